"""Benchmarks: their scripts, tables of papers, baselines, and what theory predicts of them."""

import ast
import json
import math
import os
import re
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import linprog
from torch import Tensor

from benchmarks import smoke as runner
from benchmarks.attacks import setups
from benchmarks.papers import __main__ as door
from benchmarks.papers import baselines, lemma, reference
from benchmarks.papers import flatchat as papers_flatchat
from benchmarks.papers.cells import Cell, Log, run
from benchmarks.papers.synthetic import box_probability, projection_probability, simulate_bound
from benchmarks.papers.tables import Mean, Results, mean_of, number, published, student
from lightning_fedleak.attacks import DescentSettings
from lightning_fedleak.attacks.membership.base import sentence_rows
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.texts.base import Sent, WorkLimit
from lightning_fedleak.attacks.texts.embedding_descent import _Descent
from lightning_fedleak.attacks.words.flatchat import flatchat, positive_weight
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import UnusableObservation
from tests.attacks.membership.test_membership import by_autograd, generator
from tests.attacks.texts.test_embedding_descent import MODELS
from tests.docs.blocks import blocks_of
from tests.helpers.folders import noisy_release
from tests.helpers.inputs import padded_text
from tests.helpers.measures import squared
from tests.helpers.models import VOCAB, tiny_gpt2

# ``make smoke`` runs every script of benchmarks/ and tells what failed; here the runner itself.


FOLDER = Path(runner.__file__).parent


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, for the scripts in a test's own folder, which need no model."""
    monkeypatch.setattr(runner, "make_assets", lambda folder: {"model": "M"})
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")  # which the runner sets: put back after it
    return runner


def test_every_script_says_how_it_is_run_and_is_listed(smoke: ModuleType) -> None:
    listed = (FOLDER / "README.md").read_text()
    scripts = smoke.scripts([])
    assert len(scripts) >= 18
    for path in scripts:
        assert smoke.runs_of(path)
        if FOLDER in path.parents:
            assert f"| `{path.relative_to(FOLDER)}` |" in listed
    assert {*smoke.EXAMPLES} == {path.name for path in scripts if FOLDER not in path.parents}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda p: p.stem)
def test_scripts_import_by_package_and_nothing_of_tests(path: Path) -> None:
    siblings = {other.stem for other in FOLDER.rglob("*.py")} - {"__init__", "__main__"}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not {name.partition(".")[0] for name in names} & {"tests", *siblings}, names


def main(smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(smoke, "HERE", folder)
    monkeypatch.setattr(sys, "argv", ["smoke.py"])
    status: int = smoke.main()
    return status


def script(path: Path, smoke: str, body: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\n{smoke}\nif __name__ == '__main__':\n    {body}\n")


def test_what_fails_hangs_or_is_silent_is_told(smoke, tmp_path, monkeypatch, capsys) -> None:
    script(tmp_path / "good.py", 'SMOKE = ("--model {model}", "b")', "print(sys.argv[1:])")
    (tmp_path / "module.py").write_text("1 / 0\n")
    assert main(smoke, monkeypatch, tmp_path) == 0
    assert "2 runs, 0 failed" in capsys.readouterr().out
    script(tmp_path / "papers" / "bad.py", 'SMOKE = ("", "")', "print('so far'); 1 / 0")
    script(tmp_path / "silent.py", 'SMOKE = ("",)', "pass")
    assert main(smoke, monkeypatch, tmp_path) == 1
    message = capsys.readouterr().out
    assert "5 runs, 3 failed" in message
    assert "so far" in message
    assert "ZeroDivisionError" in message
    assert "printed nothing" in message


def test_a_run_that_does_not_end_is_killed_and_told(smoke, tmp_path, monkeypatch, capsys) -> None:
    present = tmp_path / "there"
    stays = f"print('begun', flush=True); open({str(present)!r}, 'x'); time.sleep(1000)"
    script(tmp_path / "slow.py", 'import time; SMOKE = ("",)', stays)
    pids = []

    def time_is_over(process: BaseProcess, seconds: float) -> bool:
        assert seconds == smoke.LIMIT_S
        while not present.exists():
            assert process.is_alive()
            time.sleep(0.05)
        pids.append(process.pid)
        return False

    monkeypatch.setattr(smoke, "ended", time_is_over)
    assert main(smoke, monkeypatch, tmp_path) == 1
    assert "begun\nnot done after 600 s" in capsys.readouterr().out
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_script_that_does_not_say_how_it_is_run_fails(smoke, tmp_path, monkeypatch) -> None:
    script(tmp_path / "papers" / "new.py", "", "print(1)")
    with pytest.raises(SystemExit, match=r"new\.py: give SMOKE"):
        main(smoke, monkeypatch, tmp_path)


def test_setups_refuses_a_round_under_a_defense(tmp_path, monkeypatch, capsys) -> None:
    options = "--model DIR --columns gradient SGD:2 --defenses noise:.01 --out"
    monkeypatch.setattr(sys, "argv", ["setups", *options.split(), str(tmp_path / "cells.jsonl")])
    with pytest.raises(SystemExit):
        setups.main()
    assert "--columns SGD:2: a round is measured without a defence" in capsys.readouterr().err
    assert not (tmp_path / "cells.jsonl").exists()


# ``python -m benchmarks.papers``: cells, their log, the layout, and the page that is written.


ROOT = Path(__file__).parents[1]


MEASURES = {"square": squared}


def cells(*values: int, together: str = "") -> list[Cell]:
    return [Cell("square", {"value": value}, float(value), together) for value in values]


@pytest.mark.parametrize("jobs", [0, 2])
def test_a_failed_cell_is_named_costs_no_other_and_is_tried_again(tmp_path, jobs) -> None:
    path, said = tmp_path / "log.jsonl", []
    required = cells(1, 3, 2, 2, 5)
    failures = run(required, MEASURES, {}, Log.read(path), jobs=jobs, told=said.append)
    ((failed, why),) = failures
    assert failed.settings == {"value": 3}
    assert why.startswith("ArithmeticError at measures.py:")
    log = Log.read(path)
    assert [log.rows(c) for c in cells(1, 2, 5)] == [
        [{"value": v, "square": v * v, "none": None}] for v in (1, 2, 5)
    ]
    assert log.rows(required[1]) is None
    assert log.failure(required[1]) == why
    assert len(said) == 4
    again = []
    run(required, MEASURES, {}, Log.read(path), jobs=0, told=again.append)
    assert len(again) == 1
    assert "value 3" in again[0]


def test_a_line_that_was_cut_off_is_left_out_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run(cells(1, 2), MEASURES, {}, Log.read(path), jobs=0, told=lambda line: None)
    path.write_text(path.read_text()[:-20])
    log = Log.read(path)
    assert log.unreadable == 1
    assert log.rows(cells(1)[0])
    assert log.rows(cells(2)[0]) is None
    run(cells(1, 2), MEASURES, {}, log, jobs=0, told=lambda line: None)
    log = Log.read(path)
    assert log.unreadable == 1
    assert log.rows(cells(2)[0])


def test_a_mean_joins_what_is_independent_and_averages_what_shares_its_games() -> None:
    a, b = Mean(0.5, 0.4, 0.7), Mean(0.7, 0.6, 0.9)
    both = mean_of([[a, b]])
    assert (both.value, both.low, both.high) == pytest.approx((0.6, 0.5, 0.8))
    apart = mean_of([[a], [b]])
    assert apart.low == pytest.approx(0.6 - math.hypot(0.05, 0.05))
    assert apart.high == pytest.approx(0.6 + math.hypot(0.1, 0.1))
    unknown = Mean(math.nan, math.nan, math.nan)
    assert mean_of([[a], [unknown]]) == mean_of([[a]]) == a
    assert str(mean_of([[unknown]])) == "not run"


def test_numbers_and_students_interval() -> None:
    assert [number(v) for v in (0.5, 1.0, -0.25, 10.04)] == ["0.500", "1.000", "-0.250", "10.040"]
    assert student([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.302652729911275 / math.sqrt(3))


def test_published_numbers_are_complete() -> None:
    for paper in door.PAPERS:
        assert {t.name for t in paper.tables} <= set(published()[paper.name])
        for table in published()[paper.name].values():
            if not isinstance(table, dict) or "rows" not in table:
                continue
            shapes = {np.shape(row) for row in table["rows"].values()}
            columns = table.get("columns")
            metrics = len(table["metrics"])
            assert shapes == {(len(columns), metrics) if columns else (metrics,)}
    table = published()["membership"]
    for eps in ("5", "7.5", "10"):  # Table 3 is the mean of Tables 7 to 10, but for its rounding
        for attack in ("FC-Full", "FC-Token", "Attn"):
            four = [np.array(table[f"table{n}"]["rows"][f"{eps} {attack}"]) for n in range(7, 11)]
            mean = np.array(table["table3"]["rows"][f"{eps} {attack}"])
            assert np.median(np.abs(np.mean(four, 0) - mean)) < 0.02


def test_every_table_can_be_shown_before_anything_was_measured() -> None:
    for paper in door.PAPERS:
        for name, size in paper.sizes.items():
            for table in paper.tables:
                created = table.cells(size, ["some-model"])
                assert created or name == "smoke"
                assert table.show(Results([]), size).finding == "Not run."
                assert all(cell.kind in paper.measures for cell in created)
                json.dumps([cell.settings for cell in created], allow_nan=False)


def test_one_table_runs_is_printed_and_goes_on(capsys, tmp_path) -> None:
    words = ["membership", "fig5", "--log", str(tmp_path / "log.jsonl"), "--jobs", "0"]
    words += ["--set", "dims=1000,50000", "--set", "runs=5", "--json", str(tmp_path / "rows.json")]
    words += ["--docs", str(tmp_path / "page.md")]
    assert door.main(words) == 0
    first = capsys.readouterr()
    assert "| gaussian | 15 |" in first.out
    assert "[18/18]" in first.err
    rows: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows["membership"]["fig5"]) == 18
    page = (tmp_path / "page.md").read_text()
    assert "| gaussian | 15 |" in page
    assert "12 of 12 cells not run" not in page.partition("### membership fig5")[2].split("### ")[0]
    assert door.main(words) == 0
    second = capsys.readouterr()
    assert second.err == ""
    assert second.out == first.out


def test_the_page_is_what_the_log_in_the_repository_gives(tmp_path: Path) -> None:
    log = ROOT / "benchmarks" / "papers" / "measured.jsonl"
    assert door.main(["--docs", str(tmp_path / "page.md"), "--log", str(log)]) == 0
    written = (tmp_path / "page.md").read_text("utf-8")
    assert written == (ROOT / "benchmarks" / "papers" / "README.md").read_text("utf-8"), (
        "write it anew: python -m benchmarks.papers --log benchmarks/papers/measured.jsonl "
        "--docs benchmarks/papers/README.md"
    )


def two_clusters() -> torch.Tensor:
    """A gradient whose first 40 of 900 rows are wide."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(900, 24, generator=generator) * 1e-5
    rows[:40] = torch.randn(40, 24, generator=generator) * 1e-2 - 2e-2
    return rows


@pytest.mark.parametrize("scorer", ["gmm", "abs"])
def test_the_reference_of_flatchat_names_the_types_of_ours(scorer: str) -> None:
    flattened = reference.Flattened.fit(two_clusters())
    ours = flatchat(two_clusters(), 40, scorer)
    named = flattened.guess(40, scorer)
    assert set(named.types.tolist()) == set(ours.types.tolist())
    assert flattened.weight == pytest.approx(positive_weight(two_clusters()), rel=0.05)
    x, y = [0.01, 0.02, 0.06, 0.1], [12.0, 30.0, 70.0, 99.0]
    slope, constant = np.polyfit(x, y, 1)
    guess = flattened.guess(reference.fit_count(x, y), scorer)
    assert guess.n_types == pytest.approx(constant + slope * flattened.weight)
    assert len(guess.types) == round(guess.n_types)


@pytest.mark.parametrize("mechanism", ["grr", "rappor", "the", "dbitflip"])
def test_the_clients_replace_the_words_of_a_batch_by_the_law_of_ours(mechanism: Any) -> None:
    """At epsilon 3 among 6 words: the share of kept words within five standard errors."""
    ids = torch.arange(6).repeat(8, 60)

    def replaced(defense: TokenLDP, entropy: bytes) -> torch.Tensor:
        context = DefenseContext(tiny_gpt2(), 0, 1, torch.device("cpu"), "32-true", 0, entropy)
        defense.before_setup(context)
        return defense.on_batch({"input_ids": ids}, context)["input_ids"]

    kept = []
    for kind in (TokenLDP, reference.ReferenceLDP):
        with pytest.warns(UserWarning, match="no guarantee"):
            defense = kind.as_published(mechanism, 3.0, form=BatchForm(kind="causal"))
        kept.append((replaced(defense, b"a" * 32) == ids).double().mean())
    ours, clients = kept
    assert 0.2 < float(ours) < 0.95
    assert float(clients) == pytest.approx(float(ours), abs=5 * (0.25 * 2 / ids.numel()) ** 0.5)
    state = np.random.get_state()[1]
    with pytest.warns(UserWarning, match="no guarantee"):
        once, again, other = (
            replaced(reference.ReferenceLDP.as_published(mechanism, 3.0), e * 32)
            for e in (b"a", b"a", b"b")
        )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert np.array_equal(state, np.random.get_state()[1])


def test_clipped_sums_are_those_of_single_gradients() -> None:
    model = tiny_gpt2().eval()
    parameters = list(model.parameters())
    ids = [torch.tensor([[1, 5, 2, 7]]), torch.tensor([[3, 3, 4]])]
    samples = [{"input_ids": row, "labels": row} for row in ids]
    clipped, plain = papers_flatchat.sums_of_gradients(model, parameters, samples, 0.3)
    whole = [torch.zeros_like(p) for p in parameters]
    for sample in samples:
        model.zero_grad()
        model(**sample).loss.backward()
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        for total, p in zip(whole, parameters, strict=True):
            total += p.grad * min(1.0, 0.3 / float(norm))
    torch.testing.assert_close(clipped, whole, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    sum(model(**sample).loss for sample in samples).backward()
    torch.testing.assert_close(plain, [p.grad for p in parameters], rtol=1e-4, atol=1e-7)


# The papers' baselines in benchmarks/: closed forms, autograd, and programs without shortcuts.


# ---- RLG ---------------------------------------------------------------------------------------


def softmax_gradient(vocab, d, tokens, seed, spread=1.0) -> tuple[Tensor, Tensor]:
    """Head gradient (vocab, d) by autograd, and the labels (tokens,)."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, d, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocab, d, generator=draw, dtype=torch.float64) * spread / d**0.5
    labels = torch.randint(vocab // 2, (tokens,), generator=draw)
    weight.requires_grad_()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    return torch.autograd.grad(loss, weight)[0], labels


def separable_by_hand(gradient: Tensor) -> set[int]:
    """One full program for each of the V types, in the gradient's own coordinates."""
    matrix = gradient.double().numpy()
    matrix = matrix / np.abs(matrix).max(axis=1, keepdims=True)
    result = set()
    for t in range(len(matrix)):
        sign = np.where(np.arange(len(matrix)) == t, 1.0, -1.0)[:, None]
        bound = np.where(np.arange(len(matrix)) == t, -1.0, 0.0)
        solution = linprog(
            np.zeros(matrix.shape[1]), A_ub=sign * matrix, b_ub=bound, bounds=(None, None)
        )
        if solution.status == 0:
            result.add(t)
    return result


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 30), spread=st.floats(0.1, 3))
def test_rlg_names_the_types_of_a_program_for_every_row(seed, tokens, spread) -> None:
    gradient, labels = softmax_gradient(24, 10, tokens, seed, spread)
    types = set(baselines.reveal_labels(gradient).tolist())
    assert types == separable_by_hand(gradient)
    assert baselines.row_space(gradient).shape[1] == min(tokens, 10)
    if tokens <= 8:
        assert set(labels.tolist()) <= types


def test_rlg_has_no_answer_without_time() -> None:
    gradient, _ = softmax_gradient(400, 32, 28, 7)
    with pytest.raises(UnusableObservation, match="not in time"):
        baselines.reveal_labels(gradient, seconds=1e-9)


# ---- AMI FC ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return find_anatomy(tiny_gpt2())


@pytest.fixture(scope="module", params=["token", "full"])
def attack(request: pytest.FixtureRequest, anatomy: Anatomy) -> baselines.TrainedMembership:
    public = PublicText(torch.randint(3, VOCAB, (30, 10), generator=generator(1)))
    made = baselines.TrainedMembership(
        1, public, request.param, tokens=8, hidden_units=24, steps=40, public_rows=64
    )
    made.prepare(anatomy)
    return made


def texts(anatomy: Anatomy, n: int, length: int, seed: int) -> Tensor:
    ids = torch.randint(3, VOCAB, (n, length), generator=generator(seed))
    return hidden_states(anatomy, 1, ids).double()


def test_the_network_fires_on_the_target_and_stops_at_the_margin(monkeypatch) -> None:
    draw = generator(5)
    samples = 50 + torch.randn(300, 12, generator=draw) * torch.logspace(-1, 3, 12)
    target = samples[0] + torch.randn(12, generator=draw) * torch.logspace(-1, 3, 12)
    monkeypatch.setattr(baselines, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(baselines, "BATCH", 999)
    taken = {}
    for margin in (2.0, 5.0, 99.0):
        monkeypatch.setattr(baselines, "MARGIN", margin)
        network = baselines.train_network(target, samples, generator(), hidden_units=32, steps=200)
        taken[margin] = network.steps
        if margin == 2.0:
            output = baselines.outputs_of(network.parameters, torch.cat([target[None], samples]))
            assert output[0] > 1.99
            assert output[1:].max() < -1.99
            torch.testing.assert_close((output[0] + output[1:].max()) / 2, network.decision)
            torch.testing.assert_close(output[0] - network.decision, network.distance)
    assert taken[2.0] < 200
    assert taken[2.0] < taken[5.0] <= taken[99.0] == 200


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), length=st.integers(1, 9), masked=st.booleans())
def test_the_closed_form_is_what_backward_gives(attack, anatomy, seed, length, masked) -> None:
    hidden = texts(anatomy, 3, length, seed)
    mask = None
    if masked:
        mask = (torch.rand(3, length, generator=generator(seed)) < 0.7).long()
        mask[:, 0] = 1
    full = attack.granularity == "full"
    rows = sentence_rows(hidden, mask, 8) if full else hidden[:, 0]
    other = texts(anatomy, 1, 8, seed + 1)
    targets = torch.cat([rows[:1], sentence_rows(other, None, 8) if full else other[:, 3]])
    upstream = torch.randn(3, 1 if full else length, generator=generator(seed)).double()
    ours = attack.gradient(targets, hidden, mask, upstream)
    exact = by_autograd(attack, targets, hidden, mask, upstream)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-14)
    guess = attack.guess(ours.sum(0))
    assert torch.equal(guess.scores, attack.guess(exact.sum(0)).scores)
    assert guess.members[0]


# ---- the relaxation of tokens ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_relaxations_gradient_is_that_of_the_plain_model(name: str) -> None:
    model = MODELS[name]().double().eval()
    ids, mask = padded_text()
    sent = hidden_states(find_anatomy(model), 2, ids, mask)
    weights = torch.randn(*ids.shape, VOCAB, generator=torch.Generator().manual_seed(0)).double()
    leaf = weights.clone().requires_grad_()
    shares = leaf.exp() / leaf.exp().sum(-1, keepdim=True)
    words = shares @ model.get_input_embeddings().weight.detach()
    out = model(inputs_embeds=words, attention_mask=mask, output_hidden_states=True)
    difference = (out.hidden_states[2] - sent).square().sum(-1)
    (difference * mask).sum().backward()
    attack = baselines.TokenRelaxation(
        2, initial="mean", descent=DescentSettings(weighting="paper")
    )
    attack.prepare(find_anatomy(model))
    observed = Sent.from_states(sent, mask)
    gradient, _ = _Descent(attack, observed, WorkLimit())._gradient(weights, observed)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-8, atol=1e-12)


def separation_by_loops(tokens: list[np.ndarray]) -> float:
    return min(
        float(x @ x - x @ y) for i, x in enumerate(tokens) for j, y in enumerate(tokens) if i != j
    )


def draw(law: str, rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    if law == "one_hot":
        return np.eye(d)[rng.permutation(d)[:n]]
    x = rng.standard_normal((n, d))
    return x if law == "gaussian" else x / np.linalg.norm(x, axis=1, keepdims=True)


# The formulas


def test_eq_4_by_hand() -> None:
    expected = 2 / (10 * 5) + math.log(2 * 4 * 5 * 10 * 3**2) / 10
    assert lemma.condition(10, 5, 3) == pytest.approx(expected, rel=1e-14)
    assert lemma.retrieval_error(10, 5, 0.8, 3) == pytest.approx(
        2 * 3 * 4 * math.exp(2 / 5 - 8), rel=1e-14
    )
    assert lemma.retrieval_error(1, 5, -1e6, 1) == math.inf
    assert lemma.projection_radius(10, 5, 3) == pytest.approx(1 / 150)


# Simulated data


def test_gaussian_parts_against_scipy() -> None:
    for r in (0.0, 1e-9, 0.3, 2.0, 40.0):
        one = stats.norm.cdf(r) - stats.norm.cdf(-r)
        assert projection_probability("gaussian", 7, r) == pytest.approx(one, rel=1e-6)
        assert box_probability("gaussian", 7, r).value == pytest.approx(one**7, rel=1e-6)
    # Without the absolute value of the components it would be the one-sided probability.
    assert box_probability("gaussian", 7, 0.3).value < stats.norm.cdf(0.3) ** 7


@pytest.mark.parametrize("half_width", [0.72, 0.8, 0.95])
def test_spherical_box_against_geometry(half_width: float) -> None:
    c = half_width
    arc = (math.asin(c) - math.acos(c)) / (math.pi / 2)
    caps = 1 - 3 * (1 - c)  # Archimedes: six caps that do not meet
    for d, exact in ((2, arc), (3, caps)):
        rate = box_probability("spherical", d, c, draws=100_000, seed=3)
        assert abs(rate.value - exact) < 4 * math.sqrt(exact * (1 - exact) / 100_000)
        assert rate.low < rate.value < rate.high < rate.low + 0.01


@pytest.mark.parametrize(("law", "beta"), [("spherical", 6.0), ("gaussian", 1.0)])
def test_simulated_bound_against_brute_force(law: str, beta: float) -> None:
    """Every part from drawn vectors alone, at a d where P_box is neither 0 nor 1."""
    d, l_x = 12, 4
    found = simulate_bound(law, d, l_x, beta, runs=400, seed=0)
    rng = np.random.default_rng(9)
    pool = draw(law, rng, 4000, d)
    component = np.abs((pool[:2000] * pool[2000:]).sum(1)) / np.linalg.norm(pool[2000:], axis=1)
    largest = np.abs(pool).max(1)
    bounds, boxes = [], []
    for _ in range(400):
        x = draw(law, rng, l_x, d)
        delta, norm = separation_by_loops(list(x)), np.linalg.norm(x, axis=1).max()
        delta_bar = 2 * norm * (l_x - 1) * math.exp(2 / l_x - beta * delta)
        p = (component <= 1 / (beta * l_x * norm)).mean()
        boxes.append((largest <= 3 * delta_bar).mean())
        bounds.append(p + p ** (2 * l_x) - boxes[-1] - 1)
    assert 0.05 < np.mean(boxes) < 0.95
    for ours, values in ((found.bound, bounds), (found.p_box, boxes)):
        error = math.hypot(ours.standard_error, float(np.std(values)) / 20)
        assert abs(ours.value - np.mean(values)) < 4 * error + 0.01
        assert ours.low < ours.value < ours.high


def test_one_hot_is_1_as_the_paper_says_but_its_second_head_is_not() -> None:
    found = simulate_bound("one_hot", 1000, 10, 10.0)
    assert (found.bound.value, found.bound.low, found.bound.high) == (1.0, 1.0, 1.0)
    assert found.condition_holds.value == 1.0
    q = stats.beta.cdf(0.01**2, 0.5, 999 / 2)
    assert found.random_direction.value == pytest.approx(q + q**10 - 1)
    assert found.random_direction.value < 0
    assert simulate_bound("one_hot", 10**7, 10, 10.0).random_direction.value > 0.999


# ``action.yml``: its form, and its scripts as GitHub's runner would call them.
#
# The action itself was not run on GitHub.


ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def test_the_action_has_the_form_of_a_composite_action() -> None:
    """What the pages of GitHub on the metadata of actions say of composite ones."""
    parts = "name", "description", "author", "branding", "inputs", "outputs", "runs"
    assert tuple(ACTION) == parts
    assert 0 < len(ACTION["description"]) <= 125  # of the marketplace
    assert ACTION["branding"].keys() == {"icon", "color"}
    assert ACTION["runs"].keys() == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    known = {"inputs": {"description", "required", "default"}, "outputs": {"description", "value"}}
    for kind, keys in known.items():
        for name, entry in ACTION[kind].items():
            assert re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", name)
            assert entry["description"]
            assert entry.keys() <= keys
            assert isinstance(entry.get("required", False), bool)
            assert isinstance(entry.get("default", ""), str)
    assert all(entry["value"] for entry in ACTION["outputs"].values())
    for step in ACTION["runs"]["steps"]:
        [own] = [keys for keys in ({"run", "shell"}, {"uses", "with"}) if step.keys() & keys]
        assert step.keys() <= own | {"name", "id", "if", "env"}
        if "run" in own:
            assert step["run"]
            assert step["shell"] == "bash"
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        variables = (step.get("env", {}) | step.get("with", {})).values()
        assert all(isinstance(value, str) for value in variables)


def test_what_expressions_name_is_there_and_none_is_in_a_script() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == ACTION["inputs"].keys()
    scripts = {step["id"]: step["run"] for step in STEPS.values() if "id" in step}
    for step, name in re.findall(r"steps\.(\w+)\.outputs\.([\w-]+)", text):
        assert f"{name}=" in scripts[step]
    for step in ACTION["runs"]["steps"]:
        script = step.get("run", "")
        assert "${{" not in script, "an input could end the script and begin another"
        assert all(f"${name}" in script or f"${{{name}" in script for name in step.get("env", {}))


def environment(folder: Path, inputs: dict[str, str]) -> dict[str, str]:
    """Return what the step that measures has in its environment on a runner."""
    names = re.findall(r"(\w+): \$\{\{ inputs\.([\w-]+) \}\}", (ROOT / "action.yml").read_text())
    defaults = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
    values = {variable: (defaults | inputs)[name] for variable, name in names}
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        (folder / name).touch()
        values[name] = str(folder / name)
    return {
        "PATH": f"{folder / 'path'}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(folder),
        "GITHUB_ACTION_PATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        **values,
    }


def run_step(name, variables, folder) -> subprocess.CompletedProcess[str]:
    """Run a script as a runner does."""
    (folder / "script.sh").write_text(STEPS[name]["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "script.sh")]
    return subprocess.run(
        command, env=variables, cwd=folder, capture_output=True, text=True, check=False
    )


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


RECORDER = f"""#!{sys.executable}
import json, os, pathlib, sys
pathlib.Path(os.environ["RUNNER_TEMP"], "words.json").write_text(json.dumps(sys.argv[1:]))
sys.exit(STATUS)
"""
GIVEN = {"model": "m", "base": "b", "members": "x.txt", "held-out": "y.txt"}


def measured(folder: Path, status: int = 0, **inputs: str) -> tuple[int, list[str]]:
    """Return the status of the step that measures, and the words that ``fedleak`` got."""
    program(folder / "fedleak/bin/fedleak", RECORDER.replace("STATUS", str(status)))
    given = GIVEN | {name.replace("_", "-"): value for name, value in inputs.items()}
    result = run_step("Measure", environment(folder, given), folder)
    words = folder / "words.json"
    return result.returncode, json.loads(words.read_text()) if words.exists() else []


def test_options_are_those_of_the_command(tmp_path: Path) -> None:
    from lightning_fedleak.cli.commands.options import parse

    given = {"thresholds": "auc=0.6\n  extracted=0.05\n", "drawn": "true", "prompt_column": "p"}
    status, words = measured(tmp_path, **given)
    options = parse(words)
    assert status == 0
    assert options.at_most == [("auc", 0.6), ("extracted", 0.05)]
    assert (options.drawn, options.prompt_column, options.others) == (True, "p", "y.txt")
    assert options.records is None
    given |= {"reference": "a b\nc", "reference_rows": "rows.jsonl\n5"}
    options = parse(measured(tmp_path, **given)[1])
    assert (options.reference, options.reference_rows) == (["a b", "c"], ["rows.jsonl", "5"])
    assert str(options.summary) == str(tmp_path / "GITHUB_STEP_SUMMARY")


@pytest.mark.parametrize(
    "text", ["$(touch hacked)`touch hacked`", '"; touch hacked; "', "'; touch hacked # --x=y"]
)
@pytest.mark.parametrize("name", ["model", "held_out"])
def test_an_input_is_one_value_whatever_stands_in_it(tmp_path: Path, name: str, text: str) -> None:
    _, words = measured(tmp_path, **{name: text})
    option = {"held_out": "others"}.get(name, name)
    assert f"--{option}={text}" in words
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize("inputs", [{"thresholds": " \n"}, {"drawn": "yes; touch hacked"}], ids=str)
def test_wrong_inputs_are_errors(tmp_path: Path, inputs: dict[str, str]) -> None:
    assert measured(tmp_path, **inputs) == (1, [])
    assert not (tmp_path / "hacked").exists()


def test_thresholds_cannot_become_options_or_files(tmp_path: Path) -> None:
    _, words = measured(tmp_path, thresholds="* --records=z $(touch hacked)")
    limits = ("*", "--records=z", "$(touch", "hacked)")
    assert words[-4:] == [f"--at-most={limit}" for limit in limits]
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("status", [0, 2, 3])
def test_the_exit_status_stays(tmp_path: Path, status: int) -> None:
    assert measured(tmp_path, status)[0] == status
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"exit-code={status}\n"
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert ("not measured, error 2" in summary) == (status == 2)


def test_what_is_installed_is_one_requirement(tmp_path: Path) -> None:
    recorder = RECORDER.replace("STATUS", "0")
    for name in ("path/python3", "fedleak/bin/python"):
        program(tmp_path / name, recorder)
    for package, expected in (("", f"{ROOT}[peft]"), ("x; touch hacked", "x; touch hacked")):
        variables = environment(tmp_path, GIVEN | {"package": package})
        assert run_step("Install", variables, tmp_path).returncode == 0
        words = json.loads((tmp_path / "words.json").read_text())
        assert words == ["-m", "pip", "install", "--quiet", "--", expected]
    assert not (tmp_path / "hacked").exists()


@pytest.mark.slow
def test_a_release_is_judged_and_summed_up(tmp_path: Path) -> None:
    """With the real command, on a model that was changed by noise alone."""
    script = f'#!/bin/sh\nexec {sys.executable} -m lightning_fedleak "$@"\n'
    program(tmp_path / "fedleak/bin/fedleak", script)
    paths = noisy_release(tmp_path)
    given = paths | {"drawn": "true", "length": "24", "thresholds": "auc=1 shown=0.1"}
    result = run_step("Measure", environment(tmp_path, given), tmp_path)
    assert result.returncode == 3, result.stderr
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("### What the trained weights give away: FAILED")
    assert "| combined |" in summary
    assert "- combined/shown is unknown" in summary
    assert "- auc at most 1\n- shown at most 0.1\n" in summary
    outputs = dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().split())
    assert outputs["exit-code"] == "3"
    report = json.loads(Path(outputs["report"]).read_text())
    assert report["kind"] == "memorization"
    members = Path(paths["members"]).read_text().split()
    assert not [word for word in members if word in json.dumps(report) + summary + result.stdout]


def test_the_page_shows_a_workflow_that_fits() -> None:
    [block] = [one for one in blocks_of(ROOT / "docs" / "gate.md") if "jobs:" in one.text]
    [job] = yaml.safe_load(block.text)["jobs"].values()
    given = job["steps"][-1]["with"]
    needed = {name for name, one in ACTION["inputs"].items() if one.get("required")}
    assert needed <= given.keys() <= ACTION["inputs"].keys()
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    table = text.partition("### Inputs of the action")[2].partition("\nOutputs:")[0]
    assert ACTION["inputs"].keys() <= set(re.findall(r"`([\w-]+)`", table))

"""Whatever one example holds, what goes outside moves by no more than a guarantee accounts for."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedleak.defenses import (
    DPSGD,
    CanaryGradient,
    ClipSettings,
    Defense,
    DefenseError,
    GradientNoise,
    TokenLDP,
)
from lightning_fedleak.defenses.activations import ActivationNoise
from lightning_fedleak.defenses.dpsgd import loss_graph
from lightning_fedleak.defenses.dpsgd.clipped_sum import ClippedSum
from lightning_fedleak.federation import ClientDP, ClientReleaseSettings
from lightning_fedleak.strategies import DefendedStrategy
from tests.defenses.dpsgd.test_dpsgd import Run
from tests.defenses.dpsgd.test_experts import ExpertBlock
from tests.helpers.inputs import context
from tests.helpers.models import VOCAB, own_rng, tiny_bert_mlm, tiny_gpt2, tiny_t5
from tests.helpers.settings import QUIET

CLIP, ROW = 0.5, 2
NAN, INF = float("nan"), float("inf")
WIDTH = 6


def numbers(*values: float) -> Callable[[Tensor], Tensor]:
    """Contents of a row: the values, over and over."""
    return lambda row: torch.tensor(
        [*itertools.islice(itertools.cycle(values), row.numel())], dtype=row.dtype
    ).view(row.shape)


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    """The row as it was, but for its first number."""
    return lambda row: torch.cat([row.new_tensor([value]), row.flatten()[1:]]).view(row.shape)


CONTENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": numbers(NAN),
    "inf": numbers(INF),
    "one inf": first_is(INF),
    "inf and -inf": numbers(INF, -INF),
    "1e38": numbers(1e38),
    "the largest": numbers(3.4e38, -3.4e38),
    "a norm that just fits": numbers(5e18),
    "a norm that overflows": numbers(1e19, -1e19),
    "one 1e-45": numbers(1e-45, 0.0, 0.0),
    "zeros": numbers(0.0),
    "far from the others": lambda row: -1e3 * row,
}

IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first past the vocabulary": lambda row: row * 0 + VOCAB,
    "negative": lambda row: row * 0 - 1,
    "that of no label": lambda row: row * 0 - 100,
    "the largest integers": lambda row: row * 0 + torch.iinfo(torch.int64).max,
    "the smallest integers": lambda row: row * 0 + torch.iinfo(torch.int64).min,
    "padding": lambda row: row * 0,
}


def spoilt(rows: Tensor, content: Callable[[Tensor], Tensor]) -> Tensor:
    rows = rows.clone()
    rows[ROW] = content(rows[ROW])
    return rows


@contextmanager
def outside(folder: Path, caplog: Any, capfd: Any, monkeypatch: Any) -> Iterator[dict[str, Any]]:
    """What anyone may see beside numbers: warnings, log records, output and files."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    seen: dict[str, Any] = {}
    caplog.clear()
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        yield seen
    seen["warnings"] = [f"{w.category.__name__} {w.message}" for w in caught]
    seen["log"] = [record.getMessage() for record in caplog.records]
    seen["output"] = [*capfd.readouterr()]
    seen["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def looking(tmp_path: Path, caplog: Any, capfd: Any, monkeypatch: Any) -> Any:
    """Runs a function on sound and on hostile contents, and compares all but the numbers."""

    def both(run: Callable[[Any], Any], sound: Any, hostile: Any) -> tuple[Any, Any]:
        found, looks = [], []
        run(sound)  # what libraries say once
        for name, data in (("sound", sound), ("hostile", hostile)):
            with outside(tmp_path / name, caplog, capfd, monkeypatch) as seen:
                found.append(run(data))
            looks.append(seen)
        assert looks[0] == looks[1]
        return found[0], found[1]

    return both


def within(bound: float, sound: Tensor, hostile: Tensor) -> None:
    """Both are finite, and no further apart than the bound, over the last dimension."""
    assert bool(sound.isfinite().all())
    assert bool(hostile.isfinite().all())
    apart = (sound.double() - hostile.double()).norm(dim=-1)
    assert float(apart.max()) <= bound * (1 + 1e-5)


def alike(sound: dict[str, Any], hostile: dict[str, Any]) -> None:
    assert str(sound) == str(hostile)  # tensors among them


# ---- every mechanism by itself -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("content", CONTENTS)
def test_states_of_a_position(content: str, dtype: torch.dtype, looking: Any) -> None:
    states = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    hostile = states.clone()
    hostile[ROW, 1] = CONTENTS[content](hostile[ROW, 1])

    def sent(given: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        defense = ActivationNoise(1, sigma=2.0, clip=CLIP)
        defense.before_setup(context(tiny_gpt2()))
        given = given.clone().requires_grad_()
        out = defense.rewrite(given, recomputed=False, training=True)
        (out.float() * 1e3).sum().backward()
        assert given.grad is not None
        defense.teardown()
        return out.detach(), given.grad, defense.state_dict()

    (first, _, state), (second, gradient, spoilt_state) = looking(sent, states, hostile)
    alike(state, spoilt_state)
    coarse = 0.05 if dtype == torch.bfloat16 else 0.0
    within(2 * CLIP + coarse, first, second)
    others = torch.ones(4, 3, dtype=torch.bool)
    others[ROW, 1] = False
    assert torch.equal(first[others], second[others])
    assert bool(gradient.isfinite().all())
    row = hostile[ROW, 1].double()
    if not bool(row.isfinite().all()):
        assert not bool(gradient[ROW, 1].any())


def update_with(row: Tensor) -> list[nn.Parameter]:
    shapes = [(2, 2), (2,)]
    parts = zip(shapes, row.split([4, 2]), strict=True)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape, _ in parts]
    for parameter, part in zip(parameters, row.split([4, 2]), strict=True):
        parameter.grad = part.clone().view(parameter.shape)
    return parameters


@pytest.mark.parametrize("content", CONTENTS)
def test_a_client_s_whole_update(content: str, looking: Any) -> None:
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))

    def sent(given: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        defense, parameters = GradientNoise(CLIP, 1.5), update_with(given)
        local = CanaryGradient(given.repeat(3, 2, 1))
        canary = defense.on_canary(local, parameters, context()).released
        defense.on_gradients(parameters, context())
        update = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
        return update, canary, defense.state_dict()

    first, second = looking(sent, row, CONTENTS[content](row))
    within(2 * CLIP, first[0], second[0])
    within(2 * CLIP, first[1], second[1])
    alike(first[2], second[2])


def check_example_of_a_batch(looking, content, shape, clip=None, **model: Any) -> None:
    """Against the batch without it; steps, account and what is compared with autograd stay."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    others = torch.arange(5) != ROW

    def sent(given: Tensor) -> tuple[Tensor, dict[str, Any]]:
        run = Run(DPSGD(CLIP, noise_multiplier=1.0, seed=3, clip=clip), **model)
        run.loss = lambda b: run.root(b[0]).square().flatten(1).mean(1).mean()  # type: ignore[method-assign]
        updates = [run.step([given, torch.zeros(len(given))], lr=0.0) for _ in range(3)]
        return torch.stack(updates), run.defense.state_dict()

    first, second = looking(sent, rows[others], spoilt(rows, CONTENTS[content]))
    within(CLIP / 8, first[0], second[0])
    alike(first[1], second[1])


@pytest.mark.parametrize("form", ["auto", "per_sample", "ghost"])
@pytest.mark.parametrize("content", CONTENTS)
def test_an_example_of_a_batch(content: str, form: Any, looking: Any) -> None:
    check_example_of_a_batch(looking, content, (5, WIDTH), ClipSettings(form=form))


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
@pytest.mark.parametrize("content", ["NaN", "inf", "1e38", "a norm that overflows", "zeros"])
def test_an_example_that_meets_experts(content: str, kind: str, looking: Any) -> None:
    """Its numbers choose experts, and may be NaN where they do."""
    check_example_of_a_batch(looking, content, (5, 3, WIDTH), root=ExpertBlock(kind))


EVERY = {*range(24)}


@pytest.mark.parametrize(
    ("content", "steps"),
    [("NaN", {0}), ("NaN", {1}), ("NaN", {5}), ("NaN", EVERY), ("one inf", EVERY), ("1e38", EVERY)],
    ids=str,
)
def test_what_is_checked_now_and_then_is_checked_in_the_same_steps(
    content: str, steps: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check more would show in the time of a step."""
    monkeypatch.setattr(loss_graph, "CHECK_EVERY", 10)
    looks: dict[str, list[int]] = {"graph": [], "sum": []}
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    run.loss = lambda b: run.root(b[0]).square().mean(1).mean()  # type: ignore[method-assign]

    def counted(name: str, check: Any) -> Any:
        def wrapper(*args: Any, **settings: Any) -> Any:
            looks[name].append(run.defense.releases)
            return check(*args, **settings)

        return wrapper

    graph, total = loss_graph.check_isolation, ClippedSum.check_complete
    monkeypatch.setattr(loss_graph, "check_isolation", counted("graph", graph))
    monkeypatch.setattr(ClippedSum, "check_complete", counted("sum", total))
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(24):
        run.step([spoilt(rows, CONTENTS[content]) if step in steps else rows], lr=1e-4)
    assert looks == {"graph": [0, 1, 3, 7, 15], "sum": [0, 1, 3, 7, 10, 15, 20]}


@pytest.mark.parametrize("trust", ["central", "local"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_client_of_a_round(content: str, trust: Any, looking: Any) -> None:
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))

    def sent(given: Tensor) -> tuple[Tensor, Any]:
        release = ClientReleaseSettings(seed=3)
        defense = ClientDP(CLIP, 1e-9, clients=5, target_delta=1e-5, trust=trust, release=release)
        like = {"a": torch.zeros(WIDTH)}
        if trust == "central":
            updates = {client: {"a": row} for client, row in enumerate(given)}
            out = defense.mean(updates, like).update["a"]
        else:
            with warnings.catch_warnings():  # this one stays on the client's own machine
                warnings.filterwarnings("ignore", "ClientDP: .* Zero leaves in its place")
                out = defense.privatized({"a": given[ROW]}, like)["a"]
        return out, defense.privacy

    first, second = looking(sent, rows, spoilt(rows, CONTENTS[content]))
    within(2 * CLIP / (5 if trust == "central" else 1), first[0], second[0])
    assert first[1].releases == second[1].releases


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("memoize", [True, False])
@pytest.mark.parametrize("kind", ["causal", "masked", "seq2seq"])
@pytest.mark.parametrize("content", IDS)
def test_the_words_of_a_text(
    content: str, kind: str, memoize: bool, per: Any, looking: Any
) -> None:
    """The other texts are replaced as before, and the text by words of the model."""
    # Where the loss looks away is public.
    if kind == "seq2seq" and content == "that of no label":
        pytest.skip("-100 in the text of a decoder is no word")
    model = {"causal": tiny_gpt2, "masked": tiny_bert_mlm, "seq2seq": tiny_t5}[kind]()
    ids = torch.randint(5, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))

    def sent(given: Tensor) -> tuple[Any, dict[str, Any]]:
        defense = TokenLDP("grr", 3.0, per, memoize=memoize, special_ids=[], keep_special=True)
        where = context(model)
        defense.before_setup(where)
        new = defense.on_batch({"input_ids": given, "labels": given.clone()}, where)
        return new, defense.state_dict()

    (first, state), (second, spoilt_state) = looking(sent, ids, spoilt(ids, IDS[content]))
    alike(state, spoilt_state)
    others = torch.arange(4) != ROW
    for name in ("input_ids", "labels"):
        assert first[name].shape == second[name].shape
        assert torch.equal(first[name][others], second[name][others])
        words = second[name][second[name] != -100]
        assert int(words.min()) >= 0
        assert int(words.max()) < VOCAB


@pytest.mark.parametrize("place", [0, 3])
def test_a_label_that_is_not_its_input_is_not_read(place: int) -> None:
    ids = torch.randint(5, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    labels, where = ids.clone(), context(tiny_gpt2())
    labels[ROW, place] = VOCAB + 7
    found = []
    for given in (ids, labels):
        defense = TokenLDP("grr", 3.0, special_ids=[])
        defense.before_setup(where)
        found.append(defense.on_batch({"input_ids": ids, "labels": given}, where))
    assert torch.equal(found[0]["labels"], found[1]["labels"])
    assert torch.equal(found[1]["labels"], found[1]["input_ids"])


def test_an_id_outside_of_the_vocabulary_is_randomised_as_one_inside() -> None:
    """Its replacement follows the law of the word that it is taken for, which keeps epsilon."""
    where, drawn = context(tiny_gpt2()), []
    for word in (VOCAB + 9, VOCAB - 1):
        defense = TokenLDP("grr", 4.0, "token", special_ids=[], memoize=False)
        defense.before_setup(where)
        drawn.append(defense.on_batch(torch.full((400, 10), word), where))
    kept = [float((d == VOCAB - 1).double().mean()) for d in drawn]
    assert kept[0] == kept[1]
    assert 0.2 < kept[0] < 0.6  # e^4 / (e^4 + VOCAB - 1)


# ---- where states are computed again -------------------------------------------------------------


@pytest.mark.parametrize("content", ["inf", "inf and -inf", "the largest"])
def test_states_that_backward_computes_again_are_recognised(content: str, looking: Any) -> None:
    """Two forwards of a step, either with its own noise also the second time."""
    rows = torch.randn(2, 3, 2, WIDTH, generator=torch.Generator().manual_seed(0))
    hostile = rows.clone()
    hostile[:, 0, 0], hostile[:, 1, 0] = CONTENTS[content](rows[0, 0, 0]), -torch.inf

    def sent(given: Tensor) -> list[Tensor]:
        defense = ActivationNoise(1, sigma=2.0, clip=CLIP)
        defense.before_setup(context(tiny_gpt2()))
        out: list[Tensor] = []

        def block(states: Tensor) -> Tensor:
            recomputed = torch._C._current_graph_task_id() != -1
            out.append(defense.rewrite(states, recomputed=recomputed, training=True).detach())
            return states.nan_to_num() * 2

        inputs = [part.clone().requires_grad_() for part in given]
        sum(checkpoint(block, part, use_reentrant=False).sum() for part in inputs).backward()
        defense.teardown()
        return out

    for found in looking(sent, rows, hostile):
        assert len(found) == 4
        for first in found[:2]:
            assert any(torch.equal(first, again) for again in found[2:])


# ---- whole runs of a Trainer ---------------------------------------------------------------------


class Readings(pl.LightningModule):
    """Learns a number from a row of others."""

    def __init__(self) -> None:
        super().__init__()
        with own_rng(0):
            self.layers = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]).squeeze(1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Words(pl.LightningModule):
    """A language model that trains on texts, with a layer of words that nothing trains."""

    def __init__(self, vector: Tensor | None = None) -> None:
        super().__init__()
        self.model = tiny_gpt2(dropout=0.0)
        words = self.model.transformer.wte.weight.requires_grad_(False)
        if vector is not None:
            words[50] = vector.repeat(words.shape[1])[: words.shape[1]]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(module: pl.LightningModule, defense: Defense, *data: Tensor) -> tuple[int, dict, bool]:
    trainer = pl.Trainer(**QUIET, max_epochs=2, strategy=DefendedStrategy("auto", [defense]))
    trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=4))
    finite = all(bool(p.isfinite().all()) for p in module.parameters() if p.requires_grad)
    return trainer.global_step, defense.state_dict(), finite


@pytest.mark.parametrize("make", [partial(GradientNoise, CLIP, 1.0), partial(DPSGD, CLIP, 1.0)])
@pytest.mark.parametrize("content", ["NaN", "1e38"])
def test_a_fit_on_numbers(content: str, make: Callable[[], Defense], looking: Any) -> None:
    rows = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))

    def run(given: Tensor) -> tuple[int, dict, bool]:
        return fitted(Readings(), make(), given, torch.zeros(12))

    first, second = looking(run, rows, spoilt(rows, CONTENTS[content]))
    assert first[0] == second[0]
    alike(first[1], second[1])
    assert first[2]
    assert second[2]


@pytest.mark.parametrize("content", ["NaN", "inf", "1e38", "zeros"])
def test_a_fit_on_texts_whose_states_leave(content: str, looking: Any) -> None:
    """One text holds the word whose vector is hostile."""
    ids = torch.randint(5, 40, (8, 6), generator=torch.Generator().manual_seed(1))
    hostile = ids.clone()
    hostile[ROW, 3] = 50
    vector, sent = CONTENTS[content](torch.zeros(WIDTH)), []

    def run(given: Tensor) -> tuple[int, dict, bool]:
        module, states = Words(vector), []
        block = module.model.transformer.h[1]
        block.register_forward_pre_hook(lambda m, args: states.append(args[0].detach().clone()))
        found = fitted(module, ActivationNoise(1, sigma=2.0, clip=CLIP), given)[:2]
        sent.append(torch.cat(states))
        return found

    first, second = looking(run, ids, hostile)
    assert first == second
    assert len(sent) == 3
    assert all(bool(states.isfinite().all()) for states in sent)


# ---- what is left to refuse ----------------------------------------------------------------------


def test_every_defence_that_states_a_guarantee_is_in_this_file() -> None:
    def kinds(kind: type) -> Iterator[type]:
        for below in kind.__subclasses__():
            if below.__module__.startswith("lightning_fedleak."):
                yield below
                yield from kinds(below)

    stated = {
        kind.__name__
        for kind in kinds(Defense)
        if not getattr(kind, "guarantee", "").startswith("none")
    }
    abstract = {"_ActivationDefense", "HardenedNoise"}
    # Frozen weights have no gradient whatever is read; another library's optimizer acts by itself.
    elsewhere = {"Freeze", "OptimizerDP"}
    tested = {"ActivationNoise", "GradientNoise", "DPSGD", "ClientDP", "TokenLDP"}
    assert stated - abstract - elsewhere == tested


def test_a_scaler_that_skips_steps_is_refused_where_a_guarantee_is_stated() -> None:
    where = context(precision="16-mixed")
    with pytest.raises(DefenseError, match="skips steps depending on the data"):
        GradientNoise(1.0, 1.0).before_setup(where)
    GradientNoise(None, 1.0).before_setup(where)


def test_a_tokenizer_of_another_model_is_refused_at_setup() -> None:
    class Tokenizer:
        all_special_ids = (0,)

        def __len__(self) -> int:
            return VOCAB + 1

    with pytest.raises(DefenseError, match=rf"more ids than the model \({VOCAB}\)"):
        TokenLDP("grr", 1.0, special_ids=Tokenizer()).before_setup(context(tiny_gpt2()))

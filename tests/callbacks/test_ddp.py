"""Two gloo processes: what each client shares, pooled results, decisions that agree."""

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithFlattening

from lightning_fedleak.attacks.membership.base import MembershipGuess
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.words.direct import BagOfWords
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate, WatchSettings
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.engine.results import UNEXPLAINED
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit, footprint, logged_losses
from tests.helpers.lightning_modules import BlocksModule, CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.processes import launched


class FailsOnOne(Probe):
    default_name = "fails_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return super().run(view, query)


class WorseOnOne(Probe):
    """Finds more on client 1."""

    default_name = "worse_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        self.k = 20 if view.gradients[-1].client == 1 else 5
        return super().run(view, query)


class GamesFailOnOne(FCMembership):
    default_name = "games_fail_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        if dist.get_rank() == 1 and view.gradients[-1].step == 2:
            raise RuntimeError("only here")
        return super().run(view, query)


class BlindOnOne(FCMembership):
    """Tells nothing apart on client 1."""

    default_name = "blind_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        if view.gradients[-1].client == 1:
            return MembershipGuess(torch.zeros_like(guess.scores), guess.members)
        return guess


class FailsThere(RuntimeError):
    pass


def unreadable_on(rank: int, *, at: int) -> Any:
    """An adapter that raises at batch ``at`` on process ``rank``."""
    count = iter(range(10**6))

    def adapter(batch: dict[str, Tensor]) -> TokenBatch:
        if next(count) == at and dist.get_rank() == rank:
            raise FailsThere
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal")

    return adapter


class GatherSpy:
    """Counts calls of collectives that gather tensors, or pickle them."""

    NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object")

    def __enter__(self) -> "GatherSpy":
        self.calls: list[str] = []
        self._kept = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._kept.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)


def games_of(monitor: LeakageMonitor) -> Tensor:
    """(n, 3) the games that this process keeps: at each look of client 0, then of client 1."""
    looks: Any = monitor.engine.state_dict().get("games of leakage/blind_on_one", [])
    return torch.cat([torch.empty(0, 3), *looks])


def run(
    root: Path,
    callbacks: list[L.Callback],
    module_class: type[CausalLMModule] = CausalLMModule,
    **settings: Any,
) -> L.Trainer:
    module = module_class(tiny_gpt2(dropout=0.0).train(), optimizer="adamw")
    settings = {"strategy": "ddp", "devices": 2, "n": 16} | settings
    return fit(callbacks, root, module=module, **settings)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def first_rows(rank: int) -> list[int]:
    """Rows of one process's first batch: Lightning shuffles with the run's seed."""
    data = random_token_loader(16).dataset
    return list(DistributedSampler(data, num_replicas=2, rank=rank, seed=7))[:4]


def documents() -> list[dict[str, Tensor]]:
    """The rows of 16 texts of several lengths."""
    rows = random_token_loader(16).dataset
    return [{n: rows[i][n][: 12 - i % 3 * 3] for n in ("input_ids", "labels")} for i in range(16)]


def pack(texts: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One row, whose positions begin again with each text."""
    return {**DataCollatorWithFlattening()(texts, return_tensors="pt"), "use_cache": False}


def own_gradient(rank: int) -> Tensor:
    """The head's gradient of one process's first batch, by plain autograd."""
    model = tiny_gpt2(dropout=0.0).train()
    data = random_token_loader(16).dataset
    batch = torch.utils.data.default_collate([data[i] for i in first_rows(rank)])
    (gradient,) = torch.autograd.grad(model(**batch).loss, model.lm_head.weight)
    return gradient


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    stages = ("local", "shared", "aggregate")

    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    plain = run(root / "not-watched", [], **settings)
    before = footprint(plain), logged_losses(plain) if plain.is_global_zero else []
    monitor = LeakageMonitor(Probe(), every_n_steps=1, settings=WatchSettings(stages=stages))
    gate = RiskGate("leakage/probe/f1", at_most=1.0)
    watched = run(root / "watched", [gate, monitor], **settings)
    after = footprint(watched), logged_losses(watched) if watched.is_global_zero else []
    out["same"] = same(before[0], after[0]) and before[1] == after[1]
    out["looks"] = (monitor.looks, watched.global_step, monitor.failures)
    rank = dist.get_rank()

    for case in ("plain", "world"):
        probe = Probe()
        client = "world" if case == "world" else None
        monitor = LeakageMonitor(
            probe, every_n_steps=100, settings=WatchSettings(client=client, stages=stages)
        )
        run(root / case, [monitor])
        mine, others = own_gradient(rank), own_gradient(1 - rank)
        mean = (mine + others) / 2
        expected = {"local": mine, "shared": mine, "aggregate": mean}
        if case == "world":
            expected = dict.fromkeys(stages, mean)
        seen = {stage: g for _, stage, g in probe.seen}
        seen.setdefault("shared", seen["local"])
        seen.setdefault("aggregate", seen["local"])
        out[f"seen/{case}"] = all(
            torch.allclose(seen[s], expected[s], rtol=1e-4, atol=1e-7) for s in stages
        )
        values = [monitor.latest[f"leakage{s}/probe/recall"] for s in ("", "_local")]
        out[f"values/{case}"] = values
        line = json.loads((Path(monitor.engine.jsonl.path)).read_text().splitlines()[0])
        out[f"line/{case}"] = (line["client"], line["n"])

    for client, precision in (("rank", "32-true"), ("world", "bf16-mixed")):
        settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}
        watch = WatchSettings(client=client)
        monitor = LeakageMonitor(BagOfWords(), every_n_steps=1, settings=watch)
        module = CausalLMModule(tiny_gpt2(dropout=0.1, tied=False).train(), optimizer="adamw")
        root_of_fit = root / f"{client} {precision}"
        fit([monitor], root_of_fit, module=module, n=16, precision=precision, **settings)
        out[f"unexplained/{client}"] = monitor.latest[UNEXPLAINED]

    before = footprint(run(root / "no-games", [], n=32))
    attacks = [GamesFailOnOne(layer=1), BlindOnOne(layer=1), Probe()]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    with GatherSpy() as spied:
        played = run(root / "games", [monitor], n=32)
    after = footprint(played)
    games = games_of(monitor)
    out["games"] = {
        "same": same(before, after),
        "looks": monitor.looks,
        "failures": monitor.failures,
        "values": {n: str(v) for n, v in monitor.latest.items() if n.startswith("leakage")},
        "games": games.tolist(),
        "gathered": spied.calls,
    }
    path = root / "games.ckpt"
    played.save_checkpoint(path)
    monitor = LeakageMonitor([GamesFailOnOne(layer=1), BlindOnOne(layer=1), Probe()], 1)
    again = run(root / "again", [monitor], n=32, max_epochs=2, ckpt_path=str(path))
    out["games again"] = {
        "steps": again.global_step, "looks": monitor.looks, "games": len(games_of(monitor)),
        "first": games_of(monitor)[: len(games)].tolist() == games.tolist(),
    }  # fmt: skip
    public = torch.randint(3, 50, (32, 8), generator=torch.Generator().manual_seed(3))
    packed = DataLoader(documents(), batch_size=4, collate_fn=pack)
    before = footprint(run(root / "no-packed", [], loader=packed))
    attacks = [Probe(), GradientMembership(public, public_rows=16)]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    after = footprint(run(root / "packed", [monitor], loader=packed))
    path = monitor.engine.jsonl.path
    lines = map(json.loads, path.read_text().splitlines() if rank == 0 else [])
    out["packed"] = {
        "same": same(before, after),
        "auc": monitor.latest["leakage/gradient_membership/auc"],
        "failures": monitor.failures,
        "n": {line["attack"]: (line["client"], line["n"]) for line in lines if line["step"] == 0},
    }
    probe = Probe()
    defended = DefendedStrategy("ddp", defenses=[GradientNoise(clip=1.0, sigma=0.0, seed=0)])
    monitor = LeakageMonitor(probe, every_n_steps=100, settings=WatchSettings(stages=stages))
    run(root / "defended", [monitor], strategy=defended)
    seen = {stage: g for _, stage, g in probe.seen}
    both = [own_gradient(r) for r in (0, 1)]
    out["defended local"] = torch.allclose(seen["local"], both[rank], rtol=1e-4, atol=1e-7)
    gathered = [torch.empty_like(seen["shared"]) for _ in range(2)]
    dist.all_gather(gathered, seen["shared"].contiguous())
    out["defended aggregate"] = torch.allclose(
        seen["aggregate"], (gathered[0] + gathered[1]) / 2, rtol=1e-5, atol=1e-8
    )

    monitor = LeakageMonitor([FailsOnOne(), WorseOnOne()], every_n_steps=2)
    trainer = run(root / "failing", [monitor])
    out["failing"] = {
        "finished": trainer.global_step,
        "failures": monitor.failures,
        "unknown": math.isnan(monitor.latest["leakage/fails_on_one/f1"]),
        "pooled": monitor.latest["leakage/worse_on_one/f1"],
        "worst": monitor.latest.get("leakage/worse_on_one/f1_worst_client"),
        "worst in metrics": "leakage/worse_on_one/f1_worst_client" in trainer.callback_metrics,
    }

    name = "leakage/worse_on_one/f1_worst_client"
    gate = RiskGate(name, at_most=monitor.latest["leakage/worse_on_one/f1"])
    worst_monitor = LeakageMonitor(WorseOnOne(), every_n_steps=1)
    trainer = run(root / "gate-worst", [gate, worst_monitor])
    saved = gate.fired is not None and Path(str(gate.fired.checkpoint)).exists()
    out["gate worst"] = (trainer.global_step, gate.fired is not None and gate.fired.value, saved)

    monitor = LeakageMonitor(Probe(), max_overhead=0.2)
    run(root / "overhead", [monitor], max_epochs=4)
    out["overhead looks"] = (monitor.looks, monitor.last_step)

    for client in ("rank", "world"):
        settings = WatchSettings(client=client, batch_adapter=unreadable_on(1, at=2))
        monitor = LeakageMonitor(Probe(), every_n_steps=1, settings=settings)
        trainer = run(root / f"unreadable-{client}", [monitor], BlocksModule)
        out[f"unreadable/{client}"] = (trainer.global_step, monitor.looks, monitor.failures)

    monitor = LeakageMonitor(Probe(), settings=WatchSettings(batch_adapter=unreadable_on(1, at=0)))
    try:
        run(root / "first", [monitor], BlocksModule)
    except (BatchError, FailsThere) as error:
        out["first"] = type(error).__name__

    (root / f"{rank}.json").write_text(json.dumps(out))


pytestmark = pytest.mark.ddp


ranks = launched("tests.callbacks.test_ddp")


def test_training_is_bit_identical(ranks):
    for rank in ranks:
        assert rank["same"]
        looks, steps, failures = rank["looks"]
        assert looks == steps > 0
        assert failures == 0


@pytest.mark.parametrize("case", ["plain", "world"])
def test_each_stage_holds_the_gradient_computed_by_hand(ranks, case):
    assert all(rank[f"seen/{case}"] for rank in ranks)
    assert ranks[0][f"values/{case}"] == ranks[1][f"values/{case}"]


def test_of_an_untouched_step_little_is_unexplained(ranks):
    for rank in ranks:
        assert rank["unexplained/rank"] <= 1e-5
        assert rank["unexplained/world"] <= 0.02


def types_of(rows):
    data = random_token_loader(16).dataset
    return {int(t) for i in rows for t in data[i]["labels"][1:]}


def test_rank_clients_are_pooled_and_a_world_client_is_one(ranks):
    first = [first_rows(r) for r in (0, 1)]
    each = sum(len(types_of(rows)) for rows in first)
    together = len(types_of(first[0] + first[1]))
    assert ranks[0]["line/plain"] == ["pooled", each]
    assert ranks[0]["line/world"] == [0, together]
    assert together < each


def test_texts_packed_in_a_row_count_as_each_clients_own(ranks):
    texts = documents()
    each = [[texts[i]["input_ids"].tolist() for i in first_rows(rank)] for rank in (0, 1)]
    labels = [len({token for text in rows for token in text[1:]}) for rows in each]
    assert ranks[0]["packed"]["n"] == {"probe": ["pooled", sum(labels)]}
    for rank in ranks:
        assert rank["packed"]["same"]
        assert rank["packed"]["failures"] == 0
        assert rank["packed"]["auc"] > 0.9


def test_with_a_defence_the_server_gets_the_mean_of_what_was_shared(ranks):
    assert all(rank["defended local"] and rank["defended aggregate"] for rank in ranks)


def test_a_failure_on_one_client_is_unknown_on_all_and_nobody_waits(ranks):
    for rank in ranks:
        assert rank["failing"]["finished"] == 2
        assert rank["failing"]["failures"] == 1
        assert rank["failing"]["unknown"]


@pytest.mark.parametrize("client", ["rank", "world"])
def test_a_batch_that_one_client_cannot_read_is_unknown_on_all(ranks, client):
    for rank in ranks:
        assert rank[f"unreadable/{client}"] == [2, 2, 1]


def test_a_first_batch_that_one_client_cannot_read_is_refused_on_all(ranks):
    assert [rank["first"] for rank in ranks] == ["BatchError", "FailsThere"]


def test_the_worst_client_is_logged_beside_the_pooled_value_on_the_first_process_alone(ranks):
    first, second = (dict(rank["failing"]) for rank in ranks)
    assert first.pop("worst") > first["pooled"] > 0
    assert second.pop("worst") is None
    assert [part.pop("worst in metrics") for part in (first, second)] == [True, False]
    assert first == second


def test_a_gate_on_the_worst_client_stops_everywhere_at_once_and_saves(ranks):
    steps, value, saved = ranks[0]["gate worst"]
    assert (steps, saved) == (1, True)
    assert value == ranks[0]["failing"]["worst"]
    assert ranks[1]["gate worst"] == [steps, value, True]


def test_a_cadence_by_cost_agrees_over_ranks(ranks):
    assert ranks[0]["overhead looks"] == ranks[1]["overhead looks"]


def told_to_all(values):
    """Return what process 0 tells the others: the worst client and the likeliest are its alone."""
    ends = ("_worst_client", "/p_of_this_look", "/p_over_looks")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


def test_each_client_plays_its_own_games_and_training_is_the_same(ranks):
    first, second = (rank["games"] for rank in ranks)
    assert first["same"]
    assert second["same"]
    assert (first["looks"], first["failures"]) == (4, 1)
    for part in ("looks", "failures"):
        assert first[part] == second[part]
    assert second["values"] == told_to_all(first["values"])


def test_what_one_client_gave_away_goes_to_the_first_process_alone(ranks):
    first, second = (rank["games"] for rank in ranks)
    assert first["gathered"] == second["gathered"] == []
    assert second["games"] == []
    first, second = (rank["games again"] for rank in ranks)
    assert (first["steps"], first["looks"]) == (second["steps"], second["looks"]) == (8, 8)
    assert first["first"]
    assert first["games"] > 3 * 2 * 8
    assert second["games"] == 0


def test_games_are_pooled_over_clients_and_the_worst_client_is_logged(ranks):
    found = ranks[0]["games"]
    score, member, _ = zip(*found["games"], strict=True)
    scores, bits = (
        torch.tensor(column).view(3, 2, 8) for column in (score, member)
    )  # look, client
    assert torch.equal(bits.sum(2), torch.full((3, 2), 4.0))
    assert scores[:, 0].any()
    assert not scores[:, 1].any()
    values = found["values"]
    pooled = roc_auc_score(member, score)
    assert float(values["leakage/blind_on_one/auc"]) == pytest.approx(pooled)
    assert pooled < 1
    assert float(values["leakage/blind_on_one/auc_worst_client"]) == 1
    assert float(values["leakage/games_fail_on_one/auc"]) == 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

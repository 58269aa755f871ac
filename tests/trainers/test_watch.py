"""A loop of one's own is watched as a Trainer is, and runs as it does without the watch."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak import BagOfWords, FCMembership, FlatChat
from lightning_fedleak.attacks import GradientMembership, SubspaceMembership
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.engine.log import own_folder
from lightning_fedleak.report import findings, read
from lightning_fedleak.trainers import LeakageLimitExceeded, Threshold, Watch
from tests.callbacks.runs import Probe
from tests.helpers import loops
from tests.helpers.loops import check_undisturbed, lines_of, one_step, watched
from tests.helpers.models import own_rng, tiny_gpt2

F1 = "leakage/bag_of_words/f1"


def batches(count: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (count, 4, 9), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]


def attacks() -> list[Any]:
    return [FlatChat(n_types=12), BagOfWords(), FCMembership(1)]


def lines(folder: Path, name: str = "leakage") -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"{name}.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {n: value for n, value in row.items() if n not in ("run", "before", "hash")} for row in rows
    ]


def run(model: Any, optimizer: Any, watch: Watch, rows: Any) -> int:
    """Return how many steps a loop takes until it is stopped."""
    for batch in rows:
        one_step(watch, model, optimizer, batch)
        if watch.should_stop:
            break
    return watch.loop.steps


def model_and_optimizer(dropout: float = 0.0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=dropout).train()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def test_the_loop_is_not_disturbed_and_its_clipped_sum_is_read(tmp_path: Path) -> None:
    make, settings = partial(tiny_gpt2, tied=False, dropout=0.2), {"accumulate": 2}
    watch = check_undisturbed(tmp_path / "a", attacks(), make, before_step=clip, **settings)
    assert watch.looks == 4
    probe = Probe()
    model, optimizer = model_and_optimizer()
    given = {"batches": batches(4), "optimizers": [optimizer], "accumulate": 2}
    watched(tmp_path / "b", probe, model, before_step=clip, **given)
    again, optimizer = model_and_optimizer()
    assert len(probe.at("shared")) == 2
    for number, gradient in enumerate(probe.at("shared")):
        ids = torch.cat([b["input_ids"] for b in batches(4)[2 * number : 2 * number + 2]])
        again(input_ids=ids, labels=ids).loss.backward()
        clip(again)
        torch.testing.assert_close(gradient, again.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    # Nothing predicts a text's first token, so that its row of the head has no part of its own.
    types = len(torch.cat([b["input_ids"][:, 1:] for b in batches(4)[:2]]).unique())
    assert lines(tmp_path / "b")[0]["n"] == types


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["at the end", "at the start"])
def test_a_skipped_step_is_not_looked_at(tmp_path: Path, to_none: bool, when: str) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches(4)):
            with watch.step(batch):
                if when == "at the start":
                    optimizer.zero_grad(set_to_none=to_none)
                model(**batch).loss.backward()
                if number != 1:
                    optimizer.step()
                if when == "at the end":
                    optimizer.zero_grad(set_to_none=to_none)
    assert watch.loop.steps == 4
    # Whether a step at the start is skipped is known after the batch's own forward.
    steps = [0, 2, 3] if when == "at the end" else [0, 3]
    assert [line["step"] for line in lines(tmp_path)] == steps
    assert all(line["metrics"]["f1"]["value"] == 1.0 for line in lines(tmp_path))


def test_a_scaler_that_skips(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # type: ignore[attr-defined]
    probe = Probe()
    given: Any = {"every_n_steps": 1, "settings": WatchSettings(scaler=scaler)}
    with Watch(model, optimizer, [BagOfWords(), probe], folder=tmp_path, **given) as watch:
        for number, batch in enumerate(batches(3)):
            with watch.step(batch):
                loss = model(**batch).loss * (float("inf") if number == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    words = lines_of(tmp_path, "bag_of_words")
    assert [line["step"] for line in words] == [0, 2]
    assert all(line["metrics"]["f1"]["value"] == 1.0 for line in words)
    again, _ = model_and_optimizer()
    again(**batches(3)[0]).loss.backward()
    torch.testing.assert_close(probe.seen[0][2], again.lm_head.weight.grad)


def test_an_exception_ends_the_record_and_removes_every_tap(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    backward = torch.autograd.backward
    watch = Watch(model, optimizer, attacks(), folder=tmp_path, every_n_steps=1)

    def fails() -> None:
        with watch:
            for number, batch in enumerate(batches()):
                with watch.step(batch):
                    model(**batch).loss.backward()
                    1 / (1 - number)
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(ZeroDivisionError):
        fails()
    assert lines(tmp_path, "run")[-1]["how"] == "ZeroDivisionError"
    assert torch.autograd.backward is backward
    assert "step" not in vars(optimizer)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="no run has begun"), watch.step(batches()[0]):
        pass


def test_gates_stop_the_loop_or_raise(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    gate = Threshold("leakage/worst/words", at_most=0.5, patience=2)
    with Watch(model, optimizer, [BagOfWords()], [gate], every_n_steps=1, folder=tmp_path) as watch:
        assert run(model, optimizer, watch, batches()) == 3
    assert gate.fired is not None
    assert gate.fired.step == 2
    assert "DefendedLoop" in str(gate.fired)
    decided = [line for line in lines(tmp_path, "run") if line["kind"] == "gate"]
    assert [line["did"] for line in decided] == ["stopped"]
    gate = Threshold(F1, at_most=0.5, action="raise")
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(LeakageLimitExceeded, match="Threshold 'bag_of_words/f1' raised"),
        Watch(model, optimizer, [BagOfWords()], [gate], folder=tmp_path / "raise") as watch,
    ):
        run(model, optimizer, watch, batches())
    assert lines(tmp_path / "raise", "run")[-1]["how"] == "LeakageLimitExceeded"


def test_autocast_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    """A declared one may be left, as to write texts."""
    batch = batches(1)[0]
    for precision, works in (("bf16-mixed", True), (None, False)):
        model, optimizer = model_and_optimizer()
        expected = torch.enable_grad() if works else pytest.raises(ValueError, match="bfloat16")
        settings, folder = WatchSettings(precision=precision), tmp_path / str(works)
        with (
            expected,
            Watch(model, optimizer, [BagOfWords()], folder=folder, settings=settings) as watch,
            watch.step(batch),
        ):
            with torch.no_grad():
                model(**batch)
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch).loss.backward()
            optimizer.step()
        assert not works or watch.latest["leakage/bag_of_words/f1"] == 1.0


def test_metrics_of_a_loop_are_logged_where_they_change(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    rows = batches(8) * 8  # 64 steps
    with Watch(model, optimizer, [BagOfWords()], every_n_steps=1000, folder=tmp_path) as watch:
        for step, batch in enumerate(rows, 1):
            with watch.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.utility["train_loss"] = 100.0 - step  # changes at each step
                if step in (20, 40, 60):
                    watch.utility["val_loss"] = {20: 3.0, 40: 2.0, 60: 2.5}[step]
    record = [line for line in lines(tmp_path, "run") if line["kind"] == "metrics"]
    values = {
        name: [(line["step"], line["utility"][name]) for line in record if name in line["utility"]]
        for name in ("val_loss", "train_loss")
    }
    assert values["val_loss"] == [(20, 3), (40, 2), (60, 2.5)]
    assert values["train_loss"] == [(51, 49), (64, 36)]  # the look at step 0 has the first
    assert watch.latest["utility/val_loss_best"] == 2.0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for tag in ("utility/val_loss", "1_leakage/val_loss"):
        assert [one.step for one in events.Scalars(tag)] == [20, 40, 60]
    assert [(s.step, s.value) for s in events.Scalars("utility/val_loss_best")] == [(40, 2.0)]


def test_a_metric_set_after_a_batch_is_of_the_steps_that_are_over(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], every_n_steps=1000, folder=tmp_path) as watch:
        for number, batch in enumerate(batches(9), 1):
            one_step(watch, model, optimizer, batch)
            if number % 3 == 0:
                watch.utility["valid_loss"] = float("2.5")  # measured each time
    record = [line for line in lines(tmp_path, "run") if line["kind"] == "metrics"]
    assert [line["step"] for line in record if line["utility"]] == [3, 6, 9]
    [page] = findings(read([tmp_path])).runs
    assert page.utility == {"valid_loss": [(3, 2.5), (6, 2.5), (9, 2.5)]}


def test_steps_that_would_be_missed_are_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    watch = Watch(model, optimizer, [BagOfWords()], every_n_steps=1, folder=tmp_path)
    [batch] = batches(1)
    with pytest.raises(RuntimeError, match="put the loop into `with Watch"), watch.step(batch):
        pass

    def step_outside() -> None:
        with watch.step(batch):
            model(**batch).loss.backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"put forward, backward and optimizer.step"), watch:
        step_outside()
    optimizer.step()  # the tap is removed


class OneOf(torch.nn.Module):
    """Holds a model, as a class of another package's name would."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("DeepSpeedEngine", "Under DeepSpeedEngine"),
        ("FullyShardedDataParallel", "Under FullySharded.* FSDP2"),
        ("DataParallel", "Under DataParallel"),
    ],
)
def test_wrappers_of_gradients_in_parts_are_refused(tmp_path, wrapper, words) -> None:
    model, optimizer = model_and_optimizer()
    wrapped = OneOf(type(wrapper, (OneOf,), {})(model))
    with pytest.raises(ValueError, match=words):
        Watch(wrapped, optimizer, [BagOfWords()], folder=tmp_path).__enter__()
    assert "step" not in vars(optimizer)


def test_a_batch_that_fails_makes_its_look_unknown_and_its_step_counts(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches(5)):
            try:
                with watch.step(batch):
                    model(**batch).loss.backward()
                    if number != 2:  # adds to the next batch
                        optimizer.step()
                        optimizer.zero_grad()
                    if number == 1:
                        raise MemoryError
            except MemoryError:
                pass
    assert watch.loop.steps == 4
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    assert [line["unknown"] is None for line in lines(tmp_path)] == [True, False, True, True]


def test_the_first_process_alone_chooses_the_folder_and_its_error_reaches_all(tmp_path) -> None:
    sent: list[Any] = []

    def choose(rank: int) -> Path:
        run = SimpleNamespace(rank=rank, broadcast=lambda one: [*sent, one][0], say=print)
        return own_folder(run, tmp_path)

    (tmp_path / "run.jsonl").write_text("{}")
    assert [choose(0).name for _ in range(2)] == ["version_1", "version_2"]  # neither has written
    sent.append(PermissionError("no access"))
    for rank in range(2):
        with pytest.raises(PermissionError):
            choose(rank)
    assert len([*tmp_path.glob("version_*")]) == 3  # the second process made none


def test_runs_never_share_a_folder_but_one_that_is_resumed_keeps_its_own(tmp_path: Path) -> None:
    def ids(watch: Any) -> list[str]:
        rows = (watch.folder / "leakage.jsonl").read_text().splitlines()
        return [*dict.fromkeys(json.loads(row)["run"] for row in rows)]

    first, second = (watched(tmp_path, Probe()) for _ in range(2))
    assert [first.folder, second.folder] == [tmp_path, tmp_path / "version_1"]
    resumed = watched(tmp_path, Probe(), state=second.state_dict())
    third = watched(tmp_path, Probe())
    assert [resumed.folder, third.folder] == [second.folder, tmp_path / "version_2"]
    assert ids(first) == [first.engine.jsonl.run]
    assert ids(second) == [second.engine.jsonl.run, resumed.engine.jsonl.run]


# A model as litgpt has it, in a loop of Fabric: ``forward(idx)``, LoRA on parts of a fused map.


VOCABULARY, WIDTH, LENGTH, CHUNK = 200, 64, 12, 8
PUBLIC = torch.randint(VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(2)).tolist()


class FusedLoRA(nn.Module):
    """Queries, keys and values in one map, with LoRA on queries and values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.lora_dropout = nn.Dropout(0.0)
        self.lora_A = nn.Parameter(torch.randn(2 * rank, WIDTH) / 8)
        self.lora_B = nn.Parameter(torch.zeros(2 * WIDTH, rank))

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.linear(x)
        inner = functional.linear(self.lora_dropout(x), self.lora_A).transpose(1, 2)
        parts = functional.conv1d(inner, self.lora_B[:, :, None], groups=2).transpose(1, 2)
        queries, values = parts.chunk(2, -1)
        return whole + torch.cat([queries, torch.zeros_like(queries), values], -1)


class Block(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), FusedLoRA(rank)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.split(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm(x)).chunk(3, -1)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder that reads at most ``max_seq_length`` tokens, with logits in chunks if asked."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.max_seq_length = LENGTH
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        blocks = nn.ModuleList(Block(rank) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks})
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, idx: Tensor, input_pos: Any = None, lm_head_chunk_size: int = 0) -> Any:
        if idx.shape[1] > self.max_seq_length:
            raise ValueError("too long")
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x)
        if lm_head_chunk_size:
            return [self.lm_head(part) for part in x.split(lm_head_chunk_size, 1)]
        return self.lm_head(x)


def fabric_model(rank: int) -> Any:
    with own_rng(3):
        return Fabric(accelerator="cpu", devices=1).setup_module(GPT(rank))


def chunked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = torch.cat(model(batch["input_ids"], lm_head_chunk_size=CHUNK), 1)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def fabric_batches(n: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(n)]
    return [{"input_ids": ids, "labels": ids} for ids in texts]


def test_words_and_members_are_read_whatever_the_name_of_ids(tmp_path: Path) -> None:
    chosen: list[Any] = [
        SubspaceWords(PUBLIC, capacity_seconds=0),
        GradientMembership(PUBLIC, public_rows=8),
        SubspaceMembership(PUBLIC, public_rows=8),
    ]
    settings = {"batches": fabric_batches(4), "loss": chunked_loss, "optimizer": "adamw"}
    watch = check_undisturbed(tmp_path, chosen, lambda: fabric_model(16), **settings)
    assert watch.failures == 0
    assert watch.latest["leakage/subspace_words/f1"] == 1
    for name in ("gradient", "subspace"):
        assert watch.latest[f"leakage/{name}_membership/auc"] > 0.9
    played = {series.attack for series in watch.engine.results.playing}
    assert played == {attack.name for attack in chosen}


# Memory that really runs out in a look: the attack is unknown, and training is as without us.


LIMIT = 100 << 20  # bytes that the process may still take


class Greedy(BagOfWords):
    """Takes four times what there is, of torch or of Python."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)

    def run(self, view: Any, query: Any = None) -> Any:
        if self.name == "torch":
            torch.ones(4 * LIMIT, dtype=torch.uint8)
        else:
            bytearray(4 * LIMIT)
        return super().run(view, query)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
def test_an_attack_without_memory_is_unknown(tmp_path: Path) -> None:
    import resource

    plain = loops.train(None, [], tiny_gpt2(tied=False), n=16).state
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, Any] = {}
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + LIMIT
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            attacks = [Greedy("torch"), Greedy("python"), BagOfWords()]
            state = loops.train(tmp_path, attacks, tiny_gpt2(tied=False), n=16).state
            answer["same"] = all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))
            answer["unknown"] = [line["unknown"] for line in loops.lines_of(tmp_path)]
        except BaseException as error:
            answer["raised"] = repr(error)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert answer.get("same"), answer
    for torch_, python, known in zip(*[iter(answer["unknown"])] * 3, strict=True):
        assert "RuntimeError at test_watch.py" in torch_
        assert "MemoryError at test_watch.py" in python
        assert known is None

"""References that are trained before the first look, by the run's own recipe."""

import html
import logging
import math
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageCallback, LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, CombinedReference
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.callbacks.trainer_facts import TrainerRun
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.released.pool import MIN_POOL, _drawn, _sample, collect
from lightning_fedleak.evaluation.canaries import draw_references, leave_out
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import read_batch
from lightning_fedleak.model.model_state import Hook, WeightsWritten
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.model.taps.tokens import token_log_probs
from lightning_fedleak.report import findings, model_card, page, read
from lightning_fedleak.trainers import Watch
from tests.engine.channels.test_memorization import fit, lines, monitor, of_kind, tiny
from tests.helpers.lightning_modules import CausalLMModule

BOTH = [Combined(), CombinedReference()]
READ = partial(read_batch, kind="causal")


def mixed(n: int, seed: int, words: int = 300) -> list[dict[str, Tensor]]:
    """Return rows in each of which another share of the words follows from the word before."""
    rule = torch.randperm(words, generator=torch.Generator().manual_seed(9)) + 3
    draw = torch.Generator().manual_seed(seed)
    share, ids = torch.rand(n, generator=draw), torch.randint(3, words, (n, 1), generator=draw)
    for _ in range(13):
        free = torch.randint(3, words, (n,), generator=draw)
        is_bound = torch.rand(n, generator=draw) < share
        word = torch.where(is_bound, rule[ids[:, -1] - 3], free)
        ids = torch.cat([ids, word[:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def halved(n: int = 600, seed: int = 2) -> Any:
    return leave_out(mixed(n, seed), n // 2, seed=1)[0]


def auto(reference: Any = "auto", **more: Any) -> Memorization:
    return Memorization(max_overhead=4, reference=reference, **more)


def aucs(folder: Path) -> tuple[float, float]:
    """Return the last AUC without the reference, and beside it."""
    names = "combined", "combined_reference"
    without, beside = (lines(folder, name)[-1]["metrics"]["auc"]["value"] for name in names)
    return without, beside


def content(row: Any) -> tuple[int, ...]:
    return tuple(row["input_ids"].tolist())


# ---- who is trained on -------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 80), st.integers(0, 5))
def test_each_row_has_a_reference_that_never_saw_it(
    asked: int, rest: int, rows: int, seed: int
) -> None:
    inside = draw_references(asked, rest, rows, seed)
    assert not inside[:, :asked].all(0).any()
    if len(inside) == 1:
        assert int(inside.sum()) == rows <= rest
        assert not inside[:, :asked].any()
    else:
        assert rows > rest
        assert inside.sum(0).tolist() == [1] * (asked + rest)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 30), st.floats(0.25, 0.75), st.booleans(), st.sampled_from([None, 30, 150, 5000])
)
def test_no_reference_has_seen_a_row_that_it_scores(
    seed: int, share: float, coins: bool, wanted: int | None
) -> None:
    n = 450
    held_out = int(n * min(share, 0.5) if coins else n * share)
    data = leave_out(mixed(n, seed), held_out, seed=seed, coins=coins)[0]
    memorization = auto(reference_rows=wanted, seed=seed)
    pool = collect(DataLoader(data, batch_size=8), memorization, READ)
    rows = pool.references
    assert rows is not None
    sets = [{content(rows_of[i]) for i in range(len(rows_of))} for rows_of in rows.data]
    for text, seen, is_scored in zip(pool.texts, rows.seen.T, pool.alone, strict=True):
        was_read = [tuple(text.ids.tolist()) in one for one in sets]
        assert not is_scored or was_read == seen.tolist()
    whole = {content(row) for row in data.dataset}
    assert all(one <= whole for one in sets)
    if len(sets) == 1:
        assert len(rows.data[0]) == (wanted or len(data))
        assert int(pool.alone.sum()) >= 0.8 * MIN_POOL  # others have copies
    else:
        assert sets[0] | sets[1] == whole
        assert n - (wanted or len(data)) < MIN_POOL


def test_what_is_drawn_does_not_depend_on_who_is_a_member() -> None:
    """Over draws of leave_out, a row of the reference and one that is asked about have one law."""
    members = {True: [0, 0], False: [0, 0]}
    for seed in range(40):
        data = leave_out([{"input_ids": torch.tensor([n] * 9)} for n in range(440)], 220, seed)[0]
        generator = torch.Generator().manual_seed(0)
        sample, rest = _sample(data, data.others, 220, generator, by_coins=False)
        rest, _ = _drawn(rest, len(rest), generator)
        for is_asked, sources in ((True, sample), (False, rest[:100])):
            members[is_asked][0] += sum(source is data for source, _ in sources)
            members[is_asked][1] += len(sources)
    for inside, total in members.values():
        assert inside / total == pytest.approx(0.5, abs=0.03)


# ---- Lightning ---------------------------------------------------------------------------------


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yield what is said by logging."""
    messages: list[str] = []
    recorder = logging.Handler()
    recorder.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = rank_zero.log.level
    rank_zero.log.addHandler(recorder)
    rank_zero.log.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        rank_zero.log.removeHandler(recorder)
        rank_zero.log.setLevel(level)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a fit beside four references, which were trained on halves of all rows."""
    folder, data = tmp_path_factory.mktemp("auto"), halved(390)
    watching = monitor(folder / "run", BOTH, auto(references=4))
    kept = ModelCheckpoint(folder / "kept", every_n_epochs=1, save_top_k=-1)
    with heard() as messages:
        _, module = fit([watching, kept], data=data, lr=3e-3, enable_checkpointing=True)
    [channel] = {c for s, c in watching.engine.series.items() if s.name == "combined"}
    early = min((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return SimpleNamespace(
        folder=folder / "run", data=data, messages=messages, channel=channel, early=early,
        module=module,
    )  # fmt: skip


def test_beside_its_reference_members_are_told_better(whole: Any) -> None:
    without, beside = aucs(whole.folder)
    assert beside >= without
    assert without > 0.6


def test_a_model_that_saw_none_of_the_rows_is_not_told(whole: Any) -> None:
    """The null: what the reference says is of no use without memory of the rows."""
    _, module = fit([], data=mixed(len(whole.data), seed=77), lr=3e-3)
    pool, base, references = whole.channel.pool, whole.channel._base, whole.channel._references
    now = token_log_probs(find_anatomy(module.model), pool.texts)
    game = ReleasedModel(now, base, torch.ones(len(pool.texts)), references=references)
    values = membership_values(CombinedReference().score(game), pool.trains)
    assert values["auc_low"] < 0.5 < values["auc_high"]
    assert values["auc"] == pytest.approx(0.5, abs=0.13)  # 3 standard errors of 100 on 100 texts


def test_setup_record_report_and_card_say_which_it_was(whole: Any) -> None:
    n = len(whole.data)
    said = f"4 references are trained, one after the other, on halves of {2 * n} rows ("
    [first] = [message for message in whole.messages if said in message]
    assert not any("GPU available" in message for message in whole.messages[5:])
    assert re.search(r"about [\d.]+ s a pass, 3 passes\)\. For that time a second model", first)
    assert any("training references took" in message for message in whole.messages)
    [pool] = of_kind(whole.folder, "pool")
    assert pool["reference"].items() >= {"kind": "auto", "rows": n, "models": 4}.items()
    words = f"trained by the run's recipe on {n} other rows"
    found = findings(read([whole.folder]))
    for text in (html.unescape(page(found)), model_card(found)):
        assert words in text


def test_a_resumed_fit_trains_no_reference_again(whole: Any, tmp_path: Path) -> None:
    watching = monitor(tmp_path, BOTH, auto())
    with mock.patch.object(TrainerRun, "fit_copy", side_effect=AssertionError):
        fit([watching], data=whole.data, lr=3e-3, ckpt_path=whole.early)
    assert aucs(tmp_path)[1] == pytest.approx(aucs(whole.folder)[1], abs=0.05)
    [pool] = of_kind(tmp_path, "pool")
    assert pool["reference"]["kind"] == "auto"


class Recording(CausalLMModule):
    """Keeps the first row of each batch, and where its Trainer writes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.firsts: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.firsts.append(content({"input_ids": batch["input_ids"][0]}))
        if self.trainer.default_root_dir != FOLDERS[0]:
            FOLDERS.append(self.trainer.default_root_dir)
            MODES.add(stat.S_IMODE(Path(FOLDERS[-1]).stat().st_mode))
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> Sequence[L.Callback]:
        CALLS.append(1)
        return []


FOLDERS, MODES, CALLS = [""], set[int](), list[int]()


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_training_is_the_same_to_the_bit(adapters: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.2)
        return get_peft_model(tiny(), config) if adapters else tiny()

    runs = []
    for memorization in (None, auto()):
        FOLDERS[:], _ = [str(tmp_path)], CALLS.clear()
        module = Recording(make(), 3e-3, "adamw")
        watching = [] if memorization is None else [monitor(tmp_path, BOTH, memorization)]
        names = [name for name, _ in module.named_parameters()]
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        fit(watching, module, halved(), default_root_dir=str(tmp_path), max_epochs=1, **settings)
        assert [name for name, _ in module.named_parameters()] == names
        runs.append(module)
        assert len(CALLS) == 1  # those of the user, and none for the reference
    plain, watched = runs
    assert plain.firsts == watched.firsts
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [*MODES] == [0o700]
    assert len(set(FOLDERS)) == 2
    assert not Path(FOLDERS[-1]).exists()


def test_max_steps_are_as_many_passes_over_fewer_rows(tmp_path: Path) -> None:
    steps = []

    class Counting(CausalLMModule):
        def on_train_end(self) -> None:
            steps.append(self.trainer.global_step)

    more = {"max_epochs": -1, "max_steps": 60}
    watching = monitor(tmp_path, BOTH, auto(reference_rows=100))
    with heard() as messages:
        fit([watching], Counting(tiny(), 3e-3, "adamw"), halved(), **more)
    assert steps == [20, 60]  # 100 of 300 rows
    words = "a reference is trained on 100 rows, which are not asked about"
    assert any(words in message for message in messages)


# ---- transformers ------------------------------------------------------------------------------


class Order(TrainerCallback):
    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.states.append(torch.get_rng_state())


class Ordered(Trainer):
    """Keeps its batches' first rows, and means in a private dict, as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": list[float]()}
        self.firsts: list[tuple[int, ...]] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.args.output_dir.endswith("user"):
            self.firsts.append(content({"input_ids": inputs["input_ids"][0]}))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._metrics["train"].append(float(loss))
        return loss


def run_trainer(folder: Path, memorization: Memorization | None, **more: Any) -> Any:
    settings = {
        "per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 3e-3,
        "save_strategy": "epoch", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "lr_scheduler_type": "constant", "logging_steps": 10,
    } | more  # fmt: skip
    optimizers = settings.pop("optimizers", None)
    torch.manual_seed(7)
    model, arguments = tiny(), TrainingArguments(str(folder / "user"), **settings)
    given = {} if optimizers is None else {"optimizers": (optimizers(model.parameters()), None)}
    trainer = Ordered(model, arguments, train_dataset=halved(), **given)
    order = Order()
    trainer.add_callback(order)
    if memorization is not None:
        watch_settings = WatchSettings(memorization=memorization)
        trainer.add_callback(
            LeakageCallback(trainer, BOTH, folder=folder / "run", settings=watch_settings)
        )
    trainer.train()
    return trainer, order.states


def test_a_second_trainer_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    more = {"bf16": True, "neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2}
    (plain, states), (watched, states_on) = (
        run_trainer(tmp_path / str(on), auto() if on else None, max_steps=12, **more)
        for on in (False, True)
    )
    assert plain.firsts == watched.firsts
    assert plain._metrics == watched._metrics
    assert all(map(torch.equal, states, states_on))
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [
        [log["loss"] for log in trainer.state.log_history if "loss" in log]
        for trainer in (plain, watched)
    ]
    assert losses[0] == losses[1] != []
    without, beside = aucs(tmp_path / "True" / "run")
    assert beside >= without - 0.1
    [pool] = of_kind(tmp_path / "True" / "run", "pool")
    assert pool["reference"]["rows"] == 300
    folders = [tmp_path / on / "user" for on in ("False", "True")]
    files = [sorted(path.name for path in folder.rglob("*")) for folder in folders]
    assert files[0] == [name for name in files[1] if not name.startswith("fedleak")]


def test_an_optimizer_of_the_users_is_of_one_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the optimizer was made before train"):
        run_trainer(tmp_path, auto(), optimizers=torch.optim.AdamW)


# ---- loops of one's own ------------------------------------------------------------------------


def loop(model: nn.Module, data: Any, folder: Path | None, reference: Any = None) -> None:
    """Train for three epochs, watched where a folder is given."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loader, watch = DataLoader(data, batch_size=8, shuffle=True), None
    if folder is not None:
        settings = WatchSettings(memorization=auto(reference))
        watch = Watch(model, optimizer, BOTH, loader=loader, folder=folder, settings=settings)
    with watch or nullcontext():
        for batch in [batch for _ in range(3) for batch in loader]:
            with watch.step(batch) if watch else nullcontext():
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def test_a_loop_of_ones_own_gives_a_function_that_trains(tmp_path: Path) -> None:
    sizes = []

    def reference(rows: Dataset[Any]) -> nn.Module:
        sizes.append(len(rows))  # type: ignore[arg-type]
        model = tiny()
        loop(model, rows, None)
        return model

    with pytest.raises(ValueError, match=r"give reference=lambda rows: train\(make_model"):
        loop(tiny(), halved(), tmp_path / "auto", "auto")
    weights = []
    for folder in (None, tmp_path / "function"):
        torch.manual_seed(3)
        model = tiny()
        loop(model, halved(), folder, reference)
        weights.append([*model.parameters()])
    assert all(map(torch.equal, *weights))
    without, beside = aucs(tmp_path / "function")
    assert beside >= without > 0.6
    assert sizes == [300]
    [pool] = of_kind(tmp_path / "function", "pool")
    assert pool["reference"]["kind"] == "function"


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("attacks", [BOTH, "auto"], ids=["listed", "auto"])
def test_without_left_out_rows_it_is_refused(attacks: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train, others = leave_out\(data, 1000, seed=1\)"):
        fit([monitor(tmp_path, attacks, auto())], data=mixed(300, 2))


def test_given_others_are_no_draw(tmp_path: Path) -> None:
    watching = monitor(tmp_path, BOTH, auto(others=mixed(200, 3)))
    with pytest.raises(ValueError, match="needs rows that a draw holds out"):
        fit([watching], data=mixed(400, 2))


@pytest.mark.parametrize("accepted", [False, True])
def test_under_dp_it_is_refused(accepted: bool, tmp_path: Path) -> None:
    watching = monitor(tmp_path, BOTH, auto(outside_epsilon=accepted))
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)])
    with pytest.raises(ValueError, match="and without defences, and this run has"):
        fit([watching], data=halved(), strategy=strategy, max_epochs=1)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    watching = monitor(tmp_path, BOTH, auto())
    with (
        mock.patch.object(TrainerRun, "processes", 2),
        mock.patch.object(TrainerRun, "broadcast", lambda _, value: value),
        pytest.raises(ValueError, match="in one process and without"),
    ):
        fit([watching], data=halved())


def test_a_module_that_cannot_be_trained_again_is_refused(tmp_path: Path) -> None:
    class NeedsCallback(CausalLMModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.trainer.callbacks[0] is not None
            return super().training_step(batch, batch_idx)

    module = NeedsCallback(tiny(), 3e-3, "adamw")
    with pytest.raises(ValueError, match=r"the reference cannot be trained \(IndexError\)"):
        fit([monitor(tmp_path, BOTH, auto())], module, halved())


def test_a_function_that_writes_to_the_run_ends_it(tmp_path: Path) -> None:
    model = tiny()

    def reference(_: Any) -> nn.Module:
        with torch.no_grad():
            model.transformer.wte.weight.add_(1)
        return tiny()

    with pytest.raises(WeightsWritten, match="wrote to the model of the run"):
        fit([monitor(tmp_path, BOTH, auto(reference))], model, halved())


def test_a_model_a_folder_or_a_function_is_a_reference() -> None:
    assert Memorization(reference="auto").trains_reference
    assert Memorization(reference=lambda rows: None).trains_reference
    for given_reference in (None, "runs/auto", Path("folder"), nn.Linear(1, 1)):
        assert not Memorization(reference=given_reference).trains_reference
    settings = WatchSettings(memorization=auto())
    assert "combined_reference" in [a.name for a in LeakageMonitor(settings=settings).attacks]


def test_fewer_rows_than_members_make_a_weak_reference(tmp_path: Path) -> None:
    data = halved()
    count = len(data) // 4
    gate = RiskGate("leakage/combined_reference/auc", at_most=0.99, action="warn")
    fit([monitor(tmp_path, BOTH, auto(reference_rows=count)), gate], data=data, max_epochs=1)
    values = lines(tmp_path, "combined_reference")[-1]["metrics"]
    assert values["weak_reference"]["value"]
    assert values["auc"]["high"] is None
    assert values["auc"]["low"] is not None
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert "weak reference" in gate.fired.why


# ---- the copy ----------------------------------------------------------------------------------


class Doubling(nn.Linear):
    def hook(self, *_: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1


def test_a_copy_has_the_hooks_of_others_bound_to_itself() -> None:
    layer = Doubling(2, 2)
    layer.register_forward_hook(layer.hook)
    calls: list[int] = []

    def own(*_: Any) -> None:
        calls.append(1)

    layer.register_forward_hook(Hook(own))
    root = nn.Sequential(layer)
    copied = deepcopy((root, layer))
    assert copied[0][0] is copied[1] is not layer
    copied[0](torch.ones(1, 2))
    assert copied[1].calls == 1
    assert not hasattr(layer, "calls")
    assert calls == []
    root(torch.ones(1, 2))
    assert (layer.calls, calls) == (1, [1])

"""Inversion attacks on live steps: what they are shown, and what becomes of what they say."""

import inspect
import json
import math
import stat

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import DescentSettings, EmbeddingDescent, PrefixInversion
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.texts.base import NOTHING, InversionAttack, TextGuess
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.defenses import Defense
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.engine.channels.texts import Inverted, TextsChannel, place_names
from lightning_fedleak.evaluation.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out, with_states_out
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import Capability, ThreatModelError
from tests.callbacks.runs import Probe, assert_same, fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5

ACCURACY = "leakage/recording/token_accuracy"


class Recording(InversionAttack):
    """Keeps what it was shown; guesses 5 everywhere, or what ``says`` makes of the view."""

    default_name = "recording"
    needs_control = False  # its observations are counted: those of the training alone

    def __init__(self, layer=1, says=None, **more):
        super().__init__(layer, **more)
        self.says = says
        self.seen = []

    def reconstruct(self, hidden, attention_mask, position_ids):
        self.seen.append((hidden.clone(), attention_mask, position_ids))
        if self.says is not None:
            return self.says(hidden, attention_mask)
        return TextGuess(torch.full(hidden.shape[:2], 5))


class Shift(Defense):
    """Adds a constant to the hidden states at some layers."""

    name = "shift"
    guarantee = "none"

    def __init__(self, *layers, by=1.0):
        self.activation_layers = layers
        self.by = by
        self.handles = []

    def before_setup(self, context):
        for layer in self.activation_layers:
            place = place_of(find_anatomy(context.root), layer)
            if place.side == "input":
                self.handles.append(
                    place.module.register_forward_pre_hook(
                        lambda _, args: (args[0] + self.by, *args[1:])
                    )
                )
            else:
                self.handles.append(
                    place.module.register_forward_hook(
                        lambda _, __, out: with_states_out(out, states_out(out) + self.by)
                    )
                )

    def teardown(self):
        for handle in self.handles:
            handle.remove()


def exact(layer=1, **settings):
    """PrefixInversion without public text, which the tiny models have no use for."""
    return PrefixInversion(layer, None, language_model=False, **settings)


def descent(layer=1, **settings):
    """One step: cheap, and wrong."""
    return EmbeddingDescent(layer, steps=1, **settings)


def still(model=None, **settings):
    """A model that does not move, without dropout."""
    model = tiny_gpt2(dropout=0.0) if model is None else model
    return CausalLMModule(model.train(), lr=0.0, **settings)


def lines(monitor):
    return [json.loads(line) for line in monitor.engine.jsonl.path.read_text().splitlines()]


# ---- what an attack is shown --------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_states_are_those_of_the_users_own_forward_and_nothing_runs_anew(tmp_path, layer):
    module = CausalLMModule(tiny_gpt2().train())
    kept, passes = [], []
    place = place_of(find_anatomy(module), layer)
    if place.side == "input":
        place.module.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    else:
        place.module.register_forward_hook(lambda _, __, out: kept.append(states_out(out).detach()))
    module.model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    attack = Recording(layer)
    fit(
        [LeakageMonitor(attack, every_n_steps=3, settings=MonitorSettings(texts=8))],
        tmp_path,
        module=module,
    )
    assert len(passes) == len(kept) == 8
    assert len(attack.seen) == 3
    for at, (hidden, mask, positions) in zip((0, 3, 6), attack.seen, strict=True):
        assert torch.equal(hidden, kept[at])
        assert torch.equal(mask, torch.ones(4, 12))
        assert positions is None


def test_texts_are_drawn_by_the_step_and_all_of_them_in_time(tmp_path):
    class Naming(Recording):
        def run(self, view, query=None):
            self.seen.append(view.activations[-1].step)
            return super().run(view, query)

    model = tiny_gpt2(dropout=0.0).eval()
    drawn = {}
    for run in ("first", "again"):
        attack = Recording()
        fit(
            [LeakageMonitor(attack, every_n_steps=1, settings=MonitorSettings(texts=1))],
            tmp_path,
            module=still(),
        )
        drawn[run] = [hidden for hidden, *_ in attack.seen]
    for one, two, batch in zip(*drawn.values(), random_token_loader(32), strict=True):
        assert one.shape == (1, 12, 16)
        assert torch.equal(one, two)
        states = hidden_states(find_anatomy(model), 1, batch["input_ids"])
        far = (states - one).abs().amax((1, 2))
        assert far.min() < 1e-5 < far.topk(3).values.min()
    firsts = [
        (hidden_states(find_anatomy(model), 1, b["input_ids"]) - h).abs().amax((1, 2)).argmin()
        for h, b in zip(drawn["first"], random_token_loader(32), strict=True)
    ]
    assert len({int(i) for i in firsts}) > 1


class Padded(L.LightningModule):
    """Texts of several lengths, padded on a side, in micro-batches of several lengths."""

    def __init__(self, side, positions):
        super().__init__()
        self.model = tiny_gpt2(dropout=0.0).train()
        self.side = side
        self.positions = positions

    def training_step(self, batch, _):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        more = {}
        if self.positions:
            more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        loss = self.model(input_ids=ids, attention_mask=mask, labels=batch["labels"], **more).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        batches = []
        for longest in (9, 6, 12, 7):
            lengths = torch.tensor([longest, longest - 3, 2])
            ids = torch.randint(3, 97, (3, longest), generator=generator)
            columns = torch.arange(longest)
            mask = columns < lengths[:, None]
            if self.side == "left":
                mask = columns >= longest - lengths[:, None]
            labels = ids.masked_fill(~mask, -100)
            ids = ids.masked_fill(~mask, 0)
            batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
        return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_micro_batches_of_several_lengths_are_all_read(tmp_path, side, positions):
    module = Padded(side, positions)
    attack = Recording(2)
    monitor = LeakageMonitor(
        [exact(2), attack], every_n_steps=1, settings=MonitorSettings(texts=100)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)
    assert monitor.failures == 0
    assert [line["n"] for line in lines(monitor)] == [6, 6, 6, 6]
    for line in lines(monitor)[::2]:
        assert line["metrics"]["exact_sentences"]["value"] == 1
    batches = list(module.train_dataloader())
    for (hidden, mask, places), two in zip(attack.seen, (batches[:2], batches[2:]), strict=True):
        longest = max(b["input_ids"].shape[1] for b in two)
        assert hidden.shape == (6, longest, 16)
        assert (places is not None) == positions
        expected = torch.cat(
            [
                nn.functional.pad(b["attention_mask"], (0, longest - b["attention_mask"].shape[1]))
                for b in two
            ]
        )
        assert torch.equal(mask, expected)


def test_the_mask_is_the_models_own(tmp_path):
    class Blind(CausalLMModule):
        def training_step(self, batch, _):
            loss = self.model(batch["input_ids"], labels=batch["labels"]).loss
            self.log("train_loss", loss)
            return loss

    attack = Recording()
    fit([LeakageMonitor(attack)], tmp_path, module=Blind(tiny_gpt2(), lr=0.0))
    assert attack.seen[0][1] is None


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_mask_given_by_its_place_is_the_one_that_the_model_takes(tmp_path, task):
    peft = pytest.importorskip("peft")

    class ByPlace(CausalLMModule):
        def training_step(self, batch, _):
            ids = batch["input_ids"]
            mask = torch.ones_like(ids)
            mask[:, :2] = 0
            between = [None] * (0 if task else names.index("attention_mask") - 1)
            given = (ids, *between, mask)
            loss = self.model(*given, labels=batch["labels"]).loss
            self.log("train_loss", loss)
            return loss

    with own_rng(0):
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type=task)
        inner = tiny_gpt2()
        names = list(inspect.signature(inner.forward).parameters)
        model = peft.get_peft_model(inner, config)
    attack = Recording()
    fit([LeakageMonitor(attack)], tmp_path, module=ByPlace(model, lr=0.0))
    mask = attack.seen[0][1]
    assert mask is not None
    assert mask.sum(1).tolist() == [10] * 4


def test_a_module_that_calls_the_models_parts_gives_the_batchs_mask(tmp_path):
    class Parts(CausalLMModule):
        def training_step(self, batch, _):
            states = self.model.transformer(batch["input_ids"]).last_hidden_state
            logits = self.model.lm_head(states)[:, :-1]
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten()
            )
            self.log("train_loss", loss)
            return loss

    attack = Recording()
    fit([LeakageMonitor(attack)], tmp_path, module=Parts(tiny_gpt2(), lr=0.0))
    assert torch.equal(attack.seen[0][1], torch.ones(4, 12))


@pytest.mark.parametrize("layer", [0, 1])
def test_local_is_before_and_shared_behind_a_defence(tmp_path, layer):
    attacks = [Recording(layer), Recording(2, name="above")]
    strategy = DefendedStrategy("auto", defenses=[Shift(layer)])
    both = LeakageMonitor(attacks[0], stages=("local", "shared"))
    above = LeakageMonitor(attacks[1])
    plain = Recording(layer)
    fit([LeakageMonitor(plain)], tmp_path, module=still())
    fit([both, above], tmp_path, module=still(), strategy=strategy)
    local, shared = (hidden for hidden, *_ in attacks[0].seen)
    assert torch.equal(local, plain.seen[0][0])
    assert torch.equal(shared, local + 1)
    assert len(attacks[1].seen) == 1


def test_what_no_defence_rewrites_is_attacked_once_for_both_stages(tmp_path):
    attack = Recording()
    strategy = DefendedStrategy("auto", defenses=[Shift(2)])
    monitor = LeakageMonitor(attack, stages=("local", "shared", "aggregate"))
    fit([monitor], tmp_path, module=still(), strategy=strategy)
    assert len(attack.seen) == 1
    assert {name.split("/")[0] for name in monitor.latest if "recording" in name} == {
        "leakage_local",
        "leakage",
    }
    assert monitor.latest[ACCURACY] == monitor.latest["leakage_local/recording/token_accuracy"]
    assert not [name for name in monitor.metric_names() if name.startswith("leakage_aggregate/")]


def test_a_defence_shows_in_what_an_attack_finds(tmp_path):
    strategy = DefendedStrategy("auto", defenses=[Shift(1, by=3.0)])
    monitor = LeakageMonitor(exact(1), stages=("local", "shared"))
    fit([monitor], tmp_path, module=still(), strategy=strategy)
    name = "prefix_inversion/token_accuracy"
    assert monitor.latest[f"leakage_local/{name}"] == 1
    assert monitor.latest[f"leakage/{name}"] < 0.6


def test_virtual_tokens_of_prompt_tuning_are_no_text(tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        module = still(get_peft_model(tiny_gpt2(dropout=0.0), config))
    attack = Recording(2)
    monitor = LeakageMonitor([attack, exact(2)])
    fit([monitor], tmp_path, module=module, n=4)
    assert attack.seen[0][0].shape == (4, 12, 16)
    assert monitor.failures == 0
    assert monitor.latest["leakage/prefix_inversion/token_accuracy"] == 1


def test_frozen_layers_give_as_much_away(tmp_path):
    module = still()
    module.model.transformer.requires_grad_(False)
    module.model.lm_head = nn.Linear(16, 97, bias=False)
    monitor = LeakageMonitor(exact(2))
    fit([monitor], tmp_path, module=module)
    assert monitor.latest["leakage/prefix_inversion/token_accuracy"] == 1


def test_an_encoder_is_attacked_by_descent(tmp_path):
    attack = EmbeddingDescent(1, steps=150, sweeps=2, lr=0.3)
    monitor = LeakageMonitor(attack, settings=MonitorSettings(texts=2))
    fit([monitor], tmp_path, module=still(tiny_bert_mlm(dropout=0.0)), n=8)
    assert monitor.latest["leakage/embedding_descent/token_accuracy"] > 0.9


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_other_models_are_read(tmp_path, make):
    attack = Recording(1)
    monitor = LeakageMonitor(attack)
    fit([monitor], tmp_path, module=still(make()), n=4)
    assert monitor.failures == 0
    assert attack.seen[0][0].shape == (4, 12, 16)


def hooks(module):
    """Hooks of all kinds on a module and its parts."""
    stores = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, store)) for m in module.modules() for store in stores)


def test_no_hook_stays_behind(tmp_path):
    module = still()
    strategy = DefendedStrategy("auto", defenses=[Shift(1)])
    monitor = LeakageMonitor(Recording(), stages=("local", "shared"))
    fit([monitor], tmp_path, module=module, strategy=strategy, n=4)
    assert hooks(module) == 0
    for refused in (
        LeakageMonitor(exact(9)),
        LeakageMonitor(Recording(), settings=MonitorSettings(assume=())),
    ):
        with pytest.raises(ValueError, match=r"out of range|must be one that"):
            fit([refused], tmp_path, module=module)
        assert hooks(module) == 0
    encoder = still(tiny_bert_mlm())
    with pytest.raises(ValueError, match="not causal"):
        fit([LeakageMonitor(exact(1))], tmp_path, module=encoder)
    assert hooks(encoder) == 0


# ---- what becomes of what it says ---------------------------------------------------------------


def test_rates_are_those_of_the_guess(tmp_path):
    attack = Recording()
    monitor = LeakageMonitor(attack, settings=MonitorSettings(texts=4))
    fit([monitor], tmp_path, module=still(), n=4)
    ids = next(iter(random_token_loader(4)))["input_ids"]
    expected = reconstruction_rates(sentence_scores(torch.full_like(ids, 5), ids), resamples=200)
    for name, rate in expected.items():
        if name in TextsChannel.metrics:
            assert monitor.latest[f"leakage/recording/{name}"] == rate.value
            assert monitor.latest[f"leakage/recording/{name}_high"] == pytest.approx(rate.high)
    assert monitor.latest["leakage/recording/finished"] == 1
    assert monitor.latest["leakage/recording/exposed"] == 1
    [line] = lines(monitor)
    assert (line["n"], line["stage"], line["attack"]) == (4, "shared", "recording")
    hits = (ids == 5).double()
    for name, columns in {"0": [0], "1": [1], "2-3": [2, 3], "8-15": range(8, 12)}.items():
        found = line["metrics"][f"token_accuracy_at_{name}"]["value"]
        assert found == pytest.approx(float(hits[:, list(columns)].mean()))
    assert "token_accuracy_at_16-31" not in line["metrics"]


def test_texts_that_were_not_begun_in_time_do_not_count(tmp_path):
    def late(hidden, _):
        tokens = torch.full(hidden.shape[:2], NOTHING)
        tokens[0, 0] = 5
        return TextGuess(tokens, finished=False)

    monitor = LeakageMonitor(Recording(says=late))
    fit([monitor], tmp_path, module=still(), n=4)
    assert lines(monitor)[0]["n"] == 1
    assert monitor.latest["leakage/recording/finished"] == 0
    assert 0 <= monitor.latest[ACCURACY] <= 1 / 12
    assert monitor.failures == 0


def crash(hidden, _):
    raise KeyError("a secret word")


def no_time(hidden, _):
    return TextGuess(torch.full(hidden.shape[:2], NOTHING), finished=False)


def other_shape(hidden, _):
    return TextGuess(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("says", "why"),
    [(crash, "KeyError at"), (no_time, "no time"), (other_shape, "others than were sent")],
)
def test_no_answer_is_unknown_and_not_zero(tmp_path, says, why):
    monitor = LeakageMonitor([Recording(says=says), Probe()], every_n_steps=1)
    with pytest.warns(UserWarning, match="unknown, not 0"):
        trainer = fit([monitor], tmp_path, n=8)
    assert trainer.global_step == 2
    assert math.isnan(monitor.latest[ACCURACY])
    assert monitor.failures == 2
    assert why in lines(monitor)[0]["unknown"]
    assert "secret" not in monitor.engine.jsonl.path.read_text()
    assert not math.isnan(monitor.latest["leakage/probe/f1"])


def test_an_attack_that_cannot_follow_the_model_does_not_spoil_the_others(tmp_path):
    class Lost(Recording):
        default_name = "lost"

        def refresh(self, anatomy, step):
            raise RuntimeError

    monitor = LeakageMonitor([Lost(), Recording()])
    with pytest.warns(UserWarning, match="unknown, not 0"):
        fit([monitor], tmp_path, n=4)
    assert math.isnan(monitor.latest["leakage/lost/token_accuracy"])
    assert not math.isnan(monitor.latest[ACCURACY])


def test_a_layer_that_is_passed_twice_is_unknown(tmp_path):
    class Twice(CausalLMModule):
        def training_step(self, batch, _):
            loss = self.model(**batch).loss + self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

    monitor = LeakageMonitor(Recording())
    with pytest.warns(UserWarning, match="passed 2 times"):
        fit([monitor], tmp_path, module=Twice(tiny_gpt2()), n=4)
    assert math.isnan(monitor.latest[ACCURACY])


def test_a_mask_of_another_form_is_unknown(tmp_path):
    class Packed(CausalLMModule):
        def training_step(self, batch, _):
            b, length = batch["input_ids"].shape
            mask = torch.ones(length, length).tril().bool().expand(b, 1, -1, -1)
            loss = self.model(batch["input_ids"], attention_mask=mask, labels=batch["labels"]).loss
            self.log("train_loss", loss)
            return loss

    monitor = LeakageMonitor(Recording())
    with pytest.warns(UserWarning, match="attention_mask of another form"):
        fit([monitor], tmp_path, module=Packed(tiny_gpt2()), n=4)
    assert math.isnan(monitor.latest[ACCURACY])


def test_a_micro_batch_that_trains_nothing_is_left_out(tmp_path):
    class Skips(CausalLMModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

    monitor = LeakageMonitor(Recording(), settings=MonitorSettings(texts=100))
    fit([monitor], tmp_path, module=Skips(tiny_gpt2()), n=8, accumulate_grad_batches=2)
    assert lines(monitor)[0]["n"] == 4
    assert monitor.failures == 0


def test_the_age_of_the_adversarys_copy_is_logged(tmp_path):
    monitor = LeakageMonitor(
        [
            descent(descent=DescentSettings(refresh_every=3), name="old"),
            descent(name="new"),
            Recording(),
        ],
        every_n_steps=1,
    )
    fit([monitor], tmp_path, n=28)
    ages = {
        name: [
            line["metrics"].get("age", {}).get("value")
            for line in lines(monitor)
            if line["attack"] == name
        ]
        for name in ("old", "new", "recording")
    }
    assert ages["old"] == [0, 1, 2, 0, 1, 2, 0]
    assert ages["new"] == [0] * 7
    assert set(ages["recording"]) == {None}
    assert monitor.latest["leakage/old/age"] == 0


def test_after_a_resume_the_age_counts_from_the_weights_that_were_there(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path, save_last=True)
    fit([saver], tmp_path, n=20, enable_checkpointing=True)
    monitor = LeakageMonitor(descent(descent=DescentSettings(refresh_every=100)), every_n_steps=1)
    fit([monitor], tmp_path, n=20, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    ages = [line["metrics"]["age"]["value"] for line in lines(monitor)]
    assert ages == [0, 1, 2, 3, 4]


def test_texts_are_revealed_side_by_side_in_a_private_file_alone(tmp_path):
    class Words:
        def decode(self, ids):
            return "".join(f"word{i} " for i in ids)

    def gap(hidden, _):
        tokens = torch.full(hidden.shape[:2], 5)
        tokens[:, 3] = NOTHING
        return TextGuess(tokens)

    monitor = LeakageMonitor(
        [Recording(says=gap), Probe()],
        every_n_steps=4,
        reveal=True,
        tokenizer=Words(),
        settings=MonitorSettings(texts=2),
    )
    fit([monitor], tmp_path, module=still(), logger=TensorBoardLogger(tmp_path))
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and b"word5 " in p.read_bytes()]
    [path] = [p for p in holding if p.name == "revealed_texts.rank0.txt"]
    assert all(p.name.startswith("revealed_") for p in holding)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text().splitlines()
    assert [line for line in text if line.startswith("==")] == [
        "== step 0, leakage/recording",
        "== step 4, leakage/recording",
    ]
    ids = next(iter(random_token_loader(32)))["input_ids"].tolist()
    original = text[2].removeprefix("original:      ")
    assert original in [repr("".join(f"word{i} " for i in row)) for row in ids]
    said = "word5 " * 3 + "[?]" + "word5 " * 8
    assert text[3] == f"reconstructed: {said!r}"


def test_tensorboard_shows_at_which_places_tokens_were_recovered(tmp_path):
    batch = next(iter(random_token_loader(4)))["input_ids"]

    def halves(hidden, _):
        tokens = batch.clone()
        tokens[:, 6:] = NOTHING
        return TextGuess(tokens)

    logger = TensorBoardLogger(tmp_path)
    fit([LeakageMonitor(Recording(says=halves))], tmp_path, module=still(), logger=logger, n=4)
    events = EventAccumulator(logger.log_dir).Reload()
    [histogram] = events.Histograms("leakage/recording/share_recovered_by_place")
    value = histogram.histogram_value
    assert list(value.bucket_limit) == [1, 2, 4, 8, 16]
    assert list(value.bucket) == [1, 1, 2, 2, 0]
    assert "leakage/recording/token_accuracy" in events.Tags()["scalars"]


def test_a_gate_stops_on_what_is_reconstructed(tmp_path):
    gate = RiskGate("leakage/prefix_inversion/token_accuracy", at_most=0.5, action="stop")
    monitor = LeakageMonitor(exact(1), every_n_steps=1)
    trainer = fit([gate, monitor], tmp_path, module=still())
    assert trainer.global_step == 1
    assert gate.fired is not None
    sure = RiskGate(
        "leakage/prefix_inversion/exact_sentences", at_most=0.5, action="stop", bound="lower"
    )
    trainer = fit([sure, LeakageMonitor(exact(1), every_n_steps=1)], tmp_path, module=still())
    assert 1 < trainer.global_step < 8


# ---- batches without a row ----------------------------------------------------------------------


class Poisson(CausalLMModule):
    """Steps on a batch of no row without running the model (Hugging Face's cannot be run)."""

    def __init__(self, sizes):
        super().__init__(tiny_gpt2().train())
        self.sizes = sizes

    def training_step(self, batch, batch_idx):
        if len(batch["input_ids"]):
            return super().training_step(batch, batch_idx)
        return sum(p.sum() for p in self.parameters()) * 0

    def train_dataloader(self):
        full = random_token_loader(4 * len(self.sizes))
        batches = [
            {k: v[:size] for k, v in rows.items()}
            for size, rows in zip(self.sizes, full, strict=True)
        ]
        return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize(
    "attack", [lambda: Recording(), lambda: FCMembership(1), Probe], ids=["texts", "games", "words"]
)
def test_a_batch_without_a_row_is_passed_over_by_every_kind(tmp_path, attack):
    monitor = LeakageMonitor(attack(), every_n_steps=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Poisson((0, 4, 0, 0, 4, 4)))
    assert trainer.global_step == 6
    assert monitor.failures == 0
    games = isinstance(monitor.attacks[0], FCMembership)
    assert [line["step"] for line in lines(monitor)] == ([4] if games else [1, 4])


def test_an_empty_micro_batch_among_others_is_no_failure(tmp_path):
    monitor = LeakageMonitor([Recording(), Probe()], settings=MonitorSettings(texts=100))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=3,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Poisson((4, 0, 3)))
    assert {line["n"] for line in lines(monitor) if line["attack"] == "recording"} == {7}
    assert monitor.failures == 0


def test_poisson_batches_of_dpsgd_are_read_and_its_empty_ones_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.callbacks.runs.random_token_loader", lambda n: random_token_loader(n, batch_size=1)
    )

    def run(callbacks, root):
        strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=0.5, seed=3)])
        module = CausalLMModule(tiny_gpt2(dropout=0.0, tied=False).train(), optimizer="adamw")
        return fit(callbacks, root, module=module, strategy=strategy, n=10)

    class Sizes(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, module, batch, index):
            self.seen.append(len(batch["input_ids"]))

    monitor = LeakageMonitor(
        [exact(1), FCMembership(1), Probe()], every_n_steps=1, stages=("local", "shared")
    )
    sizes = Sizes()
    watched = run([sizes, monitor], tmp_path / "watched")
    assert_same(run([], tmp_path / "plain"), watched)
    assert monitor.failures == 0
    assert 0 in sizes.seen
    found = lines(monitor)
    looked = [line for line in found if line["attack"] == "prefix_inversion"]
    for stage in ("local", "shared"):
        steps = {line["step"]: line["n"] for line in looked if line["stage"] == stage}
        assert steps == {i: min(n, 4) for i, n in enumerate(sizes.seen) if n}
    assert all(line["metrics"]["token_accuracy"]["value"] == 1 for line in looked)
    assert {line["attack"] for line in found} == {"prefix_inversion", "fc_membership", "probe"}


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [0, -1, True, 2.0])
def test_a_number_of_texts_must_be_positive(texts):
    with pytest.raises(ValueError, match="texts must be an integer of at least 1"):
        LeakageMonitor(Recording(), settings=MonitorSettings(texts=texts))


def test_activations_are_never_reduced():
    with pytest.raises(ValueError, match="Add 'shared' to stages"):
        LeakageMonitor(Recording(), stages="aggregate")


def test_rounds_of_local_steps_are_refused():
    with pytest.raises(ValueError, match="of its own, without local_steps"):
        LeakageMonitor(Recording(), local_steps=2)


@pytest.mark.parametrize("attack", [Recording(9), exact(9), EmbeddingDescent(9)])
def test_a_layer_that_does_not_exist_is_refused_before_training(tmp_path, attack):
    with pytest.raises(ValueError, match=r"layer=9 is out of range: the model has 2 blocks"):
        fit([LeakageMonitor(attack)], tmp_path)


def test_an_encoder_cannot_be_read_left_to_right(tmp_path):
    with pytest.raises(ValueError, match="not causal"):
        fit([LeakageMonitor(exact(1))], tmp_path, module=still(tiny_bert_mlm()))


def test_local_does_not_exist_above_a_defence(tmp_path):
    strategy = DefendedStrategy("auto", defenses=[Shift(1)])
    with pytest.raises(ValueError, match="Leave 'local' out"):
        fit([LeakageMonitor(Recording(2), stages=("local",))], tmp_path, strategy=strategy)


def test_the_adversary_must_know_the_bottom(tmp_path):
    knows_nothing = LeakageMonitor(Recording(), settings=MonitorSettings(assume=()))
    with pytest.raises(ThreatModelError, match="below the split"):
        fit([knows_nothing], tmp_path)
    bottom = LeakageMonitor(
        Recording(), settings=MonitorSettings(assume=[Capability.KNOWS_BOTTOM_MODEL])
    )
    fit([bottom], tmp_path, n=4)
    assert bottom.looks == 1


# ---- the kind -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_clients_are_pooled_by_text(clients, n, length, seed):
    generator = torch.Generator().manual_seed(seed)
    monitor = LeakageMonitor(Recording(), settings=MonitorSettings(texts=5))
    [(series, channel)] = monitor.engine.series.items()
    rows, guessed, truths, masks, ages = {}, [], [], [], []
    for client in range(clients):
        truth = torch.randint(3, (n, length), generator=generator)
        guess = torch.randint(3, (n, length), generator=generator)
        real = torch.rand(n, length, generator=generator) < 0.8
        real[:, 0] = True
        age = float(torch.randint(5, (), generator=generator))
        found = Inverted(TextGuess(guess), truth, real, age)
        rows[client] = found.pack(5)
        assert len(rows[client]) == channel.width
        guessed.append(guess)
        truths.append(truth)
        masks.append(real)
        ages.append(age)
    outcome = channel.pooled(series, rows)
    everything = torch.cat(guessed), torch.cat(truths), torch.cat(masks)
    expected = reconstruction_rates(sentence_scores(*everything), resamples=200)
    assert outcome.n == n * clients
    assert set(outcome.rates) == set(TextsChannel.metrics)
    for name, rate in outcome.rates.items():
        assert rate.value == pytest.approx(expected[name].value)
        assert rate.low == pytest.approx(expected[name].low)
    assert outcome.extra == {"age": max(ages), "finished": 1.0}
    if clients > 1:
        each = [
            float(((g == t) & r).sum(1).div(r.sum(1)).double().mean())
            for g, t, r in zip(guessed, truths, masks, strict=True)
        ]
        assert outcome.worst["token_accuracy"] == pytest.approx(max(each))
    counts = {}
    for g, t, r in zip(*everything, strict=True):
        for place, (a, b) in enumerate(zip(g[r].tolist(), t[r].tolist(), strict=True)):
            name = place_names()[min(place.bit_length(), 11)]
            right, among = counts.get(name, (0, 0))
            counts[name] = (right + (a == b), among + 1)
    assert outcome.by_position == counts


def test_ranges_of_places_follow_each_other():
    names = place_names()
    assert names[:5] == ["0", "1", "2-3", "4-7", "8-15"]
    assert names[-2:] == ["512-1023", "1024-"]
    for place, at in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1023, 10), (1024, 11), (5000, 11)]:
        assert min(place.bit_length(), 11) == at

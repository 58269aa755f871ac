"""Membership games and inversion beside defences; where games can be played and go on."""

import copy
import math
import warnings
import weakref
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as L
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fedleak import DefendedStrategy, GradientCompression, GradientNoise
from lightning_fedleak.attacks import (
    BagOfWords,
    EmbeddingDescent,
    FCMembership,
    GradientMembership,
    PrefixInversion,
    PublicText,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.attacks.membership.attention import (
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.row_space import Whitening
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.callbacks import CanaryScorer, LeakageMonitor, RiskGate
from lightning_fedleak.cli.finetuning.module import PadRight
from lightning_fedleak.defenses import Defense, Freeze, TokenLDP
from lightning_fedleak.defenses.activations import ActivationNoise
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.defenses.gradient_compression import Method
from lightning_fedleak.engine import Engine, Games, Options, WatchSettings, selected
from lightning_fedleak.engine.options import known_stages
from lightning_fedleak.evaluation.canaries import CanarySet, InclusionRecord, new_token_canaries
from lightning_fedleak.evaluation.canaries.record import seed_key
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out, with_states_out
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.report import findings, page, read
from lightning_fedleak.trainers.loop import Loop, LoopRun
from tests.attacks.row_space.models import VOCABULARY
from tests.callbacks.runs import Kept, Probe, assert_same, fit, monitor_with
from tests.callbacks.text_counts import CountsChannel, TextCount
from tests.defenses.test_defenses import Halves
from tests.engine.test_games import AUC, RecordingAttack, texts_of
from tests.engine.test_inversion import ACCURACY, Recording, exact
from tests.engine.test_row_spaces import LOADER, LORA, model_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of, watched
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama
from tests.helpers.settings import QUIET, grouped
from tests.strategies.dpsgd_runs import CausalLM


def still(lr=0.0, kind=CausalLMModule):
    """Return a model that does not move, without dropout."""
    return kind(tiny_gpt2(dropout=0.0).train(), lr=lr)


def defended(root, attacks, *defenses, module=None, n=32, **settings):
    """Return the monitor of a fit under defences."""
    monitor = LeakageMonitor(attacks, **grouped(settings, every_n_steps=3))
    strategy = DefendedStrategy("auto", defenses=[*defenses])
    fit([monitor], root, module=module or still(), strategy=strategy, n=n)
    return monitor


def attention(name, text, **settings):
    return AttentionMembership(
        1, text, tokens=12, batch=4, attention=AttentionSettings(**settings), name=name
    )


def test_the_loss_scale_of_amp_is_not_in_the_canary(tmp_path):
    upstreams = []
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        attack = RecordingAttack()
        monitor = LeakageMonitor(attack, every_n_steps=3, games=Games(targets=2))
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fit([monitor], tmp_path / str(scale), module=still(), plugins=[plugin], n=16)
        assert monitor.latest[AUC] == 1
        upstreams.append(attack.computed[1][3])
    first, second = upstreams
    assert first.abs().max() > 0
    torch.testing.assert_close(first, second, rtol=0.05, atol=float(first.abs().max()) / 50)


def test_noise_without_a_clip_holds_no_server_back_that_scales_its_layers(tmp_path):
    noise = GradientNoise(clip=None, sigma=1.0)
    assert defended(tmp_path, RecordingAttack(), noise).latest[AUC] == 1


def test_a_defence_that_does_not_know_canaries_makes_them_unknown(tmp_path):
    with pytest.warns(UserWarning, match="'halves' does not say what it does to a canary"):
        monitor = defended(
            tmp_path, [RecordingAttack(), Probe()], Halves(), stages=("local", "shared")
        )
    assert math.isnan(monitor.latest[AUC])
    assert monitor.latest["leakage_local/recording/auc"] == 1
    assert monitor.latest["leakage/probe/f1"] > 0
    assert monitor.failures == 3


def test_freezing_does_not_freeze_the_servers_own_layers(tmp_path):
    monitor = defended(tmp_path, [RecordingAttack(), Probe()], Freeze("head+embeddings"))
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert monitor.latest["leakage/recording/exposed"] == monitor.latest[AUC] == 1


class Writes(Defense):
    """Replaces the words of the batch from ``first`` on."""

    name, guarantee = "writes", "none"

    def __init__(self, first=0):
        self.first = first
        self.written = []

    def on_batch(self, batch, context):
        ids = batch["input_ids"].clone()
        ids[:, self.first :] = (ids[:, self.first :] + 31) % 97
        self.written.append(ids)
        return batch | {"input_ids": ids}


def test_the_client_reads_what_a_defence_has_written_in_place_of_its_batch(tmp_path):
    attack, defense, module = RecordingAttack(), Writes(), still()
    monitor = defended(tmp_path, attack, defense, module=module, stages=("local", "shared"))
    batches = list(random_token_loader(32))
    for look, step in enumerate([1, 3, 6]):
        _, hidden, mask, _, _ = attack.computed[1 + look]
        truth, written = batches[step]["input_ids"], defense.written[step]
        assert not torch.equal(truth, written)
        torch.testing.assert_close(hidden, hidden_states(find_anatomy(module), 1, written, mask))
        query = next(query for number, _, _, query in attack.runs if number == step)
        assert sum(text in truth.tolist() for text in texts_of(query)) == len(truth)
    assert monitor.failures == 0
    assert monitor.latest["leakage/recording/accuracy"] == 0.5
    assert defended(tmp_path, RecordingAttack(), Writes(first=99)).latest[AUC] == 1


def test_where_a_defence_acts_attention_plays_wider_bands_and_one_under_noise(tmp_path):
    attacks = [attention("default", seeded(5)), attention("given", seeded(5), widths=WIDTHS)]
    ldp = TokenLDP("grr", epsilon=5, per="token", special_ids=[0, 1, 2])
    cases = [
        ([ldp], 0.999, list(WIDTHS)),
        ([ldp, GradientNoise(clip=3.0, sigma=0.5, seed=0)], 0.1, [0.1]),
        ([], WIDTHS[-1], list(WIDTHS)),
    ]
    for defenses, widest, given in cases:
        monitor = defended(tmp_path, attacks, *defenses)
        widths = [attack.config()["widths"] for attack in attacks]
        assert widths[0][-1] == widest
        assert widths[1] == given
        assert monitor.failures == 0


class Embeds(CausalLMModule):
    def training_step(self, batch, batch_idx):
        states = self.model.transformer.wte(batch["input_ids"])
        return self.model(inputs_embeds=states, labels=batch["labels"]).loss


def test_a_batch_that_is_replaced_and_cannot_be_read_is_unknown(tmp_path):
    with pytest.warns(UserWarning, match="the token ids that the model ran on are unknown"):
        monitor = defended(tmp_path, RecordingAttack(), Writes(), module=still(kind=Embeds))
    assert math.isnan(monitor.latest[AUC])


def test_layers_behind_rewritten_hidden_states_are_unknown_and_those_below_are_not(tmp_path):
    attacks = [FCMembership(k, name=f"fc_{k}") for k in (0, 1, 2)]
    with pytest.warns(UserWarning, match="rewrites the hidden states at layer 1"):
        monitor = defended(tmp_path, attacks, ActivationNoise(1, sigma=50.0))
    assert monitor.latest["leakage/fc_0/auc"] > 0.8
    assert math.isnan(monitor.latest["leakage/fc_1/auc"])
    assert math.isnan(monitor.latest["leakage/fc_2/auc"])


class Shift(Defense):
    """Adds a constant to the hidden states at a layer."""

    name, guarantee = "shift", "none"

    def __init__(self, layer, by=1.0):
        self.activation_layers = (layer,)
        self.by = by

    def before_setup(self, context):
        place = place_of(find_anatomy(context.root), self.activation_layers[0])
        if place.side == "input":
            self.handle = place.module.register_forward_pre_hook(
                lambda _, args: (args[0] + self.by, *args[1:])
            )
        else:
            self.handle = place.module.register_forward_hook(
                lambda _, __, out: with_states_out(out, states_out(out) + self.by)
            )

    def teardown(self):
        self.handle.remove()


def inverted(root, attacks, *defenses, **settings):
    monitor = LeakageMonitor(attacks, **grouped(settings))
    module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), lr=0.0)
    strategy = DefendedStrategy("auto", defenses=[*defenses]) if defenses else "auto"
    fit([monitor], root, module=module, strategy=strategy, n=4)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(part, name) for part in module.modules() for name in hooks)
    return monitor


@pytest.mark.parametrize("layer", [0, 1])
def test_local_is_before_and_shared_behind_a_defence(tmp_path, layer):
    plain, attack, above = Recording(layer), Recording(layer), Recording(2)
    inverted(tmp_path, plain)
    inverted(tmp_path, attack, Shift(layer), stages=("local", "shared"))
    local, shared = (hidden for hidden, *_ in attack.inputs)
    assert torch.equal(local, plain.inputs[0][0])
    assert torch.equal(shared, local + 1)
    inverted(tmp_path, above, Shift(layer))
    assert len(above.inputs) == 1
    with pytest.raises(ValueError, match="leave 'local' out"):
        inverted(tmp_path, Recording(2), Shift(layer), stages=("local",))


def test_what_no_defence_rewrites_is_attacked_once_for_both_stages(tmp_path):
    attack = Recording()
    monitor = inverted(tmp_path, attack, Shift(2), stages=("local", "shared", "aggregate"))
    assert len(attack.inputs) == 1
    assert monitor.latest[ACCURACY] == monitor.latest["leakage_local/recording/token_accuracy"]
    assert not any("leakage_aggregate/" in n for n in [*monitor.latest, *monitor.metric_names()])


class Sizes(L.Callback):
    def __init__(self):
        self.sizes = []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.sizes.append(len(batch["input_ids"]))


def test_poisson_batches_of_dpsgd_are_read_and_its_empty_ones_passed_over(tmp_path):
    def run(callbacks, root):
        strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=0.5, seed=3)])
        module = CausalLMModule(tiny_gpt2(dropout=0.0, tied=False).train(), optimizer="adamw")
        loader = random_token_loader(6, batch_size=1)
        return fit(callbacks, root, module=module, strategy=strategy, loader=loader)

    attacks, stages = [exact(1), FCMembership(1), Probe()], ("local", "shared")
    monitor = LeakageMonitor(
        attacks, every_n_steps=1, settings=WatchSettings(stages=stages), folder=tmp_path
    )
    sizes = Sizes()
    assert_same(run([], tmp_path / "plain"), run([sizes, monitor], tmp_path / "watched"))
    assert monitor.failures == 0
    assert 0 in sizes.sizes
    lines = lines_of(tmp_path, "prefix_inversion")
    for stage in stages:
        steps = {line["step"]: line["n"] for line in lines if line["stage"] == stage}
        assert steps == {step: min(n, 4) for step, n in enumerate(sizes.sizes) if n}
    assert all(line["metrics"]["token_accuracy"]["value"] == 1 for line in lines)


def opened(*attacks, stages=("shared",), client="rank"):
    """An engine whose channels are opened on a run of several processes."""
    model = tiny_gpt2()
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    run = LoopRun(loop, "Watch", find_anatomy(model), client, frozenset())
    run.processes = 2
    engine = Engine(selected(attacks), Options(stages=known_stages(stages)))
    engine.open(run)


def test_each_rank_of_ddp_may_be_a_client_and_nothing_else():
    for stages in (("shared",), ("local", "shared")):
        opened(FCMembership(1), stages=stages)
    with pytest.raises(ValueError, match=r"'fc_membership' .* use DDP with client='rank'"):
        opened(Probe(), FCMembership(1), client="world")
    with pytest.raises(ValueError, match="leave 'aggregate' out of stages"):
        opened(FCMembership(1), stages=("shared", "aggregate"))
    # Attacks on words are not concerned.
    opened(Probe(), client="world")
    opened(Probe(), stages=("shared", "aggregate"))


def seeded(seed):
    generator = torch.Generator().manual_seed(seed)
    return PublicText(torch.randint(3, 97, (60, 12), generator=generator))


class RestoredAttention(AttentionMembership):
    """Its state holds the calibration."""

    restores_fully = True

    def state_dict(self):
        return vars(self._whitening)

    def load_state_dict(self, state):
        self._whitening, self._level = Whitening(**state), 0


def wide_attention(text, **settings):
    return RestoredAttention(1, text, batch=8, **settings)


def test_a_resumed_calibration_is_of_the_same_text_and_refresh_or_made_again(tmp_path, monkeypatch):
    prepared = []
    plain = AttentionMembership.prepare
    monkeypatch.setattr(
        AttentionMembership, "prepare", lambda self, a: (prepared.append(self), plain(self, a))
    )
    first = wide_attention(seeded(0))
    state = watched(tmp_path / "first", first, n=8).state_dict()
    assert prepared == [first]
    for case, attack, again in (
        ("same", wide_attention(seeded(0)), False),
        ("text", wide_attention(seeded(1)), True),
        ("refresh", wide_attention(seeded(0)), True),
    ):
        prepared.clear()
        if case == "refresh":
            attack.refresh_every = 100
        watched(tmp_path / case, attack, n=8, state=state)
        assert prepared == ([attack] if again else [])
        means = [one.state_dict()["mean"] for one in (first, attack)]
        assert torch.equal(*means) is (case != "text")


# Attacks behind compression and noise: what is hidden is unknown or low, never certified.


METHODS = get_args(Method)
LENGTH = 10
STAGES = ("local", "shared", "aggregate")


def module() -> CausalLMModule:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    with own_rng(1):
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
        return CausalLMModule(transformers.LlamaForCausalLM(config).train(), optimizer="sgd")


def fit_under(root: Path, callbacks: Any, *defenses: Any, n: int = 1) -> Any:
    data = random_token_loader(n=n, batch_size=1, length=LENGTH, vocab=VOCABULARY)
    strategy = DefendedStrategy("auto", [*defenses])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(callbacks, root, module=module(), loader=data, strategy=strategy)


def compression_watched(
    root: Path, attacks: list[Any], *defenses: Any, n: int = 1, **settings: Any
) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, folder=root, **grouped(settings))
    fit_under(root, [monitor], *defenses, n=n)
    return monitor


def lossy(method: Method) -> GradientCompression:
    return GradientCompression(method, rank=8, error_feedback=False)


@pytest.mark.parametrize("method", METHODS)
def test_an_attack_reads_compressed_gradients_or_is_unknown(tmp_path: Path, method: Method) -> None:
    public = [[5 + (7 * i + 3 * j) % 290 for j in range(LENGTH)] for i in range(12)]
    words = [BagOfWords(), SubspaceWords(capacity_seconds=0)]
    members = [SubspaceMembership(public), GradientMembership(public, public_rows=6, controls=4)]
    games = Games(targets=4)
    monitor = compression_watched(
        tmp_path, [*words, *members], lossy(method), n=2, stages=STAGES[:2], games=games
    )
    assert monitor.latest["leakage/gradient_membership/auc"] == 1
    assert monitor.latest["leakage/subspace_membership/auc"] > 0.9
    for attack in words:
        assert monitor.latest[f"leakage_local/{attack.name}/f1"] > 0.5
        value = monitor.latest[f"leakage/{attack.name}/f1"]
        if method in attack.reads_compressed:
            assert value > 0
        else:
            assert math.isnan(value)
    if method in SubspaceWords.reads_compressed:
        assert monitor.latest["leakage/subspace_words/f1"] == 1
        if method != "low_rank":  # whose rows are combinations of the rows that there were
            assert monitor.latest["leakage/subspace_words/certified"] == 0
    why = {line["stage"]: line["unknown"] for line in lines_of(tmp_path, "bag_of_words")}
    assert f"compressed by '{method}'" in why["shared"]
    assert why["local"] is None


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(SubspaceTexts.reads_compressed))
def test_texts_are_read_through_it(tmp_path: Path, method: Method) -> None:
    monitor = compression_watched(tmp_path, [SubspaceTexts(budget_seconds=20)], lossy(method))
    assert monitor.latest["leakage/subspace_texts/token_accuracy"] == 1
    assert monitor.latest["leakage/subspace_texts/exact_sentences"] == 1


@pytest.mark.parametrize("method", ["topk", "low_rank"])  # whose memory is a factor too
def test_with_error_feedback_what_goes_in_is_read_with_the_noise_before(
    tmp_path: Path, method: Method
) -> None:
    probe = Probe()
    noise, compression = GradientNoise(None, 1e-6, seed=3), GradientCompression(method, share=0.01)
    attacks = [probe, SubspaceWords(capacity_seconds=0)]
    monitor = compression_watched(tmp_path / "a", attacks, noise, compression, stages=STAGES)
    plain = Probe()
    compression_watched(tmp_path / "b", [plain], GradientNoise(None, 1e-6, seed=3))
    assert torch.equal(plain.at("shared")[0], probe.at("shared")[0])
    assert not torch.equal(probe.at("local")[0], probe.at("shared")[0])
    assert "leakage_aggregate/subspace_words/f1" in monitor.latest
    assert compression.memory


def compression_defended(
    root: Path, attacks: Any, *defenses: Any, lora: Any = None, **settings: Any
) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, **grouped(settings))
    module = CausalLMModule(model_of(lora=lora).train(), optimizer="adamw")
    strategy = DefendedStrategy("auto", [*defenses])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([monitor], root, module=module, loader=random_token_loader(**LOADER), strategy=strategy)
    return monitor


class Levels(SubspaceWords):
    """Keeps the standard deviation of the noise that it knows of."""

    needs_control = False  # its runs are counted

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.levels: list[float] = []

    def run(self, view: Any, query: Any = None) -> Any:
        self.levels.append(view.gradients[-1].noise_std)
        return super().run(view, query)


class Mute(GradientNoise):
    name = "mute"

    def noise_std(self, context: Any) -> float:
        raise RuntimeError("private")


class Second(GradientNoise):
    name = "second"


def test_attacks_know_the_noise_of_the_defences_or_are_unknown(tmp_path: Path) -> None:
    attack, stages = Levels(), ("local", "shared", "aggregate")
    noise = (GradientNoise(None, 3e-3), Second(1.0, 4e-3))
    compression_defended(tmp_path / "a", attack, *noise, lora=LORA, stages=stages)
    assert attack.levels == pytest.approx([0.0, 5e-3, 5e-3] * 4)
    monitor = compression_defended(
        tmp_path / "b", SubspaceWords(capacity_seconds=0), Mute(None, 1e-3), lora=LORA
    )
    assert (monitor.looks, monitor.failures) == (4, 3)  # a LoRA's first step has no result yet


# A user-defined family of leak: `text_counts.py` has its attack and channel in one file.


RIGHT = "leakage/text_count/right"


def test_a_family_of_ones_own_is_logged_revealed_and_reported(tmp_path: Path) -> None:
    settings = WatchSettings(stages=("local", "shared"), reveal=True)
    attacks = [Probe(), TextCount(1e9), FCMembership(1)]
    monitor = LeakageMonitor(attacks, every_n_steps=2, settings=settings)
    fit([monitor], tmp_path, logger=TensorBoardLogger(tmp_path), n=32)
    assert monitor.failures == 0
    assert monitor.latest[RIGHT] == 0
    assert monitor.latest["leakage_local/text_count/off"] == 4
    assert f"{RIGHT}_low" in monitor.metric_names()
    lines = lines_of(tmp_path, "text_count")
    assert [(line["step"], line["stage"]) for line in lines][:2] == [(0, "local"), (0, "shared")]
    assert lines[-1]["metrics"]["right"]["value"] == 0
    [board] = tmp_path.rglob("events.out*")
    events = EventAccumulator(str(board)).Reload()
    n_shared = sum(line["stage"] == "shared" for line in lines)
    assert [e.value for e in events.Scalars(RIGHT)] == [0.0] * n_shared
    [channel] = {c for c in monitor.engine.series.values() if isinstance(c, CountsChannel)}
    titles = [(step, f"== step {step}, leakage/text_count") for step in (0, 2, 4, 6)]
    assert [one for one in channel.revealed if "_local" not in one[1]] == titles
    report = findings(read([tmp_path]))
    attacks = report.runs[0].attacks
    [attack] = [a for a in attacks if (a.name, a.stage) == ("text_count", "shared")]
    assert (attack.family.name, attack.headline, attack.mean) == ("counts", "right", 0.0)
    assert report.verdict.worst["counts"] == 0.0
    [reading] = [r for r in report.overviews[0].readings if r.family == "counts"]
    assert reading.title == "Counts of texts"
    assert reading.question == "How many texts are in a batch?"
    assert (reading.answer, reading.measure, reading.verdict) == ("0.00", "right", "little")
    assert "The share of looks at which the count was right." in page(report)


PAD = PadRight(0)


def canary_set(texts: list[Tensor]) -> CanarySet:
    digests = [bytes([i]) * 32 for i in range(len(texts))]
    return CanarySet(texts, InclusionRecord(seed_key(0), tuple(digests)))


class Weights(L.Callback):
    """Copies of the model before training and after every step."""

    def __init__(self) -> None:
        self.kept: list[nn.Module] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept.append(copy.deepcopy(module.model))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.kept.append(copy.deepcopy(module.model))


def scorer_fit(
    model: nn.Module,
    texts: list[Tensor],
    callbacks: list[L.Callback],
    folder: Path,
    steps: int = 3,
    resume: str | None = None,
    **settings: Any,
) -> L.Trainer:
    trainer = L.Trainer(max_steps=steps, callbacks=callbacks, default_root_dir=folder, **QUIET)
    data = [torch.arange(3, 9) + i for i in range(10)] + texts[::2]
    loader = DataLoader(data, batch_size=5, collate_fn=PAD)
    trainer.fit(CausalLM(model, lr=0.3, **settings), loader, ckpt_path=resume)
    return trainer


def mean_loss(model: nn.Module, text: Tensor) -> Tensor:
    logits = model.eval()(input_ids=text[None]).logits[0, :-1]
    return F.cross_entropy(logits, text[1:])


def scorer_texts_of(model: nn.Module) -> list[Tensor]:
    """Of two lengths, so that some are padded."""
    texts = new_token_canaries(model, 6, length=4, row_norm=0.5)
    return [text if i % 2 else torch.cat([text, text[1:3]]) for i, text in enumerate(texts)]


def test_a_score_is_how_far_the_texts_loss_fell(tmp_path: Path) -> None:
    model = tiny_llama()
    texts, weights = scorer_texts_of(model), Weights()
    scorer = CanaryScorer(canary_set(texts))
    scorer_fit(model, texts, [scorer, weights], tmp_path)
    with torch.no_grad():
        fell = [mean_loss(weights.kept[0], t) - mean_loss(weights.kept[-1], t) for t in texts]
    torch.testing.assert_close(scorer.scores(), torch.stack(fell).double(), rtol=1e-4, atol=1e-6)
    assert float(scorer.scores().abs().min()) > 1e-4


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    runs = []
    for callbacks in (0, 1):
        model = tiny_gpt2(dropout=0.1).train()
        texts = scorer_texts_of(model)
        scorers = [CanaryScorer(canary_set(texts)) for _ in range(callbacks)]
        torch.manual_seed(3)
        trainer = scorer_fit(model, texts, [*scorers, Weights()], tmp_path)
        runs.append([*model.state_dict().values(), torch.rand(2)])
        assert trainer.state.finished
        assert model.training
    assert all(map(torch.equal, *runs))


def test_a_resumed_run_goes_on_with_its_scores(tmp_path: Path) -> None:
    def run(steps: int, resume: str | None = None) -> tuple[CanaryScorer, L.Trainer]:
        model = tiny_llama()
        texts = scorer_texts_of(model)
        scorer = CanaryScorer(canary_set(texts))
        return scorer, scorer_fit(model, texts, [scorer], tmp_path, steps, resume)

    class Saver(L.Callback):  # within an epoch, before the scores are added up
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    model = tiny_llama()
    texts = scorer_texts_of(model)
    scorer_fit(model, texts, [CanaryScorer(canary_set(texts)), Saver()], tmp_path, 2)
    trainer = run(3)[1]
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for path, steps in ((tmp_path / "end.ckpt", 3), (tmp_path / "within.ckpt", 2)):
        whole = run(steps)[0].scores()
        torch.testing.assert_close(run(steps, str(path))[0].scores(), whole)  # no step is left
        again, _ = run(6, str(path))
        content = torch.load(path, weights_only=True)
        del content["callbacks"]
        torch.save(content, path)
        rest, _ = run(6, str(path))
        assert float(rest.scores().abs().max()) > 1e-4
        torch.testing.assert_close(again.scores(), whole + rest.scores())
    other_canaries = canary_set([torch.tensor([60 + i, 5]) for i in range(6)])
    with pytest.raises(ValueError, match="is of other canaries"):
        CanaryScorer(
            CanarySet(other_canaries.token_ids, InclusionRecord(seed_key(0), (b"x" * 32,) * 6))
        ).load_state_dict(again.state_dict())


def test_canaries_that_cannot_be_scored_so_are_refused(tmp_path: Path) -> None:
    canaries = canary_set(scorer_texts_of(tiny_llama()))
    with pytest.raises(ValueError, match="has 97 rows: train the model of new_token_canaries"):
        scorer_fit(tiny_llama(), [], [CanaryScorer(canaries)], tmp_path)
    with pytest.raises(ValueError, match="not a masked"):
        scorer_fit(tiny_bert_mlm(), [], [CanaryScorer(canaries)], tmp_path)


# Promise 1: with any monitor on, training is bit-identical.


PUBLIC = [[(7 * i + 3 * j) % 94 + 3 for j in range(20)] for i in range(12)]


def watchers(*more):
    """Return gates and a monitor with attacks on words and members, and ``more``."""
    attacks = [
        FlatChat(PublicText(PUBLIC), shapes=((1, 8), (2, 8), (4, 12))), Probe(),
        FCMembership(layer=1, name="fc_1"), *more,
    ]  # fmt: skip
    options = {"stages": ("local", "shared"), "reveal": True, "texts": 1}
    monitor = monitor_with(attacks, every_n_steps=4, **options)
    gates = [
        RiskGate(name, at_most=1.0, strict=False)
        for name in ("leakage/flatchat/f1", "leakage/fc_1/auc")
    ]
    return [*gates, monitor], monitor


def adapted():
    config = LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, lora_dropout=0.1)
    with own_rng(1):
        model = get_peft_model(tiny_gpt2().train(), config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return CausalLMModule(model, optimizer="adamw")


def checkpointing():
    model = tiny_gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return CausalLMModule(model, optimizer="adamw")


CASES = {
    "fp32 with dropout": ({}, None),
    "LoRA, accumulation, clipping and gradient checkpointing": (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        adapted,
    ),
    "gradient noise": (
        {"strategy": lambda: DefendedStrategy("auto", [GradientNoise(1.0, 0.01, seed=4)])},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_with_monitor_and_gate(case, tmp_path):
    settings, make = CASES[case]

    def run(name, callbacks):
        given = {key: value() if callable(value) else value for key, value in settings.items()}
        return fit(callbacks, tmp_path / name, module=make and make(), **given)

    plain = Kept.of(run("plain", []))
    attention = AttentionMembership(1, PublicText(PUBLIC * 6), batch=8)
    more = [attention] if case == "fp32 with dropout" else []
    callbacks, monitor = watchers(
        FCMembership(layer=2, granularity="full", name="fc_2"),
        PrefixInversion(1, None, language_model=False),
        EmbeddingDescent(0, steps=12, name="descent_0"),
        EmbeddingDescent(2, steps=6, sweeps=1, name="descent_2"),
        *more,
    )
    watched = run("watched", callbacks)
    assert_same(plain, watched)
    assert monitor.looks >= 2
    # Under noise FlatChat names the whole vocabulary, which is no result, at two of three looks.
    assert monitor.failures == (2 if "noise" in case else 0)
    if "noise" not in case:
        assert monitor.latest["leakage/fc_1/auc"] > 0.9
    if more:
        assert monitor.latest["leakage/attention_membership/auc"] > 0.6
    for name in ("prefix_inversion", "descent_0"):
        assert monitor.latest[f"leakage/{name}/token_accuracy"] > 0.4


@pytest.mark.parametrize("make", [lambda: None, checkpointing])
def test_inversion_neither_disturbs_noised_activations_nor_their_noise(make, tmp_path, monkeypatch):
    monkeypatch.setattr("os.urandom", lambda n: bytes(range(n)))

    def run(name, callbacks):
        strategy = DefendedStrategy("auto", defenses=[ActivationNoise(1, sigma=0.05)])
        return fit(callbacks, tmp_path / name, module=make(), strategy=strategy, n=16)

    plain = run("plain", [])
    attacks = [EmbeddingDescent(1, steps=20), PrefixInversion(1, None, language_model=False)]
    settings = WatchSettings(stages=("local", "shared"), texts=2)
    monitor = LeakageMonitor(attacks, every_n_steps=4, settings=settings)
    assert_same(plain, run("watched", [monitor]))
    assert monitor.failures == 0
    name = "embedding_descent/token_accuracy"
    assert monitor.latest[f"leakage_local/{name}"] > monitor.latest[f"leakage/{name}"]


def test_a_resumed_run_is_bit_identical_and_its_games_go_on(tmp_path):
    monitors = []

    def resumed(root, *, is_watched):
        """Train one epoch and save; then resume in a new Trainer with new callbacks."""

        def callbacks():
            listed, monitor = watchers() if is_watched else ([], None)
            monitors.append(monitor)
            return listed

        saver = ModelCheckpoint(root / "ckpt", save_last=True)
        fit([*callbacks(), saver], root / "first", enable_checkpointing=True)
        state = torch.load(root / "ckpt" / "last.ckpt", weights_only=True)  # nothing is pickled
        path = root / "ckpt" / "last.ckpt"
        return fit(callbacks(), root / "second", max_epochs=2, ckpt_path=path), state

    plain, _ = resumed(tmp_path / "plain", is_watched=False)
    watched, state = resumed(tmp_path / "watched", is_watched=True)
    assert_same(plain, watched)
    first, second = monitors[2:]
    assert (second.failures, second.last_step) == (0, 12)
    assert second.looks > first.looks > 2
    assert any(name.startswith("LeakageMonitor") for name in state["callbacks"])
    before, after = (m.engine.state_dict()["games of leakage/fc_1"] for m in monitors[2:])
    assert all(map(torch.equal, before, after))
    assert len(after) > len(before) > 0


def test_between_looks_nothing_of_a_look_is_kept_alive(tmp_path):
    references, alive = [], []

    class Weak(Probe):
        def run(self, view, query=None):
            guess = super().run(view, query)
            references.extend(weakref.ref(x) for x in (view.gradients[-1], guess, guess.scores))
            return guess

    class Counts(L.Callback):
        def on_train_batch_start(self, *args):
            alive.append(sum(reference() is not None for reference in references))

    monitor = LeakageMonitor(
        Weak(), every_n_steps=1, settings=WatchSettings(stages=("local", "shared", "aggregate"))
    )
    fit([Counts(), monitor], tmp_path)
    assert len(references) == 8 * 3  # without a defence one gradient stands for all three stages
    assert alive == [0] * 8

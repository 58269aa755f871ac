"""Attacks that choose themselves."""

import logging
import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedleak.attacks import AlignedFlatChat, SubspaceWords
from lightning_fedleak.attacks.base import DISHONEST_SERVER, HONEST_BUT_CURIOUS
from lightning_fedleak.attacks.words import aligned_readout, aligned_updates
from lightning_fedleak.engine import log
from lightning_fedleak.trainers import Threshold
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, t5
from tests.engine.test_row_spaces import LOADER, LORA, model_of
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import assert_same_training, train

WORST = "leakage/worst/words"
TEXT = torch.randint(3, VOCABULARY, (60, 12), generator=torch.Generator().manual_seed(5)).tolist()
FEW = LOADER | {"n": 4}
"""Two steps: the second has texts of an earlier batch, and a B that is not zero."""


@pytest.fixture(autouse=True)
def _few_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_updates, "_UPDATES", 4)
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)


still_model = partial(model_of, dropout=False)


def configure(watch: Any) -> None:
    """Let calibrations be short."""
    for attack in watch.engine.selection.attacks:
        if isinstance(attack, AlignedFlatChat):
            attack.calibration_tokens, attack.lengths = 200, (8, 12)
        if isinstance(attack, SubspaceWords):
            attack.capacity_seconds = 0.0


def auto(folder: Path | None, model: nn.Module, attacks: Any = "auto", **settings: Any) -> Any:
    """Return a loop of four steps, in which attacks choose themselves."""
    text = {"public_text": TEXT} if attacks == "auto" else {}
    given = {"optimizer": "adamw", "batches": random_token_loader(**LOADER), **text} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(folder, attacks, model, configure=configure, **given)


def attacks_in(values: dict[str, float]) -> set[str]:
    names = {name.split("/")[1] for name in values if name.startswith("leakage/")}
    return names - {"step"}


def test_a_whole_model_is_attacked_by_all_that_fit_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        watch = auto(tmp_path, still_model(gpt2), batches=random_token_loader(**FEW)).watch
    words, members = ("aligned_flatchat", "subspace_words"), ("gradient_membership",)
    assert attacks_in(watch.latest) == {*words, *members, "worst"}
    for family, names, rate in (("words", words, "f1"), ("membership", members, "auc")):
        values = [watch.latest[f"leakage/{name}/{rate}"] for name in names]
        assert watch.latest[f"leakage/worst/{family}"] == max(values)
    absent = {line["attack"] for line in watch.lines() if "not played" in (line["unknown"] or "")}
    of_weights = {
        "combined",
        "extraction",
        "loss_ratio_short",
        "prompt_ratio",
        "preference_margin",
    }  # nobody is left out
    assert absent == {"bias_sign", "bag_of_words", "subspace_membership"} | of_weights
    assert (
        "  Not possible or needed here: bias_sign, bag_of_words, subspace_membership. Why: run.json"
        in caplog.text
    )
    assert "Shared, tested by no attack: " in caplog.text


def test_under_lora_the_first_block_is_attacked_and_not_the_head(tmp_path: Path) -> None:
    gate = Threshold(WORST, at_most=0.5)
    training = auto(tmp_path, still_model(lora=LORA), gates=[gate])
    played = {"subspace_words", "gradient_membership", "worst"}
    assert attacks_in(training.watch.latest) == played
    assert training.steps == 2, "the first step, before which B was zero, is no breach"
    assert gate.fired is not None
    assert gate.fired.value == 1
    assert "leakage/worst/words = 1.000, of leakage/subspace_words/f1" in str(gate.fired)


def test_where_nothing_is_read_yet_a_strict_gate_decides_and_a_lax_one_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def biases() -> nn.Module:
        model = still_model(gpt2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model

    for metric, strict, words in (
        (WORST, False, r"no attack on words .* parameters are"),
        (WORST, True, r"no attack on words .* parameters are"),
        ("leakage/subspace_words/f1", True, "'subspace_words' is not run here"),
    ):
        gate = Threshold(metric, at_most=0.5, strict=strict)
        training = auto(tmp_path / "gate", biases(), gates=[gate], assume=HONEST_BUT_CURIOUS)
        assert training.steps == (1 if strict else 4)
        assert (gate.fired is not None) is strict
        if gate.fired is not None:
            assert math.isnan(gate.fired.value)
            assert re.search(words, str(gate.fired))
    gates = [Threshold("leakage/bias_sign/f1", at_most=0.5)]
    with pytest.raises(ValueError, match=r"bias_sign.*That is 'unknown', not 'safe'"):
        auto(tmp_path / "never", still_model(gpt2), gates=gates)  # whose head has no bias
    with caplog.at_level(logging.INFO):
        training = auto(tmp_path / "free", biases(), assume=HONEST_BUT_CURIOUS)
    assert training.steps == 4
    assert "Nothing is tested in this run. That is 'unknown', not 'safe'." in caplog.text
    assert attacks_in(training.watch.latest) == set()
    assert all(line["unknown"] for line in training.watch.lines())


def test_a_frozen_head_alone_is_no_pass_for_a_gate(tmp_path: Path) -> None:
    head = AlignedFlatChat(TEXT, calibration_tokens=200)
    gate = Threshold("leakage/aligned_flatchat/f1", at_most=0.5)
    training = auto(tmp_path, still_model(lora=LORA), head, gates=[gate])
    assert training.steps == 1
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    both = [head, SubspaceWords(capacity_seconds=0)]
    training = auto(tmp_path, still_model(lora=LORA), both, gates=[gate])
    assert training.steps == 4, "another attack reads what is shared, and is gated or not"


def test_what_a_gate_is_told_to_watch_is_not_refused_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(log, "rank_zero_warn", warned.append)

    def gated(metric: str) -> Any:
        gates, few = [Threshold(metric, 1.0)], random_token_loader(**FEW)
        return auto(tmp_path, still_model(lora=LORA), gates=gates, batches=few)

    with pytest.raises(ValueError, match="does not log") as refusal:
        gated("leakage/flatchat/f1")
    assert "Did you mean" not in str(refusal.value)
    assert f"the highest: {WORST}" in str(refusal.value)
    assert gated("leakage/aligned_flatchat/f1").steps == 1
    [said] = [text for text in warned if "not 'safe'" in text]
    assert re.search(f"not trained, and so not shared.*: watch '{WORST}'", said)
    warned.clear()
    assert gated(WORST).steps == 2
    assert not any("not 'safe'" in text for text in warned)


def test_what_is_unfrozen_on_the_way_is_attacked_from_then_on(tmp_path: Path) -> None:
    model = still_model()

    def batches() -> Any:
        for step, batch in enumerate(random_token_loader(**LOADER)):
            model.lm_head.weight.requires_grad_(step >= 2)
            yield batch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for part in (model.lm_head, model.model.embed_tokens):
        part.weight.requires_grad_(False)
    gate = Threshold("leakage/aligned_flatchat/f1", at_most=0.5, action="warn", strict=False)
    watch = auto(tmp_path, model, optimizers=[optimizer], batches=batches(), gates=[gate]).watch
    assert gate.fired is not None
    assert gate.fired.step == 2, "it waited for what it watches"
    steps_of = [line["step"] for line in watch.lines("aligned_flatchat")]
    assert steps_of == [0, 2, 3], "not played, said once; then looked at"


def test_a_masked_model_needs_text_for_what_calibrates(tmp_path: Path) -> None:
    watch = auto(tmp_path, still_model(bert), public_text=None).watch
    assert "pass the masked language model's tokenizer=" in str(watch.lines("aligned_flatchat"))
    assert "tokenizer=" in watch.engine.results.untested["words"]
    assert watch.latest[WORST] == 1
    assert {"subspace_words", "bias_sign"} <= attacks_in(watch.latest)


def test_an_encoder_decoder_is_calibrated_on_frequent_tokens(tmp_path: Path) -> None:
    few = {"batches": random_token_loader(**FEW), "optimizer": "sgd"}
    watch = auto(tmp_path, still_model(t5), public_text=None, **few).watch
    assert not watch.engine.results.untested.get("words")
    assert watch.latest["leakage/aligned_flatchat/f1"] >= 0.95
    assert watch.latest[WORST] >= 0.95


def test_a_dishonest_server_adds_its_layers(tmp_path: Path) -> None:
    batches = random_token_loader(**FEW)
    watch = auto(tmp_path, still_model(gpt2), assume=DISHONEST_SERVER, batches=batches).watch
    names = {attack.name for attack in watch.engine.selection.attacks}
    assert {"fc_membership", "attention_membership"} <= names
    assert "fc_membership" in attacks_in(watch.latest)


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_training_is_bit_identical_and_goes_on_where_it_was(lora: Any, tmp_path: Path) -> None:
    given = {"stages": ("local", "shared", "aggregate"), "batches": random_token_loader(**FEW)}
    training = auto(tmp_path / "a", still_model(lora=lora), **given)
    assert_same_training(auto(None, still_model(lora=lora), batches=given["batches"]), training)
    state = training.watch.state_dict()
    resumed = auto(tmp_path / "b", still_model(lora=lora), state=state, **given).watch
    assert resumed.looks == 2 * training.watch.looks
    assert resumed.latest[WORST] == 1


# ---- models that are not Hugging Face's ---------------------------------------------------------


class Decoder(nn.Module):
    """With a causal mask, and arguments of names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(12, 16)
        layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        states = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        for block in self.blocks:
            states = block(states, src_mask=mask)
        return self.head(states)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Takes ``input_ids``, as attacks that run the model call it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids)  # type: ignore[no-any-return]


def next_token_loss(model: Any, batch: Any) -> torch.Tensor:
    ids = batch["input_ids"]
    logits = model(ids)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


class Taught(Decoder):
    """Takes more than ids."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"])


def taught_loss(model: Any, batch: Any) -> torch.Tensor:
    return next_token_loss(lambda _: model(batch), batch)


def test_a_model_of_a_users_own_is_attacked_by_what_needs_no_text_of_it(tmp_path: Path) -> None:
    watch = auto(tmp_path, Taught(), loss=taught_loss).watch
    assert attacks_in(watch.latest) == {"bias_sign", "bag_of_words", "worst"}
    assert watch.latest[WORST] == 1
    assert "Taught.forward takes no input_ids" in str(watch.lines("aligned_flatchat"))
    with pytest.raises(ValueError, match=r"'aligned_flatchat' runs the model.*Taught\.forw"):
        auto(tmp_path, Taught(), AlignedFlatChat(TEXT), loss=taught_loss)


@pytest.mark.parametrize("wrap", [Adapted, lambda net: net], ids=["input_ids", "idx"])
def test_with_a_forward_of_ids_a_model_of_a_users_own_is_attacked_by_all(
    wrap: Any, tmp_path: Path
) -> None:
    batches = random_token_loader(**FEW)
    training = auto(tmp_path, wrap(Decoder()), loss=next_token_loss, batches=batches)
    assert {"aligned_flatchat", "gradient_membership"} <= attacks_in(training.watch.latest)
    assert training.watch.latest["leakage/gradient_membership/auc"] == 1
    assert training.watch.failures == 0

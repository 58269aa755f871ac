"""Attacks that choose themselves."""

from __future__ import annotations

import json
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning_utilities.core import rank_zero
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fedleak import GradientNoise, LeakageMonitor, RiskGate
from lightning_fedleak.attacks import AlignedFlatChat, PublicText, SubspaceWords
from lightning_fedleak.engine.choice import Row, table
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import DISHONEST_SERVER, HONEST_BUT_CURIOUS
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama, t5
from tests.callbacks.runs import assert_same, fit, monitor_with
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_bert_classifier

WORST = "leakage/worst/words"
TEXT = torch.randint(
    3, VOCABULARY, (60, 12), generator=torch.Generator().manual_seed(5)
)  # as the loader's


def module(family: Any = llama, lora: bool = False, optimizer: str = "adamw") -> CausalLMModule:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: nn.Module = family()
        if lora:
            config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
            model = get_peft_model(model, config)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return CausalLMModule(model.train(), optimizer=optimizer)  # type: ignore[arg-type]


def loader() -> Any:
    return random_token_loader(n=8, batch_size=2, length=10, vocab=VOCABULARY)


def auto(**settings: Any) -> LeakageMonitor:
    given = {"every_n_steps": 1, "public_text": TEXT.tolist()} | settings
    monitor = monitor_with(**given)
    for attack in monitor.attacks:
        if isinstance(attack, AlignedFlatChat):
            attack.calibration_tokens, attack.lengths = 200, (8, 12)
        if isinstance(attack, SubspaceWords):
            attack.capacity_seconds = 0.0
    return monitor


def run(
    root: Path, monitor: LeakageMonitor, made: CausalLMModule, *more: L.Callback, **settings: Any
) -> L.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"loader": loader()} | settings
        return fit([monitor, *more], root, module=made, **settings)


def lines(root: Path) -> list[dict[str, Any]]:
    (path,) = root.rglob("leakage.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def attacks_in(values: dict[str, float]) -> set[str]:
    return {name.split("/")[1] for name in values if name.startswith("leakage/")}


def test_a_whole_model_is_read_by_all_that_fit_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto()
    with caplog.at_level(logging.INFO, logger=rank_zero.log.name):
        run(tmp_path, monitor, module(gpt2))
    played = {
        "aligned_flatchat",
        "subspace_words",
        "gradient_membership",
        "subspace_membership",
    }
    assert attacks_in(monitor.latest) == played | {"worst"}
    assert monitor.latest[WORST] == max(
        monitor.latest[f"leakage/{name}/f1"] for name in ("aligned_flatchat", "subspace_words")
    )
    assert monitor.latest["leakage/worst/membership"] == max(
        monitor.latest[f"leakage/{name}/auc"]
        for name in ("gradient_membership", "subspace_membership")
    )
    said = caplog.text
    assert "bias_sign            not played: reads the gradient of the output head's bias" in said
    assert re.search(r"aligned_flatchat {5}played, calibrated in [\d.e-]+ s.*, about [\d.]", said)
    assert "Shared, tested by no attack: " in said
    absent = [line for line in lines(tmp_path) if (line["unknown"] or "").startswith("not played")]
    unread = {"bias_sign", "bag_of_words", "reveal_labels", "combined", "extraction"}
    assert {line["attack"] for line in absent} == unread
    [short] = (r.getMessage() for r in caplog.records if "plays these" in r.getMessage())
    (record,) = tmp_path.rglob("run.jsonl")
    begin = json.loads(record.read_text().splitlines()[0])
    assert f"{len(begin['unread'])} parameters" in short


def test_what_is_said_before_the_first_step_has_at_most_ten_lines() -> None:
    reasons = ["it is tied " * 40, "it is tied " * 40, "the argument mend= would do " * 3]
    names = tuple(f"model.layers.{i}.{part}.weight" for i in (0, 2, 4) for part in "abcdefghijkl")
    for why_not in ([None] * 8, [*reasons, *[None] * 5], [f"{x} " * 50 for x in range(8)]):
        rows = [
            Row(f"attack_{i}", names if why is None else (), why, True, 0.1)
            for i, why in enumerate(why_not)
        ]
        if why_not[-1] is None:
            rows[-1] = replace(rows[-1], never="a round of 10 steps of AdamW divides " * 9)
        said = table(rows, names, writes=True).splitlines()
        assert len(said) <= 10
        assert max(map(len, said)) <= 110
        assert all(any(f"  attack_{i}  " in line for line in said) for i in range(8))
        assert "36 parameters" in said[-1]
    few = table([Row(f"attack_{i}", (), why, True, None) for i, why in enumerate(reasons)], ())
    assert "not played, as attack_0" in few
    assert few.count("the argument mend= would do") == 3, "where there is room, nothing is cut"


def test_what_a_calibration_took_is_said_as_far_as_it_is_known() -> None:
    kinds = [(2.04, 3.1e8), (0.5, float("nan")), (0.5, -4096.0), None]
    rows = [Row(f"a{i}", ("w",), None, True, 0.1, calibration=c) for i, c in enumerate(kinds)]
    said = table(rows, ()).splitlines()[1:]
    took = [", calibrated in 2 s and 310 MB", *[", calibrated in 0.5 s"] * 2, ""]
    ends = [f"played{words}, about 0.1 s a look: reads w" for words in took]
    assert said == [f"  a{i}  {end}" for i, end in enumerate(ends)]


def test_under_lora_the_head_is_not_tested_and_the_first_block_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto()
    gate = RiskGate(WORST, at_most=0.5)
    with caplog.at_level(logging.INFO):
        trainer = run(tmp_path, monitor, module(lora=True), gate)
    assert "aligned_flatchat     not played: what it reads is not trained" in caplog.text
    assert "'subspace_words' has no result at step 0 yet" in caplog.text
    played = {"subspace_words", "gradient_membership", "subspace_membership"}
    assert attacks_in(monitor.latest) == played | {"worst"}
    assert trainer.global_step == 2, "the first step, before which B was zero, is no breach"
    assert gate.fired is not None
    assert gate.fired.value == 1
    assert "leakage/worst/words = 1.000, of leakage/subspace_words/f1" in str(gate.fired)


def test_where_nothing_can_be_read_a_gate_is_refused_and_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def biases() -> CausalLMModule:
        made = module(gpt2)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return made

    for strict in (True, False):
        with pytest.raises(ValueError, match=r"no attack on words .* parameters are\. That is 'un"):
            run(
                tmp_path / "gate",
                auto(assume=HONEST_BUT_CURIOUS),
                biases(),
                RiskGate(WORST, at_most=0.5, strict=strict),
            )
    with pytest.raises(ValueError, match="'subspace_words' is not played in this run"):
        run(
            tmp_path / "one",
            auto(assume=HONEST_BUT_CURIOUS),
            biases(),
            RiskGate("leakage/subspace_words/f1", at_most=0.5),
        )
    for local_steps in (None, 2):
        monitor, folder = (
            auto(assume=HONEST_BUT_CURIOUS, local_steps=local_steps),
            tmp_path / f"free {local_steps}",
        )
        caplog.clear()
        with caplog.at_level(logging.INFO):
            trainer = run(folder, monitor, biases())
        assert trainer.global_step == 4
        assert "Nothing is tested in this run. That is 'unknown', not 'safe'." in caplog.text
        assert attacks_in(monitor.latest) == set()
        assert len(lines(folder)) == len(monitor.attacks)


def test_a_head_alone_that_is_frozen_is_no_pass_for_a_strict_gate(tmp_path: Path) -> None:
    monitor = LeakageMonitor(AlignedFlatChat(TEXT, calibration_tokens=200), every_n_steps=1)
    gate = RiskGate("leakage/aligned_flatchat/f1", at_most=0.5)
    with pytest.raises(ValueError, match="list an attack that reads it"):
        run(tmp_path, monitor, module(lora=True), gate)
    both = LeakageMonitor(
        [AlignedFlatChat(TEXT, calibration_tokens=200), SubspaceWords(capacity_seconds=0)],
        every_n_steps=1,
    )
    trainer = run(tmp_path, both, module(lora=True), gate)
    assert trainer.global_step == 4, "another attack reads what is shared, and is gated or not"


def test_attacks_whose_look_takes_too_long_are_not_played(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto(look_seconds=1e-9)
    with caplog.at_level(logging.INFO):
        run(tmp_path, monitor, module(gpt2))
    assert "aligned_flatchat     not played: a look takes about" in caplog.text
    assert "aligned_flatchat" not in attacks_in(monitor.latest)
    refused = [line for line in lines(tmp_path) if "a look takes" in (line["unknown"] or "")]
    assert {"aligned_flatchat"} <= {line["attack"] for line in refused}


def test_what_is_unfrozen_on_the_way_is_played_from_then_on(tmp_path: Path) -> None:
    class Unfreeze(L.Callback):
        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
        ) -> None:
            if trainer.global_step == 2:
                pl_module.model.lm_head.weight.requires_grad_(True)

    made = module()
    made.model.lm_head.weight.requires_grad_(False)
    made.model.model.embed_tokens.weight.requires_grad_(False)
    made.configure_optimizers = lambda: torch.optim.SGD(made.parameters(), lr=0.01)  # type: ignore[method-assign]
    monitor = auto()
    run(tmp_path, monitor, made, Unfreeze())
    of = [line["step"] for line in lines(tmp_path) if line["attack"] == "aligned_flatchat"]
    assert of == [0, 2, 3], "not played, said once; then looked at"


def test_masked_models_need_text_for_what_calibrates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto(public_text=None)
    with caplog.at_level(logging.INFO):
        run(tmp_path, monitor, module(bert))
    assert "not played: a masked language model needs mask_token_id: pass its tok" in caplog.text
    assert "pass its tokenizer=" in monitor.engine.results.untested["words"]
    assert "Calibrated on text that the model writes itself" not in caplog.text
    assert monitor.latest[WORST] == 1
    assert {"subspace_words", "bias_sign"} <= attacks_in(monitor.latest)


def test_an_encoder_decoder_is_calibrated_on_frequent_tokens(tmp_path: Path) -> None:
    monitor = auto(public_text=None)
    run(tmp_path, monitor, module(t5, optimizer="sgd"))
    assert "words" not in monitor.engine.results.untested
    assert monitor.latest["leakage/aligned_flatchat/f1"] >= 0.95
    assert monitor.latest[WORST] >= 0.95


def test_the_words_that_a_classifier_reads_are_counted(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = CausalLMModule(tiny_bert_classifier(vocab=300, d=64, dropout=0.0), optimizer="adamw")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (8, 8), generator=generator)
    mask = torch.ones(8, dtype=torch.long)
    rows = [{"input_ids": x, "attention_mask": mask, "labels": x[0] % 2} for x in ids]
    monitor = auto(public_text=None)
    run(tmp_path, monitor, made, loader=torch.utils.data.DataLoader(rows, batch_size=2))
    assert monitor.failures == 0
    assert monitor.latest[WORST] == 1


def test_text_that_the_model_writes_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run(tmp_path, auto(public_text=None), module(lora=True))
    assert "Calibrated on text that the model writes itself" in caplog.text


def test_a_dishonest_server_adds_its_layers(tmp_path: Path) -> None:
    monitor = auto(assume=DISHONEST_SERVER)
    names = {attack.name for attack in monitor.attacks}
    assert {"fc_membership", "attention_membership"} <= names
    run(tmp_path, monitor, module(gpt2))
    assert "fc_membership" in attacks_in(monitor.latest)


class FreshOptimizer(L.Callback):
    """Begins each step as a federated client begins a round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for optimizer in trainer.optimizers:
            optimizer.state.clear()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_rounds_are_read_by_what_reads_rounds(
    optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto(local_steps=1)
    for attack in monitor.attacks:
        if isinstance(attack, AlignedFlatChat):
            attack.updates = 4
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = module(gpt2, optimizer=optimizer)
        fit([FreshOptimizer(), monitor], tmp_path, module=made, loader=loader())
    tried = re.search("aligned_flatchat +played, .*about", caplog.text)
    assert tried, "its cost is tried on an update"
    assert not [w for w in caught if "could not be tried" in str(w.message)]
    played = {"aligned_flatchat", "subspace_words", "gradient_membership"}
    assert attacks_in(monitor.latest) == played | {"worst"}
    assert monitor.latest["leakage/worst/membership"] > 0.6


@pytest.mark.parametrize("lora", [False, True])
def test_training_is_bit_identical(lora: bool, tmp_path: Path) -> None:
    noise = {"strategy": DefendedStrategy("auto", [GradientNoise(None, 1e-4, seed=3)])}
    plain = fit([], tmp_path / "plain", module=module(lora=lora), loader=loader(), **noise)
    noise = {"strategy": DefendedStrategy("auto", [GradientNoise(None, 1e-4, seed=3)])}
    monitor = auto(stages=("local", "shared", "aggregate"))
    seen = run(tmp_path / "seen", monitor, module(lora=lora), **noise)
    assert_same(plain, seen)
    assert monitor.looks == 4


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    monitor = auto()
    half = run(tmp_path / "half", monitor, module(lora=True))
    path = tmp_path / "half.ckpt"
    half.save_checkpoint(path)
    again = auto()
    run(tmp_path / "again", again, module(lora=True), max_epochs=2, ckpt_path=str(path))
    assert again.looks == monitor.looks + 4
    assert again.latest[WORST] == 1


def test_its_cadence_is_a_share_of_the_training_time() -> None:
    assert LeakageMonitor().engine.options.cadence.share == 0.005  # type: ignore[attr-defined]
    assert LeakageMonitor(every_n_steps=3).engine.options.cadence.n == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"attacks": "all"}, "attacks must be 'auto' or a list"),
        ({"attacks": [SubspaceWords()], "public_text": ["a"]}, "give it to the attacks"),
        ({"public_text": ["a text"]}, "there is no tokenizer"),
        ({"look_seconds": 0}, "look_seconds must be a number above 0"),
        ({"attacks": [SubspaceWords(name="worst")]}, "'worst', which is the highest"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        monitor_with(**settings)


def test_text_goes_to_every_attack_that_takes_it() -> None:
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    monitor = LeakageMonitor(public_text=["some words here", "and others"], tokenizer=Tokenizer())
    given = [a.public_text for a in monitor.attacks if hasattr(a, "public_text")]
    assert len(given) == 4
    assert all(isinstance(text, PublicText) and len(text) == 2 for text in given)


def test_several_monitors_of_one_family_have_no_worst_together(tmp_path: Path) -> None:
    def one(name: str) -> LeakageMonitor:
        return LeakageMonitor(SubspaceWords(capacity_seconds=0, name=name), every_n_steps=1)

    first, second = one("first"), one("second")
    run(tmp_path, first, module(), second)
    assert WORST not in first.latest | second.latest
    assert first.latest["leakage/first/f1"] == second.latest["leakage/second/f1"] == 1


def test_a_batch_is_not_needed_to_tell_what_a_look_costs() -> None:
    from lightning_fedleak.engine.channels.plans import Plan
    from lightning_fedleak.engine.choice import look_seconds
    from lightning_fedleak.model.anatomy import find_anatomy

    made = module(lora=True)
    anatomy = find_anatomy(made)
    attack = SubspaceWords(capacity_seconds=0)
    attack.prepare(anatomy)
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    plan = Plan(attack, attack.needs(anatomy).gradients, True, None)
    found, failures = look_seconds(anatomy, [plan], 4)
    assert (found.keys(), failures) == ({"subspace_words"}, {})
    assert all(torch.equal(before[n], p) for n, p in made.named_parameters())
    assert all(p.grad is None for p in made.parameters())


# ---- models that are not Hugging Face's ------------------------------------------------------


class Decoder(nn.Module):
    """With a causal mask, and arguments of names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        states = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        for block in self.blocks:
            states = block(states, src_mask=mask)
        return self.head(states)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.tokens(x), mask=mask))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(x))[0])  # type: ignore[no-any-return]


class Plain(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        logits = self.net(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adapted(Plain):
    """With the method that the line-up names."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize("net", [Decoder, Encoder, Recurrent])
def test_a_model_of_ones_own_is_read_by_what_needs_no_text_of_it(
    net: type[nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = auto()
    with caplog.at_level(logging.INFO):
        run(tmp_path, monitor, Plain(net()))
    assert attacks_in(monitor.latest) == {"bias_sign", "bag_of_words", "worst"}
    assert monitor.latest[WORST] == 1
    said = " ".join(caplog.text.split())
    mend = f"{net.__name__}.forward takes no input_ids: give Plain a method forward(self, input_ids"
    assert f"aligned_flatchat not played: runs the model on texts, and {mend})" in said
    assert "subspace_membership not played, as aligned_flatchat" in said
    with pytest.raises(ValueError, match=f"'aligned_flatchat' runs the model.*{net.__name__}.forw"):
        run(tmp_path, LeakageMonitor(AlignedFlatChat(TEXT), every_n_steps=1), Plain(net()))


class Masked(Plain):
    """Its mask has another name, so that padding could not be told."""

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(input_ids)  # type: ignore[no-any-return]


def test_a_mask_of_another_name_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(tmp_path, auto(), Masked(Recurrent()))
    assert "Masked.forward names a mask 'mask': rename it to" in " ".join(caplog.text.split())


class Demanding(Plain):
    """Its forward asks for more than ids."""

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids)  # type: ignore[no-any-return]


def test_a_model_that_fails_is_told_by_the_attack_and_not_by_a_bare_error(tmp_path: Path) -> None:
    said = r"fails on Demanding \(TypeError at .*list the attacks.*LeakageMonitor\("
    with pytest.raises(ValueError, match=said):
        run(tmp_path, auto(), Demanding(Recurrent()))


@pytest.mark.parametrize("net", [Decoder, pytest.param(Recurrent, marks=pytest.mark.slow)])
def test_with_a_forward_of_input_ids_a_model_of_ones_own_is_read_by_all(
    net: type[nn.Module], tmp_path: Path
) -> None:
    watched, monitor = Adapted(net()), auto()
    plain = Plain(net())
    plain.load_state_dict(watched.state_dict())
    alone = fit([], tmp_path / "alone", module=plain, loader=loader())
    assert_same(alone, run(tmp_path / "watched", monitor, watched))
    assert {"aligned_flatchat", "gradient_membership"} <= attacks_in(monitor.latest)
    assert monitor.latest["leakage/gradient_membership/auc"] == 1
    assert monitor.failures == 0

"""Every piece of Python in the README and in docs/ is run, and what it builds is trained.

A piece runs in an empty folder. It gets the names of a reader's own program (``model``,
``datamodule``, ...) from its setup. A Trainer that it makes and does not use is used afterwards; a
monitor, gate or strategy that stands alone gets a Trainer. All of that lasts two steps of a tiny
model. The settings of a piece are run as they are; ``PL_TRAINER_...`` supplies what it leaves open,
and calibrations are short.
"""

import ast
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from lightning_fedleak import (
    DPSGD,
    AlignedFlatChat,
    DefendedStrategy,
    Defense,
    Games,
    GradientNoise,
    LeakageLimitExceeded,
    LeakageMonitor,
    RiskGate,
)
from lightning_fedleak.attacks import GradientMembership
from lightning_fedleak.attacks.words import aligned_readout, aligned_updates
from lightning_fedleak.cli.commands.fit import fit
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.cli.finetuning.module import PadRight, tokenize_rows
from lightning_fedleak.federation import RoundObserver, trained_state
from lightning_fedleak.report import write
from tests.docs.blocks import ROOT, Block, blocks
from tests.federation import rounds as rounds_
from tests.federation.test_observer import texts
from tests.helpers.folders import TEXTS, noisy_release, save_tiny_causal_lm, tiny_tokenizer
from tests.report.lines import begin, dpsgd, end, look, result, spent, written

pytestmark = pytest.mark.slow
Names = dict[str, Any]
SUPPLIED = {
    "ACCELERATOR": "cpu",
    "DEVICES": "1",
    "ENABLE_MODEL_SUMMARY": "False",
    "ENABLE_PROGRESS_BAR": "False",
    "LIMIT_VAL_BATCHES": "0",
    "LOGGER": "False",
    "MAX_STEPS": "2",
}


CALIBRATED_ON = {"calibration_tokens": 600}  # for the sake of time


def language_model() -> LlamaForCausalLM:
    """Of four blocks: snippets look at the third."""
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def data() -> TextDataModule:
    return TextDataModule("letters.txt", tiny_tokenizer(), batch_size=4, length=16)


def fine_tuning() -> Iterator[Names]:
    """A reader's LightningModule and data."""
    names = {"model": CausalLMFineTuning(language_model()), "datamodule": data()}
    names["tokenizer"] = tiny_tokenizer()
    yield names
    train_what_is_built(names)


def transformers() -> Iterator[Names]:
    """A causal language model of Hugging Face, its tokenizer and a text."""
    names = {"model": language_model(), "tokenizer": tiny_tokenizer()}
    yield names
    assert names["trainer"].state.finished


def built() -> Iterator[Names]:
    """Built and not trained: it speaks of several processes, or takes minutes."""
    yield {}


def looked() -> Iterator[Names]:
    """A monitor whose fit is over."""
    pytest.importorskip("pandas")
    monitor = LeakageMonitor(AlignedFlatChat("sampled"), every_n_steps=1)
    L.Trainer(callbacks=[monitor]).fit(CausalLMFineTuning(language_model()), data())
    names: Names = {"monitor": monitor}
    yield names
    assert [*names["f1"].index] == [0, 1]


def own_loop() -> Iterator[Names]:
    """A reader's model, optimizer and batches, in a loop of their own."""
    model, texts = language_model().train(), data()
    texts.setup()
    names: Names = {"model": model, "loader": texts.train_dataloader()}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    yield names
    assert any(name.startswith("leakage/") for name in names["watch"].latest)


def own_accelerate() -> Iterator[Names]:
    """The same, prepared by Accelerate."""
    setting = own_loop()
    names = next(setting)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared = accelerator.prepare(names["model"], names["optimizer"], names["loader"])
    names |= dict(zip(("model", "optimizer", "loader"), prepared, strict=True))
    names["accelerator"] = accelerator
    yield names
    next(setting, None)


def own_trainer() -> Iterator[Names]:
    """A reader's Trainer of transformers."""
    arguments = TrainingArguments(
        "out", max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    ids = torch.randint(3, 384, (480, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(language_model(), arguments, default_data_collator, rows)
    names: Names = {"trainer": trainer}
    yield names
    assert any("leakage/worst/words" in logs for logs in trainer.state.log_history)


def training_step() -> Iterator[Names]:
    """The method of a reader's module, under DP-SGD."""
    names: Names = {}
    yield names
    local = type("Own", (CausalLMFineTuning,), {"training_step": names["training_step"]})
    strategy = DefendedStrategy("auto", [DPSGD(1.0, target_epsilon=8, target_delta=1e-5)])
    L.Trainer(strategy=strategy).fit(local(language_model()), data())


def canaries() -> Iterator[Names]:
    """Data with texts of the reader's own among them."""
    tokenizer = tiny_tokenizer()
    rows = tokenize_rows(TEXTS, tokenizer, 16)
    names = {
        "model": CausalLMFineTuning(language_model(), loss="sample_mean"),
        "train": rows[:-8],
        "canaries": rows[-8:],
        "collate": PadRight(0),
    }
    yield names
    assert names["trainer"].state.finished


def hidden_states() -> Iterator[Names]:
    """Hidden states of some sentences."""
    hidden = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0))
    yield {"hidden": hidden, "attention_mask": torch.ones(6, 5)}


def own_attack() -> Iterator[Names]:
    """An attack of the reader's, played."""
    names: Names = {}
    yield names
    [attack] = [n for n in names.values() if getattr(n, "default_name", None) == "largest_rows"]
    names["monitor"] = LeakageMonitor([attack()])
    names |= {"model": CausalLMFineTuning(language_model()), "datamodule": data()}
    train_what_is_built(names)
    assert 0 < names["monitor"].latest["leakage/largest_rows/f1"] <= 1


def rounds() -> Iterator[Names]:
    """A federation of two clients, and the first one's first round."""
    sent_model = language_model()
    sent, seeds = trained_state(sent_model), count()

    def train(_: object) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        data = rounds_.batches(next(seeds), n=10)
        return rounds_.train(sent_model, data, rounds_.ADAMW), data

    clients = [SimpleNamespace(number=number, train=train) for number in range(2)]
    attack = GradientMembership(texts(), public_rows=8, controls=4)
    games = Games(held_out=texts(5, n=64))
    observer = RoundObserver(
        language_model(), rounds_.ADAMW, local_steps=10, attacks=attack, games=games
    )
    observer.begin(0, sent)
    returned, batches = clients[0].train(sent)
    names: Names = {"torch": torch, "own_model": language_model(), "clients": clients, "rounds": 2}
    names |= {"sent": sent, "observer": observer, "round_": 0}
    names |= {"returned": returned, "batches": batches}
    names["rows_of"] = lambda client: [*torch.arange(1200).view(-1, 1)]
    yield names
    if "client_data" in names:
        assert len(names["client_data"](0).dataset) == 200
        return
    if "agreed" in names:
        assert names["result"].verdict == "nothing found"
        return
    if "leaving" in names:
        assert names["leaving"].state is None
        assert names["leaving"].events
        return
    lines = map(json.loads, Path("fedleak_runs/federation/leakage.jsonl").read_text().splitlines())
    observed = {(line["round"], line["client"]) for line in lines if line["unknown"] is None}
    assert observed == {(round_, number) for round_ in range(2) for number in range(2)}


def whole_clients() -> Iterator[Names]:
    """A server, and clients that return a model of three numbers each."""
    generator = torch.Generator().manual_seed(0)
    names: Names = {"sent": {"weight": torch.zeros(3)}, "all_clients": range(1_000)}
    names["like"] = names["sent"]
    names["train"] = lambda client, sent: {
        "weight": sent["weight"] + torch.randn(3, generator=generator)
    }
    yield names
    assert 7.9 < names["dp"].privacy.epsilon <= 8


def step_in_a_test() -> Iterator[Names]:
    """A reader's test of one step: words that are read fail it, and unknown ones too."""
    names: Names = {}
    yield names
    test, folder = names["test_a_step_shares_few_words"], Path("logs")
    ids = torch.randint(3, 384, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(LeakageLimitExceeded, match=r"leakage/worst/words = 1\.000"):
        test(language_model(), batch, folder)
    names["AT_MOST"] = 1.0
    model = language_model()
    test(model, batch, folder)
    assert all(map(torch.equal, model.parameters(), language_model().parameters()))
    with pytest.raises(LeakageLimitExceeded, match="leakage/worst/words is unknown"):
        test(model, batch | {"labels": torch.full_like(ids, -100)}, folder)  # no gradient


def release_in_a_test() -> Iterator[Names]:
    """A reader's test of trained weights: few texts decide no limit near guessing, which fails."""
    folder = Path("out")
    paths = noisy_release(folder)
    for side, name in (("members", "train"), ("held-out", "left_out")):
        rows = (json.dumps({"text": text}) for text in Path(paths[side]).read_text().splitlines())
        Path(f"{name}.jsonl").write_text("\n".join(rows))
    names: Names = {}
    yield names
    test = names["test_the_release_leaks_little"]
    names["SIDES"] += ["--length", "24"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        with pytest.raises(AssertionError, match="exit status 3"):
            test()
        names["LIMITS"] = ["--at-most", "auc=1"]
        test()
        Path("train.jsonl").unlink()
        with pytest.raises(AssertionError, match="exit status 1"):
            test()


SETUPS: dict[str, Callable[[], Iterator[Names]]] = {
    "": fine_tuning,
    **{
        setup.__name__: setup
        for setup in (
            transformers,
            built,
            looked,
            own_loop,
            own_accelerate,
            own_trainer,
            training_step,
            canaries,
            hidden_states,
            own_attack,
            rounds,
            whole_clients,
            step_in_a_test,
            release_in_a_test,
        )
    },
}


def train_what_is_built(names: Names) -> None:
    """Trains with the Trainer, callbacks, strategy and defences that a piece of code has made.

    What it measured is looked at: a monitor that was trained has looked, and knows something. A
    gate that stands alone gets a monitor to watch and a defence to turn up.
    """

    def made(kind: type) -> list[Any]:
        return [value for value in names.values() if isinstance(value, kind)]

    trainers, callbacks = made(L.Trainer), made(L.Callback)
    strategies, defenses = made(DefendedStrategy), made(Defense)
    if not (trainers or callbacks or strategies or defenses):
        return
    if not trainers:
        if made(RiskGate) and not made(LeakageMonitor):
            callbacks.append(LeakageMonitor(AlignedFlatChat("sampled")))
            defenses = defenses or [GradientNoise(clip=1.0, sigma=0.1)]
        if defenses and not strategies:
            strategies = [DefendedStrategy("auto", defenses)]
        trainers = [L.Trainer(callbacks=callbacks, strategy=[*strategies, "auto"][0])]
    [trainer] = trainers
    if not trainer.state.finished:
        trainer.fit(names["model"], names["datamodule"])
    for monitor in trainer.callbacks:
        if isinstance(monitor, LeakageMonitor):
            values = [v for name, v in monitor.latest.items() if name.startswith("leakage")]
            assert any(not math.isnan(value) for value in values), monitor.latest


def run(block: Block, names: Names) -> None:
    """Runs code; the values of its expressions are kept among ``names``, as no reader could."""
    for number, statement in enumerate(ast.parse(block.text, block.place).body):
        if isinstance(statement, ast.Expr):
            code = compile(ast.Expression(statement.value), block.place, "eval")
            names[f"value {number}"] = eval(code, names)
        else:
            exec(compile(ast.Module([statement], []), block.place, "exec"), names)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder, and a Trainer that has two steps where nothing else is said."""
    monkeypatch.chdir(tmp_path)
    for name, value in SUPPLIED.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    for name, value in CALIBRATED_ON.items():
        assert AlignedFlatChat.__init__.__wrapped__.__kwdefaults__[name] > value
        monkeypatch.setitem(AlignedFlatChat.__init__.__wrapped__.__kwdefaults__, name, value)
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)
    monkeypatch.setattr(aligned_updates, "_UPDATES", 8)
    (tmp_path / "letters.txt").write_text("\n".join(TEXTS * 2))
    return tmp_path


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_python_runs(block, reader):
    if block.skip:
        pytest.skip(block.skip)
    setting = SETUPS[block.setup]()
    names = next(setting)
    run(block, names)
    assert next(setting, None) is None


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_fragments_of_configs_train(block, reader, monkeypatch):
    """Appended to a config, as `fedleak fit` and LightningCLI take them."""
    monkeypatch.setattr("sys.argv", ["fedleak"])
    (reader / "own.yaml").write_text(block.text)
    model = save_tiny_causal_lm(reader / "model")
    configs = [ROOT / "examples" / "finetune.yaml"]
    if "LeakageMonitor" not in block.text:
        configs.append(ROOT / "callbacks" / "leakage.yaml")
    arguments = [a for path in [*configs, "own.yaml"] for a in ("--config", str(path))]
    arguments += [f"--model.model={model}", "--data.text=letters.txt", "--data.batch_size=4"]
    fit(["fit", *arguments, "--data.length=32", "--trainer.max_steps=2"])


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.place)
def test_what_people_know_of_a_run_is_taken(block, reader):
    (reader / "report.toml").write_text(block.text)
    lines = [result(0, f1=(0.5, 0.4, 0.6))]
    private = [begin(defenses=[dpsgd()]), look(0, privacy=[spent(2.5, 1)]), end(1)]
    files = write([written(reader / "run", lines, private)], reader)
    assert "anybody, on the Hugging Face hub" in files[0].read_text()


def test_a_piece_that_is_wrong_is_found(reader):
    names = {"model": CausalLMFineTuning(language_model()), "datamodule": data()}
    with pytest.raises(ImportError):
        run(Block("a:1", "python", "from lightning_fedleak import Mointor"), names)
    wrong = "from lightning_fedleak import *\nmonitor = LeakageMonitor(FCMembership(layer=9))"
    run(Block("a:1", "python", wrong), names)
    with pytest.raises(ValueError, match="layer"):
        train_what_is_built(names)

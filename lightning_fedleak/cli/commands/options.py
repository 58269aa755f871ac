"""The options of ``fedleak``'s subcommands.

Each function adds the options of one command, and its docstring is the command's help. This module
imports nothing that a subcommand needs, so that help is printed quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.studies import demo_settings
from lightning_fedleak.cli.studies.names import GAME_ATTACKS, INVERT_ATTACKS, SWEEP_ATTACKS

DEFENSES = ["none", "freeze:part=head+embeddings", "gradient_noise:clip=1,sigma=1e-4/1e-3/1e-2"]
PHRASES = {
    "sources": "a .jsonl, .json, .csv, .tsv, .parquet or text file, a folder of .txt files, or a "
    "dataset of the hub as name:config:split:column",
    "targets": "modules with a LoRA, with commas between (q_proj,v_proj), or all-linear; by "
    "default PEFT's for this model",
}
"""Help that several options share; docstrings refer to it by a name in braces."""

Add = Callable[..., None]
"""Adds an option, whose help is in the docstring; arguments as ``add_argument`` takes them."""


def _converter(
    kind: Callable[[str], float], holds: Callable[[float], bool], description: str
) -> Callable[[str], float]:
    """Return a function that parses an option's value, and refuses one that does not hold."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not {description}")
        return value

    return convert


_SHARE = _converter(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_POSITIVE = _converter(float, lambda x: 0 < x < float("inf"), "a positive number")
_DURATION = _converter(float, lambda x: x > 0, "a positive number")
_NOISE = _converter(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
_UINT32 = _converter(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295")


def _number(
    metavar: str, kind: Callable[[str], float], default: float | Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the settings of an option that is a number."""
    return {"default": default, "metavar": metavar, "type": kind}


_SEED = _number("N", _UINT32, 0)
_TPRS = ("shown", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001")
_METRICS = ("auc", *_TPRS, "extracted", "greedy", "at_least", "prompts")


def _limit(text: str) -> tuple[str | None, float]:
    """Return the metric of a limit, None if it is not named, and the limit."""
    name, is_named, number = text.rpartition("=")
    if is_named and name not in _METRICS and not name.startswith("entity/"):
        raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(_METRICS)}")
    return name or None, _NOISE(number)


def count_option(default: int | list[int] | None, minimum: int = 1) -> dict[str, Any]:
    """Return the settings of an option that is a whole number."""
    text = f"a whole number of at least {minimum}"
    return _number("N", _converter(int, lambda n: n >= minimum, text), default)


def path_option(metavar: str, default: str | None = None) -> dict[str, Any]:
    """Return the settings of an option that is a file or a folder."""
    return {"default": None if default is None else Path(default), "metavar": metavar, "type": Path}


def _add_sources(add: Add) -> None:
    add("--model", metavar="NAME")
    add("--text", metavar="SOURCE")
    add("--column", metavar="NAME")


def _add_training(
    add: Add, steps: int, batch: int = 8, length: int = 64, every: int = 5, lr: float = 1e-4
) -> None:
    add("--steps", **count_option(steps))
    add("--batch-size", **count_option(batch))
    add("--length", **count_option(length, 2))
    add("--every-n-steps", **count_option(every))
    add("--lr", **_number("X", _POSITIVE, lr))


def _add_rows(add: Add) -> None:
    add("--base", required=True, metavar="NAME")
    add("--column", metavar="NAME")
    add("--prompt-column", metavar="NAME")
    add("--loss", choices=("answers", "all"))
    add("--length", **count_option(256, 2))
    add("--drawn", action="store_true")
    add("--summary", **path_option("FILE"))
    add("--out", **path_option("FILE"))


def demo(add: Add) -> None:
    """Fine-tune a small model on private messages and watch them leak.

    Fine-tunes a language model on private text three times, and attacks what leaves: without a
    defence, under DP-SGD, and with a gate that stops it. It shows words, membership, whole texts
    and what the trained weights remember, and what the defence costs. A model and texts are
    included; use your own with --model and --text.

    Options:
        model: causal language model: a folder or a name on the hub.
        text: private text: {sources}.
        column: the column of --text that holds the text.
        steps: optimizer steps of a run.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two looks.
        at_most: word leakage at which the gate stops the third run.
        lr: learning rate of AdamW.
        out: folder of the logs.
        seed: seed of split, order, dropout and calibration.
        reveal: also write the recovered words to a local file that only you can read.
    """
    _add_sources(add)
    few = demo_settings
    _add_training(add, few.STEPS, few.BATCH_SIZE, few.LENGTH, few.EVERY_N_STEPS, few.LR)
    add("--at-most", **_number("F1", _SHARE, 0.5))
    add("--out", **path_option("DIR", "fedleak_runs"))
    add("--seed", **_SEED)
    add("--reveal", action="store_true")


def game(add: Add) -> None:
    """Ask, as a dishonest server, whether a text is in a client's batch.

    Plays the security game of active membership inference (Vu et al. 2024): a client's batch is
    drawn from a text, and a server that has added layers of its own to the model guesses from
    their gradient whether a target is in it. A server that adds none reads the gradient of what
    the client trains (--attack gradient). A model and texts are included; use your own with
    --model and --text.

    Options:
        model: language model: a folder or a name on the hub.
        text: the client's text: {sources}; a quarter of it, at most 200, is the server's.
        column: the column of --text that holds the text.
        attack: adversaries; all run on the same games. 'gradient' and 'subspace' add no layers and
            read what the client trains.
        lora_r: the client trains a LoRA of this rank; 0: the whole model.
        targets: {targets}.
        layer: block whose output they read, 0 for the embeddings; by default the middle one.
        batch: sentences in D.
        tokens: tokens a sentence, at most.
        games: games.
        relation: what replaces a target that is not in the batch: another sentence, or nothing.
        defense: the client randomises its tokens first: grr, rappor, the or dbitflip with settings
            of TokenLDP, as grr:epsilon=5 or rappor:epsilon=5,per=token.
        seed: seed of data, bits, targets and calibration.
    """
    _add_sources(add)
    add("--attack", nargs="+", choices=GAME_ATTACKS, default=["fc", "fc-full", "attention"])
    add("--lora-r", **count_option(0, 0))
    add("--targets", metavar="NAMES")
    add("--layer", nargs="+", **count_option(None, 0))
    add("--batch", **count_option(40))
    add("--tokens", **count_option(32, 2))
    add("--games", **count_option(240))
    add("--relation", choices=("replace_one", "add_remove"), default="replace_one")
    add("--defense", metavar="NAME:SETTING=VALUE,...")
    add("--seed", **_SEED)


def invert(add: Add) -> None:
    """Read, as the server, a client's texts from the hidden states that it sends.

    Runs a model's bottom on texts, adds Gaussian noise to the hidden states at the split as a
    client might before it sends them, and reads the texts back (Zheng 2023), beside what the noise
    costs the model. A model and texts are included; use your own with --model and --text.

    Options:
        model: language model: a folder or a name on the hub.
        text: the client's text: {sources}.
        column: the column of --text that holds the text.
        layer: splits, blocks whose output is sent, 0 for the embeddings; by
            default at a third and two thirds.
        noise: standard deviations of the noise.
        relative: --noise counts in standard deviations of each dimension of the hidden states, or
            is absolute.
        lengths: tokens a text.
        texts: texts attacked in each cell.
        attack: by default 'prefix' for causal models, 'sweeps' (descent with verified changes) for
            encoders.
        steps: gradient steps of a descent, at most.
        budget_seconds: wall time of an attack on the texts of one cell, after which its best so
            far counts; 'inf' for no bound.
        bos: token id put before every text.
        seed: seed of the choice of texts and of the noise.
        out: folder of the results.
    """
    _add_sources(add)
    add("--layer", nargs="+", **count_option(None, 0))
    add("--noise", nargs="+", **_number("S", _NOISE, [0.0, 0.3, 1.0, 3.0]))
    add("--relative", action=argparse.BooleanOptionalAction, default=True)
    add("--lengths", nargs="+", **count_option([32]))
    add("--texts", **count_option(4))
    add("--attack", nargs="+", choices=INVERT_ATTACKS)
    add("--steps", **count_option(1000))
    add("--budget-seconds", **_number("X", _DURATION, 60.0))
    add("--bos", **count_option(None, 0))
    add("--seed", **_SEED)
    add("--out", **path_option("DIR", "fedleak_runs/inversion"))


def sweep(add: Add) -> None:
    """Train under a grid of defences: what each costs and what still leaks.

    Fine-tunes a language model once for each defence and strength, with the same data, order and
    seed, and attacks every run as it trains. Writes a table, JSON and a report with utility against
    leakage. It continues where it was interrupted.

    Options:
        defense: 'none', or a defence with its settings; values separated by / make a grid.
        attack: all look at the same steps of each run.
        model: causal language model: a folder or a name on the hub.
        text: private text: {sources}.
        column: the column of --text that holds the text.
        layer: block whose output fc, attention, prefix and descent read; by default the middle
            one.
        steps: steps of a run.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two looks.
        lr: learning rate of AdamW.
        peft: train low-rank adapters; by default the whole model.
        budget_seconds: time that prefix and descent may take for one look.
        seed: seed of split, order, dropout and calibration.
        out: results.
    """
    add("--defense", nargs="+", metavar="NAME[:SETTING=VALUE[/VALUE ...],...]", default=DEFENSES)
    attacks = ["flatchat", "aligned_flatchat", "fc"]
    add("--attack", nargs="+", choices=SWEEP_ATTACKS, default=attacks)
    _add_sources(add)
    add("--layer", **count_option(None, 0))
    _add_training(add, steps=60)
    add("--peft", choices=("lora", "bitfit"))
    add("--budget-seconds", **_number("S", _POSITIVE, 10.0))
    add("--seed", **_SEED)
    add("--out", **path_option("DIR", "fedleak_runs/sweep"))


def plan(add: Add) -> None:
    """What an update of a set-up can reveal, and what the attacks on it cost, before any training.

    Counts the rows of an update that name the tokens of a batch (a LoRA's, or the whole first
    block's), and how many planted tokens they reveal. Then it says what each attack takes that a
    run would choose. A model is included; use your own with --model. Time and memory of a process
    are estimated for one device and for several; that needs no more than a folder's config.json.

    Options:
        model: language model: a folder or a name on the hub.
        batch: texts of a process's batch, and tokens of each.
        lora_r: rank of the LoRA; 0 for the whole model.
        targets: {targets}.
        seed: seed of adapters and planted sets.
    """
    add("--model", metavar="NAME")
    add("--batch", default="8x64", metavar="NxL", type=_batch)
    add("--lora-r", **count_option(8, 0))
    add("--targets", metavar="NAMES")
    add("--seed", **_SEED)


def _batch(text: str) -> tuple[int, int]:
    """Return the numbers of texts and of tokens of each, from a text such as ``4x512``."""
    texts, x, length = text.partition("x")
    if not (x and texts.isdecimal() and length.isdecimal() and int(texts) * int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not texts x tokens, such as 4x512")
    return int(texts), int(length)


def memorization(add: Add) -> None:
    """What a trained model leaks of its training texts, before it is released.

    Queries the trained model and its base with texts that were trained on and texts that were not,
    and shows how far they can be distinguished and which of them the model would write. Each
    text costs two forwards, and 14 of a masked model; nothing is generated. Classifiers of texts
    and of tokens, and masked models, are found by the architectures of --model.

    Options:
        model: the trained model: a folder, or one with adapters of PEFT.
        base: the model that the training began from: a folder or a name on the hub.
        members: texts that were trained on: {sources}.
        others: texts like them that were not trained on, in one of the same forms.
        column: the column of --members and --others that holds the text, or the answer to a prompt.
        prompt_column: the column of prompts, on which there was no loss. Prompt and answer are
            joined as TRL does it, with an end-of-text token. Chats (messages) are read by the
            model's template; rows of input_ids and labels as they are.
        label_column: for a classifier: the column of classes, numbers or names. Tokens are words in
            --column, with a list of classes.
        loss: the tokens that training's loss was computed on: of the answers, or of the
            assistant's turns; or all. Chats need it.
        length: tokens of a text, at most, as in training.
        drawn: the others were drawn at random from the same rows (leave_out), so that both
            sides are exchangeable.
        records: private file that lists the members by how much the model leaks of them: row
            numbers, p-values and a list, and no text. See fedleak records.
        entities: kinds of personal data to find in the texts, separated by commas: phone, email,
            iban, card, date, code, or a file with a value in each line. Values of members are
            compared with those of the others, by kind and place.
        reference: a model that was trained like --model on other texts of the same kind, and on no
            text of --members and --others: a folder, or one with adapters of PEFT. Texts are
            scored beside it as well (combined_reference).
        reference_rows: how many rows --reference was trained on. With fewer than --members a low
            number beside it is unknown.
        references: train this number of models, each on half of members and others, and compare
            the gain of a row with its gain in the models that were not trained on it. It takes as
            many fits. Needs --drawn. Prompts are scored without. Their answers are kept beside
            --records, in private files.
        run: folder of the run's run.jsonl, for learning rate, epochs, optimizer and whether it was
            one with differential privacy, beside which references are refused.
        epochs: epochs of a reference, if the record does not say it.
        batch_size: rows of an optimizer step in the training.
        lr: learning rate of a reference, which is constant.
        no_account: the rows were trained on without differential privacy.
        metric: what --at-most limits: the AUC, the TPR at 1% or 0.1% FPR, the former as far as it
            is shown, the excess of members that are extracted in samples or greedily, with
            --records the number of rows that are given away at least, or the AUC of prompts, which
            have no loss.
        at_most: exit with status 3 where its interval reaches above, or it is unknown. May be given
            several times, as 0.6 for --metric, or as extracted=0.05, or with --entities as
            entity/phone/label=0.6.
        summary: file that a table in Markdown is added to, such as the summary of a CI job. It
            holds no texts and no row numbers.
        out: file of the result as JSON.
    """
    add("--model", required=True, metavar="DIR")
    add("--members", required=True, metavar="SOURCE")
    add("--others", required=True, metavar="SOURCE")
    _add_rows(add)
    add("--label-column", metavar="NAME")
    add("--records", **path_option("FILE"))
    add("--entities", metavar="KINDS", type=lambda text: text.split(","), default=())
    add("--reference", metavar="DIR")
    add("--reference-rows", **count_option(None))
    add("--references", **count_option(0, 0))
    add("--run", **path_option("DIR"))
    add("--epochs", **count_option(None))
    add("--batch-size", **count_option(None))
    add("--lr", **_number("X", _POSITIVE))
    add("--no-account", action="store_true")
    add("--metric", choices=_METRICS, default="auc")
    add("--at-most", action="append", metavar="X", type=_limit)


def synthetic(add: Add) -> None:
    """What texts that a fine-tuned model wrote leak of its training rows, before a release.

    Fits a small auxiliary model on the generated texts, and queries it and its base with rows that
    were trained on and rows that were held out. It also counts passages of rows that the generated
    texts contain word for word. No access to the model that wrote them is needed.

    Options:
        rows: rows that the model was trained on: {sources}.
        others: rows like them that were not trained on, in one of the same forms.
        generated: texts that the model wrote, in one of the same forms.
        base: causal language model that the auxiliary one begins with: a folder or a name on the
            hub. The base of the model that wrote the texts is a good one.
        column: the column of --rows and --others that holds the text, or the answer to a prompt.
        prompt_column: the column of prompts, which are not compared.
        loss: the tokens that are compared: of the answers, or of the assistant's turns; or all.
            Chats need it.
        generated_column: the column of --generated that holds the text; by default it is read by
            the same columns as the rows.
        length: tokens of a text, at most.
        drawn: the others were drawn at random from the same rows (leave_out), so that both
            sides are exchangeable.
        epochs: passes of the auxiliary model over the generated texts.
        batch_size: texts of an optimizer step.
        lr: learning rate of AdamW, which is constant.
        lora_r: fit a LoRA of this rank; 0: the whole model.
        targets: {targets}.
        seed: seed of order, dropout and adapters.
        metric: what --at-most limits of each score: the AUC, the TPR at 1% or 0.1% FPR, or the
            former as far as it is shown.
        at_most: exit with status 3 where the auxiliary model's score or a count of copies reaches
            above it by its interval, or is unknown.
        summary: file that a table in Markdown is added to. It holds no texts and no row numbers.
        out: file of the result as JSON.
    """
    for name in ("--rows", "--others", "--generated"):
        add(name, required=True, metavar="SOURCE")
    _add_rows(add)
    add("--generated-column", metavar="NAME")
    add("--epochs", **count_option(1))
    add("--batch-size", **count_option(8))
    add("--lr", **_number("X", _POSITIVE, 2e-4))
    add("--lora-r", **count_option(0, 0))
    add("--targets", metavar="NAMES")
    add("--seed", **_SEED)
    add("--metric", choices=("auc", *_TPRS), default="auc")
    add("--at-most", **_number("X", _SHARE))


def records(add: Add) -> None:
    """Show the training rows that a trained model leaks, or drop them.

    Reads a list of row numbers that a monitor (Memorization(records=True)) or fedleak memorization
    --records wrote. Dropping rows protects those rows alone, and uses up the rows that were left
    out: draw others before training again. It is refused for a list of a run with differential
    privacy, and for one of too few texts.

    Options:
        action: show prints the riskiest rows on a terminal; drop writes all others to --out.
        file: the list, of mode 0600.
        data: the rows, as the list counts them: those given to leave_out, or the --members:
            {sources}.
        column: the column to show; without it all.
        top: share of the rows with a score, the riskiest ones. Copies count first, all or none.
        no_account: the rows were trained on without differential privacy, which a list of fedleak
            memorization does not know.
        out: .jsonl file of the rows that drop keeps, of mode 0600.
    """
    add("action", choices=("show", "drop"))
    add("file", metavar="FILE", type=Path)
    add("--data", required=True, metavar="SOURCE")
    add("--column", metavar="NAME")
    add("--top", **_number("X", _SHARE, 0.1))
    add("--no-account", action="store_true")
    add("--out", **path_option("FILE"))


def federate(add: Add) -> None:
    """Train a federation, and see what each client's update and their sum leak.

    Deals texts at random to clients, who train a language model for some rounds. Each update is
    attacked before it leaves; a gate may hold it back, and client-level differential privacy clip
    it and add noise. Shows utility, leakage of each client and of the sum, and epsilon, round by
    round. A model and texts are included; use your own with --model and --text.

    Options:
        clients: clients of the federation.
        rounds: rounds.
        local_steps: optimizer steps of a client in a round.
        model: causal language model: a folder or a name on the hub.
        text: the clients' texts: {sources}.
        column: the column of --text that holds the text.
        lora_r: clients train a LoRA of this rank; 0: the whole model.
        targets: {targets}.
        optimizer: optimizer of the clients.
        lr: its learning rate (0.1, of adamw 3e-4).
        batch_size: texts a batch.
        length: tokens a text, at most.
        members: texts of a round in its membership games, and as many that are not in the round; a
            gate needs 16.
        gate: the highest --watch at which an update still leaves.
        watch: what the gate watches, a name in the logs; by default leakage/worst/membership (of
            which .5 is guessing), and leakage/worst/words where an attack can read words from
            these updates.
        epsilon: client-level differential privacy: what all rounds together may cost.
        clip: largest norm of a client's update.
        delta: delta of the guarantee.
        trust: who adds the noise: the server; each client all of it; each client its share.
        seed: seed of split, order, adapters and calibration.
        out: folder of the logs.
    """
    add("--clients", **count_option(4, 2))
    add("--rounds", **count_option(3))
    add("--local-steps", **count_option(10))
    _add_sources(add)
    add("--lora-r", **count_option(0, 0))
    add("--targets", metavar="NAMES")
    add("--optimizer", choices=("sgd", "momentum", "adamw"), default="adamw")
    add("--lr", **_number("X", _POSITIVE))
    add("--batch-size", **count_option(4))
    add("--length", **count_option(32, 2))
    add("--members", **count_option(16))
    add("--gate", **_number("X", _SHARE))
    add("--watch", metavar="NAME")
    add("--epsilon", **_number("X", _POSITIVE))
    add("--clip", **_number("C", _POSITIVE, 1.0))
    add("--delta", **_number("X", _POSITIVE, 1e-5))
    add("--trust", choices=("central", "local", "secure_aggregation"), default="central")
    add("--seed", **_SEED)
    add("--out", **path_option("DIR", "fedleak_runs/federation"))


def fit(add: Add) -> None:
    """Fine-tune any causal language model on any text, configured by LightningCLI.

    These are the settings that most runs need. LightningCLI has all others of the model, the data
    and the Trainer; --print_config lists them with their values. Lists and classes (callbacks,
    strategy) are best written in a config: see examples/finetune.yaml and the recipes.

    Options:
        config: settings in YAML, with the keys model, data, trainer; several are merged.
        recipe: append a ready-made config: monitors, gates or a defence (once for each).
        print_config: print all settings and exit.
        model_model: a folder or a name on the hub; by default a small one that is included.
        model_lr: learning rate of AdamW.
        model_peft: train low-rank adapters; by default the whole model.
        model_loss: mean over tokens, or over texts of each text's mean, as DP-SGD needs.
        data_text: private text: {sources}; by default messages that are included.
        data_column: the column of the text.
        data_batch_size: texts a batch.
        data_length: tokens a row, at most.
        trainer_max_steps: optimizer steps.
        trainer_devices: number of devices.
        trainer_callbacks_help: print the settings of a callback, such as LeakageMonitor, and exit.
    """
    add("--config", metavar="FILE")
    add("--recipe", metavar="NAME")
    add("--print_config", action="store_true")
    add("--model.model", metavar="NAME")
    add("--model.lr", metavar="X", default=1e-4)
    add("--model.peft", choices=("lora", "bitfit"))
    add("--model.loss", choices=("token_mean", "sample_mean"), default="token_mean")
    add("--data.text", metavar="SOURCE")
    add("--data.column", metavar="NAME")
    add("--data.batch_size", metavar="N", default=8)
    add("--data.length", metavar="N", default=64)
    add("--trainer.max_steps", metavar="N")
    add("--trainer.devices", metavar="N")
    add("--trainer.callbacks.help", metavar="CLASS")


def report(add: Add) -> None:
    """Write what runs showed: a page for people, and JSON.

    Reads the log folders of runs (lightning_logs/version_0, fedleak_runs/...), and writes
    report.html and report.json.

    Options:
        runs: folder of logs.
        out: folder of the report (default: the first RUN's). A report.toml in it says how the
            model is released, which no log holds.
        model_card: print a block of Markdown for a model card, and write no report. With --out,
            the folder of the weights, what it says is written there as leakage.json.
        reveal: local reveal files to put into the page: private text; the page gets mode 0600.
    """
    add("runs", nargs="+", metavar="RUN", type=Path)
    add("--out", **path_option("DIR"))
    add("--model-card", action="store_true")
    add("--reveal", nargs="+", metavar="FILE", type=Path, default=[])


def compare(add: Add) -> None:
    """Print what changed between runs.

    Prints utility, leakage with 95% intervals, and epsilon of runs side by side.

    Options:
        runs: folder of logs, with all runs in it.
    """
    add("runs", nargs="+", metavar="RUN", type=Path)


def verify(add: Add) -> None:
    """Check that nobody edited the logs of a run.

    Reads leakage.jsonl, run.jsonl and report.json. Ends with 0 if everything that is given holds,
    3 if something contradicts, and 2 if it is open: a run that is not closed, lines without hashes,
    a report of another version.

    Options:
        run: folder that holds leakage.jsonl.
        weights: saved weights, which must be those that the last run ended with, or of a checkpoint
            that was noted. A leakage.json beside them must say what the logs give.
        head: hash of a line that was noted when the run ended; may be given several times.
        repetition: folder of the same training, run again: weights, losses and leakage must be
            the same to the last bit.
    """
    add("run", metavar="RUN", type=Path)
    add("--weights", **path_option("DIR"))
    add("--repetition", **path_option("DIR"))
    add("--head", action="append", default=[], metavar="HASH")

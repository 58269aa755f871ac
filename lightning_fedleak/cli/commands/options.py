"""The settings of ``fedleak``'s subcommands, and the options made from them.

A field of these dataclasses is an option: its name, default and type are the option's, and the
values of a ``Literal`` its choices; :func:`_option` holds the rest. A field without a default is a
positional argument. Help texts are the docstrings. This module imports nothing that a subcommand
needs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.names import (
    GAME_ATTACKS,
    GRADIENT_ATTACKS,
    INVERT_ATTACKS,
    PRECISIONS,
    SWEEP_ATTACKS,
)
from lightning_fedleak.extras import install

DEFENSES = ("none", "freeze:part=head+embeddings", "gradient_noise:clip=1,sigma=1e-4/1e-3/1e-2")
PHRASES = {
    "sources": "a .jsonl, .json, .csv, .tsv, .parquet or text file, a folder of .txt files, or a "
    "dataset of the hub as name:config:split:column",
    "targets": "modules with a LoRA, with commas between (q_proj,v_proj), or all-linear; by "
    "default PEFT's for this model",
}
"""What stands in braces in the docstrings below, because several options need it."""

T = TypeVar("T")


def _option(default: T, metavar: str | None = None, /, **arguments: Any) -> T:
    """Return a field that is an option.

    Args:
        default: of the field.
        metavar: name of the option's value in the help.
        arguments: for ``add_argument``.
    """
    option: T = field(default=default, metadata={"metavar": metavar, **arguments})
    return option


def _number(
    kind: Callable[[str], float], holds: Callable[[float], bool], description: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not {description}")
        return value

    return parse


def _at_least(minimum: int) -> Callable[[str], float]:
    return _number(int, lambda n: n >= minimum, f"a whole number of at least {minimum}")


_SHARE = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
_QUANTILE = _number(float, lambda x: 0 < x < 1, "a number between 0 and 1")
_POSITIVE = _number(float, lambda x: 0 < x < float("inf"), "a positive number")
_SEED = _number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295")


def _count(default: int, minimum: int = 1) -> int:
    return _option(default, "N", type=_at_least(minimum))


def shape(text: str) -> str:
    """Return texts x tokens as they are written, if they are numbers."""
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit() and int(rows) > 0 and int(length) > 1):
        raise argparse.ArgumentTypeError(f"'{text}' is not texts x tokens, such as 8x64")
    return text


def _position(text: str) -> str | int:
    if text in ("random", "last"):
        return text
    number = _number(int, lambda n: n >= 0, "'random', 'last' or a whole number of at least 0")
    return int(number(text))


LEAST_TEXTS = 16
"""Texts of a client in a round that a gate on membership needs: the engine's ``LEAST_MEMBERS``.
Options are checked before torch is loaded; a test compares the two."""


@dataclass(frozen=True)
class DemoOptions:
    """Fine-tune a small model on private messages and watch them leak.

    Fine-tunes a language model on private text twice: once watched, once with a gate that stops
    it. A model and texts are included; use your own with --model and --text.

    Attributes:
        model: causal language model: a folder or a name on the hub.
        text: private text: {sources}.
        column: the column of --text that holds the text.
        steps: steps of the first run.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two looks.
        at_most: word leakage at which the gate stops the second run.
        lr: learning rate of AdamW.
        out: folder of the logs.
        seed: seed of split, order, dropout and calibration.
        reveal: also write the recovered words to a local file that only you can read.
    """

    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    steps: int = _count(100)
    batch_size: int = _count(8)
    length: int = _count(64, 2)
    every_n_steps: int = _count(5)
    at_most: float = _option(0.5, "F1", type=_SHARE)
    lr: float = _option(1e-4, "X", type=_POSITIVE)
    out: Path = _option(Path("fedleak_runs"), "DIR")
    seed: int = _option(0, "N", type=_SEED)
    reveal: bool = False


@dataclass(frozen=True)
class GameOptions:
    """Ask, as a dishonest server, whether a text is in a client's batch.

    Plays the security game of active membership inference (Vu et al. 2024): a client's batch is
    drawn from a text, and a server that has added layers of its own to the model guesses from
    their gradient whether a target is in it. A server that adds none reads the gradient of what
    the client trains (--attack gradient). A model and texts are included; use your own with
    --model and --text.

    Attributes:
        model: language model: a folder or a name on the hub.
        text: the client's text: {sources}.
        column: the column of --text that holds the text.
        public: text that the server owns and calibrates on, as --text, or 'sampled' for text by
            the model itself; by default a quarter of --text (at most 200).
        public_column: the column of --public that holds the text.
        attack: adversaries; all play the same games. 'gradient' and 'subspace' add no layers and
            read what the client trains.
        lora_r: the client trains a LoRA of this rank; 0: the whole model.
        targets: {targets}.
        layer: block whose output they read, 0 for the embeddings; by default the middle one.
        batch: sentences in D.
        tokens: tokens a sentence, at most.
        pool: texts that games are drawn from, at most: a random choice of --text.
        games: games.
        position: which token of the target the attacks on tokens ask for.
        protocol: the game of the paper's Fig. 2, or what the authors' published code does.
        relation: what replaces a target that is not in the batch: another sentence, or nothing.
        gradients: by the attack's formula, or by backward through layers that are really inserted.
        forwards: the client computes each sentence once, in some batch (default in closed form),
            or every batch again (always by autograd).
        targets_per_batch: games that share one batch; faster, but no longer independent.
        defense: the client randomises its tokens first: grr, rappor, the or dbitflip with settings
            of TokenLDP, as grr:epsilon=5 or rappor:epsilon=5,per=token.
        precision: precision of the model.
        bos: token id put before every text.
        seed: seed of data, bits, targets and calibration.
        json: write the results to this file.
    """

    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    public: str | None = _option(None, "SOURCE")
    public_column: str | None = _option(None, "NAME")
    attack: Sequence[str] = _option(("fc", "fc-full", "attention"), choices=GAME_ATTACKS)
    lora_r: int = _count(0, 0)
    targets: str | None = _option(None, "NAMES")
    layer: Sequence[int] | None = _option(None, "N", type=_at_least(0))
    batch: int = _count(40)
    tokens: int = _count(32, 2)
    pool: int = _count(1000, 2)
    games: int = _count(240)
    position: Literal["random", "last"] | int = _option("random", "random|last|N", type=_position)
    protocol: Literal["game", "authors"] = "game"
    relation: Literal["replace_one", "add_remove"] = "replace_one"
    gradients: Literal["closed_form", "autograd"] = "closed_form"
    forwards: Literal["pooled", "fresh"] | None = _option(None, default=argparse.SUPPRESS)
    targets_per_batch: int = _count(1)
    defense: str | None = _option(None, "NAME:SETTING=VALUE,...")
    precision: str = _option("fp32", choices=PRECISIONS)
    bos: int | None = _option(None, "ID", type=_at_least(0))
    seed: int = _option(0, "N", type=_SEED)
    json: Path | None = _option(None, "FILE")


@dataclass(frozen=True)
class InvertOptions:
    """Read, as the server, a client's texts from the hidden states or gradients that it sends.

    Runs a model's bottom on texts, adds Gaussian noise to the hidden states at the split as a
    client might before it sends them, and reads the texts back (Zheng 2023), beside what the noise
    costs the model. With --from gradients the client sends the gradient of a batch of texts
    instead, of the whole model or of a LoRA, and nothing else. A model and texts are included; use
    your own with --model and --text.

    Attributes:
        from_: what the client sends: hidden states at a split, or the gradient of a batch of
            texts.
        model: language model: a folder or a name on the hub.
        text: the client's text: {sources}.
        column: the column of --text that holds the text.
        public: of activations: text that the server owns and 'prefix' ranks tokens with, as
            --text; by default text by the model itself.
        public_column: the column of --public that holds the text.
        layer: of activations: splits, blocks whose output is sent, 0 for the embeddings; by
            default at a third and two thirds.
        lora_r: of gradients: the client trains a LoRA of this rank; 0: the whole model.
        targets: of gradients: {targets}.
        batch_sizes: of gradients: texts of a batch.
        noise: standard deviations of the noise; by default 0 0.3 1 3, of gradients 0.
        relative: --noise counts in standard deviations of each dimension of the hidden states (of
            gradients: in root mean squares of all gradients that are shared), or is absolute.
        lengths: tokens a text.
        texts: texts attacked in each cell; of gradients in whole batches, one at least.
        attack: of activations by default 'prefix' for causal models, 'sweeps' (descent with
            verified changes) for encoders; of gradients 'subspace'.
        steps: of activations: gradient steps of a descent, at most.
        budget_seconds: wall time of an attack on the texts of one cell (of gradients: on one
            batch), after which its best so far counts; 'inf' for no bound.
        precision: precision of the model.
        bos: token id put before every text.
        seed: seed of the choice of texts and of the noise.
        out: folder of results and plots.
    """

    from_: Literal["activations", "gradients"] = "activations"
    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    public: str | None = _option(None, "SOURCE")
    public_column: str | None = _option(None, "NAME")
    layer: Sequence[int] | None = _option(None, "K", type=_at_least(0))
    lora_r: int = _count(0, 0)
    targets: str | None = _option(None, "NAMES")
    batch_sizes: Sequence[int] = _option((1, 4), "B", type=_at_least(1))
    noise: Sequence[float] | None = _option(
        None, "S", type=_number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
    )
    relative: bool = True
    lengths: Sequence[int] = _option((32,), "N", type=_at_least(1))
    texts: int = _count(4)
    attack: Sequence[str] | None = _option(None, choices=INVERT_ATTACKS + GRADIENT_ATTACKS)
    steps: int = _count(1000)
    budget_seconds: float = _option(
        60.0, "X", type=_number(float, lambda x: x > 0, "a positive number")
    )
    precision: str = _option("fp32", choices=PRECISIONS)
    bos: int | None = _option(None, "ID", type=_at_least(0))
    seed: int = _option(0, "N", type=_SEED)
    out: Path = _option(Path("fedleak_runs/inversion"), "DIR")


@dataclass(frozen=True)
class SweepOptions:
    """Train under a grid of defences: what each costs and what still leaks.

    Fine-tunes a language model once for each defence and strength, with the same data, order and
    seed, and attacks every run as it trains. Writes a table, JSON and a plot of utility against
    leakage. It continues where it was interrupted.

    Attributes:
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
        peft: train only a part of the model.
        budget_seconds: time that prefix and descent may take for one look.
        seed: seed of split, order, dropout and calibration.
        out: results.
    """

    defense: Sequence[str] = _option(DEFENSES, "NAME[:SETTING=VALUE[/VALUE ...],...]")
    attack: Sequence[str] = _option(("flatchat", "aligned_flatchat", "fc"), choices=SWEEP_ATTACKS)
    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    layer: int | None = _option(None, "N", type=_at_least(0))
    steps: int = _count(60)
    batch_size: int = _count(8)
    length: int = _count(64, 2)
    every_n_steps: int = _count(5)
    lr: float = _option(1e-4, "X", type=_POSITIVE)
    peft: Literal["lora", "bitfit"] | None = None
    budget_seconds: float = _option(10.0, "S", type=_POSITIVE)
    seed: int = _option(0, "N", type=_SEED)
    out: Path = _option(Path("fedleak_runs/sweep"), "DIR")


@dataclass(frozen=True)
class PlanOptions:
    """What an update of a set-up can reveal, and what the attacks on it cost, before any training.

    Counts the rows of an update that name the tokens of a batch (a LoRA's, or the whole first
    block's), and finds by attack the smallest batch that is not read exactly, which is no promise
    that a larger one is safe. Then it says what each attack takes that a run would choose. A
    model and texts are included; use your own with --model and --text.

    Attributes:
        model: language model: a folder or a name on the hub.
        text: texts like the clients': {sources}.
        column: the column of --text that holds the text.
        lora_r: rank of the LoRA; 0 for the whole model.
        targets: {targets}.
        batch: texts of a batch x tokens of a text.
        seconds: time for planted sets of tokens.
        seed: seed of adapters, texts and planted sets.
    """

    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    lora_r: int = _count(8, 0)
    targets: str | None = _option(None, "NAMES")
    batch: str = _option("8x64", "BxL", type=shape)
    seconds: float = _option(30.0, "S", type=_POSITIVE)
    seed: int = _option(0, "N", type=_SEED)


@dataclass(frozen=True)
class MemorizationOptions:
    """What a trained model gives away of its training texts, before it is released.

    Asks the trained model and its base about texts that were trained on and texts that were not,
    and shows how far they can be told apart and which of them the model would write. Each text
    costs two forwards; nothing is generated. Canaries that were planted are asked about by how
    often they were repeated.

    Attributes:
        model: the trained model: a folder, or one with adapters of PEFT.
        base: the model that the training began from: a folder or a name on the hub.
        members: texts that were trained on: {sources}.
        others: texts like them that were not trained on, in one of the same forms.
        canaries: the canaries of with_canaries in their order, as JSON lines with input_ids.
        record: the record of which of them were planted.
        suffix: tokens at the end of a canary that count; by default all but the first.
        column: the column of --members and --others that holds the text.
        length: tokens of a text, at most.
        drawn: a coin chose the others among the same rows (leave_out), so that they follow one
            law.
        metric: what --at-most limits, of canaries too: the AUC, the TPR at 1% FPR that is shown, or
            the excess of members that are extracted in samples or greedily.
        at_most: exit with status 3 where its interval reaches above, or it is unknown.
        out: file of the result as JSON.
    """

    model: str = _option("", "DIR", required=True)
    base: str = _option("", "NAME", required=True)
    members: str = _option("", "SOURCE", required=True)
    others: str = _option("", "SOURCE", required=True)
    canaries: Path | None = _option(None, "FILE")
    record: Path | None = _option(None, "FILE")
    suffix: int | None = _option(None, "N", type=_at_least(1))
    column: str | None = _option(None, "NAME")
    length: int = _count(256, 9)
    drawn: bool = False
    metric: Literal["auc", "shown", "extracted", "greedy"] = "auc"
    at_most: float | None = _option(None, "X", type=_SHARE)
    out: Path | None = _option(None, "FILE")


@dataclass(frozen=True)
class InspectOptions:
    """Whether a client was sent crafted adapter values: look before training on them.

    Asks rules of a LoRA or bottleneck adapter: alone, against the base, the agreed start and the
    round before. Exits with status 3 where something was found.

    Attributes:
        received: the adapter that was sent: a folder of PEFT, or a file in safetensors.
        base: the frozen model: a folder or a name on the hub.
        start: the adapter as the agreed config makes it, in one of the same forms. What is zero
            there must be zero in the first round.
        shared_seed: all numbers of --start are what every client starts with.
        first: this is the federation's first round.
        previous: the adapter that was sent in the round before. Leave it out where honest rows jump
            too: under SGD, a server that does more than take a mean, and after a missed round.
        own_update: the adapter that this client returned in that round.
        text: text like the federation's: {sources}.
        column: the column of --text that holds the text.
    """

    received: Path = field(metadata={"metavar": "RECEIVED"})
    base: str | None = _option(None, "NAME")
    start: Path | None = _option(None, "PATH")
    shared_seed: bool = False
    first: bool = False
    previous: Path | None = _option(None, "PATH")
    own_update: Path | None = _option(None, "PATH")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")


@dataclass(frozen=True)
class FederateOptions:
    """Train a federation, and see what each client's update and their sum leak.

    Deals texts to clients, who train a language model for some rounds. Each update is attacked
    before it leaves; a gate may hold it back, and client-level differential privacy clip it and
    add noise. Shows utility, leakage of each client and of the sum, and epsilon, round by round. A
    model and texts are included; use your own with --model and --text.

    Attributes:
        clients: clients of the federation.
        rounds: rounds.
        local_steps: optimizer steps of a client in a round.
        model: causal language model: a folder or a name on the hub.
        text: the clients' texts: {sources}.
        column: the column of --text that holds the text.
        partition_by: the column of --text with the speaker (or the kind) of each text.
        partition: how texts are dealt to clients: at random; all texts of a speaker to one client;
            or each client with its own shares of the kinds of text in --partition-by, or else of
            the whole. By default 'speaker' with --partition-by, 'iid' without.
        alpha: for 'dirichlet': the smaller, the less alike clients are.
        peft: clients train low-rank adapters; by default the whole model.
        lora_r: rank of --peft lora (8).
        targets: {targets}.
        optimizer: optimizer of the clients.
        lr: its learning rate (0.1, of adamw 3e-4).
        batch_size: texts a batch.
        length: tokens a text, at most.
        attack: every attack that can read these updates, or none.
        members: texts of a round in its membership games, and as many that are not in the round; a
            gate needs 16.
        leave_out: texts of each client that it does not train on; each client then asks the models
            that it is sent what they have memorized of its other texts. Nothing of it leaves.
        gate: the highest --watch at which an update still leaves.
        watch: what the gate watches, a name in the logs; by default leakage/worst/membership (of
            which .5 is guessing), and leakage/worst/words where an attack can read words from
            these updates.
        action: what the gate does.
        epsilon: client-level differential privacy: what all rounds together may cost.
        noise_multiplier: noise on the sum, over --clip, in place of --epsilon.
        clip: largest norm of a client's update.
        clip_quantile: --clip is the first norm, which then follows this quantile of the updates'.
        delta: delta of the guarantee.
        trust: who adds the noise: the server; each client all of it; each client its share.
        sampling: which clients take part in a round.
        per_round: for 'poisson' and 'fixed': how many (on average).
        server_optimizer: how the mean update moves the model: FedAvg, FedAvgM or FedAdam.
        server_lr: its learning rate (momentum 1, adam 0.003).
        engine: one client after the other in this process, or Flower's simulation (the extra
            'flower'); both give the same model.
        seed: seed of split, order, adapters and calibration.
        out: folder of the logs.
    """

    clients: int = _count(4, 2)
    rounds: int = _count(3)
    local_steps: int = _count(10)
    model: str | None = _option(None, "NAME")
    text: str | None = _option(None, "SOURCE")
    column: str | None = _option(None, "NAME")
    partition_by: str | None = _option(None, "COLUMN")
    partition: Literal["iid", "speaker", "dirichlet"] | None = None
    alpha: float = _option(0.5, "X", type=_POSITIVE)
    peft: Literal["lora"] | None = None
    lora_r: int | None = _option(None, "N", type=_at_least(1))
    targets: str | None = _option(None, "NAMES")
    optimizer: Literal["sgd", "momentum", "adamw"] = "adamw"
    lr: float | None = _option(None, "X", type=_POSITIVE)
    batch_size: int = _count(4)
    length: int = _count(32, 2)
    attack: Literal["auto", "none"] = "auto"
    members: int = _count(16)
    leave_out: int = _option(0, "N", type=_at_least(0))
    gate: float | None = _option(None, "X", type=_SHARE)
    watch: str | None = _option(None, "NAME")
    action: Literal["withhold", "harden", "raise", "warn"] = "withhold"
    epsilon: float | None = _option(None, "X", type=_POSITIVE)
    noise_multiplier: float | None = _option(None, "X", type=_POSITIVE)
    clip: float = _option(1.0, "C", type=_POSITIVE)
    clip_quantile: float | None = _option(None, "X", type=_QUANTILE)
    delta: float = _option(1e-5, "X", type=_POSITIVE)
    trust: Literal["central", "local", "secure_aggregation"] = "central"
    sampling: Literal["all", "poisson", "fixed"] = "all"
    per_round: float | None = _option(None, "N", type=_POSITIVE)
    server_optimizer: Literal["mean", "momentum", "adam"] = "mean"
    server_lr: float | None = _option(None, "X", type=_POSITIVE)
    engine: Literal["local", "flower"] = "local"
    seed: int = _option(0, "N", type=_SEED)
    out: Path = _option(Path("fedleak_runs/federation"), "DIR")

    def check(self) -> None:
        """Raise an error for options that contradict each other, before libraries are loaded.

        Raises:
            SourceError: says which option to add, to change or to leave out.
        """
        for wrong, text in (*self._of_training(), *self._of_gate(), *self._of_privacy()):
            if wrong:
                raise SourceError(text)

    def _first_changed(self, *names: str) -> str:
        """Return the first of some options that has another value than its default."""
        changed = [n for n in names if getattr(self, n) != getattr(FederateOptions, n)]
        return f"--{changed[0].replace('_', '-')}" if changed else ""

    def _of_training(self) -> Iterator[tuple[object, str]]:
        """Yield whether options of texts and training contradict each other, and the message."""
        yield (
            self.peft is None and self._first_changed("lora_r", "targets"),
            "--lora-r and --targets set adapters: give --peft lora too.",
        )
        yield (
            self.partition == "speaker" and self.partition_by is None,
            "--partition speaker deals texts by speaker: name the column that holds it with "
            "--partition-by. (Each embedded message has another customer, so that 'iid' deals "
            "these by speaker.)",
        )
        yield (
            self.partition == "iid" and self.partition_by is not None,
            "--partition iid deals texts at random: leave --partition-by out.",
        )
        yield (
            self.engine == "flower" and importlib.util.find_spec("flwr") is None,
            f"--engine flower needs Flower: {install('flower')}. It needs older packages than the "
            "rest: install it in an environment of its own. --engine local trains the same model "
            "without it.",
        )

    def _of_gate(self) -> Iterator[tuple[object, str]]:
        if self.gate is None:
            changed = self._first_changed("watch", "action")
            yield changed, f"{changed} sets a gate: give --gate too, such as 0.5."
        yield (
            self.gate is not None and self.attack == "none",
            "--gate needs attacks whose results it watches: leave --attack none out.",
        )
        yield (
            self.watch is not None and not self.watch.startswith("leakage/"),
            f"--watch {self.watch}: a gate watches a name in the logs, as leakage/worst/words",
        )
        texts = self.local_steps * self.batch_size
        watches_membership = self.gate is not None and "membership" in (self.watch or "membership")
        yield (
            watches_membership and texts < LEAST_TEXTS,
            f"--gate watches membership{'' if self.watch else ' by default'}, and a round has "
            f"{texts} texts of a client: no update is judged with fewer than {LEAST_TEXTS}. Give "
            "more --local-steps or a larger --batch-size, or watch words alone (--watch "
            "leakage/worst/words).",
        )
        yield (
            self.action == "harden" and (self.epsilon is None or self.trust != "local"),
            "--action harden turns up the noise that clients add themselves: give --epsilon and "
            "--trust local too.",
        )

    def _of_privacy(self) -> Iterator[tuple[object, str]]:
        if self.epsilon is None and self.noise_multiplier is None:
            changed = self._first_changed(
                "clip", "clip_quantile", "delta", "trust", "sampling", "per_round"
            )
            text = "client-level differential privacy: give --epsilon or --noise-multiplier too."
            yield changed, f"{changed} sets {text}"
        yield (
            (self.sampling == "all") != (self.per_round is None),
            "--sampling poisson and fixed draw --per-round clients: give both, or neither.",
        )
        yield (
            self.clip_quantile is not None and self.trust != "central",
            "--clip-quantile counts the clients below the clip norm, which a trusted server alone "
            f"may do: leave it or --trust {self.trust} out.",
        )
        yield (
            self.server_lr is not None and self.server_optimizer == "mean",
            "--server-lr sets the rate of an optimizer of the server: give --server-optimizer too.",
        )
        yield (
            self.delta * self.clients >= 1,
            f"--delta {self.delta:g} must be below 1 / {self.clients}, one over --clients: "
            "otherwise publishing one client's data at random would count as private.",
        )

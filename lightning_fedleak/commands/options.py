"""The settings of ``fedleak``'s subcommands, and the options made from them.

A field of these dataclasses is an option: its name, default and type are the option's, the values
of a ``Literal`` its choices, and :func:`_option` holds the rest. This module imports nothing that
a subcommand needs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_fedleak.extras import install
from lightning_fedleak.finetuning import SourceError
from lightning_fedleak.studies.names import (
    GAME_ATTACKS,
    GRADIENT_ATTACKS,
    INVERT_ATTACKS,
    PRECISIONS,
    SWEEP_ATTACKS,
)

_TARGETS = (
    "modules with a LoRA, with commas between (q_proj,v_proj), or all-linear; by default PEFT's "
    "for this model"
)
DEFENSES = ("none", "freeze:part=head+embeddings", "gradient_noise:clip=1,sigma=1e-4/1e-3/1e-2")

T = TypeVar("T")


def _option(default: T, help: str, metavar: str | None = None, /, **arguments: Any) -> T:
    """Return a field that is an option.

    Args:
        default: of the field; a tuple takes several values.
        help: of the option.
        metavar: of the option.
        arguments: for ``add_argument``.
    """
    metadata = {"help": help, **({} if metavar is None else {"metavar": metavar}), **arguments}
    if default is True:
        metadata["action"] = argparse.BooleanOptionalAction
    elif default is False:
        metadata["action"] = "store_true"
    elif isinstance(default, tuple):
        metadata["nargs"] = "+"
    option: T = field(default=default, metadata=metadata)
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
_POSITIVE = _number(float, lambda x: 0 < x < float("inf"), "a positive number")
_SEED = _number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295")
_SOURCE = (
    "a .jsonl, .json, .csv, .tsv, .parquet or text file, a folder of .txt files, or a dataset of "
    "the hub as name:config:split:column"
)


def _count(default: int, help: str, minimum: int = 1) -> int:
    return _option(default, help, "N", type=_at_least(minimum))


def _column(option: str) -> str | None:
    return _option(None, f"the column of --{option} that holds the text", "NAME")


def _seed(help: str) -> int:
    return _option(0, help, "N", type=_SEED)


def _folder(default: str, help: str) -> Path:
    return _option(Path(default), help, "DIR", type=Path)


def _shape(text: str) -> str:
    rows, _, length = text.partition("x")
    if not (rows.isdigit() and length.isdigit() and int(rows) > 0 and int(length) > 1):
        raise argparse.ArgumentTypeError(f"'{text}' is not texts x tokens, such as 8x64")
    return text


def _position(text: str) -> str | int:
    if text in ("random", "last"):
        return text
    description = "'random', 'last' or a whole number of at least 0"
    return int(_number(int, lambda n: n >= 0, description)(text))


LEAST_TEXTS = 16
"""Texts of a client in a round that a gate on membership needs: the engine's ``LEAST_MEMBERS``.

It stands here too, since options are checked before torch is loaded; a test compares the two.
"""


@dataclass(frozen=True)
class DemoOptions:
    """The settings of ``fedleak demo``.

    Without ``model`` and ``text`` the embedded model is trained on the embedded messages.
    """

    model: str | None = _option(
        None, "causal language model: a folder or a name on the hub", "NAME"
    )
    text: str | None = _option(None, f"private text: {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    steps: int = _count(100, "steps of the first run")
    batch_size: int = _count(8, "texts a batch")
    length: int = _count(64, "tokens a text, at most", 2)
    every_n_steps: int = _count(5, "steps between two looks")
    at_most: float = _option(
        0.5,
        "word leakage at which the gate stops the second run",
        "F1",
        type=_number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    )
    lr: float = _option(1e-4, "learning rate of AdamW", "X", type=_POSITIVE)
    out: Path = _folder("fedleak_runs", "folder of the logs")
    seed: int = _seed("seed of split, order, dropout and calibration")
    reveal: bool = _option(
        False, "also write the recovered words to a local file that only you can read"
    )


@dataclass(frozen=True)
class GameOptions:
    """The settings of ``fedleak game``; see :class:`~lightning_fedleak.games.GameConfig` too.

    Without ``model`` and ``text`` the game uses the embedded ones. The model may be causal, masked
    or an encoder without a head.
    """

    model: str | None = _option(None, "language model: a folder or a name on the hub", "NAME")
    text: str | None = _option(None, f"the client's text: {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    public: str | None = _option(
        None,
        "text that the server owns and calibrates on, as --text, or 'sampled' for text by the "
        "model itself; by default a quarter of --text (at most 200)",
        "SOURCE",
    )
    public_column: str | None = _column("public")
    attack: Sequence[str] = _option(
        ("fc", "fc-full", "attention"),
        "adversaries; all play the same games. 'gradient' and 'subspace' add no layers and read "
        "what the client trains",
        choices=GAME_ATTACKS,
    )
    lora_r: int = _count(0, "the client trains a LoRA of this rank; 0: the whole model", 0)
    targets: str | None = _option(None, _TARGETS, "NAMES")
    layer: Sequence[int] | None = _option(
        None,
        "block whose output they read, 0 for the embeddings; by default the middle one",
        "N",
        nargs="+",
        type=_at_least(0),
    )
    batch: int = _count(40, "sentences in D")
    tokens: int = _count(32, "tokens a sentence, at most", 2)
    pool: int = _count(
        1000, "texts that games are drawn from, at most: a random choice of --text", 2
    )
    games: int = _count(240, "games")
    position: Literal["random", "last"] | int = _option(
        "random",
        "which token of the target the attacks on tokens ask for",
        "random|last|N",
        type=_position,
    )
    protocol: Literal["game", "authors"] = _option(
        "game",
        "the game of the paper's Fig. 2, or what the authors' published code does",
    )
    relation: Literal["replace_one", "add_remove"] = _option(
        "replace_one",
        "what replaces a target that is not in the batch: another sentence, or nothing",
    )
    gradients: Literal["closed_form", "autograd"] = _option(
        "closed_form",
        "by the attack's formula, or by backward through layers that are really inserted",
    )
    forwards: Literal["pooled", "fresh"] | None = _option(
        None,
        "the client computes each sentence once, in some batch (default in closed form), or "
        "every batch again (always by autograd)",
        default=argparse.SUPPRESS,
    )
    targets_per_batch: int = _count(
        1, "games that share one batch; faster, but no longer independent"
    )
    defense: str | None = _option(
        None,
        "the client randomises its tokens first: grr, rappor, the or dbitflip with settings of "
        "TokenLDP, as grr:epsilon=5 or rappor:epsilon=5,per=token",
        "NAME:SETTING=VALUE,...",
    )
    precision: str = _option("fp32", "precision of the model", choices=PRECISIONS)
    bos: int | None = _option(None, "token id put before every text", "ID", type=_at_least(0))
    seed: int = _seed("seed of data, bits, targets and calibration")
    json: Path | None = _option(None, "write the results to this file", "FILE", type=Path)


@dataclass(frozen=True)
class InvertOptions:
    """The settings of ``fedleak invert``.

    Without ``model`` and ``text`` the embedded ones are used. Of activations the model may be
    causal, masked or an encoder without a head; of gradients it is causal.
    """

    from_: Literal["activations", "gradients"] = _option(
        "activations",
        "what the client sends: hidden states at a split, or the gradient of a batch of texts",
    )
    model: str | None = _option(None, "language model: a folder or a name on the hub", "NAME")
    text: str | None = _option(None, f"the client's text: {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    public: str | None = _option(
        None,
        "of activations: text that the server owns and 'prefix' ranks tokens with, as --text; by "
        "default text by the model itself",
        "SOURCE",
    )
    public_column: str | None = _column("public")
    layer: Sequence[int] | None = _option(
        None,
        "of activations: splits, blocks whose output is sent, 0 for the embeddings; by default at "
        "a third and two thirds",
        "K",
        nargs="+",
        type=_at_least(0),
    )
    lora_r: int = _count(
        0, "of gradients: the client trains a LoRA of this rank; 0: the whole model", 0
    )
    targets: str | None = _option(None, f"of gradients: {_TARGETS}", "NAMES")
    batch_sizes: Sequence[int] = _option(
        (1, 4), "of gradients: texts of a batch", "B", type=_at_least(1)
    )
    noise: Sequence[float] | None = _option(
        None,
        "standard deviations of the noise; by default 0 0.3 1 3, of gradients 0",
        "S",
        nargs="+",
        type=_number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0"),
    )
    relative: bool = _option(
        True,
        "--noise counts in standard deviations of each dimension of the hidden states (of "
        "gradients: in root mean squares of all gradients that are shared), or is absolute",
    )
    lengths: Sequence[int] = _option((32,), "tokens a text", "N", type=_at_least(1))
    texts: int = _count(
        4, "texts attacked in each cell; of gradients in whole batches, one at least"
    )
    attack: Sequence[str] | None = _option(
        None,
        "of activations by default 'prefix' for causal models, 'sweeps' (descent with verified "
        f"changes) for encoders; of gradients '{GRADIENT_ATTACKS[0]}'",
        nargs="+",
        choices=INVERT_ATTACKS + GRADIENT_ATTACKS,
    )
    steps: int = _count(1000, "of activations: gradient steps of a descent, at most")
    budget_seconds: float = _option(
        60.0,
        "wall time of an attack on the texts of one cell (of gradients: on one batch), after which "
        "its best so far counts; 'inf' for no bound",
        "X",
        type=_number(float, lambda x: x > 0, "a positive number"),
    )
    precision: str = _option("fp32", "precision of the model", choices=PRECISIONS)
    bos: int | None = _option(None, "token id put before every text", "ID", type=_at_least(0))
    seed: int = _seed("seed of the choice of texts and of the noise")
    out: Path = _folder("fedleak_runs/inversion", "folder of results and plots")


@dataclass(frozen=True)
class SweepOptions:
    """The settings of ``fedleak sweep``.

    Without ``model`` and ``text`` the embedded model is trained on the embedded messages. A sweep
    that is started again in its folder ``out`` goes on.
    """

    defense: Sequence[str] = _option(
        DEFENSES,
        "'none', or a defence with its settings; values separated by / make a grid",
        "NAME[:SETTING=VALUE[/VALUE ...],...]",
    )
    attack: Sequence[str] = _option(
        ("flatchat", "aligned_flatchat", "fc"),
        "all look at the same steps of each run",
        choices=SWEEP_ATTACKS,
    )
    model: str | None = _option(
        None, "causal language model: a folder or a name on the hub", "NAME"
    )
    text: str | None = _option(None, f"private text: {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    layer: int | None = _option(
        None,
        "block whose output fc, attention, prefix and descent read; by default the middle one",
        "N",
        type=_at_least(0),
    )
    steps: int = _count(60, "steps of a run")
    batch_size: int = _count(8, "texts a batch")
    length: int = _count(64, "tokens a text, at most", 2)
    every_n_steps: int = _count(5, "steps between two looks")
    lr: float = _option(1e-4, "learning rate of AdamW", "X", type=_POSITIVE)
    peft: Literal["lora", "bitfit"] | None = _option(None, "train only a part of the model")
    budget_seconds: float = _option(
        10.0, "time that prefix and descent may take for one look", "S", type=_POSITIVE
    )
    seed: int = _seed("seed of split, order, dropout and calibration")
    out: Path = _folder("fedleak_runs/sweep", "results")


@dataclass(frozen=True)
class CapacityOptions:
    """The settings of ``fedleak capacity``.

    Without ``model`` and ``text`` the embedded ones are used.
    """

    model: str | None = _option(None, "language model: a folder or a name on the hub", "NAME")
    text: str | None = _option(None, f"texts like the clients': {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    lora_r: int = _count(8, "rank of the LoRA; 0 for the whole model", 0)
    targets: str | None = _option(None, _TARGETS, "NAMES")
    batch: str = _option("8x64", "texts of a batch x tokens of a text", "BxL", type=_shape)
    seconds: float = _option(30.0, "time for planted sets of tokens", "S", type=_POSITIVE)
    seed: int = _seed("seed of adapters, texts and planted sets")


@dataclass(frozen=True)
class MemorizationOptions:
    """The settings of ``fedleak memorization``."""

    model: str = _option(
        "", "the trained model: a folder, or one with adapters of PEFT", "DIR", required=True
    )
    base: str = _option(
        "", "the model that the training began from: a folder or a name on the hub", "NAME",
        required=True,
    )  # fmt: skip
    members: str = _option("", f"texts that were trained on: {_SOURCE}", "SOURCE", required=True)
    others: str = _option(
        "", "texts like them that were not trained on, in one of the same forms", "SOURCE",
        required=True,
    )  # fmt: skip
    column: str | None = _column("members and --others")
    length: int = _count(256, "tokens of a text, at most", 9)
    drawn: bool = _option(
        False,
        "a coin chose the others among the same rows (leave_out), so that they follow one law",
    )
    metric: Literal["auc", "shown"] = _option(
        "auc",
        "what --at-most limits: the lower bound of the AUC, or the TPR at 1%% FPR that is shown",
        choices=("auc", "shown"),
    )
    at_most: float | None = _option(
        None, "exit with status 3 where more is shown, or it is unknown", "X", type=_SHARE
    )
    out: Path | None = _option(None, "file of the result as JSON", "FILE", type=Path)


@dataclass(frozen=True)
class FederateOptions:
    """The settings of ``fedleak federate``.

    Without ``model`` and ``text`` the embedded model is trained on the embedded messages.
    """

    clients: int = _count(4, "clients of the federation", 2)
    rounds: int = _count(3, "rounds")
    local_steps: int = _count(10, "optimizer steps of a client in a round")
    model: str | None = _option(
        None, "causal language model: a folder or a name on the hub", "NAME"
    )
    text: str | None = _option(None, f"the clients' texts: {_SOURCE}", "SOURCE")
    column: str | None = _column("text")
    partition_by: str | None = _option(
        None, "the column of --text with the speaker (or the kind) of each text", "COLUMN"
    )
    partition: Literal["iid", "speaker", "dirichlet"] | None = _option(
        None,
        "how texts are dealt to clients: at random; all texts of a speaker to one client; or each "
        "client with its own shares of the kinds of text in --partition-by, or else of the "
        "whole. By default 'speaker' with --partition-by, 'iid' without",
    )
    alpha: float = _option(
        0.5, "for 'dirichlet': the smaller, the less alike clients are", "X", type=_POSITIVE
    )
    peft: Literal["lora"] | None = _option(
        None, "clients train low-rank adapters; by default the whole model"
    )
    lora_r: int | None = _option(None, "rank of --peft lora (8)", "N", type=_at_least(1))
    targets: str | None = _option(None, _TARGETS, "NAMES")
    optimizer: Literal["sgd", "momentum", "adamw"] = _option("adamw", "optimizer of the clients")
    lr: float | None = _option(None, "its learning rate (0.1, of adamw 3e-4)", "X", type=_POSITIVE)
    batch_size: int = _count(4, "texts a batch")
    length: int = _count(32, "tokens a text, at most", 2)
    attack: Literal["auto", "none"] = _option(
        "auto", "every attack that can read these updates, or none"
    )
    members: int = _count(
        16,
        "texts of a round in its membership games, and as many that are not in the round; a gate "
        "needs 16",
    )
    gate: float | None = _option(
        None,
        "the highest --watch at which an update still leaves",
        "X",
        type=_number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    )
    watch: str | None = _option(
        None,
        "what the gate watches, a name in the logs; by default leakage/worst/membership (of which "
        ".5 is guessing), and leakage/worst/words where an attack can read words from these "
        "updates",
        "NAME",
    )
    action: Literal["withhold", "harden", "raise", "warn"] = _option(
        "withhold", "what the gate does"
    )
    epsilon: float | None = _option(
        None,
        "client-level differential privacy: what all rounds together may cost",
        "X",
        type=_POSITIVE,
    )
    noise_multiplier: float | None = _option(
        None, "noise on the sum, over --clip, in place of --epsilon", "X", type=_POSITIVE
    )
    clip: float = _option(1.0, "largest norm of a client's update", "C", type=_POSITIVE)
    delta: float = _option(1e-5, "delta of the guarantee", "X", type=_POSITIVE)
    trust: Literal["central", "local", "secure_aggregation"] = _option(
        "central",
        "who adds the noise: the server; each client all of it; each client its share",
    )
    sampling: Literal["all", "poisson", "fixed"] = _option(
        "all", "which clients take part in a round"
    )
    per_round: float | None = _option(
        None, "for 'poisson' and 'fixed': how many (on average)", "N", type=_POSITIVE
    )
    engine: Literal["local", "flower"] = _option(
        "local",
        "one client after the other in this process, or Flower's simulation (the extra 'flower'); "
        "both give the same model",
    )
    seed: int = _seed("seed of split, order, adapters and calibration")
    out: Path = _folder("fedleak_runs/federation", "folder of the logs")

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
            changed = self._first_changed("clip", "delta", "trust", "sampling", "per_round")
            yield (
                changed,
                f"{changed} sets client-level differential privacy: give --epsilon or "
                "--noise-multiplier too.",
            )
        yield (
            self.sampling != "all" and self.per_round is None,
            f"--sampling {self.sampling} draws some clients: give their number with --per-round.",
        )
        yield (
            self.delta * self.clients >= 1,
            f"--delta {self.delta:g} must be below 1 / {self.clients}, one over --clients: "
            "otherwise publishing one client's data at random would count as private.",
        )

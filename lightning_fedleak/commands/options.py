"""The options of ``fedleak`` and its subcommands; imports nothing that a subcommand needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """Reads the command line; ``command`` is the subcommand's name."""
    fedleak = argparse.ArgumentParser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client give away.",
    )
    fedleak.add_argument("--version", action="version", version=version("lightning-fedleak"))
    commands = fedleak.add_subparsers(
        required=True, dest="command", metavar="{demo,game,invert,sweep,fit}"
    )
    demo = commands.add_parser(
        "demo",
        help="fine-tune a small model on private messages and watch them leak",
        description="Fine-tunes a language model on private text twice: once watched, once with a "
        "gate that stops it. Model and text are on board; bring your own with --model and --text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--model", metavar="NAME", help="causal language model: a folder or a name on the hub"
    )
    demo.add_argument(
        "--text",
        metavar="SOURCE",
        help="private text: a .jsonl, .csv or text file, or a dataset as name:config:split:column",
    )
    demo.add_argument(
        "--steps", type=_at_least(1), default=100, metavar="N", help="steps of the first run"
    )
    demo.add_argument(
        "--batch-size", type=_at_least(1), default=8, metavar="N", help="texts a batch"
    )
    demo.add_argument(
        "--length",
        type=_at_least(2),
        default=64,
        metavar="N",
        help="tokens a text, at most",
    )
    demo.add_argument(
        "--every-n-steps", type=_at_least(1), default=5, metavar="N", help="steps between two looks"
    )
    demo.add_argument(
        "--at-most",
        type=_number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        default=0.5,
        metavar="F1",
        help="word leakage at which the gate stops the second run",
    )
    demo.add_argument(
        "--lr",
        type=_number(float, lambda x: 0 < x < float("inf"), "a positive number"),
        default=1e-4,
        metavar="X",
        help="learning rate of AdamW",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("fedleak_runs"), metavar="DIR", help="folder of the logs"
    )
    _add_seed(demo, "of split, order, dropout and calibration")
    demo.add_argument(
        "--reveal",
        action="store_true",
        help="also write the recovered words to a local file that only you can read",
    )
    _add_game(commands)
    _add_invert(commands)
    _add_sweep(commands)
    commands.add_parser(
        "fit", help="fine-tune any causal language model on any text, configured by LightningCLI"
    )
    return fedleak


def _add_game(commands: Any) -> None:
    game = commands.add_parser(
        "game",
        help="ask, as a dishonest server, whether a text is in a client's batch",
        description="Plays the security game of active membership inference (Vu et al. 2024): a "
        "client's batch is drawn from a text, and a server that has added layers of its own to the "
        "model guesses from their gradient whether a target is in it. Model and text are on board; "
        "bring your own with --model and --text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    game.add_argument(
        "--model", metavar="NAME", help="language model: a folder or a name on the hub"
    )
    game.add_argument(
        "--text",
        metavar="SOURCE",
        help="the client's text: a .jsonl, .csv or text file, or a dataset as "
        "name:config:split:column",
    )
    game.add_argument(
        "--public",
        metavar="SOURCE",
        help="text that the server owns and calibrates on, as --text, or 'sampled' for text by the "
        "model itself; by default a quarter of --text (at most 200) is set aside for it",
    )
    game.add_argument(
        "--attack",
        nargs="+",
        choices=("fc", "fc-full", "attention", "trained", "trained-full"),
        default=["fc", "fc-full", "attention"],
        help="adversaries; all play the same games",
    )
    game.add_argument(
        "--layer",
        nargs="+",
        type=_at_least(0),
        metavar="N",
        help="block whose output they read, 0 for the embeddings; by default the middle one",
    )
    game.add_argument("--batch", type=_at_least(1), default=40, metavar="N", help="sentences in D")
    game.add_argument(
        "--tokens", type=_at_least(2), default=32, metavar="N", help="tokens a sentence, at most"
    )
    game.add_argument(
        "--pool",
        type=_at_least(2),
        default=1000,
        metavar="N",
        help="texts that games are drawn from, at most: a random choice of --text",
    )
    game.add_argument("--games", type=_at_least(1), default=240, metavar="N", help="games")
    game.add_argument(
        "--position",
        type=_position,
        default="random",
        metavar="random|last|N",
        help="which token of the target the attacks on tokens ask for",
    )
    game.add_argument(
        "--protocol",
        choices=("game", "authors"),
        default="game",
        help="the game of the paper's Fig. 2, or what the authors' published code does",
    )
    game.add_argument(
        "--relation",
        choices=("replace_one", "add_remove"),
        default="replace_one",
        help="what is in a target's place that is not in the batch: another sentence, or nothing",
    )
    game.add_argument(
        "--gradients",
        choices=("closed_form", "autograd"),
        default="closed_form",
        help="by the attack's formula, or by backward through layers that are really inserted",
    )
    game.add_argument(
        "--forwards",
        choices=("pooled", "fresh"),
        default=argparse.SUPPRESS,
        help="the client computes each sentence once, in some batch (default in closed form), or "
        "every batch anew (always by autograd)",
    )
    game.add_argument(
        "--targets-per-batch",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="games that share one batch; faster, but no longer independent",
    )
    game.add_argument(
        "--precision", choices=("fp32", "bf16", "fp64"), default="fp32", help="of the model"
    )
    game.add_argument(
        "--bos", type=_at_least(0), metavar="ID", help="token id put before every text"
    )
    _add_seed(game, "of data, bits, targets and calibration")
    game.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="train under a grid of defences; what each costs and what still leaks",
        description="Fine-tunes a language model once for each defence and strength, with the same "
        "data, order and seed, and attacks every run as it trains. Writes a table, JSON and a plot "
        "of utility against leakage. Goes on where it was interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sweep.add_argument(
        "--defense",
        nargs="+",
        metavar="NAME[:SETTING=VALUE[/VALUE ...],...]",
        default=[
            "none",
            "freeze:part=head+embeddings",
            "gradient_noise:clip=1,sigma=1e-4/1e-3/1e-2",
        ],
        help="'none', or a defence with its settings; values told apart by / make a grid",
    )
    sweep.add_argument(
        "--attack",
        nargs="+",
        choices=("flatchat", "aligned_flatchat", "fc", "attention", "prefix", "descent"),
        default=["flatchat", "aligned_flatchat", "fc"],
        help="all look at the same steps of each run",
    )
    sweep.add_argument(
        "--model", metavar="NAME", help="causal language model: a folder or a name on the hub"
    )
    sweep.add_argument(
        "--text",
        metavar="SOURCE",
        help="private text: a .jsonl, .csv or text file, or a dataset as name:config:split:column",
    )
    sweep.add_argument(
        "--layer",
        type=_at_least(0),
        metavar="N",
        help="block whose output fc, attention, prefix and descent read; by default the middle one",
    )
    sweep.add_argument("--steps", type=_at_least(1), default=60, metavar="N", help="steps of a run")
    sweep.add_argument(
        "--batch-size", type=_at_least(1), default=8, metavar="N", help="texts a batch"
    )
    sweep.add_argument(
        "--length", type=_at_least(2), default=64, metavar="N", help="tokens a text, at most"
    )
    sweep.add_argument(
        "--every-n-steps", type=_at_least(1), default=5, metavar="N", help="steps between two looks"
    )
    positive = _number(float, lambda x: 0 < x < float("inf"), "a positive number")
    sweep.add_argument(
        "--lr", type=positive, default=1e-4, metavar="X", help="learning rate of AdamW"
    )
    sweep.add_argument("--peft", choices=("lora", "bitfit"), help="train only a part of the model")
    sweep.add_argument(
        "--budget-seconds",
        type=positive,
        default=10.0,
        metavar="S",
        help="time that prefix and descent may take for one look",
    )
    _add_seed(sweep, "of split, order, dropout and calibration")
    sweep.add_argument(
        "--out", type=Path, default=Path("fedleak_runs/sweep"), metavar="DIR", help="results"
    )


def _add_invert(commands: Any) -> None:
    invert = commands.add_parser(
        "invert",
        help="read, as the server of a split model, a client's texts off what it sends",
        description="Runs a model's bottom on texts, adds Gaussian noise to the hidden states at "
        "the split as a client might before it sends them, and reads the texts back (Zheng 2023), "
        "beside what the noise costs the model. Model and text are on board; bring your own with "
        "--model and --text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    invert.add_argument(
        "--model", metavar="NAME", help="language model: a folder or a name on the hub"
    )
    invert.add_argument(
        "--text",
        metavar="SOURCE",
        help="the client's text: a .jsonl, .csv or text file, or a dataset as "
        "name:config:split:column",
    )
    invert.add_argument(
        "--public",
        metavar="SOURCE",
        help="text that the server owns and 'prefix' ranks tokens with, as --text; by default text "
        "by the model itself",
    )
    invert.add_argument(
        "--layer",
        nargs="+",
        type=_at_least(0),
        metavar="K",
        help="splits: blocks whose output is sent, 0 for the embeddings; by default at a third and "
        "two thirds",
    )
    invert.add_argument(
        "--noise",
        nargs="+",
        type=_number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0"),
        default=[0.0, 0.3, 1.0, 3.0],
        metavar="S",
        help="standard deviations of the noise",
    )
    invert.add_argument(
        "--relative",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--noise counts in standard deviations of each dimension of the hidden states, or is "
        "absolute",
    )
    invert.add_argument(
        "--lengths", nargs="+", type=_at_least(1), default=[32], metavar="N", help="tokens a text"
    )
    invert.add_argument(
        "--texts", type=_at_least(1), default=4, metavar="N", help="texts attacked in each cell"
    )
    invert.add_argument(
        "--attack",
        nargs="+",
        choices=("prefix", "sweeps", "descent", "paper", "relaxation"),
        help="by default 'prefix' for causal models, 'sweeps' (descent with verified changes) for "
        "encoders",
    )
    invert.add_argument(
        "--steps",
        type=_at_least(1),
        default=1000,
        metavar="N",
        help="gradient steps of a descent, at most",
    )
    invert.add_argument(
        "--budget-seconds",
        type=_number(float, lambda x: x > 0, "a positive number"),
        default=60.0,
        metavar="X",
        help="wall time of an attack on the texts of one cell, after which its best so far counts; "
        "'inf' for no bound",
    )
    invert.add_argument(
        "--precision", choices=("fp32", "bf16", "fp64"), default="fp32", help="of the model"
    )
    invert.add_argument(
        "--bos", type=_at_least(0), metavar="ID", help="token id put before every text"
    )
    _add_seed(invert, "of the choice of texts and of the noise")
    invert.add_argument(
        "--out",
        type=Path,
        default=Path("fedleak_runs/inversion"),
        metavar="DIR",
        help="folder of results and plots",
    )


def _add_seed(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--seed",
        type=_number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295"),
        default=0,
        metavar="N",
        help=what,
    )


def _position(text: str) -> str | int:
    if text in ("random", "last"):
        return text
    wanted = "'random', 'last' or a whole number of at least 0"
    return int(_number(int, lambda n: n >= 0, wanted)(text))


def _at_least(least: int) -> Callable[[str], float]:
    return _number(int, lambda n: n >= least, f"a whole number of at least {least}")


def _number(
    kind: Callable[[str], float], holds: Callable[[float], bool], wanted: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}")
        return value

    return parse


__all__ = ["parser"]

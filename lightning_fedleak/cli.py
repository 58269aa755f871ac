"""The command ``fedleak``. Imports only what the chosen subcommand needs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``fedleak``; the console script.

    Args:
        argv: arguments without the program's name; None reads the command line.

    Returns:
        Exit status: 0 when done, 1 after an error that the user can mend (said on stderr), 130
        after an interrupt.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["fit"]:
        return _fit(None if argv is None else arguments)
    return _demo(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedleak",
        description="See, while a language model is being fine-tuned, what the gradients that "
        "leave a client give away.",
    )
    parser.add_argument("--version", action="version", version=version("lightning-fedleak"))
    commands = parser.add_subparsers(required=True, metavar="{demo,fit}")
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
    at_least_one = _number(int, lambda n: n >= 1, "a whole number of at least 1")
    demo.add_argument(
        "--steps", type=at_least_one, default=100, metavar="N", help="steps of the first run"
    )
    demo.add_argument(
        "--batch-size", type=at_least_one, default=8, metavar="N", help="texts a batch"
    )
    demo.add_argument(
        "--length",
        type=_number(int, lambda n: n >= 2, "a whole number of at least 2"),
        default=64,
        metavar="N",
        help="tokens a text, at most",
    )
    demo.add_argument(
        "--every-n-steps", type=at_least_one, default=5, metavar="N", help="steps between two looks"
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
    demo.add_argument(
        "--seed",
        type=_number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 4294967295"),
        default=0,
        metavar="N",
        help="of split, order, dropout and calibration",
    )
    demo.add_argument(
        "--reveal",
        action="store_true",
        help="also write the recovered words to a local file that only you can read",
    )
    commands.add_parser(
        "fit", help="fine-tune any causal language model on any text, configured by LightningCLI"
    )
    return parser


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


def _demo(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("tensorboard") is None:
        print(
            "fedleak: 'demo' writes TensorBoard logs: pip install 'lightning-fedleak[demo]'",
            file=sys.stderr,
        )
        return 1
    # Threads that spin while they wait starve each other where other programs use the cores too;
    # OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lightning_fedleak.demo.run import INTERRUPTED, Demo, UserError

    try:
        return Demo(**vars(options)).run()
    except UserError as error:
        print(f"fedleak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedleak: interrupted", file=sys.stderr)
        return INTERRUPTED


def _fit(arguments: Sequence[str] | None) -> int:
    # LightningCLI's own calls to jsonargparse are meant, and not the user's to mend.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    try:
        from lightning_fedleak.demo.fit import fit
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"jsonargparse", "docstring_parser"}:
            raise
        print(
            "fedleak: 'fit' needs LightningCLI: pip install 'lightning-fedleak[cli]'",
            file=sys.stderr,
        )
        return 1
    from lightning_fedleak.demo.assets import SourceError

    try:
        fit(arguments)
    except SourceError as error:
        print(f"fedleak: {error}", file=sys.stderr)
        return 1
    return 0

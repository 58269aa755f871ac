"""The options of the subcommands that read the logs of runs. Imports nothing that these need.

Each function adds the options of one command. Its docstring is the command's help.
"""

from __future__ import annotations

from pathlib import Path

from lightning_fedleak.cli.commands.options import Add, path_option


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

"""Commands of the docs, stored beside what they printed: for tables that no log of a script holds.

    python -m benchmarks.record --model stories15M=DIR smollm2=DIR           # what was not run yet
    python -m benchmarks.record --model stories15M=DIR smollm2=DIR --again   # all anew
    python -m benchmarks.record --show

``recorded.jsonl`` beside this file has a line for each command: the pages whose tables are made of
it, the command as it stands there, with ``<name>`` for a folder, and what it printed, when and
where. A new command is a line with ``pages`` and ``command`` alone. ``--only TEXT`` runs the
commands that hold the text. One that fails is named, and keeps what it printed before; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

SMOKE = ("--show", "--log {out}/log.jsonl")
LOG = Path(__file__).with_name("recorded.jsonl")
ROOT = Path(__file__).resolve().parents[1]


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return what a log holds, nothing where there is none."""
    return (
        [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    )


def words_of(command: str, folders: Mapping[str, str]) -> list[str]:
    """Return the words of a command that is run, with folders in place of their names.

    Raises:
        KeyError: a name that no folder is given for.
    """
    words = [re.sub(r"<([^<>]*)>", lambda m: folders[m[1]], word) for word in shlex.split(command)]
    return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def printed_by(words: Sequence[str]) -> list[str]:
    """Return the lines that a command prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | threads | {"PYTHONPATH": path}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=DIR")
    parser.add_argument("--again", action="store_true", help="also what was run")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that hold it")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--log", type=Path, default=LOG)
    options = parser.parse_args()
    folders = {
        name: str(Path(at).resolve()) for name, _, at in (m.partition("=") for m in options.model)
    }
    lines, failed = lines_of(options.log), []
    for line in lines:
        if (
            not options.show
            and options.only in line["command"]
            and (options.again or "date" not in line)
        ):
            try:
                printed = printed_by(words_of(line["command"], folders))
            except KeyError as name:
                parser.error(f"give --model {name.args[0]}=DIR, for: {line['command']}")
            except subprocess.CalledProcessError:
                failed.append(line["command"])
                continue
            line |= {"printed": printed, "date": str(date.today()), "machine": platform.machine()}
            whole = "".join(json.dumps(each) + "\n" for each in lines)
            options.log.write_text(whole, "utf-8")
        print(f"\n{line['command']}\n{line.get('date', 'not run')}, for {', '.join(line['pages'])}")
        print("\n".join(line.get("printed", [])), flush=True)
    print(f"\n{len(lines)} commands, {len(failed)} failed")
    for command in failed:
        print(f"FAILED {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

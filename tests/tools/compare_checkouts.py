"""Shows whether anything that users can observe differs between two checkouts of this project.

::

    python tests/tools/compare_checkouts.py OLD NEW

What is compared, byte for byte, with a unified diff for each title that differs:

- ``api``: signature and docstring of every name that the package and its folders hand on,
  with public methods, properties, fields and constants; whether dotted paths that OLD's docs,
  recipes and examples name can be found. Modules in front of a name do not count.
- ``help``: ``--help`` of ``fedleak`` and each subcommand, and what ``fit`` says of its classes.
- ``states``: settings of attacks at their defaults, names of metrics, keys and shapes of states.
- ``fits``: what seeded fits log, write, warn of and keep in a checkpoint, their weights and the
  state of the global random numbers afterwards. Seconds, and lines in files, do not count.
- ``resumes``: the same of fits that go on from checkpoints that OLD has written in mid-run.

Each checkout runs in a process of its own, with this interpreter, one thread and these tools.
``--ignore-file F`` names differences that are meant, one a line: ``TITLE  # why``, where TITLE is
a title of the output (``api / lightning_fedleak: LeakageMonitor``) and may hold ``*``; a line
that fits no difference is said, and is no error. Exits 1 where a difference remains.

``--make-checkpoints DIR CHECKOUT`` writes the checkpoints of ``resumes`` into a folder.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SECTIONS = ("api", "help", "states", "fits", "resumes")
SHOWN = 60
"""Lines of a diff that are printed."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "COLUMNS": "100",
}
PATH = re.compile(r"\blightning_fedleak(?:\.\w+)+")


def collect(checkout: Path, *arguments: str) -> None:
    """Runs the collector on a checkout; ends the program where it fails."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "FEDLEAK"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(HERE / "collector.py"), *arguments],
            env={**kept, **ENVIRONMENT, "PYTHONPATH": str(checkout)},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"{checkout} could not be looked at:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")


def documented(checkout: Path) -> list[str]:
    """Dotted paths that docs, recipes and examples name."""
    files = [checkout / "README.md"]
    for folder, ending in (("docs", "*.md"), ("callbacks", "*.yaml"), ("examples", "*")):
        files += sorted((checkout / folder).glob(ending))
    texts = [path.read_text() for path in files if path.suffix in (".md", ".yaml", ".py")]
    paths = {p for text in texts for p in PATH.findall(text) if not p.endswith((".py", ".md"))}
    return sorted(paths)


def meant(ignore_file: Path | None) -> list[str]:
    """Patterns of titles; each line must say why.

    Raises:
        SystemExit: one does not.
    """
    if ignore_file is None:
        return []
    patterns = []
    for line in ignore_file.read_text().splitlines():
        title, _, why = line.partition("  # ")
        if not title.strip() or title.startswith("#"):
            continue
        if not why.strip():
            sys.exit(f"{ignore_file}: '{line}' does not say why: TITLE  # why")
        patterns.append(title.strip())
    return patterns


def fits(title: str, pattern: str) -> bool:
    """Whether a title is meant by a pattern; brackets stand for themselves."""
    return fnmatch.fnmatchcase(title, re.sub(r"[\[\]]", "?", pattern))


def differences(old: dict[str, list[str]], new: dict[str, list[str]]) -> dict[str, list[str]]:
    """Unified diffs by title, of the titles that differ; of one that is missing only where."""
    found = {}
    for title in [*old, *(t for t in new if t not in old)]:
        if title not in new:
            found[title] = [f"only in OLD, {len(old[title])} lines"]
        elif title not in old:
            found[title] = ["only in NEW:", *new[title]]
        elif old[title] != new[title]:
            lines = difflib.unified_diff(old[title], new[title], "old", "new", lineterm="", n=2)
            found[title] = list(lines)
    return found


def main() -> int:
    """Compares; the exit status."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="OLD and NEW")
    parse.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parse.add_argument("--ignore-file", type=Path, metavar="F")
    parse.add_argument("--make-checkpoints", type=Path, metavar="DIR")
    parse.add_argument("--all-lines", action="store_true", help="of every diff")
    options = parse.parse_args()
    checkouts = [path.resolve() for path in options.checkouts]
    for path in checkouts:
        if not (path / "lightning_fedleak/__init__.py").is_file():
            parse.error(f"{path} is no checkout: it has no lightning_fedleak/")
    if options.make_checkpoints is not None:
        if len(checkouts) != 1:
            parse.error("--make-checkpoints takes one checkout")
        options.make_checkpoints.mkdir(parents=True, exist_ok=True)
        collect(
            checkouts[0], "--make-checkpoints", str(options.make_checkpoints.resolve()), "--only"
        )
        return 0
    if len(checkouts) != 2:
        parse.error("give two checkouts: OLD NEW")
    patterns = meant(options.ignore_file)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = documented(checkouts[0])
        for number, checkout in enumerate(checkouts):
            out = Path(folder) / f"{number}.json"
            if number == 0 and "resumes" in options.only:
                collect(checkout, "--make-checkpoints", folder, "--only")
            collect(
                checkout,
                *("--only", *options.only, "--checkpoints", folder, "--out", str(out)),
                *("--documented", *paths),
            )
            found.append(json.loads(out.read_text()))
            broken = {t: v for section in found[0].values() for t, v in section.items()}
            for title, lines in broken.items():
                if title.endswith(": raised"):
                    sys.exit(f"OLD must show what is compared, but {title} {lines[0]}")
    return report(found[0], found[1], patterns, SHOWN if not options.all_lines else sys.maxsize)


def report(
    old: dict[str, dict[str, list[str]]],
    new: dict[str, dict[str, list[str]]],
    patterns: list[str],
    shown: int,
) -> int:
    """Prints what differs; 1 where something does that no pattern names."""
    used: set[str] = set()
    left = 0
    for section, was in old.items():
        lines = sum(map(len, was.values()))
        found = differences(was, new[section])
        ignored = 0
        for title, diff in found.items():
            full = f"{section} / {title}"
            known = [p for p in patterns if fits(full, p)]
            used.update(known)
            if known:
                ignored += 1
                continue
            left += 1
            print(f"\n==== {full}")
            print("\n".join(diff[:shown]))
            if len(diff) > shown:
                print(f"... and {len(diff) - shown} more lines (--all-lines)")
        print(
            f"{section}: {len(was)} titles, {lines} lines; "
            f"{len(found) - ignored} differ, {ignored} differ as meant"
        )
    for pattern in patterns:
        if pattern not in used:
            print(f"no difference is meant by '{pattern}'")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

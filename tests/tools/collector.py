"""Prints as JSON what can be observed of the checkout that ``PYTHONPATH`` names.

Run by compare_checkouts.py, once in each checkout; imports nothing of either by a deep path.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import logging
import os
import pkgutil
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "lightning_fedleak"
Section = dict[str, list[str]]
"""Lines of text under a title; two checkouts are compared title by title."""

OURS = re.compile(rf"\b{PACKAGE}(?:\.[a-z_]\w*)*\.(?=\w)")
RAISED = ": raised"
WIDE, NARROW = "4000", "100"
HELP = {
    "fedleak": ["--help"],
    **{f"fedleak {name}": [name, "--help"] for name in ("demo", "game", "invert", "sweep", "fit")},
    "fit, classes": [
        *("callbacks=LeakageMonitor", "callbacks=RiskGate", "strategy=DefendedStrategy")
    ],
}


def bare(text: str) -> str:
    """Without the modules that names of this package lie in, addresses and the checkout's place."""
    text = text.replace(f"{Path(importlib.import_module(PACKAGE).__path__[0]).parent}/", "")
    return re.sub(r"\b0x[0-9a-f]+", "0x", OURS.sub("", text))


# ---- 1. what can be imported --------------------------------------------------------------------


def packages() -> list[str]:
    """The package and its folders; folders in folders are not looked at."""
    root = importlib.import_module(PACKAGE)
    folders = [m.name for m in pkgutil.iter_modules(root.__path__) if m.ispkg]
    return [PACKAGE, *(f"{PACKAGE}.{name}" for name in folders)]


def handed_on(module: ModuleType) -> list[str]:
    """The names of ``__all__``, or else those that a folder imports ``as`` themselves."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    nodes = ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8")))
    aliases = (a for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names)
    return sorted(a.name for a in aliases if a.asname == a.name)


def ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == PACKAGE


def signature(thing: Any) -> list[str]:
    """Each parameter on a line of its own, and what is returned."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ["        (no signature)"]
    parameters = [f"        {p.kind.description}: {p}" for p in found.parameters.values()]
    return [bare(line) for line in (*parameters, f"        -> {found.return_annotation}")]


def described(name: str, thing: Any) -> list[str]:
    """Signature and docstring of a name that is handed on; of a class all that is public in it."""
    if inspect.isclass(thing) and ours(thing):
        return list(_class(name, thing))
    if inspect.isroutine(thing):
        return [f"def {name}", *signature(thing), *_doc(thing)]
    return [f"{name} = {bare(repr(thing))}"]


def _class(name: str, cls: type) -> Iterable[str]:
    bases = [c.__name__ for c in cls.__mro__[1:] if not (ours(c) and c.__name__.startswith("_"))]
    yield f"class {name}"
    yield from signature(cls)
    yield f"    is a: {', '.join(bases)}"
    yield from _doc(cls)
    if issubclass(cls, enum.Enum):
        yield from (f"    {m.name} = {m.value!r}" for m in cls)
        return
    if dataclasses.is_dataclass(cls):
        yield from (f"    field {f.name}: {bare(str(f.type))}" for f in dataclasses.fields(cls))
    for member in sorted(dir(cls)):
        found = inspect.getattr_static(cls, member)
        home = next(c for c in cls.__mro__ if member in vars(c))
        if member.startswith("_") or not ours(home):
            continue
        if isinstance(found, property):
            writable = "" if found.fset is None else ", writable"
            yield f"    property {member}{writable}"
            yield from signature(found.fget)
            yield from _doc(found)
        elif callable(found) or isinstance(found, staticmethod | classmethod):
            kind = type(found).__name__
            yield f"    {kind} {member}"
            yield from signature(getattr(cls, member))
            yield from _doc(found)
        else:
            yield f"    {member} = {bare(repr(found))}"


def _doc(thing: Any) -> list[str]:
    text = inspect.getdoc(thing) or "(no docstring)"
    return [f"        | {line}".rstrip() for line in bare(text).splitlines()]


def api(documented: list[str]) -> Section:
    found: Section = {}
    for package in packages():
        module = importlib.import_module(package)
        if not (names := handed_on(module)):
            continue
        found[package] = [f"__all__ = {names}", *_doc(module)]
        for name in names:
            found[f"{package}: {name}"] = described(name, getattr(module, name))
    found["paths in docs"] = [f"{path}: {_resolves(path)}" for path in documented]
    return found


def _resolves(path: str) -> str:
    """Whether a dotted path can be imported, or reached from what can be."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for name in parts[split:]:
            thing = getattr(thing, name, None)
        return "found" if thing is not None else "not found"
    return "not found"


# ---- 2. the command line ------------------------------------------------------------------------


def said_by(arguments: list[str]) -> str:
    from lightning_fedleak.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            print(f"exit status {main(arguments)}")
        except SystemExit as end:
            print(f"exit status {end.code}")
    return out.getvalue()


def command_line() -> Section:
    found: Section = {}
    for title, arguments in HELP.items():
        if title == "fit, classes":
            for what in arguments:
                # In one line each, so that a path that is shorter now does not wrap anew.
                os.environ["COLUMNS"] = WIDE
                text = said_by(["fit", f"--trainer.{what.replace('=', '.help=')}"])
                found[f"fedleak fit, {what}"] = _listed(text)
            continue
        wide = "fit" in arguments
        os.environ["COLUMNS"] = WIDE if wide else NARROW
        text = said_by(arguments)
        found[" ".join(["fedleak", *arguments])] = _listed(text) if wide else text.splitlines()
    return found


def _listed(text: str) -> list[str]:
    """Known classes on lines of their own, sorted; deep paths without their modules.

    What stands directly in the package or in one of its folders is public and keeps its path.
    """
    deep = re.compile(rf"\b{PACKAGE}(?:\.[a-z_]\w*){{2,}}\.(?=[A-Z])")
    out = []
    for line in deep.sub("", text).splitlines():
        head, known, tail = line.partition("known subclasses: ")
        out += textwrap.wrap(head, int(NARROW)) or [""]
        if known:
            out += [f"    {name}" for name in sorted(tail.rstrip(")").split(", "))]
    return out


# ---- 3. names and states ------------------------------------------------------------------------


def names_and_states() -> Section:
    import seeded_runs as runs

    import lightning_fedleak as fedleak

    found: Section = {}
    attacks: dict[str, Callable[[], Any]] = {
        "FlatChat": fedleak.FlatChat,
        "FlatChat with public text": lambda: fedleak.FlatChat(runs.public()),
        "AlignedFlatChat": lambda: fedleak.AlignedFlatChat(runs.public()),
        "RevealLabels": fedleak.RevealLabels,
        "BagOfWords": fedleak.BagOfWords,
        "BiasSign": fedleak.BiasSign,
        "FCMembership": lambda: fedleak.FCMembership(1),
        "FCMembership, full": lambda: fedleak.FCMembership(1, "full"),
        "AttentionMembership": lambda: fedleak.AttentionMembership(1, runs.public()),
        "PrefixInversion": lambda: fedleak.PrefixInversion(1),
        "EmbeddingDescent": lambda: fedleak.EmbeddingDescent(1),
    }
    for title, build in attacks.items():
        attack = build()
        needs = sorted(c.name for c in attack.threat_model.needs)
        found[f"attack {title}"] = [
            f"name {attack.name}",
            f"config {bare(repr(attack.config()))}",
            f"given {bare(repr(attack.arguments()))}",
            f"threat model {needs}: {attack.threat_model.summary}",
            *runs.shapes(attack.state_dict(), "state"),
        ]
    defenses: dict[str, Callable[[], Any]] = {
        "DPSGD": lambda: fedleak.DPSGD(1.0, 1.0),
        "DPSGD, filter": lambda: fedleak.DPSGD(
            1.0, 1.0, target_epsilon=8.0, target_delta=1e-5, accountant="filter"
        ),
        "GradientNoise": lambda: fedleak.GradientNoise(1.0, 0.1),
        "ActivationNoise": lambda: fedleak.ActivationNoise(1, 0.1),
        "ActivationCompression": lambda: fedleak.ActivationCompression(1, keep_dims=4),
        "Freeze": lambda: fedleak.Freeze("head"),
        "TokenLDP": lambda: fedleak.TokenLDP("grr", 1.0, special_ids=[0]),
    }
    for title, build in defenses.items():
        defense = build()
        found[f"defence {title}"] = [
            f"name {defense.name}, guarantee: {defense.guarantee}",
            f"can harden {getattr(defense, 'can_harden', None)}",
            *runs.leaves(defense.state_dict(), "state"),
        ]
    monitors = {**{name: run.callbacks for name, run in runs.RUNS.items()}}
    monitors["checkpointed"] = runs.checkpointed
    for title, build_all in monitors.items():
        lines: list[str] = []
        for callback in build_all():
            lines.append(f"state_key {callback.state_key}")
            if runs.is_monitor(callback):
                lines += callback.metric_names()
            lines += runs.shapes(callback.state_dict(), "state")
        found[f"callbacks of '{title}'"] = lines
    return found


# ---- 4. and 5. fits -----------------------------------------------------------------------------


def fits() -> Section:
    import seeded_runs as runs

    return _shown({name: lambda f, r=run: runs.shown_by(r, f) for name, run in runs.RUNS.items()})


def resumes(folder: Path) -> Section:
    import seeded_runs as runs

    return _shown(
        {
            f"resumed, {name}": lambda f, n=name, r=run: runs.resumed(r, folder / f"{n}.ckpt", f)
            for name, run in runs.SAVED.items()
        }
    )


def _shown(all_of: dict[str, Callable[[Path], dict[str, list[str]]]]) -> Section:
    found: Section = {}
    for name, show in all_of.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                shown = show(Path(folder))
            except Exception as error:
                found[f"{name}{RAISED}"] = [f"{type(error).__name__}: {bare(str(error))}"]
                continue
        found |= {f"{name}: {kind}": lines for kind, lines in shown.items()}
    return found


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--only", nargs="*", default=["help", "api", "states", "fits", "resumes"])
    parse.add_argument("--make-checkpoints", type=Path, metavar="DIR")
    parse.add_argument("--checkpoints", type=Path, metavar="DIR")
    parse.add_argument("--documented", nargs="*", default=[])
    parse.add_argument("--out", type=Path)
    options = parse.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.make_checkpoints is not None:
        import seeded_runs as runs

        for name, run in runs.SAVED.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.make_checkpoint(run, options.make_checkpoints / f"{name}.ckpt", Path(folder))
    sections: dict[str, Callable[[], Section]] = {
        "help": command_line,  # first: it lists the classes that are imported by then
        "api": lambda: api(options.documented),
        "states": names_and_states,
        "fits": fits,
        "resumes": lambda: resumes(options.checkpoints),
    }
    found = {name: sections[name]() for name in sections if name in options.only}
    if options.out is not None:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""The import directions of the package, read from the source without importing it."""

import ast
import functools
import graphlib
import re
from pathlib import Path
from typing import TypeGuard

import pytest

PACKAGE = "lightning_fedleak"
ROOT = Path(__file__).parents[1] / PACKAGE
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
SHARED = {"validate", "progress", "extras", "private_files", "messages"}
MODEL = {*SHARED, "model"}
# What each part of the package may import from the rest of it; absent: everything. A folder's row
# holds for all below it that has no row.
ALLOWED = {
    **{name: set() for name in SHARED},
    "lightning_packages": set(),
    "model": SHARED,
    "attacks": MODEL,
    "defenses": MODEL,
    "report.records": MODEL,
    "evaluation": MODEL | {"attacks", "defenses"},
    "report": MODEL | {"report.records", "evaluation", "defenses"},
    "evidence": MODEL | {"report.records", "report"},
    # "" is the package itself, whose version a stored calibration names.
    "engine": MODEL | {"", "attacks", "defenses", "evaluation", "report.records"},
    "strategies": MODEL | {"defenses", "lightning_packages"},
    "callbacks": MODEL
    | {"attacks", "defenses", "evaluation", "report.records", "report", "engine", "strategies"}
    | {"lightning_packages"},
    "trainers": MODEL | {"attacks", "defenses", "report", "engine"},
    "federation": MODEL
    | {"attacks", "defenses", "evaluation", "report.records", "engine", "lightning_packages"},
    "cli.finetuning": MODEL | {"defenses", "lightning_packages"},
    "cli.studies": MODEL | {"attacks", "evaluation"},
    "cli.studies.references": MODEL | {"attacks", "evaluation", "report.records"},
}
WITHOUT_LIGHTNING = (
    *SHARED,
    *("model", "attacks", "defenses", "evaluation", "report.records", "report", "engine"),
    "evidence",
    "trainers",
    "cli.studies",
)
NESTED = ("model", "evaluation", "report", "cli")
"""Folders whose subfolders re-export the names."""
FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def row_of(module: str) -> str:
    """The row of the table that holds for a module: of itself, or of a folder above it."""
    parts = module.split(".")[1:]
    rows = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((row for row in rows if row in ALLOWED), part_of(module))


def part_of(module: str) -> str:
    """First level below the package: ``attacks`` of ``lightning_fedleak.attacks.base``.

    Records are a part of their own, which may be imported without the pages of ``report``.
    """
    parts = module.split(".")[1:3]
    return ".".join(parts if parts == ["report", "records"] else parts[:1])


def public_package_of(module: str) -> str:
    """The folder that re-exports a module's names."""
    parts = module.split(".")
    return ".".join(parts[: 3 if len(parts) > 1 and parts[1] in NESTED else 2])


def is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Modules that a file imports, absolute. ``from a import b`` counts as a.b where that exists.

    With ``at_import_time`` only those that run when the file is imported.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_import_time and (
            is_type_checking(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports in the package are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which holds no statement
                visit(child)

    visit(parse(path))
    return found


MODULES = {module_name(path): path for path in FILES}


def test_imports_follow_the_table() -> None:
    assert imported(ROOT / "engine" / "__init__.py")  # they are found at all
    wrong = {}
    for module, path in MODULES.items():
        part, names = row_of(module), imported(path)
        imported_parts = {part_of(n) for n in names if n.split(".")[0] == PACKAGE} - {
            part_of(module)
        }
        forbidden = imported_parts - ALLOWED.get(part, imported_parts)
        if part in WITHOUT_LIGHTNING:
            forbidden |= {n for n in names if n.split(".")[0] in LIGHTNING}
        if forbidden:
            wrong[module] = sorted(forbidden)
    assert wrong == {}, "what each of these modules must not import"


@pytest.mark.parametrize("part", ["callbacks", "strategies", "federation"])
def test_what_a_trainer_gets_is_of_either_package_of_lightning(part: str) -> None:
    for path in (path for name, path in MODULES.items() if part_of(name) == part):
        names = imported(path, at_import_time=True)
        assert not {n for n in names if n.split(".")[0] in LIGHTNING}, path


def test_contributing_shows_this_table() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| folder or module |")[2].partition("\n\n")[0]
    shown = {}
    for row in table.splitlines()[2:]:
        names, allowed = (re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:3])
        if "model, shared" in row:
            allowed = {*MODEL, *allowed}
        elif "shared" in row.split("|")[2]:
            allowed = SHARED
        shown |= {name: set(allowed) for name in names}
    del shown["cli"]
    assert shown == {name: allowed - {""} for name, allowed in ALLOWED.items()}


def test_no_circular_imports() -> None:
    graph = {
        name: {n for n in imported(path, at_import_time=True) if n in MODULES and n != name}
        for name, path in MODULES.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(MODULES)


_CONSTANTS = {"__all__", "__version__", "__getattr__", "_ACCELERATE"}


def test_folders_only_hand_names_on() -> None:
    nodes = [(p, node) for p in FILES if p.name == "__init__.py" for node in parse(p).body]
    for path, node in nodes:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constant = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id in _CONSTANTS for t in node.targets
        )
        imports = isinstance(node, ast.Import | ast.ImportFrom) or is_type_checking(node)
        assert docstring or constant or imports, (
            f"{path}: line {node.lineno} does more than hand names on"
        )


def test_another_folder_is_imported_through_its_face() -> None:
    faces = {
        name: {
            alias.name: node.module
            for statement in parse(path).body
            for node in (statement.body if is_type_checking(statement) else [statement])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for name, path in MODULES.items()
        if path.name == "__init__.py" and public_package_of(name) == name
    }
    bypassing = [
        f"{path.relative_to(ROOT)}: {', '.join(alias.name for alias in node.names)}"
        for path in FILES
        if path.name != "__init__.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module
        if (public := public_package_of(node.module))
        not in (node.module, public_package_of(module_name(path)))
        and all(faces.get(public, {}).get(alias.name) == node.module for alias in node.names)
    ]
    assert bypassing == []


def test_no_folder_has_more_than_16_modules() -> None:
    modules = {
        str(folder.relative_to(ROOT)): [p for p in folder.glob("*.py") if p.name != "__init__.py"]
        for folder in [ROOT, *(p for p in ROOT.rglob("*") if p.is_dir())]
    }
    assert {name: len(held) for name, held in modules.items() if len(held) > 16} == {}

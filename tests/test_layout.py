"""The import directions of the package, read from the source without importing it."""

import ast
import functools
import graphlib
import re
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.tools import code_metrics, lowest_versions
from tools import control_picture

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


@pytest.fixture(scope="module")
def measures():
    return code_metrics.CodeMetrics().measure()


@pytest.mark.parametrize("row", code_metrics.ROWS, ids=lambda row: row.name)
def test_no_count_rises(measures, row):
    value, places = measures[row.name]
    root = code_metrics.ROOT
    shown = "\n".join(f"{p.path.relative_to(root)}:{p.line}: {p.text}" for p in places[:20])
    assert value <= row.at_most, f"all: make metrics ARGS='--list {row.name}'\n{shown}"


def small(tmp_path: Path, **files: str) -> dict[str, code_metrics.Measure]:
    root = tmp_path / code_metrics.PACKAGE
    for name, text in {"__init__": "", **files}.items():
        path = root / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return code_metrics.CodeMetrics(tmp_path).measure()


def lines(measure: code_metrics.Measure) -> list[int]:
    return [place.line for place in measure.places]


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path):
    text = '"""One\n\ntwo."""\n\n# three\nx = """a\n\nb"""  # four\n'
    assert small(tmp_path, a=text)["code"].value == 3


def test_names_are_counted_where_they_are_bound(tmp_path):
    text = (
        "def _said(of, *, name, b=1):\n"
        "    for told, x in ():\n        x.held = told\n    __in__ = x\n"
    )
    measures = small(tmp_path, a=text)
    assert lines(measures["names"]) == [1, 1, 2, 3]
    assert measures["names"].value == 4 / (1 + 3 + 2 + 1 + 1)


def test_imports_for_types_close_a_circle_and_count(tmp_path):
    measures = small(
        tmp_path,
        a="if TYPE_CHECKING:\n    from lightning_fedleak import b\n",
        b="from .c import x\n",
        c="from lightning_fedleak.a import y\n",
        d="def f():\n    from lightning_fedleak import a, b, c\n",
    )
    assert (
        measures["circles"].places[0].text
        == "lightning_fedleak.a, lightning_fedleak.b, lightning_fedleak.c"
    )
    assert measures["circles"].value == 1
    assert measures["most_imports"].value == 3


# The picture of a control is drawn by the rule of gates, and loads nothing.


PICTURE = Path(__file__).parents[1] / "docs" / "control.svg"


def test_the_picture_in_the_docs_is_the_one_that_is_drawn() -> None:
    assert PICTURE.read_text(encoding="utf-8") == control_picture.picture()


# The tools' own logic.


def test_the_lowest_versions_are_the_bounds_of_the_extras_named():
    project = {
        "name": "me",
        "dependencies": ["torch>=2", "a>=1.5"],
        "optional-dependencies": {"x": ["b-c[d]>=0.6", "a>=1.5"], "y": ["me[x]"], "z": ["e==1.*"]},
    }
    pins = lowest_versions.lowest({"project": project}, ["y"], "a==9\ntorch==7\ntorchmetrics==3\n")
    assert pins == ["a==1.5", "b-c==0.6", "torch==7"]
    assert lowest_versions.names({"project": project}, ["y", "z"]) == ["a", "b-c[d]", "e", "torch"]


def test_every_bound_that_make_test_lowest_needs_can_be_told(capsys):
    makefile = (lowest_versions.ROOT / "Makefile").read_text()
    asked, by_name = re.findall(r"lowest_versions\.py (.*) >", makefile)
    assert by_name == f"--names {asked}"
    assert f'".[{asked.replace(" ", ",")}]"' in makefile
    lowest_versions.main(asked.split())
    pins = capsys.readouterr().out.splitlines()
    assert {"transformers==4.56", "pandas==2", "pytest==8"} <= set(pins)


@pytest.mark.parametrize("need", ["a", "a<2", "a>=1,<2", "a>=2"])
def test_a_bound_that_cannot_be_told_is_refused(need):
    project = {"name": "me", "dependencies": ["torch>=2", "a>=1"]}
    project["optional-dependencies"] = {"x": [need]}
    with pytest.raises(ValueError, match="'a"):
        lowest_versions.lowest({"project": project}, ["x"], "torch==7\n")

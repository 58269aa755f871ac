"""Count what makes the package easy or hard to read: lines, imports, arguments, names, docstrings.

::

    python -m tests.tools.code_metrics                              # the whole package
    python -m tests.tools.code_metrics lightning_fedleak/attacks    # one folder or file of it
    python -m tests.tools.code_metrics ../other                     # another checkout
    python -m tests.tools.code_metrics --list names lightning_fedleak/engine    # where each one is

The source is parsed and never imported. What each row counts:

code        lines with a token that is neither a comment nor part of a docstring; a comment between
            two texts that are joined counts
longest     lines of the longest file
long        files of more than 600 lines
imports     files that import eight modules of this package or more, those for types and those
            inside functions included, an ``__init__.py`` not; ``most_imports`` is the most of one
circles     groups of modules that import each other, for types included, inside functions not; the
            root, which hands all names on, is left out
parameters  functions of more than eight parameters, ``self`` and ``cls`` not counted;
            ``most_parameters`` is the most of one function
complexity  functions of more than 20 branches. Counted here: one, and one more for each if, loop,
            handler, assert, case and conditional expression, for each further operand of ``and``
            and ``or``, for each loop and condition of a comprehension; nested functions included.
            Ruff's C901 counts no operands, expressions and comprehensions, and finds none.
public      public classes and functions of modules whose name is defined in two files or more
private     private ones whose name is defined in three files or more
names       participles and prepositions (``NAMES``) as variables, arguments, fields and functions,
            leading underscores aside, as a share of all
fragments   docstrings that begin with a word of ``FRAGMENTS``, as a share of all
examples    public names of the package's root without an example (``>>>``) in their docstring
constants   numbers that a module binds to a name (a tuple of them once) without a comment beside or
            above, or a docstring below
any         occurrences of ``[str, Any]``
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_fedleak"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMES = _words(
    """
    of at by in into onto out on off to from for with within without about along among around
    between against over under across here there where when which what who whose whom how this
    that these those then so own mine ours theirs yours said told found given taken moved held
    kept left asked seen known made gone done got took brought caught heard met shown drawn
    wanted begun began grew ran thought lost
    """
)
FRAGMENTS = _words(
    """
    Of That Those As By Which Whose Where With Within Without From For In On At To Is Has Under
    Over Around Between Against About After Before Inside
    """
)
MOST_LINES, MANY_IMPORTS, MOST_PARAMETERS, MOST_BRANCHES = 600, 8, 8, 20

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


class Place(NamedTuple):
    """A place in the source and what stands there."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: what ``--list`` takes.
        title: what is counted.
        at_most: what the package may hold. It may fall, and rises for a new feature alone.
        is_share: whether the value is a share between 0 and 1.
    """

    name: str
    title: str
    at_most: float
    is_share: bool = False

    def format(self, value: float) -> str:
        """Return a value of this row as text."""
        return f"{value:.1%}" if self.is_share else f"{value:,}"


ROWS = (
    Row("code", "code lines", 46_245),
    Row("longest", "lines of the longest file", 600),
    Row("long", "files above 600 lines", 0),
    Row("imports", "files with 8 or more own imports", 52),
    Row("most_imports", "most own imports of a file", 18),
    Row("circles", "circles of imports, for types included", 0),
    Row("parameters", "functions with more than 8 parameters", 11),
    Row("most_parameters", "most parameters of a function", 12),
    Row("complexity", "functions with more than 20 branches", 8),
    Row("public", "public names defined twice", 9),
    Row("private", "private names defined three times", 3),
    Row("names", "participles and prepositions as names", 0.006, is_share=True),
    Row("fragments", "fragments as docstrings", 0.005, is_share=True),
    Row("examples", "root names without an example", 0),
    Row("constants", "bare constants", 2),
    Row("any", "[str, Any]", 72),
)


class Measure(NamedTuple):
    """The value of a row, and where each one stands."""

    value: float
    places: list[Place]


class Source:
    """A parsed file of the package.

    Args:
        path: the file.
        root: the checkout that it belongs to.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.nodes: list[ast.AST] = []
        self.branches: dict[Function, int] = {}
        self._visit(self.tree)
        parts = path.relative_to(root).with_suffix("").parts
        self.is_face = parts[-1] == "__init__"
        self.module = ".".join(parts[:-1] if self.is_face else parts)

    def _visit(self, node: ast.AST) -> int:
        """List the nodes below a node, and count their branches, those of each function too."""
        self.nodes.append(node)
        count = isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        for name in node._fields:
            value = getattr(node, name)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    count += self._visit(child)
        if isinstance(node, Function):
            self.branches[node] = 1 + count
        return count

    def place(self, line: int, text: str) -> Place:
        """Return a place in this file."""
        return Place(self.path, line, text)

    @cached_property
    def docstrings(self) -> list[tuple[Documented, ast.Constant]]:
        """What has a docstring, with it."""
        documented = [n for n in self.nodes if isinstance(n, Documented) and n.body]
        return [(node, node.body[0].value) for node in documented if _is_text(node.body[0])]

    @cached_property
    def code_lines(self) -> int:
        """Lines of code without docstrings, comments and blanks."""
        stripped = (line.strip() for line in self.lines)
        lines = {n for n, line in enumerate(stripped, 1) if line and not line.startswith("#")}
        for node in self.nodes:  # blank lines and hashes within a text are code
            if isinstance(node, ast.Constant | ast.JoinedStr):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for _, text in self.docstrings:
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        return len(lines)

    def imports(self, modules: Iterable[str], *, in_functions: bool = True) -> dict[str, int]:
        """Return the modules of the package that this file imports, with the line of each."""
        package = self.module.split(".")
        package = package if self.is_face else package[:-1]
        lines: dict[str, int] = {}

        def visit(node: ast.AST) -> None:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package[: len(package) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    names.append(whole if whole in modules else base)
            for name in names:
                if name in modules and name != self.module:
                    lines.setdefault(name, node.lineno)  # type: ignore[attr-defined]
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    continue  # which holds no statement
                if in_functions or not isinstance(child, Function):
                    visit(child)

        visit(self.tree)
        return lines


class CodeMetrics:
    """The package of a checkout.

    Args:
        path: a checkout, or a folder or file of its package, to which the rows are restricted.
    """

    def __init__(self, path: Path = ROOT) -> None:
        path = path.resolve()
        root = next((p for p in (path, *path.parents) if (p / PACKAGE).is_dir()), None)
        if root is None:
            raise FileNotFoundError(f"{path} is no checkout with a folder {PACKAGE}")
        self.root = root
        files = sorted((root / PACKAGE).rglob("*.py"))
        self.sources = {source.module: source for source in (Source(p, root) for p in files)}
        self.selection = [s for s in self.sources.values() if path == root or self._is_in(s, path)]

    @staticmethod
    def _is_in(source: Source, path: Path) -> bool:
        return source.path == path or path in source.path.parents

    def measure(self) -> dict[str, Measure]:
        """Return the measure of each row, by the row's name."""
        measures = {
            "code": self._code(),
            **self._lines(),
            **self._imports(),
            "circles": self._circles(),
            **self._parameters(),
            "complexity": self._complexity(),
            **self._definitions(),
            "names": self._names(),
            "fragments": self._docstrings(),
            "examples": self._examples(),
            "constants": self._constants(),
            "any": self._any(),
        }
        return {row.name: measures[row.name] for row in ROWS}

    def _code(self) -> Measure:
        files = sorted(((s.code_lines, s) for s in self.selection), key=lambda f: -f[0])
        return Measure(
            sum(count for count, _ in files), [s.place(1, f"{count} lines") for count, s in files]
        )

    def _lines(self) -> dict[str, Measure]:
        counts = [(len(s.lines), s.place(1, f"{len(s.lines)} lines")) for s in self.selection]
        return {"longest": _largest(counts), "long": _exceeding(counts, MOST_LINES)}

    def _imports(self) -> dict[str, Measure]:
        counts = []
        for source in self.selection:
            if not source.is_face:
                modules = source.imports(self.sources)
                names = ", ".join(sorted(m.removeprefix(f"{PACKAGE}.") for m in modules))
                counts.append((len(modules), source.place(1, f"{len(modules)}: {names}")))
        return {"imports": _exceeding(counts, MANY_IMPORTS - 1), "most_imports": _largest(counts)}

    def _circles(self) -> Measure:
        graph = {
            name: set(source.imports(self.sources, in_functions=False))
            for name, source in self.sources.items()
            if name != PACKAGE
        }
        modules = {source.module for source in self.selection}
        circles = [circle for circle in _circles(graph) if modules.intersection(circle)]
        return Measure(
            len(circles),
            [self.sources[circle[0]].place(1, ", ".join(circle)) for circle in circles],
        )

    def _functions(self) -> Iterator[tuple[Source, Function]]:
        for source in self.selection:
            for function in source.branches:
                yield source, function

    def _parameters(self) -> dict[str, Measure]:
        counts = []
        for source, function in self._functions():
            known = function.args
            names = [one.arg for one in known.posonlyargs + known.args + known.kwonlyargs]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            counts.append((count, source.place(function.lineno, f"{function.name}: {count}")))
        return {
            "parameters": _exceeding(counts, MOST_PARAMETERS),
            "most_parameters": _largest(counts),
        }

    def _complexity(self) -> Measure:
        counts = []
        for source, function in self._functions():
            count = source.branches[function]
            counts.append((count, source.place(function.lineno, f"{function.name}: {count}")))
        return _exceeding(counts, MOST_BRANCHES)

    def _definitions(self) -> dict[str, Measure]:
        places: dict[str, list[Place]] = defaultdict(list)
        for source in self.sources.values():
            defined = [n for n in source.tree.body if isinstance(n, ast.ClassDef | Function)]
            for name, line in {node.name: node.lineno for node in defined}.items():
                places[name].append(source.place(line, name))
        paths = {source.path for source in self.selection}
        several = {
            name: homes
            for name, homes in places.items()
            if not name.startswith("__") and paths.intersection(place.path for place in homes)
        }
        measures = {}
        for row, least, is_private in (("public", 2, False), ("private", 3, True)):
            names_of_row = sorted(
                name
                for name, homes in several.items()
                if len(homes) >= least and name.startswith("_") == is_private
            )
            measures[row] = Measure(
                len(names_of_row), [place for name in names_of_row for place in several[name]]
            )
        return measures

    def _names(self) -> Measure:
        total = 0
        places = []
        for source in self.selection:
            for line, name in identifiers(source.nodes):
                total += 1
                if name.strip("_").lower() in NAMES and not name.startswith("__"):
                    places.append(source.place(line, name))
        return Measure(len(places) / max(total, 1), places)

    def _docstrings(self) -> Measure:
        total = 0
        fragments = []
        for source in self.selection:
            for _, docstring in source.docstrings:
                summary = " ".join(str(docstring.value).split("\n\n")[0].split())
                total += 1
                if summary.split()[0].strip(",.:;") in FRAGMENTS:
                    fragments.append(source.place(docstring.lineno, summary[:100]))
        return Measure(len(fragments) / max(total, 1), fragments)

    def _examples(self) -> Measure:
        places = []
        paths = {source.path for source in self.selection}
        for name in self.public_names():
            for source in self.sources.values():
                for node, docstring in source.docstrings:
                    if (
                        isinstance(node, ast.ClassDef | Function)
                        and node.name == name
                        and ">>>" not in str(docstring.value)
                        and source.path in paths
                    ):
                        places.append(source.place(node.lineno, name))
        return Measure(len(places), places)

    def public_names(self) -> list[str]:
        """Return the names of the package's root, its version aside."""
        blocks = [node for node in self.sources[PACKAGE].tree.body if isinstance(node, ast.If)]
        imports = [n for block in blocks for n in block.body if isinstance(n, ast.ImportFrom)]
        return [alias.name for node in imports for alias in node.names]

    def _constants(self) -> Measure:
        places = []
        for source in self.selection:
            body = source.tree.body
            for node, following in zip_longest(body, body[1:]):
                if (
                    isinstance(node, ast.Assign | ast.AnnAssign)
                    and node.value is not None
                    and _is_number(node.value)
                    and "#" not in source.lines[(node.end_lineno or node.lineno) - 1]
                    and not source.lines[node.lineno - 2].strip().startswith("#")
                    and not _is_text(following)
                ):
                    places.append(source.place(node.lineno, source.lines[node.lineno - 1].strip()))
        return Measure(len(places), places)

    def _any(self) -> Measure:
        places = [
            source.place(number, line.strip())
            for source in self.selection
            for number, line in enumerate(source.lines, 1)
            for _ in range(line.count("[str, Any]"))
        ]
        return Measure(len(places), places)


_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.Assert,
    ast.match_case,
)


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable, argument, field and function where it is bound."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.lineno, node.arg
        elif isinstance(node, Function):
            yield node.lineno, node.name


def _is_number(node: ast.expr) -> bool:
    """Return whether an expression is a number, arithmetic of numbers, or a tuple with one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Tuple) and any(map(_is_number, node.elts))


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _largest(counts: list[tuple[int, Place]]) -> Measure:
    """Return the largest count, with the ten places of the largest."""
    ordered = sorted(counts, key=lambda entry: -entry[0])
    return Measure(ordered[0][0] if ordered else 0, [place for _, place in ordered[:10]])


def _exceeding(counts: list[tuple[int, Place]], limit: int) -> Measure:
    """Return how many counts exceed a limit, with their places, the largest first."""
    ordered = sorted((entry for entry in counts if entry[0] > limit), key=lambda entry: -entry[0])
    return Measure(len(ordered), [place for _, place in ordered])


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected parts of a graph that have more than one node."""
    names = sorted(graph)
    edges = np.array([[target in graph[name] for target in names] for name in names])
    _, labels = connected_components(edges, connection="strong")
    parts: dict[int, list[str]] = defaultdict(list)
    for name, label in zip(names, labels.tolist(), strict=True):
        parts[label].append(name)
    return [part for part in parts.values() if len(part) > 1]


def main(arguments: list[str] | None = None) -> None:
    """Print the table, or the places of one row."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("path", nargs="?", type=Path, default=ROOT, help="default: this checkout")
    parse.add_argument("--list", choices=[row.name for row in ROWS], metavar="ROW")
    options = parse.parse_args(arguments)
    metrics = CodeMetrics(options.path)
    measures = metrics.measure()
    if options.list is not None:
        for place in measures[options.list].places:
            print(f"{place.path.relative_to(metrics.root)}:{place.line}: {place.text}")
        return
    width = max(len(row.title) for row in ROWS)
    print(f"{'row':<16}{'':<{width}}{'is':>10}{'at most':>10}")
    for row in ROWS:
        value = row.format(measures[row.name].value)
        print(f"{row.name:<16}{row.title:<{width}}{value:>10}{row.format(row.at_most):>10}")


if __name__ == "__main__":
    main()

"""Gives the index a README without relative links, and the recipes a place in the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from setuptools import find_packages, setup

FOLDER = Path(__file__).parent
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_INSTALL = re.compile(r"<!-- checkout -->\n.*?<!-- index\n(.*?)-->\n", re.DOTALL)
_REPOSITORY = ("repository", "source", "homepage")


def for_the_index(readme: str, urls: Mapping[str, str]) -> str:
    """The README as a package index shows it.

    Relative links and images become absolute where the project names its repository. Without one, a
    link keeps its text, and the file it leads to where that is named nowhere in it; an image goes.
    What stands between ``<!-- checkout -->`` and ``<!-- index`` is replaced by what that holds.

    Args:
        readme: in Markdown.
        urls: of the project, by label, as ``[project.urls]`` has them.
    """
    by_label = {label.lower(): url.rstrip("/") for label, url in urls.items()}
    home = next((by_label[label] for label in _REPOSITORY if label in by_label), None)

    def image(found: re.Match[str]) -> str:
        label, target = found.groups()
        if not _relative(target):
            return found[0]
        tail = found[0][found[0].rindex(")") + 1 :]
        return f"![{label}]({home}/raw/HEAD/{target}){tail}" if home else ""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        if not _relative(target):
            return found[0]
        if home is not None:
            return f"[{label}]({home}{target if target[0] == '#' else f'/blob/HEAD/{target}'})"
        file = target.partition("#")[0]
        if not file or file in label:
            return label
        in_brackets = found.string[: found.start()].endswith("(")
        return f"{label}: `{file}`" if in_brackets else f"{label} (`{file}`)"

    readme = _INSTALL.sub(r"\1", readme)
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_LINK.sub(link, _IMAGE.sub(image, part)) for part in parts[::2]]
    return "".join(parts)


def _relative(target: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:|//", target) is None


if __name__ == "__main__":
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    setup(
        packages=[*find_packages(include=["lightning_fedleak*"]), "lightning_fedleak.recipes"],
        long_description=for_the_index(readme, project.get("urls", {})),
        long_description_content_type="text/markdown",
    )

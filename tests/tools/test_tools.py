"""The tools' own logic."""

import re

import pytest

from tests.tools import lowest_versions


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

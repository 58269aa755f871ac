import os
from pathlib import Path

import pytest
import yaml

from lightning_fedleak.report import entry, findings, read, registry
from lightning_fedleak.report.registry import FIELDS, REQUIRED
from tests.report.lines import begin, dpsgd, look, result, spent, written

SCHEMA = os.environ.get("FEDLEAK_REGISTRY_SCHEMA")


def private_run(folder: Path, people=None):
    record = [begin(defenses=[dpsgd()]), look(3, privacy=[spent(2.5, 3)])]
    return findings(read([written(folder, [result(0, f1=0.5)], record)]), people)


def test_an_entry_has_what_the_schema_wants(tmp_path):
    made = yaml.safe_load(entry(private_run(tmp_path)))
    assert set(made) == {"url_slug", "status", "tier", "deployment"}
    deployment = made["deployment"]
    assert set(REQUIRED) <= set(deployment["basic"])
    for section, fields in deployment.items():
        assert set(fields) <= set(FIELDS[section])
    assert deployment["privacy_loss"]["privacy_parameters"] == {"epsilon": 2.5, "delta": 1e-5}
    assert deployment["deployment_model"]["model_name"] == "Central"
    assert deployment["basic"]["publication_date"] == "2026-01-02"
    assert (made["status"], made["tier"]) == ("Draft", 3)


def test_what_people_know_is_taken(tmp_path):
    people = {
        "basic": {"name": "Ward notes", "data_curators": ["A hospital"]},
        "administrative": {"registry_authors": ["B"]},
    }
    made = yaml.safe_load(entry(private_run(tmp_path, people)))
    assert made["url_slug"] == "ward_notes"
    assert made["deployment"]["basic"]["data_curators"] == ["A hospital"]
    assert made["deployment"]["administrative"]["registry_authors"] == ["B"]


@pytest.mark.parametrize(
    ("people", "said"),
    [
        ({"basics": {}}, "a table 'basics'.*it has: basic"),
        ({"basic": {"naem": "x"}}, "no field 'naem'"),
        ({"basic": {"data_product_sector": "Space"}}, "it takes: Technology"),
        ({"basic": {"data_curators": "me"}}, "a list of strings"),
        ({"basic": {"publication_date": "2026"}}, "a date as 2026-01-31"),
        ({"basic": "x"}, "must be a table"),
        ({"basic": {"publication_date": "2026-99-99"}}, "a date as 2026-01-31"),
        ({"privacy_loss": {"privacy_parameters": {"epsilon": 0.01}}}, "comes from the runs alone"),
    ],
)
def test_what_an_entry_cannot_hold_is_refused(tmp_path, people, said):
    with pytest.raises(ValueError, match=said):
        entry(private_run(tmp_path, people))


@pytest.mark.parametrize(
    ("defense", "epsilon"),
    [
        (dpsgd(), "infinite"),
        (dpsgd() | {"guarantee": "none: the seed is known"}, 1.0),
        (dpsgd() | {"class": "TokenLDP"}, 1.0),
    ],
)
def test_what_is_no_dpsgd_that_holds_is_no_private_deployment(tmp_path, defense, epsilon):
    record = [begin(defenses=[defense]), look(3, privacy=[spent(epsilon, 3)])]
    made = yaml.safe_load(entry(findings(read([written(tmp_path, [result(0, f1=0.5)], record)]))))
    assert made["tier"] == 1
    assert set(made["deployment"]) == {"basic", "administrative"}


def test_every_value_is_one_that_the_schema_takes(tmp_path):
    made = yaml.safe_load(entry(private_run(tmp_path)))
    for section, told in made["deployment"].items():
        registry._check(section, told)


@pytest.mark.skipif(SCHEMA is None, reason="FEDLEAK_REGISTRY_SCHEMA does not name the schema")
def test_entries_are_valid_by_the_registrys_own_schema(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = yaml.safe_load(Path(str(SCHEMA)).read_text(encoding="utf-8"))
    sections = schema["properties"]["deployment"]["properties"]
    assert {name: set(of["properties"]) for name, of in sections.items()} == {
        name: set(fields) for name, fields in FIELDS.items()
    }
    assert set(sections["basic"]["required"]) == set(REQUIRED)
    plain = findings(read([written(tmp_path / "plain", [result(0, f1=0.5)])]))
    published = Path(str(SCHEMA)).parents[1] / "deployments"
    for path in sorted(published.glob("*.yaml"))[:3]:  # what others have written is taken as it is
        for section, told in yaml.safe_load(path.read_text(encoding="utf-8"))["deployment"].items():
            registry._check(section, told)
    for found in (private_run(tmp_path / "private"), plain):
        jsonschema.validate(yaml.safe_load(entry(found)), schema)

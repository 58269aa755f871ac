import os
from datetime import date
from pathlib import Path

import pytest
import yaml

from lightning_fedleak.report import entry, findings, read
from lightning_fedleak.report.registry import FIELDS, check_people
from tests.report.lines import begin, dpsgd, end, look, result, spent, written

REQUIRED = {
    *("name", "data_curators", "description", "intended_use"),
    *("data_product_type", "data_product_region", "publication_date"),
}
SCHEMA = os.environ.get("FEDLEAK_REGISTRY_SCHEMA")


def private_run(folder: Path, people=None):
    record = [begin(defenses=[dpsgd()]), look(3, privacy=[spent(2.5, 3)]), end(4)]
    return findings(read([written(folder, [result(0, f1=0.5)], record)]), people)


def test_an_entry_has_what_the_schema_wants(tmp_path):
    made = yaml.safe_load(entry(private_run(tmp_path)))
    assert set(made) == {"url_slug", "status", "tier", "deployment"}
    deployment = made["deployment"]
    assert set(deployment["basic"]) >= REQUIRED
    for section, fields in deployment.items():
        assert set(fields) <= set(FIELDS[section])
    assert deployment["privacy_loss"]["privacy_parameters"] == {"epsilon": 2.5, "delta": 1e-5}
    assert deployment["deployment_model"]["model_name"] == "Federated"
    assert deployment["deployment_model"]["model_name_details"].startswith("Only the client is")
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
        ({"basic": "x"}, "must be a table"),
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
        (dpsgd() | {"class": "OfMyOwn"}, 1.0),
    ],
)
def test_what_is_no_account_that_holds_is_no_private_deployment(tmp_path, defense, epsilon):
    record = [begin(defenses=[defense]), look(3, privacy=[spent(epsilon, 3)]), end(4)]
    made = yaml.safe_load(entry(findings(read([written(tmp_path, [result(0, f1=0.5)], record)]))))
    assert made["tier"] == 1
    assert set(made["deployment"]) == {"basic", "administrative"}


def ldp_run(folder: Path, clients=1):
    settings = {"mechanism": "grr", "epsilon": 8.0, "per": "token", "domain": "vocabulary"}
    defense = {"name": "token_ldp", "class": "TokenLDP", "guarantee": "g", "settings": settings}
    told = {"defense": "token_ldp", "epsilon": 24.0, "delta": 0.0, "releases": 3, "history": []}
    monitor = {"client": "rank", "clients": clients, "adversary": [], "local_steps": None}
    record = [
        begin("b", defenses=[defense], monitor=monitor),
        look(3, "b", privacy=[told]),
        end(4, "b"),
    ]
    return findings(read([written(folder, [result(0, run="b", f1=0.5)], record)]))


def client_run(folder: Path):
    settings = {"trust": "central", "clients": 9, "sampling": "all", "per_round": 9.0, "clip": 0.5}
    defense = dpsgd() | {"class": "ClientDP", "settings": settings | {"accountant": "prv"}}
    record = [
        begin(defenses=[defense], training={"strategy": "federation"}),
        look(3, client=0, privacy=[spent(2.5, 3, rate=1.0)]),
        end(4),
    ]
    lines = [result(0, f1=0.5) | {"client": c} for c in range(2)]
    return findings(read([written(folder, lines, record)]))


def test_words_under_local_privacy_are_a_local_deployment(tmp_path):
    made = yaml.safe_load(entry(ldp_run(tmp_path / "one")))["deployment"]
    assert made["dp_variant"]["variant_name"] == "Pure DP"
    assert made["privacy_loss"]["privacy_unit"] == "One text (a row of a batch) of one client"
    assert made["privacy_loss"]["privacy_parameters"] == {"epsilon": 24.0, "delta": 0.0}
    assert made["deployment_model"]["model_name"] == "Local"
    assert "replaced by grr" in made["implementation"]["mechanisms"]
    four = yaml.safe_load(entry(ldp_run(tmp_path / "four", clients=4)))["deployment"]
    assert four["privacy_loss"]["privacy_parameters"]["epsilon"] == 96.0


def test_whole_clients_whose_server_is_trusted_are_a_central_deployment(tmp_path):
    made = yaml.safe_load(entry(client_run(tmp_path)))["deployment"]
    assert made["privacy_loss"]["privacy_unit"].startswith("One client with all of its data")
    assert made["deployment_model"]["model_name"] == "Central"
    assert made["deployment_model"]["model_name_details"].startswith("The server is trusted")
    assert "clipped updates of clients" in made["implementation"]["mechanisms"]


def test_accounts_of_two_units_are_not_put_into_one_entry(tmp_path):
    ldp_run(tmp_path / "a")
    private_run(tmp_path / "b")
    made = yaml.safe_load(entry(findings(read([tmp_path]))))
    assert (made["tier"], set(made["deployment"])) == (1, {"basic", "administrative"})


def test_what_is_not_private_to_its_end_is_no_private_deployment(tmp_path):
    """Cut off, or beside a run without a defence on what may be the same data."""
    record = [begin(defenses=[dpsgd()]), look(3, privacy=[spent(2.5, 3)])]
    cut_off = findings(read([written(tmp_path / "cut", [result(0, f1=0.5)], record)]))
    private_run(tmp_path / "two" / "private")
    written(tmp_path / "two" / "plain", [result(0, run="b", f1=0.5)], [begin("b"), end(4, "b")])
    for found in (cut_off, findings(read([tmp_path / "two"]))):
        made = yaml.safe_load(entry(found))
        assert (made["tier"], set(made["deployment"])) == (1, {"basic", "administrative"})


def test_an_epsilon_that_composes_to_no_number_is_not_claimed(tmp_path):
    for run in "ab":
        loud = spent(190.0, 3, sigma=0.06, rate=1.0)
        defense = dpsgd(poisson=False, accountant="rdp")
        record = [begin(run, defenses=[defense]), look(3, run, privacy=[loud]), end(4, run)]
        written(tmp_path / run, [result(0, run=run, f1=0.5)], record)
    found = findings(read([tmp_path]))
    assert isinstance(found.privacy_together[0].epsilon, str)
    assert yaml.safe_load(entry(found))["tier"] == 1


@pytest.mark.parametrize("run", [private_run, ldp_run, client_run])
def test_every_value_is_one_that_the_schema_takes(tmp_path, run):
    deployment = yaml.safe_load(entry(run(tmp_path)))["deployment"]
    check_people(deployment)
    words = {
        "variant_name": {"Pure DP", "Approximate DP"},
        "model_name": {"Local", "Central", "Federated"},
        "release_type": {"One release", "Many releases"},
        "data_product_type": {"Machine learning model"},
    }
    for fields in deployment.values():
        for name, value in fields.items():
            if name in ("data_curators", "registry_authors"):
                assert [type(one) for one in value] == [str]
            elif name == "privacy_parameters":
                assert set(value) <= {"epsilon", "delta", "rho"}
            else:
                assert value in words.get(name, {value})
                assert type(value) is str
    date.fromisoformat(deployment["basic"]["publication_date"])


@pytest.mark.skipif(SCHEMA is None, reason="FEDLEAK_REGISTRY_SCHEMA does not name the schema")
def test_entries_are_valid_by_the_registrys_own_schema(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = yaml.safe_load(Path(str(SCHEMA)).read_text(encoding="utf-8"))
    sections = schema["properties"]["deployment"]["properties"]
    assert {name: set(of["properties"]) for name, of in sections.items()} == {
        name: set(fields) for name, fields in FIELDS.items()
    }
    assert set(sections["basic"]["required"]) == REQUIRED
    plain = findings(read([written(tmp_path / "plain", [result(0, f1=0.5)])]))
    published = Path(str(SCHEMA)).parents[1] / "deployments"
    for path in sorted(published.glob("*.yaml"))[:3]:  # what others have written is taken as it is
        check_people(yaml.safe_load(path.read_text(encoding="utf-8"))["deployment"])
    runs = (private_run(tmp_path / "private"), ldp_run(tmp_path / "ldp"))
    for found in (*runs, client_run(tmp_path / "clients"), plain):
        jsonschema.validate(yaml.safe_load(entry(found)), schema)

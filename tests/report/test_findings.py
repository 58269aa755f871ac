import json
import math
from decimal import ROUND_CEILING, Decimal

import pytest

from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.evaluation.auditing import dp_tpr, gaussian_auc, gaussian_tpr
from lightning_fedleak.report import page
from lightning_fedleak.report.records import as_json
from tests.report.lines import (
    about,
    begin,
    decision,
    dpsgd,
    end,
    entry,
    found_in,
    look,
    result,
    sentences_of,
    spent,
)


def rounded_up(bound):
    """Three digits, by decimals."""
    exact = Decimal(bound)
    return float(exact.quantize(Decimal((0, (1,), exact.adjusted() - 2)), ROUND_CEILING))


def test_unknown_attacks_come_first_and_are_no_zero(tmp_path):
    lines = [result(0, "a", f1=0.9), result(0, "b"), result(1, "a", f1=0.7)]
    [fit] = found_in(tmp_path, lines).runs
    first, second = fit.attacks
    assert (first.name, first.mean, first.unknown) == ("b", None, 1)
    assert first.why_unknown == "it broke"
    assert second.mean == pytest.approx(0.8)
    assert second.highest == 0.9
    assert second.last.value == 0.7


def test_what_is_not_shared_is_neither_read_nor_tested(tmp_path):
    lines = [result(0, f1=0.0) | {"exposed": False}]
    found = found_in(tmp_path, lines, [begin(unread=["a", "b"])])
    assert found.verdict.level == "unknown"
    said = found.runs[0].not_tested
    assert any(one.startswith("Which tokens are in a batch?") for one in said)
    assert any(one.startswith("2 shared parameters, tested by no attack: a, b") for one in said)


def test_epsilon_with_and_without_sampling_and_what_it_implies(tmp_path):
    record = [begin(defenses=[dpsgd(target_epsilon=3.0)])]
    record += [look(s, privacy=[spent(0.5 * s, s)]) for s in (1, 2)]
    record += [end(4, privacy=[spent(1.25, 4)])]
    [fit] = found_in(tmp_path, [result(1, f1=0.0)], record).runs
    [cost] = fit.privacy
    assert (cost.epsilon, cost.releases, cost.target_epsilon) == (1.25, 4, 3.0)
    assert cost.series == [(1, 0.5), (2, 1.0), (4, 1.25)]
    assert cost.without_sampling == rounded_up(epsilon_of([(1.0, 1.0, 4)], 1e-5, "prv"))
    assert "epsilon = 1.25 at delta = 1e-05" in cost.statement
    assert "not cover the leakage logs" in cost.statement
    assert fit.implied[0].largest_tpr == dp_tpr(0.01, 1.25, 1e-5)
    assert fit.implied[0].measured_auc is None
    assert fit.end == "finished"


def test_infinite_epsilon_is_said_and_implies_nothing(tmp_path):
    record = [begin(defenses=[dpsgd()]), look(1, privacy=[spent("infinite", 1, sigma=0.0)])]
    found = found_in(tmp_path, [result(1, f1=0.0)], record)
    [fit] = found.runs
    assert fit.privacy[0].epsilon == math.inf
    assert as_json(found)["runs"][0]["privacy"][0]["epsilon"] == "infinite"
    assert fit.implied == []
    assert "no epsilon holds" in sentences_of(found)
    assert "No epsilon holds" in fit.privacy[0].statement
    json.dumps(as_json(found), allow_nan=False)


def one_fit(run, count, epsilon=1.0, fit=None, **settings):
    record = begin(run, defenses=[dpsgd(**settings)])
    if fit is not None:
        record["fit"] = fit
    return [record, look(count, run, privacy=[spent(epsilon, count)])]


def test_a_central_epsilon_is_set_beside_the_sum_of_clients(tmp_path):
    monitor = {"client": "rank", "clients": 4, "adversary": [], "local_steps": None}
    attacks = [about("fc", "membership", "chooses the weights")]
    record = one_fit("a", 4, trust="central")
    record[0] |= {"monitor": monitor, "attacks": attacks}
    lines = [
        result(0, "fc", auc=(0.95, 0.9, 1.0)),
        result(0, "fc", stage="aggregate", auc=(0.6, 0.4, 0.8)),
    ]
    [fit] = found_in(tmp_path, lines, record).runs
    assert (fit.implied[0].stage, fit.implied[0].measured_auc) == ("aggregate", 0.6)
    assert "one client's update is not covered" in fit.privacy[0].statement
    assert fit.shared.seen_by.startswith("The sum over clients only")


def parts(value, at=()):
    """Paths to everything in a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()  # fmt: skip
    for key, of in inside:
        yield (*at, key)
        yield from parts(of, (*at, key))


def with_odd(line, path, odd, *, missing=False):
    """A copy with something else at one place, or nothing."""
    copied = json.loads(json.dumps(line))
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = odd
    if missing:
        del place[path[-1]]
    return copied


ODD = ({}, [1], "x", None, -(10**30))


def test_whatever_stands_in_a_line_no_run_is_lost(tmp_path):
    """Something odd in every place of a line of each kind: nothing raises, and both runs stay."""
    gate = {"name": "g", "metric": "m", "at_most": 0.5, "bound": "lower", "alpha": 0.1}
    settings = {"accountant": "filter", "clip": 1.0, "clients": 2, "sampling": "all"}
    defense = dpsgd(**settings) | {"name": "dpsgd", "class": "ClientDP"}
    record = [
        begin(defenses=[defense], gates=[gate], training={"strategy": "federation"}),
        look(0, utility={"loss": 1.0}, client=0, privacy=[spent("infinite", 1)]),
        decision("withheld", 0, 1),
        end(4),
    ]
    lines = [result(0, f1=(0.5, 0.4, 0.6)), result(0, run="b", f1=0.7)]
    tried = 0
    for name, of in (("leakage", lines[:1]), ("run", record)):
        for number, line in enumerate(of):
            for path in parts(line):
                odd, given = ODD[tried % len(ODD)], {"leakage": list(lines), "run": list(record)}
                given[name][number] = with_odd(line, path, odd)
                found = found_in(tmp_path, given["leakage"], given["run"])
                json.dumps(as_json(found), allow_nan=False)
                assert "b" in {fit.run for fit in found.runs}, (path, odd)
                assert not any(told.startswith("run ") for told in found.problems), path
                tried += 1
                if isinstance(path[-1], str):  # and where it is not there at all
                    given[name][number] = with_odd(line, path, None, missing=True)
                    found = found_in(tmp_path, given["leakage"], given["run"])
                    assert tried % 5 or page(found)
    assert tried > 100


def test_what_was_not_played_is_said_of_unrecorded_runs_too(tmp_path):
    lines = [result(0, f1=0.5), result(0, "x") | {"unknown": "not played: no head"}]
    [fit] = found_in(tmp_path, lines).runs
    assert "x: no head" in fit.not_tested


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "its end was not recorded"),
        ([begin()], "running, cut off"),
        ([begin(), end(1, how="OSError")], "OSError"),
    ],
)
def test_how_a_run_ended(tmp_path, record, said):
    [fit] = found_in(tmp_path, [result(0, f1=0.1)], record).runs
    assert said in fit.end


# ---- federations --------------------------------------------------------------------------------


def federation(folder, *more):
    """Three clients and their sum; client 2 is withheld in round 1."""
    of_clients = [
        result(r, f1=value, recall=value, precision=0.5) | {"client": c, "round": r}
        for r in range(2)
        for c, value in enumerate((0.2, 0.4, 0.9))
    ]
    sums = [result(r, stage="aggregate", f1=0.1) | {"client": "sum"} for r in range(2)]
    looks = [look(r, client=c, utility={"loss": 3.0 - r}) for r in range(2) for c in range(3)]
    begins = begin(training={"strategy": "federation"}, fit="x")
    return found_in(folder, [*of_clients, *sums], [begins, *looks, *more])


def test_a_federation_has_a_line_for_each_client_and_the_sum(tmp_path):
    [fit] = federation(tmp_path).runs
    assert (fit.unit, fit.shared.clients) == ("round", 3)
    points = [(p.step, p.client, p.value) for p in fit.attacks[0].points]
    assert points == [(r, str(c), v) for r in (0, 1) for c, v in enumerate((0.2, 0.4, 0.9))]
    assert set(fit.utility) == {f"loss, client {c}" for c in range(3)}
    shared, summed = fit.attacks
    assert (shared.stage, summed.stage) == ("shared", "aggregate")
    assert shared.mean == pytest.approx(0.5)
    assert (shared.worst_client, shared.last_client) == (0.9, "2")


def test_what_a_gate_kept_back_is_counted_and_in_no_mean(tmp_path):
    found = federation(tmp_path, decision("withheld", 1, 2), decision("warn", 0, 0))
    [fit] = found.runs
    assert (fit.withheld, fit.updates) == (1, 6)
    shared = fit.attacks[0]
    assert (shared.looks, shared.withheld) == (5, 1)
    assert shared.mean == pytest.approx((2 * 0.2 + 2 * 0.4 + 0.9) / 5)
    kept = [(p.step, p.client) for p in shared.points if p.withheld]
    assert kept == [(1, "2")]
    assert "Gates kept back 1 of 6 updates" in sentences_of(found)


def test_the_accounts_of_all_processes_of_a_federation_are_known(tmp_path):
    """The first one has none; the clients' own are those of later ones."""
    told = {"training": {"strategy": "federation"}, "fit": "x"}
    settings = {"trust": "local", "clients": 2, "sampling": "all", "accountant": "prv"}
    own = {"name": "dpsgd", "class": "ClientDP", "guarantee": "a client"}
    record = [begin("a", **told)]
    for client, run in enumerate("bc"):
        ledger = tmp_path / "logs" / f"{client}.ledger"
        ledger.parent.mkdir(exist_ok=True)
        ledger.write_text("1.0 1.0 2\n")
        record += [
            begin(run, **told),
            entry("defense", run, **own, settings=settings | {"ledger": str(ledger)}),
            look(0, run, client=client, privacy=[spent(3.0, 2, rate=1.0)]),
        ]
    lines = [result(0, run=run, f1=0.1) | {"client": c} for c, run in enumerate("bc")]
    lines += [result(0, run="a", stage="aggregate", f1=0.1) | {"client": "sum"}]
    found = found_in(tmp_path / "logs", lines, record)
    [run] = found.runs
    [spent_] = run.privacy
    assert (spent_.holds, spent_.class_name) == (True, "ClientDP")
    assert spent_.ledger_releases == {"0.ledger": 2, "1.ledger": 2}
    assert (run.monitors, len(run.defenses)) == (3, 1)


def test_monitors_of_one_fit_are_one_run(tmp_path):
    lines = [result(0, f1=0.5), result(0, "other", run="b", f1=0.7), result(0, run="c", f1=0.1)]
    two = [begin("a", fit="x"), begin("b", fit="x", attacks=[about("other", "words")])]
    ends = [end(9, r) for r in "abc"]
    loss = [look(0, r, utility={"loss": 1.0}) for r in "ab"]
    found = found_in(tmp_path, lines, [*two, begin("c", fit="y"), *loss, *ends])
    fit, alone = found.runs
    assert (fit.monitors, fit.run, alone.monitors) == (2, "a, b", 1)
    assert {a.name for a in fit.attacks} == {"flatchat", "other"}
    assert fit.utility == {"loss": [(0, 1.0)]}
    assert fit.end == "finished"


# ---- accounts of words and of clients -----------------------------------------------------------


def token_ldp(**settings):
    told = {"mechanism": "grr", "epsilon": 8.0, "per": "sequence", "domain": "vocabulary"}
    return {"name": "token_ldp", "class": "TokenLDP", "guarantee": "8-local", "settings": {
        **told, **settings}}  # fmt: skip


def ldp_spent(epsilon=24.0):
    return {"defense": "token_ldp", "epsilon": epsilon, "delta": 0.0, "releases": 3, "history": []}


def test_an_account_of_words_is_of_a_text(tmp_path):
    record = [begin(defenses=[token_ldp()]), look(3, privacy=[ldp_spent()])]
    found = found_in(tmp_path, [result(0, f1=0.1)], record)
    [spent_] = found.runs[0].privacy
    assert (spent_.unit, spent_.accountant, spent_.holds) == (
        "row", "basic composition", True)  # fmt: skip
    assert "After 3 releases of the text that was released most often" in spent_.statement
    assert "epsilon = 24 at delta = 0, by basic composition" in spent_.statement
    assert ", for a text" in sentences_of(found)


def test_texts_that_move_between_clients_cost_with_each(tmp_path):
    monitor = {"client": "rank", "clients": 4, "adversary": [], "local_steps": None}
    record = [begin(defenses=[token_ldp()], monitor=monitor), look(3, privacy=[ldp_spent()])]
    found = found_in(tmp_path, [result(0, f1=0.1)], record)
    [spent_] = found.runs[0].privacy
    assert "against whoever sees all of them epsilon is at most 96" in spent_.statement


def test_an_epsilon_whose_guarantee_nobody_recorded_does_not_hold(tmp_path):
    record = [look(3, privacy=[spent(1.0, 3)])]
    found = found_in(tmp_path, [result(0, f1=0.1)], record)
    assert not found.runs[0].privacy[0].holds
    assert "no epsilon holds" in sentences_of(found)


@pytest.mark.parametrize(
    ("trust", "said", "seen"),
    [
        ("central", "The server is trusted", "A server that is trusted"),
        ("local", "against the server too", "whoever receives an update"),
        ("secure_aggregation", "the sum over clients alone", "The sum over clients only"),
    ],
)
def test_an_account_of_clients_says_who_is_trusted(tmp_path, trust, said, seen):
    settings = {"trust": trust, "clients": 9, "sampling": "all", "per_round": 9.0, "clip": 0.5,
                "accountant": "prv"}  # fmt: skip
    defense = {"name": "dpsgd", "class": "ClientDP", "guarantee": "a client", "settings": settings}
    record = [
        begin(defenses=[defense], training={"strategy": "federation"}),
        look(0, client=0, privacy=[spent(1.0, 1, rate=1.0)]),
        look(0, client=1, privacy=[spent(3.0, 2, rate=1.0)]),
        look(0, client=2, privacy=[spent(2.0, 1, rate=1.0)]),
    ]
    found = found_in(tmp_path, [result(0, f1=0.1) | {"client": c} for c in range(3)], record)
    [fit] = found.runs
    [spent_] = fit.privacy
    assert (spent_.unit, spent_.epsilon, spent_.series) == ("client", 3.0, [(0, 3.0)])
    assert "After 2 rounds the privacy loss of one client" in spent_.statement
    assert said in spent_.statement
    assert seen in fit.shared.seen_by


def test_lines_of_a_ledger_that_are_no_releases_are_named(tmp_path):
    ledger = tmp_path / "a.ledger"
    ledger.write_text("1.0 0.01 3\nbroken\n1.0 0.01 4\n1.0\n")
    found = found_in(tmp_path, [result(0, f1=0.0)], one_fit("a", 7, ledger=str(ledger)))
    [spent_] = found.runs[0].privacy
    assert spent_.ledger_releases == {"a.ledger": 7}
    [told] = found.problems
    assert told == "2 of the lines of the ledger a.ledger are no releases: 2, 4"


# ---- safer than the run was ---------------------------------------------------------------------


def accounted(folder, *more, results=None, count=3, defense=None, **told):
    """A run whose account is of ``count`` releases at its last look, at step 3."""
    defense = dpsgd(poisson=False) if defense is None else defense
    cost = spent(2.0, count, rate=1.0) | told
    record = [begin(defenses=[defense]), look(3, privacy=[cost]), *more]
    return found_in(folder, results or [result(0, f1=0.0)], record)


@pytest.mark.parametrize(
    ("last", "whole"),
    [((), False), ((end(90),), False), ((end(90, privacy=[spent(2.5, 90, rate=1.0)]),), True)],
)
def test_an_epsilon_of_a_run_that_was_cut_off_is_no_bound(tmp_path, last, whole):
    found = accounted(tmp_path, *last)
    [cost] = found.runs[0].privacy
    assert cost.whole is whole
    assert ("no bound for the whole run" in sentences_of(found)) is not whole
    assert ("What this epsilon limits" in sentences_of(found)) is whole
    assert ("no bound for the whole run" in cost.statement) is not whole
    assert ("only until the last measurement" in page(found)) is not whole


@pytest.mark.parametrize(("in_ledger", "whole"), [(3, True), (40, False)])
def test_a_ledger_knows_what_a_killed_run_released(tmp_path, in_ledger, whole):
    ledger = tmp_path / "run" / "ledger"
    ledger.parent.mkdir()
    ledger.write_text(f"1.0 1.0 {in_ledger}\n")
    defense = dpsgd(poisson=False, ledger=str(ledger))
    [cost] = accounted(tmp_path / "run", defense=defense).runs[0].privacy
    assert cost.whole is whole
    assert ("counts more releases" in cost.statement) is not whole


def test_several_accounts_add_up(tmp_path):
    lines = [result(0, run=run, f1=0.0) for run in "ab"]
    record = [*one_fit("a", 10), *one_fit("b", 30)]
    found = found_in(tmp_path, lines, record)
    for text in (sentences_of(found), page(found)):
        assert "several runs on the same examples add up" in text
    one = found_in(tmp_path / "one", lines[:1], one_fit("a", 10))
    assert "add up" not in sentences_of(one) + page(one)


def test_a_result_that_is_no_number_is_unknown(tmp_path):
    lines = [result(0, f1=0.2), result(1, f1=None)]
    [attack] = found_in(tmp_path, lines, [begin()]).runs[0].attacks
    assert (attack.looks, attack.unknown) == (1, 1)
    assert attack.why_unknown == "its f1 is no number"


def test_what_does_not_say_that_it_stayed_has_left(tmp_path):
    line = result(0, f1=0.9, recall=0.9, precision=0.9)
    del line["exposed"]
    report = found_in(tmp_path, [line], [begin()])
    assert report.verdict.worst == {"words": 0.9}


def test_games_that_are_pooled_over_looks_count_once(tmp_path):
    lines = [
        result(s, "fc", auc=(0.7, 0.4, 1.0), auc_of_this_look=0.5) | {"n": 10 * (s + 1)}
        for s in range(3)
    ]
    [attack] = found_in(tmp_path, lines).runs[0].attacks
    assert (attack.n, attack.last_n) == (30, 30)


def test_sampling_hides_nobody_in_a_batch(tmp_path):
    """What is measured is membership in one batch, of which an epsilon with sampling says less."""
    defense = dpsgd(accountant="filter")
    [one] = accounted(tmp_path, defense=defense, epsilon=0.2).runs[0].implied
    assert one.largest_tpr_in_a_batch == gaussian_tpr(0.01, 1.0)
    assert one.largest_auc_in_a_batch == gaussian_auc(1.0) > one.largest_auc


def test_noise_that_was_turned_up_was_lower_before(tmp_path):
    history = [[0.5, 1.0, 3], [2.0, 1.0, 9]]
    report = accounted(
        tmp_path, defense=dpsgd(accountant="filter"), history=history, noise_multiplier=2.0
    )
    fit = report.runs[0]
    assert "Noise multiplier 0.5 at the least, 2 at the end" in fit.privacy[0].statement
    assert fit.implied[0].largest_auc_in_a_batch == gaussian_auc(0.5)


def test_of_several_accounts_the_largest_delta_holds(tmp_path):
    told = [spent(2.0, 3, rate=1.0), spent(1.0, 3, rate=1.0) | {"delta": 1e-3}]
    record = [begin(defenses=[dpsgd(poisson=False)]), look(3, privacy=told)]
    [cost] = found_in(tmp_path, [result(0, f1=0.0)], record).runs[0].privacy
    assert (cost.epsilon, cost.delta) == (2.0, 1e-3)


def test_the_unit_of_a_defence_of_ones_own_is_not_invented(tmp_path):
    report = accounted(tmp_path, defense=dpsgd(poisson=None) | {"class": "OfMyOwn"})
    assert report.runs[0].privacy[0].unit == "not recorded"
    assert ", for a unit that is not recorded, 3 releases" in sentences_of(report)


def test_an_epsilon_without_a_guarantee_is_no_claim(tmp_path):
    found = accounted(tmp_path, defense=dpsgd() | {"guarantee": "none: the seed is known"})
    assert page(found).count("none holds (recorded: 2 at 1e-05)") == 1

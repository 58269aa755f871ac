"""What a privacy officer reads: the worst first, and the same in every place and format."""

import json
import re

import pytest
import yaml

from lightning_fedleak.report import entry, findings, page, read
from lightning_fedleak.report.records import as_json
from tests.report.lines import OF_MODEL, about, begin, dpsgd, end, look, result, spent, written

LITTLE = {"f1": 0.0, "recall": 0.0, "precision": 0.0}


def found_in(folder, results, record=()):
    return findings(read([written(folder, results, record)]))


def private(folder, defense=None, epsilon=2.0, **more):
    """A run with differential privacy to its end."""
    cost = spent(epsilon, 3)
    record = [begin(defenses=[defense or dpsgd()], **more), look(2, privacy=[cost]), end(3)]
    return found_in(folder, [result(0, **LITTLE)], record)


def test_the_worst_family_comes_first_and_the_reassuring_one_after_what_is_unknown(tmp_path):
    attacks = [about("flatchat", "words"), about("fc", "membership")]
    lines = [result(0, **LITTLE), result(0, "fc", auc=(0.9, 0.7, 1.0))]
    sentences = found_in(tmp_path, lines, [begin(attacks=attacks)]).verdict.sentences
    assert "AUC of 0.90" in sentences[0]
    assert sentences[1] == f"Nobody tested whole texts or {OF_MODEL}."
    assert "next to none of a batch's distinct tokens" in sentences[2]


def test_what_is_not_conclusive_comes_before_what_reassures(tmp_path):
    attacks = [about("flatchat", "words"), about("fc", "membership")]
    lines = [result(0, **LITTLE), result(0, "fc", auc=(0.45, 0.1, 0.9))]
    sentences = found_in(tmp_path, lines, [begin(attacks=attacks)]).verdict.sentences
    assert "not conclusive" in sentences[1]
    assert "next to none" in sentences[2]


def membership(folder, *looks, over_steps=(1.0, 0.48, 1.0), family="membership", metric="auc"):
    """The report on looks of the exact test's values, corrected for all looks."""
    lines = [
        result(step, "fc", p_over_looks=p, **{metric: value, f"{metric}_over_steps": over_steps})
        for step, (value, p) in enumerate(looks)
    ]
    return found_in(folder, lines, [begin(attacks=[about("fc", family)])])


def test_one_look_that_excludes_guessing_is_conclusive_whatever_the_steps_say(tmp_path):
    found = membership(tmp_path, ((1.0, 0.977, 1.0), 3.3e-09), ((1.0, 0.98, 1.0), 3.3e-09))
    [attack] = found.runs[0].attacks
    assert (attack.conclusive, attack.p_value) == (True, 3.3e-09)
    assert attack.over_steps.low == 0.48
    sentence = found.verdict.sentences[0]
    assert "Guessing does so well at any measurement with probability 3e-09." in sentence
    assert "conclusive" not in sentence
    assert found.verdict.level == "high"


def test_where_neither_looks_nor_steps_exclude_guessing_it_is_not_conclusive(tmp_path):
    found = membership(tmp_path, ((0.9, 0.6, 1.0), 0.2), over_steps=(0.9, 0.3, 1.0))
    assert (
        "No measurement by itself excludes guessing, and the 95% interval over steps (0.30 to "
        "1.00) includes 0.50, guessing: not conclusive." in found.verdict.sentences[0]
    )
    assert found.verdict.level == "some"
    assert any("Narrow the interval of fc" in step for step in found.next_steps)
    assert (
        membership(tmp_path / "b", (0.7, 0.2), over_steps=(0.7, 0.6, 0.8)).verdict.level == "some"
    )
    [attack] = membership(tmp_path / "c", (0.7, 0.2), over_steps=(0.7, 0.6, 0.8)).runs[0].attacks
    assert attack.conclusive, "small at every look, and above guessing over the steps"


def test_words_that_blind_naming_finds_too_are_not_conclusive(tmp_path):
    found = membership(tmp_path, (0.6, 0.4), family="words", metric="f1")
    assert (
        "No measurement by itself excludes guessing: not conclusive" in (found.verdict.sentences[0])
    )
    [attack] = membership(tmp_path / "b", (0.6, 1e-9), family="words", metric="f1").runs[0].attacks
    assert attack.conclusive
    [attack] = membership(tmp_path / "c", (0.02, 1.0), family="words", metric="f1").runs[0].attacks
    assert attack.conclusive is None, "a low number is no question of guessing"


def test_p_values_of_clients_count_times_their_number(tmp_path):
    lines = [
        result(0, "fc", auc=0.9, p_over_looks=p) | {"client": client}
        for client, p in (("a", 0.02), ("b", 0.9))
    ]
    [attack] = (
        found_in(tmp_path, lines, [begin(attacks=[about("fc", "membership")])]).runs[0].attacks
    )
    assert attack.p_value == pytest.approx(0.04)
    assert attack.conclusive is False


def test_the_highest_measurement_of_another_attack_is_named_and_counts(tmp_path):
    attacks = [about("flatchat", "words"), about("rare", "words")]
    lines = [result(s, f1=0.08, recall=0.1, precision=0.1) for s in range(4)]
    lines += [result(0, "rare", f1=0.9, recall=1.0, precision=0.9)]
    lines += [result(s, "rare", **LITTLE) for s in range(1, 20)]
    verdict = found_in(tmp_path, lines, [begin(attacks=attacks)]).verdict
    assert "f1 0.90 at the worst one (rare)" in verdict.sentences[0]
    assert verdict.level == "high"


def defended(kind, **settings):
    return dpsgd() | {"name": "it", "class": kind, "settings": settings}


@pytest.mark.parametrize(
    ("defenses", "said"),
    [
        ([], "without a defence"),
        ([dpsgd(noise_multiplier=0.8)], "each example's part clipped at 1, noise 0.8 (dpsgd)"),
        (
            [dpsgd(noise_multiplier=0.8, clip_schedule="1, 0.5")],
            "each example's part clipped at 1.0 times 1, 0.5 in equal parts of the run, noise 0.8 "
            "(dpsgd)",
        ),
        (
            [dpsgd(noise_multiplier=0.8, clip_quantile="0.5")],
            "each example's part clipped at 1.0 at first, then by the 0.5 quantile, noise 0.8 "
            "(dpsgd)",
        ),
        ([defended("GradientNoise", sigma=0.5)], "not clipped, noise 0.5 (it)"),
        (
            [defended("ClientDP", trust="local", clip=0.5, noise_multiplier=2.0)],
            "clipped at 0.5, noise 2 (it)",
        ),
        (
            [defended("ClientDP", trust="secure_aggregation", clip=0.5, noise_multiplier=2.0)],
            "clipped at 0.5, a share of noise 2 (it)",
        ),
        (
            [defended("ClientDP", trust="central", clip=0.5, noise_multiplier=2.0)],
            "as it is; then the server clips it at 0.5 and adds noise 2 (it)",
        ),
        (
            [defended("TokenLDP", mechanism="grr", epsilon=8.0, per="token")],
            "whose tokens it replaced before training (grr, epsilon 8 for each token)",
        ),
        ([defended("OfMyOwn")], "after the defence it (OfMyOwn)"),
    ],
)
def test_what_left_is_named_with_what_defences_did(tmp_path, defenses, said):
    found = found_in(tmp_path, [result(0, **LITTLE)], [begin(defenses=defenses)])
    assert found.runs[0].shared.description.endswith(said)


def test_noise_that_was_found_for_a_target_is_named(tmp_path):
    found = private(tmp_path, dpsgd(target_epsilon=8.0, max_grad_norm="auto"))
    assert found.runs[0].shared.description.endswith("clipped to a norm below 1, noise 1 (dpsgd)")


def test_a_run_without_a_record_had_unknown_defences_and_gates(tmp_path):
    unrecorded = found_in(tmp_path / "a", [result(0, **LITTLE)])
    [fit] = unrecorded.runs
    assert (fit.defenses, fit.gates) == (None, None)
    html = page(unrecorded)
    assert "Gates: not recorded." in html
    assert "Defences: not recorded." in html
    none = page(found_in(tmp_path / "b", [result(0, **LITTLE)], [begin()]))
    assert "No gate." in none
    assert "No defence." in none
    assert answer(none, "Gates") == answer(none, "Epsilon and delta") == "none"
    assert answer(html, "Gates") == answer(html, "Epsilon and delta") == "not recorded"


def answer(html, question):
    """What the last table on the page answers."""
    cell = re.findall(rf'<th scope="row">{question}</th><td[^>]*>\s*(.*?)\s*</td>', html, re.S)
    return cell[-1]


def test_what_was_not_chosen_was_none_and_not_unrecorded(tmp_path):
    html = page(private(tmp_path))
    assert answer(html, "Target") == answer(html, "Ledger") == "none"


def test_epsilon_is_the_same_in_every_place_and_format(tmp_path):
    found = private(tmp_path, epsilon=1.2345678)
    [fit] = found.runs
    [cost] = fit.privacy
    assert cost.epsilon == 1.24
    without = cost.without_sampling
    html, registered = page(found), entry(found)
    parameters = yaml.safe_load(registered)["deployment"]["privacy_loss"]["privacy_parameters"]
    assert parameters["epsilon"] == cost.epsilon
    for made in (html, json.dumps(as_json(found)), registered):
        assert set(re.findall(r"\b1\.2[34]\d*", made)) == {"1.24"}
        assert f"epsilon of the same releases would be {without:g}. " in " ".join(made.split())
    assert answer(html, "Without counting on sampling, epsilon") == f"{without:g}"


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        ("local", "Only the client is trusted: epsilon holds against the server too."),
        ("central", "Epsilon holds only if nobody sees more than the sum over clients alone"),
    ],
)
def test_who_is_trusted_is_the_same_in_every_place_and_format(tmp_path, trust, said):
    found = private(tmp_path, dpsgd(trust=trust))
    registered = yaml.safe_load(entry(found))["deployment"]
    assert said in found.verdict.sentence
    assert said in found.runs[0].privacy[0].statement
    assert said in answer(page(found), "Who is trusted")
    assert registered["deployment_model"]["model_name_details"].startswith(said)
    assert said in registered["administrative"]["notes"]


def test_gates_are_the_same_in_every_place_and_format(tmp_path):
    gate = {"name": "g", "metric": "leakage/worst/words", "at_most": 0.3, "action": "stop"}
    found = private(tmp_path, gates=[gate | {"bound": "lower", "alpha": 0.05}])
    rule = "leakage/worst/words at most 0.3, else stop; judges all measurements, lower bound, "
    rule += "alpha 0.05"
    html = page(found)
    assert answer(html, "Gates") == answer(html, "Rule") == rule
    assert f"Gates: {rule}. Never acted." in found.verdict.sentence
    assert rule in yaml.safe_load(entry(found))["deployment"]["administrative"]["notes"]


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [
        (1.0, "finds at most 2.8 in 100 that were (guessing: 1)."),  # .01 e + 1e-5
        (3.0, "finds at most 20.1 in 100 that were (guessing: 1)."),
        (4.5, "finds at most 90.1 in 100 that were (guessing: 1). That is a weak limit."),
        (8.0, "finds up to all that were (guessing: 1). That is a weak limit."),
    ],
)
def test_what_epsilon_limits_is_said_in_one_sentence(tmp_path, epsilon, said):
    found = private(tmp_path, epsilon=epsilon)
    asked = "What this epsilon limits: a test of whether one example was in the training data"
    for text in (found.verdict.sentence, found.runs[0].privacy[0].statement):
        assert asked in text
        assert said in text


def test_an_epsilon_that_is_no_bound_limits_nothing(tmp_path):
    record = [begin(defenses=[dpsgd()]), look(2, privacy=[spent(1.0, 3)])]
    found = found_in(tmp_path, [result(0, **LITTLE)], record)
    assert "What this epsilon limits" not in found.verdict.sentence


def test_the_page_says_what_its_words_and_numbers_mean(tmp_path):
    html = page(found_in(tmp_path, [result(0, **LITTLE)], [begin()]))
    assert "Neither their order nor a text is read." in answer(html, "Words")
    for term in ("F1", "n", "95% interval", "Certified", "Unknown", "Not recorded"):
        assert len(answer(html, term)) > 20
    assert "AUC" not in html

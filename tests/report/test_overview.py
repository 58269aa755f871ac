"""What a page says first: a sentence, readings, facts; the same in every place and format."""

import json
import re

import pytest

from lightning_fedleak.report import findings, page, read
from lightning_fedleak.report.records import as_json
from tests.report.lines import (
    about,
    begin,
    decision,
    dpsgd,
    end,
    found_in,
    look,
    result,
    sentences_of,
    spent,
    written,
)

LITTLE = {"f1": (0.02, 0.0, 0.05), "recall": 0.01, "precision": 0.1}
READ = {"f1": (0.8, 0.7, 0.9), "recall": 0.784, "precision": 0.96}
PAIR = [about("flatchat", "words"), about("fc", "membership")]


def reading_of(found, family, run=0):
    return next(one for one in found.overviews[run].readings if one.family == family)


def facts_of(found, run=0):
    return {fact.name: fact for fact in found.overviews[run].facts}


def private(folder, defense=None, epsilon=2.0, **more):
    """A run with differential privacy to its end."""
    cost = spent(epsilon, 3)
    record = [begin(defenses=[defense or dpsgd()], **more), look(2, privacy=[cost]), end(3)]
    return found_in(folder, [result(0, **LITTLE)], record)


# ---- the sentence and the readings --------------------------------------------------------------


def test_the_sentence_says_what_was_read_alike_on_the_page_and_in_the_json(tmp_path):
    lines = [result(0, **READ), result(0, "fc", auc=(0.75, 0.6, 0.9))]
    found = found_in(tmp_path, lines, [begin(attacks=PAIR), end(4)])
    sentence = (
        "If gradients are shared, one update lets the server name most of a batch's distinct "
        "tokens and tell better than by guessing whether a given text was in a batch."
    )
    assert found.verdict.sentence == sentence
    assert as_json(found)["overviews"][0]["sentence"] == sentence
    heading = re.search(r"<h1[^>]*>(.*?)</h1>", page(found), re.S)[1]
    assert re.sub("<.*?>", "", heading).replace("&#39;", "'") == sentence
    assert re.findall("<b class=.read.>(.*?)</b>", heading) == ["most", "better than by guessing"]


def test_there_are_four_readings_and_what_nobody_tested_is_one(tmp_path):
    found = found_in(tmp_path, [result(0, **READ)], [begin()])
    words, *others = found.overviews[0].readings
    assert (words.verdict, words.answer, words.measure) == ("read", "0.80", "F1")
    assert {one.answer for one in others} == {"Not tested"}
    assert len(others) == 3
    assert page(found).count("Not measured. This says nothing about safety.") == 3
    assert facts_of(found)["Not tested"].value == "Membership, whole texts, trained model"


@pytest.mark.parametrize(
    ("auc", "verdict"),
    [
        ((0.75, 0.51, 0.9), "read"),
        ((0.75, 0.5, 0.9), "inconclusive"),
        (0.75, "inconclusive"),
        ((0.58, 0.55, 0.61), "little"),
        ((0.3, 0.1, 0.45), "little"),
    ],
)
def test_red_is_only_what_an_interval_without_guessing_shows(tmp_path, auc, verdict):
    record = [begin(attacks=PAIR[1:])]
    found = found_in(tmp_path, [result(s, "fc", auc=auc) for s in (0, 1)], record)
    assert reading_of(found, "membership").verdict == verdict
    html = page(found)
    red = re.findall(r'class="(?:[^"]* )?read[" ]', html.partition("<footer")[0])
    assert bool(red) == (verdict == "read")


def test_the_worst_attack_is_the_highest_one_that_is_sure(tmp_path):
    attacks = [about(name, "membership") for name in ("fc", "sure")]
    lines = [result(0, "fc", auc=(0.99, 0.3, 1.0)), result(0, "sure", auc=(0.8, 0.7, 0.9))]
    reading = reading_of(found_in(tmp_path, lines, [begin(attacks=attacks)]), "membership")
    assert (reading.attack, reading.answer) == ("sure", "0.80")
    assert "fc reads 0.99, not conclusive" in reading.note


def test_words_are_quoted_by_their_highest_look_and_games_by_all_of_them(tmp_path):
    lines = [result(s, f1=(v, v - 0.1, v)) for s, v in enumerate((0.3, 0.9, 0.5))]
    values = enumerate((0.9, 0.7))
    lines += [result(s, "fc", auc=(v, 0.6, 1.0), auc_of_this_look=0.5) for s, v in values]
    found = found_in(tmp_path, lines, [begin(attacks=PAIR)])
    words, games = (reading_of(found, family) for family in ("words", "membership"))
    assert words.answer == "0.90"
    assert "highest of 3 measurements, step 1; mean 0.57" in words.note
    assert games.answer == "0.70"
    assert "last of 2 measurements" in games.note


@pytest.mark.parametrize(
    ("recall", "share"), [(1.0, "all"), (0.995, "over 99%"), (0.989, "98%"), (0.7, "70%")]
)
def test_a_share_is_never_rounded_up(tmp_path, recall, share):
    found = found_in(tmp_path, [result(0, **READ | {"recall": recall})], [begin()])
    assert f"{share.capitalize()} found, 96% of what was named" in reading_of(found, "words").note


GIVEN = "whether a given text was in a batch"


@pytest.mark.parametrize(
    ("family", "value", "low", "words"),
    [
        ("membership", 1.0, 0.96, f"tell almost every time {GIVEN}"),
        ("membership", 1.0, 0.8, f"tell often {GIVEN}"),
        ("membership", 1.0, 0.55, f"tell better than by guessing {GIVEN}"),  # as few games
        ("membership", 0.61, 0.501, f"tell better than by guessing {GIVEN}"),
        ("words", 1.0, 0.92, "name almost all of a batch's distinct tokens"),
        ("words", 1.0, 0.89, "name most of a batch's distinct tokens"),
        ("texts", 0.9, 0.2, "write down some of a text"),
    ],
)
def test_the_words_follow_the_lower_end_of_the_interval(tmp_path, family, value, low, words):
    attacks = [about("attack", family, "only listens")]
    metric = {"words": "f1", "texts": "token_accuracy"}.get(family, "auc")
    lines = [result(0, "attack", recall=1.0, **{metric: (value, low, 1.0)})]
    found = found_in(tmp_path, lines, [begin(attacks=attacks)])
    assert found.verdict.sentence.endswith(f"{words}.")
    assert "DP-SGD" in reading_of(found, family).mend


def test_what_leaves_is_said_as_it_was_stated(tmp_path):
    said = {}
    for shares in ("gradients", "model"):
        stated = {"shares": f"what leaves the machine: {shares}, stated by the user, not checked"}
        start = begin(attacks=PAIR, monitor={"adversary": [], **stated})
        said[shares] = found_in(tmp_path / shares, [result(0, **READ)], [start])
    assert said["gradients"].verdict.sentence.startswith("One update lets the server name")
    left = facts_of(said["gradients"])["What left"]
    assert left.value == "The gradient of every step"
    assert left.detail.endswith("stated by the user, not checked")
    unstated = found_in(tmp_path / "unstated", [result(0, **READ)], [begin(attacks=PAIR)])
    assert facts_of(unstated)["What left"].value == "The gradient of every step, if shared"
    assert facts_of(said["model"])["What left"].value.startswith("Only the trained model")
    assert facts_of(said["model"])["Who could read it"].value == "Whoever gets the model"


def test_each_kind_has_a_chart_with_its_own_floor(tmp_path):
    lines = [result(s, **READ) for s in range(2)]
    lines += [result(s, "fc", auc=(0.9, 0.8, 1.0)) for s in range(2)]
    found = found_in(tmp_path, lines, [begin(attacks=PAIR)])
    [chart, *_] = re.findall(r"<figure class=.over_steps.>.*?</figure>", page(found), re.DOTALL)
    words, games, *_ = re.findall("<svg.*?</svg>", chart, re.DOTALL)
    assert "Words, F1" in words
    assert "guessing" not in words
    assert "Membership, AUC" in games
    assert games.count(">guessing<") == 1


def test_a_dishonest_server_is_named(tmp_path):
    attacks = [about("fc", "membership", "chooses the weights")]
    found = found_in(tmp_path, [result(0, "fc", auc=(0.99, 0.9, 1.0))], [begin(attacks=attacks)])
    assert found.verdict.sentence.startswith(
        "If gradients are shared, one update lets a server that may add layers to the model"
    )
    assert facts_of(found)["Who could read it"].detail == "may add layers to the model"


def test_little_is_not_called_safe_and_nothing_is_unknown(tmp_path):
    little = found_in(tmp_path / "a", [result(0, **LITTLE), result(1)], [begin()])
    assert little.verdict.sentence == (
        "These attacks read little or nothing. Others may read more."
    )
    assert "unknown at 1 more" in reading_of(little, "words").note
    nothing = found_in(tmp_path / "b", [result(0)], [begin()])
    assert nothing.verdict.sentence == "Nothing was measured. That is unknown, not safe."
    assert reading_of(nothing, "words").note == "flatchat: it broke."
    assert nothing.verdict.level == "unknown"


def test_what_was_tried_in_vain_is_unknown_and_not_untested(tmp_path):
    attacks = [about("flatchat", "words"), about("st", "texts"), about("silent", "words")]
    lines = [result(0, **READ), result(0, "st"), result(0, "silent")]
    found = found_in(tmp_path, lines, [begin(attacks=attacks)])
    assert reading_of(found, "texts").answer == "Unknown"
    assert "Can a text be written down? No attack gave a result." in found.runs[0].not_tested
    note = reading_of(found, "words").note
    assert "No result of silent: what it would have read is unknown." in note


def test_a_server_that_holds_no_text_says_what_its_own_check_says(tmp_path):
    reason = "whoever looks here does not hold the client's texts"
    lines = [result(r, certified=float(r > 0)) | {"client": 0, "unknown": reason} for r in range(4)]
    found = found_in(tmp_path, lines, [begin(training={"strategy": "federation"})])
    assert reading_of(found, "words").answer == "Unknown"
    assert "Its own check held at 75% of the measurements" in reading_of(found, "words").note


def federation(folder, *decisions, sums=True):
    """Two rounds of three clients, and their sum."""
    lines = [
        result(r, f1=(v, v - 0.1, v), recall=v, precision=0.5) | {"client": c}
        for r in range(2)
        for c, v in enumerate((0.3, 0.4, 0.9))
    ]
    if sums:
        summed = {"stage": "aggregate", "f1": (0.2, 0.1, 0.3)}
        lines += [result(r, **summed) | {"client": "sum"} for r in range(2)]
    begins = begin(training={"strategy": "federation"}, fit="x")
    return found_in(folder, lines, [begins, *decisions, end(2)])


def test_a_federation_is_read_by_its_worst_client_beside_the_sum(tmp_path):
    found = federation(tmp_path)
    assert found.verdict.sentence == (
        "One client's update lets the server name most of a round's distinct tokens."
    )
    reading = reading_of(found, "words")
    assert reading.comparisons == ["in the sum of 3 clients 0.20"]
    assert "highest of 6 results at 3 clients" in reading.note


def test_updates_that_did_not_leave_were_not_read(tmp_path):
    kept = [decision("withheld", r, c) for r in range(2) for c in range(3)]
    some = federation(tmp_path / "a", kept[2], kept[5])
    assert reading_of(some, "words").answer == "0.40"
    assert "Gates kept back 2 of 6 updates" in sentences_of(some)
    none = federation(tmp_path / "b", *kept)
    assert reading_of(none, "words").answer == "Withheld"
    assert none.verdict.worst == {}
    assert none.verdict.level == "unknown"


def test_where_the_sum_alone_was_seen_the_sentence_is_of_the_sum(tmp_path):
    lines = [result(0, stage="aggregate", **READ) | {"client": "sum"}]
    found = found_in(tmp_path, lines, [begin(training={"strategy": "federation"})])
    assert found.verdict.sentence.startswith("The sum over clients lets the server name most")


def test_a_defence_is_shown_by_what_was_read_before_it(tmp_path):
    lines = [
        result(step, stage=stage, f1=(value, value - 0.1, value + 0.1))
        for step in range(3)
        for stage, value in (("local", 0.8 - 0.1 * step), ("shared", 0.2))
    ]
    found = found_in(tmp_path, lines, [begin(defenses=[dpsgd()])])
    assert reading_of(found, "words").comparisons == ["before the defence 0.70 on average"]
    assert "What the defence took away" in page(found)


def test_the_knee_is_said_in_words(tmp_path):
    utility, aucs = (3.0, 2.0, 2.5), (0.6, 0.7, 0.9)
    looks = [look(s, utility={"val_loss": v}) for s, v in enumerate(utility)]
    lines = [result(s, "combined", "released", auc=(v, v - 0.09, 1.0)) for s, v in enumerate(aucs)]
    record = [begin(attacks=[about("combined", "memorization")]), *looks, end(3)]
    found = found_in(tmp_path, lines, record)
    assert found.verdict.sentence == ("The trained model tells often who was in its training data.")
    knee = (
        "Stopping at step 1, the best val_loss, would have left an AUC of 0.70 instead of "
        "0.90: later steps did not improve val_loss."
    )
    assert found.overviews[0].knee == knee
    assert knee in page(found)
    assert facts_of(found)["What left"].value == "The trained model, in the end"


@pytest.mark.parametrize(
    ("did", "times", "value"),
    [
        ("warn", 3, "Exceeded at step 0 and 2 times more: it only warned"),
        ("stopped", 1, "Acted at step 0: it stopped the run"),
        ("", 0, "Never acted"),
    ],
)
def test_a_gate_held_or_acted(tmp_path, did, times, value):
    gate = {"name": "g", "metric": "leakage/worst/words", "at_most": 0.3}
    decisions = [decision(did, step, None) for step in range(times)]
    found = found_in(tmp_path, [result(0, **READ)], [begin(gates=[gate]), *decisions, end(3)])
    assert facts_of(found)["Gate"][:3] == ("Gate", value, "worst/words at most 0.30")
    assert reading_of(found, "words").gate == 0.3
    none = found_in(tmp_path / "none", [result(0, **READ)], [begin()])
    assert facts_of(none)["Gate"].value == "No limit was set"


# ---- several runs -------------------------------------------------------------------------------


def runs(folder, *values, decisions=()):
    """Runs of which words were read so far, each with more validations than the one before."""
    for number, (low, value, high) in enumerate(values):
        run = "abc"[number]
        looks = [look(s, run, utility={"val_loss": 5.0 - s + number}) for s in range(2 + number)]
        record = [begin(run), *looks, *(d for d in decisions if d["run"] == run), end(9, run)]
        written(folder / run, [result(0, run=run, f1=(value, low, high))], record)
    return findings(read([folder]))


def test_runs_are_compared_at_the_last_step_that_all_validated(tmp_path):
    found = runs(tmp_path, (0.8, 0.9, 1.0), (0.0, 0.1, 0.2))
    assert found.verdict.sentence == (
        "Words: F1 0.90 in a, next to none (0.10) in b, for +1.00 val_loss by step 1."
    )
    assert found.comparison.utilities == {"a": 4.0, "b": 5.0}
    html = page(found)
    assert html.index("2 runs compared") < html.index('id="run1"')
    assert "Utility against leakage" in html
    assert "val_loss at 1</th>" in html


def test_overlapping_intervals_show_no_difference(tmp_path):
    found = runs(tmp_path, (0.4, 0.6, 0.8), (0.3, 0.5, 0.7))
    assert "b; the intervals overlap. No difference is shown." in found.verdict.sentence


def test_a_low_value_beside_an_attack_without_a_result_is_no_difference(tmp_path):
    attacks = [about("flatchat", "words"), about("strong", "words")]
    strong = {"a": result(0, "strong", f1=(0.95, 0.9, 1.0)), "b": result(0, "strong", run="b")}
    for run in "ab":
        weak = result(0, run=run, f1=(0.02, 0.0, 0.05))
        written(tmp_path / run, [weak, strong[run]], [begin(run, attacks=attacks), end(9, run)])
    found = findings(read([tmp_path]))
    assert "b; there strong gave no result. No difference is shown." in found.verdict.sentence
    cells = [row[found.comparison.columns.index("words")] for row in found.comparison.rows]
    assert cells[0].endswith("F1 of strong")
    assert cells[1].endswith("F1 of flatchat; no result of strong")


def test_values_of_different_attacks_are_no_difference(tmp_path):
    for run, name, f1 in (("a", "flatchat", (0.8, 0.9, 1.0)), ("b", "bias_sign", (0.0, 0.1, 0.2))):
        record = [begin(run, attacks=[about(name, "words")]), end(9, run)]
        low, value, high = f1
        written(tmp_path / run, [result(0, name, run=run, f1=(value, low, high))], record)
    sentence = findings(read([tmp_path])).verdict.sentence
    assert "by another attack, bias_sign. No difference is shown." in sentence


BOTH = [*PAIR, about("bias_sign", "words")]


def twins(folder, open_lines, defended_lines, **more):
    """A run without a defence and its twin with one."""
    for run, lines in (("open", open_lines), ("dp", defended_lines)):
        defenses = [dpsgd()] if run == "dp" else []
        record = [begin(run, attacks=BOTH, defenses=defenses, **more), end(9, run)]
        written(folder / run, [line | {"run": run} for line in lines], record)
    return findings(read([folder / "open", folder / "dp"]))


def test_each_kind_that_both_runs_measured_has_a_clause_and_what_fell_to_chance_is_first(tmp_path):
    without = [result(0, f1=(0.89, 0.81, 0.94)), result(0, "fc", auc=(0.999, 0.6, 1.0))]
    private = [result(0, f1=(0.0, 0.0, 0.14)), result(0, "fc", auc=(0.72, 0.5, 0.9))]
    found = twins(tmp_path, without, private)
    assert found.verdict.sentence == (
        "Words: F1 0.89 in open, next to none (0.00) in dp. "
        "Membership: AUC >0.99 in open, 0.72 in dp; the intervals overlap."
    )
    assert (found.comparison.family, set(found.comparison.readings)) == ("words", {"open", "dp"})
    assert "No difference is shown" not in page(found)


def test_no_difference_is_said_once_where_it_holds_for_all_kinds(tmp_path):
    lines = [result(0, f1=(0.89, 0.81, 0.94)), result(0, "fc", auc=(0.9, 0.6, 1.0))]
    sentence = twins(tmp_path, lines, lines).verdict.sentence
    assert (
        sentence == "Words: F1 0.89 in both. Membership: AUC 0.90 in both. No difference is shown."
    )


def test_the_same_attack_decides_where_the_lowest_reading_is_of_another(tmp_path):
    without = [result(0, f1=(0.89, 0.81, 0.94)), result(0, "bias_sign", f1=(0.5, 0.4, 0.6))]
    for high, fell in ((0.1, True), (0.85, False)):  # the upper end of flatchat in the twin
        private = [result(0, f1=(0.01, 0.0, high)), result(0, "bias_sign", f1=(0.02, 0.0, 0.1))]
        sentence = twins(tmp_path / str(high), without, private).verdict.sentence
        assert ("next to none" in sentence) == fell
        assert ("No difference is shown" in sentence) == (not fell)


def both_stages(folder, *pairs):
    """A run under a defence of which looks saw both sides: (attack, metric, before, after)."""
    lines = [
        result(0, attack, stage, **{metric: rate})
        for attack, metric, *rates in pairs
        for stage, rate in zip(("local", "shared"), rates, strict=True)
    ]
    return found_in(folder, lines, [begin(attacks=BOTH, defenses=[dpsgd()]), end(4)])


WORDS_FELL = ("flatchat", "f1", (0.84, 0.8, 0.9), (0.0, 0.0, 0.14))
UNSURE = ("fc", "auc", (0.99, 0.7, 1.0), (0.72, 0.5, 0.9))


def test_the_headline_of_a_defended_run_says_what_the_defence_bought(tmp_path):
    sentence = both_stages(tmp_path, UNSURE, WORDS_FELL).verdict.sentence
    assert sentence == (
        "The defence brought words from F1 0.84 down to 0.00. "
        "It shows no difference for membership. Not conclusive: membership. "
        "More measurements or texts would show it."
    )


def test_a_defence_that_takes_nothing_is_said_to_show_no_difference(tmp_path):
    same = ("flatchat", "f1", (0.84, 0.8, 0.9), (0.8, 0.7, 0.9))
    sentence = both_stages(tmp_path, same).verdict.sentence
    assert sentence.endswith("The defence shows no difference for words.")
    assert sentence.startswith("If gradients are shared, one update lets the server")


def test_without_both_stages_or_a_defence_nothing_is_said_to_be_bought(tmp_path):
    lines = [result(0, f1=(0.0, 0.0, 0.1))]
    alone = found_in(tmp_path / "a", lines, [begin(defenses=[dpsgd()]), end(4)])
    lines += [result(0, stage="local", f1=(0.9, 0.8, 1.0))]
    undefended = found_in(tmp_path / "b", lines, [begin(), end(4)])
    for found in (alone, undefended):
        assert "defence" not in found.verdict.sentence


def test_a_low_number_of_an_attack_beside_a_silent_one_is_not_what_a_defence_bought(tmp_path):
    silent = result(0, "bias_sign")
    before, left = result(0, stage="local", f1=WORDS_FELL[2]), result(0, f1=WORDS_FELL[3])
    record = [begin(attacks=BOTH, defenses=[dpsgd()]), end(4)]
    sentence = found_in(tmp_path, [before, left, silent], record).verdict.sentence
    assert sentence.startswith("The defence shows no difference for words.")


def test_runs_without_a_step_in_common_show_the_last_value_of_each(tmp_path):
    for run, step in (("a", 60), ("b", 100)):
        record = [begin(run), look(step, run, utility={"val_loss": step / 50}), end(step, run)]
        written(tmp_path / run, [result(0, run=run, **READ)], record)
    found = findings(read([tmp_path]))
    column = found.comparison.columns.index("utility")
    assert [row[column] for row in found.comparison.rows] == [
        "val_loss 1.200 at 60",
        "val_loss 2.000 at 100",
    ]


def test_what_an_attack_reads_and_nobody_shared_is_not_called_untested(tmp_path):
    line = result(0, f1=(0.0, 0.0, 0.0)) | {"exposed": False}
    found = found_in(tmp_path, [line], [begin()])
    reading = reading_of(found, "words")
    assert (reading.answer, reading.verdict) == ("Not shared", "untested")
    assert reading.note == "What flatchat reads is not shared. What is was not measured."


def test_a_run_that_a_gate_stopped_is_compared_by_what_left(tmp_path):
    stop = decision("stopped", 1, None, run="b")
    found = runs(tmp_path, (0.8, 0.9, 1.0), (0.8, 0.9, 1.0), decisions=[stop])
    assert found.verdict.sentence == (
        "The gate stopped b after 9 updates. In a all 9 left: words, F1 0.90."
    )
    assert "Updates that left" in page(found)


# ---- how sure, and what defences did ------------------------------------------------------------


def membership(folder, *looks, family="membership", metric="auc"):
    """The report on looks of the exact test's values, corrected for all looks."""
    lines = [
        result(step, "fc", p_over_looks=p, **{metric: value})
        for step, (value, p) in enumerate(looks)
    ]
    return found_in(folder, lines, [begin(attacks=[about("fc", family)])])


def test_one_look_that_excludes_guessing_is_conclusive(tmp_path):
    found = membership(tmp_path, ((1.0, 0.977, 1.0), 3.3e-09), ((1.0, 0.98, 1.0), 3.3e-09))
    [attack] = found.runs[0].attacks
    assert (attack.conclusive, attack.p_value) == (True, 3.3e-09)
    assert found.verdict.level == "high"
    assert found.verdict.sentence == (
        "If gradients are shared, one update lets the server tell almost every time whether a "
        "given text was in a batch."
    )


def test_where_no_look_excludes_guessing_it_is_not_conclusive(tmp_path):
    found = membership(tmp_path, ((0.9, 0.6, 1.0), 0.2))
    reading = reading_of(found, "membership")
    assert reading.verdict == "inconclusive"
    assert "over all measurements guessing does so well too" in reading.note
    assert found.verdict.sentence == "High, but in too few measurements to be sure: membership."
    assert found.verdict.level == "some"


def test_words_that_blind_naming_finds_too_are_not_conclusive(tmp_path):
    found = membership(tmp_path, (0.6, 0.4), family="words", metric="f1")
    assert reading_of(found, "words").verdict == "inconclusive"
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


def answer(html, question):
    """What the last table on the page answers."""
    cell = re.findall(rf'<th scope="row">{question}</th><td[^>]*>\s*(.*?)\s*</td>', html, re.S)
    return cell[-1]


def test_epsilon_is_the_same_in_every_place_and_format(tmp_path):
    found = private(tmp_path, epsilon=1.2345678)
    [fit] = found.runs
    [cost] = fit.privacy
    assert cost.epsilon == 1.24
    without = cost.without_sampling
    html = page(found)
    for made in (html, json.dumps(as_json(found))):
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
    assert said in sentences_of(found)
    assert said in found.runs[0].privacy[0].statement
    assert said in page(found)


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [
        (1.0, "finds at most 2.8 in 100 that were (guessing: 1)."),  # 0.01 e + 1e-5
        (3.0, "finds at most 20.1 in 100 that were (guessing: 1)."),
        (4.5, "finds at most 90.1 in 100 that were (guessing: 1). That is a weak limit."),
        (8.0, "finds up to all that were (guessing: 1). That is a weak limit."),
    ],
)
def test_what_epsilon_limits_is_said_in_one_sentence(tmp_path, epsilon, said):
    found = private(tmp_path, epsilon=epsilon)
    asked = "What this epsilon limits: a test of whether one example was in the training data"
    for text in (sentences_of(found), found.runs[0].privacy[0].statement):
        assert asked in text
        assert said in text


def test_the_page_says_what_its_words_and_numbers_mean(tmp_path):
    html = page(found_in(tmp_path, [result(0, **LITTLE)], [begin()]))
    assert "Neither their order nor a text is read." in answer(html, "Words")
    for term in ("F1", "n", "95% interval", "Certified", "Unknown", "Not recorded"):
        assert len(answer(html, term)) > 20
    assert '<th scope="row">AUC' not in html


def test_a_family_without_a_sentence_of_its_own_is_told_with_what_guessing_has(tmp_path):
    family = {"name": "attributes", "headline": "auc", "chance": 0.5}
    record = [begin(attacks=[about("age", "attributes")], families=[family])]
    found = found_in(tmp_path, [result(1, "age", auc=(0.9, 0.8, 1.0))], record)
    assert "lets the server reach a auc of 0.90, where guessing has 0.5." in found.verdict.sentence

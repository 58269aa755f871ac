"""What the lines of runs say together: plain values, the source of every form of the report.

Nothing here is typed by hand that the run knows; what the run does not know is ``NOT_RECORDED``,
or comes from ``report.toml``.
"""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from lightning_fedleak.report.reading import FitLines, Line, Reading, number

SCHEMA = 1
NOT_RECORDED = "not recorded"
HEADLINES = {"words": "f1", "membership": "auc", "texts": "token_accuracy"}
CHANCE = {"auc": 0.5, "accuracy": 0.5}
SHOWN = {
    "words": ("f1", "recall", "precision"),
    "membership": ("auc", "accuracy", "tpr_at_fpr_0.01"),
    "texts": ("token_accuracy", "exact_sentences", "rouge_l"),
}
_FAMILIES = {
    "words": "which words are in a batch",
    "membership": "whether a given text is in a batch",
    "texts": "whole texts",
}
NEXT_TO_NONE = 0.1
_FPR = 0.01
_DISHONEST = "chooses"
_ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_FAR = 0.2
"""A highest look or a worst client that is so much above the mean is named in the verdict."""


def findings(reading: Reading, people: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that the report says.

    Args:
        reading: of the runs.
        people: what only people know, by the names of ``report.toml``.

    Returns:
        Plain values that JSON holds; NaN never occurs, unknown is None.
    """
    problems = list(reading.problems)
    understood: list[tuple[FitLines, dict[str, Any]]] = []
    for lines in reading.fits:
        try:
            understood.append((lines, _fit(lines)))
        except _ODD as error:
            problems.append(
                f"run {lines.run} of {lines.folder.name} is not as a run writes it: {error!r}"
            )
    tables = {}
    for name, content in reading.results.items():
        try:
            tables[Path(name).name] = _table(content)
        except _ODD as error:
            problems.append(f"{Path(name).name} is not as a command writes it: {error!r}")
    fits = [fit for _, fit in understood]
    together = _together(understood)
    return {
        "schema": SCHEMA,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "made_by": f"lightning-fedleak {version('lightning-fedleak')}",
        "verdict": _verdict(fits, together) if fits else _only_results(len(tables)),
        "runs": fits,
        "privacy_together": together,
        "results": tables,
        "people": dict(people or {}),
        "problems": problems,
    }


# ---- one fit ----------------------------------------------------------------------------------


def _fit(lines: FitLines) -> dict[str, Any]:
    begin = lines.begin or {}
    attacks = _attacks(lines)
    played = {attack["family"] for attack in attacks if attack["looks"] and attack["exposed"]}
    privacy = _privacy(lines)
    shared = _shared(begin)
    return {
        "name": lines.folder.name,
        "folder": lines.folder.name if lines.folder.is_absolute() else str(lines.folder),
        "run": lines.run or NOT_RECORDED,
        "recorded": lines.begin is not None,
        "began": begin.get("time", NOT_RECORDED),
        "ended": _ended(lines),
        "steps": max((int(one["step"]) for one in (*lines.results, *lines.looks)), default=None),
        "model": begin.get("model"),
        "training": begin.get("training"),
        "versions": begin.get("versions"),
        "machine": begin.get("machine"),
        "monitor": begin.get("monitor"),
        "settings_hash": begin.get("settings_hash", NOT_RECORDED),
        "shared": shared,
        "attacks": attacks,
        "headlines": _series(lines),
        "utility": _utility(lines),
        "privacy": privacy,
        "implied": _implied(privacy, attacks, shared.get("clients", 1)),
        "defenses": [_defense(told) for told in begin.get("defenses", [])],
        "gates": begin.get("gates", []),
        "decisions": [_decision(line) for line in lines.decisions],
        "not_tested": _not_tested(
            begin, played, _left_out(lines.results), recorded=lines.begin is not None
        ),
    }


def _defense(told: Line) -> dict[str, Any]:
    """Without the ledger's path, which names places of a machine."""
    settings = {n: v for n, v in (told.get("settings") or {}).items() if n != "ledger"}
    return {**told, "settings": settings}


def _ended(lines: FitLines) -> str:
    if lines.begin is None:
        return NOT_RECORDED
    if lines.end is None:
        return "cut off: no end was recorded"
    how = str(lines.end.get("how"))
    said = {"finished": "in order", "KeyboardInterrupt": "interrupted by hand"}
    stopped = [line["gate"] for line in lines.decisions if line.get("did") == "stopped"]
    if how == "finished" and stopped:
        return f"stopped by the gate {', '.join(stopped)}"
    return said.get(how, f"by an error ({how})")


def _shared(begin: Line) -> dict[str, Any]:
    """What left a client, and who could see it."""
    if not begin:
        return {"what": NOT_RECORDED, "seen_by": NOT_RECORDED, "trained": []}
    monitor, model = begin.get("monitor", {}), begin.get("model", {})
    rounds = monitor.get("local_steps")
    what = (
        f"the weights' change after every {rounds} optimizer steps"
        if rounds
        else "the gradient of every step"
    )
    trained, of = model.get("trained_parameters"), model.get("parameters")
    share = f" of {trained:,} of {of:,} parameters" if trained and of else ""
    peft = f" ({', '.join(model['peft'])})" if model.get("peft") else ""
    clients = monitor.get("clients", 1)
    told = begin.get("defenses", [])
    central = clients > 1 and any(d["settings"].get("trust") == "central" for d in told)
    seen_by = "whoever receives a client's update: the server, its staff and storage"
    if central:
        seen_by = "the sum over clients only, if a secure aggregation really hides the parts"
    return {
        "what": f"{what}{share}{peft}",
        "clients": clients,
        "seen_by": seen_by,
        "trained": list(model.get("trained", [])),
        "unread": list(begin.get("unread", [])),
    }


# ---- attacks ----------------------------------------------------------------------------------


def _attacks(lines: FitLines) -> list[dict[str, Any]]:
    """One row for each attack and stage, unknown ones first, then by how much they read."""
    about = {one["name"]: one for one in (lines.begin or {}).get("attacks", [])}
    grouped: dict[tuple[str, str], list[Line]] = {}
    for line in lines.results:
        if not str(line.get("unknown") or "").startswith("not played: "):
            grouped.setdefault((line["attack"], line["stage"]), []).append(line)
    rows = [_attack(name, stage, of, about) for (name, stage), of in grouped.items()]
    return sorted(rows, key=lambda row: (row["looks"] > 0, -(row["mean"] or 0.0)))


def _attack(
    name: str, stage: str, lines: Sequence[Line], about: Mapping[str, Line]
) -> dict[str, Any]:
    known_as = about.get(name, {})
    family = known_as.get("family") or _family_of(lines)
    headline = HEADLINES.get(family, "")
    needs = known_as.get("needs")
    shared = [line for line in lines if line.get("exposed")]
    values = [v for line in shared if not math.isnan(v := _now(line, headline))]
    clients = [
        v for line in shared if not math.isnan(v := _value(line, f"{headline}_worst_client"))
    ]
    last = next((one for one in reversed(lines) if not math.isnan(_value(one, headline))), None)
    reasons = [str(line["unknown"]) for line in lines if line.get("unknown")]
    return {
        "name": name,
        "stage": stage,
        "family": family,
        "headline": headline,
        "chance": CHANCE.get(headline, 0.0),
        "adversary": known_as.get("adversary", NOT_RECORDED),
        "dishonest": None if needs is None else any(n.startswith(_DISHONEST) for n in needs),
        "reads": list(known_as.get("reads", [])),
        "config": dict(known_as.get("config") or (lines[-1].get("config") or {})),
        "exposed": any(line.get("exposed") for line in lines),
        "looks": len(values),
        "unknown": len(reasons),
        "why_unknown": reasons[-1] if reasons else None,
        "n": sum(int(line.get("n") or 0) for line in lines),
        "mean": _mean(values),
        "highest": max(values, default=None),
        "worst_client": max(clients, default=None),
        "last": _rate(last, headline),
        "rates": {m: _rate(last, m) for m in SHOWN.get(family, ())},
        "means": {
            m: _mean([v for line in shared if not math.isnan(v := _now(line, m))])
            for m in SHOWN.get(family, ())
        },
        "certified": _mean([v for line in lines if not math.isnan(v := _value(line, "certified"))]),
    }


def _family_of(lines: Sequence[Line]) -> str:
    """Of lines whose fit was not recorded: by the metrics that they hold."""
    names = {name for line in lines for name in line["metrics"]}
    return next((family for family, metric in HEADLINES.items() if metric in names), "unknown")


def _value(line: Line | None, metric: str, end: str = "value") -> float:
    found = {} if line is None else line["metrics"].get(metric) or {}
    return number(found.get(end))


def _now(line: Line, metric: str) -> float:
    """Of this look alone, where the value is pooled over looks."""
    alone = f"{metric}_of_this_look"
    return _value(line, alone if alone in line["metrics"] else metric)


def _rate(line: Line | None, metric: str) -> dict[str, float | None] | None:
    if line is None or math.isnan(_value(line, metric)):
        return None
    ends = ("value", "low", "high")
    return {end: _plain(_value(line, metric, end)) for end in ends}


def _series(lines: FitLines) -> dict[str, list[tuple[int, float | None]]]:
    """The headline of each attack at what was shared, over the steps; None is unknown."""
    about = {one["name"]: one["family"] for one in (lines.begin or {}).get("attacks", [])}
    found: dict[str, list[tuple[int, float | None]]] = {}
    for line in lines.results:
        if line["stage"] == "shared":
            headline = HEADLINES.get(about.get(line["attack"]) or _family_of([line]), "")
            value = _plain(_now(line, headline))
            found.setdefault(line["attack"], []).append((int(line["step"]), value))
    return {name: of for name, of in found.items() if any(v is not None for _, v in of)}


def _utility(lines: FitLines) -> dict[str, list[tuple[int, float | None]]]:
    found: dict[str, list[tuple[int, float | None]]] = {}
    for look in lines.looks:
        for name, value in (look.get("utility") or {}).items():
            found.setdefault(name, []).append((int(look["step"]), _plain(number(value))))
    return found


def _not_tested(
    begin: Line, played: set[str], left_out: Sequence[Line], *, recorded: bool
) -> list[str]:
    """What nobody tried, in sentences."""
    said = [
        f"{what}: no attack gave a result"
        for family, what in _FAMILIES.items()
        if family not in played
    ]
    said += [f"{one['name']}: {one['why']}" for one in begin.get("not_played", left_out)]
    unread = begin.get("unread", [])
    if unread:
        said.append(f"{len(unread)} shared parameters that no attack reads: {_listed(unread)}")
    if not recorded:
        said.append("which parameters are shared and read by none: not recorded")
    said.append("the trained model itself: extraction and membership by its answers")
    return said


def _left_out(results: Sequence[Line]) -> list[dict[str, str]]:
    """Attacks that were not played, as their own lines say it."""
    begins = "not played: "
    return [
        {"name": line["attack"], "why": line["unknown"].removeprefix(begins)}
        for line in results
        if str(line.get("unknown") or "").startswith(begins)
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _decision(line: Line) -> dict[str, Any]:
    names = ("gate", "did", "step", "metric", "of", "measured", "at_most", "hardened", "why")
    return {name: line.get(name) for name in names}


# ---- privacy ----------------------------------------------------------------------------------


def _privacy(lines: FitLines) -> list[dict[str, Any]]:
    """What each defence that accounts has spent at the end, and on the way."""
    told = [*lines.looks, *([lines.end] if lines.end else [])]
    found: dict[str, dict[str, Any]] = {}
    for line in told:
        for spent in line.get("privacy") or ():
            of = found.setdefault(spent["defense"], {"defense": spent["defense"], "series": []})
            epsilon = number(spent.get("epsilon"))
            of["series"].append((int(line["step"]), _plain(epsilon)))
            of |= {
                "epsilon": "infinite" if math.isinf(epsilon) else _plain(epsilon),
                "delta": _plain(number(spent.get("delta"))),
                "noise_multiplier": _plain(number(spent.get("noise_multiplier"))),
                "sample_rate": _plain(number(spent.get("sample_rate"))),
                "releases": spent.get("releases"),
                "history": spent.get("history") or [],
            }
    about = {d["name"]: d for d in (lines.begin or {}).get("defenses", [])}
    for name, of in found.items():
        defense = about.get(name, {})
        settings = defense.get("settings", {})
        of["guarantee"] = defense.get("guarantee", NOT_RECORDED)
        of["accountant"] = settings.get("accountant", NOT_RECORDED)
        of["target_epsilon"] = settings.get("target_epsilon")
        of["poisson"] = settings.get("poisson")
        of["trust"] = settings.get("trust", NOT_RECORDED)
        of["sampling"] = _sampling(settings)
        of["unit"] = settings.get("unit", "example")
        of["max_grad_norm"] = settings.get("max_grad_norm")
        of["class"] = defense.get("class", NOT_RECORDED)
        of["holds"] = _holds(of)
        of["ledger"] = _ledgers(settings.get("ledger"))
        of["without_sampling"] = _without_sampling(of)
        of["statement"] = _statement(of)
    return list(found.values())


def _holds(spent: Mapping[str, Any]) -> bool:
    """Whether there is a guarantee: a known, finite epsilon at a known delta."""
    known = all(isinstance(spent[name], int | float) for name in ("epsilon", "delta"))
    return known and not str(spent["guarantee"]).startswith("none")


def _order(epsilon: object) -> float:
    """Unknown and infinite epsilons are above every number."""
    value = number(epsilon)
    return math.inf if math.isnan(value) else value


def _ledgers(path: object) -> dict[str, str] | None:
    """SHA-256 of the ledger, or of each client's, by the file's name; None without one."""
    if not isinstance(path, str):
        return None
    place = Path(path)
    try:
        near = place.parent.glob(f"{glob.escape(place.name)}.*-of-*")
        files = [place] if place.is_file() else sorted(near)
        hashes = {}
        for one in files:
            with one.open("rb") as file:
                hashes[one.name] = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        return {place.name: f"cannot be read: {type(error).__name__}"}
    return hashes or {place.name: "the file is not there"}


def _without_sampling(spent: Mapping[str, Any]) -> float | str | None:
    """Epsilon of the same releases if every example were in every batch."""
    if spent["accountant"] == "filter" or not spent["poisson"] or not spent["holds"]:
        return None
    history = [(sigma, 1.0, count) for sigma, _, count in spent["history"]]
    return _epsilon(history, spent["delta"], spent["accountant"])


def _sampling(settings: Mapping[str, Any]) -> Literal["poisson", "without_replacement"]:
    """How what was released was drawn, as accountants name it."""
    fixed = settings.get("sampling") == "fixed" and settings.get("trust") == "central"
    return "without_replacement" if fixed else "poisson"


def _epsilon(
    history: Sequence[tuple[float, float, int]],
    delta: float | None,
    accountant: object,
    sampling: Literal["poisson", "without_replacement"] = "poisson",
) -> float | str | None:
    if not history or not delta or any(not sigma for sigma, _, _ in history):
        return None
    try:
        from lightning_fedleak.defenses.accounting.accounting import (
            LARGEST_EPSILON,
            epsilon_of,
        )

        found = epsilon_of(history, delta, "prv" if accountant == "prv" else "rdp", sampling)
    except (ImportError, ValueError) as error:
        return f"not computed: {error}"
    return f"more than {LARGEST_EPSILON:g}" if math.isinf(found) else found


def _statement(spent: Mapping[str, Any]) -> str:
    """What was promised, in words."""
    guarantee = f"The guarantee: {str(spent['guarantee']).strip().rstrip('.')}. "
    if not spent["holds"]:
        return f"No epsilon holds for these releases. {guarantee}"
    text = (
        f"After {spent['releases']} releases the privacy loss is at most epsilon = "
        f"{_bound(spent['epsilon'])} at delta = {_said(spent['delta'])}, by the accountant "
        f"{spent['accountant']}. {guarantee}"
    )
    if spent["noise_multiplier"] is not None and spent["poisson"] is not None:
        rate = f"Poisson samples at rate {_said(spent['sample_rate'])}"
        drawn = rate if spent["poisson"] else "not sampled by chance"
        text += f"Noise multiplier {_said(spent['noise_multiplier'])}; batches are {drawn}. "
    if spent["without_sampling"] is not None:
        text += (
            "Without counting on the sampling, epsilon of the same releases would be "
            f"{_bound(spent['without_sampling'])}. "
        )
    if spent["trust"] == "central":
        text += (
            "It covers the sum over clients: of several clients the update of one alone is not "
            "covered. "
        )
    return text + (
        "It does not cover the leakage logs, validation metrics, the choice of settings, or "
        "decisions that people or gates took in sight of private data."
    )


def _implied(
    privacy: Sequence[Mapping[str, Any]], attacks: Sequence[Mapping[str, Any]], clients: int
) -> list[dict[str, Any]]:
    """The most that each epsilon allows a test of membership, beside what was measured.

    Where the sum over several clients is what it covers, that is measured at stage aggregate.
    """
    held = [spent for spent in privacy if spent["holds"]]
    if not held:
        return []
    from lightning_fedleak.auditing.mechanisms import dp_auc, dp_tpr  # loads torch: seconds

    found = []
    for spent in held:
        epsilon, delta = min(spent["epsilon"], 50.0), spent["delta"]
        stage = "aggregate" if spent["trust"] == "central" and clients > 1 else "shared"
        asked = [a for a in attacks if a["family"] == "membership" and a["stage"] == stage]
        tpr = [a["rates"].get("tpr_at_fpr_0.01") for a in asked]
        auc = [a["last"]["value"] for a in asked if a["last"]]
        found.append(
            {
                "defense": spent["defense"],
                "stage": stage,
                "epsilon": spent["epsilon"],
                "delta": delta,
                "largest_tpr_at_fpr_0.01": dp_tpr(_FPR, epsilon, delta),
                "largest_auc": dp_auc(epsilon, delta),
                "measured_tpr_at_fpr_0.01": max((t["value"] for t in tpr if t), default=None),
                "measured_auc": max(auc, default=None),
            }
        )
    return found


def _together(fits: Sequence[tuple[FitLines, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What all fits have spent, if they were of the same examples: an upper bound.

    Several monitors of one fit count once, by the one that recorded most. The releases that a fit
    had taken over with a checkpoint count once too, as far as the fit that made them recorded them
    and is among these. Where noise was turned up in the run (``accountant="filter"``) epsilons are
    added up.
    """
    by_defense: dict[str, dict[str, dict[str, Any]]] = {}
    fit_of = {of.run: _fit_name(of) for of, _ in fits}
    for of, fit in fits:
        resumed = (of.begin or {}).get("resumed") or {}
        before = {s["defense"]: s["history"] for s in resumed.get("privacy", ())}
        for spent in fit["privacy"]:
            by_fit = by_defense.setdefault(spent["defense"], {})
            other = by_fit.get(_fit_name(of))
            if other is None or _releases(other["history"]) < _releases(spent["history"]):
                by_fit[_fit_name(of)] = {
                    **spent,
                    "recorded": bool(spent["history"]),
                    "from": fit_of.get(resumed.get("run", "")),
                    "before": before.get(spent["defense"], ()),
                }
    found = []
    for defense, by_fit in by_defense.items():
        all_spent = list(by_fit.values())
        if len(all_spent) < 2:
            continue
        history = [
            event
            for spent in all_spent
            for event in _own(spent, by_fit.get(spent["from"], {}).get("history", ()))
        ]
        delta = max(spent["delta"] or 0.0 for spent in all_spent)
        added = _sum([spent["epsilon"] for spent in all_spent])
        deltas = math.fsum(spent["delta"] or 0.0 for spent in all_spent)
        epsilon: float | str | None = "infinite"
        if all(spent["holds"] for spent in all_spent):
            kinds = {spent["accountant"] for spent in all_spent}
            exact = kinds <= {"prv", "rdp"} and all(spent["recorded"] for spent in all_spent)
            kind = "prv" if kinds == {"prv"} else "rdp"
            drawn = {spent["sampling"] for spent in all_spent}
            exact = exact and len(drawn) == 1
            epsilon = _epsilon(history, delta, kind, *drawn) if exact else added
            delta = delta if exact else deltas
        found.append(
            {
                "defense": defense,
                "fits": len(all_spent),
                "delta": delta,
                "epsilon": epsilon,
                "sum_of_epsilons": added,
                "sum_of_deltas": deltas,
            }
        )
    return found


def _fit_name(lines: FitLines) -> str:
    """The same for all monitors of one fit."""
    return str((lines.begin or {}).get("fit") or f"{lines.folder}/{lines.run}")


def _releases(history: Sequence[Sequence[Any]]) -> int:
    return sum(count for *_, count in history)


def _own(
    spent: Mapping[str, Any], recorded: Sequence[Sequence[Any]]
) -> list[tuple[float, float, int]]:
    """A fit's releases without those it had taken over, as far as these are recorded elsewhere.

    A fit that was killed has recorded fewer than its last checkpoint holds: the rest stays here.
    Where what was taken over is no part of the history, nothing is taken off.
    """
    counts = {(sigma, rate): count for sigma, rate, count in spent["history"]}
    before = {(sigma, rate): count for sigma, rate, count in spent["before"]}
    elsewhere = {(sigma, rate): count for sigma, rate, count in recorded}
    if all(counts.get(event, 0) >= count for event, count in before.items()):
        for event, count in before.items():
            counts[event] -= min(count, elsewhere.get(event, 0))
    return [(*event, count) for event, count in counts.items() if count]


def _sum(values: Sequence[object]) -> float | str | None:
    numbers = [number(value) for value in values]
    if any(math.isnan(value) for value in numbers):
        return None
    total = math.fsum(numbers)
    return "infinite" if math.isinf(total) else total


# ---- the verdict ------------------------------------------------------------------------------


def _verdict(
    fits: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a reader who reads one thing should read."""
    best: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for fit in fits:
        for attack in fit["attacks"]:
            if attack["stage"] != "shared" or attack["mean"] is None or not attack["exposed"]:
                continue
            held = best.get(attack["family"])
            if held is None or attack["mean"] > held[1]["mean"]:
                best[attack["family"]] = (fit, attack)
    several = len(fits) > 1
    sentences: list[str] = []
    before = ""
    for family in (name for name in _FAMILIES if name in best):
        fit, attack = best[family]
        who = _who(attack["dishonest"])
        begins = "It could also" if who == before else f"Off one shared update, {who} could"
        named = f", run {fit['name']}" if several else ""
        sentences.append(f"{begins} {_could(family, attack)}{named}).")
        before = who
    tried = {
        a["family"]
        for fit in fits
        for a in fit["attacks"]
        if a["stage"] == "shared" and a["exposed"] and a["unknown"]
    }
    unknown = [what for family, what in _FAMILIES.items() if family in tried - best.keys()]
    untested = [what for family, what in _FAMILIES.items() if family not in tried | best.keys()]
    if not sentences:
        sentences = ["Nothing was measured in these runs. That is 'unknown', not 'safe'."]
        unknown, untested = [], []
    if unknown:
        sentences.append(f"Attacks gave no result, so that it is unknown: {'; '.join(unknown)}.")
    if untested:
        sentences.append(f"Nobody tested {' or '.join(untested)}.")
    sentences += _accounted(fits, together)
    level = max((_excess(a) for _, a in best.values()), default=None)
    return {
        "sentence": " ".join(sentences),
        "sentences": sentences,
        "level": "unknown" if level is None else "high" if level > 0.5 else "some",
        "worst": {family: attack["mean"] for family, (_, attack) in best.items()},
    }


def _accounted(
    fits: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What the runs say of differential privacy."""
    private = [fit for fit in fits if any(p["holds"] for p in fit["privacy"])]
    broken = [p for fit in fits for p in fit["privacy"] if not p["holds"]]
    said = []
    if private:
        spent = [p for fit in private for p in fit["privacy"] if p["holds"]]
        worst = max(spent, key=lambda p: _order(p["epsilon"]))
        some = "" if len(private) == len(fits) else f" in {len(private)} of {len(fits)} runs"
        said.append(
            f"Differential privacy was accounted{some}: epsilon {_bound(worst['epsilon'])} at "
            f"delta {_said(worst['delta'])} by {worst['defense']}."
        )
    for one in together:
        said.append(
            f"{one['fits']} fits by {one['defense']}, if on the same examples, cost epsilon "
            f"{_bound(one['epsilon'])} at delta {_said(one['delta'])} together."
        )
    if broken:
        said.append(f"No guarantee holds for {', '.join(sorted({p['defense'] for p in broken}))}.")
    return said or ["No differential privacy was accounted."]


def _only_results(n: int) -> dict[str, Any]:
    said = f"No training run is in this report: it holds the results of {n} command{'s' * (n > 1)}."
    return {"sentence": said, "sentences": [said], "level": "unknown", "worst": {}}


def _excess(attack: Mapping[str, Any]) -> float:
    """How far above chance, from 0 to 1."""
    highest, chance = float(attack["highest"]), float(attack["chance"])
    return (highest - chance) / (1 - chance)


def _who(dishonest: bool | None) -> str:
    if dishonest is None:
        return "a server"
    if dishonest:
        return "a dishonest server, which adds layers of its own,"
    return "an honest but curious server"


def _could(family: str, attack: Mapping[str, Any]) -> str:
    """What an attack did, as the middle of a sentence that goes on in its last bracket."""
    of = f"mean of {attack['looks']} looks" if attack["looks"] > 1 else "one look"
    if attack["unknown"]:
        of += f", unknown at {attack['unknown']} more"
    for what, value in (("at the worst look", "highest"), ("of the worst client", "worst_client")):
        if attack[value] is not None and attack[value] > attack["mean"] + _FAR:
            of += f", {attack['headline']} {attack[value]:.2f} {what}"
    means = attack["means"]
    if family == "words" and attack["mean"] < NEXT_TO_NONE:
        done = f"read next to none of the words, with an F1 of {attack['mean']:.2f}"
    elif family == "words":
        done = (
            f"read {_percent(means['recall'])} of the words, where "
            f"{_percent(means['precision'])} of what it named was right"
        )
    elif family == "membership":
        done = (
            "tell texts of the batch from others with an AUC of "
            f"{means['auc']:.2f}, where a coin has 0.50"
        )
    else:
        done = (
            f"write down {_percent(means['token_accuracy'])} of the tokens in their places, and "
            f"{_percent(means['exact_sentences'])} of the texts without an error"
        )
    return f"{done} ({of}, {attack['name']}"


def _percent(share: float | None) -> str:
    """Rounded towards what it is not: 99.6% is no 100%."""
    if share is None:
        return "an unknown share"
    percent = 100 * share
    if 99 < percent < 100:
        return f"{math.floor(10 * percent) / 10:.1f}%"
    if 0 < percent < 1:
        return "below 1%"
    return f"{percent:.0f}%"


# ---- small ------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bound(epsilon: object) -> str:
    """An upper bound, rounded up."""
    if not isinstance(epsilon, int | float) or epsilon <= 0:
        return _said(epsilon)
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.3g}"


def _said(value: object) -> str:
    if value is None:
        return NOT_RECORDED
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _table(content: Mapping[str, Any]) -> dict[str, Any]:
    """A command's results, one row for each cell, flat."""
    rows = [_flat(row) for row in content.get("results") or content.get("cells") or ()]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rates = [name for name in columns if any(isinstance(row.get(name), Mapping) for row in rows)]
    columns = [*columns[:2], *rates, *(name for name in columns[2:] if name not in rates)]
    about = {k: v for k, v in content.items() if isinstance(v, str | int | float)}
    return {
        "about": about,
        "columns": columns,
        "rows": [[row.get(c) for c in columns] for row in rows],
    }


def _flat(row: Mapping[str, Any], root: str = "") -> dict[str, Any]:
    """Numbers and words of nested settings and rates; lists, of single games say, are left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if {"value", "low", "high"} <= value.keys():
                flat[root + name] = {end: value[end] for end in ("value", "low", "high")}
            else:
                flat |= _flat(value, f"{root}{name}/")
        elif value is None or isinstance(value, str | int | float):
            flat[root + name] = value
    return flat


__all__ = ["HEADLINES", "NOT_RECORDED", "SCHEMA", "findings"]

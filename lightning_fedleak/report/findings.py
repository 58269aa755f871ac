"""What the lines of runs say together: plain values, the source of every form of the report.

Nothing here is typed by hand that the run knows; what the run does not know is ``NOT_RECORDED``,
or comes from ``report.toml``.
"""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from unicodedata import category

from lightning_fedleak.report.advice import NEXT_TO_NONE, next_steps
from lightning_fedleak.report.reading import FitLines, Line, Reading, number, spans

SCHEMA = 2
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
_FPR = 0.01
_DISHONEST = "chooses"
_ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError)
CLIENT, TOKENS = "ClientDP", "TokenLDP"
"""Classes of defences whose account is not one of examples."""
_UNITS = {"DPSGD": "example", CLIENT: "client", TOKENS: "row"}
_TRUSTED = {
    "server": "The server is trusted: it sees each client's update as it is. Epsilon holds "
    "against whoever sees the models of all rounds.",
    "sum": "Epsilon holds only if nobody sees more than the sum over clients alone: one client's "
    "update is not covered.",
    "client": "Only the client is trusted: epsilon holds against the server too.",
    NOT_RECORDED: f"Who is trusted is {NOT_RECORDED}.",
}
"""Who must be trusted for an epsilon to hold, in every place that says so."""
_SUM = "sum"
"""The client whose update is that of all together."""
_KEPT_BACK = ("withheld", "raise")
"""What a gate of rounds does to an update that does not leave."""
Points = list[tuple[int, float | None]]
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
        tables[Path(name).name], odd = _table(content)
        if odd:
            problems.append(
                f"{len(odd)} of the results of {Path(name).name} are not as a command writes "
                f"them: {spans(odd)}"
            )
    fits = _runs(understood)
    for fit in fits:
        problems += [told for spent in fit["privacy"] for told in spent.pop("unread")]
    together = _together(understood)
    found = {
        "schema": SCHEMA,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "made_by": f"lightning-fedleak {version('lightning-fedleak')}",
        "verdict": _verdict(fits, together) if fits else _only_results(len(tables)),
        "next_steps": next_steps(fits),
        "runs": fits,
        "privacy_together": together,
        "results": tables,
        "problems": problems,
    }
    return {**_visible(found), "people": dict(people or {})}


# ---- one fit ----------------------------------------------------------------------------------


def _runs(understood: Sequence[tuple[FitLines, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A run for each fit, or federation; several monitors of one are one run."""
    by_fit: dict[str, list[tuple[FitLines, dict[str, Any]]]] = {}
    for lines, fit in understood:
        by_fit.setdefault(_fit_name(lines), []).append((lines, fit))
    return [
        of[0][1] if len(of) == 1 else _fit(_joined([lines for lines, _ in of]))
        for of in by_fit.values()
    ]


def _joined(monitors: Sequence[FitLines]) -> FitLines:
    """The lines of several monitors of one fit, which have attacks of their own, as of one.

    Of a federation's processes one that knows the end will do: clients' are not told of it.
    """
    begins = [dict(of.begin or {}) for of in monitors]

    def every(name: str, key: str) -> list[Any]:
        return list({one[key]: one for begin in begins for one in begin.get(name, ())}.values())

    attacks = every("attacks", "name")
    played = {one["name"] for one in attacks}
    about = [dict(begin.get("monitor") or {}) for begin in begins]
    begin = {
        **begins[0],
        "attacks": attacks,
        "not_played": [one for one in every("not_played", "name") if one["name"] not in played],
        "gates": every("gates", "name"),
        "defenses": [one for begin in begins for one in begin.get("defenses", ())],
        "unread": [name for name in begins[0].get("unread", ())
                   if all(name in other.get("unread", ()) for other in begins)],
        "monitor": about[0] | {
            name: list(dict.fromkeys(one for of in about for one in of.get(name, ())))
            for name in ("adversary", "stages")
        },
        "settings_hash": ", ".join(str(one.get("settings_hash", NOT_RECORDED)) for one in begins),
    }  # fmt: skip
    looks = sorted((one for of in monitors for one in of.looks), key=lambda one: one["step"])
    decided = sorted((one for of in monitors for one in of.decisions), key=lambda one: one["step"])
    results = sorted((one for of in monitors for one in of.results), key=lambda one: one["step"])
    ends = [of.end for of in monitors if of.end is not None]
    return FitLines(
        monitors[0].folder,
        ", ".join(of.run for of in monitors),
        begin,
        looks,
        results,
        list({str(dict(one, run="")): one for one in decided}.values()),
        ends[-1] if ends and (len(ends) == len(monitors) or _is_federation(begin)) else None,
        len(monitors),
    )


def _fit(lines: FitLines) -> dict[str, Any]:
    begin = lines.begin or {}
    clients = _clients(lines)
    kept_back = _kept_back(lines)
    attacks = _attacks(lines, clients, kept_back)
    played = {
        attack["family"]
        for attack in attacks
        if (attack["looks"] or attack["withheld"]) and attack["exposed"]
    }
    privacy = _privacy(lines)
    left_out = begin.get("not_played", _left_out(lines.results))
    not_played = {one["name"]: one["why"] for one in left_out}
    shared = _shared(begin, len(clients), privacy)
    return {
        "name": lines.folder.name,
        "folder": lines.folder.name if lines.folder.is_absolute() else str(lines.folder),
        "run": lines.run or NOT_RECORDED,
        "monitors": lines.monitors,
        "unit": "round" if _is_federation(begin) else "step",
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
        "headlines": _series(lines, clients, kept_back),
        "clients": _by_client(clients, attacks, lines) if _is_federation(begin) else [],
        "updates": len({(one.get("client"), one["step"]) for one in _of_clients(lines)}),
        "withheld": len(kept_back),
        "utility": _utility(lines),
        "privacy": privacy,
        "implied": _implied(privacy, attacks, shared.get("clients", 1)),
        "defenses": _defenses(begin["defenses"]) if "defenses" in begin else None,
        "gates": [_gate(gate) for gate in begin["gates"]] if "gates" in begin else None,
        "decisions": [_decision(line) for line in lines.decisions],
        "not_played": not_played,
        "not_tested": _not_tested(begin, played, not_played, recorded=lines.begin is not None),
    }


def _defenses(told: Sequence[Line]) -> list[dict[str, Any]]:
    """Each once, also where several clients have it; without ledgers, which name places."""
    found: list[dict[str, Any]] = []
    for one in told:
        settings = {n: v for n, v in (one.get("settings") or {}).items() if n != "ledger"}
        names = ("name", "class", "guarantee")
        about = {n: one.get(n, NOT_RECORDED) for n in names} | {"settings": settings}
        if about not in found:
            found.append(about)
    return found


def _gate(gate: Line) -> dict[str, Any]:
    """Return a gate's settings, and its rule in words."""
    names = ("name", "metric", "at_most", "action", "bound", "alpha")
    settings = {name: gate.get(name) for name in names}
    judged = "each measurement by its value"
    if settings["bound"] not in (None, "value"):
        judged = f"all measurements, {settings['bound']} bound, alpha {_said(settings['alpha'])}"
    rule = (
        f"{gate['metric']} at most {_said(settings['at_most'])}, else {_said(settings['action'])}"
    )
    return settings | {"rule": f"{rule}; judges {judged}"}


def _ended(lines: FitLines) -> str:
    if lines.begin is None:
        return f"end {NOT_RECORDED}"
    if lines.end is None:
        how = "end unknown" if _is_federation(lines.begin) else "was cut off, or still runs"
        return f"{how}: no end was recorded"
    how = str(lines.end.get("how"))
    said = {
        "finished": "finished normally",
        "KeyboardInterrupt": "was interrupted by hand",
        "SIGTERMException": "was stopped from outside (SIGTERM)",
    }
    stopped = [line["gate"] for line in lines.decisions if line.get("did") == "stopped"]
    if how == "finished" and stopped:
        return f"was stopped by the gate {', '.join(stopped)}"
    return said.get(how, f"ended by an error ({how})")


def _is_federation(begin: Line) -> bool:
    return (begin.get("training") or {}).get("strategy") == "federation"


def _of_clients(lines: FitLines) -> list[Line]:
    """Results of single clients: without those of their sum, and of what was not played."""
    return [
        line for line in lines.results if line["stage"] != "aggregate" and not _was_not_played(line)
    ]


def _was_not_played(line: Line) -> bool:
    return str(line.get("unknown") or "").startswith("not played: ")


def _clients(lines: FitLines) -> list[str]:
    """Whose results a run holds, in the order in which they came."""
    found = (line.get("client") for line in _of_clients(lines))
    return list(dict.fromkeys(str(client) for client in found if client is not None))


def _kept_back(lines: FitLines) -> set[tuple[str, int]]:
    """Updates, by client and round, that a gate did not let leave."""
    return {
        (str(line["client"]), line["step"])
        for line in lines.decisions
        if line["did"] in _KEPT_BACK and line.get("client") is not None
    }


def _by_client(
    clients: Sequence[str], attacks: Sequence[Mapping[str, Any]], lines: FitLines
) -> list[dict[str, Any]]:
    """One row for each client of a federation, and one for their sum."""
    rows = []
    for client in [*clients, *([_SUM] if any(a["stage"] == "aggregate" for a in attacks) else [])]:
        rounds = {line["step"] for line in lines.results if str(line.get("client")) == client}
        decided: dict[str, list[int]] = {}
        for line in lines.decisions:
            if str(line.get("client")) == client and line["step"] not in decided.get(
                line["did"], ()
            ):
                decided.setdefault(line["did"], []).append(line["step"])
        of = {a["name"]: a["clients"][client] for a in attacks if client in a["clients"]}
        rows.append({"client": client, "rounds": len(rounds), "decided": decided, "attacks": of})
    return rows


def _shared(begin: Line, seen: int, privacy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What left a client, after which defences, and who could see it.

    Args:
        begin: first line of the run.
        seen: how many clients are in its lines.
        privacy: what its defences have spent.
    """
    if not begin:
        return {"what": NOT_RECORDED, "seen_by": NOT_RECORDED, "trained": None, "unread": None}
    monitor, model = begin.get("monitor") or {}, begin.get("model") or {}
    rounds = monitor.get("local_steps")
    what = "the gradient of every step"
    if rounds:
        steps = "optimizer step" if rounds == 1 else f"{rounds} optimizer steps"
        what = f"the weights' change after every {steps}"
    trained, total = model.get("trained_parameters"), model.get("parameters")
    if trained and total:
        what += f", of {'all' if trained == total else f'{trained:,} of'} {total:,} parameters"
    peft = f" ({', '.join(model['peft'])})" if model.get("peft") else ""
    clients = max(monitor.get("clients", 1), seen)
    seen_by = "whoever receives a client's update: the server, its staff and storage"
    for defense in begin.get("defenses", ()):
        trusted = _trusted(defense)
        if trusted == "server":
            seen_by = "each client's update as it is: a server that is trusted with it"
        elif trusted == "sum":
            seen_by = "the sum over clients only, if a secure aggregation really hides the parts"
    return {
        "what": f"{what}{peft}, {_defended(begin.get('defenses'), privacy)}",
        "clients": clients,
        "seen_by": seen_by,
        "trained": model.get("trained"),
        "unread": begin.get("unread"),
    }


def _defended(defenses: Sequence[Line] | None, privacy: Sequence[Mapping[str, Any]]) -> str:
    """Return what defences did to what left a client, with the settings that matter."""
    if defenses is None:
        return f"defences {NOT_RECORDED}"
    spent = {one["defense"]: one for one in privacy}
    acts = dict.fromkeys(_act(one, spent.get(one["name"])) for one in defenses)
    return "; ".join(acts) or "without a defence"


def _act(defense: Line, spent: Mapping[str, Any] | None) -> str:
    """Return what one defence did."""
    settings = defense.get("settings") or {}
    name, kind = defense["name"], defense.get("class", NOT_RECORDED)
    clip = settings.get("max_grad_norm", settings.get("clip"))
    at = "not clipped" if clip is None else f"clipped at {_said(clip)}"
    if clip == "auto":
        at = "clipped to a norm below 1"
    noise = _said(settings.get("noise_multiplier", settings.get("sigma")))
    if spent is not None and spent["noise_multiplier"] is not None:
        noise = _noise(spent)
    if kind == TOKENS:
        per = "token" if settings.get("per") == "token" else "text"
        return (
            f"of texts whose tokens {name} replaced before training "
            f"({_said(settings.get('mechanism'))}, epsilon {_said(settings.get('epsilon'))} for "
            f"each {per})"
        )
    if kind == CLIENT and settings.get("trust") == "central":
        return (
            f"as it is; then the server clips it at {_said(clip)} and adds noise {noise} ({name})"
        )
    if kind == "DPSGD":
        return f"each {settings.get('unit', 'example')}'s part {at}, noise {noise} ({name})"
    if kind in (CLIENT, "GradientNoise"):
        share = "a share of " if settings.get("trust") == "secure_aggregation" else ""
        return f"{at}, {share}noise {noise} ({name})"
    return f"after the defence {name} ({kind})"


def _trusted(defense: Line) -> str:
    """Return who must be trusted for a defence's guarantee to hold, as ``_TRUSTED`` names it."""
    kind = defense.get("class")
    trust = (defense.get("settings") or {}).get("trust", "local" if kind == TOKENS else None)
    if trust == "central" and kind == CLIENT:
        return "server"
    return {"central": "sum", "secure_aggregation": "sum", "local": "client"}.get(
        str(trust), NOT_RECORDED
    )


# ---- attacks ----------------------------------------------------------------------------------


def _attacks(
    lines: FitLines, clients: Sequence[str], kept_back: Collection[tuple[str, int]]
) -> list[dict[str, Any]]:
    """One row for each attack and stage: unknown ones first, then the one furthest above chance."""
    about = {one["name"]: one for one in (lines.begin or {}).get("attacks", [])}
    grouped: dict[tuple[str, str], list[Line]] = {}
    for line in lines.results:
        if not _was_not_played(line):
            grouped.setdefault((line["attack"], line["stage"]), []).append(line)
    rows = [
        _attack(name, stage, of, about, len(clients) > 1 or _is_federation(lines.begin or {}),
                kept_back)
        for (name, stage), of in grouped.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["looks"] > 0, -row["above_chance"]))


def _attack(
    name: str,
    stage: str,
    every: Sequence[Line],
    about: Mapping[str, Line],
    by_client: bool,
    kept_back: Collection[tuple[str, int]],
) -> dict[str, Any]:
    """Of all its lines; those of updates that did not leave are counted and in no mean."""
    known_as = about.get(name, {})
    family = known_as.get("family") or _family_of(every)
    headline = HEADLINES.get(family, "")
    needs = known_as.get("needs")
    lines = [line for line in every if not _was_kept_back(line, kept_back)]
    shared = [line for line in lines if _left(line)]
    values = [v for line in shared if not math.isnan(v := _now(line, headline))]
    worst = [v for line in shared if not math.isnan(v := _value(line, f"{headline}_worst_client"))]
    reasons = [_why_unknown(line, headline) for line in lines if _is_unknown(line, headline)]
    each: dict[str, list[Line]] = {}
    for line in every if by_client else ():
        each.setdefault(str(line.get("client")), []).append(line)
    clients = {client: _of_client(of, headline, kept_back) for client, of in each.items()}
    last = next((one for one in reversed(lines) if not math.isnan(_value(one, headline))), None)
    if stage != "aggregate" and len(clients) > 1:
        worst += [of["mean"] for of in clients.values() if of["mean"] is not None]
        newest = {str(one.get("client")): one for one in lines
                  if not math.isnan(_value(one, headline))}  # fmt: skip
        last = max(newest.values(), key=lambda one: _value(one, headline), default=None)
    row = {
        "name": name,
        "stage": stage,
        "family": family,
        "headline": headline,
        "chance": CHANCE.get(headline, 0.0),
        "adversary": known_as.get("adversary", NOT_RECORDED),
        "dishonest": None if needs is None else any(n.startswith(_DISHONEST) for n in needs),
        "reads": list(known_as.get("reads", [])),
        "config": known_as.get("config") or every[-1].get("config"),
        "exposed": any(_left(line) for line in every),
        "looks": len(values),
        "withheld": len(every) - len(lines),
        "unknown": len(reasons),
        "why_unknown": reasons[-1] if reasons else None,
        "n": _counted(lines, headline),
        "mean": _mean(values),
        "highest": max(values, default=None),
        "worst_client": max(worst, default=None),
        "clients": clients,
        "last": _rate(last, headline),
        "last_n": None if last is None else last.get("n"),
        "last_client": None if last is None or len(clients) < 2 else str(last.get("client")),
        "rates": {m: _rate(last, m) for m in SHOWN.get(family, ())},
        "means": {
            m: _mean([v for line in shared if not math.isnan(v := _now(line, m))])
            for m in SHOWN.get(family, ())
        },
        "certified": _mean([v for line in lines if not math.isnan(v := _value(line, "certified"))]),
    }
    return row | {"above_chance": _excess(row), "conclusive": _is_conclusive(row)}


def _excess(attack: Mapping[str, Any]) -> float:
    """Return how far above chance an attack read, up to 1; -1 where that is unknown.

    One look at words or texts counts. One at membership is of few games, so that the highest of
    many is high by chance: there the mean counts, that of the worst client, and what is pooled.
    """
    values = [attack["highest"]]
    if attack["family"] == "membership":
        last = (attack["last"] or {}).get("value")
        values = [attack["mean"], attack["worst_client"], last]
    chance = float(attack["chance"])
    known = [float(value) for value in values if value is not None]
    return (max(known) - chance) / (1 - chance) if known else -1.0


def _is_conclusive(attack: Mapping[str, Any]) -> bool | None:
    """Return whether the last interval of a membership attack leaves guessing out."""
    low, high = ((attack["last"] or {}).get(end) for end in ("low", "high"))
    if attack["family"] != "membership" or low is None or high is None:
        return None
    return not low <= attack["chance"] <= high


def _left(line: Line) -> bool:
    """Whether what an attack reads left the client: so it did, unless the line denies it."""
    return line.get("exposed") is not False


def _is_unknown(line: Line, headline: str) -> bool:
    return bool(line.get("unknown")) or (_left(line) and math.isnan(_value(line, headline)))


def _why_unknown(line: Line, headline: str) -> str:
    return str(line.get("unknown") or f"its {headline or 'value'} is no number")


def _counted(lines: Sequence[Line], headline: str) -> int:
    """Words, texts or games in all; of what is pooled over looks each client's highest count."""
    pooled: dict[str, int] = {}
    single = 0
    for line in lines:
        n = int(line.get("n") or 0)
        if f"{headline}_of_this_look" in line["metrics"]:
            whose = str(line.get("client"))
            pooled[whose] = max(pooled.get(whose, 0), n)
        else:
            single += n
    return single + sum(pooled.values())


def _was_kept_back(line: Line, kept_back: Collection[tuple[str, int]]) -> bool:
    return line["stage"] != "aggregate" and (str(line.get("client")), line["step"]) in kept_back


def _of_client(
    every: Sequence[Line], headline: str, kept_back: Collection[tuple[str, int]]
) -> dict[str, Any]:
    """What an attack read of one client."""
    lines = [line for line in every if not _was_kept_back(line, kept_back)]
    known = [line for line in lines if not math.isnan(_value(line, headline))]
    values = [v for line in lines if _left(line) and not math.isnan(
        v := _now(line, headline))]  # fmt: skip
    return {
        "looks": len(values),
        "withheld": len(every) - len(lines),
        "unknown": sum(_is_unknown(line, headline) for line in lines),
        "mean": _mean(values),
        "highest": max(values, default=None),
        "last": _rate(known[-1] if known else None, headline),
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


def _series(
    lines: FitLines, clients: Sequence[str], kept_back: Collection[tuple[str, int]]
) -> dict[str, dict[str, Points]]:
    """The headline of each attack over the steps, by whose it is; None is unknown.

    Of one client at what was shared, named "". Of several each, and their sum where it was looked
    at; without updates that did not leave.
    """
    begin = lines.begin or {}
    about = {one["name"]: one["family"] for one in begin.get("attacks", [])}
    several = len(clients) > 1 or _is_federation(begin)
    found: dict[str, dict[str, Points]] = {}
    for line in lines.results:
        wanted = ("shared", "aggregate") if several else ("shared",)
        if line["stage"] in wanted and not _was_kept_back(line, kept_back):
            headline = HEADLINES.get(about.get(line["attack"]) or _family_of([line]), "")
            whose = str(line.get("client")) if several else ""
            of = found.setdefault(line["attack"], {}).setdefault(whose, [])
            of.append((int(line["step"]), _plain(_now(line, headline))))
    return {
        name: known
        for name, of in found.items()
        if (known := {w: p for w, p in of.items() if any(v is not None for _, v in p)})
    }


def _utility(lines: FitLines) -> dict[str, Points]:
    """By name, and by client where the lines say which."""
    found: dict[str, dict[int, float | None]] = {}
    for look in lines.looks:
        client = look.get("client")
        of = "" if client is None else f", {_SUM if client == _SUM else f'client {client}'}"
        for name, value in (look.get("utility") or {}).items():
            told = _plain(number(value))
            found.setdefault(f"{name}{of}", {}).setdefault(int(look["step"]), told)
    return {name: list(points.items()) for name, points in found.items()}


def _not_tested(
    begin: Line, played: set[str], not_played: Mapping[str, str], *, recorded: bool
) -> list[str]:
    """What nobody tried, in sentences."""
    said = [
        f"{what}: no attack gave a result"
        for family, what in _FAMILIES.items()
        if family not in played
    ]
    said += [f"{name}: {why}" for name, why in not_played.items()]
    unread = begin.get("unread", [])
    if unread:
        said.append(f"{len(unread)} shared parameters, tested by no attack: {_listed(unread)}")
    if not recorded:
        said.append("which shared parameters no attack tests: not recorded")
    said.append("the trained model itself: extraction and membership by its answers")
    return said


def _left_out(results: Sequence[Line]) -> list[dict[str, str]]:
    """Attacks that were not played, as their own lines say it."""
    begins = "not played: "
    return [
        {"name": line["attack"], "why": line["unknown"].removeprefix(begins)}
        for line in results
        if _was_not_played(line)
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _decision(line: Line) -> dict[str, Any]:
    names = ("gate", "did", "step", "client", "metric", "of", "measured", "at_most", "why")
    return {name: line.get(name) for name in names} | {"hardened": line.get("hardened") or []}


# ---- privacy ----------------------------------------------------------------------------------


def _privacy(lines: FitLines) -> list[dict[str, Any]]:
    """What each defence that accounts has spent at the end, and on the way.

    Where clients of a federation keep accounts of their own, that which has spent most, at the
    largest delta of any.
    """
    told = [*lines.looks, *([lines.end] if lines.end else [])]
    found: dict[str, dict[str, Any]] = {}
    for line in told:
        for spent in line.get("privacy") or ():
            of = found.setdefault(spent["defense"], {"defense": spent["defense"], "series": {}})
            epsilon = _rounded_up(number(spent.get("epsilon")))
            most = of["series"].get(int(line["step"]))
            if most is None or _order(most) <= _order(epsilon):
                of["series"][int(line["step"])] = _plain(epsilon)
            delta = _rounded_up(number(spent.get("delta")))
            known = [number(of["delta"]), delta] if "delta" in of else [delta]
            of["delta"] = None if any(map(math.isnan, known)) else max(known)
            if _order(of.get("epsilon", 0.0)) > _order(_written(epsilon)):
                continue
            of |= {
                "epsilon": _written(epsilon),
                "noise_multiplier": _plain(number(spent.get("noise_multiplier"))),
                "sample_rate": _plain(number(spent.get("sample_rate"))),
                "releases": spent.get("releases"),
                "history": spent.get("history") or [],
            }
    about: dict[str, list[Line]] = {}
    for told_of in (lines.begin or {}).get("defenses", ()):
        about.setdefault(told_of["name"], []).append(told_of)
    clients = int(((lines.begin or {}).get("monitor") or {}).get("clients", 1))
    for name, of in found.items():
        defense = about.get(name, [{}])[0]
        settings = defense.get("settings") or {}
        kind = defense.get("class", NOT_RECORDED)
        of["series"] = list(of["series"].items())
        of["settings"] = {n: v for n, v in settings.items() if n != "ledger"}
        of["guarantee"] = defense.get("guarantee", NOT_RECORDED)
        of["accountant"] = settings.get(
            "accountant", "basic composition" if kind == TOKENS else NOT_RECORDED
        )
        of["target_epsilon"] = settings.get("target_epsilon", "none" if settings else None)
        of["trust"] = settings.get("trust", "local" if kind == TOKENS else NOT_RECORDED)
        of["trusted"] = _TRUSTED[_trusted(defense)]
        of["sampling"] = _sampling(settings)
        of["poisson"] = settings.get("poisson")
        of["correlated"] = None
        if kind == "DPSGD" and settings.get("mechanism", "independent") != "independent":
            of["correlated"] = settings["mechanism"]
            of["poisson"] = of["poisson"] and of["correlated"] == "banded"
        of["unit"] = settings.get("unit", _UNITS.get(kind, NOT_RECORDED))
        of["clients"] = clients
        if kind == CLIENT:
            amplified = settings.get("sampling") != "all" and of["trust"] == "central"
            of["poisson"] = amplified and settings.get("sampling") == "poisson"
            of["clients"] = settings.get("clients", clients)
        of["class"] = kind
        of["holds"] = _holds(of)
        ledgers = [(one.get("settings") or {}).get("ledger") for one in about.get(name, ())]
        of |= (
            _ledgers(ledgers) if settings else {"ledger": None, "ledger_releases": {}, "unread": []}
        )
        of["until"] = max(step for step, _ in of["series"])
        of["whole"] = _is_whole(of, lines.end)
        of["without_sampling"] = _without_sampling(of)
        of["limit"], of["limits_little"] = _limit(of)
        of["statement"] = _statement(of)
    return list(found.values())


def _is_whole(spent: Mapping[str, Any], end: Line | None) -> bool:
    """Whether no release came after the last that was recorded.

    A fit that was killed went on after its last look; its ledger knows what it released until then.
    """
    counts = spent["ledger_releases"].values()
    if counts and max(counts) <= (spent["releases"] or 0):
        return True
    if end is None:
        return False
    told = any(one["defense"] == spent["defense"] for one in end.get("privacy") or ())
    return told or spent["until"] + 1 >= int(end["step"])


def _written(epsilon: float) -> float | str | None:
    return "infinite" if math.isinf(epsilon) else _plain(epsilon)


def _holds(spent: Mapping[str, Any]) -> bool:
    """Whether there is a guarantee: a known, finite epsilon at a known delta."""
    known = all(isinstance(spent[name], int | float) for name in ("epsilon", "delta"))
    said = str(spent["guarantee"])
    return known and said != NOT_RECORDED and not said.startswith("none")


def _order(epsilon: object) -> float:
    """Unknown and infinite epsilons are above every number."""
    value = number(epsilon)
    return math.inf if math.isnan(value) else value


def _ledgers(paths: Sequence[str | None]) -> dict[str, Any]:
    """SHA-256 and releases of the ledgers, each client's its own; lines of them that are none."""
    hashes: dict[str, str] = {}
    counts: dict[str, int] = {}
    unread: list[str] = []
    for place in (Path(path) for path in dict.fromkeys(paths) if path):
        try:
            near = place.parent.glob(f"{glob.escape(place.name)}.*-of-*")
            files = [place] if place.is_file() else sorted(near)
            for one in files:
                content = one.read_bytes()
                hashes[one.name] = hashlib.sha256(content).hexdigest()
                counts[one.name], odd = _released(content)
                if odd:
                    unread.append(
                        f"{len(odd)} of the lines of the ledger {one.name} are no releases: "
                        f"{spans(odd)}"
                    )
            if not files:
                hashes[place.name] = "the file is not there"
        except (OSError, ValueError) as error:
            hashes[place.name] = f"cannot be read: {type(error).__name__}"
    return {"ledger": hashes, "ledger_releases": counts, "unread": unread}


def _released(ledger: bytes) -> tuple[int, list[int]]:
    """How many releases the lines count (noise multiplier, rate, count), and which are odd."""
    releases, odd = 0, []
    for n, line in enumerate(ledger.splitlines(), 1):
        try:
            _, _, count = map(float, line.split())
            releases += int(count)
        except (ValueError, OverflowError):
            odd.append(n)
    return releases, odd


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
    return f"more than {LARGEST_EPSILON:g}" if math.isinf(found) else _rounded_up(found)


def _limit(spent: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """Return what an epsilon that holds for the whole run limits, and whether that is little.

    It is the largest TPR at an FPR of 1% of any test of two neighbouring data sets (Kairouz, Oh
    and Viswanath 2015).
    """
    if not (spent["holds"] and spent["whole"]):
        return None, None
    from lightning_fedleak.auditing.mechanisms import dp_tpr  # loads torch: seconds

    tpr = dp_tpr(_FPR, min(_over_clients(spent), 50.0), spent["delta"])
    most = math.ceil(1e3 * tpr - 1e-9) / 10
    share = f"at most {most:g} in 100" if most < 100 else "up to all"
    if spent["class"] == TOKENS:
        text = (
            "a test of which of two texts of one length was trained on. If it is wrong about the "
            f"second 1 time in 100, it is right about the first at most {most:g} times in 100 "
            "(guessing: 1)."
        )
    else:
        text = (
            f"a test of whether {UNIT_IN_WORDS.get(spent['unit'], 'one unit')} was in the training "
            f"data. If it wrongly names 1 in 100 that were not, it finds {share} that were "
            "(guessing: 1)."
        )
    weak = " That is a weak limit." if tpr > 0.5 else ""
    return f"What this epsilon limits: {text}{weak}", tpr > 0.5


def _statement(spent: Mapping[str, Any]) -> str:
    """What was promised, in words."""
    guarantee = f"The guarantee: {str(spent['guarantee']).strip().rstrip('.')}. "
    if not spent["holds"]:
        return f"No epsilon holds for these releases. {guarantee}"
    unit = UNIT_IN_WORDS.get(spent["unit"], f"one {spent['unit']}")
    what = "round" if spent["class"] == CLIENT else "release"
    if spent["correlated"]:
        what = "accounted mechanism"
    after = what + "s" * (spent["releases"] != 1)
    if spent["class"] == TOKENS:
        after += " of the text that was released most often"
    text = (
        f"After {spent['releases']} {after} the privacy loss of {unit} is at most epsilon = "
        f"{_said(spent['epsilon'])} at delta = {_said(spent['delta'])}, by "
        + ("basic composition. " if spent["class"] == TOKENS
           else f"the accountant {spent['accountant']}. ")
        + guarantee
    )  # fmt: skip
    if spent["correlated"]:
        text += (
            f"Noise is correlated over steps ({spent['correlated']}), of which one accounted "
            "mechanism covers several: there were more updates than mechanisms. "
        )
    if not spent["whole"]:
        text += (
            "How the run ended is not recorded. What was released after the last look is not in "
            "this epsilon, which is therefore no bound for the whole run. "
        )
    if any(count > (spent["releases"] or 0) for count in spent["ledger_releases"].values()):
        text += (
            "The ledger counts more releases than the run recorded. What the others cost is not in "
            "this epsilon. "
        )
    if spent["noise_multiplier"] is not None and spent["poisson"] is not None:
        rate = f"Poisson samples at rate {_said(spent['sample_rate'])}"
        drawn = rate if spent["poisson"] else "not sampled by chance"
        of = "rounds" if spent["class"] == CLIENT else "batches"
        over = " over the sensitivity" if spent["class"] == CLIENT else ""
        text += f"Noise multiplier{over} {_noise(spent)}; {of} are {drawn}. "
    if spent["without_sampling"] is not None:
        text += (
            "Without counting on the sampling, epsilon of the same releases would be "
            f"{_said(spent['without_sampling'])}. "
        )
    if spent["class"] == TOKENS and spent["clients"] > 1:
        text += (
            f"A text that a sampler moves between the {spent['clients']} clients is released by "
            "each that gets it: against whoever sees all of them epsilon is at most "
            f"{_said(_over_clients(spent))}. "
        )
    limit = f"{spent['limit']} " if spent["limit"] else ""
    return (
        text
        + f"{spent['trusted']} {limit}"
        + (
            "It does not cover the leakage logs, validation metrics, the choice of settings, or "
            "decisions that people or gates took in sight of private data."
        )
    )


UNIT_IN_WORDS = {
    "example": "one example",
    "client": "one client with all of its data",
    "row": "one text (a row of a batch) of one client",
    "user": "one user with all of their rows",
    NOT_RECORDED: f"one unit ({NOT_RECORDED} which)",
}


def _noise(spent: Mapping[str, Any]) -> str:
    """The noise multiplier, or the least and the last where it was turned up on the way."""
    least = min((sigma for sigma, *_ in spent["history"]), default=spent["noise_multiplier"])
    last = _said(spent["noise_multiplier"])
    return last if _said(least) == last else f"{_said(least)} at the least, {last} at the end"


def _implied(
    privacy: Sequence[Mapping[str, Any]], attacks: Sequence[Mapping[str, Any]], clients: int
) -> list[dict[str, Any]]:
    """The most that each epsilon allows a test of membership, beside what was measured.

    Epsilon bounds a test of whether an example was in the training data. What is measured is
    whether it is in one batch, to which sampling adds nothing: the noise of one release bounds it.
    Where the sum over several clients is what it covers, that is measured at stage aggregate.
    """
    held = [spent for spent in privacy if spent["holds"]]
    if not held:
        return []
    from lightning_fedleak.auditing.mechanisms import dp_auc, dp_tpr  # loads torch: seconds

    found = []
    for spent in held:
        epsilon, delta = min(spent["epsilon"], 50.0), spent["delta"]
        summed = spent["trust"] == "secure_aggregation" or spent["trust"] == "central"
        stage = "aggregate" if summed and clients > 1 else "shared"
        if spent["class"] == CLIENT and spent["trust"] == "central":
            stage = "the noised mean, which is not attacked"
        asked = [a for a in attacks if a["family"] == "membership" and a["stage"] == stage]
        tpr = [a["rates"].get("tpr_at_fpr_0.01") for a in asked]
        auc = [a["last"]["value"] for a in asked if a["last"]]
        in_batch = _in_batch(spent)
        found.append(
            {
                "defense": spent["defense"],
                "stage": stage,
                "epsilon": spent["epsilon"],
                "delta": delta,
                "largest_tpr_at_fpr_0.01": dp_tpr(_FPR, epsilon, delta),
                "largest_auc": dp_auc(epsilon, delta),
                "largest_tpr_at_fpr_0.01_in_a_batch": in_batch[0],
                "largest_auc_in_a_batch": in_batch[1],
                "measured_tpr_at_fpr_0.01": max((t["value"] for t in tpr if t), default=None),
                "measured_auc": max(auc, default=None),
            }
        )
    return found


def _in_batch(spent: Mapping[str, Any]) -> tuple[float, float] | tuple[None, None]:
    """Largest TPR at 1% FPR and largest AUC of a test of who is in one batch, read off its release.

    Of independent Gaussian noise exactly, by its least multiplier. Else by the epsilon of all
    releases without sampling.
    """
    from lightning_fedleak.auditing.mechanisms import dp_auc, dp_tpr, gaussian_auc, gaussian_tpr

    least = min((sigma for sigma, *_ in spent["history"]), default=0.0)
    if least > 0 and not spent["correlated"]:
        return gaussian_tpr(_FPR, least), gaussian_auc(least)
    sampled = spent["class"] != TOKENS and spent["poisson"] is not False
    epsilon = spent["without_sampling"] if sampled else spent["epsilon"]
    if not isinstance(epsilon, int | float):
        return None, None
    return dp_tpr(_FPR, min(epsilon, 50.0), spent["delta"]), dp_auc(
        min(epsilon, 50.0), spent["delta"]
    )


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
        deltas = _rounded_up(math.fsum(spent["delta"] or 0.0 for spent in all_spent))
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
                "unit": _common([spent["unit"] for spent in all_spent]),
                "whole": all(spent["whole"] for spent in all_spent),
            }
        )
    return found


def _common(units: Sequence[str]) -> str:
    """What all of them protect: whoever hides all rows of a user or client hides each example."""
    if len(set(units)) == 1:
        return units[0]
    return NOT_RECORDED if NOT_RECORDED in units else "example"


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
    return "infinite" if math.isinf(total) else _rounded_up(total)


# ---- the verdict ------------------------------------------------------------------------------


def _verdict(
    fits: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a reader who reads one thing should read."""
    seen = [(fit, a) for fit in fits for a in fit["attacks"] if a["stage"] == _judged(fit)]
    best: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for fit, attack in seen:
        if attack["mean"] is None or not attack["exposed"]:
            continue
        held = best.get(attack["family"])
        if held is None or attack["mean"] > held[1]["mean"]:
            best[attack["family"]] = (fit, attack)
    excess = {
        family: max(a["above_chance"] for _, a in seen if a["family"] == family and a["exposed"])
        for family in best
    }

    def rank(family: str) -> tuple[bool, bool, float]:
        """Sort what was read first, then what is not conclusive, what reassures last."""
        little = excess[family] <= NEXT_TO_NONE
        return little, little and best[family][1]["conclusive"] is not False, -excess[family]

    order = sorted(best, key=rank)
    results = {family: _result(*best[family], seen, fits) for family in order}
    read = [results[family] for family in order if excess[family] > NEXT_TO_NONE]
    little = [results[family] for family in order if excess[family] <= NEXT_TO_NONE]
    withheld = sum(fit["withheld"] for fit in fits)
    updates = sum(fit["updates"] for fit in fits if fit["withheld"])
    kept = {a["family"] for _, a in seen if a["withheld"] and a["exposed"]}
    tried = {a["family"] for _, a in seen if a["exposed"] and a["unknown"]}
    unknown = [what for family, what in _FAMILIES.items() if family in tried - best.keys()]
    named_ones = tried | kept | best.keys()
    untested = [what for family, what in _FAMILIES.items() if family not in named_ones]
    checked = [
        f"Nobody could compare what {a['name']} read with the texts. Its own check held at "
        f"{_percent(a['certified'])} of the measurements: what it found explains all that was "
        "shared."
        for _, a in seen
        if a["mean"] is None and a["certified"]
    ]
    silent = _silent(fits, seen, best.keys())
    sentences = [*read, *checked, *silent]
    if not best and not withheld and not checked:
        sentences = ["Nothing was measured in these runs. That is 'unknown', not 'safe'."]
        unknown, untested = [], []
    if withheld:
        sentences.append(
            f"Gates kept back {withheld} of {updates} updates: what those would have given away "
            "is in no number here."
        )
    if unknown:
        sentences.append(f"Attacks gave no result, so that it is unknown: {'; '.join(unknown)}.")
    if untested:
        sentences.append(f"Nobody tested {' or '.join(untested)}.")
    sentences += [*little, *_gated(fits), *_accounted(fits, together)]
    level = max(excess.values(), default=None)
    return {
        "sentence": " ".join(sentences),
        "sentences": sentences,
        "level": "unknown" if level is None else "high" if level > 0.5 else "some",
        "worst": {family: best[family][1]["mean"] for family in order},
    }


def _gated(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which gates watched the runs, and how often they acted."""
    said = []
    for fit in fits:
        within = f" in run {_named(fit, fits)}" if len(fits) > 1 else ""
        if fit["gates"]:
            acted = len([one for one in fit["decisions"] if one["gate"]])
            rules = "; ".join(gate["rule"] for gate in fit["gates"])
            did = f"Acted {acted} time{'s' * (acted != 1)}" if acted else "Never acted"
            said.append(f"Gates{within}: {rules}. {did}.")
        elif fit["gates"] is not None and not fit["decisions"]:
            said.append(f"No gate watched{within or ' this run'}.")
    return said


def _silent(
    fits: Sequence[Mapping[str, Any]],
    seen: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    known: Collection[str],
) -> list[str]:
    """What is unknown though another attack, or another run, has a result of the same kind.

    Args:
        fits: the runs.
        seen: every attack of the verdict's stage, with its run.
        known: families of which the verdict tells the highest result.
    """
    said = []
    for fit in fits:
        of = [a for one, a in seen if one is fit and a["exposed"]]
        has = {a["family"] for a in of if a["mean"] is not None}
        without = [
            a["name"] for a in of if a["mean"] is None and a["unknown"] and a["family"] in has
        ]
        within = f", run {_named(fit, fits)}" if len(fits) > 1 else ""
        if without:
            said.append(
                f"No result, so that what they would have read is unknown{within}: "
                f"{', '.join(dict.fromkeys(without))}."
            )
        kept = {a["family"] for a in of if a["withheld"]}
        lacking = [what for f, what in _FAMILIES.items() if f in known and f not in has | kept]
        if lacking:
            said.append(
                f"Run {_named(fit, fits)} has no result, so that it is unknown there: "
                f"{'; '.join(lacking)}."
            )
    return said


def _named(fit: Mapping[str, Any], fits: Sequence[Mapping[str, Any]]) -> str:
    """The folder of a run; where it holds several runs, with the run's id."""
    alike = [one for one in fits if one["name"] == fit["name"]]
    return f"{fit['name']} ({fit['run']})" if len(alike) > 1 else str(fit["name"])


def _judged(fit: Mapping[str, Any]) -> str:
    """The stage of which the verdict speaks: what leaves a client, where anybody looked at it."""
    return "shared" if any(a["stage"] == "shared" for a in fit["attacks"]) else "aggregate"


def _accounted(
    fits: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What the runs say of differential privacy."""
    private = [fit for fit in fits if any(p["holds"] for p in fit["privacy"])]
    broken = [p for fit in fits for p in fit["privacy"] if not p["holds"]]
    said = []
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for spent in (p for fit in private for p in fit["privacy"] if p["holds"]):
        kinds.setdefault((spent["defense"], spent["unit"]), []).append(spent)
    for (defense, unit), of in kinds.items():
        some = "" if len(of) == len(fits) else f" in {len(of)} of {len(fits)} runs"
        worst = max(of, key=_over_clients)
        said.append(
            f"Differential privacy was accounted{some}: epsilon {_said(_over_clients(worst))} at "
            f"delta {_said(max(one['delta'] for one in of))} by {defense}"
            f"{_FOR.get(unit, '')}. {' '.join(dict.fromkeys(one['trusted'] for one in of))}"
        )
        if worst["limit"]:
            said.append(worst["limit"])
    if any(not p["whole"] for fit in private for p in fit["privacy"] if p["holds"]):
        said.append(
            "How a run with an epsilon ended is not recorded: what it released after its last look "
            "is not counted, so that its epsilon is no bound for the whole run."
        )
    for one in together:
        so_far = "" if one["whole"] else ", as far as was recorded"
        said.append(
            f"{one['fits']} fits by {one['defense']}, if on the same examples, cost epsilon "
            f"{_said(one['epsilon'])} at delta {_said(one['delta'])} together"
            f"{_FOR.get(one['unit'], '')}{so_far}."
        )
    if len(private) > 1 and len({defense for defense, _ in kinds}) > 1:
        said.append("What fits by different defences cost together is not added up.")
    if broken:
        said.append(f"No guarantee holds for {', '.join(sorted({p['defense'] for p in broken}))}.")
    return said or ["No differential privacy was accounted."]


_FOR = {
    "client": ", for a whole client",
    "row": ", for a text",
    "user": ", for a user with all of their rows",
    NOT_RECORDED: ", for a unit that is not recorded",
}


def _over_clients(spent: Mapping[str, Any]) -> float:
    """Epsilon against whoever sees all clients: of a text each that a sampler moves it to pays."""
    times = spent["clients"] if spent["class"] == TOKENS else 1
    return _rounded_up(float(spent["epsilon"]) * times)


def _only_results(n: int) -> dict[str, Any]:
    said = f"No training run is in this report: it holds the results of {n} command{'s' * (n > 1)}."
    return {"sentence": said, "sentences": [said], "level": "unknown", "worst": {}}


def _who(dishonest: bool | None) -> str:
    if dishonest is None:
        return "a server"
    if dishonest:
        return "a dishonest server, which adds layers of its own,"
    return "an honest but curious server"


def _result(
    fit: Mapping[str, Any],
    attack: Mapping[str, Any],
    seen: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    fits: Sequence[Mapping[str, Any]],
) -> str:
    """Return what the attack that read most of its family did, and how sure that is.

    Args:
        fit: its run.
        attack: the attack of the highest mean.
        seen: every attack of the verdict's stage, with its run.
        fits: all runs.
    """
    means, chance = attack["means"], attack["chance"]
    if attack["family"] == "words" and attack["mean"] < NEXT_TO_NONE:
        few = "next to none" if attack["above_chance"] <= NEXT_TO_NONE else "few"
        done = f"find {few} of a batch's distinct tokens: F1 {attack['mean']:.2f}"
    elif attack["family"] == "words" and None in (means["recall"], means["precision"]):
        done = f"find a batch's distinct tokens with an F1 of {attack['mean']:.2f}"
    elif attack["family"] == "words":
        done = (
            f"recover {_percent(means['recall'])} of a batch's distinct tokens, without their "
            f"order; {_percent(means['precision'])} of those it named were correct"
        )
    elif attack["family"] == "membership":
        done = (
            f"tell texts of the batch from others with an AUC of {means['auc']:.2f}, where "
            f"guessing has {chance:.2f}"
        )
    else:
        done = (
            f"write down {_percent(means['token_accuracy'])} of the tokens in their places, and "
            f"{_percent(means['exact_sentences'])} of the texts without an error"
        )
    sources = "sum over clients" if attack["stage"] == "aggregate" else "shared update"
    run = f", run {_named(fit, fits)}" if len(fits) > 1 else ""
    looks = attack["looks"]
    sure = f"Mean of {looks} measurements" if looks > 1 else "One measurement"
    if len(attack["clients"]) > 1:
        sure += f" at {len(attack['clients'])} clients"
    if attack["unknown"]:
        sure += f", unknown at {attack['unknown']} more"
    rivals = [a for _, a in seen if a["family"] == attack["family"] and a["exposed"]]
    for what, value in (("at the worst one", "highest"), ("of the worst client", "worst_client")):
        worst = max(rivals, key=lambda a: -1.0 if a[value] is None else a[value])
        if worst[value] is not None and worst[value] > attack["mean"] + _FAR:
            by = "" if worst is attack else f" ({worst['name']})"
            sure += f"; {attack['headline']} {worst[value]:.2f} {what}{by}"
    if attack["conclusive"] is False:
        last = attack["last"]
        sure += (
            f". The last 95% interval ({last['low']:.2f} to {last['high']:.2f}) includes "
            f"{chance:.2f}, guessing: not conclusive"
        )
    who = f"From one {sources}, {_who(attack['dishonest'])}"
    return f"{who} could {done} ({attack['name']}{run}). {sure}."


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


def _visible(value: Any) -> Any:
    """With what a reader cannot see, and what is no text, written out.

    Marks that turn the direction of writing would let a name change what stands beside it; escape
    sequences act on terminals, and a lone surrogate is in no file of UTF-8.
    """
    if isinstance(value, str):
        return value if value.isprintable() else "".join(map(_seen, value))
    if isinstance(value, Mapping):
        return {_visible(name): _visible(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_visible, value))
    return value


def _seen(character: str) -> str:
    if character.isprintable() or character in "\n\t" or category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded_up(bound: float) -> float:
    """Return an upper bound with three digits, so that every place and format shows the same."""
    if not math.isfinite(bound) or bound <= 0:
        return bound
    unit = 10.0 ** (math.floor(math.log10(bound)) - 2)
    return float(f"{math.ceil(bound / unit - 1e-9) * unit:.3g}")


def _said(value: object) -> str:
    if value is None:
        return NOT_RECORDED
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _table(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """A command's results, one row for each cell, flat; and the numbers of rows that are none."""
    given = list(content.get("results") or content.get("cells") or ())
    odd = [n for n, row in enumerate(given, 1) if not isinstance(row, Mapping)]
    rows = [_flat(row) for row in given if isinstance(row, Mapping)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rates = [name for name in columns if any(isinstance(row.get(name), Mapping) for row in rows)]
    columns = [*columns[:2], *rates, *(name for name in columns[2:] if name not in rates)]
    about = {k: v for k, v in content.items() if _is_plain(v) and v is not None}
    cells = [[row.get(c) for c in dict.fromkeys(columns)] for row in rows]
    return {"about": about, "columns": list(dict.fromkeys(columns)), "rows": cells}, odd


def _is_plain(value: object) -> bool:
    """What a cell of a table shows, and strict JSON holds."""
    return value is None or isinstance(value, str | int) or (
        isinstance(value, float) and math.isfinite(value)
    )  # fmt: skip


def _flat(row: Mapping[str, Any], root: str = "") -> dict[str, Any]:
    """Numbers and words of nested settings and rates; lists, of single games say, are left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if {"value", "low", "high"} <= value.keys():
                ends = ("value", "low", "high")
                flat[root + name] = {end: _plain(number(value[end])) for end in ends}
            else:
                flat |= _flat(value, f"{root}{name}/")
        elif _is_plain(value):
            flat[root + name] = value
    return flat


__all__ = ["HEADLINES", "NOT_RECORDED", "SCHEMA", "findings"]

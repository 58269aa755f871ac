"""Lines as a run writes them, made by hand."""

import json
from pathlib import Path
from typing import Any

from lightning_fedleak.report import Findings, findings, read


def entry(kind: str, run: str, **more: Any) -> dict[str, Any]:
    """A line of ``run.jsonl``."""
    return {"schema": 4, "run": run, "kind": kind} | more


def result(step, attack="flatchat", stage="shared", run="a", **metrics) -> dict[str, Any]:
    """One line of ``leakage.jsonl``; a metric is its value, or (value, low, high)."""
    rates = {
        name: dict(zip(("value", "low", "high"), value, strict=True))
        if isinstance(value, tuple)
        else {"value": value}
        for name, value in metrics.items()
    }
    unknown = None if metrics else "it broke"
    line = {"schema": 4, "step": step, "stage": stage, "client": 0, "round": None}
    line |= {"attack": attack, "config": {"seed": 0}, "n": 10, "exposed": True}
    line |= {"metrics": rates, "unknown": unknown}
    return line if run is None else line | {"run": run}


MODEL = {
    "class": "GPT2LMHeadModel", "kind": "causal", "parameters": 1000, "trained_parameters": 10,
    "trained": ["a.weight"], "peft": ["LORA"],
}  # fmt: skip
MONITOR = {"client": "rank", "clients": 1, "adversary": ["knows"], "local_steps": None}


def begin(run: str = "a", **more: Any) -> dict[str, Any]:
    """The first line of a fit in ``run.jsonl``."""
    empty: dict[str, Any] = {n: [] for n in ("not_played", "unread", "defenses", "gates")}
    return entry(
        "begin", run, time="2026-01-02T03:04:05+00:00", versions={"torch": "2.13.0"},
        machine={"processor": "x86_64", "device": "cpu"}, model=MODEL, training={}, monitor=MONITOR,
        attacks=[about("flatchat", "words")], **empty, settings_hash="0" * 64,
    ) | more  # fmt: skip


def about(name: str, family: str, *needs: str) -> dict[str, Any]:
    """What a fit says of an attack."""
    said = {"name": name, "class": "X", "family": family, "adversary": "a server that reads"}
    return said | {"needs": [*needs], "reads": ["a.weight"], "exposed": True, "config": {}}


def dpsgd(**settings: Any) -> dict[str, Any]:
    """What a fit says of DPSGD."""
    chosen = {"accountant": "prv", "poisson": True, "trust": "local", "max_grad_norm": 1.0}
    said = {"name": "dpsgd", "class": "DPSGD", "guarantee": "one example is hidden"}
    return said | {"settings": chosen | settings}


def spent(epsilon, count, sigma=1.0, rate=0.01) -> dict[str, Any]:
    """What a look says that DPSGD has spent."""
    cost = {"defense": "dpsgd", "epsilon": epsilon, "delta": 1e-5, "noise_multiplier": sigma}
    cost |= {"sample_rate": rate, "releases": count, "history": [[sigma, rate, count]]}
    return cost | {"sampling": "poisson"}


def look(step: int, run: str = "a", **more: Any) -> dict[str, Any]:
    """A look in ``run.jsonl``."""
    return entry("look", run, step=step, utility={}, privacy=[]) | more


def end(step: int, run: str = "a", **more: Any) -> dict[str, Any]:
    """The last line of a fit in ``run.jsonl``."""
    return entry("end", run, step=step, how="finished", privacy=[]) | more


def decision(did: str, round_: int, client: int | str, run: str = "a") -> dict[str, Any]:
    """What a gate of rounds did, in ``run.jsonl``."""
    metrics = {"metric": "leakage/worst/words", "of": "leakage/flatchat/f1", "at_most": 0.5}
    told = {"gate": "words", "did": did, "step": round_, "client": client, "measured": 0.9}
    return entry("gate", run, **told, **metrics, hardened=[], why="")


def written(folder, results, record=()) -> Path:
    """A folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("leakage.jsonl", results), ("run.jsonl", record)):
        if lines:
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def found_in(folder, results, record=()) -> Findings:
    """Return what a report finds in these lines."""
    return findings(read([written(folder, results, record)]))


def sentences_of(found: Findings) -> str:
    """All that a report says first, as one text."""
    return " ".join(found.verdict.sentences)

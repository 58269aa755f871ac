"""Whether clients' logs are those whose codes their server noted, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lightning_fedleak.evidence.chain import ChainedFile, check_closings, read_chain
from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.private_files import read_secret
from lightning_fedleak.report import ReportError
from lightning_fedleak.report.records import CHAIN_KEY, RECORD, RESULTS, code_of


def check_clients(
    run: Path, record: ChainedFile, folders: Sequence[Path], verdict: Verdict
) -> tuple[list[str], list[str]]:
    """Check that each code that a server noted is of its round's line in the logs of its client.

    Args:
        run: folder of the server's logs.
        record: its ``run.jsonl``.
        folders: of clients' logs; those in the server's folder and beside it where empty.
        verdict: gets what is wrong.

    Returns:
        The clients whose logs were compared; and in words those of which no folder is there, and
        the rounds in which a client that took part sent no code.

    Raises:
        ReportError: a given folder has no key, or no logs.
    """
    noted: dict[str, list[tuple[str, str, object]]] = {}
    for line in record.contents:
        if line is not None and line.get("kind") == "client":
            code = str(line.get("code"))
            sent = code, f"client {line.get('client')}", line.get("step")
            noted.setdefault(code[:16], []).append(sent)
    names = {c: " and ".join(sorted({name for _, name, _ in rows})) for c, rows in noted.items()}
    beside = [run, *run.glob("*/"), *run.resolve().parent.glob("*/")] if noted else []
    compared: dict[str, str] = {}
    for folder in folders or [one for one in beside if (one / CHAIN_KEY).is_file()]:
        try:
            chain, codes, client = _codes_in(folder)
        except ReportError:
            if folders:
                raise
            continue
        if chain in noted:
            verdict.add(client, f"'{folder}'")
            compared[chain] = f"logs of {names[chain]}: '{folder}'"
        elif folders:
            verdict.contradict(
                f"'{folder}': the server noted no code of these logs: they are of another "
                "federation, or were written again from the start"
            )
        last: dict[str, int] = {}
        for code, name, round_ in noted.get(chain, ()):
            number = codes.index((code, round_)) if (code, round_) in codes else -1
            if number <= last.get(name, -1):
                verdict.contradict(
                    f"'{folder}', {name}: the code of round {round_} is of no line of these logs, "
                    "or of another round: lines up to there were changed or removed later"
                )
                break
            last[name] = number
    missing = [f"logs of {names[chain]}: --client DIR" for chain in noted if chain not in compared]
    return sorted(compared.values()), sorted(missing) + _rounds_without(record, noted)


def _rounds_without(
    record: ChainedFile, noted: Mapping[str, Sequence[tuple[str, str, object]]]
) -> list[str]:
    """Return in words the rounds of a server in which clients that took part sent no code."""
    sent: dict[str, set[int]] = {}
    for _, name, round_ in (one for rows in noted.values() for one in rows):
        sent.setdefault(name, set()).update([round_] if isinstance(round_, int) else [])
    steps = [line.get("step") for line in record.contents if line and "step" in line]
    rounds = {one for one in steps if isinstance(one, int)}
    texts = []
    for name, own in sorted(sent.items()):
        edges = [min(rounds, default=0) - 1, *sorted(own), max(rounds, default=0) + 1]
        gaps = [f"{a + 1} to {b - 1}" for a, b in pairwise(edges) if b - a > 1]
        texts += [f"{name}, rounds {', '.join(gaps)}: they carry no code"] if gaps else []
    return texts


def _codes_in(folder: Path) -> tuple[str, list[tuple[str, object]], Verdict]:
    """Return the name of a client's chain, the codes of its lines, and what its logs contradict.

    A code stands beside its round.

    A run without a last line is a note: clients of Flower have none, and the server's codes show
    how far each goes.
    """
    verdict, closings = Verdict(), Verdict()
    try:
        key = str(read_secret(folder / CHAIN_KEY, "the key")["key"])
        record, results = (read_chain(folder / name, verdict) for name in (RECORD, RESULTS))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ReportError(
            f"'{folder}' cannot be compared with the server's log ({error}): name a folder of a "
            f"client's logs, with its {CHAIN_KEY}"
        ) from None
    check_closings(record, results, closings)
    verdict.contradictions += closings.contradictions
    verdict.notes += closings.open + closings.notes
    lines = zip(record.hashes, record.contents, strict=True)
    codes = [
        (code_of(key, one), content.get("step"))
        for one, content in lines
        if content and content.get("kind") == "sent"
    ]
    return code_of(key, "")[:16], codes, verdict

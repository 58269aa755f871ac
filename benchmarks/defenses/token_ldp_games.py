"""Membership of a sentence or token while the client's text is randomised (TokenLDP).

    python -m benchmarks.defenses.token_ldp_games --model DIR --log games.jsonl
    python -m benchmarks.defenses.token_ldp_games --log games.jsonl --print

Vu et al. 2024, Tables 3 and 7 to 10. Under ``--rules published`` the protocol of their code (the
full epsilon on every position, the batch's own ids as the domain: no guarantee), under ``token``
epsilon for each token over the vocabulary, under ``sequence`` epsilon for the whole sentence.
``--protocols``: the ``game`` of Fig. 2, and the ``authors``' (a planted sentence, no bit).

Adversaries (``--attacks``): ``count`` at the embeddings; at each of ``--layers`` ``fc-full`` and
``fc`` with the ladder that is made for exact copies, ``fc-wide-full`` and ``fc-wide`` with rungs up
to twice the target's own norm, ``attention`` as it plays against replaced batches, and
``attention-narrow`` with the widths that are made for exact copies, ``attention-copies`` with that
beta too; at ``--trained-layers`` the trained baselines ``trained-full`` and ``trained`` (seconds
for each target, which is why every mechanism is played on the same targets).

Work goes batch by batch: every text and every setting on one batch, then on the next. What is done
is in ``--log``, so that a run may be stopped at any time (or by ``--minutes`` of CPU), printed, and
gone on with. AUC with 95% intervals (bootstrap over batches), the mean over the texts; below the
table the means over mechanisms and layers.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.attacks.membership_games import halves, joined
from benchmarks.defenses.token_count import TokenCount
from benchmarks.shared import add_line, print_place, read_lines, table
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.membership.attention import (
    BETA,
    WIDTHS,
    AttentionMembership,
    AttentionSettings,
)
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.fc import RANDOMISED_LADDER, FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.cli.studies.membership import PLANTED
from lightning_fedleak.cli.studies.models import find_model
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.labs.trained_membership import TrainedMembership

SMOKE = (
    "--model {model} --log {out}/games.jsonl --text {text} --public {text} --public-texts "
    "20 --pool 30 --batch 4 --tokens 8 --layers 1 --blocks 1 --targets 1 --authors-games "
    "1 --mechanisms grr --epsilon 5 --protocols game --attacks fc",
)

MECHANISMS = ("grr", "rappor", "the", "dbitflip")
PLAYED = ("count", "fc-wide-full", "fc-wide", "fc-full", "attention", "trained-full")
ATTACKS = (*PLAYED, "attention-narrow", "attention-copies", "fc", "trained")
COLUMNS = ("bits", "guesses", "scores", "collides", "batches", "positions")
ABOUT = ("rule", "protocol", "mechanism", "epsilon", "rounds", "memoize")
SETTINGS = ("seed", "batch", "tokens", "targets", "pool", "public_texts", "authors_games")
SETTINGS += ("attacks", "layers", "trained_layers", "trained_blocks")
"""What all parts of one log must have in common."""


@dataclass(frozen=True)
class Job:
    """One setting on one batch (of the authors' protocol: on all of one text)."""

    rule: str
    protocol: str
    mechanism: str
    epsilon: float
    rounds: int
    memoize: bool
    text: str
    block: int

    @property
    def entropy(self) -> bytes:
        """Of the client's noise: no two jobs share theirs."""
        return hashlib.sha256(repr(self).encode()).digest()


def defense_of(job: Job, tokenizer: object) -> TokenLDP:
    settings = {"special_ids": tokenizer, "form": BatchForm(kind="causal")}
    if job.rule == "published":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TokenLDP.as_published(job.mechanism, job.epsilon, **settings)
    return TokenLDP(job.mechanism, job.epsilon, job.rule, memoize=job.memoize, **settings)


class Bench:
    """One model; texts, and adversaries that are prepared once for each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.anatomy = find_model(args.model, torch.float32)
        self.texts = {name: self._text(name) for name in args.text}
        self._prepared: dict[tuple[str, str], MembershipAttack] = {}

    def ids(self, texts: list[str]) -> list[list[int]]:
        length = self.args.tokens
        return self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]

    def _text(self, name: str) -> tuple[SentencePool, PublicText]:
        args = self.args
        private, public = halves(name, args.public, args.pool, args.public_texts)
        pool = SentencePool.from_texts(private, self.tokenizer, args.tokens)
        return pool, PublicText(self.ids(public))

    def attacks(self, job: Job) -> list[MembershipAttack]:
        args, public = self.args, self.texts[job.text][1]
        wide = {"ladder": RANDOMISED_LADDER, "tau": "auto"}
        tokens = {"tokens": args.tokens}
        attention = tokens | {"batch": args.batch}
        makers = {}
        if "count" in args.attacks:
            makers["count"] = lambda: TokenCount(public, args.tokens)
        for k in args.layers:
            created = {
                "fc-wide-full": lambda k=k: FCMembership(k, "full", **tokens, **wide),
                "fc-wide": lambda k=k: FCMembership(k, **tokens, **wide),
                "fc-full": lambda k=k: FCMembership(k, "full", **tokens),
                "fc": lambda k=k: FCMembership(k, **tokens),
                "attention": lambda k=k: AttentionMembership(k, public, **attention),
                "attention-narrow": lambda k=k: AttentionMembership(
                    k, public, **attention, attention=AttentionSettings(widths=WIDTHS)
                ),
                "attention-copies": lambda k=k: AttentionMembership(
                    k, public, **attention, attention=AttentionSettings(widths=WIDTHS, beta=BETA)
                ),
            }
            makers |= {f"{name} {k}": created[name] for name in created if name in args.attacks}
        for k in args.trained_layers if job.block < args.trained_blocks else ():
            created = {
                "trained-full": lambda k=k: TrainedMembership(k, public, "full", **tokens),
                "trained": lambda k=k: TrainedMembership(k, public, **tokens),
            }
            makers |= {f"{name} {k}": created[name] for name in created if name in args.attacks}
        return [self._once(job, name, make) for name, make in makers.items()]

    def _once(self, job: Job, name: str, make) -> MembershipAttack:
        """The model stands still, so that one adversary of each kind and text is prepared once."""
        key = (job.text, f"{job.protocol} {name}" if "trained" in name else name)
        if key not in self._prepared:
            attack = make()
            attack.name = name.split()[0]
            attack.meet(RunFacts(defended=frozenset({"batches"})))
            attack.prepare(self.anatomy)
            attack.prepare = lambda anatomy: None
            self._prepared[key] = attack
        return self._prepared[key]

    def play(self, job: Job) -> list[GameResult]:
        """With several rounds the same games are played in each, and scores added up."""
        args = self.args
        pool, _ = self.texts[job.text]
        defense = defense_of(job, self.tokenizer)
        model = self.anatomy.model
        place = DefenseContext(model, 0, 1, torch.device("cpu"), "32-true", 0, job.entropy)
        defense.before_setup(place)

        def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
            batch = {"input_ids": ids, "attention_mask": mask}
            return defense.on_batch(batch, place)["input_ids"]

        authors = job.protocol == "authors"
        config = GameConfig(
            games=args.authors_games if authors else args.targets,
            batch=args.batch,
            protocol=job.protocol,
            seed=args.seed + 1_000_000 * args.text.index(job.text) + 10 * job.block,
            targets_per_batch=1 if authors else args.targets,
        )
        planted = torch.tensor(self.ids([PLANTED])[0])
        attacks = self.attacks(job)
        rounds = [
            play(self.anatomy, attacks, pool, config, planted=planted, defend=defend)
            for _ in range(job.rounds)
        ]
        return [
            replace(outcome[0], scores=torch.stack([r.scores for r in outcome]).sum(0))
            for outcome in zip(*rounds, strict=True)
        ]


def jobs_of(args: argparse.Namespace) -> Iterator[Job]:
    """The authors' protocol first, then batch by batch."""
    settings = [
        (rule, protocol, mechanism, float(epsilon), args.rounds, args.memoize)
        for rule, protocol in product(args.rules, args.protocols)
        for mechanism, epsilon in product(args.mechanisms, args.epsilon)
        if protocol == "game" or rule == "published"
    ]
    once = [s for s in settings if s[1] == "authors"]
    for setting, text in product(once, args.text):
        yield Job(*setting, text, 0)
    for block, text in product(range(args.blocks), args.text):
        for setting in settings:
            if setting[1] == "game":
                yield Job(*setting, text, block)


def run(args: argparse.Namespace) -> None:
    common = {name: getattr(args, name) for name in SETTINGS} | {"model": Path(args.model).name}
    log = read_lines(args.log)
    if not log:
        add_line(args.log, common)
    elif log[0] != common:
        raise SystemExit(f"{args.log} was made with other settings ({log[0]}): give another --log")
    finished = {(*(line[name] for name in ABOUT), line["text"], line["block"]) for line in log[1:]}
    bench = Bench(args)
    for job in jobs_of(args):
        if tuple(vars(job).values()) in finished:
            continue
        start = time.process_time()
        lines = [line_of(job, result) for result in bench.play(job)]
        lines[0]["cpu"] = time.process_time() - start
        add_line(args.log, *lines)
        if time.process_time() > 60 * args.minutes:
            print(f"stopped after {args.minutes:g} minutes of CPU", file=sys.stderr)
            return


def line_of(job: Job, result: GameResult) -> dict:
    notes = {name: getattr(result, name) for name in ("attack", "layer", "granularity", "dtype")}
    games = {name: getattr(result, name).tolist() for name in COLUMNS}
    return {**vars(job), **notes, **games, "seconds": result.seconds}


def read(log: Path) -> dict[tuple, dict[str, list[GameResult]]]:
    """What a log holds: by setting, attack and layer, then by text."""
    groups: dict[tuple, dict[str, list[GameResult]]] = {}
    for line in read_lines(log)[1:]:
        key = (*(line[name] for name in ABOUT), line["attack"], line["layer"])
        result = GameResult(
            line["attack"],
            line["layer"],
            line["granularity"],
            **{name: torch.tensor(line[name]) for name in COLUMNS},
            protocol=line["protocol"],
            dtype=line["dtype"],
        )
        groups.setdefault(key, {}).setdefault(line["text"], []).append(result)
    return groups


def auc_of(texts: Collection[list[GameResult]]) -> tuple[float, float, float]:
    """The mean of the texts' AUCs, as the paper averages, with its 95% interval.

    Scores of one text are not held against another's, whose sentences are longer or nearer to each
    other. The interval joins those of the texts by their squares (Zou & Donner 2008).
    """
    rates = [joined(results).summary()["auc"] for results in texts]
    value = statistics.fmean(rate.value for rate in rates)
    down = math.hypot(*(rate.value - rate.low for rate in rates)) / len(rates)
    up = math.hypot(*(rate.high - rate.value for rate in rates)) / len(rates)
    return value, max(0.0, value - down), min(1.0, value + up)


def means(groups: dict[tuple, dict[str, list[GameResult]]]) -> dict[tuple, dict[float, float]]:
    """By rule, game and attack the mean AUC at each epsilon, over mechanisms and layers."""
    outcome: dict[tuple, dict[float, list[float]]] = {}
    for (rule, protocol, _, epsilon, _, _, attack, _), texts in groups.items():
        cells = outcome.setdefault((rule, protocol, attack), {}).setdefault(epsilon, [])
        cells.append(auc_of(texts.values())[0])
    return {
        quantity: {epsilon: statistics.fmean(cells) for epsilon, cells in by_epsilon.items()}
        for quantity, by_epsilon in outcome.items()
    }


def with_interval(auc: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.2f} to {:.2f})".format(*auc).replace("0.", ".")


def print_tables(args: argparse.Namespace) -> None:
    """AUC: a row for each setting, a column for each adversary; see :func:`auc_of`."""
    groups = read(args.log)
    attacks = sorted({key[-2:] for key in groups}, key=lambda a: (ATTACKS.index(a[0]), a[1]))
    rows: dict[tuple, dict[tuple, list[list[GameResult]]]] = {}
    for key, texts in groups.items():
        for text, results in texts.items():
            row = rows.setdefault((*key[:-2], text if args.each else "all"), {})
            row.setdefault(key[-2:], []).append(results)
    lines = []
    for row in sorted(rows, key=lambda r: (*r[:2], r[4], r[5], r[6], MECHANISMS.index(r[2]), r[3])):
        rule, protocol, mechanism, epsilon, rounds, memoize, text = row
        quantity = f"{rule}, {protocol}" + (f", {rounds} rounds" if rounds > 1 else "")
        quantity += ", memoised" if memoize else ""
        outcome = rows[row]
        games = sorted(
            {sum(len(r) for t in ts for r in t) for ts in outcome.values()}, reverse=True
        )
        cells = [with_interval(auc_of(outcome[a])) if a in outcome else "" for a in attacks]
        lines.append(
            [quantity, text, mechanism, f"{epsilon:g}", ", ".join(map(str, games)), *cells]
        )
    names = [f"{name}, layer {layer}" for name, layer in attacks]
    print(table(["rule, game", "text", "mechanism", "eps", "games", *names], lines) + "\n")
    for quantity, outcome in sorted(means(groups).items()):
        print(
            *quantity,
            ", ".join(f"{epsilon:g}: {auc:.2f}" for epsilon, auc in sorted(outcome.items())),
        )
    seconds = sum(line.get("cpu", 0.0) for line in read_lines(args.log))
    print(f"\n{seconds:.0f} s of CPU in all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, gone on with")
    parser.add_argument("--print", action="store_true", help="only print what the log holds")
    parser.add_argument("--each", action="store_true", help="print every text by itself")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of CPU, then stop")
    parser.add_argument("--text", nargs="+", default=["banking77", "emotion", "imdb"])
    parser.add_argument("--public", help="the server's text, where --text is a file")
    parser.add_argument("--public-texts", type=int, default=400)
    parser.add_argument("--pool", type=int, default=400)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 6])
    parser.add_argument("--blocks", type=int, default=16, help="batches of each text")
    parser.add_argument("--targets", type=int, default=4, help="games that share a batch")
    parser.add_argument("--authors-games", type=int, default=16, help="worlds of each text")
    parser.add_argument("--rounds", type=int, default=1, help="of the same batches, summed")
    parser.add_argument("--memoize", action="store_true", help="the same noise in every round")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[5, 7.5, 10])
    parser.add_argument("--rules", nargs="+", default=["published", "token"])
    parser.add_argument("--protocols", nargs="+", default=["game", "authors"])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*PLAYED])
    parser.add_argument("--trained-layers", type=int, nargs="+", default=[1])
    parser.add_argument("--trained-blocks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print_place()
    if not args.print:
        if not args.model:
            parser.error("--model is needed to play")
        run(args)
    print_tables(args)


if __name__ == "__main__":
    main()

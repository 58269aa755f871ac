"""Membership games on real text: every layer, precision, dropout.

    python -m benchmarks.attacks.membership_games layers --model DIR --json layers.json
    python -m benchmarks.attacks.membership_games dropout --model DIR --json dropout.json

``--text`` takes names (banking77, emotion, imdb, yelp; from the folder that FEDLEAK_ASSETS names)
or files as ``fedleak game`` does; the adversaries' public text is then ``--public``. Games are
drawn from the sets' test halves, public text from their training halves.

- ``layers``: FC and attention at every layer, 0 included; with
  and without games in which the target's hidden state occurs twice; targets embedded alone and in
  another batch with other padding; several precisions.
- ``dropout``: what dropout at the client costs.

The tables of Vu et al. 2024: ``python -m benchmarks.papers membership``.

Rates come with 95% intervals over games (Clopper-Pearson; AUC by bootstrap).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from transformers import AutoTokenizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.studies.membership import PLANTED
from lightning_fedleak.studies.models import PRECISIONS, find_model

SMOKE = (
    "layers --model {model} --text {text} --public {text} --public-texts 20 --pool 30 "
    "--batch 4 --tokens 8 --games 4",
)

NAMED = {
    "banking77": ("banking77/test.csv", "banking77/train.csv.gz"),
    "emotion": ("emotion/test.txt", "emotion/train.txt.gz"),
    "imdb": ("imdb/test.jsonl.gz", "imdb/train.jsonl.gz"),
    "yelp": ("yelp_sentences/sentiment.test.1.gz", "yelp_sentences/sentiment.dev.1.gz"),
}
"""Test and training half, in the folder of FEDLEAK_ASSETS."""

HEAD = ("text", "attack", "layer", "precision", "protocol", "games", "collisions")
RATES = ("accuracy", "fitted", "f1", "auc", "advantage", "tpr_at_fpr_0.01")
"""``fitted``: accuracy by a threshold that is fitted on other games."""


class Table:
    """One model and the texts to play on; collects and prints what is found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.anatomies: dict[str, Anatomy] = {}
        self.found: list[dict] = []
        self.together: dict[tuple, list[GameResult]] = {}
        self.headed = False
        self.began = time.process_time()

    def anatomy(self, precision: str = "fp32") -> Anatomy:
        if precision not in self.anatomies:
            self.anatomies = {precision: find_model(self.args.model, PRECISIONS[precision])}
        return self.anatomies[precision]

    def text(self, name: str) -> tuple[SentencePool, PublicText]:
        """Sentences to play on, and the server's own text."""
        args = self.args
        private, public = halves(name, args.public, args.pool, args.public_texts)
        least = 3 if self.anatomy_kind == "causal" else 2
        pool = SentencePool.from_texts(
            private, self.tokenizer, args.tokens, at_least=least, start_token_id=args.bos
        )
        return pool, PublicText(self.ids(public))

    @property
    def anatomy_kind(self) -> str:
        kinds = [a.kind for a in self.anatomies.values()] or [self.anatomy().kind]
        return kinds[0]

    def ids(self, texts: list[str]) -> list[list[int]]:
        front = [] if self.args.bos is None else [self.args.bos]
        length = self.args.tokens - len(front)
        rows = self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        return [front + row for row in rows]

    def config(self, **changes) -> GameConfig:
        settings = {"batch": self.args.batch, "games": self.args.games, "seed": self.args.seed}
        return GameConfig(**{**settings, "forwards": "pooled", **changes})

    def play(
        self,
        name: str,
        pool: SentencePool,
        attacks: Iterable[MembershipAttack],
        config: GameConfig,
        precision: str = "fp32",
        **told,
    ) -> list[GameResult]:
        planted = None
        if config.protocol == "authors":
            planted = torch.tensor(self.ids([PLANTED])[0])
        # No two texts share their bits.
        config = replace(config, seed=config.seed + 10_000 * self.args.text.index(name))
        results = play(self.anatomy(precision), list(attacks), pool, config, planted=planted)
        self.keep(results, name, len(pool), precision=precision, **told)
        return results

    def keep(self, results: list[GameResult], name: str, sentences: int, **told) -> None:
        for result in results:
            self.add(result, text=name, sentences=sentences, **told)
            key = (result.attack, result.layer, *told.items())
            self.together.setdefault(key, []).append(result)

    def sum_up(self) -> None:
        """All texts together, for each attack and layer."""
        for (_, _, *told), results in self.together.items():
            self.add(joined(results), text="all", **dict(told))
        self.together.clear()

    def add(self, result: GameResult, **told) -> None:
        entry = {**result.to_dict(games=told["text"] != "all"), **told}
        self.found.append(entry)
        if len(self.found) == 1:
            print(
                "| text | attack | layer | precision | protocol | games | collisions | "
                + " | ".join(RATES)
            )
            print("|" + "---|" * (7 + len(RATES)))
        if not (self.args.each or told["text"] == "all"):
            return
        cells = [str(entry[name]) for name in HEAD]
        rates = {**entry["rates"], "fitted": entry["rates_fitted"]["accuracy"]}
        cells += [cell(rates[name]) for name in RATES]
        print("| " + " | ".join(cells) + " |", flush=True)

    def save(self) -> None:
        about = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}",
            "model": Path(self.args.model).name,
            "settings": {k: str(v) for k, v in vars(self.args).items() if k != "run"},
            "cpu_seconds": time.process_time() - self.began,
        }
        print(f"\n{about['date']}, {about['machine']}, {about['cpu_seconds']:.0f} s of CPU")
        if self.args.json:
            self.args.json.write_text(json.dumps(about | {"results": self.found}, indent=1))


def cell(rate: dict) -> str:
    if rate["value"] is None:
        return "unknown"
    return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**rate)


def texts_of(name: str, public: str | None) -> tuple[list[str], list[str]]:
    """The clients' texts and the server's."""
    if name in NAMED:
        folder = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data"
        private, own = (lines_of(folder / path) for path in NAMED[name])
        return private, own if public is None else read_texts(public)
    if public is None:
        raise SystemExit(f"--text {name} needs --public, the server's own text")
    return read_texts(name), read_texts(public)


def halves(name: str, own: str | None, pool: int, public_texts: int) -> tuple[list[str], list[str]]:
    """So many texts of the clients' and of the server's, none in both."""
    private, public = texts_of(name, own)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(1)).tolist()
    private = [private[i] for i in order[:pool]]
    order = torch.randperm(len(public), generator=torch.Generator().manual_seed(2)).tolist()
    public = [public[i] for i in order[:public_texts]]
    known = set(public)
    return [t for t in private if t not in known], public


def lines_of(path: Path) -> list[str]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    content = raw.decode("utf-8")
    if ".jsonl" in path.name:
        texts = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    elif ".csv" in path.name:
        texts = [row["text"] for row in csv.DictReader(io.StringIO(content))]
    elif "emotion" in path.parts:
        texts = [line.rpartition(";")[0] for line in content.splitlines()]
    else:
        texts = content.splitlines()
    return [t for t in (t.replace("<br />", " ").strip() for t in texts) if t]


def joined(results: list[GameResult]) -> GameResult:
    """Several results, played on different batches, as one."""
    most = max(int(r.batches.max()) for r in results) + 1
    shift = [most * i for i in range(len(results))]
    columns = ("bits", "guesses", "scores", "collides", "positions")
    return replace(
        results[0],
        **{name: torch.cat([getattr(r, name) for r in results]) for name in columns},
        batches=torch.cat([r.batches + s for r, s in zip(results, shift, strict=True)]),
        seconds=sum(r.seconds for r in results),
    )


def attention(layer: int, public: PublicText, args, **settings) -> AttentionMembership:
    given = {"tokens": args.tokens, "batch": args.batch, "name": "attention", **settings}
    return AttentionMembership(layer, public, **given)


def three(args, public: PublicText, layers: Iterable[int]) -> list[MembershipAttack]:
    """FC on sentences and tokens, and attention, at each layer."""
    attacks: list[MembershipAttack] = []
    for k in layers:
        attacks.append(FCMembership(k, "full", tokens=args.tokens, name="fc-full"))
        attacks.append(FCMembership(k, tokens=args.tokens, name="fc"))
        attacks.append(attention(k, public, args))
    return attacks


def layers(table: Table) -> None:
    args = table.args
    for precision in args.precisions:
        n = len(table.anatomy(precision).blocks)
        for i, recompute in enumerate(args.recompute):
            for name in args.text:
                pool, public = table.text(name)
                attacks = three(args, public, args.layers or range(n + 1))
                if not args.attention:
                    attacks = [a for a in attacks if isinstance(a, FCMembership)]
                config = table.config(recompute=recompute, seed=args.seed + 1000 * i)
                table.play(name, pool, attacks, config, precision, recompute=recompute)
        table.sum_up()


def dropout(table: Table) -> None:
    args = table.args
    for dropped in (False, True):
        for name in args.text:
            pool, public = table.text(name)
            config = table.config(forwards="fresh", dropout=dropped)
            table.play(name, pool, three(args, public, args.layers), config, dropout=dropped)
        table.sum_up()


def main() -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", required=True, help="folder or hub id")
    shared.add_argument("--text", nargs="+", default=list(NAMED))
    shared.add_argument("--public", help="the server's text, where --text is a file")
    shared.add_argument("--public-texts", type=int, default=400)
    shared.add_argument("--pool", type=int, default=800, help="texts that games are drawn from")
    shared.add_argument("--batch", type=int, default=40)
    shared.add_argument("--tokens", type=int, default=32)
    shared.add_argument("--games", type=int, default=256, help="for each text")
    shared.add_argument("--bos", type=int, help="id put before every text")
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--threads", type=int, default=1)
    shared.add_argument("--each", action="store_true", help="print the rows of each text too")
    shared.add_argument("--json", type=Path)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = parser.add_subparsers(required=True)
    one = tables.add_parser("layers", parents=[shared])
    one.add_argument("--layers", type=int, nargs="+", help="default: all")
    one.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    one.add_argument("--recompute", nargs="+", default=["alone", "padded"])
    one.add_argument("--attention", action="store_true")
    one.set_defaults(run=layers)
    one = tables.add_parser("dropout", parents=[shared])
    one.add_argument("--layers", type=int, nargs="+", default=[1, 3, 6])
    one.set_defaults(run=dropout)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table(args)
    args.run(table)
    table.save()


if __name__ == "__main__":
    main()

"""TokenLDP: what it costs, what of the text it keeps, and membership games under it.

    python benchmarks/token_ldp.py speed
    python benchmarks/token_ldp.py kept --vocabulary 30522
    python benchmarks/token_ldp.py games --model DIR --text banking77 emotion --json games.json

- ``speed``: one batch of 32 x 128 at a vocabulary of 50,257: a whole ``on_batch`` for every
  mechanism, memoised and not, the draws alone, and a token by multi-freq-ldpy's client in the same
  run. CPU time of the process, medians.
- ``kept``: how many tokens survive, exactly, by epsilon; and how much of epsilon the decoded token
  still spends.
- ``games``: Vu et al. 2024, Tables 3 and 7 to 10: membership of a sentence or token while the
  client's text is randomised. ``--ldp published`` is the protocol of their code (full epsilon on
  every position, the batch's own ids as the domain: no guarantee), ``token`` spends epsilon on
  each token over the vocabulary, ``sequence`` splits it over the sentence. ``--protocols`` as in
  ``membership_games.py``. Attacks: ``fc`` and ``fc-full`` with the ladder that is made for exact
  copies; ``fc-wide``, the same with rungs up to twice the target's own norm, at the embeddings (0)
  and behind blocks; attention with a calibrated threshold. AUC does not depend on a threshold.

Rates come with 95% intervals (AUC by bootstrap over batches).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path

import torch
from membership_games import cell, joined, texts_of
from torch import Tensor, nn
from transformers import AutoTokenizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.attention_membership import AttentionMembership
from lightning_fedleak.attacks.crafted_fc import CraftedFC, Frozen, inputs_of
from lightning_fedleak.attacks.fc_membership import FCMembership
from lightning_fedleak.attacks.hidden import hidden_states
from lightning_fedleak.attacks.membership import MembershipAttack, MembershipGuess, sentence_rows
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.trained_membership import TrainedMembership
from lightning_fedleak.defenses import DefenseContext, TokenLDP
from lightning_fedleak.defenses.ldp_mechanisms import Randomizer
from lightning_fedleak.defenses.ldp_reference import reference_sample
from lightning_fedleak.game_cli import PLANTED, find_model
from lightning_fedleak.games import GameConfig, GameResult, SentencePool, play

MECHANISMS = ("grr", "rappor", "the", "dbitflip")
WIDE = (1.0, *(float(step) for step in range(40, 2001, 20)))
"""Rungs of ``fc-wide`` in thousandths of the target's L1 norm (``tau`` of fp32 is one)."""


class TokenCount(MembershipAttack):
    """How many of the target's words stand at their places, the rare ones counting more.

    Behind the embeddings' LayerNorm, x = gain u + shift with |u|^2 = d and the u's own sum zero. In
    a first layer one neuron for each position fires with relu((<u_T, u> / d - 1 + rho) / rho), 1
    where the word is the target's and 0 where it is not much like it; two more fire where there is
    any word: at the target's last position, and right behind it. The second layer adds them up, the
    last with a minus, so that a sentence of the same length counts. The weights: how much likelier
    that is in a text that keeps a word with probability ``keep`` than in public text, as logarithm.
    """

    default_name = "count"

    def __init__(
        self, public: PublicText, tokens: int, keep: float = 0.2, rho: float = 0.1
    ) -> None:
        super().__init__(0, "full", tokens)
        self.public, self.keep, self.rho = public, keep, rho

    def prepare(self, anatomy: Anatomy) -> None:
        norm = anatomy.model.embeddings.LayerNorm
        self.gain, self.shift = norm.weight.detach(), norm.bias.detach()
        rows = [hidden_states(anatomy, 0, row[None]) for row in self.public.sentences]
        self.seen = torch.cat([sentence_rows(row, None, self.tokens) for row in rows])

    @property
    def rungs(self) -> int:
        return 100

    def _layers(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight (tokens + 2, d) and bias of the first layer, of the second its weight, (tokens +
        2,), and thresholds. The first layer's last two rows read :meth:`_ends`."""
        target = target.view(self.tokens, -1)
        there = (target != 0).any(1)
        u = (target - self.shift) / self.gain
        weight = u / self.gain / (self.rho * u.shape[1]) * there[:, None]
        bias = (1 - (weight * target).sum(1)) * there
        any_word = 1 / self.gain / (self.shift / self.gain).sum()
        weight = torch.cat([weight, any_word.expand(2, -1)])
        bias = torch.cat([bias, torch.zeros(2)])
        seen = self._fires(self.seen, weight, bias, self._ends(there)).mean(0)
        worth = torch.log(1 + self.keep / (seen + 1 / len(self.seen)))
        worth = torch.cat([worth[:-2] * there, self._length_worth(seen).expand(2)])
        worth[-1] *= -1 if int(there.sum()) < self.tokens else 0
        top = worth.clamp(min=0).sum()
        return weight, bias, worth, torch.linspace(0, 1, self.rungs + 1)[:-1] * top

    def _length_worth(self, seen: Tensor) -> Tensor:
        """Minus the log of how many public sentences have the target's length."""
        return -torch.log((seen[-2] - seen[-1]).clamp(min=1 / len(self.seen)))

    def _ends(self, there: Tensor) -> list[int]:
        length = int(there.sum())
        return [length - 1, min(length, self.tokens - 1)]

    def _fires(self, rows: Tensor, weight: Tensor, bias: Tensor, ends: list[int]) -> Tensor:
        """(N, tokens + 2)."""
        read = rows.view(len(rows), self.tokens, -1)
        read = torch.cat([read, read[:, ends]], dim=1)
        return torch.relu((read * weight).sum(2) + bias)

    def craft(self, target: Tensor) -> CraftedFC:
        weight, bias, worth, thresholds = self._layers(target)
        d = weight.shape[1]
        ends = self._ends((target.view(self.tokens, d) != 0).any(1))
        whole = torch.zeros(self.tokens + 2, self.tokens, d)
        places = [*range(self.tokens), *ends]
        whole[torch.arange(self.tokens + 2), torch.tensor(places)] = weight
        first = Frozen(whole.flatten(1), bias)
        return CraftedFC(first, worth[None], -thresholds, self.tokens)

    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        rows, samples, weights = inputs_of(hidden, mask, upstream, self.tokens)
        out = torch.zeros(len(hidden), len(targets), self.rungs)
        for g, target in enumerate(targets):
            weight, bias, worth, thresholds = self._layers(target)
            ends = self._ends((target.view(self.tokens, -1) != 0).any(1))
            total = self._fires(rows, weight, bias, ends) @ worth
            fires = (total[:, None] > thresholds) * weights[:, None]
            out[:, g] = torch.zeros(len(hidden), self.rungs).index_add_(0, samples, fires)
        return out

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        scores = (gradient != 0).sum(1)
        return MembershipGuess(scores, scores > self.rungs // 4)


def context(root: nn.Module) -> DefenseContext:
    return DefenseContext(root, 0, 1, torch.device("cpu"), "32-true", 0, b"benchmark" * 4)


def ldp(
    mechanism: str, epsilon: float, protocol: str, special_ids: object, memoize: bool
) -> TokenLDP:
    settings = {"special_ids": special_ids, "kind": "causal", "seed": 0}
    if protocol == "published":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TokenLDP.as_published(mechanism, epsilon, **settings)
    return TokenLDP(mechanism, epsilon, protocol, memoize=memoize, **settings)


def speed(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocabulary, (args.rows, args.length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    where = context(nn.Identity())
    domain = range(args.vocabulary)
    defenses = {
        (m, per, memoize): TokenLDP(
            m, 10.0, per, domain=domain, special_ids=[], kind="causal", memoize=memoize
        )
        for m in MECHANISMS
        for per in ("token", "sequence")
        for memoize in (False, True)
    }
    times: dict[tuple, list[float]] = {key: [] for key in defenses}
    for defense in defenses.values():
        defense.before_setup(where)
        defense.on_batch(batch, where)
    for _ in range(args.repeats):
        for key, defense in defenses.items():
            began = time.process_time()
            defense.on_batch(batch, where)
            times[key].append(time.process_time() - began)
    print("| mechanism | per | memoised | ms a batch |\n|---|---|---|---|")
    for (mechanism, per, memoize), seen in times.items():
        print(f"| {mechanism} | {per} | {memoize} | {1e3 * statistics.median(seen):.2f} |")
    print("\n| mechanism | draws alone, ms a batch |\n|---|---|")
    uniforms = torch.rand((ids.numel(), 2), generator=generator, dtype=torch.float64)
    for mechanism in MECHANISMS:
        randomizer = Randomizer.of(mechanism, args.vocabulary)
        alone = []
        for _ in range(args.repeats):
            began = time.process_time()
            randomizer.sample(ids.flatten(), 10.0, uniforms)
            alone.append(time.process_time() - began)
        print(f"| {mechanism} | {1e3 * statistics.median(alone):.3f} |")
    print("\n| mechanism | multi-freq-ldpy, ms a token | for the batch, s | ratio |")
    print("|---|---|---|---|")
    for mechanism in MECHANISMS[:3]:
        randomizer = Randomizer.of(mechanism, args.vocabulary)
        reference_sample(randomizer, ids[0, :2], 10.0, 0)
        seen = []
        for r in range(5):
            began = time.process_time()
            reference_sample(randomizer, ids[r, :20], 10.0, r)
            seen.append((time.process_time() - began) / 20)
        token = statistics.median(seen)
        whole = token * ids.numel()
        ratio = whole / statistics.median(times[mechanism, "token", False])
        print(f"| {mechanism} | {1e3 * token:.3f} | {whole:.2f} | {ratio:,.0f} |")


def kept(args: argparse.Namespace) -> None:
    print("| mechanism, rule | " + " | ".join(f"eps {e:g}" for e in args.epsilon) + " |")
    print("|---|" + "---|" * len(args.epsilon))
    for mechanism, rule in (
        ("grr", None),
        ("rappor", "uniform"),
        ("the", "argmax"),
        ("the", "uniform"),
    ):
        randomizer = Randomizer.of(mechanism, args.vocabulary, rule)
        found = [
            f"{randomizer.keep(e):.2g} ({randomizer.decoded_epsilon(e):.2f})" for e in args.epsilon
        ]
        print(f"| {mechanism}, {rule or '-'} | " + " | ".join(found) + " |")


def attacks_of(args: argparse.Namespace, public: PublicText) -> list[MembershipAttack]:
    attacks: list[MembershipAttack] = []
    if "count" in args.attacks:
        attacks.append(TokenCount(public, args.tokens))
    for k in args.layers if "ladders" in args.attacks else ():
        wide = {"tokens": args.tokens, "ladder": WIDE, "tau": "auto"}
        attacks.append(FCMembership(k, "full", name="fc-wide-full", **wide))
        attacks.append(FCMembership(k, name="fc-wide", **wide))
        if k > 0:
            attacks.append(FCMembership(k, "full", tokens=args.tokens, name="fc-full"))
            attacks.append(FCMembership(k, tokens=args.tokens, name="fc"))
            attacks.append(
                AttentionMembership(
                    k, public, tokens=args.tokens, batch=args.batch, name="attention", beta=0.01
                )
            )
    for k in args.layers if "trained" in args.attacks else ():
        attacks.append(TrainedMembership(k, public, "full", tokens=args.tokens))
    return attacks


class Games:
    """One model; the client's text under one protocol of LDP after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.anatomy = find_model(args.model, torch.float32)
        self.found: list[dict] = []

    def ids(self, texts: list[str]) -> list[list[int]]:
        length = self.args.tokens
        return self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]

    def text(self, name: str) -> tuple[SentencePool, PublicText]:
        private, public = texts_of(name, self.args.public)
        public = public[: self.args.public_texts]
        order = torch.randperm(len(private), generator=torch.Generator().manual_seed(1))
        known = set(public)
        private = [private[i] for i in order[: self.args.pool].tolist() if private[i] not in known]
        pool = SentencePool.of(private, self.tokenizer, self.args.tokens)
        return pool, PublicText(self.ids(public))

    def play(self, protocol: str, name: str, defense: TokenLDP) -> list[GameResult]:
        """All games on one text. With several rounds the same games are played in each, and the
        adversary adds up its scores."""
        args = self.args
        pool, public = self.text(name)
        where = context(self.anatomy.model)
        defense.before_setup(where)

        def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
            batch = {"input_ids": ids, "attention_mask": mask}
            return defense.on_batch(batch, where)["input_ids"]

        config = GameConfig(
            games=args.games if protocol == "game" else args.authors_games,
            batch=args.batch,
            protocol=protocol,
            seed=args.seed + 10_000 * args.text.index(name),
            targets_per_batch=args.targets if protocol == "game" else 1,
        )
        planted = torch.tensor(self.ids([PLANTED])[0])
        attacks = attacks_of(args, public)
        rounds = [
            play(self.anatomy, attacks, pool, config, planted=planted, defend=defend)
            for _ in range(args.rounds)
        ]
        return [
            replace(results[0], scores=torch.stack([r.scores for r in results]).sum(0))
            for results in zip(*rounds, strict=True)
        ]

    def cell(self, rule: str, protocol: str, mechanism: str, epsilon: float) -> None:
        """One mechanism at one epsilon, all texts together."""
        together: dict[tuple, list[GameResult]] = {}
        for name in self.args.text:
            defense = ldp(mechanism, epsilon, rule, self.tokenizer, self.args.memoize)
            for result in self.play(protocol, name, defense):
                together.setdefault((result.attack, result.layer), []).append(result)
        for (attack, layer), parts in together.items():
            entry = joined(parts).to_dict(games=False)
            told = {"ldp": rule, "mechanism": mechanism, "epsilon": epsilon}
            self.found.append({**entry, **told})
            rates = (entry["rates"]["auc"], entry["rates_fitted"]["accuracy"])
            about = (rule, protocol, mechanism, f"{epsilon:g}", attack, layer, entry["games"])
            print("| " + " | ".join([*map(str, about), *map(cell, rates)]) + " |", flush=True)


def games(args: argparse.Namespace) -> None:
    began = time.process_time()
    table = Games(args)
    print("| LDP | game | mechanism | epsilon | attack | layer | games | AUC | accuracy, fitted |")
    print("|" + "---|" * 9)
    for settings in product(args.ldp, args.protocols, args.mechanisms, args.epsilon):
        table.cell(*settings)
    seconds = time.process_time() - began
    print(f"\n{date.today()}, {platform.machine()}, one thread, {seconds:.0f} s of CPU")
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items() if k not in ("run", "model", "json")}
        about = {"date": str(date.today()), "settings": settings, "cpu_seconds": seconds}
        args.json.write_text(json.dumps(about | {"results": table.found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("speed")
    one.add_argument("--vocabulary", type=int, default=50_257)
    one.add_argument("--rows", type=int, default=32)
    one.add_argument("--length", type=int, default=128)
    one.add_argument("--repeats", type=int, default=30)
    one.set_defaults(run=speed)
    one = parts.add_parser("kept")
    one.add_argument("--vocabulary", type=int, default=30_522)
    one.add_argument("--epsilon", type=float, nargs="+", default=[1, 5, 7.5, 10, 20])
    one.set_defaults(run=kept)
    one = parts.add_parser("games")
    one.add_argument("--model", required=True, help="folder or hub id")
    one.add_argument("--text", nargs="+", default=["banking77", "emotion"])
    one.add_argument("--public", help="the server's text, where --text is a file")
    one.add_argument("--public-texts", type=int, default=300)
    one.add_argument("--pool", type=int, default=400)
    one.add_argument("--batch", type=int, default=40)
    one.add_argument("--tokens", type=int, default=32)
    one.add_argument("--layers", type=int, nargs="+", default=[0, 1, 6])
    one.add_argument("--games", type=int, default=64, help="for each text")
    one.add_argument("--targets", type=int, default=4, help="games that share a batch")
    one.add_argument("--rounds", type=int, default=1, help="batches of the same text, summed")
    one.add_argument("--memoize", action="store_true", help="the same noise in every round")
    one.add_argument("--authors-games", type=int, default=16, help="worlds for each text")
    one.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    one.add_argument("--epsilon", type=float, nargs="+", default=[5, 7.5, 10])
    one.add_argument("--ldp", nargs="+", default=["published", "token", "sequence"])
    one.add_argument("--protocols", nargs="+", default=["game", "authors"])
    one.add_argument(
        "--attacks",
        nargs="+",
        default=["count", "ladders"],
        help="count; ladders (fc, fc-wide, attention at each layer); trained (seconds a target)",
    )
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--json", type=Path)
    one.set_defaults(run=games)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()

"""Membership of a sentence while the client's text is randomised (TokenLDP).

    python -m benchmarks.defenses.token_ldp_games --model DIR --blocks 15
    python -m benchmarks.defenses.token_ldp_games --model DIR --attacks count --mechanisms grr

The game of Fig. 2 of Vu et al. 2024, under ``--rule token`` with epsilon for each token over the
vocabulary, under ``sequence`` for the whole sentence. The paper's own tables, under its protocol,
are in ``papers/membership.py``.

Adversaries (``--attacks``): ``count`` at the embeddings; at each of ``--layers`` ``fc``, a
FCMembership on whole sentences with rungs up to twice the target's own norm, and ``attention`` as
it plays against replaced batches. AUC with 95% intervals (bootstrap over batches), the mean over
the texts.
"""

import argparse
import math
import statistics
from collections.abc import Collection
from itertools import product

from transformers import AutoTokenizer

from benchmarks.attacks.membership_games import halves, joined, played_on_replaced, prepared
from benchmarks.defenses.token_count import TokenCount
from benchmarks.shared import parser_of, print_place, print_row, table
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.fc import RANDOMISED_LADDER, FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.cli.studies.models import find_model
from lightning_fedleak.defenses import BatchForm, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool
from lightning_fedleak.model.anatomy import Anatomy

SMOKE = (
    "--model {model} --text {text} --public {text} --public-texts 20 --pool 30 --batch 4 "
    "--tokens 8 --layers 1 --blocks 1 --targets 1 --mechanisms grr --epsilon 5 --attacks fc",
)
MECHANISMS = ("grr", "rappor", "the", "dbitflip")
ATTACKS = ("count", "fc", "attention")


def adversaries(
    anatomy: Anatomy, public: PublicText, args: argparse.Namespace
) -> list[MembershipAttack]:
    """The adversaries of one text."""
    tokens = {"tokens": args.tokens}
    attacks: list[MembershipAttack] = [TokenCount(public, args.tokens)]
    for layer in args.layers:
        wide = {"ladder": RANDOMISED_LADDER, "tau": "auto", "name": f"fc, layer {layer}"}
        attacks.append(FCMembership(layer, "full", **tokens, **wide))
        name = f"attention, layer {layer}"
        attacks.append(AttentionMembership(layer, public, batch=args.batch, name=name, **tokens))
    attacks = [attack for attack in attacks if attack.name.split(",")[0] in args.attacks]
    return prepared(anatomy, attacks)


def auc_of(texts: Collection[list[GameResult]]) -> str:
    """The mean of the texts' AUCs, as the paper averages, with its 95% interval.

    Scores of one text are not held against another's, whose sentences are longer or nearer to each
    other. The interval joins those of the texts by their squares (Zou & Donner 2008).
    """
    rates = [joined(results).summary()["auc"] for results in texts]
    value = statistics.fmean(rate.value for rate in rates)
    down = math.hypot(*(rate.value - rate.low for rate in rates)) / len(rates)
    up = math.hypot(*(rate.high - rate.value for rate in rates)) / len(rates)
    return f"{value:.3f} ({max(0.0, value - down):.2f} to {min(1.0, value + up):.2f})"


def main() -> None:
    args = parser_of(
        __doc__, "model", text=["banking77", "emotion", "imdb"], public_texts=400, pool=400,
        public=(str, "the server's text, where --text is a file"), batch=40, tokens=32,
        layers=[1, 6], blocks=(16, "batches of each text"), epsilon=[5, 7.5, 10], seed=0,
        targets=(4, "games that share a batch"), mechanisms=([*MECHANISMS], MECHANISMS),
        rule=("token", ("token", "sequence")), attacks=([*ATTACKS], ATTACKS),
    ).parse_args()  # fmt: skip
    print_place()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    anatomy = find_model(args.model)
    sides = {}
    for text in args.text:
        private, public = halves(text, args.public, args.pool, args.public_texts)
        ids = tokenizer(public, truncation=True, max_length=args.tokens)["input_ids"]
        pool = SentencePool.from_texts(private, tokenizer, args.tokens)
        sides[text] = pool, adversaries(anatomy, PublicText(ids), args)
    names = [attack.name for attack in sides[args.text[0]][1]]
    print(table(["mechanism", "eps", "games", *names], []))
    for mechanism, epsilon in product(args.mechanisms, args.epsilon):
        results: dict[str, dict[str, list[GameResult]]] = {name: {} for name in names}
        for number, text in enumerate(args.text):
            for block in range(args.blocks):
                form = BatchForm(kind="causal")
                settings = {"memoize": False, "special_ids": tokenizer, "form": form}
                defense = TokenLDP(mechanism, epsilon, args.rule, **settings)
                seed = args.seed + 1_000_000 * number + 10 * block
                shape = {"batch": args.batch, "targets_per_batch": args.targets}
                config = GameConfig(games=args.targets, seed=seed, **shape)
                pool, attacks = sides[text]
                job = (
                    f"Job(rule={args.rule!r}, protocol='game', mechanism={mechanism!r}, "
                    f"epsilon={epsilon}, rounds=1, memoize=False, text={text!r}, block={block})"
                )
                for one in played_on_replaced(anatomy, attacks, pool, config, defense, job):
                    results[one.attack].setdefault(text, []).append(one)
        games = len(args.text) * args.blocks * args.targets
        cells = [auc_of(texts.values()) for texts in results.values()]
        print_row(mechanism, f"{epsilon:g}", str(games), *cells)


if __name__ == "__main__":
    main()

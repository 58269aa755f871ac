"""Membership of a sentence while the client's text is randomised (TokenLDP).

    python -m benchmarks.defenses.token_ldp_games --model DIR --blocks 15
    python -m benchmarks.defenses.token_ldp_games --model DIR --attacks count --mechanisms grr
    python -m benchmarks.defenses.token_ldp_games --model DIR --rule published --mechanisms grr \
        --epsilon 5 --layers 1 3 6 --attacks seen fc fc_token attention words words_token

The game of Fig. 2 of Vu et al. 2024, under ``--rule token`` with epsilon for each token over the
vocabulary, under ``sequence`` for the whole sentence, under ``published`` as in their code. The
paper's own tables are in ``papers/membership.py``.

Adversaries (``--attacks``): ``count`` at the embeddings; at each of ``--layers`` ``fc``, a
FCMembership on whole sentences with rungs up to twice the target's own norm, ``fc_token`` the same
on one token, ``attention`` as it plays against replaced batches, and ``words`` and ``words_token``,
a WordMembership. ``seen`` is a server that sees the replaced batch. AUC with 95% intervals
(bootstrap over batches), the mean over the texts, and over the layers too in the last column.
"""

import argparse
import warnings
from collections.abc import Collection
from itertools import product
from typing import Any

from transformers import AutoTokenizer

from benchmarks.attacks.membership_games import (
    RANDOMISED_LADDER,
    halves,
    joined,
    played_on_replaced,
    prepared,
    seen_in_clear,
)
from benchmarks.defenses.token_count import TokenCount
from benchmarks.papers.tables import Mean, mean_of
from benchmarks.shared import parser_of, print_place, print_row, table
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.fc import FCMembership, WordMembership
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
MORE = ("fc_token", "words", "words_token", "seen")


def adversaries(
    anatomy: Anatomy, public: PublicText, args: argparse.Namespace
) -> list[MembershipAttack]:
    """The adversaries of one text."""
    tokens = {"tokens": args.tokens}
    attacks: list[MembershipAttack] = [TokenCount(public, args.tokens)]
    for layer in args.layers:
        wide = {"ladder": RANDOMISED_LADDER, "tau": "auto", **tokens}
        calibrated = {"batch": args.batch, **tokens}
        attacks.append(AttentionMembership(layer, public, name="attention", **calibrated))
        for form, end in (("full", ""), ("token", "_token")):
            attacks.append(FCMembership(layer, form, name=f"fc{end}", **wide))
            attacks.append(WordMembership(layer, public, form, name=f"words{end}", **calibrated))
    return prepared(anatomy, [attack for attack in attacks if attack.name in args.attacks])


def defense_of(mechanism: str, epsilon: float, rule: str, tokenizer: Any) -> TokenLDP:
    settings = {"special_ids": tokenizer, "form": BatchForm(kind="causal")}
    if rule == "published":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has no guarantee
            return TokenLDP.as_published(mechanism, epsilon, **settings)
    return TokenLDP(mechanism, epsilon, rule, memoize=False, **settings)


def auc_of(texts: Collection[list[GameResult]]) -> Mean:
    """Return the mean of the texts' AUCs, as the paper averages, and its 95% interval.

    Scores of one text are not held against another's, whose sentences are longer or nearer to each
    other.
    """
    rates = (joined(results).summary()["auc"] for results in texts)
    return mean_of([[Mean(rate.value, rate.low, rate.high)] for rate in rates])


def main() -> None:
    args = parser_of(
        __doc__, "model", text=["banking77", "emotion", "imdb"], public_texts=400, pool=400,
        public=(str, "the server's text, where --text is a file"), batch=40, tokens=32,
        layers=[1, 6], blocks=(16, "batches of each text"), epsilon=[5, 7.5, 10], seed=0,
        targets=(4, "games that share a batch"), mechanisms=([*MECHANISMS], MECHANISMS),
        rule=("token", ("token", "sequence", "published")), attacks=([*ATTACKS], ATTACKS + MORE),
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
    print(table(["mechanism", "eps", "games", "attack", "AUC by layer", "mean of layers"], []))
    for mechanism, epsilon in product(args.mechanisms, args.epsilon):
        results: dict[str, dict[int, dict[str, list[GameResult]]]] = {}
        for number, text in enumerate(args.text):
            for block in range(args.blocks):
                seed = args.seed + 1_000_000 * number + 10 * block
                shape = {"batch": args.batch, "targets_per_batch": args.targets}
                config = GameConfig(games=args.targets, seed=seed, **shape)
                pool, attacks = sides[text]
                job = (
                    f"Job(rule={args.rule!r}, protocol='game', mechanism={mechanism!r}, "
                    f"epsilon={epsilon}, rounds=1, memoize=False, text={text!r}, block={block})"
                )
                defense = defense_of(mechanism, epsilon, args.rule, tokenizer)
                played = played_on_replaced(anatomy, attacks, pool, config, defense, job)
                if "seen" in args.attacks:
                    defense = defense_of(mechanism, epsilon, args.rule, tokenizer)
                    game = played[0]
                    played.append(seen_in_clear(game, anatomy, pool, config, defense, job))
                for one in played:
                    layers = results.setdefault(one.attack, {})
                    layers.setdefault(one.layer, {}).setdefault(text, []).append(one)
        games = str(len(args.text) * args.blocks * args.targets)
        for name, layers in results.items():
            aucs = {layer: auc_of(texts.values()) for layer, texts in layers.items()}
            cells = "; ".join(f"{layer}: {auc}" for layer, auc in aucs.items())
            mean = mean_of([[*aucs.values()]])  # layers share games
            print_row(mechanism, f"{epsilon:g}", games, name, cells, str(mean))


if __name__ == "__main__":
    main()

"""Texts of membership games by name, and what several scripts do with games."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.shared import data_folder
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.defenses import DefenseContext, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.evaluation.games.pool import Challenge, game_challenges, pad
from lightning_fedleak.model.anatomy import Anatomy

PLANTED = " ".join(["This is the sentence that is looked for."] * 11)
"""The text that the authors' protocol plants: one short sentence many times, as in their code."""
NAMED = {
    "banking77": ("banking77/test.csv", "banking77/train.csv.gz"),
    "emotion": ("emotion/test.txt", "emotion/train.txt.gz"),
    "imdb": ("imdb/test.jsonl.gz", "imdb/train.jsonl.gz"),
    "yelp": ("yelp_sentences/sentiment.test.1.gz", "yelp_sentences/sentiment.dev.1.gz"),
}
"""Test and training half, in the folder of FEDLEAK_ASSETS."""

RANDOMISED_LADDER = (1.0, *(float(step) for step in range(40, 2001, 20)))
"""An FCMembership's for text with replaced tokens: it reaches twice the target's own norm."""


def texts_of(name: str, public_name: str | None) -> tuple[list[str], list[str]]:
    """The clients' texts and the server's."""
    if name in NAMED:
        private, public = (lines_of(data_folder() / path) for path in NAMED[name])
        return private, public if public_name is None else read_texts(public_name)
    if public_name is None:
        raise SystemExit(f"--text {name} needs --public, the server's own text")
    return read_texts(name), read_texts(public_name)


def halves(
    name: str, public_name: str | None, pool: int, public_texts: int
) -> tuple[list[str], list[str]]:
    """So many texts of the clients' and of the server's, none in both."""
    private, public = texts_of(name, public_name)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(1)).tolist()
    private = [private[i] for i in order[:pool]]
    order = torch.randperm(len(public), generator=torch.Generator().manual_seed(2)).tolist()
    public = [public[i] for i in order[:public_texts]]
    server_texts = set(public)
    return [t for t in private if t not in server_texts], public


def lines_of(path: Path) -> list[str]:
    """Return the texts of a file; those of ``emotion`` end with a class."""
    texts = read_texts(path, "text")
    if "emotion" in path.parts:
        texts = [line.rpartition(";")[0] for line in texts]
    return [t for t in (t.replace("<br />", " ").strip() for t in texts) if t]


def joined(results: list[GameResult]) -> GameResult:
    """Several results, played on different batches, as one."""
    n_batches = max(int(r.batches.max()) for r in results) + 1
    shift = [n_batches * i for i in range(len(results))]
    columns = ("bits", "guesses", "scores", "collides", "positions")
    return replace(
        results[0],
        **{name: torch.cat([getattr(r, name) for r in results]) for name in columns},
        batches=torch.cat([r.batches + s for r, s in zip(results, shift, strict=True)]),
    )


def prepared(anatomy: Anatomy, attacks: list[MembershipAttack]) -> list[MembershipAttack]:
    """The adversaries of batches that are replaced, prepared once: the model stands still."""
    for attack in attacks:
        attack.meet(RunFacts(defended=frozenset({"batches"})))
        attack.prepare(anatomy)
        attack.prepare = lambda anatomy: None
    return attacks


def replacing(anatomy: Anatomy, defense: TokenLDP, job: str) -> Callable:
    """What replaces the ids of a batch; no two jobs share their noise, two of one job do."""
    entropy, device = hashlib.sha256(job.encode()).digest(), torch.device("cpu")
    context = DefenseContext(anatomy.model, 0, 1, device, "32-true", 0, entropy)
    defense.before_setup(context)

    def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
        return defense.on_batch({"input_ids": ids, "attention_mask": mask}, context)["input_ids"]

    return defend


def played_on_replaced(
    anatomy: Anatomy, attacks: list[MembershipAttack], pool: SentencePool, config: GameConfig,
    defense: TokenLDP, job: str, challenges: Iterable[Challenge] | None = None,
) -> list[GameResult]:  # fmt: skip
    """Games in which the client's ids are replaced."""
    defend = replacing(anatomy, defense, job)
    return play(anatomy, attacks, pool, config, challenges=challenges, defend=defend)


def seen_in_clear(
    game: GameResult, anatomy: Anatomy, pool: SentencePool, config: GameConfig, defense: TokenLDP,
    job: str,
) -> GameResult:  # fmt: skip
    """The same games by a server that sees the replaced batch: the bound of what layers can read.

    Its score is the largest share of the target's words that stand at their places in one row.
    ``defense`` is a fresh one with the settings of the games'.
    """
    defend, scores = replacing(anatomy, defense, job), []
    for challenge in game_challenges(pool, config, spare=int(anatomy.kind == "causal")):
        ids, mask = pad(challenge.data, pool.pad_id)
        ids = defend(ids, mask).masked_fill(mask == 0, -1)
        for target in challenge.targets:
            n = min(len(target), ids.shape[1])
            scores.append((ids[:, :n] == target[:n]).sum(1).max() / len(target))
    scores = torch.stack(scores).double()
    return replace(game, attack="seen", scores=scores, guesses=scores > 0.5)

"""A game's settings and result, and its challenges, drawn from sentences of a real corpus.

In a membership game (Vu et al. 2024, Fig. 2) a client trains on a batch D of sentences. A secret
fair bit b says whether a target sentence is in D. The server sees the gradient, and guesses b' from
it. A *challenge* is one D with its targets and bits. In a *collision* another sentence of D has the
state that the attack reads, so that the attack cannot decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.evaluation.metrics import Rate, membership_rates
from lightning_fedleak.validate import check_choice, check_integer

Relation = Literal["replace_one", "add_remove"]


@dataclass(frozen=True)
class GameConfig:
    """Settings of a membership game.

    Attributes:
        games: number of games.
        batch: n, distinct sentences in the client's data D.
        relation: what replaces the target where it is not in D. ``"replace_one"``: another sentence
            (Fig. 2: D always has ``batch`` sentences). ``"add_remove"``: nothing, so D is
            ``batch - 1`` sentences with or without the target, as accountants of DP-SGD compare
            (:func:`lightning_fedleak.evaluation.auditing.audit_games`).
        targets_per_batch: games that share one D; each has its own bit and target. Above 1 the
            games are no longer independent, and intervals are over batches.
        seed: The seed of the game's own generators; global random numbers are not used.

    Raises:
        ValueError: a value out of range, or two that exclude each other.

    Examples:
        >>> from lightning_fedleak.evaluation.games import GameConfig
        >>> config = GameConfig(games=100, batch=8, relation="add_remove")
        >>> config.seed
        0
    """

    games: int = 240
    batch: int = 40
    relation: Relation = "replace_one"
    targets_per_batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("games", "batch", "targets_per_batch"):
            check_integer(name, getattr(self, name))
        check_choice("relation", self.relation, get_args(Relation))
        if self.relation == "add_remove" and (self.targets_per_batch > 1 or self.batch < 2):
            raise ValueError("add_remove needs batch>1, targets_per_batch=1")


@dataclass(frozen=True, repr=False)
class GameResult:
    """Guesses and scores of one adversary in all games.

    Attributes:
        attack: The name of the attack.
        layer: The attacked layer; None for an attack on the gradient of the model's own parameters.
        granularity: ``"token"`` or ``"full"``; ``"text"`` for an attack without a layer.
        bits: (n,) bool, the secret b.
        guesses: (n,) bool, the adversary's guess b'.
        scores: (n,) float64, higher is more likely a member.
        collides: (n,) bool, whether the hidden states of the target that this attack reads (of one
            token, or of its sentence) occur in D outside the target: then the assumption of Lemma 1
            fails, and the attack cannot decide.
        batches: (n,) int, the number of the D that a game was played on.
        positions: (n,) int, the target token (not used by an attack on whole sentences).
        relation: ``"replace_one"`` or ``"add_remove"``, see :class:`GameConfig`.
    """

    attack: str
    layer: int | None
    granularity: str
    bits: Tensor
    guesses: Tensor
    scores: Tensor
    collides: Tensor
    batches: Tensor
    positions: Tensor
    relation: Relation = "replace_one"

    def __len__(self) -> int:
        return len(self.bits)

    def summary(self, confidence: float = 0.95, *, fitted: bool = False) -> dict[str, Rate]:
        """Return accuracy, F1, AUC, advantage and TPR at small FPRs, each with its interval.

        The intervals are over batches; see
        :func:`lightning_fedleak.evaluation.metrics.membership.membership_rates`.

        Args:
            confidence: The confidence of the intervals.
            fitted: Whether accuracy, F1 and advantage come from a threshold on the scores that was
                fitted on other games, instead of the adversary's own guesses. It shows what the
                scores are worth to someone who knows the outcome of such games.
        """
        guesses = None if fitted else self.guesses
        return membership_rates(
            self.scores, self.bits, self.batches, guesses, confidence=confidence
        )


class SentencePool:
    """Distinct sentences that data sets and targets are drawn from.

    Sentences are cut to ``tokens`` ids, and duplicates are dropped (Fig. 2 draws a *set*). So two
    rows of a batch are never the same text.

    Args:
        rows: token ids of one sentence each, in the corpus's order.
        tokens: The maximum number of ids of a row; longer rows are cut.
        at_least: The minimum number of ids of a row without special ones; shorter rows are dropped.
        pad_id: The id that pads rows.
        special_ids: The ids that are no part of the text (start, separator, ...). They are never a
            target: at such a token early layers depend little on the sentence.

    Attributes:
        rows: (n,) of 1-D int64 tensors, all different.
        duplicates: number of rows dropped because an equal one came before.
        short: number of rows dropped because they had fewer than ``at_least`` ids.

    Raises:
        ValueError: fewer than 2 distinct rows remain.

    Examples:
        >>> from lightning_fedleak.evaluation.games import SentencePool
        >>> pool = SentencePool([[5, 6, 7], [5, 6, 7], [8, 9]], tokens=8)
        >>> len(pool), pool.duplicates
        (2, 1)
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]] | Sequence[Tensor],
        tokens: int = 32,
        *,
        at_least: int = 2,
        pad_id: int = 0,
        special_ids: Collection[int] = (),
    ) -> None:
        self.special_ids = frozenset(special_ids)
        distinct: dict[tuple[int, ...], None] = {}
        self.short = self.duplicates = 0
        for row in rows:
            ids = torch.as_tensor(row).reshape(-1)[:tokens].tolist()
            if sum(i not in self.special_ids for i in ids) < at_least:
                self.short += 1
            elif tuple(ids) in distinct:
                self.duplicates += 1
            else:
                distinct[tuple(ids)] = None
        if len(distinct) < 2:
            raise ValueError(f"the text gives {len(distinct)} distinct sentences: give more")
        self.rows = tuple(torch.tensor(ids) for ids in distinct)
        self.tokens = tokens
        self.pad_id = pad_id

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Any,
        tokens: int = 32,
        *,
        at_least: int = 2,
        start_token_id: int | None = None,
    ) -> SentencePool:
        """Return a pool of strings; the tokenizer cuts them, and so keeps its special tokens.

        Args:
            texts: One sentence or document each, of which only a prefix of ``tokens`` ids is used.
            tokenizer: A tokenizer of Hugging Face.
            tokens: as in the class.
            at_least: as in the class.
            start_token_id: The id before every text, for a model that expects a start token that
                its tokenizer does not add.
        """
        prefix = [] if start_token_id is None else [start_token_id]
        ids = tokenizer(list(texts), truncation=True, max_length=tokens - len(prefix))["input_ids"]
        pad = getattr(tokenizer, "pad_token_id", None)
        return cls(
            [prefix + row for row in ids],
            tokens,
            at_least=at_least,
            pad_id=0 if pad is None else int(pad),
            special_ids={*prefix, *getattr(tokenizer, "all_special_ids", ())},
        )

    def __len__(self) -> int:
        return len(self.rows)


def pad(rows: Sequence[Tensor], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return rows as ids and mask, each (n, L), where L is the longest row."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(r) for r in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).to(torch.int64)


@dataclass(frozen=True, repr=False)
class Challenge:
    """One batch of a client, and the targets whose membership a server guesses.

    Attributes:
        data: the client's data set D, rows of ids, all different.
        targets: (G,) rows of ids, one target sentence for each game played on D.
        bits: (G,) bool: whether the target is in D.
        positions: (G,) index of the target token in its sentence.
        places: (G,) index of the target in D, -1 where it is not in D.
    """

    data: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    bits: Tensor
    positions: Tensor
    places: Tensor


def game_challenges(pool: SentencePool, config: GameConfig, spare: int = 0) -> Iterator[Challenge]:
    """Yield the challenges of all games of Fig. 2.

    D is ``batch`` distinct sentences of the pool, the bit is fair, the target is uniform in D
    (b = 1) or among the pool's other sentences (b = 0). With several targets for one D each has
    its own bit, and all are drawn independently.

    With ``relation="add_remove"`` the target is uniform in D, and removed from it where b = 0.

    A target token is a random one of its sentence, but no special token: the states of those hardly
    differ between sentences in early layers.

    Args:
        pool: The sentences to draw from.
        config: The settings of the games, with the only seed that the challenges depend on.
        spare: The number of tokens at the end of a sentence that are no targets: 1 for a next-token
            loss, which does not depend on the hidden state of the last token.

    Raises:
        ValueError: the pool has no more than ``batch`` sentences, or a row without a target.
    """
    batch = config.batch
    generator = torch.Generator().manual_seed(config.seed)
    hint = f"the text gives {len(pool)} distinct sentences"
    check_integer("batch", batch, at_most=len(pool) - 1, hint=hint)
    if any(len(_target_positions(pool, row, spare)) == 0 for row in pool.rows):
        raise ValueError(f"a sentence holds no target: make the pool with at_least={1 + spare}")
    remaining = config.games
    while remaining:
        count = min(remaining, config.targets_per_batch)
        remaining -= count
        order = torch.randperm(len(pool), generator=generator)
        bits = torch.randint(2, (count,), generator=generator).bool()
        inside_places = torch.randint(batch, (count,), generator=generator)
        outside_places = torch.randint(len(pool) - batch, (count,), generator=generator) + batch
        places = torch.where(bits, inside_places, outside_places)
        data = order[:batch]
        if config.relation == "add_remove":
            places = inside_places
            data = data[bits | (torch.arange(batch) != inside_places)]
        targets = tuple(pool.rows[i] for i in order[places].tolist())
        yield Challenge(
            data=tuple(pool.rows[i] for i in data.tolist()),
            targets=targets,
            bits=bits,
            positions=torch.tensor([_position(pool, t, generator, spare) for t in targets]),
            places=torch.where(bits, inside_places, -1),
        )


def _target_positions(pool: SentencePool, row: Tensor, spare: int) -> Tensor:
    """Return (k,) indices of the tokens that may be targets."""
    ordinary = torch.tensor([i not in pool.special_ids for i in row.tolist()])
    return ordinary[: len(row) - spare].nonzero()[:, 0]


def _position(pool: SentencePool, row: Tensor, generator: torch.Generator, spare: int) -> int:
    """Return the index of a random token that may be a target."""
    positions = _target_positions(pool, row, spare)
    return int(positions[torch.randint(len(positions), (1,), generator=generator)])

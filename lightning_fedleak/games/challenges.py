"""Challenges of the membership game: the client's data, the secret bits, the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.games.config import Relation
from lightning_fedleak.games.pool import GameError, SentencePool

AUTHORS_POSITION = 10
"""Index of the token that the authors' code asks for."""


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

    def __repr__(self) -> str:
        return f"Challenge({len(self.data)} sentences, {len(self.targets)} targets)"


def game_challenges(
    pool: SentencePool,
    batch: int,
    games: int,
    position: str | int,
    generator: torch.Generator,
    targets_per_batch: int = 1,
    spare: int = 0,
    relation: Relation = "replace_one",
) -> Iterator[Challenge]:
    """Yield ``games`` challenges of the game of Fig. 2.

    D is ``batch`` distinct sentences of the pool, the bit is fair, the target is uniform in D
    (b = 1) or among the pool's other sentences (b = 0). With several targets for one D each has
    its own bit, and all are drawn independently.

    With ``relation="add_remove"`` the target is uniform in D, and removed from it where b = 0.

    Args:
        pool: the distribution.
        batch: n, sentences in D.
        games: targets in all.
        position: ``"random"`` for a uniformly drawn token of the target, ``"last"``, neither of
            them a special one; or an index, also of a special token.
        generator: on the CPU; the challenges depend on nothing else.
        targets_per_batch: games that share one D.
        spare: tokens at the end of a sentence that are no targets: 1 for a next-token loss, which
            no hidden state of the last token enters.
        relation: as in :class:`~lightning_fedleak.games.GameConfig`.

    Raises:
        GameError: the pool has no more than ``batch`` sentences, or rows too short for
            ``position``.
    """
    if len(pool) <= batch:
        raise GameError(
            f"batch={batch} needs more than {batch} distinct sentences, so that a target outside "
            f"it exists; the text gives {len(pool)}. Give more text or a smaller batch."
        )
    shortest = min(pool.rows, key=len)
    if isinstance(position, int) and len(shortest) <= position + spare:
        last = " (the last one enters no loss)" if spare else ""
        raise GameError(
            f"position={position} asks for token {position} (counted from 0), and the pool's "
            f"shortest sentence has {len(shortest)} tokens{last}: make the pool with "
            f"at_least={position + 1 + spare}"
        )
    if any(len(_target_places(pool, row, spare)) == 0 for row in pool.rows):
        raise GameError(
            "a sentence of the pool holds no token that could be a target (special ones, and the "
            f"last {spare}, are not): make the pool with at_least={1 + spare}"
        )
    remaining = games
    while remaining:
        count = min(remaining, targets_per_batch)
        remaining -= count
        order = torch.randperm(len(pool), generator=generator)
        bits = torch.randint(2, (count,), generator=generator).bool()
        inside_places = torch.randint(batch, (count,), generator=generator)
        outside_places = torch.randint(len(pool) - batch, (count,), generator=generator) + batch
        places = torch.where(bits, inside_places, outside_places)
        data = order[:batch]
        if relation == "add_remove":
            places = inside_places
            data = data[bits | (torch.arange(batch) != inside_places)]
        targets = tuple(pool.rows[i] for i in order[places].tolist())
        yield Challenge(
            data=tuple(pool.rows[i] for i in data.tolist()),
            targets=targets,
            bits=bits,
            positions=torch.tensor(
                [_position(pool, t, position, generator, spare) for t in targets]
            ),
            places=torch.where(bits, inside_places, -1),
        )


def authors_challenges(
    rows: Sequence[Tensor], planted: Tensor, batch: int, games: int, position: int
) -> Iterator[Challenge]:
    """Yield the two worlds of the authors' published code, which has no random bit.

    World 1 is the first ``batch`` sentences of the corpus with ``planted`` in place of the first,
    world 0 the same sentences as they are. The target is always ``planted``, the token always the
    one at ``position``. Their code repeats this on the same sentences; this function's run r takes
    the r-th ``batch`` sentences of the corpus, so run 0 is theirs.

    Args:
        rows: the corpus in order.
        planted: ids of the planted sentence.
        batch: sentences in D.
        games: worlds in all, an even number; world 1 comes first.
        position: index of the target token in ``planted``.

    Raises:
        GameError: an odd number of games, too little text, or a planted sentence that is too short
            or occurs in the corpus.
    """
    if games % 2:
        raise GameError(f"the authors' protocol has two worlds: games must be even, got {games}")
    if len(rows) < batch * (games // 2):
        raise GameError(
            f"{games // 2} runs of {batch} sentences need {batch * games // 2} sentences; the text "
            f"gives {len(rows)}. Play fewer games (games=2 is the authors' own single run)."
        )
    if len(planted) <= position:
        raise GameError(
            f"the planted sentence has {len(planted)} tokens, so it has no token {position} "
            "(counted from 0)"
        )
    if any(torch.equal(row, planted) for row in rows):
        raise GameError("the planted sentence occurs in the corpus: plant another one")
    for run in range(games // 2):
        data = tuple(rows[run * batch : (run + 1) * batch])
        for bit in (True, False):
            yield Challenge(
                data=(planted, *data[1:]) if bit else data,
                targets=(planted,),
                bits=torch.tensor([bit]),
                positions=torch.tensor([position]),
                places=torch.tensor([0 if bit else -1]),
            )


def _target_places(pool: SentencePool, row: Tensor, spare: int) -> Tensor:
    """Return (k,) places of the tokens that may be targets."""
    words = pool.words(row)
    return words[words < len(row) - spare]


def _position(
    pool: SentencePool, row: Tensor, position: str | int, generator: torch.Generator, spare: int
) -> int:
    if isinstance(position, int):
        return position
    places = _target_places(pool, row, spare)
    if position == "last":
        return int(places[-1])
    return int(places[torch.randint(len(places), (1,), generator=generator)])

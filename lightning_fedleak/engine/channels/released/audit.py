"""Compare the members of a pool with its non-members, by what models answer to its texts.

The looks of a run and ``fedleak memorization`` measure by this module. The *pool* holds texts that
were trained on, the members, and texts that were not. The *base* is the model before training, and
a *reference* a model that was trained like it on other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from lightning_fedleak.attacks import memorization
from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.engine.reference import Strength, beside, measure_strength
from lightning_fedleak.evaluation.canaries.repeats import Part, PoolRows
from lightning_fedleak.evaluation.metrics.draws import refute_draw
from lightning_fedleak.evaluation.metrics.record_list import RecordList, list_records
from lightning_fedleak.evaluation.metrics.released import (
    blind_aucs,
    check_unseen,
    distribution_shift,
    extraction_values,
    membership_values,
)
from lightning_fedleak.model import taps
from lightning_fedleak.model.snapshots import Observation, References, ReleasedModel, TokenSnapshot


def all_attacks() -> tuple[memorization.MemorizationAttack, ...]:
    """Return every attack on long texts of a finished model: first the headline."""
    m = memorization
    scores = m.Combined(), m.LossRatio(), m.ErrorZone(), m.Windows(), m.MinK(), m.Zlib(), m.Loss()
    return (*scores, m.Extraction())  # the last needs a model that predicts the next token


@dataclass(frozen=True)
class Audit:
    """The answers of the base, and of a reference if there is one, to the texts of a pool.

    Attributes:
        pool: The pool of N texts.
        base: The base's answers to the texts.
        decode: A function from token ids to their text, for zlib; None: the ids are compressed.
        references: The references' answers; None without a reference.
        reference_rows: The fewest rows that a reference was trained on; None if unknown.
        queries: The texts that the models answered; empty: those of the pool.
        rewards: (2, N) the mean rewards of each prompt; None if unknown.
        halves: Whether all references were trained as the model was, each on a random half of the
            pool. A low score beside them counts as it is: another draw would be no stronger.
    """

    pool: Pool
    base: TokenSnapshot
    decode: Callable[[list[int]], str] | None = None
    references: References | None = None
    reference_rows: int | None = None
    queries: Sequence[taps.Text] = ()
    rewards: Tensor | None = None
    halves: bool = False

    def part(
        self,
        part: Part,
        now: TokenSnapshot | None = None,
        chosen: tuple[Tensor, Tensor] | None = None,
        *,
        look: int = 1,
        alpha: float = 0.05,
    ) -> Comparison:
        """Return the texts of a part, with the answers of all models at their label tokens.

        Args:
            part: The part of the pool.
            now: The trained model's answers to the pool; None: the base's, before the training.
            chosen: The n texts, as indices, and (n,) bool, which of them are members; None: all.
            look: The number of the look at these texts, counted from 1.
            alpha: The probability of error over all looks together.

        Raises:
            UnplayableGame: All are compared, and fewer than 10 are on a side.
        """
        index, members = self.pool.everyone(part) if chosen is None else chosen
        texts, queries = (
            [texts[row].prompt if part == "prompts" else texts[row] for row in index.tolist()]
            for texts in (self.pool.texts, self.queries or self.pool.texts)
        )
        columns = self.base.labels.shape[1]
        places = taps.label_places(queries, columns)
        released = ReleasedModel(
            (self.base if now is None else now).rows(index).within(places),
            self.base.rows(index).within(places),
            taps.compressed_bytes(queries, self.decode),
            taps.answer_groups(queries),
            self.references and self.references.rows(index).within(places),
            taps.rejected_places(texts, columns) if part == "pairs" else None,
            None if self.rewards is None else self.rewards[:, index],
        )
        return Comparison(self, part, texts, index, members, released, look, alpha)


@dataclass(frozen=True)
class Comparison:
    """Members and non-members of one part of a pool, and the models' answers about them.

    Attributes:
        audit: The answers to the whole pool.
        part: The part of the pool.
        texts: N texts, or their prompts.
        index: (N,) the indices of the texts in the pool.
        members: (N,) bool, whether each text was trained on.
        released: The answers at the label tokens of the texts.
        look: The number of the look at these texts, counted from 1.
        alpha: The probability of error over all looks together.
        values: The results so far, by attack.
    """

    audit: Audit
    part: Part
    texts: Sequence[taps.Text]
    index: Tensor
    members: Tensor
    released: ReleasedModel
    look: int
    alpha: float
    values: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def times(self) -> Tensor:
        """Return (N,) int64, the number of rows of the training data that hold each text."""
        return self.audit.pool.times[self.index]

    @property
    def alone(self) -> Tensor:
        """Return (N,) bool, the texts in one row: only those are tested for membership."""
        return self.times == 1

    @cached_property
    def game(self) -> ReleasedModel:
        """Return the answers about the texts that are tested for membership."""
        return self.released.rows(self.alone)

    @property
    def sides(self) -> Tensor:
        """Return bool, which of the texts that are tested for membership are members."""
        return self.members[self.alone]

    @property
    def once(self) -> list[taps.Text]:
        """Return the texts that are tested for membership."""
        return [text for text, alone in zip(self.texts, self.alone.tolist(), strict=True) if alone]

    @cached_property
    def blind(self) -> dict[str, Tensor]:
        """Return the scores that do not use the trained model, by name."""
        return memorization.blind_scores(
            self.game.base, self.game.compressed, self.once, self.sides
        )

    def why_unknown(self, *, drawn: bool) -> str | None:
        """Return why members and non-members may not be exchangeable, or None.

        Args:
            drawn: Whether they are said to be drawn at random, which is believed unless
                :func:`~lightning_fedleak.evaluation.metrics.draws.refute_draw` refutes it.
        """
        if drawn:
            owners = self.audit.pool.owners
            owners = None if owners is None else owners[self.index[self.alone]]
            texts = self.game.base, self.game.compressed, self.once
            return refute_draw(*texts, self.sides, owners)
        return distribution_shift(blind_aucs(self.blind, self.sides))

    def check_reference(self) -> None:
        """Check that no reference has seen one side more than the other.

        Raises:
            ValueError: Answers about texts that it is said not to have seen, or the numbers of
                references that have seen a text, distinguish members from non-members.
        """
        if (game := self.game).references is not None and not self.audit.halves:
            check_unseen(game.references, game.base, game.compressed, self.sides)

    @cached_property
    def strength(self) -> Strength | None:
        """Return how far the reference was trained; None without one."""
        if self.game.references is None:
            return None
        rows = self.audit.reference_rows, self.audit.pool.length
        strength = measure_strength(self.game, self.sides, *rows)
        return strength._replace(weak="") if self.audit.halves else strength

    def measure(
        self, attack: memorization.MemorizationAttack, joint: float | None = None
    ) -> tuple[dict[str, float], Tensor | None]:
        """Run an attack, and return its values by name, and the scores of texts in one row.

        Extraction is tested on all texts, and has no scores.

        Args:
            attack: The attack.
            joint: The probability of error of a further interval, ``auc_joint``; None for none.
        """
        look, alpha = self.look, self.alpha
        if isinstance(attack, memorization.Extraction):
            guess: Any = attack.run(Observation(released=self.released))
            sides = self.members, self.times
            return extraction_values(guess, attack, *sides, look=look, alpha=alpha), None
        guess = attack.run(Observation(released=self.game))
        is_coarse = self.part == "short" or isinstance(attack, memorization.RewardGain)
        rate = partial(membership_values, guess.scores, self.sides, look=look, exact=is_coarse)
        values = rate(alpha=alpha)
        if joint is not None:
            further, ends = rate(alpha=joint), ("low", "high", "provable")
            values |= {f"auc_joint_{end}": further[f"auc_{end}"] for end in ends}
        if type(attack) is memorization.CombinedReference and self.strength is not None:
            values = beside(self.strength, values)
        return values, guess.scores

    def measure_all(self, attacks: Sequence[memorization.MemorizationAttack] = ()) -> None:
        """Keep the values of some attacks in ``values``.

        By default these are the attacks for the part: for long texts :func:`all_attacks`, without
        extraction for models whose predictions stand at their own tokens, and but for prompts the
        one beside references if there are any.
        """
        if not attacks:
            is_aligned = self.texts[0].is_aligned
            attacks = {
                "long": all_attacks()[: -1 if is_aligned else None],
                "short": (memorization.ShortAnswers(),),
            }.get(self.part, (memorization.PromptRatio(),))
            attacks = (*self.beside_references(), *attacks)
        for attack in attacks:
            self.values[attack.name] = self.measure(attack)[0]

    def beside_references(self) -> Sequence[memorization.CombinedReference]:
        """Return the attack beside references, named by the part; none without references."""
        if self.audit.references is None or self.part == "prompts":
            return ()
        name = memorization.CombinedReference.default_name + "_short" * (self.part == "short")
        return (memorization.CombinedReference(name),)

    def list_records(self, *, scores: Tensor | None = None, **facts: Any) -> RecordList:
        """Return the list of the members, by how much the model leaks of them.

        Args:
            scores: (N,) scores beside references; None: the default score of the part.
            facts: As :meth:`RecordList.of` takes them.
        """
        pool, compared = self.audit.pool, {*self.index.tolist()}
        is_short = self.part == "short"  # such a list does not hold longer rows
        assert pool.rows is not None
        excluded = {  # by row number, why a row of the training data is not compared
            number: "short" if bool(pool.is_short[row]) else "unknown"
            for row in pool.trains.nonzero()[:, 0].tolist()
            if row not in compared and (bool(pool.is_short[row]) or not is_short)
            for number in pool.rows.copies[row]
        }
        copies = [pool.rows.copies[row] for row in self.index.tolist()]
        apart = {**pool.rows.apart, **excluded}
        rows = PoolRows(copies, self.times, apart, pool.rows.short_copies)
        facts |= {"short": is_short, "scores": scores}
        return list_records(self.released, self.members, rows, **facts)

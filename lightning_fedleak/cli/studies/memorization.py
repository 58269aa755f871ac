"""Compare members with non-members by a trained model and its base, after the training.

Members are texts that were trained on, and non-members are not. The *base* is the model before
training. A *pool* holds the texts of one kind that are compared: long or short texts, or prompts. A
*reference* model was trained like the trained model, on other texts.

:class:`ReleasedPool` selects the texts that can be compared. Its :meth:`~ReleasedPool.compare` runs
the attacks on the models' outputs, and returns a :class:`Comparison`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import memorization
from lightning_fedleak.evaluation.canaries.repeats import MIN_LABELS, Part, PoolRows, scored_texts
from lightning_fedleak.evaluation.metrics import Rate, released
from lightning_fedleak.evaluation.metrics.draws import refute_draw
from lightning_fedleak.evaluation.metrics.record_list import RecordList, list_records
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text, answer_groups, compressed_bytes, pool_digest

MIN_TEXTS = 10  # members, and non-members; two for each fold of the blind word scores


def all_attacks() -> tuple[memorization.MemorizationAttack, ...]:
    """Return every attack on a released model: first the headline, last the extraction."""
    return (
        memorization.Combined(),
        memorization.LossRatio(),
        memorization.ErrorZone(),
        memorization.Windows(),
        memorization.MinK(),
        memorization.Zlib(),
        memorization.Loss(),
        memorization.Extraction(),
    )


@dataclass(frozen=True)
class Comparison:
    """How well attacks distinguish the members of a pool from its non-members.

    Attributes:
        values: The result by attack, from
            :func:`~lightning_fedleak.evaluation.metrics.released.membership_values` or
            :func:`~lightning_fedleak.evaluation.metrics.released.extraction_values`.
        blind: The AUC of each score that does not use the trained model.
        n_members: The number of members that were scored.
        n_others: The number of non-members that were scored.
        visible: The smallest TPR at 1% FPR that so many texts show with probability 0.8.
        needed: The number of non-members that a TPR needs, by its FPR.
    """

    values: Mapping[str, Mapping[str, float]]
    blind: Mapping[str, Rate]
    n_members: int
    n_others: int
    visible: float
    needed: Mapping[float, int]

    @property
    def distribution_shift(self) -> str | None:
        """Why members and non-members may be from different distributions, or None."""
        return released.distribution_shift(self.blind)


class ReleasedPool:
    """Members and non-members that a model and its base are queried with.

    Texts with fewer than 8 label tokens, and texts that share 13 label tokens in a row with another
    text of the pool, are excluded on both sides. Members that are copies of each other count as one
    text, which is tested for extraction but not for membership.

    Args:
        members: The texts that were trained on.
        others: The texts that were not trained on.
        decode: A function from token ids to their text, for zlib.
        numbers: The numbers of the members' rows, for a list of records; None: 0, 1, and so on.
        part: ``"long"``: a pool as above. ``"short"``: the pool holds the texts with 1 to 7 label
            tokens, for :class:`ShortAnswers`. ``"prompts"``: it holds the prompts of the texts,
            whose tokens are labels here, for :class:`PromptRatio`.

    Attributes:
        texts: The N texts that are scored.
        members: (N,) bool, whether each text was trained on.
        times: (N,) int64, number of members that are copies of each text; 1 for unique texts.
        short: The number of excluded short texts.
        repeated: The number of texts of which another one repeats the whole or a part.
        digest: A digest of the pool, as in the monitor's records. Only results of the same pool can
            be compared.
        rows: The rows of the training data that the texts stand for.

    Raises:
        ValueError: Fewer than 10 texts are left on either side.
    """

    def __init__(
        self,
        members: Sequence[Text],
        others: Sequence[Text],
        decode: Callable[[list[int]], str] | None = None,
        numbers: Sequence[int] | None = None,
        *,
        part: Part = "long",
    ) -> None:
        everyone = [*members, *others]
        sides = [row < len(members) for row in range(len(everyone))]
        scored = scored_texts(everyone, sides)
        self.short, self.repeated, self.part = scored.short, scored.repeated, part
        self.is_short = short = part == "short"
        pool = scored.short_rows if short else scored.rows
        if part == "prompts":
            unique = {*scored.short_rows, *scored.rows[: int((scored.times == 1).sum())]}
            pool = [row for row in scored.prompt_rows if row in unique]
        self.texts = [everyone[row] for row in pool]
        self.members = torch.tensor([sides[row] for row in pool], dtype=torch.bool)
        indices = [*(range(len(members)) if numbers is None else numbers), *[-1] * len(others)]
        rows = PoolRows.of(everyone, scored, indices, short=short)
        places = slice(len(scored.rows) if short else 0, None)
        self.rows = replace(rows, copies=rows.copies[places], times=rows.times[places])
        self.times = self.rows.times
        self.digest = pool_digest(self.texts, self.members)
        if part == "prompts":
            self.texts = [text.prompt for text in self.texts]
            self.times = torch.ones(len(pool), dtype=torch.long)
        n, n_others = int((self.members & self.alone).sum()), int((~self.members).sum())
        if min(n, n_others) < MIN_TEXTS:
            raise ValueError(
                f"{n} members and {n_others} others are left to compare (part: {part}), without "
                f"{self.short} of fewer than {MIN_LABELS} label tokens and {self.repeated} "
                f"repeated texts: at least {MIN_TEXTS} on each side are needed"
            )
        self.compressed = compressed_bytes(self.texts, decode)

    @property
    def alone(self) -> Tensor:
        """Return (N,) bool, whether a text is unique; only such texts are tested for membership."""
        return self.times == 1

    def compare(
        self,
        base: TokenSnapshot,
        now: TokenSnapshot,
        attacks: Sequence[memorization.MemorizationAttack] = (),
        *,
        reference: TokenSnapshot | None = None,
        look: int = 1,
        alpha: float = 0.05,
    ) -> Comparison:
        """Run the attacks, and return how well they distinguish members from non-members.

        Args:
            base: The outputs of the base on the texts.
            now: The outputs of the trained model.
            attacks: The attacks to run. By default :func:`all_attacks` without extraction for
                models whose predictions stand at their own tokens, or the attack of the part.
            reference: The outputs of a reference model, for an additional score; None: no score.
            look: The number of the look at these texts, counted from 1.
            alpha: The probability of error over all looks together.
        """
        alone = self.alone
        answers = answer_groups(self.texts)
        model = ReleasedModel(now, base, self.compressed, answers, reference)
        members = self.members[alone]
        values: dict[str, Mapping[str, float]] = {}
        # Extraction, the last attack, needs a model that predicts the next token.
        default = {
            "long": (
                *[memorization.CombinedReference()] * (reference is not None),
                *all_attacks()[: -1 if self.texts[0].is_aligned else None],
            ),
            "short": (memorization.ShortAnswers(),),
            "prompts": (memorization.PromptRatio(),),
        }[self.part]
        for attack in attacks or default:
            extracts = isinstance(attack, memorization.Extraction)
            guess = attack.run(Observation(released=model if extracts else model.rows(alone)))
            if isinstance(attack, memorization.Extraction) and isinstance(
                guess, memorization.ExtractionGuess
            ):
                values[attack.name] = released.extraction_values(
                    guess, attack, self.members, self.times, look=look, alpha=alpha
                )
            elif isinstance(guess, memorization.MemorizationGuess):
                values[attack.name] = released.membership_values(
                    guess.scores, members, look=look, alpha=alpha, exact=self.is_short
                )
        n_members, n_others = int(members.sum()), int((~members).sum())
        texts = [text for text, once in zip(self.texts, alone.tolist(), strict=True) if once]
        blind = memorization.blind_scores(base.rows(alone), self.compressed[alone], texts, members)
        return Comparison(
            values,
            released.blind_aucs(blind, members),
            n_members,
            n_others,
            released.visible_tpr(n_members, n_others, look=look, alpha=alpha),
            {fpr: released.min_non_members(look, alpha, fpr) for fpr in released.FPRS},
        )

    def why_unknown(self, base: TokenSnapshot, result: Comparison, *, drawn: bool) -> str | None:
        """Return why members and non-members may not be exchangeable, or None.

        Args:
            base: The outputs of the base on the texts.
            result: The comparison of the pool.
            drawn: Whether the user says that they were drawn at random, which is believed unless
                :func:`~lightning_fedleak.evaluation.metrics.draws.refute_draw` refutes it.
        """
        if not drawn:
            return result.distribution_shift
        rows = self.alone
        texts = [text for text, once in zip(self.texts, rows.tolist(), strict=True) if once]
        return refute_draw(base.rows(rows), self.compressed[rows], texts, self.members[rows])

    def list_records(
        self,
        base: TokenSnapshot,
        now: TokenSnapshot,
        alpha: float = 0.05,
        *,
        scores: Tensor | None = None,
        references: int = 0,
    ) -> RecordList:
        """Return the list of the members, by how much the model leaks of them.

        Args:
            base: The outputs of the base on the texts.
            now: The outputs of the trained model.
            alpha: The probability that the lower bound on the number of leaked rows is too high.
            scores: (N,) gains beyond reference models; None: the default score of the pool.
            references: The number of these reference models.
        """
        released = ReleasedModel(now, base, self.compressed, answer_groups(self.texts))
        # Nothing says whether the model was trained under differential privacy.
        facts: dict[str, Any] = {"pool": self.digest, "account": None, "alpha": alpha}
        facts |= {"references": references} if references else {}
        return list_records(
            released, self.members, self.rows, short=self.is_short, scores=scores, **facts
        )


def used_up_mark(rows: str | Path) -> Path:
    """Return the path of the file that marks the held-out rows beside ``rows`` as used up.

    It exists if a list of leaked rows was used to drop rows.
    """
    return Path(f"{rows}.used_up.json")

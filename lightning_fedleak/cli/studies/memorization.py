"""What a trained model gives away of its training texts, beside its base: after the fact."""

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
from lightning_fedleak.evaluation.metrics.record_list import RecordList, list_records
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text, answer_groups, compressed_bytes, pool_digest

MIN_TEXTS = 10  # texts on either side, two for each fold of the blind word scores


def all_attacks() -> tuple[memorization.MemorizationAttack, ...]:
    """Return every attack on a released model, the headline first; the last asks what it writes."""
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
        """Why members and non-members may be from different distributions; None if they are not."""
        return released.distribution_shift(self.blind)


class ReleasedPool:
    """Members and others that a model and its base are asked about.

    Texts with fewer than 8 label tokens, and texts that share 13 label tokens in a row with another
    text of the pool, are left out on both sides. Members that are copies of each other are one
    text, which is asked whether it can be extracted, and not told from others.

    Args:
        members: texts that were trained on.
        others: texts that were not.
        decode: returns the words of token ids, for zlib.
        numbers: The numbers of the members' rows, for a list of records; None counts them.
        part: ``"short"``: the pool is of the texts with 1 to 7 label tokens, which
            :class:`ShortAnswers` reads; ``"prompts"``: of the tokens that the loss is not computed
            on, as labels, which :class:`PromptRatio` reads.

    Attributes:
        texts: those that are scored.
        members: (N,) bool.
        times: (N,) int64, members that are copies of each text; 1 for all that occur once.
        short: texts that were left out because they are short.
        repeated: texts of which another one repeats the whole or a part.
        digest: names the pool, as the monitor's records do; results compare on the same pool only.
        rows: which rows the texts are.

    Raises:
        ValueError: fewer than 10 texts are left on either side.
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
        chosen = scored.short_rows if short else scored.rows
        if part == "prompts":
            alone = {*scored.short_rows, *scored.rows[: int((scored.times == 1).sum())]}
            chosen = [row for row in scored.prompt_rows if row in alone]
        self.texts = [everyone[row] for row in chosen]
        self.members = torch.tensor([sides[row] for row in chosen], dtype=torch.bool)
        counted = [*(range(len(members)) if numbers is None else numbers), *[-1] * len(others)]
        rows = PoolRows.of(everyone, scored, counted, short=short)
        places = slice(len(scored.rows) if short else 0, None)
        self.rows = replace(rows, copies=rows.copies[places], times=rows.times[places])
        self.times = self.rows.times
        self.digest = pool_digest(self.texts, self.members)
        if part == "prompts":
            self.texts = [text.prompt for text in self.texts]
            self.times = torch.ones(len(chosen), dtype=torch.long)
        n, n_others = int((self.members & self.alone).sum()), int((~self.members).sum())
        if min(n, n_others) < MIN_TEXTS:
            excluded = {
                "short": "only texts that have 1 to 7 label tokens and occur once count",
                "prompts": f"only prompts of {MIN_LABELS} tokens that no other repeats count",
                "long": f"after {self.short} texts of fewer than {MIN_LABELS} tokens and "
                f"{self.repeated} that repeat parts of others",
            }[part]
            raise ValueError(
                f"{n} members and {n_others} others are left to compare, {excluded}: "
                f"at least {MIN_TEXTS} on each side are needed"
            )
        self.compressed = compressed_bytes(self.texts, decode)

    @property
    def alone(self) -> Tensor:
        """Return (N,) bool, the texts that occur once; they alone are told from others."""
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
        """Return what the scores of both sides show.

        Args:
            base: what the base said of the texts.
            now: what the trained model says of them.
            attacks: those that are played; none plays :func:`all_attacks`, or those of the part.
            reference: what a reference model said of the texts, which is compared with as well.
            look: The number of the look at these texts, counted from 1.
            alpha: The probability of error over all looks together.
        """
        alone = self.alone
        answers = answer_groups(self.texts)
        model = ReleasedModel(now, base, self.compressed, answers, reference)
        members = self.members[alone]
        values: dict[str, Mapping[str, float]] = {}
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

    def list_records(
        self,
        base: TokenSnapshot,
        now: TokenSnapshot,
        alpha: float = 0.05,
        *,
        scores: Tensor | None = None,
        references: int = 0,
    ) -> RecordList:
        """Return the members by what the model gives away of them.

        Args:
            base: what the base said of the texts.
            now: what the trained model says of them.
            alpha: probability that the number of rows that are given away at least is too high.
            scores: (N,) to list by, of the references; None: the pool's own.
            references: how many models without each record those are beyond.
        """
        released = ReleasedModel(now, base, self.compressed, answer_groups(self.texts))
        # Nothing says whether the model was trained under differential privacy.
        facts: dict[str, Any] = {"pool": self.digest, "account": None, "alpha": alpha}
        facts |= {"references": references} if references else {}
        return list_records(
            released, self.members, self.rows, short=self.is_short, scores=scores, **facts
        )


def used_up_mark(rows: str | Path) -> Path:
    """Return the file beside rows that says that others are dropped from them by a list."""
    return Path(f"{rows}.used_up.json")

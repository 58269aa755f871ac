"""Memorization: what the trained weights themselves give away, asked about texts.

The model and its base (the model before the first step) are asked about the same pool of texts at
shares of the first epoch and at every epoch's last step. Nothing of a step is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.attacks.memorization import Extraction, MemorizationAttack, blind_scores
from lightning_fedleak.engine.channels.account import BOUND, AccountGame, too_few_non_members
from lightning_fedleak.engine.channels.exchange import over_processes
from lightning_fedleak.engine.channels.pool import NO_CONTROLS, Pool, collect, forwards_of
from lightning_fedleak.engine.channels.records import BETWEEN, FILE, RECORDS, write_list
from lightning_fedleak.engine.channels.training_rows import NoNonMembers
from lightning_fedleak.engine.channels.weights import WeightChannel
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Series, Waiting
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.evaluation.metrics.found_entities import FoundEntities, entity_names
from lightning_fedleak.evaluation.metrics.released import (
    TIERS,
    blind_aucs,
    extraction_values,
    highest_auc,
    membership_values,
    other_law,
    spent_at,
)
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, Stage, TokenSnapshot
from lightning_fedleak.model.taps import (
    MASKS,
    Text,
    answer_groups,
    compressed_bytes,
    label_places,
    token_log_probs,
)
from lightning_fedleak.private_files import hash_tensors, load_private, save_private
from lightning_fedleak.report.records import MEMORIZATION, PoolLine

BLIND = "blind/auc"
"""The largest AUC of scores that know nothing of the training; logged as ``leakage/blind/auc``."""

TIER_NAMES = tuple(f"{name}_x{least}" for name in ("extracted", "greedy") for least in TIERS)
"""Excesses by how often a text repeats; those of no text have no value."""


_Answer = dict[str, float] | str | Waiting
"""An attack's values by name, or why there are none, or none yet."""


class MemorizationChannel(WeightChannel):
    """Attacks on the trained weights, beside the base that the adversary has too."""

    reads: ClassVar[Any] = MemorizationAttack
    leak = MEMORIZATION
    metrics: ClassVar[tuple[str, ...]] = (
        *("auc", "shown", "extracted", "greedy", *TIER_NAMES, "at_least"),
    )
    ranges: ClassVar[Any] = {
        "auc": (0.0, 1.0, 0.5),
        "shown": (0.0, 1.0, 0.0),
        **dict.fromkeys(("extracted", "greedy", *TIER_NAMES), (-1.0, 1.0, 0.0)),
        "at_least": (0.0, math.inf, 0.0),
    }
    extras: ClassVar[tuple[str, ...]] = (
        *("p_value", "shown_p_value", "extracted_others", "extracted_base"),
        *("auc_joint_low", "auc_joint_high", "auc_joint_provable"),
        *("auc_provable", "extracted_provable", "greedy_provable"),
        *(f"{tier}_provable" for tier in TIER_NAMES),
        *("listed", "smallest_list", "repeated", "at_least_provable"),
        *("members", "others", "alpha", "visible", "refuted"),
        *(f"{BOUND}auc", f"{BOUND}tpr_at_fpr_0.01", BLIND),
    )
    width = 3 * len(metrics) + len(extras)
    file = "memorization_base.safetensors"  # for resuming, of mode 0600
    finds_entities: ClassVar[bool] = True

    def __init__(self, attacks: Sequence[MemorizationAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        self._found: FoundEntities | None = None
        self._account: AccountGame | None = None  # None: the texts do not play its game
        self._account_words = ""
        self._base: TokenSnapshot | None = None
        self._saved: Mapping[str, Any] = {}
        self._due, self._lists = 0, 0
        self._ended = False
        self._void = ""

    # ---- names ------------------------------------------------------------------------------

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of an attack on the released model."""
        if Stage.RELEASED not in stages:
            return []
        series = [Series.at(Stage.RELEASED, attack.name)]
        lists = [one for one in self.listed_attacks if one.part != "prompts"]
        names = [RECORDS] * self.settings.memorization.records + entity_names(self.entity_kinds)
        return series + [replace(series[0], name=name) for name in names if attack in lists[:1]]

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Forget the texts of an earlier fit."""
        super().open(run)
        self._base, self._void = None, ""
        self._due = 0

    def _drawn(self) -> Pool:
        """Return the texts that the model is asked about; raise NoNonMembers for none."""
        predicts = self.run.anatomy.kind == "causal"
        self._found = FoundEntities(self.finder, predicts) if self.finder is not None else None
        pool = collect(
            self.run.training_loader,
            self.settings.memorization,
            self._read,
            resumed=self.run.step > 0 and not self._saved,
            short=any(attack.part != "long" for attack in self.listed_attacks),
            entities=self._found,
            forwards=1 if self._mask is None else MASKS,
            show=self.run.shows_progress,
        )
        account = AccountGame(self.run, pool.no_game)
        self._account = account if account.why_not is None else None
        self._account_words = account.describe()
        return pool

    def describe(self) -> str:
        """Return in words who is compared, for the line-up."""
        if self._pool is None:
            return ""
        end = f". {NO_CONTROLS}" * (self._pool.way == "not yet seen" and self.run.epochs != 1)
        cost = f"{self._pool.cost}{end}. Reading the data took {self._reading_seconds:.1f} s"
        if n := int(self._pool.has_prompt.sum()):
            by = [attack.name for attack in self.attacks if attack.part == "prompts"]
            mend = ": PromptRatio() does" * (self._pool.way != "given")
            who = (by or [f"no attack{mend}"])[0]
            cost += f". The prompts of {n}, which have no loss, are asked about by {who}"
        return f"{cost}{self._account_words}"

    # ---- a step -----------------------------------------------------------------------------

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known: few non-members, or none after the first epoch."""
        pool = self._pool
        if pool is None or self._refusal:
            return None
        if pool.way == "not yet seen" and (self.run.epochs is None or self.run.epochs > 1):
            return NO_CONTROLS
        shares = self.settings.memorization.looks
        counts = [int((~pool.trains & pool.alone).sum())] * self._planned_looks
        if pool.way == "not yet seen":
            alone = int(pool.alone.sum())
            counts = [round((1 - share) * alone) for share in shares]
        alpha = self.settings.memorization.alpha
        return too_few_non_members(counts, alpha) if metric == "shown" else None

    @property
    def _planned_looks(self) -> int:
        """Return how many looks the run is to have, or its first epoch where nobody knows."""
        first_epoch = forwards_of(self.settings.memorization, last_step=True) - 1
        return first_epoch + max(0, (self.run.epochs or 1) - 1)

    def is_due(self, epoch: int, share: float) -> bool:
        """Return whether the weights are looked at after this share of an epoch.

        Args:
            epoch: counted from 0.
            share: of the epoch's batches that are done, up to 1.
        """
        if self._pool is None or self._refusal:
            return False
        shares = self.settings.memorization.looks
        passed = sum(share >= s - 1e-9 for s in shares) if epoch == 0 else 0
        if share >= 1:
            self._due = 0
            return True
        due, self._due = passed > self._due, max(passed, self._due)
        return due

    def ask_base(self) -> None:
        """Ask the base model about all texts, before the first step; or read what it said."""
        pool = self._pool
        if pool is None or self._refusal:
            return
        if self.run.on_any_process(bool(self._saved)):
            self._restore(pool)
            if self.run.on_any_process(self._base is None):  # a file that one of them does not see
                self._base = None
        elif self.run.step == 0:  # later weights are no base
            self._base = self._ask(pool)
        if self._base is not None and pool.way == "given":
            alone = (pool.times == 1).nonzero()[:, 0]
            texts, trains = [pool.texts[row] for row in alone.tolist()], pool.trains[alone]
            answers = self._answers(self._base, alone, texts)
            scores = blind_scores(answers, compressed_bytes(texts, self._decode), texts, trains)
            if (finding := other_law(blind_aucs(scores, trains))) is not None:
                self._void = (
                    f"the texts of others= are {finding}. Use leave_out, or more texts of the same "
                    "kind"
                )

    def _ask(self, pool: Pool) -> TokenSnapshot:
        """Return what the model says of the pool; each process asks about its part.

        Raises:
            UnusableObservation: it cannot be asked, on this process or on another one.
        """
        reads_prompts = any(attack.part == "prompts" for attack in self.attacks)
        reads_prompts |= self._found is not None and self._found.are_predicted
        columns = max(1, max(len(text.labels) for text in pool.texts) - 1)

        def ask(rows: list[int]) -> list[Tensor]:
            texts = [pool.texts[row] for row in rows]
            if reads_prompts:  # one forward has all
                texts = [text.whole for text in texts]
            part = token_log_probs(self.run.anatomy, texts, self._mask and self._mask[0])
            return [nn.functional.pad(one, (0, columns - one.shape[1])) for one in part]

        return TokenSnapshot(*over_processes(self.run, len(pool.texts), ask))

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.settings.tokenizer or next(
            (t for t in self.run.tokenizers if hasattr(t, "decode")), None
        )
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    # ---- a look -----------------------------------------------------------------------------

    def ask_weights(self, look: Look, epoch: int, *, lists: bool) -> None:
        """Let every attack guess from what the model says now.

        Args:
            look: where the answers go.
            epoch: counted from 0.
            lists: an epoch is over, or the training, so that rows may be listed.
        """
        every = self._played
        pool = self._pool
        if pool is None or self._base is None:
            why = "what the base said is not known: the run was resumed without its record"
            look.answers |= dict.fromkeys(every, f"{why} ({self.folder / self.file})")
            return
        passed, unread = self._count_seen(pool)
        self._looks += 1
        answers: TokenSnapshot | None = None
        parts = {attack.name: attack.part for attack in self.attacks}
        for texts_part in dict.fromkeys(parts.values()):
            part = [one for one in every if parts[one.attack] == texts_part]
            try:
                if unread and pool.way == "not yet seen":
                    raise NoNonMembers(
                        f"{unread} batches could not be read, and may have held texts that were to "
                        "be non-members: add leave_out"
                    )
                if self._void:
                    raise NoNonMembers(self._void)
                everyone = self._account is not None
                rows, members = pool.compared(epoch, passed, everyone=everyone, part=texts_part)
                answers = self._ask(pool) if answers is None else answers
            except (NoNonMembers, UnusableObservation) as error:
                look.answers |= dict.fromkeys(part, str(error))
                continue
            attacks = [a for a in self.attacks if parts[a.name] == texts_part]
            values: dict[str, _Answer] = {}
            values |= self._read_texts(pool, answers, rows, members, attacks)
            self._compared |= dict.fromkeys(part, pool.digest(rows, members))
            if any(series.name == RECORDS for series in part):
                self.owes_list, self._lists = not lists, self._lists + lists
                values[RECORDS] = BETWEEN
                if lists:
                    texts = pool, self._released(pool, answers, rows), rows, members
                    shared = self._lists, self._share(epoch), self.settings.memorization.alpha
                    values[RECORDS] = write_list(self.run, self.folder / FILE, *texts, *shared)
            if self._found is not None and any(one.name.startswith("entity/") for one in part):
                errors = self._looks, self.settings.memorization.alpha
                values |= self._found.compare(answers, self._base, rows, members, *errors)
            look.answers |= {series: values[series.name] for series in part}

    @staticmethod
    def _answers(answers: TokenSnapshot, rows: Tensor, texts: Sequence[Text]) -> TokenSnapshot:
        """Return what a model said of the labels of some texts, of all of which it was asked."""
        return answers.rows(rows).within(label_places(texts, answers.labels.shape[1]))

    def _released(
        self, pool: Pool, answers: TokenSnapshot, rows: Tensor, *, prompts: bool = False
    ) -> ReleasedModel:
        """Return what the model and its base said of the labels of some texts, or of prompts."""
        assert self._base is not None
        texts = [pool.texts[row].prompt if prompts else pool.texts[row] for row in rows.tolist()]
        now, base = (self._answers(one, rows, texts) for one in (answers, self._base))
        return ReleasedModel(now, base, compressed_bytes(texts, self._decode), answer_groups(texts))

    def _share(self, epoch: int) -> float:
        """Return which share of the errors of all lists the newest one has.

        Half is for that at the planned end, so that it is as long as if it were the only one. List
        k before it, or after it, has its part of the other half.
        """
        ends = self.run.epochs is not None and epoch + 1 == self.run.epochs
        is_first, self._ended = ends and not self._ended, self._ended or ends
        return 0.5 if is_first else spent_at(self._lists, 0.5)

    def _read_texts(
        self,
        pool: Pool,
        answers: TokenSnapshot,
        rows: Tensor,
        members: Tensor,
        attacks: Sequence[Any],
    ) -> dict[str, dict[str, float] | str]:
        """Return what each attack reads off some of the texts by its name.

        Texts that are in one row are compared; all are asked whether they can be extracted.
        """
        texts = [pool.texts[row] for row in rows.tolist()]
        prompts = attacks[0].part == "prompts"
        released = self._released(pool, answers, rows, prompts=prompts)
        values: dict[str, dict[str, float] | str] = {}
        times = pool.times[rows]
        look, alpha = self._looks, self.settings.memorization.alpha
        once = (times == 1).nonzero()[:, 0]
        texts, game = [texts[row] for row in once.tolist()], released.rows(once)
        shared = {} if self._account is None else self._account.limits()
        if attacks[0].part == "long":  # the log has one line of it
            blind = blind_scores(game.base, game.compressed, texts, members[once])
            shared[BLIND] = highest_auc(blind, members[once])
        for attack in attacks:
            try:
                if isinstance(attack, Extraction):
                    guess: Any = attack.run(Observation(released=released))
                    read = extraction_values(guess, attack, members, times, look=look, alpha=alpha)
                    values[attack.name] = read | self._sizes(members)
                else:
                    values[attack.name] = self._membership(attack, game, members[once], shared)
            except Exception as error:
                values[attack.name] = reason(error)
        return values

    def _membership(
        self, attack: Any, game: ReleasedModel, members: Tensor, shared: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the values of an attack on membership by name, with those that all share."""
        look, alpha = self._looks, self.settings.memorization.alpha
        ranked = sum(not isinstance(one, Extraction) for one in self.attacks)
        guess = attack.run(Observation(released=game))
        exact = attack.part == "short"
        values, joint = (
            membership_values(guess.scores, members, look=look, alpha=error, exact=exact)
            for error in (alpha, alpha / ranked)
        )
        values |= {f"auc_joint_{end}": joint[f"auc_{end}"] for end in ("low", "high", "provable")}
        if self._account is not None:
            error = spent_at(look, alpha / ranked)
            values["refuted"] = self._account.refuted(
                attack.name, guess.scores, members, error, alpha
            )
        return {**values, **shared, **self._sizes(members)}

    def _sizes(self, members: Tensor) -> dict[str, float]:
        """Return how many texts are compared, and the error that the look spends."""
        return {
            "members": float(members.sum()),
            "others": float((~members).sum()),
            "alpha": spent_at(self._looks, self.settings.memorization.alpha),
        }

    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Return the outcome of the values that an attack has; each has some of them alone."""
        outcome = super().pooled(series, rows)
        rates, extra = {**outcome.rates}, outcome.extra
        rates["shown"] = Rate(rates["shown"].value, rates["shown"].value, rates["shown"].high)
        absent: tuple[str, ...] = ()
        if math.isnan(extra["extracted_base"]):
            absent = ("extracted", "greedy")
        absent = ("auc", "shown") if math.isnan(extra["p_value"]) else absent
        absent += ("shown",) * math.isnan(extra["shown_p_value"])  # of values in texts
        rare = {name for name in (*TIER_NAMES, "at_least") if name in rates}
        silent = {name for name in rare if math.isnan(rates[name].value)}
        if "at_least" in rare - silent:  # a list of rows has no other
            absent = ("auc", "shown", "extracted", "greedy")
        absent += tuple(silent)
        played = {name: rate for name, rate in rates.items() if name not in absent}
        known = {name: value for name, value in extra.items() if not math.isnan(value)}
        return replace(outcome, rates=played, extra=known)

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Write the base's answers to a private file, and return where it is.

        The hash is of the answers and the texts together; the texts themselves are in no file.
        """
        if self._pool is None or self._base is None:
            return {}
        file = self.folder / self.file
        if self.run.rank == 0 or self.run.processes == 1:
            save_private(file, _answers(self._base))
        return {
            self.family: {
                "looks": self._looks,
                "lists": self._lists,
                "ended": self._ended,
                "due": self._due,
                "passed": self._pool.passed,
                "unread": self._pool.unread,
                "processes": self.run.processes,
                "file": str(file),
                "digest": _hash(self._pool, self._base),
                "seen": self._pool.seen_in_checkpoints.to(torch.uint8),
            }
        }

    def pool_line(self) -> PoolLine | None:
        """Return the record of the texts that are asked about; None where there are none."""
        pool, base = self._pool, self._base
        if pool is None or self._refusal:
            return None
        return pool.line(None if base is None else _hash(pool, base))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember where the base's answers are."""
        self._saved = state.get(self.family, {})
        self._looks = int(self._saved.get("looks", 0))
        self._lists = int(self._saved.get("lists", 0))
        self._ended = bool(self._saved.get("ended", False))

    def _restore(self, pool: Pool) -> None:
        """Read what the base said, if the file and the texts are those of the run's begin."""
        saved, self._saved, self._base = self._saved, {}, None
        try:
            base = TokenSnapshot(**load_private(Path(saved["file"])))
        except (OSError, ValueError, TypeError):  # TypeError: the file holds something else
            return
        if _hash(pool, base) == saved["digest"]:
            self._base = base
            pool.seen = torch.as_tensor(saved["seen"]).bool()
            self._due, pool.passed = int(saved["due"]), int(saved["passed"])
            pool.unread = int(saved.get("unread", 0))
            if pool.way == "not yet seen" and saved.get("processes", 1) > 1:
                self._void = (
                    "a checkpoint of several processes holds what the first of them has seen: add "
                    "leave_out"
                )


def _answers(base: TokenSnapshot) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in base._asdict().items()}


def _hash(pool: Pool, base: TokenSnapshot) -> str:
    """Return the SHA-256 of the pool's texts and the base's answers together."""
    texts = {f"text{n}": text.ids for n, text in enumerate(pool.texts)}
    return hash_tensors({**_answers(base), **texts})

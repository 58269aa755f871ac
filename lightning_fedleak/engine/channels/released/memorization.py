"""The channel of memorization: what the trained weights leak about the training data.

A channel plays the attacks of one family in a run, and turns their answers into rates. Here an
attack scores texts for membership, or tries to extract them. The order in a fit:

1. A *pool* of texts is drawn: rows that are trained on (members), and non-members
   (:mod:`lightning_fedleak.engine.channels.released.pool`).
2. Before the first step, the model is queried with the pool. It is then the *base*. A *reference*,
   a model trained on other texts of the same kind, is queried too, if the settings name one.
3. At each *look*, after shares of the first epoch and at the end of every epoch, the model is
   queried with the same pool. Attacks score the texts by all models' log probabilities of tokens.
4. The scores of members are compared with those of non-members. The logged rates of an attack are a
   *series*.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.attacks.memorization import CombinedReference, Extraction, MemorizationAttack
from lightning_fedleak.engine.channels.exchange import over_processes
from lightning_fedleak.engine.channels.released.account import (
    BOUND,
    AccountGame,
    too_few_non_members,
)
from lightning_fedleak.engine.channels.released.audit import Audit, Comparison
from lightning_fedleak.engine.channels.released.pool import (
    FORWARD_SHARE,
    NO_CONTROLS,
    Pool,
    collect,
    forwards_of,
)
from lightning_fedleak.engine.channels.released.records import BETWEEN, FILE, RECORDS, write_list
from lightning_fedleak.engine.channels.released.training_rows import (
    UnplayableGame,
    read_contents,
    why_not_shuffled,
)
from lightning_fedleak.engine.channels.released.weights import Answer, WeightChannel
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.reference import (
    announce_references,
    announce_strength,
    ask_references,
    digest_answers,
    load_answers,
    save_answers,
    train_references,
)
from lightning_fedleak.engine.run import Run, reason
from lightning_fedleak.evaluation.entities import FoundEntities, entity_names
from lightning_fedleak.evaluation.metrics.released import (
    FPR,
    FPRS,
    TIERS,
    highest_auc,
    rate_name,
    spent_at,
)
from lightning_fedleak.model.snapshots import References, Stage, TokenSnapshot
from lightning_fedleak.model.taps import MASKS, Text, token_log_probs
from lightning_fedleak.report.records import MEMORIZATION, STRENGTH, WEAK, PoolLine, ReferenceFacts

BLIND = "blind/auc"
"""The highest AUC of scores without the trained weights; logged as ``leakage/blind/auc``."""

TPRS = tuple(map(rate_name, FPRS))
"""The names of the TPRs at low FPRs, by which a release is judged."""

# The rates of extraction for texts in 1, 2 to 4, 5 to 16 and more training rows (*tiers*).
TIER_NAMES = tuple(f"{name}_x{count}" for name in ("extracted", "greedy") for count in TIERS)


class MemorizationChannel(WeightChannel):
    """Attacks on the trained weights, by an adversary who also has the base model.

    Attributes:
        file: The name of the private file with the base's answers, for resuming.
        cost: What it costs to query the model with a text, in forward passes.
    """

    reads: ClassVar[Any] = MemorizationAttack
    leak = MEMORIZATION
    # Of membership: the AUC, "shown" (a lower bound of the TPR) and TPRs (`membership_values`). Of
    # extraction: the share of members that are extracted, by sampling or greedily, minus that of
    # non-members (`extraction_values`). Of the list of rows: how many are revealed "at_least".
    metrics: ClassVar[tuple[str, ...]] = (
        *("auc", "shown", *TPRS, "extracted", "greedy", *TIER_NAMES, "at_least"),
    )
    # The smallest, the largest and the uninformed value of each.
    ranges: ClassVar[Any] = {
        "auc": (0.0, 1.0, 0.5),
        **dict.fromkeys(("shown", *TPRS), (0.0, 1.0, 0.0)),
        **dict.fromkeys(("extracted", "greedy", *TIER_NAMES), (-1.0, 1.0, 0.0)),
        "at_least": (0.0, math.inf, 0.0),
    }
    # "provable": the lower end that perfect scores would have; "joint": an interval that holds for
    # all attacks together; "others": the number of non-members.
    extras: ClassVar[tuple[str, ...]] = (
        *("p_value", "shown_p_value", "extracted_others", "extracted_base"),
        *("auc_joint_low", "auc_joint_high", "auc_joint_provable"),
        *("auc_provable", "extracted_provable", "greedy_provable"),
        *(f"{tier}_provable" for tier in TIER_NAMES),
        *("listed", "smallest_list", "repeated", "at_least_provable"),
        *("members", "others", "alpha", "visible", "refuted"),
        *(f"{BOUND}auc", f"{BOUND}tpr_at_fpr_0.01", BLIND, WEAK, STRENGTH),
    )
    file = "memorization_base.safetensors"  # mode 0600
    finds_entities: ClassVar[bool] = True  # it also compares values in texts, as phone numbers
    cost: ClassVar[float] = 1

    def __init__(self, attacks: Sequence[MemorizationAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        self._entities: FoundEntities | None = None
        self._account: AccountGame | None = None  # None: no account fits how the texts were drawn
        self._saved_state: Mapping[str, Any] = {}  # of a checkpoint, until the base is restored
        self._n_lists = 0  # lists written
        self._has_ended = False  # whether the planned end was reached

    def _series_names(self, attack: Attack) -> list[str]:
        # The list of rows and the values in texts are not of one attack: they go with the first.
        first_attack = next((a for a in self.listed_attacks if a.part != "prompts"), None)
        if attack is not first_attack:
            return [attack.name]
        names = [RECORDS] * self.settings.memorization.records
        return [attack.name, *names, *entity_names(self.entity_kinds)]

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Forget the texts of an earlier fit."""
        super().open(run)
        self._base: TokenSnapshot | None = None  # the answers of the base; None if unknown
        self._key = torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)  # of the digest
        self._references: References | None = None  # the answers of references
        self._facts: ReferenceFacts | None = None  # how the reference was trained
        self._void: dict[str, str] = {}  # why no comparison of a part is valid
        self._is_shuffled = True  # whether the rows so far are known to be a random choice of all
        self._why_lost = ""  # why it is not known which texts have been seen; empty if it is
        self._completions: Sequence[Text] = ()  # those of the base, if the pool has prompts of RL
        # (2, N) the mean rewards of each prompt's completions, by the base and by the model now.
        self._rewards: Tensor | None = None
        self._looks_due = 0  # looks of this epoch that were due
        self.reference_seconds = 0.0

    def _draw_pool(self) -> Pool:
        start = time.perf_counter()
        predicts = self.run.anatomy.kind == "causal"
        self._entities = FoundEntities(self.finder, predicts) if self.finder is not None else None
        why_drawn = "no row is held out" if self.settings.shares == "model" else ""
        if self.run.step > 0 and not self._saved_state:
            why_drawn = "a resumed fit may have trained on any row before"
        pool = collect(
            self.run.training_loader,
            self.settings.memorization,
            self._read,
            why_drawn=why_drawn,
            short=any(attack.part != "long" for attack in self.listed_attacks),
            entities=self._entities,
            forwards=self.cost * (1 if self._mask is None else MASKS),
            show=self.run.shows_progress,
        )
        self._is_shuffled = not why_not_shuffled(self.run.training_loader)
        account = AccountGame(self.run, pool.no_game)
        self._account = account if account.why_not is None else None
        self._account_words = account.describe()
        self._reading_seconds = time.perf_counter() - start
        return pool

    @property
    def _queries(self) -> Sequence[Text]:
        """Return the texts that the model is queried with, one for each text of the pool."""
        return self._completions or self.pool.texts

    def describe(self) -> str:
        """Return in words what is compared, for the message at the start of a run."""
        pool = self.pool
        end = f". {NO_CONTROLS}" * (pool.way == "not yet seen" and self.run.epochs != 1)
        cost = f"{pool.cost}{end}. Reading the data took {self._reading_seconds:.1f} s"
        if n := int(pool.has_prompt.sum()):
            names = [attack.name for attack in self.attacks if attack.part == "prompts"]
            mend = ": PromptRatio() does" * (pool.way != "given")
            name = next(iter(names), f"no attack{mend}")
            cost += f". The prompts of {n}, which have no loss, are asked about by {name}"
        if self._facts is not None:
            rows = self._facts.rows
            weak = rows is not None and rows < pool.length  # otherwise a look measures its strength
            cost += f". Reference of combined_reference: {self._facts.in_words(weak=weak)}"
        return f"{cost}{self._account_words}"

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known: too few non-members at a look. None if it can."""
        pool, settings = self._pool, self.settings.memorization
        if pool is None:
            return None
        counts = [int((~pool.trains & pool.alone).sum())] * self._planned_looks
        if pool.way == "not yet seen":
            if self.run.epochs is None or self.run.epochs > 1:
                return NO_CONTROLS
            n = int(pool.alone.sum())
            counts = [round((1 - share) * n) for share in sorted(settings.looks)]
        fpr = {"shown": FPR, **dict(zip(TPRS, FPRS, strict=True))}.get(metric)
        return None if fpr is None else too_few_non_members(counts, settings.alpha, metric, fpr)

    @property
    def _planned_looks(self) -> int:
        """Return the number of looks in the run; in its first epoch if its length is unknown."""
        first_epoch = forwards_of(self.settings.memorization, last_step=True) - 1
        return first_epoch + max(0, (self.run.epochs or 1) - 1)

    def is_due(self, epoch: int, share: float) -> bool:
        """Return whether the weights are looked at after this share of an epoch.

        Args:
            epoch: The epoch, counted from 0.
            share: The share of the epoch's batches that are done, up to 1.
        """
        if share >= 1:
            self._looks_due = 0
            return True
        shares = self.settings.memorization.looks if epoch == 0 else ()
        n_due = sum(share >= s - 1e-9 for s in shares)  # shares of batches are rounded
        is_due, self._looks_due = n_due > self._looks_due, max(n_due, self._looks_due)
        return is_due

    def query_base(self) -> None:
        """Query the base, and the reference if there is one, before the first step.

        A resumed fit reads the answers from a file. Without that file the base stays unknown,
        because the present weights are already trained.
        """
        pool = self.pool
        if self.run.on_any_process(bool(self._saved_state)):
            self._restore()
            if self.run.on_any_process(self._base is None):  # one process cannot read the file
                self._base = self._references = self._facts = None
        elif self.run.step == 0:  # weights of a later step are not the base
            start = time.perf_counter()
            self._base = self._query()
            settings = self.settings.memorization
            if settings.reference is not None and any(
                type(attack) is CombinedReference for attack in self.attacks
            ):
                if settings.trains_reference:
                    self._train_references(time.perf_counter() - start)
                else:
                    sources = settings.given_references, settings.rows_of_references
                    texts = [text.content for text in pool.texts]
                    read = partial(read_contents, self.run.training_loader, read=self._read)
                    asked = ask_references(*sources, texts, read, self.run, self._query)
                    self._references, self._facts = asked
        # Rows that are not yet seen are of the training data, so that nothing else can differ.
        if self._base is not None and pool.way != "not yet seen" and not self.planted:
            self._compare_untrained()

    def _train_references(self, seconds: float) -> None:
        """Train references on rows that they do not score, and query them with the pool.

        Args:
            seconds: The seconds that it took to query the base with the pool.

        Raises:
            ValueError: No rows were held out by a draw, or nothing can be trained.
        """
        source, seed = self.settings.memorization.reference, self.settings.memorization.seed
        rows, run = self.pool.references, self.run
        if rows is None:
            raise ValueError(
                f"Memorization(reference={source!r}) needs rows that a draw holds out: train on "
                "train, others = leave_out(data, 1000, seed=1)"
            )
        row_seconds = seconds / len(self.pool.texts) / FORWARD_SHARE
        announce_references(run, [len(data) for data in rows.data], row_seconds)
        start = time.perf_counter()
        trained = train_references(source, rows.data, rows.seen, run, self._query, seed)
        self._references, self._facts = trained
        self.reference_seconds = time.perf_counter() - start

    def _compare_untrained(self) -> None:
        """Check that only the training can distinguish members from non-members.

        If *blind* scores, without the trained weights, refute the draw of the members, or
        distinguish them from the user's own non-members, no attack on rows has a result: one draw
        makes the long and the short ones. What they show of prompts concerns prompts alone.

        Raises:
            ValueError: The reference model distinguishes them: it has seen some of the texts.
        """
        pool, side = self.pool, "rows left out"
        is_drawn = pool.way == "left out"
        mend = "Leave rows out by a new draw, and begin with a base that has seen neither side"
        if not is_drawn:
            side, mend = "texts of others=", "Use leave_out, or more texts of the same kind"
        rows, parts = ("long", "short"), dict.fromkeys(attack.part for attack in self.attacks)
        parts |= {"prompts": None} if self._reads_prompts else {}
        for part in {**dict.fromkeys(rows), **parts} if {*rows} & {*parts} else parts:
            with suppress(UnplayableGame):  # too few texts: each look says so
                compared = self._audit.part(part)
                if (finding := compared.why_unknown(drawn=is_drawn)) is not None:
                    void = parts if part in rows else (part,)
                    self._void |= dict.fromkeys(void, f"the {side} are {finding}. {mend}")
                elif part == "long":
                    compared.check_reference()

    @property
    def _audit(self) -> Audit:
        """Return the answers of the base and of the reference to the pool."""
        assert self._base is not None
        return Audit(
            self.pool,
            self._base,
            self._decode,
            self._references,
            None if self._facts is None else self._facts.rows,
            self._queries,
            self._rewards,
        )

    def _query(self, run: Run | None = None) -> TokenSnapshot:
        """Return a model's answers to the pool; each process queries it with a part of the texts.

        Args:
            run: The run of the model; by default the run that trains.

        Raises:
            UnusableObservation: It cannot be queried, on this process or on another one.
        """
        texts, run = self._queries, self.run if run is None else run
        columns = max(1, max(len(text.labels) for text in texts) - 1)  # the first has no prediction

        def ask(rows: list[int]) -> list[Tensor]:
            # One forward of the whole text answers for its prompt too.
            queries = [texts[row].whole if self._reads_prompts else texts[row] for row in rows]
            answers = token_log_probs(run.anatomy, queries, self._mask and self._mask[0])
            return [nn.functional.pad(values, (0, columns - values.shape[1])) for values in answers]

        return TokenSnapshot(*over_processes(run, len(texts), ask))

    @property
    def _reads_prompts(self) -> bool:
        """Return whether attacks or values in texts are compared by prompts."""
        reads_values = self._entities is not None and self._entities.are_predicted
        return reads_values or any(attack.part == "prompts" for attack in self.attacks)

    def _decode(self, ids: list[int]) -> str:
        """Return the text of token ids; their numbers if no tokenizer is known."""
        tokenizer = self.settings.tokenizer or next(
            (t for t in self.run.tokenizers if hasattr(t, "decode")), None
        )
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    # ---- a look -----------------------------------------------------------------------------

    def query_weights(self, epoch: int, *, lists: bool) -> Mapping[Series, Answer]:
        """Query the model with the pool, and return the values of every attack by series.

        Attacks are grouped by the *part* of the pool that they compare: long texts, short ones,
        prompts or pairs. Those on a part without enough texts have no values.
        """
        now = None
        series = {a: self.series(a, (Stage.RELEASED,)) for a in self.attacks}
        if self._base is None:
            why = "the base's answers are not known: the run was resumed without their file"
            why = f"{why} ({self.folder / self.file})"
            return dict.fromkeys(chain.from_iterable(series.values()), why)
        n_read, unread = self._count_seen()
        self._looks += 1
        alpha = self.settings.memorization.alpha
        answers: dict[Series, Answer] = {}
        for part in dict.fromkeys(attack.part for attack in self.attacks):
            attacks = [attack for attack in self.attacks if attack.part == part]
            names = {s: s.name for attack in attacks for s in series[attack]}
            try:
                chosen = self._choose(part, epoch, n_read, unread)
                now = now or self._query()
                compared = self._audit.part(part, now, chosen, look=self._looks, alpha=alpha)
                self._check_order(compared)
            except (UnplayableGame, UnusableObservation) as error:
                answers |= dict.fromkeys(names, str(error))
                continue
            values = dict[str, Answer](self._score_texts(compared, attacks))
            self._compared |= dict.fromkeys(names, self.pool.digest(*chosen))
            if RECORDS in names.values():
                self.owes_list, self._n_lists = not lists, self._n_lists + lists
                values[RECORDS] = BETWEEN
                if lists:
                    shared = self._n_lists, self._error_share(epoch)
                    values[RECORDS] = write_list(self.run, self.folder / FILE, compared, *shared)
            if self._entities is not None and any(n.startswith("entity/") for n in names.values()):
                found = self._entities.compare(now, self._base, *chosen, self._looks, alpha)
                void = self._void.get("prompts")
                values |= {n: void if void and "/prompt" in n else x for n, x in found.items()}
            answers |= {s: values[name] for s, name in names.items()}
        return answers

    def _choose(self, part: Any, epoch: int, n_read: int, unread: int) -> tuple[Tensor, Tensor]:
        """Return the texts of a part that are compared now, see :meth:`Pool.compared`.

        Raises:
            UnplayableGame: No comparison is valid, or there are too few texts.
        """
        why = self._void.get(part, "")
        if unread and self.pool.way == "not yet seen":
            why = (
                f"{unread} batches could not be read, and may have held texts that were to be "
                "non-members: add leave_out"
            )
        if why := self._why_lost or why:
            raise UnplayableGame(why)
        return self.pool.compared(epoch, n_read, everyone=self._account is not None, part=part)

    def _check_order(self, compared: Comparison) -> None:
        """Check that the rows so far are like the non-members, unless their order is random.

        Raises:
            UnplayableGame: Blind scores say otherwise, or cannot decide.
        """
        if self._is_shuffled or self.planted:
            return
        everyone, _ = self.pool.everyone(compared.part)
        if not torch.equal(compared.index, everyone):
            is_drawn = self.pool.way == "left out"
            if (finding := compared.why_unknown(drawn=is_drawn)) is not None:
                raise UnplayableGame(
                    f"members so far and non-members are {finding}. Shuffle the training data"
                )

    def _error_share(self, epoch: int) -> float:
        """Return the share of the allowed error of all lists that the newest list spends.

        Half is reserved for the list at the planned end, so that earlier lists do not shorten it.
        Every other list k spends ``1 / (k (k + 1))`` of the other half.
        """
        ends = self.run.epochs is not None and epoch + 1 == self.run.epochs
        is_first, self._has_ended = ends and not self._has_ended, self._has_ended or ends
        return 0.5 if is_first else spent_at(self._n_lists, 0.5)

    def _score_texts(
        self, compared: Comparison, attacks: Sequence[Any]
    ) -> dict[str, dict[str, float] | str]:
        """Return the values of each attack on some of the texts, by the name of its series."""
        values: dict[str, dict[str, float] | str] = {}
        shared = {} if self._account is None else self._account.limits()
        if compared.part in ("long", "pairs"):  # data has only one of them: it is logged once
            shared[BLIND] = highest_auc(compared.blind, compared.sides)
        for attack in attacks:
            try:
                values[attack.name] = self._measure(attack, compared, shared)
            except Exception as error:
                values[attack.name] = reason(error)
        return values

    def _measure(
        self, attack: Any, compared: Comparison, shared: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the values of an attack by name.

        Args:
            attack: The attack.
            compared: The texts.
            shared: Values that all attacks on membership have in common; they are included.
        """
        look, alpha, members = compared.look, compared.alpha, compared.members
        ranked = sum(not isinstance(a, Extraction) for a in self.attacks)  # attacks that score
        error = alpha / max(1, ranked)
        values, scores = compared.measure(attack, error)
        if scores is not None:
            members, values = compared.sides, {**values, **shared}
            if (account := self._account) is not None:
                spent = spent_at(look, error)
                values["refuted"] = account.refuted(attack.name, scores, members, spent, alpha)
        if STRENGTH in values and look == 1:
            announce_strength(self.run, compared.strength)
        counts = float(members.sum()), float((~members).sum())
        names = "members", "others", "alpha"
        return values | dict(zip(names, (*counts, spent_at(look, alpha)), strict=True))

    def outcome(self, series: Series, answer: Answer) -> Outcome:
        """Return the outcome, without tiers of extraction that no text is in."""
        if isinstance(answer, Mapping):
            tiers = (*TIER_NAMES, "at_least")
            known = {n: x for n, x in answer.items() if n not in tiers or not math.isnan(x)}
            ends = {"shown_low": known["shown"]} if "shown" in known else {}
            answer = known | ends  # "shown" is itself the lower end of its interval
        return super().outcome(series, answer)

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Write the base's answers to a private file, and return its path with the counts.

        ``digest`` hashes the answers and the texts together, with a key that only the private file
        has, so that no one can test a guess of the texts by a checkpoint. No file has the texts
        themselves.
        """
        if self._pool is None or self._base is None:
            return {}
        file = self.folder / self.file
        if self.run.rank == 0 or self.run.processes == 1:
            save_answers(file, self._key, self._base, self._references)
        return {
            self.family: {
                "looks": self._looks,
                "lists": self._n_lists,
                "ended": self._has_ended,
                "due": self._looks_due,
                "passed": self._pool.passed,
                "unread": self._pool.unread,
                "processes": self.run.processes,
                "file": str(file),
                "digest": self._digest(self._base),
                "reference": self._facts and asdict(self._facts),
                "seen": self._pool.seen_in_checkpoints.to(torch.uint8),
            }
        }

    def pool_line(self) -> PoolLine | None:
        """Return the record of the pool; None without one, or of planted texts."""
        # Each line of results has the numbers of planted texts.
        is_recorded = self._pool is not None and not self.planted
        return replace(self.pool.line(), reference=self._facts) if is_recorded else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the path of the base's answers for :meth:`query_base`, and restore the counts."""
        self._saved_state = state.get(self.family, {})
        self._looks = int(self._saved_state.get("looks", 0))
        self._n_lists = int(self._saved_state.get("lists", 0))
        self._has_ended = bool(self._saved_state.get("ended", False))

    def _digest(self, base: TokenSnapshot) -> str:
        """Return a keyed hash of the pool's texts and the base's answers together."""
        texts = [text.ids for text in self.pool.texts]
        return digest_answers(self._key, base, self._references, texts)

    def _restore(self) -> None:
        """Read the base's answers, if the file and the pool are those of the run's first fit."""
        pool, saved, self._saved_state, self._base = self.pool, self._saved_state, {}, None
        try:
            self._key, base, self._references = load_answers(Path(saved["file"]))
        except (OSError, ValueError, TypeError, KeyError):  # the last two: it holds something else
            return
        if self._digest(base) == saved["digest"]:
            self._base = base
            facts = saved.get("reference")
            self._facts = facts and ReferenceFacts(**facts)
            pool.seen = torch.as_tensor(saved["seen"]).bool()
            self._looks_due, pool.passed = int(saved["due"]), int(saved["passed"])
            pool.unread = int(saved.get("unread", 0))
            if pool.way == "not yet seen" and saved.get("processes", 1) > 1:
                self._why_lost = (
                    "a checkpoint of several processes has only the texts that the first of them "
                    "has seen: add leave_out"
                )

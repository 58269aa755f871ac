"""Memorization: what the trained weights themselves give away, asked about texts.

The model and its base (the model before the first step) are asked about the same pool of texts at
shares of the first epoch and at every epoch's last step. Nothing of a step is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_fedleak.attacks import Attack, Capability, Guess
from lightning_fedleak.attacks.memorization import (
    Extraction,
    ExtractionGuess,
    MemorizationAttack,
    MemorizationGuess,
)
from lightning_fedleak.attacks.memorization.blind import blind_scores
from lightning_fedleak.batches import TokenBatch, read_batch
from lightning_fedleak.looks.channels.account import BOUND, AccountGame
from lightning_fedleak.looks.channels.base import Channel, Plan
from lightning_fedleak.looks.options import Options
from lightning_fedleak.looks.pool import NoOthers, Pool, collect
from lightning_fedleak.looks.run import (
    Found,
    Look,
    Outcome,
    Result,
    Run,
    Series,
    Unknown,
    Waiting,
    reason,
    unknown,
)
from lightning_fedleak.metrics import Rate
from lightning_fedleak.metrics.released import (
    blind_aucs,
    extraction_values,
    follow_one_law,
    membership_values,
    others_needed,
    spent_at,
    visible_excess,
    visible_tpr,
)
from lightning_fedleak.private_files import check_private, hash_tensors
from lightning_fedleak.records import MEMORIZATION, PoolLine
from lightning_fedleak.snapshots import Observation, ReleasedModel, Stage, TokenSnapshot
from lightning_fedleak.taps.tokens import ask_tokens, compressed_bytes, pool_digest

_Answer = dict[str, float] | str
"""An attack's values by name, or why there are none."""


class MemorizationChannel(Channel):
    """Attacks on the trained weights, beside the base that the adversary has too."""

    guesses = Guess
    reads: ClassVar[Any] = MemorizationAttack
    leak = MEMORIZATION
    metrics: ClassVar[tuple[str, ...]] = ("auc", "shown", "extracted", "greedy")
    charts: ClassVar[tuple[str, ...]] = ("shown", "extracted")
    ranges: ClassVar[Any] = {
        "auc": (0.0, 1.0, 0.5),
        "shown": (0.0, 1.0, 0.0),
        **dict.fromkeys(("extracted", "greedy"), (-1.0, 1.0, 0.0)),
    }
    extras: ClassVar[tuple[str, ...]] = (
        *("p_value", "extracted_others", "extracted_base"),
        *("auc_joint_low", "auc_joint_high"),
        *("members", "others", "alpha", "visible", "refuted"),
        *(f"{BOUND}auc", f"{BOUND}tpr_at_fpr_0.01"),
    )
    limits: ClassVar[Any] = {
        "auc": f"leakage/{BOUND}auc",
        "shown": f"leakage/{BOUND}tpr_at_fpr_0.01",
    }
    width = 3 * len(metrics) + len(extras)
    reads_updates = True
    at_weights = True
    looks_dependent = True
    adversary = frozenset({Capability.HAS_RELEASED_MODEL, Capability.KNOWS_TARGET_TEXT})
    sees = frozenset({Capability.HAS_RELEASED_MODEL})
    file = "memorization_base.safetensors"  # for resuming, of mode 0600

    def __init__(self, attacks: Sequence[MemorizationAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        self._pool: Pool | None = None
        self._account: AccountGame | None = None
        self._refutations: set[str] = set()
        self._refusal: str | None = None
        self._base: TokenSnapshot | None = None
        self._folder = Path()
        self._saved: Mapping[str, Any] = {}
        self._looks = 0
        self._reading_seconds = 0.0
        self._due = 0
        self._void = ""
        self._compared = ""
        self._newest: tuple[TokenSnapshot, int, int] | None = None
        self._choices: dict[int, float] = {}
        self._chosen: dict[int, dict[str, _Answer]] = {}

    # ---- names ------------------------------------------------------------------------------

    def series(self, attack: Attack, stage: Stage) -> Series | None:
        """Return None: what is released has one series, whatever stages are measured."""
        return None

    def further_series(self) -> list[Series]:
        """Return the series of each attack on the released model."""
        return self._series_of(self.listed_attacks)

    def _series_of(self, attacks: Sequence[Attack]) -> list[Series]:
        return [Series.at(Stage.RELEASED, attack.name) for attack in attacks]

    def series_of(self, plan: Plan) -> list[Series]:
        """Return the series of an attack."""
        return self._series_of([plan.attack])

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Forget the texts of an earlier fit."""
        super().open(run)
        self._pool, self._base, self._refusal, self._void = None, None, None, ""
        self._due, self._newest = 0, None
        self._refutations.clear()

    def meet_data(self, attack: Attack) -> None:
        """Draw the texts that the model is asked about.

        Raises:
            ValueError: nobody can be compared.
        """
        if self._refusal is None:
            start = time.perf_counter()
            self._refusal = self._collect()
            self._reading_seconds = time.perf_counter() - start
        if self._refusal:
            raise ValueError(f"attack '{attack.name}' finds nobody to compare: {self._refusal}")

    def _collect(self) -> str:
        """Draw the pool, and return why there is none, or an empty string; alike on all processes.

        A process whose rows cannot be read takes part in every exchange.
        """
        run, refusal = self.run, ""
        try:
            if run.anatomy.kind != "causal":
                raise NoOthers(
                    f"a {run.anatomy.kind} model has no head that predicts every next token"
                )
            self._pool = self._drawn()
        except NoOthers as error:
            refusal = str(error)
        if run.on_any_process(bool(refusal)):
            return refusal or "another process could not read the training data"
        assert self._pool is not None
        digest = hash_tensors({str(n): t.ids for n, t in enumerate(self._pool.texts)})
        if run.on_any_process(run.broadcast(digest) != digest):
            return (
                "the processes read different data, so that the texts of one are not known to the "
                "others: give every process the same data set and a DistributedSampler"
            )
        self._account = AccountGame(run, self._pool.no_game)
        return ""

    def _drawn(self) -> Pool:
        """Return the texts that the model is asked about; raise NoOthers for none."""
        return collect(
            self.run.training_loader,
            self.settings.memorization,
            self._read,
            resumed=self.run.step > 0 and not self._saved,
            chooses=self.run.chooses,
            rounds=self.run.unit == "round",
        )

    def keep_in(self, folder: Path) -> None:
        """Keep what a resumed run needs in a folder."""
        self._folder = folder

    def plan(self, attack: Attack) -> Plan:
        """Return the plan of an attack on the released model."""
        return Plan(attack, (), True, None)

    def describe(self) -> str:
        """Return in words who is compared, for the line-up."""
        if self._pool is None:
            return ""
        cost = f"{self._pool.cost}. Reading the data took {self._reading_seconds:.1f} s"
        why_not = "" if self._account is None else self._account.why_not
        if why_not is None:
            return (
                f"{cost}. What the account allows is logged as leakage/{BOUND}auc beside them, and "
                "'refuted' is 1 where they refute it; 0 confirms nothing"
            )
        return f"{cost}. No line of what the account allows: {why_not}" if why_not else cost

    # ---- a step -----------------------------------------------------------------------------

    def never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known: few others, or none after the first epoch."""
        pool = self._pool
        if pool is None or self._refusal:
            return None
        if pool.way == "not yet seen" and (self.run.epochs is None or self.run.epochs > 1):
            return "there are no controls after epoch 1: add leave_out"
        controls = ~pool.aside if pool.way == "not yet seen" else ~pool.trains & ~pool.aside
        others = int(controls.sum())
        needed = others_needed(1, self.settings.memorization.alpha)
        if metric == "shown" and others < needed:
            return f"'shown' needs {needed} others, and {others} are asked about"
        return None

    def never_judged(self, metric: str) -> str | None:
        """Return that no update is judged: the model is that of the round's start."""
        return "it is of the model that was sent, and of no client's update"

    def trains_on(self, batch: object) -> None:
        """Note which texts of the pool a batch holds."""
        if self._pool is not None and not self._refusal:
            self._pool.remember(self._read(batch))

    def _read(self, batch: Any) -> TokenBatch:
        """Return a batch's tokens."""
        adapter = self.settings.batch_adapter
        return read_batch(batch, self.run.anatomy.kind) if adapter is None else adapter(batch)

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
        if self._saved:
            self._restore(pool)
        elif self.run.holds_base:  # later weights are no base
            self._base = self._ask(pool)
        if self._base is not None and pool.way == "given":
            compressed = compressed_bytes(pool.texts, self._decode)
            aucs = blind_aucs(
                blind_scores(self._base, compressed, pool.texts, pool.trains), pool.trains
            )
            if not follow_one_law(aucs):
                worst = max(aucs, key=lambda name: abs(aucs[name].value - 0.5))
                self._void = (
                    f"the texts of others= are of another law: before the first step '{worst}' "
                    f"tells them from the training data with an AUC of {aucs[worst].value:.2f} "
                    f"({aucs[worst].low:.2f} to {aucs[worst].high:.2f}), where .45 to .55 is "
                    "needed. Use leave_out, or more texts of the same kind"
                )

    def _ask(self, pool: Pool) -> TokenSnapshot:
        """Return what the model says of the pool; each process asks about its part."""
        with self.run.forward_context():
            sharded = any(hasattr(p, "full_tensor") for p in self.run.anatomy.root.parameters())
            if self.run.processes == 1 or sharded:
                return ask_tokens(self.run.anatomy, pool.texts)
            rows = list(range(self.run.rank, len(pool.texts), self.run.processes))
            part = ask_tokens(self.run.anatomy, [pool.texts[row] for row in rows])
        columns = max(1, max(len(text.ids) for text in pool.texts) - 1)
        whole = []
        for field in fields(TokenSnapshot):
            values = getattr(part, field.name)
            joint = torch.zeros(len(pool.texts), columns)
            joint[rows, : values.shape[1]] = values.float()
            joint = self.run.summed(joint.to(self.run.device)).cpu()
            whole.append(joint > 0.5 if values.dtype == torch.bool else joint)
        return TokenSnapshot(*whole)

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self.settings.tokenizer or next(
            (t for t in self.run.tokenizers if hasattr(t, "decode")), None
        )
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    # ---- a look -----------------------------------------------------------------------------

    def ask_weights(self, look: Look, epoch: int) -> None:
        """Let every attack guess from what the model says now.

        Args:
            look: where the answers go.
            epoch: counted from 0.
        """
        every = self._series_of(self.attacks)
        pool = self._pool
        if pool is None or self._base is None:
            why = "what the base said is not known: the run was resumed without its record"
            look.answers |= dict.fromkeys(every, f"{why} ({self._folder / self.file})")
            return
        self._newest = None
        counts = torch.cat([pool.seen.int(), torch.tensor([pool.passed], dtype=torch.int32)])
        counts = self.run.summed(counts.to(self.run.device)).cpu()
        pool.seen = counts[:-1] > 0
        if self.run.unit == "round" and not counts[-1]:
            waits = Waiting("nothing of this client has left it so far", soon=False)
            return look.answers.update(dict.fromkeys(every, waits))
        self._looks += 1
        try:
            rows, members = pool.compared(epoch, int(counts[-1]), everyone=self._plays)
        except NoOthers as error:
            look.answers |= dict.fromkeys(every, str(error))
            return
        if self._void:
            look.answers |= dict.fromkeys(every, self._void)
            return
        answers = self._ask(pool)
        self._newest = answers, epoch, int(counts[-1])
        limits = self._account.limits() if self._account is not None and self._plays else {}
        values = self._read_texts(pool, answers, rows, members, self._looks, limits)
        self._compared = str(values["pool"])
        look.answers |= {series: values[series.name] for series in every}

    @property
    def _plays(self) -> bool:
        """Return whether the texts play the game of an account."""
        return self._account is not None and self._account.why_not is None

    def _read_texts(
        self,
        pool: Pool,
        answers: TokenSnapshot,
        rows: Tensor,
        members: Tensor,
        number: int,
        limits: Mapping[str, float],
    ) -> dict[str, _Answer]:
        """Return what each attack reads off some of the texts by its name, and their digest."""
        assert self._base is not None
        texts = [pool.texts[row] for row in rows.tolist()]
        released = ReleasedModel(
            answers.rows(rows), self._base.rows(rows), compressed_bytes(texts, self._decode)
        )
        values: dict[str, _Answer] = {"pool": pool_digest(texts, members)}
        for attack in self.attacks:
            try:
                values[attack.name] = self._values(attack, released, members, number, limits)
            except Exception as error:
                values[attack.name] = reason(error)
        return values

    def _refuted(
        self, attack: Attack, guess: MemorizationGuess, members: Tensor, error: float
    ) -> float:
        """Return 1 where an attack refutes the account, and warn once; else 0."""
        assert self._account is not None
        why = self._account.refuted(guess.scores, members, error)
        if why is not None and attack.name not in self._refutations:
            self._refutations.add(attack.name)
            rank_zero_warn(
                f"{self.run.watcher}: THE ACCOUNT IS REFUTED by '{attack.name}' at step "
                f"{self.run.step}: {why}. Its noise, clipping or sampling is not what it accounts "
                "for, or something else lets texts into the weights. (An account that holds is "
                f"refuted in at most {self.settings.memorization.alpha:.0%} of runs.)"
            )
        return float(why is not None)

    def _values(
        self,
        attack: Attack,
        released: ReleasedModel,
        members: Tensor,
        number: int,
        limits: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the values of an attack by name, at the look of a number."""
        guess = attack.run(Observation(released=released))
        alpha = self.settings.memorization.alpha
        sizes = {
            "members": float(members.sum()),
            "others": float((~members).sum()),
            "alpha": spent_at(number, alpha),
        }
        if isinstance(attack, Extraction) and isinstance(guess, ExtractionGuess):
            values = extraction_values(guess, attack, members, look=number, alpha=alpha)
            hits = attack.extracted(guess.log_probs, max(attack.draws)), guess.greedy
            others = guess.asked & ~members
            values["visible"] = visible_excess(
                int((guess.asked & members).sum()),
                int(others.sum()),
                max(int(one[others].sum()) for one in hits),
                alpha=sizes["alpha"],
            )
        elif isinstance(guess, MemorizationGuess):
            ranked = sum(not isinstance(one, Extraction) for one in self.attacks)
            values, joint = (
                membership_values(guess.scores, members, look=number, alpha=one)
                for one in (alpha, alpha / ranked)
            )
            values |= {f"auc_joint_{end}": joint[f"auc_{end}"] for end in ("low", "high")}
            values["visible"] = visible_tpr(
                int(members.sum()), int((~members).sum()), look=number, alpha=alpha
            )
            if limits:
                error = spent_at(number, alpha / ranked)
                values |= {**limits, "refuted": self._refuted(attack, guess, members, error)}
        else:
            raise TypeError(f"no score is known for a {type(guess).__name__}")
        return values | sizes

    def results(self, look: Look) -> dict[Series, Result]:
        """Return what each attack's values are, packed."""
        return {one: self._packed(look, one) for one in self._series_of(self.attacks)}

    def _packed(self, look: Look, series: Series) -> Result:
        answer = look.answers.get(series, "the attack was not run")
        if isinstance(answer, dict):
            return Found([answer.get(name, math.nan) for name in self._names])
        return answer if isinstance(answer, Waiting) else Unknown(str(answer))

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the names of the values in the order in which they are packed."""
        ends = (f"{metric}{end}" for metric in self.metrics for end in ("", "_low", "_high"))
        return (*ends, *self.extras)

    def score(self, look: Look, series: Series, answer: Any) -> Sequence[float]:
        """Return nothing: :meth:`results` packs the values itself."""
        raise NotImplementedError

    # ---- over processes ---------------------------------------------------------------------

    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Return the values, which are the same on every process."""
        numbers = next(iter(rows.values()))
        return self._outcome(dict(zip(self._names, numbers, strict=True)), self._compared)

    def _outcome(self, values: Mapping[str, float], pool: str) -> Outcome:
        """Return the outcome of an attack's values on a pool of texts, by its digest."""
        triples = (self._names[n : n + 3] for n in range(0, 3 * len(self.metrics), 3))
        rates = {
            triple[0]: Rate(*(values.get(name, math.nan) for name in triple)) for triple in triples
        }
        extra = {name: values.get(name, math.nan) for name in self.extras}
        # The lower bound is what is shown; an attack has rates of membership or of extraction.
        rates["shown"] = Rate(rates["shown"].value, rates["shown"].value, rates["shown"].high)
        absent = ("extracted", "greedy") if math.isnan(extra["extracted_base"]) else ()
        absent = ("auc", "shown") if math.isnan(extra["p_value"]) else absent
        played = {name: rate for name, rate in rates.items() if name not in absent}
        extra = {name: value for name, value in extra.items() if not math.isnan(value)}
        return Outcome(played, int(extra["members"] + extra["others"]), extra=extra, pool=pool)

    # ---- the checkpoint that is chosen --------------------------------------------------------

    def choose(self, step: int, loss: float) -> float:
        """Return the loss that the newest weights are chosen by: the highest of a step's gates.

        Where it is the lowest so far, what the texts put aside show of these weights is kept.
        """
        loss = max(loss, self._choices.get(step, -math.inf))
        lowest = min((one for at, one in self._choices.items() if at != step), default=math.inf)
        self._choices[step] = loss
        if loss < lowest and step not in self._chosen:
            self._chosen[step] = self._confirmed()
        return loss

    def _confirmed(self) -> dict[str, _Answer]:
        """Return what each attack reads off the texts put aside, or why that is unknown."""
        pool = self._pool
        if pool is None or self._newest is None or not bool(pool.aside.any()):
            return {}
        answers, epoch, passed = self._newest
        try:
            rows, members = pool.compared(epoch, passed, aside=True, everyone=self._plays)
        except NoOthers as error:
            return dict.fromkeys((attack.name for attack in self.attacks), str(error))
        return self._read_texts(pool, answers, rows, members, 1, {})

    def chosen(self) -> tuple[int, dict[Series, Outcome]] | None:
        """Return the step of the weights that were chosen, and what texts put aside show of them.

        None where no weights were allowed, or no texts were put aside.
        """
        step = min(self._choices, key=self._choices.__getitem__, default=-1)
        values = self._chosen.get(step)
        if not values or math.isinf(self._choices[step]):
            return None
        outcomes = {}
        for attack in self.attacks:
            series = replace(Series.at(Stage.RELEASED, attack.name), name=f"{attack.name}_chosen")
            answer = values.get(attack.name, "it was not played when these weights were read")
            if isinstance(answer, str):
                outcomes[series] = unknown(self.metrics, answer)
            else:
                outcomes[series] = self._outcome(answer, str(values["pool"]))
        return step, outcomes

    # ---- checkpoints ------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the looks of an earlier fit."""
        self._looks, self._choices, self._chosen = 0, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Write the base's answers to a private file, and return where it is and its hash."""
        if self._pool is None or self._base is None:
            return {}
        tensors = self._tensors(self._pool, self._base)
        file = self._folder / self.file
        if self.run.processes == 1 or self.run.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(0o600, exist_ok=True)
            file.chmod(0o600)
            save_file(tensors, file)
            file.chmod(0o600)
        return {
            self.family: {
                "looks": self._looks,
                "due": self._due,
                "passed": self._pool.passed,
                "file": str(file),
                "digest": hash_tensors(tensors),
                "seen": self._pool.seen_in_checkpoints.to(torch.uint8),
                "aside": self._pool.aside.to(torch.uint8),
                "choices": self._choices,
                "chosen": self._chosen,
            }
        }

    @staticmethod
    def _tensors(pool: Pool, base: TokenSnapshot) -> dict[str, Tensor]:
        """Return what the private file holds."""
        tensors = {f.name: getattr(base, f.name).contiguous() for f in fields(TokenSnapshot)}
        return tensors | {f"text{n}": text.ids.contiguous() for n, text in enumerate(pool.texts)}

    def pool_line(self) -> PoolLine | None:
        """Return the record of the texts that are asked about; None where there are none."""
        pool, base = self._pool, self._base
        if pool is None or self._refusal:
            return None
        train = int(pool.trains.sum())
        return PoolLine(
            run="",
            way=pool.way,
            train=train,
            others=len(pool.texts) - train,
            aside=int(pool.aside.sum()),
            repeated=pool.repeated,
            short=pool.short,
            searched=pool.searched,
            base=None if base is None else hash_tensors(self._tensors(pool, base)),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember where the base's answers are."""
        self._saved = state.get(self.family, {})
        self._looks = int(self._saved.get("looks", 0))
        self._choices = dict(self._saved.get("choices", {}))
        self._chosen = dict(self._saved.get("chosen", {}))

    def _restore(self, pool: Pool) -> None:
        """Read what the base said, if the file and the texts are those of the run's begin."""
        saved, self._saved, self._base = self._saved, {}, None
        file = Path(saved["file"])
        try:
            check_private(file)
            tensors = load_file(file)
        except (OSError, ValueError):
            return
        names = [f.name for f in fields(TokenSnapshot)]
        texts = [tensors[f"text{n}"] for n in range(len(tensors) - len(names))]
        same = len(texts) == len(pool.texts) and all(
            torch.equal(ids, text.ids) for ids, text in zip(texts, pool.texts, strict=True)
        )
        if hash_tensors(tensors) == saved["digest"] and same:
            self._base = TokenSnapshot(*(tensors[name] for name in names))
            pool.seen = torch.as_tensor(saved["seen"]).bool()
            pool.aside = torch.as_tensor(saved.get("aside", pool.aside)).bool()
            self._due, pool.passed = int(saved["due"]), int(saved["passed"])

"""The lineup of a run: the attacks that run, what each of them reads, and their calibrations.

The attacks here read gradients or hidden states of training steps; those on the trained weights are
set up elsewhere. A *look* is one measurement at a step. An attack's *plan* says which parameters'
gradients it reads, and its *calibration* is work before the first step, such as fitting thresholds
on public text. The order: attacks that do not fit are excluded or refused, the others are planned
and calibrated, and at each look they are adapted to the present weights.

With ``attacks="auto"`` every attack that fits the model and the run is *played*, that is, it runs.
The :func:`table` that is logged has a line for each one: which gradients it reads and what it
costs, or which argument lets it run. One more line names those that do not fit. At its end is the
number of shared parameters that no attack tests.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_fedleak.attacks import Attack, MissingText, PublicText
from lightning_fedleak.attacks.public_text import share_work
from lightning_fedleak.defenses.processes import reshard
from lightning_fedleak.engine.channels.base import exclude
from lightning_fedleak.engine.channels.plans import HEAD_CAPABILITIES, Plan, admit, check_forward
from lightning_fedleak.engine.channels.steps import StepChannel, never_read, plan_of
from lightning_fedleak.engine.options import Options, Selection
from lightning_fedleak.engine.outcomes import Unknown
from lightning_fedleak.engine.run import Run, reason
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, Anatomy, without_peft
from lightning_fedleak.model.model_state import WeightsWritten, describe, saved_once
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.progress import Stopwatch, bars, measure_seconds, track
from lightning_fedleak.report.records import STATED
from lightning_fedleak.report.records.files import first_of

MAX_LINES = 3
"""Largest number of lines of an attack in the table; ``run.jsonl`` has the full reason."""
WIDTH = 110
"""Width of the table in characters."""
SHOWN_SECONDS = 0.01
"""Smallest cost of an attack that the table names; less disappears beside a step."""

# Follows the title if a causal model generates the text on which attacks are calibrated.
_TEXT_NOTE = ". Calibrated on text that the model writes itself; public_text= takes yours:"
# The reasons in a line of their own: arguments that let an attack run, and its own errors.
_OWN_LINE = re.compile(r"\w=|^fails on ")
_NO_ATTACK = "no attack. Nothing is tested in this run. That is 'unknown', not 'safe'."


@dataclass(frozen=True)
class Row:
    """The decision about one attack in this run.

    Attributes:
        attack: The name of the attack.
        reads: The parameters whose gradient it reads; empty if it reads layers of a server.
        why_not: Why it does not run; None if it does.
        exposed: Whether the gradients that it reads are shared, as far as is known.
        seconds: The estimated duration of a look; None if it was not measured.
        never: Why it can read no round of this run, whatever the data; None if it may.
    """

    attack: str
    reads: tuple[str, ...]
    why_not: str | None
    exposed: bool
    seconds: float | None
    never: str | None = None


def reads_of(plan: Plan | None, anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient an attack reads."""
    roles = () if plan is None else plan.roles
    return tuple(dict.fromkeys(anatomy.parameter_name(role) or role for role in roles))


def in_short(attack: str, refusal: str) -> str:
    """Return why an attack is refused, in one sentence without its name."""
    sentence = refusal.partition(". ")[0]
    sentence = re.sub(rf"^(\w+: )?(attack '\w+' |'{attack}' )?", "", sentence)
    return re.sub(r"(: remove (the attack|it))?\.?$", "", sentence)


def table(
    rows: Sequence[Row],
    unread: Sequence[str],
    *,
    writes: bool = False,
    watcher: str = "LeakageMonitor",
) -> str:
    """Return the table: a line for each attack, or a few.

    Args:
        rows: A row for each attack.
        unread: The names of shared parameters that no attack reads.
        writes: Whether attacks are calibrated on text that the model writes itself.
        watcher: The name of the class that runs the attacks.
    """
    runs = any(row.why_not is None for row in rows)
    title = f"these attacks{_TEXT_NOTE if writes else ':'}" if runs else _NO_ATTACK
    lines = [f"{watcher} runs {title}"]
    # What a user can change, or has to know, has a line of its own.
    unfit = [row.attack for row in rows if row.why_not and not _OWN_LINE.search(row.why_not)]
    unfit *= runs  # where none runs, each reason counts
    shown = [row for row in rows if row.attack not in unfit]
    width = max((len(row.attack) for row in shown), default=0)
    for row in shown:
        if row.never is not None:
            text = f"unknown in every round: {row.never}"
        elif row.why_not is None:
            seconds = row.seconds or 0.0
            cost = f"; about {seconds:.2g} s each time" * (seconds >= SHOWN_SECONDS)
            text = f"reads {first_of(row.reads, 1) or 'layers that the server adds'}{cost}"
        else:
            text = f"not run: {row.why_not}"
        lines += _wrapped(text, f"  {row.attack:<{width}}  ")
    if unfit:
        lines += _wrapped(f"{', '.join(unfit)}. Why: run.jsonl.", "  Not possible or needed here: ")
    if unread:
        n = len(unread)
        lines.append(f"  Shared, tested by no attack: {n} parameters. Their names: run.jsonl.")
    return "\n".join(lines)


def _wrapped(text: str, label: str) -> list[str]:
    """Return a few lines of text, the first one behind a label."""
    indent = " " * len(label)
    wrapper = textwrap.TextWrapper(WIDTH, label, indent, max_lines=MAX_LINES, placeholder=" ...")
    return wrapper.wrap(text)


SLOW = 2.0
"""An attack that took this multiple of ``look_seconds`` at two looks in a row is left out. With a
larger value slow attacks go on; with a smaller one few attacks run on large models."""
LOOKS_OUT = 8
"""Looks for which a slow attack is left out; each time that it is slow again, twice as many.

More: one that was slow for another reason is missed for longer. Fewer: looks are slow more often.
"""
_MAX_ESTIMATE_TEXTS = 8
"""Largest number of texts in the batch for which the seconds of a look are estimated."""
_NOT_SHARED_REASON = "what it reads is not trained, and so not shared"


class Lineup:
    """Decide which attacks run, plan what they read, and calibrate them once.

    A plan states the parameters whose gradients an attack reads. Plans change if layers are frozen
    or unfrozen.

    Args:
        run: The run; the channels are open on it.
        selection: The attacks. With ``attacks="auto"`` those that cannot read this model or run, or
            take too long, are excluded. Otherwise they raise an error.
        options: The settings by which the run is watched.
        channels: The channels that have attacks.
        refused: The reasons why attacks are excluded already, by name.

    Attributes:
        plans: The plans of the attacks that give results, in the order of the logs.
        prepared: The names of the calibrated attacks.
        rows: With ``attacks="auto"`` the decision about each attack.
        calibrating_seconds: The duration of all calibrations.
        set_up_seconds: The computation time of each calibration, by the attack's name.
        is_sharded: Whether each process holds a part of every layer.
        needed: The names of attacks that run although another one reads as much.
        spared: The attacks that do not run because another one reads as much.

    Raises:
        ValueError: An attack does not fit the model or the run.
    """

    def __init__(
        self,
        run: Run,
        selection: Selection,
        options: Options,
        channels: Sequence[StepChannel],
        refused: Mapping[str, str],
    ) -> None:
        self._run = run
        self._attacks = selection.attacks
        self._channels = tuple(channels)
        self._options = options
        self._first_step = run.step * run.local_steps
        self._is_auto = selection.auto
        # Whether attacks are calibrated on text that the model generates.
        self._self_text = run.anatomy.kind == "causal" and not selection.text_passed
        self._max_seconds = options.look_seconds  # of one attack at one look
        self._refused = dict(refused)
        self._lacking_text: set[str] = set()
        self._ever_exposed: set[str] = set()
        self.plans: list[Plan] = []
        self.prepared: set[str] = set()
        self.rows: list[Row] = []
        self.calibrating_seconds = 0.0
        self.set_up_seconds: dict[str, float] = {}
        self._too_slow: dict[str, str] = {}  # why attacks are left out, by name
        self._slow_runs: Counter[str] = Counter()  # looks in a row at which an attack was slow
        self._looks_out: dict[str, int] = {}  # looks for which an attack stays left out
        self.needed: Collection[str] = ()
        self._doubted: set[str] = set()  # attacks without which another one is not spared
        self.spared: list[Attack] = []
        reshard(run.anatomy.root)  # FSDP2 leaves layers unsharded after an evaluation
        self.is_sharded = run.is_sharded
        work: dict[Hashable, Any] = {}  # results that the checks of several attacks share
        for channel in self._channels:
            exclude(channel, self._refused.keys())
            for attack in channel.attacks:
                with self._excluding_failures(attack), share_work(work):
                    attack.check_device(run.anatomy)
                    if self._is_auto:  # a listed attack may have settings that need no text
                        check_forward(attack, run.anatomy)
                    plan_of(channel, attack)
                    admit(attack, channel.sees, run)
            exclude(channel, self._refused.keys())

    @contextmanager
    def _excluding_failures(self, attack: Attack) -> Iterator[None]:
        """Exclude an attack that fails in this block, with ``attacks="auto"``; else raise."""
        try:
            yield
        except WeightsWritten:  # the trained weights were changed: the run must not go on
            raise
        except Exception as error:
            if not self._is_auto:
                if not isinstance(error, ValueError):
                    check_forward(attack, self._run.anatomy)
                raise
            if isinstance(error, MissingText):
                self._lacking_text.add(attack.name)
            why = str(error)
            if not isinstance(error, ValueError):
                model = type(without_peft(self._run.anatomy.model)).__name__
                why = f"fails on {model} ({_root_cause(error)})"
            self._refused.setdefault(attack.name, in_short(attack.name, why))

    @property
    def untested(self) -> dict[str, str]:
        """Return why an applicable attack does not run for lack of public text, by family."""
        return {
            c.family: f"'{a.name}', which applies, is not run: {self._refused[a.name]}"
            for c in self._channels
            for a in c.listed_attacks
            if a.name in self._lacking_text
        }

    @property
    def exposed(self) -> list[Plan]:
        """Return the plans of attacks that are not too slow and whose gradients are shared."""
        return [p for p in self.plans if p.exposed and p.attack.name not in self._too_slow]

    @property
    def playing(self) -> frozenset[str]:
        """Return the names of the attacks that give results, also if those are always 0."""
        return frozenset(plan.attack.name for plan in self.plans)

    @property
    def look_seconds(self) -> float:
        """Return the estimated seconds of a look with ``attacks="auto"``; else 0."""
        return sum(row.seconds or 0.0 for row in self.rows if row.why_not is None)

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the names of the shared parameters whose gradient no attack reads."""
        if self._options.shares not in (None, "gradients"):
            return ()
        anatomy, ends = self._run.anatomy, {HEAD_WEIGHT, EMBEDDING_WEIGHT}
        roles = {role for plan in self.plans if plan.exposed for role in plan.roles}
        if anatomy.parameter(HEAD_WEIGHT) is anatomy.parameter(EMBEDDING_WEIGHT) and roles & ends:
            roles |= ends
        tested = {anatomy.parameter_name(role) for role in roles}
        return tuple(name for name in self.trained if name not in tested)

    def unread_family(self, family: str) -> str | None:
        """Return the message that no attack on a family reads anything shared; None if one does."""
        names = {a.name for c in self._channels if c.family == family for a in c.attacks}
        n = len(self.trained)
        if names & {plan.attack.name for plan in self.exposed} or not n:
            return None
        return (
            f"no attack on {family} of this monitor reads anything that is shared in this run, and "
            f"{n} trained parameter{'s are' if n > 1 else ' is'}"
        )

    def show(self) -> None:
        """Log what leaves, if the user states it, and with ``attacks="auto"`` which attacks run."""
        if self._options.shares:
            self._run.say(STATED.format(self._options.shares))
        if self.rows:
            watcher = self._run.watcher
            rank_zero_info(table(self.rows, self.unread, writes=self._self_text, watcher=watcher))

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the trained parameters."""
        return self._run.anatomy.trainable_names()

    def follow(self) -> bool:
        """Plan the attacks for the parameters that are trained now; return whether plans changed.

        Layers may be frozen and unfrozen during a run.
        """
        by_name = {a.name: plan_of(c, a) for c in self._channels for a in c.attacks}
        self._ever_exposed |= {name for name, plan in by_name.items() if plan.exposed}
        if self._is_auto:  # an attack whose gradients were never shared is not logged
            by_name = {n: plan for n, plan in by_name.items() if n in self._ever_exposed}
            self.spared = [p.attack for p in by_name.values() if self._is_spared(p, by_name)]
            by_name = {n: plan for n, plan in by_name.items() if plan.attack not in self.spared}
        plans = [by_name[a.name] for a in self._attacks if a.name in by_name]
        if plans == self.plans:
            return False
        self.plans = plans
        self._warn_of_untested()
        for channel in self._channels:
            channel.plans = tuple(by_name[a.name] for a in channel.attacks if a.name in by_name)
        self._give_run_facts()
        return True

    def _is_spared(self, plan: Plan, plans: Mapping[str, Plan]) -> bool:
        """Return whether another one of the planned attacks reads as much as this one."""
        other = plans.get(plan.attack.second_to)
        if other is None or not other.exposed or self._never_reads(other.attack.name):
            return False
        return plan.attack.name not in self.needed and other.attack.name not in self._doubted

    def doubt(self, names: Collection[str]) -> bool:
        """Set the attacks whose newest number is unknown, and return whether that changes plans."""
        others = {a.second_to for c in self._channels for a in c.attacks} & {*names}
        changed, self._doubted = others != self._doubted, others
        return changed

    def _warn_of_untested(self) -> None:
        """Warn of attacks that have nothing to read, and of parameters that no attack reads."""
        for plan in self.plans:
            if plan.exposed:
                continue
            rank_zero_warn(
                f"{self._run.watcher}: '{plan.attack.name}' reads the gradient of "
                f"{', '.join(plan.roles)}, which is not shared in this run (not trained). It is "
                f"logged as 0 with leakage/{plan.attack.name}/exposed = 0. That is not 'safe': "
                f"{len(self.unread)} of {len(self.trained)} trained parameters are tested by none "
                "of these attacks. attacks='auto' takes all that read this run."
            )

    def begin(self, step: int) -> None:
        """Set the first step. A resumed fit knows it only after the attacks are calibrated."""
        self._first_step = step
        self._give_run_facts()

    def _give_run_facts(self) -> None:
        """Give every attack the facts of the run."""
        for plan in self.plans:
            facts = plan.facts(self._run, self._options.local_steps, self._first_step)
            with self._excluding_failures(plan.attack):
                plan.attack.meet(facts)

    def calibrate(self, restored: Mapping[str, Any], follow: Callable[[], object]) -> None:
        """Calibrate every attack whose gradients are shared.

        Args:
            restored: The settings and the calibration of attacks in a checkpoint, by name. A
                calibration is used if the settings are still the same.
            follow: Calls :meth:`follow`, and adapts the taps to the new plans.

        Raises:
            ValueError: An attack does not fit the model.
        """
        costs: dict[str, float] = {}
        with (
            saved_once(not self.is_sharded), self._gathered(self.exposed),
            share_work(), bars(self._run.shows_progress),
        ):  # fmt: skip
            title = f"{self._run.watcher} calibrates"
            for plan in track(self.exposed, title, lambda plan: plan.attack.name):
                with self._excluding_failures(plan.attack):
                    saved = restored.get(plan.attack.name)
                    costs |= self._calibrated(plan.attack, saved)
        for channel in self._channels:
            exclude(channel, self._refused.keys())
            for attack in channel.attacks:
                with self._excluding_failures(attack):
                    channel.check(attack)
        if self._is_auto:
            self._choose(costs, follow)

    def _choose(self, costs: Mapping[str, float], follow: Callable[[], object]) -> None:
        """Exclude attacks that failed or take too long. The first process decides for all.

        One that an excluded attack spared is calibrated at its first look.
        """
        for name, seconds in costs.items():
            if seconds > self._max_seconds:
                self._refused.setdefault(
                    name,
                    f"it takes about {seconds:.2g} s each time, and "
                    f"look_seconds={self._max_seconds:g}",
                )
        self._refused, costs = self._run.broadcast((self._refused, dict(costs)))
        for channel in self._channels:
            exclude(channel, self._refused.keys())
        follow()
        plans = {plan.attack.name: plan for plan in self.plans}
        anatomy = self._run.anatomy
        self.rows = [
            Row(
                attack.name,
                reads_of(plans.get(attack.name), anatomy),
                self._why_not(attack, plans),
                attack.name in self._ever_exposed,
                costs.get(attack.name),
                self._never_reads(attack.name) if attack.name in self.playing else None,
            )
            for attack in self._attacks
        ]

    def _why_not(self, attack: Attack, plans: Mapping[str, Plan]) -> str | None:
        """Return why an attack does not run; None if it does."""
        if attack.name in self._refused or attack.name in plans:
            return self._refused.get(attack.name)
        if attack in self.spared:
            return f"{attack.second_to} reads as much; it runs where that one has no result"
        return _NOT_SHARED_REASON

    def _never_reads(self, name: str) -> str | None:
        """Return why an attack can read no round because of the optimizer; None if it can."""
        if self._options.local_steps is None:
            return None
        channel = next(c for c in self._channels if any(a.name == name for a in c.attacks))
        answer = never_read(channel, name, fresh=True)
        return answer.why if isinstance(answer, Unknown) else None

    def _calibrated(self, attack: Attack, saved: Mapping[str, Any] | None) -> dict[str, float]:
        """Calibrate an attack, from a checkpoint if it holds one, and return its estimated seconds.

        An attack whose looks take too long is not calibrated.
        """
        if saved is not None and saved["config"] == attack.fingerprint():
            attack.load_state_dict(saved["tensors"])
            if attack.restores_fully:
                self.prepared.add(attack.name)
            self._give_run_facts()
        is_priced = self._is_auto and not self.is_sharded
        texts = 2 * min(self._options.games.targets, _MAX_ESTIMATE_TEXTS)
        seconds = attack.estimate(self._run.anatomy, texts) if is_priced else None
        if seconds is None or seconds <= self._max_seconds:
            self.prepare(attack)
        return {} if seconds is None else {attack.name: seconds}

    def prepare(self, attack: Attack) -> None:
        """Calibrate an attack, once in a run, and log the duration if it is over a second."""
        if attack.name in self.prepared:
            return
        watch, anatomy = Stopwatch(), self._run.anatomy
        seconds = measure_seconds(partial(attack.prepare, anatomy), anatomy.device)
        self.prepared.add(attack.name)
        self.set_up_seconds[attack.name] = seconds
        self.calibrating_seconds += watch.seconds
        if seconds > 1:
            self._run.say(f"'{attack.name}' calibrated in {seconds:.1f} s")

    def refresh(self, step: int, names: Collection[str]) -> dict[str, str]:
        """Adapt attacks to the present weights, and return the reasons of failures, by name.

        Args:
            step: The optimizer step of the look.
            names: The names of the attacks to adapt.
        """
        failed = {name: why for name, why in self._too_slow.items() if name in names}
        plans = [plan for plan in self.exposed if plan.attack.name in names]
        with self._gathered(plans) if self.is_sharded else nullcontext(), share_work():
            for plan in plans:
                try:
                    self.prepare(plan.attack)
                    with self._run.timed(plan.attack.name):
                        plan.attack.refresh(self._run.anatomy, step)
                except Exception as error:
                    failed[plan.attack.name] = reason(error)
        return failed

    def leave_out_slow(self, longest: Mapping[str, float]) -> None:
        """With ``attacks="auto"``, leave out attacks that were far slower than estimated.

        They are tried again after :data:`LOOKS_OUT` looks.

        Args:
            longest: The seconds of the longest run of each attack in a look, by name.
        """
        if not self._is_auto or self.is_sharded:
            return
        self._looks_out = {name: looks - 1 for name, looks in self._looks_out.items()}
        self._too_slow = {n: why for n, why in self._too_slow.items() if self._looks_out[n] > 0}
        for name, seconds in self._run.broadcast(dict(longest)).items():
            is_slow = seconds > SLOW * self._max_seconds
            self._slow_runs[name] = slow_runs = self._slow_runs[name] + 1 if is_slow else 0
            if slow_runs > 1:
                self._looks_out[name] = looks = LOOKS_OUT * 2 ** (slow_runs - 2)
                why = f"a run took {seconds:.2g} s, and look_seconds={self._max_seconds:g}"
                self._too_slow[name] = f"not run at {looks} measurements: {why}"
                self._run.say(f"'{name}' is {self._too_slow[name]}")

    def _gathered(self, plans: Sequence[Plan]) -> AbstractContextManager[None]:
        """Return a context in which a sharded model is gathered, if an attack reads its weights."""
        kinds = [type(plan.attack) for plan in plans]
        reads = [
            kind.gathers
            for kind in kinds
            if kind.prepare is not Attack.prepare or kind.refresh is not Attack.refresh
        ]
        if not reads:
            return nullcontext()
        return whole_model(self._run.anatomy.root, as_read=all(reads))


def _root_cause(error: BaseException) -> str:
    """Return the root cause of an error at set-up, whose message cannot quote private text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error, quotes=True)


def check_texts(
    attacks: Sequence[Attack], others: Mapping[str, PublicText | None], anatomy: Anatomy
) -> None:
    """Refuse public text that the model cannot read.

    Args:
        attacks: The attacks whose ``public_text`` is checked.
        others: Further texts, by the name that a message uses.
        anatomy: The anatomy of the model.

    Raises:
        ValueError: A token id is beyond the embedding's rows, or an attack on the head of a model
            with two vocabularies has no texts of the target's.
    """
    named = {name: text for name, text in others.items() if text is not None}
    for attack in attacks:
        text = getattr(attack, "public_text", None)
        if isinstance(text, PublicText):
            named[f"the public text of attack '{attack.name}'"] = text
            pairs = anatomy.target_rows is None or text.targets is not None
            if not pairs and HEAD_CAPABILITIES & attack.threat_model.needs:
                raise ValueError(
                    f"attack '{attack.name}': in this model source and target have vocabularies of "
                    "their own: give PublicText(texts, targets=...), token ids of each"
                )
    for name, text in named.items():
        read: list[Any] = [(text.sentences, anatomy.embedding_name, anatomy.embedding_rows)]
        if text.targets is not None and anatomy.kind == "seq2seq":
            read.append((text.targets, anatomy.head_name, anatomy.vocab_size))
        for ids, matrix, rows in read:
            largest = max((int(row.max()) for row in ids if len(row)), default=0)
            if largest >= rows:
                raise ValueError(
                    f"{name} holds token id {largest}, and the model's '{matrix}' has {rows} rows: "
                    "give the tokenizer that this model was trained with, or call "
                    "model.resize_token_embeddings(len(tokenizer)) first"
                )

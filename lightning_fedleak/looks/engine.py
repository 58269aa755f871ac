"""The engine of a watched run: it runs attacks at looks, and scores, logs and stores results.

A face owns an :class:`Engine` and reports the moments of its training to it::

    engine = Engine(selected("auto", local_steps=None), Options())
    engine.reset()
    engine.check(processes, anatomy)       # before the model is on its device
    engine.begin(run, destination)         # calibrates; raises where an attack does not fit
    for batch in loader:
        engine.batch_begins(batch)
        engine.loss_computed(loss)         # before backward
        engine.optimizer_steps(optimizer)  # before the step
        engine.batch_ends(trained=True)    # after it
    engine.training_ends()
    engine.end("finished")
    engine.close()
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.auto import ASSUMED, candidates
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.batches import BatchAdapter
from lightning_fedleak.looks import choice
from lightning_fedleak.looks.cache import CalibrationCache
from lightning_fedleak.looks.cadence import Cadence, EveryNSteps
from lightning_fedleak.looks.channels.base import Channel, Settings, channels_of
from lightning_fedleak.looks.channels.targets import Games
from lightning_fedleak.looks.facts import facts_of
from lightning_fedleak.looks.fit import Fit
from lightning_fedleak.looks.log import (
    JsonLines,
    Report,
    RevealFiles,
    RunRecord,
    accounting,
    privacy_tags,
    privacy_values,
    releases_by,
)
from lightning_fedleak.looks.look import Look, Outcome, Series, reason
from lightning_fedleak.looks.plan import (
    check_attacks,
    check_rounds,
    check_texts,
    warn_of_other_tokenizers,
)
from lightning_fedleak.looks.results import WORST, Results
from lightning_fedleak.looks.run import Processes, Run
from lightning_fedleak.looks.tensorboard import Logger, add_pages
from lightning_fedleak.records import GateDecision
from lightning_fedleak.snapshots import Stage
from lightning_fedleak.threats import Capability

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class Selection:
    """The attacks of a run, as its user chose them.

    Attributes:
        attacks: the attacks; with ``auto`` all candidates for this adversary.
        auto: whether those that can read this run are chosen when it begins.
        assume: what the adversary has besides what it sees; None: what the attacks need.
        text_passed: whether the user passed public text for the chosen attacks.
    """

    attacks: tuple[Attack, ...]
    auto: bool
    assume: frozenset[Capability] | None
    text_passed: bool


def selected(
    attacks: Sequence[Attack] | Attack | str,
    assume: Collection[Capability] | None = None,
    public_text: TextSource | None = None,
    tokenizer: Any | None = None,
    *,
    rounds: bool = False,
) -> Selection:
    """Return the attacks that a user's arguments ask for.

    Args:
        attacks: the attacks, or ``"auto"``.
        assume: capabilities of the adversary.
        public_text: what attacks that choose themselves are calibrated on.
        tokenizer: reads its texts.
        rounds: what leaves is a round's update.

    Raises:
        ValueError: an unknown word, public text beside listed attacks, or attacks that cannot be
            logged together.
        TypeError: something that is no attack.
    """
    asked = None if assume is None else frozenset(assume)
    if attacks == "auto":
        asked = ASSUMED if asked is None else asked
        played = tuple(candidates(asked, public_text, tokenizer, rounds=rounds))
        check_attacks(played)
        return Selection(played, True, asked, public_text not in (None, "sampled"))
    if isinstance(attacks, str):
        raise ValueError(f"attacks must be 'auto' or a list of attacks, got {attacks!r}")
    if public_text is not None:
        raise ValueError(
            "public_text= is what attacks='auto' calibrates on; give it to the attacks that "
            "you list, AlignedFlatChat(public_text) say"
        )
    # A class in place of an attack is refused by its name.
    played = (attacks,) if isinstance(attacks, Attack | type) else tuple(attacks)
    check_attacks(played)
    return Selection(played, False, asked, False)


@dataclass(frozen=True)
class Options:
    """How a run is watched, whoever trains; see :class:`~lightning_fedleak.LeakageMonitor`.

    Attributes:
        cadence: when to look.
        stages: where to measure.
        batch_adapter: reads batches of an unknown form.
        utility: names of the user's metrics that are logged beside leakage.
        local_steps: optimizer steps of a round; None for single gradients.
        head_own_part: attack the head's own part of a tied matrix too.
        tokenizer: decodes what is revealed.
        games: how membership games are played.
        texts: that are reconstructed at a look, at most.
        look_seconds: that a look of an attack which chooses itself may take.
        cache: keep calibrations on disk.
        reveal: write recovered words and texts to local files.
    """

    cadence: Cadence = field(default_factory=lambda: EveryNSteps(50))
    stages: tuple[Stage, ...] = (Stage.SHARED,)
    batch_adapter: BatchAdapter | None = None
    utility: tuple[str, ...] = ()
    local_steps: int | None = None
    head_own_part: bool = False
    tokenizer: Any | None = None
    games: Games = field(default_factory=Games)
    texts: int = 4
    look_seconds: float = 30.0
    cache: bool = True
    reveal: bool = False


@dataclass(frozen=True)
class Destination:
    """Where the results of a run go.

    Attributes:
        folder: of ``leakage.jsonl``, ``run.jsonl`` and what is revealed.
        loggers: take every finite value.
        boards: the TensorBoard writers among them, on the process that writes.
        settings: the user's settings by name, for TensorBoard's table.
        further: names of metrics that somebody else logs beside these settings.
        training: how the model is trained, for the record.
        fit: an id that all that watch this run share; None makes one.
    """

    folder: Path
    loggers: Sequence[Logger] = ()
    boards: Sequence[SummaryWriter] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    further: Sequence[str] = ()
    training: Mapping[str, object] = field(default_factory=dict)
    fit: str | None = None


class Engine:
    """Watches runs: decides when to look, lets attacks guess, scores, logs and remembers.

    Args:
        selection: the attacks.
        options: how a run is watched.

    Attributes:
        selection: as above.
        options: as above.
        channels: one for each family of leak.
        series: the channel of each series, in the order of the logs.
        results: of all looks of the newest run.
        assume: what the adversary has besides what it sees.
        fit: the run at work; None between runs.
        jsonl: the results' file of the newest run.
        record: the file that says what the run was; None outside of a run and on processes but the
            first.

    Raises:
        ValueError: contradictory options.
    """

    def __init__(self, selection: Selection, options: Options) -> None:
        check_rounds(options.local_steps, options.stages, head_own_part=options.head_own_part)
        self.selection = selection
        self.options = options
        settings = Settings(
            options.stages,
            options.local_steps,
            options.head_own_part,
            options.games,
            options.texts,
        )
        self.channels = channels_of(selection.attacks, settings)
        self.series = _series_of(selection.attacks, self.channels, options.stages)
        adversaries = frozenset().union(*(c.adversary for c in self.channels if c.attacks))
        self.assume = adversaries if selection.assume is None else selection.assume
        self.results = Results(self.series)
        self.fit: Fit | None = None
        self.jsonl: JsonLines | None = None
        self.record: RunRecord | None = None
        self._report: Report | None = None
        self._calibrations: dict[str, object] = {}
        self._earlier: dict[str, object] = {}
        self._last: dict[str, object] = {}
        self._prepared: set[str] = set()
        self._refused: dict[str, str] = {}
        self._forget_listeners()

    def _forget_listeners(self) -> None:
        self._after_look: list[Callable[[], None]] = []
        self._after_training: list[Callable[[], None]] = []
        self._before_first: list[Callable[[], None]] = []
        self._decisions: list[str] = []
        self._gates: list[Mapping[str, object]] = []

    # ---- what a gate asks -------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of the values that are logged at each look."""
        return ["monitor/failures", "monitor/seconds", *self.results.names()]

    def subscribe(
        self,
        after_look: Callable[[], None],
        logs: Sequence[str] = (),
        *,
        facts: Mapping[str, object] | None = None,
        before_first: Callable[[], None] | None = None,
        after_training: Callable[[], None] | None = None,
    ) -> None:
        """Call ``after_look()`` on every process after each look, until the run ends.

        Args:
            after_look: is called.
            logs: names of the values that it logs then, for TensorBoard's page.
            facts: what ``run.jsonl`` records of the subscriber, a gate.
            before_first: is called once it is known what is read, before the first step.
            after_training: is called when training ends, after the last results.
        """
        self._after_look.append(after_look)
        self._decisions += logs
        if facts is not None:
            self._gates.append(facts)
        if before_first is not None:
            self._before_first.append(before_first)
        if after_training is not None:
            self._after_training.append(after_training)

    def is_of_own_threshold(self, name: str) -> bool:
        """Return whether a logged value judges an attack's own yes or no, and not its scores."""
        root, _, metric = name.rpartition("/")
        channels = (c for series, c in self.series.items() if series.log_name == root)
        return any(metric in channel.own_threshold for channel in channels)

    def looks_until_known(self, name: str, clients: int) -> tuple[int, str] | None:
        """Return after how many looks a logged value is first known.

        Args:
            name: of the value in the logs.
            clients: that it is of, together.

        Returns:
            The number of looks and why so many; None where it is known at every look.
        """
        root, _, metric = name.rpartition("/")
        channels = {series.log_name: channel for series, channel in self.series.items()}
        return channels[root].looks_until_known(metric, clients) if root in channels else None

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the log names that ``leakage/worst/<family>`` is the highest of, or none."""
        root, _, family = name.rpartition("/")
        if root != WORST or name not in self.results.names():
            return ()
        return self.results.headlines(family)

    def untested(self, name: str) -> str:
        """Return which attack on the family of ``leakage/worst/<family>`` lacks text, or ``""``."""
        return self.results.untested.get(name.removeprefix(f"{WORST}/"), "")

    def unread(self, name: str) -> str | None:
        """Return why a logged value says nothing of what is shared now; None: it does.

        Nothing is tested of an attack that is not played. One whose surface is not shared reads 0,
        and where no attack of its family reads anything, that says nothing of what is shared
        instead.

        Args:
            name: of the value in the logs.
        """
        lineup = self._fit.lineup
        root, _, metric = name.rpartition("/")
        by_root = {series.log_name: series for series in self.series}
        family = metric if root == WORST else None
        if root in by_root:
            attack, family = by_root[root].attack, self.series[by_root[root]].family
            if attack not in lineup.playing:
                why = {row.attack: row.why_not for row in lineup.rows}[attack]
                return f"'{attack}' is not played in this run: {why}"
        if family is None:
            return None
        names = {a.name for c in self.channels if c.family == family for a in c.attacks}
        if names & {plan.attack.name for plan in lineup.exposed} or not lineup.trained:
            return None
        return (
            f"no attack on {family} of this monitor reads anything that is shared in this run, and "
            f"{len(lineup.trained)} trained parameters are"
        )

    def others_on(self, name: str) -> str:
        """Return attacks that are not in use, read this run, and are of a logged value's family."""
        root, _, metric = name.rpartition("/")
        families = {series.log_name: channel.family for series, channel in self.series.items()}
        return self._fit.lineup.others_on(families.get(root, metric))

    def record_decision(self, decision: GateDecision) -> None:
        """Leave a line in ``run.jsonl``, on the first process."""
        if self.record is not None:
            self.record.decided(decision)

    def canary_scores(self, attack: str | None) -> Tensor:
        """Return (m,) one score for each of the user's canaries.

        Raises:
            ValueError: none are kept, no such attack, or no look has scored them.
        """
        for channel in self.channels:
            if (scores := channel.canary_scores(attack)) is not None:
                return scores
        raise ValueError("canaries are scored with games=Games(canaries=..., score_canaries='max')")

    # ---- a run begins -----------------------------------------------------------------------

    @property
    def _fit(self) -> Fit:
        """The run at work."""
        if self.fit is None:
            raise RuntimeError("no run has begun: Engine.begin(run, destination) comes first")
        return self.fit

    def reset(self) -> None:
        """Forget the looks of an earlier run."""
        self.results.clear()
        for channel in self.channels:
            channel.attacks = channel.given
            channel.clear()
        self.results.reset_families()

    def check(self, processes: Processes, anatomy: Callable[[], Anatomy]) -> None:
        """Check what can be checked before the model is on its device.

        Args:
            processes: how the run is spread.
            anatomy: finds the model's parts.

        Raises:
            ValueError: an attack that the user listed does not fit the run.
        """
        ranks = processes.count > 1 and processes.client == "rank"
        if self.options.local_steps is not None and ranks:
            raise ValueError(
                "local_steps describes one client that trains on its own; DDP averages at every "
                "step. Use client='world', or run one process."
            )
        self._refused = {}
        for channel in self.channels:
            try:
                channel.setup(processes, anatomy)
            except ValueError as error:
                if not self.selection.auto:
                    raise
                self._refused |= {attack.name: str(error) for attack in channel.attacks}

    def begin(self, run: Run, destination: Destination) -> None:
        """Calibrate the attacks, install the taps and begin the record.

        Args:
            run: the run; what it trains is on its device.
            destination: where results go.

        Raises:
            ValueError: an attack does not fit the model or the run.
        """
        options, attacks = self.options, self.selection.attacks
        self.check_texts(run.anatomy)
        self.jsonl = JsonLines(destination.folder / "leakage.jsonl")
        rounds, first = options.local_steps, run.rank == 0
        self._report = report = Report(
            destination.loggers,
            destination.boards,
            attacks,
            self.jsonl if first else None,
            RevealFiles(destination.folder, run.rank, options.tokenizer)
            if options.reveal
            else None,
            client="pooled" if run.processes > 1 and run.client == "rank" else 0,
            round_of=None if rounds is None else lambda step: step // rounds,
            watcher=run.watcher,
        )
        self.fit = Fit(
            run,
            attacks,
            self.series,
            [channel for channel in self.channels if channel.attacks],
            stages=options.stages,
            cadence=options.cadence,
            local_steps=rounds,
            batch_adapter=options.batch_adapter,
            choosing=self.selection.auto,
            most_seconds=options.look_seconds,
            refused=self._refused,
            cache=CalibrationCache() if options.cache else None,
        )
        lineup = self.fit.lineup
        self._prepared = lineup.prepared
        calibrations, self._calibrations = self._calibrations, {}
        earlier, self._earlier = self._earlier, {}
        self.fit.calibrate(calibrations)
        self.results.playing = {s for s in self.series if s.attack in lineup.playing}
        self.results.untested = lineup.untested
        if self.selection.auto:
            writes = run.anatomy.kind == "causal" and not self.selection.text_passed
            choice.show(lineup.rows, lineup.unread, self.assume, writes=writes, watcher=run.watcher)
            report.write_not_played(lineup.rows, run.step)
        if first:
            self._show_pages(run, destination)
        for listener in self._before_first:
            listener()
        if first:
            self.record = RunRecord(
                destination.folder / "run.jsonl", self.jsonl.run, report.warn_once
            )
            self.record.begins(
                facts_of(
                    run,
                    lineup,
                    self.series,
                    fit=destination.fit or uuid.uuid4().hex,
                    training=destination.training,
                    gates=self._gates,
                    monitor=self._settings(),
                    resumed=earlier,
                )
            )

    def _show_pages(self, run: Run, destination: Destination) -> None:
        shown = {s: c for s, c in self.series.items() if s in self.results.playing}
        families = {channel.family for channel in shown.values()}
        add_pages(
            destination.boards,
            self.options.utility,
            shown,
            privacy=privacy_tags(accounting(run.defenses)),
            decisions=self._decisions,
            worst=[f"{WORST}/{f}" for f in self.results.families if f in families],
            settings=destination.settings,
            further=destination.further,
        )

    def check_texts(self, anatomy: Anatomy) -> None:
        """Refuse public text of another vocabulary, and warn of another model's tokenizer."""
        held_out, attacks = self.options.games.held_out, self.selection.attacks
        check_texts(attacks, {"games=Games(held_out=)": held_out}, anatomy)
        texts = [held_out, *(getattr(attack, "public_text", None) for attack in attacks)]
        tokenizers = [t.tokenizer for t in texts if isinstance(t, PublicText)]
        warn_of_other_tokenizers([self.options.tokenizer, *tokenizers], anatomy)

    def _settings(self) -> dict[str, object]:
        return {
            "looks": self.options.cadence.argument,
            "stages": [str(stage) for stage in self.options.stages],
            "local_steps": self.options.local_steps,
            "attacks": "auto" if self.selection.auto else "listed",
            "reveal": self.options.reveal,
        }

    def training_begins(self) -> None:
        """Remember how many looks came before this run, and where it starts."""
        run = self._fit.run
        self.results.begin()
        if run.rank != 0:  # the first process alone goes on with all clients' games
            for channel in self.channels:
                channel.clear()
        self.options.cadence.next_step = run.step
        self._fit.lineup.begin(run.step)

    # ---- a step -----------------------------------------------------------------------------

    def batch_begins(self, batch: Any) -> None:
        """Start a look where one is due, and take the truth before any defence acts."""
        self._fit.batch_starts(self._fit.run.step, batch)

    def loss_computed(self, loss: Tensor) -> None:
        """Note which parameters have a term of their own in the loss, such as an L2 penalty."""
        self._fit.before_backward(loss)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that this batch ends an optimizer step, and does not only accumulate gradients."""
        self._fit.before_step(optimizer)

    def batch_ends(self, *, trained: bool) -> None:
        """Log a look once its optimizer step is over.

        Args:
            trained: the batch gave a gradient.

        Raises:
            RuntimeError: an optimizer stepped, and the run did not count it.
        """
        ended = self._fit.step_ends(trained)
        if ended is None:
            return
        look, outcomes = ended
        run = self._fit.run
        if run.step == look.step:
            raise RuntimeError(run.uncounted_step)
        settled = self.results.settled(look, outcomes)
        if settled is not None:
            self._publish(look, settled)
            self._fit.waiting = self.results.waiting
        elif look.scope is None:
            self.options.cadence.next_step = run.step

    def _publish(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        run, report = self._fit.run, self._report
        assert report is not None
        utility = run.metrics(self.options.utility)
        spent = privacy_values(accounting(run.defenses))
        beside = {f"utility/{name}": value for name, value in utility.items()} | spent
        self.results.playing |= outcomes.keys()
        shared = bool(self._fit.lineup.trained)
        outcomes = self.results.add(look, outcomes, beside, shared=shared)
        values = self.results.latest
        run.publish(values)
        for channel in dict.fromkeys(self.series.values()):
            shown = {s: o for s, o in outcomes.items() if self.series[s] is channel}
            try:
                channel.published(look, shown, report)
            except Exception as error:
                report.warn_once(f"not all of a look was written: {reason(error)}")
        new = {name: value for name, value in values.items() if name in self.results.look_values}
        report.write(look, outcomes, new)
        if self.record is not None:
            seconds = values.get("monitor/seconds", math.nan)
            defenses = accounting(run.defenses)
            self.record.looked(look.step, utility, seconds, self.results.failures, defenses)
        for listener in self._after_look:
            listener()

    # ---- ends and checkpoints ---------------------------------------------------------------

    def training_ends(self) -> None:
        """Publish *unknown* of a run in which looks were due and none could end."""
        step = self._fit.run.step
        missing = self.results.missing(due=self.options.cadence.due(step - 1))
        if missing:
            self._publish(Look(step), missing)
        for listener in self._after_training:
            listener()

    def end(self, how: str) -> RunRecord | None:
        """End the run's record.

        Args:
            how: ``"finished"``, or the class of what was raised.

        Returns:
            The record; None where it has ended before, and on processes that write none.
        """
        if self.record is None or self.record.ended:
            return None
        self._last = self._summary()
        run = self._fit.run
        self.record.ends(run.step, how, accounting(run.defenses))
        return self.record

    def close(self) -> None:
        """Remove every tap; may be called twice."""
        if self.fit is not None:
            self.fit.close()
        for channel in self.channels:
            channel.close()
        self._forget_listeners()
        self.fit = self._report = self.record = None

    def _summary(self) -> dict[str, object]:
        """Return what a checkpoint keeps of the run: its id, and the releases of its defences."""
        if self.record is None:
            return self._last
        defenses = accounting(self._fit.run.defenses)
        return {"run": self.record.run, "privacy": releases_by(defenses)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with: plain numbers, strings and tensors."""
        states = [channel.state_dict() for channel in self.channels]
        return {
            **self.results.state_dict(),
            "fit": self._summary(),
            **{name: value for state in states for name, value in state.items()},
            "attacks": {
                a.name: {
                    "config": a.fingerprint(),
                    "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
                }
                for a in self.selection.attacks
                if a.name in self._prepared
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        self.results.load_state_dict(state)
        for channel in self.channels:
            channel.load_state_dict(state)
        self._earlier = state.get("fit") or {}
        self._calibrations = {
            name: saved for name, saved in state["attacks"].items() if saved["tensors"]
        }


def _series_of(
    attacks: Sequence[Attack], channels: Sequence[Channel], stages: Sequence[Stage]
) -> dict[Series, Channel]:
    """Return the channel of each series, in the order of the logs."""
    owner = {attack.name: channel for channel in channels for attack in channel.attacks}
    series: dict[Series, Channel] = {}
    for stage in stages:
        for attack in attacks:
            channel = owner[attack.name]
            if (one := channel.series(attack, stage)) is not None:
                series[one] = channel
    return series | {s: channel for channel in channels for s in channel.further_series()}

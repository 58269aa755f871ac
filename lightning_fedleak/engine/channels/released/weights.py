"""Looks at the trained weights: when they take place, and the base class of their channels.

A *channel* plays the attacks of one family in a run, and turns their answers into rates. A *look*
is one measurement. The channels here query the model with a *pool* of texts, of which some are
trained on (members). The order in a fit:

1. Before the first step, :meth:`WeightLooks.begin` lets each channel draw its pool and query the
   *base*, the model before the fine-tuning. Attacks that cannot run are excluded or refused.
2. Before each batch, every channel records which texts of its pool are in it.
3. After a batch, the channels for which a look is due query the present weights
   (:meth:`WeightLooks.look_where_due`). Each attack gives the values of one or more *series*, which
   are logged under its name.
4. When training ends, all channels look again, if the weights changed since the last look.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack, Capability, UnusableObservation
from lightning_fedleak.attacks.memorization import Extraction, MemorizationAttack
from lightning_fedleak.engine.channels.base import Channel, Requirement, exclude
from lightning_fedleak.engine.channels.released.pool import NoRows, Pool
from lightning_fedleak.engine.channels.released.training_rows import (
    UnplayableGame,
    find_mask,
    read_tokens,
)
from lightning_fedleak.engine.lineup import Row, in_short
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import PREFIX, Outcome, Series, Waiting, pending, unknown
from lightning_fedleak.engine.record import RunRecord, accounting
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import unmasked
from lightning_fedleak.private_files import hash_tensors
from lightning_fedleak.report.records import PoolLine, by_reason

Answer = Mapping[str, float] | Waiting | str
"""An attack's values by name; or that they come at a later look; or why there are none."""

# How the messages of an attack without texts to compare begin; removed in the summary of the run.
_NO_TEXTS = "has no texts to compare: "


class WeightChannel(Channel):
    """Attacks on the trained weights, which are queried with one pool of texts at every look.

    A subclass draws the pool, queries the base, and queries the weights at a look.

    Attributes:
        kinds: The kinds of models that can be queried.
        planted: The name of the setting of :class:`Games` with the texts that the user planted;
            empty if the channel needs no planted texts.
        prefix: The prefix of the names of its series.
        folder: The folder of the private file that a resumed run needs.
        owes_list: Whether the user wants a list of members that the newest look did not write.
    """

    # Constants that are not listed above are explained in Channel.
    kinds: ClassVar[tuple[str, ...]] = "causal", "classifier", "masked"
    planted: ClassVar[str] = ""
    prefix: ClassVar[str] = PREFIX[Stage.RELEASED]
    # By default the adversary gets the trained weights, has the base, and holds candidate texts.
    adversary = frozenset({Capability.HAS_RELEASED_MODEL, Capability.KNOWS_TARGET_TEXT})
    sees = frozenset({Capability.HAS_RELEASED_MODEL})

    def __init__(self, attacks: Sequence[MemorizationAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        self._pool: Pool | None = None  # None until it is drawn, or if it cannot be
        self._refusal: str | None = None  # why there is no pool; None until it is known
        self.folder = Path()
        self._looks = 0  # the number of looks so far
        self.owes_list = False
        # Of a masked model, the mask token's id and the ids that are never masked.
        self._mask: tuple[int, frozenset[int]] | None = None
        self._compared: dict[Series, str] = {}  # the hash of the texts that a series compared

    @property
    def _planted(self) -> Any:
        """Return the texts or values that the user planted."""
        return getattr(self.settings.games, self.planted)

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of an attack on the released model."""
        if Stage.RELEASED not in stages:
            return []
        names = self._series_names(attack)
        return [Series(self.prefix, name, attack.name, Stage.RELEASED) for name in names]

    @abstractmethod
    def _series_names(self, attack: Attack) -> list[str]:
        """Return the names of an attack's series, without their prefix."""

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit without the texts of an earlier one."""
        super().open(run)
        self._pool = self._refusal = self._mask = None

    def meet_data(self, attack: MemorizationAttack) -> str:
        """Draw the pool if no attack has yet, and check that it has texts for this attack.

        Returns:
            Why no look can have a result of this attack; empty if one can.

        Raises:
            ValueError: There are no texts to compare.
        """
        if self._refusal is None:
            self._refusal = self._collect()
        why, kind = self._refusal, self.run.anatomy.kind
        if not why and isinstance(attack, Extraction) and kind != "causal":
            why = f"a {kind} model writes no text"
        try:
            if why:
                raise UnplayableGame(why)
            return self.pool.check_rows(attack.part)
        except ValueError as error:
            message = f"attack '{attack.name}' {_NO_TEXTS}{error}"
            raise type(error)(message) from None

    def _collect(self) -> str:
        """Draw the pool, and return why there is none, or an empty string.

        If one process fails, all return a reason. A process without readable rows does not return
        early, because the others wait for it.
        """
        run, pool, refusal = self.run, None, ""
        try:
            if (kind := run.anatomy.kind) not in self.kinds:
                raise UnplayableGame(f"a {kind} model cannot be queried, only {self.kinds}")
            tokenizers = [self.settings.tokenizer, *run.tokenizers]
            if kind == "masked":
                self._mask = find_mask(run.training_loader, tokenizers)
            pool = self._draw_pool()
        except UnplayableGame as error:
            refusal = str(error)
        if run.on_any_process(pool is None):
            return refusal or "another process could not read the training data"
        assert pool is not None
        digest = hash_tensors({str(n): t.ids for n, t in enumerate(pool.texts)})
        if run.on_any_process(run.broadcast(digest) != digest):
            return (
                "the processes read different data, so that they do not query the same texts: give "
                "every process the same data set and a DistributedSampler"
            )
        self._pool = pool
        return ""

    @property
    def pool(self) -> Pool:
        """Return the texts that the model is queried with; without them no attack runs."""
        assert self._pool is not None
        return self._pool

    @abstractmethod
    def _draw_pool(self) -> Pool:
        """Return the texts that the model is queried with.

        Raises:
            UnplayableGame: There are none.
        """

    @abstractmethod
    def query_base(self) -> None:
        """Query the base, which is the model before the first step.

        Raises:
            UnusableObservation: The model cannot be queried.
        """

    reference_seconds: float = 0.0
    """Seconds that reference models took to train; they do not count as overhead of looks."""

    @abstractmethod
    def describe(self) -> str:
        """Return in words what is compared, for the message at the start of a run."""

    def pool_line(self) -> PoolLine | None:
        """Return the record of the texts that the model is queried with; by default None."""

    # ---- a step -----------------------------------------------------------------------------

    def requirement(self, metric: str, clients: int = 1) -> Requirement:
        """Return why a rate cannot become known in this run. Clients' updates have no such rate."""
        return Requirement(never=self._never_known(metric))

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known; None if it can."""

    def batch_begins(self, batch: Any) -> None:
        """Record which texts of the pool a batch holds, or that the batch cannot be read."""
        try:
            self.pool.remember(self._read(batch))
        except Exception:  # also of the user's adapter: its texts are unknown, and training goes on
            self.pool.unread += 1

    def _read(self, batch: Any) -> TokenBatch:
        """Return a batch's tokens."""
        adapter = self.settings.batch_adapter
        tokens = read_tokens(batch, self.run.anatomy.kind) if adapter is None else adapter(batch)
        return tokens if self._mask is None else unmasked(tokens, *self._mask)

    def is_due(self, epoch: int, share: float) -> bool:
        """Return whether a look is due at this share of an epoch; by default at its end.

        Args:
            epoch: The epoch, counted from 0.
            share: The share of the epoch's batches that are done, up to 1.
        """
        return share >= 1

    # ---- a look -----------------------------------------------------------------------------

    @abstractmethod
    def query_weights(self, epoch: int, *, lists: bool) -> Mapping[Series, Answer]:
        """Query the weights, and return the answers of all attacks by series.

        Args:
            epoch: The epoch, counted from 0.
            lists: Whether lists of members may be written: at the end of an epoch or the training.
        """

    def _count_seen(self) -> tuple[int, int]:
        """Return how many texts and how many unreadable batches all processes have trained on.

        ``pool.seen`` then marks the texts that any process has trained on.
        """
        pool = self.pool
        counts = torch.tensor([*pool.seen.tolist(), pool.passed, pool.unread], dtype=torch.int64)
        counts = self.run.summed(counts.to(self.run.device)).cpu()
        pool.seen = counts[:-2] > 0
        return int(counts[-2]), int(counts[-1])

    def outcome(self, series: Series, answer: Answer) -> Outcome:
        """Return the outcome of an answer, which is the same on every process.

        Rates and values that the attack of the series does not compute are left out.
        """
        if isinstance(answer, Waiting):
            return pending(answer.why, soon=answer.soon)
        if isinstance(answer, str):
            return unknown(self.metrics_of(series), answer)
        rates = {
            name: Rate(*(answer.get(f"{name}{end}", math.nan) for end in ("", "_low", "_high")))
            for name in self.metrics
            if name in answer
        }
        extra = {n: answer[n] for n in self.extras if not math.isnan(answer.get(n, math.nan))}
        n = int(answer["members"] + answer["others"])
        return Outcome(rates, n, extra=extra, pool=self._compared.get(series, ""))


def check_any(weights: WeightLooks | None, refused: Mapping[str, str]) -> None:
    """Raise an error if no attack reads the trained weights, the only data that leave.

    Args:
        weights: The looks at the weights; None without attacks on them.
        refused: Why attacks were left out, by name.
    """
    if weights is None or not weights.attacks:
        reasons = refused if weights is None else weights.refused
        raise ValueError(
            "with shares='model' only attacks on the trained weights run, against rows held out by "
            f"leave_out(rows, n), but each {'; '.join(dict.fromkeys(reasons.values()))}"
        )


class WeightLooks:
    """Look at the weights of a run, with the channels that query them.

    If the user listed the attacks, one that cannot run is an error. If the engine chooses them, it
    is excluded, and ``refused`` has the reason.

    Args:
        run: The run.
        channels: The channels; those that read weights are used.
        series: The channel of each series, in the order of the logs.
        folder: The folder of the files that a resumed run needs besides its checkpoint.

    Attributes:
        refused: Why attacks do not run, by their names.
        looked_at: The step of the newest look; None before the first.
    """

    def __init__(
        self, run: Run, channels: Sequence[Channel], series: Mapping[Series, Channel], folder: Path
    ) -> None:
        self._run = run
        self._channels = tuple(c for c in channels if isinstance(c, WeightChannel))
        for channel in self._channels:
            channel.folder = folder
        self._series = {s: c for s, c in series.items() if isinstance(c, WeightChannel)}
        self.looked_at: int | None = None
        self._weight_sums = torch.zeros(0)  # at the newest look, see _sums_of_weights
        self._chosen_loss = -1, -math.inf  # the step of the newest choice, and its loss
        self.refused: dict[str, str] = {}
        self._has_begun = False

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """Return the attacks that run."""
        return tuple(attack for channel in self._channels for attack in channel.attacks)

    @property
    def series(self) -> frozenset[Series]:
        """Return the series of the attacks that run."""
        names = {attack.name for attack in self.attacks}
        return frozenset(series for series in self._series if series.attack in names)

    def begin(self, *, choosing: bool) -> list[str]:
        """Draw the texts, and query the base model, before the first step.

        Args:
            choosing: Whether attacks that cannot run are excluded. Otherwise they are an error.

        Returns:
            Which attacks do not run, and what is compared, in words.

        Raises:
            ValueError: An attack that the user listed cannot run, or a setting or callback would
                use private texts outside the epsilon of the run.
        """
        self._has_begun = True
        self._check_private()
        for channel in self._channels:
            self._begin(channel, choosing)
        refusals = [
            f"the trained weights are not tested{f' by {names}' * bool(self.attacks)}: "
            + why.removeprefix(_NO_TEXTS)
            for why, names in by_reason(self.refused).items()
        ]
        described = [channel.describe() for channel in self._channels if channel.attacks]
        return refusals + [f"the trained weights are queried with {words}" for words in described]

    def _begin(self, channel: WeightChannel, choosing: bool) -> None:
        """Let a channel draw its texts and query the base; exclude attacks that cannot run."""
        without_rows = dict[str, str]()  # attacks on kinds of rows that the data does not have
        for attack in channel.attacks:
            try:
                if (why := channel.meet_data(attack)) and choosing:
                    self.refused[attack.name] = why
            except ValueError as error:
                if not choosing:
                    raise
                refused = without_rows if isinstance(error, NoRows) else self.refused
                refused[attack.name] = in_short(attack.name, str(error))
        exclude(channel, self.refused.keys() | without_rows.keys())
        if not channel.attacks:
            self.refused |= without_rows  # not worth a message if other attacks of the channel run
            return
        try:
            channel.query_base()
        except UnusableObservation as error:
            if not choosing:
                raise ValueError(str(error)) from error
            self.refused |= {attack.name: str(error) for attack in channel.attacks}
            exclude(channel, self.refused.keys())

    def _check_private(self) -> None:
        """Refuse settings that the run's epsilon does not cover, and untrainable references.

        Raises:
            ValueError: Under DP, rows would be listed, a reference is used, or a callback acts on
                values of private texts. Or ``reference="auto"`` would train without the run's
                defences, or in a run of several processes.
        """
        settings = self._channels[0].settings.memorization  # all channels have the same settings
        run = self._run
        if settings.trains_reference and (run.defenses or run.processes > 1 or run.is_sharded):
            raise ValueError(
                "Memorization(reference='auto') trains on private rows, in one process and without "
                "defences, and this run has several processes or defences: leave it out, or give "
                "the folder of a reference that was trained on other rows"
            )
        if settings.outside_epsilon or not accounting(run.defenses):
            return
        roots = {series.log_name for series in self._series}
        roots |= {f"{WORST}/{channel.family}" for channel in self._series.values()}
        uncovered = {
            "Memorization(records=True)": settings.records,
            "Memorization(reference=)": settings.reference is not None,
            **{
                f"a callback that stops or chooses by '{name}'": not roots.isdisjoint(
                    (name, name.rpartition("/")[0])
                )
                for name in run.watched
            },
        }
        if name := next((name for name, is_used in uncovered.items() if is_used), None):
            raise ValueError(
                f"{name} uses private texts in a way that the run's epsilon does not cover: leave "
                "it out, or accept it by Memorization(outside_epsilon=True)"
            )

    def why_unread(self, names: Collection[str] | None) -> str | None:
        """Return why attacks on the weights have no result in this run; None if they have one.

        Args:
            names: The names of the attacks; None: all of them.
        """
        running = {attack.name for attack in self.attacks}
        if running if names is None else running.issuperset(names):
            return None
        absent = sorted(self.refused if names is None else names)
        reasons = {self.refused.get(name, "it was left out") for name in absent}
        verb = "is" if len(absent) == 1 else "are"
        return f"{' and '.join(absent)} {verb} not run here: {'; '.join(sorted(reasons))}"

    @property
    def reference_seconds(self) -> float:
        """Return the seconds that the training of references took."""
        return sum(channel.reference_seconds for channel in self._channels)

    def refusals(self) -> list[Row]:
        """Return the attacks that do not run, and why, as rows of the table of attacks."""
        # They read no gradients, weights are always exposed, and their duration is not known.
        return [Row(name, (), why, True, None) for name, why in self.refused.items()]

    def batch_begins(self, batch: Any) -> None:
        """Let every channel record which texts of its pool are trained on."""
        for channel in self._channels:
            if channel.attacks:
                channel.batch_begins(batch)

    def record_pools(self, record: RunRecord) -> None:
        """Write the numbers of texts in each pool, and a hash of the base's answers."""
        for channel in self._channels:
            if (line := channel.pool_line()) is not None:
                record.append(line)

    def choose(self, loss: float) -> float:
        """Return the loss to choose a checkpoint of this step by: the highest of all gates.

        A *gate* is a callback with a limit for a logged value. Each calls this once in a step.

        Args:
            loss: The loss from one gate; infinite if it does not allow the weights.
        """
        step, earlier = self._chosen_loss
        self._chosen_loss = self._run.step, max(loss, earlier) if step == self._run.step else loss
        return self._chosen_loss[1]

    def look_where_due(self) -> tuple[Look, dict[Series, Outcome]] | None:
        """Look with the channels for which a look is due after this batch; None without any."""
        progress = self._run.progress
        if progress is None:
            return None
        channels = [c for c in self._channels if c.attacks and c.is_due(*progress)]
        return self.look(channels) if channels else None

    def look_at_end(self) -> tuple[Look, dict[Series, Outcome]] | None:
        """Look with all channels when training ends; None if these weights had their look.

        They did not have it if a callback has replaced the weights since, for example by averages,
        or if a channel still has to write its list of members.
        """
        channels = [channel for channel in self._channels if channel.attacks]
        if not channels or not self._has_begun:  # a run without steps has no answers of the base
            return None
        with self._on_device():
            just_looked = self.looked_at == self._run.step and not self._run.on_any_process(
                not torch.equal(self._weight_sums, self._sums_of_weights())
            )
            is_done = just_looked and not any(channel.owes_list for channel in channels)
            return None if is_done else self.look(channels, ends=True)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Move the model to its training device for a block: Lightning's last hook has it on CPU.

        The CPU rounds the sums of weights differently, so that the weights would seem changed.
        """
        root, device = self._run.anatomy.root, self._run.device
        places = {p.device.type for p in root.parameters()}
        # Shards on the CPU are offloaded there during training too.
        was_moved = places == {"cpu"} != {device.type} and not self._run.is_sharded
        if was_moved:
            root.to(device)
        try:
            yield
        finally:
            if was_moved:
                root.cpu()

    def skip_present_weights(self) -> None:
        """Let :meth:`look_at_end` skip the present weights, a restored checkpoint of this run.

        A look at them would count rows as members that were trained on after the checkpoint.
        """
        self._weight_sums = self._sums_of_weights()

    def _sums_of_weights(self) -> Tensor:
        """Return (2 n,) the sum and norm of each of n trained parameters' part on this process.

        If they are equal at two times, the weights count as unchanged.
        """
        weights = [p.detach() for p in self._run.anatomy.root.parameters() if p.requires_grad]
        local = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
        sums = [
            measure(w, dtype=torch.float32)
            for w in local
            for measure in (torch.sum, torch.linalg.vector_norm)
        ]
        return torch.stack(sums).cpu().nan_to_num() if sums else torch.zeros(0)

    def look(
        self, channels: Sequence[WeightChannel], *, ends: bool = False
    ) -> tuple[Look, dict[Series, Outcome]]:
        """Look at the present weights, and return the look with its outcomes.

        Args:
            channels: The channels that look.
            ends: Whether training ends here.
        """
        self.looked_at, self._weight_sums = self._run.step, self._sums_of_weights()
        scope = frozenset(s for s in self.series if self._series[s] in channels)
        look = Look(self._run.step, scope=scope)
        answers: dict[Series, Answer] = {}
        with look.clock(self._run.device):
            for channel in channels:
                try:
                    epoch, share = self._run.progress or (0, 0.0)
                    answers |= channel.query_weights(epoch, lists=ends or share >= 1)
                except Exception as error:
                    unknown = (s for s in scope if self._series[s] is channel)
                    answers |= dict.fromkeys(unknown, reason(error))
        answers = self._run.broadcast(answers)  # all processes have the same, but for failures
        return look, {s: c.outcome(s, answers[s]) for s, c in self._series.items() if s in scope}

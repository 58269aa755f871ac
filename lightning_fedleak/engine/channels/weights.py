"""Looks at the trained weights: before the first step, within an epoch, after its last step.

What the channels have in common that take part: each asks about a pool of texts.
"""

from __future__ import annotations

import math
import time
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
from lightning_fedleak.engine.channels.exchange import Exchange
from lightning_fedleak.engine.channels.pool import NoRows, Pool
from lightning_fedleak.engine.channels.training_rows import NoNonMembers, find_mask
from lightning_fedleak.engine.choice import Row, in_short
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Found, Outcome, Result, Series, Unknown, Waiting
from lightning_fedleak.engine.record import RunRecord, accounting
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.batches import TokenBatch, read_batch
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import unmasked
from lightning_fedleak.private_files import hash_tensors
from lightning_fedleak.report.records import PoolLine


class WeightChannel(Channel):
    """Attacks on the trained weights, which are asked about one pool of texts at every look.

    Attributes:
        absent: what attacks that choose themselves lack here, where none of them is a candidate.
        kinds: of the models that can be asked.
        folder: keeps what a resumed run needs.
        owes_list: rows are to be listed, and were not at the newest look.
    """

    kinds: ClassVar[tuple[str, ...]] = "causal", "classifier", "masked"
    reads_updates = True
    reads_states = True
    at_weights = True
    adversary = frozenset({Capability.HAS_RELEASED_MODEL, Capability.KNOWS_TARGET_TEXT})
    sees = frozenset({Capability.HAS_RELEASED_MODEL})
    absent: ClassVar[str] = ""

    def __init__(self, attacks: Sequence[MemorizationAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        self._pool: Pool | None = None
        self._refusal: str | None = None
        self.folder = Path()
        self._looks = 0
        self.owes_list = False
        self._reading_seconds = 0.0
        self._mask: tuple[int, frozenset[int]] | None = None
        self._compared: dict[Series, str] = {}

    @property
    def _played(self) -> list[Series]:
        """The series of the attacks that are played."""
        return [one for attack in self.attacks for one in self.series(attack, (Stage.RELEASED,))]

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Forget the texts of an earlier fit."""
        super().open(run)
        self._pool = self._refusal = self._mask = None

    def meet_data(self, attack: MemorizationAttack) -> None:
        """Draw the texts that the model is asked about.

        Raises:
            ValueError: nobody can be compared.
        """
        if self._refusal is None:
            start = time.perf_counter()
            self._refusal = self._collect()
            self._reading_seconds = time.perf_counter() - start
        why, kind = self._refusal, self.run.anatomy.kind
        if not why and isinstance(attack, Extraction) and kind != "causal":
            why = f"a {kind} model writes no text"
        try:
            if why:
                raise NoNonMembers(why)
            if self._pool is not None:
                self._pool.check_rows(attack.part)
        except ValueError as error:
            message = f"attack '{attack.name}' finds nobody to compare: {error}"
            raise type(error)(message) from None

    def few(self, attack: MemorizationAttack) -> str:
        """Return why no look can give this attack a number; empty where one can."""
        return "" if self._pool is None else self._pool.few(attack.part)

    def _collect(self) -> str:
        """Draw the pool, and return why there is none, or an empty string; alike on all processes.

        A process whose rows cannot be read takes part in every exchange.
        """
        run, refusal = self.run, ""
        try:
            if (kind := run.anatomy.kind) not in self.kinds:
                raise NoNonMembers(f"a {kind} model is not asked, but one of {self.kinds}")
            tokenizers = [self.settings.tokenizer, *run.tokenizers]
            if kind == "masked":
                self._mask = find_mask(run.training_loader, tokenizers)
            self._pool = self._drawn()
        except NoNonMembers as error:
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
        return ""

    @abstractmethod
    def _drawn(self) -> Pool:
        """Return the texts that the model is asked about; raise NoNonMembers for none."""

    @abstractmethod
    def ask_base(self) -> None:
        """Ask the model before the first step."""

    @abstractmethod
    def describe(self) -> str:
        """Return in words who is compared, for the line-up."""

    def pool_line(self) -> PoolLine | None:
        """Return the record of the texts that are asked about; by default None."""

    # ---- a step -----------------------------------------------------------------------------

    def requirement(self, metric: str, clients: int = 1) -> Requirement:
        """Return why a rate cannot become known, and that none is of a client's update."""
        never_alone = "it is of the model that was sent, and of no client's update"
        return Requirement(never=self._never_known(metric), never_alone=never_alone)

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known; None where it can."""

    def trains_on(self, batch: object) -> None:
        """Note which texts of the pool a batch holds."""
        if self._pool is None or self._refusal:
            return
        try:
            self._pool.remember(self._read(batch))
        except Exception:  # nobody knows which texts it holds
            self._pool.unread += 1

    def _read(self, batch: Any) -> TokenBatch:
        """Return a batch's tokens."""
        adapter = self.settings.batch_adapter
        tokens = read_batch(batch, self.run.anatomy.kind) if adapter is None else adapter(batch)
        return tokens if self._mask is None else unmasked(tokens, *self._mask)

    def is_due(self, epoch: int, share: float) -> bool:
        """Return whether the weights are looked at after this share of an epoch. Default: its end.

        Args:
            epoch: counted from 0.
            share: of the epoch's batches that are done, up to 1.
        """
        return share >= 1

    # ---- a look -----------------------------------------------------------------------------

    @abstractmethod
    def ask_weights(self, look: Look, epoch: int, *, lists: bool) -> None:
        """Let every attack guess from what the model says now.

        Args:
            look: where the answers go.
            epoch: counted from 0.
            lists: an epoch is over, or the training, so that rows may be listed.
        """

    def _count_seen(self, pool: Pool) -> tuple[int, int]:
        """Join which texts all processes have seen; return the texts and unread batches so far."""
        counts = torch.tensor([*pool.seen.tolist(), pool.passed, pool.unread], dtype=torch.int64)
        counts = self.run.summed(counts.to(self.run.device)).cpu()
        pool.seen = counts[:-2] > 0
        return int(counts[-2]), int(counts[-1])

    def results(self, look: Look) -> dict[Series, Result]:
        """Return the values of each attack, packed."""
        return {one: self._result(look.answers.get(one)) for one in self._played}

    def _result(self, answer: Any) -> Result:
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
        """Return the outcome of the values, which are the same on every process."""
        values = dict(zip(self._names, next(iter(rows.values())), strict=True))
        ends = ("", "_low", "_high")
        rates = {name: Rate(*(values[name + end] for end in ends)) for name in self.metrics}
        n = int(values["members"] + values["others"])
        extra = {name: values[name] for name in self.extras}
        return Outcome(rates, n, extra=extra, pool=self._compared.get(series, ""))


class WeightLooks:
    """The channels of a run that read the weights and nothing of a step.

    Args:
        run: the run.
        channels: of which those that read weights are taken.
        series: the channel of each series, in the order of the logs.
        folder: keeps what a resumed run needs besides its checkpoint.

    Attributes:
        refused: why attacks are not played, by their names.
        looked_at: step of the newest look; None before the first.
        failure: why nothing can be known of the weights any more; None where nothing failed.
    """

    def __init__(
        self, run: Run, channels: Sequence[Channel], series: Mapping[Series, Channel], folder: Path
    ) -> None:
        self._run = run
        self._channels = tuple(c for c in channels if isinstance(c, WeightChannel))
        for channel in self._channels:
            channel.folder = folder
        self._series = {s: c for s, c in series.items() if c in self._channels}
        self._exchange = Exchange(run, series)
        self.looked_at: int | None = None
        self._sums = torch.zeros(0)
        self._choice = -1, -math.inf
        self.failure: str | None = None
        self.refused: dict[str, str] = {}

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """Return the attacks that are played."""
        return tuple(attack for channel in self._channels for attack in channel.attacks)

    @property
    def series(self) -> frozenset[Series]:
        """Return the series of the attacks that are played."""
        names = {attack.name for attack in self.attacks}
        return frozenset(series for series in self._series if series.attack in names)

    def begin(self, *, choosing: bool) -> list[str]:
        """Find out who can be compared, and ask the base model, before the first step.

        Args:
            choosing: leave out attacks that cannot be played, in place of refusing the run.

        Returns:
            What is compared, and which attacks are not played, in words.

        Raises:
            ValueError: an attack that the user listed cannot be played, or a callback stops or
                chooses by private texts under DP.
        """
        self._check_private()
        for channel in self._channels:
            self._begin(channel, choosing)
        silent = [
            f"not played on the trained weights: {names} ({why})"
            for why in dict.fromkeys(self.refused.values())
            for names in [", ".join(name for name, one in self.refused.items() if one == why)]
        ]
        silent += [
            f"not played on the trained weights: {channel.family} ({channel.absent})"
            for channel in self._channels
            if choosing and channel.absent and not channel.listed_attacks
        ]
        asked = [channel.describe() for channel in self._channels if channel.attacks]
        return silent + [f"the trained weights are asked about {words}" for words in asked]

    def _begin(self, channel: WeightChannel, choosing: bool) -> None:
        """Let a channel find out whom it compares, and ask the base; leave out what it cannot."""
        absent = dict[str, str]()  # of no kind of row that the data has
        for attack in channel.attacks:
            try:
                channel.meet_data(attack)
                if choosing and (why := channel.few(attack)):
                    self.refused[attack.name] = why
            except ValueError as error:
                if not choosing:
                    raise
                refused = absent if isinstance(error, NoRows) else self.refused
                refused[attack.name] = in_short(attack.name, str(error))
        exclude(channel, self.refused.keys() | absent.keys())
        if not channel.attacks:
            self.refused |= absent  # said only where no attack is left
            return
        try:
            channel.ask_base()
        except UnusableObservation as error:
            if not choosing:
                raise ValueError(str(error)) from error
            self.refused |= {attack.name: str(error) for attack in channel.attacks}
            exclude(channel, self.refused.keys())

    def _check_private(self) -> None:
        """Refuse callbacks that stop or choose by private texts, which no epsilon covers."""
        if not accounting(self._run.defenses):
            return
        for settings in (channel.settings.memorization for channel in self._channels):
            if settings.records and not settings.outside_epsilon:
                raise ValueError(
                    "Memorization(records=True) lists rows by their content, which the run's "
                    "epsilon does not cover: leave it out, or accept it by outside_epsilon=True"
                )
        for name in self._run.watched:
            root = name.rpartition("/")[0]
            read = [
                channel
                for series, channel in self._series.items()
                if root == series.log_name or name == f"{WORST}/{channel.family}"
            ]
            if any(not c.settings.memorization.outside_epsilon for c in read):
                raise ValueError(
                    f"a callback stops or chooses by '{name}', which is read off private texts, "
                    "outside the run's epsilon: watch another value, or accept it by "
                    "Memorization(outside_epsilon=True)"
                )

    def unread(self, names: Collection[str] | None) -> str | None:
        """Return why attacks on the weights say nothing of this run; None: they do.

        Args:
            names: of the attacks; None: all of them.
        """
        played = {attack.name for attack in self.attacks}
        if played if names is None else played.issuperset(names):
            return None
        silent = sorted(self.refused if names is None else names)
        whys = {self.refused.get(name, "it was left out") for name in silent}
        verb = "is" if len(silent) == 1 else "are"
        return f"{' and '.join(silent)} {verb} not played in this run: {'; '.join(sorted(whys))}"

    def rows(self) -> list[Row]:
        """Return the attacks that are not played, and why."""
        return [Row(name, (), why, True, None) for name, why in self.refused.items()]

    def batch_begins(self, batch: Any) -> None:
        """Note which texts are trained on."""
        try:
            for channel in self._channels:
                if channel.attacks:
                    channel.trains_on(batch)
        except Exception as error:  # from now on nobody knows which texts were trained on
            self.failure = self.failure or reason(error)

    def record_pools(self, record: RunRecord) -> None:
        """Write which texts the weights are asked about."""
        for channel in self._channels:
            if (line := channel.pool_line()) is not None:
                record.append(line)

    def choose(self, loss: float) -> float:
        """Return the loss that the weights of this step are chosen by: the highest of its gates."""
        step, earlier = self._choice
        self._choice = self._run.step, max(loss, earlier) if step == self._run.step else loss
        return self._choice[1]

    def look_where_due(self) -> tuple[Look, dict[Series, Outcome]] | None:
        """Return a look after a batch, by the channels that look now; None where none does."""
        progress = self._run.progress
        if progress is None:
            return None
        channels = [c for c in self._channels if c.attacks and c.is_due(*progress)]
        return self.look(channels) if channels else None

    def look_at_end(self) -> tuple[Look, dict[Series, Outcome]] | None:
        """Return a look by all channels when training ends; None if they have just looked.

        They look again where a callback has put other weights in place since, such as averages.
        """
        channels = [channel for channel in self._channels if channel.attacks]
        if not channels:
            return None
        with self._on_device():
            just_looked = self.looked_at == self._run.step and not self._run.on_any_process(
                not torch.equal(self._sums, self._sums_of_weights())
            )
            is_done = just_looked and not any(channel.owes_list for channel in channels)
            return None if is_done else self.look(channels, ends=True)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Hold the model where it was trained; Lightning moves it to the CPU before its last hook.

        Sums over weights are rounded otherwise there, and would pass for sums of other weights.
        """
        root, device = self._run.anatomy.root, self._run.device
        places = {p.device.type for p in root.parameters()}
        # Shards on the CPU are offloaded.
        is_away = places == {"cpu"} != {device.type} and not self._run.is_sharded
        if is_away:
            root.to(device)
        try:
            yield
        finally:
            if is_away:
                root.cpu()

    def keep_last_look(self) -> None:
        """Ask no more about weights that are there now: they are earlier ones of this run.

        Rows that were trained on since would count as their members.
        """
        self._sums = self._sums_of_weights()

    def _sums_of_weights(self) -> Tensor:
        """Return (2 n,) the sum and norm of each of n trained parameters, this process' part."""
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
        """Return a look at the weights as they are, with its outcomes.

        Args:
            channels: that look.
            ends: training ends here.
        """
        self.looked_at, self._sums = self._run.step, self._sums_of_weights()
        scope = frozenset(s for s in self.series if self._series[s] in channels)
        look = Look(self._run.step, scope=scope)
        results: dict[Series, Result] = {}
        with look.clock(self._run.device):
            for channel in channels:
                why = self.failure
                try:
                    epoch, share = self._run.progress or (0, 0.0)
                    channel.ask_weights(look, epoch, lists=ends or share >= 1)
                    results |= channel.results(look)
                except Exception as error:
                    why = reason(error)
                if why is not None:
                    own = (s for s in scope if self._series[s] is channel)
                    results |= dict.fromkeys(own, Unknown(why))
        ordered = {series: results[series] for series in self._series if series in scope}
        exposed = dict.fromkeys(ordered, True)
        outcomes, _ = self._exchange.outcomes(ordered, exposed, look.step)
        assert outcomes is not None  # weights are always there
        return look, outcomes

"""Looks at the trained weights: before the first step, within an epoch, after its last step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.engine.channels.base import Channel, exclude
from lightning_fedleak.engine.channels.exchange import Exchange
from lightning_fedleak.engine.channels.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.pool import NoRows
from lightning_fedleak.engine.choice import Row, in_short
from lightning_fedleak.engine.outcomes import Outcome, Result, Series, Unknown
from lightning_fedleak.engine.record import RunRecord, accounting
from lightning_fedleak.engine.results import WORST
from lightning_fedleak.engine.run import Look, Run, reason


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
        self._channels = tuple(c for c in channels if isinstance(c, MemorizationChannel))
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

    def _begin(self, channel: MemorizationChannel, choosing: bool) -> None:
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

    def due(self) -> list[MemorizationChannel]:
        """Return the channels that look now, after a batch."""
        progress = self._run.progress
        if progress is None:
            return []
        return [c for c in self._channels if c.attacks and c.is_due(*progress)]

    def look_at_end(self) -> tuple[Look, dict[Series, Outcome]] | None:
        """Return a look by all channels when training ends; None if they have just looked.

        They look again where a callback has put other weights in place since, such as averages.
        """
        channels = [channel for channel in self._channels if channel.attacks]
        if not channels:
            return None
        just_looked = self.looked_at == self._run.step and not self._run.on_any_process(
            not torch.equal(self._sums, self._sums_of_weights())
        )
        is_done = just_looked and not any(channel.owes_list for channel in channels)
        return None if is_done else self.look(channels, ends=True)

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
        self, channels: Sequence[MemorizationChannel], *, ends: bool = False
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

"""DP-SGD: clips each sample's gradient, adds noise to their sum, and accounts what that costs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from lightning_fedleak.defenses.accounting.accounting import (
    Accountant,
    Trust,
    check_delta_for,
    effective_noise_multiplier,
)
from lightning_fedleak.defenses.accounting.budget import (
    Account,
    Budget,
    BudgetSpent,
    guarantee_of,
)
from lightning_fedleak.defenses.accounting.groups import group_epsilon
from lightning_fedleak.defenses.accounting.ledger import check_count, client_path
from lightning_fedleak.defenses.accounting.renyi_filter import RenyiFilter
from lightning_fedleak.defenses.base import (
    CanaryGradient,
    Defense,
    DefenseContext,
    DefenseError,
    Privacy,
    State,
)
from lightning_fedleak.defenses.dpsgd.adam import DPAdamBC
from lightning_fedleak.defenses.dpsgd.batch import trainer_of
from lightning_fedleak.defenses.dpsgd.clipped_sum import (
    Clip,
    LayerNoise,
    MaxGradNorm,
    NoiseGauge,
    clip_of,
)
from lightning_fedleak.defenses.dpsgd.correlated_noise import Mechanism, Plan, StepNoise
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping
from lightning_fedleak.defenses.dpsgd.sampling import Sampling, check_same_data, sampling_of
from lightning_fedleak.defenses.dpsgd.setup_checks import (
    check_choices,
    check_clip,
    check_hardening,
    check_mechanism,
    check_model,
    check_pieces,
    check_settings,
    check_shards,
    check_trainer,
    check_users,
    planned_steps,
)
from lightning_fedleak.defenses.dpsgd.step import WatchedStep
from lightning_fedleak.defenses.dpsgd.users import GroupBy, digest_of, rows_by_user
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal
from lightning_fedleak.defenses.processes import Team, reshard


class DPSGD(Defense):
    """Differentially private SGD (Abadi et al. 2016) in the local or central model.

    Every optimizer step releases ``(sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2)) / L``: g_i is
    the gradient of sample i's own loss, C is ``max_grad_norm``, and L the expected batch size. The
    batches are Poisson samples of the client's examples, and an empty one releases noise alone. The
    unit of privacy is one example of the dataset, added or removed (with ``unit="user"`` all rows
    of one user).

    One backward pass is enough: layer inputs and output gradients are kept (book-keeping, see
    :mod:`~lightning_fedleak.defenses.dpsgd.per_sample`), so the second backward of two-pass ghost
    clipping is saved, and tied weights are exact. ``p.grad`` stays what it is until the release:
    it is the *local* gradient that monitors see. Kept inputs take memory for as long as the graph
    would; gradient checkpointing does not free them.

    A sample whose gradient is not finite counts as zero: whether a run goes on must not tell of one
    example. Weights that something else than the optimizer's step writes are refused, and weights
    that are not finite after a release.

    Refused at setup is what would break the guarantee (:mod:`~.dpsgd_checks`). Refused in a step
    are a batch without a loss, a loss that is not a mean of per-sample means or a network that
    mixes samples, through the graph (:mod:`~.loss_graph`), gradients that the layers do not
    explain, noise that is not what was accounted, a second release of one batch, buffers that
    ``training_step`` writes to, and weights that do not move.

    These looks find mistakes; they follow gradients, and prove nothing. Samples that meet without a
    gradient are not seen and void the guarantee (:mod:`~.loss_graph` says which do), as do batches
    rewritten in hooks, and plain attributes that keep something of earlier batches.

    What a module sends or logs itself is not covered, neither are validation metrics, leakage logs
    and decisions taken in sight of them, nor buffers that are written outside of ``training_step``.
    Noise is floating-point and not from a cryptographic generator
    (:mod:`~lightning_fedleak.defenses.noise` says where from).

    An empty batch does not run ``training_step``. With ``client="rank"`` under DDP do not log with
    ``sync_dist=True`` there: a rank with an empty batch would not take part.

    With ``client="world"`` (DDP, FSDP2) all processes are one client: machines that trust each
    other and a network that nobody else reads, because they send each other undefended gradients
    and sums. What leaves them is the sum over all of their samples with one noise of sigma C; L is
    the expected number of samples over all of them. Each draws from its own part of the dataset, so
    a DistributedSampler must split it, and all refuse where one does. One whose batch is empty runs
    one example of its part, whose loss is multiplied by 0 and which nothing released depends on (a
    loss that the module logs does). Large parameters are summed one at a time, whole, in float32.

    A gate may turn the noise up (:meth:`harden`) with ``accountant="filter"`` alone: PRV, and RDP
    with the best order picked at the end, are proven for noise that was settled before the run. The
    filter (:mod:`~lightning_fedleak.defenses.accounting.renyi_filter`) does not cover the decision
    itself, where it was taken by what was not released: that a gate fired on a leakage metric,
    which reads the true batch, is told by the noise.

    With ``mechanism="banded"`` or ``"banded_inverse"`` the noise of a step takes a part of the
    noise before it back, so that less of it stays in the weights (:mod:`~.correlated_noise`). The
    number of steps and the data must be known before, and stay what they are.

    Args:
        max_grad_norm: C. ``"auto"``: a sample's gradient g becomes ``g / (|g| + gamma)``, of a norm
            below C = 1, so that there is no norm to find (:mod:`~.clipped_sum`). Norms by the names
            of layers (a module's or a parameter's name in the LightningModule, the longest that
            fits; ``""`` for the rest): what each names is clipped by itself, C is the root of the
            sum of their squares.
        noise_multiplier: sigma. Or:
        target_epsilon: what the whole run may cost; sigma is then found from the number of steps.
        target_delta: delta of the guarantee; must be below one over the number of examples. With
            ``noise_multiplier`` it may be left out: a tenth of one over the number of examples.
        accountant: ``"prv"`` (tight), ``"rdp"``, or ``"filter"``: a budget in Renyi divergence, at
            one order that is fixed before the first release. It needs ``target_epsilon`` and
            ``target_delta``; sigma is found from the number of steps unless ``noise_multiplier`` is
            given too. Then :attr:`privacy` shows ``target_epsilon`` from the first step to the
            last: the budget is what holds at whatever step the run ends, there is no smaller
            epsilon "so far". :attr:`share_spent` says how much of it is used up.
        clipping: ``"ghost"`` keeps factors, ``"per_sample"`` multiplies every per-sample gradient
            out, ``"auto"`` does for each layer what takes less.
        poisson: sample batches by chance. Without it the loader's batches are taken as they are
            (of a sampler of torch's own, without replacement), each example is accounted as if it
            were in all of them, and the unit of privacy is an example replaced by nothing at its
            place.
        trust: ``"local"``: the server sees each client's update, so each adds noise of sigma C.
            ``"central"``: it sees nothing but the sum over clients (secure aggregation, which this
            package does not provide), so each adds sigma C over the root of their number, and L is
            the loader's ``batch_size``, which all clients must have alike.
        on_budget: once ``target_epsilon`` is spent, ``"stop"`` ends the fit as usual, after the
            last release that fits with the noise of then; ``"raise"`` goes on to the first that
            does not. None is released beyond.
        loss: ``"checked"``, or ``"trusted"``: you have proved that the loss is a mean over samples
            of terms that depend on one sample each.
        ledger: file that remembers every release through a crash, see
            :class:`~lightning_fedleak.defenses.accounting.ledger.Ledger`; with ``unit="user"``
            ``.users`` is appended, with several clients ``.<client>-of-<clients>``.
        seed: for tests only: noise and samples follow from it, and epsilon is infinite.
        harden_factor: what a notch multiplies the noise by, with ``accountant="filter"``.
        most_notches: how often it may be turned up; None for as often as a gate asks.
        gamma: of automatic clipping.
        per_layer: each layer that is trained is clipped by itself, to C over the root of their
            number.
        layer_noise: of layers that are clipped by themselves: ``"equal"``, sigma C on every number;
            ``"by_clip"``, on those of layer l sigma times its own norm, times the root of the
            number of layers. Both are one Gaussian mechanism of sigma
            (:func:`~lightning_fedleak.defenses.accounting.accounting.joint_noise_multiplier`).
        unit: what is added or removed: ``"example"``, a row of the dataset, or ``"user"``: all rows
            of one user. Then users are drawn, ``batch_size`` is how many on average, and the mean
            gradient over a user's rows is clipped as a sample's is.
        group_by: with ``unit="user"``, whose a row is: the name of a column, a function of an
            example, or one key for each row.
        rows_per_user: of one user in a batch, at most, drawn at random each time; None for all.
        max_physical_batch: how many rows are run at once. A batch of more is run in pieces, one
            after the other, and released once (:mod:`~.logical`): the memory is that of a piece and
            one float32 copy of what is trained. None for the whole batch at once.
        mechanism: how noise is correlated over steps. ``"independent"``: not. ``"banded"``: BandMF
            with cyclic Poisson sampling, of which ``bands`` steps are accounted as one at ``bands``
            times the sample rate; it keeps ``bands - 1`` copies of what is trained.
            ``"banded_inverse"``: BISR. Batches are the same in every epoch, all steps are accounted
            as one Gaussian mechanism without sampling, and ``bands`` times as much noise is drawn.
        bands: of the matrix that correlates noise, or of its inverse.

    Attributes:
        releases: how many were made.
        measured_noise_multiplier: standard deviation of the noise over C, as it was last measured.
            It is computed from the noise of one release, and no epsilon covers it: do not publish
            or log it beside what was released.

    Raises:
        DefenseError: a setting out of range, or contradicting another.
    """

    name = "dpsgd"
    per_sample = True
    takes_shards = True

    def __init__(
        self,
        max_grad_norm: MaxGradNorm,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: Account = "prv",
        clipping: Clipping = "auto",
        poisson: bool = True,
        trust: Trust = "local",
        on_budget: Literal["stop", "raise"] = "stop",
        loss: Literal["checked", "trusted"] = "checked",
        ledger: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        *,
        harden_factor: float = 2.0,
        most_notches: int | None = None,
        gamma: float = 0.01,
        per_layer: bool = False,
        layer_noise: LayerNoise = "equal",
        max_physical_batch: int | None = None,
        unit: Literal["example", "user"] = "example",
        group_by: GroupBy | None = None,
        rows_per_user: int | None = None,
        mechanism: Mechanism = "independent",
        bands: int | None = None,
    ) -> None:
        check_settings(
            max_grad_norm,
            noise_multiplier,
            target_epsilon,
            target_delta,
            seed,
            fixed_budget=accountant == "filter",
        )
        check_choices(
            accountant=(accountant, ("prv", "rdp", "filter")),
            clipping=(clipping, ("auto", "per_sample", "ghost")),
            trust=(trust, ("local", "central")),
            on_budget=(on_budget, ("stop", "raise")),
            loss=(loss, ("checked", "trusted")),
            unit=(unit, ("example", "user")),
        )
        check_users(unit, group_by is not None, rows_per_user, poisson=poisson)
        check_hardening(harden_factor, most_notches)
        check_mechanism(mechanism, bands, poisson=poisson, fixed_budget=accountant == "filter")
        check_clip(max_grad_norm, gamma, per_layer, layer_noise)
        check_pieces(max_physical_batch)
        self.max_grad_norm = max_grad_norm
        self.gamma = gamma
        self.per_layer = per_layer
        self.layer_noise: LayerNoise = layer_noise
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.clipping: Clipping = clipping
        self.poisson = poisson
        self.trust: Trust = trust
        self.on_budget = on_budget
        self.loss = loss
        self.seed = seed
        self.max_physical_batch = max_physical_batch
        self.unit = unit
        self.group_by = group_by
        self.rows_per_user = rows_per_user
        self.releases = 0
        self.measured_noise_multiplier = math.nan
        self.mechanism: Mechanism = mechanism
        self.bands = bands
        places = mechanism != "independent"  # which steps an example is in follows from its place
        self.guarantee = guarantee_of(
            trust, poisson and not places, seed, accountant == "filter", unit
        )
        self._noise = StepNoise(mechanism, bands)
        self._checkpointed = 0
        self._budget = Budget(
            accountant,
            noise_multiplier,
            target_epsilon,
            target_delta,
            seeded=seed is not None,
            harden_factor=harden_factor,
            most_notches=most_notches,
        )
        self.ledger = None if ledger is None else os.path.abspath(ledger)
        self._ledger = ledger
        self._sampling: Sampling | None = None
        self._team = Team()
        self._step: WatchedStep | None = None
        self._fixed = self._clip_settings()

    def settings(self) -> dict[str, bool | int | float | str]:
        """As :meth:`Defense.settings`, and how it accounts."""
        found = super().settings() | {"accountant": self._budget.kind}
        if self.noise_multiplier is not None:
            found["noise_multiplier"] = self.noise_multiplier
        if isinstance(self.max_grad_norm, Mapping):
            found["max_grad_norm"] = f"{math.hypot(*self.max_grad_norm.values()):g}, by layers"
        return found

    @property
    def accountant(self) -> Accountant | RenyiFilter:
        """Counts releases."""
        return self._budget.accountant

    @property
    def noise_multiplier(self) -> float | None:
        """Sigma that the run begins with; None until it is found."""
        return self._budget.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, sigma: float) -> None:
        self._budget.noise_multiplier = sigma

    @property
    def notches(self) -> int:
        """How often the noise was turned up."""
        return self._budget.notches

    @property
    def privacy(self) -> Privacy:
        """Epsilon and delta of the releases so far, and the noise of the next.

        With ``accountant="filter"`` epsilon is ``target_epsilon``, however much of it is used up.

        Raises:
            DefenseError: before the training data are known.
        """
        return self._budget.privacy

    def group_privacy(self, rows: int) -> Privacy:
        """What the releases so far have cost a group: ``rows`` examples added or removed together.

        For rows that turn out to be of one person. Dearer than ``unit="user"`` from the start,
        which bounds what all of a user's rows move. With ``unit="user"`` it is of so many users.

        Args:
            rows: of the group, at most.

        Returns:
            Epsilon at the delta of :attr:`privacy`
            (:func:`~lightning_fedleak.defenses.accounting.groups.group_epsilon`). With
            ``accountant="filter"``, and where noise is correlated, k times the epsilon of one, at
            delta ``k e^((k - 1) epsilon)`` times its own; infinite where that is no probability.

        Raises:
            DefenseError: no number of rows, or before the training data are known.
        """
        check_count(rows, "rows")
        own = self.privacy
        independent = self.mechanism == "independent"
        if independent and not isinstance(self.accountant, RenyiFilter):
            epsilon = group_epsilon(self.accountant.history, own.delta, rows)
            return dataclasses.replace(own, epsilon=max(epsilon, own.epsilon))
        log_delta = math.log(own.delta * rows) + (rows - 1) * own.epsilon
        if log_delta >= 0:
            return dataclasses.replace(own, epsilon=math.inf)
        return dataclasses.replace(own, epsilon=rows * own.epsilon, delta=math.exp(log_delta))

    @property
    def share_spent(self) -> float | None:
        """Renyi divergence of the releases so far over the filter's budget; None without one."""
        return self._budget.share_spent

    @property
    def noise_multiplier_now(self) -> float:
        """Sigma of the next release, as it is turned up now; refused before it is found."""
        return self._budget.noise_now

    @property
    def can_harden(self) -> bool:
        """Only with ``accountant="filter"``: the others hold for noise settled beforehand."""
        return self._budget.can_harden

    def harden(self) -> str | None:
        """Multiplies the noise by ``harden_factor``, from the next release on."""
        changed = self._budget.harden()
        if changed is not None and self._step is not None:
            self._step.check.unchecked = True
        return changed

    def before_setup(self, context: DefenseContext) -> None:
        """Checks model and Trainer, and hooks the layers.

        Raises:
            DefenseError: the guarantee cannot hold; says what to change.
        """
        self._remove_hooks()
        self._noise.begin_fit()
        self._team = team = Team(context)
        with team.together():
            check_trainer(context, poisson=self.poisson)
            check_model(context.root, self.clipping)
            check_shards(context.root, context.processes)
            if self._ledger is not None and team.process == 0:
                path = client_path(self._ledger, context.client, context.clients, self.unit)
                self._budget.open_ledger(path)
        self._ledger = None
        self._budget.adopt(team.told_by_first(self._budget.account_state()))
        if self.accountant.steps > self._checkpointed:
            self._noise.forget()  # the ledger knows of releases after the checkpoint
        self._step = WatchedStep(
            context.root,
            team,
            clip=self._clip(context),
            clipping=self.clipping,
            poisson=self.poisson,
            trusted=self.loss == "trusted",
            most=self.max_physical_batch,
            row=lambda: self._noise.row,
        )

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """A loader of Poisson samples; settles the noise.

        Raises:
            DefenseError: a loader that cannot be sampled, delta does not fit its size, or the
                filter's budget does not fit one release.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        self._team = team = Team(context)
        drawn = 0 if self._sampling is None else self._sampling.drawn
        team.check_alike(
            max_grad_norm=0.0 if self._step is None else self._step.clip.sensitivity,
            noise_multiplier=self.noise_multiplier or 0.0,
            target_epsilon=self.target_epsilon or 0.0,
            target_delta=self.target_delta or 0.0,
        )
        with team.together():
            self._sampling = sampling = sampling_of(
                dataloader,
                context,
                poisson=self.poisson,
                trust=self.trust,
                entropy=self._base(context),
                first_step=drawn,
                users=None if self.unit == "example" else self._users,
                rows_per_user=self.rows_per_user,
                mechanism=self.mechanism,
                bands=self.bands or 1,
                turn=lambda: self._noise.row,
            )
            delta = 0.1 / sampling.examples if self.target_delta is None else self.target_delta
            check_delta_for(delta, sampling.examples)
            self._budget.settle(sampling.rate, delta, self._planned(sampling, context))
        team.check_alike(
            examples=sampling.examples,
            batch_size=sampling.expected,
            users=0 if sampling.users is None else digest_of(sampling.users),
        )
        check_same_data(sampling.loader, team, poisson=self.poisson)
        self._forget_if_moved()
        # Found on another machine, it may differ in its last bits.
        self.noise_multiplier = team.told_by_first(self.noise_multiplier)
        return sampling.loader

    def on_train_start(self, context: DefenseContext) -> None:
        """Looks at what was restored, where that comes after the loader.

        Raises:
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
            DefenseError: a :class:`~.DPAdamBC` would get noise that this defence does not know.
        """
        self._check_noise_known(context)
        self._forget_if_moved()
        if self.releases and self._noise.is_lost:
            warnings.warn(
                f"DPSGD: the noise of the {self.releases} releases before cannot be gone on "
                "with (the run was killed, the file beside its checkpoint is gone, or examples "
                "stand at other places). A new mechanism begins, and its cost is added to theirs.",
                stacklevel=2,
            )
        if self._step is not None:
            reshard(context.root)
            self._step.clip = self._clip(context)
            self._step.adopt()
        self._budget.check_not_overdrawn()

    @property
    def acts_on_batches(self) -> bool:
        """Only with several processes, of which one alone may draw an empty batch."""
        return self._team.size > 1

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """The batch; one example that does not count where it is empty and others may not be."""
        step, sampling = self._in_fit()
        return step.given(batch, sampling, context) if self._team.size > 1 else batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Runs the batch in pieces of ``max_physical_batch`` rows, where it has more.

        Raises:
            DefenseError: it was released already, is not the one that was drawn, or weights are not
                as they should be.
        """
        watched, sampling = self._in_fit()
        return watched.run_whole(step, batch, sampling, self.releases, context)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Records the forward pass and looks at the loss; an empty batch gives a loss of zero.

        A process that drew none while others of its client may not have runs one example, and
        records none of it: it takes part in what the others send in forward and backward.

        Raises:
            DefenseError: there is no loss with a graph, it is not a mean of per-sample means,
                samples are mixed, or a buffer was changed.
        """
        step, sampling = self._in_fit()
        return step.run(training_step, batch, sampling, self.releases, context)

    def before_release(self) -> None:
        """Refuses a release that the budget does not cover.

        Raises:
            BudgetSpent: says how many were made.
        """
        with self._team.together():
            self._noise.check_planned()
            if self._noise.is_accounted:
                self._budget.check_affords_another()

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Puts the clipped and noised mean into ``p.grad``, and accounts it.

        Raises:
            DefenseError: a gradient that the layers do not explain, noise that is not what is
                accounted, weights that do not move, or that something else than the optimizer's
                step has moved. Nothing is released.
        """
        team, sigma, trainer = self._team, self._client_noise(context), trainer_of(context)
        step, sampling = self._in_fit()
        # What follows sends other messages where these differ.
        std = sigma * step.clip.sensitivity
        team.check_alike(
            noise_multiplier=sigma,
            releases=self.releases,
            max_grad_norm=step.clip.sensitivity,
        )
        self._check_clip()
        with team.together():
            step.weights.check(parameters, context.root)
            clipped = step.clipped(parameters, context)
        clipped.check_explained(parameters, context, team)
        if sigma > 0:
            step.moves.check(parameters, getattr(trainer, "optimizers", ()), team)
        checking = step.check.is_due(self.releases)
        compared = not checking or (
            step.can_compare and clipped.check_complete(parameters, context, team)
        )
        noise = self._noise
        with team.together():
            noise.begin(self._base(context), self.releases)
            if noise.is_accounted:
                self._budget.record(effective_noise_multiplier(sigma, context.clients, self.trust))
        self.releases += 1
        gauge = NoiseGauge(std * noise.scale, sampling.expected) if checking else None
        add = functools.partial(noise.add, key=functools.partial(self._key, context))
        clipped.release(parameters, team, std, sampling.expected, add, gauge)
        if gauge is not None:
            with team.together():
                measured = gauge.measured()
            if measured is not None:
                self.measured_noise_multiplier = measured / step.clip.sensitivity / noise.scale
        self._tell_noise(parameters, context)
        noise.end()
        if sigma > 0:
            step.moves.remember(parameters)
        step.released(self.releases, unchecked=not compared)
        if self.on_budget == "stop" and trainer is not None and noise.is_accounted:
            (spent,) = team.largest([not self._budget.affords_another()])
            trainer.should_stop = trainer.should_stop or bool(spent)

    def on_canary(
        self,
        canary: CanaryGradient,
        parameters: Sequence[nn.Parameter],
        context: DefenseContext,
    ) -> CanaryGradient:
        """Each sample's part joins that sample's norm; their clipped sum gets noise of its own.

        Raises:
            DefenseError: the canary is of other samples than the batch, or was noised before.
        """
        if self._team.size > 1:
            raise DefenseError(
                "DPSGD: what the samples of the client's other processes add to a canary is not "
                "computed; use client='rank', or one process"
            )
        if canary.noise is not None:
            raise DefenseError(
                "DPSGD: noise on the sum of samples cannot be clipped sample by sample"
            )
        step, sampling = self._in_fit()
        self._check_clip()
        clipped = step.clipped(parameters, context)
        released = clipped.with_canary(canary.samples, sampling.expected)
        std = self.noise_std(context)
        if std:
            number, step.canaries = step.canaries, step.canaries + 1
            key = self._key(context, self._base(context), self.releases, number, "canary")
            like = released.samples
            noise = standard_normal(key, like.shape[1:], like.device, like.dtype)
            released = released.noised(noise * std, std)
        return released

    def noise_std(self, context: DefenseContext) -> float:
        """Of the mean over the expected batch; of layers that differ the root mean square.

        That of one step, where noise is correlated: the next.
        """
        step, sampling = self._in_fit()
        std = self._client_noise(context) * step.clip.sensitivity / sampling.expected
        std *= self._noise.scale
        if len(step.clip.norms) == 1:
            return std
        trained = [p for p in context.root.parameters() if p.requires_grad]
        square = sum(p.numel() * step.clip.relative_noise(p) ** 2 for p in trained)
        return std * math.sqrt(square / sum(p.numel() for p in trained))

    def noise_variances(
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> dict[Tensor, float]:
        """Of the noise on each number of a parameter's gradient, as the optimizer gets it.

        That is, averaged over clients where there are several.
        """
        step, sampling = self._in_fit()
        std = self._client_noise(context) * step.clip.sensitivity / sampling.expected
        std *= self._noise.scale
        return {p: (std * step.clip.relative_noise(p)) ** 2 / context.clients for p in parameters}

    def _tell_noise(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        for optimizer in getattr(trainer_of(context), "optimizers", ()):
            if isinstance(optimizer, DPAdamBC):
                optimizer.told_noise(self.noise_variances(parameters, context))

    def _check_noise_known(self, context: DefenseContext) -> None:
        trainer = trainer_of(context)
        if not any(isinstance(o, DPAdamBC) for o in getattr(trainer, "optimizers", ())):
            return
        others = [
            d.name
            for d in getattr(trainer.strategy, "defenses", ())
            if d is not self and d.acts_on_gradients
        ]
        if others:
            raise DefenseError(
                f"DPAdamBC takes the variance of DPSGD's noise out, and {', '.join(others)} "
                "changes the gradients after it. Leave it out, or use AdamW."
            )

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Releases, what they were accounted as, and the noise: as settled, and how turned up."""
        own = {"releases": self.releases, "trust": self.trust, "unit": self.unit}
        return {**own, **self._noise.state_dict(), **self._budget.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes on counting; neither the counters nor the account ever run backwards.

        Noise that was found from ``target_epsilon`` stays what it is. Under another target the
        releases that it may make are counted anew.

        Raises:
            DefenseError: the releases were made under another kind of accountant, with
                ``accountant="filter"`` under another budget, for another unit of privacy, or under
                ``trust="central"`` and this run is under ``"local"``.
        """
        if "releases" not in state:
            self._budget.seeded = False
            return
        releases = int(state["releases"])
        if releases and state.get("trust", self.trust) == "central" and self.trust == "local":
            raise DefenseError(
                f"DPSGD: the checkpoint's {releases} releases were made under trust='central', in "
                "which each client adds a share of the noise: whoever sees each client's updates "
                "learns more than is accounted. Go on with trust='central', or begin a new run."
            )
        unit = state.get("unit", "example")
        if releases and unit != self.unit:
            raise DefenseError(
                f"DPSGD: the checkpoint's {releases} releases were made with unit={unit!r}, and "
                f"this run has unit={self.unit!r}. What is added or removed is clipped as a whole "
                "in the one and not in the other, so no epsilon would hold for both. Go on with "
                f"unit={unit!r}, or begin a new run from a model that this data did not train."
            )
        if releases:
            self._noise.load_state_dict(state)
        self._checkpointed = self._budget.load_state_dict(state, releases)
        self.releases = max(self.releases, releases)

    @property
    def secret_name(self) -> str:
        """Another after every release; empty where noise is independent."""
        return self._noise.name

    def save_secrets(self, path: Path) -> None:
        """Writes what the next correlated noise needs; nothing where noise is independent."""
        self._noise.save(path, self.releases)

    def load_secrets(self, path: Path, device: str) -> bool:
        """Goes on with it, where no release was made since it was written."""
        if self.accountant.steps > self._checkpointed:
            return False
        return self._noise.load(path, self.releases, device)

    def forget_secrets(self) -> None:
        """Begins a new mechanism."""
        self._noise.forget()

    def teardown(self) -> None:
        """Takes the hooks out, and lets go of the noise of past steps."""
        self._remove_hooks()
        self._noise.end_fit()

    def _remove_hooks(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    def _planned(self, sampling: Sampling, context: DefenseContext) -> Callable[[], int]:
        """How many mechanisms will be composed; settles what correlated noise is planned for."""
        steps = functools.partial(
            planned_steps, context, len(sampling.loader), mechanism=self.mechanism
        )
        if self.mechanism == "independent":
            return steps
        plan = Plan(self.mechanism, self.bands or 1, steps(), sampling.groups, sampling.examples)
        self._noise.settle(plan, sampling.places)
        return lambda: plan.rounds

    def _users(self, dataset: Any) -> dict[Any, list[int]]:
        assert self.group_by is not None
        return rows_by_user(dataset, self.group_by)

    def _forget_if_moved(self) -> None:
        """Begins a new mechanism where examples stand elsewhere than in the one that was loaded."""
        (moved,) = self._team.largest([self._noise.is_moved])
        if moved:
            self._noise.forget()

    def _in_fit(self) -> tuple[WatchedStep, Sampling]:
        if self._step is None or self._sampling is None:
            raise DefenseError(
                "DPSGD: a training step or a release outside of fit; nothing was released"
            )
        return self._step, self._sampling

    def _clip(self, context: DefenseContext) -> Clip:
        self._fixed = self._clip_settings()
        return clip_of(
            self.max_grad_norm,
            context.root,
            gamma=self.gamma,
            per_layer=self.per_layer,
            layer_noise=self.layer_noise,
        )

    def _clip_settings(self) -> dict[str, object]:
        given = self.max_grad_norm
        return {
            "max_grad_norm": dict(given) if isinstance(given, Mapping) else given,
            "gamma": self.gamma,
            "per_layer": self.per_layer,
            "layer_noise": self.layer_noise,
        }

    def _check_clip(self) -> None:
        now = self._clip_settings()
        for name, before in self._fixed.items():
            if now[name] != before:
                raise DefenseError(
                    f"DPSGD: {name} was {before} when the fit began and is {now[name]} now. "
                    "Samples are clipped by the first, and noise would follow the second, less of "
                    f"it than is accounted. Leave {name} as it is during a fit; nothing was "
                    "released."
                )

    def _client_noise(self, context: DefenseContext) -> float:
        """Noise multiplier of what this client adds itself."""
        share = context.clients if self.trust == "central" else 1
        return self.noise_multiplier_now / math.sqrt(share)

    def _base(self, context: DefenseContext) -> bytes:
        return base_of(context.entropy, self.seed if self._budget.seeded else None)

    def _key(
        self,
        context: DefenseContext,
        base: bytes,
        release: int,
        index: int,
        stream: str = "gradient",
    ) -> bytes:
        return noise_key(base, context.client, release, index, self.name, stream)


__all__ = ["DPSGD", "BudgetSpent", "Privacy"]

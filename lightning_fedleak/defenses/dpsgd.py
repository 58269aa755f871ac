"""DP-SGD: clips each sample's gradient, adds noise to their sum, and accounts what that costs."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.accounting import (
    Accountant,
    Trust,
    check_delta_for,
    effective_noise_multiplier,
)
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.budget import Account, Budget, BudgetSpent, guarantee_of
from lightning_fedleak.defenses.canary import CanaryGradient
from lightning_fedleak.defenses.dpsgd_checks import (
    Buffers,
    check_choices,
    check_hardening,
    check_model,
    check_settings,
    check_shards,
    check_trainer,
    count_samples,
    is_ddp,
    loss_with_graph,
    on_device,
    planned_steps,
    trainer_of,
)
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal
from lightning_fedleak.defenses.per_sample import Clipping
from lightning_fedleak.defenses.privacy import Privacy
from lightning_fedleak.defenses.recorder import Recorder
from lightning_fedleak.defenses.renyi_filter import RenyiFilter
from lightning_fedleak.defenses.sampling import Sampling, sampling_of
from lightning_fedleak.defenses.shards import (
    SHARD_BITS,
    local_part,
    own_part_of_sum,
    reshard,
    shard_number,
)
from lightning_fedleak.defenses.step_checks import (
    DrawnBatches,
    LossCheck,
    times_zero,
    zero_on_the_graph,
)
from lightning_fedleak.defenses.team import Team
from lightning_fedleak.defenses.update import ClippedSum, Moves, NoiseGauge


class DPSGD(Defense):
    """Differentially private SGD (Abadi et al. 2016) in the local or central model.

    Every optimizer step releases ``(sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2)) / L``: g_i is
    the gradient of sample i's own loss, C is ``max_grad_norm``, and L the expected batch size. The
    batches are Poisson samples of the client's examples, and an empty one releases noise alone. The
    unit of privacy is one example of the dataset, added or removed.

    One backward pass is enough: layer inputs and output gradients are kept (book-keeping, see
    :mod:`~lightning_fedleak.defenses.per_sample`), so the second backward of two-pass ghost
    clipping is saved, and tied weights are exact. ``p.grad`` stays what it is until the release:
    it is the *local* gradient that monitors see. Kept inputs take memory for as long as the graph
    would; gradient checkpointing does not free them.

    Refused at setup is what would break the guarantee (:mod:`~.dpsgd_checks`). Refused in a step
    are a batch without a loss, a loss that is not a mean of per-sample means or a network that
    mixes samples, through the graph (:mod:`~.loss_checks`), gradients that the layers do not
    explain, noise that is not what was accounted, a second release of one batch, buffers that
    ``training_step`` writes to, and weights that do not move.

    These looks find mistakes; they follow gradients, and prove nothing. Samples that meet without a
    gradient are not seen and void the guarantee: whitening by detached statistics of the batch,
    in-batch negatives that are detached, weights without gradient such as ``mask / mask.sum()``,
    labels or masks that are made from the whole batch, batches rewritten in hooks, plain attributes
    that keep something of earlier batches, and whether a network mixes samples in some steps only
    (it is looked at where layers are used in a new way, and every 100 releases).

    What a module sends or logs itself is not covered, neither are validation metrics, leakage logs
    and decisions taken in sight of them, nor buffers that are written outside of ``training_step``.
    Noise is floating-point and not from a cryptographic generator
    (:mod:`~lightning_fedleak.defenses.noise` says where from).

    An empty batch does not run ``training_step``. Under DDP do not log with ``sync_dist=True``
    there: a rank with an empty batch would not take part.

    A gate may turn the noise up (:meth:`harden`) with ``accountant="filter"`` alone. PRV, and RDP
    with the best order picked at the end, are proven for noise that was settled before the run. The
    filter (:class:`~lightning_fedleak.defenses.renyi_filter.RenyiFilter`) keeps the run within
    (``target_epsilon``, ``target_delta``) although later noise is chosen in sight of earlier
    releases. A release with more noise takes less of that budget, so that more of them fit. What it
    does not cover is the decision itself, where it was taken by what was not released: that a gate
    fired on a leakage metric, which reads the true batch, is told by how large the noise is.

    Args:
        max_grad_norm: C.
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
            :class:`~lightning_fedleak.defenses.ledger.Ledger`; with several clients ``.<client>``
            is appended.
        seed: for tests only: noise and samples follow from it, and epsilon is infinite.
        harden_factor: what a notch multiplies the noise by, with ``accountant="filter"``.
        most_notches: how often it may be turned up; None for as often as a gate asks.

    Attributes:
        releases: how many were made.
        measured_noise_multiplier: standard deviation of the noise over C, as it was last measured.

    Raises:
        DefenseError: a setting out of range, or contradicting another.
    """

    name = "dpsgd"
    per_sample = True
    takes_shards = True
    _batches: DrawnBatches
    _check: LossCheck
    _moves: Moves
    _clipped: ClippedSum | None
    _canaries: int
    _placeholder: bool
    _early: Exception | None

    def __init__(
        self,
        max_grad_norm: float,
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
    ) -> None:
        check_settings(
            max_grad_norm,
            noise_multiplier,
            target_epsilon,
            target_delta,
            fixed_budget=accountant == "filter",
        )
        check_choices(
            accountant=(accountant, ("prv", "rdp", "filter")),
            clipping=(clipping, ("auto", "per_sample", "ghost")),
            trust=(trust, ("local", "central")),
            on_budget=(on_budget, ("stop", "raise")),
            loss=(loss, ("checked", "trusted")),
        )
        check_hardening(harden_factor, most_notches)
        if seed is not None and target_epsilon is not None:
            raise DefenseError(
                "DPSGD: with a seed the noise can be guessed and no epsilon holds. Leave out seed "
                "or target_epsilon."
            )
        self.max_grad_norm = max_grad_norm
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.clipping: Clipping = clipping
        self.poisson = poisson
        self.trust: Trust = trust
        self.on_budget = on_budget
        self.loss = loss
        self.seed = seed
        self.releases = 0
        self.measured_noise_multiplier = math.nan
        self.guarantee = guarantee_of(trust, poisson, seed, accountant == "filter")
        self._budget = Budget(
            accountant,
            noise_multiplier,
            target_epsilon,
            target_delta,
            seeded=seed is not None,
            harden_factor=harden_factor,
            most_notches=most_notches,
        )
        self._ledger = ledger
        self._sampling: Sampling | None = None
        self._team = Team()
        self._recorder: Recorder | None = None
        self._forget_run()

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

    @property
    def share_spent(self) -> float | None:
        """Renyi divergence of the releases so far over the budget's, at the filter's order.

        None with another accountant.

        Raises:
            DefenseError: before the training data are known.
        """
        return self._budget.share_spent

    @property
    def noise_multiplier_now(self) -> float:
        """Sigma of the next release, as it is turned up now.

        Raises:
            DefenseError: before the training data are known, where sigma is found from them.
        """
        return self._budget.noise_now

    @property
    def can_harden(self) -> bool:
        """Only with ``accountant="filter"``: the others hold for noise settled beforehand."""
        return self._budget.can_harden

    def harden(self) -> str | None:
        """Multiplies the noise by ``harden_factor``, from the next release on."""
        changed = self._budget.harden()
        if changed is not None:
            self._check.unchecked = True
        return changed

    def before_setup(self, context: DefenseContext) -> None:
        """Checks model and Trainer, and hooks the layers.

        Raises:
            DefenseError: the guarantee cannot hold; says what to change.
        """
        self.teardown()
        self._team = team = Team(context)
        with team.together():
            check_trainer(context)
            check_model(context.root, self.clipping)
            check_shards(context.root, context.processes)
            if self._ledger is not None and team.process == 0:
                suffix = f".{context.client}" if context.clients > 1 else ""
                self._budget.open_ledger(os.fspath(self._ledger) + suffix)
        self._ledger = None
        self._budget.adopt(team.told_by_first(self._budget.account_state()))
        self._recorder = Recorder(context.root)
        self._forget_run()

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """A loader of Poisson samples; settles the noise.

        Raises:
            DefenseError: a loader that cannot be sampled, delta does not fit its size, or the
                filter's budget does not fit one release.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        self._team = Team(context)
        drawn = 0 if self._sampling is None else self._sampling.drawn
        with self._team.together():
            self._sampling = sampling = sampling_of(
                dataloader,
                context,
                poisson=self.poisson,
                trust=self.trust,
                entropy=self._base(context),
                first_step=drawn,
            )
            delta = 0.1 / sampling.examples if self.target_delta is None else self.target_delta
            check_delta_for(delta, sampling.examples)
            steps = functools.partial(planned_steps, context, len(sampling.loader))
            self._budget.settle(sampling.rate, delta, steps)
        self._team.check_alike(
            sample_rate=sampling.rate,
            examples=sampling.examples,
            batch_size=sampling.expected,
            delta=delta,
            noise_multiplier=self.noise_multiplier_now,
            max_grad_norm=self.max_grad_norm,
        )
        return sampling.loader

    def on_train_start(self, context: DefenseContext) -> None:
        """Looks at what was restored, where that comes after the loader.

        Raises:
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        if self._recorder is not None:
            reshard(context.root)
            self._recorder.adopt()
        self._budget.check_not_overdrawn()

    @property
    def acts_on_batches(self) -> bool:
        """Only with several processes, of which one alone may draw an empty batch."""
        return self._team.size > 1

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """The batch; one example that does not count where it is empty and others may not be."""
        self._placeholder, self._early = False, None
        try:
            if count_samples(batch) == 0 and self._sampling is not None:
                batch = on_device(self._sampling.placeholder(), context)
                self._placeholder = True
        except Exception as error:
            self._early = error
        return batch

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
        recorder = self._recorder
        if recorder is None or self._budget.rate is None:
            raise DefenseError("DPSGD: a training step outside of fit; nothing was released")
        team = self._team
        with team.together():
            if self._early is not None:
                raise self._early
            self._batches.begin(batch, context)
            samples = count_samples(batch)
        self._clipped = None
        if samples == 0:
            recorder.clear()
            return zero_on_the_graph(context.root)
        buffers = Buffers(context.root)
        with recorder.step(samples), buffers.sent_first() if is_ddp(context) else nullcontext():
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = loss_with_graph(output, samples)
            self._check.check_form(loss, recorder)
        self._check.look(loss, recorder, self.releases, team)
        recorder.calls = []
        if self._placeholder:
            recorder.clear()
            return times_zero(output)
        return output

    def before_release(self) -> None:
        """Refuses a release that the budget does not cover.

        Raises:
            BudgetSpent: says how many were made.
        """
        self._budget.check_affords_another()

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Puts the clipped and noised mean into ``p.grad``, and accounts it.

        Raises:
            DefenseError: a gradient that the layers do not explain, that is NaN or infinite, noise
                that is not what is accounted, or weights that do not move. Nothing is released.
        """
        team, sigma, trainer = self._team, self._client_noise(context), trainer_of(context)
        with team.together():
            clipped = self._clip(parameters, context)
        clipped.check_explained(parameters, context, team)
        if sigma > 0:
            self._moves.check(parameters, getattr(trainer, "optimizers", ()), team)
        checking = self._check.is_due(self.releases)
        if checking:
            clipped.check_complete(parameters, context, team)
        team.check_alike(noise_multiplier=sigma, releases=self.releases)
        with team.together():
            self._budget.record(effective_noise_multiplier(sigma, context.clients, self.trust))
        release, self.releases = self.releases, self.releases + 1
        gauge = NoiseGauge(sigma * self.max_grad_norm, self._divisor)
        for index, parameter in enumerate(parameters):
            total = clipped.sum_of(parameter)
            if team.size > 1:
                total = own_part_of_sum(total, parameter)
            before = gauge.before(total) if checking else None
            if sigma:
                place = index + (shard_number(parameter) << SHARD_BITS)
                key = self._key(context, release, place, "gradient")
                noise = standard_normal(key, total.shape, total.device, total.dtype)
                total.add_(noise, alpha=sigma * self.max_grad_norm)
            total.div_(self._divisor)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            released = local_part(parameter.grad)
            released.copy_(total)
            if before is not None:
                gauge.after(before, released)
        if checking:
            with team.together():
                measured = gauge.measured()
            if measured is not None:
                self.measured_noise_multiplier = measured / self.max_grad_norm
        if sigma > 0:
            self._moves.remember(parameters)
        self._batches.released()
        self._forget_step()
        if self.on_budget == "stop" and trainer is not None and not self._budget.affords_another():
            trainer.should_stop = True

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
        clipped = self._clip(parameters, context)
        released = clipped.with_canary(canary.samples, self._divisor)
        std = self._client_noise(context) * self.max_grad_norm / self._divisor
        if std:
            number, self._canaries = self._canaries, self._canaries + 1
            key = self._key(context, self.releases, number, "canary")
            like = released.samples
            noise = standard_normal(key, like.shape[1:], like.device, like.dtype)
            released = released.noised(noise * std, std)
        return released

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Releases, what they were accounted as, and the noise: as settled, and how turned up."""
        return {"releases": self.releases, **self._budget.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Goes on counting; neither the counters nor the account ever run backwards.

        Noise that was found from ``target_epsilon`` stays what it is. Under another target the
        releases that it may make are counted anew.

        Raises:
            DefenseError: the releases were made under another kind of accountant or, with
                ``accountant="filter"``, under another budget.
        """
        if "releases" not in state:
            self._budget.seeded = False
            return
        releases = int(state["releases"])
        self._budget.load_state_dict(state, releases)
        self.releases = max(self.releases, releases)

    def teardown(self) -> None:
        """Takes the hooks out."""
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        self._forget_run()

    @property
    def _divisor(self) -> float:
        """The expected number of samples, of all processes of this client."""
        if self._sampling is None:
            raise DefenseError("DPSGD: no training data yet, so nothing was released")
        return self._sampling.expected

    def _forget_run(self) -> None:
        self._batches = DrawnBatches(self.poisson)
        self._check = LossCheck(self.loss == "trusted")
        self._moves = Moves()
        self._forget_step()

    def _forget_step(self) -> None:
        self._canaries = 0
        self._placeholder, self._early = False, None
        self._check.unchecked = False
        self._clipped = None
        if self._recorder is not None:
            self._recorder.clear()

    def _clip(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Norms and clip factors of this step's samples; computed once."""
        if self._clipped is None:
            recorder = self._recorder
            if recorder is None:
                raise DefenseError("DPSGD: a release outside of fit; nothing was released")
            recorder.check()
            self._clipped = ClippedSum(
                parameters,
                recorder.parts,
                recorder.samples,
                self.max_grad_norm,
                self.clipping,
                context,
                half=recorder.half,
            )
        return self._clipped

    def _client_noise(self, context: DefenseContext) -> float:
        """Noise multiplier of what this client adds itself."""
        share = context.clients if self.trust == "central" else 1
        return self.noise_multiplier_now / math.sqrt(share)

    def _base(self, context: DefenseContext) -> bytes:
        return base_of(context.entropy, self.seed if self._budget.seeded else None)

    def _key(self, context: DefenseContext, release: int, index: int, stream: str) -> bytes:
        return noise_key(self._base(context), context.client, release, index, self.name, stream)


__all__ = ["DPSGD", "BudgetSpent", "Privacy"]

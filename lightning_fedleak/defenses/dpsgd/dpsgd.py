"""The defence DP-SGD: its arguments, its hooks, and the state of its account."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.defenses import accounting, noise
from lightning_fedleak.defenses.accounting import Account
from lightning_fedleak.defenses.base import (
    CanaryGradient,
    Curve,
    Defense,
    DefenseContext,
    DefenseError,
    Privacy,
    State,
    refuse,
)
from lightning_fedleak.defenses.dpsgd import settings, setup_checks
from lightning_fedleak.defenses.dpsgd.adam import DPAdamBC
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, MaxGradNorm, QuantileClip
from lightning_fedleak.defenses.dpsgd.poisson import Draws, Sampling
from lightning_fedleak.defenses.dpsgd.recorder import count_samples
from lightning_fedleak.defenses.dpsgd.sampling import sampling_of
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings, ReleaseSettings, Unit, Users
from lightning_fedleak.defenses.dpsgd.step import WatchedStep
from lightning_fedleak.defenses.processes import Team, reshard
from lightning_fedleak.messages import rank_zero_info

CHECK_EVERY = 160  # batches from one look of `check` to the next, which adds about 4% to the time


class DPSGD(Defense):
    """Differentially private SGD (Abadi et al. 2016) in the local or central model.

    Every optimizer step releases ``(sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2)) / L``: g_i is
    the gradient of sample i's loss, C is ``max_grad_norm``, sigma ``noise_multiplier``, and L the
    expected batch size. Batches are Poisson samples of the client's examples; an empty one releases
    noise alone. :attr:`privacy` is the cost so far. ``p.grad`` is the local gradient until the
    release. ``docs/dpsgd.md`` says what the guarantee covers, what is refused and why, what it
    costs, and how several processes train as one client.

    Examples:
        >>> import lightning as L
        >>> from lightning_fedleak import DPSGD, DefendedStrategy
        >>> defense = DPSGD(max_grad_norm=1.0, target_epsilon=8, target_delta=1e-5)
        >>> trainer = L.Trainer(max_epochs=3, strategy=DefendedStrategy("auto", [defense]))
        >>> print(defense.guarantee.partition(":")[0])
        against whoever sees every client's shared updates

    Args:
        max_grad_norm: C, or ``"auto"``: then g becomes ``g / (|g| + gamma)``, and there is no norm
            to choose; or a :class:`QuantileClip`, which follows the norms.
        noise_multiplier: sigma.
        target_epsilon: what the whole run may cost; sigma is found from the number of steps.
        target_delta: delta of the guarantee, below one over the number of examples. Default: a
            tenth of that; ``target_epsilon`` needs one.
        accountant: ``"prv"`` (tight), ``"rdp"`` (fast), or ``"filter"``: a budget that holds at
            whatever step the run ends, also where a gate turns the noise up (:meth:`harden`).
        max_physical_batch_size: rows that are run at once; a larger batch is run in pieces and
            released once. None for the whole batch.
        ledger: file that remembers every release through a crash.
        unit: what is added or removed: an ``"example"``, or :class:`Users` with all of their rows.
        clip: the form of gradients in memory, and what is known of the loss:
            :class:`ClipSettings`.
        release: trust in the server, hardening, and the end of the budget:
            :class:`ReleaseSettings`.
        seed: for tests: noise and samples follow from it, and epsilon is infinite.
        check: whether planted gradients try to refute this training, see :attr:`verdict`: before
            one batch in 160, or in so many as are given. A look takes as long as about six steps.

    Attributes:
        releases: how many were made.
        measured_noise_multiplier: standard deviation of the noise over C, as last measured. No
            epsilon covers it: do not publish it beside what was released.

    Raises:
        DefenseError: a setting out of range, or contradicting another. At setup and in a step also
            whatever would break the guarantee; says what to change.
        BudgetSpent: with ``on_budget="raise"``.
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
        *,
        max_physical_batch_size: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        unit: Unit = "example",
        clip: ClipSettings | None = None,
        release: ReleaseSettings | None = None,
        seed: int | None = None,
        check: bool | int = False,
    ) -> None:
        clip, release = clip or ClipSettings(), release or ReleaseSettings()
        settings.check_budget(noise_multiplier, target_epsilon, target_delta, seed, accountant)
        settings.check_combination(max_grad_norm, unit, max_physical_batch_size)
        settings.check_referee(check, unit, noise_multiplier, max_grad_norm)
        self._max_grad_norm = max_grad_norm
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.max_physical_batch_size = max_physical_batch_size
        self.ledger = None if ledger is None else os.path.abspath(ledger)
        self.clip = clip
        self.release = release
        self.users = unit if isinstance(unit, Users) else None
        self.unit = "example" if self.users is None else "user"
        self.seed = seed
        self.releases = 0
        self.measured_noise_multiplier = math.nan
        self.guarantee = settings.guarantee_of(
            release.trust, seed, self.unit, fixed_budget=accountant == "filter"
        )
        self._budget = accounting.Budget(
            accountant,
            noise_multiplier,
            target_epsilon,
            target_delta,
            seeded=seed is not None,
            max_hardenings=release.max_hardenings,
        )
        quantile = max_grad_norm if isinstance(max_grad_norm, QuantileClip) else None
        norm: Any = max_grad_norm if quantile is None else quantile.initial
        norm, gamma = (1.0, clip.gamma) if norm == "auto" else (float(norm), None)
        self._clip, self._quantile = Clip(norm, gamma, clip.form), quantile
        # The gradients' noise multiplier over the account's, which is of the quantile's count too.
        self._noise_share = 1.0 if quantile is None else quantile.gradient_noise
        self._opened_ledger = False
        self._sampling: Sampling | None = None
        self._team = Team()
        self._step: WatchedStep | None = None
        self._check_every = CHECK_EVERY if check is True else int(check)
        self._referee: Any = None  # of the last fit
        self._is_alone = True
        self._followers: list[str] = []

    @property
    def max_grad_norm(self) -> MaxGradNorm:
        """Return the clip norm as it was passed."""
        return self._max_grad_norm

    @property
    def clip_norm(self) -> float:
        """Return C of the next release. What a :class:`QuantileClip` makes of it is public."""
        return self._clip.norm

    @property
    def accountant(self) -> accounting.Accountant | accounting.RenyiFilter:
        """Return what counts the releases."""
        return self._budget.accountant

    @property
    def noise_multiplier(self) -> float | None:
        """Return sigma at the beginning of the run; None until it is found."""
        return self._budget.noise_multiplier

    @property
    def notches(self) -> int:
        """Return how often the noise was turned up."""
        return self._budget.notches

    @property
    def verdict(self) -> Any:
        """Return the PrivacyVerdict on the last fit; None without ``check``.

        It is *refuted*, or *not refuted* with the smallest faults that would have been seen. No
        epsilon covers it: do not publish it.
        """
        return None if self._referee is None else self._referee.verdict()

    @property
    def finding(self) -> str | None:
        """Return the verdict in one line, for the record of the fit; None without ``check``.

        One process writes the record, and a verdict on several needs all of them.
        """
        if self._referee is None or self._is_alone:
            return None if self._referee is None else str(self.verdict.in_short)
        return "unknown: several processes trained, and no one of them knows of all looks"

    @property
    def privacy(self) -> Privacy:
        """Return epsilon and delta of the releases so far, and the noise of the next.

        With ``accountant="filter"`` epsilon is ``target_epsilon``, however much of it is spent.

        Raises:
            DefenseError: before the training data are known.
        """
        return self._budget.privacy

    @property
    def can_harden(self) -> bool:
        """Return whether noise may be turned up: the other accountants need it fixed before."""
        return self._budget.can_harden

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the public settings, the accountant and the noise multiplier."""
        values = super().settings() | {"accountant": self._budget.kind, "poisson": True}
        clip, release, users = self.clip, self.release, self.users
        optional = {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "rows_per_user": None if users is None else users.rows_per_user,
            "group_by": None if users is None else users.group_by,
        }
        values |= {n: v for n, v in optional.items() if isinstance(v, int | float | str)}
        if (quantile := self._quantile) is not None:
            values |= {f"clip_{name}": value for name, value in vars(quantile).items()}
            values |= {"max_grad_norm": quantile.initial}
        values |= {"clipping": clip.form, "gamma": clip.gamma, "loss": clip.loss}
        values |= {"check": self._check_every} if self._check_every else {}
        return values | {"trust": release.trust, "on_budget": release.on_budget}

    def curve(self) -> Curve:
        """Return pairs (epsilon, delta); raise an error where users are protected."""
        if self.users is not None:
            raise DefenseError("its unit is a user, and rows were left out: leave out whole users")
        return self._budget.curve()

    def harden(self) -> str | None:
        """Double the noise, from the next release on."""
        changed = self._budget.harden()
        if changed is not None and self._step is not None:
            self._step.check.unchecked = True
        return changed

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Note which defences change gradients after this one."""
        super().check_order(before, after)
        self._followers = [defense.name for defense in after if defense.acts_on_gradients]

    def before_setup(self, context: DefenseContext) -> None:
        """Check model and Trainer, and put hooks on the layers.

        Raises:
            DefenseError: the guarantee cannot hold; says what to change.
        """
        self._remove_hooks()
        self._team = team = Team(context)
        with team.together():
            if self._quantile is not None:
                self._quantile.check_clients(context.clients)
            setup_checks.check_trainer(context)
            setup_checks.check_model(context.root, self.clip.form)
            setup_checks.check_shards(context.root, context.processes)
        self._read_ledger(context)
        trusted = self.clip.loss == "trusted"
        self._step = WatchedStep(context.root, team, clip=self._clip, trusted=trusted)
        if self._sampling is not None:  # set up again: batches are drawn as before
            self._step.sampling = self._sampling

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """Return a loader of Poisson samples, and fix the noise.

        Raises:
            DefenseError: a loader that cannot be sampled, a delta that is too large for its size,
                or a filter's budget that is too small for one release.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        self._team = team = Team(context)
        # The next loader continues where the last one is.
        sampler: Any = None if self._sampling is None else self._sampling.loader.batch_sampler
        first_step = 0 if sampler is None else sampler.step
        team.check_alike(
            max_grad_norm=self._clip.norm,
            noise_multiplier=self.noise_multiplier or 0.0,
            target_epsilon=self.target_epsilon or 0.0,
            target_delta=self.target_delta or 0.0,
        )
        draws = Draws(self._base(context), context.client, first_step)
        with team.together():
            self._sampling = sampling = sampling_of(
                dataloader, context, draws, trust=self.release.trust, users=self.users
            )
            delta = 0.1 / sampling.examples if self.target_delta is None else self.target_delta
            accounting.check_delta_for(delta, sampling.examples)
            per_epoch = len(sampling.loader)
            planned = functools.partial(setup_checks.planned_steps, context, per_epoch)
            self._budget.settle(sampling.rate, delta, planned)
        users = sampling.users_digest
        team.check_alike(examples=sampling.examples, batch_size=sampling.expected, users=users)
        setup_checks.check_same_data(sampling.loader, team)
        # Computed on another machine, it may differ in its last bits.
        self._budget.noise_multiplier = team.broadcast(self.noise_multiplier)
        if self._step is not None:
            self._step.sampling = sampling
        return sampling.loader

    def _read_ledger(self, context: DefenseContext) -> None:
        """Open the ledger in the first process, once, and adopt its releases in all."""
        with self._team.together():
            if self.ledger is not None and not self._opened_ledger and self._team.process == 0:
                self._budget.open_ledger(self.ledger, context.client, context.clients, self.unit)
        self._opened_ledger = True
        self.accountant.load_state_dict(self._team.broadcast(self.accountant.state_dict()))

    def on_train_start(self, context: DefenseContext) -> None:
        """Check the restored state, where that comes after the loader, as :meth:`on_dataloader`.

        Raises:
            DefenseError: another defence would add noise that :class:`~.DPAdamBC` does not know,
                or a scheduler sets the learning rate by a metric.
        """
        setup_checks.check_trainer(context)  # once more: only now a Trainer has its schedulers
        setup_checks.check_no_other_noise(context.host, self._followers)
        if self._step is not None and self._sampling is not None:
            reshard(context.root)
            self._step.sampling = self._sampling
            self._step.adopt(context)
            if self._check_every:
                self._begin_check(context, self._sampling)
        self._budget.check_not_overdrawn()
        if self.accountant.steps:
            self._stop_if_spent(context)

    def _stop_if_spent(self, context: DefenseContext) -> None:
        """End the fit where no further release fits the budget, with ``on_budget="stop"``."""
        if self.release.on_budget == "stop":
            (spent,) = self._team.largest([not self._budget.affords_another()])
            if spent:
                context.host.stop()

    @property
    def acts_on_batches(self) -> bool:
        """Return whether there are several processes, one of which may draw an empty batch."""
        return self._team.size > 1

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """Return the batch, or with several processes one example in place of an empty one."""
        return self._fit_step.batch_to_run(batch, context) if self._team.size > 1 else batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Run the batch, in pieces where it has more rows than ``max_physical_batch_size``.

        Raises:
            DefenseError: it was released already, is not the one that was drawn, or weights were
                written to.
        """
        if self._referee is not None and not self._referee.is_probing:
            rehearsal = functools.partial(self._rehearse, step, context)
            self._referee.before_step(batch, count_samples(batch), rehearsal)
        max_rows = self.max_physical_batch_size
        if max_rows is None:
            return step(batch)
        return self._fit_step.run_in_pieces(step, batch, max_rows, self.releases, context)

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero."""
        return self._fit_step.run(training_step, batch, self.releases, context)

    def before_release(self) -> None:
        """Raise :class:`BudgetSpent` for a release that the budget does not cover."""
        if self._budget.target_epsilon is not None:
            with self._team.together():
                self._budget.check_affords_another()

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Write the clipped and noised mean into ``p.grad``, and account it.

        Raises:
            DefenseError: a gradient is not that of the layers, or weights were written to.
                Nothing is released.
        """
        team, step = self._team, self._fit_step
        expected, norm, release = step.sampling.expected, self._clip.norm, self.releases
        noise_multiplier, count = self._budget.next_release or self._budget.settle_next()
        share = math.sqrt(context.clients if self.release.trust == "central" else 1)
        sigma = noise_multiplier / share * self._noise_share
        std = sigma * norm
        if team.size > 1:  # what follows would send other messages where these differ
            team.check_alike(noise_multiplier=sigma, releases=release, max_grad_norm=norm)
        with team.together():
            step.weights.check(parameters, context.root)
            clipped = step.clipped(parameters, context)
        clipped.check_explained(parameters, context, team)
        checking = step.check.is_due(release)
        compared = not checking or clipped.check_complete(parameters, context, team)
        with team.together():
            for optimizer in context.host.optimizers:
                if isinstance(optimizer, DPAdamBC):
                    optimizer.set_noise(self.noise_variances(parameters, context))
            count()
        self.releases += 1
        gauge = noise.NoiseGauge(std, expected) if checking else None
        key = self._base(context), release, context.client, self.name
        clipped.release(
            parameters, team, std, expected, functools.partial(noise.add_noise, *key), gauge
        )
        if gauge is not None:
            with team.together():
                measured = gauge.measured()
            if measured is not None:
                self.measured_noise_multiplier = measured / norm
        if self._quantile is not None:
            place = self._base(context), release, 0
            secret = noise.noise_key(*place, client=context.client, name=self.name, stream="count")
            counted = clipped.unclipped(team), expected, noise_multiplier
            self._set_norm(team.broadcast(self._quantile.next_norm(norm, *counted, secret)))
        step.released(unchecked=not compared)
        if self._referee is not None and not self._referee.is_probing:
            self._referee.released()
        if self._budget.target_epsilon is not None:
            self._stop_if_spent(context)

    def _set_norm(self, norm: float) -> None:
        """Set C of the next release."""
        self._clip = dataclasses.replace(self._clip, norm=norm)
        if self._step is not None:
            self._step.clip = self._clip

    def on_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Return the canary clipped together with each sample's gradient, with separate noise.

        Raises:
            DefenseError: the canary is of other samples than the batch, or was noised before.
        """
        step = self._fit_step
        refusals = {
            "what the samples of the client's other processes add to a canary is not computed; use "
            "client='rank', or one process": self._team.size > 1,
            "noise on the sum of samples cannot be clipped sample by sample": (
                canary.noise is not None
            ),
        }
        refuse("DPSGD: ", refusals)
        clipped = step.clipped(parameters, context)
        released = clipped.with_canary(canary.samples, step.sampling.expected)
        std = self.noise_std(context)
        if std:
            number, step.canaries = step.canaries, step.canaries + 1
            place = self._base(context), self.releases, number
            key = noise.noise_key(*place, client=context.client, name=self.name, stream="canary")
            like = released.samples
            standard = noise.standard_normal(key, like.shape[1:], like.device, like.dtype)
            released = released.noised(standard * std, std)
        return released

    def noise_std(self, context: DefenseContext) -> float:
        """Return the standard deviation of the noise on each number of the next update."""
        share = math.sqrt(context.clients if self.release.trust == "central" else 1)
        sigma = self._budget.noise_now / share * self._noise_share
        return sigma * self._clip.norm / self._fit_step.sampling.expected

    def noise_variances(
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> dict[Tensor, float]:
        """Return the noise's variance on each number of a parameter's gradient, by parameter.

        It is that of the optimizer's gradient, which is averaged over clients.
        """
        return dict.fromkeys(parameters, self.noise_std(context) ** 2 / context.clients)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the releases, and what they were accounted as."""
        state: dict[str, Tensor | int | float | str] = {"releases": self.releases}
        state |= {"trust": self.release.trust, "unit": self.unit}
        if self._quantile is not None:
            state["clip_norm"] = torch.tensor(self.clip_norm, dtype=torch.float64)
        return state | self._budget.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue the account, in which no count ever decreases.

        Noise that was found from ``target_epsilon`` stays.

        Raises:
            DefenseError: the releases were made under another kind of accountant, with
                ``accountant="filter"`` under another budget, for another unit of privacy, or under
                ``trust="central"`` and this run is under ``"local"``.
        """
        if "releases" not in state:
            self._budget.seeded = False
            return
        releases = int(state["releases"])
        if releases:
            settings.check_continued(state, releases, self.release.trust, self.unit)
        self._budget.load_state_dict(state, releases)
        if self._quantile is not None and "clip_norm" in state:
            self._set_norm(float(state["clip_norm"]))
        self.releases = max(self.releases, releases)

    def teardown(self) -> None:
        """Remove the hooks, and say what ``check`` has shown."""
        if self._referee is not None and self._step is not None:
            self._referee.close()
            rank_zero_info(f"DPSGD(check): {self.verdict}")
        self._remove_hooks()

    def _begin_check(self, context: DefenseContext, sampling: Sampling) -> None:
        """Let planted gradients test this fit from now on."""
        from lightning_fedleak.evaluation.auditing import PrivacyClaim
        from lightning_fedleak.evaluation.auditing.own_training import OwnTrainingCheck

        if sampling.rate == 1:
            raise DefenseError(
                "DPSGD: check compares batches with Poisson samples, and each batch holds all "
                "examples: leave check out, or pass a smaller batch_size"
            )
        norm, privacy = self._clip.norm, self.privacy
        claim = PrivacyClaim(
            noise_multiplier=self.noise_std(context) * sampling.expected / norm,
            max_grad_norm=norm,
            sample_rate=sampling.rate,
            divisor=sampling.expected,
            delta=privacy.delta,
            epsilon=lambda: self.privacy.epsilon,
        )
        self._referee = OwnTrainingCheck(
            *(context.root, context.host, sampling.loader.batch_sampler, claim, self._save),
            self._check_every,
        )
        self._is_alone = context.clients == context.processes == 1
        if self._team.size > 1:
            self._referee.give_up("several processes are one client, where no probe runs")

    def _rehearse(
        self,
        step: Callable[[Any], Any],
        context: DefenseContext,
        batch: Any,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        """Run a batch up to its release, which is not counted; :meth:`_save` restores the rest."""
        sigma, _ = self._budget.next_release or self._budget.settle_next()
        self._budget.next_release = sigma, lambda: None
        output = self.on_logical_batch(step, batch, context)
        context.host.backward(output["loss"] if isinstance(output, Mapping) else output)
        for optimizer in context.host.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            before(optimizer)
            with torch.no_grad():
                self.on_gradients([p for p in parameters if p.requires_grad], context)
            after(optimizer)

    def _save(self) -> Callable[[], None]:
        """Return a function that restores what :meth:`_rehearse` changes in this object."""
        step = self._fit_step
        parts = [self, self._budget, step, step.check, step.weights]
        parts.append(step.sampling.loader.batch_sampler)
        states = [(vars(part), {k: _copied(v) for k, v in vars(part).items()}) for part in parts]

        def restore() -> None:
            step.end_scaling()  # where backward raised an error
            for current, earlier in states:
                current.clear()
                current.update(earlier)

        return restore

    def _remove_hooks(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    @property
    def _fit_step(self) -> WatchedStep:
        if self._step is None or self._sampling is None:
            raise DefenseError("DPSGD: a step or a release outside of fit; nothing was released")
        return self._step

    def _base(self, context: DefenseContext) -> bytes:
        return noise.base_of(context.entropy, self.seed if self._budget.seeded else None)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | set | list | deque) else value

"""The DP-SGD defence: its arguments, its hooks into training, and the state of its accountant."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.defenses import accounting, base, noise
from lightning_fedleak.defenses.accounting import Account
from lightning_fedleak.defenses.accounting.ledger import client_path
from lightning_fedleak.defenses.adam import DPAdamBC
from lightning_fedleak.defenses.dpsgd import isolation, settings, setup_checks
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, MaxGradNorm, QuantileClip
from lightning_fedleak.defenses.dpsgd.poisson import Draws, Sampling
from lightning_fedleak.defenses.dpsgd.recorder import count_samples
from lightning_fedleak.defenses.dpsgd.sampling import sampling_of
from lightning_fedleak.defenses.dpsgd.settings import ClipSettings, ReleaseSettings, Unit, Users
from lightning_fedleak.defenses.dpsgd.step import WatchedStep
from lightning_fedleak.defenses.processes import Team, reshard
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.validate import explain_arguments


class DPSGD(base.Defense):
    """Differentially private SGD (Abadi et al. 2016) in the local or central model.

    Every optimizer step releases ``(sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2)) / L``: g_i is
    the gradient of sample i's loss, C is ``max_grad_norm``, sigma ``noise_multiplier``, and L the
    expected batch size. Batches are Poisson samples of the client's examples; an empty one releases
    only noise. :attr:`privacy` is the privacy cost so far. Until the release ``p.grad`` is the
    local gradient; most steps do not compute it if nothing reads it. ``docs/dpsgd.md`` says what
    the guarantee covers, what it costs, what is refused, and how several processes are one client.

    Examples:
        >>> import lightning as L
        >>> from lightning_fedleak import DPSGD, DefendedStrategy
        >>> defense = DPSGD(max_grad_norm=1.0, target_epsilon=8, target_delta=1e-5)
        >>> trainer = L.Trainer(max_epochs=3, strategy=DefendedStrategy("auto", [defense]))
        >>> print(defense.guarantee.partition(":")[0])
        against whoever sees every client's shared updates

    Args:
        max_grad_norm: The clip norm C, or ``"auto"`` for automatic clipping,
            ``g / (|g| + gamma)``, which needs no clip norm, or a :class:`QuantileClip`, which
            follows the norms.
        noise_multiplier: The noise multiplier sigma.
        target_epsilon: The epsilon that the whole run may spend; sigma follows from the steps.
        target_delta: The delta of the guarantee, less than 1 / N for N examples. Default: 0.1 / N.
            Required with ``target_epsilon``.
        accountant: ``"prv"`` (tight), ``"rdp"`` (fast), or ``"filter"``: a budget that is valid
            whenever the run ends, also if a gate increases the noise (:meth:`harden`).
        max_physical_batch_size: The maximum number of rows per forward pass. A larger batch is run
            in pieces and released once. None: no limit.
        ledger: The path of a file that records every release, so that a crash loses none.
        unit: What is added or removed: an ``"example"``, or a user with all rows (:class:`Users`).
        clip: How per-sample gradients are stored and clipped, and whether the loss is trusted:
            :class:`ClipSettings`.
        release: The trust in the server, hardening, and the end of the budget:
            :class:`ReleaseSettings`.
        seed: For tests only. Noise and sampling are derived from it, so epsilon is infinite. A
            resume from a checkpoint without this defence's state ignores it.
        check: What tries to refute this training while it runs, such as
            :class:`~lightning_fedleak.PlantedGradients` (see :attr:`verdict`); None for nothing.

    Attributes:
        releases: The number of releases so far.
        measured_noise_multiplier: The last measured standard deviation of the noise, divided by C.
            No epsilon covers it: do not publish it.

    Raises:
        DefenseError: An argument is out of range or contradicts another. At setup and in a step:
            the guarantee would be broken. The message says what to change.
        BudgetSpent: The budget is spent, with ``on_budget="raise"``.
    """

    name = "dpsgd"
    per_sample = True  # it computes the update from the samples again, not from `p.grad`
    takes_shards = True  # it supports FSDP2, where a process holds a part of each gradient
    _changing = ("releases", "measured_noise_multiplier")  # results, so no settings of a record

    @explain_arguments("{}(max_grad_norm=1.0, target_epsilon=8, target_delta=1e-5)")
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
        check: settings.PlantedCheck | None = None,
    ) -> None:
        clip, release = clip or ClipSettings(), release or ReleaseSettings()
        settings.check_budget(noise_multiplier, target_epsilon, target_delta, seed, accountant)
        settings.check_combination(max_grad_norm, unit, max_physical_batch_size)
        settings.check_audit(check, unit, noise_multiplier, max_grad_norm)
        self._max_grad_norm = max_grad_norm
        self.target_epsilon, self.target_delta = target_epsilon, target_delta
        self.max_physical_batch_size = max_physical_batch_size
        self.ledger = None if ledger is None else os.path.abspath(ledger)
        self.clip, self.release = clip, release
        self.users = unit if isinstance(unit, Users) else None
        self.unit = "example" if self.users is None else "user"
        self.seed = seed
        self.releases, self.measured_noise_multiplier = 0, math.nan
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
        # The gradients' noise multiplier over the account's, which covers the quantile's count too.
        self._noise_share = 1.0 if quantile is None else quantile.gradient_noise
        self._opened_ledger = False
        self._sampling: Sampling | None = None  # set by `on_dataloader`
        self._team = Team()  # the processes of this client
        self._step: WatchedStep | None = None  # set by `before_setup`
        self.check = check
        self._audit: Any = None  # of the last fit, by `check`
        self._later_defenses: list[str] = []
        self._has_activation_noise = False  # which draws secret numbers itself

    @property
    def max_grad_norm(self) -> MaxGradNorm:
        """Return the clip norm as it was passed; it is read-only."""
        return self._max_grad_norm

    @property
    def clip_norm(self) -> float:
        """Return C of the next release. What a :class:`QuantileClip` makes of it is public."""
        return self._clip.norm

    @property
    def accountant(self) -> accounting.Accountant | accounting.RenyiFilter:
        """Return the accountant, which counts the releases."""
        return self._budget.accountant

    @property
    def noise_multiplier(self) -> float | None:
        """Return the initial sigma; None until it is computed."""
        return self._budget.noise_multiplier

    @property
    def notches(self) -> int:
        """Return how many times the noise was doubled (:meth:`harden`)."""
        return self._budget.notches

    @property
    def verdict(self) -> Any:
        """Return the PrivacyVerdict on the last fit; None without ``check``.

        It is *refuted*, or *not refuted* with the smallest faults that the audit would have
        detected. No epsilon covers it: do not publish it.
        """
        return None if self._audit is None else self._audit.verdict()

    @property
    def finding(self) -> str | None:
        """Return the verdict in one line, for the record of the fit; None without ``check``."""
        return None if self._audit is None else str(self._audit.finding)

    @property
    def privacy(self) -> base.Privacy:
        """Return epsilon and delta of the releases so far, and the noise of the next.

        With ``accountant="filter"`` epsilon is ``target_epsilon``, regardless of what is spent.

        Raises:
            DefenseError: The training data are not known yet.
        """
        return self._budget.privacy

    @property
    def can_harden(self) -> bool:
        """Return whether noise may be increased, as only ``accountant="filter"`` allows."""
        return self._budget.can_harden

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the public settings, the accountant and the noise multiplier."""
        values = super().settings() | {"accountant": self._budget.kind, "poisson": True}
        clip, release, quantile = self.clip, self.release, self._quantile
        optional = {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm if quantile is None else quantile.initial,
            **({} if self.users is None else vars(self.users)),
        }
        values |= {n: v for n, v in optional.items() if isinstance(v, int | float | str)}
        if quantile is not None:
            values |= {f"clip_{name}": value for name, value in vars(quantile).items()}
        values |= {"clipping": clip.form, "gamma": clip.gamma, "loss": clip.loss}
        values |= {} if self.check is None else {"check": self.check.every_n_steps}
        return values | {"trust": release.trust, "on_budget": release.on_budget}

    def curve(self) -> base.Curve:
        """Return pairs (epsilon, delta) of one example; raise an error if the unit is a user."""
        if self.users is not None:
            raise base.DefenseError("its unit is a user: hold out whole users, not rows")
        return self._budget.curve()

    def harden(self) -> str | None:
        """Double the noise, from the next release on."""
        changed = self._budget.harden()
        if changed is not None and self._step is not None:
            self._step.check.unchecked = True
        return changed

    def check_order(self, before: Sequence[base.Defense], after: Sequence[base.Defense]) -> None:
        """Note which defences change gradients after this one, and whether one changes states."""
        super().check_order(before, after)
        self._has_activation_noise = any(d.activation_layers for d in (*before, *after))
        self._later_defenses = [defense.name for defense in after if defense.acts_on_gradients]

    def before_setup(self, context: base.DefenseContext) -> None:
        """Check the model and the Trainer, and register hooks on the layers.

        Raises:
            DefenseError: The guarantee cannot hold. The message says what to change.
        """
        self._remove_hooks()
        self._team = team = Team(context)
        with team.together():
            if self._quantile is not None and context.clients > 1:  # each had its own clip norm
                raise base.DefenseError("QuantileClip for several clients needs client='world'")
            setup_checks.check_trainer(context)
            setup_checks.check_model(context.root)
            setup_checks.check_shards(context.root, context.processes)
        self._read_ledger(context)
        trusted = self.clip.loss == "trusted"
        self._step = WatchedStep(context.root, team, clip=self._clip, trusted=trusted)
        self._step.is_rehearsed = self._has_activation_noise
        run, rows = (context.root, context.precision), self.max_physical_batch_size
        self._isolation = isolation.Isolation(*run, trusted=trusted, max_rows=rows)
        self._check_quantile()
        if self._sampling is not None:  # set up again: continue its sampling
            self._step.sampling = self._sampling

    def on_dataloader(self, dataloader: Any, context: base.DefenseContext) -> Any:
        """Return a loader of Poisson samples, and fix the noise.

        Raises:
            DefenseError: The loader cannot be sampled, the delta is too large for its size, or a
                filter's budget is too small for one release.
            BudgetSpent: A resumed run has cost more than ``target_epsilon`` already.
        """
        self._team = team = Team(context)
        # A new loader continues at the step of the previous one.
        sampler: Any = None if self._sampling is None else self._sampling.loader.batch_sampler
        first_step = 0 if sampler is None else sampler.step
        team.check_alike(
            max_grad_norm=self._clip.norm,
            noise_multiplier=self.noise_multiplier or 0.0,
            target_epsilon=self.target_epsilon or 0.0,
            target_delta=self.target_delta or 0.0,
        )
        draws = Draws(self._noise_base(context), context.client, first_step)
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
        # Sigma computed on another machine may differ in its last bits.
        self._budget.noise_multiplier = team.broadcast(self.noise_multiplier)
        if self._step is not None:
            self._step.sampling = sampling
        return sampling.loader

    def _read_ledger(self, context: base.DefenseContext) -> None:
        """Open the ledger once, in the first process, and load its releases in all processes."""
        with self._team.together():
            if self.ledger is not None and not self._opened_ledger and self._team.process == 0:
                clients = context.client, context.clients
                self._budget.open_ledger(client_path(self.ledger, *clients, self.unit))
        self._opened_ledger = True
        self.accountant.load_state_dict(self._team.broadcast(self.accountant.state_dict()))

    def on_train_start(self, context: base.DefenseContext) -> None:
        """Check again what a checkpoint may have changed since :meth:`on_dataloader`.

        Raises:
            DefenseError: Another defence would add noise that :class:`~.DPAdamBC` does not know,
                or a scheduler sets the learning rate by a metric.
        """
        setup_checks.check_trainer(context)  # again: only now schedulers exist
        setup_checks.check_no_other_noise(context.host, self._later_defenses)
        if self._step is not None and self._sampling is not None:
            reshard(context.root)
            self._step.sampling = self._sampling
            self._step.adopt(context)
            if self.check is not None:
                save = functools.partial(self._step.save, self, self._budget)
                self._audit = self.check.begin(self, context, self._sampling, save)
                self._step.audited = True
        self._budget.check_not_overdrawn()
        if self.accountant.steps:
            self._stop_if_spent(context)

    def on_train_end(self, context: base.DefenseContext) -> None:
        """Raise an error if weights were written to since the optimizer's last step."""
        with self._team.together():
            self._fit_step.trained_weights.check_all(context.root)

    def _stop_if_spent(self, context: base.DefenseContext) -> None:
        """With ``on_budget="stop"``, end the fit if the budget allows no further release."""
        if self.release.on_budget == "stop":
            (spent,) = self._team.largest([not self._budget.affords_another()])
            if spent:
                context.host.stop()

    @property
    def acts_on_batches(self) -> bool:
        """Return whether there are several processes, any of which may draw an empty batch."""
        return self._team.size > 1

    def on_batch(self, batch: Any, context: base.DefenseContext) -> Any:
        """Return the batch; with several processes an uncounted example instead of an empty one."""
        return self._fit_step.batch_to_run(batch, context) if self._team.size > 1 else batch

    def on_logical_batch(
        self, step: Callable[[Any], Any], batch: Any, context: base.DefenseContext
    ) -> Any:
        """Run the batch, in pieces if it has more rows than ``max_physical_batch_size``.

        Raises:
            DefenseError: The batch was released before, is not the one that was sampled, or weights
                were changed.
        """
        if self._isolation.measure(step, self._sampling, context, self._team):
            self.guarantee = self.guarantee.removesuffix(isolation.NOT_MEASURED)
            self.guarantee += isolation.NOT_MEASURED
        self._check_quantile()
        if self._audit is not None and not self._audit.is_probing:
            dry_run = functools.partial(self._run_uncounted, step, context)
            self._audit.before_step(batch, count_samples(batch), dry_run)
        max_rows, fit = self.max_physical_batch_size, self._fit_step
        return fit.run_batch(step, batch, max_rows, self.releases, context)

    def _check_quantile(self) -> None:
        """Raise an error if half precision is known to move the norms that a quantile counts."""
        if self._quantile is not None and self._isolation.rounding:
            raise base.DefenseError(
                "DPSGD: in half precision other rows move an example's norm, which QuantileClip's "
                "count does not cover: use precision='32-true', or a fixed max_grad_norm"
            )

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: base.DefenseContext
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero."""
        if self._isolation.is_running:
            return self._isolation.run(training_step, batch)
        base = self._noise_base(context)
        return self._fit_step.run(training_step, batch, self.releases, context, base)

    def before_release(self) -> None:
        """Raise :class:`BudgetSpent` for a release that the budget does not cover."""
        if self._budget.target_epsilon is not None:
            with self._team.together():
                self._budget.check_affords_another()

    def on_gradients(
        self, parameters: Sequence[nn.Parameter], context: base.DefenseContext
    ) -> None:
        """Write the clipped and noised mean into ``p.grad``, and record the release.

        Raises:
            DefenseError: A gradient does not match the recorded layers, or weights or buffers were
                changed. Nothing is released.
        """
        team, step = self._team, self._fit_step
        expected, norm, release = step.sampling.expected, self._clip.norm, self.releases
        noise_multiplier = self._budget.noise_now
        sigma = self._sigma(noise_multiplier, context)
        std = sigma * norm
        if team.size > 1:  # the collective calls below need equal values
            team.check_alike(noise_multiplier=sigma, releases=release, max_grad_norm=norm)
        with team.together():
            clipped = step.checked_sum(parameters, context)
        checking = step.check.is_due(release)
        is_complete = not checking or clipped.check_complete(parameters, context, team)
        with team.together():
            for optimizer in context.host.optimizers:
                if isinstance(optimizer, DPAdamBC):
                    optimizer.set_noise(self.noise_variances(parameters, context))
            self._budget.count_release()
        self.releases += 1
        gauge = noise.NoiseGauge(std, expected) if checking else None
        source = self._noise_base(context), release, context.client, self.name
        clipped.release(
            parameters, team, std, expected, functools.partial(noise.add_noise, *source), gauge
        )
        if gauge is not None:
            with team.together():
                measured = gauge.measured()
            if measured is not None:
                self.measured_noise_multiplier = measured / norm
        if self._quantile is not None:
            ids = self._noise_base(context), release, 0
            secret = noise.noise_key(*ids, client=context.client, name=self.name, stream="count")
            counted = clipped.unclipped(team), expected, noise_multiplier
            self._set_norm(team.broadcast(self._quantile.next_norm(norm, *counted, secret)))
        step.released(unchecked=not is_complete)
        if self._audit is not None and not self._audit.is_probing:
            self._audit.released()
        if self._budget.target_epsilon is not None:
            self._stop_if_spent(context)

    def _set_norm(self, norm: float) -> None:
        """Set C of the next release."""
        self._clip = dataclasses.replace(self._clip, norm=norm)
        if self._step is not None:
            self._step.clip = self._clip

    def on_canary(
        self,
        canary: base.CanaryGradient,
        parameters: Sequence[nn.Parameter],
        context: base.DefenseContext,
    ) -> base.CanaryGradient:
        """Return the canary clipped together with each sample's gradient, with independent noise.

        Raises:
            DefenseError: The canary belongs to other samples than the batch, or already has noise.
        """
        step = self._fit_step
        if self._team.size > 1 or canary.noise is not None:
            raise base.DefenseError(
                "DPSGD: a canary needs client='rank' or one process, and DPSGD before other noise"
            )
        clipped = step.clipped(parameters, context)
        released = clipped.with_canary(canary.samples, step.sampling.expected)
        std = self.noise_std(context)
        if std:
            index, step.canaries = step.canaries, step.canaries + 1
            ids = self._noise_base(context), self.releases, index
            key = noise.noise_key(*ids, client=context.client, name=self.name, stream="canary")
            samples = released.samples
            standard = noise.standard_normal(key, samples.shape[1:], samples.device, samples.dtype)
            released = released.noised(standard * std, std)
        return released

    def _sigma(self, noise_multiplier: float, context: base.DefenseContext) -> float:
        """Return the deviation of this client's noise over C, raised by what rounding moves."""
        expected = self._fit_step.sampling.expected
        divisor = math.sqrt(context.clients if self.release.trust == "central" else 1)
        moved = self._isolation.rounding * math.sqrt(expected)
        return noise_multiplier / divisor * self._noise_share * (1 + moved)

    def noise_std(self, context: base.DefenseContext) -> float:
        """Return the standard deviation of the noise on each number of the next update."""
        sigma = self._sigma(self._budget.noise_now, context)
        return sigma * self._clip.norm / self._fit_step.sampling.expected

    def example_norm(self, context: base.DefenseContext) -> float:
        """Return the clip norm over the divisor of the update; infinite if users are clipped."""
        return math.inf if self.users else self._clip.norm / self._fit_step.sampling.expected

    def noise_variances(
        self, parameters: Sequence[nn.Parameter], context: base.DefenseContext
    ) -> dict[Tensor, float]:
        """Return the noise's variance on each number of a parameter's gradient, by parameter.

        It refers to the optimizer's gradient, the mean over clients.
        """
        return dict.fromkeys(parameters, self.noise_std(context) ** 2 / context.clients)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the number of releases and the state of the accountant."""
        state: dict[str, Tensor | int | float | str] = {"releases": self.releases}
        state |= {"trust": self.release.trust, "unit": self.unit}
        if self._quantile is not None:
            state["clip_norm"] = torch.tensor(self.clip_norm, dtype=torch.float64)
        return state | self._budget.state_dict()

    def load_state_dict(self, state: base.State) -> None:
        """Continue the account. Counts never decrease.

        A sigma computed from ``target_epsilon`` is kept.

        Raises:
            DefenseError: The releases were made under another kind of accountant, with
                ``accountant="filter"`` under another budget, for another unit of privacy, or under
                ``trust="central"`` and this run is under ``"local"``.
        """
        if "releases" not in state:
            # How much of the seed's noise was used is unknown: draw secret noise, with a finite
            # epsilon. ``guarantee`` still says none, which errs on the safe side.
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
        """Remove the hooks, and log the verdict of ``check``."""
        if self._audit is not None and self._step is not None:
            self._audit.close()
            rank_zero_info(f"DPSGD(check): {self.verdict}")
        self._remove_hooks()

    def _run_uncounted(
        self,
        step: Callable[[Any], Any],
        context: base.DefenseContext,
        batch: Any,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        """Run a batch and its release uncounted; the caller restores the rest (:meth:`~.save`)."""
        self._budget.is_counted = False
        output = self.on_logical_batch(step, batch, context)
        context.host.backward(output["loss"] if isinstance(output, Mapping) else output)
        for optimizer in context.host.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            before(optimizer)
            with torch.no_grad():
                self.on_gradients([p for p in parameters if p.requires_grad], context)
            after(optimizer)

    def _remove_hooks(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None

    @property
    def _fit_step(self) -> WatchedStep:
        """Return the recorder of this fit's steps, or raise an error outside of a fit."""
        if self._step is None or self._sampling is None:
            raise base.DefenseError("DPSGD: a step was run outside of fit; nothing was released")
        return self._step

    def _noise_base(self, context: base.DefenseContext) -> bytes:
        """Return the bytes from which keys of the noise follow: of the seed, or secret ones."""
        return noise.base_of(context.entropy, self.seed if self._budget.seeded else None)

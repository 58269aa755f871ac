"""DP-SGD: clips each sample's gradient, adds noise to their sum, and accounts what that costs."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.accounting import (
    MOST_NOISE,
    Accountant,
    Kind,
    Trust,
    check_delta_for,
    effective_noise_multiplier,
    noise_multiplier_for,
)
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.canary import CanaryGradient
from lightning_fedleak.defenses.dpsgd_checks import (
    Buffers,
    check_choices,
    check_hardening,
    check_loader,
    check_model,
    check_settings,
    check_trainer,
    count_samples,
    drawn_batch,
    loss_with_graph,
    planned_steps,
    same_draw,
    sizes_of,
    trainer_of,
    unsharded,
)
from lightning_fedleak.defenses.loss_checks import FormCheck, check_isolation, outputs_of
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal
from lightning_fedleak.defenses.per_sample import Clipping, Part
from lightning_fedleak.defenses.poisson import (
    PoissonBatchSampler,
    checked_loader,
    is_sharded,
    poisson_loader,
)
from lightning_fedleak.defenses.privacy import Privacy
from lightning_fedleak.defenses.recorder import Layout, Recorder
from lightning_fedleak.defenses.renyi_filter import RenyiFilter
from lightning_fedleak.defenses.update import ClippedSum, Moves, NoiseGauge

CHECK_EVERY = 100
"""After the first, every so many releases are checked for what is cheap but not free to check."""
EPSILON_SLACK = 0.02
"""The epsilon that is reported may be that of up to 2% more releases: PRV is called less."""
_ACCOUNT = "accountant/"


class BudgetSpent(DefenseError):
    """One more release would cost more than ``target_epsilon``; it was not made."""


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
        noise_multiplier: sigma that the run begins with; None until it is found.
        notches: how often the noise was turned up.

    Raises:
        DefenseError: a setting out of range, or contradicting another.
    """

    name = "dpsgd"
    per_sample = True

    def __init__(
        self,
        max_grad_norm: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: Kind | Literal["filter"] = "prv",
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
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.clipping: Clipping = clipping
        self.poisson = poisson
        self.trust: Trust = trust
        self.on_budget = on_budget
        self.loss = loss
        self.seed = seed
        self.harden_factor = harden_factor
        self.most_notches = most_notches
        self.notches = 0
        self._kind: Kind | Literal["filter"] = accountant
        self.accountant = self._new_accountant(None)
        self.releases = 0
        self.measured_noise_multiplier = math.nan
        self.guarantee = _guarantee(trust, poisson, seed, accountant == "filter")
        self._calibrates = noise_multiplier is None
        self._ledger = ledger
        self._seeded = seed is not None
        self._delta = target_delta
        self._rate: float | None = None
        self._expected = 0.0
        self._covered = 0
        self._sampler: PoissonBatchSampler | None = None
        self._recorder: Recorder | None = None
        self._form = FormCheck()
        self._seen: set[tuple[frozenset[tuple[str, Layout]], frozenset[tuple[str, str]]]] = set()
        self._looked = 0
        self._drawn: Any = None
        self._released: Any = None
        self._moves = Moves()
        self._clipped: ClippedSum | None = None
        self._batches = self._canaries = 0
        self._unchecked = False

    @property
    def privacy(self) -> Privacy:
        """Epsilon and delta of the releases so far, and the noise of the next.

        With ``accountant="filter"`` epsilon is ``target_epsilon``, however much of it is used up.

        Raises:
            DefenseError: before the training data are known.
        """
        if self._rate is None or self._delta is None or self.noise_multiplier is None:
            raise DefenseError("DPSGD.privacy is known once a fit has begun")
        account, epsilon = self.accountant, math.inf
        if isinstance(account, RenyiFilter):
            epsilon = account.epsilon
        elif not self._seeded:
            epsilon = account.epsilon(self._delta, slack=EPSILON_SLACK)
            if self.target_epsilon is not None and epsilon > self.target_epsilon:
                epsilon = account.epsilon(self._delta)
        return Privacy(epsilon, self._delta, self.noise_multiplier_now, self._rate, account.steps)

    @property
    def share_spent(self) -> float | None:
        """Renyi divergence of the releases so far over the budget's, at the filter's order.

        None with another accountant.

        Raises:
            DefenseError: before the training data are known.
        """
        return self.accountant.share_spent if isinstance(self.accountant, RenyiFilter) else None

    @property
    def noise_multiplier_now(self) -> float:
        """Sigma of the next release, as it is turned up now.

        Raises:
            DefenseError: before the training data are known, where sigma is found from them.
        """
        if self.noise_multiplier is None:
            raise DefenseError("DPSGD: no training data yet, so no noise is settled")
        return self.noise_multiplier * self.harden_factor**self.notches

    @property
    def can_harden(self) -> bool:
        """Only with ``accountant="filter"``: the others hold for noise settled beforehand."""
        return self._kind == "filter" and self.most_notches != 0

    def harden(self) -> str | None:
        """Multiplies the noise by ``harden_factor``, from the next release on."""
        if not self.can_harden or self.notches == self.most_notches:
            return None
        before = self.noise_multiplier_now
        if before * self.harden_factor > MOST_NOISE:
            return None
        self.notches += 1
        self._unchecked = True
        return f"dpsgd: noise multiplier {before:g} -> {self.noise_multiplier_now:g}"

    def before_setup(self, context: DefenseContext) -> None:
        """Checks model and Trainer, and hooks the layers.

        Raises:
            DefenseError: the guarantee cannot hold; says what to change.
        """
        check_trainer(context)
        check_model(context.root, self.clipping)
        self.teardown()
        if self._ledger is not None:
            path = os.fspath(self._ledger) + (f".{context.client}" if context.clients > 1 else "")
            remembered = self._new_accountant(path)
            remembered.load_state_dict(self.accountant.state_dict())
            self.accountant, self._ledger = remembered, None
        self._recorder = Recorder(context.root)
        self._form, self._moves, self._seen = FormCheck(), Moves(), set()
        self._drawn = self._released = None
        self._forget_step()

    def on_dataloader(self, dataloader: Any, context: DefenseContext) -> Any:
        """A loader of Poisson samples; settles the noise.

        Raises:
            DefenseError: a loader that cannot be sampled, delta does not fit its size, or the
                filter's budget does not fit one release.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        examples, batch_size = sizes_of(dataloader)
        delta = 0.1 / examples if self.target_delta is None else self.target_delta
        check_delta_for(delta, examples)
        replicas = getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
        if context.clients > 1 and not is_sharded(dataloader):
            warnings.warn(unsharded(context.clients, self.trust), stacklevel=2)
        if self.poisson:
            rate = min(1.0, batch_size / max(1, examples // replicas))
            first = 0 if self._sampler is None else self._sampler.step
            dataloader = poisson_loader(
                dataloader,
                rate,
                client=context.client,
                clients=context.clients,
                entropy=base_of(context.entropy, self.seed if self._seeded else None),
                first_step=first,
            )
            sampler = dataloader.batch_sampler
            assert isinstance(sampler, PoissonBatchSampler)
            self._sampler, self._expected = sampler, rate * len(sampler.shard)
            if self.trust == "central" and context.clients > 1:
                # The same on all clients: shards differ in size, and with them rate * size.
                self._expected = float(batch_size)
        else:
            dataloader = checked_loader(dataloader)
            rate, self._expected = 1.0, float(batch_size)
        self._rate, self._delta = rate, delta
        if self.noise_multiplier is None:
            assert self.target_epsilon is not None
            steps = planned_steps(context, len(dataloader))
            kind: Kind = "prv" if self._kind == "prv" else "rdp"
            self.noise_multiplier = noise_multiplier_for(
                self.target_epsilon, delta, rate, steps, kind
            )
            self._covered = steps if self.accountant.steps == 0 else 0
        if isinstance(self.accountant, RenyiFilter):
            self.accountant.begin(self.noise_multiplier, rate)
        else:
            self._check_not_overdrawn()
        return dataloader

    def on_training_step(
        self, training_step: Callable[[], Any], batch: Any, context: DefenseContext
    ) -> Any:
        """Records the forward pass and looks at the loss; an empty batch gives a loss of zero.

        Raises:
            DefenseError: there is no loss with a graph, it is not a mean of per-sample means,
                samples are mixed, or a buffer was changed.
        """
        recorder = self._recorder
        if recorder is None or self._rate is None:
            raise DefenseError("DPSGD: a training step outside of fit; nothing was released")
        check_loader(context)
        self._drawn = drawn_batch(context, batch)
        if self.poisson and self._released is not None and same_draw(self._drawn, self._released):
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Every release is accounted as a Poisson "
                "sample of its own. Take one optimizer step on each batch, or pass poisson=False: "
                "then each example is accounted as if it were in all of them."
            )
        self._batches += 1
        if self._batches > 1:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released (gradient accumulation, "
                "by a callback perhaps). Let every batch have its own optimizer step."
            )
        self._clipped = None
        samples = count_samples(batch)
        if samples == 0:
            recorder.clear()
            return _zero_on_the_graph(context.root)
        buffers = Buffers(context.root)
        with recorder.step(samples):
            output = training_step()
        buffers.check_unchanged()
        self._check_loss(loss_with_graph(output, samples), recorder)
        recorder.calls = []
        return output

    def before_release(self) -> None:
        """Refuses a release that the budget does not cover.

        Raises:
            BudgetSpent: says how many were made.
        """
        if not self._affords_another():
            raise BudgetSpent(
                f"DPSGD: after {self.accountant.steps} releases one more would cost more than "
                f"target_epsilon={self.target_epsilon} at delta={self._delta}. It was not made; "
                "the weights are those of the last one."
            )

    def on_gradients(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> None:
        """Puts the clipped and noised mean into ``p.grad``, and accounts it.

        Raises:
            DefenseError: a gradient that the layers do not explain, that is NaN or infinite, noise
                that is not what is accounted, or weights that do not move. Nothing is released.
        """
        clipped = self._clip(parameters, context)
        sigma = self._client_noise(context)
        trainer = trainer_of(context)
        if sigma > 0:
            self._moves.check(parameters, getattr(trainer, "optimizers", ()))
        checking = self._unchecked or self.releases % CHECK_EVERY == 0
        if checking:
            clipped.check_complete(parameters, context)
        assert self._rate is not None
        accounted = effective_noise_multiplier(sigma, context.clients, self.trust)
        self.accountant.step(self._settled(accounted), self._rate)
        release, self.releases = self.releases, self.releases + 1
        gauge = NoiseGauge(sigma * self.max_grad_norm, self._expected)
        for index, parameter in enumerate(parameters):
            total = clipped.sum_of(parameter)
            before = gauge.before(total) if checking else None
            if sigma:
                key = self._key(context, release, index, "gradient")
                noise = standard_normal(key, total.shape, total.device, total.dtype)
                total.add_(noise, alpha=sigma * self.max_grad_norm)
            total.div_(self._expected)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(total)
            if before is not None:
                gauge.after(before, parameter.grad)
        if checking:
            measured = gauge.measured()
            if measured is not None:
                self.measured_noise_multiplier = measured / self.max_grad_norm
        if sigma > 0:
            self._moves.remember(parameters)
        self._released = self._drawn
        self._forget_step()
        if self.on_budget == "stop" and trainer is not None and not self._affords_another():
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
        if canary.noise is not None:
            raise DefenseError(
                "DPSGD: noise on the sum of samples cannot be clipped sample by sample"
            )
        clipped = self._clip(parameters, context)
        samples = canary.samples * clipped.samples
        if len(samples) != clipped.samples:
            raise DefenseError(
                f"DPSGD: a canary of {len(samples)} samples in a batch of {clipped.samples}"
            )
        own = clipped.norms.to(samples)[:, None] if len(samples) else samples.new_zeros(0, 1)
        joint = torch.hypot(samples.norm(dim=2), own)
        factors = (self.max_grad_norm / joint.clamp(min=self.max_grad_norm)) / self._expected
        released = CanaryGradient(samples * factors[..., None])
        std = self._client_noise(context) * self.max_grad_norm / self._expected
        if std:
            number, self._canaries = self._canaries, self._canaries + 1
            key = self._key(context, self.releases, number, "canary")
            noise = standard_normal(key, samples.shape[1:], samples.device, samples.dtype)
            released = released.noised(noise * std, std)
        return released

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Releases, what they were accounted as, and the noise: as settled, and how turned up."""
        state: dict[str, Tensor | int | float | str] = {"releases": self.releases}
        if self.notches:
            state["notches"] = self.notches
        if self.noise_multiplier is not None:
            state["noise_multiplier"] = self.noise_multiplier
            state["covered"] = self._covered
            state["covered_target"] = self._target
        for key, value in self.accountant.state_dict().items():
            state[_ACCOUNT + key] = value
        return state

    def load_state_dict(self, state: State) -> None:
        """Goes on counting; neither the counters nor the account ever run backwards.

        Noise that was found from ``target_epsilon`` stays what it is. Under another target the
        releases that it may make are counted anew.

        Raises:
            DefenseError: the releases were made under another kind of accountant or, with
                ``accountant="filter"``, under another budget.
        """
        if "releases" not in state:
            self._seeded = False
            return
        account = {k.removeprefix(_ACCOUNT): v for k, v in state.items() if k.startswith(_ACCOUNT)}
        filtered = "orders" in account
        if int(state["releases"]) and filtered != (self._kind == "filter"):
            raise DefenseError(
                f"DPSGD: the checkpoint's {int(state['releases'])} releases were "
                f"{'' if filtered else 'not '}made under accountant='filter', and this run has "
                f"accountant={self._kind!r}. A budget holds from the first release on: go on with "
                "the accountant of the checkpoint, or begin a new run."
            )
        self.releases = max(self.releases, int(state["releases"]))
        self.notches = max(self.notches, int(state.get("notches", 0)))
        if self._calibrates and "noise_multiplier" in state:
            self.noise_multiplier = float(state["noise_multiplier"])
            same = state.get("covered_target") == self._target
            self._covered = int(state["covered"]) if same else 0
        self.accountant.load_state_dict(account)

    def teardown(self) -> None:
        """Takes the hooks out."""
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None
        self._clipped = None
        self._drawn = self._released = None

    def _forget_step(self) -> None:
        self._batches = self._canaries = 0
        self._unchecked = False
        self._clipped = None
        if self._recorder is not None:
            self._recorder.clear()

    def _check_loss(self, loss: Tensor, recorder: Recorder) -> None:
        """The form in every step, the rest where it or the use of layers is new, and at times."""
        if self.loss == "trusted":
            top, separate = outputs_of(loss, recorder.calls), True
        else:
            top = self._form(loss, recorder.calls, recorder.samples)
            separate = self._form.separate
        layouts = frozenset((call.name, call.layout) for call in recorder.calls if call.trained)
        kind = layouts, self._form.form
        if kind in self._seen and self.releases < self._looked + CHECK_EVERY:
            return
        self._unchecked = True
        if recorder.samples > 1 and bool(torch.isfinite(loss.detach())):
            with recorder.looking():
                check_isolation(loss, top, recorder.calls, recorder.samples, separate=separate)
            self._seen.add(kind)
            self._looked = self.releases

    def _clip(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Norms and clip factors of this step's samples; computed once."""
        if self._clipped is None:
            recorder = self._recorder
            if recorder is None:
                raise DefenseError("DPSGD: a release outside of fit; nothing was released")
            parts: dict[Tensor, list[Part]] = recorder.parts
            samples = recorder.samples
            self._clipped = ClippedSum(
                parameters, parts, samples, self.max_grad_norm, self.clipping, context
            )
        return self._clipped

    def _client_noise(self, context: DefenseContext) -> float:
        """Noise multiplier of what this client adds itself."""
        share = context.clients if self.trust == "central" else 1
        return self.noise_multiplier_now / math.sqrt(share)

    def _settled(self, accounted: float) -> float:
        """The noise multiplier as it was settled: the root and its square may differ by an ulp."""
        settled = self.noise_multiplier_now
        if not math.isclose(accounted, settled, rel_tol=1e-9):
            raise DefenseError(f"DPSGD: noise multiplier {accounted} is not {settled}, as settled")
        return settled

    @property
    def _target(self) -> str:
        """What the noise was found for: with another one it covers another number of releases."""
        return f"{self._kind} {self.target_epsilon!r} {self.target_delta!r}"

    def _is_covered(self, releases: int) -> bool:
        """Whether so many are within what the noise was found for, and all of that noise."""
        event = self.noise_multiplier, self._rate
        return releases <= self._covered and all(
            row[:2] == event for row in self.accountant.history
        )

    def _check_not_overdrawn(self) -> None:
        """Refuses to begin where ``target_epsilon`` was passed already, under another target."""
        account = self.accountant
        if self.target_epsilon is None or account.steps == 0 or self._is_covered(account.steps):
            return
        assert self._delta is not None
        assert isinstance(account, Accountant)
        epsilon = account.epsilon(self._delta)
        if epsilon > self.target_epsilon:
            raise BudgetSpent(
                f"DPSGD: the {account.steps} releases of the checkpoint or ledger cost epsilon="
                f"{epsilon:.4g} at delta={self._delta} already, more than target_epsilon="
                f"{self.target_epsilon}. They cannot be taken back: raise target_epsilon, or begin "
                "a new run from a model that this data did not train."
            )

    def _affords_another(self) -> bool:
        if self.target_epsilon is None:
            return True
        if self._rate is None or self._delta is None or self.noise_multiplier is None:
            return True
        if isinstance(self.accountant, RenyiFilter):
            return self.accountant.allows(self.noise_multiplier_now, self._rate)
        if self._is_covered(self.accountant.steps + 1):
            return True
        return self.accountant.allows(
            self.target_epsilon, self._delta, self.noise_multiplier, self._rate
        )

    def _new_accountant(self, ledger: str | None) -> Accountant | RenyiFilter:
        if self._kind == "filter":
            assert self.target_epsilon is not None
            assert self.target_delta is not None
            return RenyiFilter(self.target_epsilon, self.target_delta, None, ledger)
        return Accountant(self._kind, ledger)

    def _key(self, context: DefenseContext, release: int, index: int, stream: str) -> bytes:
        base = base_of(context.entropy, self.seed if self._seeded else None)
        return noise_key(base, context.client, release, index, self.name, stream)


def _zero_on_the_graph(root: nn.Module) -> Tensor:
    """What an empty batch has for a loss."""
    parameter = next(p for p in root.parameters() if p.requires_grad)
    return parameter.flatten()[:1].sum() * 0.0


def _guarantee(trust: Trust, poisson: bool, seed: int | None, fixed_budget: bool) -> str:
    if seed is not None:
        return "none: with a seed the noise can be guessed and subtracted"
    server = (
        "whoever sees every client's shared updates"
        if trust == "local"
        else "whoever sees only the sum of all clients' updates (secure aggregation)"
    )
    unit = "added or removed" if poisson else "put in the place of nothing"
    budget = (
        "with the budget (`target_epsilon`, `target_delta`) that was fixed before the run, at "
        "whatever step it ends, also where noise was turned up in sight of earlier releases"
        if fixed_budget
        else "with the epsilon that `privacy` gives"
    )
    return (
        f"against {server}: (epsilon, delta)-differential privacy of one example {unit}, for all "
        f"releases together, {budget}. An example that several clients hold pays at each of them: "
        "the loader must be split among them. Not covered: what is logged or sent otherwise, and "
        "decisions taken in sight of the data."
    )


__all__ = ["DPSGD", "BudgetSpent", "Privacy"]

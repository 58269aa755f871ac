"""The planted gradients of :mod:`.private_training` in a training under the package's own DPSGD.

A *probe* runs a step on copies of one example whose gradients are scaled, to see whether the
result is clipped and noised as claimed; a *look* is a set of probes. Here a probe is a *rehearsal*:
it runs in the training's own loop, right before a batch, through its forward pass, backward and
:class:`~lightning_fedleak.DPSGD`, up to the *release* (the clipped and noisy gradient that the
optimizer would get). This gradient is discarded. No optimizer steps with it, and neither the
privacy account nor the ledger (the file that records all releases) counts it. So these probes do
not test the optimizers. All probes of a look use the noise of the release that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.defenses import DPSGD, DefenseContext, DefenseError
from lightning_fedleak.defenses.base import check_integer
from lightning_fedleak.defenses.dpsgd.poisson import Sampling
from lightning_fedleak.evaluation.auditing import side_effects
from lightning_fedleak.evaluation.auditing.private_training import Gradients, PrivateTrainingCheck
from lightning_fedleak.evaluation.auditing.training_checks import PrivacyClaim
from lightning_fedleak.model.model_state import Hook, preserve_model

FIRST = 1  # number of the first batch with a look: batch 0 shows which module makes the logits
ReadGradients = Callable[[Optimizer], None]  # records the gradients of an optimizer
Rehearsal = Callable[[Any, ReadGradients, ReadGradients], None]
"""Runs a batch up to its release, and calls functions right before and after it."""


@dataclass(frozen=True)
class PlantedGradients:
    """Let planted gradients try to refute a training under DPSGD.

    :attr:`.DPSGD.verdict` says what was found. A look takes about as long as six steps.

    Examples:
        >>> from lightning_fedleak import DPSGD, PlantedGradients
        >>> DPSGD(1.0, noise_multiplier=1.0, check=PlantedGradients(every_n_steps=50)).name
        'dpsgd'

    Attributes:
        every_n_steps: The number of steps from one look to the next; 160 take about 4% more time.

    Raises:
        DefenseError: The number is no whole number above 0. At the start of a fit: each batch holds
            all examples.
    """

    every_n_steps: int = 160

    def __post_init__(self) -> None:
        check_integer("PlantedGradients: every_n_steps", self.every_n_steps)

    def begin(self, defense: Any, context: Any, sampling: Any, save: Any) -> OwnTrainingCheck:
        """Return the audit of one fit; for the arguments see :class:`.OwnTrainingCheck`."""
        return OwnTrainingCheck(defense, context, sampling, save, self.every_n_steps)


class OwnTrainingCheck(PrivateTrainingCheck):
    """Run probes in a training under DPSGD, and try to refute its claim.

    Args:
        defense: the DPSGD, whose claim is tested.
        context: the client and the process.
        sampling: the Poisson sampling; ``rows`` of its sampler is wrapped until :meth:`close`.
        save: saves the state of DPSGD, and returns a function that restores it after a rehearsal.
        every_n_steps: the number of steps from one look to the next.

    Raises:
        DefenseError: each batch holds all examples.
    """

    def __init__(
        self,
        defense: DPSGD,
        context: DefenseContext,
        sampling: Sampling,
        save: Callable[[], Callable[[], None]],
        every_n_steps: int,
    ) -> None:
        if sampling.rate == 1:
            raise DefenseError(
                "DPSGD: check needs a smaller batch_size, because each batch holds all examples"
            )

        def noise_multiplier() -> float:
            return defense.noise_std(context) * sampling.expected / defense.clip_norm

        claim = PrivacyClaim(
            noise_multiplier=noise_multiplier(),
            max_grad_norm=defense.clip_norm,
            sample_rate=sampling.rate,
            divisor=sampling.expected,
            delta=defense.privacy.delta,
            epsilon=lambda: defense.privacy.epsilon,
        )
        models = context.root, context.host.optimizers
        super().__init__(self._rehearse, *models, claim, every_n_steps=every_n_steps)
        self._noise_multiplier = noise_multiplier
        self._is_single = context.clients == context.processes == 1
        if context.processes > 1:
            self._observations.obstacle = "probes are not supported: several processes, one client"
        sampler: Any = sampling.loader.batch_sampler
        self._host, self._save, self._sampler = context.host, save, sampler
        self._pending_draws: deque[Sequence[int]] = deque()
        self._rehearsal: Rehearsal | None = None
        self._state_before: dict[str, Tensor] = {}
        self._logits_module: nn.Module | None = None
        self._discovery_hooks = ExitStack()
        self._observations.examples = len(sampler.shard)
        self._observations.evaluations = 1  # evaluations are not counted here: assume that some ran
        draw = sampler.rows

        def rows(step: int) -> list[int]:
            self._pending_draws.append(drawn := draw(step))
            return drawn  # type: ignore[no-any-return]

        sampler.rows = rows

    @property
    def finding(self) -> str:
        """Return the verdict in one line; of several processes none has the results of all."""
        if self._is_single:
            return self.verdict().in_short
        return "unknown: several processes trained, and none has the results of all probes"

    @property
    def is_probing(self) -> bool:
        """Return whether the current step is a probe."""
        return self._scales is not None

    def before_step(self, batch: Any, rows: int, rehearsal: Rehearsal) -> None:
        """Run the probes before a batch, if they are due.

        Args:
            batch: The batch, as ``training_step`` gets it.
            rows: The number of rows in it that count.
            rehearsal: A function that runs such a batch up to its release.
        """
        self._discovery_hooks.close()
        # Half precision that the first step has found, or a gate, may have raised the noise.
        self._claim = replace(self._claim, noise_multiplier=self._noise_multiplier())
        self._rehearsal, self._draws = rehearsal, []
        while self._pending_draws and not self._draws:  # the loop may have skipped some draws
            drawn = self._pending_draws.popleft()
            self._draws = [drawn] if len(drawn) == rows else []
        if self._logits_module is None:
            self._find_logits()
        self._look(batch, FIRST % self._every)
        self._rows = rows

    def _run_probes(self, batch: Any) -> None:
        """Run the probes of a look, and restore the state that they change in module and host."""
        with ExitStack() as stack:
            if self._logits_module is not None:
                # Before the hooks of DPSGD, so that these get the scaled gradients.
                hook = Hook(self._scale_rows)
                handle = self._logits_module.register_forward_hook(hook, prepend=True)
                stack.callback(handle.remove)
            stack.enter_context(self._host.without_logs())
            stack.enter_context(preserve_model(self._model))
            super()._run_probes(batch)

    def released(self) -> None:
        """Count a release of the training."""
        self._count_step()

    def close(self) -> None:
        """Remove the hooks of the model and the wrapper of the sampler."""
        self._discovery_hooks.close()
        with suppress(KeyError):
            del vars(self._sampler)["rows"]

    def _find_logits(self) -> None:
        """Find the module that makes the logits, by hooks on the next forward pass.

        The logits are the ``.logits`` of the outermost module's output. If there are none, they are
        the last output tensor of a module with two dimensions or more.
        """
        makers: dict[int, nn.Module] = {}
        tensors: list[Tensor] = []  # alive, so that no two have the same id
        has_attribute = False

        @Hook
        def record_output(module: nn.Module, _: object, output: Any) -> None:
            nonlocal has_attribute
            logits = getattr(output, "logits", None)
            has_attribute |= isinstance(logits, Tensor)
            value = logits if isinstance(logits, Tensor) else output
            if isinstance(value, Tensor) and value.dim() > 1 and value.requires_grad:
                tensors.append(value)
                maker = makers.setdefault(id(value), module)
                if logits is not None or not has_attribute:
                    self._logits_module = maker

        for module in self._model.modules():
            self._discovery_hooks.callback(module.register_forward_hook(record_output).remove)
        self._discovery_hooks.callback(tensors.clear)

    def _rehearse(self, copies: Any) -> None:
        """Run the training's step on copies, up to the release."""
        assert self._rehearsal is not None
        self._rehearsal(copies, self._read_raw, self._record_step)

    def _read_raw(self, optimizer: Optimizer) -> None:
        """Record the raw gradients in the units of the mean loss; those of hooks are scaled."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter in self._names:
                self._raw[self._names[parameter]] = parameter.grad.float().clone()

    def _save_state(self) -> Callable[[], None]:
        """Return a function that restores gradients and DPSGD; a rehearsal changes nothing else."""
        gradients = [(parameter, parameter.grad) for parameter in self._names]
        for parameter, _ in gradients:
            parameter.grad = None
        self._state_before = side_effects.read_tensors(self._model, ())
        restore_defense = self._save()

        def restore() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            restore_defense()

        return restore

    def _side_effects(
        self, gradients: Gradients, restore: Callable[[], None]
    ) -> side_effects.SideEffects:
        """Return all changes of the model: no optimizer has stepped, so none is explained."""
        after = side_effects.read_tensors(self._model, ())
        with torch.no_grad():
            return side_effects.side_effects(after, self._state_before)

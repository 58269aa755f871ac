"""The planted gradients of :mod:`.private_training` in a training under the package's own DPSGD.

The probes run in the training's own loop, right before a batch: through its forward pass, backward
and :class:`~lightning_fedleak.DPSGD`, up to the gradient that would be released. It is not: no
optimizer steps with it, and neither account nor ledger counts it. So what an optimizer does with a
release is not seen. The noise is that of the release which follows, equal in all probes of a look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.defenses.host import Host
from lightning_fedleak.evaluation.auditing import side_effects
from lightning_fedleak.evaluation.auditing.private_training import Gradients, PrivateTrainingCheck
from lightning_fedleak.evaluation.auditing.training_checks import PrivacyClaim
from lightning_fedleak.model.model_state import preserve_model

FIRST = 1  # number of the first batch with a look: the one before shows where the logits are
Read = Callable[[Optimizer], None]
Rehearsal = Callable[[Any, Read, Read], None]
"""Runs a batch up to its release, and calls functions right before and after it."""


class OwnTrainingCheck(PrivateTrainingCheck):
    """Probes in a training under DPSGD.

    Args:
        root: the module that is trained.
        host: the trainer or loop.
        sampler: draws the batches.
        claim: what DPSGD claims.
        save: returns a function that restores what a rehearsal changes in DPSGD.
        every_n_steps: from one look to the next.
    """

    def __init__(
        self,
        root: nn.Module,
        host: Host,
        sampler: Any,
        claim: PrivacyClaim,
        save: Callable[[], Callable[[], None]],
        every_n_steps: int,
    ) -> None:
        super().__init__(self._rehearse, root, host.optimizers, claim, every_n_steps=every_n_steps)
        self._host, self._save, self._sampler = host, save, sampler
        self._waiting: deque[Sequence[int]] = deque()
        self._rehearsal: Rehearsal | None = None
        self._before: dict[str, Tensor] = {}
        self._called: nn.Module | None = None
        self._discovery = ExitStack()
        self._observations.examples = len(sampler.shard)
        self._observations.evaluations = 1  # none is counted, so none is ruled out
        draw = sampler.rows

        def rows(step: int) -> list[int]:
            self._waiting.append(drawn := draw(step))
            return drawn  # type: ignore[no-any-return]

        sampler.rows = rows

    @property
    def is_probing(self) -> bool:
        """Return whether the step at work is a probe."""
        return self._scales is not None

    def before_step(self, batch: Any, rows: int, rehearsal: Rehearsal) -> None:
        """Run the probes before a batch, if they are due.

        Args:
            batch: as ``training_step`` gets it.
            rows: The rows that count in it.
            rehearsal: runs such a batch.
        """
        self._discovery.close()
        self._rehearsal, self._draws = rehearsal, []
        while self._waiting and not self._draws:  # those of an epoch that ended early never come
            drawn = self._waiting.popleft()
            self._draws = [drawn] if len(drawn) == rows else []
        if self._called is None:
            self._find_logits()
        self._look(batch, FIRST % self._every)
        self._rows = rows

    def _run_probes(self, batch: Any) -> None:
        """Run the probes of a look, and restore what the module and the host note of them."""
        with ExitStack() as stack:
            if self._called is not None:
                # Before the hooks of DPSGD, which are to see gradients that are scaled.
                hook = self._called.register_forward_hook(self._scale_rows, prepend=True)
                stack.callback(hook.remove)
            stack.enter_context(self._host.without_logs())
            stack.enter_context(preserve_model(self._model))
            super()._run_probes(batch)

    def give_up(self, reason: str) -> None:
        """Run no probe; the verdict says why."""
        self._observations.obstacle = reason

    def released(self) -> None:
        """Count a release of the training."""
        self._count_step()

    def close(self) -> None:
        """Remove what was put on the model and the sampler."""
        self._discovery.close()
        with suppress(KeyError):
            del vars(self._sampler)["rows"]

    def _find_logits(self) -> None:
        """Let the next forward pass show which module makes the logits.

        They are what the outermost module returns as ``.logits``, else the last tensor of two
        dimensions or more that one returns.
        """
        makers: dict[int, nn.Module] = {}
        tensors: list[Tensor] = []  # alive, so that no two have the same id
        has_attribute = False

        def returned(module: nn.Module, _: object, output: Any) -> None:
            nonlocal has_attribute
            logits = getattr(output, "logits", None)
            has_attribute |= isinstance(logits, Tensor)
            value = logits if isinstance(logits, Tensor) else output
            if isinstance(value, Tensor) and value.dim() > 1 and value.requires_grad:
                tensors.append(value)
                maker = makers.setdefault(id(value), module)
                if logits is not None or not has_attribute:
                    self._called = maker

        for module in self._model.modules():
            self._discovery.callback(module.register_forward_hook(returned).remove)
        self._discovery.callback(tensors.clear)

    def _rehearse(self, copies: Any) -> None:
        assert self._rehearsal is not None
        self._rehearsal(copies, self._read_raw, self._record_step)

    def _read_raw(self, optimizer: Optimizer) -> None:
        """Read the gradients of the mean loss, which hooks see in other units."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter in self._names:
                self._raw[self._names[parameter]] = parameter.grad.float().clone()

    def _save_state(self) -> Callable[[], None]:
        """Return a function that restores gradients and DPSGD; nothing else changes."""
        gradients = [(parameter, parameter.grad) for parameter in self._names]
        for parameter, _ in gradients:
            parameter.grad = None
        self._before = side_effects.read_tensors(self._model, ())
        restore_defense = self._save()

        def restore() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            restore_defense()

        return restore

    def _side_effects(
        self, gradients: Gradients, restore: Callable[[], None]
    ) -> side_effects.SideEffects:
        """Return what changed without a step."""
        after = side_effects.read_tensors(self._model, ())
        with torch.no_grad():
            return side_effects.side_effects(after, self._before)

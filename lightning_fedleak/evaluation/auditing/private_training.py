"""A referee for a training whose differential privacy is somebody else's: gradients planted in it.

DP-SGD releases in each step ``(sum of clipped gradients + noise) / divisor``. What an optimizer
takes its step with is read, in a few steps in which the training's own step runs on copies of one
example. The gradient of each copy is scaled where it enters the model, at its logits, so that what
must be released is known:

======== =========================================== ===========================================
probe    gradients of the copies                     what must be released
======== =========================================== ===========================================
silent   1e-8 of each                                noise alone, of the claimed deviation, new
planted  all much longer than the clip norm          at most one clip norm for each
opposed  most of one sign; some far longer against   at most one clip norm for each of these away
         them, or taken out                          from where they are taken out
======== =========================================== ===========================================

In planted probes the gradient of early layers is a thousand times larger in turn, so that a layer
that the norm leaves out is seen. Weights, optimizers and random states are restored after a probe:
the training goes on as if there were none. In all other steps only the drawn examples are counted.

Every planted gradient is of the worst case that differential privacy allows for. The tests are in
:mod:`lightning_fedleak.evaluation.auditing.training_checks`.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.evaluation.auditing import training_checks as checks
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import before_real_step, real_optimizer
from lightning_fedleak.validate import check_integer

SILENT = 1e-8  # of a gradient; small beside any noise, and its square is no zero in float32
BOOST = 1e3  # of the gradients of early layers; a norm without them is wrong by as much
FEWEST = 8  # copies of an example in a probe; fewer show too little beside the noise
GOLDEN = 0.618034  # its multiples spread evenly over the layers, however many looks there are

Gradients = dict[str, Tensor]


class PrivateTrainingCheck:
    """Watches a training that claims differential privacy, and tries to refute the claim.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_fedleak.evaluation.auditing import PrivacyClaim, PrivateTrainingCheck
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> loader = DataLoader(TensorDataset(torch.randn(320, 64)), 16, shuffle=True)
        >>> def step(batch):  # adds no noise
        ...     optimizer.zero_grad()
        ...     model(batch[0]).square().mean().backward()
        ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        >>> claim = PrivacyClaim(1.0, max_grad_norm=1.0, sample_rate=0.05, divisor=16, delta=1e-5)
        >>> check = PrivateTrainingCheck(step, model, optimizer, claim)
        >>> for epoch in range(5):
        ...     for batch in check.watch(loader):
        ...         step(batch)
        >>> check.verdict().result
        'refuted'

    Args:
        step: runs forward, backward, the optimizer's step and ``zero_grad`` on a whole batch of the
            loader; it may split it. A scheduler's step is not part of it.
        model: what ``step`` calls. Its output is logits, or has ``.logits``, one row for each
            example.
        optimizers: all that ``step`` steps.
        claim: what the training says of itself.
        every_n_steps: steps from one look to the next. A look costs as much as five steps: 100 is
            5% of the time.
        also: what else ``step`` changes and must be restored, each with ``state_dict`` and
            ``load_state_dict`` (an average of weights); Opacus' accountant is known.

    Raises:
        ValueError: ``step`` did not call the model with gradients or did not step each optimizer
            once, or no logits are found.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        claim: checks.PrivacyClaim,
        *,
        every_n_steps: int = 100,
        also: Sequence[Any] = (),
    ) -> None:
        check_integer("PrivateTrainingCheck: every_n_steps", every_n_steps)
        outer = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        accountants = [OptimizerDP(optimizer).accountant for optimizer in outer]
        self._step, self._model, self._claim, self._every = step, model, claim, every_n_steps
        self._optimizers = [real_optimizer(optimizer) for optimizer in outer]
        self._restored = [*also, *filter(None, accountants), *self._optimizers]
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._seen = checks.Observations()
        self._batches = self._rows = 0
        self._is_due = False
        self._scales: Tensor | None = None
        self._released: list[Gradients] = []
        self._layers: list[nn.Module] = []

    def watch(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's batches, and look before some of them.

        Args:
            loader: of the training; a torch DataLoader also says which examples it draws.
        """
        draws: deque[Sequence[int]] = deque()
        sampler = getattr(loader, "batch_sampler", None)
        with ExitStack() as stack:
            stack.callback(self._model.register_forward_hook(self._called).remove)
            for optimizer in self._optimizers:
                stack.callback(before_real_step(optimizer, partial(self._read, optimizer)))
            if sampler is not None:
                self._seen.examples = len(loader.dataset)
                vars(loader)["batch_sampler"] = _Recorder(sampler, draws)  # it refuses to set one
                stack.callback(vars(loader).update, batch_sampler=sampler)
            for batch in loader:
                if draws:
                    self._seen.draws += 1
                    self._seen.inclusions.update(draws.popleft())
                self._is_due |= self._batches % self._every == self._every // 2
                self._batches += 1
                if self._is_due and _count_rows(batch) >= FEWEST:
                    self._is_due = False
                    with preserve_process():
                        self._look(batch)
                yield batch

    def verdict(self) -> checks.PrivacyVerdict:
        """Return what was refuted; with ``client="rank"`` a collective."""
        seen = self._seen
        if self._claim.client == "rank" and dist.is_initialized():
            mine = torch.cat([part[2] for look in seen.noise for part in look.values()])
            seen.noise_of_ranks = [mine] * dist.get_world_size()
            dist.all_gather_object(seen.noise_of_ranks, mine)
        return checks.judge(self._claim, seen)

    def _called(self, _: nn.Module, inputs: object, output: Any) -> None:
        """Scale the gradient of each row of a call of the model, and count rows."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"PrivateTrainingCheck: {type(output).__name__} has no logits. Let the model "
                "return them, or an output with .logits, without a fused loss."
            )
        if not logits.requires_grad:
            return  # an evaluation
        start, self._rows = self._rows, self._rows + len(logits)
        if self._scales is not None:
            scales = self._scales[start : self._rows].to(logits)
            scales = scales.view(-1, *[1] * (logits.dim() - 1))
            logits.register_hook(lambda gradient: gradient * scales)  # type: ignore[no-untyped-call]

    def _read(self, optimizer: Optimizer) -> None:
        """Read what an optimizer takes its step with; outside of probes only count the step."""
        if self._scales is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = {self._names.get(p, "another"): p.grad for p in parameters}
            copies = {n: g.float().clone() for n, g in gradients.items() if g is not None}
            self._released.append(copies)
        elif optimizer is self._optimizers[0]:
            self._seen.sizes.append(self._rows)
            self._rows = 0

    def _look(self, batch: Any) -> None:
        """Run the probes on copies of one of the batch's rows."""
        seen, clip, rows = self._seen, self._claim.max_grad_norm, _count_rows(batch)
        looks = len(seen.noise)
        row = random.Random(looks).randrange(rows)
        copies = tree_map(lambda v: v[[row] * rows] if _count_rows(v) == rows else v, batch)
        is_first = self._claim.client == "rank" or not dist.is_initialized() or not dist.get_rank()
        ones = torch.ones(rows) * is_first  # of several processes one plants, and all take part
        noise, raw = self._probe(copies, SILENT * ones, explain=True)
        seen.add_noise(noise, self._claim)
        length = _norm(raw) / SILENT or 1.0
        near, far = 2 * rows * clip / length, 20 * rows**2 * clip / length
        place = int((looks - 1) * GOLDEN % 1 * len(self._layers))
        layer = self._layers[place] if looks and self._layers else None
        planted, raw = self._probe(copies, far * ones, layer)
        if _norm(raw) > 10 * clip:
            seen.planted.append((self._along(planted, raw), rows))
        number = max(1, rows // (rows, 8, 4, 2)[looks % 4])
        opposed = torch.arange(number) * rows // number
        with preserve_process():  # both have the same dropout
            without, raw = self._probe(copies, near * ones.index_fill(0, opposed, 0))
        scales = ones.index_fill(0, opposed, -far / near) * is_first
        against, _ = self._probe(copies, near * scales)
        if _norm(raw) > clip:
            moved = {name: without[name] - against[name] for name in without}
            seen.opposed.append((self._along(moved, raw), number))

    def _probe(
        self, copies: Any, scales: Tensor, layer: nn.Module | None = None, *, explain: bool = False
    ) -> tuple[Gradients, Gradients]:
        """Return what a step on copies releases, and the gradient that was computed."""
        raw: Gradients = {}

        def add(name: str, gradient: Tensor) -> None:
            raw.setdefault(name, torch.zeros_like(gradient, dtype=torch.float32)).add_(gradient)

        def entered(module: nn.Module, inputs: tuple[object, ...]) -> None:
            tensors = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
            if tensors and explain and module not in self._layers:
                self._layers.append(module)
            for tensor in tensors if module is layer else ():
                tensor.register_hook(lambda gradient: gradient * BOOST)  # type: ignore[no-untyped-call]

        self._scales, self._released, rows, self._rows = scales, [], self._rows, 0
        restore = self._saved()
        with ExitStack() as stack:
            stack.callback(restore)
            for parameter, name in self._names.items():
                if parameter.requires_grad:
                    handle = parameter.register_hook(partial(add, name))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(entered).remove)
            self._step(copies)
            run, released = self._rows, self._released
            if not run or len(released) != len(self._optimizers):
                raise ValueError(
                    f"PrivateTrainingCheck: step(batch) ran {run} rows through the model and took "
                    f"{len(released)} optimizer steps. It must run a whole batch, and step each "
                    "optimizer once. Pass the model that it calls and all optimizers."
                )
            gradients = {name: g for part in released for name, g in part.items()}
            if explain:
                self._seen.is_explained &= self._explains(gradients, restore)
        self._rows, self._scales = rows, None
        return gradients, {name: value for name, value in raw.items() if name in gradients}

    def _explains(self, gradients: Gradients, restore: Callable[[], None]) -> bool:
        """Return whether the weights follow from what the optimizers were given."""
        after = [parameter.detach().clone() for parameter in self._names]
        restore()
        for parameter, name in self._names.items():
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        for optimizer in self._optimizers:
            optimizer.step()
        return all(map(torch.equal, after, self._names))

    def _saved(self) -> Callable[[], None]:
        """Return a function that restores what a step changes."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        values = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
        states = [(one, copy.deepcopy(one.state_dict())) for one in self._restored]

        def restore() -> None:
            for tensor, value, gradient in values:
                tensor.data.copy_(value)
                tensor.grad = gradient
            for one, state in states:
                one.load_state_dict(copy.deepcopy(state))

        return restore

    def _along(self, released: Gradients, raw: Gradients) -> float:
        """Return how many clip norms were released along the planted gradient."""
        dot = sum(float((released[n] * v).sum(dtype=torch.float64)) for n, v in raw.items())
        return dot * self._claim.divisor / _norm(raw) / self._claim.max_grad_norm


class _Recorder:
    """A batch sampler that notes what it draws."""

    def __init__(self, sampler: Any, draws: deque[Sequence[int]]) -> None:
        self._sampler, self._draws = sampler, draws

    def __iter__(self) -> Iterator[Sequence[int]]:
        for draw in self._sampler:
            self._draws.append(draw)
            yield draw

    def __len__(self) -> int:
        return len(self._sampler)


def _count_rows(batch: Any) -> int:
    return next((len(v) for v in tree_leaves(batch) if isinstance(v, Tensor) and v.dim()), 0)


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in gradients.values()))

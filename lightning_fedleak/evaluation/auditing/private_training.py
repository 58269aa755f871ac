"""Gradients planted in a training that claims differential privacy, to refute the claim.

In each step DP-SGD releases ``(sum of clipped gradients + noise) / divisor``, which is the gradient
that an optimizer steps with. A probe runs the training's own step on copies of one example. It
scales the gradient of each copy where it enters the model, at the logits. So it is known what the
step may release:

======== ============================================= =========================================
probe    gradients of the copies                       what the step may release
======== ============================================= =========================================
silent   all scaled by 1e-8                            only noise: of the claimed deviation, and
                                                       fresh
planted  all much longer than the clip norm            at most one clip norm for each copy
opposed  some copies scaled by a large negative        compared with a step in which these copies
         factor, the others longer than the clip norm  have no gradient: a change of at most one
                                                       clip norm for each of them
======== ============================================= =========================================

From the second look on, planted probes also enlarge the gradients of all layers before one a
thousand times, another one in each look. That shows layers whose gradients are missing in the norm.
After a probe the weights, optimizers and random states are restored, so that the training goes on
unchanged. In all other steps only the drawn examples are counted.

Every planted gradient is the worst case that differential privacy allows for. The tests are in
:mod:`lightning_fedleak.evaluation.auditing.training_checks`.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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

SILENT = 1e-8  # factor on silent gradients: far below the noise, and its square fits into float32
LOUD = 0.1  # length of silent gradients, over the noise's deviation, from which they are not silent
BOOST = 1e3  # factor on the gradients of early layers; a norm without these is too small by as much
MIN_COPIES = 8  # copies of an example in a probe; fewer stand out too little from the noise
GOLDEN = 0.618034  # golden ratio: its multiples, modulo 1, spread evenly over the layers

Gradients = dict[str, Tensor]


class PrivateTrainingCheck:
    """Run probes in a training that claims differential privacy, and try to refute the claim.

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
        step: a function that runs forward, backward, the optimizer's step and ``zero_grad`` on a
            batch of the loader, which it may split. It does not step a scheduler. If it steps an
            optimizer never or twice, no more probes run, and the verdict says why.
        model: the model that ``step`` calls. Its output is logits, or has ``.logits``, with one row
            for each example.
        optimizers: all optimizers that ``step`` steps.
        claim: the privacy that the training claims.
        every_n_steps: the number of steps from one look (four probes) to the next. A look takes as
            long as about five steps, so that 100 adds 5% to the time.
        also: other objects that ``step`` changes, such as averaged weights or a GradScaler. Each
            has ``state_dict`` and ``load_state_dict``. The state of Opacus is restored without it.

    Raises:
        ValueError: the model returns no logits.
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
        self._splitters: list[Any] = [o for o in outer if hasattr(o, "_step_skip_queue")]
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._observations = checks.Observations()
        self._batches = self._rows = 0
        self._draws: list[Sequence[int]] = []  # since the last step
        self._is_due = False
        self._scales: Tensor | None = None
        self._released: list[Gradients] = []
        self._layers: list[nn.Module] = []

    def watch(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's batches, and run the probes before some of them.

        Args:
            loader: the loader of the training. The sampler of a torch DataLoader also shows which
                examples are drawn, unless several processes with ``client="world"`` each draw a
                part of them.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        is_shared = self._claim.client == "world" and world > 1
        draws: deque[Sequence[int]] = deque()
        sampler = getattr(loader, "batch_sampler", None)
        with ExitStack() as stack:
            stack.callback(self._model.register_forward_hook(self._scale_rows).remove)
            for optimizer in self._optimizers:
                stack.callback(before_real_step(optimizer, partial(self._record_step, optimizer)))
            if sampler is not None and not is_shared:
                self._observations.examples = len(loader.dataset)
                vars(loader)["batch_sampler"] = _Recorder(sampler, draws)  # it refuses to set one
                stack.callback(vars(loader).update, batch_sampler=sampler)
            for batch in loader:
                if draws:
                    self._draws.append(draws.popleft())
                self._is_due |= self._batches % self._every == self._every // 2
                self._batches += 1
                if self._is_due and self._can_look(batch, is_shared):
                    self._is_due = False
                    with preserve_process():
                        self._run_probes(batch)
                yield batch

    def verdict(self) -> checks.PrivacyVerdict:
        """Return the results of all tests. With ``client="rank"`` every process must call it."""
        observations = self._observations
        if self._claim.client == "rank" and dist.is_initialized():
            parts = [part[2] for look in observations.noise for part in look.values()]
            noises = [torch.cat([torch.empty(0), *parts])] * dist.get_world_size()
            dist.all_gather_object(noises, noises[0])
            length = min(map(len, noises))  # of the looks that all processes have
            obstacle = observations.obstacle or ("" if length else "a process had no look")
            vectors = [noise[:length] for noise in noises if length]
            observations = replace(observations, noise_of_ranks=vectors, obstacle=obstacle)
        return checks.judge(self._claim, observations)

    def _can_look(self, batch: Any, is_shared: bool) -> bool:
        """Return whether a batch can be probed; processes that release one sum decide together."""
        can_look = torch.tensor(
            _count_rows(batch) >= MIN_COPIES and not self._observations.obstacle
        ).int()
        if is_shared:
            can_look = can_look.to(next(self._model.parameters()).device)
            dist.all_reduce(can_look, dist.ReduceOp.MIN)
        return bool(can_look)

    def _scale_rows(self, _: nn.Module, inputs: object, output: Any) -> None:
        """Count the rows of a call of the model, and in a probe scale the gradient of each row."""
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

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record the gradients that an optimizer steps with; outside of probes count the step."""
        if self._scales is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = {self._names.get(p, "another"): p.grad for p in parameters}
            copies = {n: g.float().clone() for n, g in gradients.items() if g is not None}
            self._released.append(copies)
        elif optimizer is self._optimizers[0]:
            self._observations.sizes.append(self._rows)
            examples = [int(number) for draw in self._draws for number in draw]  # some are tensors
            self._observations.draws += bool(self._draws) and len(examples) == self._rows
            self._observations.inclusions.update(examples)
            self._rows, self._draws = 0, []

    def _run_probes(self, batch: Any) -> None:
        """Run a silent, a planted and two opposed probes on copies of a row of the batch."""
        observations, clip, rows = self._observations, self._claim.max_grad_norm, _count_rows(batch)
        looks = len(observations.noise)
        row = random.Random(looks).randrange(rows)
        copies = tree_map(lambda v: v[[row] * rows] if _count_rows(v) == rows else v, batch)
        plants = self._claim.client == "rank" or not dist.is_initialized() or not dist.get_rank()
        ones = torch.ones(rows) * plants  # of processes that release one sum, only the first plants
        noise, raw = self._probe(copies, SILENT * ones, explain=True)
        if noise:
            observations.add_noise(noise, self._claim)
            deviation = self._claim.noise_multiplier * clip
            observations.is_silent &= bool(raw) and rows * _norm(raw) < LOUD * deviation
        length = _norm(raw) / SILENT or 1.0
        # The second factor outweighs the sum of all rows that have the first one.
        near, far = 2 * rows * clip / length, 20 * rows**2 * clip / length
        index = int((looks - 1) * GOLDEN % 1 * len(self._layers))
        layer = self._layers[index] if looks and self._layers else None
        planted, raw = self._probe(copies, far * ones, layer)
        if _norm(raw) > 10 * clip:
            observations.planted.append((self._project(planted, raw), rows))
        n_opposed = max(1, rows // (rows, 8, 4, 2)[looks % 4])
        opposed = torch.arange(n_opposed) * rows // n_opposed
        with preserve_process():  # so that both probes have the same dropout
            without, raw = self._probe(copies, near * ones.index_fill(0, opposed, 0))
        scales = ones.index_fill(0, opposed, -far / near) * plants
        flipped, _ = self._probe(copies, near * scales)
        if flipped and _norm(raw) > clip:
            change = {name: without[name] - flipped[name] for name in without}
            observations.opposed.append((self._project(change, raw), n_opposed))

    def _probe(
        self, copies: Any, scales: Tensor, layer: nn.Module | None = None, *, explain: bool = False
    ) -> tuple[Gradients, Gradients]:
        """Return the gradients that a step on copies releases, and those that it computed.

        Both are empty if the step cannot be probed. The step runs on every process all the same,
        because its collectives need all of them.
        """
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
        restore = self._save_state()
        for splitter in self._splitters:  # the probe is a whole batch
            splitter._step_skip_queue, splitter._is_last_step_skipped = [], False
            splitter.zero_grad()
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
            gradients = {name: g for part in released for name, g in part.items()}
            if not run or len(released) != len(self._optimizers):
                gradients = {}
                self._observations.obstacle = (
                    f"in a look step() ran {run} rows and took {len(released)} optimizer steps. "
                    "Pass the model that it calls and all optimizers, and step each once"
                )
            elif explain:
                self._observations.is_explained &= self._explains(gradients, restore)
        self._rows, self._scales = rows, None
        return gradients, {name: value for name, value in raw.items() if name in gradients}

    def _explains(self, gradients: Gradients, restore: Callable[[], None]) -> bool:
        """Return whether the recorded gradients explain the change of the weights."""
        after = [parameter.detach().clone() for parameter in self._names]
        restore()
        for parameter, name in self._names.items():
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        for optimizer in self._optimizers:
            optimizer.step()
        return all(map(torch.equal, after, self._names))

    def _save_state(self) -> Callable[[], None]:
        """Return a function that restores all that a step changes."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        values = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
        for tensor in tensors:  # a step that adds to .grad in place leaves the training's as it is
            tensor.grad = None
        states = [(stateful, copy.deepcopy(stateful.state_dict())) for stateful in self._restored]
        attributes = [(vars(splitter), {**vars(splitter)}) for splitter in self._splitters]
        for splitter in self._splitters:
            attributes += [(vars(p), {"summed_grad": p.summed_grad}) for p in splitter.params]

        def restore() -> None:
            for tensor, value, gradient in values:
                tensor.data.copy_(value)
                tensor.grad = gradient
            for stateful, state in states:
                stateful.load_state_dict(copy.deepcopy(state))
            for current, earlier in attributes:
                current.update(earlier)

        return restore

    def _project(self, released: Gradients, raw: Gradients) -> float:
        """Return the length, in clip norms, of a release along the planted gradient."""
        dot = sum(float((released[n] * v).sum(dtype=torch.float64)) for n, v in raw.items())
        return dot * self._claim.divisor / _norm(raw) / self._claim.max_grad_norm


class _Recorder:
    """A batch sampler that records the examples that it draws."""

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

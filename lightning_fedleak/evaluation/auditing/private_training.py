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
again    the same on copies of another row, in the     the same noise, or independent noise
         same random state
planted  all much longer than the clip norm            at most one clip norm for each copy, and the
                                                       same noise as without them
near     one to two clip norms                         at most one clip norm for each copy
opposed  some of the near copies scaled by a large     compared with a step in which these copies
         negative factor                               have no gradient: a change of at most one
                                                       clip norm for each of them
======== ============================================= =========================================

From the second look on, planted probes also enlarge the gradients of all layers before one a
thousand times, another one in each look. That shows layers whose gradients are missing in the norm.

What a step changes beside its release is compared between probes. The weights, buffers and states
that a probe leaves, less those that the optimizers make of the recorded gradients, may depend on
no row: neither on which one is copied, nor on how long its gradient is.

After a probe the weights, buffers, optimizers and random states are restored, so that the training
goes on unchanged. In all other steps only the drawn examples and the learning rates are read. A
training in which no probe can run goes on, and the verdict says why.

Every planted gradient is the worst case that differential privacy allows for. The tests are in
:mod:`lightning_fedleak.evaluation.auditing.training_checks`. They do not see what happens outside
of ``step`` (but for schedulers on a metric), gradients that bypass the logits, faults that need a
condition which no look meets, what is sent or logged, noise that is not normal, and a leak that is
smaller than the verdict's *visible*.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import random
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.defenses.dpsgd.logical import copies_of, number_of_rows
from lightning_fedleak.evaluation.auditing import side_effects
from lightning_fedleak.evaluation.auditing import training_checks as checks
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import before_real_step, real_optimizer
from lightning_fedleak.validate import check_integer

SILENT = 1e-8  # factor on silent gradients: far below the noise, and its square fits into float32
LOUD = 0.1  # length of silent gradients, over the noise's deviation, from which they are not silent
BOOST = 1e3  # factor on the gradients of early layers; a norm without these is too small by as much
SAME = 1e-2  # distance of two noises, over their size, below which they are the same draw
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
            batch of the loader, which it may split. It does not step a scheduler. If it raises an
            error in a probe, or steps an optimizer never or twice, no more probes run, and the
            verdict says why.
        model: the model that ``step`` calls. Its output is logits, or has ``.logits``, with one row
            for each example.
        optimizers: all optimizers that ``step`` steps.
        claim: the privacy that the training claims.
        every_n_steps: the number of steps from one look (five probes) to the next. A look takes as
            long as about eight steps, so that 160 adds 5% to the time.
        also: other objects that ``step`` changes, such as averaged weights or a GradScaler. Each
            has ``state_dict`` and ``load_state_dict``. The state of Opacus is restored without it.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        claim: checks.PrivacyClaim,
        *,
        every_n_steps: int = 160,
        also: Sequence[Any] = (),
    ) -> None:
        check_integer("PrivateTrainingCheck: every_n_steps", every_n_steps)
        outer = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        accountants = [OptimizerDP(optimizer).accountant for optimizer in outer]
        self._step, self._model, self._claim, self._every = step, model, claim, every_n_steps
        self._outer = outer
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
        self._raw: Gradients = {}
        self._layers: list[nn.Module] = []
        self._sums_rows = False

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
                self._look(batch, self._every // 2, is_shared)
                yield batch

    def _look(self, batch: Any, first: int, is_shared: bool = False) -> None:
        """Run the probes before a batch, if they are due since the first of every n batches."""
        self._is_due |= self._batches % self._every == first
        self._batches += 1
        if self._is_due and self._can_look(batch, is_shared):
            self._is_due = False
            try:
                with preserve_process():
                    self._run_probes(batch)
            except Exception as error:  # the training goes on without looks
                self._scales = None
                self._observations.obstacle = f"a look raised {_named(error)}"

    def verdict(self) -> checks.PrivacyVerdict:
        """Return the results of all tests. With ``client="rank"`` every process must call it."""
        observations = self._observations
        observations.schedulers = self._schedulers() if observations.rate_changes else {}
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
            number_of_rows(batch) >= MIN_COPIES and not self._observations.obstacle
        ).int()
        if is_shared:
            can_look = can_look.to(next(self._model.parameters()).device)
            dist.all_reduce(can_look, dist.ReduceOp.MIN)
        return bool(can_look)

    def _scale_rows(self, _: nn.Module, inputs: object, output: Any) -> None:
        """Count the rows of a call of the model, and in a probe scale the gradient of each row."""
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or not logits.dim():
            self._observations.obstacle = (
                f"the model returns {type(output).__name__}, which has no logits. Let it return "
                "them, or an output with .logits, without a fused loss"
            )
            return
        if not logits.requires_grad:
            self._observations.evaluations += 1
            return
        start, self._rows = self._rows, self._rows + len(logits)
        if self._scales is not None:
            places = torch.arange(start, self._rows) % len(self._scales)
            scales = self._scales[places].to(logits).view(-1, *[1] * (logits.dim() - 1))
            logits.register_hook(lambda gradient: gradient * scales)  # type: ignore[no-untyped-call]

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record the gradients that an optimizer steps with; outside of probes count the step."""
        if self._scales is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = {self._names.get(p, "another"): p.grad for p in parameters}
            copies = {n: g.float().clone() for n, g in gradients.items() if g is not None}
            self._released.append(copies)
        elif optimizer is self._optimizers[0]:
            self._count_step()

    def _count_step(self) -> None:
        """Count a step of the training, with what was drawn for it."""
        examples = [int(number) for draw in self._draws for number in draw]  # some are tensors
        rates = [float(g["lr"]) for o in self._optimizers for g in o.param_groups if "lr" in g]
        self._observations.add_step(self._rows, examples if self._draws else None, rates)
        self._rows, self._draws = 0, []

    def _run_probes(self, batch: Any) -> None:
        """Run the probes of a look, on copies of a row of the batch and of another one."""
        observations, clip, rows = (
            self._observations,
            self._claim.max_grad_norm,
            number_of_rows(batch),
        )
        looks = len(observations.noise)
        row = random.Random(looks).randrange(rows)
        copies, others = (
            copies_of(batch, number % rows, rows) for number in (row, row + rows // 2)
        )
        plants = self._claim.client == "rank" or not dist.is_initialized() or not dist.get_rank()
        ones = torch.ones(rows) * plants  # of processes that release one sum, only the first plants
        with preserve_process():  # so that the next probe begins in the same random state
            silent = self._probe(copies, SILENT * ones, explain=True)
        again = self._probe(others, SILENT * ones, explain=True)
        if silent.released:
            observations.add_noise(silent.released, self._claim)
            deviation = self._claim.noise_multiplier * clip
            observations.is_silent &= bool(silent.raw) and rows * _norm(silent.raw) < (
                LOUD * deviation
            )
            weights = [n for n in silent.beside if n.startswith("the weight")]
            observations.is_explained &= not weights
        length = _norm(silent.raw) / SILENT or 1.0
        far = 20 * rows**2 * clip / length
        index = int((looks - 1) * GOLDEN % 1 * len(self._layers))
        layer = self._layers[index] if looks and self._layers else None
        planted = self._probe(copies, far * ones, layer, explain=True)
        if _norm(planted.raw) > 10 * clip:
            observations.planted.append((self._project(planted.released, planted.raw), rows))
            self._compare(silent, again, planted, rows)
        if observations.runs == 1:  # else it is not known which row of an example a scale meets
            self._run_opposed(copies, ones, length, max(1, rows // (rows, 8, 4, 2)[looks % 4]))

    def _run_opposed(self, copies: Any, ones: Tensor, length: float, n_opposed: int) -> None:
        """Run two probes near the clip norm, in one of which some rows oppose the others.

        Args:
            copies: the batch.
            ones: a number for each row; zeros where another process plants.
            length: The length of a gradient that is not scaled.
            n_opposed: how many rows.
        """
        observations, clip, rows = self._observations, self._claim.max_grad_norm, len(ones)
        far = 20 * rows**2 * clip / length  # outweighs the sum of all rows near the clip norm
        opposed = torch.arange(n_opposed) * rows // n_opposed
        for _ in range(2):
            unit = clip / length * (rows if self._sums_rows else 1)
            near = unit * (1 + torch.arange(rows) / rows) * ones
            with preserve_process():  # so that both probes have the same dropout
                without = self._probe(copies, near.index_fill(0, opposed, 0))
            shift = self._project(without.released, without.raw) / (rows - n_opposed)
            is_one_sum = dist.is_initialized() and self._claim.client == "world"
            if not without.released or shift > 0.5 or self._sums_rows or is_one_sum:
                break  # processes that release one sum must run equally many probes
            self._sums_rows = True  # the loss is a sum, or backward ran again on one
        flipped = self._probe(copies, near.index_fill(0, opposed, -far * float(ones[0])))
        if flipped.released and _norm(without.raw) > clip / 4:
            if shift > 0.5:  # else their norms were not near the clip norm
                observations.near.append((shift * (rows - n_opposed), rows - n_opposed))
            change = {name: without.released[name] - flipped.released[name] for name in without.raw}
            observations.opposed.append((self._project(change, without.raw), n_opposed))

    def _compare(self, silent: _Probe, again: _Probe, planted: _Probe, rows: int) -> None:
        """Compare noise and side effects of a look's probes, if all of them ran."""
        if not (silent.released and again.released and planted.released):
            return
        observations, share = self._observations, rows / self._claim.divisor
        observations.add_repeated("again", again.released, self._claim)
        observations.add_repeated("planted", planted.released, self._claim, planted.raw)
        apart, worst = [], 0.0
        for name, first in silent.released.items():
            second, size = again.released[name], float(first.norm())
            raw = [float(probe.raw[name].norm()) for probe in (silent, again) if name in probe.raw]
            distance = float((first - second).norm())
            worst = max(worst, distance / size if size else 0.0)
            if not distance <= SAME * size + 4 * share * sum(raw):
                apart.append(name)
        if apart:
            observations.add_pair(
                *({name: probe.released[name] for name in apart} for probe in (silent, again))
            )
        tolerance = 10 * math.sqrt(worst) + SAME / 10
        rows_differ = side_effects.far_apart(silent.beside, again.beside, tolerance)
        observations.unrepeated |= bool(apart and rows_differ)
        if not apart and observations.is_silent:
            observations.leaks.update(dict.fromkeys(rows_differ, "follows which row is copied"))
        # Clipped gradients enlarge a side effect that is noise by so much, and chance does too.
        shares = (c * (1 + rows / self._claim.noise_multiplier) for c in side_effects.CHANCE)
        lengthened = side_effects.far_apart(silent.beside, planted.beside, *shares)
        observations.leaks.update(dict.fromkeys(lengthened, "follows the length of gradients"))
        weights = math.sqrt(sum(float(p.detach().norm()) ** 2 for p in self._names))
        visible = side_effects.ROUNDING * torch.finfo(torch.float32).eps * weights
        observations.smallest_leak = max(observations.smallest_leak, visible / _norm(planted.raw))

    def _probe(
        self, copies: Any, scales: Tensor, layer: nn.Module | None = None, *, explain: bool = False
    ) -> _Probe:
        """Return the gradients that a step on copies releases, and those that it computed.

        Both are empty if the step cannot be probed. The step runs on every process all the same,
        because its collectives need all of them.
        """
        raw: Gradients = {}
        self._raw = raw

        def add(name: str, gradient: Tensor) -> None:
            raw.setdefault(name, torch.zeros_like(gradient, dtype=torch.float32)).add_(gradient)

        def entered(module: nn.Module, inputs: tuple[object, ...]) -> object:
            tensors = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
            if tensors and explain and module not in self._layers:
                self._layers.append(module)
            is_boosted = tensors and module is layer
            return tuple(map(_boosted, inputs)) if is_boosted else None

        self._scales, self._released, rows, self._rows = scales, [], self._rows, 0
        restore, beside = self._save_state(), side_effects.SideEffects()
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
            error = self._run_step(copies)
            runs, released = self._rows, self._released
            gradients = {name: g for part in released for name, g in part.items()}
            reason = error or self._why_no_probe(runs, len(scales), len(released))
            if reason:
                self._observations.obstacle, gradients = reason, {}
            elif explain:
                self._observations.runs = max(1, runs // len(scales))
                beside = self._side_effects(gradients, restore)
        self._rows, self._scales = rows, None
        return _Probe(gradients, {n: value for n, value in raw.items() if n in gradients}, beside)

    def _why_no_probe(self, runs: int, copies: int, steps: int) -> str:
        """Return why a step on copies is no probe; empty where it is one.

        Args:
            runs: rows that the model ran.
            copies: rows of the batch.
            steps: that optimizers took.
        """
        if runs and steps == len(self._optimizers):
            fits = runs <= copies or runs % copies == 0
            return "" if fits else f"in a look step() ran {runs} rows for {copies} examples"
        return self._observations.obstacle or (
            f"in a look step() ran {runs} rows and took {steps} optimizer steps. Pass the model "
            "that it calls and all optimizers, and step each once"
        )

    def _run_step(self, copies: Any) -> str:
        """Run the step on copies, and return the error that it raised; empty without one."""
        try:
            self._step(copies)
        except Exception as error:  # the training goes on without looks, and the verdict says why
            return f"in a look step() raised {_named(error)}"
        return ""

    def _side_effects(
        self, gradients: Gradients, restore: Callable[[], None]
    ) -> side_effects.SideEffects:
        """Return what the step changed beside what optimizers make of the recorded gradients."""
        after = side_effects.read_tensors(self._model, self._restored)
        restore()
        for parameter, name in self._names.items():
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        for optimizer in self._optimizers:
            optimizer.step()
        explained = side_effects.read_tensors(self._model, self._restored)
        return side_effects.side_effects(after, explained)

    def _schedulers(self) -> dict[str, bool]:
        """Return the kinds of the optimizers' schedulers, and whether they take a metric."""
        ours = {id(optimizer) for optimizer in (*self._outer, *self._optimizers)}
        kinds = {}
        for scheduler in [s for s in gc.get_objects() if issubclass(type(s), LRScheduler)]:
            optimizer = getattr(scheduler, "optimizer", None)
            while optimizer is not None and id(optimizer) not in ours:
                optimizer = getattr(optimizer, "optimizer", None)  # Accelerate wraps it
            if optimizer is not None:
                kind = type(scheduler)
                kinds[kind.__name__] = "metrics" in inspect.signature(kind.step).parameters
        return kinds

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
        return dot * self._claim.divisor / (_norm(raw) or 1.0) / self._claim.max_grad_norm


@dataclass(frozen=True)
class _Probe:
    """What a probe shows.

    Attributes:
        released: the gradients that the optimizers stepped with, by parameter.
        raw: the gradients that backward computed.
        beside: what the step changed beside the release.
    """

    released: Gradients
    raw: Gradients
    beside: side_effects.SideEffects


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


def _named(error: Exception) -> str:
    """Return an error's class and place; its message may hold text of the training data."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def _boosted(value: object) -> object:
    """Return the value; the gradient of a tensor is enlarged where it leaves a module's input."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    view = value.view_as(value)  # so that hooks on the value itself get the enlarged gradient
    view.register_hook(lambda gradient: gradient * BOOST)  # type: ignore[no-untyped-call]
    return view


def _norm(gradients: Gradients) -> float:
    return math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in gradients.values()))

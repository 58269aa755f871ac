"""Gradients planted in a training that claims differential privacy, to refute the claim.

In each step DP-SGD releases ``(sum of clipped gradients + noise) / divisor``, which is the gradient
that an optimizer steps with. A *look* interrupts the training before a step and runs the probes
below. A *probe* runs the training's own step on copies of one example. It scales the gradient of
each copy where it enters the model, at the logits. The claim then says what the step may release:

======== ============================================= =========================================
probe    gradients of the copies                       what the step may release
======== ============================================= =========================================
silent   all scaled by 1e-8                            only noise, of the claimed deviation and
                                                       independent of earlier noise
again    silent, with copies of another row and the    the same noise as silent, or independent
         same random state                             noise
planted  all much longer than the clip norm            at most one clip norm for each copy, and
                                                       noise of the claimed deviation
near     one to two clip norms                         at most one clip norm for each copy
opposed  as near, but some copies scaled by a large    compared with near, in which these copies
         negative factor                               are scaled by 0: a change of at most one clip
                                                       norm for each of them
======== ============================================= =========================================

From the second look on, the planted probe also multiplies the gradient at the input of one layer by
1000, and with it the gradients of all layers before. Each look picks a different layer. That
reveals layers whose gradients the clipped norm omits.

Side effects of a step (:mod:`lightning_fedleak.evaluation.auditing.side_effects`) are compared
between probes. They must not depend on which row is copied, nor on the length of its gradient.

After a probe the weights, buffers, optimizers and random states are restored, so that the training
continues unchanged. In all other steps only the drawn examples and the learning rates are recorded.
If no probe can run, the training continues, and the verdict gives the reason.

Every planted gradient is a worst case that differential privacy must cover. The tests are in
:mod:`lightning_fedleak.evaluation.auditing.training_checks`. They cannot detect faults outside of
``step`` (except schedulers on a metric), gradients that bypass the logits, faults under a condition
that no look meets, data that is sent or logged, noise that is not normal, and leaks smaller than
the verdict's *visible*.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
from lightning_fedleak.model.model_state import Hook, describe, preserve_process
from lightning_fedleak.model.taps import before_real_step, real_optimizer
from lightning_fedleak.validate import check_integer

SILENT = 1e-8  # factor on silent gradients: far below the noise, and its square fits into float32
LOUD = 0.1  # length of silent gradients, in deviations of the noise, that is no longer negligible
BOOST = 1e3  # factor on the gradients of early layers; a norm that omits them is too small by it
SAME = 1e-2  # relative distance of two noises up to which they are the same draw
MIN_COPIES = 8  # copies of an example in a probe; the effect of fewer is small beside the noise
GOLDEN = 0.618034  # golden ratio: its multiples, modulo 1, spread evenly over the layers

Gradients = dict[str, Tensor]  # by the names of the parameters


class PrivateTrainingCheck:
    """Run probes in a training that claims differential privacy, and try to refute the claim.

    Iterate over :meth:`watch` in place of the loader, and call :meth:`verdict` at the end.

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
        step: A function that runs forward, backward, the optimizer's step and ``zero_grad`` on a
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
        # Optimizers of Opacus, which may step only after several batches.
        self._splitters: list[Any] = [o for o in outer if hasattr(o, "_step_skip_queue")]
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._observations = checks.Observations()
        self._batches = self._rows = 0
        self._draws: list[Sequence[int]] = []  # the examples of each batch since the last step
        self._is_due = False
        # (rows,) the factor on the gradient of each row's logits in a probe; else None.
        self._scales: Tensor | None = None
        self._released: list[Gradients] = []  # the gradients of each optimizer step of a probe
        self._raw: Gradients = {}  # the gradients of backward in a probe, before clipping
        self._layers: list[nn.Module] = []  # modules whose input has a gradient, in forward order
        self._sums_rows = False  # whether the loss is a sum over rows, not a mean

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
            stack.callback(self._model.register_forward_hook(Hook(self._scale_rows)).remove)
            for optimizer in self._optimizers:
                stack.callback(before_real_step(optimizer, partial(self._record_step, optimizer)))
            if sampler is not None and not is_shared:
                self._observations.examples = len(loader.dataset)
                vars(loader)["batch_sampler"] = _RecordingSampler(sampler, draws)  # has no setter
                stack.callback(vars(loader).update, batch_sampler=sampler)
            for batch in loader:
                if draws:
                    self._draws.append(draws.popleft())
                # The first look is after half of the distance between looks.
                self._look(batch, self._every // 2, is_shared)
                yield batch

    def _look(self, batch: Any, offset: int, is_shared: bool = False) -> None:
        """Run the probes before a batch if a look is due.

        A look is due at batch ``offset`` and every n batches later. It waits for a batch that can
        be probed.
        """
        self._is_due |= self._batches % self._every == offset
        self._batches += 1
        if self._is_due and self._can_look(batch, is_shared):
            self._is_due = False
            try:
                with preserve_process():
                    self._run_probes(batch)
            except Exception as error:  # the training goes on without looks
                self._scales = None
                self._observations.obstacle = f"a look raised {describe(error)}"

    def verdict(self) -> checks.PrivacyVerdict:
        """Return the results of all tests. With ``client="rank"`` every process must call it."""
        observations = self._observations
        observations.schedulers = self._schedulers() if observations.rate_changes else {}
        if self._claim.client == "rank" and dist.is_initialized():
            parts = [part[2] for look in observations.noise for part in look.values()]
            noises = [torch.cat([torch.empty(0), *parts])] * dist.get_world_size()
            dist.all_gather_object(noises, noises[0])
            length = min(map(len, noises))  # the noise of the looks that all processes had
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
        """Count the rows of a forward, and in a probe scale the gradient of each row's logits.

        It is a forward hook of the model.
        """
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
            copies = torch.arange(start, self._rows) % len(self._scales)
            scales = self._scales[copies].to(logits).view(-1, *[1] * (logits.dim() - 1))
            logits.register_hook(lambda gradient: gradient * scales)  # type: ignore[no-untyped-call]

    def _record_step(self, optimizer: Optimizer) -> None:
        """Record the gradients of an optimizer's step in a probe; elsewhere count the step."""
        if self._scales is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = {self._names.get(p, "another"): p.grad for p in parameters}
            copies = {n: g.float().clone() for n, g in gradients.items() if g is not None}
            self._released.append(copies)
        elif optimizer is self._optimizers[0]:
            self._count_step()

    def _count_step(self) -> None:
        """Count a step of the training, with its drawn examples and learning rates."""
        examples = [int(number) for draw in self._draws for number in draw]  # some are tensors
        rates = [float(g["lr"]) for o in self._optimizers for g in o.param_groups if "lr" in g]
        self._observations.add_step(self._rows, examples if self._draws else None, rates)
        self._rows, self._draws = 0, []

    def _run_probes(self, batch: Any) -> None:
        """Run the probes of a look on copies of one row, and one probe on copies of another."""
        observations, clip = self._observations, self._claim.max_grad_norm
        look, rows = len(observations.noise), number_of_rows(batch)
        row = random.Random(look).randrange(rows)
        copies, other_copies = (
            copies_of(batch, number % rows, rows) for number in (row, row + rows // 2)
        )
        plants = self._claim.client == "rank" or not dist.is_initialized() or not dist.get_rank()
        ones = torch.ones(rows) * plants  # of processes that release one sum, only the first plants
        with preserve_process():  # so that the next probe begins in the same random state
            silent = self._probe(copies, SILENT * ones, explain=True)
        again = self._probe(other_copies, SILENT * ones, explain=True)
        if silent.released:
            observations.add_noise(silent.released, self._claim)
            deviation = self._claim.noise_multiplier * clip
            observations.is_silent &= bool(silent.raw) and rows * _norm(silent.raw) < (
                LOUD * deviation
            )
            changed_weights = [n for n in silent.effects if n.startswith("the weight")]
            observations.is_explained &= not changed_weights
        length = _norm(silent.raw) / SILENT or 1.0
        # A row scaled by this outweighs the sum of all rows that are near the clip norm.
        far = 20 * rows**2 * clip / length
        index = int((look - 1) * GOLDEN % 1 * len(self._layers))
        layer = self._layers[index] if look and self._layers else None
        planted = self._probe(copies, far * ones, layer, explain=True)
        # Far above the clip norm, or a training that does not clip would look like one that does.
        if _norm(planted.raw) > 10 * clip:
            observations.planted.append((self._project(planted.released, planted.raw), rows))
            self._compare(silent, again, planted, rows)
        if observations.runs == 1:  # else a scale could meet only some of an example's rows
            divisor = (rows, 8, 4, 2)[look % 4]  # one row, an eighth, a quarter and a half in turn
            self._run_opposed(copies, ones, length, far, max(1, rows // divisor))

    def _run_opposed(
        self, copies: Any, ones: Tensor, length: float, far: float, n_opposed: int
    ) -> None:
        """Run two probes near the clip norm: some rows have no gradient, then an opposed one.

        Args:
            copies: The batch.
            ones: (rows,) 1 in the process that plants gradients, 0 in the others.
            length: The norm of the unscaled gradient.
            far: The factor that makes a gradient outweigh all rows near the clip norm.
            n_opposed: The number of rows with opposed gradients.
        """
        observations, clip, rows = self._observations, self._claim.max_grad_norm, len(ones)
        opposed = torch.arange(n_opposed) * rows // n_opposed
        for _ in range(2):
            unit = clip / length * (rows if self._sums_rows else 1)
            near = unit * (1 + torch.arange(rows) / rows) * ones
            with preserve_process():  # so that both probes have the same dropout
                without = self._probe(copies, near.index_fill(0, opposed, 0))
            # Clip norms of each row in the release: 1 if its gradient was clipped, nearly 0 if it
            # was far too short. Above 0.5 the gradients were near the clip norm.
            shift = self._project(without.released, without.raw) / (rows - n_opposed)
            is_one_sum = dist.is_initialized() and self._claim.client == "world"
            if not without.released or shift > 0.5 or self._sums_rows or is_one_sum:
                break  # processes that release one sum must all run the same number of probes
            self._sums_rows = True  # of a summed loss, of which a row has 1 / rows of ``length``
        flipped = self._probe(copies, near.index_fill(0, opposed, -far * float(ones[0])))
        if flipped.released and _norm(without.raw) > clip / 4:  # else much shorter than planned
            if shift > 0.5:  # else the gradients' norms were not near the clip norm
                observations.near.append((shift * (rows - n_opposed), rows - n_opposed))
            change = {name: without.released[name] - flipped.released[name] for name in without.raw}
            observations.opposed.append((self._project(change, without.raw), n_opposed))

    def _compare(self, silent: _Probe, again: _Probe, planted: _Probe, rows: int) -> None:
        """Compare noise and side effects of a look's first three probes, if all of them ran."""
        if not (silent.released and again.released and planted.released):
            return
        observations, share = self._observations, rows / self._claim.divisor
        observations.add_repeated("again", again.released, self._claim)
        observations.add_repeated("planted", planted.released, self._claim, planted.raw)
        unequal, worst = [], 0.0
        for name, first in silent.released.items():
            second, size = again.released[name], float(first.norm())
            raw = [float(probe.raw[name].norm()) for probe in (silent, again) if name in probe.raw]
            distance = float((first - second).norm())
            worst = max(worst, distance / size if size else 0.0)
            # Each release also contains ``share`` times its own silent gradient, and these differ.
            if not distance <= SAME * size + 4 * share * sum(raw):
                unequal.append(name)
        if unequal:
            observations.add_pair(
                *({name: probe.released[name] for name in unequal} for probe in (silent, again))
            )
        # The allowed distance of side effects: it grows with the largest distance of the noises.
        tolerance = 10 * math.sqrt(worst) + SAME / 10
        rows_differ = side_effects.far_apart(silent.effects, again.effects, tolerance)
        observations.unrepeated |= bool(unequal and rows_differ)
        if not unequal and observations.is_silent:
            observations.leaks.update(dict.fromkeys(rows_differ, "follows which row is copied"))
        # Side effects may be multiples of the release, which is noise in one probe. In the other it
        # also has clipped gradients, of up to rows / noise_multiplier deviations of the noise.
        shares = (c * (1 + rows / self._claim.noise_multiplier) for c in side_effects.CHANCE)
        lengthened = side_effects.far_apart(silent.effects, planted.effects, *shares)
        observations.leaks.update(dict.fromkeys(lengthened, "follows the length of gradients"))
        weights = math.sqrt(sum(float(p.detach().norm()) ** 2 for p in self._names))
        visible = side_effects.ROUNDING * torch.finfo(torch.float32).eps * weights
        observations.smallest_leak = max(observations.smallest_leak, visible / _norm(planted.raw))

    def _probe(
        self, copies: Any, scales: Tensor, layer: nn.Module | None = None, *, explain: bool = False
    ) -> _Probe:
        """Return the gradients that a step on copies releases, and its raw gradients.

        Both are empty if the step cannot be probed. The step runs on every process even then,
        because its collectives need all of them.

        Args:
            copies: The batch.
            scales: (rows,) The factor on the gradient of each row's logits.
            layer: The layer whose input's gradient is multiplied by :data:`BOOST`; None: no layer.
            explain: Whether to compute the side effects as well.
        """
        raw: Gradients = {}
        self._raw = raw

        def add_gradient(name: str, gradient: Tensor) -> None:
            raw.setdefault(name, torch.zeros_like(gradient, dtype=torch.float32)).add_(gradient)

        def enter_layer(module: nn.Module, inputs: tuple[object, ...]) -> object:
            tensors = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
            if tensors and explain and module not in self._layers:
                self._layers.append(module)
            is_boosted = tensors and module is layer
            return tuple(map(_enlarge_gradient, inputs)) if is_boosted else None

        self._scales, self._released, rows, self._rows = scales, [], self._rows, 0
        restore, effects = self._save_state(), side_effects.SideEffects()
        for splitter in self._splitters:  # the probe is a whole batch
            splitter._step_skip_queue, splitter._is_last_step_skipped = [], False
            splitter.zero_grad()
        with ExitStack() as stack:
            stack.callback(restore)
            for parameter, name in self._names.items():
                if parameter.requires_grad:
                    handle = parameter.register_hook(partial(add_gradient, name))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(Hook(enter_layer)).remove)
            error = self._run_step(copies)
            rows_run, released = self._rows, self._released
            gradients = {name: g for part in released for name, g in part.items()}
            reason = error or self._why_no_probe(rows_run, len(scales), len(released))
            if reason:
                self._observations.obstacle, gradients = reason, {}
            elif explain:
                self._observations.runs = max(1, rows_run // len(scales))
                effects = self._side_effects(gradients, restore)
        self._rows, self._scales = rows, None
        return _Probe(gradients, {n: value for n, value in raw.items() if n in gradients}, effects)

    def _why_no_probe(self, rows_run: int, copies: int, steps: int) -> str:
        """Return the reason why a step on copies is not a valid probe; empty if it is valid.

        Args:
            rows_run: The number of rows that the model ran.
            copies: The number of rows of the batch.
            steps: The number of optimizer steps in the probe.
        """
        if rows_run and steps == len(self._optimizers):
            fits = rows_run <= copies or rows_run % copies == 0
            return "" if fits else f"in a look step() ran {rows_run} rows for {copies} examples"
        return self._observations.obstacle or (
            f"in a look step() ran {rows_run} rows and took {steps} optimizer steps. Pass the "
            "model that it calls and all optimizers, and step each once"
        )

    def _run_step(self, copies: Any) -> str:
        """Run the step on copies, and return the error that it raised; empty without one."""
        try:
            self._step(copies)
        except Exception as error:  # the training goes on without looks, and the verdict says why
            return f"in a look step() raised {describe(error)}"
        return ""

    def _side_effects(
        self, gradients: Gradients, restore: Callable[[], None]
    ) -> side_effects.SideEffects:
        """Return the changes of the step that the optimizers do not make from ``gradients``.

        Args:
            gradients: The recorded gradients.
            restore: A function that restores the state before the step.
        """
        after = side_effects.read_tensors(self._model, self._restored)
        restore()
        for parameter, name in self._names.items():
            parameter.grad = gradients[name].to(parameter) if name in gradients else None
        for optimizer in self._optimizers:
            optimizer.step()
        explained = side_effects.read_tensors(self._model, self._restored)
        return side_effects.side_effects(after, explained)

    def _schedulers(self) -> dict[str, bool]:
        """Return whether each scheduler of the optimizers takes a metric, by its class's name.

        The training does not pass its schedulers, so they are searched for in memory.
        """
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
        """Return a function that restores the weights, buffers, gradients and states of now."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        values = [(tensor, tensor.detach().clone(), tensor.grad) for tensor in tensors]
        for tensor in tensors:  # so that a probe's step cannot add to the training's gradients
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
        """Return the length of a release along the planted gradient, in clip norms."""
        dot = sum(float((released[n] * v).sum(dtype=torch.float64)) for n, v in raw.items())
        return dot * self._claim.divisor / (_norm(raw) or 1.0) / self._claim.max_grad_norm


@dataclass(frozen=True)
class _Probe:
    """The recorded results of a probe.

    Attributes:
        released: the gradients that the optimizers stepped with.
        raw: the gradients that backward computed, before clipping.
        effects: the side effects of the step.
    """

    released: Gradients
    raw: Gradients
    effects: side_effects.SideEffects


class _RecordingSampler:
    """A batch sampler that records the examples that it draws."""

    def __init__(self, sampler: Any, draws: deque[Sequence[int]]) -> None:
        self._sampler, self._draws = sampler, draws

    def __iter__(self) -> Iterator[Sequence[int]]:
        for draw in self._sampler:
            self._draws.append(draw)
            yield draw

    def __len__(self) -> int:
        return len(self._sampler)


def _enlarge_gradient(value: object) -> object:
    """Return the value; a hook enlarges a tensor's gradient, and so those of earlier layers."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    view = value.view_as(value)  # so that hooks on the value itself get the enlarged gradient
    view.register_hook(lambda gradient: gradient * BOOST)  # type: ignore[no-untyped-call]
    return view


def _norm(gradients: Gradients) -> float:
    """Return the norm of all gradients together."""
    return math.sqrt(sum(float(v.square().sum(dtype=torch.float64)) for v in gradients.values()))

"""The release of an update: the optimizer step at which a client's gradient leaves the client.

A release has three stages. The *local* gradient is the client's gradient before any defence, the
*shared* gradient is the result of the defences, which the client sends, and the *aggregate*
gradient is the mean over clients, which the optimizer uses. :class:`UpdateRelease` runs the
defences between these stages, and calls observing functions ("taps") at each stage. A *canary* is
the simulated gradient of layers that a dishonest server could add, to measure what would leak.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, check_choice
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import before_real_step

Client = Literal["rank", "world"]  # each process is a client, or all processes are one client
# A function that is called with the stage of the gradients, and the optimizer that steps.
Tap = Callable[[Stage, Optimizer], None]
# A function that is called with a defence before it rewrites the gradients of the parameters.
CanaryHook = Callable[[Defense, Sequence[nn.Parameter], DefenseContext], None]
Function = TypeVar("Function")
_RELEASES: WeakKeyDictionary[Optimizer, UpdateRelease] = WeakKeyDictionary()  # by guarded optimizer


class UpdateRelease:
    """The defences and taps of a run; see the module's docstring.

    The release happens right before an optimizer changes the weights. It calls the taps with the
    local gradient, then the defences that rewrite gradients, then the taps with the shared and the
    aggregate gradient. A fit calls :meth:`open`, :meth:`begin`, :meth:`guard` for each optimizer,
    :meth:`train_starts`, :meth:`training_step` for each batch, :meth:`train_ends` and :meth:`end`.

    Args:
        defenses: The defences, in the order in which they act.
        client: ``"rank"`` if each process is a client, ``"world"`` if all processes are one.
        owner: The name of the class that has the defences, for messages.

    Attributes:
        guarded: The guarded optimizers by id, each with the function that removes its release.
        reduces: Whether the release averages the defended gradients over all ranks, instead of the
            trainer, which would do so before the defences act.
        separates_stages: Whether a release has the local and the shared gradient in ``p.grad``.

    Raises:
        DefenseError: The client is unknown, ``defenses`` is not a list of defences, two defences
            have one name, or their order is wrong.
    """

    def __init__(self, defenses: Iterable[Defense], client: Client, owner: str) -> None:
        check_choice(f"{owner}: client", client, get_args(Client))
        defenses = tuple(defenses)  # a generator can be iterated only once
        for defense in defenses:
            if not isinstance(defense, Defense) or not (defense.name and defense.guarantee):
                raise DefenseError(
                    f"{owner}: {defense!r} in `defenses` must be an instance of a Defense "
                    "with the class attributes `name` and `guarantee`"
                )
        names = [defense.name for defense in defenses]
        if len(set(names)) < len(names):
            raise DefenseError(
                f"{owner}: give each defence once, with a `name` of its own: {names}"
            )
        self.owner, self.defenses = owner, defenses
        for i, defense in enumerate(self.defenses):
            defense.check_order(self.defenses[:i], self.defenses[i + 1 :])
        self.client: Client = client
        self.gradient_defenses = tuple(d for d in self.defenses if d.acts_on_gradients)
        # Per-sample defences replace an empty batch first; other defences then act on the
        # replacement too.
        self._batch_defenses = sorted(self.defenses, key=lambda d: not d.per_sample)
        # Each defence wraps the step and the defences after it, so the first one is outermost.
        self._step_defenses = _defenses_with_hook("on_training_step", self.defenses[::-1])
        self._logical_batch_defenses = _defenses_with_hook("on_logical_batch", self.defenses[::-1])
        self._release_defenses = _defenses_with_hook("before_release", self.defenses)
        self.separates_stages = True
        self.reduces = False
        self._paused = False
        self._context: DefenseContext | None = None
        self._taps: OrderedDict[int, Tap] = OrderedDict()
        self._canaries: OrderedDict[int, CanaryHook] = OrderedDict()
        self.guarded: dict[int, tuple[Optimizer, Callable[[], None]]] = {}
        self._step_hook: RemovableHandle | None = None
        # The ids of parameters whose gradients are released, but not yet used by an optimizer.
        self._released_ids: set[int] = set()
        self._has_released = False  # in this fit; weights may change from then on
        # The weights and their version counters at the first batch; None before it.
        self._first_versions: list[tuple[nn.Parameter, int]] | None = None

    def add_tap(self, fn: Tap) -> Callable[[], None]:
        """Call ``fn(stage, optimizer)`` at each stage; return a function that removes it."""
        return _register(self._taps, fn)

    def add_canaries(self, fn: CanaryHook) -> Callable[[], None]:
        """Call ``fn(defense, parameters, context)`` before each defence rewrites gradients.

        Returns:
            A function that removes ``fn``.
        """
        return _register(self._canaries, fn)

    @property
    def is_watched(self) -> bool:
        """Return whether functions are called with the gradients of each stage."""
        return bool(self._taps or self._canaries)

    @property
    def is_open(self) -> bool:
        """Return whether the defences have their context: between ``open`` and ``end``."""
        return self._context is not None

    def open(
        self, host: Host, root: nn.Module, device: torch.device, precision: str, share: int | None
    ) -> None:
        """Begin a fit: give the defences their context.

        If several processes are one client, all must call it, because the first process sends its
        entropy to the others.

        Args:
            host: The trainer or loop.
            root: The trained module, without a wrapper such as DistributedDataParallel.
            device: The device of this process.
            precision: The precision of the training, as Lightning names it.
            share: The index of this process's share of the data, if all processes are one client;
                None if the index is its rank.
        """
        entropy, (rank, processes) = [os.urandom(32)], host.rank_and_world_size
        if self.client == "rank":
            client, clients, process, n_together = rank, processes, 0, 1
        else:
            client, clients, process, n_together = 0, 1, rank if share is None else share, processes
            if processes > 1:
                dist.broadcast_object_list(entropy, device=device)
        self._context = DefenseContext(
            root, client, clients, device, precision, 0, entropy[0], process, n_together, host
        )
        self._has_released, self._first_versions = False, None
        if self.gradient_defenses:
            self._step_hook = register_optimizer_step_post_hook(self._check_optimizer)

    def begin(self, *, fitting: bool = True) -> None:
        """Let the defences prepare the model; without ``fitting``, those that act in inference."""
        context = self._current_context()
        for defense in self.defenses:
            if fitting or defense.acts_in_inference:
                defense.before_setup(context)

    def train_starts(self) -> None:
        """Call ``on_train_start`` of every defence."""
        context = self._current_context()
        for defense in self.defenses:
            defense.on_train_start(context)

    def train_ends(self) -> None:
        """Call ``on_train_end`` of every defence."""
        for defense in self.defenses:
            defense.on_train_end(self._current_context())

    def dataloader(self, dataloader: Any) -> Any:
        """Return the training loader, as the defences replace it one after another."""
        context = self._current_context()
        for defense in self.defenses:
            dataloader = _check_returned(
                defense, "on_dataloader", defense.on_dataloader(dataloader, context)
            )
        return dataloader

    def training_step(self, run: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
        """Return ``run(batch, *arguments)``, with the batch as the defences replace it.

        It runs within the defences' hooks ``on_training_step`` and ``on_logical_batch``.

        Raises:
            DefenseError: A defence replaces batches and ``batch`` is an iterator, a defence returns
                no batch, or weights changed without a release.
        """
        if not self.defenses:
            return run(batch, *arguments)
        context = self._current_context()
        self._released_ids.clear()
        if self.gradient_defenses and not self._has_released:
            self._check_weights(context)
        for defense in (d for d in self._batch_defenses if d.acts_on_batches):
            if isinstance(batch, Iterator):
                raise DefenseError(
                    f"{type(defense).__name__} replaces batches: let `training_step` take `batch` "
                    "and `batch_idx`, not an iterator"
                )
            batch = _check_returned(defense, "on_batch", defense.on_batch(batch, context))

        def step(rows: Any) -> Any:
            call = functools.partial(run, rows, *arguments)
            for defense in self._step_defenses:
                call = functools.partial(defense.on_training_step, call, rows, context)
            return call()

        logical_step: Callable[[Any], Any] = step
        for defense in self._logical_batch_defenses:
            logical_step = functools.partial(
                defense.on_logical_batch, logical_step, context=context
            )
        return logical_step(batch)

    def guard(self, optimizer: Optimizer) -> None:
        """Release before each step of an optimizer; a second call for it does nothing."""
        if id(optimizer) in self.guarded:
            return
        remove = before_real_step(optimizer, lambda: self._release(optimizer))
        self.guarded[id(optimizer)] = (optimizer, remove)
        _RELEASES[optimizer] = self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which optimizer steps release nothing.

        It is for steps that only create the optimizer's state.
        """
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def end(self) -> None:
        """End a fit: remove all hooks, taps and canaries, and call each defence's ``teardown``."""
        if self._context is None:
            return
        for optimizer, remove in self.guarded.values():
            remove()
            _RELEASES.pop(optimizer, None)
        self.guarded.clear()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        self._taps.clear()
        self._canaries.clear()
        self._context = None
        for defense in self.defenses:
            defense.teardown()

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return the states of the defences by name."""
        return {defense.name: dict(defense.state_dict()) for defense in self.defenses}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore each defence, with an empty state if the checkpoint has none for it.

        A warning names the defences that only the checkpoint, or only this run, has.
        """
        missing = sorted(set(states) - {defense.name for defense in self.defenses})
        if missing:
            rank_zero_warn(
                f"the checkpoint was trained with the defences {missing}, which this run does not "
                "have: updates from now on are sent without them. Add them to `defenses`."
            )
        if new_names := [defense.name for defense in self.defenses if defense.name not in states]:
            rank_zero_warn(
                f"the checkpoint was trained without the defences {new_names}: updates that were "
                "released before it are neither defended nor accounted by them."
            )
        for defense in self.defenses:
            defense.load_state_dict(states.get(defense.name, {}))

    def _release(self, optimizer: Optimizer) -> None:
        """Defend and reduce the gradients of an optimizer, and call the taps at each stage.

        If ``separates_stages`` is False, ``p.grad`` holds the aggregate gradient already.
        """
        if self._paused:
            return
        for defense in self._release_defenses:
            defense.before_release()
        self._has_released = True
        if self.separates_stages:
            self._tap(Stage.LOCAL, optimizer)
            context, parameters = self._current_context(), _update_parameters(optimizer)
            for defense in self.gradient_defenses:
                for canary in tuple(self._canaries.values()):
                    canary(defense, parameters, context)
                returned: object = defense.on_gradients(parameters, context)  # type: ignore[func-returns-value]
                if returned is not None:
                    raise DefenseError(
                        f"{type(defense).__name__}.on_gradients must rewrite `p.grad` and return "
                        "None; the update was not released"
                    )
            self._released_ids.update(map(id, parameters))
            self._tap(Stage.SHARED, optimizer)
            if self.reduces:
                _average_gradients(parameters)
        self._tap(Stage.AGGREGATE, optimizer)

    def _check_weights(self, context: DefenseContext) -> None:
        """Raise an error if weights change between batches before any release in this fit.

        Such a loop writes updates into the weights without an optimizer. Weights that no optimizer
        updates, such as a moving average, may change while gradients accumulate.
        """
        if self._first_versions is None:
            self._first_versions = [
                (p, p._version)
                for p in context.root.parameters()
                if p.requires_grad and not isinstance(p, DTensor)
            ]
            return
        changed = {id(p) for p, version in self._first_versions if p._version != version}
        if not changed:
            return
        guarded = [
            p for optimizer, _ in self.guarded.values() for p in _update_parameters(optimizer)
        ]
        accumulates = any(p.grad is not None for p in guarded)
        if not accumulates or not changed.isdisjoint(map(id, guarded)):
            raise DefenseError(
                f"{self.owner}: the weights changed without an optimizer, so not defended. "
                f"{context.host.mend} (torch.optim.SGD does `weight -= lr * weight.grad`.)"
            )

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise an error if an optimizer has stepped with gradients that were not defended.

        A guarded optimizer may wrap one that is not guarded. The inner optimizer then steps with
        released gradients, which is allowed.
        """
        if self._paused or self._context is None:
            return
        if id(optimizer) in self.guarded:
            self._released_ids.clear()  # the next gradients need a new release
            return
        host = self._context.host
        trained = {id(p) for p in self._context.root.parameters() if p.requires_grad}
        used = [p for p in _update_parameters(optimizer) if p.grad is not None and id(p) in trained]
        if any(id(p) not in self._released_ids for p in used):
            raise DefenseError(
                f"{self.owner}: a {type(optimizer).__name__} that {host.name} does not know "
                f"stepped with gradients that were not defended. {host.mend}"
            )

    def _current_context(self) -> DefenseContext:
        """Return the context with the number of the current step.

        Raises:
            DefenseError: No fit is open.
        """
        if self._context is None:
            raise DefenseError(f"{self.owner}: nothing was released: train within a fit")
        return dataclasses.replace(self._context, step=self._context.host.step)

    def _tap(self, stage: Stage, optimizer: Optimizer) -> None:
        """Call all taps for a stage."""
        for fn in tuple(self._taps.values()):
            fn(stage, optimizer)


def release_of(optimizer: Optimizer) -> UpdateRelease | None:
    """Return the release that guards an optimizer, or None if it is not guarded."""
    return _RELEASES.get(optimizer)


def _register(functions: OrderedDict[int, Function], fn: Function) -> Callable[[], None]:
    """Add a function; return a function that removes it, which may be called twice."""
    handle = RemovableHandle(functions)
    functions[handle.id] = fn
    return handle.remove


def _defenses_with_hook(hook: str, defenses: Sequence[Defense]) -> list[Defense]:
    """Return the defences that override a hook, whose default does nothing."""
    default = getattr(Defense, hook)
    return [d for d in defenses if getattr(getattr(d, hook), "__func__", None) is not default]


def _check_returned(defense: Defense, hook: str, value: Any) -> Any:
    """Return the value that a hook returned.

    Raises:
        DefenseError: The value is None, which a hook without a return statement returns.
    """
    if value is None:
        raise DefenseError(
            f"{type(defense).__name__}.{hook} must return its argument, or what takes its place"
        )
    return value


def _update_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer may change, in its order."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad or parameter.grad is not None
    ]


def _average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average every gradient over all ranks in place; a gradient that is None counts as zero.

    Raises:
        DefenseError: A gradient is sparse.
    """
    gradients, works, buffers = [], [], []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout != torch.strided:
            raise DefenseError("build embeddings with sparse=False to average their gradients")
        buffer = parameter.grad.contiguous()  # all_reduce requires it
        gradients.append(parameter.grad)
        buffers.append(buffer)
        works.append(dist.all_reduce(buffer, async_op=True))
    for gradient, buffer, work in zip(gradients, buffers, works, strict=True):
        if work is not None:
            work.wait()
        buffer.div_(dist.get_world_size())
        if buffer is not gradient:
            gradient.copy_(buffer)

"""The stages between a client's gradient and its optimizer: local, shared, aggregate."""

from __future__ import annotations

import dataclasses
import functools
import os
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

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError
from lightning_fedleak.defenses.checks import check_choice
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import before_real_step

Client = Literal["rank", "world"]
Tap = Callable[[Stage, Optimizer], None]
CanaryHook = Callable[[Defense, Sequence[nn.Parameter], DefenseContext], None]
Function = TypeVar("Function")
_GUARDED: WeakKeyDictionary[Optimizer, UpdateRelease] = WeakKeyDictionary()


class UpdateRelease:
    """The defences and taps of a run, and the moment in which an update leaves the client.

    Args:
        defenses: in the order in which they act.
        client: who is a client.
        owner: the class that has them, for messages.

    Attributes:
        guarded: optimizers before whose update the release is, by id, and what removes it.

    Raises:
        DefenseError: an unknown ``client``, defences of one name, or a wrong order.
    """

    def __init__(self, defenses: Iterable[Defense], client: Client, owner: str) -> None:
        hint = "'rank' makes each process a client, 'world' all processes together one"
        check_choice(f"{owner}: client", client, get_args(Client), hint=hint)
        if isinstance(defenses, Defense) or not isinstance(defenses, Iterable):
            raise DefenseError(f"{owner}: defenses={defenses!r} must be a list, even of one: [...]")
        defenses = tuple(defenses)  # once: a generator would be empty the second time
        for defense in defenses:
            if not isinstance(defense, Defense) or not (defense.name and defense.guarantee):
                raise DefenseError(
                    f"{owner}: {defense!r} in `defenses` must be an instance of a Defense "
                    "with the class attributes `name` and `guarantee`"
                )
        names = [defense.name for defense in defenses]
        if len(set(names)) < len(names):
            raise DefenseError(
                f"{owner}: defenses named alike: {names}. A defence may be given once; "
                "two instances of one class need different `name`s."
            )
        self.owner, self.defenses = owner, defenses
        for place, defense in enumerate(self.defenses):
            defense.check_order(self.defenses[:place], self.defenses[place + 1 :])
        self.client: Client = client
        self.gradient_defenses = tuple(d for d in self.defenses if d.acts_on_gradients)
        # Per-sample defences first: what they put in place of an empty batch is then defended too.
        in_order = sorted(self.defenses, key=lambda d: not d.per_sample)
        self._of_batches = _overriding("on_batch", in_order)
        self._of_steps = _overriding("on_training_step", self.defenses[::-1])
        self._of_logical_batches = _overriding("on_logical_batch", self.defenses[::-1])
        self._of_releases = _overriding("before_release", self.defenses)
        self.separates_stages = True
        self.reduces = False
        self._paused = False
        self._context: DefenseContext | None = None
        self._step: Callable[[], int] | None = None
        self._taps: dict[object, Tap] = {}
        self._canaries: dict[object, CanaryHook] = {}
        self.guarded: dict[int, tuple[Optimizer, Callable[[], None]]] = {}
        self._watch: RemovableHandle | None = None
        self._just_released: set[int] = set()
        self._unreleased: list[tuple[nn.Parameter, int]] | None = None

    def add_tap(self, fn: Tap) -> Callable[[], None]:
        """Register ``fn``; return a function that removes it."""
        return _added(self._taps, fn)

    def add_canaries(self, fn: CanaryHook) -> Callable[[], None]:
        """Register ``fn``; return a function that removes it."""
        return _added(self._canaries, fn)

    @property
    def is_open(self) -> bool:
        """Return whether the defences know where they act."""
        return self._context is not None

    def open(self, context: DefenseContext, step: Callable[[], int]) -> None:
        """Set where the defences act; ``step`` returns the current optimizer step."""
        self._context, self._step = context, step
        self._unreleased = None
        if self.gradient_defenses:
            self._watch = register_optimizer_step_post_hook(self._stepped)

    def begin(self, *, fitting: bool = True) -> None:
        """Let every defence prepare the model; without a fit only those that act in inference."""
        context = self._now()
        for defense in self.defenses:
            if fitting or defense.acts_in_inference:
                defense.before_setup(context)

    def train_starts(self) -> None:
        """Call every defence right before training."""
        context = self._now()
        for defense in self.defenses:
            defense.on_train_start(context)

    def dataloader(self, dataloader: Any) -> Any:
        """Return the training loader that the defences make from one."""
        context = self._now()
        for defense in self.defenses:
            dataloader = _returned(
                defense, "on_dataloader", defense.on_dataloader(dataloader, context)
            )
        return dataloader

    def training_step(self, run: Callable[..., Any], batch: Any, *arguments: Any) -> Any:
        """Run ``run(batch, *arguments)`` on what the defences return, within their hooks."""
        if not self.defenses:
            return run(batch, *arguments)
        context = self._now()
        self._just_released.clear()
        if self.gradient_defenses and self._unreleased != []:
            self._check_unmoved(context)
        for defense in (d for d in self._of_batches if d.acts_on_batches):
            if isinstance(batch, Iterator):
                raise DefenseError(
                    f"{type(defense).__name__} replaces batches, but `training_step` takes an "
                    "iterator over them. Let it take `batch` and `batch_idx`."
                )
            batch = _returned(defense, "on_batch", defense.on_batch(batch, context))

        def step(rows: Any) -> Any:
            inner = functools.partial(run, rows, *arguments)
            for defense in self._of_steps:
                inner = functools.partial(defense.on_training_step, inner, rows, context)
            return inner()

        logical_step: Callable[[Any], Any] = step
        for defense in self._of_logical_batches:
            logical_step = functools.partial(
                defense.on_logical_batch, logical_step, context=context
            )
        return logical_step(batch)

    def guard(self, optimizer: Optimizer) -> None:
        """Put the release before the optimizer's update, once."""
        if id(optimizer) in self.guarded:
            return
        remove = before_real_step(optimizer, lambda: self._release(optimizer))
        self.guarded[id(optimizer)] = (optimizer, remove)
        _GUARDED[optimizer] = self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let steps of optimizers be no releases, such as a step that only creates state."""
        previous, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = previous

    def end(self) -> None:
        """Undo after a fit everything that was done since ``open``."""
        if self._context is None:
            return
        for optimizer, remove in self.guarded.values():
            remove()
            _GUARDED.pop(optimizer, None)
        self.guarded.clear()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        self._taps.clear()
        self._canaries.clear()
        self._context = self._step = None
        for defense in self.defenses:
            defense.teardown()

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return the defences' states by name."""
        return {defense.name: dict(defense.state_dict()) for defense in self.defenses}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each defence its state, an empty one where the checkpoint holds none."""
        missing = sorted(set(states) - {defense.name for defense in self.defenses})
        if missing:
            rank_zero_warn(
                f"the checkpoint was trained with the defences {missing}, which this run does not "
                "have: updates from here on leave without them."
            )
        if new := [defense.name for defense in self.defenses if defense.name not in states]:
            rank_zero_warn(
                f"the checkpoint was trained without the defences {new}: what was released before "
                "it is neither defended nor accounted by them."
            )
        for defense in self.defenses:
            defense.load_state_dict(states.get(defense.name, {}))

    def _release(self, optimizer: Optimizer) -> None:
        if self._paused:
            return
        for defense in self._of_releases:
            defense.before_release()
        self._unreleased = []
        if self.separates_stages:
            self._tap(Stage.LOCAL, optimizer)
            if self.gradient_defenses:
                context, parameters = self._now(), _released(optimizer)
                for defense in self.gradient_defenses:
                    for canary in tuple(self._canaries.values()):
                        canary(defense, parameters, context)
                    returned: object = defense.on_gradients(parameters, context)  # type: ignore[func-returns-value]
                    if returned is not None:
                        raise DefenseError(
                            f"{type(defense).__name__}.on_gradients returned "
                            f"{type(returned).__name__}, not None: let it rewrite `p.grad`. The "
                            "update was not released."
                        )
                self._just_released.update(map(id, parameters))
                self._tap(Stage.SHARED, optimizer)
                if self.reduces:
                    _average_gradients(parameters)
            else:
                self._tap(Stage.SHARED, optimizer)
        self._tap(Stage.AGGREGATE, optimizer)

    def _check_unmoved(self, context: DefenseContext) -> None:
        """Raise an error where weights change between batches before any release in this fit.

        Something writes the update into them without an optimizer. Weights of no optimizer may
        change while gradients wait for a step: an average of the others, for example.
        """
        if self._unreleased is None:
            self._unreleased = [
                (p, p._version)
                for p in context.root.parameters()
                if p.requires_grad and not isinstance(p, DTensor)
            ]
            return
        changed = {id(p) for p, version in self._unreleased if p._version != version}
        if not changed:
            return
        guarded = [p for optimizer, _ in self.guarded.values() for p in _released(optimizer)]
        waits = any(p.grad is not None for p in guarded) and changed.isdisjoint(map(id, guarded))
        if not waits:
            raise DefenseError(
                f"{self.owner}: the weights changed since the first batch, and no optimizer "
                f"stepped: what was written into them was not defended. {context.host.mend} "
                "(torch.optim.SGD does `weight -= lr * weight.grad`.)"
            )

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise an error for an optimizer that is not guarded: its update was not defended.

        An optimizer inside one that is guarded steps after the release.
        """
        if self._paused or self._context is None:
            return
        if id(optimizer) in self.guarded:
            self._just_released.clear()  # gradients that come from here on are new
            return
        host = self._context.host
        trained = {id(p) for p in self._context.root.parameters() if p.requires_grad}
        open_ = [p for p in _released(optimizer) if p.grad is not None and id(p) in trained]
        if any(id(p) not in self._just_released for p in open_):
            raise DefenseError(
                f"{self.owner}: a {type(optimizer).__name__} that {host.name} does not know "
                f"stepped with gradients that no defence has seen. {host.mend}"
            )

    def _now(self) -> DefenseContext:
        if self._context is None or self._step is None:
            raise DefenseError(
                "an optimizer stepped, or a batch came, outside of fit, where the defences are not "
                "set up: nothing was released."
            )
        return dataclasses.replace(self._context, step=self._step())

    def _tap(self, stage: Stage, optimizer: Optimizer) -> None:
        for fn in tuple(self._taps.values()):
            fn(stage, optimizer)


def one_client(
    root: nn.Module, host: Host, device: torch.device, precision: str, rank: int, processes: int
) -> DefenseContext:
    """Return the context of processes that are one client, with new entropy; a collective."""
    entropy = [os.urandom(32)]
    if processes > 1:
        dist.broadcast_object_list(entropy, device=device)
    return DefenseContext(root, 0, 1, device, precision, 0, entropy[0], rank, processes, host)


def release_of(optimizer: Optimizer) -> UpdateRelease | None:
    """Return where defences act before an optimizer's update; None where none do."""
    return _GUARDED.get(optimizer)


def _added(functions: dict[object, Function], fn: Function) -> Callable[[], None]:
    """Add a function; return one that removes it, and may be called twice."""
    key = object()
    functions[key] = fn

    def remove() -> None:
        functions.pop(key, None)

    return remove


def _overriding(hook: str, defenses: Sequence[Defense]) -> list[Defense]:
    """Return the defences that override a hook, the others of which do nothing in it."""
    default = getattr(Defense, hook)
    return [d for d in defenses if getattr(getattr(d, hook), "__func__", None) is not default]


def _returned(defense: Defense, hook: str, value: Any) -> Any:
    if value is None:
        raise DefenseError(
            f"{type(defense).__name__}.{hook} returned None; it must return what training "
            "continues with, which may be its argument"
        )
    return value


def _released(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters that are part of the update, in its order."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad or parameter.grad is not None
    ]


def _average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average every gradient over all ranks, in place; None counts as zero."""
    gradients, works, buffers = [], [], []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout != torch.strided:
            raise DefenseError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which "
                "cannot be averaged over clients. Build the embedding with sparse=False."
            )
        buffer = parameter.grad.contiguous()
        gradients.append(parameter.grad)
        buffers.append(buffer)
        works.append(dist.all_reduce(buffer, async_op=True))
    for gradient, buffer, work in zip(gradients, buffers, works, strict=True):
        if work is not None:
            work.wait()
        buffer.div_(dist.get_world_size())
        if buffer is not gradient:
            gradient.copy_(buffer)

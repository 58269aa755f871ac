"""Computes, checks, clips and sums the updates that clients share in a round of a federation.

An update is the difference of two states: the state that the server *sent* to a client, and the
state that the client *returned*. A state is a mapping from names to tensors. It holds a whole model
or only its trained parameters, for example the state of a PEFT adapter. No package for federated
learning is needed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_fedleak.model.snapshots import NotYet, Stage, UpdateSnapshot
from lightning_fedleak.model.taps import UpdateError as UpdateError
from lightning_fedleak.validate import check_integer

State = Mapping[str, Tensor]
"""Tensors by name, as in a ``state_dict``."""

Update = Mapping[str, Tensor]
"""Changes of trained parameters by name, as :func:`difference` returns them."""

C = TypeVar("C")  # the type of a client's name


def observe(
    sent: State,
    returned: State,
    optimizer: Optimizer,
    local_steps: int,
    *,
    trained: Collection[str] | None = None,
    learning_rate: float | None = None,
    round_: int = 0,
    stage: Stage = Stage.SHARED,
    fresh: bool = True,
    noise_std: float = 0.0,
) -> UpdateSnapshot:
    """Return the update of a client's round, as attacks read it.

    Args:
        sent: the state that the client got.
        returned: the state that it returned, with the same names, shapes and dtypes.
        optimizer: an optimizer of the class and with the settings that the server prescribed. The
            update is divided by its learning rate; it is never stepped.
        local_steps: the number of optimizer steps in the round.
        trained: the names of the trained tensors. All other tensors must be returned unchanged.
            None means all floating-point tensors.
        learning_rate: the mean learning rate over the local steps, if a schedule changes it within
            a round. None means the optimizer's learning rate.
        round_: the number of the round, from 0: the snapshot's ``step``.
        stage: the stage at which the update was observed, such as ``Stage.SHARED``.
        fresh: whether the optimizer began the round without state of earlier rounds.
        noise_std: the standard deviation of the noise that a defence is known to have added to each
            entry of ``returned``; 0 without noise.

    Returns:
        ``(sent - returned) / learning_rate`` by name, in float32, or float64 if sent in float64.

    Raises:
        UpdateError: no update can be read from the two states. The message says why.
        NotYet: the learning rate is 0, and nothing was changed.
    """
    check_integer("local_steps", local_steps, error=UpdateError)
    rate = _read_rate(optimizer) if learning_rate is None else float(learning_rate)
    change = difference(sent, returned, trained=trained)
    unchanged = not any(bool(t.any()) for t in change.values())
    if unchanged and rate == 0:
        raise NotYet("the learning rate is 0, so nothing was changed and nothing is shared")
    if not (rate > 0 and math.isfinite(rate)):
        raise UpdateError(
            f"an update cannot be divided by a learning rate of {rate}: it must be positive and "
            "finite, and if a step reports it, each step of the round must"
        )
    if unchanged:
        raise UpdateError(
            "the client returned exactly what it was sent: it trained nothing (no batch, a "
            "learning rate of 0, or returned before it was updated)"
        )
    tensors = {name: t.div_(-rate) for name, t in change.items()}
    return UpdateSnapshot(
        round_,
        stage,
        tensors,
        noise_std=noise_std / rate,
        local_steps=local_steps,
        learning_rate=rate,
        fresh=fresh,
    )


def difference(
    sent: State, returned: State, *, trained: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return ``returned - sent`` of the trained tensors, in float32, or float64 if sent in float64.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import difference
        >>> difference({"weight": torch.zeros(2)}, {"weight": torch.ones(2)})
        {'weight': tensor([1., 1.])}

    Args:
        sent: the state that the client got.
        returned: the state that it returned.
        trained: the names of the trained tensors, see :func:`observe`.

    Raises:
        UpdateError: names, shapes or dtypes differ, a tensor holds NaN or infinity, or a tensor
            that is not trained was changed.
    """
    if different := sorted(sent.keys() ^ returned.keys()):
        raise UpdateError(
            "the client must return what it was sent, under the same names: only one of both has "
            f"'{different[0]}'"
        )
    floats = (n for n, t in sent.items() if t.is_floating_point())
    trained_names = set(floats if trained is None else trained)
    change: dict[str, Tensor] = {}
    for name, before in sent.items():
        after = returned[name]
        if (after.shape, after.dtype) != (before.shape, before.dtype):
            raise UpdateError(
                f"'{name}' was sent with {_form(before)} and came back with {_form(after)}: return "
                "each tensor in the shape and dtype in which it was sent"
            )
        before, after = before.detach(), after.detach().to(before.device)
        if name not in trained_names:
            if not _is_equal(before, after):
                raise UpdateError(
                    f"'{name}' is not trained in this federation, and came back changed: do not "
                    "share it, or name it in trained="
                )
            continue
        dtype = torch.float64 if before.dtype == torch.float64 else torch.float32
        change[name] = after.to(dtype) - before.to(dtype)
        if not bool(change[name].isfinite().all()):
            source = "the client's update" if bool(before.isfinite().all()) else "the sent state"
            raise UpdateError(f"{source} holds NaN or infinity in '{name}'")
    return change


def moved(sent: State, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sum of a sent state and an update, each tensor in its sent dtype.

    Args:
        sent: the state that the client got.
        update: the update by name. Tensors of ``sent`` that it does not name are copied.

    Raises:
        UpdateError: a name of the update was not sent, or a tensor has another shape than the sent
            one, to which a sum would broadcast it, or is not floating-point as that one is.
    """
    for name, change in update.items():
        form = change.shape, change.is_floating_point()
        if name not in sent or form != (sent[name].shape, sent[name].is_floating_point()):
            raise UpdateError(f"the update has '{name}' with {_form(change)}, which was not sent")
    return {
        name: (before.detach() + update[name].to(before.device)).to(before.dtype)
        if name in update
        else before.detach().clone()
        for name, before in sent.items()
    }


def read_state(arrays: Mapping[str, object], before: State | None = None) -> dict[str, Tensor]:
    """Return the state that numpy or torch arrays hold.

    Args:
        arrays: the arrays by name: a state, or the difference of two states.
        before: the state from which the difference was taken; None if the arrays are a state.

    Raises:
        UpdateError: the difference does not fit ``before``, see :func:`moved`.
    """
    tensors = {name: torch.as_tensor(value) for name, value in arrays.items()}
    return tensors if before is None else moved(before, tensors)


def convert_like(state: State, arrays: Mapping[str, object]) -> dict[str, object]:
    """Return a state in torch if some of ``arrays`` are tensors, and in numpy otherwise."""
    if any(isinstance(value, Tensor) for value in arrays.values()):
        return dict(state)
    return {name: tensor.numpy() for name, tensor in state.items()}


def array_in(meta: Mapping[str, object]) -> str | None:
    """Return the name of the first value in a model's meta data that holds an array, or None."""
    names = (n for n, v in meta.items() if any(getattr(x, "ndim", 0) for x in tree_leaves(v)))
    return next(names, None)


def joint_norm(update: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of all tensors together, summed in float64."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters that a client shares: the trained ones, tied ones only once.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import trained_state
        >>> list(trained_state(torch.nn.Linear(2, 3)))
        ['weight', 'bias']
    """
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def parameter_names(model: nn.Module) -> dict[str, str]:
    """Return a map from each name that a state dict may use to the parameter's name in ``model``.

    A state dict may use the names in ``model``, including all names of a tied parameter. For a PEFT
    model it may also use the names of the adapter's state (``get_peft_model_state_dict``), in which
    the adapter's name is left out.
    """
    first_names = {id(p): n for n, p in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {n: first_names[id(p)] for n, p in parameters.items()}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        adapters = getattr(module, "peft_config", None)
        if not isinstance(adapters, Mapping):
            continue
        for name, parameter in parameters.items():
            inner_name = name.removeprefix(prefix)
            for adapter in adapters:
                short = inner_name.replace(f".modules_to_save.{adapter}.", ".")
                short = re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", "", short)
                names.setdefault(short, first_names[id(parameter)])
    return names


@torch.no_grad()
def load_sent(model: nn.Module, names: Mapping[str, str], sent: State) -> dict[str, str]:
    """Load a sent state into a model, and return each parameter's name in the sent state.

    Args:
        model: the model. All of its trained parameters must be sent.
        names: the map from names in a state to the model's names, see :func:`parameter_names`.
        sent: the state that clients get.

    Returns:
        The names in ``sent`` by the parameters' names in ``model``.

    Raises:
        UpdateError: names or shapes differ from the model's, or its dtypes cannot hold the values.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    keys = {names[n]: n for n in sent if n in names}
    unknown = [n for n in sent if n not in names and n not in buffers]
    missing = [n for n, p in parameters.items() if p.requires_grad and n not in keys]
    if unknown or missing:
        raise UpdateError(
            f"the observer's {type(model).__name__} differs from the clients' models: "
            f"'{[*unknown, *missing][0]}' is {'sent' if unknown else 'trained'} and not "
            f"{'a parameter of it' if unknown else 'sent'}"
        )
    for name, tensor in sent.items():
        target = parameters[names[name]] if name in names else buffers[name]
        values = tensor.detach().to(target.device)
        if target.shape == tensor.shape:
            target.copy_(values)
        if target.shape != tensor.shape or not _is_equal(target.to(values.dtype), values):
            raise UpdateError(
                f"'{name}' is sent with {_form(tensor)}, which the observer's model, with "
                f"{_form(target)}, cannot hold"
            )
    return keys


def equal_states(a: State, b: State) -> bool:
    """Return whether two states hold the same names and values."""
    return a.keys() == b.keys() and all(
        t is b[n] or _is_equal(t.to(b[n].device), b[n]) for n, t in a.items()
    )


def _read_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of an optimizer, which must be the same in all groups."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise UpdateError(
            f"the optimizer has {len(rates)} learning rates, {sorted(rates)}: pass learning_rate="
        )
    return rates.pop()


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal if NaN counts as equal to NaN."""
    is_float = a.is_floating_point() and a.shape == b.shape
    return torch.equal(a, b) or (is_float and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _form(tensor: Tensor) -> str:
    """Return a tensor's shape and dtype, in words."""
    return f"shape {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def clipped(update: Update, clip: float, like: Update) -> dict[str, Tensor]:
    """Return an update in float64, clipped to a joint 2-norm of at most ``clip``.

    Args:
        update: the update by name.
        clip: the clip norm, which is positive.
        like: tensors with the names and shapes that the update must have.

    Raises:
        UpdateError: names or shapes differ, or the norm is not finite.
    """
    mismatches = sorted(update.keys() ^ like.keys())
    mismatches += [n for n, t in update.items() if n in like and t.shape != like[n].shape]
    if mismatches:
        raise UpdateError(f"'{mismatches[0]}' has another name or shape than the shared tensors")
    norm = joint_norm(update)
    if not math.isfinite(norm):
        raise UpdateError("the update holds NaN or infinity, or numbers whose squares overflow")
    # The margin of 1e-12 covers the rounding errors of the norm and of the products in float64.
    scale = 1.0 if norm <= clip * (1 - 1e-12) else clip / norm * (1 - 1e-12)
    return {n: update[n].detach().double() * scale for n in like}


@dataclass(frozen=True)
class Release:
    """The result of a round of client-level DP.

    Attributes:
        update: the noised mean of the clients' clipped updates, by name, in the dtype of ``like``.
        zeros: for each client whose update counted as zero, the reason. No noise hides these, so
            the trusted server must not publish them.
    """

    update: dict[str, Tensor]
    zeros: Mapping[Any, str]


class UpdateSum(Generic[C]):
    """Sums the clipped updates of a round, with one update at a time in memory.

    :meth:`~lightning_fedleak.federation.ClientDP.begin` makes it.

    Args:
        clients: the sampled clients of the round.
        like: tensors with the names, shapes and dtypes of the shared parameters.
        clip: the 2-norm to which each update is clipped.
        release: a function that returns the noised mean of the sum, and accounts for it.

    Attributes:
        total: the sum so far, by name, in float64.
        zeros: for each client whose update counts as zero so far, the reason. At first these are
            all clients.
    """

    def __init__(
        self,
        clients: Collection[C],
        like: Update,
        clip: float,
        release: Callable[[UpdateSum[C]], dict[str, Tensor]],
    ) -> None:
        self.clients, self.like, self.clip = frozenset(clients), like, clip
        self.total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in like.items()}
        self.zeros: dict[C, str] = dict.fromkeys(clients, "failed or withheld")
        self._awaited = set(clients)
        self._release = release

    def add(self, client: C, update: Update) -> None:
        """Clip and add the update of a client; an update that cannot be read counts as zero.

        Raises:
            UpdateError: the client was not sampled, or has sent an update before: two updates of a
                client would change the sum by twice the accounted sensitivity.
        """
        self._take_turn(client)
        try:
            clipped_update = clipped(update, self.clip, self.like)
        except UpdateError as error:
            self.zeros[client] = str(error)
            return
        del self.zeros[client]
        for name, tensor in clipped_update.items():
            self.total[name] += tensor.to(self.total[name].device)

    def add_returned(self, client: C, sent: State, returned: State) -> None:
        """Add the difference of a returned and a sent state; it is zero if it cannot be read.

        Raises:
            UpdateError: the same as in :meth:`add`.
        """
        try:
            update = difference(sent, returned, trained=self.like)
        except UpdateError as error:
            self._take_turn(client)
            self.zeros[client] = str(error)
        else:
            self.add(client, update)

    def _take_turn(self, client: C) -> None:
        if client not in self._awaited:
            raise UpdateError(
                f"an update came from client {client!r}, which was not sampled or sent one already"
            )
        self._awaited.remove(client)

    def end(self) -> Release:
        """Return the noised mean, which counts as one release.

        Raises:
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        return Release(self._release(self), self.zeros)

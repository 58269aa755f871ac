"""The taps that take gradients and weight changes of a training step.

Also the terms of a loss that come from parameters alone, as its autograd graph shows them. An L2
penalty in ``training_step``, AdaLoRA's orthogonality and FedProx's proximal term add to a gradient
what no batch did. An attack that takes all of it for the batch's reads it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.snapshots import (
    GradientSnapshot,
    NotYet,
    Stage,
    UpdateSnapshot,
    whole_tensor,
)

# Beginnings of operations that compare with targets, look words up, or normalise over classes: a
# term with one of them depends on the batch. Functions of one's own (fused losses, checkpointing,
# compiled code) hide what they hold, and count as the batch's too.
_OF_A_BATCH = (
    *("Nll", "LogSoftmax", "Softmax", "Embedding", "BinaryCrossEntropy", "CtcLoss"),
    *("ScaledDotProduct", "Mse", "SmoothL1", "Huber", "Kl"),
)
# Matrix products: of the batch where one side needs no gradient.
_PRODUCTS = ("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Mv", "Addmv", "Dot", "Convolution")
_SUMS = ("Add", "Sub", "Stack", "Cat")
_FACTORS = ("Mul", "Div")
_SHAPES = (
    *("Neg", "Sum", "Mean", "Clone", "View", "ReshapeAlias", "ToCopy", "Squeeze", "Unsqueeze"),
    *("Select", "Expand", "Alias"),
)


class GradientTap:
    """Reads the gradients of chosen parameters, and keeps a client's own where DDP overwrites it.

    Where ``p.grad`` holds a stage's gradient, :meth:`view` hands out views of it: no copy. A DDP
    process's own gradient is different: it exists only until DDP reduces it inside backward. Then
    :meth:`keep_local` copies it, while the tap is armed, into one buffer per parameter that is
    allocated once.

    Args:
        parameters: parameter by role. A tied matrix given under two roles is read once.
        tied: recorded in the snapshots.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, tied: bool = False) -> None:
        self._parameters = dict(parameters)
        self._tied = tied
        self._buffers: dict[int, Tensor] = {}
        self._kept: dict[int, float] = {}
        self._handles: list[RemovableHandle] = []
        self.armed = False

    def keep_local(self) -> None:
        """Copies each gradient as autograd accumulates it, before DDP's reduction, when armed.

        Under gradient accumulation the last copy is the sum over micro-batches, as it leaves.
        """
        for parameter in {id(p): p for p in self._parameters.values()}.values():
            handle = parameter.register_post_accumulate_grad_hook(self._keep)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _keep(self, parameter: Tensor) -> None:
        if not self.armed or parameter.grad is None:
            return
        grad = _dense(parameter.grad)
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            buffer = self._buffers[id(parameter)] = torch.empty_like(grad)
        buffer.copy_(grad)
        self._kept[id(parameter)] = 1.0

    def arm(self) -> None:
        """Starts a look: forgets what was kept and lets the hooks copy."""
        self._kept.clear()
        self.armed = True

    def disarm(self) -> None:
        """Ends a look: the hooks return at once."""
        self.armed = False

    def view(
        self,
        step: int,
        stage: Stage,
        *,
        kept: bool = False,
        client: int = 0,
        scale: float = 1.0,
    ) -> GradientSnapshot:
        """Views of the gradients as they are now.

        Args:
            step: optimizer step they lead to.
            stage: which stage they are at now; the caller knows.
            kept: read what :meth:`keep_local` copied in place of ``p.grad``.
            client: rank of the client.
            scale: loss scale still in the kept gradients (fp16's GradScaler); divided out.

        Returns:
            A snapshot without the roles that have no gradient.
        """
        tensors: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        for role, parameter in self._parameters.items():
            key = id(parameter)
            if key not in seen:
                if kept:
                    if key not in self._kept:
                        continue
                    seen[key] = self._buffers[key]
                    if self._kept[key] != scale:
                        seen[key].div_(scale / self._kept[key])
                        self._kept[key] = scale
                elif parameter.grad is not None:
                    seen[key] = _dense(parameter.grad)
                else:
                    continue
            tensors[role] = seen[key]
        return GradientSnapshot(step, stage, tensors, self._tied, client)

    def close(self) -> None:
        """Removes every hook and frees the buffers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers.clear()
        self._kept.clear()


class UpdateError(ValueError):
    """A weight change cannot be put in units of a gradient."""


class UpdateTap:
    """Takes the weight change of several local steps: what FedAvg clients share.

    Args:
        parameters: parameter by role.
        tied: recorded in the snapshots.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, tied: bool = False) -> None:
        self._parameters = dict(parameters)
        self._tied = tied
        self._before: dict[int, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Remembers the weights, in buffers that are allocated once."""
        for parameter in {id(p): p for p in self._parameters.values()}.values():
            value = _dense(parameter.detach())
            buffer = self._before.get(id(parameter))
            if buffer is None:
                self._before[id(parameter)] = value.clone()
            else:
                buffer.copy_(value)

    @torch.no_grad()
    def end(
        self, step: int, stage: Stage, *, learning_rate: float, local_steps: int, client: int = 0
    ) -> UpdateSnapshot:
        """``(before - after) / learning_rate``, computed in the buffers of :meth:`begin`.

        Raises:
            UpdateError: the learning rate is not positive.
            NotYet: it is 0 and nothing has moved.
        """
        if learning_rate == 0 and not any(
            bool(self._before[id(p)].ne(_dense(p.detach())).any())
            for p in self._parameters.values()
        ):
            raise NotYet("the learning rate is 0, so that nothing has moved and nothing is shared")
        if not learning_rate > 0:
            raise UpdateError(
                f"an update has no scale at learning rate {learning_rate}: it must be positive "
                "(a warm-up that starts at 0? start the round one step later)"
            )
        for parameter in {id(p): p for p in self._parameters.values()}.values():
            self._before[id(parameter)].sub_(_dense(parameter.detach())).div_(learning_rate)
        tensors = {role: self._before[id(p)] for role, p in self._parameters.items()}
        return UpdateSnapshot(
            step,
            stage,
            tensors,
            self._tied,
            client,
            local_steps=local_steps,
            learning_rate=learning_rate,
        )


class HeadOwnPart:
    """The head's own part of a tied matrix's gradient: a local diagnostic, the worst case.

    No adversary sees it: what is shared is the sum with the embedding's part. The head's forward
    is replaced by the same product on an alias of its weight, and a hook on the alias receives
    the gradient that autograd computes anyway: no extra product, bit-identical training.

    Args:
        head: the output head, an ``nn.Linear``.

    Raises:
        TypeError: the head is no plain ``nn.Linear``, or something else has replaced its forward.
    """

    def __init__(self, head: nn.Module) -> None:
        if type(head) is not nn.Linear:
            raise TypeError(
                "the head's own part can be taken from a plain nn.Linear only, not from "
                f"{type(head).__name__}"
            )
        if "forward" in vars(head):
            raise TypeError("the head's forward is replaced already; its own part cannot be taken")
        self._head: nn.Linear = head
        self._buffer: Tensor | None = None
        self._filled = False
        self.armed = False
        head.forward = self._forward  # type: ignore[method-assign,assignment]

    def _forward(self, hidden: Tensor) -> Tensor:
        weight: Tensor = self._head.weight
        if self.armed and torch.is_grad_enabled() and weight.requires_grad:
            weight = weight.view_as(weight)
            weight.register_hook(self._keep)  # type: ignore[no-untyped-call]
        return functional.linear(hidden, weight, self._head.bias)

    def _keep(self, grad: Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty_like(grad)
        if self._filled:
            self._buffer.add_(grad)
        else:
            self._buffer.copy_(grad)
            self._filled = True

    def arm(self) -> None:
        """Starts a look; micro-batches add up until :meth:`view`."""
        self._filled = False
        self.armed = True

    def disarm(self) -> None:
        """Ends a look."""
        self.armed = False

    def view(self, step: int, *, client: int = 0, scale: float = 1.0) -> GradientSnapshot:
        """The head's own gradient (V, d), stage local."""
        tensors = {}
        if self._filled and self._buffer is not None:
            if scale != 1.0:
                self._buffer.div_(scale)
            tensors["head.weight"] = self._buffer
        return GradientSnapshot(step, Stage.LOCAL, tensors, tied=False, client=client)

    def close(self) -> None:
        """Gives the head its own forward back."""
        self._head.__dict__.pop("forward", None)
        self._buffer = None


def _dense(tensor: Tensor) -> Tensor:
    """The whole tensor, also of a sparse one."""
    tensor = whole_tensor(tensor)
    return tensor.to_dense() if tensor.is_sparse else tensor


def loss_terms(loss: Tensor) -> set[int]:
    """Return ids of the parameters of which a loss has a term that depends on nothing else.

    Follows sums and constant factors from the loss down. What a sum adds up is a term of
    parameters alone if no operation below it reads a batch. Nothing is run.

    Args:
        loss: with a graph; before backward.

    Returns:
        ``id(p)`` of each. Not seen is a term inside of a function with a backward of its own.
    """
    parameters: set[int] = set()
    first = loss.grad_fn
    while first is not None and first.name() == "_DDPSinkBackward":  # hands on what it gets
        first = first.next_functions[loss.output_nr][0]
    if first is None:
        return parameters
    reads = _batch_readers(first)
    nodes, visited = [first], {first}
    while nodes:
        node = nodes.pop()
        if _times_zero(node):  # as some add all parameters, so that each has a gradient
            continue
        below = [n for n, _ in node.next_functions if n is not None and n not in visited]
        if not reads[node]:
            variable = getattr(node, "variable", None)
            parameters |= set() if variable is None else {id(variable)}
        elif node.name().startswith(_FACTORS):
            below = [n for n in below if reads[n]]
        elif not node.name().startswith(_SUMS + _SHAPES):
            continue
        visited.update(below)
        nodes.extend(below)
    return parameters


def _batch_readers(first: Node) -> dict[Node, bool]:
    """Return for each operation whether it or one below it reads a batch; none below one that does.

    Below one that surely does nothing is looked at.
    """
    reads: dict[Node, bool] = {}
    stack = [first]
    while stack:
        node = stack[-1]
        if node in reads:
            stack.pop()
            continue
        if _surely_reads_batch(node):
            reads[node] = True
            continue
        below = [n for n, _ in node.next_functions if n is not None]
        open_ones = [n for n in below if n not in reads]
        if open_ones:
            stack.extend(open_ones)
        else:
            reads[node] = any(reads[n] for n in below)
    return reads


def _times_zero(node: Node) -> bool:
    """Whether an operation multiplies by a constant 0."""
    if not node.name().startswith("Mul"):
        return False
    factors = (getattr(node, f"_saved_{side}", None) for side in ("self", "other"))
    return any(isinstance(x, Tensor) and x.dim() == 0 and not bool(x) for x in factors)


def _surely_reads_batch(node: Node) -> bool:
    name = node.name()
    if name.startswith(_OF_A_BATCH):
        return True
    if name.startswith(_PRODUCTS):
        return any(below is None for below, _ in node.next_functions)
    return not (name[-1].isdigit() or name.endswith("AccumulateGrad"))

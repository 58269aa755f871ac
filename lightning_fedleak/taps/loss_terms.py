"""Terms of a loss that come from parameters alone, as its autograd graph shows them.

An L2 penalty in ``training_step``, AdaLoRA's orthogonality and FedProx's proximal term add to the
gradient what no batch did. An attack that takes all of a gradient for the batch's reads it wrong.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

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


def _surely_reads_batch(node: Node) -> bool:
    name = node.name()
    if name.startswith(_OF_A_BATCH):
        return True
    if name.startswith(_PRODUCTS):
        return any(below is None for below, _ in node.next_functions)
    return not (name[-1].isdigit() or name.endswith("AccumulateGrad"))


__all__ = ["loss_terms"]

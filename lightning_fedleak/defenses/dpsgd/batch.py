"""A batch of DP-SGD: its loader, its samples, its number and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fedleak.defenses.base import DefenseContext, DefenseError


def on_device(batch: Any, context: DefenseContext) -> Any:
    """Return a batch on the device of this process, converted as the Trainer does."""
    trainer = trainer_of(context)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = context.root._on_before_batch_transfer(batch, dataloader_idx=0)  # type: ignore[operator]
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def check_loader(context: DefenseContext) -> None:
    """Raise a DefenseError where there are several training loaders at once."""
    loaders = len(tree_leaves(getattr(trainer_of(context), "train_dataloader", None)))
    if loaders > 1:
        raise DefenseError(
            f"DPSGD: {loaders} training loaders at once; an example is sampled from one. "
            "Return one DataLoader (torch.utils.data.ConcatDataset joins datasets)."
        )


def drawn_batch(context: DefenseContext, batch: Any) -> Any:
    """Return the number of a batch in the fit, or the batch itself without a Trainer."""
    epoch_loop = getattr(getattr(trainer_of(context), "fit_loop", None), "epoch_loop", None)
    progress = getattr(epoch_loop, "batch_progress", None)
    return batch if progress is None else int(progress.total.ready)


def same_draw(first: Any, second: Any) -> bool:
    """Return whether two results of :func:`drawn_batch` are of the same batch."""
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    return first is second


def overlap_warning(clients: int, trust: str) -> str:
    """Return the warning for several clients that may hold the same examples."""
    central = (
        " trust='central' also needs the same batch_size and noise on all of them."
        if trust == "central"
        else ""
    )
    return (
        f"DPSGD: {clients} clients, and no DistributedSampler splits the training data among them. "
        "The guarantee is for an example that one client alone holds: one that all of them hold "
        "is in every client's releases, and pays for each. Leave use_distributed_sampler=True, or "
        f"let each process load data of its own.{central}"
    )


def trainer_of(context: DefenseContext) -> Any:
    """Return the Trainer of the module that is trained, None where it has none."""
    return getattr(context.root, "_trainer", None)


def count_samples(batch: Any) -> int:
    """Return B, the first dimension of all tensors of a batch.

    Raises:
        DefenseError: they differ in it, or there are none.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    if len(sizes) != 1:
        content = "no tensors" if not sizes else f"tensors with first dimensions {sorted(sizes)}"
        raise DefenseError(
            f"DPSGD: the batch ({type(batch).__name__}) holds {content}, so its samples cannot be "
            "counted. Let it be a tensor, or a dict, list or tuple of tensors, each with the "
            "samples as its first dimension."
        )
    return int(sizes.pop())


def loss_with_graph(output: Any, samples: int) -> Tensor:
    """Return the loss in the output of ``training_step`` for a batch that is not empty.

    Raises:
        DefenseError: there is none, or it has no graph.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    returned = "a loss that needs no gradient" if isinstance(loss, Tensor) else "no loss"
    raise DefenseError(
        f"DPSGD: training_step returned {returned} for a batch of {samples} samples. If what a "
        "batch holds decides whether it counts, one sample can remove what all others add, which "
        "no clip bounds. Return a loss for every batch: filter the dataset instead, and let a "
        "sample without labels count as zero, as mean_of_sample_means does."
    )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch, in mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def sizes_of(dataloader: Any) -> tuple[int, int]:
    """Return the number of examples of all clients, and the batch size.

    Raises:
        DefenseError: not a DataLoader that can be sampled.
    """
    dataset, batch_size = (
        getattr(dataloader, "dataset", None),
        getattr(dataloader, "batch_size", None),
    )
    if dataset is None or not hasattr(dataset, "__len__") or not batch_size:
        raise DefenseError(
            f"DPSGD needs one DataLoader with batch_size and a dataset that has a length, got "
            f"{type(dataloader).__name__} with batch_size={batch_size}. Pass batch_size=... "
            "instead of batch_sampler=..."
        )
    return len(dataset), int(batch_size)

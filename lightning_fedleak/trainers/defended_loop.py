"""Defences in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.defenses.host import Host, rank_and_world_size
from lightning_fedleak.defenses.release import Client, UpdateRelease
from lightning_fedleak.engine import AUTOCAST
from lightning_fedleak.private_files import load_state, save_state
from lightning_fedleak.trainers.loop import (
    autocast_dtype,
    check_whole,
    precision_of,
    torch_optimizers,
)

DEFENSES = "defenses.safetensors"
"""File in a checkpoint with the states of the defences: releases and account, no secret."""


def save_defenses(release: UpdateRelease, folder: Path, rank: int) -> None:
    """Write the states of the defences into a checkpoint's folder, only in the first process."""
    if rank == 0:
        save_state(folder / DEFENSES, release.state_dict())


def load_defenses(release: UpdateRelease, folder: Path) -> None:
    """Load the states of the defences that :func:`save_defenses` wrote.

    Raises:
        DefenseError: the folder holds no states.
    """
    path = folder / DEFENSES
    if not path.exists():
        raise DefenseError(
            f"{release.owner}: {folder} has no {DEFENSES}, so what was released before it is not "
            "known. Go on from a whole checkpoint, or begin a new run from its weights."
        )
    release.load_state_dict(load_state(path))


class DefendedLoop(Host):
    """Lets defences act in a loop of one's own, before an update leaves the client.

    It yields the batches of one epoch each time that it is iterated over, by the loader that the
    defences make: under :class:`~lightning_fedleak.DPSGD` Poisson samples of the loader's data. No
    more batch comes once the budget is spent. ``loss(compute, batch)`` computes the loss of a batch
    within the defences, in pieces where DPSGD has ``max_physical_batch_size``. Everything else is
    the loop's: backward, ``step``, ``zero_grad``, schedulers. Under DPSGD each batch, also an empty
    one, has its step before the next is asked for. What a step's places are is as under
    :class:`~lightning_fedleak.DefendedStrategy`; processes of DistributedDataParallel are one
    client (``client="world"`` there).

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import DPSGD
        >>> from lightning_fedleak.trainers import DefendedLoop
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1)).train()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> loader = torch.utils.data.DataLoader(rows, batch_size=4)
        >>> dp = DPSGD(max_grad_norm=1.0, target_epsilon=8, target_delta=1e-2)
        >>> with DefendedLoop(model, optimizer, loader, [dp], epochs=3) as private:
        ...     for _ in range(3):
        ...         for batch in private:
        ...             private.loss(lambda rows: model(**rows).loss, batch).backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        >>> dp.releases, dp.privacy.epsilon <= 8
        (6, True)

    Args:
        model: the model that the loop trains, in train mode; under DDP the wrapped model.
        optimizer: the optimizer or the optimizers, also as Accelerate has prepared them.
        loader: the loader of the training data, as torch makes it: Accelerate must not have
            prepared it.
        defenses: the defences, in the order in which they act.
        epochs: the number of epochs of the loop, those of the runs that it resumes included.
        steps: the number of optimizer steps of the loop, in place of ``epochs``.
            ``target_epsilon`` needs one of the two.
        precision: ``"bf16-mixed"`` if the loss is computed under autocast. The default is the
            precision of the weights.

    Raises:
        DefenseError: the defences do not fit each other. When the loop begins also: no guarantee
            can hold under the model, the optimizer or the loader. In the loop also: a batch is
            taken before the last one was released and its gradients set to None, or is taken twice.
    """

    name = "DefendedLoop"
    mend = "Pass it to DefendedLoop, alone or in a list."
    steps_by = "epochs= or steps="

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: Any,
        defenses: Sequence[Defense],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        precision: str | None = None,
    ) -> None:
        client: Client = "rank" if rank_and_world_size()[1] == 1 else "world"
        self._fedleak = UpdateRelease(defenses, client, self.name)
        self.model, self._loader = model, loader
        self._root = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = torch_optimizers(optimizer)
        self._epochs, self._planned = epochs, steps
        self._precision = precision or precision_of(None, self._root)
        self._device = next(model.parameters()).device
        self._samples = any(defense.per_sample for defense in self._fedleak.defenses)
        self.batch_number: int = 0
        self.should_stop = self._waiting = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> DefendedLoop:
        """Let the defences prepare model, loader and optimizers."""
        self._fedleak.end()
        self._waiting = False
        check_whole(self._root, self.name, error=DefenseError)
        if self._fedleak.client == "world" and self.reducer is None:
            raise DefenseError(
                "DefendedLoop: several processes are one client, and nothing reduces their "
                "gradients. Wrap the model in DistributedDataParallel."
            )
        try:
            self._fedleak.open(self, self._root, self._device, self._precision, None)
            self._fedleak.begin()
            self._batches = self._fedleak.dataloader(self._loader)
            for optimizer in self.optimizers:
                self._fedleak.guard(optimizer)
            self._fedleak.train_starts()
        except BaseException:
            self._fedleak.end()
            raise
        leaf = next(m for m in self._root.modules() if not [*m.children()])
        self._handles = [
            leaf.register_forward_pre_hook(self._check_autocast),
            self.optimizers[0].register_step_post_hook(self._stepped),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Undo what the defences changed."""
        while self._handles:
            self._handles.pop().remove()
        self._fedleak.end()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, until the budget is spent.

        Raises:
            DefenseError: examples are accounted, and the batch before was not released.
        """
        for batch in takewhile(lambda _: not self.should_stop, self._batches):
            self._check_released()
            self.batch_number += 1
            self._waiting = self._samples
            yield self.to_device(batch)
        self._check_released()

    def loss(self, compute: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return the loss of a batch, computed within the defences.

        Args:
            compute: a function that takes the batch, or rows of it, and returns their loss: the
                forward pass.
            batch: the batch that this loop has yielded.

        Raises:
            DefenseError: gradients of the last step are still there, autocast is not declared, or
                no batch waits for its release.
        """
        has_gradients = any(p.grad is not None for p in self._root.parameters())
        if self._samples and (has_gradients or not self._waiting):
            raise DefenseError(
                "DefendedLoop: gradients are there before backward, or this batch was released "
                "already, or did not come from this loop. Iterate over the DefendedLoop, and take "
                "one loss, one optimizer.step() and zero_grad(set_to_none=True) for each batch; "
                "for accumulation there is max_physical_batch_size."
            )
        loss: Tensor = self._fedleak.training_step(compute, batch)
        return loss

    def save(self, folder: str | Path) -> None:
        """Write the states of the defences into a checkpoint's folder, in the first process."""
        save_defenses(self._fedleak, Path(folder), rank_and_world_size()[0])

    def restore(self, folder: str | Path) -> None:
        """Load the states that :meth:`save` wrote. Call it before ``with``.

        Raises:
            DefenseError: the folder holds no states.
        """
        load_defenses(self._fedleak, Path(folder))

    def count_steps(self, per_epoch: int) -> int | None:
        """Return ``steps``, or those of ``epochs``."""
        steps = None if self._epochs is None else self._epochs * per_epoch
        return self._planned or steps

    def stop(self) -> None:
        """Yield no more batch."""
        self.should_stop = True

    def to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the model's device."""
        return tree_map(lambda v: v.to(self._device) if hasattr(v, "to") else v, batch)

    def _check_released(self) -> None:
        if self._waiting:
            raise DefenseError(
                "DefendedLoop: the batch before was not released. Call loss, backward and "
                "optimizer.step() for each batch before the next, also for an empty one: skip and "
                "collect none. For accumulation there is max_physical_batch_size."
            )

    def _stepped(self, *_: object) -> None:
        self.step += 1
        self._waiting = False

    def _check_autocast(self, *_: object) -> None:
        dtype = autocast_dtype(self._device)
        if dtype not in (None, AUTOCAST.get(self._precision)):
            raise DefenseError(
                f"DefendedLoop: the model runs under autocast to {dtype}, and precision is "
                f"{self._precision!r}. Pass precision='bf16-mixed' with bfloat16."
            )

"""Lets defences act in the user's own training loop: :class:`DefendedLoop`.

It makes the loader and computes each loss within the defences. Under a per-sample defence (DPSGD)
it also checks that each batch has exactly one optimizer step. A *release* is an update that leaves
the client: the result of one optimizer step. :func:`save_defenses` and :func:`load_defenses` keep
the states of the defences in a checkpoint, for this loop and for a defended Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.defenses.host import Host, rank_and_world_size
from lightning_fedleak.defenses.release import Client, UpdateRelease
from lightning_fedleak.model.model_state import Hook
from lightning_fedleak.private_files import load_state, save_state
from lightning_fedleak.trainers import loop

DEFENSES = "defenses.safetensors"
"""The file in a checkpoint with the states of the defences: the privacy account, no secret."""


_ONE_STEP = (
    "DefendedLoop: gradients are there before backward, or a batch is of another loop, or was not "
    "released once before the next. For each batch of this loop, even an empty one, call one loss, "
    "backward, optimizer.step() and zero_grad(set_to_none=True). To accumulate gradients, use "
    "DPSGD(max_physical_batch_size=...)."
)


def save_defenses(release: UpdateRelease, folder: Path, rank: int) -> None:
    """Write the states of the defences into a checkpoint's folder, if this process has rank 0."""
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
            f"{release.owner}: {folder} has no {DEFENSES}, so the privacy spent before it is "
            "unknown. Resume from a checkpoint with this file, or begin a new run from its weights."
        )
    release.load_state_dict(load_state(path))


class DefendedLoop(Host):
    """Lets defences act in the user's own training loop, before an update leaves the client.

    Each iteration over this object yields the batches of one epoch, from the loader that the
    defences make. Under :class:`~lightning_fedleak.DPSGD` they are Poisson samples of the loader's
    data. Once the privacy budget is spent, no further batch is yielded. ``loss(compute, batch)``
    computes the loss of a batch within the defences, in pieces if DPSGD has
    ``max_physical_batch_size``. The loop itself calls backward, ``step``, ``zero_grad`` and the
    schedulers. Under DPSGD it must do so for each batch before it takes the next one, even if the
    batch is empty. In each step the defences act at the same stages as in
    :class:`~lightning_fedleak.DefendedStrategy`. The processes of DistributedDataParallel are one
    client (``client="world"`` of that strategy).

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
        model: the model that the loop trains, in train mode; with DistributedDataParallel, the
            wrapped model.
        optimizer: the optimizer, or the optimizers, of which DPSGD takes one. Accelerate may have
            prepared them.
        loader: the torch loader of the training data. Accelerate must not have prepared it.
        defenses: the defences, in the order in which they act.
        epochs: the number of epochs of the loop, including those of the runs that it resumes.
        steps: the number of optimizer steps of the loop, in place of ``epochs``.
            ``target_epsilon`` of DPSGD needs one of the two.
        precision: ``"bf16-mixed"`` if the loss is computed under autocast. The default is the
            precision of the weights.

    Raises:
        DefenseError: the defences do not fit each other. When the loop begins also: the model, the
            optimizer or the loader breaks their guarantee. Under DPSGD also: the next batch is
            taken, or its loss computed, before the previous batch had its optimizer step and its
            gradients were set to None, or a batch is used twice.
    """

    # Parts of the messages of defences: the host, what to do with an undefended optimizer, and the
    # arguments that determine the number of steps.
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
        self._release = UpdateRelease(defenses, client, self.name)
        self.model, self._loader = model, loader
        self._root = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = loop.torch_optimizers(optimizer)
        self._epochs, self._planned_steps = epochs, steps
        self._precision = precision or loop.precision_of(None, self._root)
        self._device = next(model.parameters()).device
        self._per_sample = any(defense.per_sample for defense in self._release.defenses)
        if self._per_sample and len(self.optimizers) > 1:
            raise DefenseError(
                "DefendedLoop: DPSGD clips an example's gradient as a whole, and releases a batch "
                "once: pass one optimizer, with parameter groups"
            )
        self.batch_number: int = 0
        self.should_stop = self._awaits_step = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> DefendedLoop:
        """Let the defences prepare model, loader and optimizers.

        A loop that has stopped, because the budget was spent, yields no batch after this either.
        """
        self._release.end()  # of an earlier `with` that an error may have left open
        self._awaits_step = False
        loop.check_whole(self._root, self.name, error=DefenseError)
        if self._release.client == "world" and self.reducer is None:
            raise DefenseError(
                "DefendedLoop: several processes train one client's model, but nothing averages "
                "their gradients. Wrap the model in DistributedDataParallel."
            )
        try:
            self._release.open(self, self._root, self._device, self._precision, None)
            self._release.begin()
            self._batches = self._release.dataloader(self._loader)
            for optimizer in self.optimizers:
                self._release.guard(optimizer)
            self._release.train_starts()
        except BaseException:
            self._release.end()
            raise
        # Any module without children runs within the user's autocast. The first optimizer alone
        # counts steps: each batch is one step of every optimizer.
        leaf = next(m for m in self._root.modules() if not [*m.children()])
        self._handles = [
            leaf.register_forward_pre_hook(Hook(self._check_autocast)),
            self.optimizers[0].register_step_post_hook(self._record_step),
        ]
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Let the defences check the weights, and undo what they changed."""
        while self._handles:
            self._handles.pop().remove()
        try:
            if error is None:
                self._release.train_ends()
        finally:
            self._release.end()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, until the budget is spent.

        Raises:
            DefenseError: DPSGD acts, and the previous batch had no optimizer step.
        """
        for batch in takewhile(lambda _: not self.should_stop, self._batches):
            self._check_released()
            self.batch_number += 1
            self._awaits_step = self._per_sample
            yield self.to_device(batch)
        self._check_released()

    def loss(self, compute: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return the loss of a batch, computed within the defences.

        Args:
            compute: a function that runs the forward pass on the batch, or on some of its rows, and
                returns their loss.
            batch: the batch that this loop has yielded.

        Raises:
            DefenseError: the model runs under an autocast that ``precision`` does not name. Under
                DPSGD also: gradients of the last step are still there, or the batch had its step
                already.
        """
        has_gradients = any(p.grad is not None for p in self._root.parameters())
        if self._per_sample and (has_gradients or not self._awaits_step):
            raise DefenseError(_ONE_STEP)
        loss: Tensor = self._release.training_step(compute, batch)
        return loss

    def save(self, folder: str | Path) -> None:
        """Write the states of the defences into a checkpoint's folder, in the first process."""
        save_defenses(self._release, Path(folder), rank_and_world_size()[0])

    def restore(self, folder: str | Path) -> None:
        """Load the states that :meth:`save` wrote. Call it before ``with``.

        Raises:
            DefenseError: the folder holds no states.
        """
        load_defenses(self._release, Path(folder))

    def count_steps(self, per_epoch: int) -> int | None:
        """Return the number of optimizer steps, for the defences: ``steps``, or that of ``epochs``.

        Args:
            per_epoch: the number of steps in an epoch.
        """
        steps = None if self._epochs is None else self._epochs * per_epoch
        return self._planned_steps or steps

    def stop(self) -> None:
        """Let the loop yield no further batch; DPSGD calls this when its budget is spent."""
        self.should_stop = True

    def to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the model's device; the defences call this too."""
        return tree_map(lambda v: v.to(self._device) if hasattr(v, "to") else v, batch)

    def _check_released(self) -> None:
        """Raise an error if the previous batch had no optimizer step."""
        if self._awaits_step:
            raise DefenseError(_ONE_STEP)

    def _record_step(self, *_: object) -> None:
        """Count an optimizer step, which released the current batch."""
        self.step += 1
        self._awaits_step = False

    def _check_autocast(self, *_: object) -> None:
        """Raise an error if the forward pass runs under an autocast other than ``precision``."""
        if torch.is_autocast_enabled(self._device.type):
            loop.check_autocast(self.name, self._device, self._precision, DefenseError)

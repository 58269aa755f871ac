"""What DP-SGD looks at in each training step: whether each sample's gradient is its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd_checks import check_loader, drawn_batch, same_draw
from lightning_fedleak.defenses.loss_checks import (
    FormCheck,
    check_isolation,
    outputs_of,
    under_ddp,
)
from lightning_fedleak.defenses.recorder import Call, Layout, Recorder
from lightning_fedleak.defenses.shards import unshard, whole_layers
from lightning_fedleak.defenses.team import Team

CHECK_EVERY = 100
"""After the first, every so many releases are checked for what is cheap but not free to check."""

Kind = tuple[frozenset[tuple[str, Layout]], frozenset[tuple[str, str]]]
"""How layers were used in a step, and the operations of its loss."""


class DrawnBatches:
    """Sees to it that every batch is released once, by itself.

    Args:
        poisson: batches are Poisson samples, so that one must not be released twice.
    """

    def __init__(self, poisson: bool) -> None:
        self._poisson = poisson
        self._drawn: Any = None
        self._released: Any = None
        self._waiting = 0

    def begin(self, batch: Any, context: DefenseContext) -> None:
        """A batch comes.

        Raises:
            DefenseError: it was released already, or the one before it was not.
        """
        check_loader(context)
        self._drawn = drawn_batch(context, batch)
        if self._poisson and self._released is not None and same_draw(self._drawn, self._released):
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Every release is accounted as a Poisson "
                "sample of its own. Take one optimizer step on each batch, or pass poisson=False: "
                "then each example is accounted as if it were in all of them."
            )
        self._waiting += 1
        if self._waiting > 1:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released (gradient accumulation, "
                "by a callback perhaps). Let every batch have its own optimizer step."
            )

    def released(self) -> None:
        """It has left the client."""
        self._released, self._waiting = self._drawn, 0


class LossCheck:
    """Looks at the loss: its form in every step, the rest where something is new, and at times.

    Args:
        trusted: the user has proved that the loss is a mean of per-sample means.

    Attributes:
        unchecked: something in the step since the last release was new.
    """

    def __init__(self, trusted: bool) -> None:
        self.unchecked = False
        self._trusted = trusted
        self._form = FormCheck()
        self._top: list[Call] = []
        self._separate = False
        self._seen: set[Kind] = set()
        self._looked = 0

    def is_due(self, releases: int) -> bool:
        """Whether the next release is to be checked for what is not checked in all of them."""
        return self.unchecked or releases % CHECK_EVERY == 0

    def check_form(self, loss: Tensor, recorder: Recorder) -> None:
        """Looks from the loss down to the layers.

        Args:
            loss: scalar with a graph.
            recorder: holds the calls of this step's layers.

        Raises:
            DefenseError: it is not known to be a mean of per-sample means.
        """
        if self._trusted:
            self._top, self._separate = outputs_of(loss, recorder.calls), True
        else:
            self._top = self._form(loss, recorder.calls, recorder.samples)
            self._separate = self._form.separate

    def look(
        self, loss: Tensor, recorder: Recorder, releases: int, team: Team, *, counts: bool = True
    ) -> None:
        """Looks at the network, and at the loss where its form leaves it open, if it is time to.

        All processes of the client look where one of them has to, because backward may be a
        collective.

        Args:
            loss: as in :meth:`check_form`, which comes before.
            recorder: the same.
            releases: how many were made.
            team: the processes of this client.
            counts: whether this process has samples of its own.

        Raises:
            DefenseError: samples are mixed.
        """
        layouts = frozenset((call.name, call.layout) for call in recorder.calls if call.trained)
        kind = layouts, self._form.form
        new = counts and (kind not in self._seen or releases >= self._looked + CHECK_EVERY)
        due = new and recorder.samples > 1
        new, due, joint = map(bool, team.largest([new, due, not self._separate]))
        self.unchecked = self.unchecked or new
        top, self._top = self._top, []
        if not due:
            return
        with team.together(), recorder.looking():
            seen = check_isolation(
                under_ddp(loss),
                top,
                recorder.calls,
                recorder.samples,
                separate=not joint,
                # FSDP2 shards them after any backward, and not all of them know of the next one.
                restore=functools.partial(unshard, whole_layers(recorder.root)),
            )
        if recorder.samples == 1 or seen:
            self._looked = releases
        if recorder.samples > 1 and seen:
            self._seen.add(kind)


def zero_on_the_graph(root: nn.Module) -> Tensor:
    """What an empty batch has for a loss."""
    parameter = next(p for p in root.parameters() if p.requires_grad)
    return parameter.flatten()[:1].sum() * 0.0


def times_zero(output: Any) -> Any:
    """What ``training_step`` gave, with a loss of zero on the same graph."""
    if isinstance(output, Mapping):
        return {**output, "loss": output["loss"] * 0.0}
    return output * 0.0


__all__ = ["DrawnBatches", "LossCheck", "times_zero", "zero_on_the_graph"]

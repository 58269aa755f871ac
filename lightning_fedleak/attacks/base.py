"""What an attack is: a snapshot (and what this adversary knows) in, a guess out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.snapshots import Observation
from lightning_fedleak.snapshots import UnusableObservation as UnusableObservation
from lightning_fedleak.threats import ThreatModel

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Kinds of devices that have no float64: Apple's GPUs."""


@dataclass(frozen=True)
class Surfaces:
    """What an attack reads.

    Attributes:
        gradients: roles (``"head.weight"``, ``"head.bias"``, ``"embedding.weight"``) or parameter
            names whose gradient it reads.
        layers: names of blocks whose output activations it reads.
    """

    gradients: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guess:
    """What an attack says."""


@dataclass(frozen=True)
class WordGuess(Guess):
    """Word types that an attack says were in the batch.

    Attributes:
        types: (k,) distinct token ids, best first where scores exist.
        scores: (V,) higher is more likely used, or None where the attack only decides.
        n_types: the attack's own estimate of the number of types, or None where it makes none.
        surface: ``"output"`` for words predicted (labels), ``"input"`` for words read.
        certified: whether the adversary can tell by itself that no type is missing; None where the
            attack makes no certificate.
        capacity: how many types the attack could have told apart; None where it cannot say.
    """

    types: Tensor
    scores: Tensor | None = None
    n_types: float | None = None
    surface: str = "output"
    certified: bool | None = None
    capacity: float | None = None


@dataclass(frozen=True)
class Query:
    """Targets that a game hands to an attack (candidate texts of a membership game).

    Attributes:
        input_ids: (G, L) one target sentence a row.
        attention_mask: (G, L), 0 where padded, or None.
        positions: (G,) which token of each sentence is asked for; None leaves it to the attack.
        labels: (G, L) of a causal model, -100 where the loss looks away; None: it looks at all.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    positions: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class RunFacts:
    """What an adversary knows of the run that it attacks, besides what it sees.

    A server that prescribes the training knows all of it.

    Attributes:
        precision: in the Trainer's words (``"bf16-mixed"``); None where it is not known.
        autocast: dtype that the client's forward is cast to; None without autocast.
        optimizer: class of the one that owns what the attack reads; None where none does.
        optimizer_settings: of that optimizer, plain values.
        local_steps: optimizer steps whose weight change is shared; None where single gradients are.
        defended: what the run's defences rewrite.
        step: optimizer step that the fit begins at; not 0 where it was resumed.
        clip_value: size that entries of a step's gradient are cut to before it is shared; None
            where they are not cut, or it is not known.
    """

    precision: str | None = None
    autocast: torch.dtype | None = None
    optimizer: str | None = None
    optimizer_settings: Mapping[str, object] = field(default_factory=dict)
    local_steps: int | None = None
    defended: frozenset[Literal["gradients", "batches", "activations"]] = frozenset()
    step: int = 0
    clip_value: float | None = None


class Attack(ABC):
    """An adversary. Subclasses set ``threat_model`` and implement ``needs`` and ``run``.

    ``prepare`` may compute on the model before training starts, ``refresh`` when the weights have
    moved; both run without gradients reaching the model and leave no trace on it. ``run`` uses no
    global random numbers and works on the device of the observation.

    Args:
        name: the instance's name in the logs; two alike on one monitor are refused.
    """

    threat_model: ClassVar[ThreatModel]
    default_name: ClassVar[str]
    reads_adaptive_updates: ClassVar[bool] = False
    """Whether it reads weight changes that are no sums of gradients, as Adam's are, or says why it
    does not; else there is no result where such are shared."""
    removes_loss_terms: ClassVar[bool] = False
    """Whether it takes off what a loss term of a parameter alone adds to its gradient
    (``snapshot.loss_terms``), or says why it cannot; else there is no result behind one."""
    reads_clipped: ClassVar[bool] = False
    """Whether it reads gradients whose entries clipping by value has cut to one size, or says why
    it does not; else there is no result where such are shared."""
    restores_fully: ClassVar[bool] = True
    """Whether :meth:`state_dict` holds all that :meth:`prepare` finds, so that it need not run."""

    needs_float64: ClassVar[bool] = False
    """Whether it computes in float64 where the model lies, which Apple's GPUs do not do."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.default_name

    def check_device(self, anatomy: Anatomy) -> None:
        """Refuses a device that cannot compute what this attack does, before :meth:`prepare`.

        Raises:
            ValueError: says which device, and what to do.
        """
        kind = anatomy.device.type
        if self.needs_float64 and kind in WITHOUT_FLOAT64:
            raise ValueError(
                f"attack '{self.name}' computes in float64, which the device '{kind}' does not "
                "have: put the model on the CPU (Trainer(accelerator='cpu')), or leave this attack "
                "out"
            )

    def meet(self, facts: RunFacts) -> None:  # noqa: B027
        """Learns about the run, before :meth:`prepare` and whenever the facts change.

        Default: nothing.
        """

    def check_updates(self, facts: RunFacts) -> None:  # noqa: B027
        """Refuses rounds of local steps of which it can read no update, whatever is in it.

        Args:
            facts: of the run; with its local steps, and the optimizer's settings.

        Raises:
            UnusableObservation: says what to change; :class:`Inapplicable` where the method is not
                made for such updates.
        """

    @abstractmethod
    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Which gradients and activations this attack reads from this model."""

    def prepare(self, anatomy: Anatomy) -> None:  # noqa: B027
        """Calibrates on what the adversary knows (public text, the model). Default: nothing."""

    def estimate(self, anatomy: Anatomy, texts: int) -> float | None:
        """Seconds that a look will take, known before :meth:`prepare`; None: it has to be tried.

        Args:
            anatomy: the model.
            texts: that a membership attack is asked for.
        """
        return None

    def refresh(self, anatomy: Anatomy, step: int) -> None:  # noqa: B027
        """Follows a model that has moved. Default: nothing."""

    @abstractmethod
    def run(self, view: Observation, query: Query | None = None) -> Guess:
        """Attacks one observation.

        Raises:
            UnusableObservation: the snapshot is non-finite or all zero.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that must survive a checkpoint (a calibration, say). Default: none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes back what ``state_dict`` gave."""

    def calibration_inputs(self) -> dict[str, object] | None:
        """All that a calibration hangs on besides the model, as plain values.

        What is known by these and the model's weights may be kept on disk for another fit.
        Default: None, it is made anew in each.
        """
        return None

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports: plain numbers and strings."""
        return {}

    def arguments(self) -> dict[str, object]:
        """Those of :meth:`config` that were given, which a saved state must have been made with.

        Default: all. An attack whose ``config`` tells what was measured leaves that out.
        """
        return self.config()

    def fingerprint(self) -> str:
        """What a saved state must have been made with, as one string."""
        return repr(sorted(self.arguments().items()))

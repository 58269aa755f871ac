"""The interface of attacks: from a snapshot, and what the adversary knows, to a guess.

It hands on what every attack needs besides: its adversary's threat model and the observation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.compression import Compression
from lightning_fedleak.model.snapshots import Observation as Observation
from lightning_fedleak.model.snapshots import UnusableObservation as UnusableObservation
from lightning_fedleak.model.snapshots import check_finite
from lightning_fedleak.threats import Capability as Capability
from lightning_fedleak.threats import ThreatModel as ThreatModel

Stored = TypeVar("Stored")

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Device types without float64: Apple's GPUs."""


@dataclass(frozen=True)
class Surfaces:
    """The gradients and activations that an attack reads.

    Examples:
        >>> from lightning_fedleak import HEAD_WEIGHT, Surfaces
        >>> Surfaces(gradients=(HEAD_WEIGHT,))
        Surfaces(gradients=('head.weight',), layers=())

    Attributes:
        gradients: roles (``"head.weight"``, ``"head.bias"``, ``"embedding.weight"``) or parameter
            names whose gradient is read.
        layers: names of blocks whose output activations are read.
    """

    gradients: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guess:
    """The result of an attack."""


@dataclass(frozen=True)
class WordGuess(Guess):
    """The word types that an attack names.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import WordGuess
        >>> scores = torch.tensor([0.1, 0.9, 0.4])
        >>> WordGuess(types=scores.topk(2).indices, scores=scores).types
        tensor([1, 2])

    Attributes:
        types: (k,) distinct token ids, best first if there are scores.
        scores: (V,) higher is more likely used, or None if the attack only decides.
        n_types: the attack's estimate of the number of types, or None.
        surface: ``"output"`` for words predicted (labels), ``"input"`` for words read.
        certified: whether the adversary can verify that no type is missing; None if the attack has
            no certificate.
        capacity: how many types the attack can distinguish; None if that is unknown.
        silent: (m,) tokens that may be missing although the rest is certified, since they would
            leave no trace; None where nothing is certified.
    """

    types: Tensor
    scores: Tensor | None = None
    n_types: float | None = None
    surface: str = "output"
    certified: bool | None = None
    capacity: float | None = None
    silent: Tensor | None = None


@dataclass(frozen=True)
class Query:
    """The targets of a game: candidate texts of a membership game.

    Attributes:
        input_ids: (G, L) one target sentence per row.
        attention_mask: (G, L), 0 where padded, or None.
        positions: (G,) the token of each sentence that is tested; None lets the attack choose.
        labels: (G, L) of a causal model, -100 where the loss ignores a token; None for no such.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    positions: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class RunFacts:
    """What an adversary knows of the run, besides what it sees.

    A server that prescribes the training knows all of it.

    Attributes:
        precision: in the Trainer's words (``"bf16-mixed"``); None if unknown.
        autocast: dtype that the client's forward is cast to; None without autocast.
        optimizer: class name of the optimizer of the parameters that are read; None without one.
        optimizer_settings: its settings, as plain values.
        local_steps: optimizer steps whose weight change is shared; None if single gradients are.
        defended: the data that the run's defences change.
        step: optimizer step that the fit begins at; above 0 if it was resumed.
        compression: The compression of each tensor before it is shared; None without one, or where
            what it leaves out is sent in later steps.
    """

    precision: str | None = None
    autocast: torch.dtype | None = None
    optimizer: str | None = None
    optimizer_settings: Mapping[str, object] = field(default_factory=dict)
    local_steps: int | None = None
    defended: frozenset[Literal["gradients", "batches", "activations"]] = frozenset()
    step: int = 0
    compression: Compression | None = None


class Attack(ABC):
    """An adversary. Subclasses set ``threat_model`` and implement ``needs`` and ``run``.

    ``prepare`` may compute on the model before training starts, ``refresh`` when the weights have
    changed. Neither changes the model or its gradients. ``run`` uses no global random numbers and
    works on the device of the observation. docs/api/extending.md shows an attack of your own.

    Examples:
        >>> from lightning_fedleak import (
        ...     HEAD_WEIGHT, Attack, Capability, LeakageMonitor, Surfaces, ThreatModel, WordGuess,
        ... )
        >>> class LongestRows(Attack):
        ...     threat_model = ThreatModel.create("a server", Capability.SEES_HEAD_GRADIENT)
        ...     default_name = "longest_rows"
        ...
        ...     def needs(self, anatomy):
        ...         return Surfaces(gradients=(HEAD_WEIGHT,))
        ...
        ...     def run(self, view, query=None):
        ...         lengths = view.gradient(HEAD_WEIGHT).float().norm(dim=1)
        ...         return WordGuess(lengths.topk(8).indices, lengths)
        >>> LeakageMonitor([LongestRows()], every_n_steps=10)
        LeakageMonitor([longest_rows], every_n_steps=10)

    Args:
        name: the instance's name in the logs, unique on one monitor.
    """

    threat_model: ClassVar[ThreatModel]
    default_name: ClassVar[str]
    reads_adaptive_updates: ClassVar[bool] = False
    """Whether :meth:`run` reads weight changes that are no sums of gradients, such as Adam's, or
    raises an error that says why not. If False, there is no result for them."""
    reads_compressed: ClassVar[frozenset[str]] = frozenset()
    """The compressions (``snapshot.compression``) that :meth:`run` knows how to read. Of what
    another one left of a gradient there is no result."""
    needs_control: bool = True
    """Whether a low number counts only beside a control, for which :meth:`run` is called again on a
    gradient of known words. False: it is called once a look, and nothing shows what a change of the
    gradient hid from it."""
    for_uneven_losses: ClassVar[bool] = False
    """Whether it chooses itself only in steps whose labels weigh differently in the loss, by class,
    token or text: there the attacks that learn from public text read less."""
    restores_fully: ClassVar[bool] = True
    """Whether :meth:`state_dict` holds all that :meth:`prepare` computes, so that it need not run
    after :meth:`load_state_dict`."""
    needs_float64: ClassVar[bool] = False
    """Whether it computes in float64 on the model's device, which Apple's GPUs do not support."""

    gathers: ClassVar[bool] = False
    """Whether :meth:`prepare` and :meth:`refresh` read only parts of a model that is sharded: by
    running it as far as they need, by modules' attributes, by ``whole_tensor``, on every process
    alike, with the same token ids; an error on one process alone leaves the others waiting. If
    False, the whole model is gathered for them, which takes its memory on each."""

    config_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that :meth:`config` returns; ``settings.steps`` is there as ``steps``."""
    _facts = RunFacts()

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.default_name

    def check_device(self, anatomy: Anatomy) -> None:
        """Raise an error if the model's device does not support this attack's arithmetic.

        Raises:
            ValueError: says which device, and what to do.
        """
        kind = anatomy.device.type
        if self.needs_float64 and kind in WITHOUT_FLOAT64:
            raise ValueError(
                f"attack '{self.name}' computes in float64, which the device '{kind}' does not "
                "have: put the model on the CPU (Trainer(accelerator='cpu')), or remove this attack"
            )

    def meet(self, facts: RunFacts) -> None:
        """Store facts of the run, before :meth:`prepare` and whenever they change."""
        self._facts = facts

    def check_updates(self, facts: RunFacts) -> None:  # noqa: B027
        """Raise an error for rounds of local steps whose updates cannot be read at all.

        Args:
            facts: The facts of the run, with its local steps and the optimizer's settings.

        Raises:
            UnusableObservation: says what to change; :class:`Inapplicable` if the method is not
                made for such updates.
        """

    @abstractmethod
    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return the gradients and activations that this attack reads from this model."""

    def prepare(self, anatomy: Anatomy) -> None:  # noqa: B027
        """Calibrate on what the adversary knows (public text, the model)."""

    def estimate(self, anatomy: Anatomy, texts: int) -> float | None:
        """Return the seconds that a run at a look will take; None if that is not known, or little.

        Args:
            anatomy: the model, before :meth:`prepare`.
            texts: number of texts that a membership attack scores.
        """
        return None

    def refresh(self, anatomy: Anatomy, step: int) -> None:  # noqa: B027
        """Follow a model whose weights have changed."""

    @abstractmethod
    def run(self, view: Observation, query: Query | None = None) -> Guess:
        """Return the guess for one observation.

        Raises:
            UnusableObservation: the snapshot is non-finite or all zero.
        """

    def require_calibration(self, calibration: Stored | None) -> Stored:
        """Return what :meth:`prepare` stored, or raise ``RuntimeError`` if nothing is."""
        if calibration is None:
            raise RuntimeError(
                f"attack '{self.name}' has no calibration: call prepare(anatomy) first"
            )
        return calibration

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold, such as a calibration."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what ``state_dict`` returned."""

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports, as plain numbers and strings.

        Of public text it is the first digits of its SHA-256.
        """
        values = {name: attrgetter(name)(self) for name in self.config_names}
        return {
            name.rpartition(".")[2]: value.digest if isinstance(value, PublicText) else value
            for name, value in values.items()
        }

    def arguments(self) -> dict[str, object]:
        """Return the settings that a saved state must agree with.

        By default they are those of :meth:`config`. An attack whose ``config`` has measured values
        leaves them out.
        """
        return self.config()

    def fingerprint(self) -> str:
        """Return what a saved state must agree with, as one string."""
        return repr(sorted(self.arguments().items()))


def check_readable(largest: Tensor, name: str) -> None:
    """Raise an error for a gradient with NaN or infinity, or of zeros alone.

    Args:
        largest: () size of its largest number, or of a number that is NaN if one of them is.
        name: The name of the gradient, which begins the message.

    Raises:
        UnusableObservation: nothing can be read.
    """
    check_finite(largest, name)
    if not bool(largest > 0):
        raise UnusableObservation(f"{name} is all zero: no token was trained on in this step")


def refuse_tied(are_tied: bool, attack: str, matrix: str) -> None:
    """Raise an error if head and embedding, of which an attack reads one, are one matrix.

    Raises:
        ValueError: they are.
    """
    if are_tied:
        raise ValueError(
            f"attack '{attack}' needs the {matrix}'s own gradient, and this model ties head and "
            "embedding: only the sum of both is shared. Remove it; FlatChat reads the tied sum."
        )

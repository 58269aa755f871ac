"""The interface of attacks: an adversary turns an observation of the training into a guess.

An engine runs attacks during a training. It calls :meth:`Attack.meet`, :meth:`Attack.needs` and
:meth:`Attack.prepare` before the training, :meth:`Attack.refresh` after weights have changed, and
:meth:`Attack.run` on observations. Names that every attack needs, such as ``ThreatModel`` and
``Observation``, can be imported from here.

An attack declares a :class:`ThreatModel`: the capabilities that its adversary needs. At setup,
:func:`require` compares them with the capabilities that the adversary has in the user's run. So an
attack never runs in a setting in which its result has no meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import Compression, check_finite
from lightning_fedleak.model.snapshots import Observation as Observation
from lightning_fedleak.model.snapshots import UnusableObservation as UnusableObservation


class Capability(Enum):
    """A capability of an adversary. Its value is the phrase for messages.

    Examples:
        >>> from lightning_fedleak import Capability
        >>> Capability.KNOWS_MODEL.value
        "knows the model's current weights"
    """

    SEES_HEAD_GRADIENT = "sees the gradient of the output head's weight"
    SEES_HEAD_BIAS_GRADIENT = "sees the gradient of the output head's bias"
    SEES_EMBEDDING_GRADIENT = "sees the gradient of the input embeddings"
    SEES_ACTIVATIONS = "sees the activations at the split layer"
    KNOWS_MODEL = "knows the model's current weights"
    KNOWS_BOTTOM_MODEL = "knows the weights below the split layer"
    KNOWS_PUBLIC_TEXT = "has public text to calibrate on"
    CHOOSES_WEIGHTS = "chooses the weights it sends to clients (a dishonest server)"
    CHOOSES_ARCHITECTURE = "chooses the modules that clients train (a dishonest server)"
    KNOWS_TARGET_TEXT = "holds the candidate texts whose membership it infers"
    HAS_RELEASED_MODEL = "gets the trained model, and has its public base"


HONEST_BUT_CURIOUS = frozenset({Capability.KNOWS_MODEL, Capability.KNOWS_PUBLIC_TEXT})
"""A server that follows the protocol. An attack adds capabilities for the data it receives."""

DISHONEST_SERVER = HONEST_BUT_CURIOUS | {
    Capability.CHOOSES_WEIGHTS,
    Capability.CHOOSES_ARCHITECTURE,
    Capability.KNOWS_TARGET_TEXT,
}
"""A server that adds layers to the model to test whether a client trains on candidate texts."""


@dataclass(frozen=True)
class ThreatModel:
    """The adversary of an attack.

    Examples:
        >>> from lightning_fedleak import Capability, ThreatModel
        >>> ThreatModel.create("a curious server", Capability.SEES_HEAD_GRADIENT).summary
        'a curious server'

    Attributes:
        needs: The capabilities that the attack needs.
        summary: A description of the adversary, for reports.
    """

    needs: frozenset[Capability]
    summary: str

    @classmethod
    def create(cls, summary: str, *needs: Capability) -> ThreatModel:
        """Return a threat model with these capabilities."""
        return cls(frozenset(needs), summary)


def require(attack: str, threat_model: ThreatModel, capabilities: Iterable[Capability]) -> None:
    """Raise an error unless the adversary has all capabilities that an attack needs.

    Args:
        attack: The name of the attack.
        threat_model: The attack's threat model.
        capabilities: The capabilities of the adversary in the user's run.

    Raises:
        ValueError: A capability is missing. The message names the attack and all missing ones.
    """
    missing = threat_model.needs - frozenset(capabilities)
    if missing:
        names = "; ".join(c.value for c in Capability if c in missing)  # in the order of the enum
        raise ValueError(
            f"attack '{attack}' is of an adversary ({threat_model.summary}) that: {names}"
        )


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
    """The result of an attack; a subclass for each kind of attack holds its fields."""


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
        types: (k,) distinct token ids (word types), by descending score if there are scores.
        scores: (V,) score of each type, higher if its use is more likely; None if the attack gives
            a set without scores.
        n_types: the attack's estimate of the number of used types, or None.
        surface: ``"output"`` for the words that the model predicts (labels), ``"input"`` for the
            words that it reads.
        certified: whether the adversary can verify that no type is missing; None if the attack has
            no certificate.
        capacity: number of types that the attack can distinguish; None if unknown.
        silent: (m,) tokens that may be missing although all other types are certified, because they
            would leave no trace; None if nothing is certified.
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
    """The candidate texts of a membership game: was each of them in the batch?

    Attributes:
        input_ids: (G, L) token ids, one candidate text per row.
        attention_mask: (G, L), 0 where padded, or None.
        positions: (G,) position of the token of each text that is tested; None lets the attack
            choose.
        labels: (G, L) labels for a causal model, -100 where the loss ignores a token; None if it
            ignores no token.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    positions: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class RunFacts:
    """What an adversary knows of the run in addition to its observations.

    A server that prescribes the training knows all of these facts.

    Attributes:
        precision: the Trainer's ``precision`` (``"bf16-mixed"``); None if unknown.
        autocast: dtype that the client's forward is cast to; None without autocast.
        optimizer: class name of the optimizer of the parameters that are read; None without one.
        optimizer_settings: the optimizer's settings, as plain values.
        local_steps: number of optimizer steps whose weight change is shared; None if single
            gradients are shared.
        defended: the data that the run's defences change.
        step: optimizer step at which the fit begins; above 0 if it was resumed.
        compression: The compression of each tensor before it is shared; None without one, or if
            omitted entries are sent in later steps.
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
    """The base of attacks. Subclasses set ``threat_model`` and implement ``needs`` and ``run``.

    ``prepare`` may run the model before the training starts, ``refresh`` when the weights have
    changed. Neither changes the model or its gradients. ``run`` uses no global random numbers and
    works on the device of the observation. docs/api.md shows how to write an attack.

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
    """Whether :meth:`run` accepts weight changes that are not sums of gradients, such as Adam's, or
    raises an error with the reason. If False, there is no result for them."""
    reads_compressed: ClassVar[frozenset[str]] = frozenset()
    """The compressions (``snapshot.compression``) that :meth:`run` can read. There is no result for
    gradients that are compressed in another way."""
    needs_control: bool = True
    """Whether a low result counts only if a control succeeds, for which :meth:`run` is called again
    on a gradient of known words. If False, :meth:`run` is called once per measurement, and nothing
    shows whether a change of the gradient made the attack fail."""
    for_even_losses: ClassVar[bool] = False
    """Whether the attack misses labels of little weight beside others of more, by class, token or
    text. Where labels weigh unevenly and another method may separate them, because they are fewer
    than the hidden states' dimensions and no noise was added, a low number is then unknown."""
    restores_fully: ClassVar[bool] = True
    """Whether :meth:`state_dict` holds all that :meth:`prepare` computes, so that it need not run
    after :meth:`load_state_dict`."""
    second_to: ClassVar[str] = ""
    """The name of an attack that reads as much for less. With ``attacks="auto"``, in a training of
    one process without defences, this one runs only where the other one has no result."""
    needs_float64: ClassVar[bool] = False
    """Whether the attack computes in float64 on the model's device, which Apple's GPUs lack."""

    gathers: ClassVar[bool] = False
    """Whether :meth:`prepare` and :meth:`refresh` themselves gather the parts that they need of a
    sharded model: by running the model, by modules' attributes, or by ``whole_tensor``. Every
    process must do the same with the same token ids; if one alone raises an error, the other ones
    wait. If False, the whole model is gathered before, which takes its memory on each process."""

    config_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that :meth:`config` returns; ``settings.steps`` is returned as ``steps``."""
    _facts = RunFacts()  # nothing is known until meet is called

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.default_name

    def check_device(self, anatomy: Anatomy) -> None:
        """Raise an error if the model's device does not support this attack's arithmetic.

        Raises:
            ValueError: the device has no float64, and the attack needs it.
        """
        kind = anatomy.device.type
        if self.needs_float64 and kind in WITHOUT_FLOAT64:
            raise ValueError(
                f"attack '{self.name}' needs float64, which '{kind}' does not have: use "
                "accelerator='cpu', or remove it"
            )

    def n_distinct(self, anatomy: Anatomy) -> float | None:
        """Return how many distinct inputs the gradients that it reads can distinguish.

        A batch of more is *low by aggregation* if the attack works on a part of it. None, the
        default, if they are not counted: a low number without a control is then unknown.
        """
        return None

    def meet(self, facts: RunFacts) -> None:
        """Store the facts of the run; called before :meth:`prepare` and whenever they change."""
        self._facts = facts

    def check_updates(self, facts: RunFacts) -> None:  # noqa: B027
        """Raise an error for rounds of local steps whose updates cannot be read at all.

        Args:
            facts: The facts of the run, with its local steps and the optimizer's settings.

        Raises:
            UnusableObservation: the updates cannot be read; the message says what to change. It is
                an :class:`Inapplicable` if the method is not made for such updates.
        """

    @abstractmethod
    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return the gradients and activations that this attack reads from this model."""

    def prepare(self, anatomy: Anatomy) -> None:  # noqa: B027
        """Calibrate on the adversary's prior knowledge (public text, the model)."""

    def estimate(self, anatomy: Anatomy, texts: int) -> float | None:
        """Return an estimate of the seconds of one :meth:`run`; None if unknown or negligible.

        Args:
            anatomy: the model, before :meth:`prepare`.
            texts: number of texts that a membership attack scores.
        """
        return None

    def refresh(self, anatomy: Anatomy, step: int) -> None:  # noqa: B027
        """Update the calibration to a model whose weights have changed."""

    @abstractmethod
    def run(self, view: Observation, query: Query | None = None) -> Guess:
        """Return the guess for one observation.

        Raises:
            UnusableObservation: the snapshot is non-finite or all zero.
        """

    def require_calibration(self, calibration: Stored | None) -> Stored:
        """Return the calibration of :meth:`prepare`, or raise ``RuntimeError`` if it is None."""
        if calibration is None:
            raise RuntimeError(f"attack '{self.name}': call prepare(anatomy) first")
        return calibration

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold, such as a calibration."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore the tensors that ``state_dict`` returned."""

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports, as plain numbers and strings.

        A public text is represented by the first digits of its SHA-256.
        """
        values = {name: attrgetter(name)(self) for name in self.config_names}
        return {
            name.rpartition(".")[2]: value.digest if isinstance(value, PublicText) else value
            for name, value in values.items()
        }

    def arguments(self) -> dict[str, object]:
        """Return the settings that a saved state must agree with.

        By default they are those of :meth:`config`. An attack whose ``config`` includes measured
        values omits them here.
        """
        return self.config()

    def fingerprint(self) -> str:
        """Return :meth:`arguments` as one string, to compare with that of a saved state."""
        return repr(sorted(self.arguments().items()))


def check_readable(largest: Tensor, name: str) -> None:
    """Raise an error for a gradient that has NaN or infinity, or is all zero.

    Args:
        largest: () its largest magnitude, or another number that is NaN, infinite or 0 in these
            cases, such as a norm.
        name: The name of the gradient, with which the message begins.

    Raises:
        UnusableObservation: the gradient is non-finite or all zero.
    """
    check_finite(largest, name)
    if not bool(largest > 0):
        raise UnusableObservation(f"{name} is all zero: no token was trained on in this step")

"""The arguments of a user: which attacks run, when, and under which settings.

``parts_of`` checks the arguments of an integration (a callback or a loop) and returns them as
a :class:`Selection` of attacks and the :class:`Options` of an engine. A *look* is one measurement
at an optimizer step, and the *cadence* is the rule for the steps of looks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak import attacks as library
from lightning_fedleak.attacks import (
    DISHONEST_SERVER,
    HONEST_BUT_CURIOUS,
    Attack,
    Capability,
    PublicText,
    TextSource,
    memorization,
)
from lightning_fedleak.engine.scheduler import Cadence
from lightning_fedleak.evaluation.canaries import CanarySet, EntitySet
from lightning_fedleak.evaluation.entities import finders_of
from lightning_fedleak.model.batches import BatchAdapter
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage
from lightning_fedleak.validate import check_choice, check_integer, check_number, explain_arguments

ASSUMED = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}
"""Capabilities that the adversary has by default, besides what it sees."""
SCALE = 1e9
"""Default factor by which a dishonest server scales the gradient of the layers that it adds.

Without clipping or noise it changes nothing. With them it is the worst case: the gradient of a
canary layer takes the whole norm that it is clipped to. The server need not disturb the model: a
factor that is still zero adds nothing to the output, and its gradient can be of any size.
"""

# Values of `WatchSettings.precision`, in the spelling of Lightning's Trainer.
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


@explain_arguments()
@dataclass(frozen=True)
class Games:
    """The settings of membership games: ``LeakageMonitor(games=Games(...))``.

    In a game an attack scores candidate texts, of which some are in the batch (members) and some
    are not (non-members).

    Examples:
        >>> from lightning_fedleak import FCMembership, Games, LeakageMonitor, PublicText
        >>> texts = PublicText([[5, 8, 2, 7], [7, 1, 3, 4]])  # ids; strings need a tokenizer
        >>> LeakageMonitor([FCMembership(1)], games=Games(targets=8, held_out=texts))
        LeakageMonitor([fc_membership], 10 looks)

    Args:
        targets: the largest number of members that are queried at a look, and of non-members.
        held_out: non-members: texts that are in no batch, as a
            :class:`~lightning_fedleak.attacks.public_text.PublicText`. It must not be the text that
            an attack is calibrated on. Default: sentences of the batches of earlier looks. The
            first look then has no result of these games yet, and the next step is looked at too.
        window: the number of looks over which the games of membership attacks are pooled. At 16
            targets a rate at 1% false positives is known after 63 looks.
        scale: the factor by which a dishonest server scales the gradient of its own layers. It
            matters only under clipping or noise, where the default is the worst case: a canary
            takes the whole norm that it is clipped to. Only the clipping of defences acts on it,
            not the Trainer's ``gradient_clip_val``: with that and noise leakage is overstated.
        canaries: texts that were inserted into the training data by random inclusion
            (:func:`~lightning_fedleak.evaluation.canaries.with_canaries`).
            :class:`~lightning_fedleak.attacks.memorization.Canaries` queries the trained weights
            with them; logged as ``audit/<attack>_x<times>``.
        entities: values that were inserted by
            :func:`~lightning_fedleak.evaluation.canaries.with_entities`.
            :class:`~lightning_fedleak.attacks.memorization.Entities` ranks them by the trained
            weights.

    Raises:
        ValueError: a number out of range.
    """

    targets: int = 16
    held_out: PublicText | None = None
    window: int = 100
    scale: float = SCALE
    canaries: CanarySet | None = None
    entities: EntitySet | None = None

    def __post_init__(self) -> None:
        check_integer("targets", self.targets)
        check_integer("window", self.window)
        if self.held_out is not None and not isinstance(self.held_out, PublicText):
            raise ValueError(f"held_out must be a PublicText, got a {type(self.held_out).__name__}")
        check_number("scale", self.scale, above=0)


@explain_arguments()
@dataclass(frozen=True)
class Memorization:
    """The settings of attacks on the trained weights, which measure memorization.

    These attacks query the model with texts that it was trained on (members) and with held-out
    texts (non-members).

    Examples:
        >>> from lightning_fedleak.engine import Memorization
        >>> Memorization(max_overhead=0.1).looks
        (0.5, 0.9)

    Attributes:
        others: non-members: a data set of texts that are not trained on, in the form of the
            training rows. None: rows that
            :func:`~lightning_fedleak.evaluation.canaries.leave_out` held out, else rows that the
            first epoch has not reached yet.
        max_overhead: the largest share of an epoch's time that all its looks may take; above 1 for
            short epochs. It limits the number of queried texts.
        looks: the shares of the first epoch after which to look. If the non-members do not run
            out, the last step of every epoch is looked at too.
        alpha: the probability that an attack's interval is wrong at any look. A gate on the worst
            of the family splits it among the attacks.
        most_texts: the largest number of queried texts. Half of the default are enough non-members
            for a TPR at 0.1% FPR at five looks; with fewer it is unknown.
        outside_epsilon: whether gates and choices by these numbers are allowed under differential
            privacy, although epsilon does not cover them.
        records: whether to list the training rows that the weights leak in ``records.jsonl`` (mode
            0600, row numbers and no text), after each epoch and at the end.
        reference: the reference model of
            :class:`~lightning_fedleak.attacks.memorization.CombinedReference`: a model that was
            trained like this one on other texts of the same kind, or its folder, or a folder of
            PEFT adapters. It must not have been trained on a text that it scores. It is queried
            once, before the first step; for that time a second model is in memory. ``"auto"``
            trains one before the first step, by the run's recipe, on rows that are not queried
            (:func:`~lightning_fedleak.evaluation.canaries.draw_references`). A function gets these
            rows as a data set and returns a model trained on them. Both need ``leave_out``. Or a
            list of models or folders.
        references: how many references ``"auto"`` or the function trains; each costs a training.
            Two or more are trained on random halves of the rows.
        reference_rows: the number of rows that the reference was trained on; for a list, a list of
            numbers, or of data sets of the rows, which say which texts a reference has seen. For
            ``"auto"`` and a function, the number of rows to train on, by default all. With
            fewer than this model's it is *weak*
            (:func:`~lightning_fedleak.engine.reference.measure_strength`): a low number is unknown.
        seed: the seed of the random choice of rows.

    Raises:
        ValueError: a number out of its range.
    """

    others: Any = None
    max_overhead: float = 0.02
    looks: tuple[float, ...] = (0.5, 0.9)
    alpha: float = 0.05
    most_texts: int = 15_000
    outside_epsilon: bool = False
    records: bool = False
    reference: Any = None
    references: int = 1
    reference_rows: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("max_overhead", self.max_overhead, above=0)
        check_number("alpha", self.alpha, above=0, below=1)
        check_integer("most_texts", self.most_texts, at_least=20)
        check_integer("seed", self.seed, at_least=0)
        check_integer("references", self.references)
        if self.references > 1 and not self.trains_reference:
            raise ValueError("Memorization(references=) is for reference='auto' or a function")
        if len(self.given_references) != len(self.rows_of_references):
            raise ValueError("reference_rows: give as many entries as reference has")
        for rows in self.rows_of_references:
            if isinstance(rows, int) or not hasattr(rows, "__getitem__"):
                check_integer("reference_rows", rows, optional=True)
        for share in self.looks:
            check_number("looks", share, above=0, at_most=1, hint="shares of the first epoch")

    @property
    def trains_reference(self) -> bool:
        """Return whether the reference is trained before the first step, not passed as a model."""
        given = (nn.Module, str, Path, list, tuple, type(None))
        return self.reference == "auto" or not isinstance(self.reference, given)

    @property
    def given_references(self) -> Sequence[Any]:
        """Return the models or folders; one entry for a reference that is trained."""
        return self.reference if isinstance(self.reference, list | tuple) else [self.reference]

    @property
    def rows_of_references(self) -> Sequence[Any]:
        """Return the number of rows of each of them, a data set of these, or None."""
        if isinstance(self.reference_rows, list | tuple):
            return self.reference_rows
        return [self.reference_rows] * len(self.given_references)


@explain_arguments()
@dataclass(frozen=True)
class WatchSettings:
    """Settings that are rarely changed, for all integrations (Lightning, own loops, federations).

    An integration refuses the settings that it gets from elsewhere, such as a Trainer's precision.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.callbacks import WatchSettings
        >>> LeakageMonitor(settings=WatchSettings(stages=("local", "shared")))
        LeakageMonitor('auto', 10 looks, stages=['local', 'shared'])

    Attributes:
        stages: where to measure: ``"shared"`` (what leaves the client; the default), ``"local"``
            (before the defences), ``"aggregate"`` (after the reduction over clients).
        reveal: write recovered words, and original and reconstructed texts side by side, to local
            files of mode 0600, never to a logger.
        tokenizer: decodes what ``reveal`` writes; without one it writes token ids. It also encodes
            the texts of ``public_text``.
        public_text: for ``attacks="auto"``: text like the clients', on which attacks are
            calibrated. Without it a causal model generates text for this.
        report: write ``report.html`` and ``report.json`` next to the logs when the run ends, as
            ``fedleak report`` does; also after an error or Ctrl-C. ``"live"``: update
            ``report.html`` after looks too; the open page reloads itself.
        upload_report: attach ``report.html`` to the runs of W&B and MLflow that the Trainer writes.
            It holds the measured leakage, and no text.
        utility: names of the user's own metrics to log as ``utility/<name>`` at looks, and when a
            validation or an epoch changed them. Their last and best values are logged at the end.
            None: all metrics that the run logs, except times and learning rates.
        client: who is a client: ``"rank"`` (each process) or ``"world"`` (all processes together;
            the reduced gradient is then what is shared). None: as the strategy says, under FSDP2
            and ZeRO ``"world"``, else ``"rank"``.
        shares: what leaves this machine during training, which nothing checks: ``"gradients"`` (or
            updates), ``"states"`` (hidden states of a split model), or the trained ``"model"``
            alone, so that only attacks on trained weights run, and rows must be held out
            (``leave_out``). None: not stated, and gradients are attacked.
        assume: capabilities of the adversary besides seeing what is shared. None:
            :data:`~lightning_fedleak.attacks.base.HONEST_BUT_CURIOUS` (it knows the model and has
            public text); if a :class:`MembershipAttack` is listed
            :data:`~lightning_fedleak.attacks.base.DISHONEST_SERVER`, which also adds layers to the
            model and holds the candidate texts. With ``attacks="auto"`` the former with candidate
            texts.
        anatomy: overrides for :func:`find_anatomy` (``model``, ``embedding``, ``head``, ...).
        batch_adapter: converts a batch of your own form into a :class:`TokenBatch`. It is needed
            only if the step's graph cannot be read (fused losses, ``torch.compile``, rounds of a
            federation) and :func:`read_batch` does not know the batch's form.
        texts: The largest number of texts of each client's batch that attacks on texts reconstruct
            at a look.
        look_seconds: with ``attacks="auto"``, the largest estimated seconds of a look of one
            attack; slower attacks do not run. An attack that took twice as long is not run again,
            except in a federation or under DP. If the model is sharded, nothing is excluded.
        memorization: the settings of attacks on the trained weights.
        precision: the precision in which the model runs: ``"bf16-mixed"`` or ``"16-mixed"`` under
            autocast. None: the dtype of the weights, without autocast.
        scaler: the GradScaler of the loop; it matters only under DDP.
        entities: kinds of personal data in the texts whose leakage is logged separately:
            ``"phone"``, ``"email"``, ``"iban"``, ``"card"``, ``"date"``, ``"code"``, or files with
            a value in each line. Attacks on words and texts log
            ``leakage/<attack>/entity/<kind>/recall``, the first one on the trained weights
            ``leakage/entity/<kind>/<place>/auc``. They need a tokenizer.
        tensorboard: whether to log to TensorBoard, if it is installed.

    Raises:
        ValueError: a setting is out of its range.
    """

    stages: Sequence[str] = ("shared",)
    reveal: bool = False
    tokenizer: Any = None
    public_text: TextSource | None = None
    report: bool | Literal["live"] = False
    upload_report: bool = False
    utility: str | Sequence[str] | None = None
    client: Literal["rank", "world"] | None = None
    shares: Literal["gradients", "states", "model"] | None = None
    assume: Collection[Capability] | None = None
    anatomy: Mapping[str, Any] | None = None
    batch_adapter: BatchAdapter | None = None
    texts: int = 4
    look_seconds: float = 30.0
    memorization: Memorization = field(default_factory=Memorization)
    precision: str | None = None
    scaler: Any = None
    entities: Sequence[str | Path] = ()
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_number("look_seconds", self.look_seconds, above=0)
        check_choice("client", self.client, ("rank", "world"), optional=True)
        check_choice("shares", self.shares, ("gradients", "states", "model"), optional=True)
        check_choice("precision", self.precision, PRECISIONS, optional=True)
        check_choice("report", self.report, (False, True, "live"))
        finders_of(self.entities)
        if self.upload_report and not self.report:
            raise ValueError("upload_report=True uploads report.html: pass report=True too")

    def refuse(self, watcher: str, *names: str) -> None:
        """Refuse settings that an integration does not have.

        Args:
            watcher: The name of its class, for the message.
            names: The names of the settings.

        Raises:
            ValueError: One of them is not the default.
        """
        for name in (setting.name for setting in fields(self) if setting.name in names):
            if getattr(self, name) != getattr(type(self)(), name):
                raise ValueError(f"{watcher} takes no settings=WatchSettings({name}=...): omit it")


@dataclass(frozen=True)
class Options(WatchSettings):
    """All settings of an engine: :class:`WatchSettings`, and the integration's other arguments.

    Attributes:
        stages: as in :class:`WatchSettings`, in their order on the way to the server.
        utility: as in :class:`WatchSettings`; None: all of the user's metrics.
        cadence: the rule for the steps of looks.
        games: the settings of membership games.
        local_steps: the number of optimizer steps in a round of a federation; None if the gradients
            of single steps are shared.
    """

    stages: tuple[Stage, ...] = (Stage.SHARED,)
    utility: tuple[str, ...] | None = None
    cadence: Cadence = field(default_factory=lambda: Cadence(50))
    games: Games = field(default_factory=Games)
    local_steps: int | None = None


def parts_of(
    attacks: Sequence[Attack] | Attack | str,
    settings: WatchSettings,
    games: Games | None,
    every_n_steps: int | None = None,
    max_overhead: float | None = None,
    *,
    local_steps: int | None = None,
) -> tuple[Selection, Options]:
    """Return the attacks and options for an :class:`Engine`, from an integration's arguments.

    Args:
        attacks: the attacks, or ``"auto"``.
        settings: the settings that are rarely changed.
        games: the settings of membership games; None for the defaults.
        every_n_steps: look at every n-th step.
        max_overhead: the share of the training time that looks may take.
        local_steps: the number of local steps of a round of a federation.

    Raises:
        ValueError: arguments are contradictory or unknown.
    """
    selection = selected(attacks, settings, games, rounds=local_steps is not None)
    names = settings.utility
    further = {
        "stages": known_stages(settings.stages),
        "utility": (names,) if isinstance(names, str) else names and tuple(names),
        "cadence": cadence_of(every_n_steps, max_overhead),
        "games": games or Games(),
        "local_steps": local_steps,
    }
    common = {setting.name: getattr(settings, setting.name) for setting in fields(WatchSettings)}
    return selection, Options(**common | further)


@dataclass(frozen=True)
class Selection:
    """The attacks that a user asks for.

    Attributes:
        attacks: the attacks; with ``auto`` all candidates for this adversary.
        auto: whether the user passed ``"auto"``: of the candidates, those that can read the run are
            then chosen when it begins.
        assume: the capabilities of the adversary besides seeing what is shared; None: those that
            the attacks need.
        text_passed: whether the user passed ``public_text``.
    """

    attacks: tuple[Attack, ...]
    auto: bool
    assume: frozenset[Capability] | None
    text_passed: bool


def candidates(
    assumed: Collection[Capability], settings: WatchSettings, *, rounds: bool
) -> list[Attack]:
    """Return every attack that this adversary can run, for ``attacks="auto"``.

    When a run begins, the attacks that cannot read it are excluded.

    Args:
        assumed: the capabilities of the adversary besides seeing what is shared.
        settings: the tokenizer and public text for calibrations; without public text the model
            generates some.
        rounds: whether the weight changes of rounds are shared, which some attacks cannot read.

    Raises:
        ValueError: ``public_text`` is one string, or strings without a tokenizer.
    """
    tokenizer = settings.tokenizer
    parsed = PublicText.parse(settings.public_text, tokenizer)
    text: TextSource = "sampled" if parsed is None else parsed
    attacks: list[Attack] = [
        library.AlignedFlatChat(text, tokenizer=tokenizer),
        library.SubspaceWords(parsed, capacity_seconds=0),  # the first number comes sooner
        library.BiasSign(),
        library.BagOfWords(),
    ]
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks.append(library.GradientMembership(text))
        if not rounds:
            attacks += [library.SubspaceMembership(text), library.Combined(), library.Extraction()]
            attacks += [
                memorization.ShortAnswers(),
                memorization.PromptRatio(),
                memorization.PreferenceMargin(),
            ]
            if settings.memorization.reference is not None:
                attacks.append(memorization.CombinedReference())
    if not rounds and frozenset(assumed) >= DISHONEST_SERVER:
        attacks += [library.FCMembership(layer=1), library.AttentionMembership(1, text)]
    return attacks


def selected(
    attacks: Sequence[Attack] | Attack | str,
    settings: WatchSettings | None = None,
    games: Games | None = None,
    *,
    rounds: bool = False,
) -> Selection:
    """Return the attacks that a user's arguments ask for.

    Args:
        attacks: the attacks, or ``"auto"``.
        settings: the adversary's capabilities, and the public text for ``"auto"``.
        games: the canaries and entities, for which ``"auto"`` adds attacks on the trained weights.
        rounds: whether a client shares the update of a round, not gradients.

    Raises:
        ValueError: public text is passed next to listed attacks, or the attacks cannot be logged
            together.
        TypeError: an entry is not an attack, or ``attacks`` is another string.
    """
    settings = settings or WatchSettings()
    capabilities = None if settings.assume is None else frozenset(settings.assume)
    text_passed = settings.public_text not in (None, "sampled")
    if is_auto := attacks == "auto":
        capabilities = ASSUMED if capabilities is None else capabilities
        chosen: list[Any] = candidates(capabilities, settings, rounds=rounds)
        if games is not None and not rounds:
            if games.canaries is not None and min(map(len, games.canaries.token_ids)) > 1:
                chosen.append(memorization.Canaries())
            if games.entities is not None:
                chosen.append(memorization.Entities())
    elif settings.public_text is not None:
        raise ValueError(
            "public_text= is for attacks='auto'; give it to the attacks that you list, "
            "for example AlignedFlatChat(public_text)"
        )
    else:  # `check_attacks` refuses a class or a name that was passed instead of an instance
        chosen = [attacks] if isinstance(attacks, Attack | type | str) else [*attacks]
    check_attacks(chosen)
    chosen = _readers(chosen, settings.shares, choosing=is_auto)
    return Selection(tuple(chosen), is_auto, capabilities, text_passed)


def _readers(attacks: Sequence[Attack], shares: str | None, *, choosing: bool) -> list[Attack]:
    """Return the attacks that read what leaves; a trained model always does in the end.

    Raises:
        ValueError: A listed attack does not, or ``"auto"`` has no attack on hidden states.
    """
    readers = []
    for attack in attacks:
        needs = attack.threat_model.needs
        read = "states" if Capability.SEES_ACTIVATIONS in needs else "gradients"
        if shares in (None, read) or Capability.HAS_RELEASED_MODEL in needs:
            readers.append(attack)
        elif not choosing or shares == "states":
            raise ValueError(
                f"attack '{attack.name}' reads nothing that leaves with shares='{shares}': list "
                "attacks that do"
            )
    return readers


def check_attacks(attacks: Sequence[Attack]) -> None:
    """Refuse an empty list, classes in place of instances, and names that cannot be logged.

    Raises:
        ValueError: there are no attacks, two have the same name, or a name cannot be part of a log
            name.
        TypeError: an entry is not an attack.
    """
    if not attacks:
        raise ValueError("attacks= needs at least one attack; got an empty list")
    for attack in attacks:
        if not isinstance(attack, Attack):
            raise TypeError(
                f"attacks must be 'auto' or instances of Attack, such as FlatChat(); got {attack!r}"
            )
        double = sum(isinstance(a, Attack) and a.name == attack.name for a in attacks) > 1
        if double or not re.fullmatch(r"(?!worst$)[A-Za-z0-9_.\-]+", attack.name):
            raise ValueError(
                f"the name {attack.name!r} is that of two attacks, or 'worst', or has more than "
                "letters, digits, '_', '-' and '.': give another, FlatChat(name='flatchat_abs')"
            )


def known_stages(stages: Sequence[str] | str) -> tuple[Stage, ...]:
    """Return the stages in their order on the way to the server, without duplicates.

    Raises:
        ValueError: a stage is unknown, or there is none.
    """
    names = [stages] if isinstance(stages, str) else list(stages)
    choices = [str(s) for s in ON_THE_WAY]
    if not names or any(s not in choices for s in names):
        raise ValueError(f"stages must be some of {choices}, got {names}")
    return tuple(s for s in ON_THE_WAY if str(s) in names)


def cadence_of(every_n_steps: int | None, max_overhead: float | None) -> Cadence:
    """Return the cadence that the user asks for; by default ten looks, evenly spread.

    Args:
        every_n_steps: look at every n-th step.
        max_overhead: the share of the training time that looks may take.

    Raises:
        ValueError: both are passed, or a number is out of range.
    """
    if every_n_steps is not None and max_overhead is not None:
        raise ValueError("give every_n_steps or max_overhead, not both")
    if every_n_steps is not None:
        return Cadence(check_integer("every_n_steps", every_n_steps))
    if max_overhead is not None:
        check_number("max_overhead", max_overhead, above=0, at_most=1, hint="it is a share")
    return Cadence(max_overhead=max_overhead)


def check_optimizers(optimizers: Sequence[Optimizer], attacks: Sequence[Attack]) -> None:
    """Refuse attacks on gradients if no optimizer has parameters: no step would be observed.

    This is so if ``configure_optimizers`` returned None.

    Raises:
        ValueError: no optimizer has parameters.
    """
    at_split = Capability.SEES_ACTIVATIONS  # attacks on activations need no optimizer
    names = [a.name for a in attacks if at_split not in a.threat_model.needs]
    if names and not any(group["params"] for o in optimizers for group in o.param_groups):
        raise ValueError(
            f"'{names[0]}' reads what an optimizer steps with, and configure_optimizers returned "
            "None. Return it, or torch.optim.SGD(..., lr=0.0), which changes no weight."
        )

"""The choices of a user: the attacks of a run, and how it is watched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.attacks import (
    DISHONEST_SERVER,
    HONEST_BUT_CURIOUS,
    AlignedFlatChat,
    Attack,
    AttentionMembership,
    BagOfWords,
    BiasSign,
    Capability,
    Combined,
    Extraction,
    FCMembership,
    GradientMembership,
    PublicText,
    RevealLabels,
    SubspaceMembership,
    SubspaceWords,
    TextSource,
)
from lightning_fedleak.attacks.memorization import (
    Canaries,
    CombinedReference,
    Entities,
    PreferenceMargin,
    PromptRatio,
    ShortAnswers,
)
from lightning_fedleak.engine.scheduler import Cadence
from lightning_fedleak.evaluation.canaries import CanarySet, EntitySet
from lightning_fedleak.evaluation.entities import finders_of
from lightning_fedleak.model.batches import BatchAdapter
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage
from lightning_fedleak.validate import check_choice, check_integer, check_number

ASSUMED = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}
"""Capabilities that the adversary has by default, besides what it sees."""
MAX_OVERHEAD = 0.005
"""Share of the training time that looks may take by default beyond those of a curve."""
SCALE = 1e9
"""How strongly a dishonest server's layers feed the model, unless the user says otherwise.

Without clipping or noise it changes nothing. With them it is the worst case: a canary takes the
whole norm that it is clipped to. No server has to disturb the model for it: a factor that is still
zero adds nothing to the output, and its gradient can be made as large as the server likes.
"""


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class Games:
    """How a :class:`LeakageMonitor` plays membership games: ``LeakageMonitor(games=Games(...))``.

    Examples:
        >>> from lightning_fedleak import FCMembership, Games, LeakageMonitor, PublicText
        >>> texts = PublicText([[5, 8, 2, 7], [7, 1, 3, 4]])  # ids; strings need a tokenizer
        >>> LeakageMonitor([FCMembership(1)], games=Games(targets=8, held_out=texts))
        LeakageMonitor([fc_membership], 10 looks or max_overhead=0.005)

    Args:
        targets: sentences asked for at a look, at most so many that are in the batch and as many
            that are not.
        held_out: texts that are in no batch, a
            :class:`~lightning_fedleak.attacks.public_text.PublicText`, and not the one that an
            attack is calibrated on. Default: sentences of the batches of earlier looks;
            the first look, before which there was none, then has no result of these games yet, and
            the next step is looked at too.
        window: looks over which the games of membership attacks are pooled. At 16 targets a rate
            at 1% false positives is known after 63 looks.
        scale: how strongly a dishonest server lets its own layers feed the model. It matters
            under clipping or noise only, where the default is the worst case: a canary takes the
            whole norm that it is clipped to. The Trainer's own ``gradient_clip_val`` does not act
            on it, only defences do: with noise and that clipping together leakage is overstated.
        canaries: texts of the user's own, in the training data by random inclusion
            (:func:`~lightning_fedleak.evaluation.canaries.with_canaries`), that
            :class:`~lightning_fedleak.attacks.memorization.Canaries` asks the trained weights
            about; logged as ``audit/<attack>_x<times>``.
        entities: values that
            :func:`~lightning_fedleak.evaluation.canaries.with_entities` planted, which
            :class:`~lightning_fedleak.attacks.memorization.Entities` ranks by the trained weights.

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


def means_auto(reference: Any) -> bool:
    """Return whether a reference is "auto", or nearly so, and the path of nothing."""
    if not isinstance(reference, str) or Path(reference).exists():
        return False
    return bool(get_close_matches(reference.strip().lower(), ("auto", "automatic"), cutoff=0.7))


@dataclass(frozen=True)
class Memorization:
    """How the trained weights are tested for what they have memorized.

    Examples:
        >>> from lightning_fedleak.engine import Memorization
        >>> Memorization(max_overhead=0.1).looks
        (0.5, 0.9)

    Attributes:
        others: a data set of texts that are not trained on, in the form of the training rows. None
            takes rows that :func:`~lightning_fedleak.evaluation.canaries.leave_out` left out, else
            rows that the first epoch has not come to.
        max_overhead: largest share of an epoch's time that all looks of it take, above 1 where an
            epoch is short; sets how many texts are asked about.
        looks: shares of the first epoch after which to look; where others do not run out, every
            epoch's last step is looked at too.
        alpha: probability that an attack's interval is wrong at any look. A gate on the worst of
            the family splits it among the attacks.
        most_texts: largest number of texts that are asked about. Of the default one half are
            enough non-members for a TPR at 0.1% FPR at five looks; with fewer it is unknown.
        outside_epsilon: allow gates and choices by these numbers under differential privacy. They
            read private texts outside of the account.
        records: list the training rows that the weights give away in ``records.jsonl`` (mode 0600,
            row numbers and no text), after each epoch and at the end.
        reference: a model that was trained like this one on other texts of the same kind, or the
            folder of one, or of PEFT's adapters, which
            :class:`~lightning_fedleak.attacks.memorization.CombinedReference` compares with. It
            must not have seen a text that it scores. It is asked once, before the first step; for
            that time a second model is in memory. ``"auto"`` trains one before the first step, by
            the run's own recipe, on rows that are not asked about
            (:func:`~lightning_fedleak.evaluation.canaries.draw_references`). It needs
            ``leave_out``. So does a function, which gets these rows as a data set and returns a
            model that it has trained on them.
        reference_rows: how many rows it was trained on; of ``"auto"`` and of a function how many it
            is trained on, by default as many as this model. Fewer than this model's make it *weak*
            (:func:`~lightning_fedleak.engine.reference.measure_strength`): a low number is unknown.
        seed: draws the rows.

    Raises:
        ValueError: a number out of its range, or a reference that is nearly "auto" and no folder.
        TypeError: a reference that is no model and no folder.
    """

    others: Any = None
    max_overhead: float = 0.02
    looks: tuple[float, ...] = (0.5, 0.9)
    alpha: float = 0.05
    most_texts: int = 15_000
    outside_epsilon: bool = False
    records: bool = False
    reference: Any = None
    reference_rows: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("max_overhead", self.max_overhead, above=0)
        check_number("alpha", self.alpha, above=0, below=1)
        check_integer("most_texts", self.most_texts, at_least=20)
        check_integer("seed", self.seed, at_least=0)
        check_integer("reference_rows", self.reference_rows, optional=True)
        if self.reference is None and self.reference_rows is not None:
            raise ValueError("reference_rows counts the rows of a reference: give reference too")
        if not isinstance(self.reference, str | Path | None) and not callable(self.reference):
            kind = type(self.reference).__name__
            raise TypeError(f"reference must be a model or the folder of one, got a {kind}")
        if not self.trains_reference and means_auto(self.reference):
            raise ValueError(
                f"reference={self.reference!r} is no folder. To have a reference trained, write "
                'Memorization(reference="auto"); else give the folder of a model'
            )
        for share in self.looks:
            check_number("looks", share, above=0, at_most=1, hint="shares of the first epoch")
        if list(self.looks) != sorted(set(self.looks)):
            raise ValueError(f"looks must be shares in rising order, got {self.looks}")

    @property
    def trains_reference(self) -> bool:
        """Return whether the reference is trained before the first step, and not given."""
        given = nn.Module | str | Path | None
        return self.reference == "auto" or not isinstance(self.reference, given)


@dataclass(frozen=True)
class WatchSettings:
    """Hold the settings of a watched run that are rarely changed, whoever trains.

    An integration refuses those that it takes from elsewhere, such as a Trainer's precision.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.callbacks import WatchSettings
        >>> LeakageMonitor(settings=WatchSettings(stages=("local", "shared")))
        LeakageMonitor('auto', 10 looks or max_overhead=0.005, stages=['local', 'shared'])

    Attributes:
        stages: where to measure: ``"shared"`` (what leaves the client; the default), ``"local"``
            (before the defences), ``"aggregate"`` (after the reduction over clients).
        reveal: write recovered words, and original and reconstructed texts side by side, to local
            files of mode 0600, never to a logger.
        tokenizer: decodes what ``reveal`` writes; without one it writes token ids. Reads the texts
            of ``public_text``.
        public_text: for ``attacks="auto"``: text like the clients', which attacks are calibrated
            on. Without it a causal model writes some itself.
        report: write ``report.html`` and ``report.json`` beside the logs when the run ends, as
            ``fedleak report`` does; also after an error or Ctrl-C. ``"live"``: ``report.html`` also
            while it goes on, after a look; the open page loads itself again.
        upload_report: attach ``report.html`` to the runs of W&B and MLflow that the Trainer writes.
            It says what was read, and no text.
        utility: names of the user's own metrics to repeat as ``utility/<name>`` at looks, and where
            a validation or an epoch changed them; their last and best are logged at the end. None:
            all that the run logs, but times and learning rates.
        client: who is a client: ``"rank"`` (each process) or ``"world"`` (all processes are one
            company's; shared is then the reduced gradient). None: as the strategy says, under
            FSDP2 and ZeRO ``"world"``, else ``"rank"``.
        assume: capabilities of the adversary besides seeing what is shared. None:
            :data:`~lightning_fedleak.threats.HONEST_BUT_CURIOUS` (it knows the model and has
            public text); where a :class:`MembershipAttack` is listed
            :data:`~lightning_fedleak.threats.DISHONEST_SERVER`, which also puts layers of its own
            into the model and holds the texts it asks for. With ``attacks="auto"`` the former one,
            holding texts.
        anatomy: overrides for :func:`find_anatomy` (``model``, ``embedding``, ``head``, ...).
        batch_adapter: turns a batch of your own into a :class:`TokenBatch`; needed only where the
            step's graph cannot be read (fused losses, ``torch.compile``, rounds of a federation)
            and :func:`read_batch` does not know the batch's form.
        texts: The largest number of texts of each client's batch that attacks on texts reconstruct
            at a look.
        look_seconds: with ``attacks="auto"``, attacks of which one look is estimated to take longer
            are not played. One whose run took twice as long is not run again, but in a federation
            and under DP. None is left out for its price where the model is sharded.
        memorization: how the trained weights are tested.
        precision: how the model is run: ``"bf16-mixed"`` or ``"16-mixed"`` under autocast. None: by
            the dtype of the weights, without autocast.
        scaler: the GradScaler of the loop; matters under DDP alone.
        entities: kinds of personal data in the texts, of which a share of its own is logged:
            ``"phone"``, ``"email"``, ``"iban"``, ``"card"``, ``"date"``, ``"code"``, or files with
            a value in each line. Attacks on words and texts have
            ``leakage/<attack>/entity/<kind>/recall``, the first one on the trained weights
            ``leakage/entity/<kind>/<place>/auc``. They need a tokenizer.
        tensorboard: log to TensorBoard, where it is installed.

    Raises:
        ValueError: a setting out of its range.
    """

    stages: Sequence[str] = ("shared",)
    reveal: bool = False
    tokenizer: Any = None
    public_text: TextSource | None = None
    report: bool | Literal["live"] = False
    upload_report: bool = False
    utility: str | Sequence[str] | None = None
    client: Literal["rank", "world"] | None = None
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
        check_choice("precision", self.precision, PRECISIONS, optional=True)
        check_choice("report", self.report, (False, True, "live"))
        finders_of(self.entities)
        if self.upload_report and not self.report:
            raise ValueError("upload_report=True uploads report.html: pass report=True too")

    def refuse(self, watcher: str, *names: str) -> None:
        """Refuse settings that a watcher does not have.

        Raises:
            ValueError: names the first of them that is set.
        """
        for name in (setting.name for setting in fields(self) if setting.name in names):
            if getattr(self, name) != getattr(type(self)(), name):
                raise ValueError(f"{watcher} takes no settings=WatchSettings({name}=...): omit it")


@dataclass(frozen=True)
class Options(WatchSettings):
    """How a run is watched: all settings, and the integration's arguments.

    Attributes:
        utility: as above; None: all of the user's metrics.
        cadence: when to look.
        games: how membership games are played.
        local_steps: optimizer steps of a round of a federation; None: gradients of single steps.
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
        settings: what is rarely changed.
        games: how membership games are played.
        every_n_steps: look at every n-th step.
        max_overhead: share of the training time that looks may take.
        local_steps: The number of local steps of a round of a federation.

    Raises:
        ValueError: contradictory or unknown arguments.
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


UNEVEN_SECONDS = 2.0
"""Seconds of the linear programs of one look, where RevealLabels chooses itself.

They read some 30 label types of a vocabulary of 50,000. More: larger batches, rarer looks.
"""


@dataclass(frozen=True)
class Selection:
    """Hold the attacks of a run, as its user chose them.

    Attributes:
        attacks: the attacks; with ``auto`` all candidates for this adversary.
        auto: whether those that can read this run are chosen when it begins.
        assume: what the adversary has besides what it sees; None: what the attacks need.
        text_passed: whether the user passed public text for the chosen attacks.
    """

    attacks: tuple[Attack, ...]
    auto: bool
    assume: frozenset[Capability] | None
    text_passed: bool


def candidates(
    assumed: Collection[Capability], settings: WatchSettings, *, rounds: bool
) -> list[Attack]:
    """Return every attack that may apply; a fit runs those that do.

    Args:
        assumed: capabilities of the adversary besides what it sees.
        settings: their public text, for calibrations; None means text that the model writes itself.
        rounds: whether weight changes are shared, which some attacks do not read.

    Raises:
        ValueError: ``public_text`` is one string, or strings without a tokenizer.
    """
    tokenizer = settings.tokenizer
    parsed = PublicText.parse(settings.public_text, tokenizer)
    text: TextSource = "sampled" if parsed is None else parsed
    attacks: list[Attack] = [
        AlignedFlatChat(text, tokenizer=tokenizer),
        SubspaceWords(parsed, capacity_seconds=0),  # the first number comes sooner
        BiasSign(),
        BagOfWords(),
    ]
    if not rounds:
        attacks.append(RevealLabels(max_seconds=UNEVEN_SECONDS))
    if Capability.KNOWS_TARGET_TEXT in assumed:
        attacks.append(GradientMembership(text))
        if not rounds:
            attacks += [SubspaceMembership(text), Combined(), Extraction()]
            attacks += [ShortAnswers(), PromptRatio(), PreferenceMargin()]
            if settings.memorization.reference is not None:
                attacks.append(CombinedReference())
    if not rounds and frozenset(assumed) >= DISHONEST_SERVER:
        attacks += [FCMembership(layer=1), AttentionMembership(1, text)]
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
        settings: the adversary's capabilities, and the public text of attacks that choose
            themselves.
        games: whose canaries, if there are any, the trained weights are asked about.
        rounds: what leaves is a round's update.

    Raises:
        ValueError: an unknown word, public text beside listed attacks, or attacks that cannot be
            logged together.
        TypeError: something that is no attack.
    """
    settings = settings or WatchSettings()
    capabilities = None if settings.assume is None else frozenset(settings.assume)
    text_passed = settings.public_text not in (None, "sampled")
    if is_auto := attacks == "auto":
        capabilities = ASSUMED if capabilities is None else capabilities
        chosen = candidates(capabilities, settings, rounds=rounds)
        if games is not None and not rounds:
            if games.canaries is not None and min(map(len, games.canaries.token_ids)) > 1:
                chosen.append(Canaries())
            if games.entities is not None:
                chosen.append(Entities())
    elif isinstance(attacks, str):
        raise ValueError(f"attacks must be 'auto' or a list of attacks, got {attacks!r}")
    elif settings.public_text is not None:
        raise ValueError(
            "public_text= is for attacks='auto'; give it to the attacks that you list, "
            "AlignedFlatChat(public_text) say"
        )
    else:  # A class in place of an attack is refused by its name.
        chosen = [attacks] if isinstance(attacks, Attack | type) else [*attacks]
    check_attacks(chosen)
    return Selection(tuple(chosen), is_auto, capabilities, text_passed)


def check_attacks(attacks: Sequence[Attack]) -> None:
    """Refuse an empty list, classes in place of instances, and names that cannot be logged.

    Raises:
        ValueError: no attacks, two alike, or a name that is no part of a log name.
        TypeError: something that is no attack.
    """
    if not attacks:
        raise ValueError("attacks= needs at least one attack; got an empty list")
    for attack in attacks:
        if not isinstance(attack, Attack):
            raise TypeError(
                f"attacks must be instances of Attack, such as FlatChat(); got {attack!r}"
            )
        if not re.fullmatch(r"(?!worst$)[A-Za-z0-9_.\-]+", attack.name):
            raise ValueError(
                f"the name {attack.name!r} cannot be part of a log name: use letters, digits, "
                "'_', '-' and '.', but not 'worst'"
            )
    counts = Counter(attack.name for attack in attacks)
    if double := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(
            f"several attacks are named {', '.join(double)}: give each a name, "
            "FlatChat(name='flatchat_abs') say"
        )


def known_stages(stages: Sequence[str] | str) -> tuple[Stage, ...]:
    """Return the stages in their order on the way to the server, each once.

    Raises:
        ValueError: an unknown stage, or none.
    """
    names = [stages] if isinstance(stages, str) else list(stages)
    choices = [str(s) for s in ON_THE_WAY]
    if not names or any(s not in choices for s in names):
        raise ValueError(f"stages must be some of {choices}, got {names}")
    return tuple(s for s in ON_THE_WAY if str(s) in names)


def cadence_of(every_n_steps: int | None, max_overhead: float | None) -> Cadence:
    """Return the cadence that the user asks for, by default that of a curve.

    Args:
        every_n_steps: look at every n-th step.
        max_overhead: share of the training time that looks may take.

    Raises:
        ValueError: both, or a number out of range.
    """
    if every_n_steps is not None and max_overhead is not None:
        raise ValueError("give every_n_steps or max_overhead, not both")
    if every_n_steps is not None:
        return Cadence(check_integer("every_n_steps", every_n_steps))
    share = MAX_OVERHEAD if max_overhead is None else max_overhead
    check_number("max_overhead", share, above=0, at_most=1, hint="it is a share")
    return Cadence(share=share, is_curve=max_overhead is None)


def check_optimizers(optimizers: Sequence[Optimizer], attacks: Sequence[Attack]) -> None:
    """Refuse attacks on gradients where no optimizer steps, so that none is seen to leave.

    Raises:
        ValueError: the only optimizer is Lightning's stand-in for none.
    """
    split = Capability.SEES_ACTIVATIONS
    names = [a.name for a in attacks if split not in a.threat_model.needs]
    if names and not any(group["params"] for o in optimizers for group in o.param_groups):
        raise ValueError(
            f"'{names[0]}' reads what an optimizer steps with, and configure_optimizers returned "
            "None. Return it, or torch.optim.SGD(..., lr=0.0), which changes no weight."
        )

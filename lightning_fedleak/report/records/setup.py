"""The first line of ``run.jsonl``, the set-up of a fit, and the families of attacks that it names.

A *fit* is one training run, or one federation. Its *monitor* runs the attacks, at *looks* (steps at
which leakage is measured); a *gate* acts if a metric exceeds a limit.
:class:`BeginLine` is the first line. The other lines are its parts: model, monitor, attacks,
defences and gates. A :class:`DefenseLine` adds a defence that was not known then.

A :class:`Family` is the attacks on one kind of leak, with the words of a report on it. They share a
main metric, the *headline*. In a *game*, an attack guesses which candidate texts are members.
*Canaries* are texts, and *planted values* names or numbers, that the user adds to the training data
to measure what the model memorizes. A *positive control* is the same attack on data whose content
is known.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from lightning_fedleak.report.records import fields
from lightning_fedleak.report.records.fields import Record, Share
from lightning_fedleak.report.records.lines import RunLine


@dataclass(frozen=True, kw_only=True)
class Family(Record):
    """A kind of leak.

    A sentence completes "one update lets the server ...", or "the trained model ..." for a family
    on trained weights. What it has in braces is highlighted: ``{auc}`` is a metric with two digits,
    ``{surely}`` (how often) and ``{amount}`` (how much) are phrases by the lower end of the
    headline's interval, and other words are printed as they are.

    Attributes:
        name: as in ``leakage/worst/<name>``.
        headline: the main metric.
        chance: the value of the headline that guessing reaches. If it is above 0, each look is a
            game with few trials, so that the mean over looks counts, not the highest look.
        metrics: the metrics that a report shows.
        question: what its attacks try to find out, such as "Which tokens are in a batch?"
        title: what its attacks recover, in a word or two.
        sentences: what an adversary could do with an attack: the first one; for an attack with an
            excess as its main metric, the last.
        untested: what to do if no attack of the family was run.
        mend: what to do if an attack of the family reads, in a sentence.
        terms: the meaning of its words and metrics, for the report's glossary.
        excesses: metrics of which a baseline is subtracted, so that guessing has 0. They are the
            main metrics of attacks that do not have the headline.
    """

    name: str
    headline: str = ""
    chance: Share = 0.0
    metrics: tuple[str, ...] = ()
    question: str = ""
    title: str = ""
    sentences: tuple[str, ...] = ()
    untested: str = ""
    mend: str = ""
    terms: Mapping[str, str] = field(default_factory=dict)
    excesses: tuple[str, ...] = ()

    def headline_of(self, metrics: Collection[str]) -> str:
        """Return the main metric of an attack that has these metrics."""
        names = (self.headline, *self.excesses)
        return next((name for name in names if name in metrics), self.headline)

    def chance_of(self, metric: str) -> float:
        """Return the value that guessing reaches in the headline or an excess."""
        return 0.0 if metric in self.excesses else self.chance

    @property
    def known(self) -> str:
        """What the positive control recovers, for messages: texts in a game, otherwise words."""
        return "texts" if self.chance else "words"

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        """The metrics that a report shows; the headline if the family names none."""
        return self.metrics or ((self.headline,) if self.headline else ())

    @property
    def tested(self) -> str:
        """What its attacks try to find out."""
        return self.question or f"What do attacks of the family '{self.name}' read?"

    @property
    def short_title(self) -> str:
        """What its attacks recover, in a word or two; the name without a title."""
        return self.title or self.name

    @property
    def all_sentences(self) -> tuple[str, ...]:
        """The sentences; one with the headline if the family has none."""
        guessing = f", where guessing has {self.chance:g}" if self.chance else ""
        default = f"reach a {self.headline} of {{{self.headline}}}{guessing}"
        return self.sentences or (default,)


MEND_UPDATES = (
    "train under DP-SGD, train fewer weights, or share only sums over clients; then measure again."
)
"""What to do if an attack reads shared updates."""

WORDS = Family(
    name="words",
    headline="f1",
    metrics=("f1", "recall", "precision"),
    question="Which tokens are in a batch?",
    title="words",
    sentences=("name {amount} of a batch's distinct tokens",),
    mend=MEND_UPDATES,
    terms={
        "Words": "Tokens, the pieces of text that a model reads: whole words or parts of words. "
        "Which distinct tokens are in a batch is tested. Neither their order nor a text is read.",
        "F1": "0: no token right. 1: every distinct token of the batch named, and none besides. "
        "It is the harmonic mean of recall (the share of the batch's tokens that was named) and "
        "precision (the share of what was named that was right).",
    },
)

MEMBERSHIP = Family(
    name="membership",
    headline="auc",
    chance=0.5,
    metrics=("auc", "accuracy", "tpr_at_fpr_0.01"),
    question="Is a given text in a batch?",
    title="membership",
    sentences=("tell {surely} whether a given text was in a batch",),
    mend=MEND_UPDATES,
    untested="Test whether a given text is in a batch, which no attack asked: "
    "settings=WatchSettings(assume=DISHONEST_SERVER).",
    terms={
        "AUC": "How often the attack ranks a text of the batch above one that is not in it. "
        "0.5 is guessing, 1 is always.",
        "TPR at 1% FPR": "The share of the batch's texts that is found while 1 in 100 other texts "
        "is taken for one of them.",
    },
)

TEXTS = Family(
    name="texts",
    headline="token_accuracy",
    metrics=("token_accuracy", "exact_sentences", "rouge_l"),
    question="Can a text be written down?",
    title="whole texts",
    sentences=("write down {amount} of a text",),
    mend=MEND_UPDATES.replace("only sums", "noised hidden states or only sums"),
    untested="Test whole texts, which no attack read: attacks=[SubspaceTexts()].",
    terms={
        "Token accuracy": "The share of tokens that was written down in the right place. 1 is "
        "every text word for word."
    },
)

MEMORIZATION = Family(
    name="memorization",
    headline="auc",
    chance=0.5,
    metrics=(
        *("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001", "shown", "extracted", "greedy"),
        *("extracted_x1", "extracted_x2", "extracted_x5", "extracted_x17"),
        *("greedy_x1", "greedy_x2", "greedy_x5", "greedy_x17"),
    ),
    question="Was a given text trained on, by the trained model alone?",
    title="trained model",
    sentences=(
        "tells {surely} who was in its training data",
        "writes {passages of its training texts}",
    ),
    mend="do not release it as it is: remove repeated texts, train for fewer epochs or under "
    "DP-SGD, and measure again.",
    untested="Test what the trained model itself has memorized: train on `train` of "
    "`train, others = leave_out(rows, n)`, n some hundreds, with settings=WatchSettings("
    "memorization=Memorization(max_overhead=0.4)).",
    terms={
        "TPR at 1% and 0.1% FPR": "The share of the training texts that is found while 1 in 100, "
        "or in 1,000, held-out texts is taken for one. Unknown with fewer than 437, or 4,380, "
        "held-out texts, and later measurements need more.",
        "Shown": "The lower end of the TPR at 1% FPR: that share is found for certain.",
        "Extracted": "How many more training texts than held-out ones, as a share, hold a run of "
        "tokens (16 by default) that the model would write in 10,000 samples. Below 0: fewer do. "
        "By how many rows of the data hold them: x1, x2 (2 to 4), x5 (5 to 16) and x17 (more); "
        "without such a name it is the highest of these. Greedy: that it would write each time.",
    },
    excesses=("extracted",),
)

CANARIES = Family(
    name="canary",
    headline="auc",
    chance=0.5,
    metrics=("exposure", "auc", "greedy", "extracted"),
    question="What does the trained model leak of planted texts, by how often they were repeated?",
    title="canaries",
    terms={
        "Exposure": "How far up a planted text ranks among held-out ones, in bits: each bit halves "
        "the share above it. Capped if it ranks above all of them: more held-out texts would show "
        "more."
    },
)

ENTITIES = Family(
    name="entity",
    headline="first",
    metrics=("first", "greedy"),
    question="Which planted values does the trained model know, by kind and place?",
    title="planted values",
    sentences=("ranks {amount} of the planted values of a kind and place first",),
    terms={
        "First": "The share of planted values that rank first among drawn ones of their set, in "
        "the same words, minus that of values that were left out."
    },
)

PLANTED = CANARIES.name, ENTITIES.name
"""Names of families on planted texts and values, whose results do not cover the remaining texts."""

STANDARD_FAMILIES = (WORDS, MEMBERSHIP, TEXTS, MEMORIZATION)
"""The families that a report names even if no attack tested them."""


def standard_family(name: str) -> Family:
    """Return the standard family of a name, or a new family with nothing but the name."""
    return next((family for family in STANDARD_FAMILIES if family.name == name), Family(name=name))


class _ReleasesBefore(TypedDict):
    """The releases of a defence before a fit, restored from a checkpoint."""

    defense: str
    history: fields.History


class _DefenseSettings(TypedDict):
    """The types of the settings of defences that a report uses; further settings are unchecked."""

    trust: str
    unit: str
    sampling: str
    accountant: str
    ledger: str
    target_epsilon: fields.Amount | None
    clip: fields.Amount | None
    max_grad_norm: fields.Amount | str | None  # "auto", or norms by layers
    clients: int
    poisson: bool | None


@dataclass(frozen=True, kw_only=True)
class DefenseFacts(fields.Record):
    """A defence, its guarantee and its settings.

    Attributes:
        name: name of the defence in the logs.
        class_name: name of its class.
        guarantee: its privacy guarantee, in a sentence that begins with "none" if it has none.
        settings: its settings by name.
    """

    name: str
    class_name: str | None = fields.named("class", default=None)
    guarantee: str | None = None
    settings: Annotated[fields.JsonObject, _DefenseSettings] | None = None


@dataclass(frozen=True, kw_only=True)
class DefenseLine(DefenseFacts, RunLine):
    """A defence that is not in the first line, such as that of a client with its own account."""

    kind: str = field(default="defense", init=False)


class _EndedFit(TypedDict):
    """The fit that a fit resumes from a checkpoint: its id, and the releases of its defences."""

    run: str
    privacy: tuple[Annotated[fields.JsonObject, _ReleasesBefore], ...]


@dataclass(frozen=True, kw_only=True)
class ModelFacts(fields.Record):
    """The model: its class, sizes in parameters, and the names of those that are trained."""

    class_name: str = fields.named("class")
    kind: str | None = None
    vocabulary: int | None = None
    parameters: int | None = None
    trained_parameters: int | None = None
    trained: tuple[str, ...] = ()
    peft: tuple[str, ...] = ()
    dtype: str | None = None


STATED = "what leaves the machine: {}, stated by the user, not checked"
"""What the user says of a run, as the record has it."""


@dataclass(frozen=True, kw_only=True)
class MonitorFacts(fields.Record):
    """The settings of the monitor of a fit.

    Attributes:
        client: what counts as a client: ``"rank"`` for each process, ``"world"`` for all together,
            or the name of a client of a federation.
        clients: number of clients.
        adversary: the capabilities that the adversary is assumed to have; None if not recorded.
        local_steps: optimizer steps in a round; None if the gradient of each step is shared.
        stages: the stages at which it measured; None if not recorded.
        more: its further settings.
    """

    client: str | int | None = None
    clients: int = 1
    adversary: tuple[str, ...] | None = None
    local_steps: int | None = None
    stages: tuple[str, ...] | None = None
    more: fields.JsonObject = field(default_factory=dict, metadata=fields.OTHER_KEYS)


@dataclass(frozen=True, kw_only=True)
class AttackFacts(fields.Record):
    """An attack that a fit runs.

    Attributes:
        name: name of the attack in the logs.
        class_name: name of its class.
        family: name of its family.
        adversary: its threat model, in a sentence.
        needs: the capabilities that its adversary must have.
        reads: names of the parameters that it reads.
        exposed: whether these are shared.
        config: its settings.
    """

    name: str
    class_name: str | None = fields.named("class", default=None)
    family: str
    adversary: str | None = None
    needs: tuple[str, ...] | None = None
    reads: tuple[str, ...] = ()
    exposed: bool | None = None
    config: fields.JsonObject | None = None


@dataclass(frozen=True, kw_only=True)
class NotPlayed(fields.Record):
    """An attack that a fit does not run, and the reason."""

    name: str
    family: str | None = None
    reason: str = fields.named("why")


@dataclass(frozen=True, kw_only=True)
class GateFacts(fields.Record):
    """A gate, which acts if a metric exceeds a limit.

    Attributes:
        name: name of the gate.
        metric: the metric that it judges.
        at_most: the limit.
        action: what it does above the limit.
        bound: whether it judges the ``"value"`` or the ``"lower"`` end of its interval.
        alpha: error probability of this interval.
        strict: whether an unknown result counts as above the limit.
        patience: number of such results in a row that it lets pass.
    """

    name: str
    metric: str
    at_most: fields.Limit | None = None
    action: str | None = None
    bound: str | None = None
    alpha: float | None = None
    strict: bool | None = None
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class BeginLine(RunLine):
    """The set-up of a fit, before its first step.

    Attributes:
        fit: name that all monitors of the fit share.
        resumed: the fit whose checkpoint it resumes; None if it starts without a checkpoint.
        versions: versions of the packages on which results may depend.
        machine: processor and device.
        model: the model.
        training: the strategy and the settings of training.
        monitor: the settings of the monitor.
        families: the families of its attacks.
        attacks: the attacks that it runs.
        not_played: the attacks that it does not run; None if not recorded.
        unread: names of the trained parameters that no attack reads; None if not recorded.
        defenses: the defences in their order.
        gates: the gates; None if not recorded.
        settings_hash: SHA-256 of all settings.
        next_look: step of the first look; None if none is planned.
        weights: one hash of all ``trained`` and one of all ``frozen`` tensors before the first
            step; a group that is too large is left out. None for sharded weights and federations,
            and where both are too large.
    """

    kind: str = field(default="begin", init=False)
    fit: str | None = None
    resumed: Annotated[fields.JsonObject, _EndedFit] | None = None
    versions: Mapping[str, str] | None = None
    machine: fields.JsonObject | None = None
    model: ModelFacts | None = None
    training: fields.JsonObject | None = None
    monitor: MonitorFacts | None = None
    families: tuple[Family, ...] = ()
    attacks: tuple[AttackFacts, ...] = ()
    not_played: tuple[NotPlayed, ...] | None = None
    unread: tuple[str, ...] | None = None
    defenses: tuple[DefenseFacts, ...] = ()
    gates: tuple[GateFacts, ...] | None = None
    settings_hash: str | None = None
    next_look: fields.Count | None = None
    weights: Mapping[str, str] | None = None

    @property
    def stated(self) -> str:
        """What the user says leaves the machine; empty if it is not stated."""
        return "" if self.monitor is None else str(self.monitor.more.get("shares", ""))

    @property
    def keeps_updates(self) -> bool:
        """Whether the user says that only the trained model leaves the machine."""
        return self.stated == STATED.format("model")

    @property
    def is_federation(self) -> bool:
        """Whether the fit is a federation, which counts rounds instead of steps."""
        return (self.training or {}).get("strategy") == "federation"

    def family_of(self, attack: str) -> Family | None:
        """Return the family of an attack by the attack's name; None if it is not recorded."""
        name = next((facts.family for facts in self.attacks if facts.name == attack), "")
        recorded = {family.name: family for family in self.families}
        return recorded.get(name) or standard_family(name) if name else None

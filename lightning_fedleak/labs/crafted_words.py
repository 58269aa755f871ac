"""Word types from a round's change of an adapter whose values a dishonest server has crafted.

Rounds of a client that a dishonest server sent crafted values, played on copies.

The client trains with the values of
:class:`~lightning_fedleak.labs.crafted_words.CraftedAdapterWords`, and once more with those of the
model, from the same texts. The model itself stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn import functional as F

from lightning_fedleak import attacks
from lightning_fedleak.attacks import RunFacts, WordGuess
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.evaluation.metrics import Counts, word_counts
from lightning_fedleak.labs import crafted_rows
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import micro_batches, token_logits, undisturbed
from lightning_fedleak.model.snapshots import Observation, Stage, UpdateSnapshot, whole_tensor
from lightning_fedleak.progress import track
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError
from lightning_fedleak.validate import check_integer

USUAL = 0.5  # chance to be in a round from which a type is guessed without being read
MOST = 4  # types that are read off one row at most; more add false ones, not tuned
NEAR = 0.15  # share of the threshold by which a type may miss it and still be read; not tuned
SURE = 0.1  # share by which a type passes it that a row at rest excludes; not tuned
LOWEST = 0.05  # similarity below which nothing is read; cuts are tried from here on, not tuned
CUTS = 60  # cuts that are tried; more cost time, not tuned


@dataclass(frozen=True)
class CraftedGuess(attacks.WordGuess):
    """The types of a round: those that are read off rows, and the usual ones.

    Attributes:
        read: (k,) types that are read off rows, the clearest first.
    """

    read: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


@dataclass(frozen=True)
class Readings:
    """What could be read off the rows of one round, before a cut.

    Attributes:
        types: (n,) named types.
        similarities: (n,) cosine of the type's input with what its row's earlier types leave
            unexplained, and no larger than theirs.
        absent: (V,) bool, types that a row at rest excludes.
    """

    types: Tensor
    similarities: Tensor
    absent: Tensor

    def above(self, cut: float) -> Tensor:
        """Return the distinct types that are read at a cut, the clearest first."""
        order = self.similarities.argsort(descending=True, stable=True)
        types = self.types[order][self.similarities[order] >= cut]
        return torch.tensor(list(dict.fromkeys(types.tolist())), dtype=torch.long)


def read_rows(change: Tensor, still: Tensor, rows: crafted_rows.CraftedRows) -> Readings:
    """Return the types whose inputs explain the rows' changes, by orthogonal matching pursuit.

    The gradient of a row is a combination of the inputs that it fires for, and Adam's step keeps
    most of its direction. Of the types that a row fires for, the one whose input is most similar to
    the change is taken, then the one most similar to what is left. Where a type alone determines
    its input, types that pass the threshold of a row that did not change are not in the round.

    Args:
        change: (r, d) of the rows, without decay.
        still: (r,) bool, the rows that only decay and rounding have changed.
        rows: what the rows were made for.
    """
    candidates = rows.fires(-NEAR)
    absent = torch.zeros_like(rows.readable)
    if rows.exact:
        absent = (rows.fires(SURE) & still).any(1)
        candidates &= ~absent[:, None]
    atoms = F.normalize(rows.inputs, dim=1)
    readings = []
    for row in (~still).nonzero()[:, 0].tolist():
        types = candidates[:, row].nonzero()[:, 0]
        columns, residual, clearest = atoms[types], change[row], 1.0
        chosen: list[int] = []
        for _ in range(min(MOST, len(types))):
            similarity = (columns @ F.normalize(residual, dim=0)).abs()
            similarity[chosen] = 0.0
            best = int(similarity.argmax())
            clearest = min(clearest, float(similarity[best]))
            if clearest < LOWEST:
                break
            chosen.append(best)
            readings.append((int(types[best]), clearest))
            basis = torch.linalg.qr(columns[chosen].T).Q
            residual = change[row] - basis @ (basis.T @ change[row])
    pairs = torch.tensor(readings, dtype=torch.float64).reshape(-1, 2)
    return Readings(pairs[:, 0].long(), pairs[:, 1], absent.cpu())


@dataclass(frozen=True)
class RoundShape:
    """What the server prescribes a round to be, beside the optimizer and its steps.

    Attributes:
        texts: in a step of a client.
        tokens: of a text.
        clients: whose updates the server sees the mean of, as behind a secure aggregation.
    """

    texts: int = 4
    tokens: int = 32
    clients: int = 1


class CraftedAdapterWords(attacks.Attack):
    """The word types of a round, from an adapter whose values a dishonest server has chosen.

    The server sends the modules that the client agreed to train, with values of its own
    (:func:`~lightning_fedleak.labs.crafted_rows.craft`): each row of a bottleneck adapter fires for
    few types. The change of such a row, after any number of steps of an optimizer, shows which of
    them the round held. Types that most rounds hold are guessed without being read.

    Training on such values differs from the user's own. So rounds run on copies of the weights
    (:func:`~lightning_fedleak.labs.crafted_words.play_crafted_rounds`), and the values are put
    into no model.

    Args:
        adapter: path of the adapter's module in the model; see
            :func:`~lightning_fedleak.labs.crafted_rows.craft`.
        public_text: text like the clients', or ``"sampled"`` for text that the model writes.
        tokenizer: for strings.
        shape: of a round.
        rounds: public rounds that are played on copies to choose the cut.
        rows: how rows are dealt out.
        seed: of the public rounds, and of sampled text.
        name: as in the logs.

    Raises:
        ValueError: a number out of range, or no public text.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lightning_fedleak.attacks import PublicText, RunFacts
        >>> from lightning_fedleak.labs.crafted_words import CraftedAdapterWords
        >>> from lightning_fedleak.model.anatomy import find_anatomy
        >>> class Adapted(nn.Embedding):
        ...     def __init__(self, types, width):
        ...         super().__init__(types, width)
        ...         maps = nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width)
        ...         self.adapter = nn.Sequential(*maps)
        ...     def forward(self, ids):
        ...         return super().forward(ids) + self.adapter(super().forward(ids))
        >>> size = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2))
        >>> model.model.embed_tokens = Adapted(64, 16)
        >>> public = PublicText(torch.randint(64, (40, 32)))
        >>> attack = CraftedAdapterWords("model.embed_tokens.adapter", public, rounds=1)
        >>> attack.meet(RunFacts(optimizer="AdamW", local_steps=2))
        >>> attack.prepare(find_anatomy(model))
        >>> sorted(name.rpartition("adapter.")[2] for name in attack.values)
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    threat_model = ThreatModel.create(
        "a dishonest server that sends values of its own for an adapter, and knows the optimizer",
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
        Capability.CHOOSES_WEIGHTS,
    )
    default_name = "crafted_adapter_words"
    config_names = ("adapter", "public_text", "rounds")
    reads_adaptive_updates = True
    restores_fully = False

    def __init__(
        self,
        adapter: str,
        public_text: attacks.TextSource = "sampled",
        *,
        tokenizer: Any = None,
        shape: RoundShape | None = None,
        rounds: int = 6,
        rows: crafted_rows.RowSettings | None = None,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.adapter = adapter
        attack = type(self).__name__
        self.public_text = attacks.PublicText.parse_required(public_text, tokenizer, attack)
        self.shape = shape or RoundShape()
        self.rounds = check_integer("rounds", rounds)
        self.rows, self.seed = rows or crafted_rows.RowSettings(), seed
        self.cut: float | None = None
        self._crafted: crafted_rows.CraftedValues | None = None

    def config(self) -> dict[str, object]:
        """Return the settings, those of rounds and rows among them."""
        seeds = {"public_seed": self.seed}
        return {**super().config(), **seeds, **vars(self.shape), **vars(self.rows)}

    def needs(self, anatomy: Anatomy) -> attacks.Surfaces:
        """Return the matrix whose rows are read.

        Raises:
            ThreatModelError: the adapter is of another kind, or not trained, or the model predicts
                no next tokens.
        """
        if anatomy.kind != "causal":
            raise ThreatModelError(
                f"attack '{self.name}' needs next tokens, not a {anatomy.kind} model: remove "
                "the attack"
            )
        return attacks.Surfaces(
            gradients=(crafted_rows.find_adapter(anatomy, self.adapter).reads.name,)
        )

    # ---- a round on copies ------------------------------------------------------------------

    @property
    def crafted(self) -> crafted_rows.CraftedValues:
        """Return what ``prepare`` has crafted."""
        assert self._crafted is not None
        return self._crafted

    @property
    def values(self) -> Mapping[str, Tensor]:
        """Return the crafted values by parameter name."""
        return self.crafted.tensors

    @property
    def usual(self) -> Tensor:
        """Return (V,) bool, the types that are in more than half of all rounds."""
        return self.crafted.rows.presence.cpu() > USUAL

    @staticmethod
    def _steps(facts: attacks.RunFacts) -> LocalSteps:
        steps = LocalSteps.from_facts(facts)
        if steps is None:
            raise attacks.UnusableObservation(
                "rounds are played on copies: give RunFacts local_steps and an optimizer"
            )
        if facts.clip_value is not None:
            raise attacks.UnusableObservation(
                "rounds are played without clipping by value: omit clip_value"
            )
        return steps

    def mean_update(
        self, anatomy: Anatomy, clients: Sequence[Sequence[TokenBatch]]
    ) -> UpdateSnapshot:
        """Return the mean update of clients that train copies with the crafted values.

        The model and its gradients stay as they are.

        Args:
            anatomy: of the model.
            clients: for each client the batch of each local step.
        """
        steps, rate = self._steps(self._facts), self._steps(self._facts).rate
        total: dict[str, Tensor] = {}
        for batches in clients:
            for name, after in train_copies(anatomy, batches, steps, self.values).items():
                change = self.values.get(name, anatomy.root.get_parameter(name)) - after
                total[name] = total.get(name, 0) + change.detach()
        stage = Stage.SHARED if len(clients) == 1 else Stage.AGGREGATE
        tensors = {name: t / (rate * len(clients)) for name, t in total.items()}
        return UpdateSnapshot(0, stage, tensors, local_steps=steps.steps, learning_rate=rate)

    def prepare(self, anatomy: Anatomy) -> None:
        """Craft the values, and choose the cut on public rounds that are played on copies."""
        public = attacks.PublicText.resolve(self.public_text, anatomy, self.seed)
        steps = self._steps(self._facts).steps
        shape = self.shape
        tokens = shape.clients * steps * shape.texts * shape.tokens
        self._crafted = crafted_rows.craft(
            anatomy, self.adapter, public, tokens, settings=self.rows
        )
        generator = torch.Generator().manual_seed(self.seed)
        rounds = []
        for _ in track(range(self.rounds), "playing public rounds with crafted values"):
            clients = [
                [public.batch(shape.texts, shape.tokens, generator) for _ in range(steps)]
                for _ in range(shape.clients)
            ]
            view = Observation((self.mean_update(anatomy, clients),))
            used = torch.cat([b.context_ids() for batches in clients for b in batches])
            rounds.append((self._readings(view), torch.unique(used)))
        self.cut = self._best_cut(rounds)

    def _best_cut(self, rounds: Sequence[tuple[Readings, Tensor]]) -> float:
        """Return the cut with the highest mean F1 over public rounds."""

        def mean_f1(cut: float) -> float:
            total = 0.0
            for readings, truth in rounds:
                named = self._named(readings, cut)[0]
                hits = int(torch.isin(named, truth).sum())
                total += 2 * hits / max(1, len(named) + len(truth))
            return total / len(rounds)

        cuts: list[float] = torch.linspace(LOWEST, 1.0, CUTS).tolist()
        return max(cuts, key=mean_f1)

    # ---- reading ----------------------------------------------------------------------------

    def run(self, view: Observation, query: attacks.Query | None = None) -> CraftedGuess:
        """Return the types of a round that was played with the crafted values.

        Raises:
            UnusableObservation: the update is not finite, or all zero.
        """
        assert self.cut is not None
        if not any(bool(change.any()) for change in view.gradients[-1].tensors.values()):
            raise attacks.UnusableObservation("nothing has changed: nothing was trained on")
        readings = self._readings(view)
        types, read = self._named(readings, self.cut)
        return CraftedGuess(types, n_types=float(len(types)), surface="input", read=read)

    def _named(self, readings: Readings, cut: float) -> tuple[Tensor, Tensor]:
        """Return all types that are named at a cut, and of them those that are read."""
        read = readings.above(cut)
        usual = (self.usual & ~readings.absent).nonzero()[:, 0]
        return torch.cat([read, usual[~torch.isin(usual, read)]]), read

    def _readings(self, view: Observation) -> Readings:
        """Return what the rows' change without decay shows."""
        crafted, update = self.crafted, view.gradients[-1]
        assert isinstance(update, UpdateSnapshot)
        steps, rate = self._steps(self._facts), update.learning_rate
        name = crafted.rows.parameter
        before = crafted.tensors[name].float()
        shared = whole_tensor(update.tensors[name]).to(before)
        if not bool(shared.isfinite().all()):
            raise attacks.UnusableObservation(f"the update of '{name}' has NaN or infinity")
        change = steps.without_decay(shared, before, rate)[: len(crafted.rows.thresholds)]
        unit = (steps.steps + 2) * torch.finfo(crafted.tensors[name].dtype).eps / rate
        still = change.abs().amax(1) <= unit * before[: len(change)].abs().amax(1)
        return read_rows(change, still, crafted.rows)


Round = Sequence[Sequence[TokenBatch]]
"""It holds, for each client, the batch of each of its local steps."""


@dataclass(frozen=True)
class CraftedRound:
    """What one round showed to a server that had crafted an adapter's values.

    Attributes:
        words: counts of all types that were named.
        rare: the same of types that are in a round with a chance of at most one half.
        usual: of a guess of the other types without any update.
        blind: of a guess of the most frequent types, given the number of types.
        losses: on held-out text, in nats: ``"before"`` the round and ``"honest"`` after it with
            the model's own values, ``"crafted"`` and ``"trapped"`` the same with crafted values;
            NaN without such text.
    """

    words: Counts
    rare: Counts
    usual: Counts
    blind: Counts
    losses: Mapping[str, float]


def play_crafted_rounds(
    anatomy: Anatomy,
    attack: CraftedAdapterWords,
    rounds: Sequence[Round],
    facts: RunFacts,
    *,
    held_out: TokenBatch | None = None,
) -> list[CraftedRound]:
    """Calibrate the attack once, play rounds with the values that it crafts, and score each.

    Args:
        anatomy: of the model, which is not changed.
        attack: the server.
        rounds: of ``attack.shape.clients`` clients each, whose texts the attack has never seen.
        facts: with the optimizer that the server prescribes, and the number of local steps.
        held_out: text on which the losses with and without crafted values are compared.

    Raises:
        GameError: a round has another number of clients or steps than the attack assumes.
        ThreatModelError: the attack refuses the adapter.
        UnusableObservation: a round cannot be played, or nothing was trained on.
    """
    for clients in rounds:
        n = attack.shape.clients
        if len(clients) != n or {len(c) for c in clients} != {facts.local_steps}:
            raise GameError(
                f"a round needs {n} clients (RoundShape.clients) with {facts.local_steps} batches "
                f"each (RunFacts.local_steps); one has {[len(c) for c in clients]} by client"
            )
    attack.needs(anatomy)
    attack.meet(facts)
    attack.prepare(anatomy)
    return [_score(anatomy, attack, clients, held_out) for clients in rounds]


def _score(
    anatomy: Anatomy, attack: CraftedAdapterWords, clients: Round, held_out: TokenBatch | None
) -> CraftedRound:
    update = attack.mean_update(anatomy, clients)
    guess = attack.run(Observation((update,)))
    presence = attack.crafted.rows.presence.cpu()
    truth = torch.unique(torch.cat([b.context_ids() for batches in clients for b in batches]))
    rare = ~attack.usual

    def counts(guessed: Tensor, used: Tensor = truth) -> Counts:
        return word_counts(WordGuess(guessed), used, len(presence))

    return CraftedRound(
        words=counts(guess.types),
        rare=counts(guess.read[rare[guess.read]], truth[rare[truth]]),
        usual=counts((~rare).nonzero()[:, 0]),
        blind=counts(presence.topk(len(truth)).indices),
        losses=_losses(anatomy, attack, clients, update, held_out),
    )


def _losses(
    anatomy: Anatomy,
    attack: CraftedAdapterWords,
    clients: Round,
    update: UpdateSnapshot,
    held_out: TokenBatch | None,
) -> dict[str, float]:
    if held_out is None or len(clients) > 1:
        return dict.fromkeys(("before", "honest", "crafted", "trapped"), math.nan)
    steps = attack._steps(attack._facts)
    trapped = {
        name: attack.values.get(name, anatomy.root.get_parameter(name))
        - update.learning_rate * change
        for name, change in update.tensors.items()
    }
    return {
        "before": _loss(anatomy, held_out, {}),
        "honest": _loss(anatomy, held_out, train_copies(anatomy, clients[0], steps)),
        "crafted": _loss(anatomy, held_out, attack.values),
        "trapped": _loss(anatomy, held_out, trapped),
    }


def _loss(anatomy: Anatomy, batch: TokenBatch, values: Mapping[str, Tensor]) -> float:
    """Return the mean cross-entropy of a batch with other values in the model, by root name."""
    names = {id(p): name for name, p in anatomy.root.named_parameters()}
    model_parameters = anatomy.model.named_parameters()
    views = {n: values[names[id(p)]] for n, p in model_parameters if names[id(p)] in values}
    total, tokens = 0.0, 0
    with undisturbed(anatomy) as model, torch.no_grad():
        for part in micro_batches(anatomy, batch):
            logits, labels = token_logits(model, part, views)
            total += float(functional.cross_entropy(logits.float(), labels, reduction="sum"))
            tokens += len(labels)
    return total / tokens

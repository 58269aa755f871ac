"""Whole texts by gradient matching: dummy words are moved until their gradient is the shared one.

Three systems of the literature share the idea and differ in the distance, in what is done about
labels, and in whether words are also rearranged: DLG (Zhu, Liu and Han, NeurIPS 2019), TAG (Deng et
al., Findings of EMNLP 2021) and LAMP (Balunovic et al., NeurIPS 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Query, RunFacts, Surfaces, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts.base import TINY, Deadline, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.descent import RowAdam, TokenTable
from lightning_fedleak.attacks.texts.model_copy import ModelCopy, trained_names
from lightning_fedleak.model_runs import context_length
from lightning_fedleak.snapshots import Observation, UpdateSnapshot, whole_tensor
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError

Distance = Literal["l2", "tag", "cosine"]
DISTANCES: tuple[Distance, ...] = ("l2", "tag", "cosine")
Labels = Literal["learned", "text"]
LABELS: tuple[Labels, ...] = ("learned", "text")

_LABEL_RATE = 0.2
_SOFTNESS = 0.1
_BURN_IN = 0.1
_ROUNDING = 1e-5
"""Of the largest norm: biases of keys have no gradient but this."""


class GradientMatching(TextAttack):
    """Dummy word embeddings whose gradient is made to match the shared one.

    An honest but curious server knows the weights. It is told how many texts the batch holds and
    how long they are, which the literature assumes; all are taken to be of one length.
    :meth:`dlg`, :meth:`tag` and :meth:`lamp` are the systems of three papers:

    ==========  ===============  ================  ========================
    system      ``dlg``          ``tag``           ``lamp``
    ==========  ===============  ================  ========================
    distance    squared l2       + ``alpha`` * l1  1 - cosine, mean of all
    labels      learned          learned           the text itself
    start       one, random      one, random       best of ``starts``
    norms       free             free              near the vocabulary's
    rearranged  no               no                ``swaps``, by ``prior``
    ==========  ===============  ================  ========================

    In the papers DLG learns labels, TAG does without knowing them, and LAMP is told those of
    classifiers. A causal model's labels are its text. Learned, they are free distributions at each
    place. Taken from the text, each is the token nearest to the dummy word there, with the gradient
    of a softmax of the cosines (a straight-through estimate).

    Unlike in the papers, all three descend by Adam whose rate falls linearly to zero (DLG used
    L-BFGS, LAMP a rate that falls in steps), and start at the mean norm of the vocabulary. Of a
    causal text the last token is a label alone; learned, it is read off there. It does not count,
    as for :class:`~lightning_fedleak.attacks.texts.subspace.SubspaceTexts`.

    Reads whole models and adapters of causal models, and of classifiers with learned labels and
    without a prior. Single gradients, and rounds of one plain step of SGD; with momentum a first
    step is one.

    Args:
        texts: of a batch.
        length: tokens of each, at least 2.
        distance: ``"l2"``, ``"tag"`` or ``"cosine"``. The first two are in units of the shared
            gradient's squared norm.
        alpha: weight of TAG's l1.
        layer_weights: have TAG's l1 count for less from layer to layer, linearly down to zero.
        labels: ``"learned"`` or ``"text"``.
        regularise: weight of the squared relative deviation of the words' mean norm from the
            vocabulary's.
        prior: weight of the model's own loss on a text where texts are rearranged (LAMP: an
            auxiliary model's).
        swaps: rearrangements tried for each text at a time: two tokens exchanged, a token moved, a
            piece moved, a beginning put behind; 0 for none.
        swap_every: steps between these, behind the first tenth.
        starts: random starts, of which the best is gone on with.
        steps: of the descent.
        lr: in standard deviations of the vocabulary's numbers.
        parameters: roles or names in the model, whose gradients are matched; by default all that
            are trained.
        budget_seconds: wall time that one observation may take; None for no bound. What is found
            by then is returned, and the guess says that it is not finished.
        seed: of starts and rearrangements.
        name: as in the logs.

    Raises:
        ValueError: a number out of range, or an unknown word.
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one gradient and is told how many texts it is of "
        "and how long they are",
        Capability.KNOWS_MODEL,
    )
    default_name = "gradient_matching"
    needs_float64 = True
    reads_adaptive_updates = True
    restores_fully = False
    last_token_open = True

    def __init__(
        self,
        texts: int,
        length: int,
        *,
        distance: Distance = "cosine",
        alpha: float = 0.01,
        layer_weights: bool = False,
        labels: Labels = "text",
        regularise: float = 0.1,
        prior: float = 0.1,
        swaps: int = 20,
        swap_every: int = 75,
        starts: int = 20,
        steps: int = 2000,
        lr: float = 0.5,
        parameters: Sequence[str] | None = None,
        budget_seconds: float | None = 120.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        for which, value, known in (("distance", distance, DISTANCES), ("labels", labels, LABELS)):
            if value not in known:
                raise ValueError(f"{which} must be one of {', '.join(known)}, got {value!r}")
        for which, number, least in (
            ("texts", texts, 1),
            ("length", length, 2),
            ("swaps", swaps, 0),
            ("swap_every", swap_every, 1),
            ("starts", starts, 1),
            ("steps", steps, 1),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(
                    f"{which} must be a whole number, at least {least}, got {number!r}"
                )
        for which, weight in (("alpha", alpha), ("regularise", regularise), ("prior", prior)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{which} must be a number of at least 0, got {weight!r}")
        if not 0 < lr < math.inf:
            raise ValueError(f"lr must be positive, got {lr!r}")
        if budget_seconds is not None and not budget_seconds > 0:
            raise ValueError(f"budget_seconds must be positive or None, got {budget_seconds!r}")
        if isinstance(parameters, str) or (parameters is not None and not len(parameters)):
            raise ValueError(
                f"parameters must be a list of names, or None for all, got {parameters!r}"
            )
        self.texts = texts
        self.length = length
        self.distance: Distance = distance
        self.alpha = alpha
        self.layer_weights = layer_weights
        self.labels: Labels = labels
        self.regularise = regularise
        self.prior = prior
        self.swaps = swaps
        self.swap_every = swap_every
        self.starts = starts
        self.steps = steps
        self.lr = lr
        self.parameters = None if parameters is None else tuple(parameters)
        self.budget_seconds = budget_seconds
        self.seed = seed
        self._facts = RunFacts()
        self._copy: ModelCopy | None = None
        self._table: TokenTable | None = None

    @classmethod
    def dlg(cls, texts: int, length: int, **settings: Any) -> Self:
        """Deep Leakage from Gradients (Zhu et al. 2019); ``settings`` override its own."""
        own: dict[str, Any] = {"distance": "l2", "labels": "learned", "name": "dlg"}
        plain = {"regularise": 0.0, "prior": 0.0, "swaps": 0, "starts": 1, "lr": 0.2}
        return cls(texts, length, **(own | plain | settings))

    @classmethod
    def tag(cls, texts: int, length: int, **settings: Any) -> Self:
        """TAG (Deng et al. 2021); ``settings`` override its own."""
        return cls.dlg(texts, length, **({"distance": "tag", "name": "tag"} | settings))

    @classmethod
    def lamp(cls, texts: int, length: int, **settings: Any) -> Self:
        """LAMP with the cosine distance (Balunovic et al. 2022); ``settings`` override its own."""
        return cls(texts, length, **({"name": "lamp"} | settings))

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision, and what made an update."""
        self._facts = facts

    def age(self, step: int) -> float:
        """Optimizer steps that the copy of the model is behind; NaN before there is one."""
        return math.nan if self._copy is None else float(self._copy.age(step))

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The trained parameters of the model, or those that were named.

        Raises:
            ThreatModelError: labels that this kind of model does not have, or a prior that it
                does not give.
            AnatomyError: a name is none of the model's.
            ValueError: texts longer than the model's context.
        """
        self._check_kind(anatomy)
        context = context_length(anatomy)
        if context is not None and self.length > context:
            raise ValueError(
                f"attack '{self.name}': length={self.length}, but the model's context holds "
                f"{context} tokens"
            )
        return Surfaces(gradients=self._names(anatomy))

    def _check_kind(self, anatomy: Anatomy) -> None:
        if anatomy.kind not in ("causal", "classifier"):
            raise ThreatModelError(
                f"attack '{self.name}' cannot compute the loss of a {anatomy.kind} model on a text "
                "alone: it matches gradients of causal models and of classifiers. Remove the attack"
            )
        if anatomy.kind == "classifier" and (self.labels == "text" or self.prior):
            raise ThreatModelError(
                f"attack '{self.name}': the labels of a classifier are not its text, and it gives "
                "text no likelihood: set labels='learned' and prior=0"
            )
        if anatomy.kind == "classifier" and anatomy.vocab_size < 2:
            raise ThreatModelError(
                f"attack '{self.name}' matches the cross-entropy of classes, and this model has "
                "one output: remove the attack"
            )

    def _names(self, anatomy: Anatomy) -> tuple[str, ...]:
        names = trained_names(anatomy) if self.parameters is None else self.parameters
        absent = [n for n in names if anatomy.parameter(n) is None]
        if absent:
            raise ThreatModelError(f"attack '{self.name}': this model has no '{absent[0]}'")
        return names

    def prepare(self, anatomy: Anatomy) -> None:
        """Copies the model, and differentiates a gradient of it once.

        Raises:
            ValueError: its gradient has no derivative (flash attention), or a causal model predicts
                other tokens than it embeds.
        """
        self._copy = ModelCopy(anatomy, self._names(anatomy), autocast=self._facts.autocast)
        self._table = TokenTable.by_cosine(self._copy.word_embeddings())
        embedded = len(self._table.embeddings)
        if anatomy.kind == "causal" and embedded != anatomy.vocab_size:
            raise ValueError(
                f"attack '{self.name}' takes labels from the tokens that are embedded "
                f"({embedded}), and this model predicts {anatomy.vocab_size}: remove the attack"
            )

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Renews the copy; anew where something else is trained."""
        if self._copy is None or self._copy.names != self._names(anatomy):
            self.prepare(anatomy)
        assert self._copy is not None
        self._copy.refresh(anatomy, step)
        self._table = TokenTable.by_cosine(self._copy.word_embeddings())

    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstructs the texts of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, in any order. ``confidence`` is by how much cosine
            a token is ahead of the next best at the word found.

        Raises:
            UnusableObservation: non-finite or zero gradients, or an update that is no gradient.
            RuntimeError: ``prepare`` was not called.
        """
        if self._copy is None or self._table is None:
            raise RuntimeError(f"attack '{self.name}' has no copy of the model: call prepare")
        _check_update(view, self._facts)
        deadline = Deadline(self.budget_seconds)
        with self._copy.session(), torch.no_grad():
            matching = Matching(self, self._copy, self._table, self._target(view, self._copy))
            return matching.run(deadline)

    def _target(self, view: Observation, copy: ModelCopy) -> dict[str, Tensor]:
        held = view.gradients[-1].tensors
        target = {}
        for name in copy.read:
            if name in held:
                g = whole_tensor(held[name]).to(copy.device)
                target[name] = g if g.dtype == torch.float64 else g.float()
                if not bool(g.isfinite().all()):
                    raise UnusableObservation(f"the gradient of {name} has NaN or infinity")
        if not any(bool(g.any()) for g in target.values()):
            raise UnusableObservation("every gradient that is matched is zero")
        return target

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        names = (
            "texts",
            "length",
            "distance",
            "alpha",
            "layer_weights",
            "labels",
            "regularise",
            "prior",
            "swaps",
            "swap_every",
            "starts",
            "steps",
            "lr",
            "parameters",
            "budget_seconds",
            "seed",
        )
        return {name: getattr(self, name) for name in names}


def _check_update(view: Observation, facts: RunFacts) -> None:
    update = view.gradients[-1]
    if not isinstance(update, UpdateSnapshot):
        return
    steps = LocalSteps.from_facts(facts)
    plain = (
        steps is not None
        and steps.sums(fresh=update.fresh)
        and not steps.settings.get("nesterov")  # a multiple of the gradient
    )
    if update.local_steps != 1 or not plain:
        raise UnusableObservation(
            "gradients are matched with single gradients and with rounds of one plain step of "
            "SGD (with momentum one that begins afresh, without weight decay or Nesterov's): "
            "measure rounds of one step, or leave local_steps out to see what the client's data "
            "would give away"
        )


@dataclass(frozen=True)
class Dummy:
    """Texts as they are tried.

    Attributes:
        words: (B, L, e) word embeddings.
        labels: (B, L, V) logits of each token's label, of a classifier (B, C); None where labels
            are the text itself.
    """

    words: Tensor
    labels: Tensor | None

    def rearranged(self, text: int, order: Tensor) -> Dummy:
        """With the tokens of one text in another order (L,)."""
        words, labels = self.words.clone(), self.labels
        words[text] = words[text, order]
        if labels is not None and labels.dim() == 3:
            labels = labels.clone()
            labels[text] = labels[text, order]
        return Dummy(words, labels)


class Matching:
    """The search for the texts of one observation, within a session of the copy.

    Args:
        attack: its settings.
        copy: of the model.
        table: its vocabulary.
        target: shared gradients by name, not all zero.
    """

    def __init__(
        self,
        attack: GradientMatching,
        copy: ModelCopy,
        table: TokenTable,
        target: Mapping[str, Tensor],
    ) -> None:
        self.attack, self.copy, self.table = attack, copy, table
        self.target = dict(target)
        self.squared = float(sum(g.double().square().sum() for g in target.values()))
        self.norm = float(table.embeddings.norm(dim=1).mean())
        self.generator = torch.Generator().manual_seed(attack.seed)
        self.tried = 0

    # ---- the loss -------------------------------------------------------------------------

    def distance(self, dummy: Dummy, *, differentiable: bool = False) -> Tensor:
        """Between the gradient of dummy texts and the shared one; 0 at the true texts."""
        with torch.enable_grad():
            ids, labels = self._labelled(dummy)
            loss = self.copy.loss(ids, labels, dummy.words)
            gradients = self.copy.gradients(loss, differentiable=differentiable)
            parts = [(gradients[n], g) for n, g in self.target.items() if n in gradients]
            if not parts:
                raise UnusableObservation("the loss of a text hangs on nothing that is matched")
            if self.attack.distance == "cosine":
                return _cosine_distance(parts)
            total = torch.stack([(a - b).square().sum() for a, b in parts]).sum()
            if self.attack.distance == "tag":
                weights = [1.0] * len(parts)
                if self.attack.layer_weights:
                    weights = [1 - k / len(parts) for k in range(len(parts))]
                pairs = zip(weights, parts, strict=True)
                l1 = torch.stack([w * (a - b).abs().sum() for w, (a, b) in pairs]).sum()
                total = total + self.attack.alpha * l1
            return total / self.squared

    def _labelled(self, dummy: Dummy) -> tuple[Tensor, Tensor]:
        """The nearest tokens (B, L), and labels as distributions, differentiable."""
        ids = self.tokens(dummy.words)[0]
        if dummy.labels is not None:
            return ids, dummy.labels.softmax(-1)
        directions = self.table.directions["cosine"]
        likeness = F.normalize(dummy.words, dim=-1) @ directions.T
        soft = (likeness / _SOFTNESS).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(2, ids[..., None], 1.0)
        return ids, hard + soft - soft.detach()

    def tokens(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest tokens (B, L), and by how much cosine they are ahead of the next."""
        ids, likeness = self.table.nearest(words, 2, "cosine")
        return ids[..., 0], likeness[..., 0] - likeness[..., -1]

    def _chosen_by(self, dummy: Dummy) -> float:
        """What rearranged texts are chosen by: distance and the model's own loss on the text."""
        self.tried += 1
        value = float(self.distance(dummy).detach())
        if self.attack.prior:
            ids = self.tokens(dummy.words)[0]
            value += self.attack.prior * float(self.copy.loss(ids, ids))
        return value

    # ---- the search -----------------------------------------------------------------------

    def run(self, deadline: Deadline) -> TextGuess:
        """Descends from the best of random starts, and rearranges texts on the way."""
        attack = self.attack
        dummy = self._started(deadline)
        words = RowAdam(dummy.words, attack.lr * self.table.scale)
        labels = None if dummy.labels is None else RowAdam(dummy.labels, _LABEL_RATE)
        best, least, done = dummy, math.inf, 0
        for step in range(attack.steps):
            if deadline.passed:
                break
            for adam, rate in ((words, attack.lr * self.table.scale), (labels, _LABEL_RATE)):
                if adam is not None:
                    adam.lr = rate * (1 - step / attack.steps)
            now = Dummy(words.values, None if labels is None else labels.values)
            value, slopes = self._slopes(now)
            if value < least:
                least = value
                best = Dummy(now.words.clone(), None if now.labels is None else now.labels.clone())
            words.step(slopes[0])
            if labels is not None:
                labels.step(slopes[1])
            due = step % attack.swap_every == 1 % attack.swap_every
            if attack.swaps and due and step >= _BURN_IN * attack.steps:
                moved = self._rearranged(now, deadline)
                words.values.copy_(moved.words)
                if labels is not None and moved.labels is not None:
                    labels.values.copy_(moved.labels)
            done += 1
        tokens, ahead = self.tokens(best.words)
        if best.labels is not None and best.labels.dim() == 3:
            tokens[:, -1] = best.labels[:, -1].argmax(-1)
        return TextGuess(tokens.cpu(), ahead.float().cpu(), done == attack.steps, self.tried + done)

    def _started(self, deadline: Deadline) -> Dummy:
        attack, device = self.attack, self.copy.device
        shape = (attack.texts, attack.length)
        types, width = self.table.embeddings.shape
        best: tuple[float, Dummy] | None = None
        for _ in range(attack.starts):
            draws = torch.randn(*shape, width, generator=self.generator).to(self.table.embeddings)
            labels: Tensor | None = None
            if self.copy.anatomy.kind == "classifier":
                classes = self.copy.anatomy.vocab_size
                labels = torch.randn(attack.texts, classes, generator=self.generator).to(device)
            elif attack.labels == "learned":
                labels = torch.randn(*shape, types, generator=self.generator).to(device)
            dummy = Dummy(self.norm * F.normalize(draws, dim=-1), labels)
            if attack.starts == 1:
                return dummy
            self.tried += 1
            value = float(self.distance(dummy).detach())
            if best is None or value < best[0]:
                best = (value, dummy)
            if deadline.passed:
                break
        assert best is not None
        return best[1]

    def _slopes(self, dummy: Dummy) -> tuple[float, Sequence[Tensor]]:
        """The loss that is descended on, and its gradients in words and labels."""
        leaves = [
            x.detach().clone().requires_grad_()
            for x in (dummy.words, dummy.labels)
            if x is not None
        ]
        with torch.enable_grad():
            tried = Dummy(leaves[0], leaves[1] if len(leaves) > 1 else None)
            loss = self.distance(tried, differentiable=True)
            if self.attack.regularise:
                norm = tried.words.norm(dim=-1).mean()
                loss = loss + self.attack.regularise * (norm / self.norm - 1).square()
            slopes = torch.autograd.grad(loss, leaves)
        return float(loss.detach()), slopes

    def _rearranged(self, dummy: Dummy, deadline: Deadline) -> Dummy:
        """The best of some orders of each text, its own among them."""
        for text in range(len(dummy.words)):
            best, least = dummy, self._chosen_by(dummy)
            for order in self._orders():
                if deadline.passed:
                    return best
                other = dummy.rearranged(text, order.to(dummy.words.device))
                value = self._chosen_by(other)
                if value < least:
                    best, least = other, value
            dummy = best
        return dummy

    def _orders(self) -> Iterator[Tensor]:
        """Tokens exchanged, a token moved, a piece moved, a beginning put behind, in turn."""
        length = self.attack.length
        for k in range(self.attack.swaps):
            order = torch.arange(length)
            first, last, place = self._draw(length), self._draw(length), self._draw(length)
            if k % 4 == 0:
                order[[first, last]] = order[[last, first]]
            elif k % 4 == 3:
                order = order.roll(-first)
            else:
                first, last = (first, first) if k % 4 == 1 else sorted((first, last))
                piece = order[first : last + 1]
                rest = torch.cat([order[:first], order[last + 1 :]])
                place = place % (len(rest) + 1)
                order = torch.cat([rest[:place], piece, rest[place:]])
            yield order

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))


def _cosine_distance(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """1 - cosine, mean over the tensors whose shared gradient is more than rounding."""
    norms = torch.stack([b.norm() for _, b in parts])
    kept = (norms > _ROUNDING * norms.max()).tolist()
    pairs = [pair for pair, keep in zip(parts, kept, strict=True) if keep]
    cosines = [(a * b).sum() / (a.norm() * b.norm()).clamp_min(TINY) for a, b in pairs]
    return 1 - torch.stack(cosines).mean()


__all__ = ["DISTANCES", "LABELS", "Distance", "GradientMatching", "Labels"]

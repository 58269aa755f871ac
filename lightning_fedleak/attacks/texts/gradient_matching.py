"""Whole texts by gradient matching: change dummy words until their gradient is the shared one.

Three systems of the literature share the idea and differ in the distance, in the labels, and in
whether words are also rearranged: DLG (Zhu, Liu and Han, NeurIPS 2019), TAG (Deng et al., Findings
of EMNLP 2021) and LAMP (Balunovic et al., NeurIPS 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.base import (
    Capability,
    Query,
    Surfaces,
    ThreatModel,
    ThreatModelError,
    UnusableObservation,
)
from lightning_fedleak.attacks.texts.base import TINY, Deadline, TextGuess
from lightning_fedleak.attacks.texts.descent import RowAdam, TokenTable
from lightning_fedleak.attacks.texts.model_copy import GradientTextAttack, ModelCopy, trained_names
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import Observation, whole_tensor
from lightning_fedleak.validate import check_choice, check_integer, check_number

Distance = Literal["l2", "tag", "cosine"]
Labels = Literal["learned", "text"]


@dataclass(frozen=True)
class MatchingLimits:
    """Settings of the search that users do not set. None of the values was tuned."""

    label_rate: float = 0.2  # Adam's learning rate of learned labels, in logits
    softness: float = 0.1  # temperature of cosines in soft labels; less: steeper gradients
    burn_in: float = 0.1  # share of the steps before texts are rearranged
    rounding: float = 1e-5  # share of the largest norm; smaller gradients (key biases) are rounding


LIMITS = MatchingLimits()


@dataclass(frozen=True)
class MatchingSettings:
    """Settings of :class:`GradientMatching` that the systems of the papers fix.

    Attributes:
        alpha: weight of the l1 distance in TAG.
        layer_weights: whether this weight falls linearly to zero from layer to layer.
        regularise: weight of the squared relative deviation of the words' mean norm from the
            vocabulary's.
        prior: weight of the model's own loss on a text when rearranged texts are compared (LAMP
            uses the loss of an auxiliary model).
        swaps: number of rearrangements that are tried for each text at a time: two tokens
            exchanged, a token moved, a piece moved, or the text rotated; 0 for none.
        swap_every: steps from one time to the next, after the first tenth of all steps.
        starts: number of random starts. The search continues from the best.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from lightning_fedleak.attacks import GradientMatching, MatchingSettings
        >>> attack = GradientMatching(1, 16, matching=MatchingSettings(starts=5, swaps=0))
    """

    alpha: float = 0.01
    layer_weights: bool = False
    regularise: float = 0.1
    prior: float = 0.1
    swaps: int = 20
    swap_every: int = 75
    starts: int = 20

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, at_least=0)
        check_number("regularise", self.regularise, at_least=0)
        check_number("prior", self.prior, at_least=0)
        check_integer("swaps", self.swaps, at_least=0)
        check_integer("swap_every", self.swap_every)
        check_integer("starts", self.starts)


class GradientMatching(GradientTextAttack):
    """An attack that changes dummy word embeddings until their gradient matches the shared one.

    An honest but curious server knows the weights. As in the literature it also knows how many
    texts the batch holds and how long they are, and all have the same length.
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

    In the papers DLG learns labels, TAG does without knowing them, and LAMP is given those of
    classifiers. A causal model's labels are its text. Learned labels are free distributions at each
    position. A label from the text is the token nearest to the dummy word at its position, with the
    gradient of a softmax of the cosines (a straight-through estimate).

    Unlike in the papers, all three descend by Adam with a rate that falls linearly to zero (DLG
    used L-BFGS, LAMP a rate that falls in steps), and start at the mean norm of the vocabulary. A
    causal text's last token is only a label and does not count, as for
    :class:`~lightning_fedleak.attacks.texts.subspace.SubspaceTexts`.

    It reads whole models and adapters of causal models, and of classifiers with learned labels and
    without a prior. It reads single gradients, and rounds of one plain step of SGD, or of a first
    step with momentum.

    Args:
        texts: number of texts in a batch.
        length: number of tokens in each text, at least 2.
        distance: ``"l2"``, ``"tag"`` or ``"cosine"``. The first two are in units of the shared
            gradient's squared norm.
        labels: ``"learned"`` or ``"text"``.
        steps: number of steps of the descent.
        lr: learning rate, in standard deviations of the entries of the embedding matrix.
        parameters: roles or names in the model, whose gradients are matched; by default all that
            are trained.
        matching: settings that the systems fix.
        budget_seconds: wall time for one observation; None for no bound. After it the best so far
            is returned, and the guess says that it is not finished.
        seed: seed of starts and rearrangements.
        name: the attack's name in the logs.

    Raises:
        ValueError: a number out of range, or an unknown ``distance`` or ``labels``.

    Examples:
        >>> from lightning_fedleak import GradientMatching, LeakageMonitor
        >>> attack = GradientMatching.lamp(texts=1, length=16, budget_seconds=60.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one gradient and knows how many texts it comes "
        "from and how long they are",
        Capability.KNOWS_MODEL,
    )
    default_name = "gradient_matching"
    config_names = (
        *("texts", "length", "distance", "matching.alpha", "matching.layer_weights", "labels"),
        *("matching.regularise", "matching.prior", "matching.swaps", "matching.swap_every"),
        *("matching.starts", "steps", "lr", "parameters", "budget_seconds", "seed"),
    )
    needs_float64 = True
    _copy: ModelCopy | None = None

    def __init__(
        self,
        texts: int,
        length: int,
        *,
        distance: Distance = "cosine",
        labels: Labels = "text",
        steps: int = 2000,
        lr: float = 0.5,
        parameters: Sequence[str] | None = None,
        matching: MatchingSettings | None = None,
        budget_seconds: float | None = 120.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name, budget_seconds)
        check_choice("distance", distance, get_args(Distance))
        check_choice("labels", labels, get_args(Labels))
        self.texts = check_integer("texts", texts)
        self.length = check_integer("length", length, at_least=2)
        self.steps = check_integer("steps", steps)
        self.lr = check_number("lr", lr, above=0)
        if isinstance(parameters, str) or (parameters is not None and not len(parameters)):
            raise ValueError(
                f"parameters must be a list of names, or None for all, got {parameters!r}"
            )
        self.distance: Distance = distance
        self.labels: Labels = labels
        self.matching = matching or MatchingSettings()
        self.parameters = None if parameters is None else tuple(parameters)
        self.seed = seed
        self._table: TokenTable | None = None

    @classmethod
    def dlg(cls, texts: int, length: int, **settings: Any) -> Self:
        """Return Deep Leakage from Gradients (Zhu et al. 2019), changed by ``settings``.

        These are arguments of the class, or fields of :class:`MatchingSettings`.
        """
        system = {"distance": "l2", "labels": "learned", "lr": 0.2, "name": "dlg"}
        matching = {"regularise": 0.0, "prior": 0.0, "swaps": 0, "starts": 1}
        return cls._system(texts, length, system | matching | settings)

    @classmethod
    def tag(cls, texts: int, length: int, **settings: Any) -> Self:
        """Return TAG (Deng et al. 2021), changed by ``settings`` as in :meth:`dlg`."""
        return cls.dlg(texts, length, **({"distance": "tag", "name": "tag"} | settings))

    @classmethod
    def lamp(cls, texts: int, length: int, **settings: Any) -> Self:
        """Return LAMP with cosine distance (Balunovic et al. 2022), changed as in :meth:`dlg`."""
        return cls._system(texts, length, {"name": "lamp"} | settings)

    @classmethod
    def _system(cls, texts: int, length: int, settings: Mapping[str, Any]) -> Self:
        names = {field.name for field in fields(MatchingSettings)}
        arguments = {name: value for name, value in settings.items() if name not in names}
        matching = {name: value for name, value in settings.items() if name in names}
        return cls(texts, length, **({"matching": MatchingSettings(**matching)} | arguments))

    @property
    def prefers_likely_texts(self) -> bool:  # type: ignore[override]
        """Return whether the model's own loss on a text counts beside the gradient."""
        return self.matching.prior > 0

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return the names of the trained parameters, or of those that the user named.

        Raises:
            ThreatModelError: labels that this kind of model does not have, or a prior that it
                does not give.
            AnatomyError: a name is neither a role nor a parameter of the model.
            ValueError: texts longer than the model's context.
        """
        self._check_kind(anatomy)
        self._check_length(anatomy, self.length)
        return Surfaces(gradients=self._names(anatomy))

    def _check_kind(self, anatomy: Anatomy) -> None:
        if anatomy.kind not in ("causal", "classifier"):
            raise ThreatModelError(
                f"attack '{self.name}' cannot compute the loss of a {anatomy.kind} model on a text "
                "alone: it matches gradients of causal models and of classifiers. Remove the attack"
            )
        if anatomy.kind == "classifier" and (self.labels == "text" or self.matching.prior):
            raise ThreatModelError(
                f"attack '{self.name}': the labels of a classifier are not its text, and it gives "
                "text no likelihood: set labels='learned' and "
                "matching=MatchingSettings(prior=0)"
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
        """Copy the model, and test that its gradient can be differentiated.

        Raises:
            ValueError: its gradient has no derivative (flash attention), or a causal model predicts
                other tokens than it embeds.
        """
        self._copy = ModelCopy(anatomy, self._names(anatomy), autocast=self._facts.autocast)
        self._table = TokenTable.from_embeddings(self._copy.word_embeddings(), whiten=False)
        embedded = len(self._table.embeddings)
        if anatomy.kind == "causal" and embedded != anatomy.vocab_size:
            raise ValueError(
                f"attack '{self.name}' takes labels from the tokens that are embedded "
                f"({embedded}), and this model predicts {anatomy.vocab_size}: remove the attack"
            )

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again, and prepare again where something else is trained."""
        if self._copy is None or self._copy.names != self._names(anatomy):
            self.prepare(anatomy)
        assert self._copy is not None
        self._copy.refresh(anatomy, step)
        self._table = TokenTable.from_embeddings(self._copy.word_embeddings(), whiten=False)

    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstruct the texts of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, in any order. ``confidence`` is a token's lead in
            cosine over the next best.

        Raises:
            UnusableObservation: non-finite or zero gradients, or an update that is no gradient.
            RuntimeError: ``prepare`` was not called.
        """
        if self._copy is None or self._table is None:
            raise RuntimeError(f"attack '{self.name}' has no copy of the model: call prepare")
        self._check_update(
            view,
            # Nesterov's first step is a multiple of the gradient.
            lambda steps, update: (
                update.local_steps == 1
                and steps.sums(fresh=update.fresh)
                and not steps.settings.get("nesterov")
            ),
            "gradients are matched with single gradients and with rounds of one plain step of "
            "SGD (with momentum one that begins afresh, without weight decay or Nesterov's): "
            "measure rounds of one step, or leave local_steps out to see what the client's data "
            "would give away",
        )
        deadline = Deadline(self.budget_seconds)
        with self._copy.session(), torch.no_grad():
            matching = Matching(self, self._copy, self._table, self._target(view, self._copy))
            return matching.run(deadline)

    def _target(self, view: Observation, copy: ModelCopy) -> dict[str, Tensor]:
        shared = view.gradients[-1].tensors
        target = {}
        for name in copy.read:
            if name in shared:
                g = whole_tensor(shared[name]).to(copy.device)
                target[name] = g if g.dtype == torch.float64 else g.float()
                if not bool(g.isfinite().all()):
                    raise UnusableObservation(f"the gradient of {name} has NaN or infinity")
        if not any(bool(g.any()) for g in target.values()):
            raise UnusableObservation("every gradient that is matched is zero")
        return target


@dataclass(frozen=True)
class Dummy:
    """Dummy texts, which the search changes until their gradient is the shared one.

    Attributes:
        words: (B, L, e) word embeddings.
        labels: (B, L, V) logits of each token's label; (B, C) for a classifier; None if labels are
            the text itself.
    """

    words: Tensor
    labels: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return words and labels by name; no labels if they are the text itself."""
        return {"words": self.words} | ({} if self.labels is None else {"labels": self.labels})

    def rearranged(self, text: int, order: Tensor) -> Dummy:
        """Return the texts with one text's tokens in another order (L,)."""
        words, labels = self.words.clone(), self.labels
        words[text] = words[text, order]
        if labels is not None and labels.dim() == 3:
            labels = labels.clone()
            labels[text] = labels[text, order]
        return Dummy(words, labels)


class Matching:
    """The search for the texts of one observation, within a session of the copy.

    Args:
        attack: the settings.
        copy: the adversary's copy of the model.
        table: the vocabulary of the copy.
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
        self.squared_norm = float(sum(g.double().square().sum() for g in target.values()))
        self.mean_word_norm = float(table.embeddings.norm(dim=1).mean())
        self.generator = torch.Generator().manual_seed(attack.seed)
        self.tried = 0

    # ---- the loss -------------------------------------------------------------------------

    def distance(self, dummy: Dummy, *, differentiable: bool = False) -> Tensor:
        """Return the distance of dummy texts' gradient from the shared one; 0 at the true texts."""
        with torch.enable_grad():
            ids, labels = self._ids_and_labels(dummy)
            loss = self.copy.loss(ids, labels, dummy.words)
            gradients = self.copy.gradients(loss, differentiable=differentiable)
            parts = [(gradients[n], g) for n, g in self.target.items() if n in gradients]
            if not parts:
                raise UnusableObservation("the loss of a text depends on nothing that is matched")
            if self.attack.distance == "cosine":
                return _cosine_distance(parts)
            total = torch.stack([(a - b).square().sum() for a, b in parts]).sum()
            if self.attack.distance == "tag":
                weights = [1.0] * len(parts)
                if self.attack.matching.layer_weights:
                    weights = [1 - k / len(parts) for k in range(len(parts))]
                pairs = zip(weights, parts, strict=True)
                l1 = torch.stack([w * (a - b).abs().sum() for w, (a, b) in pairs]).sum()
                total = total + self.attack.matching.alpha * l1
            return total / self.squared_norm

    def _ids_and_labels(self, dummy: Dummy) -> tuple[Tensor, Tensor]:
        """Return the nearest tokens (B, L), and labels as differentiable distributions."""
        ids = self.tokens(dummy.words)[0]
        if dummy.labels is not None:
            return ids, dummy.labels.softmax(-1)
        directions = self.table.directions["cosine"]
        cosines = F.normalize(dummy.words, dim=-1) @ directions.T
        soft = (cosines / LIMITS.softness).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(2, ids[..., None], 1.0)
        return ids, hard + soft - soft.detach()

    def tokens(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest tokens (B, L), and their lead in cosine over the next."""
        ids, cosines = self.table.nearest(words, 2, "cosine")
        return ids[..., 0], cosines[..., 0] - cosines[..., -1]

    def _score(self, dummy: Dummy) -> float:
        """Return the score that ranks rearranged texts: the distance plus the weighted loss."""
        self.tried += 1
        value = float(self.distance(dummy).detach())
        if self.attack.matching.prior:
            ids = self.tokens(dummy.words)[0]
            value += self.attack.matching.prior * float(self.copy.loss(ids, ids))
        return value

    # ---- the search -----------------------------------------------------------------------

    def run(self, deadline: Deadline) -> TextGuess:
        """Descend from the best of random starts, and rearrange texts between steps."""
        attack = self.attack
        dummy = self._start(deadline)
        rates = {"words": attack.lr * self.table.scale, "labels": LIMITS.label_rate}
        optimizers = {name: RowAdam(x, rates[name]) for name, x in dummy.tensors.items()}
        best, smallest, steps = dummy, math.inf, 0
        for step in range(attack.steps):
            if deadline.passed:
                break
            current = Dummy(**{name: optimizer.values for name, optimizer in optimizers.items()})
            value, gradients = self._loss_gradients(current)
            if value < smallest:
                best = Dummy(**{name: x.clone() for name, x in current.tensors.items()})
                smallest = value
            for name, gradient in gradients.items():
                optimizers[name].lr = rates[name] * (1 - step / attack.steps)
                optimizers[name].step(gradient)
            every = attack.matching.swap_every
            due = step % every == 1 % every
            if attack.matching.swaps and due and step >= LIMITS.burn_in * attack.steps:
                for name, x in self._rearrange(current, deadline).tensors.items():
                    optimizers[name].values.copy_(x)
            steps += 1
        tokens, lead = self.tokens(best.words)
        if best.labels is not None and best.labels.dim() == 3:
            tokens[:, -1] = best.labels[:, -1].argmax(-1)
        return TextGuess(
            tokens.cpu(), lead.float().cpu(), steps == attack.steps, self.tried + steps
        )

    def _start(self, deadline: Deadline) -> Dummy:
        """Return the best of the random starts."""
        attack, device = self.attack, self.copy.device
        shape = (attack.texts, attack.length)
        types, width = self.table.embeddings.shape
        best: tuple[float, Dummy] | None = None
        for _ in range(attack.matching.starts):
            draws = torch.randn(*shape, width, generator=self.generator).to(self.table.embeddings)
            labels: Tensor | None = None
            if self.copy.anatomy.kind == "classifier":
                classes = self.copy.anatomy.vocab_size
                labels = torch.randn(attack.texts, classes, generator=self.generator).to(device)
            elif attack.labels == "learned":
                labels = torch.randn(*shape, types, generator=self.generator).to(device)
            dummy = Dummy(self.mean_word_norm * F.normalize(draws, dim=-1), labels)
            if attack.matching.starts == 1:
                return dummy
            self.tried += 1
            value = float(self.distance(dummy).detach())
            if best is None or value < best[0]:
                best = (value, dummy)
            if deadline.passed:
                break
        assert best is not None
        return best[1]

    def _loss_gradients(self, dummy: Dummy) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of the descent, and its gradients in words and labels by name."""
        leaves = {name: x.clone().requires_grad_() for name, x in dummy.tensors.items()}
        with torch.enable_grad():
            leaf = Dummy(**leaves)
            loss = self.distance(leaf, differentiable=True)
            if self.attack.matching.regularise:
                ratio = leaf.words.norm(dim=-1).mean() / self.mean_word_norm
                loss = loss + self.attack.matching.regularise * (ratio - 1).square()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, gradients, strict=True))

    def _rearrange(self, dummy: Dummy, deadline: Deadline) -> Dummy:
        """Return each text in the best of several orders, the current one included."""
        for text in range(len(dummy.words)):
            best, smallest = dummy, self._score(dummy)
            for order in self._orders():
                if deadline.passed:
                    return best
                other = dummy.rearranged(text, order.to(dummy.words.device))
                value = self._score(other)
                if value < smallest:
                    best, smallest = other, value
            dummy = best
        return dummy

    def _orders(self) -> Iterator[Tensor]:
        """Yield orders: two tokens exchanged, a token moved, a piece moved, a rotation, in turn."""
        length = self.attack.length
        for k in range(self.attack.matching.swaps):
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
    """Return the mean of 1 - cosine over tensors whose shared gradient is more than rounding."""
    norms = torch.stack([b.norm() for _, b in parts])
    is_large = (norms > LIMITS.rounding * norms.max()).tolist()
    pairs = [pair for pair, large in zip(parts, is_large, strict=True) if large]
    cosines = [(a * b).sum() / (a.norm() * b.norm()).clamp_min(TINY) for a, b in pairs]
    return 1 - torch.stack(cosines).mean()

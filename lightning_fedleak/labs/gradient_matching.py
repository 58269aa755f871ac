"""Whole texts by gradient matching: change dummy words until their gradient is the shared one.

Three systems of the literature share the idea and differ in the distance, in the labels, and in
whether words are also rearranged: DLG (Zhu, Liu and Han, NeurIPS 2019), TAG (Deng et al., Findings
of EMNLP 2021) and LAMP (Balunovic et al., NeurIPS 2022).

The whole model on the adversary's copy of its weights: logits, losses and their gradients.

A :class:`~lightning_fedleak.attacks.texts.bottom_model.BottomModel` ends at a block and its weights
have no gradient. Attacks that compare gradients need the model's loss, its gradient
with respect to the attacked weights, and that gradient's derivative with respect to word
embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_fedleak import attacks
from lightning_fedleak.attacks import Query, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts.base import TINY, Deadline, TextGuess
from lightning_fedleak.attacks.texts.bottom_model import CopiedModel
from lightning_fedleak.attacks.texts.descent import RowAdam, TokenTable
from lightning_fedleak.model.anatomy import Anatomy, unwrap
from lightning_fedleak.model.model_runs import call_with, logits_in, takes
from lightning_fedleak.model.snapshots import Observation, UpdateSnapshot, whole_tensor
from lightning_fedleak.validate import check_choice, check_integer


class ModelCopy(CopiedModel):
    """A causal model, run in eval mode on the adversary's copy of its weights.

    Trained weights are copied, frozen ones shared with the live model. A run restores the user's
    parameters and their ``.grad``, training flags, hooks and global random states. Attention runs
    in plain products (SDPA's ``MATH``), which have a second derivative.

    Args:
        anatomy: of the live model.
        autocast: dtype of the client's autocast region, or None.

    Raises:
        TypeError: the model is sharded over processes (FSDP2).
    """

    def __init__(self, anatomy: Anatomy, *, autocast: torch.dtype | None = None) -> None:
        super().__init__(autocast)
        self.refresh(anatomy, step=0)

    @torch.no_grad()
    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights at ``step``; trained parameters may have changed.

        Raises:
            TypeError: the model is sharded over processes (FSDP2).
        """
        if any(hasattr(m, "unshard") for m in anatomy.root.modules()):
            raise TypeError(
                f"{type(anatomy.model).__name__} is sharded over processes (FSDP2), of which no "
                "copy is made: remove the attack"
            )
        self.anatomy, self.step = anatomy, step
        self._embedding = unwrap(anatomy.embedding)
        attacked = set(trained_names(anatomy))
        names = {id(p): n for n, p in anatomy.root.named_parameters() if n in attacked}
        with torch.inference_mode(False):
            self._weights, self._leaves = {}, {}
            for name, parameter in anatomy.model.named_parameters():
                weight = parameter.detach()
                weight = weight.clone() if parameter.requires_grad else weight
                if id(parameter) in names:
                    self._leaves[names[id(parameter)]] = weight.requires_grad_()
                self._weights[name] = weight

    @contextmanager
    def session(self) -> Iterator[None]:
        """Prepare the model for any number of calls."""
        with torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH), super().session():
            yield

    @torch.no_grad()
    def word_embeddings(self) -> Tensor:
        """Return the word embeddings (V, e) of the vocabulary."""
        names = {id(p): n for n, p in self.anatomy.model.named_parameters()}
        weights = {n: self._weights[names[id(p)]] for n, p in self._embedding.named_parameters()}
        with self.session():
            ids = torch.arange(self.anatomy.vocab_size, device=self.device)
            table: Tensor = torch.func.functional_call(self._embedding, weights, (ids,))
        return table.detach()

    def logits(self, ids: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the logits (B, L, V) of texts, in float32 at least.

        Args:
            ids: (B, L).
            words: (B, L, e) word embeddings in place of those of ``ids``. A trained embedding gets
                the gradient of the rows that ``ids`` name.
        """

        def replaced(_: nn.Module, __: object, output: Tensor) -> Tensor:
            assert words is not None
            return output - output.detach() + words.to(output.dtype)

        with self.session(), ExitStack() as stack:
            options = {"use_cache": False} if takes(self.anatomy.model, "use_cache") else {}
            if words is not None:
                stack.enter_context(self._embedding.register_forward_hook(replaced))
            inputs = {"input_ids": ids.to(self.device), **options}
            logits = logits_in(call_with(self.anatomy.model, self._weights, **inputs))
        logits = logits[:, -ids.shape[1] :]  # virtual tokens come first
        return logits if logits.dtype == torch.float64 else logits.float()

    def loss(self, ids: Tensor, labels: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy that the client trains on.

        Args:
            ids: (B, L).
            labels: (B, L), or (B, L, V) if they are distributions; each label is predicted from the
                position before it, and the first is not predicted.
            words: as for :meth:`logits`.
        """
        logits = self.logits(ids, words)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(0, 1))

    def gradients(self, loss: Tensor, *, differentiable: bool = False) -> dict[str, Tensor]:
        """Return a loss's gradient for each attacked weight, in float32 at least, by name.

        Args:
            loss: of :meth:`loss`, computed with gradients enabled.
            differentiable: whether they have a gradient themselves.
        """
        gradients = torch.autograd.grad(
            loss, list(self._leaves.values()), create_graph=differentiable, allow_unused=True
        )
        pairs = zip(self._leaves, gradients, strict=True)
        return {n: g if g.dtype == torch.float64 else g.float() for n, g in pairs if g is not None}


def trained_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names in ``anatomy.root`` of trained parameters; of all if none is trained."""
    inside = {id(p) for p in anatomy.model.parameters()}
    every = [n for n, p in anatomy.root.named_parameters() if id(p) in inside]
    return tuple([n for n in every if anatomy.trainable(n)] or every)


class ModelCopyAttack(attacks.TextAttack):
    """An adversary with a copy of a causal model who knows the texts' number and lengths."""

    threat_model = attacks.ThreatModel.create(
        "an honest but curious server that reads one gradient and knows how many texts it comes "
        "from and how long they are",
        attacks.Capability.KNOWS_MODEL,
    )
    restores_fully = False
    needs_plain_inputs = True
    last_token_open = True
    _copy: ModelCopy | None = None

    def needs(self, anatomy: Anatomy) -> attacks.Surfaces:
        """Return the gradients of the trained parameters; of all parameters if none is trained.

        Raises:
            ThreatModelError: the model predicts no next token.
        """
        if anatomy.kind != "causal":
            raise attacks.ThreatModelError(
                f"attack '{self.name}' needs next tokens, not a {anatomy.kind} model: remove "
                "the attack"
            )
        return attacks.Surfaces(gradients=trained_names(anatomy))

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the model."""
        self._copy = ModelCopy(anatomy, autocast=self._facts.autocast)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again."""
        self.model.refresh(anatomy, step)

    @property
    def model(self) -> ModelCopy:
        """Return the copy that :meth:`prepare` made."""
        assert self._copy is not None
        return self._copy


# None of the values was tuned.
LABEL_RATE = 0.2  # Adam's learning rate of learned labels, in logits
SOFTNESS = 0.1  # temperature of cosines in soft labels; less: steeper gradients
BURN_IN = 0.1  # share of the steps before texts are rearranged
SWAP_EVERY = 75  # steps from one rearrangement to the next
ROUNDING = 1e-5  # share of the largest norm; smaller gradients (key biases) are rounding
ALPHA = 0.01  # weight of the l1 distance in TAG

System = Literal["dlg", "tag", "lamp"]
Dummy = dict[str, Tensor]
"""Dummy texts: ``words`` (B, L, e), and ``labels`` (B, L, V) logits unless they are the text."""


@dataclass(frozen=True)
class Matched:
    """The choices of a system.

    Attributes:
        distance: of gradients.
        learned: whether labels are free distributions; else they are the text itself.
        lr: learning rate, in standard deviations of the entries of the embedding matrix.
        starts: number of random starts. The search continues from the best.
        swaps: number of rearrangements that are tried for each text at a time.
        regularise: weight of the squared relative deviation of the words' mean norm from the
            vocabulary's.
        prior: weight of the model's own loss on a text when rearranged texts are compared (LAMP
            uses the loss of an auxiliary model).
    """

    distance: Literal["l2", "tag", "cosine"]
    learned: bool
    lr: float
    starts: int = 1
    swaps: int = 0
    regularise: float = 0.0
    prior: float = 0.0


SYSTEMS: Mapping[str, Matched] = {
    "dlg": Matched("l2", True, 0.2),
    "tag": Matched("tag", True, 0.2),
    "lamp": Matched("cosine", False, 0.5, starts=20, swaps=20, regularise=0.1, prior=0.1),
}


class GradientMatching(ModelCopyAttack):
    """An attack that changes dummy word embeddings until their gradient matches the shared one.

    An honest but curious server knows the weights. As in the literature it also knows how many
    texts the batch holds and how long they are, and all have the same length.

    ==========  ===============  ================  ========================
    system      ``dlg``          ``tag``           ``lamp``
    ==========  ===============  ================  ========================
    distance    squared l2       + .01 * l1        1 - cosine, mean of all
    labels      learned          learned           the text itself
    start       one, random      one, random       best of ``starts``
    norms       free             free              near the vocabulary's
    rearranged  no               no                ``swaps``, by a prior
    ==========  ===============  ================  ========================

    In the papers DLG learns labels, TAG does without knowing them, and LAMP is given those of
    classifiers. A causal model's labels are its text. Learned labels are free distributions at each
    position. A label from the text is the token nearest to the dummy word at its position, with the
    gradient of a softmax of the cosines (a straight-through estimate).

    Unlike in the papers, all three descend by Adam with a rate that falls linearly to zero (DLG
    used L-BFGS, LAMP a rate that falls in steps), and start at the mean norm of the vocabulary. A
    causal text's last token is only a label and does not count, as for
    :class:`~lightning_fedleak.attacks.texts.subspace.SubspaceTexts`.

    It reads single gradients of whole causal models and of adapters, and rounds of one step of SGD.

    Args:
        texts: number of texts in a batch.
        length: number of tokens in each text, at least 2.
        system: ``"dlg"``, ``"tag"`` or ``"lamp"``.
        steps: number of steps of the descent.
        starts: number of random starts; None for the system's.
        swaps: number of rearrangements that are tried for each text at a time; None for the
            system's.
        budget_seconds: wall time for one observation; None for no bound. After it the best so far
            is returned, and the guess says that it is not finished.
        seed: seed of starts and rearrangements.
        name: the attack's name in the logs; by default the system's.

    Raises:
        ValueError: a number out of range, or an unknown ``system``.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.labs.gradient_matching import GradientMatching
        >>> attack = GradientMatching(texts=1, length=16, system="lamp", budget_seconds=60.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    config_names = ("texts", "length", "system", "steps", "choices.starts", "choices.swaps", "seed")
    needs_float64 = True

    def __init__(
        self,
        texts: int,
        length: int,
        system: System = "lamp",
        *,
        steps: int = 2000,
        starts: int | None = None,
        swaps: int | None = None,
        budget_seconds: float | None = 120.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        check_choice("system", system, get_args(System))
        super().__init__(name or system, budget_seconds)
        self.texts = check_integer("texts", texts)
        self.length = check_integer("length", length, at_least=2)
        self.steps = check_integer("steps", steps)
        self.system: System = system
        check_integer("starts", starts, optional=True)
        check_integer("swaps", swaps, at_least=0, optional=True)
        choices = SYSTEMS[system]
        choices = choices if starts is None else replace(choices, starts=starts)
        self.choices = choices if swaps is None else replace(choices, swaps=swaps)
        self.prefers_likely_texts = self.choices.prior > 0
        self.seed = seed

    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstruct the texts of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, in any order. ``confidence`` is a token's lead in
            cosine over the next best.

        Raises:
            UnusableObservation: non-finite or zero gradients, or a round of other than one plain
                step of SGD.
        """
        update = view.gradients[-1]
        if isinstance(update, UpdateSnapshot):
            steps = LocalSteps.from_facts(self._facts)
            if (
                steps is None
                or update.local_steps != 1
                or not steps.sums(fresh=update.fresh)
                or steps.settings.get("nesterov")
            ):
                raise UnusableObservation(
                    "only a gradient, or a round of one plain step of SGD, is matched"
                )
        deadline = Deadline(self.budget_seconds)
        with self.model.session(), torch.no_grad():
            return Matching(self, view.gradients[-1].tensors).run(deadline)


class Matching:
    """The search for the texts of one observation, within a session of the copy.

    Args:
        attack: the settings and the copy.
        shared: gradients by name.

    Raises:
        UnusableObservation: non-finite or zero gradients.
    """

    def __init__(self, attack: GradientMatching, shared: Mapping[str, Tensor]) -> None:
        self.attack, self.choices, self.copy = attack, attack.choices, attack.model
        self.table = TokenTable.from_embeddings(self.copy.word_embeddings())
        wide = {n: whole_tensor(g).to(self.copy.device) for n, g in shared.items()}
        self.target = {n: g if g.dtype == torch.float64 else g.float() for n, g in wide.items()}
        self.squared_norm = float(sum(g.double().square().sum() for g in wide.values()))
        if not 0 < self.squared_norm < math.inf:
            raise UnusableObservation("the gradients have NaN or infinity, or all of them are zero")
        self.mean_word_norm = float(self.table.embeddings.norm(dim=1).mean())
        self.generator = torch.Generator().manual_seed(attack.seed)
        self.tried = 0

    # ---- the loss -------------------------------------------------------------------------

    def distance(self, dummy: Dummy, *, differentiable: bool = False) -> Tensor:
        """Return the distance of dummy texts' gradient from the shared one; 0 at the true texts."""
        with torch.enable_grad():
            ids, labels = self._ids_and_labels(dummy)
            loss = self.copy.loss(ids, labels, dummy["words"])
            gradients = self.copy.gradients(loss, differentiable=differentiable)
            parts = [(gradients[n], g) for n, g in self.target.items() if n in gradients]
            if not parts:
                raise UnusableObservation("the loss of a text depends on nothing that is matched")
            if self.choices.distance == "cosine":
                return _cosine_distance(parts)
            total = torch.stack([(a - b).square().sum() for a, b in parts]).sum()
            if self.choices.distance == "tag":
                total = total + ALPHA * torch.stack([(a - b).abs().sum() for a, b in parts]).sum()
            return total / self.squared_norm

    def _ids_and_labels(self, dummy: Dummy) -> tuple[Tensor, Tensor]:
        """Return the nearest tokens (B, L), and labels as differentiable distributions."""
        ids = self.tokens(dummy["words"])[0]
        if "labels" in dummy:
            return ids, dummy["labels"].softmax(-1)
        directions = self.table.directions["cosine"]
        cosines = F.normalize(dummy["words"], dim=-1) @ directions.T
        soft = (cosines / SOFTNESS).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(2, ids[..., None], 1.0)
        return ids, hard + soft - soft.detach()

    def tokens(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest tokens (B, L), and their lead in cosine over the next."""
        ids, cosines = self.table.nearest(words, 2, "cosine")
        return ids[..., 0], cosines[..., 0] - cosines[..., -1]

    def score(self, dummy: Dummy) -> float:
        """Return the score that ranks rearranged texts: the distance plus the weighted loss."""
        self.tried += 1
        value = float(self.distance(dummy).detach())
        if self.choices.prior:
            ids = self.tokens(dummy["words"])[0]
            value += self.choices.prior * float(self.copy.loss(ids, ids))
        return value

    # ---- the search -----------------------------------------------------------------------

    def run(self, deadline: Deadline) -> TextGuess:
        """Descend from the best of random starts, and rearrange texts between steps."""
        n_steps = self.attack.steps
        dummy = self._start(deadline)
        rates = {"words": self.choices.lr * self.table.scale, "labels": LABEL_RATE}
        optimizers = {name: RowAdam(x, rates[name]) for name, x in dummy.items()}
        best, smallest, steps = dummy, math.inf, 0
        while steps < n_steps and not deadline.passed:
            current = {name: optimizer.values for name, optimizer in optimizers.items()}
            value, gradients = self._loss_gradients(current)
            if value < smallest:
                best, smallest = {name: x.clone() for name, x in current.items()}, value
            for name, gradient in gradients.items():
                optimizers[name].lr = rates[name] * (1 - steps / n_steps)
                optimizers[name].step(gradient)
            due = steps % SWAP_EVERY == 1 % SWAP_EVERY and steps >= BURN_IN * n_steps
            if self.choices.swaps and due:
                for name, x in self.rearrange(current, deadline).items():
                    optimizers[name].values.copy_(x)
            steps += 1
        tokens, lead = self.tokens(best["words"])
        if "labels" in best:
            tokens[:, -1] = best["labels"][:, -1].argmax(-1)
        return TextGuess(tokens.cpu(), lead.float().cpu(), steps == n_steps, self.tried + steps)

    def _start(self, deadline: Deadline) -> Dummy:
        """Return the best of the random starts."""
        table = self.table.embeddings
        shape = (self.attack.texts, self.attack.length)
        best: tuple[float, Dummy] | None = None
        for _ in range(self.choices.starts):
            draws = torch.randn(*shape, table.shape[1], generator=self.generator).to(table)
            dummy = {"words": self.mean_word_norm * F.normalize(draws, dim=-1)}
            if self.choices.learned:
                labels = torch.randn(*shape, len(table), generator=self.generator)
                dummy["labels"] = labels.to(self.copy.device)
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
        leaves = {name: x.clone().requires_grad_() for name, x in dummy.items()}
        with torch.enable_grad():
            loss = self.distance(leaves, differentiable=True)
            ratio = leaves["words"].norm(dim=-1).mean() / self.mean_word_norm
            loss = loss + self.choices.regularise * (ratio - 1).square()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, gradients, strict=True))

    def rearrange(self, dummy: Dummy, deadline: Deadline) -> Dummy:
        """Return each text in the best of several orders, the current one included."""
        for text in range(self.attack.texts):
            best, smallest = dummy, self.score(dummy)
            for order in self.orders():
                if deadline.passed:
                    return best
                other = {name: x.clone() for name, x in dummy.items()}
                for x in other.values():
                    x[text] = x[text, order.to(x.device)]
                value = self.score(other)
                if value < smallest:
                    best, smallest = other, value
            dummy = best
        return dummy

    def orders(self) -> Iterator[Tensor]:
        """Yield orders: two tokens exchanged, a token moved, a piece moved, a rotation, in turn."""
        length = self.attack.length
        for k in range(self.choices.swaps):
            order = torch.arange(length)
            first, last, place = torch.randint(length, (3,), generator=self.generator).tolist()
            if k % 4 == 0:
                order[[first, last]] = order[[last, first]]
            elif k % 4 == 3:
                order = order.roll(-first)
            else:
                first, last = (first, first) if k % 4 == 1 else sorted((first, last))
                rest = torch.cat([order[:first], order[last + 1 :]])
                place = place % (len(rest) + 1)
                order = torch.cat([rest[:place], order[first : last + 1], rest[place:]])
            yield order


def _cosine_distance(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of 1 - cosine over tensors whose shared gradient is more than rounding."""
    norms = torch.stack([b.norm() for _, b in parts])
    is_large = (norms > ROUNDING * norms.max()).tolist()
    pairs = [pair for pair, large in zip(parts, is_large, strict=True) if large]
    cosines = [(a * b).sum() / (a.norm() * b.norm()).clamp_min(TINY) for a, b in pairs]
    return 1 - torch.stack(cosines).mean()

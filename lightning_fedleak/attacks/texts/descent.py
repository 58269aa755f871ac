"""Gradient descent to a text: its steps, the tokens at which it ends, and the base of two attacks.

``torch.optim`` is not used: other tools hook every optimizer of the process, and a row that stops
would have to take its moments along.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.texts.base import (
    NOTHING,
    Deadline,
    InversionAttack,
    Sent,
    TextGuess,
    join_guesses,
)
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.validate import check_choice, check_integer, check_number

BETAS = (0.9, 0.999)  # decay of Adam's moments: Kingma & Ba 2015
EPS = 1e-8  # added to the root of Adam's second moment: Kingma & Ba 2015

Likeness = Literal["whitened", "cosine"]
LIKENESSES: tuple[Likeness, ...] = ("whitened", "cosine")

SIMILARITIES_AT_ONCE = 1 << 24  # numbers in memory; fewer need less memory and more calls
LEAST_VARIANCE = 1e-4  # of the largest; whitening enlarges directions of less no further. Not tuned

Weighting = Literal["per_position", "paper"]
Stop = Literal["settled", "cosine"]

CHECK_EVERY = 25  # steps between checks whether a text has settled. Not tuned
PATIENCE = 8  # checks without a change of a token after which it has; more cost steps. Not tuned


class RowAdam:
    """Adam (Kingma & Ba 2015) as torch.optim's, without weight decay.

    Args:
        values: (B, ...) start; copied.
        lr: learning rate.

    Attributes:
        values: (B, ...) without gradient.
        steps: number of steps so far.
    """

    def __init__(self, values: Tensor, lr: float) -> None:
        self.values = values.detach().clone()
        self.lr = lr
        self.steps = 0
        self._mean = torch.zeros_like(self.values)
        self._square = torch.zeros_like(self.values)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """Take one step against ``gradient`` (B, ...), in place in ``values``."""
        self.steps += 1
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self._square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        self.values.addcdiv_(self._mean, root, value=-self.lr / (1 - BETAS[0] ** self.steps))

    def select(self, rows: Tensor) -> None:
        """Drop all but ``rows`` (indices)."""
        self.values = self.values[rows]
        self._mean = self._mean[rows]
        self._square = self._square[rows]


@dataclass(frozen=True)
class TokenTable:
    """The vocabulary's word embeddings, ready to be searched.

    *Cosine* is the cosine of an embedding with a token's (Eq. 4). *Whitened* is the same after
    the vocabulary's mean is subtracted and its covariance made the identity. Then directions that
    most tokens share no longer decide, along which an embedding may drift unseen. For SmolLM2-135M
    at split 10, 48 tokens and 100 steps it names 85% of the tokens, the plain cosine 33%.

    Attributes:
        embeddings: (V, e) float32 or wider.
        mean: (e,) of the vocabulary.
        whitening: (e, e), applied from the right; empty in a table for cosines alone.
        directions: (V, e) of unit length, for each likeness.
    """

    embeddings: Tensor
    mean: Tensor
    whitening: Tensor
    directions: dict[Likeness, Tensor]

    @classmethod
    def from_embeddings(cls, embeddings: Tensor, *, whiten: bool = True) -> TokenTable:
        """Return the table of word embeddings (V, e), V at least 2.

        Without ``whiten`` it is for cosines alone, and no covariance is computed.
        """
        table = embeddings.detach()
        table = table if table.dtype == torch.float64 else table.float()
        mean, cosines = table.mean(0), F.normalize(table, dim=1)
        if not whiten:
            return cls(table, mean, table.new_zeros(0, 0), {"cosine": cosines})
        centred = (table - mean).double()
        variances, axes = torch.linalg.eigh(centred.T @ centred / len(table))
        variances = variances.clamp(min=LEAST_VARIANCE * float(variances[-1]))
        whitening = (axes / variances.sqrt() @ axes.T).to(table.dtype)
        white = F.normalize((table - mean) @ whitening, dim=1)
        return cls(table, mean, whitening, {"whitened": white, "cosine": cosines})

    @property
    def scale(self) -> float:
        """Return the standard deviation of the vocabulary's numbers about their mean."""
        return float((self.embeddings - self.mean).square().mean().sqrt())

    def nearest(
        self, embeddings: Tensor, k: int = 1, likeness: Likeness = "whitened"
    ) -> tuple[Tensor, Tensor]:
        """Return the k tokens most like each embedding, the most similar first.

        Args:
            embeddings: (..., e).
            k: at most the size of the vocabulary.
            likeness: see the class.

        Returns:
            Token ids and their cosines, both (..., k).
        """
        shape = embeddings.shape[:-1]
        points = embeddings.detach().to(self.embeddings.dtype).reshape(-1, embeddings.shape[-1])
        if likeness == "whitened":
            points = (points - self.mean) @ self.whitening
        points = F.normalize(points, dim=1)
        directions = self.directions[likeness]
        k = min(k, len(directions))
        nearest = [
            (part @ directions.T).topk(k, dim=1)
            for part in torch.split(points, max(1, SIMILARITIES_AT_ONCE // len(directions)))
        ]
        ids = torch.cat([part.indices for part in nearest]).reshape(*shape, k)
        return ids, torch.cat([part.values for part in nearest]).reshape(*shape, k)


@dataclass(frozen=True)
class DescentGuess(TextGuess):
    """The texts at which a descent ends.

    Attributes:
        steps: (B,) gradient steps for each text.
        errors: (B, L) distance of the hidden states of ``tokens`` from those sent, over the norm
            of those sent; 0 at padded positions, NaN where nothing was guessed.
    """

    steps: Tensor | None = None
    errors: Tensor | None = None


@dataclass(frozen=True)
class DescentSettings:
    """Settings of a descent on hidden states that are rarely changed.

    Attributes:
        stop: ``"settled"`` ends when the tokens' hidden states are those sent but for rounding, or
            when no token has changed in 200 steps (checked every 25). ``"cosine"``, the paper's
            rule, ends when the cosine of a text's hidden states, as one vector, with those sent has
            reached ``cosine``.
        cosine: the paper's value is .98.
        weighting: the loss. ``"paper"`` is the squared distance of a text's hidden states from
            those sent (Eq. 3), which positions of large norm dominate, such as the first of most
            models (18 against 3.5 in stories15M). ``"per_position"`` is the sum over positions of
            the distance over the norm of what was sent.
        at_once: tokens that go through the bottom with gradient in one run (at least one text),
            which bounds the memory.
        autocast: dtype of the autocast region that the client computes in (bf16-mixed), or None.
        refresh_every: optimizer steps after which the bottom model is copied again.

    Raises:
        ValueError: a setting out of range.

    Examples:
        >>> from lightning_fedleak.attacks import DescentSettings, EmbeddingDescent
        >>> paper = DescentSettings(stop="cosine", weighting="paper")
        >>> attack = EmbeddingDescent(layer=3, likeness="cosine", initial="mean", descent=paper)
    """

    stop: Stop = "settled"
    cosine: float = 0.98
    weighting: Weighting = "per_position"
    at_once: int = 1 << 11
    autocast: torch.dtype | None = None
    refresh_every: int = 1

    def __post_init__(self) -> None:
        check_choice("stop", self.stop, get_args(Stop))
        check_number("cosine", self.cosine, above=-1, at_most=1)
        check_choice("weighting", self.weighting, get_args(Weighting))
        check_integer("at_once", self.at_once)
        check_integer("refresh_every", self.refresh_every)


class DescentAttack(InversionAttack):
    """An inversion attack by gradient steps through a copy of the bottom model.

    Every text is a separate problem and stops separately.

    Args:
        layer: the split.
        steps: gradient steps for one text, at most.
        lr: Adam's learning rate.
        descent: rarely changed settings; None for the defaults.
        budget_seconds: for one observation, divided evenly among its texts.
        name: in the logs.

    Raises:
        ValueError: a setting out of range.
    """

    needs_float64 = True
    config_names: ClassVar[tuple[str, ...]] = (
        *("layer", "steps", "lr", "descent.stop", "descent.weighting", "budget_seconds"),
    )

    def __init__(
        self,
        layer: int,
        steps: int,
        lr: float,
        descent: DescentSettings | None,
        budget_seconds: float | None,
        name: str | None,
    ) -> None:
        super().__init__(layer, budget_seconds, name)
        self.steps = check_integer("steps", steps)
        self.lr = check_number("lr", lr, above=0)
        self.descent = descent or DescentSettings()
        self._table: TokenTable | None = None

    # ---- the adversary's copy -------------------------------------------------------------

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the bottom model.

        Raises:
            ValueError: the model has no such layer, or its bottom cannot be run alone.
        """
        super().prepare(anatomy)
        # Weights copied in inference mode could never take part in autograd.
        with torch.inference_mode(False), torch.no_grad():
            self._copy = BottomModel(
                anatomy, self.layer, autocast=self.descent.autocast or self._facts.autocast
            )
            self._table = TokenTable.from_embeddings(self._copy.word_embeddings())

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again if the copy is old enough, or of another fit."""
        if 0 <= self.bottom.age(step) < self.descent.refresh_every:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.bottom.refresh(anatomy, step)
            words = self.bottom.word_embeddings()
            if not torch.equal(words.to(self.table.embeddings.dtype), self.table.embeddings):
                self._table = TokenTable.from_embeddings(words)

    @property
    def table(self) -> TokenTable:
        """Return the vocabulary of the adversary's copy.

        Raises:
            RuntimeError: there is none before :meth:`prepare`.
        """
        if self._table is None:
            raise RuntimeError(f"{type(self).__name__} has no bottom model yet: call prepare()")
        return self._table

    # ---- the variables of the descent -----------------------------------------------------

    @abstractmethod
    def start(self, sent: Sent) -> Tensor:
        """Return the variables (B, L, n) to start from."""

    @abstractmethod
    def words(self, variables: Tensor) -> Tensor:
        """Return the word embeddings (B, L, e) of variables, differentiable."""

    @abstractmethod
    def decode(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids (B, L) of variables, and each one's lead over the next best."""

    @property
    @abstractmethod
    def step_size(self) -> float:
        """Return ``lr`` in units of the variables."""

    def tokens_at_once(self) -> int:
        """Return the number of tokens in one run."""
        return self.descent.at_once

    def solve(self, sent: Sent, deadline: Deadline) -> DescentGuess:
        """Return the texts of a few hidden states, within a session of the bottom model."""
        run = Descent(self, sent, deadline)
        run.descend(self.steps)
        return run.guess()

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> DescentGuess:
        """Return the texts of hidden states (B, L, d).

        Raises:
            ValueError: the hidden states are not as wide as the layer's, or mask or positions of
                another shape than they.
        """
        bottom = self._check_width(hidden)
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
        for name, tensor in inputs.items():
            if tensor is not None and tensor.shape != hidden.shape[:2]:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)}, but the hidden states are "
                    f"{tuple(hidden.shape[:2])} and more"
                )
        deadline = Deadline(self.budget_seconds)
        rows = max(1, self.tokens_at_once() // hidden.shape[1])
        with torch.inference_mode(False), torch.no_grad(), bottom.session():
            # Cloned, since autograd takes no tensors that were made in inference mode.
            copies = [
                None if t is None else t.to(bottom.device).clone()
                for t in (attention_mask, position_ids)
            ]
            sent = Sent.from_states(hidden.to(bottom.device).clone(), *copies)
            guesses: list[DescentGuess] = []
            for start in range(0, len(sent), rows):
                count = -(-(len(sent) - start) // rows)
                part = sent[start : start + rows]
                late = bool(guesses) and deadline.passed
                guess = _open_guess(part) if late else self.solve(part, deadline.share(count))
                guesses.append(guess)
            return join_guesses(guesses, hidden.device)


class Descent:
    """One descent on a few texts.

    Attributes:
        variables: (B, L, n).
        tokens: (B, L) that the variables stood for after the last :meth:`descend`.
        errors: (B, L) relative errors of these tokens.
        confidence: (B, L) of these tokens.
        steps: (B,) gradient steps for each text.
        stopped: (B,) texts whose descent is over.
        finished: False once the deadline has passed.
        verified: number of candidates so far.
    """

    def __init__(self, attack: DescentAttack, sent: Sent, deadline: Deadline) -> None:
        self.attack = attack
        self.sent = sent
        self.deadline = deadline
        device, n = sent.real.device, len(sent)
        self.variables = attack.start(sent).clone()
        self.steps = torch.zeros(n, dtype=torch.int64, device=device)
        self.tokens = torch.full(sent.real.shape, NOTHING, device=device)
        self.errors = torch.full_like(sent.hidden[..., 0], torch.nan)
        self.confidence = torch.zeros_like(sent.hidden[..., 0])
        self.stopped = torch.zeros(n, dtype=torch.bool, device=device)
        self.finished = True
        self.verified = 0

    def descend(self, steps: int) -> None:
        """Take up to ``steps`` gradient steps for each text that is not stopped, and decode it."""
        rows = (~self.stopped).nonzero().flatten()
        if len(rows) == 0:
            return
        active, sent = rows, self.sent[rows]
        adam = RowAdam(self.variables[rows], self.attack.step_size)
        last, same = self.tokens[rows], torch.zeros_like(rows)
        for step in range(1, steps + 1):
            if self.deadline.passed:
                self.finished = False
                break
            gradient, stopped = self._gradient(adam.values, sent)
            adam.step(gradient)
            self.steps[active] += 1
            if self.attack.descent.stop == "settled" and step % CHECK_EVERY == 0:
                tokens, _ = self.attack.decode(adam.values)
                unchanged = ((tokens == last) | ~sent.real).all(1)
                same = torch.where(unchanged, same + 1, 0)
                exact = self._errors(tokens, sent) <= self.attack.bottom.rounding
                stopped = (same >= PATIENCE) | exact.all(1)
                last = tokens
            if bool(stopped.any()):
                self.variables[active] = adam.values
                rest = (~stopped).nonzero().flatten()
                if len(rest) == 0:
                    break
                active, sent, last, same = active[rest], sent[rest], last[rest], same[rest]
                adam.select(rest)
        self.variables[active] = adam.values
        tokens, lead = self.attack.decode(self.variables[rows])
        self.record(rows, tokens, self._errors(tokens, self.sent[rows]), lead)

    def _gradient(self, variables: Tensor, sent: Sent) -> tuple[Tensor, Tensor]:
        """Return the distance's gradient in the variables, and which texts their cosine stops."""
        attack = self.attack
        with torch.enable_grad():
            leaf = variables.detach().requires_grad_()
            words = attack.words(leaf)
            hidden = attack.bottom.hidden_from(words, sent.attention_mask, sent.position_ids)
            if attack.descent.weighting == "paper":
                distance = sent.squared_errors(hidden).sum()
            else:
                distance = sent.relative_errors(hidden).sum()
            (gradient,) = torch.autograd.grad(distance, leaf)
        if attack.descent.stop == "cosine":
            return gradient, sent.cosines(hidden.detach()) >= attack.descent.cosine
        return gradient, torch.zeros(len(sent), dtype=torch.bool, device=gradient.device)

    def _errors(self, tokens: Tensor, sent: Sent) -> Tensor:
        hidden = self.attack.bottom.hidden(tokens, sent.attention_mask, sent.position_ids)
        self.verified += int(sent.real.sum())
        return sent.relative_errors(hidden)

    def record(self, rows: Tensor, tokens: Tensor, errors: Tensor, confidence: Tensor) -> None:
        """Set the tokens of the texts ``rows``."""
        self.tokens[rows], self.errors[rows] = tokens, errors.to(self.errors.dtype)
        self.confidence[rows] = confidence.to(self.confidence.dtype)

    def record_better(self, other: DescentGuess) -> None:
        """Set the texts in which ``other`` is nearer to what was sent, by squared errors."""
        assert other.errors is not None
        assert other.confidence is not None
        sums = (e.masked_fill(~self.sent.real, 0.0) for e in (other.errors, self.errors))
        other_sums, present_sums = (e.square().sum(1) for e in sums)
        rows = (other_sums < present_sums).nonzero().flatten()
        self.record(rows, other.tokens[rows], other.errors[rows], other.confidence[rows])

    def guess(self) -> DescentGuess:
        """Return the tokens, errors and steps so far."""
        real = self.sent.real
        return DescentGuess(
            self.tokens.masked_fill(~real, NOTHING),
            confidence=self.confidence * real,
            finished=self.finished,
            candidates=self.verified,
            steps=self.steps,
            errors=self.errors.masked_fill(~real, 0.0),
        )


def _open_guess(sent: Sent) -> DescentGuess:
    """Return a guess without tokens, for texts that no time was left for."""
    nothing = torch.full(sent.real.shape, NOTHING, device=sent.real.device)
    unknown = torch.full_like(sent.hidden[..., 0], torch.nan)
    return DescentGuess(
        nothing,
        confidence=torch.zeros_like(unknown),
        finished=False,
        steps=torch.zeros_like(nothing[:, 0]),
        errors=unknown.masked_fill(~sent.real, 0.0),
    )

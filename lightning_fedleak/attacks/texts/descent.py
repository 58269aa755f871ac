"""Descent to a text: its steps, the tokens it ends at, and what the two attacks have in common.

``torch.optim`` is not used: other tools hook every optimizer of the process, and a row that
leaves would have to take its moments with it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.texts.base import (
    NOTHING,
    Deadline,
    InversionAttack,
    Sent,
    TextGuess,
    rounding,
)
from lightning_fedleak.attacks.texts.bottom_model import BottomModel

BETAS = (0.9, 0.999)
EPS = 1e-8

Likeness = Literal["whitened", "cosine"]
LIKENESSES: tuple[Likeness, ...] = ("whitened", "cosine")

CHUNK = 1 << 24
"""Similarities held at once."""

LEAST_VARIANCE = 1e-4
"""Of the largest: directions in which the vocabulary varies less are not blown up any further."""

Weighting = Literal["per_position", "paper"]
Stop = Literal["settled", "cosine"]
WEIGHTINGS: tuple[Weighting, ...] = ("per_position", "paper")
STOPS: tuple[Stop, ...] = ("settled", "cosine")

CHECK_EVERY = 25
PATIENCE = 8
"""Checks over which no token changes, after which a text is settled."""


class RowAdam:
    """Adam (Kingma & Ba 2015) as torch.optim's, without weight decay.

    Args:
        values: (B, ...) start; copied.
        lr: learning rate.

    Attributes:
        values: (B, ...) as they are now, without gradient.
        steps: taken so far.
    """

    def __init__(self, values: Tensor, lr: float) -> None:
        self.values = values.detach().clone()
        self.lr = lr
        self.steps = 0
        self._mean = torch.zeros_like(self.values)
        self._square = torch.zeros_like(self.values)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step against ``gradient`` (B, ...). In place: ``values`` is the same tensor."""
        self.steps += 1
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (self._square / (1 - BETAS[1] ** self.steps)).sqrt_().add_(EPS)
        self.values.addcdiv_(self._mean, root, value=-self.lr / (1 - BETAS[0] ** self.steps))

    def keep(self, rows: Tensor) -> None:
        """Goes on with ``rows`` (indices) alone."""
        self.values = self.values[rows]
        self._mean = self._mean[rows]
        self._square = self._square[rows]


@dataclass(frozen=True)
class TokenTable:
    """The vocabulary's word embeddings, ready to be searched.

    *Cosine* is the cosine of an embedding with a token's (Eq. 4). *Whitened* is the same after
    the vocabulary's mean is taken off and its covariance made the identity: the directions that
    most tokens share, and along which an embedding may drift without the hidden states showing
    it, then no longer decide. SmolLM2-135M at split 10, 48 tokens, 100 steps: 85% of the tokens in
    place of 33%.

    Attributes:
        embeddings: (V, e) float32 or wider.
        mean: (e,) of the vocabulary.
        whitening: (e, e), to be applied from the right; empty where only cosines are asked for.
        directions: of each likeness (V, e), of unit length.
    """

    embeddings: Tensor
    mean: Tensor
    whitening: Tensor
    directions: dict[Likeness, Tensor]

    @classmethod
    def of(cls, embeddings: Tensor) -> TokenTable:
        """Of (V, e) word embeddings, V at least 2."""
        table = embeddings.detach()
        table = table if table.dtype == torch.float64 else table.float()
        mean = table.mean(0)
        centred = (table - mean).double()
        variances, axes = torch.linalg.eigh(centred.T @ centred / len(table))
        variances = variances.clamp(min=LEAST_VARIANCE * float(variances[-1]))
        whitening = (axes / variances.sqrt() @ axes.T).to(table.dtype)
        directions: dict[Likeness, Tensor] = {
            "whitened": F.normalize((table - mean) @ whitening, dim=1),
            "cosine": F.normalize(table, dim=1),
        }
        return cls(table, mean, whitening, directions)

    @classmethod
    def by_cosine(cls, embeddings: Tensor) -> TokenTable:
        """Of (V, e) word embeddings, for cosines alone: no covariance is computed."""
        table = embeddings.detach()
        table = table if table.dtype == torch.float64 else table.float()
        directions: dict[Likeness, Tensor] = {"cosine": F.normalize(table, dim=1)}
        return cls(table, table.mean(0), table.new_zeros(0, 0), directions)

    @property
    def scale(self) -> float:
        """Standard deviation of the vocabulary's numbers about their mean, over all dimensions."""
        return float((self.embeddings - self.mean).square().mean().sqrt())

    def nearest(
        self, embeddings: Tensor, k: int = 1, likeness: Likeness = "whitened"
    ) -> tuple[Tensor, Tensor]:
        """The k tokens most like each embedding, the likest first.

        Args:
            embeddings: (..., e).
            k: at most the size of the vocabulary.
            likeness: see above.

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
        found = [
            (part @ directions.T).topk(k, dim=1)
            for part in torch.split(points, max(1, CHUNK // len(directions)))
        ]
        ids = torch.cat([f.indices for f in found]).reshape(*shape, k)
        return ids, torch.cat([f.values for f in found]).reshape(*shape, k)


@dataclass(frozen=True)
class DescentGuess(TextGuess):
    """The texts that a descent ends in.

    Attributes:
        steps: (B,) gradient steps taken for each text.
        errors: (B, L) distance of the hidden states of ``tokens`` from those sent, over the norm
            of those sent; 0 at padded positions, NaN where nothing was guessed.
    """

    steps: Tensor | None = None
    errors: Tensor | None = None


class DescentAttack(InversionAttack):
    """An inversion attack by gradient steps through its own copy of the bottom model.

    Every text is a problem of its own, and stops on its own.

    Args:
        layer: the split.
        steps: most gradient steps for one text.
        lr: Adam's learning rate.
        stop: ``"settled"``: the hidden states of the tokens found so far are those sent but for
            rounding, or no token changed in 200 steps (looked at every 25). ``"cosine"``, the
            paper's: the cosine of all hidden states of a text, as one vector, with those sent has
            reached ``cosine``.
        cosine: the paper's .98.
        weighting: what is made small. ``"paper"``: the squared distance of all hidden states of a
            text from those sent (Eq. 3), which positions of large norm dominate, such as the first
            of most models (18 against 3.5 in stories15M). ``"per_position"``: the sum over
            positions of the distance, not squared, over the norm of what was sent there.
        at_once: tokens that go through the bottom with gradient in one run (at least one text),
            which bounds the memory.
        autocast: dtype of the autocast region that the client computes in (bf16-mixed), or None.
        refresh_every: optimizer steps after which the copy of the bottom model is renewed.
        budget_seconds: for one observation, dealt out evenly over its texts.
        name: in the logs.

    Raises:
        ValueError: a setting out of range.
    """

    needs_float64 = True

    def __init__(
        self,
        layer: int,
        *,
        steps: int,
        lr: float,
        stop: Stop,
        cosine: float,
        weighting: Weighting,
        at_once: int,
        autocast: torch.dtype | None,
        refresh_every: int,
        budget_seconds: float | None,
        name: str | None,
    ) -> None:
        super().__init__(layer, budget_seconds, name)
        for which, value, known in (("stop", stop, STOPS), ("weighting", weighting, WEIGHTINGS)):
            if value not in known:
                raise ValueError(f"{which} must be one of {', '.join(known)}, got {value!r}")
        for which, number in (
            ("steps", steps),
            ("at_once", at_once),
            ("refresh_every", refresh_every),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{which} must be a whole number, at least 1, got {number!r}")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr!r}")
        if not -1 < cosine <= 1:
            raise ValueError(f"cosine must lie in (-1, 1], got {cosine!r}")
        self.steps = steps
        self.lr = lr
        self.stop: Stop = stop
        self.cosine = cosine
        self.weighting: Weighting = weighting
        self.at_once = at_once
        self.autocast = autocast
        self.refresh_every = refresh_every
        self._table: TokenTable | None = None

    def config(self) -> dict[str, object]:
        """Settings that name the attack in reports."""
        names = ("layer", "steps", "lr", "stop", "weighting", "budget_seconds")
        return {name: getattr(self, name) for name in names}

    # ---- the adversary's copy -------------------------------------------------------------

    def prepare(self, anatomy: Anatomy) -> None:
        """Takes the copy of the bottom model.

        Raises:
            ValueError: the model has no such layer, or its bottom cannot be run alone.
        """
        super().prepare(anatomy)
        # Weights copied in inference mode could never take part in autograd.
        with torch.inference_mode(False), torch.no_grad():
            self._bottom = BottomModel(
                anatomy, self.layer, autocast=self.autocast or self._met.autocast
            )
            self._table = TokenTable.of(self._bottom.word_embeddings())

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Renews the copy, if it is old enough or of another fit, with the weights at ``step``."""
        if 0 <= self.bottom.age(step) < self.refresh_every:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.bottom.refresh(anatomy, step)
            words = self.bottom.word_embeddings()
            if not torch.equal(words.to(self.table.embeddings.dtype), self.table.embeddings):
                self._table = TokenTable.of(words)

    @property
    def table(self) -> TokenTable:
        """The vocabulary of the adversary's copy.

        Raises:
            RuntimeError: before :meth:`prepare`.
        """
        if self._table is None:
            raise RuntimeError(f"{type(self).__name__} has no bottom model yet: call prepare()")
        return self._table

    # ---- what is descended on -------------------------------------------------------------

    @abstractmethod
    def start(self, sent: Sent) -> Tensor:
        """(B, L, n) variables to start from."""

    @abstractmethod
    def words(self, variables: Tensor) -> Tensor:
        """(B, L, e) word embeddings of variables, differentiable."""

    @abstractmethod
    def decoded(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) token ids of variables, and by how much each is ahead of the next best."""

    @property
    @abstractmethod
    def step_size(self) -> float:
        """``lr`` in units of the variables."""

    def tokens_at_once(self) -> int:
        """Tokens in one run."""
        return self.at_once

    def solve(self, sent: Sent, deadline: Deadline) -> DescentGuess:
        """The texts of a few hidden states, within a session of the bottom."""
        run = Descent(self, sent, deadline)
        run.descend(self.steps)
        return run.guess()

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> DescentGuess:
        """The texts of hidden states (B, L, d).

        Raises:
            ValueError: the hidden states are not as wide as the layer's, or mask or positions of
                another shape than they.
        """
        bottom = self.bottom
        if hidden.dim() != 3 or hidden.shape[-1] != bottom.width:
            raise ValueError(
                f"layer {self.layer} gives hidden states (B, L, {bottom.width}), but these are "
                f"{tuple(hidden.shape)}"
            )
        for which, given in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if given is not None and given.shape != hidden.shape[:2]:
                raise ValueError(
                    f"{which} is {tuple(given.shape)}, but the hidden states are "
                    f"{tuple(hidden.shape[:2])} and more"
                )
        deadline = Deadline(self.budget_seconds)
        rows = max(1, self.tokens_at_once() // hidden.shape[1])
        with torch.inference_mode(False), torch.no_grad(), bottom.session():
            # Cloned, since autograd takes no tensors that were made in inference mode.
            own = [
                None if t is None else t.to(bottom.device).clone()
                for t in (attention_mask, position_ids)
            ]
            sent = Sent.of(hidden.to(bottom.device).clone(), *own)
            parts: list[DescentGuess] = []
            for a in range(0, len(sent), rows):
                left = -(-(len(sent) - a) // rows)
                part = sent[a : a + rows]
                late = bool(parts) and deadline.passed
                parts.append(_left_open(part) if late else self.solve(part, deadline.share(left)))
            return _joined(parts, hidden.device)


class Descent:
    """One descent on a few texts.

    Attributes:
        variables: (B, L, n) as they are now.
        tokens: (B, L) that they stand for, as of the last :meth:`descend`.
        errors: (B, L) relative errors of these.
        confidence: (B, L).
        steps: (B,) taken for each text.
        done: (B,) texts that are not gone on with.
        finished: False once the deadline has passed.
        verified: candidates so far.
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
        self.done = torch.zeros(n, dtype=torch.bool, device=device)
        self.finished = True
        self.verified = 0

    def descend(self, steps: int) -> None:
        """Up to ``steps`` gradient steps for each text that is not done; then its tokens."""
        rows = (~self.done).nonzero().flatten()
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
            if self.attack.stop == "settled" and step % CHECK_EVERY == 0:
                tokens, _ = self.attack.decoded(adam.values)
                unchanged = ((tokens == last) | ~sent.real).all(1)
                same = torch.where(unchanged, same + 1, 0)
                stopped = (same >= PATIENCE) | self._exact(tokens, sent)
                last = tokens
            if bool(stopped.any()):
                self.variables[active] = adam.values
                kept = (~stopped).nonzero().flatten()
                if len(kept) == 0:
                    break
                active, sent, last, same = active[kept], sent[kept], last[kept], same[kept]
                adam.keep(kept)
        self.variables[active] = adam.values
        tokens, ahead = self.attack.decoded(self.variables[rows])
        self.take(rows, tokens, self._errors(tokens, self.sent[rows]), ahead)

    def _gradient(self, variables: Tensor, sent: Sent) -> tuple[Tensor, Tensor]:
        """Of the distance with respect to the variables; and which texts their cosine stops."""
        attack = self.attack
        with torch.enable_grad():
            leaf = variables.detach().requires_grad_()
            words = attack.words(leaf)
            hidden = attack.bottom.hidden_from(words, sent.attention_mask, sent.position_ids)
            if attack.weighting == "paper":
                distance = sent.squared_errors(hidden).sum()
            else:
                distance = sent.relative_errors(hidden).sum()
            (gradient,) = torch.autograd.grad(distance, leaf)
        if attack.stop == "cosine":
            return gradient, sent.cosines(hidden.detach()) >= attack.cosine
        return gradient, torch.zeros(len(sent), dtype=torch.bool, device=gradient.device)

    def _errors(self, tokens: Tensor, sent: Sent) -> Tensor:
        hidden = self.attack.bottom.hidden(tokens, sent.attention_mask, sent.position_ids)
        self.verified += int(sent.real.sum())
        return sent.relative_errors(hidden)

    def _exact(self, tokens: Tensor, sent: Sent) -> Tensor:
        bottom = self.attack.bottom
        same = self._errors(tokens, sent) <= rounding(bottom.autocast or bottom.dtype)
        return same.all(1)

    def take(self, rows: Tensor, tokens: Tensor, errors: Tensor, confidence: Tensor) -> None:
        """Sets what is found of the texts ``rows``."""
        self.tokens[rows], self.errors[rows] = tokens, errors.to(self.errors.dtype)
        self.confidence[rows] = confidence.to(self.confidence.dtype)

    def take_better(self, other: DescentGuess) -> None:
        """Sets the texts of which ``other`` is nearer to what was sent, by squared errors."""
        assert other.errors is not None
        assert other.confidence is not None
        sums = (e.masked_fill(~self.sent.real, 0.0) for e in (other.errors, self.errors))
        theirs, own = (e.square().sum(1) for e in sums)
        rows = (theirs < own).nonzero().flatten()
        self.take(rows, other.tokens[rows], other.errors[rows], other.confidence[rows])

    def guess(self) -> DescentGuess:
        """What is found."""
        real = self.sent.real
        return DescentGuess(
            self.tokens.masked_fill(~real, NOTHING),
            confidence=self.confidence * real,
            finished=self.finished,
            candidates=self.verified,
            steps=self.steps,
            errors=self.errors.masked_fill(~real, 0.0),
        )


def _left_open(sent: Sent) -> DescentGuess:
    nothing = torch.full(sent.real.shape, NOTHING, device=sent.real.device)
    unknown = torch.full_like(sent.hidden[..., 0], torch.nan)
    return DescentGuess(
        nothing,
        confidence=torch.zeros_like(unknown),
        finished=False,
        steps=torch.zeros_like(nothing[:, 0]),
        errors=unknown.masked_fill(~sent.real, 0.0),
    )


def _joined(parts: list[DescentGuess], device: torch.device) -> DescentGuess:
    columns: dict[str, Tensor] = {}
    for field in fields(DescentGuess):
        if isinstance(getattr(parts[0], field.name), Tensor):
            columns[field.name] = torch.cat([getattr(p, field.name) for p in parts]).to(device)
    return replace(
        parts[0],
        finished=all(p.finished for p in parts),
        candidates=sum(p.candidates for p in parts),
        **columns,  # type: ignore[arg-type]
    )


__all__ = [
    "LIKENESSES",
    "STOPS",
    "WEIGHTINGS",
    "Descent",
    "DescentAttack",
    "DescentGuess",
    "Likeness",
    "RowAdam",
    "Stop",
    "TokenTable",
    "Weighting",
]

"""EmbeddingDescent: word embeddings by gradient descent, then the likest tokens.

Blocks add to the residual stream, so that much of a token's word embedding is still there, turned
and shrunk, at the split. How it is turned is learned from texts of random tokens, which whoever has
the bottom model can run through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.texts.base import Deadline, Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import (
    LIKENESSES,
    Descent,
    DescentAttack,
    DescentGuess,
    Likeness,
    Stop,
    Weighting,
)
from lightning_fedleak.attacks.texts.sweeps import high_errors, sweep

TEXTS, LENGTH = 64, 64
RIDGE = 1e-2
"""Of the mean variance of a hidden number."""

Initial = Literal["readout", "mean"]
INITIALS: tuple[Initial, ...] = ("readout", "mean")


@dataclass(frozen=True)
class StateReadout:
    """A ridge regression of word embeddings on hidden states.

    all-MiniLM-L6-v2, 128 tokens of IMDB reviews: the token nearest to what is read is right for
    nine of ten tokens at split 3 and for six to seven of ten at split 5.

    Attributes:
        weights: (d, e).
        state: (d,) mean hidden state.
        word: (e,) mean word embedding of the tokens drawn.
        radius: the largest distance of a word embedding from ``word``; what is read is no further.
    """

    weights: Tensor
    state: Tensor
    word: Tensor
    radius: float

    @classmethod
    def of(
        cls,
        bottom: BottomModel,
        embeddings: Tensor,
        *,
        texts: int = TEXTS,
        length: int = LENGTH,
        seed: int = 0,
    ) -> StateReadout:
        """Learns from texts of tokens drawn evenly.

        Of a causal model the first position is left out, whose state is unlike all others.

        Args:
            bottom: the adversary's copy.
            embeddings: (V, e) its word embeddings.
            texts: how many.
            length: of each, cut at the model's context.
            seed: of the draw.
        """
        generator = torch.Generator().manual_seed(seed)
        length = min(length, bottom.context or length)
        shape = (texts, length)
        ids = torch.randint(len(embeddings), shape, generator=generator).to(bottom.device)
        with torch.no_grad(), bottom.session():
            states = torch.cat([bottom.hidden(row[None]) for row in ids])
        skipped = 1 if bottom.causal and length > 1 else 0
        x = states[:, skipped:].flatten(0, 1).double()
        y = embeddings[ids[:, skipped:].flatten()].double()
        state, word = x.mean(0), y.mean(0)
        x, y = x - state, y - word
        gram = x.T @ x
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
        weights = torch.linalg.solve(gram, x.T @ y)
        dtype = embeddings.dtype
        word = word.to(dtype)
        radius = float((embeddings - word).norm(dim=1).max())
        return cls(weights.to(dtype), state.to(dtype), word, radius)

    def words(self, hidden: Tensor) -> Tensor:
        """(..., e) word embeddings that hidden states (..., d) speak of."""
        read = (hidden.to(self.weights.dtype) - self.state) @ self.weights
        length = read.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(read.dtype).tiny)
        words: Tensor = self.word + read * (self.radius / length).clamp(max=1.0)
        return words


class EmbeddingDescent(DescentAttack):
    """Zheng's attack: the word embeddings whose hidden states are those sent (Eq. 3), by Adam.

    The model adds its position embeddings itself. Then each position's token is the one whose
    embedding is most like the one found (Eq. 4).

    The paper's attack is ``weighting="paper", stop="cosine", likeness="cosine"`` with
    ``init_token`` the id of 'hello'. What is done otherwise by default finds more tokens in fewer
    steps (measured in ``docs/inversion.md``): each position is weighed by itself, the descent
    starts from what a regression reads off the hidden states, and it ends at the likest token after
    whitening, so that what the hidden states do not tell stays at the mean and does not decide.

    Args:
        layer: the split.
        steps: most gradient steps for one text.
        lr: Adam's, in standard deviations of the vocabulary's word embeddings.
        stop: ``"settled"`` or the paper's ``"cosine"``, see
            :class:`~lightning_fedleak.attacks.texts.descent.DescentAttack`.
        cosine: the paper's .98.
        initial: where the descent starts, ``"readout"``:
            :class:`~lightning_fedleak.attacks.texts.embedding_descent.StateReadout`, learned once
            in :meth:`prepare`, or ``"mean"``, the vocabulary's.
        init_token: id of the token whose embedding all positions start from, in place of that.
        weighting: ``"per_position"`` or ``"paper"``, see there.
        likeness: of embeddings and tokens, ``"whitened"`` or ``"cosine"``, see
            :class:`~lightning_fedleak.attacks.texts.descent.TokenTable`.
        sweeps: times, evenly spread over the steps, that the tokens found so far are put right by
            verified changes (:func:`~lightning_fedleak.attacks.texts.sweeps.sweep`). For encoders;
            0 is the paper's attack.
        candidates: tokens that a sweep tries at a position: a third each the likest by either
            likeness, and those likest to the token that is there.
        always_try: ids that a sweep tries at every position beside these. Give the tokenizer's
            special tokens: hidden states hardly tell BERT's ``[CLS]`` from other tokens.
        at_once: tokens that go through the bottom with gradient in one run; bounds the memory.
        autocast: dtype of the autocast region that the client computes in (bf16-mixed), or None.
        refresh_every: optimizer steps after which the copy of the bottom model is renewed.
        budget_seconds: for one observation, dealt out evenly over its texts.
        name: in the logs.

    Raises:
        ValueError: a setting out of range; at :meth:`prepare`, token ids that the model lacks.
    """

    default_name = "embedding_descent"

    def __init__(
        self,
        layer: int,
        steps: int = 1000,
        lr: float = 0.1,
        stop: Stop = "settled",
        *,
        cosine: float = 0.98,
        initial: Initial = "readout",
        init_token: int | None = None,
        weighting: Weighting = "per_position",
        likeness: Likeness = "whitened",
        sweeps: int = 0,
        candidates: int = 18,
        always_try: Sequence[int] = (),
        at_once: int = 1 << 11,
        autocast: torch.dtype | None = None,
        refresh_every: int = 1,
        budget_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            layer,
            steps=steps,
            lr=lr,
            stop=stop,
            cosine=cosine,
            weighting=weighting,
            at_once=at_once,
            autocast=autocast,
            refresh_every=refresh_every,
            budget_seconds=budget_seconds,
            name=name,
        )
        if likeness not in LIKENESSES:
            raise ValueError(f"likeness must be one of {', '.join(LIKENESSES)}, got {likeness!r}")
        if initial not in INITIALS:
            raise ValueError(f"initial must be one of {', '.join(INITIALS)}, got {initial!r}")
        if not 0 <= sweeps <= steps:
            raise ValueError(f"sweeps must lie between 0 and the {steps} steps, got {sweeps!r}")
        if candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {candidates!r}")
        self.initial: Initial = initial
        self.init_token = init_token
        self._readout: StateReadout | None = None
        self.likeness: Likeness = likeness
        self.sweeps = sweeps
        self.candidates = candidates
        self.always_try = tuple(always_try)

    def config(self) -> dict[str, object]:
        """Settings that name the attack in reports."""
        initial = self.initial if self.init_token is None else self.init_token
        own = {"initial": initial, "likeness": self.likeness, "sweeps": self.sweeps}
        return super().config() | own

    def prepare(self, anatomy: Anatomy) -> None:
        """Takes the copy of the bottom model, and checks the token ids.

        Raises:
            ValueError: as in the base class, or a token id outside the vocabulary.
        """
        super().prepare(anatomy)
        ids = {"always_try": self.always_try}
        if self.init_token is not None:
            ids["init_token"] = (self.init_token,)
        for which, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < self.bottom.vocab_size:
                    raise ValueError(
                        f"{which} holds the id {token}, but the vocabulary ends at "
                        f"{self.bottom.vocab_size - 1}"
                    )
        if self.initial == "readout" and self.init_token is None:
            with torch.inference_mode(False), torch.no_grad():
                self._readout = StateReadout.of(self.bottom, self.table.embeddings)

    @property
    def step_size(self) -> float:
        """In numbers of a word embedding."""
        return self.lr * self.table.scale

    def start(self, sent: Sent) -> Tensor:
        """(B, L, e) word embeddings."""
        table = self.table
        if self._readout is not None:
            return torch.where(sent.real[..., None], self._readout.words(sent.hidden), table.mean)
        point = table.mean if self.init_token is None else table.embeddings[self.init_token]
        return point.expand(*sent.real.shape, -1)

    def words(self, variables: Tensor) -> Tensor:
        """The variables are the word embeddings."""
        return variables

    def decoded(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """The likest tokens, and by how much likeness they are ahead."""
        ids, likeness = self.table.nearest(variables, 2, self.likeness)
        return ids[..., 0], likeness[..., 0] - likeness[..., -1]

    def solve(self, sent: Sent, deadline: Deadline) -> DescentGuess:
        """Descends; with sweeps in phases, and a sweep after each.

        Out of time, what an earlier sweep found stays where it is nearer to what was sent.
        """
        run = Descent(self, sent, deadline)
        phases = max(1, self.sweeps)
        for phase in range(phases):
            earlier = run.guess()
            run.descend(self.steps // phases + (phase < self.steps % phases))
            if not self.sweeps or bool(run.done.all()):
                break
            if deadline.passed:
                run.finished = False
            else:
                self._sweep(run, last=phase == phases - 1)
            if not run.finished:
                run.take_better(earlier)
                break
        return run.guess()

    def _sweep(self, run: Descent, last: bool) -> None:
        """Puts right what is not, and sets what is right to its exact embedding."""
        rows = (~run.done).nonzero().flatten()
        sent, variables = run.sent[rows], run.variables[rows]
        third = -(-self.candidates // 3)
        found = [self.table.nearest(variables, third, likeness)[0] for likeness in LIKENESSES]
        now = self.table.embeddings[run.tokens[rows]]
        found.append(self.table.nearest(now, third + 1, "cosine")[0][..., 1:])
        always = torch.tensor(self.always_try, dtype=torch.int64, device=rows.device)
        candidates = torch.cat([*found, always.expand(*found[0].shape[:2], -1)], -1)
        swept = sweep(
            self.bottom,
            sent,
            run.tokens[rows],
            candidates,
            deadline=run.deadline,
            at_once=2 * self.at_once,
        )
        run.verified += swept.candidates
        run.finished &= swept.finished
        run.take(rows, swept.tokens, swept.errors, swept.confidence)
        run.done[rows] = swept.exact
        if not last:
            right = sent.real & ~high_errors(swept.errors * sent.norms, sent.real)
            words = self.table.embeddings[swept.tokens]
            run.variables[rows] = torch.where(right[..., None], words, variables)


__all__ = ["INITIALS", "EmbeddingDescent", "Initial", "StateReadout"]

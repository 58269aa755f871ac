"""EmbeddingDescent: word embeddings by gradient descent, then the most similar tokens.

Blocks add to the residual stream, so that much of a token's word embedding is still in the hidden
state at the split, rotated and scaled. The rotation is learned from texts of random tokens, which
the adversary runs through its copy of the bottom model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    DescentSettings,
    Likeness,
)
from lightning_fedleak.attacks.texts.sweeps import high_errors, sweep
from lightning_fedleak.validate import (
    check_choice,
    check_integer,
    old_spelling,
    warn_of_old_spelling,
)

TEXTS, LENGTH = 64, 64  # random texts of a readout and their tokens; more cost time. Not tuned
RIDGE = 1e-2  # of the mean variance of a hidden number; more shrinks what is read. Not tuned

Initial = Literal["readout", "mean"]
INITIALS: tuple[Initial, ...] = ("readout", "mean")


@dataclass(frozen=True)
class StateReadout:
    """A ridge regression of word embeddings on hidden states.

    For all-MiniLM-L6-v2 and 128 tokens of IMDB reviews, the token nearest to the readout is right
    for nine of ten tokens at split 3 and for six to seven of ten at split 5.

    Attributes:
        weights: (d, e).
        state: (d,) mean hidden state.
        word: (e,) mean word embedding of the random tokens.
        radius: the largest distance of a word embedding from ``word``, and of a readout.
    """

    weights: Tensor
    state: Tensor
    word: Tensor
    radius: float

    @classmethod
    def fit(
        cls,
        bottom: BottomModel,
        embeddings: Tensor,
        *,
        texts: int = TEXTS,
        length: int = LENGTH,
        seed: int = 0,
    ) -> StateReadout:
        """Return the regression on texts of tokens drawn uniformly.

        A causal model's first position is left out, because its state is unlike all others.

        Args:
            bottom: the adversary's copy.
            embeddings: (V, e) its word embeddings.
            texts: number of texts.
            length: tokens of a text, at most the model's context.
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
        """Return the word embeddings (..., e) that hidden states (..., d) predict."""
        read = (hidden.to(self.weights.dtype) - self.state) @ self.weights
        length = read.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(read.dtype).tiny)
        words: Tensor = self.word + read * (self.radius / length).clamp(max=1.0)
        return words


_old_settings = old_spelling(DescentSettings, init_token=int)


class EmbeddingDescent(DescentAttack):
    """Zheng's attack: word embeddings whose hidden states are those sent (Eq. 3), by Adam.

    The server of a split model owns the bottom model. It moves word embeddings until their hidden
    states are those that the client sent, and takes each position's most similar token (Eq. 4).

    The paper's attack has ``likeness="cosine"``, ``initial`` the id of 'hello', and
    ``descent=DescentSettings(stop="cosine", weighting="paper")``. The defaults recover more tokens
    in fewer steps (measured in ``docs/inversion.md``): each position counts alike, the descent
    starts from a regression on the hidden states, and tokens are compared after whitening, so that
    directions that the hidden states do not determine stay at the mean.

    Args:
        layer: the split.
        steps: gradient steps for one text, at most.
        lr: Adam's learning rate, in standard deviations of the vocabulary's word embeddings.
        initial: where the descent starts: ``"readout"``, a regression that :meth:`prepare` learns
            (:class:`~lightning_fedleak.attacks.texts.embedding_descent.StateReadout`), ``"mean"``,
            the vocabulary's mean, or the id of a token, whose embedding all positions start from.
        likeness: of embeddings and tokens, ``"whitened"`` or ``"cosine"``, see
            :class:`~lightning_fedleak.attacks.texts.descent.TokenTable`.
        sweeps: times, evenly spread over the steps, that tokens are corrected by verified changes
            (:func:`~lightning_fedleak.attacks.texts.sweeps.sweep`). For encoders; 0 is the paper's
            attack.
        candidates: tokens that a sweep tries at a position: a third each the most similar by
            either likeness, and those most similar to the present token.
        always_try: ids that a sweep tries at every position besides. Give the tokenizer's special
            tokens, because BERT's ``[CLS]`` hardly shows in the hidden states.
        descent: rarely changed settings
            (:class:`~lightning_fedleak.attacks.texts.descent.DescentSettings`).
        budget_seconds: for one observation, divided evenly among its texts.
        name: in the logs.
        old: arguments of 0.1.0, which warn: those that ``descent`` has, and ``init_token``.

    Raises:
        ValueError: a setting out of range; at :meth:`prepare`, token ids that the model lacks.

    Example:
        >>> from lightning_fedleak import EmbeddingDescent, LeakageMonitor
        >>> attack = EmbeddingDescent(layer=3, steps=300, budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "embedding_descent"

    def __init__(
        self,
        layer: int,
        steps: int = 1000,
        lr: float = 0.1,
        *,
        initial: Initial | int = "readout",
        likeness: Likeness = "whitened",
        sweeps: int = 0,
        candidates: int = 18,
        always_try: Sequence[int] = (),
        descent: DescentSettings | None = None,
        budget_seconds: float | None = None,
        name: str | None = None,
        **old: Any,
    ) -> None:
        passed = _old_settings(**old)
        if "init_token" in passed:
            warn_of_old_spelling("EmbeddingDescent(init_token=)", "EmbeddingDescent(initial=)")
            initial = passed.pop("init_token")
        super().__init__(
            layer,
            steps=steps,
            lr=lr,
            descent=descent,
            budget_seconds=budget_seconds,
            name=name,
            old=passed,
        )
        check_choice("likeness", likeness, LIKENESSES)
        if isinstance(initial, str):
            check_choice("initial", initial, INITIALS, hint="or the id of a token")
        else:
            check_integer("initial", initial, at_least=0)
        check_integer("sweeps", sweeps, at_least=0, at_most=steps, hint="at most one for each step")
        check_integer("candidates", candidates)
        self.initial: Initial | int = initial
        self._readout: StateReadout | None = None
        self.likeness: Likeness = likeness
        self.sweeps = sweeps
        self.candidates = candidates
        self.always_try = tuple(always_try)

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports."""
        settings = {"initial": self.initial, "likeness": self.likeness, "sweeps": self.sweeps}
        return super().config() | settings

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the bottom model, check the token ids, and learn the readout.

        Raises:
            ValueError: the model has no such layer, its bottom cannot be run alone, or a token id
                lies outside the vocabulary.
        """
        super().prepare(anatomy)
        ids = {"always_try": self.always_try}
        if isinstance(self.initial, int):
            ids["initial"] = (self.initial,)
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < self.bottom.vocab_size:
                    raise ValueError(
                        f"{name} holds the id {token}, but the vocabulary ends at "
                        f"{self.bottom.vocab_size - 1}"
                    )
        if self.initial == "readout":
            with torch.inference_mode(False), torch.no_grad():
                self._readout = StateReadout.fit(self.bottom, self.table.embeddings)

    @property
    def step_size(self) -> float:
        """Return the learning rate in the numbers of a word embedding."""
        return self.lr * self.table.scale

    def start(self, sent: Sent) -> Tensor:
        """Return the word embeddings (B, L, e) to start from."""
        table = self.table
        if self._readout is not None:
            return torch.where(sent.real[..., None], self._readout.words(sent.hidden), table.mean)
        start = self.initial
        point = table.embeddings[start] if isinstance(start, int) else table.mean
        return point.expand(*sent.real.shape, -1)

    def words(self, variables: Tensor) -> Tensor:
        """Return the variables, which are the word embeddings."""
        return variables

    def decode(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most similar tokens, and their lead in likeness over the next."""
        ids, likeness = self.table.nearest(variables, 2, self.likeness)
        return ids[..., 0], likeness[..., 0] - likeness[..., -1]

    def solve(self, sent: Sent, deadline: Deadline) -> DescentGuess:
        """Return the texts after a descent, or after phases of descent and sweep.

        Where time runs out, an earlier sweep's text stays if it is nearer to what was sent.
        """
        run = Descent(self, sent, deadline)
        phases = max(1, self.sweeps)
        for phase in range(phases):
            earlier = run.guess()
            run.descend(self.steps // phases + (phase < self.steps % phases))
            if not self.sweeps or bool(run.stopped.all()):
                break
            if deadline.passed:
                run.finished = False
            else:
                self._sweep(run, last=phase == phases - 1)
            if not run.finished:
                run.record_better(earlier)
                break
        return run.guess()

    def _sweep(self, run: Descent, last: bool) -> None:
        """Change wrong tokens, and set right ones to their exact embedding."""
        rows = (~run.stopped).nonzero().flatten()
        sent, variables = run.sent[rows], run.variables[rows]
        third = -(-self.candidates // 3)
        similar = [self.table.nearest(variables, third, likeness)[0] for likeness in LIKENESSES]
        words = self.table.embeddings[run.tokens[rows]]
        similar.append(self.table.nearest(words, third + 1, "cosine")[0][..., 1:])
        always = torch.tensor(self.always_try, dtype=torch.int64, device=rows.device)
        candidates = torch.cat([*similar, always.expand(*similar[0].shape[:2], -1)], -1)
        swept = sweep(
            self.bottom,
            sent,
            run.tokens[rows],
            candidates,
            deadline=run.deadline,
            at_once=2 * self.descent.at_once,
        )
        run.verified += swept.candidates
        run.finished &= swept.finished
        run.record(rows, swept.tokens, swept.errors, swept.confidence)
        run.stopped[rows] = swept.exact
        if not last:
            right = sent.real & ~high_errors(swept.errors * sent.norms, sent.real)
            words = self.table.embeddings[swept.tokens]
            run.variables[rows] = torch.where(right[..., None], words, variables)

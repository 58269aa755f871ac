"""EmbeddingDescent: word embeddings by gradient descent, then the most similar tokens.

Blocks add to the residual stream, so that much of a token's word embedding is still in the hidden
state at the split, rotated and scaled. The rotation is learned from texts of random tokens, which
the adversary runs through its copy of the bottom model.

A text that is nearly right is then corrected by sweeps, token by token, each change verified. After
a descent a wrong token's right neighbour is often the second or fifth most similar one. A candidate
is verified by running the whole text through the bottom model with it in its place. That is exact
for any model, while a likeness of embeddings is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import TINY, Deadline, Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import (
    LIKENESSES,
    Descent,
    DescentAttack,
    DescentGuess,
    DescentSettings,
    Likeness,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.validate import (
    check_choice,
    check_integer,
)

TEXTS, LENGTH = 64, 64  # random texts of a readout and their tokens; more cost time. Not tuned
RIDGE = 1e-2  # of the mean variance of a hidden number; more shrinks what is read. Not tuned

# Of sweeps; none of the values was tuned.
SWEPT_AT_ONCE = 1 << 12  # tokens in one run of the bottom; bounds the memory
HIGH = 1.5  # multiple of a text's lower quartile above which an error is high; lower tries more
NEAR = 1.1  # multiple of the present error at its place up to which a candidate is run alone
ALONE = 24  # candidates that each of both rankings runs alone in a round; more cost time
ROUNDS = 12  # rounds at most; texts that still get better stop there
RIVALS = 4  # candidates that a token's confidence compares it with


Initial = Literal["readout", "mean"]


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
            (:func:`~lightning_fedleak.attacks.texts.embedding_descent.sweep`). For encoders; 0 is
            the paper's attack.
        candidates: tokens that a sweep tries at a position: a third each the most similar by
            either likeness, and those most similar to the present token.
        always_try: ids that a sweep tries at every position besides. Give the tokenizer's special
            tokens, because BERT's ``[CLS]`` hardly shows in the hidden states.
        descent: rarely changed settings
            (:class:`~lightning_fedleak.attacks.texts.descent.DescentSettings`).
        budget_seconds: for one observation, divided evenly among its texts.
        name: in the logs.

    Raises:
        ValueError: a setting out of range; at :meth:`prepare`, token ids that the model lacks.

    Examples:
        >>> from lightning_fedleak import EmbeddingDescent, LeakageMonitor
        >>> attack = EmbeddingDescent(layer=3, steps=300, budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "embedding_descent"
    config_names = (*DescentAttack.config_names, "initial", "likeness", "sweeps")

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
    ) -> None:
        super().__init__(layer, steps, lr, descent, budget_seconds, name)
        check_choice("likeness", likeness, LIKENESSES)
        if isinstance(initial, str):
            check_choice("initial", initial, get_args(Initial), hint="or the id of a token")
        else:
            check_integer("initial", initial, at_least=0)
        self.sweeps = check_integer(
            "sweeps", sweeps, at_least=0, at_most=steps, hint="at most one for each step"
        )
        self.candidates = check_integer("candidates", candidates)
        self.initial: Initial | int = initial
        self._readout: StateReadout | None = None
        self.likeness: Likeness = likeness
        self.always_try = tuple(always_try)

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


@dataclass(frozen=True)
class Swept:
    """The texts that a sweep returns.

    Attributes:
        tokens: (B, L) token ids.
        errors: (B, L) relative errors of their hidden states.
        confidence: (B, L) in [0, 1]: ``1 - (e / e')**2`` for the error e at a position and the
            least error e' there with one of four other candidates in its place, where every second
            position is tried at once. 1 where a whole text is as sent but for rounding; 0 where it
            is not and the deadline passed before others were tried.
        exact: (B,) bool, texts that are as sent but for rounding.
        finished: False where the deadline passed.
        candidates: number of candidates that were verified.
    """

    tokens: Tensor
    errors: Tensor
    confidence: Tensor
    exact: Tensor
    finished: bool
    candidates: int


def sweep(
    bottom: BottomModel,
    sent: Sent,
    tokens: Tensor,
    candidates: Tensor,
    *,
    rounds: int = ROUNDS,
    deadline: Deadline | None = None,
    at_once: int = SWEPT_AT_ONCE,
) -> Swept:
    """Return texts after exchanges of tokens for candidates, until no exchange is better.

    *Jointly.* All positions with a high error take their k-th candidate at once, for each k, and
    each keeps the one with the smallest error at its place, because a token changes the state at
    its own place most. This costs K runs of a text for any number of wrong positions.

    *Alone.* Candidates that were nearly as good at their place as the present token are run one by
    one, 24 at most, and 24 of all positions that the gradient of the text's error recommends
    (BERT's ``[CLS]`` shows less at its own place than elsewhere). The best exchange stays, or all
    that are better if they are better together.

    A text's error is the sum of squared relative errors of its positions, and no exchange makes it
    larger. A text that is as sent but for rounding does not change.

    Args:
        bottom: within a session or not.
        sent: the hidden states of B texts.
        tokens: (B, L) the texts so far.
        candidates: (B, L, K) other tokens for each position.
        rounds: at most.
        deadline: after which the best so far is returned; None for none.
        at_once: tokens in one run (at least one text), which bounds the memory.
    """
    deadline = deadline or Deadline(None)
    with torch.no_grad(), bottom.session():
        texts = [
            _Text(bottom, sent[i : i + 1], tokens[i], candidates[i], at_once)
            for i in range(len(sent))
        ]
        for text in texts:
            for _ in range(rounds):
                if deadline.passed or text.exact:
                    break
                better = text.jointly()
                if deadline.passed or not (text.alone() or better):
                    break
        confidence = [t.confidence(late=deadline.passed) for t in texts]
    return Swept(
        torch.stack([t.tokens for t in texts]),
        torch.stack([t.errors / t.norms for t in texts]),
        torch.stack(confidence),
        torch.tensor([t.exact for t in texts], device=tokens.device),
        not deadline.passed,
        sum(t.candidates for t in texts),
    )


def high_errors(errors: Tensor, real: Tensor) -> Tensor:
    """Return (B, L) bool, the distances from what was sent that are high for their text.

    Noise moves every position by about the same distance, so that a right position shows about the
    lower quartile: the noise, or the effect of wrong tokens elsewhere.
    """
    quartile = errors.masked_fill(~real, torch.nan).nanquantile(0.25, dim=-1, keepdim=True)
    return real & (errors > HIGH * quartile)


class _Text:
    """One text: its ``tokens``, and ``errors``, the distances of its hidden states."""

    def __init__(
        self, bottom: BottomModel, sent: Sent, tokens: Tensor, options: Tensor, at_once: int
    ) -> None:
        self.bottom = bottom
        self.sent = sent
        self.real = sent.real[0]
        self.options = options
        self.rows = max(1, at_once // len(tokens))
        self.norms = sent.norms[0]
        self.candidates = 0
        self.tokens = tokens.clone()
        self.errors = self._errors(tokens[None])[0]
        self._ratios: Tensor | None = None

    def _errors(self, texts: Tensor) -> Tensor:
        """Return the distances (n, L) of the hidden states of n texts from those sent."""
        errors = []
        for part in torch.split(texts, self.rows):
            sent = self.sent[torch.zeros(len(part), dtype=torch.int64, device=part.device)]
            hidden = self.bottom.hidden(part, sent.attention_mask, sent.position_ids)
            errors.append(sent.squared_errors(hidden).sqrt())
        return torch.cat(errors)

    def _sums(self, errors: Tensor) -> Tensor:
        """Return the sums (...) of squared relative errors of distances (..., L)."""
        return (errors / self.norms).square().sum(-1)

    @property
    def exact(self) -> bool:
        """Return whether it is as sent but for rounding."""
        return bool((self.errors <= self.bottom.rounding * self.norms).all())

    def _change(self, texts: Tensor, errors: Tensor) -> bool:
        """Change to the best of n texts (n, L) if it is better than the present one."""
        sums = self._sums(errors)
        best = int(sums.argmin())
        if not bool(sums[best] < self._sums(self.errors)):
            return False
        self.tokens, self.errors = texts[best], errors[best]
        return True

    def jointly(self) -> bool:
        """Try the candidates of all suspects at once, and record each one's error at its place."""
        suspects = high_errors(self.errors, self.real)
        texts = torch.where(suspects, self.options.T, self.tokens)
        self.candidates += len(texts) * int(suspects.sum())
        errors = self._errors(texts)
        tried = torch.cat([self.errors[None], errors])
        best = torch.cat([self.tokens[None], texts]).gather(0, tried.argmin(0)[None])
        better = self._change(best, self._errors(best))
        ratios = errors / self.errors.clamp(min=TINY)
        self._ratios = ratios.masked_fill(~suspects | (texts == self.tokens), torch.inf).T
        return better

    def alone(self) -> bool:
        """Try the most promising changes one by one."""
        pairs = torch.unique(torch.cat([self._near(), self._recommended()]))
        if len(pairs) == 0:
            return False
        places, tokens = pairs // self.options.shape[1], self.options.flatten()[pairs]
        texts = self.tokens.repeat(len(pairs), 1).scatter(1, places[:, None], tokens[:, None])
        self.candidates += len(pairs)
        errors = self._errors(texts)
        sums = self._sums(errors)
        together = self.tokens.clone()
        for i in sums.argsort(descending=True).tolist():
            if sums[i] < self._sums(self.errors):
                together[places[i]] = tokens[i]
        texts = torch.cat([texts, together[None]])
        return self._change(texts, torch.cat([errors, self._errors(together[None])]))

    def _near(self) -> Tensor:
        """Return pairs of place and candidate, as indices of ``options``, that were near."""
        assert self._ratios is not None
        ratios = self._ratios.masked_fill(self.options == self.tokens[:, None], torch.inf).flatten()
        first = ratios.argsort()[:ALONE]
        return first[ratios[first] <= NEAR]

    def _recommended(self) -> Tensor:
        """Return pairs for which the text's error falls most, to first order in the embedding."""
        words = self.bottom.word_embeddings(self.tokens)[None].float()
        with torch.enable_grad():
            leaf = words.detach().requires_grad_()
            hidden = self.bottom.hidden_from(leaf, self.sent.attention_mask, self.sent.position_ids)
            total = (self.sent.squared_errors(hidden)[0] / self.norms.square()).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
        moves = self.bottom.word_embeddings(self.options).float() - words[0][:, None]
        rise = (moves * gradient[0][:, None]).sum(-1)
        rise = rise.masked_fill(~self.real[:, None], torch.inf).flatten()
        first = rise.argsort()[:ALONE]
        return first[rise[first] < 0]

    def confidence(self, *, late: bool) -> Tensor:
        """Return the confidence (L,) of :class:`Swept`; ``late`` if the deadline has passed."""
        if self.exact or late:
            return self.real.to(self.errors.dtype) * self.exact
        same = (self.options == self.tokens[:, None]).int()
        rivals = self.options.gather(1, same.argsort(dim=1, stable=True))[:, :RIVALS]
        least = torch.full_like(self.errors, torch.inf)
        for parity in range(2):
            half = torch.arange(len(self.tokens), device=self.tokens.device) % 2 == parity
            texts = torch.where(half & self.real, rivals.T, self.tokens)
            differs = half & (texts != self.tokens)
            errors = self._errors(texts).masked_fill(~differs, torch.inf)
            least = least.minimum(errors.amin(0))
        return (1 - (self.errors / least).square()).clamp(min=0) * self.real

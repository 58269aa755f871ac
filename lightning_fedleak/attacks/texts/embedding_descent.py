"""EmbeddingDescent: word embeddings by gradient descent, then the most similar tokens.

Blocks add to the residual stream, so the hidden state at the split still holds much of a token's
word embedding, rotated and scaled. :class:`StateReadout` learns the inverse map by a regression on
texts of random tokens, which the adversary runs through its copy of the bottom model. From its
prediction :class:`_Descent` moves the word embeddings until their hidden states are those that the
client sent. :class:`_TokenTable` then maps each embedding to the most similar token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.texts import base
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.descent import RowAdam, high_errors, sweep
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.validate import check_choice, check_integer, check_number, explain_arguments

# None of the values was tuned.
TEXTS, LENGTH = 64, 64  # random texts to fit a readout, and tokens of each; more cost time
RIDGE = 1e-2  # share of the mean variance of a hidden unit; more shrinks the predictions
SIMILAR = 6  # candidates of a sweep at each position, from each of three rankings
# The number of tokens that run at once with gradients (at least one text); bounds the memory.
TOKENS_AT_ONCE = 1 << 11
CHECK_EVERY = 25  # steps between checks whether the tokens of a text still change
PATIENCE = 8  # checks without a changed token after which a text stops; more cost steps
PAPER_COSINE = 0.98  # cosine with the hidden states sent, at which the paper's attack stops

Likeness = Literal["whitened", "cosine"]
LIKENESSES: tuple[Likeness, ...] = ("whitened", "cosine")
SIMILARITIES_AT_ONCE = 1 << 24  # entries of one similarity matrix (64 MiB); bounds the memory
MIN_VARIANCE = 1e-4  # share of the largest variance, to which whitening raises smaller ones

Initial = Literal["readout", "mean"]
Weighting = Literal["per_position", "paper"]
Stop = Literal["settled", "cosine"]


@dataclass(frozen=True)
class _TokenTable:
    """The word embeddings of the vocabulary, with a search for the most similar tokens.

    There are two measures of similarity (*likeness*). ``"cosine"`` is the cosine of an embedding
    with a token's (Eq. 4). ``"whitened"`` is the cosine after the vocabulary's mean is subtracted
    and its covariance is transformed to the identity. It gives less weight to directions that most
    tokens share, along which the descent hardly determines an embedding. For SmolLM2-135M at split
    10, 48 tokens and 100 steps it recovers 85% of the tokens, the plain cosine 33%.

    Attributes:
        embeddings: (V, e) word embeddings, float32 or wider.
        mean: (e,) their mean.
        whitening: (e, e) the matrix that centred embeddings are multiplied by from the right.
        directions: (V, e) the tokens' embeddings at unit length, for each likeness.
    """

    embeddings: Tensor
    mean: Tensor
    whitening: Tensor
    directions: dict[Likeness, Tensor]

    @classmethod
    def from_embeddings(cls, embeddings: Tensor) -> _TokenTable:
        """Return the table of word embeddings (V, e), V at least 2."""
        table = embeddings.detach()
        table = table if table.dtype == torch.float64 else table.float()
        mean, cosines = table.mean(0), F.normalize(table, dim=1)
        centred = (table - mean).double()
        variances, axes = torch.linalg.eigh(centred.T @ centred / len(table))
        variances = variances.clamp(min=MIN_VARIANCE * float(variances[-1]))
        whitening = (axes / variances.sqrt() @ axes.T).to(table.dtype)
        white = F.normalize((table - mean) @ whitening, dim=1)
        return cls(table, mean, whitening, {"whitened": white, "cosine": cosines})

    @property
    def scale(self) -> float:
        """Return the root mean square of the centred embeddings' entries."""
        return float((self.embeddings - self.mean).square().mean().sqrt())

    def nearest(self, embeddings: Tensor, k: int = 1, likeness: Likeness = "whitened") -> Tensor:
        """Return the k tokens (..., k) most similar to each embedding, the most similar first.

        Args:
            embeddings: (..., e) embeddings.
            k: The number of tokens; all tokens if it exceeds the vocabulary.
            likeness: The measure of similarity, see the class.
        """
        shape = embeddings.shape[:-1]
        points = embeddings.detach().to(self.embeddings.dtype).reshape(-1, embeddings.shape[-1])
        if likeness == "whitened":
            points = (points - self.mean) @ self.whitening
        points = F.normalize(points, dim=1)
        directions = self.directions[likeness]
        k = min(k, len(directions))
        nearest = [
            (part @ directions.T).topk(k, dim=1).indices
            for part in torch.split(points, max(1, SIMILARITIES_AT_ONCE // len(directions)))
        ]
        return torch.cat(nearest).reshape(*shape, k)


@dataclass(frozen=True)
class DescentSettings:
    """Settings of a descent on hidden states that are rarely changed.

    Attributes:
        stop: When the descent of a text ends. ``"settled"``: when its tokens' hidden states equal
            those sent up to rounding, or when no token has changed in 200 steps (checked every 25).
            ``"cosine"``, the paper's rule: when the cosine of its hidden states, as one vector,
            with those sent has reached .98.
        weighting: The loss. ``"paper"`` is the squared distance of a text's hidden states from
            those sent (Eq. 3). Positions of large norm dominate it, such as the first one of most
            models (18 against 3.5 in stories15M). ``"per_position"`` is the sum over positions of
            the distance divided by the norm of the state sent.
        refresh_every: The optimizer steps after which the bottom model is copied again.

    Raises:
        ValueError: an unknown ``stop`` or ``weighting``. :class:`EmbeddingDescent` checks
            ``refresh_every``.

    Examples:
        The paper's settings, except that the paper starts from the embedding of 'hello':

        >>> from lightning_fedleak.attacks import DescentSettings, EmbeddingDescent
        >>> paper = DescentSettings(stop="cosine", weighting="paper")
        >>> attack = EmbeddingDescent(layer=3, likeness="cosine", initial="mean", descent=paper)
    """

    stop: Stop = "settled"
    weighting: Weighting = "per_position"
    refresh_every: int = 1

    def __post_init__(self) -> None:
        check_choice("stop", self.stop, get_args(Stop))
        check_choice("weighting", self.weighting, get_args(Weighting))


@dataclass(frozen=True)
class StateReadout:
    """A ridge regression of word embeddings on hidden states.

    For all-MiniLM-L6-v2 and 128 tokens of IMDB reviews, the token nearest to the prediction is
    correct for nine of ten tokens at split 3 and for six to seven of ten at split 5.

    Attributes:
        weights: (d, e) the regression's weights.
        state: (d,) the mean hidden state.
        word: (e,) the mean word embedding of the random tokens.
        radius: The largest distance of a word embedding from ``word``. Predictions that lie farther
            from it are moved to this distance.
    """

    weights: Tensor
    state: Tensor
    word: Tensor
    radius: float

    @classmethod
    def fit(cls, bottom: BottomModel, embeddings: Tensor) -> StateReadout:
        """Return the regression on texts of tokens drawn uniformly.

        A causal model's first position is excluded, because its state is unlike all others.

        Args:
            bottom: The adversary's copy of the bottom model.
            embeddings: (V, e) the word embeddings of the copy.
        """
        generator = torch.Generator().manual_seed(0)
        length = min(LENGTH, bottom.context or LENGTH)
        shape = (TEXTS, length)
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
        offsets = (hidden.to(self.weights.dtype) - self.state) @ self.weights
        length = offsets.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(offsets.dtype).tiny)
        words: Tensor = self.word + offsets * (self.radius / length).clamp(max=1.0)
        return words


class EmbeddingDescent(base.InversionAttack):
    """Zheng's attack: find word embeddings whose hidden states are those sent (Eq. 3), by Adam.

    The server of a split model owns the bottom model. It moves word embeddings until their hidden
    states are those that the client sent, and takes each position's most similar token (Eq. 4).

    The paper's attack has ``likeness="cosine"``, ``initial`` the id of 'hello', and
    ``descent=DescentSettings(stop="cosine", weighting="paper")``. The defaults recover more tokens
    in fewer steps (measured in ``docs/whole_texts.md``): each position counts alike, the descent
    starts from a regression on the hidden states, and tokens are compared after whitening, so that
    directions that the hidden states do not determine stay at the mean.

    Args:
        layer: the split.
        steps: gradient steps for one text, at most.
        lr: Adam's learning rate, in standard deviations of the vocabulary's word embeddings.
        initial: where the descent starts: ``"readout"``, a regression that :meth:`prepare` learns
            (:class:`~lightning_fedleak.attacks.texts.embedding_descent.StateReadout`), ``"mean"``,
            the vocabulary's mean, or the id of a token, whose embedding all positions start from.
        likeness: The measure of similarity of embeddings and tokens: ``"cosine"``, or
            ``"whitened"``, the cosine after the vocabulary's mean is subtracted and its covariance
            is transformed to the identity.
        sweeps: The number of times, evenly spread over the steps, that tokens are corrected by
            verified changes (:func:`~lightning_fedleak.attacks.texts.descent.sweep`). For encoders;
            0 is the paper's attack.
        always_try: Additional token ids that a sweep tries at every position. Give the tokenizer's
            special tokens, because BERT's ``[CLS]`` hardly shows in the hidden states.
        descent: rarely changed settings
            (:class:`~lightning_fedleak.attacks.texts.embedding_descent.DescentSettings`).
        budget_seconds: About the time for one observation, divided evenly among groups of texts.
        name: The name in the logs.

    Raises:
        ValueError: a setting out of range; at :meth:`prepare`, token ids that the model lacks.

    Examples:
        >>> from lightning_fedleak import EmbeddingDescent, LeakageMonitor
        >>> attack = EmbeddingDescent(layer=3, steps=300, budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "embedding_descent"
    needs_float64 = True  # for the whitening and the readout
    config_names = (
        *("layer", "steps", "lr", "descent.stop", "descent.weighting", "budget_seconds"),
        *("initial", "likeness", "sweeps"),
    )

    @explain_arguments("EmbeddingDescent(layer=2)")
    def __init__(
        self,
        layer: int,
        steps: int = 1000,
        lr: float = 0.1,
        *,
        initial: Initial | int = "readout",
        likeness: Likeness = "whitened",
        sweeps: int = 0,
        always_try: Sequence[int] = (),
        descent: DescentSettings | None = None,
        budget_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        self.descent = descent or DescentSettings()
        super().__init__(layer, budget_seconds, name)
        self.refresh_every = check_integer("refresh_every", self.descent.refresh_every)
        self.steps = check_integer("steps", steps)
        self.lr = check_number("lr", lr, above=0)
        check_choice("likeness", likeness, LIKENESSES)
        if isinstance(initial, str):
            check_choice("initial", initial, get_args(Initial), hint="or the id of a token")
        else:
            check_integer("initial", initial, at_least=0)
        self.sweeps = check_integer("sweeps", sweeps, at_least=0, at_most=steps)
        self.initial: Initial | int = initial
        self.likeness: Likeness = likeness
        self.always_try = tuple(always_try)
        self._table: _TokenTable | None = None
        self._readout: StateReadout | None = None

    @property
    def table(self) -> _TokenTable:
        """Return the word embeddings of the adversary's copy, with their search."""
        assert self._table is not None
        return self._table

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the bottom model, and learn the readout.

        Raises:
            ValueError: the model has no such layer, or a token id lies outside the vocabulary.
        """
        super().prepare(anatomy)
        self._copy_bottom(anatomy)
        start = [self.initial] if isinstance(self.initial, int) else []
        unknown = [i for i in (*self.always_try, *start) if not 0 <= i < self.bottom.vocab_size]
        if unknown:
            raise ValueError(f"initial or always_try holds the unknown id {unknown[0]}")
        with torch.inference_mode(False), torch.no_grad():
            self._table = _TokenTable.from_embeddings(self.bottom.word_embeddings())
            if self.initial == "readout":
                self._readout = StateReadout.fit(self.bottom, self.table.embeddings)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again if the copy is too old, or from an earlier fit.

        The table is computed again if the word embeddings changed. The readout stays as
        :meth:`prepare` learned it: the descent only starts from its predictions.
        """
        super().refresh(anatomy, step)
        with torch.inference_mode(False), torch.no_grad():
            words = self.bottom.word_embeddings()
            if not torch.equal(words.to(self.table.embeddings.dtype), self.table.embeddings):
                self._table = _TokenTable.from_embeddings(words)

    # ---- the variables of the descent: a subclass that moves others overrides these methods ----

    @property
    def step_size(self) -> float:
        """Return the learning rate in the units of a word embedding's entries."""
        return self.lr * self.table.scale

    def start(self, sent: base.Sent) -> Tensor:
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

    def decode(self, variables: Tensor) -> Tensor:
        """Return the most similar tokens."""
        return self.table.nearest(variables, 1, self.likeness)[..., 0]

    def tokens_at_once(self) -> int:
        """Return the number of tokens in one run."""
        return TOKENS_AT_ONCE

    # ---- the descent ----------------------------------------------------------------------

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> base.TextGuess:
        """Return the texts of hidden states (B, L, d)."""
        limit, bottom = base.WorkLimit(self), self.bottom
        rows = max(1, self.tokens_at_once() // hidden.shape[1])
        with torch.inference_mode(False), torch.no_grad(), bottom.session():
            # Cloned, since autograd takes no tensors that were made in inference mode.
            copies = [
                None if t is None else t.to(bottom.device).clone()
                for t in (attention_mask, position_ids)
            ]
            sent = base.Sent.from_states(hidden.to(bottom.device).clone(), *copies)
            guesses: list[base.TextGuess] = []
            for a in range(0, len(sent), rows):
                share = limit.share(-(-(len(sent) - a) // rows))
                run = _Descent(self, sent[a : a + rows], share)
                run.finished = not (guesses and limit.reached)
                if run.finished:
                    self.solve(run)
                guesses.append(run.guess())
            return base.join_guesses(guesses, hidden.device)

    def solve(self, run: _Descent) -> None:
        """Run the descent of a group of texts; with ``sweeps``, alternate descents and sweeps.

        If time runs out, texts are kept from the previous phase if they are nearer to what was
        sent.
        """
        phases = max(1, self.sweeps)
        for phase in range(phases):
            previous = run.guess(), run.errors.clone()
            run.descend(self.steps // phases + (phase < self.steps % phases))
            if not self.sweeps or bool(run.stopped.all()):
                break
            if run.limit.reached:
                run.finished = False
            else:
                self._sweep(run, is_final=phase == phases - 1)
            if not run.finished:
                run.record_better(*previous)
                break

    def _sweep(self, run: _Descent, is_final: bool) -> None:
        """Correct tokens by verified changes; unless final, reset right ones to their embedding."""
        rows = (~run.stopped).nonzero().flatten()
        sent, variables = run.sent[rows], run.variables[rows]
        similar = [self.table.nearest(variables, SIMILAR, likeness) for likeness in LIKENESSES]
        # The third ranking: the tokens most similar to the current one, without itself.
        words = self.table.embeddings[run.tokens[rows]]
        similar.append(self.table.nearest(words, SIMILAR + 1, "cosine")[..., 1:])
        extra = torch.tensor(self.always_try, dtype=torch.int64, device=rows.device)
        candidates = torch.cat([*similar, extra.expand(*similar[0].shape[:2], -1)], -1)
        swept = sweep(self.bottom, sent, run.tokens[rows], candidates, limit=run.limit)
        run.verified += swept.candidates
        run.finished &= swept.finished
        run.record(rows, swept.tokens, swept.errors)
        run.stopped[rows] = swept.exact
        if not is_final:
            # Times the norms: high_errors takes distances, and sweeps return relative errors.
            correct = sent.real & ~high_errors(swept.errors * sent.norms, sent.real)
            words = self.table.embeddings[swept.tokens]
            run.variables[rows] = torch.where(correct[..., None], words, variables)


class _Descent:
    """The descent of a group of texts.

    Attributes:
        variables: (B, L, n) the variables that Adam moves, here word embeddings.
        tokens: (B, L) the tokens of the variables after the last :meth:`descend` or sweep.
        errors: (B, L) the relative errors of the hidden states of ``tokens``, see
            ``Sent.relative_errors``; NaN before the first guess.
        steps: (B,) the number of gradient steps of each text.
        stopped: (B,) whether a sweep has found the text exact, which ends its descent.
        finished: False if the limit ended a descent or a sweep.
        verified: The number of tokens and candidates that were verified so far.
    """

    def __init__(self, attack: EmbeddingDescent, sent: base.Sent, limit: base.WorkLimit) -> None:
        self.attack = attack
        self.sent = sent
        self.limit = limit
        device, n = sent.real.device, len(sent)
        self.variables = attack.start(sent).clone()
        self.steps = torch.zeros(n, dtype=torch.int64, device=device)
        self.tokens = torch.full(sent.real.shape, base.NOTHING, device=device)
        self.errors = torch.full_like(sent.hidden[..., 0], torch.nan)
        self.stopped = torch.zeros(n, dtype=torch.bool, device=device)
        self.finished = True
        self.verified = 0

    def descend(self, steps: int) -> None:
        """Take up to ``steps`` steps for each text that no sweep found exact, and decode it."""
        rows = (~self.stopped).nonzero().flatten()
        if len(rows) == 0:
            return
        active, sent = rows, self.sent[rows]
        adam = RowAdam(self.variables[rows], self.attack.step_size)
        previous, n_same = self.tokens[rows], torch.zeros_like(rows)
        for step in range(1, steps + 1):
            if self.limit.reached:
                self.finished = False
                break
            gradient, has_ended = self._gradient(adam.values, sent)
            adam.step(gradient)
            self.steps[active] += 1
            if self.attack.descent.stop == "settled" and step % CHECK_EVERY == 0:
                tokens = self.attack.decode(adam.values)
                unchanged = ((tokens == previous) | ~sent.real).all(1)
                n_same = torch.where(unchanged, n_same + 1, 0)
                exact = self._errors(tokens, sent) <= self.attack.bottom.rounding
                has_ended = (n_same >= PATIENCE) | exact.all(1)
                previous = tokens
            if bool(has_ended.any()):
                self.variables[active] = adam.values
                idx = (~has_ended).nonzero().flatten()
                if len(idx) == 0:
                    break
                active, sent, previous, n_same = active[idx], sent[idx], previous[idx], n_same[idx]
                adam.select(idx)
        self.variables[active] = adam.values
        tokens = self.attack.decode(self.variables[rows])
        self.record(rows, tokens, self._errors(tokens, self.sent[rows]))

    def _gradient(self, variables: Tensor, sent: base.Sent) -> tuple[Tensor, Tensor]:
        """Return the loss's gradient in the variables, and which texts stop by their cosine."""
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
            return gradient, sent.cosines(hidden.detach()) >= PAPER_COSINE
        return gradient, torch.zeros(len(sent), dtype=torch.bool, device=gradient.device)

    def _errors(self, tokens: Tensor, sent: base.Sent) -> Tensor:
        """Return the relative errors (B, L) of the tokens' hidden states."""
        hidden = self.attack.bottom.hidden(tokens, sent.attention_mask, sent.position_ids)
        self.verified += int(sent.real.sum())
        return sent.relative_errors(hidden)

    def record(self, rows: Tensor, tokens: Tensor, errors: Tensor) -> None:
        """Store the tokens of the texts ``rows`` and their errors."""
        self.tokens[rows], self.errors[rows] = tokens, errors.to(self.errors.dtype)

    def record_better(self, guess: base.TextGuess, errors: Tensor) -> None:
        """Restore the texts whose earlier guess has a smaller sum of squared errors."""
        sums = (e.masked_fill(~self.sent.real, 0.0) for e in (errors, self.errors))
        earlier_sums, current_sums = (e.square().sum(1) for e in sums)
        rows = (earlier_sums < current_sums).nonzero().flatten()
        self.record(rows, guess.tokens[rows], errors[rows])

    def guess(self) -> base.TextGuess:
        """Return the current tokens as a guess."""
        real = self.sent.real
        return base.TextGuess(
            self.tokens.masked_fill(~real, base.NOTHING),
            finished=self.finished,
            candidates=self.verified,
        )

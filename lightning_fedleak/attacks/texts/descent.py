"""Gradient descent to a text: its steps, the tokens at which it ends, and sweeps behind it.

``torch.optim`` is not used: other tools hook every optimizer of the process, and a row that stops
would have to take its moments along.

Sweeps correct texts that are nearly right token by token, each change verified. After a descent a
wrong token's right neighbour is often the second or fifth most similar one. A candidate is verified
by running the whole text through the bottom model with it in its place. That is exact for any
model, while a likeness of embeddings is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import TINY, Deadline, Sent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel

BETAS = (0.9, 0.999)  # decay of Adam's moments: Kingma & Ba 2015
EPS = 1e-8  # added to the root of Adam's second moment: Kingma & Ba 2015


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


# None of the values was tuned.
HIGH = 1.5  # multiple of a text's lower quartile above which an error is high; lower tries more
NEAR = 1.1  # multiple of the present error at its place up to which a candidate is run alone
ALONE = 24  # candidates that each of both rankings runs alone in a round; more cost time
ROUNDS = 12  # rounds at most; texts that still get better stop there
TOKENS_AT_ONCE = 1 << 12  # in one run of the bottom (at least one text); bounds the memory


@dataclass(frozen=True)
class _Swept:
    """The texts that a sweep returns.

    Attributes:
        tokens: (B, L) token ids.
        errors: (B, L) relative errors of their hidden states.
        exact: (B,) bool, texts that are as sent but for rounding.
        finished: False where the deadline passed.
        candidates: number of candidates that were verified.
    """

    tokens: Tensor
    errors: Tensor
    exact: Tensor
    finished: bool
    candidates: int


def sweep(
    bottom: BottomModel,
    sent: Sent,
    tokens: Tensor,
    candidates: Tensor,
    *,
    deadline: Deadline | None = None,
) -> _Swept:
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
        deadline: after which the best so far is returned; None for none.
    """
    deadline = deadline or Deadline(None)
    with torch.no_grad(), bottom.session():
        texts = [_Text(bottom, sent[i : i + 1], tokens[i], candidates[i]) for i in range(len(sent))]
        for text in texts:
            for _ in range(ROUNDS):
                if deadline.passed or text.exact:
                    break
                better = text.jointly()
                if deadline.passed or not (text.alone() or better):
                    break
    return _Swept(
        torch.stack([t.tokens for t in texts]),
        torch.stack([t.errors / t.norms for t in texts]),
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

    def __init__(self, bottom: BottomModel, sent: Sent, tokens: Tensor, options: Tensor) -> None:
        self.bottom = bottom
        self.sent = sent
        self.real = sent.real[0]
        self.options = options
        self.rows = max(1, TOKENS_AT_ONCE // len(tokens))
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

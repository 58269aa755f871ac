"""Tools of a gradient descent to a text: Adam for single rows, and sweeps that correct tokens.

:class:`RowAdam` replaces ``torch.optim``, because other tools hook every optimizer of the process,
and because rows whose descent ends are dropped together with their moments.

:func:`sweep` corrects texts that are nearly right, token by token. After a descent the right token
is often the second to fifth most similar one. A candidate is verified by a run of the whole text
with the candidate at its position. This is exact for any model, whereas the similarity of
embeddings only ranks candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import TINY, Sent, WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import BottomModel

BETAS = (0.9, 0.999)  # decay of Adam's moments: Kingma & Ba 2015
EPS = 1e-8  # added to the root of Adam's second moment: Kingma & Ba 2015


class RowAdam:
    """Adam (Kingma & Ba 2015) as in ``torch.optim``, without weight decay.

    Args:
        values: (B, ...) the initial values, which are copied.
        lr: The learning rate.

    Attributes:
        values: (B, ...) the current values, without gradient.
        steps: The number of steps so far.
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
HIGH = 1.5  # an error is high above this multiple of its text's lower quartile
NEAR = 1.1  # max. error of a candidate that is run alone, over the current error there
ALONE = 24  # candidates of each of both rankings that a round runs alone; more cost time
ROUNDS = 12  # max. number of rounds, also for texts that still improve
TOKENS_AT_ONCE = 1 << 12  # in one run of the bottom (at least one text); bounds the memory


@dataclass(frozen=True)
class _Swept:
    """The result of a sweep.

    Attributes:
        tokens: (B, L) token ids.
        errors: (B, L) relative errors of their hidden states.
        exact: (B,) bool, whether the hidden states equal those sent up to rounding.
        finished: False if the limit passed.
        candidates: The number of candidates that were verified.
    """

    tokens: Tensor
    errors: Tensor
    exact: Tensor
    finished: bool
    candidates: int


def sweep(
    bottom: BottomModel, sent: Sent, tokens: Tensor, candidates: Tensor, *, limit: WorkLimit
) -> _Swept:
    """Exchange tokens of texts for candidates until no exchange reduces the error.

    A text's error is the sum of squared relative errors of its positions. No exchange increases it,
    and a text whose hidden states equal those sent up to rounding does not change. Each round has
    two parts:

    *Jointly.* For each k, all positions with a high error take their k-th candidate at once. Each
    position keeps the candidate with the smallest error there, because a token changes the state at
    its own position most. This costs K runs of a text for any number of wrong positions.

    *Alone.* Up to 24 candidates that were nearly as good at their position as the current token run
    one by one. So do the 24 exchanges at any position that the error's gradient favours most, since
    a token such as BERT's ``[CLS]`` has more effect at other positions. The best exchange is
    kept, or all exchanges that reduce the error if they reduce it more together.

    Args:
        bottom: The bottom model; its session may be open.
        sent: The hidden states of B texts.
        tokens: (B, L) the current texts.
        candidates: (B, L, K) other tokens for each position.
        limit: Where it is reached, the best texts so far are returned.
    """
    with torch.no_grad(), bottom.session():
        texts = [_Text(bottom, sent[i : i + 1], tokens[i], candidates[i]) for i in range(len(sent))]
        for text in texts:
            for _ in range(ROUNDS):
                if limit.reached or text.exact:
                    break
                better = text.jointly()
                if limit.reached or not (text.alone() or better):
                    break
    return _Swept(
        torch.stack([t.tokens for t in texts]),
        torch.stack([t.errors / t.norms for t in texts]),
        torch.tensor([t.exact for t in texts], device=tokens.device),
        not limit.reached,
        sum(t.candidates for t in texts),
    )


def high_errors(errors: Tensor, real: Tensor) -> Tensor:
    """Return (B, L) bool, whether a position's distance from the state sent is high for its text.

    Noise, and wrong tokens elsewhere, move all positions by similar distances. So the lower
    quartile estimates the distance at a position whose token is right.
    """
    quartile = errors.masked_fill(~real, torch.nan).nanquantile(0.25, dim=-1, keepdim=True)
    return real & (errors > HIGH * quartile)


class _Text:
    """One text during a sweep.

    Attributes:
        tokens: (L,) the current tokens.
        errors: (L,) the distances of their hidden states from those sent.
        norms: (L,) the norms of the states sent.
        options: (L, K) the candidates at each position.
        candidates: The number of candidates that were verified so far.
    """

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
        # (L, K) the error with each candidate, tried jointly, over the current error there.
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
        """Return whether the hidden states equal those sent up to rounding."""
        return bool((self.errors <= self.bottom.rounding * self.norms).all())

    def _change(self, texts: Tensor, errors: Tensor) -> bool:
        """Change to the best of n texts (n, L) if its error is smaller than the current one."""
        sums = self._sums(errors)
        best = int(sums.argmin())
        if not bool(sums[best] < self._sums(self.errors)):
            return False
        self.tokens, self.errors = texts[best], errors[best]
        return True

    def jointly(self) -> bool:
        """Try candidates at all positions of high error at once, and record their errors there."""
        suspects = high_errors(self.errors, self.real)
        texts = torch.where(suspects, self.options.T, self.tokens)
        self.candidates += len(texts) * int(suspects.sum())
        errors = self._errors(texts)
        all_errors = torch.cat([self.errors[None], errors])
        best = torch.cat([self.tokens[None], texts]).gather(0, all_errors.argmin(0)[None])
        better = self._change(best, self._errors(best))
        ratios = errors / self.errors.clamp(min=TINY)
        self._ratios = ratios.masked_fill(~suspects | (texts == self.tokens), torch.inf).T
        return better

    def alone(self) -> bool:
        """Try the most promising exchanges one by one, and those that help together."""
        pairs = torch.unique(torch.cat([self._near(), self._recommended()]))
        if len(pairs) == 0:
            return False
        places, tokens = pairs // self.options.shape[1], self.options.flatten()[pairs]
        texts = self.tokens.repeat(len(pairs), 1).scatter(1, places[:, None], tokens[:, None])
        self.candidates += len(pairs)
        errors = self._errors(texts)
        sums = self._sums(errors)
        combined = self.tokens.clone()
        for i in sums.argsort(descending=True).tolist():
            if sums[i] < self._sums(self.errors):
                combined[places[i]] = tokens[i]
        texts = torch.cat([texts, combined[None]])
        return self._change(texts, torch.cat([errors, self._errors(combined[None])]))

    def _near(self) -> Tensor:
        """Return nearly as good pairs of position and candidate, as flat indices of ``options``."""
        assert self._ratios is not None
        ratios = self._ratios.masked_fill(self.options == self.tokens[:, None], torch.inf).flatten()
        best = ratios.argsort()[:ALONE]
        return best[ratios[best] <= NEAR]

    def _recommended(self) -> Tensor:
        """Return pairs for which the error falls most, to first order in the embedding."""
        words = self.bottom.word_embeddings(self.tokens)[None].float()
        with torch.enable_grad():
            leaf = words.detach().requires_grad_()
            hidden = self.bottom.hidden_from(leaf, self.sent.attention_mask, self.sent.position_ids)
            total = (self.sent.squared_errors(hidden)[0] / self.norms.square()).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
        changes = self.bottom.word_embeddings(self.options).float() - words[0][:, None]
        rise = (changes * gradient[0][:, None]).sum(-1)
        rise = rise.masked_fill(~self.real[:, None], torch.inf).flatten()
        best = rise.argsort()[:ALONE]
        return best[rise[best] < 0]

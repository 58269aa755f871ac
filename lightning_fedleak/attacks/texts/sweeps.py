"""Sweeps: a text that is nearly right is put right token by token, each change verified.

What a descent leaves wrong are tokens whose right neighbour in the vocabulary was second or fifth
and not first. A candidate is verified by running the whole text through the bottom model with it in
its place: exact, whatever the model, where a likeness of embeddings is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import TINY, Deadline, Sent, rounding
from lightning_fedleak.attacks.texts.bottom_model import BottomModel

AT_ONCE = 1 << 12
"""Tokens that go through the bottom in one run."""

HIGH = 1.5
"""An error is high above this multiple of the lower quartile of its text."""

NEAR = 1.1
"""A candidate is run alone whose error at its own place is at most this multiple of the present."""

ALONE = 24
"""Candidates that are run alone in one round, at most, from each of both rankings."""

ROUNDS = 12
RIVALS = 4


@dataclass(frozen=True)
class Swept:
    """Texts after sweeping.

    Attributes:
        tokens: (B, L) token ids.
        errors: (B, L) relative errors of their hidden states.
        confidence: (B, L) in [0, 1]: ``1 - (e / e')**2`` for the error e at a position and the
            least error e' there with one of four other candidates in its place, those of every
            second position tried at once. 1 where a whole text is as sent but for rounding; 0 where
            it is not and the deadline had passed before others were tried.
        exact: (B,) which texts are.
        finished: False where the deadline passed.
        candidates: that were verified.
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
    at_once: int = AT_ONCE,
) -> Swept:
    """Puts ``candidates`` in the places of tokens until nothing gets better, in rounds.

    *Jointly.* All positions with a high error take their k-th candidate at once, for each k, and
    each keeps the one with the smallest error at its own place, which is mostly its own doing.
    This costs K runs of a text however many positions are wrong.

    *Alone.* The candidates that did nearly as well at their own place as the present token, and
    those of all positions that the gradient of the text's error recommends (BERT's ``[CLS]`` shows
    less at its own place than elsewhere), are run one by one, 24 of each. The best is kept, or all
    that are better together.

    A text's error is the sum of squared relative errors of its positions. No change is kept that
    makes it larger. A text that is as sent but for rounding is left alone.

    Args:
        bottom: within a session or not.
        sent: what was sent of B texts.
        tokens: (B, L) what they are thought to be.
        candidates: (B, L, K) what else each may be.
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
    """(B, L) bool: which distances from what was sent are high for their text.

    Noise moves every position by about the same distance, so that the lower quartile is what a
    right position shows: the noise, or what wrong ones elsewhere do to it.
    """
    quartile = errors.masked_fill(~real, torch.nan).nanquantile(0.25, dim=-1, keepdim=True)
    return real & (errors > HIGH * quartile)


class _Text:
    """One text as it is now: ``tokens``, and ``errors``, the distances of its hidden states."""

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
        self._own: Tensor | None = None

    def _errors(self, texts: Tensor) -> Tensor:
        """(n, L) distances of the hidden states of n texts from those sent."""
        found = []
        for part in torch.split(texts, self.rows):
            sent = self.sent[torch.zeros(len(part), dtype=torch.int64, device=part.device)]
            hidden = self.bottom.hidden(part, sent.attention_mask, sent.position_ids)
            found.append(sent.squared_errors(hidden).sqrt())
        return torch.cat(found)

    def _sums(self, errors: Tensor) -> Tensor:
        """(...) sums of squared relative errors of (..., L) distances."""
        return (errors / self.norms).square().sum(-1)

    @property
    def exact(self) -> bool:
        """Whether it is as sent but for rounding."""
        return bool(
            (self.errors <= rounding(self.bottom.autocast or self.bottom.dtype) * self.norms).all()
        )

    def _change(self, texts: Tensor, errors: Tensor) -> bool:
        """Takes the best of n texts (n, L) if it is better than the present one."""
        sums = self._sums(errors)
        best = int(sums.argmin())
        if not bool(sums[best] < self._sums(self.errors)):
            return False
        self.tokens, self.errors = texts[best], errors[best]
        return True

    def jointly(self) -> bool:
        """Tries the candidates of all suspects at once, and notes each's error at its own place."""
        suspects = high_errors(self.errors, self.real)
        texts = torch.where(suspects, self.options.T, self.tokens)
        self.candidates += len(texts) * int(suspects.sum())
        own = self._errors(texts)
        tried = torch.cat([self.errors[None], own])
        best = torch.cat([self.tokens[None], texts]).gather(0, tried.argmin(0)[None])
        better = self._change(best, self._errors(best))
        ratio = own / self.errors.clamp(min=TINY)
        self._own = ratio.masked_fill(~suspects | (texts == self.tokens), torch.inf).T
        return better

    def alone(self) -> bool:
        """Tries the most promising changes one by one."""
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
        """Pairs of place and candidate, as indices of ``options``, that did well jointly."""
        assert self._own is not None
        ratios = self._own.masked_fill(self.options == self.tokens[:, None], torch.inf).flatten()
        first = ratios.argsort()[:ALONE]
        return first[ratios[first] <= NEAR]

    def _recommended(self) -> Tensor:
        """Pairs for which the text's error falls most, to first order in the word embedding."""
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
        """(L,) as in :class:`Swept`; ``late``: the deadline has passed."""
        if self.exact or late:
            return self.real.to(self.errors.dtype) * self.exact
        same = (self.options == self.tokens[:, None]).int()
        rivals = self.options.gather(1, same.argsort(dim=1, stable=True))[:, :RIVALS]
        least = torch.full_like(self.errors, torch.inf)
        for parity in range(2):
            here = torch.arange(len(self.tokens), device=self.tokens.device) % 2 == parity
            texts = torch.where(here & self.real, rivals.T, self.tokens)
            differs = here & (texts != self.tokens)
            errors = self._errors(texts).masked_fill(~differs, torch.inf)
            least = least.minimum(errors.amin(0))
        return (1 - (self.errors / least).square()).clamp(min=0) * self.real


__all__ = ["Swept", "high_errors", "sweep"]

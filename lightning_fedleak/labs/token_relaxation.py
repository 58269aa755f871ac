"""TokenRelaxation: one weight for each token of the vocabulary, by gradient descent."""

from __future__ import annotations

from torch import Tensor

from lightning_fedleak.attacks.texts.base import Sent
from lightning_fedleak.attacks.texts.embedding_descent import TOKENS_AT_ONCE, EmbeddingDescent

WEIGHTS_AT_ONCE = 1 << 25
"""Weights in one run (at least one text's), of which Adam and the gradient keep five copies: 640 MB
in float32. More need more memory."""


class TokenRelaxation(EmbeddingDescent):
    """The softmax relaxation that Zheng compares with (Sect. 4.3; Song & Raghunathan 2020).

    Each position's word embedding is the mean of all word embeddings under the softmax of V
    weights. Adam moves the weights until the hidden states are those sent, and the token with the
    largest weight is the guess. There are far more weights than hidden numbers, so that many
    mixtures of tokens fit. The arguments are those of
    :class:`~lightning_fedleak.attacks.texts.embedding_descent.EmbeddingDescent`; ``lr`` is in units
    of the weights, which start at 0. Give ``initial="mean"``, as no readout is used.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.labs.token_relaxation import TokenRelaxation
        >>> attack = TokenRelaxation(layer=3, steps=300, initial="mean", budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "token_relaxation"

    @property
    def step_size(self) -> float:
        """Return the learning rate in units of the weights."""
        return self.lr

    def tokens_at_once(self) -> int:
        """Return the number of tokens whose weights fit into one run."""
        return min(TOKENS_AT_ONCE, WEIGHTS_AT_ONCE // self.bottom.vocab_size)

    def start(self, sent: Sent) -> Tensor:
        """Return zeros (B, L, V): all tokens have the same share."""
        embeddings = self.table.embeddings
        return embeddings.new_zeros(*sent.real.shape, len(embeddings))

    def words(self, variables: Tensor) -> Tensor:
        """Return mixtures (B, L, e) of word embeddings."""
        return variables.softmax(-1) @ self.table.embeddings

    def decode(self, variables: Tensor) -> Tensor:
        """Return the tokens of largest share in the mixture."""
        return variables.argmax(-1)

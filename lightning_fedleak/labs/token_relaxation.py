"""TokenRelaxation: recover a text from its hidden states by gradient descent on token weights.

In split learning the client sends the hidden states of a layer, and the attack knows the layers
below it. The base class runs the descent; this class defines the variables that it changes.

Shapes: B texts of L tokens, V tokens in the vocabulary, e dimensions of a word embedding.
"""

from __future__ import annotations

from torch import Tensor

from lightning_fedleak.attacks.texts.base import Sent
from lightning_fedleak.attacks.texts.embedding_descent import TOKENS_AT_ONCE, EmbeddingDescent

# The maximum number of weights that are optimized at once (but always those of one text). Adam and
# the gradient keep five copies of them, 640 MB in float32.
WEIGHTS_AT_ONCE = 1 << 25


class TokenRelaxation(EmbeddingDescent):
    """The softmax relaxation, the baseline of Zheng 2023 (Sect. 4.3; Song & Raghunathan 2020).

    The word embedding at each position is the mean of all word embeddings, weighted by the softmax
    of V numbers, the weights. Adam changes the weights so that the hidden states become those that
    the client sent. The guess is the token with the largest weight. There are far more weights than
    numbers in a hidden state, so many mixtures of tokens give the same state. The arguments are
    those of :class:`~lightning_fedleak.attacks.texts.embedding_descent.EmbeddingDescent`. ``lr`` is
    in units of the weights, which start at 0. Pass ``initial="mean"``, because a readout, which
    predicts a first guess, is not used.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.labs.token_relaxation import TokenRelaxation
        >>> attack = TokenRelaxation(layer=3, steps=300, initial="mean", budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "token_relaxation"  # the name in the logs without ``name``

    @property
    def step_size(self) -> float:
        """Return the learning rate in units of the weights."""
        return self.lr

    def tokens_at_once(self) -> int:
        """Return the number of tokens whose weights are optimized at once."""
        return min(TOKENS_AT_ONCE, WEIGHTS_AT_ONCE // self.bottom.vocab_size)

    def start(self, sent: Sent) -> Tensor:
        """Return the initial weights (B, L, V): zeros, so that all tokens have the same share.

        ``sent.real`` (B, L) marks the tokens that are no padding.
        """
        embeddings = self.table.embeddings
        return embeddings.new_zeros(*sent.real.shape, len(embeddings))

    def words(self, variables: Tensor) -> Tensor:
        """Return the weighted means (B, L, e) of word embeddings for weights (B, L, V)."""
        return variables.softmax(-1) @ self.table.embeddings

    def decode(self, variables: Tensor) -> Tensor:
        """Return the token (B, L) with the largest weight at each position."""
        return variables.argmax(-1)

"""TokenRelaxation: one weight for each token of the vocabulary, by gradient descent."""

from __future__ import annotations

from torch import Tensor

from lightning_fedleak.attacks.texts.base import Sent
from lightning_fedleak.attacks.texts.descent import DescentAttack, DescentSettings
from lightning_fedleak.validate import check_integer, check_number


class TokenRelaxation(DescentAttack):
    """The softmax relaxation that Zheng compares with (Sect. 4.3; Song & Raghunathan 2020).

    Each position's word embedding is the mean of all word embeddings under the softmax of V
    weights. Adam moves the weights until the hidden states are those sent, and the token with the
    largest weight is the guess. There are far more weights than hidden numbers, so that many
    mixtures of tokens fit.

    Args:
        layer: the split.
        steps: gradient steps for one text, at most.
        lr: Adam's learning rate, in units of the weights, which start at 0.
        temperature: divides the weights before the softmax.
        most_weights: weights in one run (at least one text's), of which Adam and the gradient keep
            five copies: the default is 640 MB in float32.
        descent: rarely changed settings
            (:class:`~lightning_fedleak.attacks.texts.descent.DescentSettings`).
        budget_seconds: for one observation, divided evenly among its texts.
        name: in the logs.

    Raises:
        ValueError: a setting out of range.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor, TokenRelaxation
        >>> attack = TokenRelaxation(layer=3, steps=300, budget_seconds=20.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "token_relaxation"
    config_names = (*DescentAttack.config_names, "temperature")

    def __init__(
        self,
        layer: int,
        steps: int = 1000,
        lr: float = 0.1,
        *,
        temperature: float = 1.0,
        most_weights: int = 1 << 25,
        descent: DescentSettings | None = None,
        budget_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, steps, lr, descent, budget_seconds, name)
        self.temperature = check_number("temperature", temperature, above=0)
        self.most_weights = check_integer("most_weights", most_weights)

    @property
    def step_size(self) -> float:
        """Return the learning rate in units of the weights."""
        return self.lr

    def tokens_at_once(self) -> int:
        """Return the number of tokens whose weights fit into one run."""
        return min(self.descent.at_once, self.most_weights // self.bottom.vocab_size)

    def start(self, sent: Sent) -> Tensor:
        """Return zeros (B, L, V): all tokens have the same share."""
        embeddings = self.table.embeddings
        return embeddings.new_zeros(*sent.real.shape, len(embeddings))

    def words(self, variables: Tensor) -> Tensor:
        """Return mixtures (B, L, e) of word embeddings."""
        return (variables / self.temperature).softmax(-1) @ self.table.embeddings

    def decode(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of largest share in the mixture, and their lead over the next."""
        shares, ids = (variables / self.temperature).softmax(-1).topk(2, dim=-1)
        return ids[..., 0], shares[..., 0] - shares[..., 1]

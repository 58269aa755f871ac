"""Two attacks on words that need no calibration.

:class:`BagOfWords` names the non-zero rows of the input embedding's gradient, :class:`BiasSign` the
negative entries of the gradient of the head's bias.
"""

import math
from collections import Counter
from typing import Any

import torch
from scipy.special import chdtri
from torch import Tensor, nn

from lightning_fedleak.attacks import base
from lightning_fedleak.attacks.base import Capability, ThreatModel
from lightning_fedleak.attacks.local_steps import LocalSteps, copy_weights, decays_apart
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    HEAD_BIAS,
    HEAD_WEIGHT,
    Anatomy,
    unwrap,
)
from lightning_fedleak.model.snapshots import (
    Inapplicable,
    Observation,
    UpdateSnapshot,
    whole_tensor,
)

_MAX_NAMED_SHARE = 0.9
"""Share of the vocabulary above which a guess under noise is refused; not tuned."""


def bag_of_words(gradient: Tensor, noise_std: float = 0.0) -> base.WordGuess:
    """Return the types whose embedding row has a gradient (Gupta et al. 2022, FILM).

    Only the rows that a batch looks up receive a gradient, so that the guess is exact. It misses
    padding, and tokens that influence no predicted position (the last token of a causal text).
    With weight decay in the update every row is non-zero, so that every type is named.

    With noise, a row is named if its squared norm is above the quantile of its law without a
    gradient, a chi-square of d degrees of freedom, that half a row of V exceeds by chance.

    Args:
        gradient: (V, d) of the input embedding, strided or sparse.
        noise_std: the standard deviation of the Gaussian noise on each number; 0 for none.

    Returns:
        The types of rows with a gradient, with ``surface="input"``. A score is the largest
        magnitude in the type's row, or with noise the squared norm over that quantile, less 1.
        Types are in descending order of it.

    Raises:
        UnusableObservation: the gradient is non-finite or all zero, or the size of the noise is not
            known.
        Inapplicable: nearly all rows exceed the noise.
    """
    gradient = whole_tensor(gradient)
    if noise_std != 0.0:
        return _types_above_noise(gradient, noise_std)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        scores = gradient.values().new_zeros(gradient.shape[0])
        scores[gradient.indices()[0]] = _largest(gradient.values())
    else:
        scores = _largest(gradient)
    base.check_readable(scores.max(), "the embedding's gradient")
    return _positive_scores(scores, "input")


def _types_above_noise(gradient: Tensor, noise_std: float) -> base.WordGuess:
    """Return the types whose row exceeds noise of a standard deviation, see bag_of_words."""
    if not noise_std < math.inf:
        raise base.UnusableObservation("the size of the noise on the embedding is not known")
    n_rows, width = gradient.shape
    scaled = gradient.to_dense().to(torch.promote_types(gradient.dtype, torch.float32)) / noise_std
    squares = scaled.square().sum(1)
    base.check_readable(squares.max(), "the embedding's gradient")
    guess = _positive_scores(squares / float(chdtri(width, 0.5 / n_rows)) - 1.0, "input")
    if len(guess.types) > _MAX_NAMED_SHARE * n_rows:
        raise Inapplicable(
            f"{len(guess.types)} of {n_rows} rows of the embedding's gradient exceed the declared "
            "noise, as in an update with weight decay: which words were read does not show"
        )
    return guess


def _positive_scores(scores: Tensor, surface: str) -> base.WordGuess:
    """Return the types of positive score, the largest first."""
    types = scores.argsort(descending=True, stable=True)[: int((scores > 0).sum())]
    return base.WordGuess(types=types, scores=scores, n_types=float(len(types)), surface=surface)


_MAX_RATE_RATIO = 50.0
"""Largest learning rate of a round over the rate that its update is divided by; not tuned."""


class BagOfWords(base.Attack):
    """The word types whose rows in the input embedding's gradient are not zero.

    For a LoRA on the embedding it reads the columns of A's gradient, from the first step on and
    even if the head is tied to the embedding. If PEFT trains the rows of listed tokens alone, it
    names those of them that were read, and shows nothing of other words.

    In a round of local steps, also of Adam and AdamW, it names the words of all steps: the rows
    that changed by more than decoupled weight decay, which shrinks a row but does not rotate it.
    The result is *unknown* if the optimizer keeps momentum or Adam's averages from earlier rounds.
    See :func:`bag_of_words`.

    Args:
        name: The name in the logs.

    Raises:
        ValueError: at setup, if head and embedding are one matrix.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_fedleak import BagOfWords
        >>> from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
        >>> embedding = nn.Embedding(100, 8)
        >>> embedding(torch.tensor([[3, 5, 5, 59]])).square().sum().backward()
        >>> gradients = {"embedding.weight": embedding.weight.grad}
        >>> guess = BagOfWords().run(Observation((GradientSnapshot(0, Stage.SHARED, gradients),)))
        >>> sorted(guess.types.tolist())
        [3, 5, 59]
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the input embeddings",
        Capability.SEES_EMBEDDING_GRADIENT,
    )
    default_name = "bag_of_words"
    reads_adaptive_updates = True  # Adam changes only rows with a gradient, up to decay
    gathers = True  # prepare needs nothing, and refresh gathers the embedding itself

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._factors: tuple[str, ...] = ()  # names of the factors A that are read, if any
        self._listed: dict[str, Tensor] = {}  # names of rows of listed tokens, with their ids
        self._before: dict[str, Tensor] = {}  # the weights that the current round began with

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Store the weights that a round begins with, if decoupled decay changes them."""
        if decays_apart(self._facts):
            self._before = copy_weights(anatomy, self._names)

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the input embedding; the A of a LoRA on it, or its listed rows, if those train.

        Raises:
            ValueError: head and embedding are one matrix.
        """
        self._factors = _trained_factors(anatomy)
        self._listed = {} if self._factors else _listed_tokens(anatomy)
        # A control has few listed tokens too, which proves nothing: their rows are exact by design.
        self.needs_control = not self._listed
        is_tied = anatomy.parameter(EMBEDDING_WEIGHT) is anatomy.parameter(HEAD_WEIGHT)
        if is_tied and not self._factors:
            raise ValueError(
                f"attack '{self.name}' reads the embedding's own gradient, and this model ties "
                "head and embedding, so that their sum is shared: remove it. FlatChat reads the sum"
            )
        return base.Surfaces(gradients=self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        """The parameters whose gradients are read."""
        return self._factors or (*self._listed,) or (EMBEDDING_WEIGHT,)

    def run(self, view: Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the types whose embedding row changed in the newest snapshot.

        Raises:
            UnusableObservation: the gradient is non-finite or all zero, or it is an update in which
                rows of words that were not read change too.
        """
        noise_std = view.gradients[-1].noise_std
        if self._factors:
            rows = [self._without_decay(view, name).T for name in self._factors]
            return bag_of_words(torch.cat(rows, dim=1), noise_std)
        if self._listed:
            ids = torch.cat([*self._listed.values()])
            shared = torch.cat([whole_tensor(self._without_decay(view, n)) for n in self._listed])
            # Without a gradient the batch has no listed token.
            read = bag_of_words(shared, noise_std).types.cpu() if bool(shared.any()) else ids[:0]
            return base.WordGuess(ids[read], surface="input")
        return bag_of_words(self._without_decay(view, EMBEDDING_WEIGHT), noise_std)

    def _without_decay(self, view: Observation, name: str) -> Tensor:
        """Return the shared gradient or update, with zeros in rows that only decay has changed."""
        shared, update = view.gradient(name), view.gradients[-1]
        if not isinstance(update, UpdateSnapshot):
            return shared
        steps = LocalSteps.from_facts(self._facts)
        if steps is None or steps.plain:
            return shared
        steps.check_fresh(update.fresh)  # else rows of words of earlier rounds change too
        if not steps.settings.get("weight_decay"):
            return shared
        if update.noise_std != 0.0:
            raise Inapplicable("noise hides what weight decay alone changed: use weight_decay=0")
        if not steps.decays_apart:
            raise base.UnusableObservation(
                f"weight decay of {steps.optimizer.__name__} changes rows of unread words too: use "
                "AdamW, or weight_decay=0"
            )
        before = self._before[name]
        is_factor = name in self._factors
        change, weights = whole_tensor(shared).to_dense().float(), before.float().to(shared.device)
        if is_factor:  # (r, V), with a column for each token
            change, weights = change.T, weights.T
        squares = weights.square().sum(1, keepdim=True)
        share = (change * weights).sum(1, keepdim=True) / squares.where(squares > 0, 1.0)
        common = share.median()  # most rows are of words that were not read
        if change.shape[1] == 1:  # a row of one number has no direction
            share = common
        rotation = (change - share * weights).abs().amax(1)  # the part that is not along the row
        # Weights are rounded once in each step; 2 more for the arithmetic of the update.
        rounding = (steps.steps + 2) * torch.finfo(before.dtype).eps / update.learning_rate
        # A narrow row's gradient may be along it by chance, but changes it much more than decay.
        decay = steps.steps * float(steps.settings["weight_decay"])
        shrunk = share.abs().flatten() <= max(2 * float(common.abs()), _MAX_RATE_RATIO * decay)
        unread = shrunk & (rotation <= rounding * weights.abs().amax(1))
        change = change.masked_fill(unread[:, None], 0.0)
        return change.T if is_factor else change


def _trained_factors(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names of the trained (r, V) factors A of the embedding's active LoRA adapters.

    There are none if the embedding itself is trained, or if another layer shares the factor.
    """
    embedding = unwrap(anatomy.embedding)
    factors = embedding._modules.get("lora_embedding_A")
    if not isinstance(factors, nn.ParameterDict) or anatomy.trainable(EMBEDDING_WEIGHT):
        return ()
    active = getattr(embedding, "active_adapters", ())
    ids = {id(factors[adapter]) for adapter in active if adapter in factors}
    parameters = anatomy.root.named_parameters(remove_duplicate=False)
    trained = [(n, id(p)) for n, p in parameters if id(p) in ids and p.requires_grad]
    uses = Counter(key for _, key in trained)
    return tuple(n for n, key in trained if uses[key] == 1)


def _listed_tokens(anatomy: Anatomy) -> dict[str, Tensor]:
    """Return the ids of the tokens whose rows PEFT trains alone, by the name of their parameter."""
    layer: Any = unwrap(anatomy.embedding)
    layer = layer._modules.get("token_adapter", layer)
    rows = layer._modules.get("trainable_tokens_delta")
    if not isinstance(rows, nn.ParameterDict) or anatomy.trainable(EMBEDDING_WEIGHT):
        return {}
    active = [name for name in layer.active_adapters if name in rows]
    ids = {id(rows[name]): torch.as_tensor(layer.token_indices[name]) for name in active}
    parameters = [(n, p) for n, p in anatomy.root.named_parameters() if p.requires_grad]
    return {name: ids[id(p)] for name, p in parameters if id(p) in ids}


def _largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row; a sum of squares could underflow."""
    low, high = rows.aminmax(dim=1)
    return high.maximum(-low)


def bias_sign(gradient: Tensor) -> base.WordGuess:
    """Return the types whose bias gradient is negative (Zhao et al. 2020, iDLG, for many samples).

    The bias gradient of a softmax with cross-entropy is ``sum_i (p_i - onehot(y_i))``, over the
    tokens i of the batch. The entry of an unused type is a sum of probabilities, never negative, so
    that every named type was used. A used type is missed if the model's probabilities for it over
    the whole batch exceed its count, as for frequent words. The rule does not hold with label
    smoothing, which makes entries of unused types negative too.

    Args:
        gradient: (V,) of the output head's bias; its scale does not matter.

    Returns:
        The types of negative entries, the most negative first; scores are ``-gradient``.

    Raises:
        UnusableObservation: the gradient is non-finite or all zero.
    """
    gradient = whole_tensor(gradient)
    base.check_readable(gradient.abs().max(), "the head's bias gradient")
    scores = -(gradient if gradient.dtype.itemsize >= 4 else gradient.float())
    return _positive_scores(scores, "output")


class BiasSign(base.Attack):
    """The types whose gradient of the output head's bias is negative.

    Every named type was used; frequent words may be missed. Few language models have such a bias:
    BERT-style masked models do, GPT-2 and Llama do not. See :func:`bias_sign`.

    Args:
        name: The name in the logs.

    Raises:
        ValueError: at setup, if the head has no bias.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import BiasSign
        >>> from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
        >>> bias = torch.zeros(50, requires_grad=True)
        >>> torch.nn.functional.cross_entropy(bias[None], torch.tensor([7])).backward()
        >>> gradients = {"head.bias": bias.grad}
        >>> guess = BiasSign().run(Observation((GradientSnapshot(0, Stage.SHARED, gradients),)))
        >>> guess.types.tolist()
        [7]
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the output head's bias",
        Capability.SEES_HEAD_BIAS_GRADIENT,
    )
    default_name = "bias_sign"

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the head's bias.

        Raises:
            ValueError: the head has none.
        """
        if anatomy.parameter(HEAD_BIAS) is None:
            raise ValueError(
                f"attack '{self.name}' reads the head's bias, and this head has none: remove it"
            )
        return base.Surfaces(gradients=(HEAD_BIAS,))

    def run(self, view: Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the types whose bias gradient is negative in the newest snapshot."""
        return bias_sign(view.gradient(HEAD_BIAS))

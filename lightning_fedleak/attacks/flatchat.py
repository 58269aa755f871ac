"""FLATCHAT: word types from the row sums of the output head's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.base import (
    Attack,
    Query,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.calibration import PublicText, gradient_of
from lightning_fedleak.attacks.flattening import (
    REGULARIZATION,
    TAILS,
    Scorer,
    flattened,
    rank_types,
    separate_clusters,
)
from lightning_fedleak.attacks.mixture import Mixture
from lightning_fedleak.snapshots import Observation
from lightning_fedleak.threats import Capability, ThreatModel

SHAPES = tuple((size, length) for size in (1, 2, 4, 8, 16, 32) for length in (25, 50, 100))


@dataclass(frozen=True, kw_only=True)
class FlatChatGuess(WordGuess):
    """A guess with what the mixture said.

    Attributes:
        mixture: fitted to the normalised row sums; its wide component is the positive cluster.
        fits: starts that were tried.
        separated: whether the variances of the clusters are told apart. False: no start got
            there, ``mixture`` is the one of the largest ratio, and the guess deserves less trust.
    """

    mixture: Mixture
    fits: int
    separated: bool


@dataclass(frozen=True)
class TypeCountRegressor:
    """Number of word types from the weight of the positive cluster (Remark 2, Appendix B).

    Attributes:
        coefficients: (degree + 1,) float64, constant first.
    """

    coefficients: Tensor

    @classmethod
    def fit(
        cls, positive_weights: Sequence[float], n_types: Sequence[float], degree: int = 1
    ) -> TypeCountRegressor:
        """Least squares on pairs of positive weight and number of types.

        Raises:
            ValueError: fewer distinct weights than coefficients.
        """
        if len(set(positive_weights)) <= degree:
            raise ValueError(
                f"a polynomial of degree {degree} needs more than {degree} gradients with "
                f"different positive weights; got {len(set(positive_weights))}. Use more batch "
                "shapes or a lower degree."
            )
        x = torch.tensor(positive_weights, dtype=torch.float64)
        y = torch.tensor(n_types, dtype=torch.float64)
        powers = torch.stack([x**k for k in range(degree + 1)], dim=1)
        return cls(torch.linalg.lstsq(powers, y[:, None]).solution[:, 0])

    def __call__(self, mixture: Mixture) -> float:
        """The number of types that the mixture stands for; may be below 1 or above V."""
        weight = float(mixture.weights[1])
        return float(sum(c * weight**k for k, c in enumerate(self.coefficients.tolist())))


def flatchat(
    gradient: Tensor,
    n_types: float | Callable[[Mixture], float],
    scorer: Scorer = "gmm",
    *,
    regularization: float = REGULARIZATION,
    tails: Sequence[float] = TAILS,
    min_ratio: float = 4.0,
) -> FlatChatGuess:
    """Algorithm 1 on one gradient.

    Args:
        gradient: (V, d) of the output head's weight.
        n_types: how many types to name, or what estimates it from the mixture. Rounded, and kept
            between 1 and V.
        scorer: as in :func:`rank_types`.
        regularization: as in :func:`separate_clusters`.
        tails: as in :func:`separate_clusters`.
        min_ratio: as in :func:`separate_clusters`.

    Raises:
        UnusableObservation: the row sums are non-finite, all zero, all alike, or rounding errors.
    """
    s = flattened(gradient)
    mixture, fits, separated = separate_clusters(
        s, regularization=regularization, tails=tails, min_ratio=min_ratio
    )
    scores = rank_types(s, mixture, scorer)
    estimate = float(n_types(mixture) if callable(n_types) else n_types)
    top = scores.topk(min(max(round(estimate), 1), len(scores)))
    return FlatChatGuess(
        types=top.indices.to(gradient.device),
        scores=scores.float().to(gradient.device),
        n_types=estimate,
        mixture=mixture,
        fits=fits,
        separated=separated,
    )


class FlatChat(Attack):
    """The gradient flattening attack (Algorithm 1): row sums, mixture, rank, top K.

    Token i enters its label's row sum with the sum of its hidden state as weight (Lemma 2); the
    used types form the cluster of large variance (Theorem 3, Remark 1), and how many they are is
    read off that cluster's weight by a regression fitted on gradients of public text (Remark 2).

    Args:
        public_text: what the regression is fitted on, in ``prepare``. Needed for
            ``n_types="predicted"`` unless a fitted state is loaded. ``"sampled"``: text that a
            causal model writes itself.
        n_types: ``"predicted"``, or a number the adversary assumes, or a function of the mixture.
        oracle_n_types: the *true* number of types, or a function that returns it for the batch
            under attack. No adversary has it: for the paper's oracle columns only.
        scorer: ``"gmm"`` (Eq. 11) or ``"abs"``.
        degree: of the polynomial (1 in the paper, higher in its Appendix B).
        shapes: (sentences, length) of the public batches.
        batches_per_shape: public gradients for each shape (20 in the paper).
        mask_token_id: needed to calibrate a masked language model.
        regularization: added to the clusters' variances, see :func:`separate_clusters`.
        min_ratio: of the clusters' variances, from which they count as separated.
        seed: of the public batches.
        name: as in the logs.
    """

    threat_model = ThreatModel.of(
        "an honest but curious server that reads one update of the output head",
        Capability.SEES_HEAD_GRADIENT,
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
    )
    default_name = "flatchat"

    def __init__(
        self,
        public_text: PublicText | Literal["sampled"] | None = None,
        *,
        n_types: Literal["predicted"] | float | Callable[[Mixture], float] = "predicted",
        oracle_n_types: int | Callable[[], int] | None = None,
        scorer: Scorer = "gmm",
        degree: int = 1,
        shapes: Sequence[tuple[int, int]] = SHAPES,
        batches_per_shape: int = 1,
        mask_token_id: int | None = None,
        regularization: float = REGULARIZATION,
        min_ratio: float = 4.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if scorer not in ("gmm", "abs"):
            raise ValueError(f"scorer must be 'gmm' or 'abs', got {scorer!r}")
        if isinstance(n_types, str) and n_types != "predicted":
            raise ValueError(f"n_types must be 'predicted', a number or callable, got {n_types!r}")
        if oracle_n_types is not None and n_types != "predicted":
            raise ValueError("give n_types or oracle_n_types, not both")
        if isinstance(public_text, str) and public_text != "sampled":
            raise ValueError(
                "public_text must be a PublicText (PublicText(list_of_texts, tokenizer)) or "
                "'sampled', not a string of text"
            )
        if degree < 1 or batches_per_shape < 1 or not shapes:
            raise ValueError("degree and batches_per_shape must be at least 1, shapes not empty")
        self.public_text = public_text
        self.n_types = n_types
        self.oracle_n_types = oracle_n_types
        self.scorer: Scorer = scorer
        self.degree = degree
        self.shapes = tuple(shapes)
        self.batches_per_shape = batches_per_shape
        self.mask_token_id = mask_token_id
        self.regularization = regularization
        self.min_ratio = min_ratio
        self.seed = seed
        self.regressor: TypeCountRegressor | None = None
        self._not_fitted = "it has no regression: call prepare(anatomy), or load one"

    @property
    def predicts(self) -> bool:
        """Whether the number of types is predicted by the regression."""
        return self.oracle_n_types is None and self.n_types == "predicted"

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The head's weight; for a tied matrix that is the sum as shared."""
        return Surfaces(gradients=(HEAD_WEIGHT,))

    def prepare(self, anatomy: Anatomy) -> None:
        """Fits the regression on gradients of public text, where the number is predicted.

        Where row sums of public gradients are rounding errors (a model that is not trained yet)
        nothing is fitted: ``run`` says so, and ``refresh`` tries again.

        Raises:
            ValueError: the number of types is to be predicted and there is no public text.
        """
        if not self.predicts:
            return
        if self.public_text is None:
            raise ValueError(
                f"attack '{self.name}' predicts the number of types with a regression on public "
                "text and was given none: pass FlatChat(public_text=...), or the number it shall "
                "assume, FlatChat(n_types=...)."
            )
        text = self.public_text
        if isinstance(text, str):
            sentences, length = (max(sizes) for sizes in zip(*self.shapes, strict=True))
            text = PublicText.sampled_from(anatomy, 2 * sentences, length, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        weights, counts = [], []
        for sentences, length in self.shapes * self.batches_per_shape:
            batch = text.batch(
                sentences, length, generator, kind=anatomy.kind, mask_token_id=self.mask_token_id
            )
            try:
                s = flattened(gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT])
            except UnusableObservation as error:
                self._not_fitted = f"its regression on public text could not be fitted: {error}"
                return
            mixture, _, _ = separate_clusters(
                s, regularization=self.regularization, min_ratio=self.min_ratio
            )
            weights.append(float(mixture.weights[1]))
            counts.append(float(len(torch.unique(batch.target_ids()))))
        self.regressor = TypeCountRegressor.fit(weights, counts, self.degree)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Fits the regression if ``prepare`` could not, on a model that was not trained yet."""
        if self.predicts and self.regressor is None:
            self.prepare(anatomy)

    def run(self, view: Observation, query: Query | None = None) -> FlatChatGuess:
        """Names the word types predicted in the batch behind the newest head gradient.

        Raises:
            UnusableObservation: non-finite or all-zero row sums, or rounding errors; or the number
                of types is to be predicted and there is no fitted regression.
        """
        how_many: float | Callable[[Mixture], float]
        if self.oracle_n_types is not None:
            how_many = (
                self.oracle_n_types() if callable(self.oracle_n_types) else self.oracle_n_types
            )
        elif isinstance(self.n_types, str):
            if self.regressor is None:
                raise UnusableObservation(f"attack '{self.name}': {self._not_fitted}")
            how_many = self.regressor
        else:
            how_many = self.n_types
        gradient = view.gradient(HEAD_WEIGHT)
        guess = flatchat(
            gradient,
            how_many,
            self.scorer,
            regularization=self.regularization,
            min_ratio=self.min_ratio,
        )
        return guess if self.oracle_n_types is None else replace(guess, n_types=None)

    def state_dict(self) -> dict[str, Tensor]:
        """The fitted regression, where there is one."""
        return {} if self.regressor is None else {"regressor": self.regressor.coefficients}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back the regression."""
        if "regressor" in state:
            self.regressor = TypeCountRegressor(state["regressor"].detach().cpu().double())

    def config(self) -> dict[str, object]:
        """Settings for reports; tells an oracle's number of types from the attack's own."""
        if self.oracle_n_types is not None:
            source: object = "oracle"
        else:
            source = "function" if callable(self.n_types) else self.n_types
        return {
            "scorer": self.scorer,
            "n_types": source,
            "degree": self.degree,
            "regularization": self.regularization,
        }

"""Membership from a released model beside references: models that were trained like it.

A *reference* shows what all texts of a kind gain by such a training (difficulty calibration, arXiv
2111.08440). If it is known which texts each of several references was trained on, every text also
has a distribution of scores by models with it, and one by models without.
"""

import math
from dataclasses import replace

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.memorization.scores import (
    MAX_GAIN,
    Combined,
    ErrorZone,
    LossRatio,
    MemorizationAttack,
    normal_scores,
)
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot, check_finite

MIN_WEIGHT = 0.35
"""The smallest weight of a reference that is used, in the fit of :func:`fit_base`.

Of references of as many rows it was .37 to .77; of a quarter of them .24 to .30 where the base knew
the domain, and .70 where it did not; of another domain up to .28, where the fit lowered the AUC
from .81 to .77 (tiny GPT-2, AG News and IMDB). Lower: such references weaken the score.
"""

MIN_FREEDOM = 30
"""The fewest degrees of freedom of a deviation in :func:`likelihood_ratio`, for an error of 13%."""

MIN_SHARE = 0.01
"""The least share of a text's own variance in that of all texts, .33 for references of their own.

A reference that is given twice has 0. Lower: the ratio of such references weakens the score.
"""

MAX_P = 0.01  # the p-value by which a reference knows its own rows; higher: wrong rows are taken


class CombinedReference(MemorizationAttack):
    """Apply :class:`Combined` with what references and the base together predict for the base.

    The model's log probabilities are fitted by the base's and by their mean in the references that
    were not trained on a text (:func:`fit_base`), without the memberships. They are not used, and
    the score is :class:`Combined`, if their weight is below :data:`MIN_WEIGHT`, or if one does not
    know the rows that it is said to be trained on (:func:`knows_rows`). The likelihood ratios of
    both parts of :class:`Combined` are added (:func:`likelihood_ratio`), if enough texts were in
    some references and not in others.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.attacks.memorization import Combined, CombinedReference
        >>> from lightning_fedleak.callbacks import WatchSettings
        >>> from lightning_fedleak.engine import Memorization
        >>> memorization = Memorization(reference="runs/other-rows/model")  # a folder, or a model
        >>> settings = WatchSettings(memorization=memorization)
        >>> monitor = LeakageMonitor([Combined(), CombinedReference()], settings=settings)
    """

    default_name = "combined_reference"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the scores of :class:`Combined` with the fit as the base, and likelihood ratios.

        Raises:
            UnusableObservation: There is no reference, or its outputs are not finite.
        """
        if (references := released.references) is None:
            raise UnusableObservation("what a reference model says of the texts is not known")
        for answer in references.answers:
            check_finite(answer.log_probs, "the reference's log probabilities")
        base, weight = fit_base(released)
        if weight < MIN_WEIGHT or not knows_rows(released):
            return Combined().score(released)
        scores = Combined().score(replace(released, base=base))
        ratios = []
        for attack in (LossRatio(MAX_GAIN), ErrorZone()):
            others = [attack.score(replace(released, now=a)) for a in references.answers]
            own = attack.score(released)
            ratio = likelihood_ratio(own, torch.stack(others), references.inside)
            ratios += [] if ratio is None else [normal_scores(ratio)]
        return sum(ratios, normal_scores(scores)) if ratios else scores


def likelihood_ratio(scores: Tensor, others: Tensor, inside: Tensor) -> Tensor | None:
    """Return (N,) the log likelihood ratio that a model was trained on each text, or None.

    This is LiRA online (Carlini et al. 2022, arXiv 2112.03570): a normal distribution of scores in
    the references that were trained on a text, and one in those that were not. The means are the
    text's own; if it has none on a side, it is that of the other side, shifted by the mean
    difference. All texts share the two variances, because the references are few. None: they have
    too few degrees of freedom, see :data:`MIN_FREEDOM`, are copies of one, :data:`MIN_SHARE`, or
    no text is known on both sides.

    Args:
        scores: (N,) the scores by the model.
        others: (K, N) those by the references.
        inside: (K, N) bool, the texts that each reference was trained on.
    """
    means, variances, known = [], [], []
    for side in (~inside, inside):
        counts = side.sum(0)
        means.append((others * side).sum(0) / counts.clamp_min(1))
        known.append(counts > 0)
        freedom = int(counts.sum() - known[-1].sum())
        if freedom < MIN_FREEDOM:
            return None
        squares = ((others - means[-1]) ** 2)[side].sum()
        variances.append(squares / freedom)
        if variances[-1] < MIN_SHARE * others[side].var():
            return None
    if not bool((both := known[0] & known[1]).any()):
        return None
    shift = (means[1] - means[0])[both].mean()
    outside = torch.where(known[0], means[0], means[1] - shift)
    trained = torch.where(known[1], means[1], means[0] + shift)
    sides = zip((outside, trained), variances, strict=True)
    logs = [-((scores - mean) ** 2) / variance / 2 - variance.log() / 2 for mean, variance in sides]
    ratio: Tensor = logs[1] - logs[0]
    return ratio


def knows_rows(released: ReleasedModel) -> bool:
    """Return whether each reference knows the texts better that it is said to be trained on.

    With the rows of another reference, the mean of models without a text is one of models with it.
    The mean log probability is compared with its mean in the base and the other references. Where
    too few rows are on one side for the test, the file is believed.
    """
    assert released.references is not None
    answers = released.references.answers
    means = torch.stack([part.mean_log_probs() for part in (*answers, released.base)])
    for own, inside in zip(means, released.references.inside, strict=False):
        scores = (own * len(means) - means.sum(0)).numpy()
        sides = scores[inside.numpy()], scores[~inside.numpy()]
        can_tell = 1 / math.comb(len(scores), len(sides[0])) < MAX_P / 10  # the smallest p-value
        if can_tell and mannwhitneyu(*sides, alternative="greater").pvalue > MAX_P:
            return False
    return True


def fit_base(released: ReleasedModel) -> tuple[TokenSnapshot, float]:
    """Return the base with log probabilities fitted to the model's, and the references' weight.

    The fit is ``lp ~ 1 + lp0 + lp_reference`` by least squares over all label tokens of N texts.
    """
    assert released.references is not None
    labels, parts = released.base.labels, (released.now, released.base, released.references)
    now, base, reference = (part.log_probs[labels].double() for part in parts)
    features = torch.stack([torch.ones_like(base), base, reference], 1)
    products = features.T @ features, features.T @ now[:, None]
    fit = torch.linalg.lstsq(*products, driver="gelsd").solution[:, 0]
    log_probs = torch.zeros_like(released.base.log_probs)
    log_probs[labels] = (features @ fit).clamp_max(0).to(log_probs.dtype)
    return released.base._replace(log_probs=log_probs), float(fit[2])

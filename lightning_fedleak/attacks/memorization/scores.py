"""Membership from a released model and its public base: one score for each text.

An adversary who gets a fine-tuned model and has its *base*, the public model from which training
started, can query both with a text. Fine-tuning raises the log probability of its texts more than
that of non-members. All scores here are computed from the numbers of
:class:`~lightning_fedleak.model.snapshots.TokenSnapshot`. So a measurement step costs one forward
for each text, whatever the number of attacks.

``lp`` and ``lp0`` denote the log probability of a label token under the model and its base, and
``loss``, ``loss0`` minus their means over a text.

*Blind* scores do not use the trained model: are members and non-members exchangeable? If the base
model's outputs or the words alone distinguish members from non-members, a membership attack may
measure this difference instead of the training. If a random draw chose the non-members, such a
difference is chance. With any other non-members, the comparison is invalid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import (
    Attack,
    Capability,
    Guess,
    Query,
    Surfaces,
    ThreatModel,
    UnusableObservation,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import (
    Observation,
    ReleasedModel,
    TokenSnapshot,
    check_finite,
)
from lightning_fedleak.model.taps import Text
from lightning_fedleak.validate import check_number

T = TypeVar("T")

WINDOWS = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)
"""The numbers of tokens of the windows: geometric from 2 to 40, as in arXiv 2601.02751."""

MAX_GAIN = 3.0
"""The cap on the gain of a token in :class:`Combined` and :class:`PromptRatio`, in nats.

Of 2, 3, 4 and no cap, 3 was the best on two draws of three setups
(``benchmarks.attacks.memorization``). Lower caps were worse with LoRA, higher ones with full
fine-tuning.
"""

MIN_LOSS = 1e-6  # nats per token; lower bound of the base's loss, which is a divisor
MIN_DEVIATION = 1e-6  # nats; lower bound of the deviation, by which Min-K%++ divides


@dataclass(frozen=True)
class MemorizationGuess(Guess):
    """The scores of N texts for membership in the training data.

    Attributes:
        scores: (N,) float64; higher is more likely a member. Comparable only within one pool, the
            candidate texts that are scored together.
    """

    scores: Tensor


class MemorizationAttack(Attack):
    """An outsider who gets the trained model, has its public base, and holds candidate texts.

    Subclasses implement :meth:`score`, or :meth:`run` if their guess is no score.

    Args:
        name: The name in the logs.

    Attributes:
        part: The texts that the attack scores. ``"long"``: those with 8 label tokens or more.
            ``"short"``: those with fewer. ``"prompts"``: prompts, on which no loss is computed.
            ``"pairs"``: pairs of a chosen and a rejected answer.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak.model.anatomy import find_anatomy
        >>> from lightning_fedleak.attacks.memorization import LossRatio
        >>> from lightning_fedleak.model.snapshots import Observation, ReleasedModel
        >>> from lightning_fedleak.model.taps.tokens import Text, token_log_probs, compressed_bytes
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = [Text(ids, ids) for ids in torch.arange(60).view(6, 10)]
        >>> base = token_log_probs(find_anatomy(model), texts)
        >>> released = ReleasedModel(base, base, compressed_bytes(texts))  # nothing was trained
        >>> LossRatio().run(Observation(released=released)).scores
        tensor([-1., -1., -1., -1., -1., -1.], dtype=torch.float64)
    """

    threat_model = ThreatModel.create(
        "whoever gets the trained model, has its public base, and holds the texts it asks about",
        Capability.HAS_RELEASED_MODEL,
        Capability.KNOWS_TARGET_TEXT,
    )
    part: ClassVar[Literal["long", "short", "prompts", "pairs"]] = "long"

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return no surface, because the attack uses nothing of a training step."""
        return Surfaces()

    def run(self, view: Observation, query: Query | None = None) -> Guess:
        """Return the scores of all texts that the model was queried with.

        Raises:
            UnusableObservation: No model is released, or its outputs are not finite.
        """
        return MemorizationGuess(self.score(_finite(view.released)))

    def score(self, released: ReleasedModel) -> Tensor:
        """Return (N,) one score for each text; higher is more likely a member."""
        raise NotImplementedError(f"{type(self).__name__} must define score, or its own run")


def released_part(answers: T | None, query: str) -> T:
    """Return the outputs of a released model, if there is one.

    Args:
        answers: The outputs; None if no model is released.
        query: The kind of query, such as "text", for the message.

    Raises:
        UnusableObservation: No model is released.
    """
    if answers is None:
        raise UnusableObservation(f"no model is released here: no {query} was asked")
    return answers


def _finite(released: ReleasedModel | None) -> ReleasedModel:
    """Return the released model's outputs, after a check that they exist and are finite."""
    released = released_part(released, "text")
    check_finite(released.now.log_probs, "the model's log probabilities")
    return released


def _gains(released: ReleasedModel) -> Tensor:
    """Return (N, L) float64, the gain ``lp - lp0`` of each label token; 0 at other tokens."""
    gains = released.now.log_probs.double() - released.base.log_probs.double()
    return gains * released.now.labels


class Loss(MemorizationAttack):
    """Score a text by minus its loss: the baseline that needs no base model (Yeom et al. 2018)."""

    default_name = "loss"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return ``-loss``."""
        return released.now.mean_log_probs()


class LossRatio(MemorizationAttack):
    """Score a text by minus the ratio of its loss to the base's (arXiv 2402.17012, section 3).

    A few tokens may gain so much that they dominate the score, also in non-members: for example, a
    word that occurs in the whole data. A cap limits the effect of a single token.

    Args:
        most_gain: The cap on the gain ``lp - lp0`` of a token, in nats. None for no cap, as
            published.
        name: The name in the logs.

    Raises:
        ValueError: a cap that is not above 0.
    """

    default_name = "loss_ratio"
    config_names = ("most_gain",)

    def __init__(self, most_gain: float | None = None, name: str | None = None) -> None:
        super().__init__(name)
        if most_gain is not None:
            check_number("most_gain", most_gain, above=0)
        self.most_gain = most_gain

    def score(self, released: ReleasedModel) -> Tensor:
        """Return ``-loss / loss0``, with the gain of each token capped."""
        mean = released.now.mean_log_probs()
        if self.most_gain is not None:
            excess = (_gains(released) - self.most_gain).clamp_min(0)
            mean = mean - excess.sum(1) / released.now.labels.sum(1)
        return mean / (-released.base.mean_log_probs()).clamp_min(MIN_LOSS)


class ShortAnswers(MemorizationAttack):
    """Score texts with 1 to 7 label tokens, such as short answers and classes.

    These texts are a separate pool. The score is the loss ratio without a cap. If most texts share
    their answer with others, such as intents and classes, the score is minus the loss, relative to
    the other texts with the same answer: the gain of an answer in general does not show members.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.attacks.memorization import Combined, ShortAnswers
        >>> monitor = LeakageMonitor([Combined(), ShortAnswers()])
    """

    default_name = "loss_ratio_short"
    part = "short"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return ``-loss / loss0``, or ``-loss`` minus its mean over the answer's other texts."""
        answers, mean = released.answers, released.now.mean_log_probs()
        if answers is None:
            raise UnusableObservation("which texts share an answer is not known")
        sizes = torch.bincount(answers).double()[answers]  # of the group with the same answer
        if (sizes > 1).double().mean() <= 0.5:
            return LossRatio().score(released)
        sums = torch.zeros(int(answers.max()) + 1, dtype=torch.float64)
        sums_of_rest = sums.index_add_(0, answers, mean)[answers] - mean
        # The mean of all texts counts as one more text with the answer, and is the only one if no
        # other text has it.
        return mean - (sums_of_rest + mean.mean()) / sizes


class PromptRatio(MemorizationAttack):
    """Score texts by their prompts: tokens that the model reads, and that have no loss.

    A model may memorize what users wrote although no loss is computed on it. Only prompts with 8
    tokens or more are scored, and only if no other row has the same one. Their results are a series
    of their own, apart from all scores of labels. With LoRA the score was never better than chance;
    with full fine-tuning it was, slightly.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.attacks.memorization import Combined, PromptRatio
        >>> monitor = LeakageMonitor([Combined(), PromptRatio()])
    """

    default_name = "prompt_ratio"
    part = "prompts"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the mean gain ``lp - lp0`` of a text's tokens, capped at 3 nats each."""
        return _gains(released).clamp_max(MAX_GAIN).sum(1) / released.now.labels.sum(1)


class PreferenceMargin(MemorizationAttack):
    """Score pairs of preferences by the margin that the training gave the chosen answer.

    DPO, ORPO and CPO raise the likelihood of chosen answers over that of rejected ones. The margin
    is the one of DPO's loss (arXiv 2305.18290, equation 7), with the model before the first step as
    the reference policy. PREMIA (arXiv 2407.06443) also compares with a reference model, and finds
    that DPO leaks its pairs more than PPO does; its formula may differ. The two answers of a pair
    have 8 tokens or more together. An answer that is rated alone, as in KTO (arXiv 2402.01306), is
    scored by its own gain, with the opposite sign if it is undesirable.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.attacks.memorization import PreferenceMargin
        >>> monitor = LeakageMonitor([PreferenceMargin()])     # of a loss that prefers answers
    """

    default_name = "preference_margin"
    part = "pairs"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the gain ``lp - lp0`` of the chosen minus that of the rejected answer, in nats.

        Raises:
            UnusableObservation: the texts are no pairs.
        """
        if released.rejected is None:
            raise UnusableObservation("the texts are no answers that were chosen or rejected")
        gains = _gains(released)
        return torch.where(released.rejected, -gains, gains).sum(1)


class PromptAttack(MemorizationAttack):
    """Score the prompts of reinforcement learning by the model's completions.

    GRPO and RLOO train on completions that the model itself writes, so a prompt has no fixed text
    whose likelihood rises. The attacks compare the model's behaviour before and after training.
    """


class PolicyDrift(PromptAttack):
    """Score a prompt by how far the model has moved from its base on the base's own completions.

    The mean of ``lp0 - lp`` estimates the Kullback-Leibler divergence per token between the base
    and the model after the prompt, if the trainer samples at temperature 1 from all tokens. DIBA
    (arXiv 2511.14045) and PREMIA (arXiv 2407.06443) use similar ratios: DIBA on completions of the
    trained model, which needs the base's weights at each measurement; PREMIA on given answers, with
    the opposite sign. Here the base writes the completions once, before the first step, and a
    measurement is one forward of each completion.

    Examples:
        >>> from lightning_fedleak.attacks.memorization import PolicyDrift
        >>> PolicyDrift().name
        'policy_drift'
    """

    default_name = "policy_drift"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the mean of ``lp0 - lp`` over the tokens of a prompt's completions, in nats."""
        return released.base.mean_log_probs() - released.now.mean_log_probs()


class RewardGain(PromptAttack):
    """Score a prompt by how much the rewards of its completions have risen since the base.

    This is the reward signal of DIBA (arXiv 2511.14045), with the trainer's reward functions. Both
    models sample with the same random numbers, so an unchanged model has a gain of 0.

    Examples:
        >>> from lightning_fedleak.attacks.memorization import RewardGain
        >>> RewardGain().name
        'reward_gain'
    """

    default_name = "reward_gain"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the mean reward of the model's completions minus that of the base's.

        Raises:
            UnusableObservation: the rewards are not known, or not finite.
        """
        before, now = released_part(released.rewards, "reward")
        check_finite(now, "the rewards of the model's completions")
        return torch.sub(now, before)


class Zlib(MemorizationAttack):
    """Score a text by its log likelihood over its compressed size (Carlini et al. 2021)."""

    default_name = "zlib"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return minus the summed loss of the text, over its zlib-compressed size in bytes."""
        tokens = released.now.labels.sum(1)
        return released.now.mean_log_probs() * tokens / released.compressed


class MinK(MemorizationAttack):
    """Score a text by its least likely tokens: Min-K%++ (arXiv 2404.02936, equation 3).

    A token's log probability is standardised by the mean and standard deviation of log
    probabilities over the vocabulary. The score is the mean of the lowest standardised values.

    Args:
        share: The share of a text's tokens that are averaged.
        name: The name in the logs.

    Raises:
        ValueError: a share outside (0, 1].
    """

    default_name = "min_k"
    config_names = ("share",)

    def __init__(self, share: float = 0.2, *, name: str | None = None) -> None:
        super().__init__(name)
        self.share = check_number("share", share, above=0, at_most=1)

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the mean of the lowest standardised log probabilities."""
        tokens = released.now
        z_scores = (tokens.log_probs - tokens.means) / tokens.deviations.clamp_min(MIN_DEVIATION)
        ordered = z_scores.double().masked_fill(~tokens.labels, torch.inf).sort(1).values
        counts = (tokens.labels.sum(1) * self.share).long().clamp_min(1)
        lowest = torch.arange(ordered.shape[1]) < counts[:, None]
        return ordered.masked_fill(~lowest, 0).sum(1) / counts


class Windows(MemorizationAttack):
    """Score a text by the share of its windows that are more likely than under the base.

    Window-based comparison (WBC, arXiv 2601.02751): the share of windows of w tokens in which the
    sum of ``lp - lp0`` is positive, averaged over the sizes. A text shorter than a window counts as
    one window.
    """

    default_name = "windows"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the mean share of windows that gained."""
        gains = _gains(released)
        scores = torch.empty(len(gains), dtype=torch.float64)
        for row, labels in enumerate(released.now.labels):
            sums = torch.cat([gains.new_zeros(1), gains[row, labels].cumsum(0)])
            widths = [min(size, len(sums) - 1) for size in WINDOWS]
            shares = [(sums[width:] - sums[: len(sums) - width] > 0).double() for width in widths]
            scores[row] = torch.stack([share.mean() for share in shares]).mean()
        return scores


class ErrorZone(MemorizationAttack):
    """Score a text by the gains of its wrongly predicted tokens (EZ-MIA, arXiv 2601.12104).

    Over the tokens that the model does not predict greedily, P sums the gains ``lp - lp0`` and N
    the drops. The published ratio P / N has no value where N is 0, and the published code ranks
    such texts last, although they are memorized best. The score here is
    ``log((P + 1) / (N + 1))``, and a text with wrong tokens under the base and none now ranks
    first.
    """

    default_name = "error_zone"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return ``log((P + 1) / (N + 1))``."""
        wrong = released.now.labels & ~released.now.greedy
        gains = _gains(released) * wrong
        scores = torch.log1p(gains.clamp_min(0).sum(1)) - torch.log1p((-gains).clamp_min(0).sum(1))
        is_learned = ~wrong.any(1) & (released.base.labels & ~released.base.greedy).any(1)
        return torch.where(is_learned, scores.max() + 1, scores)


class Combined(MemorizationAttack):
    """Add the ranks of :class:`LossRatio`, with capped gains, and :class:`ErrorZone`.

    The loss ratio is better after LoRA, and the error zone after full fine-tuning. Each is ranked
    among all candidate texts, members and non-members, so no membership label is used. The ranks
    are transformed to normal scores and added. The score of a text depends on this pool: results
    are comparable only on the same pool.

    Examples:
        >>> from lightning_fedleak import Combined, LeakageMonitor, RiskGate
        >>> gate = RiskGate("leakage/combined/auc", at_most=0.7)
        >>> callbacks = [LeakageMonitor([Combined()]), gate]
        >>> gate.metric in callbacks[0].metric_names()
        True
    """

    default_name = "combined"

    def score(self, released: ReleasedModel) -> Tensor:
        """Return the sum of both normal scores."""
        parts = (LossRatio(MAX_GAIN).score(released), ErrorZone().score(released))
        return torch.stack([normal_scores(part) for part in parts]).sum(0)


def gain_beyond(released: ReleasedModel, fitted: Tensor) -> Tensor:
    """Return (N,) the gains of texts beyond what the base's outputs predict, in nats per token.

    The gain ``loss0 - loss`` is regressed on the base's outputs for a text: its loss, the standard
    deviation of its log probabilities and its share of greedy tokens. Membership is not used, so
    members and non-members remain exchangeable if nothing was learned.

    Args:
        released: The outputs of the model and its base for N texts.
        fitted: (N,) bool, the texts that the regression is fitted on.
    """
    base, labels = released.base, released.base.labels
    mean, counts = base.mean_log_probs(), labels.sum(1).double()
    gain = released.now.mean_log_probs() - mean
    squares = ((base.log_probs.double() - mean[:, None]) ** 2 * labels).sum(1)
    greedy = (base.greedy & labels).sum(1) / counts
    features = torch.stack([torch.ones_like(mean), mean, (squares / counts).sqrt(), greedy], 1)
    fit = torch.linalg.lstsq(features[fitted], gain[fitted, None], driver="gelsd").solution
    residual: Tensor = gain - (features @ fit)[:, 0]
    return residual


def normal_scores(values: Tensor) -> Tensor:
    """Return (N,) the normal deviate of ``(rank - 1/2) / N`` of each value; ties share a rank."""
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2
    deviates: Tensor = torch.special.ndtri((ranks[places].double() - 0.5) / len(values))
    return deviates


FOLDS = 5  # folds of the cross-fitted word counts, the usual number; more are slower
MIN_BLIND_AUC, MAX_BLIND_AUC = 0.45, 0.55  # limits of a blind AUC's interval, to be near chance


def blind_scores(
    base: TokenSnapshot, compressed: Tensor, texts: Sequence[Text], members: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Return scores (N,) by name that do not use the trained model.

    They are minus the base's loss, its zlib ratio and Min-K%++, the number of label tokens, and
    cross-fitted word counts.

    Args:
        base: The base model's outputs for the texts.
        compressed: (N,) the zlib-compressed size of each text in bytes.
        texts: The N texts.
        members: (N,) bool, whether each text is a member.
        seed: The seed of the folds.
    """
    released = ReleasedModel(base, base, compressed)
    return {
        "loss": Loss().score(released),
        "zlib": Zlib().score(released),
        "min_k": MinK().score(released),
        "length": base.labels.sum(1).double(),
        "words": word_scores(texts, members, seed),
    }


def word_scores(texts: Sequence[Text], members: Tensor, seed: int = 0) -> Tensor:
    """Return (N,) the log odds per token that a text is a member, by its words alone.

    The score of a text is from a multinomial naive Bayes classifier with add-one smoothing, fitted
    on the other folds. The folds are stratified by membership.

    Args:
        texts: The N texts.
        members: (N,) bool, with at least one member and one non-member in each of five folds.
        seed: The seed of the folds.
    """
    labels = members.bool()
    ids, lengths = torch.cat([text.ids for text in texts]), [len(text.ids) for text in texts]
    owners = torch.arange(len(texts)).repeat_interleave(torch.tensor(lengths))
    folds = torch.empty(len(texts), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for group in (labels, ~labels):
        order = torch.randperm(int(group.sum()), generator=generator)
        folds[group] = order % FOLDS
    scores = torch.empty(len(texts), dtype=torch.float64)
    for fold in range(FOLDS):
        inside, size = folds == fold, 1 + int(ids.max())
        rates = (_log_rates(ids[(~inside & side)[owners]], size) for side in (labels, ~labels))
        odds = next(rates) - next(rates)
        sums = torch.zeros_like(scores).index_add_(0, owners, odds[ids])
        scores[inside] = (sums / torch.tensor(lengths))[inside]
    return scores


def _log_rates(ids: Tensor, size: int) -> Tensor:
    """Return (size,) the log frequency of each token id, with add-one smoothing."""
    totals = torch.bincount(ids, minlength=size).double() + 1
    return (totals / totals.sum()).log()

"""What declared noise hides: the best F1 of a reader who knows everything but one word.

If an attack recovers little behind a defence, noise may hide the words, or only blind this attack.
A bound on every reader decides. For some *types* (distinct words) of the batch, D is the change of
what leaves the client if every occurrence of the type is replaced by another word. Behind Gaussian
noise of standard deviation sigma, a reader who knows D, and so all else, cannot do better than to
compare the likelihoods with and without the type (the lemma of Neyman and Pearson). At the distance
``d = |D| / sigma`` and a threshold t of their log ratio, it finds the type with a probability of
``Phi(d / 2 - t / d)``, and names one that is not there with ``Phi(-d / 2 - t / d)``.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from lightning_fedleak.attacks.base import WITHOUT_FLOAT64
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.engine.run import Run
from lightning_fedleak.model.taps import Step, one_text, replace_word

N_TYPES = 8
"""Types that are replaced for one bound; each takes the time of a gradient of the batch.

More: the mean over them is closer to that of all types. Fewer: a bound is cheaper.
"""
N_TEXTS = 2
"""Texts in which a type is replaced under per-sample clipping; its other texts count as these do.

More: the change of a type in many texts is known better, for two gradients of one text each.
"""
NO_TOKEN = -1
"""An id that no token has: replacing it leaves a step as it is."""
LOOKS = 10
"""Controlled looks for which one set of changes is used; a bound then adds a step's time to each.

More: a bound costs less, and the changes are those of older weights. Fewer: the opposite.
"""
MAX_GROWTH = 2.0
"""How many times an old change may be as large now; words are replaced again beyond it.

More: bounds of looks between are further above the true ones. Fewer: they cost more.
"""
_THRESHOLDS = np.linspace(-30.0, 30.0, 1201)  # of a log ratio; the steps of .05 are not tuned

Gradient = Callable[[Step, Sequence[str]], Mapping[str, Tensor]]
"""A function that returns the gradients of a step that is made again, by parameter."""


def best_f1(distances: Sequence[float], types: int, vocabulary: int) -> float:
    """Return the highest F1 of a reader who knows everything but whether a type is there.

    A rule of the highest F1 compares each likelihood ratio with one threshold. With T and F the
    means over the types of the probabilities above, ``2 k T / (k + k T + (V - k) F)`` is the F1 of
    the expected counts, of which the maximum over thresholds is returned.

    Args:
        distances: The change of the release for some types, over the noise's standard deviation;
            NaN if it is not known.
        types: The number k of types in the batch.
        vocabulary: The number V of types that may be there.
    """
    distance = np.clip(np.nan_to_num(distances, nan=60.0), 1e-6, 60.0)[:, None]
    found = types * ndtr(distance / 2 - _THRESHOLDS / distance).mean(0)
    wrong = (vocabulary - types) * ndtr(-distance / 2 - _THRESHOLDS / distance).mean(0)
    return float((2 * found / (types + found + wrong)).max())


class HiddenWords:
    """Bounds what any reader recovers of the words behind the declared noise of a run.

    Args:
        run: The run.
        gradient: Makes a step again.
        special: The ids of tokens that are not replaced.
    """

    def __init__(self, run: Run, gradient: Gradient, special: frozenset[int]) -> None:
        self._run = run
        self._gradient = gradient
        self._special = special
        self._changes: list[dict[int, float]] = []  # norms of D for some types, by parameter
        self._looks = 0  # since the changes were measured
        self._counts: Sequence[int] = ()  # tokens and labels there
        self._sizes = dict[int, float]()  # norms of the gradients there, by parameter
        self._clips = [d.clip for d in run.defenses if isinstance(d, GradientNoise) and d.clip]

    def bound(self, step: Step, noise_std: float, *, games: bool = False) -> float:
        """Return the highest F1 that any reader of a step's release can have; 1 without a bound.

        There is none for processes that are one client, if two defences rewrite the gradient, if
        it clips those of several optimizers, if the noise is unknown, and if the batch uses the
        vocabulary up.

        Args:
            step: The step before any defence.
            noise_std: The standard deviation of the noise on each number of the release.
            games: Whether to return the AUC of whether a text is in the batch instead. A reader who
                knows all else, and so how many candidates are in, compares two normal
                distributions: another text was in this one's place. Their means are at most twice
                the norm of a clipped text apart; there is no bound if texts are not clipped alone.
        """
        vocabulary = self._run.anatomy.embedding_rows
        if not self._is_bounded:
            return 1.0
        if games:
            distance = step.example_norm / noise_std if 0 < noise_std < math.inf else math.nan
            return 1.0 if math.isnan(distance) else float(ndtr(math.sqrt(2) * distance))
        tokens = torch.cat([batch.context_ids() for batch in step.batches]).tolist()
        ids = set(tokens)
        types = sorted(ids - self._special)
        others = sorted({*range(vocabulary)} - ids - self._special)
        if not (types and others and 0 < noise_std < math.inf and step.example_norm != math.inf):
            return 1.0
        labels = sum(0 if b.labels is None else int((b.labels >= 0).sum()) for b in step.batches)
        changes = self._newest_changes(step, (len(tokens), labels or 1), types, others)
        return best_f1([change / noise_std for change in changes], len(types), vocabulary)

    @property
    def _is_bounded(self) -> bool:
        """Return whether the run's defences and processes allow a bound."""
        run = self._run
        rewriting = [d for d in run.defenses if d.acts_on_gradients and d.compression is None]
        clips_apart = len(self._clips) > 0 and len(run.optimizers) > 1
        is_split = run.is_sharded or (run.client == "world" and run.processes > 1)
        return len(rewriting) <= 1 and not clips_apart and not is_split

    def _newest_changes(
        self, step: Step, counts: Sequence[int], types: Sequence[int], others: Sequence[int]
    ) -> list[float]:
        """Return the changes, measured at this step if they are old or the batches too different.

        Args:
            step: The step.
            counts: The numbers of its tokens and labels.
            types: The types that may be replaced.
            others: The types that may stand in their place.
        """
        growth = self._growth(step, counts) if math.isnan(step.example_norm) else {}
        grown = [{p: d * growth.get(p, 1.0) for p, d in c.items()} for c in self._changes]
        pairs = zip(map(_total, grown), map(_total, self._changes), strict=True)
        is_near = math.inf not in growth.values()  # also of parameters that no change has reached
        is_near &= all(now <= MAX_GROWTH * then for now, then in pairs)
        if self._looks % LOOKS == 0 or not is_near or self._sizes.keys() != step.sizes.keys():
            self._looks = 0
            self._counts, self._sizes = counts, step.sizes.copy()
            draw = random.Random(step.number)
            olds = draw.sample(types, min(N_TYPES, len(types)))
            self._changes = self._measure(step, [(old, draw.choice(others)) for old in olds])
            grown = self._changes
        self._looks += 1
        return [*map(_total, grown)]

    def _growth(self, step: Step, counts: Sequence[int]) -> dict[int, float]:
        """Return how many times the change of each parameter may be as large as it was measured.

        A loss may be a mean over the tokens or labels, or their sum; code may multiply any
        gradient; and clipping leaves the more of each, the smaller all are together.
        """
        whole = _ratio(*(math.hypot(*sizes.values()) for sizes in (self._sizes, step.sizes)))
        least = max(whole, *map(_ratio, self._counts, counts), 1.0)
        clip = whole if self._clips else 1.0
        sizes = ((p, self._sizes.get(p, 0.0), size) for p, size in step.sizes.items())
        return {p: max(least, clip * _ratio(before, now)) for p, before, now in sizes}

    def _measure(self, step: Step, pairs: Sequence[tuple[int, int]]) -> list[dict[int, float]]:
        """Return the norms of the release's change, for each type and the one in its place.

        They are by the ``id`` of the parameter; 0 stands for all together.
        """
        if not math.isnan(step.example_norm):
            return [{0: self._clipped_change(step, *pair)} for pair in pairs]
        before = self._all(replace_word(step, NO_TOKEN, NO_TOKEN))
        scales = {p: self._scale(step.sizes.get(p, 0.0), g) for p, g in before.items()}
        made = {p for p, gradient in before.items() if bool(gradient.any())}
        if not step.sizes or any(size > 0 and p not in made for p, size in step.sizes.items()):
            return [{0: math.inf}] * len(pairs)  # a gradient that the step made again does not have
        before = _scaled(before, scales)
        afters = (_scaled(self._all(replace_word(step, *pair)), scales) for pair in pairs)
        return [self._change(before, after) for after in afters]

    def _scale(self, size: float, made: Tensor) -> float:
        """Return by how much code multiplied a gradient; at least 1 if nothing is clipped.

        Smaller gradients leave others more of what a clip leaves of all.
        """
        norm = float(in_float64(made).norm())
        return max(size / norm if norm > 0 else 0.0, 0.0 if self._clips else 1.0)

    def _change(
        self, before: Mapping[int, Tensor], after: Mapping[int, Tensor]
    ) -> dict[int, float]:
        """Return the norms of the change of gradients, after the clipping of GradientNoise."""
        norms = map(_norm, (before, after))
        factors = (min([1.0, *(clip / n for clip in self._clips if n > 0)]) for n in norms)
        return _distances(before, after, *factors)

    def _clipped_change(self, step: Step, old: int, new: int) -> float:
        """Return a bound of the change of the mean of clipped gradients, one of each text.

        Let g and g' be a text's gradients with both words, and u and u' their directions. Whatever
        their scale is, they differ after clipping to a norm C by at most C times the larger of
        ``|u - u'|`` (both are clipped) and ``|g - g'| / max(|g|, |g'|)`` (the larger one just is).
        """
        texts = [
            (i, text)
            for i, call in enumerate(step.calls)
            for text in (call.texts.input_ids == old).any(1).nonzero()[:, 0].tolist()
        ]
        changes = []
        for i, text in texts[:N_TEXTS]:
            steps = (one_text(replace_word(step, old, word), i, text) for word in (old, new))
            before, after = map(self._all, steps)
            sizes = _norm(before), _norm(after)
            if not min(sizes) > 0:
                changes.append(2.0)
                continue
            scaled = _total(_distances(before, after, 1 / sizes[0], 1 / sizes[1]))
            changes.append(max(scaled, _total(_distances(before, after)) / max(sizes)))
        return step.example_norm * len(texts) * sum(changes) / len(changes)

    def _all(self, step: Step) -> Mapping[int, Tensor]:
        """Return the gradients of a step that is made again, by the ``id`` of the parameter."""
        made = self._gradient(step, self._run.anatomy.trainable_names())
        return {id(self._run.anatomy.parameter(name)): g for name, g in made.items()}


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no float64."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()


def _scaled(gradients: Mapping[int, Tensor], scales: Mapping[int, float]) -> dict[int, Tensor]:
    """Return gradients times their scales, at least in float32."""
    wide = ((p, g.to(torch.promote_types(g.dtype, torch.float32))) for p, g in gradients.items())
    return {parameter: gradient * scales.get(parameter, 1.0) for parameter, gradient in wide}


def _norm(gradients: Mapping[int, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*(float(in_float64(gradient).norm()) for gradient in gradients.values()))


def _total(norms: Mapping[int, float]) -> float:
    """Return the norm of parts together."""
    return math.hypot(*norms.values())


def _ratio(before: float, now: float) -> float:
    """Return how many times the larger one is as large; 1 if nothing is left of it now."""
    if now in (0, before):
        return 1.0
    return max(before, now) / min(before, now) if before > 0 and now > 0 else math.inf


def _distances(
    first: Mapping[int, Tensor],
    second: Mapping[int, Tensor],
    scale: float = 1.0,
    other: float = 1.0,
) -> dict[int, float]:
    """Return the norms of the differences of gradients, each times its scale; absent ones are 0."""
    zero = torch.zeros(())
    pairs = ((p, first.get(p, zero), second.get(p, zero)) for p in {**first, **second})
    return {p: float((in_float64(x) * scale - in_float64(y) * other).norm()) for p, x, y in pairs}

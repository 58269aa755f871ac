"""A passive membership attack on gradients: how much of a text's own gradient is shared.

A server that knows the model can compute the gradient of a candidate text, and measure how much of
it the shared gradient contains. In a model with many parameters the gradients of different texts
are nearly orthogonal, so the inner product shows members (Li, Li and Ribeiro, ICLR 2023). Two steps
are new in this package. Both sides of a linear map's gradient are whitened by public text, so
components that all texts share have little weight. And the part of every token is tested separately
(:mod:`~lightning_fedleak.attacks.membership.token_parts`): if one word of a member was replaced,
the shared gradient contains nearly all parts of the text, but not those of the replaced word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import local_steps, row_space
from lightning_fedleak.attacks.base import Query, Surfaces, UnusableObservation
from lightning_fedleak.attacks.membership import token_parts
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership, reach
from lightning_fedleak.attacks.public_text import TextSource, do_once, gradient_of, stored_work
from lightning_fedleak.model import snapshots
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_runs import labels_of
from lightning_fedleak.progress import measure_seconds
from lightning_fedleak.validate import check_integer

Parts = Mapping[str, tuple[Tensor, Tensor]]
"""Inputs (B, L, d) and slopes (B, L, o) of texts, by the map's name."""

MAX_NUMBERS = 64_000_000  # values of gradients and whitenings, or of stored parts: 256 MB
MAX_OTHER_NUMBERS = 1 << 20  # values of other parameters: 4 MB for each public text
FAR_DEVIATIONS = 3.0  # standard deviations of a member above the controls' mean; not tuned
DECAY_ROUNDINGS = 4.0  # an update within so many rounding errors is no gradient; not tuned
TIMED_TEXTS = 2  # public texts of a time estimate; more are more stable and slower
MIN_GRADIENT = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
"""The smallest usable maximum of a gradient, 1e-31: below it, float32 rounds values 1e-7 as big."""


class GradientMembership(PassiveMembership):
    """Score how much of a text's own gradient, token by token, the shared gradient holds.

    The attack uses trained linear maps of any block, also low-rank factors, but not the head. If no
    map is trained (biases, norms' gains, virtual tokens of prompt tuning), it compares the whole
    gradients of the other trained parameters.

    With the whitened parts P_t of the text's tokens and the shared gradient G, the least squares
    coefficient ``c = <G, sum P_t> / |sum P_t|^2`` is one over the number of tokens in the batch for
    a member, and nearly zero for a non-member. The same coefficient of two neighbouring tokens in
    the residual is far lower where a word was replaced: the token before predicts that word, and
    the word is the input at its position. The score is c minus the largest such shortfall beyond
    two standard errors, and at least c / 2. Maps are weighted by their noise on public texts.

    An update of plain SGD is a sum of gradients, after weight decay is subtracted. Adam and similar
    optimizers scale all values of a gradient to about the same size; the attack multiplies them by
    their root mean squares on public text.

    Args:
        public_text: Text like the clients', or ``"sampled"`` for text that the model writes.
        controls: The number of public texts that are scored at every measurement step, at least 2.
        shared: ``tokenizer``, ``public_rows``, ``tokens`` (from the first that the loss counts),
            ``refresh_every``, ``seed`` and ``name``, as in
            :class:`~lightning_fedleak.attacks.PassiveMembership`.

    Raises:
        ValueError: a number out of range, or no public text.

    Examples:
        >>> from lightning_fedleak.attacks import GradientMembership
        >>> attack = GradientMembership(public_rows=16, tokens=32)
        >>> attack.config()["controls"]
        8
    """

    default_name = "gradient_membership"
    config_names = (*PassiveMembership.config_names, "controls")
    needs_float64 = True  # for the whitening
    reads_adaptive_updates = True  # they are scaled back by sizes on public text

    def __init__(
        self, public_text: TextSource = "sampled", *, controls: int = 8, **shared: Any
    ) -> None:
        super().__init__(public_text, **shared)
        self.controls = check_integer("controls", controls, at_least=2)
        self._names: list[str] = []
        self._whitenings: dict[str, token_parts.SideWhitening] = {}
        self._common: _CommonPart | None = None  # None if linear maps are used
        self._round_weights: dict[str, Tensor] = {}  # at the start of a round, by name

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return trained linear maps of blocks over the depth, or else other trained parameters.

        Raises:
            ValueError: not a causal model, or one that has neither.
        """
        if anatomy.kind != "causal":
            raise ValueError(f"attack '{self.name}' knows no {anatomy.kind} labels: remove it")
        names = [m.name for m in self._select_maps(anatomy)] or self._other_parameters(anatomy)
        names = names or [m.name for m in _maps_on_text(anatomy)[:1]]
        if not names:
            raise ValueError(f"attack '{self.name}' finds no parameter to read: remove it")
        return Surfaces(gradients=tuple(names))

    def _select_maps(self, anatomy: Anatomy) -> list[row_space.LinearMap]:
        """Return the trained maps of evenly spread blocks, as many as memory allows."""
        blocks: dict[str, list[row_space.LinearMap]] = {}
        for linear in _maps_on_text(anatomy):
            if anatomy.trainable(linear.name):
                blocks.setdefault(row_space.block_name(linear.name), []).append(linear)
        if not blocks:
            return []
        largest = max(
            sum(token_parts.count_numbers(m, anatomy) for m in maps) for maps in blocks.values()
        )
        n = max(1, min(len(blocks), MAX_NUMBERS // largest))
        places = torch.linspace(0, len(blocks) - 1, n).round().long().tolist()
        block_maps = list(blocks.values())
        return [linear for i in places for linear in block_maps[i]]

    def _other_parameters(self, anatomy: Anatomy) -> list[str]:
        """Return small trained parameters of the language model, as many as memory allows."""
        inside = {id(p) for p in anatomy.model.parameters()}
        inside -= {id(p) for p in row_space.adalora_factors(anatomy.model)}
        names, numbers = [], 0
        for name, parameter in anatomy.root.named_parameters():
            fits = numbers + parameter.numel() <= MAX_OTHER_NUMBERS
            if parameter.requires_grad and fits and id(parameter) in inside:
                numbers += parameter.numel()
                names.append(name)
        return names

    def estimate(self, anatomy: Anatomy, texts: int) -> float:
        """Return the seconds of a measurement step, from runs on a few texts."""
        batch, maps = self._trial_texts(anatomy, TIMED_TEXTS), self._select_maps(anatomy)

        def run() -> None:
            if maps:
                token_parts.map_token_parts(anatomy, maps, batch, lambda parts: None)
            else:
                _text_gradients(anatomy, self._other_parameters(anatomy), batch)

        return measure_seconds(run, anatomy.device) / TIMED_TEXTS * (texts + self.controls)

    def prepare(self, anatomy: Anatomy) -> None:
        """Run the model on public text, forward and backward.

        A LoRA whose B is zero is calibrated in :meth:`run`, because its A has no slopes yet.
        """
        maps = self._select_maps(anatomy)
        factors = [m for m in maps if m.factor == "A"]
        if factors and not _all_reached(anatomy, factors, self._trial_texts(anatomy, TIMED_TEXTS)):
            self._names, self._anatomy = [m.name for m in maps], anatomy
            self._whitenings, self._common = {}, None  # none of an earlier fit
        else:
            self._calibrate(anatomy)

    def _calibrate(self, anatomy: Anatomy) -> None:
        """Fit the whitening of the maps, or else the other parameters' common part."""
        public = self._texts(anatomy, self.public_rows)
        maps = self._select_maps(anatomy)
        self._whitenings, self._common = {}, None
        self._names = [m.name for m in maps] or self._other_parameters(anatomy)
        if maps:
            moments = token_parts.Moments()
            token_parts.map_token_parts(anatomy, maps, public, moments.add)
            self._whitenings = moments.whitenings(maps)
        elif self._names:
            names = self._names
            gradients = _text_gradients(anatomy, names, public)
            self._common = _CommonPart.fit(gradients, names, anatomy)
        self._anatomy = anatomy

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Calibrate again if the calibration is too old or other parameters are trained."""
        names = [m.name for m in self._select_maps(anatomy)] or self._other_parameters(anatomy)
        self._anatomy = anatomy
        if names != self._names or not 0 <= step - self._prepared_at < self.refresh_every:
            self._prepared_at = step
            self._calibrate(anatomy)
        self._round_starts(anatomy)
        if local_steps.decays_apart(self._facts):
            self._round_weights = local_steps.copy_weights(anatomy, names)

    def run(self, view: snapshots.Observation, query: Query | None = None) -> MembershipGuess:
        """Score every text of the query, and public texts as controls.

        Returns:
            The scores; ``members`` are texts that score more than three standard deviations above
            the mean of the controls. A text without a label has no gradient, and gets that mean.

        Raises:
            UnusableObservation: The gradients are not finite, are zero, or are too small for
                float32.
        """
        assert query is not None
        local_steps.check_fresh(self._facts, view.gradients[-1])
        candidates = _query_batch(query, self.tokens)
        length = max(2, candidates.input_ids.shape[1])  # longer public texts only take longer
        public = self._texts(self._anatomy, self.controls, skip=self.public_rows, tokens=length)
        texts = (candidates, public)
        with self._at_start():
            if self._common is None:
                size, scores, control_scores = self._token_scores(view, *texts)
            else:
                names = self._other_parameters(self._anatomy)
                gradients = {name: self._shared_gradient(view, name) for name in names}
                size = _gradient_size(gradients.values())
                shared = torch.cat(
                    [self._rescale(g / size, view, name).flatten() for name, g in gradients.items()]
                )
                scores, control_scores = (
                    self._common.coefficients(shared, _text_gradients(self._anatomy, names, batch))
                    for batch in texts
                )
        scores, control_scores = scores.double() * size, control_scores.double() * size
        has_labels = (labels_of(texts[0])[:, 1:] != IGNORE_INDEX).any(1).to(scores.device)
        scores = torch.where(has_labels, scores, control_scores.mean())
        threshold = control_scores.mean() + FAR_DEVIATIONS * control_scores.std()
        return MembershipGuess(scores=scores.cpu(), members=(scores > threshold).cpu())

    def _shared_gradient(self, view: snapshots.Observation, name: str) -> Tensor:
        """Return the gradient of a parameter, or the update that replaces it.

        An update is returned without weight decay, and zeros if only decay changed the weights. As
        long as LoRA's B is zero, only decay changes A. The remainder of such an update is not a
        gradient: it shows how the step of B changed a text's loss, with the opposite sign.
        """
        g = snapshots.whole_tensor(view.gradient(name)).float()
        snapshots.check_finite(g, f"the gradient of {name}")
        update = view.gradients[-1]
        if not isinstance(update, snapshots.UpdateSnapshot) or not local_steps.decays_apart(
            self._facts
        ):
            return g
        steps = local_steps.LocalSteps.from_facts(self._facts)
        assert steps is not None
        weights, numbers = self._round_weights[name].to(g), torch.finfo(g.dtype)
        share = (g * weights).sum() / weights.square().sum().clamp_min(numbers.tiny)
        rounding = DECAY_ROUNDINGS * steps.steps * numbers.eps / update.learning_rate
        remainder = float((g - share * weights).abs().max())
        if g.numel() > 1 and remainder <= rounding * float(weights.abs().max()):
            return torch.zeros_like(g)
        return steps.without_decay(g, self._round_weights[name], update.learning_rate)

    def _rescale(self, g: Tensor, view: snapshots.Observation, name: str) -> Tensor:
        """Return a shared gradient; an adaptive optimizer's is scaled by sizes on public text."""
        update = isinstance(view.gradients[-1], snapshots.UpdateSnapshot)
        if not update or self._facts.optimizer in (None, "SGD"):
            return g
        if self._common is not None:
            return g * self._common.sizes[name]
        whitening = self._whitenings.get(name)
        return torch.zeros_like(g) if whitening is None else g * whitening.sizes

    def _token_scores(
        self, view: snapshots.Observation, candidates: TokenBatch, public: TokenBatch
    ) -> tuple[float, Tensor, Tensor]:
        """Return the gradients' size, and the scores of candidates and controls in its units."""
        anatomy, maps = self._anatomy, self._select_maps(self._anatomy)
        gradients = {m.name: self._shared_gradient(view, m.name) for m in maps}
        size = _gradient_size(gradients.values())
        nonzero = {name for name, g in gradients.items() if bool(g.any())}
        if nonzero - self._whitenings.keys():  # LoRA's A has no slopes as long as B is zero
            self._calibrate(anatomy)
        whitened = {}
        for name in (linear.name for linear in maps if linear.name in nonzero):
            if name in self._whitenings:
                gradient = self._rescale(gradients[name] / size, view, name)
                whitened[name] = self._whitenings[name].whiten(gradient)
        if not whitened:
            raise UnusableObservation("no public text reaches the maps that have a gradient")
        maps = [m for m in maps if m.name in whitened]

        controls = token_parts.join_fits(self._fits(maps, whitened, public))
        weights = {name: 1 / token_parts.noise_variance(fit) for name, fit in controls.items()}
        control_fit = token_parts.sum_fits(controls, weights)
        if not bool(control_fit.squares.any()):
            raise UnusableObservation("public texts leave nothing in the maps that are read")
        noise = token_parts.noise_variance(control_fit).sqrt()

        fits = self._fits(maps, whitened, candidates)
        sums = [token_parts.sum_fits(fit, weights) for fit in fits]
        scores = [token_parts.min_coefficient(fit, noise) for fit in sums]
        return size, torch.cat(scores), token_parts.min_coefficient(control_fit, noise)

    def _fits(
        self, maps: Sequence[row_space.LinearMap], shared: Mapping[str, Tensor], batch: TokenBatch
    ) -> list[dict[str, token_parts.PartFit]]:
        """Return the fits of a few texts at a time to whitened gradients, by the map's name.

        The parts of texts are the same for all gradients of a step and its controls. If they fit
        into memory (``MAX_NUMBERS`` values in all), they are computed once and stored.
        """
        anatomy, whitenings = self._anatomy, self._whitenings

        def whiten(parts: Parts) -> dict[str, token_parts.WhiteParts]:
            return {n: token_parts.WhiteParts.whiten(whitenings[n], *p) for n, p in parts.items()}

        def fit(parts: Mapping[str, token_parts.WhiteParts]) -> dict[str, token_parts.PartFit]:
            return {name: part.fit(shared[name]) for name, part in parts.items()}

        length = batch.input_ids.shape[1]
        sides = (sum(token_parts.sides(m, anatomy)) + length for m in maps)
        work, numbers = stored_work(), batch.input_ids.numel() * sum(sides)
        rows = tuple(t.cpu().numpy().tobytes() for t in (batch.input_ids, labels_of(batch)))
        key = ("parts", id(self), tuple(m.name for m in maps), rows)
        if key not in work and work.get("numbers", 0) + numbers > MAX_NUMBERS:
            return token_parts.map_token_parts(
                anatomy, maps, batch, lambda parts: fit(whiten(parts))
            )
        if key not in work:
            work["numbers"] = work.get("numbers", 0) + numbers
        stored = do_once(key, lambda: token_parts.map_token_parts(anatomy, maps, batch, whiten))
        return [fit(parts) for parts in stored]


def _maps_on_text(anatomy: Anatomy) -> list[row_space.LinearMap]:
    """Return the linear maps whose input depends on the text, without PEFT's prompt encoder."""
    # A factor that is a parameter of its layer has no module, so no output of it is recorded.
    linears = row_space.find_linear_maps(anatomy)
    linears = [m for m in linears if m.factor != "A" or m.reader is not m.layer]
    return [m for m in linears if ".prompt_encoder." not in f".{m.name}"]


def _all_reached(anatomy: Anatomy, maps: Sequence[row_space.LinearMap], batch: TokenBatch) -> bool:
    """Return whether each of the maps has a gradient from some text."""

    def reached(parts: Parts) -> set[str]:
        return {name for name, sides in parts.items() if all(bool(s.any()) for s in sides)}

    names = token_parts.map_token_parts(anatomy, maps, batch, reached)
    return set[str]().union(*names) == {m.name for m in maps}


def _gradient_size(gradients: Iterable[Tensor]) -> float:
    """Return the largest absolute value; divided by it, squares stay in range of float32."""
    largest = max(float(g.abs().max()) for g in gradients)
    if largest < MIN_GRADIENT:
        raise UnusableObservation("every gradient that is read is (nearly) zero: scale the loss up")
    return largest


@dataclass(frozen=True)
class _CommonPart:
    """The span of public texts' gradients, which is removed before a comparison.

    Attributes:
        sizes: The root mean square of each value over the public texts, by parameter.
        scale: (D,) the factor of each value.
        public: (n, D) the scaled public gradients.
        inverse: (n, n) the inverse of the matrix of their inner products, with a ridge.
    """

    sizes: Mapping[str, Tensor]
    scale: Tensor
    public: Tensor
    inverse: Tensor

    @classmethod
    def fit(cls, gradients: Tensor, names: Sequence[str], anatomy: Anatomy) -> _CommonPart:
        """Return the common part of public gradients (n, D) of some parameters."""
        size = gradients.square().mean(0).sqrt()
        scale = 1 / (size + row_space.RIDGE * size.square().mean().sqrt())
        public = gradients * scale
        products = (public @ public.T).double()
        products.diagonal().add_(row_space.RIDGE * products.diagonal().mean())
        parameters = [p for name in names if (p := anatomy.parameter(name)) is not None]
        parts = torch.split(size, [p.numel() for p in parameters])
        sizes = {n: v.view_as(p) for n, v, p in zip(names, parts, parameters, strict=True)}
        return cls(sizes, scale, public, torch.linalg.inv(products).float())

    def coefficients(self, shared: Tensor, gradients: Tensor) -> Tensor:
        """Return (G,) the coefficients of gradients (G, D) in ``shared`` (D,), outside the span."""
        scaled, shared = gradients * self.scale, shared * self.scale
        projections = scaled @ self.public.T
        products = scaled @ shared - projections @ (self.inverse @ (self.public @ shared))
        size = scaled.square().sum(1) - ((projections @ self.inverse) * projections).sum(1)
        return products / size.clamp_min(torch.finfo(size.dtype).tiny)


def _text_gradients(anatomy: Anatomy, names: Sequence[str], batch: TokenBatch) -> Tensor:
    """Return (B, D) the gradient of each text's summed loss with respect to some parameters."""
    gradients = []
    assert batch.attention_mask is not None
    columns = batch.input_ids, labels_of(batch), batch.attention_mask
    for ids, labels, real in zip(*columns, strict=True):
        n = int((labels[1:] != IGNORE_INDEX).sum())
        if n == 0:
            shapes = [anatomy.parameter(name) for name in names]
            gradients.append(torch.zeros(sum(p.numel() for p in shapes if p is not None)))
            continue
        text = TokenBatch(ids[None], labels[None], real[None], batch.kind)
        gradient = gradient_of(anatomy, text, names)
        gradients.append(n * torch.cat([gradient[name].flatten().float() for name in names]))
    return torch.stack([g.to(anatomy.device) for g in gradients])


def _query_batch(query: Query, tokens: int) -> TokenBatch:
    """Return the query's texts, cut ``tokens`` tokens after the first label."""
    ids, mask = query.input_ids, query.attention_mask
    real = torch.ones_like(ids) if mask is None else mask.long()
    labels = ids if query.labels is None else query.labels
    labels = labels.masked_fill(real == 0, IGNORE_INDEX)
    cut = reach(labels != IGNORE_INDEX, tokens)
    return TokenBatch(ids[:, :cut], labels[:, :cut], real[:, :cut], "causal")

"""Labels from maps that write into the residual stream, learned from rehearsals on public text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak import attacks
from lightning_fedleak.attacks import row_space
from lightning_fedleak.attacks.base import check_readable
from lightning_fedleak.attacks.words.public_gradients import gradient_of, head_parameters
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import Inapplicable, NotYet, Observation, UpdateSnapshot
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError

_FIRST_BLOCKS = 2  # blocks whose inputs a lone token resembles; more cost time, not tuned
_LAST_BLOCKS = 2  # blocks whose outputs are read; earlier ones showed nothing on stories15M
_RIDGE = 0.01  # added to covariances, in units of their mean; .627 against .547 at another value
_PENALTY = 1e-3  # of the readout's squared weights, in units of a rehearsal's loss; not tuned
_BACKGROUND = 1500  # random types that represent the unused ones in the fit; not tuned
_FREQUENT = 600  # most frequent types, all of which are in the fit; not tuned
_STANDARD_ERRORS = 3.0  # of a gain in rehearsals, above which it is no chance; not tuned
_WHITENINGS, _NEWTON_STEPS = 3, 25  # alternations and steps after which nothing moves; not tuned


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter whose gradient has rows that resemble known vectors of tokens.

    Attributes:
        name: of the parameter.
        axis: of the parameter that is summed over: its rows are gradients along the other one.
        atoms: (V, d) a vector of each token, without their mean.
    """

    name: str
    axis: int
    atoms: Tensor

    def rows(self, gradient: Tensor) -> Tensor:
        """Return (k, d) rows of a gradient."""
        gradient = gradient.to(self.atoms.device, torch.float32)
        return gradient[None] if gradient.dim() == 1 else gradient.movedim(self.axis, 0)


@dataclass(frozen=True, eq=False)
class _Filter:
    """The energy that a part's rows have along each token's vector, whitened on both sides.

    Attributes:
        part: the part.
        root: (k, k) inverse root of the covariance among rows.
        matched: (V, d) atoms times the inverse covariance of the rows' entries, each of norm 1
            there.
    """

    part: _Part
    root: Tensor
    matched: Tensor

    @classmethod
    def fit(cls, part: _Part, rows: Tensor) -> _Filter:
        """Return the filter that whitens (n, k, d) rows of rehearsals."""
        _, k, d = rows.shape
        root = torch.eye(k, device=rows.device)
        for _ in range(_WHITENINGS):
            white = (root @ rows).reshape(-1, d)
            inverse = torch.linalg.inv(_ridged(white.T @ white / len(white)))
            values, vectors = torch.linalg.eigh(_ridged((rows @ inverse @ rows.mT).mean(0) / d))
            root = vectors * values.clamp_min(1e-20).rsqrt() @ vectors.T
        matched = part.atoms @ inverse
        energy = (matched * part.atoms).sum(1, keepdim=True).clamp_min(1e-12)
        return cls(part, root, matched * energy.rsqrt())

    def scores(self, gradient: Tensor, types: Tensor) -> Tensor:
        """Return (n,) logarithms of the mean energy along the vectors of types."""
        rows = self.root @ self.part.rows(gradient)
        return (self.matched[types] @ rows.T).square().mean(1).clamp_min(1e-30).log()


def _ridged(covariance: Tensor) -> Tensor:
    """Return a covariance with a share of its mean variance added."""
    variance = covariance.diagonal().mean().clamp_min(1e-30)
    return covariance + torch.eye(len(covariance), device=covariance.device) * variance * _RIDGE


@dataclass(frozen=True, eq=False)
class _Readout:
    """A logistic regression on scores and frequency.

    Attributes:
        filters: those of all parts.
        log_counts: (V,) logarithms of the counts in public text.
        background: random types, whose scores are the zero of each filter.
        mean: (f,) mean of the features in the fit.
        scale: (f,) their deviation.
        weights: (f + 1,) of the scaled features, then the constant.
    """

    filters: tuple[_Filter, ...]
    log_counts: Tensor
    background: Tensor
    mean: Tensor
    scale: Tensor
    weights: Tensor

    @classmethod
    def fit(
        cls,
        gradients: Sequence[dict[str, Tensor]],
        labels: Sequence[Tensor],
        filters: tuple[_Filter, ...],
        log_counts: Tensor,
        generator: torch.Generator,
    ) -> _Readout:
        """Return the readout that tells the labels of rehearsals from other types."""
        size, device = len(log_counts), log_counts.device
        background = torch.randperm(size, generator=generator)[:_BACKGROUND].to(device)
        frequent = log_counts.topk(min(_FREQUENT, size)).indices
        bare = cls(filters, log_counts, background, *(log_counts[:0],) * 3)
        columns, truths, counts = [], [], []
        for gradient, used in zip(gradients, labels, strict=True):
            surely = torch.unique(torch.cat([frequent, used]))
            others = background[~torch.isin(background, surely)]
            types = torch.cat([surely, others])
            columns.append(bare.features(gradient, types))
            truths.append(torch.isin(types, used).cpu().double())
            stand_for = (size - len(surely)) / max(1, len(others))
            counts.append(torch.ones_like(truths[-1]))
            counts[-1][len(surely) :] = stand_for
        x, truth, count = (torch.cat(c) for c in (columns, truths, counts))
        return cls(filters, log_counts, background, *logistic_regression(x, truth, count))

    def features(self, gradient: dict[str, Tensor], types: Tensor) -> Tensor:
        """Return (n, f) float64 on the CPU: log count, the gradient's size, scores of all parts."""
        tokens = torch.cat([self.background, types])
        scores = torch.stack([f.scores(gradient[f.part.name], tokens) for f in self.filters], 1)
        level = scores[: len(self.background)].mean(0)
        centred = scores[len(self.background) :] - level
        size = level.mean().expand(len(types))
        return (
            torch.cat([torch.stack([self.log_counts[types], size], 1), centred], 1).cpu().double()
        )

    def probabilities(self, gradient: dict[str, Tensor]) -> Tensor:
        """Return (V,) probabilities that a type is among the labels."""
        types = torch.arange(len(self.log_counts), device=self.log_counts.device)
        x = (self.features(gradient, types) - self.mean) / self.scale
        logits = x @ self.weights[:-1] + self.weights[-1]
        return torch.sigmoid(logits).float().to(types.device)


def logistic_regression(x: Tensor, truth: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logistic regression with the highest likelihood less a penalty, by Newton steps.

    Args:
        x: (n, f) float64 features.
        truth: (n,) 0 or 1.
        count: (n,) how often each row counts.

    Returns:
        (f,) mean and (f,) deviation of the features; (f + 1,) weights of the scaled features, then
        the constant, which has no penalty.
    """
    mean, scale = x.mean(0), x.std(0) + 1e-6
    x = torch.cat([(x - mean) / scale, torch.ones_like(x[:, :1])], 1)
    penalty = torch.full_like(x[0], 2 * _PENALTY * len(x))
    penalty[-1] = 0.0
    weights = torch.zeros_like(x[0])
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(x @ weights)
        slope = x.T @ (count * (p - truth)) + penalty * weights
        curvature = (x.T * (count * p * (1 - p)).clamp_min(1e-9)) @ x + penalty.diag()
        weights -= torch.linalg.solve(curvature, slope)
    return mean, scale, weights


class RehearsedLabels(attacks.Attack):
    """The labels behind gradients of maps that write into the residual stream.

    Bottleneck adapters (Houlsby et al. 2019) and a LoRA on output projections read inputs that no
    token determines alone. The gradient of such a map is a sum of outer products, with what the
    loss sends back at each token: there the head's row of the label stands, changed by all that
    follows. In the first blocks its input resembles that of the token alone. An honest but curious
    server knows the model. It rehearses on public text: it computes gradients of batches whose
    labels it knows, whitens them on both sides, looks for the vector of each token, and learns how
    much to trust each parameter and the frequency of tokens. That readout gives the probability of
    each type, and the set of the highest expected F1 is named.

    This method is new here. It names labels alone, and a part of them: its guess is evidence, and
    nothing is certified. It rehearses again when the number of steps has doubled. It reads
    gradients of single steps, without noise. Where rehearsals that it was not fitted to are read no
    better with their own gradients than with each other's, its result is *unknown*.

    Args:
        public_text: text like the clients' (strings need ``tokenizer``), or ``"sampled"``.
        tokenizer: for strings.
        shapes: (texts, tokens) of the rehearsed batches, those of the clients at best.
        rehearsals: number of batches, shapes in turn; 12 at least.
        seed: of the batches.
        name: as in the logs.

    Raises:
        ValueError: an argument is out of range, or the text cannot be read.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lightning_fedleak.model.anatomy import find_anatomy
        >>> from lightning_fedleak.labs.rehearsed_labels import RehearsedLabels
        >>> size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **size))
        >>> _ = model.requires_grad_(False)
        >>> _ = model.model.layers[1].mlp.down_proj.requires_grad_(True)
        >>> attack = RehearsedLabels(torch.randint(64, (32, 12)), shapes=[(2, 12)])
        >>> attack.needs(find_anatomy(model)).gradients
        ('model.layers.1.mlp.down_proj.weight',)
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one gradient of adapters, and rehearses on text "
        "of its own",
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
    )
    default_name = "rehearsed_labels"
    needs_plain_inputs = True
    restores_fully = False

    def __init__(
        self,
        public_text: attacks.TextSource,
        *,
        tokenizer: Any = None,
        shapes: Sequence[tuple[int, int]] = ((4, 32), (8, 32), (4, 64), (8, 64)),
        rehearsals: int = 48,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if not shapes or rehearsals < 12:  # two pairs are held out of a readout then
            raise ValueError(f"shapes must hold one, rehearsals be >= 12: {shapes}, {rehearsals}")
        attack = type(self).__name__
        self.public_text = attacks.PublicText.parse_required(public_text, tokenizer, attack)
        self.shapes = tuple((int(texts), int(tokens)) for texts, tokens in shapes)
        self.rehearsals = rehearsals
        self.seed = seed
        self._readout: _Readout | None = None
        self._reads_gradients = False
        self._rehearsed_at = 0
        self._roles: tuple[str, ...] = ()
        self._maps = row_space.PerMaps(
            lambda anatomy, maps: (maps, row_space.find_shared_inputs(anatomy, maps))
        )

    def needs(self, anatomy: Anatomy) -> attacks.Surfaces:
        """Return the trained maps that write into the residual stream, or read the first blocks.

        Raises:
            ThreatModelError: there is none, or the model predicts no next token with a head.
        """
        places = [] if anatomy.kind != "causal" else list(self._places(anatomy))
        if not places:
            raise ThreatModelError(
                f"attack '{self.name}' reads trained maps that write into the residual stream of a "
                "causal model with a head, and this training has none: remove the attack"
            )
        return attacks.Surfaces(gradients=tuple(dict.fromkeys(name for name, *_ in places)))

    def prepare(self, anatomy: Anatomy) -> None:
        """Rehearse: compute gradients of public batches, and learn to read their labels.

        Raises:
            ValueError: there is no public text for this model.
        """
        text = attacks.PublicText.resolve(self.public_text, anatomy, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [self.shapes[i % len(self.shapes)] for i in range(self.rehearsals)]
        batches = [text.batch(*shape, generator) for shape in shapes]
        self._roles = roles = self.needs(anatomy).gradients
        start = int(text.sentences[0][0])
        gradients = [gradient_of(anatomy, batch, roles) for batch in batches]
        labels = [torch.unique(b.target_ids()).to(anatomy.device) for b in batches]
        # A filter is sharper on the gradients that it was fitted to: the readout learns on others.
        third = len(batches) // 3
        with torch.no_grad():
            filters = []
            for part in _parts(anatomy, self._places(anatomy), start):
                rows = [part.rows(g[part.name]) for g in gradients[third:]]
                sized = torch.stack([r / r.norm().clamp_min(1e-30) for r in rows])
                if bool(sized.flatten(1).any(1).all()):  # the others have no gradient yet
                    filters.append(_Filter.fit(part, sized * math.sqrt(sized[0].numel())))
            self._readout = None
            if filters:
                counts = torch.bincount(torch.cat(text.sentences), minlength=anatomy.vocab_size)
                log_counts = (counts + 0.1).log().to(anatomy.device)
                fitted = gradients[:third], labels[:third], tuple(filters), log_counts, generator
                self._readout = _Readout.fit(*fitted)
                self._reads_gradients = _exceed(_held_out_gains(*fitted))

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Rehearse again if the number of steps has doubled, or other parameters are trained."""
        changed = self._roles != self.needs(anatomy).gradients
        if changed or self._readout is None or step >= max(1, 2 * self._rehearsed_at):
            self.prepare(anatomy)
            self._rehearsed_at = step

    @torch.no_grad()
    def run(self, view: Observation, query: attacks.Query | None = None) -> attacks.WordGuess:
        """Return the labels that one gradient was computed on, as far as rehearsals show them.

        Returns:
            ``scores`` are probabilities; ``n_types`` is the expected number of types; ``types`` is
            the set of the highest expected F1.

        Raises:
            UnusableObservation: the gradient is non-finite or zero, has noise, or is an update.
        """
        snapshot = view.gradients[-1]
        if isinstance(snapshot, UpdateSnapshot) or snapshot.noise_std != 0:
            raise Inapplicable(
                "rehearsals are single steps without noise: measure gradients of undefended steps"
            )
        if self._readout is None:
            raise NotYet("no map that is read had a gradient in the rehearsals")
        gradients = {f.part.name: view.gradient(f.part.name) for f in self._readout.filters}
        for name, gradient in gradients.items():
            check_readable(gradient.abs().max(), f"the gradient of {name}")
        if not self._reads_gradients:
            raise attacks.UnusableObservation("its rehearsals show frequent tokens alone")
        probabilities = self._readout.probabilities(gradients)
        ordered, types = probabilities.sort(descending=True)
        number = torch.arange(1, len(ordered) + 1, device=ordered.device)
        expected = 2 * ordered.cumsum(0) / (number + ordered.sum())
        return attacks.WordGuess(
            types=types[: int(expected.argmax()) + 1],
            scores=probabilities,
            n_types=float(ordered.sum()),
            surface="output",
        )

    def _places(self, anatomy: Anatomy) -> Iterator[tuple[str, int, row_space.SharedInput | None]]:
        """Yield (name, axis, input or None) of trained parameters; None: it writes."""
        maps, inputs = self._maps.get(anatomy)
        blocks = [f"{name}." for name in anatomy.block_names]
        last, first = tuple(blocks[-_LAST_BLOCKS:]), tuple(blocks[:_FIRST_BLOCKS])
        names = {id(p): n for n, p in anatomy.root.named_parameters()}
        weight = anatomy.parameter(HEAD_WEIGHT)
        for m in maps:
            writes = weight is not None and m.factor != "A" and m.rows == weight.shape[1]
            if writes and m.name.startswith(last) and anatomy.trainable(m.name):
                yield m.name, m.axis, None
                bias = m.reader._parameters.get("bias")
                if bias is not None and bias.requires_grad:
                    yield names[id(bias)], 0, None
        for shared in inputs:
            for m in shared.trainable_maps(anatomy):
                wide = m.factor != "B" and shared.width >= anatomy.hidden_size
                if wide and weight is not None and m.name.startswith(first):
                    yield m.name, 1 - m.axis, shared

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports."""
        return {
            "public_text": attacks.PublicText.label(self.public_text),
            "shapes": str(self.shapes),
            "rehearsals": self.rehearsals,
            "seed": self.seed,
        }


def _held_out_gains(
    gradients: Sequence[dict[str, Tensor]], labels: Sequence[Tensor], *rest: Any
) -> Tensor:
    """Return (n,) shares of labels named by a batch's own gradient, less those by another one's.

    Each half is read by what was fitted to the other half, or noise would seem to be read.
    """
    middle, gains = len(labels) // 2, []
    halves = slice(middle), slice(middle, None)
    for learned, held_out in (halves, halves[::-1]):
        readout = _Readout.fit(gradients[learned], labels[learned], *rest)
        chances = [readout.probabilities(gradient) for gradient in gradients[held_out]]
        foreign = chances[1:] + chances[:1]
        for *pair, used in zip(chances, foreign, labels[held_out], strict=True):
            own, other = (torch.isin(p.topk(len(used)).indices, used).float().mean() for p in pair)
            gains.append(own - other)
    return torch.stack(gains).cpu()


def _exceed(gains: Tensor) -> bool:
    """Return whether a mean lies above zero by some standard errors; no from one gain alone."""
    error = float(gains.std()) / len(gains) ** 0.5 if len(gains) > 1 else math.inf
    return float(gains.mean()) > _STANDARD_ERRORS * error


def _parts(
    anatomy: Anatomy, places: Iterator[tuple[str, int, row_space.SharedInput | None]], start: int
) -> Iterator[_Part]:
    """Yield the parts of a model, with the vectors of each token behind a start token."""
    states: dict[int, Tensor] = {}
    head = _label_vectors(anatomy)
    tokens = torch.arange(len(head), device=head.device)
    texts = torch.stack([torch.full_like(tokens, start), tokens], 1)
    for name, axis, shared in places:
        if shared is None:
            yield _Part(name, axis, head)
            continue
        if id(shared) not in states:
            alone = row_space.input_rows(anatomy, shared, texts)[:, -1].float()
            states[id(shared)] = alone - alone.mean(0)
        yield _Part(name, axis, states[id(shared)])


def _label_vectors(anatomy: Anatomy) -> Tensor:
    """Return what the loss sends back for each label: (V, d) rows of the head, less their mean.

    They are multiplied by the gain of the norm before the head.
    """
    rows, head = head_parameters(anatomy)[0], anatomy.head
    assert head is not None
    states = row_space.SharedInput(
        (row_space.LinearMap("", head, head, 1, len(rows), "whole"),), rows.shape[1]
    )
    norm = row_space.norm_before(anatomy, states, torch.arange(4, device=rows.device)[None])
    if norm is not None:
        signs = torch.ones(rows.shape[1], device=rows.device)
        signs[::2] = -1  # mean 0 and size 1, so that either kind of norm leaves them as they are
        weight = next(norm.parameters(), signs)
        gain = (norm(signs.to(weight.dtype)) - norm(-signs.to(weight.dtype))).float() / 2 * signs
        rows = rows * gain
    return rows - rows.mean(0)

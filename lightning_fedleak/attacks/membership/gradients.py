"""Is this text in the batch, asked by a server that adds nothing: its own gradient, token by token.

A server that knows the model can compute the gradient that a text would leave, and ask how much of
it the shared one holds. Gradients of different texts are nearly orthogonal where a model has many
parameters, so that the inner product tells members (Li, Li and Ribeiro, ICLR 2023). Two things are
ours. The gradient of a linear map is a sum over tokens of outer products, ``sum_t e_t x_t^T`` of
the map's input x and the loss's gradient e in its output. Both sides are whitened by what public
text has there (the Kronecker factors of Martens and Grosse 2015), so that what all texts have in
common counts for little. And every token's part is looked for by itself: of a text in which one
word was replaced nearly all is there, but the parts of that word are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Query, RunFacts, Surfaces, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps, check_fresh, decays_apart
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership, reach
from lightning_fedleak.attacks.public_text import Given
from lightning_fedleak.attacks.row_space.linear_maps import (
    LinearMap,
    block_name,
    find_linear_maps,
)
from lightning_fedleak.attacks.words.public_gradients import gradient_of
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model_runs import (
    labels_of,
    micro_batches,
    only_needed_hooks,
    token_logits,
    undisturbed,
)
from lightning_fedleak.progress import measure_seconds
from lightning_fedleak.snapshots import (
    Observation,
    UpdateSnapshot,
    explain_weight_term,
    whole_tensor,
)
from lightning_fedleak.threats import ThreatModelError

T = TypeVar("T")

_RIDGE = 0.1
_WIDEST = 1024
_MOST_NUMBERS = 64_000_000
_MOST_OTHERS = 1 << 20
_FAR = 3.0
_ROUNDED = 4.0
_ALLOWANCE = 2.0
_MOST_LACKING = 0.5
_TIMED = 2  # public texts that an estimate is made on; more: steadier, and so many times longer
_LEAST = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
"""A largest number of a gradient, 1e-31, below which numbers of 1e-7 of it are no longer exact."""


class GradientMembership(PassiveMembership):
    """How much of a candidate's own gradient the shared one holds, and whether all of its tokens.

    With the whitened parts P_t of the candidate's tokens and the shared gradient G, the least
    squares coefficient ``c = <G, sum P_t> / |sum P_t|^2`` is one over the tokens of the batch for a
    member, and nearly zero for another text. The same coefficient of each two neighbouring tokens,
    given the rest, is far lower where a word was replaced: a word is what the token before is to
    predict, and what the model reads at its own place. The score is c less what two tokens fall
    short of it at most, of which two standard errors are allowed for, and half of c is
    taken off at most. How noisy a map is, and so what it counts, is told by public texts.

    Reads trained linear maps of any block, low-rank factors among them, head left out. Where none
    is trained (biases, norms' gains, virtual tokens of prompt tuning) the gradients of the other
    trained parameters are compared as a whole.

    Of an optimizer's update plain SGD's is a sum of gradients, and decay is undone. Adam and its
    kin take all numbers of a gradient to about one size; they are given back the sizes that public
    text has there, and what is left of a member's part is found like before.

    Args:
        public_text: text like the clients', or ``"sampled"``: what any text has in common.
        tokenizer: for strings.
        public_rows: public texts.
        controls: public texts that are asked for beside the candidates at every look, at least 2.
        tokens: of a text that are read at most, from the first that the loss counts.
        refresh_every: steps after which :meth:`refresh` runs the model on public text anew.
        seed: of sampled text.
        name: as in the logs.

    Raises:
        ValueError: a number out of range, or no public text.
    """

    default_name = "gradient_membership"
    needs_float64 = True
    reads_adaptive_updates = True
    removes_loss_terms = True
    reads_clipped = True

    def __init__(
        self,
        public_text: Given = "sampled",
        *,
        tokenizer: Any = None,
        public_rows: int = 24,
        controls: int = 8,
        tokens: int = 64,
        refresh_every: int = 50,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            public_text,
            tokenizer=tokenizer,
            public_rows=public_rows,
            tokens=tokens,
            refresh_every=refresh_every,
            seed=seed,
            name=name,
        )
        if isinstance(controls, bool) or controls < 2:
            raise ValueError(f"controls must be an integer of at least 2, got {controls}")
        self.controls = controls
        self._found: tuple[Anatomy, tuple[LinearMap, ...]] | None = None
        self._reads: list[str] = []
        self._factors: dict[str, _Factor] = {}
        self._whole: _Whole | None = None
        self._prepared_at = 0
        self._facts = RunFacts()
        self._before: dict[str, Tensor] = {}
        self._left_out: frozenset[str] = frozenset()

    def meet(self, facts: RunFacts) -> None:
        """Learns what makes an update, where updates are shared."""
        self._facts = facts

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Trained linear maps of blocks spread over the depth; else other trained parameters.

        Raises:
            ThreatModelError: not a causal model, or one that has neither.
        """
        if anatomy.kind != "causal":
            raise ThreatModelError(
                f"attack '{self.name}' computes a text's own gradient, and a {anatomy.kind} "
                "model's texts have labels that it does not know. Remove the attack; "
                "SubspaceMembership asks without labels."
            )
        names = [m.name for m in self._read(anatomy)] or self._others(anatomy)
        names = names or sorted(self._left_out) or [m.name for m in self._maps(anatomy)[:1]]
        if not names:
            raise ThreatModelError(
                f"attack '{self.name}' finds no parameter that it could read: remove the attack"
            )
        return Surfaces(gradients=tuple(names))

    def _maps(self, anatomy: Anatomy) -> tuple[LinearMap, ...]:
        if self._found is None or self._found[0] is not anatomy:
            maps = find_linear_maps(anatomy)
            found = tuple(m for m in maps if not m.regularised and not _of_prompts(m.name))
            self._found = (anatomy, found)
        return self._found[1]

    def _read(self, anatomy: Anatomy) -> list[LinearMap]:
        """The trained maps of as many blocks as there is memory for, evenly spread."""
        blocks: dict[str, list[LinearMap]] = {}
        for linear in self._maps(anatomy):
            if anatomy.trainable(linear.name) and linear.name not in self._left_out:
                blocks.setdefault(block_name(linear.name), []).append(linear)
        if not blocks:
            return []
        largest = max(sum(_numbers(m, anatomy) for m in maps) for maps in blocks.values())
        n = max(1, min(len(blocks), _MOST_NUMBERS // largest))
        places = torch.linspace(0, len(blocks) - 1, n).round().long().tolist()
        chosen = list(blocks.values())
        return [linear for i in places for linear in chosen[i]]

    def _others(self, anatomy: Anatomy) -> list[str]:
        """Small trained parameters of the language model, as many as there is memory for."""
        inside = {id(p) for p in anatomy.model.parameters()}
        names, numbers = [], 0
        for name, parameter in anatomy.root.named_parameters():
            fits = numbers + parameter.numel() <= _MOST_OTHERS
            read = id(parameter) in inside and name not in self._left_out
            if parameter.requires_grad and fits and read:
                numbers += parameter.numel()
                names.append(name)
        return names

    def _leave_out(self, terms: frozenset[str]) -> None:
        """Calibrates again without the parameters that the loss has a term of, of their own.

        Raises:
            UnusableObservation: no other is read.
        """
        if terms:
            self._left_out |= terms
            self.prepare(self._anatomy)
        if not self._reads:
            raise UnusableObservation(explain_weight_term(min(self._left_out)))

    def estimate(self, anatomy: Anatomy, texts: int) -> float:
        """Nearly all of a look is the model's run on each text, timed on a few public ones."""
        few, maps = self._texts(anatomy, _TIMED), self._read(anatomy)

        def run() -> None:
            if maps:
                of_token_parts(anatomy, maps, few, lambda parts: None)
            else:
                _gradients(anatomy, self._others(anatomy), few)

        return measure_seconds(run, anatomy.device) / _TIMED * (texts + self.controls)

    def prepare(self, anatomy: Anatomy) -> None:
        """Runs the model on public text, forward and backward."""
        public, maps = self._texts(anatomy, self.public_rows), self._read(anatomy)
        self._factors, self._whole = {}, None
        self._reads = [m.name for m in maps] or self._others(anatomy)
        if maps:
            moments = _Moments()
            of_token_parts(anatomy, maps, public, moments.add)
            self._factors = moments.factors(maps)
        elif self._reads:
            names = self._reads
            self._whole = _Whole.of(_gradients(anatomy, names, public), names, anatomy)
        self._anatomy = anatomy

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Runs the model on public text anew now and then, and where something else is trained."""
        read = [m.name for m in self._read(anatomy)] or self._others(anatomy)
        self._anatomy = anatomy
        if read != self._reads or not 0 <= step - self._prepared_at < self.refresh_every:
            self._prepared_at = step
            self.prepare(anatomy)
        self._round_starts(anatomy, self._facts)
        if decays_apart(self._facts):
            weights = ((name, anatomy.parameter(name)) for name in read)
            self._before = {n: whole_tensor(p).clone() for n, p in weights if p is not None}

    def run(self, view: Observation, query: Query | None = None) -> MembershipGuess:
        """Scores every text of the query, and public texts beside them.

        Returns:
            ``members`` are texts whose score lies more than three standard deviations above the
            mean of public ones. That mean is the score of a text without a label, which leaves no
            gradient.

        Raises:
            UnusableObservation: gradients that are not finite, zero, or hardly above what float32
                can hold.
            ValueError: no query.
            RuntimeError: ``prepare`` was not called.
        """
        if query is None:
            raise ValueError(f"attack '{self.name}' asks about texts: give a query")
        if not self._reads and not self._left_out:
            raise RuntimeError(f"attack '{self.name}' has no calibration: call prepare(anatomy)")
        check_fresh(self._facts, view.gradients[-1])
        self._leave_out(view.gradients[-1].loss_terms & frozenset(self._reads))
        public = self._texts(self._anatomy, self.controls, skip=self.public_rows)
        texts = (_batch_of(query, self.tokens), public)
        with self._at_start():
            if self._whole is None:
                size, scores, others = self._by_tokens(view, *texts)
            else:
                names = self._others(self._anatomy)
                each = {name: self._shared(view, name) for name in names}
                size = _largest(each.values())
                shared = [self._scaled(g / size, view, name).flatten() for name, g in each.items()]
                scores, others = (
                    self._whole.coefficients(
                        torch.cat(shared), _gradients(self._anatomy, names, batch)
                    )
                    for batch in texts
                )
        scores, others = scores.double() * size, others.double() * size
        told = (labels_of(texts[0])[:, 1:] != IGNORE_INDEX).any(1).to(scores.device)
        scores = torch.where(told, scores, others.mean())
        threshold = others.mean() + _FAR * others.std()
        return MembershipGuess(scores=scores.cpu(), members=(scores > threshold).cpu())

    def _shared(self, view: Observation, name: str) -> Tensor:
        """The gradient of a parameter, of an update what stands for it."""
        g = whole_tensor(view.gradient(name)).float()
        if not bool(g.isfinite().all()):
            raise UnusableObservation(f"the gradient of {name} has NaN or infinity")
        update, facts = view.gradients[-1], self._facts
        if not isinstance(update, UpdateSnapshot) or facts.optimizer is None:
            return g
        return self._without_decay(g, name, update) if decays_apart(facts) else g

    def _scaled(self, g: Tensor, view: Observation, name: str) -> Tensor:
        """A shared gradient; of what an adaptive optimizer divided, in sizes as public text's."""
        facts = self._facts
        plain = not isinstance(view.gradients[-1], UpdateSnapshot) or facts.optimizer is None
        return g if plain or facts.optimizer == "SGD" else g * self._sizes(name)

    def _without_decay(self, g: Tensor, name: str, update: UpdateSnapshot) -> Tensor:
        """An update less what decay added; zeros where decay alone has moved the weights.

        So it does with LoRA's A as long as B is zero. What is left of that is no gradient: it says
        how B's step has changed a text's loss, which is the contrary of what a gradient says.
        """
        steps = LocalSteps.from_facts(self._facts)
        if steps is None:
            return g
        if name not in self._before:
            raise RuntimeError(f"attack '{self.name}' has not seen the weights: call refresh")
        before = self._before[name].to(g)
        share = (g * before).sum() / before.square().sum().clamp_min(torch.finfo(g.dtype).tiny)
        rounding = _ROUNDED * steps.steps * torch.finfo(g.dtype).eps / update.learning_rate
        rest = float((g - share * before).abs().max())
        if g.numel() > 1 and rest <= rounding * float(before.abs().max()):
            return torch.zeros_like(g)
        return steps.without_decay(g, self._before[name], update.learning_rate)

    def _sizes(self, name: str) -> Tensor:
        """How large each number of a parameter's gradient is by public text."""
        if self._whole is None:
            factor = self._factors.get(name)
            return torch.zeros(()) if factor is None else factor.sizes
        return self._whole.sizes[name]

    def _by_tokens(
        self, view: Observation, asked: TokenBatch, public: TokenBatch
    ) -> tuple[float, Tensor, Tensor]:
        """The gradients' size, and in units of it scores of the candidates and of public texts."""
        anatomy, maps = self._anatomy, self._read(self._anatomy)
        given = {m.name: self._shared(view, m.name) for m in maps}
        size = _largest(given.values())
        there = {name for name, g in given.items() if bool(g.any())}
        if there - self._factors.keys():  # LoRA's A has no slopes as long as B is zero
            self.prepare(anatomy)
        whitened = {}
        for linear in maps:
            if linear.name in there and (factor := self._factors.get(linear.name)) is not None:
                whitened[linear.name] = factor.whitened(
                    self._scaled(given[linear.name] / size, view, linear.name)
                )
        if not whitened:
            raise UnusableObservation("the maps with a gradient are reached by no public text")
        read = [m for m in maps if m.name in whitened]
        controls = _joined(
            of_token_parts(
                anatomy, read, public, lambda parts: _fits(whitened, self._factors, parts)
            )
        )
        weights = {name: 1 / _noise(fit) for name, fit in controls.items()}
        others = _summed(controls, weights)
        if not bool(others.sizes.any()):
            raise UnusableObservation("public texts leave nothing in the maps that are read")
        noise = _noise(others).sqrt()

        def scored(parts: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
            fit = _summed(_fits(whitened, self._factors, parts), weights)
            return _least_coefficient(fit, noise)

        scores = of_token_parts(anatomy, read, asked, scored)
        return size, torch.cat(scores), _least_coefficient(others, noise)

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        return super().config() | {"controls": self.controls}


def _largest(gradients: Iterable[Tensor]) -> float:
    """Return the largest number of shared gradients, by which squares in float32 stay in range.

    Raises:
        UnusableObservation: it is zero, or so small that float32 has rounded the others off.
    """
    largest = max(float(g.abs().max()) for g in gradients)
    if largest == 0:
        raise UnusableObservation("every gradient that is read is zero")
    if largest < _LEAST:
        raise UnusableObservation(
            f"the gradients that are read are below {_LEAST:.0e}, where float32 rounds them off: "
            "scale the loss up"
        )
    return largest


def _of_prompts(name: str) -> bool:
    """Whether a map of PEFT's makes virtual tokens or prefixes, which are no part of a text."""
    return ".prompt_encoder." in f".{name}"


# ---- tokens' parts --------------------------------------------------------------------------


def of_token_parts(
    anatomy: Anatomy,
    maps: Sequence[LinearMap],
    batch: TokenBatch,
    take: Callable[[Mapping[str, tuple[Tensor, Tensor]]], T],
) -> list[T]:
    """What each token of texts adds to the gradients of linear maps, as the pairs it is made of.

    Args:
        anatomy: the model, run in eval mode.
        maps: each called once in a forward.
        batch: texts (B, L) with labels.
        take: is called for a few texts at a time with, by the map's name, inputs (b, L, d) and the
            summed loss's gradients in the outputs (b, L, o), in float32. Padded and virtual tokens
            are left out or zero. Maps that are not called, or more than once, are missing.

    Returns:
        What ``take`` made of them.
    """
    taken = []
    wanted = {id(anatomy.parameter(m.name)) for m in maps}
    views = {
        name: p.detach().requires_grad_(id(p) in wanted)
        for name, p in anatomy.model.named_parameters()
    }
    with undisturbed(anatomy) as model, torch.enable_grad(), only_needed_hooks(anatomy.root):
        for part in micro_batches(anatomy, batch):
            with _calls(maps) as calls:
                logits, labels = token_logits(model, part, views)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            with torch.no_grad():
                taken.append(take(_pairs(maps, calls, loss, part)))
    return taken


def _pairs(
    maps: Sequence[LinearMap],
    calls: Mapping[int, list[tuple[Tensor, Tensor]]],
    loss: Tensor,
    part: TokenBatch,
) -> dict[str, tuple[Tensor, Tensor]]:
    length = part.input_ids.shape[1]
    seen = {}
    for linear in maps:
        # DoRA also calls its maps on a unit matrix, through which no gradient goes.
        of = [(x, y) for x, y in calls.get(id(linear.reader), []) if x.dim() == 3]
        if len(of) == 1 and of[0][1].requires_grad:
            seen[linear.name] = of[0]
    outputs = [y for _, y in seen.values()]
    slopes: Sequence[Tensor | None] = ()
    if outputs:
        slopes = torch.autograd.grad(loss, outputs, allow_unused=True)
    real = None if part.attention_mask is None else (part.attention_mask != 0)[..., None]
    found = {}
    for (name, (x, _)), slope in zip(seen.items(), slopes, strict=True):
        if slope is None:
            continue
        x, slope = x[:, -length:].float(), slope[:, -length:].float()
        found[name] = (x, slope if real is None else slope * real)
    return found


@contextmanager
def _calls(maps: Sequence[LinearMap]) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Collects what each map reads and gives, by the id of its reader."""
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            seen.setdefault(id(module), []).append((args[0].detach(), out))

    with ExitStack() as stack:
        for reader in {id(m.reader): m.reader for m in maps}.values():
            stack.callback(reader.register_forward_hook(keep).remove)
        yield seen


@dataclass(frozen=True)
class _Factor:
    """What public text leaves in a map's gradient.

    Attributes:
        into: (d, d) that inputs are multiplied by from the right to be alike in all directions;
            of wide ones (d,), for each number by itself.
        out: (o, o) or (o,), the same of slopes.
        axis: the parameter's axis along the input.
        sizes: shaped as the parameter; root mean square of each number of a token's part.
    """

    into: Tensor
    out: Tensor
    axis: int
    sizes: Tensor

    @classmethod
    def of(cls, into: Tensor, out: Tensor, axis: int) -> _Factor:
        """Of the second moments of inputs, (d, d) or (d,), and of slopes."""
        squares = [m.diagonal() if m.dim() == 2 else m for m in (out, into)]
        sizes = torch.outer(*(square.sqrt() for square in squares)).float()
        return cls(whitening(into), whitening(out), axis, sizes if axis == 1 else sizes.T)

    def whitened(self, gradient: Tensor) -> Tensor:
        """(o, d) of the parameter's gradient."""
        g = gradient if self.axis == 1 else gradient.T
        return _times(_times(g.T, self.out).T, self.into)


class _Moments:
    """Second moments of inputs and slopes over public tokens, by map."""

    def __init__(self) -> None:
        self._into: dict[str, Tensor] = {}
        self._out: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds those of a few texts."""
        for name, both in parts.items():
            for sums, values in zip((self._into, self._out), both, strict=True):
                flat = values.flatten(0, 1).double()
                wide = flat.shape[1] > _WIDEST
                sums[name] = sums.get(name, 0.0) + (flat.square().sum(0) if wide else flat.T @ flat)

    def factors(self, maps: Sequence[LinearMap]) -> dict[str, _Factor]:
        """By map, of those that public text reaches."""
        return {
            m.name: _Factor.of(self._into[m.name], self._out[m.name], m.axis)
            for m in maps
            if m.name in self._into
            and bool(self._into[m.name].any())
            and bool(self._out[m.name].any())
        }


def _times(values: Tensor, factor: Tensor) -> Tensor:
    """Rows times a matrix, or times the diagonal of one."""
    return values @ factor if factor.dim() == 2 else values * factor


def whitening(moment: Tensor) -> Tensor:
    """W such that ``x W`` is alike in all directions.

    Args:
        moment: second moments (d, d), or their diagonal (d,).

    Returns:
        (d, d), or its diagonal.
    """
    if moment.dim() == 1:
        return (moment + _RIDGE * moment.mean()).rsqrt().float()
    moment = moment + _RIDGE * moment.diagonal().mean() * torch.eye(len(moment)).to(moment)
    lower = torch.linalg.cholesky(moment)
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    white: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False).T.float()
    return white


@dataclass(frozen=True)
class _Fit:
    """Texts' tokens against the shared gradient.

    Attributes:
        held: (B, L) inner product of each token's part with it.
        gram: (B, L, L) of the parts of a text with each other.
    """

    held: Tensor
    gram: Tensor

    @property
    def sizes(self) -> Tensor:
        """(B, L) squared norm of each part; 0 where a token has none."""
        return self.gram.diagonal(dim1=1, dim2=2)


def _fits(
    shared: Mapping[str, Tensor],
    factors: Mapping[str, _Factor],
    parts: Mapping[str, tuple[Tensor, Tensor]],
) -> dict[str, _Fit]:
    """By map."""
    found = {}
    for name, (x, slope) in parts.items():
        x, slope = _times(x, factors[name].into), _times(slope, factors[name].out)
        held = ((slope @ shared[name]) * x).sum(-1)
        found[name] = _Fit(held, (slope @ slope.mT) * (x @ x.mT))
    return found


def _joined(fits: Iterable[Mapping[str, _Fit]]) -> dict[str, _Fit]:
    """All texts of several, by map."""
    rows: dict[str, list[_Fit]] = {}
    for found in fits:
        for name, fit in found.items():
            rows.setdefault(name, []).append(fit)
    return {
        name: _Fit(torch.cat([f.held for f in of]), torch.cat([f.gram for f in of]))
        for name, of in rows.items()
    }


def _summed(fits: Mapping[str, _Fit], weights: Mapping[str, Tensor]) -> _Fit:
    """Over the maps that have a weight, each with its own."""
    known = [(weights[name], fit) for name, fit in fits.items() if name in weights]
    if not known:
        raise UnusableObservation("the loss depends on none of the maps that are read")
    held = [weight * fit.held for weight, fit in known]
    gram = [weight * fit.gram for weight, fit in known]
    return _Fit(torch.stack(held).sum(0), torch.stack(gram).sum(0))


def _noise(fit: _Fit) -> Tensor:
    """Mean square of what parts of texts that are not in the batch hold, in units of their size."""
    counts = fit.sizes > 0
    noise = (fit.held[counts].square() / fit.sizes[counts]).mean()
    # A map that none of them reaches (the mean of nothing) gets no weight.
    return noise.nan_to_num(nan=torch.inf).clamp_min(torch.finfo(noise.dtype).tiny)


def _least_coefficient(fit: _Fit, noise: Tensor) -> Tensor:
    """(B,) a text's coefficient, less what two neighbouring tokens of it fall short at most.

    Args:
        fit: of the texts.
        noise: () standard deviation of a part's inner product, in units of its norm.
    """
    whole = fit.held.sum(1) / fit.gram.sum((1, 2)).clamp_min(torch.finfo(fit.gram.dtype).tiny)
    rest = fit.held - whole[:, None] * fit.gram.sum(2)
    size = fit.sizes[:, 1:] + fit.sizes[:, :-1] + 2 * fit.gram.diagonal(1, dim1=1, dim2=2)
    counts = size > 0
    size = size.where(counts, torch.ones_like(size))
    short = (rest[:, 1:] + rest[:, :-1]) / size + _ALLOWANCE * noise / size.sqrt()
    most = short.masked_fill(~counts, 0.0).amin(1).clamp(max=0.0)
    return whole + torch.maximum(most, -_MOST_LACKING * whole.abs())


# ---- other parameters, as a whole -----------------------------------------------------------


@dataclass(frozen=True)
class _Whole:
    """What public texts' gradients have in common.

    Attributes:
        sizes: root mean square of each number, by parameter.
        scale: (D,) that every number is multiplied by.
        public: (n, D) public gradients, scaled.
        inverse: (n, n) of their inner products, with a ridge.
    """

    sizes: Mapping[str, Tensor]
    scale: Tensor
    public: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, gradients: Tensor, names: Sequence[str], anatomy: Anatomy) -> _Whole:
        """Of public gradients (n, D) of some parameters."""
        size = gradients.square().mean(0).sqrt()
        scale = 1 / (size + _RIDGE * size.square().mean().sqrt())
        public = gradients * scale
        products = (public @ public.T).double()
        products.diagonal().add_(_RIDGE * products.diagonal().mean())
        parameters = [p for name in names if (p := anatomy.parameter(name)) is not None]
        parts = torch.split(size, [p.numel() for p in parameters])
        sizes = {n: v.view_as(p) for n, v, p in zip(names, parts, parameters, strict=True)}
        return cls(sizes, scale, public, torch.linalg.inv(products).float())

    def coefficients(self, shared: Tensor, gradients: Tensor) -> Tensor:
        """(G,) of texts' gradients (G, D) in the shared one (D,), the common part left out."""
        own, shared = gradients * self.scale, shared * self.scale
        along = own @ self.public.T
        held = own @ shared - along @ (self.inverse @ (self.public @ shared))
        size = own.square().sum(1) - ((along @ self.inverse) * along).sum(1)
        return held / size.clamp_min(torch.finfo(size.dtype).tiny)


def _gradients(anatomy: Anatomy, names: Sequence[str], batch: TokenBatch) -> Tensor:
    """(B, D) the gradient of each text's summed loss in some parameters."""
    found = []
    mask = batch.attention_mask
    masks = torch.ones_like(batch.input_ids) if mask is None else mask
    for ids, labels, real in zip(batch.input_ids, labels_of(batch), masks, strict=True):
        n = int((labels[1:] != IGNORE_INDEX).sum())
        if n == 0:
            shapes = [anatomy.parameter(name) for name in names]
            found.append(torch.zeros(sum(p.numel() for p in shapes if p is not None)))
            continue
        text = TokenBatch(ids[None], labels[None], real[None], batch.kind)
        gradient = gradient_of(anatomy, text, names)
        found.append(n * torch.cat([gradient[name].flatten().float() for name in names]))
    return torch.stack([g.to(anatomy.device) for g in found])


def _numbers(linear: LinearMap, anatomy: Anatomy) -> int:
    """In a map's gradient, and in what whitens its two sides."""
    parameter = anatomy.parameter(linear.name)
    assert parameter is not None
    sides = (linear.rows, parameter.numel() // linear.rows)
    return parameter.numel() + sum(n if n > _WIDEST else n * n for n in sides)


def _batch_of(query: Query, tokens: int) -> TokenBatch:
    """The texts that are asked for, as far as ``tokens`` behind where the loss begins to look."""
    ids, mask = query.input_ids, query.attention_mask
    real = torch.ones_like(ids) if mask is None else mask.long()
    labels = ids if query.labels is None else query.labels
    labels = labels.masked_fill(real == 0, IGNORE_INDEX)
    cut = reach(labels != IGNORE_INDEX, tokens)
    return TokenBatch(ids[:, :cut], labels[:, :cut], real[:, :cut], "causal")

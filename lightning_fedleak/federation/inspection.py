"""Evidence in adapter values that a server sends, for a client that has not trained on them yet.

A server that chooses values alone, never a module, can craft an adapter whose neurons each fire for
a few rare words, and read those words off the update. Each rule here asks one thing of the received
values. A rule that cannot be asked is *not applicable* and says why. Where no rule finds anything,
nothing was found: that is no proof that the values are honest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from lightning_fedleak.federation.updates import State

Rule = Literal[
    "extra", "start", "equal_rows", "blind_rows", "replaced", "few_rows", "cancelled", "jump"
]

LIMITS: dict[Rule, float] = {
    "extra": 0.0,
    "start": 0.0,
    "equal_rows": 0.9999,
    "blind_rows": 4.0,
    "replaced": 2.0,
    "few_rows": 4.0,
    "cancelled": 0.6,
    "jump": 1.5,
}
"""The largest value of each rule that is no evidence: above those of 20 honest set-ups, by eye.
Lower limits find weaker traps, and honest states (``benchmarks/federation/inspection.py``)."""

DIVERGED = 0.5  # norm of a row of B A over the base's, at the median; below .35 in honest runs
MOST_GROWTH = 3.0  # of rows over one's own; above, other clients' runs came apart; not tuned
ALIVE = 0.3  # of what Adam moves elsewhere; rows that fire once in a round are below; not tuned
ALIKE = 1.2  # over the largest singular value of independent rows; small matrices are near 1.1
USUAL_TYPES = 30  # token types whose span every honest row sees; not tuned
MOST_ROWS = 8192  # of a matrix whose rows are compared, which bounds the memory
WORST = 5  # rows that an answer names; not tuned

_LORA = re.compile(r"\.lora_A(?=\.|$)")


@dataclass(frozen=True)
class Answer:
    """What one rule says of received values.

    Attributes:
        rule: its name.
        value: the largest of all rows; NaN where the rule is not applicable.
        count: rows, or tensors, above the limit.
        rows: the worst of them, ``"name[row]"``, worst first.
        why: why the rule is not applicable; else empty.
        unasked: names of what the rule is for and could not be asked of.
    """

    rule: Rule
    value: float = math.nan
    count: int = 0
    rows: tuple[str, ...] = ()
    why: str = ""
    unasked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """What all rules say of received values.

    Attributes:
        answers: of each rule.
        diverged: names of what holds NaN or infinity, outgrew the base as a whole, or changed as a
            whole far more than this client's own update.
        unread: names of received tensors that belong to no LoRA and no bottleneck adapter.
    """

    answers: tuple[Answer, ...]
    diverged: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def found(self) -> tuple[Answer, ...]:
        """Return the answers that found something."""
        return tuple(answer for answer in self.answers if answer.count)

    @property
    def verdict(self) -> Literal["crafted", "diverged", "nothing found"]:
        """Return what the values look like. Values that diverged may hide crafted ones."""
        if self.found:
            return "crafted"
        return "diverged" if self.diverged else "nothing found"


@dataclass(frozen=True)
class Agreed:
    """What a client holds beside the received values, of its own and not of this server.

    Attributes:
        base: matrices (out, in) that LoRAs act on, as they were before any training, by the name of
            A.
        scales: of B A, by the name of A.
        start: the values that the agreed config starts with, by name. A LoRA without them is taken
            to start with B = 0.
        shared_seed: ``start`` is what every client starts with, and not of a seed of one's own.
        shapes: of all that was agreed to be sent, by name; None: not known.
        usual: what bottlenecks read at the most usual token types, (k, d), by the matrix' name.
        unknown: why the rules for LoRAs cannot be asked where no base is known.
    """

    base: State = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    start: State | None = None
    shared_seed: bool = False
    shapes: Mapping[str, torch.Size] | None = None
    usual: State = field(default_factory=dict)
    unknown: str = "base and scale of none are known"


@dataclass(frozen=True)
class LastRound:
    """The round before the one that is inspected, as the client remembers it.

    Attributes:
        received: what the server sent then.
        update: the client's own change, returned less received.
    """

    received: State
    update: State


@dataclass(frozen=True)
class Adapter:
    """Two matrices with a narrow space between them.

    Attributes:
        name: of ``down`` in the state.
        partner: name of ``up``.
        down: (r, in), A of a LoRA.
        up: (out, r), B of a LoRA.
        bias: (r,) of a bottleneck adapter; None for a LoRA.
    """

    name: str
    partner: str
    down: Tensor
    up: Tensor
    bias: Tensor | None = None

    def holds(self, name: str) -> bool:
        """Return whether a tensor of the state belongs to this adapter."""
        stems = (part.removesuffix("weight") for part in (self.name, self.partner))
        return name in (self.name, self.partner) or name in (f"{stem}bias" for stem in stems)


def find_adapters(state: State) -> Iterator[Adapter]:
    """Yield the LoRAs and bottleneck adapters of a state.

    A LoRA has the names of PEFT. A bottleneck is a matrix (r, d) with r < d and a bias (r,), and
    behind it a matrix (d, r): the one whose name begins most alike.
    """
    matrices = {n: t for n, t in state.items() if t.dim() == 2 and t.is_floating_point()}
    order = list(matrices)
    for place, (name, down) in enumerate(matrices.items()):
        if _LORA.search(name):
            partner = _LORA.sub(".lora_B", name)
            up = matrices.get(partner)
            if up is not None and up.shape[1] == len(down):
                yield Adapter(name, partner, down.float(), up.float())
            continue
        bias = state.get(_bias_of(name))
        if len(down) >= down.shape[1] or bias is None or bias.shape != down.shape[:1]:
            continue
        alike = [n for n in order if matrices[n].shape == down.shape[::-1]]
        paths = {n: [n.replace(".", "/"), name.replace(".", "/")] for n in alike}
        nearest = max(alike, key=lambda n: len(os.path.commonpath(paths[n])), default=name)
        if order.index(nearest) > place:
            yield Adapter(name, nearest, down.float(), matrices[nearest].float(), bias.float())


def _bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def base_rows(layer: nn.Module) -> Tensor | None:
    """Return the matrix (out, in) of a layer that a LoRA acts on; None where it is quantized."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    transposed = type(layer).__name__ == "Conv1D"
    rows: Tensor = weight.detach().T if transposed else weight.detach()
    return rows


def equal_rows(rows: Tensor) -> Tensor:
    """Return the largest absolute cosine of each row (r, d) with another one; 0 for a zero row."""
    unit = normalize(rows.double(), dim=1)
    return (unit @ unit.T).abs().fill_diagonal_(0).amax(1)


def usual_types(types: Tensor) -> Tensor:
    """Return the most usual of token types (N,), the most usual first."""
    unique, counts = torch.unique(types, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    most: Tensor = unique[order[:USUAL_TYPES]]
    return most


def sum_inputs(inputs: Tensor, types: Tensor, usual: Tensor) -> Tensor:
    """Return the sum of the inputs (N, d) at each usual type (k,), (k, d), float64."""
    return (types == usual[:, None]).double() @ inputs.double()


def shared_direction(rows: Tensor, start: Tensor | None = None) -> Tensor:
    """Return how far each of rows (r, d) lies along one direction; 0 where random ones do too.

    The largest singular value of r independent rows of norm 1 is near ``1 + sqrt(r / d)``
    (Marchenko and Pastur). Rows whose thresholds lie along their direction share one.

    Args:
        rows: of a matrix that nobody has trained yet.
        start: the agreed ones, of a seed of one's own.
    """
    _, values, directions = torch.linalg.svd(normalize(rows.double(), dim=1), full_matrices=False)
    edge = 1 + (len(rows) / rows.shape[1]) ** 0.5
    if start is not None:
        units = normalize(start.to(rows).double(), dim=1)
        edge = max(edge, float(torch.linalg.matrix_norm(units, 2)))
    share = (normalize(rows.double(), dim=1) @ directions[0]).abs()
    return torch.where(values[0] > ALIKE * edge, share, 0.0)


def blind_rows(rows: Tensor, usual: Tensor) -> Tensor:
    """Return how unlikely it is that rows (r, d) see so little of usual words, as -log10 of p.

    A row of any direction has the share k / d of its energy in the span of k inputs. A row that is
    crafted to fire for rare words alone has none in that of the usual ones. p is at least the
    chance that one of r random directions has as little: the energy has a Beta distribution, whose
    lower tail is below that of chi-squared over d.

    Args:
        rows: weights.
        usual: (k, d), what is read at the most usual token types, of any length; an eighth of d
            are used at most.
    """
    d = rows.shape[1]
    inputs = usual[: max(1, d // 8)].double()
    span, _ = torch.linalg.qr(inputs.T)
    energy = (normalize(rows.double(), dim=1) @ span).square().sum(1)
    half = torch.tensor(len(inputs) / 2, dtype=torch.float64)
    p = len(rows) * torch.special.gammainc(half, energy * d / 2)
    return torch.where(rows.norm(dim=1) == 0, 0.0, -p.clamp(1e-300, 1).log10())


def product_norms(adapter: Adapter) -> Tensor:
    """Return the norms of the rows of B A, (out,)."""
    gram = adapter.down @ adapter.down.T
    return (adapter.up @ gram * adapter.up).sum(1).clamp(min=0).sqrt()


def rewritten_rows(adapter: Adapter, base: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return how far a LoRA rewrites each row of its base: its relative size, and what it cancels.

    Both are functions of ``scale B A`` alone, which no rotation between A and B changes.

    Args:
        adapter: a LoRA.
        base: (out, in).
        scale: of B A.

    Returns:
        (out,) norm of the row of ``scale B A`` over that of the base's row, and (out,) the cosine
        of ``-scale B A`` with that row times the ratio, at most 1: 1 where the row is taken away.
    """
    base = base.to(adapter.up)
    norms, base_norms = product_norms(adapter) * abs(scale), base.norm(dim=1)
    ratio = norms / base_norms.clamp(min=1e-12)
    inner = -scale * (adapter.up * (base @ adapter.down.T)).sum(1)
    cosine = inner / (norms * base_norms).clamp(min=1e-12)
    return ratio, cosine * ratio.clamp(max=1)


def jumps(change: Tensor, update: Tensor, growth: float = 1.0) -> Tensor:
    """Return how far each row (r, d) of a received change jumps; 0 where one's own explains it.

    That is its norm over the client's largest row, and over 1.5 times its median row where that is
    larger. Rows count that are larger than the client's own, in another direction (a cosine below
    0.2).

    Args:
        change: received now less received before.
        update: returned before less received before.
        growth: how much larger than one's own the rows of all adapters are, at the median.
    """
    size, update_size = change.norm(dim=1), update.norm(dim=1)
    away = (cosine_similarity(change, update, dim=1) < 0.2) & (size > update_size)
    usual = torch.maximum(1.5 * update_size.median(), update_size.max())
    return torch.where(away, size / (growth * usual).clamp(min=1e-12), 0.0)


def agree(model: nn.Module, *, shared_seed: bool = False) -> Agreed:
    """Return what a client knows from a model that is set up as agreed and not trained yet.

    Names are those of the model's parameters. A base that is quantized is not known.
    """
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    start: dict[str, Tensor] = {}
    for adapter in find_adapters(parameters):
        start |= {n: t.clone() for n, t in parameters.items() if adapter.holds(n)}
    base: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    layers: Any = dict(model.named_modules())
    for adapter in find_adapters(start):
        path, lora, name = adapter.name.removesuffix(".weight").rpartition(".lora_A.")
        layer = layers.get(path)
        rows = base_rows(layer.base_layer) if lora else None
        scale = getattr(layer, "scaling", {}).get(name)
        if rows is None or scale is None or getattr(layer, "use_dora", {}).get(name):
            continue
        if bool(adapter.up.any()):
            rows = rows + (scale * adapter.up @ adapter.down).to(rows)
        base[adapter.name], scales[adapter.name] = rows, scale
    shapes = {n: t.shape for n, t in parameters.items()}
    return Agreed(base, scales, start, shared_seed, shapes)


def inspect_received(
    received: State, agreed: Agreed, last: LastRound | None = None, *, first: bool = False
) -> Inspection:
    """Return what the rules say of values that a server sent.

    Args:
        received: what is trained, by name.
        agreed: what the client holds beside it.
        last: the round before; None: not known.
        first: whether this is the federation's first round.
    """
    received = {name: t.detach().cpu() for name, t in received.items()}
    finite = {n: t for n, t in received.items() if bool(t.isfinite().all())}
    adapters = list(find_adapters(finite))
    bottlenecks = [a for a in adapters if a.bias is not None]
    loras = [a for a in adapters if a.bias is None]
    rewritten, outgrown = _rewritten(loras, agreed)
    jump, grown = _jump(adapters, last)
    answers = [
        _extra(received, agreed, last),
        _start(received, adapters, agreed, first),
        _equal(finite, {a.partner for a in adapters}),
        _blind(bottlenecks, agreed),
        *rewritten,
        jump,
    ]
    unread = (n for n in finite if not any(a.holds(n) for a in adapters))
    broken = tuple(n for n in received if n not in finite)
    return Inspection(tuple(answers), (*broken, *outgrown, *grown), tuple(unread))


def _judge(rule: Rule, scores: Mapping[str, Tensor], why: str, names: Iterable[str] = ()) -> Answer:
    """Return the answer of a rule by the score of each row (rows,) of each tensor, by name.

    Args:
        rule: its name.
        scores: of what it was asked of.
        why: why it was asked of nothing, where that is so.
        names: of what it is for.
    """
    unasked = tuple(name for name in names if name not in scores)
    if not scores:
        return Answer(rule, why=why, unasked=unasked)
    limit = LIMITS[rule]
    above = ((n, s, i) for n, s in scores.items() for i in (s > limit).nonzero().flatten().tolist())
    rows = sorted(((float(s[i]), f"{n}[{i}]") for n, s, i in above), reverse=True)
    value = max(float(s.max()) for s in scores.values())
    worst = tuple(name for _, name in rows[:WORST])
    return Answer(rule, value, len(rows), worst, unasked=unasked)


def _extra(received: State, agreed: Agreed, last: LastRound | None) -> Answer:
    """Return which tensors have names or shapes that were never agreed."""
    shapes = agreed.shapes
    if shapes is None and last is not None:
        shapes = {n: t.shape for n, t in last.received.items()}
    if shapes is None:
        return Answer("extra", why="it is not known what was agreed to be sent")
    names = [n for n, t in received.items() if shapes.get(n) != t.shape]
    return Answer("extra", float(len(names)), len(names), tuple(names[:WORST]))


def _start(received: State, adapters: list[Adapter], agreed: Agreed, first: bool) -> Answer:
    """Return what differs from the start that the agreed config makes, of any seed or a shared one.

    Rows that nobody has trained are independent, whatever the seed.
    """
    if not first:
        return Answer("start", why="this is not the first round")
    start = agreed.start
    scores = {a.name: shared_direction(a.down, (start or {}).get(a.name)) for a in adapters}
    if start is None:
        start = {a.partner: torch.zeros_like(a.up) for a in adapters if a.bias is None}
    for name, tensor in start.items():
        if name in received and (agreed.shared_seed or not tensor.any()):
            values = received[name]
            near = 4 * torch.finfo(values.dtype).eps * float(tensor.abs().max())  # rounding
            error = (values.double() - tensor.cpu().double()).abs().reshape(len(values), -1).amax(1)
            scores[name] = torch.where(error > near, error, 0.0)
    why = "nothing of the agreed start is known to be zero: give it, best of a shared seed"
    zeros = [a.partner if a.bias is None else _bias_of(a.name) for a in adapters]
    names = start if agreed.shared_seed else zeros
    return _judge("start", scores, why, names)


def _equal(state: State, partners: Collection[str]) -> Answer:
    """Return which rows are equal of matrices with a bias, a ladder say of the FC-based adversary.

    The second matrices of adapters are left out: after few steps of Adam from zero their rows are
    alike.
    """
    scores, names = {}, []
    for name, rows in state.items():
        bias = state.get(_bias_of(name))
        if name in partners or rows.dim() != 2 or bias is None or not name.endswith("weight"):
            continue
        if bias.shape in (rows.shape[:1], rows.shape[1:]):
            rows = rows if bias.shape == rows.shape[:1] else rows.T  # of transformers' Conv1D
            names.append(name)
            if len(rows) <= MOST_ROWS and rows.shape[1] >= 16:
                scores[name] = equal_rows(rows)
    why = "matrices are too large, or narrow" if names else "no matrix with a bias was received"
    return _judge("equal_rows", scores, why, names)


def _blind(bottlenecks: list[Adapter], agreed: Agreed) -> Answer:
    """Return which rows of bottlenecks see nothing of the usual words."""
    scores = {
        a.name: blind_rows(a.down, agreed.usual[a.name])
        for a in bottlenecks
        if a.name in agreed.usual
    }
    why = "no text was given to run" if bottlenecks else "no bottleneck adapter was received"
    return _judge("blind_rows", scores, why, (a.name for a in bottlenecks))


def _rewritten(loras: list[Adapter], agreed: Agreed) -> tuple[list[Answer], tuple[str, ...]]:
    """Return the answers of the rules for LoRAs, and which of these outgrew the base as a whole."""
    replaced, few, cancelled, outgrown = {}, {}, {}, []
    for lora in loras:
        if lora.name not in agreed.base or lora.name not in agreed.scales:
            continue
        change = _since_start(lora, agreed.start or {})
        ratio, part = rewritten_rows(change, agreed.base[lora.name], agreed.scales[lora.name])
        cancelled[lora.name] = part
        norms = product_norms(change)
        steps = (norms / norms.median().clamp(min=1e-12)).clamp(min=1.0).log()
        if float(ratio.median()) > DIVERGED:
            outgrown.append(lora.name)
        replaced[lora.name] = ratio
        few[lora.name] = torch.where(ratio > DIVERGED, steps, 0.0)
    why = agreed.unknown if loras else "no LoRA was received"
    if outgrown:
        why = "the adapter has outgrown its base as a whole, as in a run that diverged"
        replaced, few = {}, {}
    scores: dict[Rule, dict[str, Tensor]]
    scores = {"replaced": replaced, "few_rows": few, "cancelled": cancelled}
    names = [lora.name for lora in loras]
    return [_judge(rule, rows, why, names) for rule, rows in scores.items()], tuple(outgrown)


def _since_start(lora: Adapter, start: State) -> Adapter:
    """Return a LoRA whose product is the change of B A since the agreed start."""
    down, up = start.get(lora.name), start.get(lora.partner)
    if down is None or up is None or not up.any():
        return lora
    return Adapter(
        lora.name,
        lora.partner,
        torch.cat([lora.down, down.to(lora.down)]),
        torch.cat([lora.up, -up.to(lora.up)], 1),
    )


def _changes(adapters: list[Adapter], last: LastRound) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what changed in each adapter's rows since the round before, and one's own change.

    A row's bias, which says whether it fires at all, counts as one more of its numbers.

    An adapter whose rows had no gradient for this client is left out: they moved by decay alone,
    and other clients may have moved them far.
    """
    pairs = {}
    step = max((float(t.float().square().mean().sqrt()) for t in last.update.values()), default=0)
    for a in adapters:
        before, update = last.received.get(a.name), last.update.get(a.name)
        if before is None or update is None or before.shape != a.down.shape:
            continue
        if a.bias is None and not last.received[a.partner].any():
            continue  # while B is zero, A gets next to no gradient
        update = update.detach().cpu().float()
        sizes = update.norm(dim=1)
        if sizes.median() > 0 and sizes.max() >= ALIVE * step * update.shape[1] ** 0.5:
            change = a.down - before.detach().cpu().float()
            bias = _bias_of(a.name)
            if a.bias is not None and bias in last.received and bias in last.update:
                bias_change = a.bias - last.received[bias].detach().cpu().float()
                change = torch.cat([change, bias_change[:, None]], dim=1)
                bias_update = last.update[bias].detach().cpu().float()
                update = torch.cat([update, bias_update[:, None]], dim=1)
            pairs[a.name] = (change, update)
    return pairs


def _jump(adapters: list[Adapter], last: LastRound | None) -> tuple[Answer, tuple[str, ...]]:
    """Return which rows one's own last update does not explain, and what grew as a whole."""
    names = [a.name for a in adapters]
    if last is None:
        return Answer("jump", why="the round before is not known"), ()
    pairs = _changes(adapters, last)
    why = "the client's own last update hardly moved the rows of any adapter"
    if not pairs:
        return Answer("jump", why=why, unasked=tuple(names)), ()
    sizes = [c.norm(dim=1) / u.norm(dim=1).clamp(min=1e-12) for c, u in pairs.values()]
    growth = max(float(torch.cat(sizes).median()), 1.0)
    if growth > MOST_GROWTH:
        why = f"the rows changed {growth:.3g} times as much as this client's own, at the median"
        return Answer("jump", why=why, unasked=tuple(names)), tuple(pairs)
    scores = {n: jumps(c, u, growth) for n, (c, u) in pairs.items()}
    return _judge("jump", scores, why, names), ()

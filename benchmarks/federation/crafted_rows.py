"""Values that a dishonest server gives an adapter, so that each of its rows fires for few types.

The server chooses numbers only: the modules are those that the client agreed to train. A row of a
bottleneck's first map, behind which a ReLU stands, is set to fire for about ``kappa`` of the types
that a round holds. The gradient of a row that fires is a combination of the inputs it fires for,
and Adam leaves a row that never fires where it was. Privacy backdoors (Feng and Tramer, arXiv
2404.00473) and NeuroImprint (arXiv 2606.20553) trap whole texts so; here rows trap types, which
more of a round's texts share.

Nothing here changes a model: values are returned by name, and rounds are played on copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks import PublicText, row_space
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import TOKENS_AT_ONCE

UNSEEN = 0.02  # occurrences that a type without any in the public text counts as; not tuned
MIN_PRESENCE = 1e-3  # chance to be in a round from which a type is worth a row; not tuned
SWEEPS = 8  # of the clustering; more change few types, not tuned
_PRICE = 0.05  # change of a full cluster's price in a sweep; larger balances more, not tuned
_RIDGE = 1e-2  # share of the mean eigenvalue that is added before rows are solved; not tuned
_LENGTH = 64  # tokens of a public text whose inputs are averaged; not tuned
_SAME = 1e-5  # relative difference up to which two float32 inputs are equal; not tuned
PARTS = "down.weight", "down.bias", "up.weight", "up.bias"
_UP_STD = 0.01  # standard deviation of the second map, where the adapter's own is 0: Houlsby's


@dataclass(frozen=True)
class RowSettings:
    """How rows are dealt out.

    Attributes:
        kappa: types of a round that a row fires for, on average.
        frequent: most frequent types that no row may fire for; at most half of the width is used.
        row_norm: norm of a row; None keeps the median of the adapter's own rows.
        seed: of the clusters' first centres.
    """

    kappa: float = 3.0
    frequent: int = 150
    row_norm: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class CraftedRows:
    """Rows that each fire for few types.

    Attributes:
        parameter: name of the matrix (r, d) whose rows change.
        inputs: (V, d) what the matrix reads at a type, on average where the text around matters.
        exact: whether the type alone determines it.
        readable: (V,) bool, the types whose input is known.
        directions: (r, d) rows of norm 1.
        thresholds: (r,) a row fires for inputs whose product with its direction is larger.
        presence: (V,) chance that a type is in a round.
    """

    parameter: str
    inputs: Tensor
    exact: bool
    readable: Tensor
    directions: Tensor
    thresholds: Tensor
    presence: Tensor


@dataclass(frozen=True)
class CraftedValues:
    """What a dishonest server sends in place of an adapter's values.

    Attributes:
        adapter: name of the adapter in ``anatomy.root``.
        tensors: new values by parameter name.
        rows: what they are made for.
    """

    adapter: str
    tensors: Mapping[str, Tensor]
    rows: CraftedRows


def craft(
    anatomy: Anatomy,
    adapter: str,
    public: PublicText,
    tokens_per_round: int,
    *,
    settings: RowSettings = RowSettings(),
) -> CraftedValues:
    """Return values for an adapter with which its update shows the types of a round.

    The model is run on public text, and not changed.

    Args:
        anatomy: of the model.
        adapter: path in ``anatomy.root`` of a bottleneck: two linear maps with biases, ``down``
            and ``up``, and a ReLU between.
        public: text like the clients'.
        tokens_per_round: number of tokens that a client reads in a round.
        settings: how rows are dealt out.
    """
    weight = f"{adapter}.down.weight"
    reads = next(m for m in row_space.find_linear_maps(anatomy) if m.name == weight)
    inputs, readable, exact = type_inputs(anatomy, reads, public)
    presence = chance_in_round(public, tokens_per_round, len(inputs)).to(inputs.device)
    worth = torch.where(readable, presence, 0.0)
    directions, thresholds = deal_rows(inputs, worth, presence, reads.rows, settings)
    rows = CraftedRows(weight, inputs, exact, readable, directions, thresholds, presence)
    parts = {name: anatomy.root.get_parameter(f"{adapter}.{name}").detach() for name in PARTS}
    norm = settings.row_norm or float(parts["down.weight"].float().norm(dim=1).median())
    generator = torch.Generator().manual_seed(settings.seed)
    spread = float(parts["up.weight"].float().std()) or _UP_STD
    noise = torch.randn(parts["up.weight"].shape, generator=generator) * spread
    made = (norm * directions, -norm * thresholds, noise, torch.zeros_like(parts["up.bias"]))
    tensors = {
        f"{adapter}.{name}": one.to(parts[name]) for name, one in zip(PARTS, made, strict=True)
    }
    return CraftedValues(adapter, tensors, rows)


# ---- which types a row fires for ------------------------------------------------------------


def chance_in_round(public: PublicText, tokens: int, types: int) -> Tensor:
    """Return (V,) the chance that a type is in a round of so many tokens, float32.

    Tokens count as independent. A type that the public text lacks counts :data:`UNSEEN` times.
    """
    counts = torch.bincount(torch.cat(public.sentences), minlength=types).double() + UNSEEN
    return -torch.expm1(tokens * torch.log1p(-counts / counts.sum())).float()


def deal_rows(
    inputs: Tensor, worth: Tensor, presence: Tensor, rows: int, settings: RowSettings
) -> tuple[Tensor, Tensor]:
    """Return directions (r, d) of norm 1 and thresholds (r,), each for a cluster of types.

    The span of the most frequent types is projected out, so that no row fires for them. The others
    are clustered by direction, with a price on full clusters; least squares on each cluster's
    indicator sharpens its row against all other types. The threshold lets so many types pass that
    ``kappa`` of them are expected in a round.

    Args:
        inputs: (V, d) of each type.
        worth: (V,) of a type, 0 where its input is not known.
        presence: (V,) chance that a type is in a round.
        rows: r.
        settings: how they are dealt out.

    Raises:
        ValueError: fewer types than rows are worth one.
    """
    width = inputs.shape[1]
    top = presence.topk(min(settings.frequent, width // 2)).indices
    span = torch.linalg.qr(inputs[top].T).Q
    worth = worth.index_fill(0, top, 0.0)
    used = (worth > MIN_PRESENCE).nonzero()[:, 0]
    if len(used) < rows:
        raise ValueError(
            f"{rows} rows need as many types that a round may hold, and the public text has "
            f"{len(used)} beside the most frequent ones: give more public text"
        )
    rest, weight = inputs[used] - (inputs[used] @ span) @ span.T, worth[used]
    units = F.normalize(rest, dim=1)
    generator = torch.Generator().manual_seed(settings.seed)
    centres = units[torch.multinomial(weight.cpu(), rows, generator=generator).to(units.device)]
    prices = weight.new_zeros(rows)
    for _ in range(SWEEPS):
        cluster = (units @ centres.T - prices).argmax(1)
        load = weight.new_zeros(rows).index_add_(0, cluster, weight)
        prices += _PRICE * (load / load.mean() - 1).clamp(-1, 2)
        sums = torch.zeros_like(centres).index_add_(0, cluster, weight[:, None] * units)
        centres = F.normalize(sums + 1e-6 * centres, dim=1)  # an empty cluster stays where it was
    weighted = (weight + UNSEEN)[:, None] * rest
    gram = weighted.T @ rest
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(width, device=gram.device)
    sums = torch.zeros_like(centres).index_add_(0, cluster, weighted)
    directions = torch.linalg.solve(gram, sums.T).T
    directions = F.normalize(directions - (directions @ span) @ span.T, dim=1)
    products, order = (inputs @ directions.T).sort(dim=0, descending=True)
    passed = (worth[order].cumsum(0) <= settings.kappa).sum(0).clamp(1, len(inputs) - 1)
    cuts = products.gather(0, torch.stack([passed - 1, passed])).mean(0)
    return directions, cuts.clamp(min=MIN_PRESENCE * float(rest.norm(dim=1).mean()))


def type_inputs(
    anatomy: Anatomy, reads: row_space.LinearMap, public: PublicText
) -> tuple[Tensor, Tensor, bool]:
    """Return what a map reads at each type (V, d), where that is known (V,), and if it is exact.

    It is exact where the type alone determines it: the same in a text that is read backwards. Else
    it is the mean over the public text, and known of the types that occur there.
    """
    types, width = row_space.vocabulary_size(anatomy), _width(anatomy, reads)
    shared = [row_space.SharedInput((reads,), width)]
    longest = max(public.sentences, key=len)[None, :_LENGTH]
    forwards, backwards = (
        row_space.input_states(anatomy, shared, ids)[0] for ids in (longest, longest.flip(1))
    )
    if float((forwards - backwards.flip(1)).abs().max()) <= _SAME * float(forwards.abs().max()):
        length = min(longest.shape[1], types)
        ids = torch.arange(-(-types // length) * length).clamp(max=types - 1).view(-1, length)
        parts = [row_space.input_states(anatomy, shared, rows)[0] for rows in _runs(ids)]
        states = torch.cat(parts).reshape(-1, width)[:types]
        return states, torch.ones(types, dtype=torch.bool, device=states.device), True
    sums = torch.zeros(types, width, device=forwards.device)
    counts = torch.zeros(types, device=forwards.device)
    batch = public.rows(range(len(public)), _LENGTH, torch.Generator())
    assert batch.attention_mask is not None
    for ids, mask in zip(_runs(batch.input_ids), _runs(batch.attention_mask), strict=True):
        real = mask.bool()
        states = row_space.input_states(anatomy, shared, ids, mask)[0][real.to(sums.device)]
        tokens = ids[real].to(sums.device)
        sums.index_add_(0, tokens, states)
        counts += torch.bincount(tokens, minlength=types)
    return sums / counts.clamp(min=1)[:, None], counts > 0, False


def _runs(ids: Tensor) -> tuple[Tensor, ...]:
    return torch.split(ids, max(1, TOKENS_AT_ONCE // ids.shape[1]))


def _width(anatomy: Anatomy, reads: row_space.LinearMap) -> int:
    return anatomy.root.get_parameter(reads.name).shape[reads.axis]

"""Is this text in the batch, asked by a server that adds nothing: the test of shared row spaces.

What a member's hidden states are combined to in the shared rows of every block, another text's are
not. ProjRes (arXiv 2604.21197) measures how far a candidate's hidden states lie from the row space
of a whole gradient. Under LoRA the row space is far smaller than a batch, so that no state lies in
it. Then two things tell: whether the candidate's tokens are among those that the first block's rows
give away (:class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`), and how much more of
deeper blocks' rows its states explain than of the first's, where their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import (
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.local_steps import check_fresh
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership, reach
from lightning_fedleak.attacks.membership.gradients import whitening
from lightning_fedleak.attacks.public_text import Given
from lightning_fedleak.attacks.row_space.dictionary import factor_rows, orthonormal
from lightning_fedleak.attacks.row_space.linear_maps import (
    SharedInput,
    block_name,
    find_linear_maps,
    find_shared_inputs,
    input_states,
)
from lightning_fedleak.attacks.row_space.pursuit import SharedRows
from lightning_fedleak.attacks.words.subspace import NO_GRADIENT_YET, SubspaceWords
from lightning_fedleak.snapshots import (
    NotYet,
    Observation,
    UpdateSnapshot,
    explain_weight_term,
    whole_tensor,
)
from lightning_fedleak.threats import ThreatModelError

_SMALLEST_PIVOT = 1e-2
_SMALLEST_GAIN = 1e-2
_MARGIN = 20
_ABSENT = 10.0
_CLOSEST = 1e-10
_DEPTHS = (0.4, 0.95)
_OF_FIRST = 0.5


class SubspaceMembership(PassiveMembership):
    """Whether candidates' hidden states explain the shared rows of all blocks.

    Args:
        public_text: text like the clients', or ``"sampled"``, for what any text explains.
        tokenizer: for strings.
        blocks: that are read at most: the first two, and others from the middle on.
        public_rows: public texts.
        tokens: of a text that are read at most.
        refresh_every: steps after which :meth:`refresh` runs the model on public text anew.
        seed: of sampled text.
        name: as in the logs.

    Raises:
        ValueError: a number out of range, or no public text.
    """

    default_name = "subspace_membership"
    needs_float64 = True
    removes_loss_terms = True

    def __init__(
        self,
        public_text: Given = "sampled",
        *,
        tokenizer: Any = None,
        blocks: int = 12,
        public_rows: int = 24,
        tokens: int = 64,
        refresh_every: int = 500,
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
        if isinstance(blocks, bool) or blocks < 1:
            raise ValueError(f"blocks must be an integer of at least 1, got {blocks}")
        self.blocks = blocks
        self._words = SubspaceWords(capacity_seconds=0)
        self._facts = RunFacts()
        self._inputs: tuple[Anatomy, tuple[SharedInput, ...]] | None = None
        self._whitening: list[Tensor] = []
        self._others: tuple[Tensor, Tensor, list[Tensor]] | None = None
        self._factors: dict[str, Tensor] = {}
        self._prepared_at = 0

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision, and what made an update."""
        self._facts = facts
        self._words.meet(facts)

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The maps of a block that read what its attention reads, of some blocks.

        Raises:
            ThreatModelError: the model has no linear map that is called once.
        """
        words = self._words.needs(anatomy).gradients
        inputs = self._read(anatomy)
        own = [m.name for i in inputs for m in _trained(i, anatomy)]
        if not own:
            return Surfaces(gradients=tuple(m.name for m in inputs[0].maps if m.factor != "B"))
        of_words = [name for name in words if anatomy.trainable(name)]
        return Surfaces(gradients=tuple(dict.fromkeys([*of_words, *own])))

    def _read(self, anatomy: Anatomy) -> tuple[SharedInput, ...]:
        """The inputs that are read: of those with trained readers, if there are any."""
        if self._inputs is None or self._inputs[0] is not anatomy:
            found = find_shared_inputs(
                anatomy, [m for m in find_linear_maps(anatomy) if m.factor != "B"]
            )
            wide = tuple(i for i in found if i.width == anatomy.hidden_size)
            if not wide:
                raise ThreatModelError(
                    f"attack '{self.name}' reads linear maps of hidden states, and this model has "
                    "none that is called once: remove the attack"
                )
            self._inputs = (anatomy, wide)
        trained = [i for i in self._inputs[1] if _trained(i, anatomy)]
        inputs = _first_of_each_block(trained or list(self._inputs[1]))
        first, deep = inputs[: _early(len(inputs))], inputs[_early(len(inputs)) :]
        wanted = max(1, self.blocks - len(first))
        if len(deep) > wanted:
            ends = [share * (len(inputs) - 1) - len(first) for share in _DEPTHS]
            places = torch.linspace(max(0.0, ends[0]), ends[1], wanted).round()
            deep = [deep[int(i)] for i in dict.fromkeys(places.tolist())]
        return (*first, *deep)

    def prepare(self, anatomy: Anatomy) -> None:
        """Runs the model on public text, and on every token up to the first projections."""
        self._words.prepare(anatomy)
        self._prepare_public(anatomy)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Follows the model: the first input at every look, public text now and then."""
        self._words.refresh(anatomy, step)
        if not 0 <= step - self._prepared_at < self.refresh_every or not self._whitening:
            self._prepared_at = step
            self._prepare_public(anatomy)
        self._follow(anatomy)

    def _follow(self, anatomy: Anatomy) -> None:
        """Keeps a copy of the factors A as they are now, which a term of the loss may share."""
        read = [m for known in self._read(anatomy) for m in _trained(known, anatomy)]
        self._factors = factor_rows(anatomy, read)
        self._round_starts(anatomy, self._facts)
        self._anatomy = anatomy

    def _prepare_public(self, anatomy: Anatomy) -> None:
        public = self._texts(anatomy, self.public_rows)
        ids, mask = public.input_ids, public.attention_mask
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask > 0
        states = input_states(anatomy, self._read(anatomy), ids, real.long())
        flat = (x[real.to(x.device)].double() for x in states)
        self._whitening = [whitening(x.T @ x / len(x)) for x in flat]
        self._others = (ids, real, states)
        self._follow(anatomy)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> MembershipGuess:
        """Scores every text of the query, and public texts beside them.

        Returns:
            ``members`` are texts that score above all public ones (had these no absent tokens,
            where the tokens of the batch are certain).

        Raises:
            UnusableObservation: non-finite or zero gradients.
            ValueError: no query.
            RuntimeError: ``prepare`` was not called.
        """
        if query is None:
            raise ValueError(f"attack '{self.name}' asks about texts: give a query")
        if self._others is None:
            raise RuntimeError(f"attack '{self.name}' has no calibration: call prepare(anatomy)")
        anatomy = self._anatomy
        check_fresh(self._facts, view.gradients[-1])
        update = isinstance(view.gradients[-1], UpdateSnapshot)
        if update and self._facts.optimizer_settings.get("weight_decay"):
            raise UnusableObservation(
                "the weight decay of a round is not taken off what is shared; GradientMembership "
                "does"
            )
        inputs = self._read(anatomy)
        own = [self._own_rows(i, anatomy, view) for i in inputs]
        shared = [self._rows(i, anatomy, view, basis) for i, basis in zip(inputs, own, strict=True)]
        if all(rows is None for rows in shared):
            if any(m.factor == "A" for i in inputs for m in _trained(i, anatomy)):
                raise NotYet(NO_GRADIENT_YET)
            raise UnusableObservation("every gradient that is read is zero")
        words = self._bag(view)
        ids, mask = query.input_ids, query.attention_mask
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask > 0
        cut = reach(real, self.tokens)
        ids, real = ids[:, :cut], real[:, :cut]
        with self._at_start():
            states = input_states(anatomy, inputs, ids, None if mask is None else real.long())
        causal = anatomy.kind == "causal"
        public_ids, public_real, public_states = self._others
        asked, other = (
            _evidence(
                shared,
                self._whitening,
                [_outside(x, basis) for x, basis in zip(inputs_of_texts, own, strict=True)],
                _counted(tokens, causal=causal),
                text,
                words,
            )
            for inputs_of_texts, tokens, text in (
                (states, real, ids),
                (public_states, public_real, public_ids),
            )
        )
        scores, others = _scores(asked, other), _scores(other, other)
        if words is not None and words.certified:
            # Absent tokens rule a text out; what is left must tell it from public text.
            others = others + other[:, 3]
        return MembershipGuess(scores=scores.cpu(), members=(scores > others.max()).cpu())

    def _bag(self, view: Observation) -> WordGuess | None:
        try:
            return self._words.run(view)
        except UnusableObservation:
            return None

    def _own_rows(self, known: SharedInput, anatomy: Anatomy, view: Observation) -> Tensor:
        """Return a basis (k, d) of what terms of the loss add to the gradients of A's.

        Raises:
            UnusableObservation: a term is of a whole matrix.
        """
        basis = [torch.zeros(0, known.width, dtype=torch.float64, device=anatomy.device)]
        for linear in _trained(known, anatomy):
            if linear.regularised or linear.name in view.gradients[-1].loss_terms:
                if linear.name not in self._factors:
                    raise UnusableObservation(explain_weight_term(linear.name))
                basis.append(self._factors[linear.name])
        return orthonormal(torch.cat(basis))

    def _rows(
        self, known: SharedInput, anatomy: Anatomy, view: Observation, beside: Tensor
    ) -> SharedRows | None:
        """What the trained readers of an input shared; None where that is all zero."""
        gradients = []
        for linear in _trained(known, anatomy):
            g = whole_tensor(view.gradient(linear.name))
            if not bool(g.isfinite().all()):
                raise UnusableObservation(f"the gradient of {linear.name} has NaN or infinity")
            if bool(g.any()):
                gradients.append(g if linear.axis == 1 else g.T)
        if not gradients:
            return None
        noise = [view.gradients[-1].noise_std] * len(gradients)
        dtypes = [*(g.dtype for g in gradients), self._facts.autocast or torch.float32]
        rounding = max(torch.finfo(d).eps for d in dtypes)
        rows = SharedRows.stack(gradients, beside, rounding=rounding, noise=noise)
        return None if len(beside) and rows.silent else rows

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        return super().config() | {"blocks": self.blocks}


def _trained(known: SharedInput, anatomy: Anatomy) -> list[Any]:
    return [m for m in known.maps if m.factor != "B" and anatomy.trainable(m.name)]


def _outside(states: Tensor, basis: Tensor) -> Tensor:
    """Return states (G, L, d) less their part in the span of orthonormal rows (k, d)."""
    basis = basis.to(states)
    return states - (states @ basis.T) @ basis


def _first_of_each_block(inputs: Sequence[SharedInput]) -> list[SharedInput]:
    blocks: dict[str, SharedInput] = {}
    for known in inputs:
        blocks.setdefault(block_name(known.maps[0].name), known)
    return list(blocks.values())


def _early(inputs: int) -> int:
    """How many of the inputs are the first blocks', where order hardly matters."""
    return 2 if inputs > 3 else 1


def _counted(real: Tensor, *, causal: bool) -> Tensor:
    """(G, L) positions that have a part in gradients: not a causal text's last."""
    if not causal:
        return real
    behind = real.flip(1).cumsum(1).flip(1) - real.long()
    return real & (behind > 0)


def _evidence(
    shared: Sequence[SharedRows | None],
    whitening: Sequence[Tensor],
    states: Sequence[Tensor],
    counted: Tensor,
    ids: Tensor,
    words: WordGuess | None,
) -> Tensor:
    """(G, 4) for texts: explained in the first block, deeper, nearness to spans, absent tokens."""
    device = states[0].device
    counted = counted.to(device)
    first, deep, near = (torch.zeros(len(ids), device=device) for _ in range(3))
    early = _early(len(states))
    begun = blocks = close = 0
    for number, (rows, white, x) in enumerate(zip(shared, whitening, states, strict=True)):
        if rows is None:
            continue
        gain = _log_gain(rows, white, x, counted)
        if number < early:
            first, begun = first + gain, begun + 1
            continue
        deep, blocks = deep + gain, blocks + 1
        if len(rows.principal) < x.shape[-1] - _MARGIN:
            near, close = near + _nearness(rows, x, counted), close + 1
    absent = torch.zeros(len(ids), device=device)
    if words is not None:
        held = torch.isin(ids.to(device), words.types.to(device))
        total = counted.sum(1).clamp_min(1)
        absent = (~held & counted).sum(1) / total
        if words.certified:
            absent = _ABSENT * ((absent > 0).float() + absent)
    first = first / max(1, begun)
    deep = deep / blocks if blocks else first
    return torch.stack([first, deep, near / max(1, close), absent], 1)


def _scores(asked: Tensor, public: Tensor) -> Tensor:
    """(G,) one score of the evidence: explained beyond public text, less what is absent."""
    level = public[:, :2].mean(0)
    first, deep = (asked[:, :2] - level).unbind(1)
    return deep - _OF_FIRST * first + asked[:, 2] - asked[:, 3]


def _log_gain(rows: SharedRows, white: Tensor, x: Tensor, counted: Tensor) -> Tensor:
    """(G,) mean logarithm of what a token's state explains of the rows beyond those before it."""
    g = rows.whole.float() @ white
    g = g / g.norm()
    x = (x @ white).masked_fill(~counted[..., None], 0.0)
    gram = x @ x.mT
    size = gram.diagonal(dim1=-2, dim2=-1)
    jitter = 1e-4 * size.mean(-1, keepdim=True) + (~counted).float()
    lower = torch.linalg.cholesky(gram + torch.diag_embed(jitter))
    part = torch.linalg.solve_triangular(lower, x @ g.T, upper=False)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square() / size.clamp_min(1e-30)
    used = counted & (pivots > _SMALLEST_PIVOT)
    gain = (part.square().sum(-1) * g.shape[1]).clamp_min(_SMALLEST_GAIN).log()
    mean: Tensor = gain.masked_fill(~used, 0.0).sum(-1) / used.sum(-1).clamp_min(1)
    return mean


def _nearness(rows: SharedRows, x: Tensor, counted: Tensor) -> Tensor:
    """(G,) mean of minus the logarithm of a state's distance from the span of the rows."""
    basis = orthonormal(rows.principal).to(x.device)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    left = (1 - (unit @ basis.T).square().sum(-1)).clamp(_CLOSEST, 1.0)
    return (-left.log10() * counted).sum(-1).float() / counted.sum(-1).clamp_min(1)

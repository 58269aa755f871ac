"""A passive membership attack on row spaces: how much of the shared rows a text's states explain.

The shared rows of every block are combinations of the hidden states of members only.
ProjRes (arXiv 2604.21197) measures how far a candidate's hidden states lie from the row space of a
whole gradient. Under LoRA the row space is far smaller than a batch, so no state lies in it. Then
two quantities distinguish members: whether the candidate's tokens are among those that the first
block's rows reveal (:class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`), and how much
more its states explain of deeper blocks' rows than of the first block's, where order has no effect.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import row_space
from lightning_fedleak.attacks.base import Query, RunFacts, Surfaces, UnusableObservation, WordGuess
from lightning_fedleak.attacks.local_steps import check_fresh
from lightning_fedleak.attacks.membership.base import MembershipGuess, PassiveMembership, reach
from lightning_fedleak.attacks.public_text import TextSource
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import before_last
from lightning_fedleak.model.snapshots import Observation, UpdateSnapshot
from lightning_fedleak.progress import measure_seconds

# None of these was tuned.
MIN_PIVOT = 1e-2  # a state is skipped if its squared share outside earlier ones is smaller
MIN_GAIN = 1e-2  # lower bound of a gain, relative to that of a random state
FREE_DIMENSIONS = 20  # min. dimensions outside of the rows' span, for distances to be used
ABSENT_WEIGHT = 10.0  # subtracted from a text's score if a token is certainly absent
MIN_DISTANCE = 1e-10  # lower bound of a unit state's squared distance, for rounding
DEEP_SHARES = (0.4, 0.95)  # range of relative depths of the deeper blocks that are used
_TIMED_TEXTS = 2  # public texts of a time estimate
BLOCKS = 12  # max. number of blocks that are used: the first two, and deeper ones
FIRST_BLOCK_WEIGHT = 0.5  # weight of the first blocks' gain, subtracted from the deeper gain


class SubspaceMembership(PassiveMembership):
    """Score how much of the shared rows of all blocks a text's hidden states explain.

    Args:
        public_text: Text like the clients', or ``"sampled"`` for text that the model writes. It
            shows how much a non-member explains.
        shared: ``tokenizer``, ``public_rows``, ``tokens``, ``seed`` and ``name``, as in
            :class:`~lightning_fedleak.attacks.PassiveMembership`.

    Raises:
        ValueError: a number out of range, or no public text.

    Examples:
        >>> from lightning_fedleak.attacks import SubspaceMembership
        >>> attack = SubspaceMembership(public_rows=16)
        >>> attack.config()["public_rows"]
        16
    """

    default_name = "subspace_membership"
    second_to = "gradient_membership"
    needs_float64 = True  # for spans of rows
    refresh_every = 500  # steps after which public text is run again; not tuned

    def __init__(self, public_text: TextSource = "sampled", **shared: Any) -> None:
        super().__init__(public_text, **shared)
        self._words = SubspaceWords(capacity_seconds=0)
        self._wide_inputs = row_space.PerMaps(row_space.find_shared_inputs)
        self._public_inputs: tuple[row_space.SharedInput, ...] = ()
        self._whitenings: list[Tensor] = []  # (d, d) of each input
        # Token ids (n, L), the mask of real tokens (n, L), and the states (n, L, d) of each input.
        self._public_states: tuple[Tensor, Tensor, list[Tensor]] | None = None
        self._factors: dict[str, Tensor] = {}  # AdaLoRA's A, by name

    def meet(self, facts: RunFacts) -> None:
        """Store the run's precision and optimizer, also for the attack on words."""
        super().meet(facts)
        self._words.meet(facts)

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return the maps of some blocks that share the input of the block's attention.

        Raises:
            ValueError: the model has no linear map that is called once.
        """
        words = self._words.needs(anatomy).gradients
        inputs = self._select_inputs(anatomy)
        names = [m.name for i in inputs for m in i.trainable_maps(anatomy)]
        if not names:
            return Surfaces(gradients=tuple(m.name for m in inputs[0].maps))
        word_names = [name for name in words if anatomy.trainable(name)]
        return Surfaces(gradients=tuple(dict.fromkeys([*word_names, *names])))

    def _select_inputs(self, anatomy: Anatomy) -> tuple[row_space.SharedInput, ...]:
        """Return the inputs that are used: those with trained maps, if there are any."""
        wide = self._wide_inputs.get(anatomy)
        if not wide:
            raise ValueError(f"attack '{self.name}' finds no linear map to read: remove it")
        trained = [i for i in wide if i.trainable_maps(anatomy)]
        inputs = [*row_space.first_in_blocks(trained or wide).values()]
        first, deep = inputs[: _early_blocks(len(inputs))], inputs[_early_blocks(len(inputs)) :]
        deep_blocks = max(1, BLOCKS - len(first))
        if len(deep) > deep_blocks:
            ends = [share * (len(inputs) - 1) - len(first) for share in DEEP_SHARES]
            places = torch.linspace(max(0.0, ends[0]), ends[1], deep_blocks).round()
            deep = [deep[int(i)] for i in dict.fromkeys(places.tolist())]
        return (*first, *deep)

    def estimate(self, anatomy: Anatomy, texts: int) -> float:
        """Return the seconds of a measurement step: the words' estimate, and timed states."""
        inputs = self._select_inputs(anatomy)
        ids = self._trial_texts(anatomy, _TIMED_TEXTS).input_ids
        run = partial(row_space.input_states, anatomy, inputs, ids)
        states = measure_seconds(run, anatomy.device) / _TIMED_TEXTS * texts
        return self._words.estimate(anatomy, texts) + states

    def prepare(self, anatomy: Anatomy) -> None:
        """Run the model on public text, and on every token up to the first projections."""
        self._words.prepare(anatomy)
        self._prepare_public(anatomy)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Update the words at every step, and the states of public text when they are too old."""
        self._words.refresh(anatomy, step)
        changed = self._public_inputs != self._select_inputs(anatomy)
        if changed or not 0 <= step - self._prepared_at < self.refresh_every:
            self._prepared_at = step
            self._prepare_public(anatomy)
        self._copy_weights(anatomy)

    def _copy_weights(self, anatomy: Anatomy) -> None:
        """Store copies of AdaLoRA's factors A, which its regularisation adds to the gradient."""
        inputs = self._select_inputs(anatomy)
        readers = [m for i in inputs for m in i.trainable_maps(anatomy)]
        self._factors = row_space.factor_rows(anatomy, readers)
        self._round_starts(anatomy)
        self._anatomy = anatomy

    def _prepare_public(self, anatomy: Anatomy) -> None:
        """Run the model on public text; store its states and their whitening."""
        public = self._texts(anatomy, self.public_rows)
        ids, mask = public.input_ids, public.attention_mask
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask > 0
        self._public_inputs = self._select_inputs(anatomy)
        states = row_space.input_states(anatomy, self._public_inputs, ids, real.long())
        flat = (x[real.to(x.device)].double() for x in states)
        self._whitenings = [row_space.whitening_matrix(x.T @ x / len(x)) for x in flat]
        self._public_states = (ids, real, states)
        self._copy_weights(anatomy)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> MembershipGuess:
        """Score every text of the query, and public texts as controls.

        Returns:
            The scores; ``members`` are texts that score above all public ones. If the tokens of the
            batch are certain, the absent tokens of public texts are ignored for this.

        Raises:
            UnusableObservation: The gradients are not finite, or all are zero.
        """
        assert query is not None
        assert self._public_states is not None
        anatomy = self._anatomy
        check_fresh(self._facts, view.gradients[-1])
        update = isinstance(view.gradients[-1], UpdateSnapshot)
        if update and self._facts.optimizer_settings.get("weight_decay"):
            raise UnusableObservation("it subtracts no weight decay; GradientMembership does")
        inputs = self._select_inputs(anatomy)
        bases = [self._loss_term_rows(i, anatomy) for i in inputs]
        shared = [self._rows(i, anatomy, view, b) for i, b in zip(inputs, bases, strict=True)]
        if all(rows is None for rows in shared):
            row_space.refuse_zeros(m for i in inputs for m in i.trainable_maps(anatomy))
        # Without an answer of the attack on words, no token counts as absent.
        words: WordGuess | None = None
        with suppress(UnusableObservation):
            if view.gradients[-1].compression in ("", *self._words.reads_compressed):
                words = self._words.run(view)
        ids, mask = query.input_ids, query.attention_mask
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask > 0
        cut = reach(real, self.tokens)
        ids, real = ids[:, :cut], real[:, :cut]
        with self._at_start():
            states = row_space.input_states(
                anatomy, inputs, ids, None if mask is None else real.long()
            )
        causal = anatomy.kind == "causal"
        public_ids, public_real, public_states = self._public_states
        candidates, controls = (
            _evidence(
                shared,
                self._whitenings,
                [
                    x - (x @ basis.T.to(x)) @ basis.to(x)
                    for x, basis in zip(inputs_of_texts, bases, strict=True)
                ],
                # A causal text's last token is a label alone: no gradient depends on it.
                tokens & before_last(tokens) if causal else tokens,
                text,
                words,
            )
            for inputs_of_texts, tokens, text in (
                (states, real, ids),
                (public_states, public_real, public_ids),
            )
        )
        scores, control_scores = _scores(candidates, controls), _scores(controls, controls)
        if words is not None and words.silent is not None:
            # Absent tokens exclude a text; its other evidence must exceed that of public text.
            control_scores = control_scores + controls[:, 3]
        return MembershipGuess(scores=scores.cpu(), members=(scores > control_scores.max()).cpu())

    def _loss_term_rows(self, shared_input: row_space.SharedInput, anatomy: Anatomy) -> Tensor:
        """Return a basis (k, d) of what AdaLoRA's regularisation adds to the gradients of A."""
        basis = [torch.zeros(0, shared_input.width, dtype=torch.float64, device=anatomy.device)]
        for linear in shared_input.trainable_maps(anatomy):
            if linear.regularised:
                basis.append(self._factors[linear.name])
        return row_space.orthonormal(torch.cat(basis))

    def _rows(
        self,
        shared_input: row_space.SharedInput,
        anatomy: Anatomy,
        view: Observation,
        excluded: Tensor,
    ) -> row_space.SharedRows | None:
        """Return the shared rows of an input's trained maps; None if all are zero."""
        maps = row_space.nonzero_gradients(view, shared_input.trainable_maps(anatomy))
        gradients = list(maps.values())
        noise = [view.gradients[-1].noise_on(linear.name) for linear in maps]
        if not gradients:
            return None
        dtypes = [*(g.dtype for g in gradients), self._facts.autocast or torch.float32]
        rounding = max(torch.finfo(d).eps for d in dtypes)
        rows = row_space.SharedRows.stack(gradients, excluded, rounding=rounding, noise=noise)
        return None if len(excluded) and rows.is_noise else rows


def _early_blocks(inputs: int) -> int:
    """Return how many inputs count as the first blocks', where word order has little effect."""
    return 2 if inputs > 3 else 1


def _evidence(
    shared: Sequence[row_space.SharedRows | None],
    whitenings: Sequence[Tensor],
    states: Sequence[Tensor],
    counted: Tensor,
    ids: Tensor,
    words: WordGuess | None,
) -> Tensor:
    """Return the evidence (G, 4): first blocks' gain, deeper gain, nearness, absent tokens.

    A *gain* is the mean logarithm of what a state explains of the rows beyond earlier states.
    *Nearness* is minus the logarithm of a state's distance from the rows' span. It is used only for
    blocks whose rows leave enough dimensions free. The last column is the share of tokens that are
    not in the batch by ``words``, weighted more if the words are certified (``silent`` is then a
    tensor: the tokens that would leave no trace).

    Args:
        shared: The rows of each input; None for an input without a gradient.
        whitenings: (d, d) for each input.
        states: (G, L, d) the texts' states at each input.
        counted: (G, L) bool, the tokens on which a gradient depends.
        ids: (G, L) token ids.
        words: The tokens of the batch; None if they were not recovered.
    """
    device = states[0].device
    counted = counted.to(device)
    first, deep, nearness = (torch.zeros(len(ids), device=device) for _ in range(3))
    early = _early_blocks(len(states))
    first_blocks = blocks = close_blocks = 0
    for number, (rows, white, x) in enumerate(zip(shared, whitenings, states, strict=True)):
        if rows is None:
            continue
        gain = _mean_log_gain(rows, white, x, counted)
        if number < early:
            first, first_blocks = first + gain, first_blocks + 1
            continue
        deep, blocks = deep + gain, blocks + 1
        if len(rows.principal) < x.shape[-1] - FREE_DIMENSIONS:
            nearness, close_blocks = nearness + _nearness(rows, x, counted), close_blocks + 1
    absent = torch.zeros(len(ids), device=device)
    if words is not None:
        types = words.types if words.silent is None else torch.cat([words.types, words.silent])
        present = torch.isin(ids.to(device), types.to(device))
        total = counted.sum(1).clamp_min(1)
        absent = (~present & counted).sum(1) / total
        if words.silent is not None:
            absent = ABSENT_WEIGHT * ((absent > 0).float() + absent)
    first = first / max(1, first_blocks)
    deep = deep / blocks if blocks else first
    return torch.stack([first, deep, nearness / max(1, close_blocks), absent], 1)


def _scores(candidates: Tensor, public: Tensor) -> Tensor:
    """Return (G,) the scores: gains beyond public text, plus nearness, minus absent tokens."""
    level = public[:, :2].mean(0)
    first, deep = (candidates[:, :2] - level).unbind(1)
    return deep - FIRST_BLOCK_WEIGHT * first + candidates[:, 2] - candidates[:, 3]


def _mean_log_gain(rows: row_space.SharedRows, white: Tensor, x: Tensor, counted: Tensor) -> Tensor:
    """Return (G,) the mean logarithm of what a token's state explains beyond earlier states.

    The Cholesky factor of the states' Gram matrix orthogonalises them in their order, as
    Gram-Schmidt does. Its pivots are the shares of states outside of the span of earlier ones.

    Args:
        rows: The shared rows.
        white: The whitening matrix, (d, d).
        x: The states of the candidates, (G, L, d).
        counted: Which of them are tokens of a text, (G, L).
    """
    g = rows.singular.float() @ white
    g = g / g.norm()
    x = (x @ white).masked_fill(~counted[..., None], 0.0)
    gram = x @ x.mT
    size = gram.diagonal(dim1=-2, dim2=-1)
    # Keeps the factor finite for equal states; 1 where no token counts.
    jitter = 1e-4 * size.mean(-1, keepdim=True) + (~counted).float()
    lower = torch.linalg.cholesky(gram + torch.diag_embed(jitter))
    part = torch.linalg.solve_triangular(lower, x @ g.T, upper=False)
    pivots = lower.diagonal(dim1=-2, dim2=-1).square() / size.clamp_min(1e-30)
    informative = counted & (pivots > MIN_PIVOT)
    gain = (part.square().sum(-1) * g.shape[1]).clamp_min(MIN_GAIN).log()
    mean: Tensor = gain.masked_fill(~informative, 0.0).sum(-1) / informative.sum(-1).clamp_min(1)
    return mean


def _nearness(rows: row_space.SharedRows, x: Tensor, counted: Tensor) -> Tensor:
    """Return (G,) the mean of minus the logarithm of a state's distance from the rows' span."""
    basis = row_space.orthonormal(rows.principal).to(x.device)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    distance = (1 - (unit @ basis.T).square().sum(-1)).clamp(MIN_DISTANCE, 1.0)
    return (-distance.log10() * counted).sum(-1).float() / counted.sum(-1).clamp_min(1)

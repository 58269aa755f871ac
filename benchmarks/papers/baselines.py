"""Attacks that the papers compare with, and A_Attn as published.

:func:`reveal_labels` is RLG (Dang et al. 2021), :class:`TrainedMembership` AMI FC (Nguyen et al.
2023, extended to language models as in Vu et al. 2024, Sect. 5), :class:`PublishedAttention` A_Attn
of Vu et al. 2024, and :class:`TokenRelaxation` the baseline of Zheng 2023, Sect. 4.3 (Song &
Raghunathan 2020).
"""

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.linalg import qr
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional as F

from benchmarks.papers import lemma
from lightning_fedleak.attacks.base import Query, WordGuess
from lightning_fedleak.attacks.membership import attention_layers, base
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.fc import batch_inputs
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.texts.base import Sent
from lightning_fedleak.attacks.texts.embedding_descent import TOKENS_AT_ONCE, EmbeddingDescent
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import Observation, UnusableObservation

# ---- RLG: word types from the head's gradient ------------------------------------------------

SLACK = 1e-7  # constraint violation that counts as rounding: HiGHS's own feasibility tolerance
VOLUME_GROWTH = 1.01  # largest coefficient in the basis; nearer to 1 takes more swaps, not tuned
ROWS_PER_ROUND = 60  # violated constraints added before a program is solved again; not tuned


@dataclass(frozen=True)
class RevealLabels:
    """RLG as an attack that is called like those of the package; ``seconds`` are for one run."""

    seconds: float

    def prepare(self, anatomy: Anatomy) -> None:
        """It learns nothing."""

    def run(self, view: Observation) -> WordGuess:
        types = reveal_labels(view.gradient(HEAD_WEIGHT), self.seconds)
        return WordGuess(types, n_types=float(len(types)))


def reveal_labels(gradient: Tensor, seconds: float = 60.0) -> Tensor:
    """Return the types whose row alone some vector makes negative, in ascending order.

    The gradient of softmax with cross-entropy is ``dW = G H^T`` with a column ``p_i - onehot(y_i)``
    of G for each token, negative in the row of its label only. With at most d tokens a vector r
    exists for each used type t with ``dW_t r < 0`` and ``dW_j r >= 0`` for all other j (Sect. 3);
    with more, used types may be missed.

    The paper solves one program for each candidate. Here candidates are few: take S rows that span
    the others with coefficients of magnitude at most 1. Because the rows sum to zero, a row whose
    coefficients all exceed -1 is a non-negative combination of other rows, which no r can separate
    (Farkas).

    Args:
        gradient: (V, d) of the head, not tied, in float32 or more, without label smoothing.
        seconds: time limit for all linear programs together.

    Raises:
        UnusableObservation: the time ran out, or the solver cannot decide a program.
    """
    deadline = time.monotonic() + seconds
    basis, coefficients = large_volume_basis(row_space(gradient))
    excluded = coefficients.min(axis=1) > -1 + SLACK
    excluded[basis] = False
    scale = np.abs(coefficients).max(axis=1)
    constraints = coefficients / np.where(scale > 0, scale, 1)[:, None]
    candidates = np.flatnonzero(~excluded)
    types = [t for t in candidates if is_separable(constraints, basis, t, deadline)]
    return torch.tensor(types, dtype=torch.int64)


def row_space(gradient: Tensor) -> np.ndarray:
    """Rows in coordinates of the row space: (V, S) with orthonormal columns, S the rank."""
    matrix = gradient.cpu().double()
    _, singular, right = torch.linalg.svd(torch.linalg.qr(matrix, mode="r").R)
    rank = int((singular > 8 * torch.finfo(gradient.dtype).eps * singular[0]).sum())
    return ((matrix @ right[:rank].T) / singular[:rank]).numpy()


def large_volume_basis(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (S,) of rows that span the others, and coefficients (V, S) of about 1 at most.

    The search starts from pivoted QR and swaps in the row of the largest coefficient (Goreinov et
    al. 2010, maxvol).
    """
    basis = qr(rows.T, mode="r", pivoting=True)[1][: rows.shape[1]].copy()
    coefficients = np.linalg.solve(rows[basis].T, rows.T).T
    for _ in range(10 * rows.shape[1]):
        j, k = np.unravel_index(np.abs(coefficients).argmax(), coefficients.shape)
        pivot = coefficients[j, k]
        if abs(pivot) <= VOLUME_GROWTH:
            break
        change = coefficients[j].copy()
        change[k] -= 1
        coefficients -= np.outer(coefficients[:, k] / pivot, change)
        basis[k] = j
    return basis, np.linalg.solve(rows[basis].T, rows.T).T  # without the swaps' rounding


def is_separable(constraints: np.ndarray, basis: np.ndarray, t: int, deadline: float) -> bool:
    """Whether an r has ``c_t r = -1`` and ``c_j r >= 0`` for all other rows j.

    Rows of the basis are unit vectors, so that their constraints are bounds. The others are added
    when they are violated: a program that is infeasible with some is so with all.
    """
    lower = np.where(basis == t, -1.0, 0.0)
    upper = np.where(basis == t, -1.0, np.inf)
    in_basis = t in basis
    constrained = np.ones(len(constraints), dtype=bool)
    constrained[[*basis, t]] = False
    working = np.zeros(len(constraints), dtype=bool)
    r, meets_bounds = lower, in_basis
    while True:
        if meets_bounds:
            values = constraints @ r
            tolerance = SLACK * (1 + np.abs(r).max())
            violated = np.flatnonzero(constrained & ~working & (values < -tolerance))
            if len(violated) == 0:
                return True
            working[violated[np.argsort(values[violated])[:ROWS_PER_ROUND]]] = True
        seconds = deadline - time.monotonic()
        solution = seconds > 0 and linprog(
            np.ones(len(basis)),
            A_ub=-constraints[working],
            b_ub=np.zeros(int(working.sum())),
            A_eq=None if in_basis else constraints[t : t + 1],
            b_eq=None if in_basis else np.array([-1.0]),
            bounds=np.column_stack([lower, upper]),
            options={"time_limit": seconds},
        )
        if not solution or solution.status not in (0, 2):
            raise UnusableObservation("a program was not decided, or not in time")
        if solution.status == 2:  # infeasible
            return False
        r, meets_bounds = solution.x, True


# ---- AMI FC: a network that is trained to fire on one text -----------------------------------

TWIN_DISTANCE = 1e-2  # public samples nearer to the target (relative, in L1) are skipped
CHECK_EVERY = 5  # training steps between checks of the margin; not tuned
LEARNING_RATE, MARGIN, BATCH = 1e-3, 3.0, 256  # of Adam, of outputs, public samples; not tuned
KEPT = 5  # trained networks; more would save repeated trainings, of 50 MB each

POSITIONS = (0.9, 0.8, 0.6, 0.4, 0.2, 0.0, -0.2, -0.4, -0.6, -0.8, -1.0, -1.5, -2.0, -3.0)
"""Thresholds of the rungs, as shares of the distance from the decision's (0) to the target's output
(1). They choose the points of the ROC curve; not tuned."""


@dataclass(frozen=True)
class Network:
    """A trained network, whose weights include the scaling of its inputs.

    Attributes:
        parameters: W1 (h, D), b1 (h,), W2 (1, h) and b2 (1,).
        decision: the output above which the target counts as in the batch: half way between its
            own and the largest one on public samples.
        distance: from there to the target's output.
        steps: of training.
    """

    parameters: list[Tensor]
    decision: Tensor
    distance: Tensor
    steps: int


def outputs_of(parameters: list[Tensor], rows: Tensor) -> Tensor:
    """The outputs (n,) on inputs (n, D) of W1, b1, W2 and, if it is given, b2."""
    weight, bias, second, *offset = parameters
    outputs = (F.relu(F.linear(rows, weight, bias)) @ second.T)[:, 0]
    return outputs + offset[0] if offset else outputs


def train_network(
    target: Tensor, public: Tensor, generator: torch.Generator, *, hidden_units: int, steps: int
) -> Network:
    """Train a network until it outputs more than a margin on the target, and less than minus it on
    public samples.

    The loss is the logistic one in which the target weighs as much as all public samples.

    Args:
        target: (D,).
        public: (N, D). Samples near the target are skipped, as those of the same prefix.
        generator: the only source of random numbers.
        hidden_units: h.
        steps: of Adam, at most.
    """

    def separated(outputs: Tensor) -> bool:
        return bool((outputs[0] > MARGIN) & (outputs[1:] < -MARGIN).all())

    def uniform(*shape: int, fan_in: int) -> Tensor:
        weights = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        return weights.mul_(fan_in**-0.5).to(target).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        target, public = target.clone(), public.clone()  # autograd refuses inference tensors
        mean, spread = public.mean(0), public.std(0, correction=0)
        spread = spread.clamp(min=0.1 * float(spread.mean()) or 1.0)
        twins = (public - target).abs().sum(1) < TWIN_DISTANCE * target.abs().sum()
        samples, scaled = (public[~twins] - mean) / spread, (target[None] - mean) / spread
        d, h = len(target), hidden_units
        shapes = (((h, d), d), ((h,), d), ((1, h), h), ((1,), h))
        parameters = [uniform(*shape, fan_in=fan_in) for shape, fan_in in shapes]
        optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
        taken = 0
        while taken < steps:
            rows = samples
            if len(samples) > BATCH:
                rows = samples[torch.randint(len(samples), (BATCH,), generator=generator)]
            outputs = outputs_of(parameters, torch.cat([scaled, rows]))
            check = taken % CHECK_EVERY == 0 and separated(outputs)
            if check and separated(outputs_of(parameters, torch.cat([scaled, samples]))):
                break
            loss = F.softplus(-outputs[0]) + F.softplus(outputs[1:]).sum() / max(1, len(rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken += 1
        weight, bias, second, offset = (p.detach() for p in parameters)
        folded = [weight / spread, bias - weight @ (mean / spread), second, offset]
        on_target = outputs_of(folded, target[None])[0]
        others = outputs_of(folded, public[~twins])
        # Without a sample, any lower output puts the decision below the target's.
        decision = (on_target + (others.max() if len(others) else on_target - 1)) / 2
        # The lower limit keeps the rungs apart where the network does not separate the target.
        distance = (on_target - decision).clamp(min=1e-3 * (1 + float(on_target.abs())))
        return Network(folded, decision, distance, taken)


class TrainedMembership(base.MembershipAttack):
    """AMI FC: two layers that are trained to fire on the hidden states of the target only.

    The output is repeated with different biases, the rungs, so that one run gives a whole ROC
    curve. Otherwise than in the published code inputs are scaled, the loss has one output, training
    stops at a margin, and the decision is half way instead of at 0, which does not change the order
    of scores.

    Args:
        layer, granularity, tokens, name: as in the base class.
        public: text like the clients'.
        hidden_units: d_h.
        steps: of Adam for each target, at most.
        public_rows: public samples, at most.
    """

    threat_model = base.CalibratedMembership.threat_model
    default_name = "trained_membership"
    rungs, guess_rung = len(POSITIONS), POSITIONS.index(0.0)

    def __init__(
        self, layer: int, public: PublicText, granularity: base.Granularity = "token", *,
        hidden_units: int = 1000, steps: int = 200, public_rows: int = 1024, tokens: int = 32,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layer, granularity, tokens, name)
        self.text, self.public_rows = public, public_rows
        self.training = {"hidden_units": hidden_units, "steps": steps}
        self._networks: dict[bytes, Network] = {}  # by the target, the oldest first

    def prepare(self, anatomy: Anatomy) -> None:
        """Compute the hidden states of the public text (A_init of the paper)."""
        super().prepare(anatomy)
        generator, samples = torch.Generator().manual_seed(0), list[Tensor]()
        for rows in self.text.draw(min(len(self.text), self.public_rows), generator).split(64):
            batch = self.text.rows(rows.tolist(), 2 * self.tokens, generator)
            states = hidden_states(anatomy, self.layer, batch.input_ids, batch.attention_mask)
            if self.granularity == "full":
                samples.append(base.sentence_rows(states, batch.attention_mask, self.tokens))
            else:
                samples.append(states[batch.attention_mask != 0])
            if sum(map(len, samples)) >= 4 * self.public_rows:
                break
        public = torch.cat(samples)
        order = torch.randperm(len(public), generator=generator)
        self._public = public[order[: self.public_rows]]
        self._networks.clear()

    def network(self, target: Tensor) -> Network:
        """The network of one target (D,)."""
        key = target.numpy().tobytes()
        if key not in self._networks:
            public, generator = self._public.to(target), torch.Generator().manual_seed(0)
            self._networks[key] = train_network(target, public, generator, **self.training)
            if len(self._networks) > KEPT:
                del self._networks[next(iter(self._networks))]
        return self._networks[key]

    def biases(self, network: Network) -> Tensor:
        """(K,), the output bias of each rung, ascending."""
        positions = torch.tensor(POSITIONS).to(network.distance)
        return network.parameters[3] - network.decision - positions * network.distance

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """As in the base class: the sum of upstream gradients of inputs on which a rung fires."""
        rows, samples, weights = batch_inputs(hidden, mask, upstream, self.read_together)
        gradient = targets.new_zeros(len(hidden), len(targets), self.rungs)
        for k, target in enumerate(targets):
            network = self.network(target)
            output = outputs_of(network.parameters[:3], rows)
            fires = output[:, None] + self.biases(network) > 0
            gradient[:, k].index_add_(0, samples, torch.where(fires, weights[:, None], 0.0))
        return gradient


# ---- A_Attn as published ---------------------------------------------------------------------

LEVELS = 16  # gammas of the calibrated ladder; more give a finer score


class PublishedAttention(AttentionMembership):
    """A_Attn with the paper's choices: raw hidden states, and all coordinates with both signs.

    A target is a member if any coordinate of the response exceeds gamma. The paper fixes no gamma:
    ``"calibrated"`` is the lowest of a ladder that public batches exceed for at most
    ``false_positive_rate`` of the public tokens that they do not hold, ``"lemma"`` 2 Delta-bar.

    Args:
        layer, public_text, settings: as in :class:`AttentionMembership`.
        gamma: which gamma decides.
    """

    def __init__(
        self, layer: int, public_text: PublicText, *,
        gamma: Literal["calibrated", "lemma"] = "calibrated", **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(layer, public_text, **settings)
        self.gamma = gamma

    def calibrate(self, states: attention_layers.PublicStates) -> None:
        """Choose the ladder of gammas, hardest to exceed first, and the one that decides."""
        self.d, self._level = states.hidden.shape[-1], 0
        self.factor = 2 / math.sqrt(self.d - 1)  # of their code
        if self.gamma == "lemma":
            self.ladder = torch.tensor([lemma_gamma(states, self.factor)])
            return
        sentence, position = states.draw_tokens(self.seed)
        v = states.hidden[sentence, position]
        best = v.new_full((len(v), len(states.hidden)), -torch.inf)
        for attention in attention_layers.attentions(states.hidden, states.mask, v, self.factor):
            target, _, z = coordinates(attention)
            best[:, attention.sentence].scatter_reduce_(0, target, z.abs().amax(1), "amax")
        scores_with = best.gather(1, sentence[:, None])[:, 0]
        scores = best.masked_fill(attention_layers.sentences_with(states, v), -torch.inf)
        self.ladder = batch_quantiles(scores, scores_with, self.batch, self.seed)
        for i, gamma in enumerate(self.ladder.tolist()):
            rate = attention_layers.false_positive_rate(scores, gamma, self.batch)
            if rate <= self.false_positive_rate:
                self._level = i

    @property
    def rungs(self) -> int:
        """A ladder for each row of W_O."""
        return 2 * self.d * len(self.ladder)

    def reads(self, position: int) -> slice | None:
        """That one token alone."""
        return None

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """The target tokens."""
        return base.MembershipAttack.embed(self, hidden, query)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """As in the base class, (B, G, 2 d R) for R gammas."""
        base.check_targets(targets)
        x = hidden.to(torch.promote_types(targets.dtype, hidden.dtype))
        gammas, (b, _, d) = self.ladder.to(x), x.shape
        gradient = x.new_zeros((b, len(targets), 2, d, len(gammas)))
        for attention in attention_layers.attentions(x, mask, targets.to(x), self.factor):
            target, token, z = coordinates(attention, float(gammas.min()))
            weight = upstream[attention.sentence, attention.places].to(x)[token][:, None]
            for level, gamma in enumerate(gammas):
                for sign in (0, 1):
                    above = -z > gamma if sign else z > gamma
                    part = torch.where(z.isnan(), torch.nan, torch.where(above, weight, 0.0))
                    gradient[attention.sentence, :, sign, :, level].index_add_(0, target, part)
        return gradient.flatten(2)

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> base.MembershipGuess:
        """Decide by the largest number of all rows at the gamma that was chosen."""
        assert noise_std == 0
        assert self._level is not None
        base.check_gradient(gradient)
        best = gradient.view(len(gradient), -1, len(self.ladder)).abs().amax(1)
        return base.read_rungs(best, 0.0, self._level)


def coordinates(
    attention: attention_layers.Attention, at_least: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Z1 - Z2 (m, d) in all coordinates where one may exceed ``at_least``, and the targets, tokens.

    The others are found by a bound: no coordinate is larger than the sum of the attentions'
    absolute differences, each times the norm of its token.
    """
    difference = attention.first - attention.second
    bound = (difference.abs() @ attention.tokens.norm(dim=1)) * (1 + 1e-4)  # float32's rounding
    target, token = (~(bound < at_least)).nonzero(as_tuple=True)
    return target + attention.targets.start, token, difference[target, token] @ attention.tokens


def batch_quantiles(scores: Tensor, scores_with: Tensor, batch: int, seed: int) -> Tensor:
    """Evenly spaced quantiles of the maxima of random public batches with and without targets."""
    (t, s), generator = scores.shape, torch.Generator().manual_seed(seed)
    picks = torch.randint(s, (8, t, batch), generator=generator).to(scores.device)
    without = scores.expand(8, t, s).gather(2, picks).amax(2)
    maxima = torch.cat([without, torch.maximum(without, scores_with)])
    maxima = maxima[maxima.isfinite()].sort(descending=True).values.cpu()
    gammas = maxima[torch.linspace(0, len(maxima) - 1, LEVELS).long()].float()
    gammas[0] *= 0.999  # no score exceeds the maximum itself
    return gammas


def lemma_gamma(states: attention_layers.PublicStates, beta: float) -> float:
    """2 Delta-bar of public text (Lemma 2); infinite where it overflows."""
    x, real = states.hidden.double(), states.mask
    products = x @ x.mT
    squares = products.diagonal(dim1=1, dim2=2)
    others = real[:, None] & ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    nearest = products.masked_fill(~others, -torch.inf).amax(2)
    apart, largest = float((squares - nearest)[real].min()), float(squares[real].max())
    longest = int(real.sum(1).max())
    return 2 * float(lemma.retrieval_error(beta, longest, apart, math.sqrt(largest)))


# ---- the relaxation of tokens ----------------------------------------------------------------

WEIGHTS_AT_ONCE = 1 << 25  # optimized at once; with Adam's copies and the gradient 640 MB


class TokenRelaxation(EmbeddingDescent):
    """At each position the mean of all word embeddings, weighted by the softmax of V numbers.

    Adam changes the numbers so that the hidden states become those that the client sent; the guess
    is the token with the largest one. Pass ``initial="mean"``: no readout predicts a first guess.
    """

    default_name = "token_relaxation"

    @property
    def step_size(self) -> float:
        return self.lr

    def tokens_at_once(self) -> int:
        return min(TOKENS_AT_ONCE, WEIGHTS_AT_ONCE // self.bottom.vocab_size)

    def start(self, sent: Sent) -> Tensor:
        embeddings = self.table.embeddings
        return embeddings.new_zeros(*sent.real.shape, len(embeddings))

    def words(self, variables: Tensor) -> Tensor:
        return variables.softmax(-1) @ self.table.embeddings

    def decode(self, variables: Tensor) -> Tensor:
        return variables.argmax(-1)

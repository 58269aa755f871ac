"""The FC-based adversary: two layers that are active only near one target hidden state.

Vu et al. 2024, Sect. 4.1 and Appx. A (Algorithms 2 and 3, Eqs. 2 and 6). The layers compute
``relu(tau - ‖x - T‖_1)``. A gradient of the second bias that is not zero proves that an input of
the batch lies within ``tau`` of the target. Conversely, such an input gives a gradient that is not
zero, unless its upstream gradient is zero or the contributions of several inputs cancel. A server
inserts the layers into the model as real modules; :meth:`FCMembership.gradient` computes the same
result without them. Each entry of the second bias is a *rung*, the gradient that the server reads.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Query, RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership import base
from lightning_fedleak.attacks.membership.attention_layers import PublicStates
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.row_space import Whitening, fit_whitening
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import products_in_tf32
from lightning_fedleak.validate import check_integer, check_number, explain_arguments


def batch_inputs(
    hidden: Tensor, mask: Tensor | None, upstream: Tensor, tokens: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs that crafted layers read from a batch, without padding.

    Args:
        hidden: The hidden states, (B, L, d).
        mask: The attention mask, (B, L); None without padding.
        upstream: The upstream gradient of each input: (B, L), or (B, 1) if ``tokens`` is set.
        tokens: The number of token positions that are concatenated into one input; None if
            each token is one input.

    Returns:
        The inputs (N, D), and for each the index of its sample (N,) and its upstream gradient (N,).
    """
    inputs, real = select_inputs(hidden, mask, tokens)
    b, r, d = inputs.shape
    samples = torch.arange(b, device=hidden.device)[:, None].expand(b, r)
    if real is None:
        return inputs.reshape(b * r, d), samples.reshape(-1), upstream.reshape(-1)
    return inputs[real], samples[real], upstream[real]


def select_inputs(
    hidden: Tensor, mask: Tensor | None, tokens: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the inputs (B, R, D), and a mask (B, R) of those with a token; None without a mask."""
    real = None if mask is None else mask.to(hidden.device) != 0
    if tokens is None:
        return hidden, real
    rows = base.sentence_rows(hidden, mask, tokens)[:, None]
    return rows, None if real is None else real.any(1, keepdim=True)


Precision = Literal["fp32", "tf32", "fp16", "bf16"]

PRECISION_BY_PREFIX: dict[str, Precision] = {
    "bf16": "bf16",
    "16": "fp16",
    "32": "fp32",
    "64": "fp32",
}
"""Precision by the prefix of the Trainer's ``precision`` argument."""

SAFE_DISTANCES: dict[Precision, tuple[float, float]] = {
    "fp32": (1e-3, 2.5e-4),
    "tf32": (2e-3, 1e-2),
    "fp16": (2e-3, 1e-2),
    "bf16": (7e-3, 5e-2),
}
"""(tau, dead zone) of ``"auto"`` by precision of the hidden states, finest precision first.

tau is in units of ``‖T‖_1``, the dead zone in units of the mean absolute value of T's non-zero
coordinates. The docstring of :class:`FCMembership` lists the models they were measured on.
"""

MAX_NUMBERS_AT_ONCE = 1 << 20  # values of a chunk of inputs, 4 MiB in float32; bounds the memory

MAX_RELATIVE_TAU = 0.5
"""The highest rung of an automatic ladder, in units of ``‖T‖_1``; not tuned."""
_RUNGS_BELOW, _RUNGS_ABOVE = 5, 8  # rungs below and above ``tau`` of an automatic ladder


class FCMembership(base.MembershipAttack):
    """Algorithms 2 and 3 of Vu et al. 2024, with a ladder of values of ``tau`` instead of one.

    Two crafted layers fire only on inputs within the L1 distance ``tau`` of a target. Each rung of
    the ladder is one more entry of the second bias with the same row of weights, so the gradient
    shows between which two values of ``tau`` the nearest input lies: one run gives a whole ROC. The
    paper's decision b' corresponds to the rung ``tau``.

    **tau.** ``tau="auto"`` is in units of ``‖T‖_1``, because the norm of hidden states differs by
    a factor of a thousand between models and layers. It lies between two L1 distances from the
    target, in these units, at layers >= 1 of MiniLM-L6, stories15M and SmolLM2-135M:

    ==================== ============================ ==========================================
    hidden states        distance to the same text,   distance to the nearest token of another
                         computed in another batch    sentence
    ==================== ============================ ==========================================
    float32              at most 2e-6                 .04 or more, rarely less in first layers
    float16, TF32        at most .004                 the same
    bfloat16             at most .029                 the same
    bfloat16, dead zone  mostly below .005 (below     .0126 or more; at layer 1 once .0016, of
    of a 20th of T's     .0003 in MiniLM's first      two sentences that differ only in their
    mean coordinate      layers), .015 in one case    last punctuation mark
    ==================== ============================ ==========================================

    The case of .015 is a token with a massive activation (SmolLM2, layer 3), and that member is
    missed. In half precision the first layers have a far smaller rounding error than the last ones,
    and other tokens are close to the target: set ``tau`` yourself there. A numeric ``tau`` is an
    absolute distance, as in the paper. The server must embed its targets in the client's precision:
    from float32 to bfloat16 the distance is up to .07.

    No ``tau`` separates two texts with the same hidden state: for example, at layer 0, the same
    word at the same position, and in a causal model positions whose whole prefix occurs in another
    sentence. Dropout changes the hidden states of a text, so a dishonest server turns it off.

    **Dead zone.** The layers compute ``relu(tau - sum_i relu(|x_i - T_i| - dead_zone))``. The dead
    zone is part of the first bias, ``[-T - dead_zone; T - dead_zone]``. If no coordinate differs
    from T by more, the first layer outputs zero, as for an exact copy.

    If the gradient at the target's token is exactly zero, for example because its label is ignored,
    the rung stays zero and the guess is "no".

    If a defence acts on gradients (:meth:`meet`), only the rung ``tau`` is crafted, whatever
    ``ladder`` says: under noise of a known standard deviation only that rung is read, and under
    clipping further rungs would use up part of the clip norm.

    Args:
        layer: As in :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        granularity: ``"token"`` (FC-Token) or ``"full"`` (FC-Full).
        tau: The L1 distance below which an input counts as the target, or ``"auto"``, which depends
            on the precision.
        dead_zone: The difference up to which a coordinate counts as equal, or ``"auto"``.
        ladder: The rungs as multiples of ``tau``, ascending, with 1 among them. ``"auto"``: 5 rungs
            below ``tau``, each half of the next, and 8 above it, up to half of ``‖T‖_1`` (with an
            absolute ``tau``: 32 times ``tau``).
        tokens: As in the base class.
        name: The name of the attack in the logs.

    Raises:
        ValueError: An argument is outside of its range.

    Examples:
        >>> from lightning_fedleak.attacks import FCMembership
        >>> attack = FCMembership(layer=1)
        >>> attack.rungs, attack.guess_rung
        (14, 5)
    """

    default_name = "fc_membership"
    config_names = ("layer", "granularity", "tau", "dead_zone", "tokens")
    restores_fully = False  # prepare notes the parameters' precision again

    @explain_arguments("FCMembership(layer=1)")
    def __init__(
        self,
        layer: int,
        granularity: base.Granularity = "token",
        tau: float | Literal["auto"] = "auto",
        dead_zone: float | Literal["auto"] = "auto",
        *,
        ladder: Sequence[float] | Literal["auto"] = "auto",
        tokens: int = 32,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, granularity, tokens, name)
        if tau != "auto":
            check_number("tau", tau, above=0, hint="or 'auto'")
        if dead_zone != "auto":
            check_number("dead_zone", dead_zone, at_least=0, hint="or 'auto'")
        self.tau = tau
        self.dead_zone = dead_zone
        self.ladder = ladder if ladder == "auto" else tuple(float(x) for x in ladder)
        if self.ladder != "auto":
            ladder = self.ladder
            ascending = all(a < b for a, b in pairwise(ladder))
            if 1.0 not in ladder or not ascending or ladder[0] <= 0 or ladder[-1] == math.inf:
                raise ValueError(f"ladder must be positive, ascending and include 1.0: {ladder}")
        self._precisions: dict[str, Precision] = {}

    def prepare(self, anatomy: Anatomy) -> None:
        """Run A_init: check the layer, and note the precision of the parameters."""
        super().prepare(anatomy)
        parameter = next(anatomy.model.parameters())
        self._precisions["model"] = _dtype_precision(parameter.dtype, parameter.device)

    def set_precision(self, precision: str) -> None:
        """Set the precision in which the client runs, in Lightning's notation (``"bf16-mixed"``).

        The coarsest of this precision, the parameters' and the targets' is used.

        Raises:
            ValueError: The precision is unknown.
        """
        name = str(precision)
        prefixes: dict[str, Precision] = dict(zip(SAFE_DISTANCES, SAFE_DISTANCES, strict=True))
        prefixes |= PRECISION_BY_PREFIX
        current = next((p for prefix, p in prefixes.items() if name.startswith(prefix)), None)
        if current is None:
            raise ValueError(f"precision {precision!r} is none of a Trainer's")
        self._precisions["trainer"] = current

    def meet(self, facts: RunFacts) -> None:
        """Store the precision; against defended gradients the ladder is only the rung ``tau``."""
        super().meet(facts)
        if facts.precision is not None:
            self.set_precision(facts.precision)

    @property
    def _ladder_steps(self) -> tuple[float, ...] | Literal["auto"]:
        """Return the ladder; ``"auto"`` if its multiples depend on ``tau``."""
        return (1.0,) if self._defended else self.ladder

    @property
    def rungs(self) -> int:
        """Return K, the length of the ladder."""
        automatic = _RUNGS_BELOW + 1 + _RUNGS_ABOVE
        return automatic if self._ladder_steps == "auto" else len(self._ladder_steps)

    @property
    def guess_rung(self) -> int:
        """Return the rung whose bias is ``tau``."""
        return _RUNGS_BELOW if self._ladder_steps == "auto" else self._ladder_steps.index(1.0)

    def settings(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the thresholds and the dead zone for each target.

        Args:
            targets: The targets, (G, D).

        Returns:
            The ladder of ``tau`` (G, K), ascending, and the dead zones (G,), at least in float32.

        Raises:
            ValueError: A target is not finite, or it is all zero and ``tau`` or ``dead_zone`` is
                ``"auto"``.
        """
        safe_tau, safe_zone = SAFE_DISTANCES[self._resolve_precision(targets.dtype)]
        targets = targets.to(_promote(targets.dtype))
        sizes = targets.abs().sum(1)
        base.check_targets(sizes)
        if "auto" in (self.tau, self.dead_zone) and bool((sizes == 0).any()):
            raise ValueError("a target is all zeros, so 'auto' has no scale: set tau")
        taus = safe_tau * sizes if self.tau == "auto" else torch.full_like(sizes, float(self.tau))
        zones = (
            safe_zone * sizes / (targets != 0).sum(1)
            if self.dead_zone == "auto"
            else torch.full_like(sizes, float(self.dead_zone))
        )
        return taus[:, None] * self._multiples(safe_tau).to(taus), zones

    def _multiples(self, safe_tau: float) -> Tensor:
        """Return the ladder (K,) in units of tau, of which ``safe_tau`` is the automatic value."""
        if self._ladder_steps != "auto":
            return torch.tensor(self._ladder_steps, dtype=torch.float64)
        top = MAX_RELATIVE_TAU / safe_tau if self.tau == "auto" else 32.0
        lower = [0.5**i for i in range(_RUNGS_BELOW, 0, -1)]
        higher = [top ** (i / _RUNGS_ABOVE) for i in range(1, _RUNGS_ABOVE + 1)]
        return torch.tensor([*lower, 1.0, *higher], dtype=torch.float64)

    def _resolve_precision(self, dtype: torch.dtype) -> Precision:
        """Return the coarsest precision of the trainer, the parameters and targets of ``dtype``."""
        order = list(SAFE_DISTANCES)
        precisions = [*self._precisions.values(), _dtype_precision(dtype, torch.device("cpu"))]
        return max(precisions, key=order.index)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of inputs within each rung, summed per sample."""
        dtype = _promote(torch.promote_types(targets.dtype, hidden.dtype))
        rows, samples, weights = batch_inputs(hidden, mask, upstream, self.read_together)
        taus, zones = (x.to(dtype) for x in self.settings(targets))
        distances = l1_distances(rows.to(dtype), targets.to(dtype), zones)
        return _rung_gradients(distances, taus, weights, samples, len(hidden))

    def config(self) -> dict[str, object]:
        """Return the settings for reports.

        ``tau_relative`` is the value of ``tau="auto"`` in the current precision, in units of
        ``‖T‖_1``.
        """
        relative = SAFE_DISTANCES[self._resolve_precision(torch.float32)][0]
        ladder = self._ladder_steps
        return super().config() | {
            "tau_relative": relative if self.tau == "auto" else None,
            "ladder": ladder if ladder == "auto" else list(ladder),
        }


def l1_distances(rows: Tensor, targets: Tensor, dead_zones: Tensor) -> Tensor:
    """Return (G, N) ``sum_i relu(|x_i - T_i| - dead_zone)``; NaN for rows that are not finite.

    Args:
        rows: The inputs, (N, D).
        targets: The targets, (G, D), of the same floating dtype.
        dead_zones: The dead zones, (G,); 0 for the plain L1 distance.
    """
    distances = rows.new_empty(len(targets), len(rows))
    chunks = torch.split(rows, max(1, MAX_NUMBERS_AT_ONCE // max(1, rows.shape[1])))
    for k, (target, zone) in enumerate(zip(targets, dead_zones.tolist(), strict=True)):
        differences = ((chunk - target).abs_() for chunk in chunks)
        sums = [(x.sub_(zone).clamp_min_(0) if zone > 0 else x).sum(1) for x in differences]
        torch.cat(sums, out=distances[k])
    # A row's norm is finite if all of the row is, and takes no memory of the rows' size.
    row_norms = torch.linalg.vector_norm(rows, ord=1, dim=1)
    return distances.masked_fill(~row_norms.isfinite(), torch.nan)


def _rung_gradients(
    distances: Tensor, taus: Tensor, weights: Tensor, samples: Tensor, batch: int
) -> Tensor:
    """Return (batch, G, K): the upstream gradients of inputs within each tau, summed per sample.

    Args:
        distances: (G, N) the distance of each input; NaN makes its sample's gradients NaN.
        taus: (G, K) ascending.
        weights: (N,) the upstream gradient of each input.
        samples: (N,) the sample of each input.
        batch: The number of samples.
    """
    gradient = distances.new_zeros((batch * len(taus), taus.shape[1]))
    # Not (>=), so that NaN distances stay.
    target_index, row = (~(distances >= taus[:, -1:])).nonzero(as_tuple=True)
    distance = distances[target_index, row]
    fires = distance[:, None] < taus[target_index]
    shares = torch.where(fires, weights[row].to(distances)[:, None], 0.0)
    shares.masked_fill_(distance.isnan()[:, None], torch.nan)
    gradient.index_add_(0, samples[row] * len(taus) + target_index, shares)
    return gradient.view(batch, *taus.shape)


def _promote(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _dtype_precision(dtype: torch.dtype, device: torch.device) -> Precision:
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == torch.float16:
        return "fp16"
    coarse = device.type == "cuda" and dtype == torch.float32 and products_in_tf32()
    return "tf32" if coarse else "fp32"


WORD_FLOOR = 0.2
"""The share of a word's own evidence below which it counts as replaced.

A word that is left among replaced ones has .8 at layer 1 of MiniLM-L6, .5 at layer 3 and .4 at
layer 6 (GRR, epsilon 5). From .1 to .3 the AUC differs by .003."""

WORD_LADDERS: dict[base.Granularity, tuple[int, float]] = {"full": (100, 1.0), "token": (64, 0.25)}
"""Rungs of a ladder, and its top in units of the whole sentence's own evidence, so that scores of
short and long sentences compare. A word of a sentence of ten has a tenth of it on average."""


class WordMembership(base.CalibratedMembership):
    """A_FC against a client that replaces words, as token-level LDP does.

    A member is then no copy of the target, and its distance from the target is that of the words
    that are gone. So these two layers add up what speaks for the words that are left. Let x be the
    hidden state at one position and T the target's, both whitened by public text. The log
    likelihood ratio of "T with noise" against "public text" is linear in ``<T, x - mean>``. The
    first layer has one neuron for each position, ``relu(<T, x - mean> - WORD_FLOOR ‖T‖²)``: a word
    that is gone counts as nothing. With ``"full"`` the second layer adds them up within a sentence
    and has one ladder. With ``"token"`` it has a ladder for each word of the target, and the server
    adds up what fires anywhere in the batch.

    The score is the number of rungs whose gradient is not zero. Noise on gradients hides which
    those are, so that the result is unknown. A target is guessed to be a member above the score
    that a batch of public texts reaches for ``false_positive_rate`` of other public texts.

    Args:
        layer: As in :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        public_text: A text like the clients' (token ids, or a
            :class:`~lightning_fedleak.PublicText`), or ``"sampled"`` for text that a causal model
            writes. More than ``batch`` are needed; with fewer than 100 more, more non-members are
            guessed to be members.
        granularity: Whether the layers read whole sentences (``"full"``) or single tokens.
        tokens: The number of positions of a sentence that are read.
        batch: The number of sentences in a client's batch, for which the decision is calibrated.
        name: The name in the logs.

    Examples:
        >>> from lightning_fedleak.attacks import WordMembership
        >>> attack = WordMembership(layer=1, public_text=[[5, 6, 7, 8], [9, 8, 7, 6]], batch=1)
        >>> attack.rungs
        100
    """

    default_name = "word_membership"
    config_names = ("layer", "granularity", "tokens", "batch", "public_text", "refresh_every")
    restores_fully = False  # prepare calibrates again
    _whitening: Whitening | None = None
    _threshold = math.inf

    @explain_arguments("WordMembership(layer=1, public_text='sampled')")
    def __init__(
        self,
        layer: int,
        public_text: TextSource,
        granularity: base.Granularity = "full",
        *,
        tokens: int = 32,
        batch: int = 40,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, granularity, tokens, name)
        self.batch = check_integer("batch", batch)
        self.public_text = PublicText.parse_required(public_text, None, type(self).__name__)

    def calibrate(self, states: PublicStates) -> None:
        """Fit the whitening and the decision on the hidden states of public text."""
        hidden, mask, n = states.hidden, states.mask, self.batch
        check_integer(f"len(public_text), for batch={n},", len(hidden), at_least=n + 1)
        self._whitening = fit_whitening(states.tokens)
        others = slice(n, n + self.public_targets)
        targets = self.embed(hidden[others], Query(mask[others], mask[others]))
        upstream = hidden.new_ones(mask[:n, : 1 if self.read_together else None].shape)
        gradient = self.gradient(targets, hidden[:n], mask[:n], upstream).sum(0)
        scores = self.guess(gradient).scores
        self._threshold = float(scores.quantile(1 - self.false_positive_rate))

    @property
    def rungs(self) -> int:
        """Return K: the rungs of one ladder, with ``"token"`` of one for each position."""
        return WORD_LADDERS[self.granularity][0] * (1 if self.read_together else self.tokens)

    def reads(self, position: int) -> slice | None:
        """Return the tokens of the target's sentence that are read, also with ``"token"``."""
        return slice(0, self.tokens)

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """Return the whitened words of each target, (G, tokens * d), and zeros behind its end.

        They are orthogonal to the mean, so that what is read of padding, zeros, counts as nothing.
        """
        words = base.sentence_rows(hidden, query.attention_mask, self.tokens)
        words = words.view(len(hidden), self.tokens, -1)
        whitening = self.require_calibration(self._whitening)
        x = whitening(words.to(_promote(words.dtype)))
        mean = torch.nn.functional.normalize(whitening.mean @ whitening.matrix, dim=0).to(x)
        x = x - (x @ mean)[..., None] * mean
        return x.masked_fill((words == 0).all(-1, keepdim=True), 0.0).flatten(1)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of inputs above each rung, summed per sample."""
        base.check_targets(targets)
        rows, samples, weights = batch_inputs(hidden, mask, upstream, self.read_together)
        words = targets.to(_promote(torch.promote_types(targets.dtype, hidden.dtype)))
        words = words.view(len(targets), self.tokens, -1)
        inputs = rows.to(words).view(len(rows), self.read_together or 1, hidden.shape[-1])
        first = words @ self.require_calibration(self._whitening).matrix.to(words)
        most = words.square().sum(2)  # the evidence of the same hidden state
        evidence = torch.einsum("npd,gpd->gpn", inputs, first) - WORD_FLOOR * most[..., None]
        evidence = evidence.clamp_min(0)
        if self.read_together:
            evidence = evidence.sum(1, keepdim=True)
        levels, top = WORD_LADDERS[self.granularity]
        ladder = torch.arange(1 - levels, 1).to(words) * (top / levels)  # minus the thresholds
        ladders = (most.sum(1, keepdim=True) * ladder).repeat_interleave(evidence.shape[1], 0)
        distances = -evidence.flatten(0, 1)
        gradient = _rung_gradients(distances, ladders, weights, samples, len(hidden))
        return gradient.view(len(hidden), len(targets), self.rungs)

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> base.MembershipGuess:
        """Run A_guess: count the rungs that are not zero.

        Raises:
            UnusableObservation: The gradient is not finite, or it has noise.
        """
        base.check_gradient(gradient)
        if noise_std > 0:
            raise UnusableObservation("noise on gradients hides which rungs of the layers fire")
        scores = (gradient != 0).sum(1).float()
        return base.MembershipGuess(scores, scores > self._threshold)

"""The FC-based adversary: two fully connected layers that fire on one hidden state only.

Vu et al. 2024, Sect. 4.1 and Appx. A (Algorithms 2 and 3, Eqs. 2 and 6). The layers compute
``relu(tau - ‖x - T‖_1)``, so that the gradient of the second bias is non-zero if and only if some
input of the batch lies within ``tau`` of the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.membership.base import (
    Granularity,
    MembershipAttack,
    MembershipGuess,
    RungReader,
)
from lightning_fedleak.attacks.membership.fc_layers import (
    CraftedFC,
    TwoIdentities,
    check_targets,
    inputs_of,
)
from lightning_fedleak.attacks.membership.l1_distance import neighbours, own_rounding

Precision = Literal["fp32", "tf32", "fp16", "bf16"]

SAFE: dict[Precision, tuple[float, float]] = {
    "fp32": (1e-3, 2.5e-4),
    "tf32": (2e-3, 1e-2),
    "fp16": (2e-3, 1e-2),
    "bf16": (7e-3, 5e-2),
}
"""By precision of the hidden states, (tau, dead zone) of ``"auto"``: tau in units of ``‖T‖_1``,
the dead zone in units of the mean size of those coordinates of T that are not zero (padding is).
Finest precision first."""

MARGIN = 8.0
"""``tau`` in units of the model's own rounding, where that is measured."""

MEASURED: dict[Precision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Precisions in which a model's own rounding is measured; in the others it is next to nothing."""

MEASURE_EVERY = 500
"""Steps after which it is measured anew, as the weights have moved."""

WIDEST = 0.5
"""The highest rung of an automatic ladder, in units of ``‖T‖_1``."""

RANDOMISED_LADDER = (1.0, *(float(step) for step in range(40, 2001, 20)))
"""A ladder that reaches text of which some tokens were replaced: with fp32's ``tau``, up to twice
``‖T‖_1``."""


class FCMembership(MembershipAttack):
    """Algorithms 2 and 3, with a ladder of ``tau`` in place of one.

    Every rung of the ladder is one more entry of the second bias with the same row of weights, so
    that the real gradient says between which two values of ``tau`` the nearest input lies: a score
    with a whole ROC, at the price of one. The paper's decision b' is read at the rung ``tau``.

    **tau.** The same text gives hidden states that differ in rounding, by its place in a batch and
    by padding. Relative to ``‖T‖_1``, on MiniLM-L6, stories15M and SmolLM2-135M at layers >= 1, the
    L1 distance is then at most 2e-6 in float32, .004 in float16 and .029 in bfloat16; to the
    nearest token of another sentence in the batch it is .04 or more, with rare exceptions in the
    first layers. Beyond a dead zone of a twentieth of T's mean coordinate the first is mostly below
    .005 in bfloat16 and in MiniLM's first layers below .0003, but once .015, and so missed: a token
    with a massive activation (SmolLM2, layer 3). The second is .0126 or more but at layer 1, where
    two sentences that differ in their last punctuation mark alone came to .0016.
    ``tau="auto"`` lies between, and follows ``‖T‖_1``, since the scale of hidden states differs by
    a factor of a thousand between models and layers: no absolute value serves them all. An absolute
    one is taken as the paper states it. TF32 is treated as float16, which has as many bits. The
    server must embed its targets in the client's precision: between float32 and bfloat16 the
    distance is up to .07.

    In float16 and bfloat16 the first layers round far less than the last, and it is there that
    other tokens come near. :meth:`prepare` therefore measures the model's own rounding at the
    layer, beyond the dead zone, on a few random texts (alone, and in a padded batch; in the
    client's precision, by autocast where the weights are finer). ``tau`` is 8 times that, but not
    below float32's and not above that of :data:`SAFE`, which also holds where nothing was measured:
    before ``prepare``, or for targets in a coarser precision.

    Where two texts have the same hidden state no ``tau`` tells them apart: layer 0 (same word at
    the same place), and, in a causal model, positions whose whole prefix occurs in another
    sentence. Under dropout a text is not near itself: a dishonest server turns it off.

    The dead zone, ``relu(tau - sum_i relu(|x_i - T_i| - dead_zone))``, lies in the first bias,
    ``[-T - dead_zone; T - dead_zone]``. Within it the first layer is silent, as for an exact copy.

    A gradient of exactly zero at the target's token (a label that is ignored, say) cannot tell:
    the rung stays zero and the guess is "no".

    Under noise of a known standard deviation the rungs up to ``tau`` are averaged from ``tau``
    downwards, as far as they help: a member has the same mean in all of them from its own distance
    upwards, a non-member zero in all. But rungs share the norm under clipping, so that a ladder
    tells less than one rung. Told that a defence acts on gradients (:meth:`meet`), which the
    monitor does, ``ladder="auto"`` is therefore the rung ``tau`` alone.

    The sign of the upstream gradient is not used unless it is given: it hangs on the client's own
    loss and labels, so that a server knows it only where it chooses what follows its layers.

    Args:
        layer: as in :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        granularity: ``"token"`` (FC-Token) or ``"full"`` (FC-Full).
        tau: the L1 distance below which an input is taken for the target, or ``"auto"``: by
            precision and the model's own rounding, as said above.
        dead_zone: per coordinate, or ``"auto"``.
        ladder: the rungs as multiples of ``tau``, ascending, 1 among them; ``"auto"``: 5 below,
            halving, and 8 above, up to half of ``‖T‖_1`` (with an absolute ``tau``: 32 times that);
            where a defence acts on gradients ``(1.0,)``.
        precision: of the hidden states, for ``"auto"`` values: ``"fp32"``, ``"tf32"``, ``"fp16"``,
            ``"bf16"``. ``"auto"``: the coarsest of the parameters' dtype (:meth:`prepare`), the
            trainer's precision (:meth:`set_precision`) and the target's own dtype.
        width: neurons of the first layer where the protocol fixes them. Those beyond 2D are
            ignored (zero); with fewer only the first ``width // 2`` numbers of the target are
            compared (Sect. 4.1). None: 2D.
        false_positive_rate: under noise, the chance of "yes" when nothing is in reach.
        upstream_sign: +1 or -1 where the adversary knows the sign of the loss's gradient at the
            crafted output (it may choose what follows); 0 reads both sides. Under noise only.
        tokens: as in the base class.
        prefilter: False computes every distance; the result is the same.
        name: in the logs.

    Raises:
        ValueError: a setting outside of its range.
    """

    default_name = "fc_membership"

    def __init__(
        self,
        layer: int,
        granularity: Granularity = "token",
        tau: float | Literal["auto"] = "auto",
        dead_zone: float | Literal["auto"] = "auto",
        *,
        ladder: Sequence[float] | Literal["auto"] = "auto",
        precision: Precision | Literal["auto"] = "auto",
        width: int | None = None,
        false_positive_rate: float = 0.01,
        upstream_sign: Literal[-1, 0, 1] = 0,
        tokens: int = 32,
        prefilter: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, granularity, tokens, name)
        if tau != "auto" and not (_is_number(tau) and 0 < tau < math.inf):
            raise ValueError(f"tau must be a positive distance or 'auto', got {tau!r}")
        if dead_zone != "auto" and not (_is_number(dead_zone) and 0 <= dead_zone < math.inf):
            raise ValueError(f"dead_zone must be 0, positive or 'auto', got {dead_zone!r}")
        if precision != "auto" and precision not in SAFE:
            raise ValueError(f"precision must be 'auto' or one of {list(SAFE)}, got {precision!r}")
        if width is not None and (isinstance(width, bool) or width < 2):
            raise ValueError(f"width must be at least 2 neurons, got {width!r}")
        self.tau = tau
        self.dead_zone = dead_zone
        self.ladder = ladder if ladder == "auto" else tuple(float(x) for x in ladder)
        if self.ladder != "auto":
            steps = self.ladder
            ascending = all(a < b for a, b in pairwise(steps))
            if not steps or not ascending or steps[0] <= 0 or steps[-1] == math.inf:
                raise ValueError(f"ladder must be positive multiples in ascending order: {steps}")
            if 1.0 not in steps:
                raise ValueError(f"ladder must hold 1, the rung at which b' is read: {steps}")
        self.precision = precision
        self.width = width
        self.reader = RungReader(false_positive_rate, upstream_sign)
        self.prefilter = prefilter
        self._defended = False
        self._hints: dict[str, Precision] = {}
        self._rounding: tuple[Precision, float] | None = None
        self._measured_at = 0

    def prepare(self, anatomy: Anatomy) -> None:
        """A_init: checks the layer, finds the precision, and measures how the model rounds in it.

        The precision is that of the parameters' dtype, unless :meth:`set_precision` or the argument
        said a coarser one.
        """
        super().prepare(anatomy)
        parameter = next(anatomy.model.parameters())
        self._hints["model"] = _of_dtype(parameter.dtype, parameter.device)
        self._rounding = None
        precision = self._resolved(parameter.dtype)
        if self.tau == "auto" and precision in MEASURED:
            dtype = MEASURED[precision]
            found = own_rounding(
                anatomy,
                self.layer,
                SAFE[precision][1],
                together=self.read_together,
                cast=None if parameter.dtype == dtype else dtype,
            )
            self._rounding = None if found is None else (precision, found)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Measures anew once :data:`MEASURE_EVERY` steps have passed, and in a fit from 0 on."""
        if not 0 <= step - self._measured_at < MEASURE_EVERY:
            self._measured_at = step
            self.prepare(anatomy)

    def state_dict(self) -> dict[str, Tensor]:
        """When the rounding was measured, what it is, and the precisions heard of."""
        order = list(SAFE)
        state = {f"hint.{k}": torch.tensor(order.index(v)) for k, v in self._hints.items()}
        if self._rounding is not None:
            state["rounding"] = torch.tensor(self._rounding[1], dtype=torch.float64)
            state["rounding.precision"] = torch.tensor(order.index(self._rounding[0]))
        return state | {"measured_at": torch.tensor(self._measured_at)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state_dict` gave; what is heard afterwards counts more."""
        if not state:
            return
        order = list(SAFE)
        self._measured_at = int(state["measured_at"])
        hints = {k.removeprefix("hint."): v for k, v in state.items() if k.startswith("hint.")}
        self._hints |= {k: order[int(v)] for k, v in hints.items()}
        self._rounding = None
        if "rounding" in state:
            precision = order[int(state["rounding.precision"])]
            self._rounding = precision, float(state["rounding"])

    def set_precision(self, precision: str) -> None:
        """Says in which precision the client runs, in the Trainer's words (``"bf16-mixed"``).

        Used by ``precision="auto"`` only. Where it is another one than before, what was measured no
        longer holds, and the next :meth:`refresh` measures anew.
        """
        name, before = str(precision), self._hints.get("trainer")
        if name in SAFE:
            self._hints["trainer"] = _known(name)
        elif name.startswith("bf16"):
            self._hints["trainer"] = "bf16"
        elif name.startswith("16"):
            self._hints["trainer"] = "fp16"
        elif name.startswith(("32", "64")):
            self._hints["trainer"] = "fp32"
        else:
            raise ValueError(
                f"no known precision: {precision!r}; give one of {list(SAFE)} or a Trainer's own"
            )
        if before not in (None, self._hints["trainer"]):
            self._measured_at = -MEASURE_EVERY

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision; against defended gradients ``ladder="auto"`` is ``(1.0,)``."""
        if facts.precision is not None:
            self.set_precision(facts.precision)
        self._defended = "gradients" in facts.defended

    @property
    def _steps(self) -> tuple[float, ...] | Literal["auto"]:
        """The ladder; ``"auto"`` where it hangs on ``tau``."""
        return (1.0,) if self.ladder == "auto" and self._defended else self.ladder

    @property
    def rungs(self) -> int:
        """K, the length of the ladder."""
        return 14 if self._steps == "auto" else len(self._steps)

    @property
    def guess_rung(self) -> int:
        """The rung whose bias is ``tau``."""
        return 5 if self._steps == "auto" else self._steps.index(1.0)

    def settings(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What is crafted for each target.

        Args:
            targets: (G, D).

        Returns:
            (G, K) ladder of ``tau``, ascending, and (G,) dead zones, at least in float32.

        Raises:
            ValueError: a target is not finite, or all zero where ``tau`` is to follow its size.
        """
        safe_tau, safe_zone = self._relative(self._resolved(targets.dtype))
        targets = self._part(targets.to(_at_least_float32(targets.dtype)))
        sizes = targets.abs().sum(1)
        if not bool(sizes.isfinite().all()):
            raise ValueError("a target is not finite: the server's copy of the model gave no text")
        if "auto" in (self.tau, self.dead_zone) and bool((sizes == 0).any()):
            raise ValueError("a target is all zeros, so that 'auto' finds no scale: set tau")
        taus = safe_tau * sizes if self.tau == "auto" else torch.full_like(sizes, float(self.tau))
        zones = (
            safe_zone * sizes / (targets != 0).sum(1)
            if self.dead_zone == "auto"
            else torch.full_like(sizes, float(self.dead_zone))
        )
        return taus[:, None] * self._multiples(safe_tau).to(taus), zones

    def _relative(self, precision: Precision) -> tuple[float, float]:
        """(tau, dead zone) of ``"auto"``, as in :data:`SAFE`, by what was measured."""
        tau, zone = SAFE[precision]
        if self._rounding is None or self._rounding[0] != precision:
            return tau, zone
        return min(tau, max(SAFE["fp32"][0], MARGIN * self._rounding[1])), zone

    def _multiples(self, safe_tau: float) -> Tensor:
        if self._steps != "auto":
            return torch.tensor(self._steps, dtype=torch.float64)
        top = WIDEST / safe_tau if self.tau == "auto" else 32.0
        below = [0.5**i for i in range(5, 0, -1)]
        above = [top ** (i / 8) for i in range(1, 9)]
        return torch.tensor([*below, 1.0, *above], dtype=torch.float64)

    def _resolved(self, dtype: torch.dtype) -> Precision:
        if self.precision != "auto":
            return self.precision
        order = list(SAFE)
        hints = [*self._hints.values(), _of_dtype(dtype, torch.device("cpu"))]
        return max(hints, key=order.index)

    def _part(self, rows: Tensor) -> Tensor:
        return rows if self.width is None else rows[..., : self.width // 2]

    def craft(self, target: Tensor) -> CraftedFC:
        """A_attack, Algorithm 2: the layers of Eq. 6 for one target, (D,).

        Raises:
            ValueError: the target is not a finite vector.
        """
        if target.dim() != 1:
            raise ValueError(f"one target (D,) is crafted at a time, got {tuple(target.shape)}")
        taus, zones = self.settings(target[None])
        target = target.detach().to(taus.dtype)
        first = TwoIdentities(target, zones[0], self.width or 2 * len(target))
        second = target.new_zeros((1, first.width))
        second[:, : 2 * first.part] = -1.0
        return CraftedFC(first, second, taus[0], self.read_together)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """(B, G, K): the upstream gradients of the inputs within each rung, summed per sample.

        Raises:
            ValueError: shapes that do not fit.
        """
        b = len(hidden)
        dtype = _at_least_float32(torch.promote_types(targets.dtype, hidden.dtype))
        rows, samples, weights = inputs_of(hidden, mask, upstream, self.read_together)
        check_targets(targets, rows.shape[1])
        out = torch.zeros((b * len(targets), self.rungs), dtype=dtype, device=hidden.device)
        if len(targets) and len(rows):
            taus, zones = (x.to(dtype) for x in self.settings(targets))
            row, which, distance = neighbours(
                self._part(rows.to(dtype)),
                self._part(targets.to(dtype)),
                taus[:, -1],
                zones,
                prefilter=self.prefilter,
            )
            fires = distance[:, None] < taus[which]
            parts = torch.where(fires, weights[row].to(dtype)[:, None], 0.0)
            parts.masked_fill_(distance.isnan()[:, None], torch.nan)
            out.index_add_(0, samples[row] * len(targets) + which, parts)
        return out.view(b, len(targets), self.rungs)

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        """A_guess, Algorithm 3: a member where the gradient of the rung ``tau`` is not zero.

        Args:
            gradient: (G, K).
            noise_std: of the noise on each number.

        Returns:
            Scores: without noise the number of rungs from the smallest that fires to the highest
            (0: none fires; K: the nearest input lies within all of them). With noise the
            statistic of :class:`~lightning_fedleak.attacks.membership.base.RungReader`.

        Raises:
            UnusableObservation: the gradient is not finite.
            ValueError: it has another number of rungs, or the noise is negative.
        """
        return self.reader.guess(gradient, noise_std, self.rungs, self.guess_rung)

    def arguments(self) -> dict[str, object]:
        """The settings without what was measured."""
        measured = ("tau_relative", "rounding")
        return {name: value for name, value in self.config().items() if name not in measured}

    def config(self) -> dict[str, object]:
        """Settings for reports.

        ``rounding`` is the model's own as it was measured, None where it was not; ``tau_relative``
        what ``tau="auto"`` comes to for targets in the precision found; both in units of ``‖T‖_1``.
        """
        relative = self._relative(self._resolved(torch.float32))[0]
        return {
            "layer": self.layer,
            "granularity": self.granularity,
            "tau": self.tau,
            "tau_relative": relative if self.tau == "auto" else None,
            "rounding": None if self._rounding is None else self._rounding[1],
            "dead_zone": self.dead_zone,
            "ladder": self._steps if self._steps == "auto" else list(self._steps),
            "precision": self.precision,
            "width": self.width or "auto",
            "tokens": self.tokens,
            "false_positive_rate": self.reader.false_positive_rate,
            "upstream_sign": self.reader.upstream_sign,
        }


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_dtype(dtype: torch.dtype, device: torch.device) -> Precision:
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == torch.float16:
        return "fp16"
    coarse = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if coarse and dtype == torch.float32 else "fp32"


def _known(name: str) -> Precision:
    return next(p for p in SAFE if p == name)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

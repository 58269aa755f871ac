"""How long a sample's gradient may be, all of it or layer by layer, and the noise that covers it.

- *Fixed*: ``min(1, C / |g|) g`` (Abadi et al. 2016).
- *Automatic*: ``g / (|g| + gamma)``, AUTO-S of Bu et al. 2023 (arXiv 2206.07136). No C to
  find: what is released of a sample has a norm below 1, whatever its gradient.
- *Per layer*: each group of parameters is clipped by itself to a C_l of its own. Noise of standard
  deviation s_l on group l is one Gaussian mechanism: scaled by 1 / s_l the noise of all numbers is
  alike, and one sample moves what it is added to by at most ``sqrt(sum (C_l / s_l)^2)``.

Bounds are for an example that is added or removed. One that is replaced by another moves the sum by
up to twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.accounting.accounting import joint_noise_multiplier
from lightning_fedleak.defenses.base import DefenseError

MaxGradNorm = float | Literal["auto"] | Mapping[str, float]
LayerNoise = Literal["equal", "by_clip"]


@dataclass(frozen=True)
class Clip:
    """Clip norms of groups of parameters, and how the noise is shared among them.

    Attributes:
        norms: C_l of each group.
        noise: standard deviation of each group's noise, over the noise multiplier.
        gamma: of automatic clipping; None where gradients are clipped at a fixed norm.
        groups: which group a parameter is in; None where there is one group.
    """

    norms: tuple[float, ...]
    noise: tuple[float, ...]
    gamma: float | None = None
    groups: Mapping[Tensor, int] | None = field(default=None, repr=False)

    @property
    def sensitivity(self) -> float:
        """Norm of what one sample can add, over all groups."""
        return math.hypot(*self.norms)

    def group_of(self, parameter: Tensor) -> int:
        """Which group a parameter is in.

        Raises:
            DefenseError: it was not trained when the fit began.
        """
        if self.groups is None:
            return 0
        if parameter not in self.groups:
            raise DefenseError(
                f"DPSGD: a parameter of shape {tuple(parameter.shape)} is trained that was frozen "
                "or not there when the fit began, so it has no clip norm of its own. Thaw it "
                "before the fit, or clip all layers together (a plain max_grad_norm)."
            )
        return self.groups[parameter]

    def factors(self, norms: Tensor) -> Tensor:
        """What gradients are multiplied by.

        Args:
            norms: (groups, B), or (..., B) of one group; of samples' gradients, infinite for none.
        """
        if len(self.norms) == 1:
            return _factors(norms, self.norms[0], self.gamma)
        each = [_factors(n, c, self.gamma) for n, c in zip(norms, self.norms, strict=True)]
        return torch.stack(each)

    def relative_noise(self, parameter: Tensor) -> float:
        """Standard deviation of its noise over ``noise multiplier * sensitivity``."""
        return self.noise[self.group_of(parameter)] / self.sensitivity


def _factors(norms: Tensor, clip: float, gamma: float | None) -> Tensor:
    if gamma is None:
        return clip / norms.clamp(min=clip)
    return clip / (norms + gamma)


def clip_of(
    max_grad_norm: MaxGradNorm,
    root: nn.Module,
    *,
    gamma: float,
    per_layer: bool,
    layer_noise: LayerNoise,
) -> Clip:
    """The clip norms of a model's layers.

    Args:
        max_grad_norm: see :class:`~lightning_fedleak.defenses.dpsgd.dpsgd.DPSGD`.
        root: the module that is trained.
        gamma: of automatic clipping.
        per_layer: every layer that trains parameters is clipped by itself.
        layer_noise: how the noise is shared among groups.

    Raises:
        DefenseError: a name that is none of the model's, or a trained parameter without a norm.
    """
    trained = [(name, p) for name, p in root.named_parameters() if p.requires_grad]
    automatic = gamma if max_grad_norm == "auto" else None
    if isinstance(max_grad_norm, Mapping):
        names = _longest([name for name, _ in trained], max_grad_norm)
        norms = [float(max_grad_norm[name]) for name in dict.fromkeys(names)]
    else:
        total = 1.0 if max_grad_norm == "auto" else float(max_grad_norm)
        if not per_layer:
            return Clip((total,), (total,), automatic)
        names = [name.rpartition(".")[0] for name, _ in trained]
        count = len(set(names))
        norms = [total / math.sqrt(count)] * count
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups: dict[Tensor, int] = {
        p: index[name] for name, (_, p) in zip(names, trained, strict=True)
    }
    joint = math.hypot(*norms)
    noise = [joint] * len(norms)
    if layer_noise == "by_clip":
        noise = [math.sqrt(len(norms)) * norm for norm in norms]
    assert math.isclose(joint_noise_multiplier(norms, noise), 1.0, rel_tol=1e-12)
    return Clip(tuple(norms), tuple(noise), automatic, groups)


def _longest(names: Sequence[str], norms: Mapping[str, float]) -> list[str]:
    """Of each parameter the longest of the keys that are its own name or a module's around it."""
    found = []
    for name in names:
        own = [k for k in norms if not k or name == k or name.startswith(f"{k}.")]
        if not own:
            raise DefenseError(
                f"DPSGD: max_grad_norm has no norm for '{name}'. Add it, a module around it, or "
                "'' for all the rest."
            )
        found.append(max(own, key=len))
    if unused := sorted(set(norms) - set(found) - {""}):
        raise DefenseError(
            f"DPSGD: max_grad_norm names '{unused[0]}', and the model trains nothing under that "
            f"name. The first that it trains is '{names[0] if names else ''}'."
        )
    return found


__all__ = ["Clip", "LayerNoise", "MaxGradNorm", "clip_of"]

"""What projections of several blocks were given for texts, and how rows are explained by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import Place, states_in, text_blocks
from lightning_fedleak.anatomy.wrappers import unwrap
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.row_space.linear_maps import LinearMap, SharedInput, block_name
from lightning_fedleak.attacks.row_space.pursuit import SharedRows
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model_runs import stop_at

RESIDUAL, CERTAIN = 20.0, 100.0
"""In units of rounding: what a certificate leaves of the rows at most, and what leaving a token out
leaves at least."""
LARGEST_SHARE = 0.9
"""Of the numbers of a state: more states tell nothing."""
NEEDED = 5.0


class FoundText(NamedTuple):
    """A text.

    Attributes:
        tokens: ids; -1 where none was found.
        fits: share of each token's state that the rows explain, in the block that explains least
            (of encoders the mean of the blocks).
    """

    tokens: tuple[int, ...]
    fits: tuple[float, ...]


def readers(known: SharedInput, anatomy: Anatomy) -> list[LinearMap]:
    """Trained maps whose rows are combinations of an input."""
    return [m for m in known.trainable_maps(anatomy) if m.factor != "B"]


class BlockInputs(BottomModel):
    """A copy of the model up to some blocks' projections: what these read, side by side."""

    def __init__(self, anatomy: Anatomy, inputs: Sequence[SharedInput], facts: RunFacts) -> None:
        self.inputs = tuple(inputs)
        names = [name for name, _ in text_blocks(anatomy)]
        deepest = names.index(block_name(inputs[-1].maps[0].name)) + 1
        super().__init__(anatomy, deepest, autocast=facts.autocast)

    def _bind(self, anatomy: Anatomy, step: int) -> None:
        super()._bind(anatomy, step)
        *before, last = self.inputs
        cut = stop_at(anatomy.model, Place("", last.reader, "input"))

        def run(**given: Any) -> Tensor:
            seen: dict[int, Tensor] = {}

            def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[id(module)] = states_in(args, kwargs)

            with ExitStack() as stack:
                for known in before:
                    handle = known.reader.register_forward_pre_hook(keep, with_kwargs=True)
                    stack.callback(handle.remove)
                deepest: Tensor = cut(**given)
            return torch.cat([*(seen[id(known.reader)] for known in before), deepest], -1)

        self._run: Callable[..., Any] = run

    def next_tokens(self, texts: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """Log probabilities (B, n) of tokens (n,) as the next ones of texts, by the model itself.

        The head alone: where a model scales its logits or caps them, that is left out.
        """
        head = unwrap(self.anatomy.head) if self.anatomy.head is not None else None
        if head is None:
            raise ValueError("this model has no head that predicts the next token")
        ends = torch.tensor([len(text) for text in texts], device=tokens.device)
        ids = torch.zeros(len(texts), int(ends.max()), dtype=torch.int64, device=tokens.device)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        run = stop_at(self.anatomy.model, Place("head", head, "input"))
        with self.session():
            states = copy_context().run(run, input_ids=ids, **self._no_cache)[:, -ids.shape[1] :]
            logits: Tensor = head(states[torch.arange(len(texts), device=ends.device), ends - 1])
        return logits.double().log_softmax(-1)[:, tokens]

    def parts(self, states: Tensor) -> list[Tensor]:
        """What each block's projections read, (..., d) float64 of unit length, of (..., n d)."""
        parts = states.double().chunk(len(self.inputs), -1)
        return [nn.functional.normalize(x, dim=-1) for x in parts]


@dataclass(frozen=True, eq=False)
class Explained:
    """Rows and the states that explain them, in units of the rows' noise.

    Attributes:
        residual: root mean square of what is left.
        own: (n,) what leaving out one state would leave.
        basis: (n, d) orthonormal, of the states.
        alone: (n, d) unit, of each state what is orthogonal to all others.
    """

    residual: float
    own: Tensor
    basis: Tensor
    alone: Tensor

    @classmethod
    def of(cls, shared: SharedRows, states: Tensor) -> Explained:
        """Of states (n, d), n at most d."""
        q, r = torch.linalg.qr(states.T)
        unit = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(r[: len(unit)], unit, upper=True)
        size = inverse.norm(dim=1, keepdim=True)
        held = shared.whole @ q
        own = (inverse @ held.T).norm(dim=1) / size[:, 0]
        left = shared.whole - held @ q.T
        return cls(float(left.norm()) / shared.floor, own / shared.floor, q.T, inverse @ q.T / size)

    @property
    def needed(self) -> float:
        """What an exchange leaves at least where it is certainly worse than what is left now."""
        return NEEDED * max(1.0, self.residual)

    @property
    def width(self) -> int:
        """Numbers in a state."""
        return self.basis.shape[1]

    def further(self, shared: SharedRows, others: Tensor) -> tuple[Tensor, Tensor]:
        """Of other states (k, d), how far they lie outside of these, and what they explain besides.

        Returns:
            (k,) norms of what is outside of the basis, and (k,) what is left of the rows along it,
            in units of what noise leaves along any direction.
        """
        outside = others - (others @ self.basis.T) @ self.basis
        size = outside.norm(dim=1)
        left = shared.whole - (shared.whole @ self.basis.T) @ self.basis
        along = left @ (outside / size.clamp_min(1e-300)[:, None]).T
        return size, along.norm(dim=0) / len(left) ** 0.5

    def exchanged(self, number: int, others: Tensor) -> Tensor:
        """(k,) what is left where others (k, d) stand in one state's place."""
        outside = (others - (others @ self.basis.T) @ self.basis).square().sum(1)
        along = (others @ self.alone[number]).square()
        return self.own[number] * (outside / (outside + along).clamp_min(1e-300)).sqrt()


__all__ = [
    "CERTAIN",
    "LARGEST_SHARE",
    "NEEDED",
    "RESIDUAL",
    "BlockInputs",
    "Explained",
    "FoundText",
    "readers",
]

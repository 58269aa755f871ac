"""The attacks on texts by the names that commands and benchmarks use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_fedleak import attacks
from lightning_fedleak.labs.gradient_matching import GradientMatching
from lightning_fedleak.labs.token_relaxation import TokenRelaxation

STEPS_A_SWEEP = 50  # gradient steps between two sweeps of verified changes; not tuned
PAPER_LR = 0.3  # learning rate of the descent with the paper's choices; not tuned
RELAXATION_LR = 0.3  # learning rate of the relaxation; not tuned


def make_adversary(
    name: str,
    layer: int,
    *,
    steps: int = 1000,
    budget_seconds: float | None = None,
    hello: int | None = None,
    special_ids: Sequence[int] = (),
    public_text: attacks.PublicText | Literal["sampled"] | None = "sampled",
) -> attacks.InversionAttack:
    """Return an attack on activations by its name; it is called ``name@layer``.

    Args:
        name: out of ``INVERT_ATTACKS``: ``prefix`` is :class:`PrefixInversion`; ``descent``
            :class:`EmbeddingDescent` as it comes, ``sweeps`` with verified changes, ``paper`` with
            the paper's choices (Eq. 3 and 4 from 'hello') but for its stop at a cosine of .98: it
            goes on until settled; ``relaxation`` :class:`TokenRelaxation`.
        layer: the split.
        steps: most gradient steps of a descent.
        budget_seconds: wall time for one observation, or None.
        hello: id that ``paper`` starts from; None for the mean of the vocabulary.
        special_ids: that ``sweeps`` tries at every position.
        public_text: of :class:`PrefixInversion`.

    Raises:
        ValueError: a setting that the attack refuses.
    """
    label = f"{name}@{layer}"
    common: dict[str, Any] = {"budget_seconds": budget_seconds, "name": label}
    if name == "prefix":
        return attacks.PrefixInversion(layer, public_text, **common)
    common |= {"steps": steps}
    if name == "relaxation":
        return TokenRelaxation(layer, lr=RELAXATION_LR, initial="mean", **common)
    if name == "paper":
        common["descent"] = attacks.DescentSettings(weighting="paper")
        start: Literal["mean"] | int = "mean" if hello is None else hello
        return attacks.EmbeddingDescent(
            layer, lr=PAPER_LR, likeness="cosine", initial=start, **common
        )
    if name == "sweeps":
        return attacks.EmbeddingDescent(
            layer,
            sweeps=max(1, steps // STEPS_A_SWEEP),
            always_try=tuple(special_ids),
            **common,
        )
    return attacks.EmbeddingDescent(layer, **common)


def make_reader(
    name: str, texts: int, length: int, *, budget_seconds: float | None = None
) -> attacks.TextAttack:
    """Return an attack on gradients by its name.

    Args:
        name: out of ``GRADIENT_ATTACKS``: ``subspace`` is :class:`SubspaceTexts`, each other one
            a :class:`GradientMatching`.
        texts: of a batch; ``subspace`` does not use it.
        length: tokens of each text; ``subspace`` does not use it.
        budget_seconds: wall time for one batch, or None.

    Raises:
        ValueError: a setting that the attack refuses.
    """
    if name == "subspace":
        return attacks.SubspaceTexts(budget_seconds=budget_seconds, name=name)
    system: Any = name
    return GradientMatching(texts, length, system, budget_seconds=budget_seconds, name=name)

"""A reference model: trained like the watched one on other texts, and asked about the same texts.

What rows gain in general, from data of their kind and by the same recipe, a reference shows too, so
that what is left is what training on a row itself brought: difficulty calibration (arXiv
2111.08440), or an attack with one reference model (arXiv 2012.07805, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu
from torch import Tensor, nn

from lightning_fedleak.attacks.memorization import CombinedReference
from lightning_fedleak.extras import require_package
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, without_peft
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot

CHANCE = 1e-3
"""p-value below which a reference has seen rows that it scores; 1 sound run in 1,000 is refused."""


def ask_reference(
    reference: Any, anatomy: Anatomy, ask: Callable[[Anatomy], TokenSnapshot]
) -> TokenSnapshot:
    """Return what a reference says of the texts; afterwards it is where it was, or is freed.

    Args:
        reference: a model, or the folder of one or of PEFT's adapters.
        anatomy: of the model that trains, on its device.
        ask: asks a model about the texts.

    Raises:
        ValueError: it cannot be loaded, is the model that trains, or predicts something else.
    """
    with preserve_process():  # new adapters are drawn at random before their weights are loaded
        model = reference if isinstance(reference, nn.Module) else _load(str(reference), anatomy)
        own = {id(p) for p in anatomy.root.parameters() if p.requires_grad}
        if any(id(p) in own for p in model.parameters()):
            raise ValueError(
                "Memorization(reference=): it shares weights with the model that trains: give one "
                "of its own, such as the folder of an earlier run"
            )
        place = next(model.parameters()).device
        try:
            found = find_anatomy(model.to(anatomy.device), kind=anatomy.kind)
            if found.vocab_size != anatomy.vocab_size:
                raise ValueError(
                    f"Memorization(reference=): it predicts {found.vocab_size} tokens or classes, "
                    f"and the model that trains {anatomy.vocab_size}: both need one tokenizer"
                )
            return ask(found)
        finally:
            model.to(place)


def _load(folder: str, anatomy: Anatomy) -> nn.Module:
    """Return the model in a folder, of the class of the one that trains, with its adapters."""
    own = without_peft(anatomy.model)
    load = getattr(type(own), "from_pretrained", None)
    refusal = f"Memorization(reference={folder!r}) cannot be loaded"
    if load is None:
        raise ValueError(f"{refusal} as a {type(own).__name__}: give the model itself")
    adapters, settings = (
        Path(folder) / "adapter_config.json",
        {"dtype": next(own.parameters()).dtype},
    )
    try:
        if not adapters.is_file():
            model: nn.Module = load(folder, **settings)
            return model
        with require_package("peft", "Memorization(reference=) is a folder of adapters"):
            from peft import PeftModel
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not base:
            raise ValueError("its adapter_config.json names no base model: give the model itself")
        return PeftModel.from_pretrained(load(base, **settings), folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{refusal}: {error}") from error


def check_unseen(
    reference: TokenSnapshot, base: TokenSnapshot, compressed: Tensor, trains: Tensor
) -> None:
    """Refuse a reference that tells both sides apart before any training: it has seen some rows.

    Trained on the rows that are left out, for example, it would show members of a model that was
    trained on none.

    Args:
        reference: what it says of N texts.
        base: what the model says before its first step.
        compressed: (N,) see :class:`~lightning_fedleak.model.snapshots.ReleasedModel`.
        trains: (N,) bool, rows of the training data.

    Raises:
        ValueError: the scores of both sides differ by more than chance.
    """
    untrained = ReleasedModel(base, base, compressed, reference=reference)
    scores = CombinedReference().score(untrained)
    p_value = float(mannwhitneyu(scores[trains].numpy(), scores[~trains].numpy()).pvalue)
    if p_value < CHANCE:
        raise ValueError(
            "Memorization(reference=): before any training it scores the rows that are trained on "
            f"otherwise than those that are not (p = {p_value:.1g}), so that it has seen some of "
            "them: give a model that was trained on other rows alone"
        )


def both(base: TokenSnapshot, reference: TokenSnapshot | None) -> dict[str, Tensor]:
    """Return what the base and the reference say, by name, as a private file holds it."""
    named = {name: value.contiguous() for name, value in base._asdict().items()}
    further = {} if reference is None else reference._asdict()
    return {**named, **{f"reference.{name}": value.contiguous() for name, value in further.items()}}


def from_both(tensors: dict[str, Tensor]) -> tuple[TokenSnapshot, TokenSnapshot | None]:
    """Return what :func:`both` has put together.

    Raises:
        TypeError: the tensors are other ones.
    """
    base = {name: value for name, value in tensors.items() if "." not in name}
    further = {n.partition(".")[2]: value for n, value in tensors.items() if "." in n}
    return TokenSnapshot(**base), TokenSnapshot(**further) if further else None

"""A reference model: trained like the watched one on other texts, and asked about the same texts.

What rows gain in general, from data of their kind and by the same recipe, a reference shows too, so
that what is left is what training on a row itself brought: difficulty calibration (arXiv
2111.08440), or an attack with one reference model (arXiv 2012.07805, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu
from torch import Tensor, nn

from lightning_fedleak.attacks.memorization import CombinedReference
from lightning_fedleak.engine.run import Run
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, without_peft
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text
from lightning_fedleak.private_files import hash_tensors, load_private, save_private

CHANCE = 1e-3
"""p-value below which a reference has seen rows that it scores; 1 sound run in 1,000 is refused."""


def ask_reference(reference: Any, run: Run, ask: Callable[[Run], TokenSnapshot]) -> TokenSnapshot:
    """Return what a reference says of the texts; afterwards it is where it was, or is freed.

    Args:
        reference: a model, or the folder of one or of PEFT's adapters.
        run: of the model that trains, on its device.
        ask: asks the model of a run about the texts.

    Raises:
        ValueError: it cannot be loaded, is the model that trains, or predicts something else.
    """
    failure: ValueError | None = None
    with preserve_process():  # new adapters are drawn at random before their weights are loaded
        try:
            beside = _anatomy_of(reference, run.anatomy)
        except ValueError as error:
            failure = error
        if run.on_any_process(failure is not None):  # all ask together, or none does
            other = "Memorization(reference=) cannot be used on another process"
            raise failure or ValueError(other)
        place = beside.device
        try:
            beside.model.to(run.anatomy.device)
            return ask(replace(run, anatomy=beside))
        finally:
            beside.model.to(place)


def _anatomy_of(reference: Any, anatomy: Anatomy) -> Anatomy:
    """Return the parts of the reference; raise a ValueError where it cannot be one."""
    model = reference if isinstance(reference, nn.Module) else _load(str(reference), anatomy)
    trained = {id(p) for p in anatomy.root.parameters() if p.requires_grad}
    if any(id(p) in trained for p in model.parameters()):
        raise ValueError(
            "Memorization(reference=): it shares weights with the model that trains: give one of "
            "its own, such as the folder of an earlier run"
        )
    beside = find_anatomy(model, kind=anatomy.kind)
    if beside.vocab_size != anatomy.vocab_size:
        raise ValueError(
            f"Memorization(reference=): it predicts {beside.vocab_size} tokens or classes, and the "
            f"model that trains {anatomy.vocab_size}: both need one tokenizer"
        )
    return beside


def _load(folder: str, anatomy: Anatomy) -> nn.Module:
    """Return the model in a folder, of the class of the one that trains, with its adapters."""
    base_model = without_peft(anatomy.model)
    kind = type(base_model)
    refusal = f"Memorization(reference={folder!r}) cannot be loaded"
    if not hasattr(kind, "from_pretrained"):
        raise ValueError(f"{refusal} as a {kind.__name__}: give the model itself")
    dtype = next(p.dtype for p in base_model.parameters() if p.is_floating_point())  # not of 4 bits

    def load(source: str) -> nn.Module:
        model, loaded = kind.from_pretrained(source, dtype=dtype, output_loading_info=True)
        if missing := loaded["missing_keys"]:
            raise ValueError(f"'{source}' lacks {len(missing)} tensors of a {kind.__name__}")
        return model  # type: ignore[no-any-return]

    adapters = Path(folder) / "adapter_config.json"
    try:
        if not adapters.is_file():
            return load(folder)
        from peft import PeftModel

        source = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not source:
            raise ValueError("its adapter_config.json names no base model: give the model itself")
        return PeftModel.from_pretrained(load(source), folder)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
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


def digest_answers(
    base: TokenSnapshot, reference: TokenSnapshot | None, texts: Sequence[Text]
) -> str:
    """Return the SHA-256 of the texts and what the base, and the reference, say of them."""
    ids = {f"text{number}": text.ids for number, text in enumerate(texts)}
    return hash_tensors({**_named(base, reference), **ids})


def save_answers(path: Path, base: TokenSnapshot, reference: TokenSnapshot | None) -> None:
    """Write what the base, and the reference, say to a private file.

    Raises:
        OSError: it cannot be written.
    """
    save_private(path, _named(base, reference))


def load_answers(path: Path) -> tuple[TokenSnapshot, TokenSnapshot | None]:
    """Return what :func:`save_answers` wrote.

    Raises:
        ValueError: other users may access the file, or it holds no tensors.
        TypeError: it holds other ones.
        OSError: it cannot be read.
    """
    tensors = load_private(path)
    base = {name: value for name, value in tensors.items() if "." not in name}
    further = {name.partition(".")[2]: value for name, value in tensors.items() if "." in name}
    return TokenSnapshot(**base), TokenSnapshot(**further) if further else None


def _named(base: TokenSnapshot, reference: TokenSnapshot | None) -> dict[str, Tensor]:
    named = {name: value.contiguous() for name, value in base._asdict().items()}
    further = {} if reference is None else reference._asdict()
    return named | {f"reference.{name}": value.contiguous() for name, value in further.items()}

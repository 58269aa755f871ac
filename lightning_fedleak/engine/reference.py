"""A reference model: trained like the watched one on other texts, and asked about the same texts.

What rows gain in general, from data of their kind and by the same recipe, a reference shows too, so
that what is left is what training on a row itself brought: difficulty calibration (arXiv
2111.08440), or an attack with one reference model (arXiv 2012.07805, section 4).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedleak.engine.run import Run
from lightning_fedleak.messages import rank_zero_info, without_messages
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, without_peft
from lightning_fedleak.model.model_state import WeightsWritten, copy_without_hooks, preserve_process
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.private_files import hash_tensors, load_private, plain_name, save_private
from lightning_fedleak.report.records import STRENGTH, WEAK, ReferenceFacts

MIN_STRENGTH = 0.9
"""Share of the model's gain on texts that neither was trained on, below which a reference is weak.

Behind LoRA (stories15M, 185 texts of WikiText-2) references of 200 and 50 rows had 1.02 and .79 of
it, and showed a TPR of .86 and .52 at .1% FPR. Lower: weaker references pass for strong ones.
"""


def ask_reference(
    reference: Any, rows: int | None, run: Run, ask: Callable[[Run], TokenSnapshot]
) -> tuple[TokenSnapshot, ReferenceFacts]:
    """Return what a reference says of the texts, and which it is; then it is freed, or moved back.

    Args:
        reference: a model, or the folder of one or of PEFT's adapters.
        rows: how many it was trained on; None: not known.
        run: The run of the model that trains, on its device.
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
            facts = describe_reference(reference, rows, beside)
            beside.model.to(run.anatomy.device)
            return ask(replace(run, anatomy=beside)), facts
        finally:
            beside.model.to(place)


def describe_reference(reference: Any, rows: int | None, anatomy: Anatomy) -> ReferenceFacts:
    """Return which reference it is: the same weights in a folder and as a model have one hash.

    Args:
        reference: a model, or a folder.
        rows: how many it was trained on; None: not known.
        anatomy: The anatomy of its model.
    """
    kind = "module"
    if not isinstance(reference, nn.Module):
        kind = "adapters" if (Path(reference) / "adapter_config.json").is_file() else "folder"
    weights = {plain_name(name): p for name, p in anatomy.model.named_parameters()}
    name = type(without_peft(anatomy.model)).__name__
    return ReferenceFacts(kind=kind, model=name, rows=rows, weights=hash_tensors(weights))


def _anatomy_of(reference: Any, anatomy: Anatomy) -> Anatomy:
    """Return the parts of the reference; raise a ValueError where it cannot be one."""
    if not isinstance(reference, nn.Module | str | Path):
        raise ValueError(
            f"Memorization(reference=): a function that returns a {type(reference).__name__} names "
            "no model: have it return the model that it trained, or its folder"
        )
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


# ---- trained before the first look ---------------------------------------------------------


def announce_references(run: Run, sizes: Sequence[int], row_seconds: float) -> None:
    """Say at setup which references are trained, and what that takes.

    Args:
        run: The run of the model that trains.
        sizes: rows of each of them.
        row_seconds: The seconds that training on a row is estimated to take.
    """
    which = f"a reference is trained on {sizes[0]:,} rows, which are not asked about"
    if len(sizes) > 1:
        total = f"{sum(sizes):,} rows, too few for one on rows that are not asked about"
        which = f"two references are trained, one after the other, on halves of {total}"
    cost = f"about {row_seconds * sum(sizes):.2g} s a pass"
    cost += f", {run.epochs} passes" * (run.epochs is not None)
    megabytes = sum(p.nbytes for p in run.anatomy.root.parameters()) / 1e6
    rank_zero_info(
        f"{run.watcher}: {which} ({cost}). For that time a second model ({megabytes:,.3g} MB of "
        "weights) and its optimizer are in memory"
    )


def train_references(
    source: Any,
    data: Sequence[Dataset[Any]],
    seen: Tensor,
    run: Run,
    ask: Callable[[Run], TokenSnapshot],
    seed: int,
) -> tuple[TokenSnapshot, ReferenceFacts]:
    """Train one or two references, one after the other; return what they say, and which they are.

    Each text's answer is that of a reference that was not trained on it. Afterwards random states
    are what they were, and the references are freed.

    Args:
        source: ``"auto"``: by the run's recipe; or a function of the user's that trains on a data
            set and returns a model.
        data: what each is trained on.
        seen: (N,) bool, the texts that the first is trained on, so that the last answers.
        run: The run of the model that trains, before its first step.
        ask: asks the model of a run about the N texts.
        seed: The seed of the order of the rows, and of dropout.

    Raises:
        ValueError: the recipe is not known, the training fails, or what the function returns cannot
            be a reference.
        WeightsWritten: the training wrote to the run's own model.
    """
    answers, facts = list[TokenSnapshot](), list[ReferenceFacts]()
    for rows in data:
        with preserve_process():
            torch.manual_seed(seed)
            beside = _train(source, rows, run)
            beside.model.to(run.anatomy.device)
            answers.append(ask(replace(run, anatomy=beside)))
        facts.append(describe_reference(beside.model, len(rows), beside))  # type: ignore[arg-type]
        del beside
    pairs = zip(answers[0], answers[-1], strict=True)
    unseen = TokenSnapshot(*(torch.where(seen[:, None], last, first) for first, last in pairs))
    weights = facts[0].weights
    if len(facts) > 1:
        weights = hashlib.sha256("".join(x.weights for x in facts).encode()).hexdigest()
    kind = "auto" if source == "auto" else "function"
    return unseen, replace(facts[0], kind=kind, weights=weights, models=len(facts))


def _train(source: Any, rows: Dataset[Any], run: Run) -> Anatomy:
    """Return the parts of a model that was trained on rows, by the run's recipe or a function."""
    root = run.anatomy.root
    before = [(p, p._version, p.grad) for p in root.parameters()]
    try:
        if source == "auto":
            beside = copy_without_hooks(run.anatomy, root, __name__.partition(".")[0])
            with without_messages():  # of a second Trainer
                run.fit_copy(beside.root, rows)
        else:
            beside = _anatomy_of(source(rows), run.anatomy)
    except ValueError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(
            f"Memorization(reference={source!r}): the reference cannot be trained ({kind}): give "
            "the folder of a model that was trained on other rows"
        ) from error
    if any(p._version != version or p.grad is not gradient for p, version, gradient in before):
        raise WeightsWritten(
            "the training of the reference wrote to the model of the run, which shares weights or "
            "compiled code with its copy: give a reference of another run"
        )
    return beside


class _Strength(NamedTuple):
    """How far a reference was trained, beside the model that it is compared with.

    Attributes:
        share: The share of the model's gain that the reference has; NaN if it is unknown.
        weak: why the reference is weak, in words; empty where it is not.
    """

    share: float
    weak: str


def measure_strength(
    game: ReleasedModel, members: Tensor, rows: int | None, trained: int
) -> _Strength:
    """Return whether a reference is weak, so that a low number beside it is *unknown*.

    A reference must have gained what texts of the kind gain in general. That shows on the
    non-members, which neither model was trained on: there the mean gain of a token over the base is
    compared. A reference with less than :data:`MIN_STRENGTH` of the model's gain is weak. So is
    one that was trained on fewer rows than the model, whatever it gained, since such ones were
    measured to show less behind LoRA. Where the model itself has not gained there (by two standard
    errors) nothing is measured, and a reference of an unstated number of rows counts as weak. A
    weak reference hides leakage and makes none up, so that a high number stands.

    Args:
        game: what the model, its base and the reference say of N texts.
        members: (N,) bool.
        rows: The rows that the reference was trained on; None: not known.
        trained: rows of the model's training data.
    """
    assert game.reference is not None
    base = game.base.mean_log_probs()[~members]
    own, its = (x.mean_log_probs()[~members] - base for x in (game.now, game.reference))
    is_measured = float(own.mean()) > 2 * float(own.std()) / math.sqrt(len(own))
    share = float(its.mean() / own.mean()) if is_measured else math.nan
    if rows is not None and rows < trained:
        return _Strength(share, f"it was trained on {rows} rows, and the model on {trained}")
    if share < MIN_STRENGTH:
        gained = f"on texts that neither was trained on it has gained {share:.0%} of what the model"
        return _Strength(share, f"{gained} has")
    if math.isnan(share) and rows is None:
        return _Strength(share, "nothing shows how far it was trained: say how many rows it had")
    return _Strength(share, "")


def beside(strength: _Strength, values: Mapping[str, float]) -> dict[str, float]:
    """Return what a score beside a reference shows; beside a weak one nothing bounds it above."""
    facts = {WEAK: float(bool(strength.weak)), STRENGTH: strength.share}
    unbounded = {n: math.nan for n in values if n.endswith("_high")} if strength.weak else {}
    return {**values, **unbounded, **facts}


def digest_answers(
    base: TokenSnapshot, reference: TokenSnapshot | None, texts: Sequence[Tensor]
) -> str:
    """Return the SHA-256 of the texts' ids and what the base, and the reference, say of them."""
    ids = {f"text{number}": text for number, text in enumerate(texts)}
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

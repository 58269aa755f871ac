"""A reference model: trained like the watched one on other texts, and queried with the same texts.

A reference shows how much the likelihood of a text rises by training on texts of its kind. The
rest of the rise is due to training on the text itself. This is difficulty calibration (arXiv
2111.08440), or an attack with one reference model (arXiv 2012.07805, section 4). The *base* is the
watched model before its first step. The user passes references (:func:`ask_references`), or some
are trained before the first step (:func:`train_references`). Their answers are the
log-probabilities of the texts' tokens. A reference that was trained less than the model is *weak*:
scores with it are too low.
"""

import hashlib
import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fedleak.attacks.memorization.references import MIN_WEIGHT, fit_base, knows_rows
from lightning_fedleak.engine.run import Run
from lightning_fedleak.messages import rank_zero_info, without_messages
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, without_peft
from lightning_fedleak.model.loading import load_adapters, load_whole
from lightning_fedleak.model.model_state import WeightsWritten, preserve_process
from lightning_fedleak.model.snapshots import References, ReleasedModel, TokenSnapshot
from lightning_fedleak.private_files import hash_tensors, load_private, plain_name, save_private
from lightning_fedleak.report.records import STRENGTH, WEAK, ReferenceFacts

MIN_STRENGTH = 0.9
"""Smallest share of the model's gain, on texts that neither was trained on, of a strong reference.

For a LoRA model (stories15M, 185 texts of WikiText-2) references of 200 and 50 rows had 1.02 and
.79 of its gain, and a TPR of .86 and .52 at .1% FPR. Lower: weaker ones pass for strong. Of one
recipe and as many rows, another LoRA had .99; a two-layer GPT-2 that knew the domain .54 to 1.71,
12 of 39 below .9, so that honest ones are called weak there.
"""

MAX_STRENGTH = 1.2
"""Largest such share of a reference of no more rows than the model.

Clean references had .92 to 1.02, and ones that saw 27% of all rows 1.25 to 1.41. Higher: these hide
leakage.
"""


def ask_references(
    sources: Sequence[Any],
    rows: Sequence[Any],
    contents: Sequence[bytes],
    read: Callable[[Any], set[bytes]],
    run: Run,
    ask: Callable[[Run], TokenSnapshot],
) -> tuple[References, ReferenceFacts]:
    """Query given references with N texts, and return their answers and a description of all.

    Args:
        sources: K models or folders.
        rows: For each of them the number of its training rows, a data set of these, or None.
        contents: The contents of the N texts.
        read: Returns the contents of the texts of a data set.
        run: The run of the model that trains, on its device.
        ask: Returns the token log-probabilities of the texts, from the model of a run.

    Raises:
        ValueError: See :func:`_ask_reference`.
    """
    counts = [part if part is None or isinstance(part, int) else len(part) for part in rows]
    seen = [
        set() if count is part else read(part) for count, part in zip(counts, rows, strict=True)
    ]
    asked = [_ask_reference(*one, run, ask) for one in zip(sources, counts, strict=True)]
    answers = References([answer for answer, _ in asked], inside_of(contents, seen))
    return answers, describe_all([facts for _, facts in asked])


def inside_of(contents: Sequence[bytes], seen: Sequence[Container[bytes]]) -> Tensor:
    """Return (K, N) bool, which of N contents each of K sets holds."""
    return torch.tensor([[content in one for content in contents] for one in seen])


def describe_all(facts: Sequence[ReferenceFacts]) -> ReferenceFacts:
    """Return the description of several references: the fewest rows, and a hash of all hashes."""
    rows = None if any(one.rows is None for one in facts) else min(one.rows or 0 for one in facts)
    weights = "".join(one.weights for one in facts)
    weights = hashlib.sha256(weights.encode()).hexdigest() if len(facts) > 1 else weights
    return replace(facts[0], rows=rows, weights=weights, models=len(facts))


def _ask_reference(
    reference: Any, rows: int | None, run: Run, ask: Callable[[Run], TokenSnapshot]
) -> tuple[TokenSnapshot, ReferenceFacts]:
    """Query a given reference with the texts, and return its answers and its description.

    The reference runs on the device of the run. Afterwards a model that was passed is moved back.

    Args:
        reference: A model, or the folder of one or of PEFT adapters.
        rows: The number of rows that it was trained on; None if it is not known.
        run: The run of the model that trains, on its device.
        ask: Returns the token log-probabilities of the texts, from the model of a run.

    Raises:
        ValueError: The reference cannot be loaded, shares weights with the model that trains, or
            has another vocabulary, on this process or another one.
    """
    failure: ValueError | None = None
    with preserve_process():  # new adapters are drawn at random before their weights are loaded
        try:
            anatomy = _anatomy_of(reference, run.anatomy)
        except ValueError as error:
            failure = error
        if run.on_any_process(failure is not None):  # all processes query together, or none does
            other = "Memorization(reference=) cannot be used on another process"
            raise failure or ValueError(other)
        device = anatomy.device
        try:
            facts = describe_reference(reference, rows, anatomy)
            anatomy.model.to(run.anatomy.device)
            return ask(run.altered(anatomy=anatomy)), facts
        finally:
            anatomy.model.to(device)


def describe_reference(reference: Any, rows: int | None, anatomy: Anatomy) -> ReferenceFacts:
    """Return the description of a reference for the run's record, with a hash of its weights.

    The hash is the same if the weights are passed as a model and as a folder.

    Args:
        reference: A model, or a folder.
        rows: The number of rows that it was trained on; None if it is not known.
        anatomy: The anatomy of its model.
    """
    kind = "module"
    if not isinstance(reference, nn.Module):
        kind = "adapters" if (Path(reference) / "adapter_config.json").is_file() else "folder"
    weights = {plain_name(name): p for name, p in anatomy.model.named_parameters()}
    name = type(without_peft(anatomy.model)).__name__
    return ReferenceFacts(kind=kind, model=name, rows=rows, weights=hash_tensors(weights))


def _anatomy_of(reference: Any, anatomy: Anatomy) -> Anatomy:
    """Return the parts of a reference model, or raise a ValueError if it cannot be a reference."""
    model = reference if isinstance(reference, nn.Module) else _load(str(reference), anatomy)
    trained = {id(p) for p in anatomy.root.parameters() if p.requires_grad}
    if any(id(p) in trained for p in model.parameters()):
        raise ValueError(
            "Memorization(reference=): it shares weights with the model that trains: give one of "
            "its own, such as the folder of an earlier run"
        )
    parts = find_anatomy(model, kind=anatomy.kind)
    if parts.vocab_size != anatomy.vocab_size:
        raise ValueError(
            f"Memorization(reference=): it predicts {parts.vocab_size} tokens or classes, and the "
            f"model that trains {anatomy.vocab_size}: both need one tokenizer"
        )
    return parts


def _load(folder: str, anatomy: Anatomy) -> nn.Module:
    """Load a model of the same class as the one that trains, with adapters if the folder has some.

    Raises:
        ValueError: It cannot be loaded, or lacks tensors.
    """
    base_model = without_peft(anatomy.model)
    kind = type(base_model)  # loading fails for a class without `from_pretrained`
    # Weights of 4 bits are stored as integers: take the dtype of another parameter.
    dtype = next(p.dtype for p in base_model.parameters() if p.is_floating_point())
    adapters, source = Path(folder) / "adapter_config.json", folder
    try:
        if adapters.is_file():
            source = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        model: nn.Module = load_whole(kind, source, dtype=dtype)[0]
        return load_adapters(model, folder) if adapters.is_file() else model
    except Exception as error:
        message = f"Memorization(reference={folder!r}) cannot be loaded as a {kind.__name__}"
        raise ValueError(f"{message} ({error}): give a folder of one, or the model") from error


# ---- references that are trained before the first step --------------------------------------


def announce_references(run: Run, sizes: Sequence[int], row_seconds: float) -> None:
    """Log at setup which references are trained, and the time and memory that this needs.

    Args:
        run: The run of the model that trains.
        sizes: The number of training rows of each reference.
        row_seconds: The estimated seconds of training on one row.
    """
    which = f"a reference is trained on {sizes[0]:,} rows, which are not asked about"
    if (n := len(sizes)) > 1:
        total = f"{sum(sizes[:2]):,} rows"
        total += ", too few for one on rows that are not asked about" * (n == 2)
        which = f"{n} references are trained, one after the other, on halves of {total}"
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
    inside: Tensor,
    run: Run,
    ask: Callable[[Run], TokenSnapshot],
    seed: int,
) -> tuple[References, ReferenceFacts]:
    """Train K references, query them, and return their answers and their description.

    They are trained one after the other. Afterwards random states are restored, and the references
    are freed.

    Args:
        source: ``"auto"`` to train by the run's recipe; or the user's function, which trains on a
            data set and returns a model.
        data: The training rows of each reference.
        inside: (K, N) bool, the texts that each reference is trained on.
        run: The run of the model that trains, before its first step.
        ask: Returns the token log-probabilities of the N texts, from the model of a run.
        seed: The seed of the order of the rows, and of dropout.

    Raises:
        ValueError: The recipe is not known, the training fails, or the function returns something
            that cannot be a reference.
        WeightsWritten: The training wrote to the run's own model.
    """
    answers, facts = list[TokenSnapshot](), list[ReferenceFacts]()
    for rows in data:
        with preserve_process():
            torch.manual_seed(seed)
            parts = _train(source, rows, run)
            parts.model.to(run.anatomy.device)
            answers.append(ask(run.altered(anatomy=parts)))
        facts.append(describe_reference(parts.model, len(rows), parts))  # type: ignore[arg-type]
        del parts
    kind = "auto" if source == "auto" else "function"
    return References(answers, inside), replace(describe_all(facts), kind=kind)


def _train(source: Any, rows: Dataset[Any], run: Run) -> Anatomy:
    """Return the parts of a model that was trained on rows, by the run's recipe or a function."""
    root = run.anatomy.root
    before = [(p, p._version, p.grad) for p in root.parameters()]
    try:
        if source == "auto":
            parts = deepcopy(run.anatomy)  # this package's hooks do nothing in it
            with without_messages():  # hides the messages of a second Trainer
                run.fit_copy(parts.root, rows)
        else:
            parts = _anatomy_of(source(rows), run.anatomy)
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
    return parts


class Strength(NamedTuple):
    """How far a reference was trained, compared with the watched model.

    Attributes:
        share: The gain of the reference as a share of the model's; NaN if it is unknown.
        weak: Why the reference is weak, in words; empty if it is not.
        weight: Its weight in the fit of the score; below :data:`MIN_WEIGHT` it is not used.
        knows: Whether references know the rows that they are said to be trained on; else no one is
            used.
    """

    share: float
    weak: str
    weight: float
    knows: bool = True

    @property
    def is_used(self) -> bool:
        """Return whether the score uses the reference."""
        return self.knows and self.weight >= MIN_WEIGHT

    @property
    def note(self) -> str:
        """Return in words what is wrong with the reference; empty if nothing is."""
        unused = f"it is not used, because its weight beside the base is {self.weight:.2f}"
        strange = "it is not used, because it does not know the rows that it is said to have seen"
        parts = f"it is weak: {self.weak}" * bool(self.weak), strange * (not self.knows)
        return "; ".join(filter(None, (*parts, unused * (self.weight < MIN_WEIGHT))))


def measure_strength(
    game: ReleasedModel, members: Tensor, rows: int | None, trained: int
) -> Strength:
    """Return whether a reference is weak, so that a low score with it is *unknown*.

    The gain of a model is the mean rise of the log-probability of a token over the base model. It
    is compared on the non-members, which neither model was trained on. A reference with less than
    :data:`MIN_STRENGTH` of the model's gain is weak. So is a reference of fewer rows than the
    model's, whatever it gained: with LoRA such references were measured to show less. If the gain
    of the model itself is below two standard errors, nothing is measured, and a reference with an
    unknown number of rows counts as weak. A weak reference hides leakage but invents none, so that
    a high score remains valid.

    Args:
        game: The answers of the model, its base and the reference for N texts.
        members: (N,) bool, the texts that the model is trained on.
        rows: The number of rows that the reference was trained on; None if it is not known.
        trained: The number of rows of the model's training data.
    """
    assert game.references is not None
    unseen = game.base._replace(log_probs=game.references.log_probs)
    base = game.base.mean_log_probs()[~members]
    gain, reference = (x.mean_log_probs()[~members] - base for x in (game.now, unseen))
    is_measured = float(gain.mean()) > 2 * float(gain.std()) / math.sqrt(len(gain))
    share = float(reference.mean() / gain.mean()) if is_measured else math.nan
    gained = f"on texts that neither was trained on it has gained {share:.0%} of what the model has"
    weak = ""
    if rows is not None and rows < trained:
        weak = f"it was trained on {rows} rows, and the model on {trained}"
    elif share < MIN_STRENGTH:
        weak = gained
    elif share > MAX_STRENGTH and (rows or trained) <= trained:
        weak = f"{gained}: it may have seen them"
    elif math.isnan(share) and rows is None:
        weak = "nothing shows how far it was trained: say how many rows it had"
    return Strength(share, weak, fit_base(game)[1], knows_rows(game))


def beside(strength: Strength, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a score with a reference, and the strength of that reference.

    With a weak reference the upper ends of intervals are NaN: the leakage may be higher.
    """
    facts = {WEAK: float(bool(strength.weak)), STRENGTH: strength.share}
    unbounded = {n: math.nan for n in values if n.endswith("_high")} if strength.weak else {}
    return {**values, **unbounded, **facts}


def announce_strength(run: Run, strength: Strength | None) -> None:
    """Log what is wrong with a reference, if anything is."""
    if strength is not None and strength.note:
        rank_zero_info(f"{run.watcher}: of the reference: {strength.note}")


def digest_answers(
    key: Tensor, base: TokenSnapshot, references: References | None, texts: Sequence[Tensor]
) -> str:
    """Return the SHA-256 of a key, the texts' token ids and the answers to the texts."""
    ids = {f"text{number}": text for number, text in enumerate(texts)}
    return hash_tensors({"key": key, **_named(base, references), **ids})


def save_answers(
    path: Path, key: Tensor, base: TokenSnapshot, references: References | None
) -> None:
    """Write a key and the answers of the base and of references, if any, to a private file.

    Raises:
        OSError: The file cannot be written.
    """
    save_private(path, {"key": key, **_named(base, references)})


def load_answers(path: Path) -> tuple[Tensor, TokenSnapshot, References | None]:
    """Return what :func:`save_answers` wrote.

    Raises:
        ValueError: Other users may access the file, or it holds no tensors.
        TypeError: It holds other tensors.
        KeyError: It holds no key.
        OSError: The file cannot be read.
    """
    tensors = load_private(path)
    key, inside = tensors.pop("key"), tensors.pop("inside", None)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        parts.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = value
    base = TokenSnapshot(**parts.pop(""))
    answers = [TokenSnapshot(**parts[str(n)]) for n in range(len(parts))]
    return key, base, None if inside is None else References(answers, inside.bool())


def _named(base: TokenSnapshot, references: References | None) -> dict[str, Tensor]:
    """Return the tensors of all answers by name, those of references with their number before."""
    named = {name: value.contiguous() for name, value in base._asdict().items()}
    if references is not None:
        named["inside"] = references.inside.to(torch.uint8)
        for n, answer in enumerate(references.answers):
            named |= {f"{n}.{name}": value.contiguous() for name, value in answer._asdict().items()}
    return named

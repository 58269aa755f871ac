"""Attack and task accuracy over splits, lengths and noise levels, one cell at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks import InversionAttack, TextAttack
from lightning_fedleak.metrics.rates import Rate
from lightning_fedleak.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model_runs import hidden_states
from lightning_fedleak.studies.invert.noise import Noise, Utility, gaussian_noise, utility

ROUGE_UP_TO = 512  # tokens of a text; ROUGE-L of longer ones takes time with the square


Rates = Mapping[str, Rate]
A = TypeVar("A", bound=TextAttack)


class JsonCell:
    """A frozen dataclass of results that is written to JSON and read from it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become None."""
        content: dict[str, Any] = finite(asdict(self))  # type: ignore[call-overload]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the cell that :meth:`to_dict` wrote."""
        values = dict(content)
        if values.get("utility") is not None:
            values["utility"] = Utility(**_numbers(values["utility"], "accuracy"))
        values["rates"] = {
            name: Rate(**_numbers(rate, "value", "low", "high"))
            for name, rate in values["rates"].items()
        }
        return cls(**_numbers(values, "seconds", "cpu_seconds", "prepare_seconds", "candidates"))


def finite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, also in dicts."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the values with NaN in place of None under some names."""
    return {k: math.nan if v is None and k in names else v for k, v in values.items()}


@dataclass(frozen=True)
class ActivationCell(JsonCell):
    """One attack on the texts of one length, sent through one split with one noise level.

    Attributes:
        attack: its name.
        layer: the split.
        blocks: of the whole model.
        length: tokens of each text.
        sigma: of the noise.
        relative: whether in standard deviations per dimension.
        texts: attacked.
        utility: of the whole model from the noised states; None where it could not be measured.
        rates: by the names of :func:`~lightning_fedleak.metrics.texts.
            reconstruction_rates`, each with its 95% interval; empty where the attack failed.
        seconds: wall time of the attack on all texts.
        cpu_seconds: processor time of it, of all threads: what counts on a busy machine.
        prepare_seconds: wall time of its preparation, once for each split.
        candidates: verified per token.
        steps: gradient steps per text, or None.
        budget_seconds: wall time that the attack was given for all texts; None for no bound.
        finished: False where the time budget cut anything off.
        problem: what went wrong, or None.
    """

    attack: str
    layer: int
    blocks: int
    length: int
    sigma: float
    relative: bool
    texts: int
    utility: Utility | None = None
    rates: Rates = field(default_factory=dict)
    seconds: float = math.nan
    cpu_seconds: float = math.nan
    prepare_seconds: float = math.nan
    candidates: float = math.nan
    steps: float | None = None
    budget_seconds: float | None = None
    finished: bool = True
    problem: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """Return the wall time for a token."""
        return self.seconds / (self.texts * self.length)


def run_cells(
    anatomy: Anatomy,
    rows: Mapping[int, Tensor],
    attacks: Sequence[tuple[str, Callable[[int], InversionAttack]]],
    layers: Sequence[int],
    noises: Sequence[Noise],
    *,
    texts: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Iterator[ActivationCell]:
    """Yield each cell when it is measured: layers, attacks on them, lengths, noise levels.

    The first ``texts`` of the rows are attacked, all of them measure the utility, with noise of the
    same law. An attack that raises costs its own cells and no other's; so does a utility that
    cannot be measured. ``KeyboardInterrupt`` is passed on.

    Args:
        anatomy: of the model.
        rows: (n, L) token ids without padding, by their length L.
        attacks: names, and how to make each for a split.
        layers: splits.
        noises: on what is sent.
        texts: attacked in each cell.
        tokenizer: for the task of a masked model: its mask, and special tokens, never masked.
        announce: called with the name of what comes next.
    """
    special: dict[str, Any] = {}
    if tokenizer is not None:
        special["mask_token_id"] = tokenizer.mask_token_id
        special["special_ids"] = tokenizer.all_special_ids
    for layer in layers:
        useful: dict[tuple[int, Noise], Utility | str] = {}
        for name, make in attacks:
            announce(f"preparing {name}@{layer}")
            attack, seconds = prepared(partial(make, layer), anatomy)
            for length, ids in rows.items():
                for noise in noises:
                    if (length, noise) not in useful:
                        announce(f"utility, split {layer}, {length} tokens")
                        try:
                            useful[length, noise] = utility(anatomy, layer, ids, noise, **special)
                        except Exception as error:
                            useful[length, noise] = f"utility: {describe(error)}"
                    announce(f"{name}, split {layer}, {length} tokens, noise {noise.sigma:g}")
                    task = useful[length, noise]
                    cell = ActivationCell(
                        attack=name,
                        layer=layer,
                        blocks=len(anatomy.blocks),
                        length=length,
                        sigma=noise.sigma,
                        relative=noise.relative,
                        texts=min(texts, len(ids)),
                        utility=task if isinstance(task, Utility) else None,
                        prepare_seconds=seconds,
                        problem=None if isinstance(task, Utility) else task,
                    )
                    yield _attacked(cell, attack, anatomy, ids, noise)


def prepared(make: Callable[[], A], anatomy: Anatomy) -> tuple[A | Exception, float]:
    """Return a new attack, prepared, and the seconds that this took; the error where one came."""
    start = time.perf_counter()
    try:
        attack = make()
        attack.prepare(anatomy)
    except Exception as error:
        return error, math.nan
    return attack, time.perf_counter() - start


def _attacked(
    cell: ActivationCell,
    attack: InversionAttack | Exception,
    anatomy: Anatomy,
    ids: Tensor,
    noise: Noise,
) -> ActivationCell:
    """Return the cell with the results of the attack."""
    try:
        if isinstance(attack, Exception):
            raise attack
        cell = replace(cell, budget_seconds=attack.budget_seconds)
        hidden = hidden_states(anatomy, cell.layer, ids)
        sent = (hidden + gaussian_noise(hidden, noise))[: cell.texts]
        truth = ids[: cell.texts]
        start, cpu_seconds = time.perf_counter(), time.process_time()
        guess = attack.reconstruct(sent, None, None)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_seconds
        scores = sentence_scores(guess.tokens, truth, rouge=cell.length <= ROUGE_UP_TO)
    except Exception as error:
        problems = [p for p in (cell.problem, describe(error)) if p]
        return replace(cell, problem="; ".join(problems), finished=False)
    steps = getattr(guess, "steps", None)
    return replace(
        cell,
        rates=reconstruction_rates(scores, seed=noise.seed),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        candidates=guess.candidates / truth.numel(),
        steps=None if steps is None else float(steps.double().mean()),
        finished=guess.finished,
    )


def describe(error: Exception) -> str:
    """Return the class and the message of an error."""
    return f"{type(error).__name__}: {error}"

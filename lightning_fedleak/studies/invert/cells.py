"""Attack and task accuracy over splits, lengths and noise levels, one cell at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.texts.base import InversionAttack
from lightning_fedleak.metrics.rates import Rate
from lightning_fedleak.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model_runs import hidden_states
from lightning_fedleak.studies.invert.noise import gaussian_noise
from lightning_fedleak.studies.invert.task import Utility, utility

ROUGE_UP_TO = 512  # tokens of a text; ROUGE-L of longer ones takes time with the square


@dataclass(frozen=True)
class Cell:
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
    rates: Mapping[str, Rate] = field(default_factory=dict)
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become None."""
        content: dict[str, Any] = finite(asdict(self) | {"rates": dict(self.rates)})
        content["rates"] = {name: finite(asdict(rate)) for name, rate in self.rates.items()}
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Cell:
        """Return the cell that :meth:`to_dict` wrote."""
        values = dict(content)
        if values["utility"] is not None:
            values["utility"] = Utility(**numbers(values["utility"], ("accuracy",)))
        values["rates"] = {
            name: Rate(**numbers(rate, ("value", "low", "high")))
            for name, rate in values["rates"].items()
        }
        return cls(**numbers(values, ("seconds", "cpu_seconds", "prepare_seconds", "candidates")))


def finite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite, also in dicts."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values with NaN in place of None under some names."""
    return {k: math.nan if v is None and k in names else v for k, v in values.items()}


def run_cells(
    anatomy: Anatomy,
    rows: Mapping[int, Tensor],
    attacks: Sequence[tuple[str, Callable[[int], InversionAttack]]],
    layers: Sequence[int],
    sigmas: Sequence[float],
    *,
    relative: bool,
    texts: int,
    seed: int = 0,
    mask_token_id: int | None = None,
    special_ids: Sequence[int] = (),
    announce: Callable[[str], None] = lambda _: None,
) -> Iterator[Cell]:
    """Yield each cell when it is measured: layers, attacks on them, lengths, noise levels.

    The first ``texts`` of the rows are attacked, all of them measure the utility, with noise of the
    same law. An attack that raises costs its own cells and no other's; so does a utility that
    cannot be measured. ``KeyboardInterrupt`` is passed on.

    Args:
        anatomy: of the model.
        rows: (n, L) token ids without padding, by their length L.
        attacks: names, and how to make each for a split.
        layers: splits.
        sigmas: noise levels.
        relative: of the noise, see :func:`~lightning_fedleak.studies.invert.noise.gaussian_noise`.
        texts: attacked in each cell.
        seed: of the noise.
        mask_token_id: for the task of a masked model.
        special_ids: never masked in it.
        announce: called with the name of what comes next.
    """
    for layer in layers:
        useful: dict[tuple[int, float], Utility | str] = {}
        for name, make in attacks:
            attack, prepared = _prepared(make, layer, anatomy, announce)
            for length, ids in rows.items():
                for sigma in sigmas:
                    if (length, sigma) not in useful:
                        announce(f"utility, split {layer}, {length} tokens")
                        useful[length, sigma] = _utility(
                            anatomy, layer, ids, sigma, relative, seed, mask_token_id, special_ids
                        )
                    announce(f"{name}, split {layer}, {length} tokens, noise {sigma:g}")
                    task = useful[length, sigma]
                    cell = Cell(
                        attack=name,
                        layer=layer,
                        blocks=len(anatomy.blocks),
                        length=length,
                        sigma=sigma,
                        relative=relative,
                        texts=min(texts, len(ids)),
                        utility=task if isinstance(task, Utility) else None,
                        prepare_seconds=prepared,
                        problem=None if isinstance(task, Utility) else task,
                    )
                    yield _attacked(cell, attack, anatomy, ids, seed)


def _prepared(
    make: Callable[[int], InversionAttack],
    layer: int,
    anatomy: Anatomy,
    announce: Callable[[str], None],
) -> tuple[InversionAttack | Exception, float]:
    start = time.perf_counter()
    try:
        attack = make(layer)
        announce(f"preparing {attack.name}")
        attack.prepare(anatomy)
    except Exception as error:
        return error, math.nan
    return attack, time.perf_counter() - start


def _utility(
    anatomy: Anatomy,
    layer: int,
    ids: Tensor,
    sigma: float,
    relative: bool,
    seed: int,
    mask_token_id: int | None,
    special_ids: Sequence[int],
) -> Utility | str:
    try:
        return utility(
            anatomy,
            layer,
            ids,
            sigma,
            relative=relative,
            seed=seed,
            mask_token_id=mask_token_id,
            special_ids=special_ids,
        )
    except Exception as error:
        return f"utility: {describe(error)}"


def _attacked(
    cell: Cell, attack: InversionAttack | Exception, anatomy: Anatomy, ids: Tensor, seed: int
) -> Cell:
    """Return the cell with the results of the attack."""
    values = dict(vars(cell))
    try:
        if isinstance(attack, Exception):
            raise attack
        values["budget_seconds"] = attack.budget_seconds
        hidden = hidden_states(anatomy, cell.layer, ids)
        noise = gaussian_noise(hidden, cell.sigma, relative=cell.relative, seed=seed)
        sent, truth = (hidden + noise)[: cell.texts], ids[: cell.texts]
        start, cpu_seconds = time.perf_counter(), time.process_time()
        guess = attack.reconstruct(sent, None, None)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_seconds
        scores = sentence_scores(guess.tokens, truth, rouge=cell.length <= ROUGE_UP_TO)
    except Exception as error:
        problems = [p for p in (cell.problem, describe(error)) if p]
        return Cell(**values | {"problem": "; ".join(problems), "finished": False})
    steps = getattr(guess, "steps", None)
    return Cell(
        **values
        | {
            "rates": reconstruction_rates(scores, seed=seed),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "candidates": guess.candidates / truth.numel(),
            "steps": None if steps is None else float(steps.double().mean()),
            "finished": guess.finished,
        }
    )


def describe(error: Exception) -> str:
    """Return the class and the message of an error."""
    return f"{type(error).__name__}: {error}"

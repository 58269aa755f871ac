"""Whole texts read from a batch's gradient, over batch sizes, lengths and noise levels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import SubspaceTexts, TextAttack, TextGuess, gradient_of
from lightning_fedleak.cli.studies.invert.cells import (
    ROUGE_UP_TO,
    Cell,
    Noise,
    describe,
    prepared,
)
from lightning_fedleak.evaluation.metrics.texts import TextReconstruction, in_true_order
from lightning_fedleak.labs.gradient_matching import GradientMatching, trained_names
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Observation,
    Stage,
    UnusableObservation,
)

LR = 2e-4  # of AdamW in that one step; not tuned


@dataclass(frozen=True, kw_only=True)
class GradientCell(Cell):
    """An attack on the gradients of some batches of one shape; seconds are means over batches.

    Attributes:
        batch: texts of a batch.
        batches: attacked.
        unknown: of them, those for which the attack has no result; their texts do not count.
        certified: of the other batches, those whose texts the attack certified; None where it makes
            no certificate.
    """

    batch: int
    batches: int
    unknown: int = 0
    certified: int | None = None


def batches_of(texts: int, size: int) -> int:
    """Return how many batches of ``size`` the ``texts`` make, one at least."""
    return max(1, texts // size)


def step_of_adamw(anatomy: Anatomy, input_ids: Tensor) -> None:
    """Train for one step, as PEFT's LoRA must be before its A has a gradient.

    Args:
        anatomy: of a causal model, whose weights change.
        input_ids: (B, L) texts without padding.
    """
    trained = {n: p for n, p in anatomy.root.named_parameters() if p.requires_grad}
    batch = TokenBatch(input_ids.to(anatomy.device), None, None, "causal")
    gradients = gradient_of(anatomy, batch, list(trained))
    for name, parameter in trained.items():
        parameter.grad = gradients[name]
    torch.optim.AdamW(trained.values(), lr=LR).step()
    for parameter in trained.values():
        parameter.grad = None


def run_gradient_cells(
    anatomy: Anatomy,
    rows: Mapping[int, Tensor],
    attacks: Sequence[tuple[str, Callable[[int, int], TextAttack]]],
    sizes: Sequence[int],
    noises: Sequence[Noise],
    *,
    texts: int,
    announce: Callable[[str], None] = lambda _: None,
) -> Iterator[GradientCell]:
    """Yield each cell when it is measured: attacks, lengths, batch sizes, noise levels.

    What is shared is the gradient of the mean loss of next-token prediction, of what is trained, in
    eval mode, with Gaussian noise whose size the attack knows. An attack that raises an error has
    no result for its batch. ``KeyboardInterrupt`` is passed on.

    Args:
        anatomy: of a causal model.
        rows: (n, L) token ids without padding, by their length L; n enough for every size.
        attacks: names, and how to make each for batches of so many texts of so many tokens.
        sizes: texts of a batch.
        noises: on what is shared.
        texts: attacked in each cell: as many whole batches as they make, one at least.
        announce: called with the name of what comes next.
    """
    for name, make in attacks:
        for length, ids in rows.items():
            for size in sizes:
                announce(f"preparing {name} for {size} x {length}")
                attack = prepared(partial(_reader, make, size, length, anatomy), anatomy)
                batches = torch.split(ids[: size * batches_of(texts, size)], size)
                for noise in noises:
                    announce(f"{name}, batches of {size} x {length}, noise {noise.sigma:g}")
                    cell = GradientCell(
                        attack=name,
                        batch=size,
                        length=length,
                        sigma=noise.sigma,
                        relative=noise.relative,
                        batches=len(batches),
                        texts=size * len(batches),
                    )
                    if isinstance(attack, Exception):
                        yield replace(
                            cell,
                            texts=0,
                            unknown=len(batches),
                            finished=False,
                            problem=describe(attack),
                        )
                    else:
                        yield _attacked(cell, attack, anatomy, batches, noise.seed)


def _reader(
    make: Callable[[int, int], TextAttack], size: int, length: int, anatomy: Anatomy
) -> TextAttack:
    """Return an attack that reads only what is shared."""
    attack = make(size, length)
    frozen = [role for role in attack.needs(anatomy).gradients if not anatomy.trainable(role)]
    if frozen:
        raise UnusableObservation(
            f"it reads the gradient of {frozen[0]}, which is not trained here and so not shared. "
            "That is 'unknown', not 'safe': other attacks may read what is shared"
        )
    return attack


def _attacked(
    cell: GradientCell,
    attack: TextAttack,
    anatomy: Anatomy,
    batches: Sequence[Tensor],
    seed: int,
) -> GradientCell:
    """Return the cell with the results of the attack."""
    metric = TextReconstruction(rouge=cell.length <= ROUGE_UP_TO, seed=seed, sync_on_compute=False)
    guesses: list[TextGuess] = []
    problem, roles = None, attack.needs(anatomy).gradients
    seconds = 0.0
    for number, ids in enumerate(batches):
        batch = TokenBatch(ids.to(anatomy.device), None, None, "causal")
        try:
            view = _shared(anatomy, batch, roles, cell, 1_000_003 * seed + number)
            start = time.perf_counter()
            guess = attack.run(view)
            if not isinstance(guess, TextGuess):
                raise TypeError(f"attack '{attack.name}' names no texts")
            if not guess.finished and not bool((guess.tokens >= 0).any()):
                raise UnusableObservation("no time: the budget is over before any token is found")
            taken = time.perf_counter() - start
            mask = batch.context_mask() if attack.last_token_open else torch.ones_like(ids).bool()
            real = mask.cpu()
            metric.update(in_true_order(guess.tokens, ids, real), ids, real)
        except Exception as error:
            problem = describe(error)
        else:
            guesses.append(guess)
            seconds += taken
    certified = [g.certified for g in guesses if g.certified is not None]
    return replace(
        cell,
        unknown=len(batches) - len(guesses),
        texts=cell.batch * len(guesses),
        rates=metric.rates() if guesses else {},
        certified=sum(certified) if certified else None,
        seconds=seconds / len(guesses) if guesses else math.nan,
        budget_seconds=getattr(attack, "budget_seconds", None),
        finished=all(g.finished for g in guesses),
        problem=problem,
    )


def _shared(
    anatomy: Anatomy, batch: TokenBatch, roles: Sequence[str], cell: GradientCell, seed: int
) -> Observation:
    """Return the gradient of a batch as it leaves the client: the part that an attack reads."""
    gradients = gradient_of(anatomy, batch, [*roles, *trained_names(anatomy)])
    distinct = {id(g): g for g in gradients.values()}.values()  # a tied matrix has two roles
    squares = sum(float(g.double().square().sum()) for g in distinct)
    unit = math.sqrt(squares / sum(g.numel() for g in distinct)) if cell.relative else 1.0
    std = cell.sigma * unit
    generator = torch.Generator().manual_seed(seed)
    read = {role: gradients[role] for role in roles}
    if std:
        for g in {id(g): g for g in read.values()}.values():
            g += std * torch.randn(g.shape, generator=generator).to(g)
    return Observation((GradientSnapshot(0, Stage.SHARED, read, noise_std=std),))


def make_reader(
    name: str, texts: int, length: int, *, budget_seconds: float | None = None
) -> TextAttack:
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
        return SubspaceTexts(budget_seconds=budget_seconds, name=name)
    system: Any = name
    return GradientMatching(texts, length, system, budget_seconds=budget_seconds, name=name)

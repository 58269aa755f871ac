"""References that are trained before the first look: by the run's own recipe, on rows drawn first.

A reference must not have seen a row that it scores, and which rows it is trained on must not depend
on who is a member. Trained on the non-members themselves it would tell members of a model that was
trained on none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedleak.engine.reference import anatomy_of, describe_reference
from lightning_fedleak.engine.run import Run
from lightning_fedleak.messages import rank_zero_info, without_messages
from lightning_fedleak.model.model_state import (
    WeightsWritten,
    copy_without_hooks,
    preserve_process,
)
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.report.records import ReferenceFacts


def halves(n: int, count: int, seed: int = 0) -> Tensor:
    """Return (count, n) bool, the rows that each reference is trained on.

    Reference 2 k + 1 is trained on the rows that reference 2 k is not trained on.
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(0, count, 2):
        inside = torch.randperm(n, generator=generator) < n // 2
        rows += [inside, ~inside]
    return torch.stack(rows[:count])


def draw_references(asked: int, rest: int, rows: int, seed: int) -> Tensor:
    """Return (K, asked + rest) bool, which rows each of K references is trained on.

    Where ``rest`` has so many rows, one reference is trained on them and scores all that are asked
    about. Else there are two, on random halves of everything, each of which scores the rows that it
    was not trained on. Neither looks at who is a member, so that members and others stay
    exchangeable.

    Args:
        asked: rows that the models are asked about; they come first.
        rest: further rows, in random order.
        rows: that one reference is to be trained on.
        seed: draws the halves.
    """
    if rows > rest:
        return halves(asked + rest, 2, seed)
    places = torch.arange(asked + rest)[None]
    return (places >= asked) & (places < asked + rows)


class ReferenceData(Dataset[Any]):
    """Some rows of the user's data, as a data set.

    Args:
        sources: of each row a data set, and its place in it.
    """

    def __init__(self, sources: Sequence[tuple[Any, int]]) -> None:
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> Any:
        dataset, row = self._sources[index]
        return dataset[row]


@dataclass(frozen=True)
class ReferenceRows:
    """The rows that references are trained on.

    Attributes:
        sources: n rows of the user's data, members and others: a data set, and the place in it.
        inside: (K, n) bool, which of them each of one or two references is trained on.
        row_of: (N,) int64, the row that each of the N texts stands in that the models are asked
            about.
    """

    sources: Sequence[tuple[Any, int]]
    inside: Tensor
    row_of: Tensor

    def announce(self, run: Run, row_seconds: float) -> None:
        """Say at setup what is trained, and what it takes.

        Args:
            run: of the model that trains.
            row_seconds: that training on a row is estimated to take.
        """
        sizes = self.inside.sum(1).tolist()
        which = f"a reference is trained on {sizes[0]:,} rows, which are not asked about"
        if len(sizes) > 1:
            total = f"{sum(sizes):,} rows, too few for one on rows that are not asked about"
            which = f"two references are trained, one after the other, on halves of {total}"
        cost = f"about {row_seconds * sum(sizes):.2g} s a pass"
        cost += f", {run.epochs} passes" * (run.epochs is not None)
        megabytes = sum(p.nbytes for p in run.anatomy.root.parameters()) / 1e6
        rank_zero_info(
            f"{run.watcher}: {which} ({cost}). For that time a second model ({megabytes:,.3g} MB "
            "of weights) and its optimizer are in memory"
        )

    def train(
        self, source: Any, run: Run, ask: Callable[[Run], TokenSnapshot], seed: int
    ) -> tuple[TokenSnapshot, ReferenceFacts]:
        """Train the references one after the other; return what they say, and which they are.

        Each text's answer is that of a reference that was not trained on it. Afterwards random
        states are what they were, and the references are freed.

        Args:
            source: ``"auto"``: by the run's recipe; or a function of the user's that trains on a
                data set and returns a model.
            run: of the model that trains, before its first step.
            ask: asks the model of a run about the texts.
            seed: of the order of the rows, and of dropout.

        Raises:
            ValueError: the recipe is not known, the training fails, or what the function returns
                cannot be a reference.
            WeightsWritten: the training wrote to the run's own model.
        """
        answers, facts = list[TokenSnapshot](), list[ReferenceFacts]()
        for inside in self.inside:
            rows = ReferenceData([self.sources[n] for n in inside.nonzero()[:, 0].tolist()])
            with preserve_process():
                torch.manual_seed(seed)
                beside = _train(source, rows, run)
                beside.anatomy.model.to(run.anatomy.device)
                answers.append(ask(beside))
            model = beside.anatomy.model
            facts.append(describe_reference(model, len(rows), beside.anatomy))
            del beside, model
        is_seen = self.inside[0, self.row_of][:, None]  # by the first, so that the last one answers
        pairs = zip(answers[0], answers[-1], strict=True)
        unseen = TokenSnapshot(*(torch.where(is_seen, last, first) for first, last in pairs))
        hashes = [one.weights for one in facts]
        both = hashlib.sha256("".join(hashes).encode()).hexdigest()
        kind = "auto" if source == "auto" else "function"
        weights = both if len(facts) > 1 else hashes[0]
        return unseen, replace(facts[0], kind=kind, weights=weights, models=len(facts))


def _train(source: Any, rows: Dataset[Any], run: Run) -> Run:
    """Return the run of a model that was trained on rows, by the run's recipe or a function."""
    parameters, anatomy = [*run.anatomy.root.parameters()], run.anatomy
    before = [(p._version, p.grad) for p in parameters]
    try:
        if source == "auto":
            beside = copy_without_hooks(anatomy, anatomy.root, __name__.partition(".")[0])
            with without_messages():  # of a second Trainer
                run.fit_copy(beside.root, rows)
        else:
            beside = anatomy_of(source(rows), anatomy)
    except ValueError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(
            f"Memorization(reference={source!r}): the reference cannot be trained ({kind}): give "
            "the folder of a model that was trained on other rows"
        ) from error
    for p, (version, gradient) in zip(parameters, before, strict=True):
        if p._version != version or p.grad is not gradient:
            raise WeightsWritten(
                "the training of the reference wrote to the model of the run, which shares "
                "weights or compiled code with its copy: give a reference of another run"
            )
    return replace(run, anatomy=beside)

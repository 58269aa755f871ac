"""N, sample rate and step count follow from what the user passed, whatever one example holds."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset
from transformers import Trainer

from lightning_fedleak.defenses import DPSGD, Defense, DefenseError, GradientNoise, Users
from tests.helpers.models import tiny_llama
from tests.trainers.hosts import HOSTS, rows, trainer_of

N = 16


class Texts(list):  # type: ignore[type-arg]
    """Rows that keep an attribute, and have a filter as those of `datasets` have."""

    def filter(self, function: Any, **_: Any) -> "Texts":
        return Texts(row for row in self if function(row))


class Left(Texts):
    public_length = N


def texts() -> Texts:
    return Texts(rows(N))


def private() -> DPSGD:
    return DPSGD(1.0, target_epsilon=4, target_delta=1e-2)


def steps_of(host: str, folder: Path, dataset: Any, defense: DPSGD) -> int:
    """Train two epochs of batches of six, and return the number of steps."""
    settings = {"per_device_train_batch_size": 6, "num_train_epochs": 2}
    trace = HOSTS[host](folder, tiny_llama(), [defense], 0.05, train_dataset=dataset, **settings)
    return int(trace.steps)


def account(defense: DPSGD) -> tuple[Any, ...]:
    privacy, settings = defense.privacy, defense.settings()
    assert not {"releases", "measured_noise_multiplier"} & settings.keys()
    return (
        privacy.sample_rate,
        privacy.releases,
        privacy.epsilon,
        defense.noise_multiplier,
        settings,
    )


@cache
def of_the_whole(host: str) -> tuple[int, tuple[Any, ...]]:
    with TemporaryDirectory() as folder:
        steps = steps_of(host, Path(folder), texts(), defense := private())
    return steps, account(defense)


def silent(row: Any) -> Any:
    return row | {"labels": torch.full_like(row["input_ids"], -100)}


@pytest.mark.parametrize(
    ("host", "change"),
    [
        *((host, change) for host in HOSTS for change in ("left out", "without labels")),
        ("loop", "part left out"),
        ("loop", "padding"),
    ],
)
def test_one_text_changes_neither_account_nor_steps(host: str, change: str, tmp_path: Path) -> None:
    other = texts()
    datasets: dict[str, Any] = {
        "left out": Left(other[1:]),
        "part left out": ConcatDataset([Left(other[1:]), Texts(other[:0])]),
        "without labels": Texts([silent(other[0]), *other[1:]]),
        "padding": Texts(
            [silent({k: torch.zeros_like(v) for k, v in other[0].items()}), *other[1:]]
        ),
    }
    steps = steps_of(host, tmp_path, datasets[change], defense := private())
    assert (steps, account(defense)) == of_the_whole(host)
    assert steps == 6


# ---- trainers that prepare the data themselves ---------------------------------------------------


class Preparing(Trainer):
    """Leaves out rows without a label, as TRL's trainers do."""

    def __init__(self, *args: Any, train_dataset: Any, **kwargs: Any) -> None:
        prepared = self._prepare_dataset(train_dataset, None, "train")
        super().__init__(*args, train_dataset=prepared, **kwargs)

    def _prepare_dataset(self, dataset: Any, collator: object, name: str) -> Any:
        return dataset.filter(lambda row: bool((row["labels"] != -100).any()), desc="Dropping")


class Filtering(Trainer):
    """Leaves them out without that method."""

    keeps = Texts

    def __init__(self, *args: Any, train_dataset: Any, **kwargs: Any) -> None:
        left = [row for row in train_dataset if bool((row["labels"] != -100).any())]
        super().__init__(*args, train_dataset=self.keeps(left), **kwargs)


class ToList(Filtering):
    keeps = list  # type: ignore[assignment]


class Doubling(Trainer):
    def __init__(self, *args: Any, train_dataset: Any, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=Texts([*train_dataset] * 2), **kwargs)


def prepared_by(kind: Any, folder: Path, dataset: Any, defense: Defense) -> Any:
    settings = {"per_device_train_batch_size": 6, "num_train_epochs": 2}
    return trainer_of(folder, tiny_llama(), [defense], kind=kind, train_dataset=dataset, **settings)


@pytest.mark.parametrize(("kind", "kept"), [(Preparing, N), (Filtering, N - 1)])
def test_a_trainer_that_drops_a_row_changes_nothing(kind: Any, kept: int, tmp_path: Path) -> None:
    found = []
    for dataset in (texts(), Texts([silent(rows(1)[0]), *texts()[1:]])):
        defense = private()
        trainer = prepared_by(kind, tmp_path, dataset, defense)
        trainer.train()
        found.append((trainer.state.global_step, account(defense)))
    assert found[0] == found[1]
    assert len(trainer.train_dataset) == kept
    assert "filter" in vars(Texts)
    assert len(Texts([1, 2]).filter(lambda row: row > 1)) == 1


def test_rows_are_dropped_as_ever_without_a_defence_of_examples(tmp_path: Path) -> None:
    dataset = Texts([silent(rows(1)[0]), *texts()[1:]])
    trainer = prepared_by(Preparing, tmp_path, dataset, GradientNoise(1.0, 1.0))
    assert len(trainer.train_dataset) == N - 1
    trainer.train()


@pytest.mark.parametrize(
    ("kind", "defense"),
    [
        (Doubling, private),
        (ToList, private),
        (Filtering, lambda: DPSGD(1.0, 1.0, unit=Users([*range(N - 1)]))),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_mend(
    kind: Any, defense: Any, tmp_path: Path
) -> None:
    dataset = Texts([silent(rows(1)[0]), *texts()[1:]])
    trainer = prepared_by(kind, tmp_path, dataset, defense())
    with pytest.raises(DefenseError, match=r"number of rows.*tokenized and truncated"):
        trainer.train()

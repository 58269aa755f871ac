"""The commitment to the order of rows is the HMAC of their numbers, and loaders work as without."""

from __future__ import annotations

import gc
import hmac
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_fedleak import DPSGD, BagOfWords, DefendedStrategy
from lightning_fedleak.engine import record
from lightning_fedleak.engine.record import ROW_KEY, _RowOrder
from lightning_fedleak.report.records import RECORD
from lightning_fedleak.trainers import Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.helpers.models import tiny_gpt2

KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = [*record._active_orders]  # of tests that end no run
    yield
    assert record._active_orders == before
    if not before:
        assert _BaseDataLoaderIter._next_index.__name__ == "_next_index"


def loader(seed: int, workers: int = 0, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    settings = {"batch_size": 4, "shuffle": True, "generator": generator} | settings
    return DataLoader(TensorDataset(torch.arange(10)), num_workers=workers, **settings)


def expected(batches: list[list[int]]) -> str:
    text = "".join(f"{batch}\n" for batch in batches)
    return hmac.digest(KEY, text.encode(), "sha256").hex()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_code_is_of_all_rows_in_order(workers: int) -> None:
    """A data set whose values are its rows' numbers says what they were; another one is apart."""
    plain, watched, beside = loader(1), loader(1, workers), loader(3)
    order = _RowOrder(KEY)
    taken = [batch.tolist() for _ in range(2) for [batch] in watched]
    assert len(list(beside)) == 3
    assert order.code_of(watched.dataset) == expected(taken)
    order.close()
    order.close()
    assert taken == [batch.tolist() for _ in range(2) for [batch] in plain]
    swapped = [taken[1], taken[0], *taken[2:]]
    assert expected(swapped) != expected(taken)
    assert order.code_of(plain.dataset) is None


def test_single_rows_and_streams() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    order = _RowOrder(KEY)
    single, stream = loader(1, batch_size=None), DataLoader(Stream())
    taken = [[int(row)] for [row] in single]
    assert len(list(stream)) == 4
    order.close()
    assert order.code_of(single.dataset) == expected(taken)
    assert order.code_of(stream.dataset) is None


class ReadOnce:
    """A batch sampler whose batches can be read once, or raise where they are read as numbers."""

    def __iter__(self) -> Any:
        yield from (iter(range(start, start + 5)) for start in (0, 5))


def test_batches_that_can_be_read_once_reach_the_training() -> None:
    batches: Any = ReadOnce()
    order = _RowOrder(KEY)
    rows = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=batches)
    assert [batch.tolist() for [batch] in rows] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    order.add(rows.dataset, torch.tensor([float("nan")]))  # which int() refuses
    order.close()
    assert order.code_of(rows.dataset) is None


def test_data_sets_are_not_kept_in_memory() -> None:
    order, beside = _RowOrder(KEY), loader(1)
    plain = [torch.tensor(number) for number in range(4)]  # a list takes no weak reference
    list(beside)
    list(DataLoader(plain))  # type: ignore[arg-type]
    gone = weakref.ref(beside.dataset)
    del beside
    gc.collect()
    assert gone() is None
    order.close()
    assert order.code_of(plain) == expected([[0], [1], [2], [3]])


def end_of(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob(RECORD)
    return json.loads(path.read_text().splitlines()[-1])


def test_a_watch_commits_with_a_key_of_its_own(tmp_path: Path) -> None:
    model = tiny_gpt2(tied=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(3, 60, (10, 6))
    rows = DataLoader(TensorDataset(ids), 4, shuffle=True)
    order = []
    with Watch(model, optimizer, [BagOfWords()], loader=rows, folder=tmp_path) as watch:
        for [batch] in rows:
            order.append([int((ids == row).all(1).nonzero()) for row in batch])
            with watch.step({"input_ids": batch, "labels": batch}):
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    file = tmp_path / ROW_KEY
    assert file.stat().st_mode & 0o777 == 0o600
    key = bytes.fromhex(json.loads(file.read_text())["key"])
    text = "".join(f"{batch}\n" for batch in order)
    assert end_of(tmp_path)["row_order"] == hmac.digest(key, text.encode(), "sha256").hex()


def test_monitors_of_one_fit_share_a_key(tmp_path: Path) -> None:
    monitors = [monitor_with([Probe(name=n)], every_n_steps=4) for n in ("one", "two")]
    fit(monitors, tmp_path, logger=False)
    lines = [json.loads(line) for path in tmp_path.rglob(RECORD) for line in path.open()]
    codes = [line["row_order"] for line in lines if line["kind"] == "end"]
    assert len(codes) == 2
    assert len(set(codes)) == 1
    [key] = tmp_path.rglob(ROW_KEY)
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(key, again)
    fit([monitor_with([Probe()], every_n_steps=4)], again, logger=False)
    assert json.loads((again / RECORD).read_text().splitlines()[-1])["row_order"] == codes[0]


def test_with_an_account_there_is_none(tmp_path: Path) -> None:
    strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=1.0)])
    fit([monitor_with([Probe()], every_n_steps=4)], tmp_path, strategy=strategy, logger=False)
    assert end_of(tmp_path)["row_order"] is None
    assert not list(tmp_path.rglob(ROW_KEY))


def test_a_key_that_others_may_read_is_refused_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / ROW_KEY).write_text(json.dumps({"key": KEY.hex()}))
    (tmp_path / ROW_KEY).chmod(0o644)
    with pytest.warns(UserWarning, match="order of rows is not committed to"):
        fit([monitor_with([Probe()], every_n_steps=4)], tmp_path, logger=False)
    assert end_of(tmp_path)["row_order"] is None

"""Calibrations on disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_fedleak.attacks import Attack, BagOfWords, FlatChat, PublicText
from lightning_fedleak.engine.cache import CalibrationCache, hash_of_weights
from tests.helpers.loops import watched
from tests.helpers.models import tiny_gpt2

TEXT = torch.randint(3, 97, (20, 8), generator=torch.Generator().manual_seed(3))
SHAPES = ((1, 8), (2, 8), (4, 8))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLEAK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibrations"


def attack(**settings: Any) -> FlatChat:
    return FlatChat(**({"public_text": PublicText(TEXT), "shapes": SHAPES} | settings))


class Counted(FlatChat):
    prepared = 0

    def prepare(self, anatomy: Any) -> None:
        Counted.prepared += 1
        super().prepare(anatomy)


def counted(**settings: Any) -> Counted:
    return Counted(**({"public_text": PublicText(TEXT), "shapes": SHAPES} | settings))


def prepared_in(root: Path, attack_: Attack, **settings: Any) -> int:
    """Return how often a run calibrates."""
    Counted.prepared = 0
    watched(root, attack_, n=8, every_n_steps=4, **settings)
    return Counted.prepared


def test_a_second_run_calibrates_no_more_and_reads_the_same(tmp_path: Path, folder: Path) -> None:
    first, second = counted(), counted()
    assert prepared_in(tmp_path / "a", first) == 1
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert prepared_in(tmp_path / "b", second) == 0
    assert first.regressor is not None
    assert second.regressor is not None
    assert torch.equal(first.regressor.coefficients, second.regressor.coefficients)
    assert prepared_in(tmp_path / "c", counted(), cache=False) == 1


@pytest.mark.parametrize(
    "other",
    [{"public_text": PublicText(TEXT.flip(1))}, {"seed": 1}, {"shapes": SHAPES[:2]}],
)
def test_other_text_or_settings_are_another_calibration(
    other: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    assert prepared_in(tmp_path / "a", counted()) == 1
    assert prepared_in(tmp_path / "b", counted(**other)) == 1


class Numbers(BagOfWords):
    """An attack whose calibration is six numbers."""

    def __init__(self, state: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.state = dict(state or {})

    def calibration_inputs(self) -> dict[str, object]:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)


def rewritten(path: Path, change: Callable[[Tensor], Any], **metadata: str) -> None:
    """Another file in its place that is sound in itself, with the same names, types and shapes."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written = file.metadata() or {}
    for tensor in tensors.values():
        change(tensor)
    save_file(tensors, path, {**written, **metadata})
    path.chmod(0o600)


def replaced_by_a_link(path: Path) -> None:
    os.replace(path, path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def another_calibration(path: Path) -> None:
    CalibrationCache().save(Numbers({"numbers": torch.zeros(6)}), "other weights")
    (other,) = set(path.parent.iterdir()) - {path}
    os.replace(other, path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: rewritten(path, Tensor.zero_), "does not hold what was written"),
        (another_calibration, "does not hold what was written"),
        (lambda path: rewritten(path, Tensor.clone, empty="{"), "Expecting property name"),
        (lambda path: rewritten(path, Tensor.clone, empty='{"a": ["torch.nn", 1]}'), "dtype"),
        (lambda path: path.write_bytes(b""), "header"),
        (lambda path: path.chmod(0o640), "others may use it .mode 0640, not 0600"),
        (replaced_by_a_link, "it is a link, or no file"),
    ],
)
def test_a_calibration_that_is_not_what_was_written_is_not_used(
    spoil: Callable[[Path], Any], reason: str, folder: Path
) -> None:
    cache, numbers = CalibrationCache(), {"numbers": torch.arange(6.0)}
    cache.save(Numbers(numbers), "weights")
    loaded = Numbers()
    assert cache.load(loaded, "weights")
    assert torch.equal(loaded.state["numbers"], numbers["numbers"])
    (path,) = folder.iterdir()
    spoil(path)
    after = Numbers()
    with pytest.warns(UserWarning, match=reason) as caught:
        assert not cache.load(after, "weights")
    assert not after.state
    assert "\n" not in str(caught[0].message)


def test_nan_is_neither_kept_nor_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, spoilt = CalibrationCache(), Numbers({"numbers": torch.full((6,), torch.nan)})
    cache.save(spoilt, "weights")
    assert not folder.exists()
    with monkeypatch.context() as patch:
        patch.setattr("lightning_fedleak.engine.cache._holds_nan", lambda state: False)
        cache.save(spoilt, "weights")
    with pytest.warns(UserWarning, match="it holds NaN"):
        assert not cache.load(Numbers(), "weights")


def test_a_calibration_that_cannot_be_written_is_not_kept(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.warns(UserWarning, match="is not kept: .*No space left"):
            prepared_in(tmp_path, counted())
    assert not list(folder.iterdir()), "no drafts remain"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLEAK_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is not kept: .* Set FEDLEAK_CACHE"):
        prepared_in(tmp_path, counted())


def test_any_change_of_the_weights_is_another_calibration() -> None:
    model = tiny_gpt2()
    before = hash_of_weights(model)
    assert hash_of_weights(tiny_gpt2()) == before
    parameter = model.transformer.h[1].mlp.c_fc.bias
    with torch.no_grad():
        value = parameter[0].clone()
        parameter[0] = torch.nextafter(value, value + 1)
    assert hash_of_weights(model) != before
    with torch.no_grad():
        parameter[0] = value
    assert hash_of_weights(model) == before
    parameter.requires_grad_(False)
    assert hash_of_weights(model) != before


def _save_and_load(folder: str, times: int, failures: Any) -> None:
    from lightning_fedleak.attacks.words.flatchat import TypeCountRegressor

    warnings.simplefilter("error")
    cache, attack_ = CalibrationCache(Path(folder)), attack()
    attack_.regressor = TypeCountRegressor(torch.arange(2.0, dtype=torch.float64))
    for _ in range(times):
        cache.save(attack_, "weights")
        if not cache.load(attack(), "weights"):
            failures.value += 1


def test_two_processes_may_write_the_same_file(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    failures = fork.Value("i", 0)
    both = [
        fork.Process(target=_save_and_load, args=(str(tmp_path), 40, failures)) for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert failures.value == 0
    assert len(list((tmp_path / "calibrations").iterdir())) == 1

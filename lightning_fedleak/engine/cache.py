"""Calibrations on disk: what an attack has learnt of a model, for the next fit that begins so."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

import lightning_fedleak
from lightning_fedleak.attacks import Attack
from lightning_fedleak.messages import rank_zero_warn
from lightning_fedleak.private_files import check_private, hash_tensors, save_private

FORMAT = 2
_EMPTY, _HASH = "empty", "sha256"


def cache_folder() -> Path:
    """``FEDLEAK_CACHE``, or ``lightning_fedleak`` in the user's cache folder."""
    if given := os.environ.get("FEDLEAK_CACHE"):
        return Path(given)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning_fedleak"


def hash_of_weights(model: nn.Module, head: nn.Module | None = None) -> str:
    """SHA-256 of names, types, values, and what is trained, of all parameters and buffers.

    A LoRA's A counts once its B is not zero: before that it is random, and changes nothing. That
    on the head counts always, since the gradient of its B is read through it.
    """
    on_head = set() if head is None else {id(p) for p in head.parameters()}
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    counted = {}
    for name, tensor in state.items():
        other = state.get(name.replace("lora_A", "lora_B"))
        random = "lora_A" in name and other is not None and not bool(other.detach().any())
        if not random or id(tensor) in on_head:
            counted[f"{name} {tensor.requires_grad}"] = tensor
    return hash_tensors(counted)


class CalibrationCache:
    """Calibrations of attacks on one model, as files of mode 0600 in safetensors.

    A file is written elsewhere and then renamed, so that several processes may write the same one.
    It holds what the attack's ``state_dict`` does: like the model itself, nothing of a batch.

    Args:
        folder: default :func:`cache_folder`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (cache_folder() if folder is None else folder) / "calibrations"

    def path(self, attack: Attack, weights: str) -> Path | None:
        """The file of an attack on a model; None where the attack is not kept."""
        settings = attack.calibration_inputs()
        if settings is None:
            return None
        kind = f"{type(attack).__module__}.{type(attack).__qualname__}"
        parts = (FORMAT, lightning_fedleak.__version__, kind, sorted(settings.items()), weights)
        return self.folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.safetensors"

    def load(self, attack: Attack, weights: str) -> bool:
        """Gives an attack its calibration back.

        Returns:
            False where there is none. One that is damaged, holds NaN, or could be somebody else's
            is said to be, and counts as none.
        """
        path = self.path(attack, weights)
        if path is None or not os.path.lexists(path):
            return False
        try:
            attack.load_state_dict(_read(path))
        except (
            Exception
        ) as error:  # whatever is in it: another calibration is only a matter of time
            rank_zero_warn(
                f"lightning-fedleak: the calibration of '{attack.name}' in {path} is not used "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}) and is "
                "made again"
            )
            return False
        return True

    def save(self, attack: Attack, weights: str) -> None:
        """Keeps an attack's calibration, unless it holds NaN; where that fails, says so."""
        path = self.path(attack, weights)
        state = attack.state_dict()
        if path is None or not state or _holds_nan(state):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(path, state)
        except OSError as error:
            why = error.strerror or str(error)
            rank_zero_warn(
                f"lightning-fedleak: the calibration of '{attack.name}' is not kept: {self.folder} "
                f"cannot be written ({why}). Set FEDLEAK_CACHE to another folder, or "
                "pass cache=False"
            )


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
    # Tensors without elements all lie at address 0, which safetensors takes for sharing.
    empty = {n: [str(t.dtype), *t.shape] for n, t in tensors.items() if not t.numel()}
    stored = {name: t for name, t in tensors.items() if name not in empty}
    save_private(path, stored, {_EMPTY: json.dumps(empty), _HASH: _hash(path, tensors)})


def _read(path: Path) -> dict[str, Tensor]:
    """Return what :func:`_write` wrote.

    Raises:
        ValueError: it is another user's, not what was written there, or holds NaN.
        Exception: it is no such file.
    """
    check_private(path)
    with safe_open(path, "pt") as file:
        state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written = file.metadata() or {}
    for name, (dtype, *shape) in json.loads(written.get(_EMPTY, "{}")).items():
        state[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    if written.get(_HASH) != _hash(path, state):
        raise ValueError("it does not hold what was written")
    if _holds_nan(state):
        raise ValueError("it holds NaN")
    return state


def _hash(path: Path, state: Mapping[str, Tensor]) -> str:
    """Of the tensors, and of what they are a calibration of, which the file's name says."""
    return hash_tensors({f"{path.name} {name}": tensor for name, tensor in state.items()})


def _holds_nan(state: Mapping[str, Tensor]) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in state.values())

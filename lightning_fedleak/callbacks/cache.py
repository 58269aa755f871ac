"""Calibrations on disk: what an attack has learnt of a model, for the next fit that begins so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lightning_fedleak
from lightning_fedleak.attacks.base import Attack

FORMAT = 1
_EMPTY = "empty"


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
    found = hashlib.sha256()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(state):
        other = state.get(name.replace("lora_A", "lora_B"))
        random = "lora_A" in name and other is not None and not bool(other.detach().any())
        if random and id(state[name]) not in on_head:
            continue
        tensor = state[name].detach().contiguous().cpu()
        trained = state[name].requires_grad
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {trained}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


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
        settings = attack.calibrated_with()
        if settings is None:
            return None
        kind = f"{type(attack).__module__}.{type(attack).__qualname__}"
        parts = (FORMAT, lightning_fedleak.__version__, kind, sorted(settings.items()), weights)
        return self.folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.safetensors"

    def load(self, attack: Attack, weights: str) -> bool:
        """Gives an attack its calibration back.

        Returns:
            False where there is none; a damaged one is said to be, and counts as none.
        """
        path = self.path(attack, weights)
        if path is None or not path.exists():
            return False
        try:
            attack.load_state_dict(_read(path))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            rank_zero_warn(
                f"lightning-fedleak: the calibration of '{attack.name}' in {path} cannot be read "
                f"({type(error).__name__}) and is made anew"
            )
            return False
        return True

    def save(self, attack: Attack, weights: str) -> None:
        """Keeps an attack's calibration; where that fails, says so."""
        path = self.path(attack, weights)
        state = attack.state_dict()
        if path is None or not state:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(path, state)
        except (OSError, SafetensorError) as error:  # the latter of a full disk
            why = getattr(error, "strerror", None) or str(error)
            rank_zero_warn(
                f"lightning-fedleak: the calibration of '{attack.name}' is not kept: {self.folder} "
                f"cannot be written ({why}). Set FEDLEAK_CACHE to another folder, or "
                "pass cache=False"
            )


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
    # Tensors without elements all lie at address 0, which safetensors takes for sharing.
    empty = {n: [str(t.dtype), *t.shape] for n, t in tensors.items() if not t.numel()}
    descriptor, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")  # of mode 0600
    os.close(descriptor)
    try:
        held = {name: t for name, t in tensors.items() if name not in empty}
        save_file(held, draft, metadata={_EMPTY: json.dumps(empty)})
        os.chmod(draft, 0o600)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        empty = json.loads((file.metadata() or {}).get(_EMPTY, "{}"))
    for name, (dtype, *shape) in empty.items():
        state[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return state


__all__ = ["CalibrationCache", "cache_folder", "hash_of_weights"]

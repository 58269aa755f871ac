"""Secret random states: what a training step, a dataset and a collate function draw.

The guarantee of DP-SGD needs random numbers, such as masks of dropout, that nobody can guess: from
a known seed, one row more in a batch would change the masks of all later rows. So torch's, NumPy's
and Python's global generators get secret states while a step runs and while a batch is loaded, and
their own states afterwards. Generators that cannot be set are found by measurement: two runs from
one state differ.
"""

import copy
import hashlib
import operator
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import data

from lightning_fedleak.defenses.base import refuse
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of, values_in
from lightning_fedleak.model.model_state import is_compiled, preserve_model, preserve_process
from lightning_fedleak.model.taps.hooks import taps_paused

WORDS = 624  # 32-bit words of the state of torch's CPU generator, a Mersenne twister
# The number of examples that are loaded to compare two runs. With few tokens, two draws of a masked
# language model may be equal by chance: at 10 tokens for each example in one of 10^10 cases.
PROBES = 8
# Numbers of a module's output that are compared, and the largest difference of their sum over their
# norm. It is 0 on a CPU; a GPU may round two equal runs differently. Not tuned.
NUMBERS, SAME_RUN = 1 << 16, 1e-3
Values = list[tuple[str, object]]


def set_states(key: bytes) -> None:
    """Set the process's global generators to states that depend on ``key`` only.

    All 624 words of torch's CPU generator are set, because a seed would set only 32 bits. A CUDA
    device gets a seed of 64 bits, which is all that its generator has; NumPy and Python get 256.

    Args:
        key: Secret bytes, of which no other purpose has the same.
    """
    devices = _device_generators()
    stream = hashlib.shake_256(b"lightning-fedleak random state 1\0" + key)
    secret = np.frombuffer(stream.digest(4 * (WORDS + 16) + 8 * (1 + len(devices))), dtype="<u4")
    words, others, seeds = secret[:WORDS], secret[WORDS : WORDS + 16], secret[WORDS + 16 :]
    cpu_seed, *device_seeds = seeds.view("<u8").tolist()
    # A state of torch: the seed, 16 bytes of counters, and each word in 64 bits.
    state = torch.Generator().manual_seed(cpu_seed).get_state()
    state[24 : 24 + 8 * WORDS].view(torch.int64).copy_(torch.from_numpy(words.astype("<i8")))
    torch.set_rng_state(state)
    for generator, seed in zip(devices, device_seeds, strict=True):
        generator.manual_seed(seed)
    np.random.seed(others[:8])
    random.seed(others[8:].tobytes())


def _device_generators() -> Sequence[torch.Generator]:
    """Return the generators of the CUDA devices; none if CUDA is not in use."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators if is_used else ()


@contextmanager
def secret_states(key: bytes) -> Iterator[None]:
    """Set the global generators as :func:`set_states` does, and restore them after the block."""
    with preserve_process():
        set_states(key)
        yield


def check_draws(
    run: Callable[[], Values], owner: str, differ: Callable[[Any, Any], object] = operator.ne
) -> None:
    """Raise an error for code whose random numbers do not follow the global generators' states.

    It is run twice from one state, and once from another.

    Args:
        run: Runs the code, and returns what makes values, each with the values.
        owner: What runs, for a message.
        differ: Returns whether two values differ.

    Raises:
        DefenseError: Two runs from one state differ, or two from different states end in one.
    """
    key, runs, ends = os.urandom(32), list[Values](), list[list[Any]]()
    for state in (key, key, os.urandom(32)):
        with secret_states(state):
            runs.append(run())
            words: Any = np.random.get_state()
            end = [torch.get_rng_state().tolist(), words[1].tolist(), random.getstate()]
            ends.append(end + [g.get_state().tolist() for g in _device_generators()])
    pairs = zip(*runs[:2], strict=False)
    drawer = next((name for (name, value), (_, again) in pairs if differ(value, again)), "")
    known, seeds = "so masks may follow from a known seed", any(map(operator.eq, *ends[1:]))
    refusals: dict[str, object] = {
        f"{drawer} gives two results from one random state, {known}: let it draw from torch's, "
        "NumPy's or Python's global generator, which DPSGD sets to secret states, and not from a "
        "generator, seed or counter of its own": drawer,
        f"{owner} seeds a global generator, {known}: leave that out": seeds,
    }
    refuse("DPSGD: ", refusals)


def check_step(step: Callable[[Any], Any], batch: Any, root: nn.Module) -> None:
    """Raise an error for a training step with random numbers of its own.

    Args:
        step: Runs the training step on a batch, and returns its output.
        batch: The batch, of which copies are run.
        root: The model, whose state is restored.

    Raises:
        DefenseError: Names the first module whose output differs between two runs.
    """
    names = {module: name for name, module in root.named_modules() if name}

    def run() -> Values:
        values: Values = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            name = f"'{names.get(module, 'model')}' ({type(module).__name__})"
            values.extend(
                (name, _weighted_sum(t)) for t in tensors_of(output) if t.is_floating_point()
            )

        with register_module_forward_hook(note):
            note(root, None, step(copy.deepcopy(batch)))
        return values

    eager = torch.compiler.set_stance("force_eager") if is_compiled(root) else nullcontext()
    with preserve_model(root), taps_paused(), eager:
        check_draws(
            run, "training_step", lambda a, b: (a - b)[0].abs() > SAME_RUN * a[1].maximum(b[1])
        )


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Return a sum (2,) of a tensor's numbers that depends on their order, and their norm."""
    numbers = tensor.detach().flatten()
    numbers = numbers[:: max(1, len(numbers) // NUMBERS)].double()
    weights = torch.linspace(1, 2, len(numbers), dtype=torch.float64, device=numbers.device)
    return torch.stack([numbers @ weights, numbers.norm()])


def check_loading(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Raise an error for a dataset or a collate function with random numbers of its own.

    Raises:
        DefenseError: Names the one that draws from another generator than the global ones.
    """
    indices = [len(dataset) * i // PROBES for i in range(PROBES)]
    fetch = getattr(dataset, "__getitems__", lambda batch: [dataset[i] for i in batch])
    name = getattr(collate, "__name__", type(collate).__name__)

    def load() -> Values:
        examples = list(fetch(indices))
        contents = [*values_in(examples)]  # before the collate function may change them
        batch = [*values_in(collate(examples))]
        return [
            (f"the dataset ({type(dataset).__name__})", contents),
            (f"the collate function ({name})", batch),
        ]

    check_draws(load, "the dataset or the collate function")


class SecretLoader(data.DataLoader[Any]):
    """A loader whose dataset and collate function draw from secret random states.

    Each batch that this process loads has a state of its own, by its batch sampler's
    ``loading_key``. :func:`begin_worker` sets the state of a worker.
    """

    def __iter__(self) -> Any:
        """Yield the batches."""
        sampler: Any = self.batch_sampler
        with secret_states(sampler.loading_key()):  # also the workers' seeds are drawn from it
            batches = super().__iter__()
        while True:
            with secret_states(sampler.loading_key()):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def begin_worker(begin: Callable[[int], Any] | None, collate: Any, key: bytes, worker: int) -> None:
    """Let a worker draw from a secret state of its own, whatever it has seeded itself.

    Args:
        begin: The user's ``worker_init_fn``.
        collate: The user's collate function.
        key: Secret bytes of the loader.
        worker: The worker's number.

    Raises:
        DefenseError: It now draws from another generator than the global ones.
    """
    info: Any = data.get_worker_info()
    if begin is not None:
        begin(worker)
        if worker == 0:  # all begin alike, and this loads examples
            check_loading(info.dataset, collate)
    set_states(b"worker" + key + info.seed.to_bytes(16, "big", signed=True))

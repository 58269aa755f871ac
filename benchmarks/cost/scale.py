"""Time and memory of attacks on LoRA by the shape of the model, and the laws that follow.

    make scale                                        # a few shapes up to the width of Llama-3.2-1B
    python -m benchmarks.cost.scale --shapes 128256x2048x1x16-bfloat16

A shape is vocabulary x width x layers x rank - dtype of a random Llama with tied embeddings and a
LoRA on queries and values. Every shape runs in a process of its own. Seconds are of the processor.
Memory is the highest resident memory within a call over what was resident before; Linux only.
``entry`` is that memory in bytes for each of the V x d numbers of a dictionary.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cost.memorization import grown
from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import (
    Attack,
    GradientMembership,
    PublicText,
    Query,
    SubspaceMembership,
    SubspaceWords,
)
from lightning_fedleak.attacks.words.public_gradients import gradient_of
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage

SMOKE = ("--shapes 512x64x2x4-float32",)
SHAPES = (
    "32000x512x4x8-float32",
    "128256x640x2x16-float32",
    "262144x640x2x16-float32",
    "128256x2048x1x16-bfloat16",
)
ATTACKS: dict[str, Callable[[PublicText], Attack]] = {
    "words": lambda public: SubspaceWords(public, capacity_seconds=0),
    "row space": SubspaceMembership,
    "gradient": GradientMembership,
}


def random_model(vocabulary: int, width: int, layers: int, rank: int, dtype: str) -> nn.Module:
    """Return a random Llama with a LoRA on queries and values that has been trained a little."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    heads = max(4, width // 64)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
        tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    lora = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    move(model)
    return model


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Change the trained parameters, as a step of training does."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.01 * torch.randn_like(parameter))


def draw(vocabulary: int, rows: int, length: int, seed: int) -> Tensor:
    """Return rows of tokens whose frequencies follow Zipf's law."""
    frequencies = 1 / (10.0 + torch.arange(min(vocabulary, 32_000)))
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(frequencies, rows * length, True, generator=generator).view(rows, -1)


def clocked(function: Callable[[], object]) -> tuple[float, float]:
    """Return processor seconds and bytes of a call."""
    start = time.process_time()
    size = grown(function)
    return time.process_time() - start, size


def measure(shape: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return what calibration, a second look and reading take, by attack."""
    sizes, dtype = shape.rsplit("-", 1)
    vocabulary, width, layers, rank = map(int, sizes.split("x"))
    model = random_model(vocabulary, width, layers, rank, dtype)
    anatomy = find_anatomy(model)
    public = PublicText(list(draw(vocabulary, 60, 64, 1)))
    return {name: measure_attack(ATTACKS[name](public), anatomy) for name in names}


def measure_attack(attack: Attack, anatomy: Anatomy, length: int = 64) -> dict[str, float]:
    """Return what an attack takes at two steps of training, with texts of some tokens."""
    vocabulary, width = anatomy.vocab_size, anatomy.hidden_size
    ids = draw(vocabulary, 2, length, 2)
    calibration, size = clocked(lambda: attack.prepare(anatomy))
    attack.refresh(anatomy, 0)
    move(anatomy.model)
    second, _ = clocked(lambda: attack.refresh(anatomy, 1))
    batch = TokenBatch(ids, ids, torch.ones_like(ids), "causal")
    gradients = gradient_of(anatomy, batch, attack.needs(anatomy).gradients)
    view = Observation((GradientSnapshot(1, Stage.SHARED, gradients),))
    query = Query(torch.cat([ids, draw(vocabulary, 2, length, 3)]))
    reading, reading_size = clocked(lambda: attack.run(view, query))
    costs = {
        "calibration": calibration, "bytes": size, "entry": size / vocabulary / width,
        "second": second, "reading": reading, "reading bytes": reading_size,
    }  # fmt: skip
    if isinstance(attack, SubspaceWords):
        truth, guess = set(ids[:, :-1].flatten().tolist()), attack.run(view).types.tolist()
        costs["f1"] = 2 * len(truth & set(guess)) / (len(truth) + len(guess))
    return costs


def main() -> None:
    """Read the options, and print a line for each attack of each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--json", action="store_true", help="of one shape, in this process")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.json:
        print(json.dumps(measure(options.shapes[0], options.attacks)))
        return
    print(f"# {platform.machine()}, one thread, {date.today()}")
    for shape in options.shapes:
        command = [
            sys.executable, "-m", "benchmarks.cost.scale", "--json", "--shapes", shape,
            "--attacks", *options.attacks,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(shape, done.stderr[-3000:])
            continue
        for name, c in json.loads(done.stdout.splitlines()[-1]).items():
            print(
                f"{shape} {name}: calibration {c['calibration']:.1f} s, "
                f"{c['bytes'] / 1e6:.0f} MB ({c['entry']:.1f} bytes an entry); second look "
                f"{c['second']:.2f} s; reading {c['reading']:.2f} s, "
                f"{c['reading bytes'] / 1e6:.0f} MB" + (f"; F1 {c['f1']:.3f}" if "f1" in c else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()

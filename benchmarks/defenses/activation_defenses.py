"""What defences of the hidden states at a split cost the model, and what they cost an attacker.

    python -m benchmarks.defenses.activation_defenses  # the embedded model and messages
    python -m benchmarks.defenses.activation_defenses --model DIR --text FILE --layer 4 --length 32

For each defence: next-token loss of the model as it is (nothing is trained to get along with the
defence), and tokens that PrefixInversion recovers. The attacker knows the defence: the copy of the
bottom model that it works with compresses as the client does.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion
from lightning_fedleak.cli.finetuning.data import TokenRows, load_tokenizer
from lightning_fedleak.cli.finetuning.module import load_model
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.defenses import (
    ActivationCompression,
    ActivationNoise,
    DefenseContext,
)
from lightning_fedleak.defenses.activations.base import ActivationDefense
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out, with_states_out
from lightning_fedleak.model.snapshots import ActivationSnapshot, Observation, Stage

SMOKE = ("--texts 1 --length 8 --utility-texts 32 --budget 0.5",)

Make = Callable[[], ActivationDefense]


def defences(layer: int, d: int) -> dict[str, Make | None]:
    """By name; the dimensions that are kept are a half, a quarter and a sixteenth."""
    results: dict[str, Make | None] = {"none": None}
    for sigma in (0.1, 0.3, 1.0):
        results[f"noise, {sigma} std"] = lambda sigma=sigma: ActivationNoise(layer, sigma, True)
    for keep in (d // 2, d // 4, d // 16):
        results[f"{keep} of {d} dims, random"] = lambda keep=keep: ActivationCompression(
            layer, keep
        )
    return results


def where(root: nn.Module) -> DefenseContext:
    """One client, with fresh entropy."""
    return DefenseContext(root, 0, 1, torch.device("cpu"), "32-true", 0, os.urandom(32))


def sent(anatomy: Anatomy, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (B, L, d) as they leave the client, and the model's logits (B, L, V)."""
    observed: list[Tensor] = []
    place = place_of(anatomy, layer)
    handle = place.module.register_forward_hook(lambda _, a, out: observed.append(states_out(out)))
    try:
        with torch.no_grad():
            logits = anatomy.model(input_ids=ids).logits
    finally:
        handle.remove()
    return observed[0], logits


def knows(anatomy: Anatomy, layer: int, defence: ActivationDefense | None) -> Anatomy:
    """The attacker's model, whose bottom compresses as the client's does; noise it cannot know."""
    if not isinstance(defence, ActivationCompression):
        return anatomy
    server = find_anatomy(copy.deepcopy(anatomy.root))
    block = place_of(server, layer).module
    for hooks in (block._forward_hooks, block._forward_pre_hooks):
        hooks.clear()
    forward = block.forward

    def compressing(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        states = defence.rewrite(states_out(output), recomputed=False, training=False)
        return with_states_out(output, states)

    block.forward = compressing
    return server


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name of a causal model")
    parser.add_argument("--text", default="embedded", help="name or file of the private text")
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--texts", type=int, default=4, help="that are attacked")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--utility-texts", type=int, default=64)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of an attack")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model).eval()
    anatomy = find_anatomy(model)
    texts = messages() if args.text == "embedded" else read_texts(args.text)
    rows = [r for r in TokenRows.tokenize(texts, tokenizer, args.length) if len(r) == args.length]
    private = torch.stack(rows[: args.utility_texts])
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {args.threads} "
        f"thread; {args.model or 'embedded model'}, layer {args.layer} of {len(anatomy.blocks)}, "
        f"{args.texts} texts of {args.length} tokens, {len(private)} for the loss\n"
    )
    print("| defence | loss | tokens recovered |\n|---|---|---|")
    for name, make in defences(args.layer, anatomy.hidden_size).items():
        print(f"| {name} | " + measured(args, anatomy, make, private) + " |", flush=True)


def messages() -> list[str]:
    """The embedded private messages."""
    from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES

    return read_texts(EMBEDDED_MESSAGES)


def measured(args: argparse.Namespace, anatomy: Anatomy, make: Make | None, private: Tensor) -> str:
    """Return the loss and the share of tokens recovered."""
    defence = None if make is None else make()
    if defence is not None:
        defence.before_setup(where(anatomy.root))
    _, logits = sent(anatomy, args.layer, private)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), private[:, 1:].flatten())
    attacked = private[: args.texts]
    states, _ = sent(anatomy, args.layer, attacked)
    server = knows(anatomy, args.layer, defence)
    attack = PrefixInversion(args.layer, public_text=None, budget_seconds=args.budget)
    attack.prepare(server)
    layer_name = place_of(server, args.layer).name
    snapshot = ActivationSnapshot(0, Stage.SHARED, {layer_name: states})
    guess = attack.run(Observation(activations=(snapshot,)))
    right = (guess.tokens == attacked).float().mean()
    recovered = f"{float(right):.3f}" + ("" if guess.finished else " (time ran out)")
    return f"{float(loss):.3f} | {recovered}"


if __name__ == "__main__":
    main()

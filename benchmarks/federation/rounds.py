"""What a round of a federation gives away, and what it costs to look at it before it leaves.

Rounds of one client: LoRA of a rank, or the whole model, by an optimizer, for some local steps.
Each round is trained in a plain loop, and then looked at by every attack that chooses itself
(:class:`~lightning_fedleak.federation.OutgoingUpdates`). Printed are the medians over rounds of
what was read off the update, and of the processor time of training and of looking::

    OMP_NUM_THREADS=1 python -m benchmarks.federation.rounds
    OMP_NUM_THREADS=1 python -m benchmarks.federation.rounds --model DIR --text FILE --rank 32 \
        --steps 10

A rank of 0 is the whole model. With ``--epsilon`` the client adds noise of its own.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.federation import (
    ClientDP,
    OutgoingUpdates,
    RoundObserver,
    RoundSettings,
    trained_state,
)
from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES, model_source
from lightning_fedleak.finetuning.data import load_tokenizer
from lightning_fedleak.finetuning.texts import read_texts

SMOKE = ("--rounds 1 --steps 1 --rank 4 --rows 2 --length 12 --texts 24 --targets 2 --epsilon 8",)

SGD, MOMENTUM = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": torch.optim.AdamW}
LORA_RATES = {"sgd": 0.03, "momentum": 0.003, "adamw": 3e-4}
WHOLE_RATES = {"sgd": 1e-3, "momentum": 1e-4, "adamw": 3e-5}
SHOWN = ("f1", "auc")


def batches(
    rows: list[list[int]], size: int, length: int, pad: int, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Batches of texts in a random order, again and again."""
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            chosen = [rows[i][:length] for i in order[start : start + size]]
            wide = max(map(len, chosen))
            ids = torch.tensor([r + [pad] * (wide - len(r)) for r in chosen])
            mask = torch.tensor([[1] * len(r) + [0] * (wide - len(r)) for r in chosen])
            labels = ids.masked_fill(mask == 0, -100)
            yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model_of(name: str | None, rank: int) -> nn.Module:
    """A causal model with a LoRA of that rank on all linear layers; of rank 0 the whole one."""
    from transformers import AutoModelForCausalLM

    source, options = model_source(name)
    model = AutoModelForCausalLM.from_pretrained(source, **options).float()
    if rank:
        from peft import LoraConfig, get_peft_model

        linear = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        torch.manual_seed(0)
        model = get_peft_model(model, linear)
    trained: nn.Module = model.train()
    return trained


def rate_of(optimizer: str, rank: int) -> float:
    """The learning rate, at which stories15M does not diverge."""
    rate = (LORA_RATES if rank else WHOLE_RATES)[optimizer]
    return rate / 3 if optimizer == "sgd" and rank > 8 else rate


def optimizer_of(name: str, rank: int) -> Any:
    """The optimizer of a LoRA of that rank; of rank 0 of the whole model."""
    return partial(OPTIMIZERS[name], lr=rate_of(name, rank))


def train(model: nn.Module, data: list[dict[str, Tensor]], optimizer: Any) -> float:
    """A round, by an optimizer that begins afresh; the loss of its last step."""
    stepping = optimizer([p for p in model.parameters() if p.requires_grad])
    loss = torch.tensor(math.nan)
    for batch in data:
        stepping.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        stepping.step()
    return float(loss.detach())


def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians over rounds."""
    tokenizer = load_tokenizer(args.model)
    texts = read_texts(args.text or str(EMBEDDED_MESSAGES))[: args.texts]
    rows = [r for t in texts if len(r := tokenizer(t)["input_ids"]) >= 4]
    half = len(rows) // 2
    generator = torch.Generator().manual_seed(args.seed)
    pad = tokenizer.pad_token_id or 0
    public = [torch.tensor(r[: args.length]) for r in rows[half:]]
    outside, known = public[: len(public) // 2], public[len(public) // 2 :]
    optimizer = optimizer_of(args.optimizer, args.rank)
    model = model_of(args.model, args.rank)
    dp = None
    if args.epsilon:
        dp = ClientDP(
            args.clip, clients=1000, target_delta=1e-5, target_epsilon=args.epsilon,
            rounds=args.rounds + 1, trust="local", accountant="rdp",
        )  # fmt: skip
    observer = RoundObserver(
        copy.deepcopy(model),
        optimizer,
        args.steps,
        folder=folder,
        public_text=PublicText(known),
        tokenizer=tokenizer,
        games=Games(targets=args.targets, held_out=PublicText(outside)),
        defenses=[] if dp is None else [dp],
        settings=RoundSettings(look_seconds=600.0, tensorboard=False, cache=False),
    )
    out = OutgoingUpdates(observer, dp=dp)
    source = batches(rows[:half], args.rows, args.length, pad, generator)
    found: dict[str, list[float]] = {}
    for round_ in range(args.rounds + 1):
        sent = trained_state(model)
        data = list(itertools.islice(source, args.steps))
        started = time.process_time()
        loss = train(model, data, optimizer)
        trained = time.process_time()
        # The model goes on without the noise, which a mean over many clients takes away.
        leaving = out.leaves(round_, sent, trained_state(model), data, utility={"loss": loss})
        looked = time.process_time()
        if leaving.look is None:
            raise SystemExit("the update cannot be read: is the loss NaN? Lower the learning rate")
        if round_ == 0:
            continue  # calibrates, and finds a LoRA's B at zero
        names = {n: v for n, v in leaving.look.now.items() if n.endswith(SHOWN)}
        for name, value in names.items():
            found.setdefault(name, []).append(value)
        found.setdefault("training, s", []).append(trained - started)
        found.setdefault("looking, s", []).append(looked - trained)
        found.setdefault("loss", []).append(loss)
    observer.end()
    return {name: _median(values) for name, values in found.items()}


def _median(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a causal model; default the embedded one")
    parser.add_argument("--text", help="default the embedded messages")
    parser.add_argument(
        "--rank", type=int, default=8, help="of LoRA on all linear layers; 0: whole"
    )
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--steps", type=int, default=10, help="local steps of a round")
    parser.add_argument("--rows", type=int, default=4, help="texts in a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text, at most")
    parser.add_argument("--rounds", type=int, default=3, help="besides the first")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--targets", type=int, default=16)
    parser.add_argument("--epsilon", type=float, default=0.0, help="of client-level DP; 0: none")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    what = "whole" if args.rank == 0 else f"LoRA r {args.rank}"
    print(
        f"{what}, {args.optimizer}, {args.steps} local steps of {args.rows} x {args.length}, "
        f"{args.rounds} rounds; {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {datetime.date.today()}"
    )
    for name, value in found.items():
        print(f"{name:<44} {value:8.3f}")
    share = found["looking, s"] / found["training, s"]
    print(f"{'looking over training':<44} {share:8.2f}")


if __name__ == "__main__":
    main()

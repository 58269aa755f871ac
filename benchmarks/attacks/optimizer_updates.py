"""Words off the output head's update, by the optimizer that made it, on real text.

    python -m benchmarks.attacks.optimizer_updates --private imdb --public wikitext2 --steps 1,4
    python -m benchmarks.attacks.optimizer_updates --private imdb --public wikitext2 \
        --steps 16 --know-batch
    python -m benchmarks.attacks.optimizer_updates --model DIR --private imdb --public wikitext2 \
        --shapes 8x25,16x50

A client takes so many steps, each on a batch of private text of ``texts x tokens``, from the
model's weights and with a fresh optimizer, and shares the weight change. ``AlignedFlatChat`` is
told the optimizer, its settings and the number of steps, and with ``--know-batch`` the number of
texts in a batch; it rehearses on public text. Prints F1 with its 95% interval over rounds
(Student's t), the share of true types among the n likeliest where n is given, and seconds.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from datetime import date
from pathlib import Path

import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import read_texts
from lightning_fedleak.anatomy import HEAD_WEIGHT, find_anatomy
from lightning_fedleak.attacks import AlignedFlatChat, PublicText, RunFacts
from lightning_fedleak.finetuning.assets import EMBEDDED_MODEL
from lightning_fedleak.snapshots import Observation, Stage
from lightning_fedleak.taps.gradients import UpdateTap

SMOKE = (
    "--private {text} --public {text} --steps 1,2 --shapes 2x8 --rounds 1 --updates 4 "
    "--calibration-tokens 300",
)


def made(options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """The optimizer's class in torch.optim, and its settings."""
    settings: dict[str, object] = {"lr": options.lr}
    for pair in options.settings:
        name, _, value = pair.partition("=")
        settings[name] = float(value)
    return options.optimizer, settings


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95% interval."""
    t = torch.tensor(values, dtype=torch.float64)
    if len(t) < 2:
        return float(t.mean()), float("nan")
    half = stats.t.ppf(0.975, len(t) - 1) * float(t.std()) / len(t) ** 0.5
    return float(t.mean()), float(half)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--private", required=True)
    parser.add_argument("--public", required=True)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--settings", nargs="*", default=["weight_decay=0.01"])
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", default="1")
    parser.add_argument("--shapes", default="8x25,8x64")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--calibration-tokens", type=int, default=12_000)
    parser.add_argument("--know-batch", action="store_true")
    parser.add_argument("--pool", type=int, default=1500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    anatomy = find_anatomy(model.to(options.device).eval())
    public = PublicText(
        [t for t in read_texts(options.public) if len(t) > 60][: options.pool], tokenizer
    )
    private = [tokenizer(t)["input_ids"] for t in read_texts(options.private)[: options.pool]]
    kind, settings = made(options)
    print(f"# {platform.machine()}, one thread, {options.device}, {date.today()}")
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    for steps in map(int, options.steps.split(",")):
        facts = RunFacts(optimizer=kind, optimizer_settings=settings, local_steps=steps)
        attack = None
        for texts, length in shapes:
            if attack is None or options.know_batch:
                attack = AlignedFlatChat(
                    public,
                    updates=options.updates,
                    batch_texts=texts if options.know_batch else None,
                    calibration_tokens=options.calibration_tokens,
                    seed=options.seed,
                )
                attack.meet(facts)
                attack.prepare(anatomy)
            generator = torch.Generator().manual_seed(options.seed + 1)
            f1, given, types, seconds = [], [], [], []
            long = [ids[:length] for ids in private if len(ids) >= length]
            for _ in range(options.rounds):
                client = copy.deepcopy(model)
                parts = find_anatomy(client)
                weight = parts.parameter(HEAD_WEIGHT)
                tap = UpdateTap({HEAD_WEIGHT: weight}, tied=parts.tied)
                optimizer = getattr(torch.optim, kind)(client.parameters(), **settings)
                tap.begin()
                labels = []
                for _ in range(steps):
                    rows = torch.randint(len(long), (texts,), generator=generator).tolist()
                    ids = torch.tensor([long[i] for i in rows], device=options.device)
                    optimizer.zero_grad()
                    client(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
                    labels.append(ids[:, 1:].flatten())
                update = tap.end(0, Stage.SHARED, learning_rate=options.lr, local_steps=steps)
                truth = torch.cat(labels).unique()
                began = time.perf_counter()
                said = attack.run(Observation((update,)))
                seconds.append(time.perf_counter() - began)
                right = int(torch.isin(said.types, truth).sum())
                f1.append(2 * right / (len(said.types) + len(truth)))
                top = said.scores.topk(len(truth)).indices
                given.append(float(torch.isin(top, truth).float().mean()))
                types.append(len(truth))
            mean, half = mean_and_half(f1)
            print(
                f"{Path(options.model).name} {kind} {steps} steps of {texts}x{length} | types "
                f"{sum(types) / len(types):.0f} | F1 {mean:.3f} +- {half:.3f} | n given "
                f"{sum(given) / len(given):.3f} | {sum(seconds) / len(seconds):.1f} s a look, "
                f"calibrated in {attack.calibration_seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""How often a gate is silent on noise alone: short runs of DP-SGD at epsilon 2.

    python -m benchmarks.defenses.null_runs                 # a hundred runs, 17 busy minutes
    python -m benchmarks.defenses.null_runs --without       # the same runs without the defence

Each run trains a tiny Llama, whole or by LoRA, on texts of its own for a few steps under
``DPSGD(target_epsilon=2)``, and looks at every other one. A gate at .5 on ``leakage/worst/words``
should be silent: nothing is read through the noise, and the control of the looks says that words
would have been read without it. A gate that fires on *unknown* is not silent.
"""

import io
import math
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.shared import FineTuning, fit, llama, parser_of, quieten, with_lora
from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor, RiskGate
from lightning_fedleak.attacks import HONEST_BUT_CURIOUS
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.defenses import mean_of_sample_means

SMOKE = ("--runs 1",)
MIN_RUNS = 20  # runs that a share of 95 in 100 is judged by: one miss is allowed

VOCABULARY, TEXTS, LENGTH, STEPS, AT_MOST = 512, 96, 12, 10, 0.5
BATCH = 3
"""Texts of a step: no more tokens than the attack on a LoRA can distinguish, for high controls."""
WORST = "leakage/worst/words"


class Module(FineTuning):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return mean_of_sample_means(logits, batch["labels"], causal=True)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: Any = llama(VOCABULARY, 64, 2, max_position_embeddings=32)
    if seed % 2:
        model = with_lora(model, 16, ["q_proj", "v_proj"])
        with torch.no_grad():  # as an adapter that is trained further
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter += 0.02 * torch.randn_like(parameter)
    return model.train()


def run(seed: int, defended: bool) -> tuple[str, dict[str, float], float]:
    """Return how a run's gate ended, its controls, and the worst at its last look."""
    model = model_of(seed)
    ids = torch.randint(3, VOCABULARY, (TEXTS, LENGTH))
    rows = [{"input_ids": x, "labels": x} for x in ids]
    gate = RiskGate(WORST, at_most=AT_MOST, action="warn")
    settings = WatchSettings(assume=HONEST_BUT_CURIOUS)
    monitor = LeakageMonitor(every_n_steps=2, settings=settings)
    defense = DPSGD(max_grad_norm=1.0, target_epsilon=2, target_delta=1 / TEXTS**1.1)
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Module(model, partial(torch.optim.AdamW, lr=1e-3)),
            DataLoader(rows, batch_size=BATCH, shuffle=True), max_steps=STEPS,
            callbacks=[monitor, gate], strategy=DefendedStrategy("auto", [defense] * defended),
            default_root_dir=folder,
        )  # fmt: skip
    latest = monitor.latest
    controls = {n.split("/")[1]: v for n, v in latest.items() if n.endswith("/control")}
    event = gate.fired
    ended = "silent"
    if event is not None:
        ended = f"unknown ({event.why})" if math.isnan(event.value) else "fired"
    return ended, controls, latest.get(WORST, math.nan)


def main() -> int:
    parser = parser_of(__doc__, runs=100, without=(False, "without the defence"))
    options = parser.parse_args()
    quieten()
    start, ends, above, highest = time.monotonic(), Counter[str](), 0, 0.0
    for seed in range(options.runs):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ended, controls, worst = run(seed, not options.without)
        ends[ended] += 1
        above += ended == "silent" and any(value > AT_MOST for value in controls.values())
        highest = max(highest, worst)
        if ended != "silent" or options.runs <= 2:
            print(f"run {seed}: {ended}, worst {worst:.3f}, controls {controls}", flush=True)
    print(f"{options.runs} runs, {time.monotonic() - start:.0f} s: {dict(ends)}")
    print(f"silent with a control above {AT_MOST}: {above}; highest worst at an end: {highest:.3f}")
    judged = not options.without and options.runs >= MIN_RUNS
    return int(judged and above < 0.95 * options.runs)


if __name__ == "__main__":
    sys.exit(main())

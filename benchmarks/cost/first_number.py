"""How long the first numbers of an ordinary LoRA run take, from ``trainer.fit`` on.

    python -m benchmarks.cost.first_number --model DIR --text FILE

``LeakageMonitor()`` with nothing cached, on one core, a LoRA of rank 8 on queries and values, AdamW
behind a warm-up from rate 0. Seconds are of the process's processor time, so that other programs
do not count; those of the fit alone, without the monitor, stand beside.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_fedleak import LeakageMonitor
from lightning_fedleak.callbacks import MonitorSettings

SMOKE = ("--model {model} --text {text} --shape 2x8 --steps 6",)


class FineTuning(L.LightningModule):
    """A LoRA of a causal model, whose rate begins at 0."""

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(folder)
        targets = ["q_proj", "v_proj"] if hasattr(model, "model") else ["c_attn"]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.model = get_peft_model(model, config).train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of next tokens."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        """AdamW, and ten steps of warm-up."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(L.Callback):
    """Notes when each value is first known, in seconds of processor time and in steps."""

    def __init__(self, monitor: LeakageMonitor | None) -> None:
        self.monitor = monitor
        self.first: dict[str, tuple[float, int, float]] = {}
        self.began = time.process_time()
        self.training = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Calibration is over, as far as it comes before the first step."""
        self.training = time.process_time() - self.began

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Looks at what is known."""
        known = {} if self.monitor is None else self.monitor.latest
        for name, value in known.items():
            if name.endswith(("/f1", "/auc")) or name.startswith("leakage/worst/"):
                now = time.process_time() - self.began
                self.first.setdefault(name, (now, trainer.global_step - 1, value))


def rows_of(text: Path, folder: str, shape: tuple[int, int], steps: int) -> list[torch.Tensor]:
    """Windows of a text's tokens, as many as the steps take."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text()[: 40 * steps * shape[0] * shape[1]])["input_ids"]
    windows = torch.tensor(ids)[: len(ids) // shape[1] * shape[1]].view(-1, shape[1])
    needed = steps * shape[0]
    return list(windows.repeat(-(-needed // len(windows)), 1)[:needed])


def run(options: argparse.Namespace, monitor: LeakageMonitor | None, steps: int) -> Clock:
    """One fit."""
    L.seed_everything(0, verbose=False)
    rows, length = map(int, options.shape.split("x"))
    data = rows_of(options.text, options.model, (rows, length), steps)
    module, clock = FineTuning(options.model, options.rank), Clock(monitor)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            callbacks=[clock, *([] if monitor is None else [monitor])][::-1],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        clock.began = time.process_time()
        trainer.fit(module, DataLoader(data, batch_size=rows))
    return clock


def main() -> None:
    """Prints one row for each value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a causal model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--shape", default="4x64", help="rows x tokens of a batch")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
    monitor = LeakageMonitor(settings=MonitorSettings(cache=False))
    plain = run(options, None, 3)
    step = (time.process_time() - plain.began - plain.training) / 3
    watched = run(options, monitor, options.steps)
    print(f"a step takes {step:.2f} s; before the first one {watched.training:.0f} s")
    print(f"{'value':<40} {'processor s':>11} {'step':>5} {'value':>6}")
    for name, (seconds, at, value) in sorted(watched.first.items(), key=lambda x: x[1][0]):
        print(f"{name:<40} {seconds:>11.0f} {at:>5} {value:>6.3f}")


if __name__ == "__main__":
    main()

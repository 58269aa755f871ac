"""Whether training is bit-identical with and without the monitor, in drawn configurations.

    python -m benchmarks.identity                       # two hundred, about 15 minutes
    python -m benchmarks.identity --only 17 --runs 1    # a configuration alone

A configuration draws a face (LeakageMonitor on Lightning, LeakageCallback on transformers' Trainer,
Watch in a loop of one's own, alone or under DDP), a model, what of it is trained, its optimizer,
precision, accumulation, clipping and checkpointing, the attacks, how often they look, and whether
the run is stopped and resumed. In half of them every look has a control. Weights, optimizer states,
losses and the random states of torch, numpy and Python must be the same bits.
"""

from __future__ import annotations

import argparse
import io
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from benchmarks.shared import trained, with_lora
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    FCMembership,
    GradientMembership,
    PrefixInversion,
    PublicText,
    RevealLabels,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch, WatchSettings

SMOKE = ("--runs 4",)

VOCABULARY, WIDTH, TEXTS, LENGTH, STEPS = 97, 16, 24, 9, 6
PUBLIC = PublicText([[(7 * i + 3 * j) % 94 + 3 for j in range(12)] for i in range(48)])
FACES = ("lightning", "trainer", "loop", "ddp")
ATTACKS: dict[str, Any] = {
    "auto": lambda: "auto",
    "head": lambda: [AlignedFlatChat(PUBLIC, calibration_tokens=600), RevealLabels(max_seconds=5)],
    "maps": lambda: [SubspaceWords(capacity_seconds=0), SubspaceMembership(PUBLIC)],
    "members": lambda: [GradientMembership(PUBLIC)],
    "crafted": lambda: [FCMembership(1)],
    "split": lambda: [PrefixInversion(1, budget_seconds=5)],
    "texts": lambda: [SubspaceTexts(budget_seconds=None)],
}


@dataclass(frozen=True)
class Configuration:
    seed: int
    face: str
    model: str
    part: str
    optimizer: str
    precision: str
    dropout: float
    accumulate: int
    clip: float
    checkpointing: bool
    resumed: bool
    attacks: str
    every: int
    controlled: bool

    @classmethod
    def drawn(cls, seed: int, faces: tuple[str, ...]) -> Configuration:
        draw = random.Random(seed)
        model = draw.choice(["gpt2", "gpt2 tied", "llama", "bert"])
        part = draw.choice(["whole", "LoRA", "LoRA all linear"])
        attacks = ["auto", "maps"]
        if model != "bert":
            attacks += ["members", "crafted", "texts", "split"]
        if model in ("gpt2", "llama") and part == "whole":
            attacks.append("head")
        face = draw.choices(faces, [1 if face == "ddp" else 5 for face in faces])[0]
        return cls(
            seed,
            face,
            model,
            part,
            draw.choice(["sgd", "adamw"]),
            draw.choice(["32-true", "bf16-mixed", "bf16-true"]),
            draw.choice([0.0, 0.1]),
            draw.choice([1, 1, 2]),
            draw.choice([0.0, 0.1]),
            draw.random() < 0.2,
            draw.random() < 0.2,
            draw.choice(attacks),
            draw.choice([1, 2, 3]),
            seed % 2 == 0,
        )

    def module(self) -> nn.Module:
        """Return the model; the same for the same configuration."""
        torch.manual_seed(self.seed)
        size = {"vocab_size": VOCABULARY, "pad_token_id": 0}
        wide = {
            "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 32,
        }  # fmt: skip
        p = self.dropout
        if self.model == "bert":
            rates = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
            model: Any = BertForMaskedLM(BertConfig(**size, **wide, **rates))
        elif self.model == "llama":
            model = LlamaForCausalLM(LlamaConfig(**size, **wide, attention_dropout=p))
        else:
            rates = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
            shape = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
            tied = {"tie_word_embeddings": self.model == "gpt2 tied"}
            model = GPT2LMHeadModel(GPT2Config(**size, **shape, **rates, **tied, eos_token_id=2))
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if self.part != "whole":
            q = {"gpt2": "c_attn", "bert": "query", "llama": "q_proj"}[self.model.split()[0]]
            targets: Any = [q] if self.part == "LoRA" else "all-linear"
            model = with_lora(model, 4, targets, lora_dropout=p)
        dtype = torch.bfloat16 if self.precision == "bf16-true" else torch.float32
        return model.to(dtype).train()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained(model), 1e-2, momentum=0.9)
        return torch.optim.AdamW(trained(model), 1e-2)

    def rows(self) -> list[dict[str, Tensor]]:
        ids = torch.randint(3, 97, (TEXTS * self.accumulate, LENGTH), generator=self.generator)
        labels = ids.clone()
        if self.model == "bert":
            labels[:, ::2] = -100
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def settings(self, **rare: Any) -> dict[str, Any]:
        settings = WatchSettings(**rare)
        return {"every_n_steps": self.every, "settings": settings}


def footprint(model: nn.Module, optimizer: Any, losses: list[float]) -> list[Tensor]:
    """Return weights, the optimizer's state, losses and random states, as they are."""
    tensors = [t.detach().clone() for t in model.state_dict().values()]
    states = list(optimizer.state.values())
    tensors += [v.clone() for state in states for v in state.values() if isinstance(v, Tensor)]
    numbers = [*np.random.get_state()[1], *random.getstate()[1][:-1]]
    tensors.append(torch.tensor(losses, dtype=torch.float64))
    return [*tensors, torch.get_rng_state(), torch.tensor([int(n) for n in numbers])]


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ---- faces -------------------------------------------------------------------------------------


class Module(L.LightningModule):
    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration, self.model = configuration, configuration.module()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.configuration.optimizer_of(self.model)


def lightning(c: Configuration, folder: Path, watched: bool) -> list[Tensor]:
    module, losses = Module(c), []
    for epochs in (1, 2) if c.resumed else (1,):
        module = Module(c)
        saver = ModelCheckpoint(folder / "saved", save_last=True)
        callbacks: list[L.Callback] = [saver] if c.resumed else []
        if watched:
            settings = c.settings()
            attacks = ATTACKS[c.attacks]()
            callbacks.append(LeakageMonitor(attacks, folder=folder, **settings))
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", precision=c.precision, logger=False,
            accumulate_grad_batches=c.accumulate, gradient_clip_val=c.clip or None,
            callbacks=callbacks, enable_checkpointing=c.resumed, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        if epochs == 1:
            seeded(c.seed)
        last = folder / "saved" / "last.ckpt" if epochs == 2 else None
        loader = DataLoader(c.rows(), batch_size=4, shuffle=True)
        trainer.fit(module, loader, ckpt_path=last, weights_only=False)
        losses += module.losses
    return footprint(module, trainer.optimizers[0], losses)


class Recording(Trainer):
    """Keeps the loss of each batch."""

    def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
        loss = super().compute_loss(*arguments, **settings)
        self.losses.append(float(loss.detach()))
        return loss


def trainer(c: Configuration, folder: Path, watched: bool) -> list[Tensor]:
    losses: list[float] = []
    for steps in (STEPS // 2, STEPS) if c.resumed else (STEPS,):
        seeded(c.seed)
        model = c.module()
        arguments = TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=4, report_to=[],
            save_strategy="steps" if c.resumed else "no", save_steps=STEPS // 2, use_cpu=True,
            gradient_accumulation_steps=c.accumulate, max_grad_norm=c.clip, disable_tqdm=True,
            bf16=c.precision == "bf16-mixed", dataloader_pin_memory=False, logging_strategy="no",
            seed=c.seed, lr_scheduler_type="constant",
        )  # fmt: skip
        optimizers = (c.optimizer_of(model), None)
        one = Recording(model, arguments, train_dataset=c.rows(), optimizers=optimizers)
        one.losses = losses
        if watched:
            callback = LeakageCallback(one, ATTACKS[c.attacks](), **c.settings())
            one.add_callback(callback)
        one.train(resume_from_checkpoint=steps == STEPS and c.resumed)
    return footprint(model, one.optimizer, losses)


def loop(c: Configuration, folder: Path, watched: bool, ddp: bool = False) -> list[Tensor]:
    model, losses, saved = c.module(), [], None
    optimizer = c.optimizer_of(model)
    called: nn.Module = DistributedDataParallel(model) if ddp else model
    rows = c.rows()[distributed.get_rank() :: 2] if ddp else c.rows()
    batches = [*DataLoader(rows, batch_size=4)]
    parts = [batches[: len(batches) // 2], batches[len(batches) // 2 :]] if c.resumed else [batches]
    seeded(c.seed)
    for part in parts:
        watch, gate = None, Threshold("leakage/worst/words", at_most=1.0, strict=False)
        if watched:
            gates = [gate] if c.attacks == "head" else []
            settings = c.settings(precision=c.precision, tensorboard=False)
            watch = Watch(called, optimizer, ATTACKS[c.attacks](), gates, folder=folder, **settings)
            if saved is not None:
                watch.load_state_dict(saved)
        with watch or nullcontext():
            for number, batch in enumerate(part, 1):
                with nullcontext() if watch is None else watch.step(batch):
                    with torch.autocast("cpu", torch.bfloat16, c.precision == "bf16-mixed"):
                        loss = called(**batch).loss
                    (loss / c.accumulate).backward()
                    losses.append(float(loss.detach()))
                    if number % c.accumulate == 0:
                        if c.clip:
                            nn.utils.clip_grad_norm_(model.parameters(), c.clip)
                        optimizer.step()
                        optimizer.zero_grad()
            saved = None if watch is None else watch.state_dict()
    return footprint(model, optimizer, losses)


def process(rank: int, c: Configuration, folder: Path, watched: bool) -> None:
    quiet(c)
    place = f"file://{folder}/meeting-{watched}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    torch.save(loop(c, folder, watched, ddp=True), folder / f"{watched}-{rank}.pt")
    distributed.destroy_process_group()


def ddp(c: Configuration, folder: Path, watched: bool) -> list[Tensor]:
    torch.multiprocessing.spawn(process, (c, folder, watched), 2)
    return [t for rank in (0, 1) for t in torch.load(folder / f"{watched}-{rank}.pt")]


# ---- comparing ---------------------------------------------------------------------------------

_is_due, _keep = Controls._is_due, Controls._keep
controls = Counter[str]()
"""Controls of this process by whether they could be read."""


def kept(self: Controls, look: Any, plan: Any, control: Any) -> None:
    """Count a control."""
    controls["unread" if control.why else "read"] += 1
    _keep(self, look, plan, control)


def quiet(c: Configuration) -> None:
    """Print nothing, and give every look a control in half of the configurations."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Controls._keep = kept  # type: ignore[method-assign]
    Controls._is_due = (lambda *_: True) if c.controlled else _is_due  # type: ignore[method-assign]


def differ(c: Configuration) -> str | None:
    """Return what differs with and without the monitor; None where nothing does."""
    run = {"lightning": lightning, "trainer": trainer, "loop": loop, "ddp": ddp}[c.face]
    quiet(c)
    runs = []
    for watched in (True, False):
        with tempfile.TemporaryDirectory() as name:
            runs.append(run(c, Path(name), watched))
    enabled, disabled = runs
    if len(enabled) != len(disabled):
        return f"{len(enabled)} tensors, not {len(disabled)}"
    pairs = enumerate(zip(enabled, disabled, strict=True))
    wrong = [i for i, (a, b) in pairs if not torch.equal(a.nan_to_num(), b.nan_to_num())]
    return f"tensors {wrong} of {len(enabled)}" if wrong else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--only", type=int, default=0, help="the first configuration")
    parser.add_argument("--faces", nargs="+", default=FACES, choices=FACES)
    options = parser.parse_args()
    start, count, wrong = time.monotonic(), Counter[str](), 0
    for seed in range(options.only, options.only + options.runs):
        c = Configuration.drawn(seed, tuple(options.faces))
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            difference = differ(c)
        kinds = {"resumed": c.resumed, "control forced": c.controlled}
        count[", ".join([c.face, *(name for name, is_so in kinds.items() if is_so)])] += 1
        if difference is not None:
            wrong += 1
            print("DIFFERENT", c, difference, flush=True)
    elapsed = time.monotonic() - start
    print(f"{count.total()} configurations, {elapsed:.0f} s, {wrong} differ: {dict(count)}")
    print(f"controls: {dict(controls)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

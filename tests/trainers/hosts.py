"""The same training within the same defences by each host: Lightning and transformers' Trainer."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

from lightning_fedleak.defenses import Defense
from lightning_fedleak.defenses.dpsgd.poisson import PoissonBatchSampler
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers import DefendedLoop, defended
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import own_rng, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_t5
from tests.helpers.settings import QUIET

N, BATCH, CLIP = 24, 4, 0.9


def rows(n: int = N) -> Any:
    return random_token_loader(n=n, length=8, padded=True).dataset


def lora(
    make: Any = tiny_llama, targets: Sequence[str] = ("q_proj", "v_proj"), **settings: Any
) -> torch.nn.Module:
    import peft

    with own_rng(1):
        given = {"target_modules": [*targets], "init_lora_weights": False}
        return peft.get_peft_model(make(), peft.LoraConfig(r=2, **given, **settings))


def dora() -> torch.nn.Module:
    return lora(use_dora=True, trainable_token_indices=list(range(3, 60)))


MODELS = {
    "gpt2 tied": lambda: tiny_gpt2(dropout=0.0), "llama": tiny_llama, "lora": lora, "dora": dora,
    "experts": lambda: tiny_mixtral("grouped_mm"),
    "encoder-decoder": lambda: lora(lambda: tiny_t5(dropout=0.0), "qv"),
}  # fmt: skip


@dataclass
class Trace:
    """What a training made: drawn rows and shared gradients of each step, and the weights."""

    model: Any
    drawn: list[list[int]] = field(default_factory=list)
    local: list[Tensor] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    steps: int = 0
    trainer: Any = None

    def tap(self, stage: Stage, optimizer: Any) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        values = torch.cat([gradient.flatten().clone() for gradient in flat])
        if stage == Stage.SHARED:
            self.shared.append(values)
        elif stage == Stage.LOCAL:
            self.local.append(values)


@contextmanager
def drawing(trace: Trace) -> Iterator[None]:
    """Note the rows of each batch."""
    real = PoissonBatchSampler.rows

    def note(self: PoissonBatchSampler, step: int) -> list[int]:
        drawn = real(self, step)
        trace.drawn.append(drawn)
        return drawn

    PoissonBatchSampler.rows = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        PoissonBatchSampler.rows = real  # type: ignore[method-assign]


def in_lightning(folder, model, defenses, lr, **settings) -> Trace:
    names = {"num_train_epochs": "max_epochs", "max_steps": "max_steps"}
    known: dict[str, Any] = {names[n]: v for n, v in settings.items() if n in names}
    if settings.get("bf16"):
        known["precision"] = "bf16-mixed"
    trace = Trace(model.train())
    strategy = DefendedStrategy("auto", defenses)

    class Taps(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            strategy.add_tap(trace.tap)

    run = L.Trainer(
        **({"max_epochs": 1} | known), devices=1, strategy=strategy, default_root_dir=folder,
        callbacks=[Taps()], **QUIET,
    )  # fmt: skip
    batch = settings.get("per_device_train_batch_size", BATCH)
    with drawing(trace):
        data = settings.get("train_dataset", rows())
        run.fit(CausalLMModule(model, lr=lr), DataLoader(data, batch_size=batch))
    trace.steps = run.global_step
    return trace


def trainer_of(
    folder: Path,
    model: Any,
    defenses: Sequence[Defense],
    lr: float = 0.05,
    kind: Any = Trainer,
    *,
    outside_epsilon: bool = False,
    train_dataset: Any = None,
    compute_loss_func: Any = None,
    eval_dataset: Any = None,
    optimizers: Any = (None, None),
    **settings: Any,
) -> Any:
    known: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
        "learning_rate": lr, "lr_scheduler_type": "constant", "optim": "sgd", "logging_steps": 1,
    }  # fmt: skip
    return defended(kind)(
        model, TrainingArguments(str(folder), **(known | settings)), default_data_collator,
        train_dataset=rows() if train_dataset is None else train_dataset, eval_dataset=eval_dataset,
        compute_loss_func=compute_loss_func, optimizers=optimizers, defenses=defenses,
        outside_epsilon=outside_epsilon,
    )  # fmt: skip


def under_the_trainer(folder, model, defenses, lr, resume=None, **settings) -> Trace:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_of(folder, model, defenses, lr, optimizers=(optimizer, scheduler), **settings)
    return traced(trainer, resume)


def traced(trainer: Any, resume: Any = None) -> Trace:
    """Train, and note what is released."""
    trace = Trace(trainer.model, trainer=trainer)
    begin = trainer._begin

    def begin_with_taps() -> None:
        begin()
        trainer._fedleak.add_tap(trace.tap)

    trainer._begin = begin_with_taps
    with drawing(trace):
        trainer.train(resume_from_checkpoint=resume)
    trace.steps = trainer.state.global_step
    return trace


def in_a_loop(folder, model, defenses, lr, **settings) -> Trace:
    """A loop of one's own, under autocast where it is asked for."""
    trace, bf16 = Trace(model.train()), settings.get("bf16", False)
    epochs, steps = settings.get("num_train_epochs", 1), settings.get("max_steps")
    batch = settings.get("per_device_train_batch_size", BATCH)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)

    def compute(given: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss: Tensor = model(**given).loss
        return loss

    private = DefendedLoop(
        model, optimizer, DataLoader(settings.get("train_dataset", rows()), batch), defenses,
        epochs=epochs, steps=steps, precision="bf16-mixed" if bf16 else None,
    )  # fmt: skip
    with drawing(trace), private:
        private._release.add_tap(trace.tap)
        for _ in range(epochs):
            for given in private:
                private.loss(compute, given).backward()
                optimizer.step()
                optimizer.zero_grad()
                trace.steps += 1
    return trace


HOSTS = {"lightning": in_lightning, "trainer": under_the_trainer, "loop": in_a_loop}


def clipped_sum(model: Any, drawn: Sequence[int], clip: float, *, bf16: bool = False) -> Tensor:
    """Return the sum of clipped gradients of rows, one backward pass for each, in float64."""
    model = copy.deepcopy(model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    data = rows()
    for place in drawn:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**{name: value[None] for name, value in data[place].items()}).loss
        parts = torch.autograd.grad(loss, trained)
        flat = torch.cat([part.double().flatten() for part in parts])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total

"""Fits under DPSGD, shared by the tests of DP-SGD, and the clipped sum by brute force."""

import copy
import tempfile
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fedleak.defenses import DPSGD, mean_of_sample_means
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import own_rng, tiny_gpt2
from tests.helpers.settings import QUIET

N, BATCH, CLIP = 24, 4, 0.9
CLIPS = {"lora": 0.25}
"""Of models whose gradients are all shorter than CLIP."""


def lora() -> torch.nn.Module:
    import peft

    with own_rng(1):
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
        return peft.get_peft_model(tiny_gpt2(dropout=0.0), config).train()


class CausalLM(L.LightningModule):
    """Fine-tunes on the mean of per-sample means; sizes of its batches are kept."""

    synced = False
    """Whether its loss is logged as the mean of processes: none may then have an empty batch."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.05) -> None:
        super().__init__()
        self.model = tiny_gpt2(dropout=0.0).train() if model is None else model
        self.lr = lr
        self.sizes: list[int] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self.model(**inputs, use_cache=False).logits
        return mean_of_sample_means(logits, batch["labels"], causal=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.append(len(batch["labels"]))
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=self.synced)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def clipped_sum(module, batch, precision, clip, user_of=None) -> tuple[Tensor, list[float]]:
    """One backward pass for each sample, or all of a user's, on a copy; and norms over clips."""
    module = copy.deepcopy(module)
    for inner in module.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    trained = [p for p in module.parameters() if p.requires_grad]
    total, norms = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64), []
    whose = [user_of(ids) if user_of else i for i, ids in enumerate(batch["input_ids"])]
    for user in dict.fromkeys(whose):
        own = [i for i, other in enumerate(whose) if other == user]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.loss({key: value[own] for key, value in batch.items()})
        found = torch.autograd.grad(loss, trained, materialize_grads=True)
        flat = torch.cat([gradient.double().flatten() for gradient in found])
        norms.append(float(flat.norm()) / clip)
        total += flat * min(1.0, 1 / max(norms[-1], 1e-30))
    return total, norms


def trainer(strategy: Any, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        **QUIET, "devices": 1, "max_epochs": 1, "default_root_dir": tempfile.mkdtemp(),
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **{**defaults, **settings})


def loader(n: int = N, batch_size: int = BATCH) -> DataLoader[Any]:
    return random_token_loader(n=n, batch_size=batch_size, length=8, padded=True)


def fit(defenses, module=None, *, name="auto", **settings) -> tuple[CausalLM, L.Trainer]:
    """Fits with these defences, or with one."""
    defenses = [defenses] if isinstance(defenses, DPSGD) else defenses
    module = CausalLM() if module is None else module
    ckpt_path = settings.pop("ckpt_path", None)
    data = settings.pop("data", None) or loader()
    run = trainer(DefendedStrategy(name, defenses), **settings)
    run.fit(module, data, ckpt_path=ckpt_path)
    return module, run

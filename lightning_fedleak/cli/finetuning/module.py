"""The module that fine-tunes a causal language model."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_fedleak.cli.finetuning.assets import SourceError, loading, model_source
from lightning_fedleak.defenses import mean_of_sample_means
from lightning_fedleak.extras import require_package
from lightning_fedleak.validate import check_choice


def load_model(name: str | None) -> PreTrainedModel:
    """Return a causal language model of the hub or of a folder, in fp32.

    None loads the small model inside this package.

    Raises:
        SourceError: there is no such model, or no way to reach it.
    """
    source, settings = model_source(name)
    with loading(source, "causal language model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, **settings
        )
    return model


class CausalLMFineTuning(L.LightningModule):
    """The training of any Hugging Face causal language model by AdamW on the next-token loss.

    It passes ``train_loss`` to the logger at each step, and ``val_loss`` at each validation.

    Args:
        model: name on the hub, folder or object; None for the small model inside this package.
        lr: learning rate.
        peft: ``"lora"`` trains low-rank adapters (needs the extra ``peft``), ``"bitfit"`` the
            biases only; None trains everything.
        loss: ``"token_mean"`` is the mean over all tokens of a batch, as Hugging Face models return
            it; ``"sample_mean"`` is the mean over texts of the mean over a text's tokens, which
            DP-SGD needs.

    Raises:
        ValueError: an unknown ``loss`` or ``peft``; or ``peft="lora"`` with a model for which PEFT
            has no default modules.
        SourceError: the model cannot be loaded, or has no biases for ``peft="bitfit"``.
        ImportError: ``peft="lora"`` without the package peft.

    Examples:
        >>> from lightning_fedleak.cli.finetuning import CausalLMFineTuning
        >>> module = CausalLMFineTuning(lr=1e-3)
        >>> type(module.configure_optimizers()).__name__
        'AdamW'
    """

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        lr: float = 1e-4,
        peft: Literal["lora", "bitfit"] | None = None,
        loss: Literal["token_mean", "sample_mean"] = "token_mean",
    ) -> None:
        super().__init__()
        self.loss = check_choice("loss", loss, ("token_mean", "sample_mean"))
        check_choice("peft", peft, ("lora", "bitfit"), optional=True)
        settings = {"lr": lr, "peft": peft, "loss": loss}  # without the model: it may be an object
        self.save_hyperparameters(settings)
        self.lr = lr
        language_model = model if isinstance(model, PreTrainedModel) else load_model(model)
        self.model = _with_lora(language_model) if peft == "lora" else language_model
        if peft == "bitfit":
            _train_biases_only(language_model)
        self.model.train()  # from_pretrained gives eval mode, and Lightning keeps a module's mode

    def forward(self, **batch: Tensor) -> Tensor:
        """Return the mean next-token loss, over tokens or texts as ``loss`` says; a scalar."""
        if self.loss == "sample_mean":
            labels = batch.pop("labels")
            return mean_of_sample_means(self.model(**batch).logits, labels, causal=True)
        loss: Tensor = self.model(**batch).loss
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of ``input_ids``, ``attention_mask`` and ``labels``, each (B, L)."""
        loss: Tensor = self(**batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss, averaged over rows."""
        self.log("val_loss", self(**batch), prog_bar=True, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the trainable parameters."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


def _with_lora(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model with a LoRA of rank 8 on PEFT's default modules."""
    with require_package("peft", "peft='lora' needs the package peft"):
        from peft import LoraConfig, TaskType, get_peft_model
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, lora_dropout=0.05)
    wrapped: torch.nn.Module = get_peft_model(model, config)
    return wrapped


def _train_biases_only(model: PreTrainedModel) -> None:
    """Freeze all parameters but the biases; raise ``SourceError`` if there are none."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    if not biases:
        raise SourceError(
            f"peft='bitfit' trains biases, and {type(model).__name__} has none; use peft='lora'"
        )
    model.requires_grad_(False)
    for bias in biases:
        bias.requires_grad_(True)

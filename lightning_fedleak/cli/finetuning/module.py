"""The module that fine-tunes a causal language model, and the data module of its texts.

The data module turns any text into batches for causal language models. The package contains a small
model with its tokenizer, and invented private messages. Here these are called the *embedded* ones;
they are the defaults.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_fedleak.cli.finetuning import assets
from lightning_fedleak.cli.finetuning.assets import SourceError, check_option, loading, model_source
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.defenses import mean_of_sample_means
from lightning_fedleak.extras import require_package
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.validate import check_choice, check_integer, check_number


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
            biases only; None trains everything that the model has set to train.
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
        model: str | torch.nn.Module | None = None,
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
        language_model = model if isinstance(model, torch.nn.Module) else load_model(model)
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


def _with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with a LoRA of rank 8 on PEFT's default modules."""
    with require_package("peft", "peft='lora' needs the package peft"):
        from peft import LoraConfig, TaskType, get_peft_model
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, lora_dropout=0.05)
    wrapped: torch.nn.Module = get_peft_model(model, config)
    return wrapped


def _train_biases_only(model: torch.nn.Module) -> None:
    """Freeze all parameters but the biases; raise ``SourceError`` if there are none."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        name = type(model).__name__
        raise SourceError(f"peft='bitfit' trains biases, and {name} has none; use peft='lora'")


def load_tokenizer(name: str | Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model on the hub or in a folder; None for the embedded one.

    Raises:
        SourceError: there is no such tokenizer, or no way to reach it.
    """
    source, settings = assets.model_source(name)
    with assets.loading(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **settings)
    return tokenizer


def tokenize_rows(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> list[Tensor]:
    """Return texts as rows of token ids, which are a data set for a ``DataLoader``.

    A text that is longer than a row continues in the next row. A last piece of one token is left
    out, because no token follows it.

    Args:
        texts: The texts.
        tokenizer: The tokenizer of the model.
        length: The largest number of tokens in a row.
    """
    return [
        torch.tensor(ids[start : start + length])
        for ids in (tokenizer(list(texts), verbose=False)["input_ids"] if texts else ())
        for start in range(0, len(ids), length)
        if len(ids) - start >= 2
    ]


class PadRight:
    """A function from rows of unequal length to a batch for Hugging Face models.

    Args:
        pad_id: The token id after the end of a row, masked and never a label; None for 0.
    """

    def __init__(self, pad_id: int | None) -> None:
        self.pad_id = pad_id or 0

    def __call__(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each (B, longest row)."""
        ids = [row.long() for row in rows]
        return {
            "input_ids": pad_sequence(ids, True, self.pad_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            "labels": pad_sequence(ids, True, IGNORE_INDEX),
        }


class TextDataModule(L.LightningDataModule):
    """Any text as batches for a causal language model, split into train and validation.

    Split and order depend only on ``seed`` and the texts, never on global random numbers.

    Args:
        text: a file, folder or dataset as
            :func:`~lightning_fedleak.cli.finetuning.texts.read_texts` takes it; None for the
            embedded private messages.
        tokenizer: name, folder or object; None for the embedded model's.
        batch_size: rows a batch.
        length: tokens a row, at most; longer texts continue in the next row.
        val_fraction: share of the texts for validation.
        column: the field of the file or dataset that holds the text.
        seed: The seed of the split and of the order.

    Raises:
        ValueError: an argument is out of its range.

    Examples:
        >>> from lightning_fedleak.cli.finetuning import TextDataModule
        >>> data = TextDataModule(batch_size=4, length=32)
        >>> data.setup()
        >>> next(iter(data.train_dataloader()))["input_ids"].shape[0]
        4
    """

    def __init__(
        self,
        text: str | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        batch_size: int = 8,
        length: int = 64,
        val_fraction: float = 0.1,
        column: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = check_integer("batch_size", batch_size)
        self.length = check_integer("length", length, at_least=2, hint="a token and the next")
        self.val_fraction = check_number("val_fraction", val_fraction, above=0, below=1)
        self.text = text
        self._tokenizer = tokenizer
        self.column = column
        self.seed = seed
        self._train: list[Tensor] | None = None
        self._val: list[Tensor] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded at the first use."""
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            self._tokenizer = load_tokenizer(self._tokenizer)
        return self._tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Read, split and tokenize the texts, once.

        Raises:
            SourceError: the text cannot be read, or is too little for one batch and one
                validation text; or ``length`` is more than the model can read.
        """
        if self._train is not None:
            return
        hint, limit = "tokens that this model can read", self.tokenizer.model_max_length
        check_option("length", self.length, at_most=limit, hint=hint)
        source = assets.EMBEDDED_MESSAGES if self.text is None else self.text
        texts = read_texts(source, self.column)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.seed))
        n_val = max(1, round(len(texts) * self.val_fraction))
        train, val = (
            tokenize_rows([texts[i] for i in part], self.tokenizer, self.length)
            for part in (order[n_val:], order[:n_val])
        )
        if len(train) < self.batch_size or not len(val):
            raise assets.SourceError(
                f"'{source}' gives {len(train)} rows of at most {self.length} tokens for training, "
                f"fewer than batch_size={self.batch_size}, or none of {len(val)} for validation: "
                "give more text (in a plain file one a line), or a smaller batch_size or length."
            )
        self._train, self._val = train, val

    def _loader(self, rows: list[Tensor] | None, *, train: bool) -> DataLoader[Tensor]:
        """Return a loader of rows; for training it shuffles, and omits a smaller last batch."""
        assert rows is not None, "call setup() first"
        return DataLoader(
            rows,  # type: ignore[arg-type]  # a list has all that a map-style data set needs
            batch_size=self.batch_size,
            shuffle=train,
            drop_last=train,
            collate_fn=PadRight(self.tokenizer.pad_token_id),
            generator=torch.Generator().manual_seed(self.seed),
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return whole batches in an order that depends on ``seed``."""
        return self._loader(self._train, train=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the validation rows in order."""
        return self._loader(self._val, train=False)

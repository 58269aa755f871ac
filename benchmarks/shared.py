"""What several scripts share: options, texts, models, fits, files of results, means and tables."""

import argparse
import csv
import gzip
import io
import json
import logging
import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)  # fmt: skip

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.finetuning.texts import read_texts as finetuning_texts

NAMED = {
    "imdb": "imdb/test.jsonl.gz",
    "agnews": "ag_news/test.csv.gz",
    "wikitext2": "wikitext2/train.raw.txt.gz",
    "tinystories": "tinystories/train_2MiB.txt.gz",
    "yelp": "yelp_sentences/sentiment.test.1.gz",
    "multi30k": "multi30k/test_2016_flickr.en.gz",
}


# ---- options --------------------------------------------------------------------------------


def parser_of(doc: str | None, *required: str, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser of a script's options.

    Args:
        doc: what ``--help`` says of the script.
        required: options that must be given, each a text.
        settings: other options by their defaults, which say the types: ``False`` makes a flag, a
            list takes several values, and a type in place of a value has no default (None, or an
            empty list). A pair adds help, where it is a text, or else the choices.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    for name in required:
        parser.add_argument(f"--{name}", required=True)
    for name, setting in settings.items():
        default, more = setting if isinstance(setting, tuple) else (setting, None)
        details: dict[str, Any] = {"help" if isinstance(more, str) else "choices": more}
        if default is False:
            details = {"action": "store_true", "help": more}
        else:
            values = default if isinstance(default, list) else [default]
            kind = next((v for v in values if isinstance(v, float)), values[0])
            details["type"] = kind if isinstance(kind, type) else type(kind)
            details["nargs"] = "*" if values is default else None
            missing = [] if values is default else None
            details["default"] = missing if kind is details["type"] else default
        parser.add_argument(f"--{name.replace('_', '-')}", **details)
    return parser


# ---- texts ----------------------------------------------------------------------------------


def data_folder() -> Path:
    """Return the folder of data sets in that of ``FEDLEAK_ASSETS``."""
    return Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data"


def content_of(path: Path) -> str:
    """Return the text of a file, also of one that is compressed."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


def read_texts(name: str) -> list[str]:
    """Return the texts of a named set or a file."""
    path = data_folder() / NAMED[name] if name in NAMED else Path(name)
    if not path.exists():
        names = ", ".join(NAMED)
        raise SystemExit(f"no text at {path}: name a file, or one of {names} (FEDLEAK_ASSETS)")
    content = content_of(path)
    if ".jsonl" in path.name:
        texts = [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    elif ".csv" in path.name:
        texts = [" ".join(row[1:]) for row in csv.reader(io.StringIO(content))]
    elif name == "tinystories":
        texts = content.split("<|endoftext|>")
    else:
        texts = [line for line in content.splitlines() if not line.lstrip().startswith("=")]
    if name == "wikitext2":
        texts = [without_token_spaces(t) for t in texts]
    texts = [t.replace("<br />", " ").strip() for t in texts]
    return [t for t in texts if t]


def shuffled_texts(name: str) -> list[str]:
    """Return the different texts of a set or a file, in one random order."""
    read = read_texts if name in NAMED else finetuning_texts
    texts = list(dict.fromkeys(t.replace("<br />", " ") for t in read(name)))
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def without_token_spaces(text: str) -> str:
    """Return WikiText's spaced-out punctuation as it is written."""
    text = re.sub(r" @([-.,])@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r'" ([^"]*) "', r'"\1"', text)
    return text.replace(" 's", "'s").replace(" n't", "n't")


def tokens_of(texts: list[str], tokenizer, bos: int | None, seed: int, limit: int) -> PublicText:
    """Return ``limit`` texts in random order, as ids."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    front = [] if bos is None else [bos]
    chosen = [texts[i] for i in order[:limit]]
    ids = [front + tokenizer(t, add_special_tokens=False)["input_ids"] for t in chosen]
    return PublicText([i for i in ids if len(i) >= 2])


def drawn_ids(
    name: str, tokenizer: Any, options: argparse.Namespace, generator: torch.Generator | None = None
) -> list[list[int]]:
    """Return ``pool`` texts in random order as ids, with special tokens and ``bos`` in front."""
    texts, front = read_texts(name), [] if options.bos is None else [options.bos]
    generator = generator or torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(texts), generator=generator).tolist()[: options.pool]
    return [front + tokenizer(texts[i])["input_ids"] for i in order]


# ---- models and fits ------------------------------------------------------------------------


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def llama(vocabulary: int, width: int, blocks: int, heads: int = 4, **sizes: Any) -> Any:
    """Return a Llama of random numbers; its MLPs have twice the width where no size says so."""
    sizes = {"intermediate_size": 2 * width, "num_key_value_heads": heads, **sizes}
    sizes |= {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": blocks}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, **sizes))


def with_lora(
    model: nn.Module, rank: int, targets: Sequence[str] | str = "all-linear", **options: Any
) -> Any:
    """Return a model with a LoRA of PEFT, which is scaled by 2."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options)
    return get_peft_model(model, config)


def float_model(folder: str) -> Any:
    """Return a folder's model in single precision."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def loaded(folder: str) -> tuple[Any, Any]:
    """Return the tokenizer of a folder and its model, without dropout."""
    return AutoTokenizer.from_pretrained(folder), float_model(folder).eval()


def tuned_model(options: argparse.Namespace, seed: int) -> Any:
    """Return the model of the options, with a LoRA of a seed where they give its rank."""
    model = float_model(options.model)
    torch.manual_seed(seed)
    return with_lora(model, options.lora, lora_dropout=0.05) if options.lora else model


def trainer_arguments(folder: str, **settings: Any) -> TrainingArguments:
    """Return the arguments of a silent Trainer of transformers, on the processor."""
    silent = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    return TrainingArguments(folder, disable_tqdm=True, **silent, **settings)


ADAMW = partial(torch.optim.AdamW, lr=1e-4)


class FineTuning(L.LightningModule):
    """Fine-tuning of what is trained in a model, which gives its own loss.

    Args:
        model: from the field names of a batch to an output with a loss.
        optimizer: from parameters to an optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    ) -> None:
        super().__init__()
        self.model, self.optimizer = model.train(), optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(trained(self))


def fit(module: L.LightningModule, loader: DataLoader, **settings: Any) -> L.Trainer:
    """Fit a module with a silent Trainer, on the processor unless the settings say otherwise."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    silent |= {"enable_model_summary": False, "devices": 1}
    trainer = L.Trainer(**{"accelerator": "cpu", **silent, **settings})
    trainer.fit(module, loader)
    return trainer


# ---- results --------------------------------------------------------------------------------


def mean_and_half(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean of the known values, and half of its 95% interval (Student's t)."""
    x = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
    if len(x) < 2:
        return (float(x.mean()) if len(x) else math.nan), math.nan
    half = float(stats.t.ppf(0.975, len(x) - 1)) * float(x.std()) / len(x) ** 0.5
    return float(x.mean()), half


def with_ends(rate: Any, digits: int = 3) -> str:
    """Return a rate and its interval as text."""
    return f"{rate.value:.3f} ({rate.low:.{digits}f} to {rate.high:.{digits}f})"


def with_range(value: float, low: float, high: float, **_: Any) -> str:
    """Return a rate and its interval as the short text of a cell."""
    return f"{value:.3f} ({low:.2f}-{high:.2f})"


def print_head(options: argparse.Namespace, *more: str) -> None:
    """Print which model a table is of, and what of it is trained."""
    kind = f"LoRA r {options.lora}" if options.lora else "whole"
    print(f"\n### {', '.join([Path(options.model).name, kind, *more])}")


def print_epochs(options: argparse.Namespace, cells: dict[str, list[str]], *more: str) -> None:
    """Print the AUCs of attacks after each epoch below such a line."""
    print_head(options, *more)
    head = ["AUC (interval) after epoch", *(str(n + 1) for n in range(options.epochs))]
    print(table(head, ([name, *row] for name, row in cells.items())), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file of JSON lines; none where there is no file."""
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def auc_cells(folder: Path) -> tuple[dict[str, list[str]], str]:
    """Return the AUCs of each attack in a run's looks, and how many were asked about at the last.

    An attack that has none at a look has a dash there.
    """
    cells: dict[str, list[str]] = {}
    sides = ""
    for line in read_lines(folder / "leakage.jsonl"):
        values, text = line["metrics"], "-"
        if values.get("auc", {}).get("value") is not None:
            text = with_range(**values["auc"])
            members, others = (values[side]["value"] for side in ("members", "others"))
            sides = f"{members:.0f} members, {others:.0f} others"
        cells.setdefault(line["attack"], []).append(text)
    return cells, sides


def add_line(path: Path, *lines: dict[str, Any]) -> None:
    """Add results to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def quieten() -> None:
    """Use one thread, and print no warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def print_place(*more: str) -> None:
    """Use one thread, and print on what machine and when a script has run."""
    torch.set_num_threads(1)
    print(f"# {', '.join([platform.machine(), '1 thread', *more, str(date.today())])}")


def print_row(*cells: str) -> None:
    """Print a row of a table in Markdown at once."""
    print(f"| {' | '.join(cells)} |", flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))

"""24 ways to fine-tune: what is read, what is said of it, and whether that is true.

    python -m benchmarks.attacks.matrix --model DIR --bos 1 --out FILE
    python -m benchmarks.attacks.matrix --model DIR --cells LoRA "LoRA, NF4" --steps 5 --out FILE
    python -m benchmarks.attacks.matrix --table FILE

A cell trains ``--steps`` steps on public text, and then some on private text that ``SubspaceWords``
and ``GradientMembership`` look at. The truth is computed anew: a token counts where the loss has a
gradient at its embedding, and a text where it stands in the batch. Cells with NF4 and int8 need
bitsandbytes (``make test-quantized`` installs it beside the environment).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.attacks.setups import adapters, neftune, packed, padded, whole
from benchmarks.attacks.word_recovery import read_texts
from lightning_fedleak.attacks import GradientMembership, PublicText, SubspaceWords
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.cli.studies.sweep.cell import quiet

SMOKE = (
    "--model {model} --private {text} --public {text} --shape 2x8 --looks 2 --steps 1 "
    "--cells LoRA 'LoRA, left padding' --out {out}/cells.jsonl",
)
PROMPT = 8
"""Tokens of the system prompt of a chat, the same in each text."""


def adapted(config: type = LoraConfig, **options: Any) -> Callable[[Any], nn.Module]:
    rank = (
        {"init_r": 12, "target_r": 8, "total_step": 1000} if config is AdaLoraConfig else {"r": 8}
    )
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **rank, **options}
    return lambda model: get_peft_model(model, config(lora_alpha=16, **options))


LORA = adapted()


@dataclass(frozen=True)
class Cell:
    """A way to fine-tune."""

    setup: Callable[[Any], nn.Module] = LORA
    rows: str = "equal"
    precision: str = "32-true"
    accumulate: int = 1
    reentrant: bool | None = None
    compiled: bool = False
    base: str = "plain"


CELLS = {
    "whole": Cell(whole),
    "whole, bf16-mixed": Cell(whole, precision="bf16-mixed"),
    "LoRA": Cell(),
    "DoRA": Cell(adapted(use_dora=True)),
    "rsLoRA": Cell(adapted(use_rslora=True)),
    "PiSSA": Cell(adapted(init_lora_weights="pissa")),
    "AdaLoRA": Cell(adapted(AdaLoraConfig)),
    "adapters": Cell(adapters),
    "LoRA, bf16-mixed": Cell(precision="bf16-mixed"),
    "LoRA, bf16-true": Cell(precision="bf16-true"),
    "LoRA, accumulation 2": Cell(accumulate=2),
    "LoRA, checkpointing": Cell(reentrant=False),
    "LoRA, reentrant checkpointing": Cell(reentrant=True),
    "LoRA, compiled": Cell(compiled=True),
    "LoRA, completions": Cell(rows="completion"),
    "LoRA, chat": Cell(rows="chat"),
    "LoRA, left padding": Cell(rows="left"),
    "LoRA, right padding": Cell(rows="right"),
    "LoRA, packed": Cell(rows="packed"),
    "LoRA, padding-free with a cache": Cell(rows="crossing"),
    "LoRA, NF4": Cell(base="nf4"),
    "LoRA, int8": Cell(base="int8"),
    "LoRA, NEFTune 5": Cell(neftune),
    "LoRA, dropout .05": Cell(adapted(lora_dropout=0.05)),
}


# ---- a fit ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, each as long as a row or longer."""

    private: Sequence[Sequence[int]]
    outside: Sequence[Sequence[int]]
    public: Sequence[Sequence[int]]


class Client(L.LightningModule):
    """Keeps its batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()
        self.batches: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


class Words(SubspaceWords):
    """Keeps its guesses."""

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        self.guesses[view.gradients[-1].step] = set(guess.types.tolist())
        return guess


class Members(GradientMembership):
    """Keeps its scores."""

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        self.guesses[view.gradients[-1].step] = (query, guess.scores.tolist())
        return guess


def loaded(folder: str, base: str) -> Any:
    settings = {
        "plain": None,
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }[base]
    options = {} if settings is None else {"quantization_config": settings, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def collate(rows: str, texts: list[Tensor]) -> dict[str, Any]:
    """A batch of texts in a form."""
    if rows in ("left", "right", "packed", "crossing"):  # of several lengths
        texts = [ids[: len(ids) - i % 3 * len(ids) // 4] for i, ids in enumerate(texts)]
    each = [{"input_ids": ids, "labels": ids} for ids in texts]
    if rows in ("packed", "crossing"):
        batch = packed(each)
        return batch if rows == "packed" else {**batch, "use_cache": True}
    if rows == "left":
        turned = padded([{n: v.flip(0) for n, v in one.items()} for one in each])
        return {name: value.flip(1) for name, value in turned.items()}
    if rows == "right":
        return padded(each)
    ids = torch.stack(texts)
    if rows == "chat":
        ids[:, 1 : 1 + PROMPT] = texts[0][1 : 1 + PROMPT]
    labels = ids.clone()
    labels[:, : {"completion": len(texts[0]) // 2, "chat": 1 + PROMPT}.get(rows, 0)] = -100
    return {"input_ids": ids, "labels": labels}


def true_words(model: nn.Module, batches: Sequence[dict[str, Any]]) -> set[int]:
    """Tokens at whose embedding the loss has a gradient, without noise and dropout."""
    retained: list[tuple[Tensor, Tensor]] = []

    def watch(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.detach().requires_grad_()
        retained.append((args[0], output))
        return output

    handle = model.get_input_embeddings().register_forward_hook(watch)
    for batch in batches:
        model.eval()(**batch).loss.backward()
    handle.remove()
    return {i for ids, x in retained for i in ids[x.grad.abs().amax(-1) > 0].tolist()}


def own_auc(members: Members, batches: Sequence[dict[str, Any]], step: int) -> float:
    """AUC of the scores at a step, of texts that stand in its batches."""
    query, scores = members.guesses.get(step, (None, []))
    if query is None:
        return math.nan
    masks = (
        torch.ones_like(query.input_ids) if query.attention_mask is None else query.attention_mask
    )
    queried = [ids[mask != 0].tolist() for ids, mask in zip(query.input_ids, masks, strict=True)]
    rows = [f" {' '.join(map(str, row))} " for b in batches for row in b["input_ids"].tolist()]
    inside = [any(f" {' '.join(map(str, ids))} " in row for row in rows) for ids in queried]
    return float(roc_auc_score(inside, scores)) if 0 < sum(inside) < len(inside) else math.nan


def run(
    cell: Cell, folder: str, texts: Texts, shape: str, steps: int, looks: int
) -> dict[str, Any]:
    """What a fit logged of its last look, and the same computed anew."""
    torch.manual_seed(0)
    torch.compiler.reset()
    rows, length = map(int, shape.split("x"))
    model = cell.setup(loaded(folder, cell.base))
    if cell.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": cell.reentrant})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(steps):
        ids = [texts.public[(step * rows + i) % len(texts.public)][:length] for i in range(rows)]
        batch = torch.tensor(ids)
        optimizer.zero_grad()
        model.train()(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    public = PublicText([list(ids) for ids in texts.public])
    words, members = Words(capacity_seconds=0), Members(public, tokens=length)
    for attack in (words, members):
        attack.guesses = {}
    with tempfile.TemporaryDirectory() as logs:
        monitor = LeakageMonitor(
            [members] if cell.setup is adapters else [words, members],
            every_n_steps=1,
            games=Games(
                held_out=PublicText([list(ids[:length]) for ids in texts.outside]),
                targets=2 * rows * cell.accumulate,
            ),
            folder=logs,
        )
        trainer = L.Trainer(
            max_steps=looks,
            accelerator="cpu",
            callbacks=[monitor],
            precision=cell.precision,
            accumulate_grad_batches=cell.accumulate,
            default_root_dir=logs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        client = Client(torch.compile(model, backend="aot_eager") if cell.compiled else model)
        data = [
            torch.tensor(ids[:length]) for ids in texts.private[: looks * rows * cell.accumulate]
        ]
        loader = DataLoader(data, batch_size=rows, collate_fn=lambda each: collate(cell.rows, each))
        trainer.fit(client, loader)
        lines = map(json.loads, (Path(logs) / "leakage.jsonl").read_text().splitlines())
        last = {line["attack"]: line for line in lines if line["step"] == looks - 1}
    batches = client.batches[-cell.accumulate :]
    message = {n: one["unknown"] or one["metrics"] for n, one in last.items()}
    truth = true_words(model.float(), batches)
    guess = words.guesses.get(looks - 1)
    results = {"types": len(truth), "own_auc": own_auc(members, batches, looks - 1)}
    if guess is not None:
        results["own_f1"] = 2 * len(guess & truth) / (len(guess) + len(truth))
    for name, metric in (("subspace_words", "f1"), ("gradient_membership", "auc")):
        value = message.get(name, "none reads it")
        results[metric] = value if isinstance(value, str) else value[metric]["value"]
    return results


# ---- the table ------------------------------------------------------------------------------


def shown(value: object) -> str:
    if isinstance(value, str):
        return value if value == "none reads it" else f"*unknown*: {value.partition(',')[0][:60]}"
    return f"{value:.3f}".removeprefix("0") if isinstance(value, float) else "not known"


def print_table(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    steps = sorted({line["steps"] for line in lines})
    heads = " | ".join(f"step {s}: words (own) | is this text there? (own)" for s in steps)
    print(f"| cell | {heads} |\n|---|{'---|' * 2 * len(steps)}")
    for name in dict.fromkeys(line["cell"] for line in lines):
        cells = {line["steps"]: line for line in lines if line["cell"] == name}
        row = [
            f"{shown(one.get(m, 'not run'))}" + (f" ({shown(local)})" if local is not None else "")
            for one in (cells.get(s, {}) for s in steps)
            for m, local in (("f1", one.get("own_f1")), ("auc", one.get("own_auc")))
        ]
        print(f"| {name} | {' | '.join(row)} |")
    error = [abs(x["f1"] - x["own_f1"]) for x in lines if isinstance(x["f1"], float)]
    print(f"\nlogged F1 less own: at most {max(error, default=0.0):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--shape", default="4x32")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--steps", nargs="+", type=int, default=[5, 100])
    parser.add_argument("--looks", type=int, default=3)
    parser.add_argument("--bos", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print_table(options.table)
        return
    if options.model is None or options.out is None:
        parser.error("give --model DIR and --out FILE, or --table FILE")
    torch.set_num_threads(1)
    print(f"# {platform.machine()}, one thread, {date.today()}")
    length = int(options.shape.partition("x")[2])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    front = [] if options.bos is None else [options.bos]
    long: dict[str, list[list[int]]] = {}
    for name in dict.fromkeys((options.private, options.public)):
        every = (front + tokenizer(text)["input_ids"] for text in read_texts(name)[:600])
        long[name] = [ids[:64] for ids in every if len(ids) >= length]
    private = long[options.private]
    texts = Texts(private[::2], private[1::2], long[options.public][:120])
    finished = options.out.read_text("utf-8").splitlines() if options.out.is_file() else []
    have = {(line["cell"], line["steps"]) for line in map(json.loads, finished)}
    for steps in options.steps:
        for name in options.cells:
            cell = CELLS[name]
            if (name, steps) in have or (cell.base != "plain" and not find_spec("bitsandbytes")):
                continue
            with quiet():
                results = run(cell, options.model, texts, options.shape, steps, options.looks)
            line = {"cell": name, "steps": steps, "day": str(date.today()), **results}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()

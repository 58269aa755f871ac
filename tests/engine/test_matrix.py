"""24 ways to fine-tune a tiny model: what is logged is true against a truth computed anew.

A token counts where the loss has a gradient at its embedding, and a text where it is in the batch.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.attacks.setups import adapters, neftune, packed, padded, warm, whole
from benchmarks.shared import FineTuning, fit, read_lines
from lightning_fedleak.attacks import GradientMembership, PublicText, SubspaceWords
from lightning_fedleak.callbacks import Games, LeakageMonitor
from tests.helpers.folders import save_tiny_llama

ROWS, LENGTH, LOOKS = 2, 12, 3
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
    "whole": Cell(whole), "whole, bf16-mixed": Cell(whole, precision="bf16-mixed"), "LoRA": Cell(),
    "DoRA": Cell(adapted(use_dora=True)), "rsLoRA": Cell(adapted(use_rslora=True)),
    "PiSSA": Cell(adapted(init_lora_weights="pissa")), "AdaLoRA": Cell(adapted(AdaLoraConfig)),
    "adapters": Cell(adapters), "LoRA, bf16-mixed": Cell(precision="bf16-mixed"),
    "LoRA, bf16-true": Cell(precision="bf16-true"), "LoRA, accumulation 2": Cell(accumulate=2),
    "LoRA, checkpointing": Cell(reentrant=False),
    "LoRA, reentrant checkpointing": Cell(reentrant=True), "LoRA, compiled": Cell(compiled=True),
    "LoRA, completions": Cell(rows="completion"), "LoRA, chat": Cell(rows="chat"),
    "LoRA, left padding": Cell(rows="left"), "LoRA, right padding": Cell(rows="right"),
    "LoRA, packed": Cell(rows="packed"), "LoRA, padding-free with a cache": Cell(rows="crossing"),
    "LoRA, NF4": Cell(base="nf4"), "LoRA, int8": Cell(base="int8"),
    "LoRA, NEFTune 5": Cell(neftune), "LoRA, dropout .05": Cell(adapted(lora_dropout=0.05)),
}  # fmt: skip


class Client(FineTuning):
    """Keeps its batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.batches: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


class Words(SubspaceWords):
    """Keeps its guess of each step, not that of its control."""

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        self.guesses.setdefault(view.gradients[-1].step, set(guess.types.tolist()))
        return guess


class Members(GradientMembership):
    """Keeps its scores of each step, not those of its control."""

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        self.guesses.setdefault(view.gradients[-1].step, (query, guess.scores.tolist()))
        return guess


def base_model(folder: str, base: str) -> Any:
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


def true_auc(members: Members, batches: Sequence[dict[str, Any]], step: int) -> float:
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


def run(cell, folder) -> dict[str, Any]:
    """What a fit logged of its last look, and the same computed anew."""
    torch.manual_seed(0)
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    private, outside, public = torch.randint(5, 500, (3, 40, 16), generator=generator).tolist()
    model = cell.setup(base_model(folder, cell.base))
    if cell.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": cell.reentrant})
        model.enable_input_require_grads()
    warm(model.train(), public, f"{ROWS}x{LENGTH}", 2)
    words, members = Words(capacity_seconds=0), Members(PublicText(public), tokens=LENGTH)
    for attack in (words, members):
        attack.guesses = {}
    attacks = [members] if cell.setup is adapters else [words, members]
    held_out = PublicText([ids[:LENGTH] for ids in outside])
    games = Games(held_out=held_out, targets=2 * ROWS * cell.accumulate)
    with tempfile.TemporaryDirectory() as logs:
        monitor = LeakageMonitor(attacks, every_n_steps=1, games=games, folder=logs)
        client = Client(torch.compile(model, backend="aot_eager") if cell.compiled else model)
        data = [torch.tensor(ids[:LENGTH]) for ids in private[: LOOKS * ROWS * cell.accumulate]]
        loader = DataLoader(data, batch_size=ROWS, collate_fn=lambda each: collate(cell.rows, each))
        fit(
            client, loader, max_steps=LOOKS, callbacks=[monitor], precision=cell.precision,
            accumulate_grad_batches=cell.accumulate, default_root_dir=logs,
        )  # fmt: skip
        lines = read_lines(Path(logs) / "leakage.jsonl")
        last = {line["attack"]: line for line in lines if line["step"] == LOOKS - 1}
    batches = client.batches[-cell.accumulate :]
    message = {n: one["unknown"] or one["metrics"] for n, one in last.items()}
    truth = true_words(model.float(), batches)
    guess = words.guesses.get(LOOKS - 1)
    results: dict[str, Any] = {"true_auc": true_auc(members, batches, LOOKS - 1)}
    if guess is not None:
        results["true_f1"] = 2 * len(guess & truth) / (len(guess) + len(truth))
    for name, metric in (("subspace_words", "f1"), ("gradient_membership", "auc")):
        value = message.get(name, "none reads it")
        results[metric] = value if isinstance(value, str) else value[metric]["value"]
    return results


FAST = ("LoRA", "LoRA, left padding", "LoRA, padding-free with a cache", "LoRA, NEFTune 5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=512)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CELLS]
)
def test_what_is_logged_is_true(folder: Path, name: str) -> None:
    if CELLS[name].base != "plain":
        pytest.importorskip("bitsandbytes")
    values = run(CELLS[name], str(folder))
    if name == "adapters":
        assert values["f1"] == "none reads it"
    else:
        assert values["f1"] == pytest.approx(values["true_f1"])
        exact = "dropout" not in name and "bf16" not in name
        assert values["f1"] > (0.9 if exact else 0.2) or "NEFTune" in name
    if "cache" in name:
        assert "attend to the others" in values["auc"]
    else:
        assert values["true_auc"] > 0.9

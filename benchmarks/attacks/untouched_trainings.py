"""Whether a watch leaves random trainings as they are, and makes their untouched steps again.

    python -m benchmarks.attacks.untouched_trainings                    # a hundred pairs
    python -m benchmarks.attacks.untouched_trainings --only 17 --runs 1  # the draw of a violation

A draw is trained without a watch and with one, of attacks that choose themselves and a gate that
only records. Both have to end with the same weights, losses and random numbers, to the bit. Nobody
touches a gradient, so that ``leakage/step/unexplained`` has to be rounding. For more comparisons
each look has a control here, which else those have whose number fell. The faces of TRL are drawn
where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak import LeakageMonitor, RiskGate
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.run import reason
from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch, WatchSettings

SMOKE = ("--runs 3",)

BOUNDS = {"32-true": 1e-5, "bf16-true": 0.02, "bf16-mixed": 0.02}
VOCABULARY, BLOCKS, POSITIONS = 128, 2, 64
FACES = ["loop", "transformers", "lightning"]
TRL = ["trl sft", "trl dpo", "trl grpo"]
FAMILIES = {
    "gpt2": ("GPT2", "LMHeadModel", "CAUSAL_LM", ["c_attn"]),
    "llama": ("Llama", "ForCausalLM", "CAUSAL_LM", ["q_proj", "v_proj"]),
    "gemma2": ("Gemma2", "ForCausalLM", "CAUSAL_LM", ["q_proj", "v_proj"]),
    "qwen2": ("Qwen2", "ForCausalLM", "CAUSAL_LM", ["q_proj", "v_proj"]),
    "bert": ("Bert", "ForMaskedLM", None, ["query", "value"]),
    "t5": ("T5", "ForConditionalGeneration", "SEQ_2_SEQ_LM", ["q", "v"]),
    "bert classes": ("Bert", "ForSequenceClassification", "SEQ_CLS", ["query", "value"]),
    "llama classes": ("Llama", "ForSequenceClassification", "SEQ_CLS", ["q_proj", "v_proj"]),
}
"""Of each: the prefix and the end of its class, PEFT's task, and what LoRA adapts."""


@dataclass(frozen=True)
class Training:
    """What a draw fixes."""

    seed: int
    face: str
    family: str
    part: str
    width: int
    tied: bool
    dropout: float
    lora_dropout: float
    adapted: str
    checkpointing: str
    accumulate: int
    precision: str
    clip: float
    smoothing: float
    optimizer: str
    warm_up: int
    neftune: float
    packed: bool
    rows: int
    length: int
    padded: bool
    steps: int
    every: int

    @classmethod
    def drawn(cls, seed: int) -> Training:
        draw = random.Random(seed)
        has_trl = importlib.util.find_spec("trl") is not None
        face = draw.choice(FACES + TRL if has_trl else FACES)
        family = draw.choice(list(FAMILIES)[: 4 if face in TRL else None])
        parts = ["whole", "whole", "LoRA", "LoRA", "biases"]
        rows, length = draw.choice([(1, 6), (2, 8), (4, 8), (3, 12), (4, 16)])
        return cls(
            seed,
            face,
            family,
            draw.choice(parts[:4] if family == "t5" else parts),
            draw.choice([32, 48]),
            draw.random() < 0.3,
            draw.choice([0.0, 0.1]),
            draw.choice([0.0, 0.1]),
            draw.choice(["some", "all-linear"]),
            draw.choice(["none", "none", "plain", "reentrant"]),
            draw.choice([1, 2, 3]),
            draw.choice(["32-true", "32-true", "bf16-true", "bf16-mixed"]),
            draw.choice([0.0, 0.5]),
            draw.choice([0.0, 0.0, 0.1]) if face in FACES else 0.0,
            draw.choice(["SGD", "AdamW"]),
            draw.choice([0, 2]),
            draw.choice([0.0, 5.0]) if face in ("transformers", "trl sft") else 0.0,
            draw.random() < 0.3 and face == "trl sft",
            max(2, rows // 2 * 2) if face == "trl grpo" else rows,
            length,
            draw.random() < 0.5,
            draw.choice([3, 4, 5]),
            draw.choice([1, 2]),
        )

    @property
    def adapter(self) -> LoraConfig | None:
        """Return what PEFT adapts; None where no LoRA is trained."""
        _, _, task, some = FAMILIES[self.family]
        targets: Any = some if self.adapted == "some" else "all-linear"
        settings = {"target_modules": targets, "lora_dropout": self.lora_dropout, "task_type": task}
        return LoraConfig(r=8, **settings) if self.part == "LoRA" else None

    def model(self) -> Any:
        torch.manual_seed(self.seed)
        prefix, end, _, _ = FAMILIES[self.family]
        sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": self.tied, "pad_token_id": 0}
        more: dict[str, Any] = {
            "hidden_size": self.width, "intermediate_size": 2 * self.width, "num_labels": 3,
            "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "eos_token_id": 1,
            "max_position_embeddings": POSITIONS,
        }  # fmt: skip
        if prefix == "GPT2":
            more = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
            more |= {"n_embd": self.width, "n_layer": BLOCKS, "n_head": 4, "eos_token_id": 1}
        elif prefix == "T5":
            more = {"d_model": self.width, "d_kv": 8, "d_ff": 2 * self.width, "num_heads": 4}
            more |= {"num_layers": BLOCKS, "decoder_start_token_id": 0}
            more["dropout_rate"] = self.dropout
        elif prefix == "Bert":
            more |= {"hidden_dropout_prob": self.dropout}
            more |= {"attention_probs_dropout_prob": self.dropout}
        else:
            more |= {"num_key_value_heads": 2, "head_dim": self.width // 4}
            more |= {"attention_dropout": self.dropout, "attention_bias": self.part == "biases"}
        model = getattr(hf, prefix + end)(getattr(hf, prefix + "Config")(**sizes, **more))
        with torch.no_grad():  # as after some training: not all norms are alike
            for name, parameter in model.named_parameters():
                if "norm" in name.lower() or "ln_" in name:
                    parameter += 0.2 * torch.randn_like(parameter)
        if self.part == "biases":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.endswith("bias") or name.startswith(("cl", "sc")))
        elif self.part == "LoRA" and self.face not in TRL:
            model = get_peft_model(model, self.adapter)
        if self.checkpointing != "none" and self.face in FACES:
            model.config.use_cache = False
            if self.part != "whole" and self.checkpointing == "reentrant":
                model.enable_input_require_grads()
            if self.face != "transformers":
                model.gradient_checkpointing_enable({"use_reentrant": self.is_reentrant})
        return model.to(torch.bfloat16 if self.precision == "bf16-true" else torch.float32).train()

    @property
    def is_reentrant(self) -> bool:
        return self.checkpointing == "reentrant"

    def texts(self) -> list[dict[str, Tensor]]:
        """Return the texts of all steps, of the fields that the family reads."""
        generator = torch.Generator().manual_seed(self.seed)
        n, texts = self.steps * self.accumulate * self.rows, []
        for ids in torch.randint(5, VOCABULARY, (n, self.length), generator=generator):
            drawn = torch.rand(self.length, generator=generator)
            end = max(3, int(self.length * (1 - drawn[0] / 2))) if self.padded else self.length
            mask = torch.arange(self.length) < end
            labels = ids.masked_fill(~mask, -100)
            ids = ids.masked_fill(~mask, 0)
            if self.family == "bert":
                asked = (drawn < 0.3) & mask
                asked[1] = True
                labels, ids = labels.masked_fill(~asked, -100), ids.masked_fill(asked, 4)
            elif self.family == "t5":
                labels = labels.flip(0)[: self.length - 1].roll(1)
                labels = torch.where(labels == -100, 3, labels)
            elif "classes" in self.family:
                labels = ids[0] % 3
            texts.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
            if self.family == "t5" and self.smoothing:
                texts[-1]["decoder_input_ids"] = torch.cat([labels.new_zeros(1), labels[:-1]])
        return texts

    def batches(self) -> list[dict[str, Tensor]]:
        texts = self.texts()
        groups = [texts[i : i + self.rows] for i in range(0, len(texts), self.rows)]
        return [{name: torch.stack([t[name] for t in g]) for name in g[0]} for g in groups]

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        if not self.smoothing:
            own: Tensor = model(**batch).loss
            return own
        labels = batch["labels"]
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits.float()
        if FAMILIES[self.family][2] == "CAUSAL_LM":
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits = logits.flatten(0, -2)
        return functional.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)

    def optimizers(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = getattr(torch.optim, self.optimizer)(trained, lr=1e-2)
        warm = self.warm_up
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, step / warm) if warm else 1.0
        )
        return optimizer, rates


# ---- the faces: each trains, watched or not, and returns its model, losses and engine -----------

Trained = tuple[nn.Module, list[float], Any]
GATE = ("leakage/worst/words", 0.5)


def by_loop(training: Training, folder: Path, watched: bool) -> Trained:
    model, losses = training.model(), list[float]()
    optimizer, rates = training.optimizers(model)
    mixed = training.precision == "bf16-mixed"
    watch = None
    if watched:
        settings = WatchSettings(precision="bf16-mixed" if mixed else None, tensorboard=False)
        gates = [Threshold(*GATE, action=lambda event: None)]
        looks = {"folder": folder, "every_n_steps": training.every}
        watch = Watch(model, optimizer, "auto", gates, settings=settings, **looks)
    torch.manual_seed(training.seed)
    with watch or nullcontext():
        for number, batch in enumerate(training.batches(), 1):
            with watch.step(batch) if watch else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    loss = training.loss(model, batch)
                (loss / training.accumulate).backward()
                losses.append(loss.item())
                if number % training.accumulate == 0:
                    if training.clip:
                        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                    rates.step()
    return model, losses, watch and watch.engine


class Module(L.LightningModule):
    """A training of Lightning."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_drawn, self.model = training, training.model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.training_drawn.loss(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, rates = self.training_drawn.optimizers(self.model)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


def by_lightning(training: Training, folder: Path, watched: bool) -> Trained:
    module, callbacks = Module(training), list[Any]()
    monitor = LeakageMonitor(every_n_steps=training.every, folder=folder)
    if watched:
        callbacks = [monitor, RiskGate(*GATE, action=lambda event: None)]
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, precision=training.precision,
        accumulate_grad_batches=training.accumulate, gradient_clip_val=training.clip or None,
        callbacks=callbacks, default_root_dir=folder,
    )  # fmt: skip
    torch.manual_seed(training.seed)
    loader: Any = torch.utils.data.DataLoader(training.batches(), batch_size=None)
    trainer.fit(module, loader)
    return module.model, module.losses, monitor.engine if watched else None


def arguments_of(training: Training, folder: Path) -> dict[str, Any]:
    """Return the arguments of a Trainer."""
    return {
        "output_dir": str(folder), "max_steps": training.steps, "logging_steps": 1,
        "per_device_train_batch_size": training.rows, "learning_rate": 1e-2,
        "gradient_accumulation_steps": training.accumulate, "max_grad_norm": training.clip,
        "warmup_steps": training.warm_up, "lr_scheduler_type": "constant_with_warmup",
        "optim": {"SGD": "sgd", "AdamW": "adamw_torch"}[training.optimizer],
        "bf16": training.precision == "bf16-mixed", "seed": training.seed,
        "gradient_checkpointing": training.checkpointing != "none",
        "gradient_checkpointing_kwargs": {"use_reentrant": training.is_reentrant},
        "neftune_noise_alpha": training.neftune or None, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def trl_trainer(training: Training, folder: Path) -> Any:
    """Return a trainer of TRL on texts of drawn words."""
    import trl
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, models, pre_tokenizers

    disable_progress_bars()
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    columns: list[list[str]] = [[], [], []]
    for text in training.texts():
        line = [words[n] for n in text["input_ids"].tolist() if n]
        half = len(line) // 2
        for column, part in zip(columns, (line[:half], line[half:], line[::-1]), strict=True):
            column.append(" ".join(part))
    prompts, chosen, rejected = columns
    pairs = zip(prompts, chosen, strict=True)
    name = training.face.removeprefix("trl ")
    model, settings, given = training.model(), arguments_of(training, folder), {}
    data = {"prompt": prompts, "chosen": chosen, "rejected": rejected}
    if name == "sft":
        data = {"text": [" ".join(pair) for pair in pairs]}
        settings |= {"max_length": 2 * training.length, "packing": training.packed}
    elif name == "grpo":
        data = {"prompt": prompts}
        settings |= {"num_generations": 2, "max_completion_length": training.length}
        given["reward_funcs"] = lambda completions, **_: [float(len({*c})) for c in completions]
    elif training.part != "LoRA":
        given["ref_model"] = copy.deepcopy(model)
    kind, config = (getattr(trl, name.upper() + end) for end in ("Trainer", "Config"))
    return kind(
        model, args=config(**settings), train_dataset=Dataset.from_dict(data),
        processing_class=fast, peft_config=training.adapter, **given,
    )  # fmt: skip


def by_trainer(training: Training, folder: Path, watched: bool) -> Trained:
    if training.face in TRL:
        trainer = trl_trainer(training, folder)
    else:
        arguments = arguments_of(training, folder)
        arguments["label_smoothing_factor"] = training.smoothing
        texts: Any = training.texts()
        trainer = hf.Trainer(training.model(), hf.TrainingArguments(**arguments), None, texts)
    engine = None
    if watched:
        gates = [Threshold(*GATE, action=lambda event: None)]
        looks = {"folder": folder, "every_n_steps": training.every}
        settings = WatchSettings(tensorboard=False)
        callback = LeakageCallback(trainer, "auto", gates, settings=settings, **looks)
        trainer.add_callback(callback)
        engine = callback.engine
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return trainer.model, losses, engine


# ---- what a pair shows -------------------------------------------------------------------------


@dataclass
class Pair:
    """What came of one draw, trained twice."""

    differs: list[str] = field(default_factory=list)
    shares: dict[int, float] = field(default_factory=dict)
    missing: Counter[str] = field(default_factory=Counter)


@contextmanager
def each_look_compared() -> Iterator[tuple[dict[int, float], dict[int, str]]]:
    """Make the step of each look again; yield what is unexplained, or why not, by step."""
    shares, reasons = dict[int, float](), dict[int, str]()
    play, again = Controls._play, Controls._again

    def noted(method: Callable[..., Any], step: int, *given: Any) -> Any:
        try:
            return method(*given)
        except Exception as error:
            reasons[step] = reason(error)
            raise

    def played(controls: Controls, moment: Any, *plans: Any) -> None:
        try:
            noted(play, moment.look.step, controls, moment, *plans)
        finally:
            shares[moment.look.step] = moment.look.unexplained

    def made_again(controls: Controls, look: Any, *given: Any) -> Any:
        return noted(again, look.step, controls, look, *given)

    patched = {"_is_due": lambda *_: True, "_play": played, "_again": made_again}
    with mock.patch.multiple(Controls, **patched):
        yield shares, reasons


def why_none(folder: Path, step: int) -> str:
    """Return what the log says of a step at which no attack was scored."""
    lines = [json.loads(x) for p in folder.rglob("leakage.jsonl") for x in p.open()]
    texts = [x["unknown"] for x in lines if x["step"] == step and x["unknown"]]
    played = [text for text in texts if "not played" not in text]
    return f"not due: {played[0]}" if played else "no attack read words of the step"


def trained_twice(training: Training, folder: Path) -> Pair:
    faces = {"loop": by_loop, "lightning": by_lightning}
    train, pair = faces.get(training.face, by_trainer), Pair()
    ends = []
    with each_look_compared() as (shares, reasons):
        for watched in (False, True):
            model, losses, engine = train(training, folder / str(watched), watched)
            state = {n: t.detach().clone() for n, t in model.state_dict().items()}
            ends.append((state, losses, torch.get_rng_state()))
    (state, losses, numbers), (state_on, losses_on, numbers_on) = ends
    same = state.keys() == state_on.keys()
    same = same and all(torch.equal(state[name], state_on[name]) for name in state)
    same_losses = losses == losses_on or [*map(repr, losses)] == [*map(repr, losses_on)]
    what = {"weights": same, "losses": same_losses and len(losses) >= training.steps}
    what["random numbers"] = torch.equal(numbers, numbers_on)
    pair.differs = [name for name, equal in what.items() if not equal]
    pair.shares = {step: share for step, share in shares.items() if not math.isnan(share)}
    looked = {*range(0, training.steps, training.every)} | shares.keys()
    for step in looked - pair.shares.keys():
        pair.missing[reasons.get(step) or why_none(folder, step)] += 1
    assert engine.results.looks or pair.missing
    return pair


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--only", type=int, default=0, help="the first draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cells: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    refused: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    violations, start = 0, time.monotonic()
    for seed in range(options.only, options.only + options.runs):
        training = Training.drawn(seed)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            try:
                pair = trained_twice(training, Path(folder))
            except Exception as error:
                refused[f"{type(error).__name__}: {error}"] += 1
                print(
                    f"refused: {type(error).__name__}: {error}\n    {training}",
                    flush=True,
                    file=sys.stderr,
                )
                continue
        cells[training.face, training.precision].append(pair)
        missing += pair.missing
        bound = BOUNDS[training.precision]
        above = [f"unexplained {s:.2g} at step {n}" for n, s in pair.shares.items() if s > bound]
        if wrong := pair.differs + above:
            violations += 1
            print("VIOLATION", "; ".join(wrong), f"\n    {training}", flush=True)
    print(f"{options.runs} draws, {time.monotonic() - start:.0f} s, {violations} violations")
    print("face         precision   pairs  identical  compared  median   largest unexplained")
    for (face, precision), pairs in sorted(cells.items()):
        shares = [share for pair in pairs for share in pair.shares.values()]
        ends = f"{statistics.median(shares):<9.1e}{max(shares):.1e}" if shares else "-"
        counts = len(pairs), sum(not p.differs for p in pairs), sum(bool(p.shares) for p in pairs)
        print(f"{face:13}{precision:12}{counts[0]:5}  {counts[1]:9}  {counts[2]:8}  {ends}")
    print(f"looks without a comparison: {missing.total()}")
    for title, counter in (("no comparison", missing), ("refused", refused)):
        for text, count in counter.most_common(8):
            print(f"{title}: {count} x {text}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

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
from dataclasses import dataclass
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
from lightning_fedleak.model.taps import Step
from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch, WatchSettings

SMOKE = ("--runs 3",)

BOUNDS = {"32-true": 1e-5, "bf16-true": 0.02, "bf16-mixed": 0.02}
VOCABULARY = 128
DROPOUTS = ["resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout_prob"]
DROPOUTS += ["attention_probs_dropout_prob", "attention_dropout"]
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


OPTIONS: dict[str, list[Any]] = {
    "part": ["whole", "whole", "LoRA", "LoRA", "biases"],
    "adapted": ["some", "all-linear"],
    "lora_dropout": [0.0, 0.1],
    "width": [32, 48],
    "tied": [False, False, True],
    "dropout": [0.0, 0.1],
    "checkpointing": ["none", "none", "plain", "reentrant"],
    "accumulate": [1, 2, 3],
    "precision": ["32-true", "32-true", "bf16-true", "bf16-mixed"],
    "clip": [0.0, 0.5],
    "smoothing": [0.0, 0.0, 0.1],
    "optimizer": ["SGD", "AdamW"],
    "warm_up": [0, 2],
    "neftune": [0.0, 5.0],
    "packed": [False, False, True],
    "padded": [False, True],
    "steps": [3, 4, 5],
    "every": [1, 2],
}


@dataclass(frozen=True)
class Training:
    """What a draw fixes."""

    seed: int
    face: str
    family: str
    rows: int
    length: int
    part: str
    adapted: str
    lora_dropout: float
    width: int
    tied: bool
    dropout: float
    checkpointing: str
    accumulate: int
    precision: str
    clip: float
    smoothing: float
    optimizer: str
    warm_up: int
    neftune: float
    packed: bool
    padded: bool
    steps: int
    every: int

    @classmethod
    def drawn(cls, seed: int) -> Training:
        draw = random.Random(seed)
        face = draw.choice(FACES + TRL if importlib.util.find_spec("trl") else FACES)
        family = draw.choice(list(FAMILIES)[: 4 if face in TRL else None])
        rows, length = draw.choice([(1, 6), (2, 8), (4, 8), (3, 12), (4, 16)])
        drawn = {name: draw.choice(options) for name, options in OPTIONS.items()}
        drawn["packed"] &= face == "trl sft"
        drawn["smoothing"] *= face in FACES
        drawn["neftune"] *= face in ("transformers", "trl sft")
        if family == "t5" and drawn["part"] == "biases":  # it has none
            drawn["part"] = "whole"
        if face == "trl grpo":  # two texts for each prompt
            rows = max(2, rows // 2 * 2)
        return cls(seed, face, family, rows, length, **drawn)

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
        sizes: dict[str, Any] = {  # by the names of all families; each takes its own
            "vocab_size": VOCABULARY, "hidden_size": self.width, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": self.width // 4,
            "intermediate_size": 2 * self.width, "d_ff": 2 * self.width, "num_labels": 3,
            "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
            "decoder_start_token_id": 0, "tie_word_embeddings": self.tied,
            "attention_bias": self.part == "biases",
        }  # fmt: skip
        sizes |= dict.fromkeys(DROPOUTS, self.dropout)
        model = getattr(hf, prefix + end)(getattr(hf, prefix + "Config")(**sizes))
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
            end = max(3, int(self.length * (1 - self.padded * drawn[0] / 2)))
            mask = torch.arange(self.length) < end
            labels, ids = ids.masked_fill(~mask, -100), ids.masked_fill(~mask, 0)
            if self.family == "bert":
                asked = (drawn < 0.3) & mask
                asked[1] = True
                labels, ids = labels.masked_fill(~asked, -100), ids.masked_fill(asked, 4)
            elif self.family == "t5":
                labels = torch.where(labels == -100, 3, labels).flip(0)[:-1]
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


# ---- the faces: each trains, watched or not, and returns what it ends with -----------

Trained = tuple[nn.Module, list[float], Tensor]
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
    return model, losses, torch.get_rng_state()


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
    return module.model, module.losses, torch.get_rng_state()


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
    if watched:
        gates = [Threshold(*GATE, action=lambda event: None)]
        looks = {"folder": folder, "every_n_steps": training.every}
        settings = WatchSettings(tensorboard=False)
        callback = LeakageCallback(trainer, "auto", gates, settings=settings, **looks)
        trainer.add_callback(callback)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return trainer.model, losses, torch.get_rng_state()


# ---- what a pair shows -------------------------------------------------------------------------


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

    def played(controls: Controls, look: Any, *plans: Any) -> None:
        try:
            noted(play, look.step, controls, look, *plans)
        finally:
            shares[look.step] = look.training_step.unexplained

    def made_again(controls: Controls, step: Step, roles: Any) -> Any:
        return noted(again, step.number, controls, step, roles)

    patched = {"_is_due": lambda *_: True, "_play": played, "_again": made_again}
    with mock.patch.multiple(Controls, **patched):
        yield shares, reasons


def why_none(folder: Path, step: int) -> str:
    """Return what the log says of a step at which no attack was scored."""
    lines = [json.loads(x) for p in folder.rglob("leakage.jsonl") for x in p.open()]
    texts = [x["unknown"] for x in lines if x["step"] == step and x["unknown"]]
    played = [text for text in texts if "not played" not in text]
    return f"not due: {played[0]}" if played else "no attack read words of the step"


def differences(one: Trained, other: Trained) -> list[str]:
    """Return in what two trainings differ."""
    (model, losses, numbers), (model_on, losses_on, numbers_on) = one, other
    pairs = [*zip(model.state_dict().values(), model_on.state_dict().values(), strict=True)]
    equal = {
        "weights": all(torch.equal(*pair) for pair in pairs),
        "losses": bool(losses) and [*map(repr, losses)] == [*map(repr, losses_on)],
        "random numbers": torch.equal(numbers, numbers_on),
    }
    return [name for name, is_equal in equal.items() if not is_equal]


def trained_twice(training: Training, folder: Path) -> tuple[list[str], list[float], list[str]]:
    """Return in what a pair differs, the shares of its looks, and why others have none."""
    train = {"loop": by_loop, "lightning": by_lightning}.get(training.face, by_trainer)
    with each_look_compared() as (shares, reasons):
        ends = [train(training, folder / str(watched), watched) for watched in (False, True)]
    looked = {*range(0, training.steps, training.every)} | shares.keys()
    known = {step: share for step, share in shares.items() if not math.isnan(share)}
    missing = [reasons.get(n) or why_none(folder, n) for n in looked - known.keys()]
    return differences(*ends), [*known.values()], missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--only", type=int, default=0, help="the first draw")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cells: dict[tuple[str, str], list[tuple[bool, list[float]]]] = defaultdict(list)
    refused: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    violations, start = 0, time.monotonic()
    for seed in range(options.only, options.only + options.runs):
        training = Training.drawn(seed)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            try:
                differs, shares, why = trained_twice(training, Path(folder))
            except ValueError as error:
                refused[f"{error}"] += 1
                continue
        cells[training.face, training.precision].append((not differs, shares))
        missing.update(why)
        bound = BOUNDS[training.precision]
        if wrong := differs + [f"unexplained {share:.2g}" for share in shares if share > bound]:
            violations += 1
            print("VIOLATION", "; ".join(wrong), f"\n    {training}", flush=True)
    print(f"{options.runs} draws, {time.monotonic() - start:.0f} s, {violations} violations")
    print("face         precision   pairs  identical  compared  median   largest unexplained")
    for (face, precision), pairs in sorted(cells.items()):
        shares = [share for _, of_pair in pairs for share in of_pair]
        ends = f"{statistics.median(shares):<9.1e}{max(shares):.1e}" if shares else "-"
        counts = len(pairs), sum(same for same, _ in pairs), sum(bool(some) for _, some in pairs)
        print(f"{face:13}{precision:12}{counts[0]:5}  {counts[1]:9}  {counts[2]:8}  {ends}")
    print(f"looks without a comparison: {missing.total()}")
    for title, counter in (("no comparison", missing), ("refused", refused)):
        for text, count in counter.most_common(8):
            print(f"{title}: {count} x {text}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

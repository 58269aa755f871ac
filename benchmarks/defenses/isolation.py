"""How far one more example moves the released sum, and what the check of isolation measures.

    python -m benchmarks.defenses.isolation               # 12 models, 6 kinds of company, 4 hosts
    python -m benchmarks.defenses.isolation --unsound     # trainings that the check refuses
    python -m benchmarks.defenses.isolation --half        # bfloat16
    python -m benchmarks.defenses.isolation --drawn 60    # drawn sound trainings, none refused

Each training is run twice with equal draws and without noise: with the added example and without
it. All gradients are clipped (C is tiny), so that a sound training's sum moves by exactly C.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.shared import FineTuning, fit, parser_of, quieten
from lightning_fedleak import DPSGD, DefendedStrategy
from lightning_fedleak.defenses import DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.isolation import Isolation
from lightning_fedleak.trainers import DefendedLoop, defended

SMOKE = (
    "--models GPT-2 --hosts loop --rows 4",
    "--unsound --rows 4",
    "--half --rows 4",
    "--drawn 3",
)
VOCABULARY, WIDTH, POSITIONS, CLIP = 120, 16, 48, 1e-3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": POSITIONS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "vocab_size": 120}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1}
NEO = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
NEO |= {"embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0}
GROUPED = {"num_key_value_heads": 1}


def model_of(name: str, kind: str = "CausalLM", **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = getattr(tf, f"{name}Config")(**settings)
            head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}For{kind}"
            return getattr(tf, head)(config).train()  # type: ignore[no-any-return]

    return build


def lora() -> nn.Module:
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(1)
        maps = ["q_proj", "v_proj"]
        settings = peft.LoraConfig(r=2, target_modules=maps, init_lora_weights=False)
        return peft.get_peft_model(MODELS["Llama"](), settings).train()  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": model_of("GPT2", **GPT2, eos_token_id=2, pad_token_id=0),
    "GPT-Neo": model_of("GPTNeo", **SIZES, **NEO),
    "GPT-NeoX": model_of("GPTNeoX", **SIZES),
    "OPT": model_of(
        "OPT", **SIZES, word_embed_proj_dim=WIDTH, ffn_dim=24, dropout=0.0, attention_dropout=0.0
    ),
    "Llama": model_of("Llama", **SIZES, **GROUPED),
    "Mistral, window 8": model_of("Mistral", **SIZES, **GROUPED, sliding_window=8),
    "Qwen2": model_of("Qwen2", **SIZES, **GROUPED),
    "Gemma": model_of("Gemma", **SIZES, **GROUPED, head_dim=8),
    "Phi-3": model_of("Phi3", **SIZES, **GROUPED),
    "BERT, masked": model_of("Bert", "MaskedLM", **SIZES, **NO_DROPOUT),
    "RoBERTa, masked": model_of("Roberta", "MaskedLM", **SIZES, **NO_DROPOUT),
    "Llama, LoRA": lora,
}
HOSTS = "lightning", "trainer", "loop", "accelerate"
COMPANY = "longer", "longest", "one token", "no label", "padded", "packed"


class Rows(Dataset[Any]):
    """``number`` rows of 3 to 8 tokens, and if ``is_whole`` one more of another kind."""

    def __init__(self, number: int, company: str, is_whole: bool, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        sizes = [*torch.randint(3, 9, (number,), generator=draw).tolist()]
        last = {"longer": 14, "longest": POSITIONS - 4, "one token": 1, "no label": 8}
        self.rows: list[dict[str, Tensor]] = []
        for size in (*sizes, last.get(company, 8)):
            ids = torch.randint(3, VOCABULARY, (size,), generator=draw)
            row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
            if company == "packed":  # without a mask positions say where a document begins
                row["position_ids"] = torch.arange(size) % 4
            self.rows.append(row)
        if company == "no label":
            self.rows[-1]["labels"].fill_(-100)
        elif company == "padded":
            self.rows[-1]["attention_mask"][4:], self.rows[-1]["labels"][4:] = 0, -100
        self.public_length = number + 1
        self.kept = number + is_whole

    def __len__(self) -> int:
        return self.kept

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def collate(
    rows: Sequence[dict[str, Tensor]],
    *,
    side: str = "right",
    cut: bool = False,
    is_causal: bool = True,
) -> Any:
    """Return the rows with padding on a side; or all cut to the shortest."""
    pad = {"labels": -100}
    sizes = [len(row["input_ids"]) for row in rows]
    width = min(sizes) if cut else max(sizes)
    batch: dict[str, Tensor] = {}
    for key in rows[0]:
        batch[key] = torch.full((len(rows), width), pad.get(key, 0))
        for index, row in enumerate(rows):
            values = row[key][:width]
            start = width - len(values) if side == "left" else 0
            batch[key][index, start : start + len(values)] = values
    if "position_ids" in batch and is_causal:  # a mask would hide where documents begin
        del batch["attention_mask"]
    return batch


class Keep(torch.optim.SGD):
    """SGD that keeps what it is given."""

    given: list[Tensor]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.given = [g.double().clone() for g in gradients if g is not None]
        return loss


def train(
    host: str,
    model: nn.Module,
    rows: Dataset[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    collate_fn: Callable[[Any], Any],
    precision: str = "32-true",
) -> tuple[list[Tensor], DPSGD]:
    """Return what one step releases, times the batch's size, and the defence."""
    size = rows.public_length  # type: ignore[attr-defined]
    defense = DPSGD(CLIP, noise_multiplier=0.0, target_delta=1e-3, seed=7)
    optimizer = Keep([p for p in model.parameters() if p.requires_grad], lr=0.0)
    loader: DataLoader[Any] = DataLoader(rows, size, shuffle=True, collate_fn=collate_fn)
    if host == "lightning":

        class Module(FineTuning):
            def training_step(self, batch: Any, _: int) -> Tensor:
                return loss(self.model, batch)

        strategy = DefendedStrategy("auto", [defense])
        fit(
            Module(model, lambda _: optimizer),
            loader,
            max_steps=1,
            strategy=strategy,
            precision=precision,
        )
    elif host == "trainer":

        class OwnLoss(tf.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                return loss(model, inputs)

        with tempfile.TemporaryDirectory() as folder:
            arguments = tf.TrainingArguments(
                folder, per_device_train_batch_size=size, max_steps=1, report_to=[], use_cpu=True,
                save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            )  # fmt: skip
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            own = defended(OwnLoss)(
                model, arguments, data_collator=collate_fn, train_dataset=rows,
                optimizers=(optimizer, schedule), defenses=[defense],
            )  # fmt: skip
            own.remove_callback(tf.PrinterCallback)
            own.train()
    else:
        wrapped, stepped, backward = model, optimizer, Tensor.backward
        if host == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            wrapped, stepped = accelerator.prepare(model, optimizer)
            backward = accelerator.backward
        with DefendedLoop(wrapped, stepped, loader, [defense], steps=1) as private:
            for batch in private:
                backward(private.loss(lambda rows: loss(wrapped, rows), batch))  # type: ignore[arg-type]
                stepped.step()
                stepped.zero_grad()
    return [gradient * size for gradient in optimizer.given], defense


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def moved(host: str, name: str, company: str, number: int, precision: str = "32-true") -> float:
    """Return by how many C the added example moves the sum; NaN if DPSGD refuses the training."""
    how = own_loss, partial(collate, is_causal="masked" not in name), precision
    try:
        sums = [
            train(host, MODELS[name](), Rows(number, company, is_whole), *how)[0]
            for is_whole in (True, False)
        ]
    except DefenseError:
        return math.nan
    squares = (float((a - b).square().sum()) for a, b in zip(*sums, strict=True))
    return math.sqrt(math.fsum(squares)) / CLIP


@contextmanager
def measured(values: list[float]) -> Iterator[None]:
    """Append what each check of isolation measures to ``values`` in this context."""
    original = Isolation.measure

    def measure(self: Isolation, *arguments: Any) -> str:
        is_first = not self._is_done
        try:
            return original(self, *arguments)
        finally:
            if is_first:
                values.append(self.moved)

    Isolation.measure = measure  # type: ignore[method-assign]
    try:
        yield
    finally:
        Isolation.measure = original  # type: ignore[method-assign]


class BatchStatistics(nn.Module):
    """A model whose hidden states are divided by their detached deviation in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Tensor) -> Any:
        states = self.embedding(input_ids)
        logits = self.head(states / states.detach().std())
        loss = mean_of_sample_means(logits, labels, causal=True)
        return tf.modeling_outputs.CausalLMOutput(loss=loss)


def over_labels(model: nn.Module, batch: Any) -> Tensor:
    """Return a sum over tokens divided by a detached number of the batch's labels."""
    labels = batch.pop("labels")
    logits = model(**batch).logits
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    share = (labels != -100).float() / (labels != -100).sum() * len(labels)
    return (losses * share).sum(1).mean()


def left(rows: Any) -> Any:
    return collate(rows, side="left")


def cut(rows: Any) -> Any:
    return collate(rows, cut=True)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
UNSOUND: dict[str, tuple[Any, Any, Any]] = {
    "padding on the left, GPT-2": (MODELS["GPT-2"], own_loss, left),
    "padding on the left, OPT": (MODELS["OPT"], own_loss, left),
    "padding on the left, Llama": (MODELS["Llama"], own_loss, left),
    "padding on the left, LoRA": (lora, own_loss, left),
    "rows cut to the shortest": (MODELS["GPT-2"], own_loss, cut),
    "a loss over the batch's labels": (MODELS["GPT-2"], over_labels, collate),
    "statistics of the batch, detached": (BatchStatistics, own_loss, collate),
    "dynamic RoPE": (
        model_of("Llama", **{**SIZES, "max_position_embeddings": 24}, rope_parameters=DYNAMIC),
        own_loss,
        collate,
    ),
}


def print_sound(models: Sequence[str], hosts: Sequence[str], number: int) -> None:
    print(f"| model | {' | '.join(COMPANY)} | the check measures |")
    for name in models:
        values: list[float] = []
        with measured(values):
            cells = [[moved(h, name, kind, number) for h in hosts] for kind in COMPANY]
        ends = [[f"{end:.4f}" for end in (min(cell), max(cell))] for cell in cells]
        shown = [" to ".join(dict.fromkeys(pair)) for pair in ends]
        print(f"| {name} | {' | '.join(shown)} | {max(values):.1e} |", flush=True)


def print_unsound(number: int) -> None:
    print("| training | the check measures | it says |")
    for name, (build, loss, collate_fn) in UNSOUND.items():
        values: list[float] = []
        said = "nothing"
        with measured(values):
            try:
                train("loop", build(), Rows(number, "longer", True), loss, collate_fn)
            except DefenseError as error:
                said = str(error)
        print(f"| {name} | {max(values):.1e} | {said} |", flush=True)


def print_half(number: int) -> None:
    print("| model, bf16-mixed | a longer row without a label moves the sum by | covered |")
    for name in ("GPT-2", "Llama", "Llama, LoRA"):
        rows = Rows(number, "longest", True)
        rows.rows[-1]["labels"].fill_(-100)
        for row in rows.rows[:-1]:  # of one length, so that the longer row changes the most
            row.update(dict.fromkeys(row, torch.randint(3, VOCABULARY, (12,))))
            row["attention_mask"] = torch.ones(12, dtype=torch.long)
        sums = []
        for is_whole in (True, False):
            rows.kept = number + is_whole
            half = own_loss, collate, "bf16-mixed"
            gradients, defense = train("lightning", MODELS[name](), rows, *half)
            sums.append(torch.cat([gradient.flatten() for gradient in gradients]))
        share = defense._isolation.rounding * math.sqrt(number + 1)
        print(f"| {name} | {float((sums[0] - sums[1]).norm()) / CLIP:.4f} | {share:.4f} |")


def eights(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the rows cut to 9 tokens, padded to a multiple of eight."""
    batch = collate([{k: v[:9] for k, v in row.items()} for row in rows])
    ends = {key: (0, -value.shape[1] % 8) for key, value in batch.items()}
    pad = nn.functional.pad
    return {k: pad(v, ends[k], value=-100 if k == "labels" else 0) for k, v in batch.items()}


def masked(rows: Sequence[dict[str, Tensor]]) -> Any:
    """Return the rows with labels at random tokens, which the input hides."""
    batch = collate(rows)
    hidden = torch.bernoulli(batch["attention_mask"] * 0.3).bool()
    batch["labels"][~hidden], batch["input_ids"][hidden] = -100, 3
    return batch


def own_mean(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return mean_of_sample_means(model(**batch).logits, labels, causal=True)


def print_drawn(count: int) -> None:
    """Train drawn sound trainings for a step, and print what is refused or not measured."""
    alarms, values = 0, list[float]()
    for seed in range(count):
        draw = random.Random(seed)
        name, host, company = (draw.choice([*x]) for x in (MODELS, HOSTS, COMPANY))
        company = "longer" if name == "OPT" else company  # it has no positions for packed rows
        is_masked = "masked" in name
        function = partial(collate, is_causal=not is_masked)
        function = draw.choice([function, function, masked if is_masked else eights])
        loss = own_loss if is_masked else draw.choice([own_loss, own_mean])
        precision = draw.choice(["32-true", "bf16-mixed" if host == "lightning" else "32-true"])
        model, dropout = MODELS[name](), draw.choice([0.0, 0.1])
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        rows = Rows(draw.randint(3, 8), company, True, seed)
        with measured(values):
            try:
                alarm = train(host, model, rows, loss, function, precision)[1]._isolation.reason
            except DefenseError as error:
                alarm = f"refused: {error}"
        if alarm:
            print(f"{seed}: {host}, {precision}, {name}, {company}, {loss.__name__}: {alarm}")
        alarms += bool(alarm)
    print(f"{count} drawn: {alarms} refused or not measured, moved by {max(values):.1e} at most")


def main() -> None:
    models, hosts = ([*MODELS], [*MODELS]), ([*HOSTS], HOSTS)
    options = parser_of(
        __doc__, models=models, hosts=hosts, rows=(6, "rows beside the added one"), unsound=False,
        half=False, drawn=(0, "how many"),
    ).parse_args()  # fmt: skip
    quieten()
    if options.unsound:
        print_unsound(options.rows)
    elif options.half:
        print_half(options.rows)
    elif options.drawn:
        print_drawn(options.drawn)
    else:
        print_sound(options.models, options.hosts, options.rows)


if __name__ == "__main__":
    main()

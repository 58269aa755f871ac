"""What a set-up leaks: words, membership, texts; by what is trained and what is shared.

    python -m benchmarks.attacks.setups --model DIR --shape 8x64 --out FILE
    python -m benchmarks.attacks.setups --model DIR --setups whole "lora 8 q,v" \
        --columns gradient AdamW:1 --out FILE
    python -m benchmarks.attacks.setups --model DIR --setups whole --columns gradient \
        --defenses dpsgd:.5 dpsgd:1 --out FILE
    python -m benchmarks.attacks.setups --model DIR --shape 1x32 --columns texts --out FILE
    python -m benchmarks.attacks.setups --model DIR --shape 4x32 --head texts \
        --setups whole "lora 8 q,v" --columns gradient AdamW:1 --out FILE
    python -m benchmarks.attacks.setups --model DIR --shape 4x32 --rows packed \
        --setups "lora 8 q,v" --columns gradient texts --out FILE
    python -m benchmarks.attacks.setups --table FILE

A cell is a fit with ``LeakageMonitor()``, whose attacks choose themselves, calibrated on
``--public``. It looks at ``--batches`` gradients, one after the other, or at as many rounds. A
column is ``gradient`` (of every step of AdamW), or the weight change of a round: an optimizer of
torch.optim, from a fresh state, and its steps; rounds take no ``--defenses``. ``texts`` is
``gradient`` again, looked at by ``SubspaceTexts`` alone, which does not choose itself, in
``--texts-seconds`` a look. Before, the set-up is trained by ``--warm`` steps of AdamW on public
text, so that no adapter is at its start. Dropout is 0 where the set-up does not say otherwise.

``--head texts`` and ``--head tokens`` put a new head of two classes on the model (a class a text,
or a token), which is trained too; classes are drawn at random. ``--bert`` takes a BERT of the
model's sizes with random weights in its place, of which ``--model`` gives the tokenizer.

``--rows packed`` cuts every second and third text to three quarters and half, and joins the texts
of a batch in one row as transformers' padding-free collator does, with positions that begin again;
documents are kept apart (``use_cache=False``). In ``--rows crossing`` the model makes its cache, so
that documents attend to the earlier ones. ``--rows padded`` gives each of the texts its own row.
"""

import argparse
import copy
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations import activate_neftune

from benchmarks import shared
from lightning_fedleak.attacks import PublicText, SubspaceTexts
from lightning_fedleak.callbacks import Games, LeakageMonitor, WatchSettings
from lightning_fedleak.cli.finetuning import TRAINING, quiet_logs
from lightning_fedleak.defenses import DPSGD, GradientNoise
from lightning_fedleak.federation import RoundObserver, RoundSettings, trained_state
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, find_anatomy
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 2 --warm 1 "
    "--setups adapters --columns SGD:2 --out {out}/cells.jsonl",
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 2 --warm 1 "
    "--head tokens --bert --setups 'lora 4 q,v' --columns gradient --out {out}/cells.jsonl",
    "--model {model} --private {text} --public {text} --shape 1x8 --batches 1 --warm 1 "
    "--setups norms --columns texts --texts-seconds 1 --out {out}/cells.jsonl",
    "--model {model} --private {text} --public {text} --shape 2x8 --batches 2 --warm 1 "
    "--rows packed --setups 'lora 4 q,v' --columns gradient "
    "--defenses noise:.01 --out {out}/cells.jsonl",
)
HEAD_CLASSES = {
    "next": transformers.AutoModelForCausalLM,
    "texts": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
}
TASKS = {
    "ForSequenceClassification": TaskType.SEQ_CLS,
    "ForTokenClassification": TaskType.TOKEN_CLS,
}
DEFENSES = {
    "none": lambda: [],
    "noise:.001": lambda: [GradientNoise(clip=1, sigma=0.001)],
    "noise:.01": lambda: [GradientNoise(clip=1, sigma=0.01)],
    "dpsgd:.5": lambda: [DPSGD(max_grad_norm=1, noise_multiplier=0.5)],
    "dpsgd:1": lambda: [DPSGD(max_grad_norm=1, noise_multiplier=1)],
}
RATES = {"AdamW": 1e-4, "SGD": 1e-3}
VALUES = {"words": "f1", "texts": "token_accuracy"}
HEADS = {"words": "words F1", "membership": "membership AUC", "texts": "tokens in place"}
LOOK_SECONDS = 600.0
"""Of a look, at most: enough for every attack that can read a set-up."""
VIRTUAL_TOKENS = 16
BOTTLENECK = 32


# ---- what is trained ------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """A layer with a Houlsby adapter behind it: ``y + up(relu(down(y)))`` of its output y."""

    def __init__(self, layer: nn.Module, width: int, inner: int = BOTTLENECK) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(width, inner)
        self.up = nn.Linear(inner, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, adapted."""
        y = self.layer(*args, **kwargs)
        return y + self.up(self.down(y).relu())


def whole(model: transformers.PreTrainedModel) -> nn.Module:
    return model


def frozen_ends(model: transformers.PreTrainedModel) -> nn.Module:
    anatomy = find_anatomy(model)
    for role in (HEAD_WEIGHT, EMBEDDING_WEIGHT):
        anatomy.parameter(role).requires_grad_(False)
    return model


def adapters(model: transformers.PreTrainedModel) -> nn.Module:
    model.requires_grad_(False)
    for block in model.get_decoder().layers:
        block.mlp = Bottleneck(block.mlp, model.config.hidden_size)
    return model


def embedding_adapters(model: transformers.PreTrainedModel) -> nn.Module:
    """Adapters of half the width, one behind the embeddings and one behind every MLP."""
    model.requires_grad_(False)
    decoder, width = model.get_decoder(), model.config.hidden_size
    decoder.embed_tokens = Bottleneck(decoder.embed_tokens, width, width // 2)
    for block in decoder.layers:
        block.mlp = Bottleneck(block.mlp, width, width // 2)
    return model


def norms(model: transformers.PreTrainedModel) -> nn.Module:
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def prompts(model: transformers.PreTrainedModel) -> nn.Module:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL_TOKENS)
    return get_peft_model(model, config)


def lora(rank: int, targets: list[str] | str, dropout: float = 0.0):
    def adapted(model: transformers.PreTrainedModel) -> nn.Module:
        bert = {"q_proj": "query", "v_proj": "value"} if model.config.model_type == "bert" else {}
        names = targets if isinstance(targets, str) else [bert.get(t, t) for t in targets]
        task = next((t for n, t in TASKS.items() if type(model).__name__.endswith(n)), None)
        return shared.with_lora(model, rank, names, lora_dropout=dropout, task_type=task)

    return adapted


def neftune(model: transformers.PreTrainedModel) -> nn.Module:
    """LoRA, and noise on the embeddings in training (NEFTune, arXiv 2310.05914), alpha 5."""
    adapted = lora(8, ["q_proj", "v_proj"])(model)
    activate_neftune(adapted, 5.0)
    return adapted


def first_block_frozen(model: transformers.PreTrainedModel) -> nn.Module:
    adapted = lora(8, ["q_proj", "v_proj"])(model)
    for name, parameter in adapted.named_parameters():
        if ".layers.0." in name:
            parameter.requires_grad_(False)
    return adapted


SETUPS: dict[str, Callable[[transformers.PreTrainedModel], nn.Module]] = {
    "whole": whole,
    "head and embeddings frozen": frozen_ends,
    **{f"lora {r} q,v": lora(r, ["q_proj", "v_proj"]) for r in (4, 8, 16, 32)},
    **{f"lora {r} all-linear": lora(r, "all-linear") for r in (4, 8, 16, 32)},
    "lora 8 q,v, dropout .05": lora(8, ["q_proj", "v_proj"], 0.05),
    "lora 8 q,v, NEFTune 5": neftune,
    "lora 8 q,v, first block frozen": first_block_frozen,
    "norms": norms,
    "lora 8 o,down": lora(8, ["o_proj", "down_proj"]),
    "adapters": adapters,
    "adapters, one behind the embeddings": embedding_adapters,
    "prompt tuning": prompts,
}


# ---- a fit ----------------------------------------------------------------------------------


def by_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes an optimizer of torch.optim."""
    return partial(getattr(torch.optim, name), lr=RATES[name])


def warm(
    model: nn.Module, public: Sequence[Sequence[int]], shape: str, steps: int, head: str = "next"
) -> None:
    """Train the set-up on the public texts that are long enough."""
    texts, length = map(int, shape.split("x"))
    public = [ids for ids in public if len(ids) >= length]
    optimizer = by_optimizer("AdamW")(shared.trained(model))
    for step in range(steps):
        rows = [public[(step * texts + i) % len(public)][:length] for i in range(texts)]
        ids = torch.tensor(rows)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels_of(ids, head)).loss.backward()
        optimizer.step()


def labels_of(ids: Tensor, head: str) -> Tensor:
    """What texts (n, L) are labelled with: themselves, or classes drawn at random."""
    if head == "next":
        return ids
    shape = ids.shape if head == "tokens" else ids.shape[:1]
    return torch.randint(2, shape, device=ids.device)


def loaded(options: argparse.Namespace, tokenizer: Any) -> transformers.PreTrainedModel:
    """The model, with its head."""
    kind = HEAD_CLASSES[options.head]
    if not options.bert:
        model = kind.from_pretrained(options.model, dtype=torch.float32)
        if options.head == "texts":
            model.config.pad_token_id = tokenizer.pad_token_id or 0
        return model
    like = transformers.AutoConfig.from_pretrained(options.model)
    names = ["vocab_size", "hidden_size", "intermediate_size"]
    names += ["num_hidden_layers", "num_attention_heads"]
    sizes = {name: getattr(like, name) for name in names}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return kind.from_config(transformers.BertConfig(**sizes, **dropout))


def padded(texts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of texts of several lengths, each in a row."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    masked = [text | {"attention_mask": torch.ones_like(text["input_ids"])} for text in texts]
    return {
        name: nn.utils.rnn.pad_sequence([text[name] for text in masked], True, value)
        for name, value in fill.items()
    }


def packed(texts: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A batch of texts in one row, kept apart."""
    rows = transformers.DataCollatorWithFlattening()(texts, return_tensors="pt")
    return {**rows, "use_cache": False}


COLLATE: dict[str, Callable[..., Any] | None] = {
    "equal": None,
    "padded": padded,
    "packed": packed,
    "crossing": transformers.DataCollatorWithFlattening(return_tensors="pt"),
}


@dataclass(frozen=True)
class Data:
    """The texts of a cell, of ``length`` tokens and ``texts`` in a batch.

    Attributes:
        rows: the examples of the clients' training.
        held_out: (n, length) private texts that are not trained on.
        public: ids of the adversary's own texts.
        texts: of a batch.
        length: in tokens.
    """

    rows: list[dict[str, Tensor]]
    held_out: Tensor
    public: list[list[int]]
    texts: int
    length: int

    def games(self) -> Games:
        """Return membership games with as many non-members as a batch has texts."""
        return Games(held_out=PublicText(self.held_out), targets=2 * self.texts)

    def loader(self, form: str) -> DataLoader:
        """Return the batches in a form of ``COLLATE``; only ``equal`` texts are of one length."""
        collate, rows = COLLATE[form], self.rows
        if collate is not None:
            ends = [self.length - i % 3 * self.length // 4 for i in range(len(rows))]
            pairs = zip(rows, ends, strict=True)
            rows = [{name: values[:end] for name, values in row.items()} for row, end in pairs]
        return DataLoader(rows, batch_size=self.texts, collate_fn=collate)


def read_data(options: argparse.Namespace, tokenizer: Any, public: list[list[int]]) -> Data:
    """Return half of the private texts to train on, the other half as non-members."""
    texts, length = map(int, options.shape.split("x"))
    private = [ids[:length] for ids in shared.drawn_ids(options.private, tokenizer, options)]
    whole = torch.tensor([ids for ids in private if len(ids) == length])
    trained_on, held_out = whole.tensor_split(2)
    pairs = zip(trained_on, labels_of(trained_on, options.head), strict=True)
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in pairs]
    return Data(rows, held_out, public, texts, length)


def run_cell(
    setup: str, column: str, defense: str, options: argparse.Namespace, folder: str
) -> list[dict]:
    """Return the lines of ``leakage.jsonl`` of one fit."""
    torch.manual_seed(options.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    public = shared.drawn_ids(options.public, tokenizer, options)
    model = SETUPS[setup](loaded(options, tokenizer))
    warm(model, public, options.shape, options.warm, options.head)
    data = read_data(options, tokenizer, public)
    if ":" in column:
        run_rounds(model, data, column, options, folder)
    else:
        monitor = watch(column, data, options, folder)
        defenses = DEFENSES[defense]()
        shared.fit(
            shared.FineTuning(model, by_optimizer("AdamW")), data.loader(options.rows),
            strategy=DefendedStrategy("auto", defenses=defenses) if defenses else "auto",
            max_steps=options.batches, callbacks=[monitor], default_root_dir=folder,
        )  # fmt: skip
    return shared.read_lines(Path(folder) / "leakage.jsonl")


def watch(column: str, data: Data, options: argparse.Namespace, folder: str) -> LeakageMonitor:
    """Return a monitor with ``SubspaceTexts`` only, or one whose attacks choose themselves."""
    if column == "texts":
        attack = SubspaceTexts(budget_seconds=options.texts_seconds)
        settings = WatchSettings(texts=data.texts)
        return LeakageMonitor(attack, every_n_steps=1, folder=folder, settings=settings)
    settings = WatchSettings(look_seconds=LOOK_SECONDS, public_text=PublicText(data.public))
    return LeakageMonitor(every_n_steps=1, games=data.games(), folder=folder, settings=settings)


def run_rounds(
    model: nn.Module, data: Data, column: str, options: argparse.Namespace, folder: str
) -> None:
    """Train and look at rounds, each from a fresh optimizer; they take no defence."""
    name, _, steps = column.partition(":")
    make, batches = by_optimizer(name), iter(data.loader(options.rows))
    settings = RoundSettings(look_seconds=LOOK_SECONDS, public_text=PublicText(data.public))
    observer = RoundObserver(
        copy.deepcopy(model), make, int(steps), folder=folder, games=data.games(), settings=settings
    )
    for round_ in range(options.batches):
        observer.begin(round_, trained_state(model))
        optimizer = make(shared.trained(model))
        round_batches = list(itertools.islice(batches, observer.local_steps))
        for batch in round_batches:
            optimizer.zero_grad()
            model.train()(**batch).loss.backward()
            optimizer.step()
        observer.look(trained_state(model), batches=round_batches)
    observer.end()


def family_of(attack: str) -> str:
    """Of an attack by its name in the logs."""
    if attack == SubspaceTexts.default_name:
        return "texts"
    return "membership" if "membership" in attack else "words"


def families_in(column: str) -> tuple[str, ...]:
    """What a column measures."""
    return ("texts",) if column == "texts" else ("words", "membership")


def summary(lines: list[dict]) -> dict[str, dict]:
    """By attack: mean and interval, and in how many looks it was unknown and why."""
    names = dict.fromkeys(line["attack"] for line in lines)
    return {name: summary_of([x for x in lines if x["attack"] == name], name) for name in names}


def summary_of(lines: list[dict], attack: str) -> dict[str, Any]:
    """Return the summary of one attack's lines."""
    reasons = [line["unknown"] for line in lines if line["unknown"]]
    rates = [line["metrics"] for line in lines if not line["unknown"] and line["exposed"]]
    why = reasons[-1] if reasons else "" if rates else "what it reads is not shared"
    family = family_of(attack)
    result = {"looks": len(rates), "unknown": len(reasons), "why": why, "family": family}
    if rates and family == "membership":
        result |= rates[-1]["auc"]
    elif rates:
        mean, half = shared.mean_and_half([look[VALUES[family]]["value"] for look in rates])
        result |= {"value": mean, "low": mean - half, "high": mean + half}
    if rates and family == "texts":
        for name in ("exact_sentences", "certified"):
            values = [look[name]["value"] for look in rates if name in look]
            result[name] = sum(values) / len(values) if values else None
    return result


def best_value(cell: dict[str, Any] | None, family: str) -> str:
    """What the best attack of a family found; None is a cell that was not run."""
    if cell is None:
        return "not run"
    summaries = [s for name, s in cell["attacks"].items() if family_of(name) == family]
    results = [s for s in summaries if "value" in s]
    if not results:
        tried = any(s["unknown"] and not s["why"].startswith("not played") for s in summaries)
        return "*unknown*" if tried else "none reads it"
    best = max(results, key=lambda s: s["value"])
    if family != "membership":
        text = f"{best['value']:.3f} ± {(best['high'] - best['low']) / 2:.3f}"
    else:
        text = f"{best['value']:.3f} ({best['low']:.2f} to {best['high']:.2f})"
    text = re.sub(r"\b0\.", ".", text)
    return text + (f", {best['unknown']} looks unknown" if best["unknown"] else "")


def print_table(cells: Sequence[dict[str, Any]]) -> None:
    """For each model and shape: set-ups and defences by what is shared."""
    for model, shape in dict.fromkeys((cell["model"], cell["shape"]) for cell in cells):
        of_shape = [c for c in cells if (c["model"], c["shape"]) == (model, shape)]
        columns = list(dict.fromkeys(c["column"] for c in of_shape))
        minutes = sum(c["seconds"] for c in of_shape) / 60
        print(f"{model}, {shape}, {of_shape[-1]['day']}, {minutes:.0f} min\n")
        pairs = [(column, family) for column in columns for family in families_in(column)]
        rows = []
        for setup, defense in dict.fromkeys((c["setup"], c["defense"]) for c in of_shape):
            run = [c for c in of_shape if (c["setup"], c["defense"]) == (setup, defense)]
            results = {c["column"]: c for c in run}
            row = [best_value(results.get(column), family) for column, family in pairs]
            rows.append([setup if defense == "none" else f"{setup}; {defense}", *row])
        heads = [f"{column}: {HEADS[family]}" for column, family in pairs]
        print(f"{shared.table(['trained', *heads], rows)}\n")


def run_setups(options: argparse.Namespace) -> None:
    """Run what the file lacks: set-ups by what is shared and by defence."""
    have = {tuple(line["key"]) for line in shared.read_lines(options.out)}
    model = Path(options.model).name
    if options.head != "next":
        model = f"{'BERT like ' * options.bert}{model}, classes of {options.head}"
    if options.rows != "equal":
        model = f"{model}, {options.rows} rows"
    cells = itertools.product(options.setups, options.columns, options.defenses)
    for setup, column, defense in cells:
        key = [model, options.shape, setup, column, defense]
        if tuple(key) in have:
            continue
        cell = dict(zip(("model", "shape", "setup", "column", "defense"), key, strict=True))
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, quiet_logs(TRAINING):
            cell["attacks"] = summary(run_cell(setup, column, defense, options, folder))
        cell["seconds"] = time.perf_counter() - start
        shared.add_line(options.out, {"key": key, "day": str(date.today()), **cell})
        print(setup, column, defense, f"{cell['seconds']:.0f} s")
        for attack, result in cell["attacks"].items():
            value = "{value:.3f} ({low} to {high})".format(**result) if "value" in result else ""
            note = f"unknown {result['unknown']} {result['why'][:200]}"
            print(f"    {attack} {value} {note}", flush=True)


def main() -> None:
    parser = shared.parser_of(
        __doc__, table=Path, model=str, head=("next", HEAD_CLASSES), bert=False,
        rows=("equal", COLLATE), private="imdb", public="wikitext2", shape="8x64",
        setups=([*SETUPS], SETUPS), columns=["gradient", "SGD:10", "AdamW:1", "AdamW:10"],
        defenses=(["none"], DEFENSES), batches=10, warm=5, texts_seconds=60.0, bos=int, pool=2000,
        seed=0, out=Path,
    )  # fmt: skip
    options = parser.parse_args()
    if options.table is not None:
        print_table(shared.read_lines(options.table))
        return
    if options.model is None or options.out is None:
        parser.error("give --model DIR and --out FILE, or --table FILE")
    rounds = [column for column in options.columns if ":" in column]
    if rounds and options.defenses != ["none"]:
        parser.error(
            f"--columns {' '.join(rounds)}: a round is measured without a defence; give --defenses "
            "with --columns gradient or texts only"
        )
    shared.print_place()
    run_setups(options)


if __name__ == "__main__":
    main()

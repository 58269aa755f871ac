"""Words off the first projections' gradients: LoRA or whole, real text, nothing given.

    python benchmarks/subspace_words.py --model DIR --rank 8 --targets q_proj,v_proj \
        --private imdb --shapes 8x25,8x64 --batches 10
    python benchmarks/subspace_words.py --config gpt2 --rank 8 --targets c_attn --shapes 8x64
    python benchmarks/subspace_words.py --model DIR --rank 0 --noise 0,1e-3,1e-2,1e-1
    python benchmarks/subspace_words.py --model DIR --rank 8 --update AdamW --shapes 1x64,8x64

``--rank 0`` trains the projections whole. Adapters are PEFT's, moved by ``--warm`` steps of AdamW
on ``--public`` text first. ``--config gpt2`` and ``bert`` are those architectures at their own size
with random weights and Zipf-distributed tokens. Every shape is texts x tokens; ``--padded`` takes
shorter texts as they are. ``--noise`` adds Gaussian noise of so many times the rms of the gradients
that are read, which the attack is told. ``--prior`` tells it how often public text has each token.
``--update`` shares in place of gradients the weight change of one step of that optimizer of
torch.optim, with its own settings and a learning rate of 2e-4, from a fresh state.

Prints for each shape: types in a batch, F1 with its 95% interval over batches (Student's t),
precision, the share of true types among the n likeliest where n is given, the share of batches with
a certificate, and seconds of a look on one core. Types are those with a part in the gradient: not a
causal text's last token.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)
from word_recovery import read_texts

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import RunFacts, SubspaceWords, UnusableObservation, WordGuess
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 4 --targets q_proj,v_proj "
    "--shapes 1x8 --batches 1",
    "--model {model} --private {text} --public {text} --rank 4 --shapes 1x8 --batches 1 "
    "--update AdamW",
)
RATE = 2e-4


def built(options: argparse.Namespace) -> nn.Module:
    """The model, its adapters on it, what is read trainable and nothing else."""
    torch.manual_seed(options.seed)
    if options.config == "gpt2":
        model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=2))
    elif options.config == "bert":
        model = BertForMaskedLM(BertConfig(num_hidden_layers=2))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.rank:
        targets = options.targets if options.targets == "all-linear" else options.targets.split(",")
        config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets)
        model = get_peft_model(model, config)
    return model.to(options.device).eval()


class Source:
    """Batches of text as ids, or of Zipf-distributed ids."""

    def __init__(self, name: str, options: argparse.Namespace, vocabulary: int) -> None:
        self.options = options
        self.vocabulary = vocabulary
        self.generator = torch.Generator().manual_seed(options.seed)
        self.ids: list[list[int]] = []
        if options.config is None:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            front = [] if options.bos is None else [options.bos]
            texts = read_texts(name)
            order = torch.randperm(len(texts), generator=self.generator).tolist()
            self.ids = [front + tokenizer(texts[i])["input_ids"] for i in order[: options.pool]]
        self.next = 0

    def batch(self, rows: int, length: int) -> TokenBatch:
        """(rows, length) ids, padded with 0 on the right where ``--padded`` allows it."""
        kind = "masked" if self.options.config == "bert" else "causal"
        if not self.ids:
            odds = 1 / torch.arange(1, self.vocabulary + 1).float()
            ids = torch.multinomial(odds, rows * length, True, generator=self.generator)
            return TokenBatch(ids.view(rows, length), ids.view(rows, length), None, kind)
        chosen: list[list[int]] = []
        while len(chosen) < rows:
            text = self.ids[self.next % len(self.ids)][:length]
            self.next += 1
            if len(text) == length or (self.options.padded and len(text) > 1):
                chosen.append(text)
        ids = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in chosen], batch_first=True)
        mask = torch.arange(ids.shape[1])[None] < torch.tensor([[len(t)] for t in chosen])
        return TokenBatch(ids, ids.masked_fill(~mask, IGNORE_INDEX), mask.long(), kind)


def backward(model: nn.Module, batch: TokenBatch, device: str) -> None:
    """The gradient of the mean token loss, as Hugging Face models compute it."""
    model.zero_grad()
    mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
    ids, labels = batch.input_ids.to(device), batch.labels.to(device)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()


def observed(anatomy: Anatomy, roles: tuple[str, ...], noise: float, seed: int) -> Observation:
    """What the attack reads, with noise of ``noise`` times its rms."""
    found = {r: anatomy.parameter(r).grad.clone() for r in roles}
    flat = torch.cat([g.flatten() for g in found.values()])
    std = noise * float(flat.square().mean().sqrt())
    generator = torch.Generator(flat.device).manual_seed(seed)
    if std:
        for g in found.values():
            g += std * torch.randn(g.shape, generator=generator, device=g.device)
    return Observation((GradientSnapshot(0, Stage.SHARED, found, noise_std=std),))


def updated(anatomy: Anatomy, roles: tuple[str, ...], kind: str) -> Observation:
    """The weight change of one step with the gradients at hand; the weights are put back."""
    parameters = {r: anatomy.parameter(r) for r in roles}
    before = {r: p.detach().clone() for r, p in parameters.items()}
    getattr(torch.optim, kind)(list(parameters.values()), lr=RATE).step()
    with torch.no_grad():
        found = {r: (before[r] - p) / RATE for r, p in parameters.items()}
        for r, p in parameters.items():
            p.copy_(before[r])
    return Observation((UpdateSnapshot(0, Stage.SHARED, found, learning_rate=RATE),))


def f1_of(found: set[int], truth: set[int]) -> float:
    return 2 * len(found & truth) / (len(found) + len(truth))


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval."""
    x = torch.tensor(values, dtype=torch.float64)
    if len(x) < 2:
        return float(x.mean()), float("nan")
    half = float(stats.t.ppf(0.975, len(x) - 1)) * float(x.std()) / len(x) ** 0.5
    return float(x.mean()), half


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--config", choices=("gpt2", "bert"))
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--shapes", default="8x64")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--noise", default="0")
    parser.add_argument("--update")
    parser.add_argument("--bos", type=int)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--prior", action="store_true")
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.model is None) == (options.config is None):
        parser.error("give --model DIR or --config")
    torch.set_num_threads(options.threads)
    rows = []
    print(f"# {platform.machine()}, {options.threads} thread(s), {options.device}, {date.today()}")
    for shape in options.shapes.split(","):
        texts, length = map(int, shape.split("x"))
        model = built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        trained = [p for p in model.parameters() if p.requires_grad]
        if options.rank:
            optimizer = torch.optim.AdamW(trained, lr=2e-4)
            for _ in range(options.warm):
                backward(model, public.batch(texts, length), options.device)
                optimizer.step()
        given = public.ids[:500] if options.prior else None
        attack = SubspaceWords(given, capacity_seconds=0)
        if options.update:
            kind = getattr(torch.optim, options.update)
            group = kind([nn.Parameter(torch.zeros(1))], lr=RATE).param_groups[0]
            settings = {k: v for k, v in group.items() if k != "params"}
            attack.meet(
                RunFacts(optimizer=options.update, optimizer_settings=settings, local_steps=1)
            )
        roles = attack.needs(anatomy).gradients
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in roles)
        attack.prepare(anatomy)
        for level in map(float, options.noise.split(",")):
            scores: dict[str, list[float]] = {
                k: [] for k in ("types", "f1", "precision", "ranked", "certified", "seconds")
            }
            for number in range(options.batches):
                batch = private.batch(texts, length)
                backward(model, batch, options.device)
                truth = set(batch.context_ids().tolist())
                attack.refresh(anatomy, number)
                if options.update:
                    view = updated(anatomy, roles, options.update)
                else:
                    view = observed(anatomy, roles, level, number)
                start = time.perf_counter()
                guess = _guess(attack, view)
                scores["seconds"].append(time.perf_counter() - start)
                found = set(guess.types.tolist())
                ranked = set() if guess.scores is None else _first(guess.scores, len(truth))
                scores["types"].append(len(truth))
                scores["f1"].append(f1_of(found, truth))
                scores["precision"].append(len(found & truth) / max(1, len(found)))
                scores["ranked"].append(len(ranked & truth) / len(truth))
                scores["certified"].append(float(bool(guess.certified)))
            row = {k: mean_and_half(v) for k, v in scores.items()}
            rows.append({"shape": shape, "noise": level, "n": options.batches, **row})
            print(
                f"{options.config or Path(options.model).name} {options.private} r {options.rank} "
                f"{options.targets if options.rank else 'whole'} {shape} noise {level:g} "
                f"{options.update or 'gradient'} | types "
                f"{row['types'][0]:.0f} | F1 {row['f1'][0]:.4f} +- {row['f1'][1]:.4f} | precision "
                f"{row['precision'][0]:.3f} | n given {row['ranked'][0]:.3f} | certified "
                f"{row['certified'][0]:.2f} | {row['seconds'][0]:.1f} s",
                flush=True,
            )
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "rows": rows})
        )


def _guess(attack: SubspaceWords, view: Observation) -> WordGuess:
    """What the attack says; nothing where it says that it cannot."""
    try:
        return attack.run(view)
    except UnusableObservation:
        return WordGuess(torch.empty(0, dtype=torch.int64))


def _first(scores: Tensor, n: int) -> set[int]:
    return set(scores.topk(n).indices.tolist())


if __name__ == "__main__":
    main()

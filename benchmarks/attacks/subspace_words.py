"""Words off the first projections' gradients: LoRA or whole, real text, nothing given.

    python -m benchmarks.attacks.subspace_words --model DIR --rank 8 --targets q_proj,v_proj \
        --private imdb --shapes 8x25,8x64 --batches 10
    python -m benchmarks.attacks.subspace_words --config gpt2 --rank 8 --targets c_attn \
        --shapes 8x64
    python -m benchmarks.attacks.subspace_words --model DIR --rank 0 --noise 0,1e-3,1e-2,1e-1
    python -m benchmarks.attacks.subspace_words --model DIR --rank 8 --update AdamW \
        --shapes 1x64,8x64
    python -m benchmarks.attacks.subspace_words --model DIR --rank 8 --update AdamW --shapes 4x32 \
        --warm 5,30,100,300

``--rank 0`` trains the projections whole. Adapters are PEFT's, moved by ``--warm`` steps of AdamW
on ``--public`` text first. Several numbers are points of one training: the same private batches are
read at each of them. ``--dropout`` is that in front of the adapters, in training and in the shared
gradients. ``--chat`` trains and shares chats with masked prompts: the first half of a text is the
user's turn, the second the assistant's, in the tokenizer's chat template, and only the second has
labels. ``--config gpt2`` is that architecture at its own size with random weights and
Zipf-distributed tokens. Every shape is texts x tokens. ``--noise`` adds Gaussian noise of so many
times the rms of the gradients that are read, which the attack is told. ``--prior`` tells it how
often public text has each token.
``--update`` shares in place of gradients the weight change of one step of that optimizer of
torch.optim, with its own settings and a learning rate of 2e-4, from a fresh state.

Prints for each shape: types in a batch, F1 with its 95% interval over batches (Student's t),
precision, the share of true types among the n likeliest where n is given, the share of batches with
a certificate, seconds of a look on one core, and how many looks are unknown. These count in none of
the means. Unknown is a look at which the attack refuses, and one that names no type without noise:
something is shared there, so that it is no finding. Types are those with a part in the gradient:
not a causal text's last token.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from benchmarks.shared import drawn_ids, mean_and_half, parser_of, print_place, trained, with_lora
from lightning_fedleak.attacks import RunFacts, SubspaceWords, UnusableObservation, WordGuess
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 4 --targets q_proj,v_proj "
    "--shapes 1x8 --batches 1",
    "--model {model} --private {text} --public {text} --rank 4 --shapes 1x8 --batches 1 "
    "--update AdamW --warm 1,3 --dropout .05 --chat",
)
RATE = 2e-4
# Of tokenizers that have no chat template: turns between words that every vocabulary can spell.
PLAIN_TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def built(options: argparse.Namespace) -> nn.Module:
    """The model, its adapters on it, what is read trainable and nothing else."""
    torch.manual_seed(options.seed)
    if options.config == "gpt2":
        model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=2))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    if options.rank:
        targets = options.targets if options.targets == "all-linear" else options.targets.split(",")
        model = with_lora(model, options.rank, targets, lora_dropout=options.dropout)
    return model.to(options.device).train(options.dropout > 0)


class Training:
    """Steps of AdamW on public text, which move adapters from their start.

    Args:
        model: what of it can be trained now is trained.
        public: gives the batches.
        shape: texts and tokens of a batch.
    """

    def __init__(
        self, model: nn.Module, public: "Source", shape: tuple[int, int], device: str
    ) -> None:
        self.model, self.public, self.shape, self.device = model, public, shape, device
        self.trained = trained(model)
        self.optimizer = torch.optim.AdamW(self.trained, lr=RATE)
        self.steps = 0

    def until(self, steps: int) -> None:
        """Train on until so many steps are taken in all."""
        for parameter in self.trained:
            parameter.requires_grad_(True)
        for _ in range(self.steps, steps):
            backward(self.model, self.public.batch(*self.shape), self.device)
            self.optimizer.step()
        self.steps = max(self.steps, steps)

    def read_only(self, roles: Sequence[str]) -> None:
        """Leave trainable what an attack reads alone."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in roles)


class Source:
    """Batches of text as ids, or of Zipf-distributed ids."""

    def __init__(self, name: str, options: argparse.Namespace, vocabulary: int) -> None:
        self.options = options
        self.vocabulary = vocabulary
        self.generator = torch.Generator().manual_seed(options.seed)
        self.ids: list[list[int]] = []
        if options.config is None:
            self.tokenizer = AutoTokenizer.from_pretrained(options.model)
            self.tokenizer.chat_template = self.tokenizer.chat_template or PLAIN_TURNS
            self.ids = drawn_ids(name, self.tokenizer, options, self.generator)
        self.next = 0

    def chat(self, text: list[int], length: int) -> tuple[list[int], int]:
        """Return a chat of at most so many tokens, and how many of them are the prompt."""
        half = self.tokenizer.decode(text[: length // 4], skip_special_tokens=True)
        rest = self.tokenizer.decode(text[length // 4 :], skip_special_tokens=True)
        user = [{"role": "user", "content": half}]
        both = [*user, {"role": "assistant", "content": rest}]
        prompt = self.tokenizer.apply_chat_template(user, return_dict=False)
        return self.tokenizer.apply_chat_template(both, return_dict=False)[:length], len(prompt)

    def batch(self, rows: int, length: int) -> TokenBatch:
        """(rows, length) ids."""
        if not self.ids:
            odds = 1 / torch.arange(1, self.vocabulary + 1).float()
            ids = torch.multinomial(odds, rows * length, True, generator=self.generator)
            return TokenBatch(ids.view(rows, length), ids.view(rows, length), None, "causal")
        chosen: list[list[int]] = []
        prompts: list[int] = []
        first = self.next
        while len(chosen) < rows:
            if not chosen and self.next - first > len(self.ids):
                raise SystemExit(f"no text has {length} tokens and, in a chat, a label among them")
            text, prompt = self.ids[self.next % len(self.ids)], 0
            if self.options.chat and len(text) > length:
                text, prompt = self.chat(text, length)
            text = text[:length]
            self.next += 1
            if len(text) == length > prompt:
                chosen.append(text)
                prompts.append(prompt)
        ids = torch.tensor(chosen)
        labelled = torch.arange(length)[None] >= torch.tensor(prompts)[:, None]
        labels = ids.masked_fill(~labelled, IGNORE_INDEX)
        return TokenBatch(ids, labels, torch.ones_like(ids), "causal")


def backward(model: nn.Module, batch: TokenBatch, device: str) -> None:
    """The gradient of the mean token loss, as Hugging Face models compute it."""
    model.zero_grad()
    mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
    ids, labels = batch.input_ids.to(device), batch.labels.to(device)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()


def observed(anatomy: Anatomy, roles: tuple[str, ...], noise: float, seed: int) -> Observation:
    """What the attack reads, with noise of ``noise`` times its rms."""
    gradients = {r: anatomy.parameter(r).grad.clone() for r in roles}
    flat = torch.cat([g.flatten() for g in gradients.values()])
    std = noise * float(flat.square().mean().sqrt())
    generator = torch.Generator(flat.device).manual_seed(seed)
    if std:
        for g in gradients.values():
            g += std * torch.randn(g.shape, generator=generator, device=g.device)
    return Observation((GradientSnapshot(0, Stage.SHARED, gradients, noise_std=std),))


def shared(
    model: nn.Module, roles: tuple[str, ...], batches: Sequence[TokenBatch], noise: float,
    number: int, options: argparse.Namespace,
) -> Observation:  # fmt: skip
    """The gradient of a batch, or the weight change of a step of ``--update`` on each."""
    anatomy = find_anatomy(model)
    if options.update:
        parameters = [anatomy.parameter(role) for role in roles]
        optimizer = getattr(torch.optim, options.update)(parameters, lr=RATE)
        steps = [partial(backward, model, batch, options.device) for batch in batches]
        return updated(anatomy, roles, optimizer, steps)
    backward(model, batches[0], options.device)
    return observed(anatomy, roles, noise, number)


def updated(
    anatomy: Anatomy, roles: tuple[str, ...], optimizer: torch.optim.Optimizer,
    backwards: Sequence[Callable[[], None]],
) -> Observation:  # fmt: skip
    """The weight change of a step behind each backward pass; the weights are put back."""
    [group] = optimizer.param_groups
    before = {p: p.detach().clone() for p in group["params"]}
    for compute in backwards:
        compute()
        optimizer.step()
    parameters, rate = {r: anatomy.parameter(r) for r in roles}, group["lr"]
    changes = {r: (before[p] - p.detach()) / rate for r, p in parameters.items()}
    with torch.no_grad():
        for p, weights in before.items():
            p.copy_(weights)
    steps = len(backwards)
    update = UpdateSnapshot(0, Stage.SHARED, changes, local_steps=steps, learning_rate=rate)
    return Observation((update,))


def facts_of(kind: str, steps: int) -> RunFacts:
    """What a server knows of rounds of an optimizer with its own settings."""
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))], lr=RATE)
    group = optimizer.param_groups[0]
    settings = {name: value for name, value in group.items() if name != "params"}
    return RunFacts(optimizer=kind, optimizer_settings=settings, local_steps=steps)


def f1_of(named: set[int], truth: set[int]) -> float:
    return 2 * len(named & truth) / (len(named) + len(truth))


MODEL: dict[str, Any] = {"model": str, "config": (str, ("gpt2",))}
SOURCE: dict[str, Any] = {
    "private": "imdb", "public": "wikitext2", "rank": 8, "targets": "q_proj,v_proj",
    "shapes": "8x64", "batches": 10, "bos": int, "pool": 2000, "device": "cpu", "seed": 0,
}  # fmt: skip
"""Options of the adapters and the texts."""
TRAINING: dict[str, Any] = {
    "dropout": (0.0, "in front of the adapters"),
    "warm": ("1", "steps of training before; several: 5,30,100"),
    "update": (str, "an optimizer of torch.optim; default gradients"),
}
"""Options of the training before, and of what is shared."""


def read_options(doc: str | None, **settings: Any) -> argparse.Namespace:
    """Return the options of a script on a model of a folder, or one of a config."""
    parser = parser_of(doc, **MODEL, **settings)
    options = parser.parse_args()
    if (options.model is None) == (options.config is None):
        parser.error("give --model DIR or --config")
    print_place(options.device)
    return options


def main() -> None:
    chat = False, "chats with masked prompts"
    options = read_options(__doc__, **SOURCE, **TRAINING, noise="0", chat=chat, prior=False)
    for shape in options.shapes.split(","):
        texts, length = map(int, shape.split("x"))
        model = built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        batches = [private.batch(texts, length) for _ in range(options.batches)]
        training = Training(model, public, (texts, length), options.device)
        for warm in map(int, options.warm.split(",")):
            training.until(warm if options.rank else 0)
            attack = SubspaceWords(public.ids[:500] if options.prior else None, capacity_seconds=0)
            if options.update:
                attack.meet(facts_of(options.update, 1))
            roles = attack.needs(anatomy).gradients
            training.read_only(roles)
            attack.prepare(anatomy)
            for noise in map(float, options.noise.split(",")):
                row = measured(attack, model, roles, batches, noise, options)
                row |= {"shape": shape, "warm": warm, "noise": noise}
                print(described(row, options), flush=True)


def measured(
    attack: SubspaceWords, model: nn.Module, roles: tuple[str, ...], batches: Sequence[TokenBatch],
    noise: float, options: argparse.Namespace,
) -> dict[str, object]:  # fmt: skip
    """Return the means over batches with half of their intervals, and how many are unknown."""
    names = "types", "f1", "precision", "ranked", "certified", "seconds"
    scores: dict[str, list[float]] = {name: [] for name in names}
    for number, batch in enumerate(batches):
        truth = set(batch.context_ids().tolist())
        attack.refresh(find_anatomy(model), number)
        view = shared(model, roles, [batch], noise, number, options)
        start = time.perf_counter()
        guess = _guess(attack, view)
        scores["seconds"].append(time.perf_counter() - start)
        scores["types"].append(len(truth))
        if guess is None or not (len(guess.types) or noise):
            continue
        named = set(guess.types.tolist())
        likely = [] if guess.scores is None else guess.scores.topk(len(truth)).indices.tolist()
        scores["f1"].append(f1_of(named, truth))
        scores["precision"].append(len(named & truth) / max(1, len(named)))
        scores["ranked"].append(len({*likely} & truth) / len(truth))
        scores["certified"].append(float(bool(guess.certified)))
    row: dict[str, object] = {name: mean_and_half(values) for name, values in scores.items()}
    return row | {"n": len(batches), "unknown": len(batches) - len(scores["f1"])}


def adapted(options: argparse.Namespace) -> str:
    """Return the rank of the adapters, and where they are."""
    return f"r {options.rank} {options.targets if options.rank else 'whole'}"


def described(row: dict[str, Any], options: argparse.Namespace) -> str:
    """Return a line for people."""
    is_known = row["n"] > row["unknown"]
    words = (
        f"F1 {row['f1'][0]:.4f} +- {row['f1'][1]:.4f} | precision {row['precision'][0]:.3f} | "
        f"n given {row['ranked'][0]:.3f} | certified {row['certified'][0]:.2f}"
    )
    dropout = f" dropout {options.dropout:g}" if options.dropout else ""
    chats = " chats" if options.chat else ""
    return (
        f"{options.config or Path(options.model).name} {options.private}{chats} {adapted(options)}"
        f"{dropout} {row['shape']} noise {row['noise']:g} {options.update or 'gradient'} | after "
        f"{row['warm']} steps | types {row['types'][0]:.0f} | {words if is_known else 'unknown'} | "
        f"{row['seconds'][0]:.1f} s | {row['unknown']} of {row['n']} unknown"
    )


def _guess(attack: SubspaceWords, view: Observation) -> WordGuess | None:
    """What the attack says; None where it says that it cannot."""
    try:
        return attack.run(view)
    except UnusableObservation:
        return None


if __name__ == "__main__":
    main()

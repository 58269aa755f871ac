"""Whole texts off the projections' gradients, LoRA or whole: real text, nothing given.

    python -m benchmarks.attacks.subspace_texts --model DIR --rank 0 --shapes 8x32 --batches 10
    python -m benchmarks.attacks.subspace_texts --model DIR --rank 16 \
        --targets q_proj,k_proj,v_proj --shapes 1x48
    python -m benchmarks.attacks.subspace_texts --model DIR --rank 8 --targets q_proj,v_proj \
        --shapes 1x32
    python -m benchmarks.attacks.subspace_texts --model DIR --classes 2 --rank 0 --shapes 1x32,2x32
    python -m benchmarks.attacks.subspace_texts --model DIR --rank 0 --shapes 8x32 \
        --defenses none,noise:.001,dpsgd:.01,bf16,int8,topk:.1,sgd:1,sgd:4

Settings as in subspace_words.py, whose functions this uses. ``--classes`` makes it a classifier,
which an encoder has to be, of two classes that alternate over the batch. Prints for each shape and
defence: the share of tokens that are in their place (the last token of each causal text, which is
not in these gradients, does not count) and of texts that are exact, with 95% intervals over texts;
how often the attack certified its texts, and how often that was wrong; and the median of a look's
processor seconds.

``--config gpt2`` is that shape (two blocks of it) with random weights and Zipf-distributed tokens.

``--defenses``: ``noise:s`` adds Gaussian noise of s times the rms of the gradients that are read;
``dpsgd:s`` clips each text's gradient of all that is trained to norm 1 and adds noise of s to their
sum; ``int8`` rounds each tensor to 255 evenly spaced values: the attack is told how much noise that
is, the most of all tensors. ``bf16`` rounds the gradients, which shows. It is not told that
``topk:p`` keeps a share p of each tensor's entries, the largest. ``sgd:k`` shares the weight change
of k plain steps of SGD (learning rate ``--lr``), each on texts of its own, k times as many in all.
"""

import argparse
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.attacks import subspace_words
from benchmarks.attacks.subspace_words import SOURCE, Source, adapted, built, observed, read_options
from benchmarks.shared import trained, with_ends, with_lora
from lightning_fedleak.attacks import RunFacts, SubspaceTexts, UnusableObservation
from lightning_fedleak.evaluation.metrics import TextReconstruction
from lightning_fedleak.evaluation.metrics.texts import in_true_order
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 0 --shapes 2x8 --batches 1 --budget 1",
    "--model {model} --private {text} --public {text} --rank 8 --targets q_proj,k_proj,v_proj "
    "--shapes 1x8 --batches 1 --budget 1 --defenses topk:.1,dpsgd:.1,sgd:1",
)


def classifier(options: argparse.Namespace) -> nn.Module:
    """A model with a head for classes, as :func:`built` otherwise."""
    torch.manual_seed(options.seed)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=options.classes, dtype=torch.float32
    )
    if options.rank:
        model = with_lora(model, options.rank, options.targets.split(","))
        for name, parameter in model.named_parameters():
            if ".classifier." in name:
                parameter.requires_grad_(True)
    return model.to(options.device).eval()


def texts_of(source: Source, rows: int, length: int, options: argparse.Namespace) -> Tensor:
    """(rows, length) token ids; a classifier's end as its tokenizer ends them."""
    ids = source.batch(rows, length).input_ids
    if options.classes:
        end = AutoTokenizer.from_pretrained(options.model).sep_token_id
        ids[:, -1] = ids[:, -1] if end is None else end
    return ids.to(options.device)


def backward(model: nn.Module, ids: Tensor, options: argparse.Namespace) -> None:
    """The gradient of the mean loss of texts (B, L)."""
    model.zero_grad()
    labels = torch.arange(len(ids), device=ids.device) % options.classes if options.classes else ids
    model(input_ids=ids, labels=labels).loss.backward()


def move_adapters(model: nn.Module, public: Source, rows: int, length: int, options) -> None:
    """Take a step on public text: A has no gradient while B is zero."""
    if options.rank:
        backward(model, texts_of(public, rows, length, options), options)
        torch.optim.AdamW(trained(model), lr=2e-4).step()


def shared(
    anatomy: Anatomy, roles: tuple[str, ...], ids: Tensor, defense: str, number: int, options
) -> Observation:
    """What the server is shown of a batch; the model is left as it was."""
    model = anatomy.root
    kind, _, value = defense.partition(":")
    generator = torch.Generator(ids.device).manual_seed(number)
    if kind == "sgd":
        steps = [partial(backward, model, part, options) for part in ids.chunk(int(value))]
        optimizer = torch.optim.SGD(trained(model), lr=options.lr)
        return subspace_words.updated(anatomy, roles, optimizer, steps)
    std = 0.0
    if kind == "dpsgd":
        gradients = {r: torch.zeros_like(anatomy.parameter(r)) for r in roles}
        for row in ids:
            backward(model, row[None], options)
            norm = torch.stack([p.grad.norm() for p in trained(model) if p.grad is not None]).norm()
            for role in roles:
                gradients[role] += anatomy.parameter(role).grad / norm.clamp_min(1.0)
        std = float(value)
    else:
        backward(model, ids, options)
        if kind in ("none", "noise"):
            return observed(anatomy, roles, float(value or 0), number)
        gradients = {r: anatomy.parameter(r).grad.clone() for r in roles}
    for role, g in gradients.items():
        if kind == "dpsgd":
            noise = torch.randn(g.shape, generator=generator, device=g.device)
            gradients[role] = g + std * noise
        elif kind == "bf16":
            gradients[role] = g.bfloat16()
        elif kind == "int8":
            step = g.abs().max() / 127
            gradients[role] = (g / step).round() * step
            std = max(std, float(step) / 12**0.5)
        elif kind == "topk":
            least = g.abs().flatten().topk(max(1, int(float(value) * g.numel()))).values[-1]
            gradients[role] = g.where(g.abs() >= least, 0.0)
    return Observation((GradientSnapshot(number, Stage.SHARED, gradients, noise_std=std),))


def main() -> None:
    more = {"budget": (120.0, "seconds of a look"), "lr": (1e-3, "of sgd:k"), "classes": 0}
    options = read_options(__doc__, **SOURCE | more | {"shapes": "1x32", "defenses": "none"})
    options.dropout, options.chat = 0.0, False
    for shape, defense in product(options.shapes.split(","), options.defenses.split(",")):
        kind, _, value = defense.partition(":")
        steps = int(value) if kind == "sgd" else 1
        rows, length = map(int, shape.split("x"))
        model = classifier(options) if options.classes else built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        move_adapters(model, public, rows, length, options)
        attack = SubspaceTexts(budget_seconds=options.budget)
        if kind == "sgd":
            settings = {"optimizer_settings": {"lr": options.lr}, "local_steps": steps}
            attack.meet(RunFacts(optimizer="SGD", **settings))
        roles = tuple(sorted(attack.needs(anatomy).gradients))
        attack.prepare(anatomy)
        metric = TextReconstruction()
        certified = wrong = unknown = 0
        seconds: list[float] = []
        for number in range(options.batches):
            ids = texts_of(private, rows * steps, length, options)
            attack.refresh(anatomy, number)
            view = shared(anatomy, roles, ids, defense, number, options)
            start = time.process_time()
            truth = (ids if options.classes else ids[:, :-1]).cpu()
            guessed_ids = torch.full_like(truth, -1)
            sure, extra = False, False
            try:
                guess = attack.run(view)
                guessed_ids = in_true_order(guess.tokens, truth)
                sure, extra = bool(guess.certified), guess.tokens.shape != truth.shape
            except UnusableObservation:
                unknown += 1
            seconds.append(time.process_time() - start)
            certified += sure
            wrong += sure and (extra or not torch.equal(guessed_ids, truth))
            metric.update(guessed_ids, truth)
        rates = metric.rates()
        in_place, exact = rates["token_accuracy"], rates["exact_sentences"]
        print(
            f"{options.config or Path(options.model).name} {options.private} {adapted(options)} "
            f"{shape} {defense} | in place {with_ends(in_place)} | exact {with_ends(exact)} | "
            f"certified {certified} of {options.batches}, wrongly {wrong}, unknown {unknown} | "
            f"{torch.tensor(seconds).median():.1f} s", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()

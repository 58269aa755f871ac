"""Train the small language model that ``fedleak demo`` ships with.

The script makes everything in the model folder from nothing but WikiText-2: a byte-level BPE
tokenizer with 8,192 entries, a Llama-style causal language model with about 5 million parameters
and tied embeddings, and a model card with the perplexities that it measured itself.

It needs the packages ``torch``, ``transformers``, ``tokenizers`` and ``safetensors``, and a folder
with the three raw WikiText-2 files, named either ``train.raw.txt.gz``, ``valid.raw.txt.gz`` and
``test.raw.txt.gz`` or, as in the original archive, ``wiki.train.raw``, ``wiki.valid.raw`` and
``wiki.test.raw``. By default that folder is ``$FEDLEAK_ASSETS/data/wikitext2``.

A full run on one CPU core, and a short one to see that everything works::

    python tools/train_demo_model.py --minutes 60 --threads 1 --precision bf16 --compile
    python tools/train_demo_model.py --minutes 2 --work /tmp/smoke --out /tmp/smoke/model

Training stops after ``--minutes``; the learning-rate schedule follows the clock, so the model is
fully annealed whatever the speed of the machine. A checkpoint goes to ``--work`` every few minutes,
and the same command line continues from it after an interruption (``--fresh`` starts over).
``--export-only`` evaluates and saves the latest checkpoint, also while a training is under way.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

REPO_ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 8192
CONTEXT = 256
END_OF_TEXT = "<|endoftext|>"
SPLITS = ("train", "valid", "test")
SAMPLE_PROMPTS = ("The history of the city", "In 1998, she", "The song was")


# --- text -----------------------------------------------------------------------------------------

# Each rule undoes one habit of the WikiText tokenisation; they apply in this order.
_JOINING_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" @([-.,])@ ", r"\1"),  # hard @-@ shelled, 0 @.@ 7, 20 @,@ 000
        (r" (['’]) ?(s|t|re|m|ve|ll|d)\b", r"\1\2"),  # lobster 's, don 't
        (r" n't\b", "n't"),  # did n't
        (r"(?<=\d) ([:–]) (?=\d)", r"\1"),  # 12 : 30, 5 – 6
        (r" ([/—]) ", r"\1"),  # and / or, word — word
        (r" ° (?=[CF]\b)", " °"),  # 20 ° C
        (r" °(?!\S)", "°"),  # 40 ° N
        (r"([$£€¥₹#]) (?=\d)", r"\1"),  # $ 5, # 1
        (r"(?<!\S)([(\[]) ", r"\1"),
        (r"(?<=[\"'(\[])([(\[]) ", r"\1"),
        (r" (\.\.\.|[.,;:?!%)\]…’])(?!\w)", r"\1"),
    )
)
_HEADING = re.compile(r"^(?P<marks>=(?: =)*) (?P<title>.+?) (?P=marks)$")


def _join_quotes(text: str, mark: str) -> str:
    """Attach free-standing quotation marks to the words they enclose, opening and closing in turn.

    A single quote after a word in ``s`` counts as a possessive unless a quotation is open.
    """
    first, *rest = f" {text} ".split(f" {mark} ")
    joined, is_open = first, False
    for piece in rest:
        if is_open or (mark == "'" and joined.endswith("s")):
            joined, is_open = f"{joined}{mark} {piece}", False
        else:
            joined, is_open = f"{joined} {mark}{piece}", True
    return joined.strip()


def detokenise(line: str) -> str:
    r"""Turn one line of WikiText into ordinary English spelling.

    WikiText is split into words: every punctuation mark stands between spaces, hyphens, decimal
    points and thousands separators inside a word are written ``@-@``, ``@.@`` and ``@,@``, and
    headings are framed with ``=``. This puts the marks back where a writer would have put them. It
    works by rule and without looking at the sense, so a few unbalanced quotation marks stay wrong.

    >>> detokenise(' He said " I don \'t know " , about 2 @,@ 000 hard @-@ won points ( 5 % ) . ')
    'He said "I don\'t know", about 2,000 hard-won points (5%).'
    >>> detokenise(" = = Life cycle = = ")
    'Life cycle'
    """
    text = line.strip()
    if heading := _HEADING.match(text):
        text = heading["title"]
    text = _join_quotes(text, '"')
    text = _join_quotes(text, "'")
    for pattern, replacement in _JOINING_RULES:
        text = pattern.sub(replacement, text)
    return text


def default_data_folder() -> Path:
    """Where WikiText-2 is expected when ``--data`` is not given."""
    root = Path(os.environ.get("FEDLEAK_ASSETS", "."))
    return root / "data" / "wikitext2"


def read_articles(folder: Path, split: str) -> list[str]:
    """The detokenised articles of one split: a title, then headings and paragraphs, one a line."""
    candidates = [folder / f"{split}.raw.txt.gz", folder / f"wiki.{split}.raw"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        names = " or ".join(candidate.name for candidate in candidates)
        raise SystemExit(f"no {names} in {folder}; name the folder with --data or FEDLEAK_ASSETS")
    raw = path.read_bytes()
    lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").split("\n")
    articles: list[list[str]] = []
    after_blank = True
    for line in lines:
        text = detokenise(line)
        heading = _HEADING.match(line.strip())
        # Legends of tables ("= Games played") look like titles but follow a line of text.
        is_title = after_blank and heading is not None and heading["marks"] == "="
        if is_title or not articles:
            articles.append([])
        if text:
            articles[-1].append(text)
        after_blank = not text
    return ["\n".join(article) for article in articles if article]


# --- tokens ---------------------------------------------------------------------------------------


def train_tokenizer(articles: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` entries, special token included."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(articles, trainer)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the tokenizer has {bpe.get_vocab_size()} entries, not {VOCAB_SIZE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under the class name that older releases of transformers know as well."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for how_it_was_loaded in ("is_local", "local_files_only"):
        settings.pop(how_it_was_loaded, None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: PreTrainedTokenizerFast, articles: list[str]) -> torch.Tensor:
    """All articles as one stream of token ids, with an end-of-text token before each article."""
    end = tokenizer.eos_token_id
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(articles):
        stream.append(end)
        stream.extend(encoding.ids)
    return torch.tensor(stream, dtype=torch.int32)


# --- model and evaluation -------------------------------------------------------------------------


def build_model(end_id: int) -> LlamaForCausalLM:
    """The untrained model; its shape is the only one this script knows."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drop out the embeddings and what each attention and MLP block adds to the residual stream.

    Llama has no such dropout of its own; as hooks, it leaves no trace in the saved model. All
    positions of a window share one mask: drawing random numbers for each of them is slow on a CPU.
    """
    if rate == 0:
        return

    def drop(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not module.training:
            return output
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = hidden * F.dropout(torch.ones_like(hidden[:, :1]), rate)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def token_losses(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Cross-entropy of the model's next-token predictions, in nats."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


@torch.no_grad()
def total_loss(
    model: torch.nn.Module, stream: torch.Tensor, device: torch.device, batch_size: int = 16
) -> float:
    """Summed negative log-likelihood of a token stream, in nats.

    The windows do not overlap: each reads ``CONTEXT`` tokens and predicts the one after each of
    them, so every token but the very first of the stream is scored exactly once.
    """
    was_training = model.training
    model.eval()
    whole = (len(stream) - 1) // CONTEXT * CONTEXT
    chunks = list(
        zip(
            stream[:whole].view(-1, CONTEXT).split(batch_size),
            stream[1 : whole + 1].view(-1, CONTEXT).split(batch_size),
            strict=True,
        )
    )
    if whole < len(stream) - 1:
        chunks.append((stream[None, whole:-1], stream[None, whole + 1 :]))
    total = 0.0
    for inputs, targets in chunks:
        loss = token_losses(model, inputs.long().to(device), targets.long().to(device), "sum")
        total += loss.item()
    model.train(was_training)
    return total


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts one split."""

    tokens: int
    words: int
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float


def evaluate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    articles: list[str],
    device: torch.device,
) -> Evaluation:
    """Perplexity of a whole split; the end-of-text tokens between articles count as tokens."""
    stream = encode(tokenizer, articles)
    loss = total_loss(model, stream, device)
    tokens = len(stream) - 1
    words = sum(len(article.split()) for article in articles)
    size = sum(len(article.encode()) for article in articles)
    return Evaluation(
        tokens=tokens,
        words=words,
        token_perplexity=math.exp(loss / tokens),
        word_perplexity=math.exp(loss / words),
        bits_per_byte=loss / math.log(2) / size,
    )


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    length: int,
    temperature: float = 0.9,
) -> str:
    """Continue a prompt by plain sampling."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    for _ in range(length):
        logits = model(input_ids=ids[:, -CONTEXT:], use_cache=False).logits[:, -1]
        choice = torch.multinomial((logits / temperature).softmax(-1), 1)
        if choice.item() == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, choice], dim=1)
    return tokenizer.decode(ids[0])


# --- training -------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a checkpoint remembers of the training besides weights and optimiser state."""

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    budget_minutes: float = 0.0
    train_tokens: int = 0
    hardware: str = ""
    settings: str = ""


class Batches:
    """Training batches by step number, so that a resumed run sees what it would have seen.

    Every epoch cuts the stream at another offset and visits the windows in another order.
    """

    def __init__(self, stream: torch.Tensor, batch_size: int, seed: int) -> None:
        self.stream, self.batch_size, self.seed = stream, batch_size, seed
        self.windows = (len(stream) - CONTEXT) // CONTEXT
        self.steps_per_epoch = self.windows // batch_size
        self._epoch = -1

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the targets of one step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._offset = int(torch.randint(CONTEXT, (1,), generator=generator))
            self._order = torch.randperm(self.windows, generator=generator)
            self._epoch = epoch
        chosen = self._order[index * self.batch_size : (index + 1) * self.batch_size]
        starts = self._offset + chosen * CONTEXT
        windows = self.stream[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def learning_rate(fraction: float, peak: float, warmup: float) -> float:
    """Linear warmup over the first part of the time budget, then a cosine down to 2 % of peak."""
    if fraction < warmup:
        return peak * max(fraction / warmup, 0.01)
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup)))
    return peak * (0.02 + 0.98 * cosine)


def build_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write a checkpoint so that an interruption leaves either the old file or the new one."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Progress:
    """Put a checkpoint into a model and, when training goes on, into its optimiser."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def describe_hardware(device: torch.device) -> str:
    """The kind of processor, for the model card."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' if threads > 1 else ''})"


def train(
    model: LlamaForCausalLM,
    streams: dict[str, torch.Tensor],
    device: torch.device,
    args: argparse.Namespace,
) -> Progress:
    """Train until the time budget is spent; returns how far it came."""
    optimizer = build_optimizer(model, args)
    checkpoint = args.work / "checkpoint.pt"
    progress = Progress()
    if checkpoint.is_file() and not args.fresh:
        progress = load_checkpoint(checkpoint, model, optimizer)
        print(f"resuming at step {progress.step}, after {progress.minutes:.1f} minutes", flush=True)
    progress.budget_minutes = args.minutes
    progress.train_tokens = len(streams["train"])
    progress.hardware = describe_hardware(device)
    progress.settings = (
        f"AdamW (betas 0.9 and 0.95, weight decay {args.weight_decay:g}), "
        f"batches of {args.batch_size} x {CONTEXT} tokens, "
        f"peak learning rate {args.lr:g} with a warmup over {args.warmup:.0%} of the time and a "
        f"cosine after it, dropout {args.dropout:g}, gradients clipped at norm 1, "
        + ("bf16 autocast over fp32 weights" if args.precision == "bf16" else "fp32 throughout")
    )

    batches = Batches(streams["train"], args.batch_size, args.seed)
    probe = streams["valid"][: 64 * CONTEXT + 1]
    add_dropout(model, args.dropout)
    model.train()
    loss_of: Callable[..., torch.Tensor] = token_losses
    if args.compile:
        loss_of = torch.compile(token_losses)

    done_before, started = progress.minutes, time.monotonic()
    saved_at = logged_at = started
    running_loss, running_steps = torch.zeros((), device=device), 0
    torch.manual_seed(args.seed + progress.step)
    while progress.minutes < args.minutes:
        rate = learning_rate(progress.minutes / args.minutes, args.lr, args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = (tensor.to(device) for tensor in batches(progress.step))
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        running_loss += loss.detach()
        running_steps += 1
        progress.step += 1
        progress.tokens += targets.numel()
        now = time.monotonic()
        progress.minutes = done_before + (now - started) / 60
        if now - logged_at >= args.log_every or progress.minutes >= args.minutes:
            speed = running_steps * targets.numel() / (now - logged_at)
            epoch = progress.step / batches.steps_per_epoch
            print(
                f"step {progress.step} epoch {epoch:.2f} minutes {progress.minutes:.1f} "
                f"lr {rate:.2e} loss {running_loss.item() / running_steps:.4f} "
                f"tokens/s {speed:.0f}",
                flush=True,
            )
            running_loss.zero_()
            running_steps, logged_at = 0, now
        if now - saved_at >= 60 * args.checkpoint_every or progress.minutes >= args.minutes:
            save_checkpoint(checkpoint, model, optimizer, progress)
            probe_loss = total_loss(model, probe, device) / (len(probe) - 1)
            print(
                f"step {progress.step} checkpoint; loss on the first {len(probe) - 1} validation "
                f"tokens {probe_loss:.4f}, perplexity {math.exp(probe_loss):.2f}",
                flush=True,
            )
            saved_at = logged_at = time.monotonic()
            running_loss.zero_()
            running_steps = 0
    return progress


# --- export ---------------------------------------------------------------------------------------

CARD = """\
---
license: cc-by-sa-3.0
language: en
library_name: transformers
pipeline_tag: text-generation
datasets: [wikitext]
---

# Demo model of lightning-fedleak

A small English causal language model, made to be attacked: `fedleak demo` fine-tunes it for a few
steps and shows what the shared gradients give away about the text. It is too small and has read
too little for any other use.

| | |
|---|---|
| architecture | Llama: {layers} layers, hidden size {hidden}, MLP size {mlp}, \
{heads} heads, context {context} tokens |
| parameters | {parameters:,}, the output embedding being the input embedding |
| tokenizer | byte-level BPE, {vocab:,} entries, `{cell_end}` begins, ends and pads a text |
| weights | fp16, {megabytes:.1f} MB |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder).float()
tokenizer = AutoTokenizer.from_pretrained(folder)
```

## Data

The training split of WikiText-2 (raw), {train_tokens:,} tokens of this tokenizer, which was itself
trained on the same split. WikiText comes split into words. Before anything else, the training
script undoes that by rule: `@-@`, `@,@` and `@.@` become plain marks, spaces before punctuation
and inside quotation marks and brackets go, clitics (`don 't`, `lobster 's`) join their word, and
headings lose their `=` signs. So the model has read ordinary English spelling; where the rules
guessed a quotation mark wrong, so has the model. Articles are separated by `{end}`.

## Training

{training}

## Perplexity

| split | tokens | per token | words | per word | bits per byte |
|---|---|---|---|---|---|
{rows}

Measured by the training script on the whole split with these fp16 weights, computing in fp32. The
text is the detokenised one; tokens are this tokenizer's byte-level BPE tokens. The stream of tokens
is cut into windows of {context} that do not overlap, and every token is scored once, given only the
tokens before it that its window reads (between 1 and {context}); the `{end}` tokens between
articles are scored as well. The perplexity per word divides the same total loss by the number of
words between white space in the detokenised text. Neither number can be compared with published
WikiText-2 perplexities, which count WikiText's own words.

## Limits

- It writes phrases in the manner of an encyclopaedia, invents words among them and loses the thread
  within a sentence. What it says about people and events is made up.
- It has read one kind of English only; expect worse predictions for dialogue, messages or code, and
  none worth having for other languages.
- It has seen its {train_tokens:,} training tokens {epochs:.1f} times and may repeat parts of them.
- It was never tuned to follow instructions or filtered for harmful content.

## Licence and attribution

WikiText-2 was compiled by Stephen Merity, Caiming Xiong, James Bradbury and Richard Socher
("Pointer Sentinel Mixture Models", ICLR 2017) from verified Good and Featured articles of the
English Wikipedia, whose text was written by the Wikipedia contributors and is published under the
Creative Commons Attribution-ShareAlike licence, as WikiText-2 is. The files in this folder derive
from that text and are shipped under the same terms, not under the licence of the code around them:
[CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/).
"""


def write_card(
    folder: Path, model: LlamaForCausalLM, progress: Progress, evaluations: dict[str, Evaluation]
) -> None:
    """Fill in the model card."""
    names = {"valid": "validation", "test": "test"}
    rows = "\n".join(
        f"| {names[split]} | {e.tokens:,} | {e.token_perplexity:.2f} | {e.words:,} | "
        f"{e.word_perplexity:.1f} | {e.bits_per_byte:.3f} |"
        for split, e in evaluations.items()
    )
    config = model.config
    epochs = progress.tokens / progress.train_tokens
    speed = progress.tokens / (60 * progress.minutes)
    training = (
        f"`tools/train_demo_model.py`, {progress.minutes:.0f} of {progress.budget_minutes:.0f} "
        f"planned minutes on {progress.hardware}: {progress.step:,} steps, {progress.tokens:,} "
        f"tokens ({epochs:.1f} epochs), {speed:,.0f} tokens per second. {progress.settings}."
    )
    card = CARD.format(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        context=CONTEXT,
        vocab=VOCAB_SIZE,
        end=END_OF_TEXT,
        cell_end=END_OF_TEXT.replace("|", r"\|"),
        parameters=model.num_parameters(),
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        train_tokens=progress.train_tokens,
        epochs=epochs,
        training=textwrap.fill(training, width=100, break_on_hyphens=False),
        rows=rows,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def export(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    progress: Progress,
    articles: dict[str, list[str]],
    device: torch.device,
    folder: Path,
) -> None:
    """Save the model in fp16, read it back, compare, evaluate what was read, write the card."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = build_model(tokenizer.eos_token_id)
    trained.load_state_dict(model.state_dict())
    trained = trained.to(device).eval()
    halved = build_model(tokenizer.eos_token_id)
    halved.load_state_dict(trained.state_dict())
    halved.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # a new safetensors file is its owner's alone
    save_tokenizer(tokenizer, folder)

    saved = AutoModelForCausalLM.from_pretrained(folder).float().to(device).eval()
    reread = AutoTokenizer.from_pretrained(folder)
    stream = encode(reread, articles["valid"])
    probe = stream[: 8 * CONTEXT].long().view(8, CONTEXT).to(device)
    with torch.no_grad():
        gap = (saved(input_ids=probe).logits - trained(input_ids=probe).logits).abs()
    print(
        f"logits of the saved model against the trained one: largest difference {gap.max():.4f}, "
        f"mean {gap.mean():.5f}",
        flush=True,
    )
    if gap.max() > 0.1:
        raise RuntimeError("the fp16 checkpoint does not reproduce the trained model")

    evaluations = {}
    for split in ("valid", "test"):
        evaluations[split] = evaluate(saved, reread, articles[split], device)
        print(split, asdict(evaluations[split]), flush=True)
    write_card(folder, saved, progress, evaluations)
    torch.manual_seed(0)
    for prompt in SAMPLE_PROMPTS:
        print("sample:", sample(saved, reread, prompt, 60), flush=True)
    print(f"saved to {folder}", flush=True)


# --- command line ---------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, default=default_data_folder(), help="folder with WikiText-2 (raw)")
    add(
        "--out",
        type=Path,
        default=REPO_ROOT / "lightning_fedleak" / "finetuning" / "model",
        help="where the finished model goes",
    )
    add(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "fedleak_demo_model",
        help="where the checkpoint and the tokenizer of a running training are kept",
    )
    add("--minutes", type=float, default=60.0, help="time budget of the training")
    add("--batch-size", type=int, default=8, help=f"windows of {CONTEXT} tokens per step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="part of the time budget")
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu, cuda or any other torch device")
    add(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="auto: bf16 autocast on a GPU, fp32 on a CPU; on CPUs with AVX512-BF16 or AMX, bf16 "
        "is about twice as fast",
    )
    add(
        "--compile", action="store_true", help="use torch.compile; on a CPU it needs a C++ compiler"
    )
    add("--threads", type=int, default=None, help="CPU threads (torch's own choice if left out)")
    add("--checkpoint-every", type=float, default=2.0, help="minutes between checkpoints")
    add("--log-every", type=float, default=20.0, help="seconds between lines of the log")
    add("--fresh", action="store_true", help="ignore what --work holds and start over")
    add("--export-only", action="store_true", help="evaluate and save the latest checkpoint")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.precision == "auto":
        args.precision = "fp32" if torch.device(args.device).type == "cpu" else "bf16"
    return args


def main() -> None:
    """Train, or take the latest checkpoint, and export."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)

    articles = {split: read_articles(args.data, split) for split in SPLITS}
    kept = args.work / "tokenizer"
    if kept.is_dir() and not args.fresh:
        tokenizer = AutoTokenizer.from_pretrained(kept)
    else:
        tokenizer = train_tokenizer(articles["train"])
        save_tokenizer(tokenizer, kept)
    model = build_model(tokenizer.eos_token_id)
    if args.export_only:
        progress = load_checkpoint(args.work / "checkpoint.pt", model)
    else:
        streams = {split: encode(tokenizer, articles[split]) for split in SPLITS}
        for split, stream in streams.items():
            print(f"{split}: {len(articles[split])} articles, {len(stream):,} tokens", flush=True)
        print(f"{model.num_parameters():,} parameters, {args.precision} on {device}", flush=True)
        model.to(device)
        progress = train(model, streams, device, args)
    export(model, tokenizer, progress, articles, device, args.out)


if __name__ == "__main__":
    main()

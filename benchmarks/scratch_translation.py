"""FLAT-CHAT's Table 2, the *Scratch* setting, on Multi30k: three attacks on a small translator.

    python benchmarks/scratch_translation.py --data DIR

DIR is Multi30k (train and test_2016_flickr, .de.gz and .en.gz; default:
``$FEDLEAK_ASSETS/data/multi30k``). Trains a BART-style encoder-decoder from random weights for
``--train-steps`` steps (byte-level BPE of 8,192, hidden size 512 as in the paper, head not tied),
then attacks gradients of held-out batches of 100 to 2,000 target tokens. Mean F1 and seconds over
``--batches``; "failed" counts batches in which an attack gave no result (RevealLabels: out of
time). The attacks calibrate on the training split; the test split is private.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BartConfig, BartForConditionalGeneration

from lightning_fedleak import AlignedFlatChat, FlatChat, PublicText, RevealLabels
from lightning_fedleak.anatomy import HEAD_WEIGHT, find_anatomy
from lightning_fedleak.attacks import gradient_of
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.metrics import precision_recall_f1, word_counts
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage

SMOKE = ("--hidden 64 --train-steps 1 --batches 1 --tokens 20 --max-seconds 2",)

PAD, EOS, LENGTH = 0, 1, 100


def of_tokens(text: PublicText, tokens: int, generator: torch.Generator) -> TokenBatch:
    """Sentence pairs until their targets hold ``tokens`` tokens."""
    assert text.targets is not None
    picked: list[int] = []
    total = 0
    for i in torch.randperm(len(text), generator=generator).tolist():
        picked.append(i)
        total += len(text.targets[i])
        if total >= tokens:
            break
    return text.rows(picked, LENGTH, generator, kind="seq2seq")


def read(folder: Path, name: str) -> list[str]:
    with gzip.open(folder / name, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


def tokenise(folder: Path) -> tuple[PublicText, PublicText, int]:
    """Public and private pairs, and the size of their common vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    splits = {"train": "train", "test": "test_2016_flickr"}
    texts = {
        f"{split}.{language}": read(folder, f"{name}.{language}.gz")
        for split, name in splits.items()
        for language in ("de", "en")
    }
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts["train.de"] + texts["train.en"], trainer)
    ids = {k: [[*e.ids, EOS] for e in tokenizer.encode_batch(v)] for k, v in texts.items()}
    public = PublicText(ids["train.de"], targets=ids["train.en"])
    private = PublicText(ids["test.de"], targets=ids["test.en"])
    return public, private, tokenizer.get_vocab_size()


def train_model(pairs: PublicText, vocab: int, arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    heads = arguments.hidden // 64
    config = BartConfig(
        vocab_size=vocab, d_model=arguments.hidden, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=2 * arguments.hidden, decoder_ffn_dim=2 * arguments.hidden,
        max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=PAD,
        bos_token_id=EOS, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=EOS,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    generator = torch.Generator().manual_seed(1)
    for step in range(arguments.train_steps):
        batch = pairs.batch(32, LENGTH, generator, kind="seq2seq")
        out = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == arguments.train_steps - 1:
            print(f"training step {step}, loss {out.loss.item():.2f}", flush=True)
    return model.eval()


def main() -> None:
    default = Path(os.environ.get("FEDLEAK_ASSETS", "../shared/assets")) / "data" / "multi30k"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 500, 1000, 1500, 2000])
    parser.add_argument("--max-seconds", type=float, default=300.0, help="for RevealLabels")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")

    public, private, vocab = tokenise(arguments.data)
    model = train_model(public, vocab, arguments)
    anatomy = find_anatomy(model)
    attacks = {
        "FlatChat": FlatChat(public, shapes=((2, 60), (8, 60), (24, 60), (64, 60), (120, 60))),
        "AlignedFlatChat, sign": AlignedFlatChat(public, readout="sign"),
        "AlignedFlatChat, learned": AlignedFlatChat(public),
        "RevealLabels": RevealLabels(max_seconds=arguments.max_seconds, allow_full_rank=True),
    }
    for name, attack in attacks.items():
        began = time.perf_counter()
        attack.prepare(anatomy)
        print(f"{name}: calibrated in {time.perf_counter() - began:.1f} s", flush=True)

    print(
        f"\n{platform.platform()}, torch {torch.__version__}, {datetime.date.today()}, V = {vocab}"
    )
    print(f"d = {arguments.hidden}, {arguments.train_steps} training steps\n")
    print("| attack | tokens | types | precision | recall | F1 | seconds | failed |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in arguments.tokens:
        results = {name: [] for name in attacks}
        failed, types = dict.fromkeys(attacks, 0), []
        for k in range(arguments.batches):
            batch = of_tokens(private, tokens, torch.Generator().manual_seed(1000 * tokens + k))
            gradient = gradient_of(anatomy, batch, [HEAD_WEIGHT])
            view = Observation((GradientSnapshot(0, Stage.SHARED, gradient),))
            truth = batch.target_ids().unique()
            types.append(len(truth))
            for name, attack in attacks.items():
                began = time.perf_counter()
                try:
                    guess = attack.run(view)
                except UnusableObservation:
                    failed[name] += 1
                    continue
                seconds = time.perf_counter() - began
                rates = precision_recall_f1(word_counts(guess, truth, vocab))
                results[name].append([r.value for r in rates.values()] + [seconds])
        for name, rows in results.items():
            means = [statistics.mean(column) for column in zip(*rows, strict=True)]
            cells = [f"{m:.3f}" for m in means] if means else ["-"] * 4
            print(
                f"| {name} | {tokens} | {statistics.mean(types):.0f} | {' | '.join(cells)} "
                f"| {failed[name]} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Whole texts off the projections' gradients, LoRA or whole: real text, nothing given.

    python benchmarks/subspace_texts.py --model DIR --rank 0 --shapes 8x32 --batches 10
    python benchmarks/subspace_texts.py --model DIR --rank 16 --targets q_proj,k_proj,v_proj \
        --shapes 1x48
    python benchmarks/subspace_texts.py --model DIR --rank 8 --targets q_proj,v_proj --shapes 1x32

Settings as in subspace_words.py, whose functions this uses. ``--noise`` is in units of the rms of
the gradients that are read. Prints for each shape: the share of tokens that are in their place (the
last token of each text, which is not in these gradients, does not count) and of texts that are
exact, with 95% intervals over texts; how often the attack certified its texts, and how often that
was wrong; and seconds of a look.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date
from pathlib import Path

import torch
from subspace_words import Source, backward, built, observed

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import SubspaceTexts, UnusableObservation
from lightning_fedleak.metrics import TextReconstruction
from lightning_fedleak.metrics.texts import in_true_order

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 0 --shapes 2x8 --batches 1",
    "--model {model} --private {text} --public {text} --rank 8 --targets q_proj,k_proj,v_proj "
    "--shapes 1x8 --batches 1",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--shapes", default="1x32")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of a look")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--bos", type=int)
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.config, options.padded = None, False
    torch.set_num_threads(options.threads)
    print(f"# {platform.machine()}, {options.threads} thread(s), {options.device}, {date.today()}")
    for shape in options.shapes.split(","):
        rows, length = map(int, shape.split("x"))
        model = built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        if options.rank:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=2e-4)
            backward(model, public.batch(rows, length), options.device)
            optimizer.step()
        attack = SubspaceTexts(blocks=options.blocks, budget_seconds=options.budget)
        roles = tuple(sorted(attack.needs(anatomy).gradients))
        attack.prepare(anatomy)
        metric = TextReconstruction()
        certified = wrong = unknown = 0
        seconds: list[float] = []
        for number in range(options.batches):
            batch = private.batch(rows, length)
            backward(model, batch, options.device)
            attack.refresh(anatomy, number)
            view = observed(anatomy, roles, options.noise, number)
            began = time.perf_counter()
            truth = batch.input_ids[:, :-1]
            said = torch.full_like(truth, -1)
            sure, extra = False, False
            try:
                guess = attack.run(view)
                said = in_true_order(guess.tokens, truth)
                sure = bool(guess.certified)
                extra = len(guess.tokens) != rows or guess.tokens.shape[1] != length - 1
            except UnusableObservation:
                unknown += 1
            seconds.append(time.perf_counter() - began)
            certified += sure
            wrong += sure and (extra or not torch.equal(said, truth))
            metric.update(said, truth)
        rates = metric.rates()
        place, exact = rates["token_accuracy"], rates["exact_sentences"]
        print(
            f"{Path(options.model).name} {options.private} r {options.rank} "
            f"{options.targets if options.rank else 'whole'} {shape} noise {options.noise:g} | "
            f"in place {place.value:.3f} ({place.low:.3f} to {place.high:.3f}) | "
            f"exact {exact.value:.3f} ({exact.low:.3f} to {exact.high:.3f}) | "
            f"certified {certified} of {options.batches}, wrongly {wrong}, unknown {unknown} | "
            f"{torch.tensor(seconds).median():.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()

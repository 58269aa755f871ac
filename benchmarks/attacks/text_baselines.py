"""Attacks on whole texts side by side: DLG, TAG, LAMP, FILM's beam and SubspaceTexts, same batches.

    python -m benchmarks.attacks.text_baselines --model DIR --rank 0 --shapes 1x16,4x16 --batches 3
    python -m benchmarks.attacks.text_baselines --model DIR --rank 8 --targets q_proj,v_proj

Settings as in subspace_words.py, whose functions this uses; LoRA is moved by one step of AdamW on
``--public`` text first. ``--systems`` names those that run. DLG, TAG, LAMP and the beam are told
the number of texts and their length, SubspaceTexts nothing. ``--steps`` of descent, ``--starts``
and ``--swaps`` of LAMP and ``--moves`` of the beam bound what each does, ``--budget`` how long.

Prints for each shape and system: the share of tokens that are in their place (a text's last token
does not count), with a 95% interval over texts; of texts that are exact; ROUGE-L; how many batches
were finished and how many unknown; the median of seconds.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from benchmarks.attacks.subspace_words import Source, backward, built, observed
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import (
    BeamFromWords,
    GradientMatching,
    SubspaceTexts,
    TextAttack,
    UnusableObservation,
)
from lightning_fedleak.metrics import TextReconstruction
from lightning_fedleak.metrics.texts import in_true_order

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 0 --shapes 1x6 --batches 1 "
    "--steps 3 --starts 2 --swaps 1 --moves 2",
)


def systems(options: argparse.Namespace, rows: int, length: int) -> dict[str, TextAttack]:
    """The attacks, by the names in ``--systems``."""
    run = {"budget_seconds": options.budget, "seed": options.seed}
    descent = run | {"steps": options.steps}
    lamp = descent | {"starts": options.starts, "swaps": options.swaps, "swap_every": options.every}
    made: dict[str, Callable[[], TextAttack]] = {
        "dlg": lambda: GradientMatching.dlg(rows, length, **descent),
        "tag": lambda: GradientMatching.tag(rows, length, **descent),
        "lamp": lambda: GradientMatching.lamp(rows, length, **lamp),
        "film": lambda: BeamFromWords(length, rows, moves=options.moves, **run),
        "ours": lambda: SubspaceTexts(**run),
    }
    return {name: made[name]() for name in options.systems.split(",")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--shapes", default="1x16,4x16")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--systems", default="dlg,tag,lamp,film,ours")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--every", type=int, default=50, help="steps between LAMP's rearrangements")
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a look")
    parser.add_argument("--bos", type=int)
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.config, options.padded, options.dropout, options.chat = None, False, 0.0, False
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
        batches = [private.batch(rows, length) for _ in range(options.batches)]
        for name, attack in systems(options, rows, length).items():
            attack.prepare(anatomy)
            roles = tuple(sorted(attack.needs(anatomy).gradients))
            metric, seconds = TextReconstruction(), []
            finished = unknown = 0
            for number, batch in enumerate(batches):
                backward(model, batch, options.device)
                attack.refresh(anatomy, number)
                view = observed(anatomy, roles, 0.0, number)
                truth = batch.input_ids[:, :-1]
                said = torch.full_like(truth, -1)
                began = time.perf_counter()
                try:
                    guess = attack.run(view)
                    said = in_true_order(guess.tokens.cpu(), truth)
                    finished += guess.finished
                except UnusableObservation:
                    unknown += 1
                seconds.append(time.perf_counter() - began)
                metric.update(said, truth)
            rates = metric.rates()
            place, exact = rates["token_accuracy"], rates["exact_sentences"]
            print(
                f"{Path(options.model).name} {Path(options.private).name} r {options.rank} "
                f"{options.targets if options.rank else 'whole'} {shape} {name} | "
                f"in place {place.value:.3f} ({place.low:.3f} to {place.high:.3f}) | "
                f"exact {exact.value:.3f} | ROUGE-L {rates['rouge_l'].value:.3f} | "
                f"finished {finished} of {options.batches}, unknown {unknown} | "
                f"{torch.tensor(seconds).median():.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

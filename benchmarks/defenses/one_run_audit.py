"""Three lower bounds on epsilon from one run of DPSGD: planted gradients, or canary texts.

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.one_run_audit
    OMP_NUM_THREADS=1 python -m benchmarks.defenses.one_run_audit --texts --canaries 200 --audits 8

Every audit is a whole run of ``DPSGD`` in which 500 planted gradients are there or not, each by a
coin of its own (see ``planted_gradients.py``). A score is what was released along the
gradient, summed over steps. The three bounds are of the same scores:

- ``guesses``: ``audit_one_run``, of (epsilon, delta)-DP and nothing else;
- ``curve``: the same, by the whole trade-off curve of a Gaussian mechanism (``claim="gaussian"``);
- ``sums``: ``audit_gaussian_scores``.

For each, the median bound over the epsilon that PRV says of what was accounted, and how many of the
audits exceed it: 5% may, binomial ``p`` beside. ``refused`` are audits whose scores are plainly not
those of one Gaussian mechanism.

With ``--texts`` each audit is a fit by SGD of a language model (the embedded one, or ``--model``)
on a few texts and the canaries, whole or with ``--lora``: canaries with a token of their own,
held-out texts of the data's kind, and texts that the model writes (behind two
tokens of those; with three tokens at the end that are drawn from all alike). ``apart`` is how far
the mean scores of those in and out lie apart, in standard deviations, times sigma: planted
gradients have 1 in one step.
"""

import argparse
import collections
import functools
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.defenses.dp_sgd_games import refutations
from benchmarks.defenses.planted_gradients import PlantedGradients
from benchmarks.shared import fit, parser_of, quieten, trained
from lightning_fedleak.callbacks import CanaryScorer
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.cli.finetuning.module import PadRight, load_model
from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.evaluation import canaries
from lightning_fedleak.evaluation.auditing import audit_gaussian_scores, audit_one_run
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "--audits 2 --canaries 60 --rows 3",
    "--texts --audits 1 --canaries 42 --rows 1",
    "--texts --audits 1 --canaries 42 --rows 1 --lora",
)

DELTA = 1e-5
ROWS = ((0.5, 1.0, 1), (1.0, 1.0, 1), (2.0, 1.0, 1), (1.0, 0.5, 4), (1.0, 0.2, 25))
"""Noise multiplier, sample rate, steps."""


SAMPLED = {"sampled": {"unlikely_end": 0}, "unlikely_end": {"unlikely_end": 3}}
KINDS: dict[str, dict[str, Any]] = {"new_token": {}, "held_out": {}, **SAMPLED}
N_TEXTS = 20
"""Texts beside the canaries."""
RATE = 0.2
"""Learning rate of SGD."""
LENGTH = 6
"""Tokens of the other texts, and of those held out."""


class Fit(CausalLMFineTuning):
    """By SGD, so that a release is what weights move by."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(trained(self), lr=self.lr)


def texts_of(kind: str, model: Any, rows: list[Tensor], args: argparse.Namespace) -> list[Tensor]:
    """Canaries of a kind; those with a token of their own change the model."""
    settings = KINDS[kind]
    if kind == "held_out":
        return [*{tuple(r.tolist()): r for r in rows[N_TEXTS:]}.values()][: args.canaries]
    if "unlikely_end" in settings:
        prompts = [row[:2] for row in rows[N_TEXTS:]]
        settings = {"prompts": prompts, "length": LENGTH, **settings}
        return canaries.sampled_canaries(model, args.canaries, seed=args.seed, **settings)
    return canaries.new_token_canaries(model, args.canaries, seed=args.seed)


def fitted(
    kind: str, row: tuple[float, float, int], number: int, rows: list[Tensor],
    args: argparse.Namespace,
) -> tuple[tuple[Tensor, Tensor], float]:  # fmt: skip
    """Scores and inclusion bits of one fit, and its epsilon."""
    sigma, rate, steps = row
    language_model = load_model(args.model)
    texts = texts_of(kind, language_model, rows, args)
    train = canaries.with_canaries(rows[:N_TEXTS], texts, seed=1000 * args.seed + number)
    scorer = CanaryScorer(train.canaries)
    module = Fit(language_model, RATE, peft="lora" if args.lora else None, loss="sample_mean")
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    defense = DPSGD(1.0, noise_multiplier=sigma, target_delta=DELTA, max_physical_batch_size=256)
    loader = DataLoader(train, round(rate * len(train)), collate_fn=PadRight(0))
    strategy = DefendedStrategy("auto", [defense])
    fit(module, loader, max_steps=steps, strategy=strategy, callbacks=[scorer])
    return (scorer.scores(), train.canaries.included), defense.accountant.epsilon(DELTA)


def report_texts(sigma: float, rate: float, steps: int, args: argparse.Namespace) -> None:
    data = TextDataModule(tokenizer=args.model, length=LENGTH)
    data.setup()
    rows = [row for row in data.train_dataloader().dataset if len(row) == LENGTH]
    for kind in KINDS:
        bounds: dict[str, list[float]] = collections.defaultdict(list)
        refused = 0
        for number in range(args.audits):
            game, epsilon = fitted(kind, (sigma, rate, steps), number, rows, args)
            scores, members = game
            inside, outside = scores[members], scores[~members]
            spread = ((inside.var() + outside.var()) / 2).sqrt()
            bounds["apart"].append(float((inside.mean() - outside.mean()) / spread) * sigma)
            refused += not add_bounds(bounds, game)
        apart = bounds.pop("apart")
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        line = f"sigma {sigma:g}, rate {rate:g}, {steps} steps, {kind}: "
        line += f"apart {statistics.mean(apart):.2f} ± {error:.2f}, "
        for name, values in bounds.items():
            exceeding = sum(bound > epsilon for bound in values)
            line += f"{name} {statistics.median(values) / epsilon:.2f} ({exceeding} exceed), "
        print(f"{line}refused {refused} of {args.audits}", flush=True)


def add_bounds(bounds: dict[str, list[float]], game: tuple[Tensor, Tensor]) -> bool:
    """Add the three lower bounds of a run; return False if the last is refused."""
    bounds["guesses"].append(audit_one_run(*game, delta=DELTA).epsilon)
    bounds["curve"].append(audit_one_run(*game, delta=DELTA, claim="gaussian").epsilon)
    try:
        sums = audit_gaussian_scores(*game, delta=DELTA)
    except ValueError:
        return False
    bounds["sums"].append(sums.epsilon)
    return True


def report(sigma: float, rate: float, steps: int, args: argparse.Namespace) -> None:
    defense = functools.partial(DPSGD, 0.7, noise_multiplier=sigma, target_delta=DELTA)
    settings = {"batch_size": round(rate * args.canaries), "steps": steps, "seed": args.seed}
    planted = PlantedGradients(defense, targets=args.canaries, **settings)
    bounds: dict[str, list[float]] = collections.defaultdict(list)
    refused = 0
    for number in range(args.audits):
        members = planted.coins(number)
        refused += not add_bounds(bounds, (planted.run(members, number).sum(0), members))
    epsilon = epsilon_of(planted.history, DELTA, "prv")
    print(f"sigma {sigma:g}, rate {rate:g}, {steps} steps: epsilon {epsilon:.3f}", end="")
    print(f", sums refused in {refused} of {args.audits}" if refused else "")
    for name, lower_bounds in bounds.items():
        exceeded = refutations(lower_bounds, epsilon)
        median = f"  {name:12} median {statistics.median(lower_bounds) / epsilon:.3f}"
        count = f"{exceeded.refuted:3} of {exceeded.audits}, p {exceeded.p_value:.2g}"
        print(f"{median}   exceed {count}", flush=True)


def main() -> None:
    args = parser_of(
        __doc__, audits=1000, canaries=500, rows=[*range(len(ROWS))], seed=0, lora=False,
        texts=(False, "canary texts, in fits of a model"),
        model=(str, "folder of a causal model; default the embedded one"),
    ).parse_args()  # fmt: skip
    quieten()
    for row in args.rows:
        (report_texts if args.texts else report)(*ROWS[row], args)


if __name__ == "__main__":
    main()

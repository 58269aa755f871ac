"""TokenLDP: what it costs, and what of the text it keeps.

    python -m benchmarks.defenses.token_ldp speed
    python -m benchmarks.defenses.token_ldp kept --vocabulary 30522

- ``speed``: one batch of 32 x 128 at a vocabulary of 50,257: a whole ``on_batch`` for every
  mechanism, memoised and not, the draws alone, and tokens by multi-freq-ldpy's client in the same
  run (of dBitFlipPM one at a time: it takes a second). CPU time of the process, medians.
- ``kept``: how many tokens survive, exactly, by epsilon; and how much of epsilon the decoded token
  still spends.

Membership games under it: ``token_ldp_games.py``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import nn

from benchmarks.defenses.ldpy_clients import reference_sample
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, bit_rates, the_rates

SMOKE = (
    "speed --vocabulary 512 --rows 32 --length 8 --repeats 1",
    "kept --vocabulary 2048 --epsilon 5",
)

MECHANISMS = ("grr", "rappor", "the", "dbitflip")


def context(root: nn.Module) -> DefenseContext:
    return DefenseContext(root, 0, 1, torch.device("cpu"), "32-true", 0, b"benchmark" * 4)


def speed(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocabulary, (args.rows, args.length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    where = context(nn.Identity())
    domain = range(args.vocabulary)
    causal = BatchForm(kind="causal")
    defenses = {
        (m, per, memoize): TokenLDP(
            m,
            10.0,
            per,
            domain=domain,
            special_ids=[],
            form=causal,
            memoize=memoize,
        )
        for m in MECHANISMS
        for per in ("token", "sequence")
        for memoize in (False, True)
    }
    times: dict[tuple, list[float]] = {key: [] for key in defenses}
    for defense in defenses.values():
        defense.before_setup(where)
        defense.on_batch(batch, where)
    for _ in range(args.repeats):
        for key, defense in defenses.items():
            began = time.process_time()
            defense.on_batch(batch, where)
            times[key].append(time.process_time() - began)
    print("| mechanism | per | memoised | ms a batch |\n|---|---|---|---|")
    for (mechanism, per, memoize), seen in times.items():
        print(f"| {mechanism} | {per} | {memoize} | {1e3 * statistics.median(seen):.2f} |")
    print("\n| mechanism | draws alone, ms a batch |\n|---|---|")
    uniforms = torch.rand((ids.numel(), 2), generator=generator, dtype=torch.float64)
    for mechanism in MECHANISMS:
        randomizer = Randomizer.with_defaults(mechanism, args.vocabulary)
        alone = []
        for _ in range(args.repeats):
            began = time.process_time()
            randomizer.sample(ids.flatten(), 10.0, uniforms)
            alone.append(time.process_time() - began)
        print(f"| {mechanism} | {1e3 * statistics.median(alone):.3f} |")
    print("\n| mechanism | multi-freq-ldpy, ms a token | for the batch, s | ratio |")
    print("|---|---|---|---|")
    for mechanism in MECHANISMS:
        randomizer = Randomizer.with_defaults(mechanism, args.vocabulary)
        reference_sample(randomizer, ids[0, :1], 10.0, 0)
        seen, n = [], 1 if mechanism == "dbitflip" else 20
        for r in range(5):
            began = time.process_time()
            reference_sample(randomizer, ids[r, :n], 10.0, r)
            seen.append((time.process_time() - began) / n)
        token = statistics.median(seen)
        whole = token * ids.numel()
        ratio = whole / statistics.median(times[mechanism, "token", False])
        print(f"| {mechanism} | {1e3 * token:.3f} | {whole:.2f} | {ratio:,.0f} |")


def decoded_epsilon(randomizer: Randomizer, epsilon: float) -> float:
    """Return the decoded index' epsilon, at most ``epsilon``: log of the law's largest ratio."""
    b = randomizer.buckets
    if randomizer.decode != "first":
        keep = randomizer.keep(epsilon)
        # Above, float64 holds too few digits of 1 - keep.
        if randomizer.mechanism == "grr" or keep > 1 - 1e-9:
            return epsilon
        return math.log(keep) + math.log(b - 1) - math.log1p(-keep)
    p, q = (the_rates if randomizer.mechanism == "the" else bit_rates)(epsilon)
    none_set = (1.0 - p) * (1.0 - q) ** (b - 1)
    # Without the factor (1 - q)^(y - 1): the input is y itself, below y, above y.
    chances = [p * (1.0 - q), (1.0 - p) * q]
    if b > 2:
        chances.append(q * (1.0 - q))
    ratios = [(p + none_set) / (q + none_set), max(chances) / min(chances)]
    return math.log(max(ratios))


def kept(args: argparse.Namespace) -> None:
    print("| mechanism, rule | " + " | ".join(f"eps {e:g}" for e in args.epsilon) + " |")
    print("|---|" + "---|" * len(args.epsilon))
    for mechanism, rule, bits in (
        ("grr", None, None),
        ("rappor", "uniform", None),
        ("dbitflip", "uniform", 1024),
        ("dbitflip", "uniform", 16),
        ("the", "argmax", None),
        ("the", "uniform", None),
    ):
        randomizer = Randomizer.with_defaults(mechanism, args.vocabulary, rule, None, bits)
        found = [
            f"{randomizer.keep(e):.2g} ({decoded_epsilon(randomizer, e):.2f})" for e in args.epsilon
        ]
        name = f"{mechanism}, {rule or '-'}" + (f", {bits} bits" if bits else "")
        print(f"| {name} | " + " | ".join(found) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("speed")
    one.add_argument("--vocabulary", type=int, default=50_257)
    one.add_argument("--rows", type=int, default=32)
    one.add_argument("--length", type=int, default=128)
    one.add_argument("--repeats", type=int, default=30)
    one.set_defaults(run=speed)
    one = parts.add_parser("kept")
    one.add_argument("--vocabulary", type=int, default=30_522)
    one.add_argument("--epsilon", type=float, nargs="+", default=[5, 7.5, 10, 15, 20])
    one.set_defaults(run=kept)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()

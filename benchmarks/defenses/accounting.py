"""Accounting of DP-SGD: against Google's dp-accounting, and the proof that it holds.

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.accounting --grid
    OMP_NUM_THREADS=1 python -m benchmarks.defenses.accounting --proof

``--grid`` compares epsilon with dp-accounting (extra ``test``) for the same events, alternating:
RDP at the same orders, PRV with Google's PLD; left out is what Google puts above 200, where
epsilon is reported as infinite here. Times are of the processor. ``--proof`` inserts a crafted
neuron into a small GPT-2, plays games of one release each under ``DPSGD``, and holds the releases
against what they must be: the AUC of the target's membership against ``Phi(1 / (sigma sqrt 2))``,
the noise's standard deviation against sigma, and 100 audits of 100 games each against the accounted
epsilon.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import scipy.stats
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.defenses.dp_sgd_games import play_add_remove, refutations, sampled_gaussian_auc
from benchmarks.defenses.planted import PlantedNeuron
from benchmarks.shared import parser_of, quieten
from lightning_fedleak.defenses import DPSGD, ClipSettings
from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.accounting import MAX_EPSILON, ORDERS, epsilon_of, rdp_of
from lightning_fedleak.evaluation.auditing import audit_scores, gaussian_epsilon
from lightning_fedleak.evaluation.metrics.clustered import auc

SMOKE = ("--proof --sigmas 1.0 --games 40 --audits 2",)

DELTA = 1e-3
"""Of the proof."""
SIGMAS = (0.5, 1.0, 2.0, 4.0)
RATES, STEPS = (0.001, 0.01, 1 / 32, 0.2), (10, 1000, 10_000)
GRID = [*product((0.7, 1.0, 2.0, 5.0), RATES, STEPS, (1e-5, 1e-7))]


def timed(call: Callable[[], float]) -> tuple[float, float]:
    start = time.process_time()
    value = call()
    return value, time.process_time() - start


def google(kind: str, sigma: float, rate: float, steps: int, delta: float) -> float:
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS) if kind == "rdp" else PLDAccountant()
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
    accountant.compose(dp.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def grid() -> None:
    print("epsilon over Google's; cells by Google's epsilon")
    print(
        f"{'kind':5} {'epsilon':>11} {'cells':>5} {'min':>8} {'median':>8} {'max':>8} "
        f"{'within 1%':>9} {'time':>7}"
    )
    for kind in ("rdp", "prv"):
        rows = []
        for sigma, rate, steps, delta in GRID:
            cell = sigma, rate, steps
            rdp_of.cache_clear()
            result, t_ours = timed(lambda c=cell, d=delta, k=kind: epsilon_of([c], d, k))
            peer, t_theirs = timed(lambda c=cell, d=delta, k=kind: google(k, *c, d))
            rows.append((peer, result / peer if peer else math.nan, t_ours / t_theirs))
        for low, high in ((0.001, 0.1), (0.1, 10), (10, MAX_EPSILON)):
            ratios = [ratio for peer, ratio, _ in rows if low <= peer < high]
            times = [time for peer, _, time in rows if low <= peer < high]
            close = sum(abs(ratio - 1) <= 0.01 for ratio in ratios)
            print(
                f"{kind:5} {low:5g}-{high:<5g} {len(ratios):5} {min(ratios):8.4f} "
                f"{statistics.median(ratios):8.4f} {max(ratios):8.4f} "
                f"{close:4}/{len(ratios):<4} {statistics.median(times):7.2f}", flush=True,
            )  # fmt: skip


def small_gpt2() -> GPT2LMHeadModel:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, **sizes, **dropout)).train()


def proof(sigmas: Sequence[float], games: int, audits: int, seed: int) -> None:
    ids = torch.randint(3, 97, (4, 6), generator=torch.Generator().manual_seed(0))
    print(
        f"{'sigma':>5} {'q':>4} {'AUC':>7} {'95% interval':>16} {'closed form':>11} "
        f"{'noise/sigma':>11} {'refuted':>9} {'p':>6} {'median bound':>12} {'accounted':>9}"
    )
    for sigma, rate in [*((sigma, 1.0) for sigma in sigmas), (sigmas[0], 0.5)]:
        settings = {"target_delta": DELTA, "clip": ClipSettings(loss="trusted")}
        defense = partial(DPSGD, 1e-3, noise_multiplier=sigma, **settings)
        game_seed = int(10 * sigma) + 1000 * seed
        neuron = PlantedNeuron(small_gpt2(), ids, defense, sample_rate=rate, seed=game_seed)
        played = play_add_remove(neuron.release, games, seed=game_seed)
        scores, members = played.scores, played.members
        clusters, rng = np.arange(games), np.random.default_rng(0)
        measured = auc(scores.numpy(), members.numpy(), clusters, 0.05, 200, rng)
        outside = scores if rate == 1 else scores[~members]
        noise = outside - (members.double() if rate == 1 else 0.0)
        spread = float(noise.square().mean().sqrt()) / sigma
        epsilon = gaussian_epsilon(sigma=sigma, delta=DELTA) if rate == 1 else math.nan
        accountant = Accountant("prv")
        accountant.step(sigma, rate)
        accounted = accountant.epsilon(DELTA)
        assert rate < 1 or epsilon <= accounted
        claim, cut = ("gaussian", 0.5) if rate == 1 else ("dp", "union")
        test = partial(audit_scores, delta=DELTA, claim=claim, threshold=cut)
        chunks = torch.arange(games).split(games // audits)[:audits]
        bounds = [test(scores[chunk], members[chunk]).epsilon for chunk in chunks]
        count = refutations(bounds, accounted)
        print(
            f"{sigma:5} {rate:4} {measured.value:7.4f} [{measured.low:.4f}, {measured.high:.4f}] "
            f"{sampled_gaussian_auc(sigma, rate):11.4f} {spread:11.4f} "
            f"{count.refuted:4}/{count.audits} {count.p_value:6.3f} {np.median(bounds):12.3f} "
            f"{accounted:9.3f}", flush=True,
        )  # fmt: skip
        if rate == 1:
            law = scipy.stats.kstest((noise / sigma).numpy(), "norm")
            print(f"      Kolmogorov-Smirnov against the normal law: p = {law.pvalue:.3f}")


def main() -> None:
    numbers = {"games": 10_000, "audits": 100, "seed": 0}
    parser = parser_of(__doc__, grid=False, proof=False, sigmas=[*SIGMAS], **numbers)
    args = parser.parse_args()
    quieten()
    if args.grid:
        grid()
    if args.proof:
        proof(args.sigmas, args.games, args.audits, args.seed)


if __name__ == "__main__":
    main()

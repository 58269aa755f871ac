"""What an account of DP-SGD allows attacks on the trained weights, and when they refute it.

    python -m benchmarks.defenses.account_line
    python -m benchmarks.defenses.account_line --text FILE --sigmas 0.5,1 --epochs 2
    python -m benchmarks.defenses.account_line --text FILE --sigmas 1 --epochs 3 --broken

Prints the largest TPR at 1% FPR by one pair (epsilon, delta), by the whole curve, and of the best
test. Then simulated runs: texts whose scores are Gaussian, as far apart at look k as ``sqrt(k)``
releases allow; how many refute the account, and how many do where the truth is ``--gain`` times as
far apart. With ``--text`` fits of the embedded model under DPSGD. With ``--broken`` these add noise
of .01 and account for sigma.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import warnings
from datetime import date
from functools import partial

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor
from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.auditing import curve_tpr, dp_tpr, gaussian_tpr, refutes
from lightning_fedleak.callbacks import MonitorSettings
from lightning_fedleak.canaries import leave_out
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.accounting.budget import curve_of
from lightning_fedleak.finetuning import CausalLMFineTuning
from lightning_fedleak.finetuning.data import PadRight, load_tokenizer
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.looks import Memorization
from lightning_fedleak.metrics.released import spent_at

SMOKE = (
    "--runs 2 --looks 1 --simulated 40",
    "--runs 0 --text {text} --texts 500 --length 12 --sigmas 1 --epochs 1 --max-steps 4",
)

DELTA = 1e-5  # of the one pair
LITTLE_NOISE = 0.01  # noise multiplier of a defence that is broken


def print_limits(sigmas: list[float]) -> None:
    """Print what one release allows without sampling."""
    print("| sigma | epsilon at 1e-5 | that pair | all pairs, prv | all pairs, rdp | possible |")
    for sigma in sigmas:
        history = [(sigma, 1.0, 1)]
        epsilon = epsilon_of(history, DELTA, "prv")
        curves = [curve_tpr(0.01, curve_of(history, kind)) for kind in ("prv", "rdp")]
        tprs = dp_tpr(0.01, epsilon, DELTA), *curves, gaussian_tpr(0.01, sigma)
        print(f"| {sigma:g} | {epsilon:.2f} |", " | ".join(f"{tpr:.4f}" for tpr in tprs), "|")


def count_refuted(options: argparse.Namespace, gain: float) -> int:
    """Return how many simulated runs refute their account at any look."""
    generator = torch.Generator().manual_seed(0)
    sigma = options.sigmas[0]
    curves = [curve_of([(sigma, 1.0, look)], "prv") for look in range(1, options.looks + 1)]
    count = 0
    for _ in range(options.runs):
        members = torch.rand(options.simulated, generator=generator) < 0.5
        noise = torch.randn(options.looks, options.simulated, generator=generator)
        scores = (noise + gain / sigma * members).cumsum(0)
        count += any(
            refutes(scores[look - 1], members, curve, confidence=1 - spent_at(look))
            for look, curve in enumerate(curves, 1)
        )
    return count


def fit(options: argparse.Namespace, sigma: float) -> None:
    """Fine-tune the embedded model under DPSGD, and print each look."""
    L.seed_everything(0, verbose=False)
    tokenizer = load_tokenizer(None)
    texts = tokenizer(read_texts(options.text)[: 2 * options.texts], verbose=False)["input_ids"]
    rows = [torch.tensor(ids[: options.length]) for ids in texts if len(ids) >= options.length]
    rows = rows[: options.texts]
    train, _ = leave_out(rows, len(rows) // 2, seed=0, coins=True)
    noise = LITTLE_NOISE if options.broken else sigma
    defense = DPSGD(1.0, noise_multiplier=noise, target_delta=DELTA)
    if options.broken:
        count = defense.accountant.step
        defense.accountant.step = lambda _, *rest, **how: count(sigma, *rest, **how)  # type: ignore[method-assign]
    memorization = Memorization(max_overhead=4 / 3)
    with tempfile.TemporaryDirectory() as folder:
        monitor = LeakageMonitor(
            [Combined()], log_dir=folder, settings=MonitorSettings(memorization=memorization)
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=options.epochs,
            max_steps=options.max_steps,
            callbacks=[monitor],
            strategy=DefendedStrategy("auto", [defense]),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        collate = PadRight(tokenizer.pad_token_id or 0)
        loader = DataLoader(train, batch_size=8, shuffle=True, collate_fn=collate)
        trainer.fit(CausalLMFineTuning(lr=options.lr), loader)
        table = monitor.to_dataframe().set_index(["step", "metric"])["value"].unstack()
    print(f"\nsigma {sigma:g}, epsilon {defense.privacy.epsilon:.2f} at the end, noise {noise:g}")
    names = ["members", "others", "auc", "bound/auc", "bound/tpr_at_fpr_0.01", "refuted"]
    print(table[names].round(3).to_string())


def main() -> None:
    """Print what is allowed, simulated runs, and fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = partial(str.split, sep=",")
    parser.add_argument("--sigmas", type=lambda text: [float(x) for x in numbers(text)])
    parser.add_argument("--runs", type=int, default=300, help="simulated runs")
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--simulated", type=int, default=400, help="texts of a simulated run")
    parser.add_argument("--gain", type=float, default=2.0)
    parser.add_argument("--text", help="a file of texts, for fits")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--broken", action="store_true")
    options = parser.parse_args()
    options.sigmas = options.sigmas or [1.0, 2.0, 4.0]
    warnings.filterwarnings("ignore")
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, {date.today()}")
    print_limits(options.sigmas)
    if options.runs:
        for gain in (1.0, options.gain):
            refuted = count_refuted(options, gain)
            print(f"{gain:g} times as far apart: {refuted} of {options.runs} runs refuted")
    for sigma in options.sigmas if options.text else []:
        fit(options, sigma)


if __name__ == "__main__":
    main()

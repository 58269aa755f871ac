"""What a step of DP-SGD costs, against Opacus' own engine and a plain step, in turn, in one run.

    python -m benchmarks.cost.dpsgd                      # GPT-2 6 x 384 untied, V = 50,257, 8 x 64
    python -m benchmarks.cost.dpsgd --lora               # the same with LoRA of rank 8 on c_attn
    python -m benchmarks.cost.dpsgd --tied               # tied: Opacus' ghost clipping refuses it
    python -m benchmarks.cost.dpsgd --layers 4 --width 132 --vocabulary 8000    # a small one
    python -m benchmarks.cost.dpsgd --isolation          # isolation measured again in each step
    python -m benchmarks.cost.dpsgd --memory ours        # peak resident memory of one arm alone
    python -m benchmarks.cost.dpsgd --pieces 8 --batch 4096 64 --memory ours

``ours`` is a step of Lightning's Trainer under DefendedStrategy, from on_train_batch_start to
on_train_batch_end, monitors' seams and checks included; ``plain`` and the two of Opacus (per-sample
hooks and ghost clipping) are bare loops outside of Lightning; ``--peers recorded`` is one with our
hooks alone. Opacus' steps get position ids of
shape (B, T): with GPT-2's own (1, T) its clipped sums are wrong. Fixed batches, one thread, SGD.
With ``--pieces`` a batch is run so many rows at a time, by all
(Opacus' optimizer skips all steps but the last). Processor time, with
``--device cuda`` elapsed time and the GPU's memory; medians over rounds. A ratio is the median over
rounds of ours over the peer's in the same round.
"""

import argparse
import copy
import datetime
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import shared
from benchmarks.shared import FineTuning, fit, trained
from lightning_fedleak.defenses import DPSGD, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.isolation import Isolation
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from lightning_fedleak.strategies import DefendedStrategy

SMOKE = (
    "--layers 1 --width 24 --vocabulary 64 --batch 2 8 --rounds 1",
    "--layers 1 --width 24 --vocabulary 64 --batch 4 8 --rounds 1 --pieces 2 --lora",
)

CLIP, SIGMA, LR = 1.0, 1.0, 1e-3
Step = Callable[[], None]


def clock(device: str) -> float:
    """Seconds: the processor's, of a GPU those that went by once it is done."""
    if device != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "vocab_size": options.vocabulary}
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(n_head=6, tie_word_embeddings=options.tied, **sizes)
    )
    if options.lora:
        model = shared.with_lora(model, 8, ["c_attn"], fan_in_fan_out=True)
    return model.train().to(options.device)


class SampleMeans(FineTuning):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mean_of_sample_means(self.model(batch[0]).logits, batch[0], causal=True)


def plain(model: nn.Module, ids: Tensor, rows: int) -> Step:
    optimizer = torch.optim.SGD(trained(model), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        for some in ids.split(rows):
            loss = mean_of_sample_means(model(some).logits, some, causal=True)
            (loss * (len(some) / len(ids))).backward()
        optimizer.step()

    return step


def recorded(model: nn.Module, ids: Tensor) -> Step:
    """A plain step with our hooks alone, which record per-sample gradients in place of sums."""
    optimizer, recorder = torch.optim.SGD(trained(model), lr=LR), Recorder(model)

    def step() -> None:
        with recorder.step(len(ids)):
            loss = mean_of_sample_means(model(ids).logits, ids, causal=True)
        recorder.without_sums(loss, *recorder.check_uses(loss)).backward()
        optimizer.step()

    return step


def opacus(model: nn.Module, ids: Tensor, mode: str, rows: int) -> Step:
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD(trained(model), lr=LR)
    samples, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows, 1)
    loader = DataLoader(TensorDataset(ids), batch_size=samples)
    settings: dict[str, Any] = {"module": model, "optimizer": optimizer, "data_loader": loader}
    settings |= {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "poisson_sampling": False}
    settings |= {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
    made = PrivacyEngine().make_private(**settings, grad_sample_mode=mode)
    private, optimizer, criterion = made[0], made[1], made[2] if mode == "ghost" else None

    def step() -> None:
        for start in range(0, samples, rows):
            some = ids[start : start + rows]
            optimizer.zero_grad()
            labels = nn.functional.pad(some[:, 1:], (0, 1), value=-100).flatten()
            arguments = {"input_ids": some, "position_ids": positions[: len(some)]}
            logits = private(**arguments).logits.flatten(0, 1)
            if criterion is None:
                nn.functional.cross_entropy(logits, labels).backward()
            else:
                criterion(logits, labels, shape=(len(some), length)).backward()
            if rows < samples:
                optimizer.signal_skip_step(do_skip=start + rows < samples)
            optimizer.step()

    return step


def arms(options: argparse.Namespace, ids: Tensor) -> dict[str, Step]:
    """Return a step of each peer, of which one, that allocates, is done."""
    model, rows = build(options), options.pieces or len(ids)
    steps: dict[str, Step] = {}
    for name in options.peers:
        own = copy.deepcopy(model) if len(options.peers) > 1 else model
        try:
            ours = plain(own, ids, rows) if name == "plain" else recorded(own, ids)
            step = ours if name in ("plain", "recorded") else opacus(own, ids, name, rows)
            step()
            steps[name] = step
        except NotImplementedError as error:
            print(f"{name}: refused by Opacus: {str(error)[:100]}")
    return steps


def isolation_seconds(device: str, *, in_each_step: bool) -> list[float]:
    """Seconds of the measurements of isolation from now on, of which a first step has one."""
    seconds: list[float] = []
    measure = Isolation.measure

    def timed_measure(self: Isolation, *arguments: Any) -> bool:
        start = clock(device)
        self._is_done = self._is_done and not in_each_step
        try:
            return measure(self, *arguments)
        finally:
            seconds.append(clock(device) - start)

    Isolation.measure = timed_measure  # type: ignore[method-assign]
    return seconds


class InTurn(L.Callback):
    """Times this step, then one of each peer."""

    def __init__(self, peers: dict[str, Step], device: str) -> None:
        self.peers, self.device = peers, device
        self.times: dict[str, list[float]] = {"ours": [], **{name: [] for name in peers}}

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = clock(self.device)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.times["ours"].append(clock(self.device) - self.start)
        for name, step in self.peers.items():
            start = clock(self.device)
            step()
            self.times[name].append(clock(self.device) - start)


def ours(options: argparse.Namespace, ids: Tensor, callbacks: list[L.Callback]) -> DPSGD:
    defense = DPSGD(CLIP, noise_multiplier=SIGMA, max_physical_batch_size=options.pieces)
    fit(
        SampleMeans(build(options), partial(torch.optim.SGD, lr=LR)),
        DataLoader(TensorDataset(ids), batch_size=len(ids)),
        strategy=DefendedStrategy("auto", [defense]),
        accelerator=options.device,
        max_steps=options.rounds + 1,
        max_epochs=-1,
        callbacks=callbacks,
    )
    return defense


def parser() -> argparse.ArgumentParser:
    return shared.parser_of(
        __doc__, device=("cpu", ("cpu", "cuda")), lora=False, tied=False, layers=6, width=384,
        vocabulary=50257, isolation=False,
        batch=([8, 64], "rows, and tokens of each"), rounds=7, peers=["plain", "hooks", "ghost"],
        pieces=(int, "rows that ours runs at once"),
        memory=(str, ("ours", "plain", "hooks", "ghost")),
    )  # fmt: skip


def batch(options: argparse.Namespace) -> Tensor:
    """The ids that every step trains on."""
    generator = torch.Generator().manual_seed(1)
    shape = tuple(options.batch)
    return torch.randint(0, options.vocabulary, shape, generator=generator).to(options.device)


def peak(options: argparse.Namespace, ids: Tensor) -> tuple[float, float]:
    """GiB of one arm alone, three steps long: resident memory, of a GPU what tensors took of it.

    And how much of it came after the packages were loaded and the model was built once.
    """
    build(options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options.rounds = 2
    if options.memory == "ours":
        ours(options, ids, [])
    else:
        options.peers = [options.memory]
        for step in arms(options, ids).values():
            step()
            step()
    if options.device == "cuda":
        most = torch.cuda.max_memory_allocated() / 2**30
        return most, most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return most, most - before


def timed(options: argparse.Namespace, ids: Tensor) -> dict[str, list[float]]:
    """Seconds of every step, by arm; the first of ours holds the checks."""
    turns = InTurn(arms(options, ids), options.device)
    ours(options, ids, [turns])
    return turns.times


def paired(ours: list[float], peers: list[float]) -> float:
    """Median over rounds of ours over the peer's; without the first, which holds the checks."""
    return statistics.median(a / b for a, b in zip(ours[1:], peers[1:], strict=True))


def main() -> None:
    options = parser().parse_args()
    shared.quieten()
    ids = batch(options)
    place = f"{platform.machine()}, one thread, {options.device}, {datetime.date.today()}"
    if options.memory:
        most, grown = peak(options, ids)
        rows = f"{len(ids)} rows" + (f" in pieces of {options.pieces}" if options.pieces else "")
        print(f"{options.memory}, {rows}: peak {most:.3f} GiB, {grown:.3f} in the fit ({place})")
        return
    isolation = isolation_seconds(options.device, in_each_step=options.isolation)
    results = timed(options, ids)
    if options.isolation:
        results["ours"] = [a - b for a, b in zip(results["ours"], isolation, strict=True)]
    medians = {name: statistics.median(times[1:]) for name, times in results.items()}
    print(f"{place}; B x T {tuple(ids.shape)}, {options.rounds} rounds; ", end="")
    print(f"first step of ours {results['ours'][0]:.2f} s, isolation {max(isolation):.2f} s of it")
    for name, seconds in medians.items():
        spread = f"{min(results[name][1:]):.3f} to {max(results[name][1:]):.3f}"
        ratio = paired(results["ours"], results[name])
        print(f"{name:>6} {seconds:7.3f} s ({spread})   ours/{name} {ratio:.3f}", end="")
        shares = [a / b for a, b in zip(isolation[1:], results[name][1:], strict=True)]
        print(f"   isolation/{name} {statistics.median(shares):.2f}" if options.isolation else "")


if __name__ == "__main__":
    main()

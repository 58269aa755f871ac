"""Every table of docs/gpu.md, on one GPU in less than ten minutes.

    make gpu                                            # fills docs/gpu.md
    python -m benchmarks.cost.gpu --only attacks games
    # tries the script; its numbers mean nothing
    python -m benchmarks.cost.gpu --device cpu --smallest

Sections run one after another, each in a process of its own with a time bound of its own. One that
fails, or is not done in time, is named, keeps the rows it has, and the others run still; the exit
status then is 1. ``--out`` gets ``gpu.md`` and ``gpu.json``. ``--docs FILE`` also puts the tables
of the sections that were done between their marks in FILE.

Models are the embedded one with the embedded messages, and GPT-2 shapes with random weights, so
that nothing is downloaded; ``--model DIR`` adds one of your own to the section ``overhead``. What
attacks find on the GPU is set beside what the same ones find on the CPU in the same run, in single
precision.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.cost import dpsgd, overhead
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    AttentionMembership,
    EmbeddingDescent,
    FCMembership,
    FlatChat,
    GradientMembership,
    PrefixInversion,
    PublicText,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
    TextGuess,
    UnusableObservation,
    WordGuess,
    gradient_of,
)
from lightning_fedleak.callbacks import MonitorSettings
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.cli.finetuning.module import load_model
from lightning_fedleak.defenses import DPSGD, Defense, GradientNoise, mean_of_sample_means
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.evaluation.metrics.texts import in_true_order, token_hits
from lightning_fedleak.labs.beam_from_words import BeamFromWords
from lightning_fedleak.labs.gradient_matching import GradientMatching
from lightning_fedleak.labs.token_relaxation import TokenRelaxation
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import (
    ActivationSnapshot,
    GradientSnapshot,
    Observation,
    Stage,
)
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import DISHONEST_SERVER

SMOKE = ("--device cpu --smallest --out {out}",)

SECONDS = {
    "versions": 30,
    "waiting": 60,
    "overhead": 130,
    "attacks": 120,
    "dpsgd": 60,
    "games": 70,
    "inversion": 70,
}
"""How long each section may take: 9 minutes together."""
PACKAGES = ("torch", "lightning", "transformers", "peft", "opacus", "torchmetrics", "numpy")


@dataclass
class Table:
    """Rows under columns; ``note`` says what they are of."""

    note: str
    columns: tuple[str, ...]
    rows: list[list[object]] = field(default_factory=list)


class Section:
    """What one section finds, kept in a file row by row, for a process that may be ended any time.

    Args:
        options: of the command line.
        file: JSON, written anew after each row.
    """

    def __init__(self, options: argparse.Namespace, file: Path) -> None:
        self.device: str = options.device
        self.small: bool = options.smallest
        self.model: str | None = options.model
        self.file = file
        self.tables: list[Table] = []

    def table(self, note: str, *columns: str) -> None:
        """Begins one."""
        self.tables.append(Table(note, columns))

    def row(self, *values: object) -> None:
        """Adds one to the last table."""
        self.tables[-1].rows.append(list(values))
        draft = self.file.with_suffix(".part")
        draft.write_text(json.dumps([vars(table) for table in self.tables]), "utf-8")
        os.replace(draft, self.file)

    def pick(self, usual: Any, smallest: Any) -> Any:
        """The one for this size of run."""
        return smallest if self.small else usual

    def causal(self) -> nn.Module:
        """The embedded model; in the smallest run one of the same ids that has learned nothing."""
        if not self.small:
            return load_model(None).eval()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=8192, num_hidden_layers=2, max_position_embeddings=64, **sizes)
        ).eval()

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPU, and the CPU to compare with."""
        return tuple(dict.fromkeys((self.device, "cpu")))


def seconds(device: str) -> float:
    """Now, once a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mebibytes(run: Callable[[], object]) -> float:
    """What tensors took of a GPU at most while ``run`` ran, beyond what they took before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@functools.cache
def tokens_of_messages() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    return [i for text in read_texts(EMBEDDED_MESSAGES) for i in tokenizer(text)["input_ids"]]


def messages(length: int) -> Tensor:
    """(n, length) ids of the embedded messages, joined and cut, so that none is padded."""
    ids = tokens_of_messages()
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def public_rows(section: Section) -> PublicText:
    """The half of the messages that nobody trains on."""
    rows = messages(32)
    return PublicText(rows[len(rows) // 2 :][: section.pick(400, 60)])


# ---- versions -------------------------------------------------------------------------------


def versions(section: Section) -> None:
    section.table("", "what", "which")
    section.row("date", str(date.today()))
    section.row("machine", f"{platform.machine()}, {os.cpu_count()} CPU cores")
    if section.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"PyTorch {torch.__version__} sees no CUDA device here. Install PyTorch for CUDA "
                "on a machine that has one; --device cpu --smallest tries the script without."
            )
        card = torch.cuda.get_device_properties(0)
        section.row("GPU", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
        section.row("compute capability", f"{card.major}.{card.minor}")
        section.row("driver", driver())
        section.row("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")
        section.row("float32 products", torch.get_float32_matmul_precision())
    section.row("Python", platform.python_version())
    for name in ("lightning-fedleak", *PACKAGES):
        try:
            section.row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            section.row(name, "not installed")


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.split()[0] if said.stdout.split() else "unknown"


# ---- waiting --------------------------------------------------------------------------------


class CUDAWaits:
    """What makes the host wait for the GPU: counted, or refused while ``strict``."""

    SAYS = "called a synchronizing CUDA operation"

    def __init__(self) -> None:
        self.count, self.strict = 0, False

    @contextmanager
    def watched(self) -> Iterator[None]:
        waits = torch.cuda.synchronize  # not among what the debug mode reports

        def counted(*args: Any) -> None:
            if self.strict:
                raise RuntimeError(f"torch.cuda.synchronize {self.SAYS}")
            self.count += 1
            waits(*args)

        def heard(message: Warning | str, *args: Any, **more: Any) -> None:
            self.count += self.SAYS in str(message)

        torch.cuda.synchronize = counted
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = heard
                torch.cuda.set_sync_debug_mode("warn")
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize = waits

    def be_strict(self, strict: bool) -> None:
        self.strict = strict
        torch.cuda.set_sync_debug_mode("error" if strict else "warn")


class HostReads(TorchDispatchMode):
    """The same question where there is no GPU: operations that hand a value to Python."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.count, self.strict = 0, False

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self:
            yield

    def be_strict(self, strict: bool) -> None:
        self.strict = strict

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        reads = op.overloadpacket.__name__ in self.READS
        if reads and self.strict:
            raise RuntimeError(f"{op} {CUDAWaits.SAYS}")
        self.count += reads
        return op(*args, **(kwargs or {}))


class Opened(L.Callback):
    """Stands first: counts from here to the next step, and is strict from here on where told to."""

    def __init__(self, waits: CUDAWaits | HostReads, strict_from: int | None = None) -> None:
        self.waits, self.strict_from = waits, strict_from
        self.steps: list[int] = []
        self.before: int | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.lap()
        if self.strict_from is not None and trainer.global_step >= self.strict_from:
            self.waits.be_strict(True)

    def on_train_end(self, *args: Any) -> None:
        self.lap()

    def on_exception(self, *args: Any) -> None:
        """What the Trainer clears away then may wait."""
        self.waits.be_strict(False)

    def lap(self) -> None:
        if self.before is not None:
            self.steps.append(self.waits.count - self.before)
        self.before = self.waits.count


class Closed(L.Callback):
    """Stands last: the end of what is strict."""

    def __init__(self, waits: CUDAWaits | HostReads) -> None:
        self.waits = waits

    def on_train_batch_end(self, *args: Any) -> None:
        self.waits.be_strict(False)


class OnIds(L.LightningModule):
    """SGD on a mean of per-sample means, which asks nothing of the host, and logs nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        return mean_of_sample_means(self.model(input_ids=ids).logits, ids, causal=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def gpt2(layers: int, width: int, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(1, width // 64),
        n_positions=128,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    # As after some training: hidden states behind a new LayerNorm all sum to zero.
    nn.init.normal_(model.transformer.ln_f.weight, mean=1.0, std=0.3)
    return model


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "devices": 1,
    "max_epochs": -1,
}
LOOKS = 2
"""Steps 0 and 1 of each fit: games wait for a second batch."""


def watched_fit(
    section: Section,
    *,
    monitored: bool,
    strict: bool = False,
    defenses: tuple[Defense, ...] = (),
) -> list[int]:
    """Waits of each step.

    Strict ones train on batches that lie on the device already: bringing one there waits.
    """
    vocabulary = section.pick(2048, 256)
    model = gpt2(*section.pick((2, 128), (1, 64)), vocabulary)
    waits = CUDAWaits() if section.device == "cuda" else HostReads()
    opened = Opened(waits, LOOKS if strict else None)
    callbacks: list[L.Callback] = [opened]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (32, section.pick(32, 16)), generator=generator)
    if monitored:
        public = PublicText(ids)
        attacks = [
            FlatChat(public, shapes=((2, 8), (4, 16))),
            FCMembership(1),
            GradientMembership(public, public_rows=16),
            TokenRelaxation(1, steps=5, initial="mean"),
        ]
        attacks = section.pick(attacks, attacks[:2])
        callbacks.append(
            LeakageMonitor(
                attacks,
                every_n_steps=50,
                settings=MonitorSettings(assume=DISHONEST_SERVER, cache=False),
            )
        )
    ids = ids.to(section.device) if strict else ids
    with tempfile.TemporaryDirectory() as folder, waits.watched():
        trainer = L.Trainer(
            accelerator=section.device,
            strategy=DefendedStrategy("auto", list(defenses)) if defenses else "auto",
            max_steps=section.pick(8, 3),
            callbacks=[*callbacks, Closed(waits)],
            default_root_dir=folder,
            **QUIET,
        )
        loader = DataLoader([{"input_ids": row} for row in ids], batch_size=4)
        trainer.fit(OnIds(model), loader)
    return opened.steps


def waiting(section: Section) -> None:
    defended: dict[str, Callable[[], tuple[Defense, ...]]] = {
        "none": lambda: (),
        "GradientNoise": lambda: (GradientNoise(1.0, 0.01),),
        "DPSGD": lambda: (DPSGD(1.0, noise_multiplier=1.0, poisson_sampling=False),),
    }
    section.table(
        "times that the host waits for the device in one step",
        *("defence", "without a monitor", "no look", "look"),
    )
    more = []
    for name, made in section.pick(list(defended.items()), [("none", defended["none"])]):
        plain = watched_fit(section, monitored=False, defenses=made())
        steps = watched_fit(section, monitored=True, defenses=made())
        idle = steps[LOOKS:]
        section.row(name, span(plain[LOOKS:]), span(idle), span(steps[:LOOKS]))
        if Counter(idle) != Counter(plain[LOOKS:]):
            more.append(name)
    section.table(
        "steps in which waiting is an error, data on the device",
        *("steps", "outcome"),
    )
    said = outcome(section, monitored=False)
    section.row("without a monitor", said)
    if said == PASSED:
        said = outcome(section, monitored=True)
        section.row("with one that does not look", said)
        if said != PASSED:
            more.append("where waiting is an error")
    if more:
        raise AssertionError(f"steps without a look wait more often with a monitor: {more}")


PASSED = "pass"


def outcome(section: Section, *, monitored: bool) -> str:
    try:
        watched_fit(section, monitored=monitored, strict=True)
    except RuntimeError as error:
        if CUDAWaits.SAYS not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "lightning_fedleak" in f.filename] or frames[-1:]
        return f"waits at {Path(own[-1].filename).name}:{own[-1].lineno}"
    return PASSED


def span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


# ---- overhead -------------------------------------------------------------------------------


def overhead_table(section: Section) -> None:
    section.table(
        "elapsed time of a step, look and plain in turn, batch 8 x 64, AdamW",
        *("model", "precision", "attacks", "step", "n", "median, ms", "ratio to off"),
        *("95% interval", "peak memory, MiB"),
    )
    cases = [
        ((6, 384), None, "32-true", "flatchat,sign"),
        ((12, 768), None, "32-true", "flatchat,sign"),
        ((12, 768), None, "bf16-mixed", "flatchat,sign"),
        ((12, 768), None, "bf16-mixed", "learned"),
        ((12, 768), None, "bf16-mixed", "membership"),
    ]
    if section.model:
        cases.append(((0, 0), section.model, "bf16-mixed", "flatchat,sign"))
    if section.small:
        cases = [((1, 64), None, "32-true", "flatchat")]
    for size, model, precision, attacks in cases:
        arguments = overhead.parser().parse_args([])
        arguments.size, arguments.model, arguments.precision = size, model, precision
        arguments.attacks, arguments.device = attacks, section.device
        arguments.layer = max(1, size[0] // 2)
        arguments.steps = section.pick(30, 1)
        arguments.vocabulary = section.pick(arguments.vocabulary, 512)
        arguments.shape = section.pick("8x64", "2x8")
        arguments.out = str(section.file.parent)
        name = Path(model).name if model else "GPT-2 {} x {}".format(*size)
        found = overhead.timed(arguments)
        peaks = {}
        if section.device == "cuda":
            vocab = overhead.build(arguments)[1]
            peaks["off"] = mebibytes(lambda a=arguments: overhead.fit(a, [], 4))
            every = LeakageMonitor(overhead.attacks(arguments, vocab), every_n_steps=1)
            peaks["look"] = mebibytes(lambda a=arguments, m=every: overhead.fit(a, [m], 4))
        plain = [row[0] for row in found["off"]]
        for arm, rows in found.items():
            elapsed = [row[0] for row in rows]
            low, high = overhead.interval(elapsed, plain)
            median = statistics.median(elapsed)
            section.row(
                *(name, precision, attacks, arm, len(rows), f"{1e3 * median:.2f}"),
                f"{median / statistics.median(plain):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{peaks[arm]:.0f}" if arm in peaks else "",
            )


# ---- attacks --------------------------------------------------------------------------------


def found_words(guess: WordGuess, batch: TokenBatch) -> float:
    """F1 over word types."""
    truth = batch.target_ids() if guess.surface == "output" else batch.context_ids()
    said, held = set(guess.types.tolist()), set(truth.tolist())
    return 2 * len(said & held) / (len(said) + len(held))


def found_texts(guess: TextGuess, batch: TokenBatch) -> float:
    """Share of the tokens in their place, the last ones left out."""
    truth = batch.input_ids[:, :-1].cpu()
    hits, there = token_hits(in_true_order(guess.tokens.cpu(), truth), truth)
    return float(hits.sum() / there.sum())


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """With a LoRA whose B is not zero, as after some training."""
    if not rank:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    names = ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=rank, target_modules=names, init_lora_weights=False))


def looked(
    section: Section, make: Callable[[], Attack], rank: int, ids: Tensor, device: str
) -> tuple[float, float, float]:
    """Seconds of the preparation, median seconds of a look, and the mean of what was found."""
    anatomy = find_anatomy(adapted(section.causal(), rank).to(device))
    attack = make()
    began = seconds(device)
    attack.prepare(anatomy)
    prepared = seconds(device) - began
    roles = attack.needs(anatomy).gradients
    times, found = [], []
    for number, rows in enumerate(ids.to(device)):
        batch = TokenBatch(rows, rows, None, "causal")
        shared = gradient_of(anatomy, batch, list(roles))
        attack.refresh(anatomy, number)
        view = Observation((GradientSnapshot(number, Stage.SHARED, shared, anatomy.tied),))
        began = seconds(device)
        try:
            guess = attack.run(view)
        except UnusableObservation:
            continue
        finally:
            times.append(seconds(device) - began)
        scored = found_words if isinstance(guess, WordGuess) else found_texts
        found.append(scored(guess, batch))
    mean = statistics.fmean(found) if found else float("nan")
    return prepared, statistics.median(times), mean


def attacks_table(section: Section) -> None:
    section.table(
        "one look at a gradient of the embedded model, single precision; found: F1 of words, share "
        "of tokens of texts",
        *("attack", "trained", "batch", "device", "prepare, s", "look, s", "found"),
    )
    public = public_rows(section)
    tokens = section.pick(3000, 200)
    capacity = section.pick(1.0, 1e-9)
    texts = {"budget_seconds": section.pick(10.0, 1.0)}
    cases: list[tuple[str, Callable[[], Attack], int, tuple[int, int]]] = [
        ("FlatChat", lambda: FlatChat(public, shapes=((2, 16), (4, 32))), 0, (8, 32)),
        (
            "AlignedFlatChat, sign",
            lambda: AlignedFlatChat(public, readout="sign", calibration_tokens=tokens),
            0,
            (8, 32),
        ),
        (
            "AlignedFlatChat",
            lambda: AlignedFlatChat(public, calibration_tokens=tokens),
            0,
            (8, 32),
        ),
        ("SubspaceWords", lambda: SubspaceWords(public, capacity_seconds=capacity), 0, (4, 16)),
        ("SubspaceWords", lambda: SubspaceWords(public, capacity_seconds=capacity), 8, (1, 8)),
        ("SubspaceTexts", lambda: SubspaceTexts(**texts), 0, (4, 16)),
        ("SubspaceTexts", lambda: SubspaceTexts(**texts), 8, (1, 8)),
        (
            "GradientMatching",
            lambda: GradientMatching(
                1,
                8,
                steps=section.pick(40, 2),
                starts=2,
                swaps=4,
                **texts,
            ),
            0,
            (1, 8),
        ),
        (
            "BeamFromWords",
            lambda: BeamFromWords(8, 1, moves=20, **texts),
            0,
            (1, 8),
        ),
    ]
    if section.small:
        cases = [cases[0], cases[5]]
    for name, make, rank, (rows, length) in cases:
        n = section.pick(3, 1)
        rows, length = section.pick((rows, length), (1, 8))
        ids = messages(length)[: n * rows].view(n, rows, length)
        for device in section.devices:
            prepared, look, found = looked(section, make, rank, ids, device)
            section.row(
                *(name, f"LoRA {rank} on q, v" if rank else "whole", f"{rows} x {length}", device),
                *(f"{prepared:.2f}", f"{look:.4f}", f"{found:.3f}"),
            )


# ---- dpsgd ----------------------------------------------------------------------------------


def dpsgd_table(section: Section) -> None:
    section.table(
        "a step of DP-SGD in turn with a plain one and Opacus's two, GPT-2 shapes, V = 50,257, "
        "SGD, single precision",
        *("model", "batch", "step", "median, ms", "ours over it", "peak memory, MiB"),
    )
    cases = [((6, 384), (8, 64), []), ((12, 768), (8, 64), []), ((12, 768), (8, 64), ["--lora"])]
    for (layers, width), shape, flags in section.pick(cases, [((1, 24), (2, 8), [])]):
        sizes = ["--layers", str(layers), "--width", str(width), "--batch", *map(str, shape)]
        sizes += ["--device", section.device, "--rounds", str(section.pick(10, 1))]
        sizes += section.pick([], ["--vocabulary", "64", "--peers", "plain"])
        options = dpsgd.parser().parse_args([*sizes, *flags])
        if importlib.util.find_spec("opacus") is None:
            options.peers = ["plain"]
        names = list(options.peers)
        found = dpsgd.timed(options, dpsgd.batch(options))
        medians = {name: statistics.median(times[1:]) for name, times in found.items()}
        for name in ("ours", *names):
            if name not in medians:
                section.row(f"GPT-2 {layers} x {width}", "", name, "refused by Opacus", "", "")
                continue
            memory = ""
            if section.device == "cuda":
                alone = dpsgd.parser().parse_args([*sizes, *flags, "--memory", name])
                peak = mebibytes(lambda a=alone: dpsgd.peak(a, dpsgd.batch(a)))
                memory = f"{peak:.0f}"
            section.row(
                f"GPT-2 {layers} x {width}{', LoRA 8' if flags else ''}",
                "{} x {}".format(*shape),
                {"hooks": "Opacus, hooks", "ghost": "Opacus, ghost"}.get(name, name),
                f"{1e3 * medians[name]:.2f}",
                f"{medians['ours'] / medians[name]:.3f}",
                memory,
            )


# ---- games ----------------------------------------------------------------------------------


def games_table(section: Section) -> None:
    length = 16
    rows = messages(length)
    pool = SentencePool(list(rows[: len(rows) // 2][: section.pick(400, 40)]), tokens=length)
    public = public_rows(section)
    section.table(
        "the same membership games on each device, embedded model, batches of 8",
        *("attack", "device", "games", "AUC", "s a game", "guesses as on the CPU"),
    )
    made: list[Callable[[], list[Any]]] = [
        lambda: [FCMembership(2), FCMembership(2, "full", tokens=length, name="fc_full")],
        lambda: [AttentionMembership(2, public, tokens=length, batch=8)],
        lambda: [GradientMembership(public)],
        lambda: [SubspaceMembership(public, blocks=2)],
    ]
    config = GameConfig(games=section.pick(40, 2), batch=section.pick(8, 2))
    for make in section.pick(made, made[:1]):
        results = {}
        for device in reversed(section.devices):
            anatomy = find_anatomy(section.causal().to(device))
            results[device] = play(anatomy, make(), pool, config)
        for i, here in enumerate(results["cpu"]):
            for device in section.devices:
                found = results[device][i]
                same = float((found.guesses == here.guesses).double().mean())
                section.row(
                    *(found.attack, device, len(found), f"{found.summary()['auc'].value:.3f}"),
                    *(f"{found.seconds / len(found):.4f}", f"{same:.3f}"),
                )


# ---- inversion ------------------------------------------------------------------------------


def inversion_table(section: Section) -> None:
    length, n = section.pick((32, 4), (6, 1))
    ids = messages(length)[:n]
    public = public_rows(section)
    section.table(
        f"{n} messages of {length} tokens off the hidden states at a split, embedded model",
        *("attack", "split", "device", "prepare, s", "ms a token", "tokens in place"),
    )
    steps = section.pick(200, 2)
    made: dict[str, Callable[[int], Any]] = {
        "PrefixInversion": lambda k: PrefixInversion(k, public, types=section.pick(4096, 32)),
        "EmbeddingDescent": lambda k: EmbeddingDescent(k, steps=steps, budget_seconds=10.0),
        "TokenRelaxation": lambda k: TokenRelaxation(
            k, steps=steps, initial="mean", budget_seconds=10.0
        ),
    }
    for name, make in made.items():
        if section.small and name == "TokenRelaxation":
            continue
        for layer in section.pick((1, 3), (1,)):
            for device in section.devices:
                anatomy = find_anatomy(section.causal().to(device))
                attack = make(layer)
                began = seconds(device)
                attack.prepare(anatomy)
                prepared = seconds(device) - began
                hidden = hidden_states(anatomy, layer, ids.to(device))
                sent = {attack.needs(anatomy).layers[0]: hidden}
                view = Observation((), (ActivationSnapshot(0, Stage.SHARED, sent),))
                began = seconds(device)
                guess = attack.run(view)
                took = seconds(device) - began
                hits, there = token_hits(guess.tokens.cpu(), ids)
                section.row(
                    *(name, layer, device, f"{prepared:.2f}", f"{1e3 * took / ids.numel():.2f}"),
                    f"{float(hits.sum() / there.sum()):.3f}",
                )


# ---- the whole ------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Section], None]] = {
    "versions": versions,
    "waiting": waiting,
    "overhead": overhead_table,
    "attacks": attacks_table,
    "dpsgd": dpsgd_table,
    "games": games_table,
    "inversion": inversion_table,
}


def in_process(name: str, options: argparse.Namespace, folder: Path) -> None:
    """A section at work, in a process group of its own."""
    os.setsid()
    os.environ["FEDLEAK_CACHE"] = str(folder / "cache")
    problem = folder / f"{name}.problem"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    try:
        SECTIONS[name](Section(options, folder / f"{name}.json"))
    except SystemExit as said:
        problem.write_text(str(said), "utf-8")
    except Exception as error:
        traceback.print_exc()
        problem.write_text(f"{type(error).__name__}: {error}", "utf-8")


def run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a section found, how long it took, and its problem (None: it was done)."""
    began = time.monotonic()
    bound = SECONDS[name] * (10 if options.smallest else 1)  # which runs on machines that are busy
    # A process that is forked saves importing the large packages; CUDA does not stand it.
    start = "spawn" if options.device == "cuda" else "fork"
    process = multiprocessing.get_context(start).Process(
        target=in_process, args=(name, options, folder)
    )
    process.start()
    process.join(bound)
    problem = None
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        problem = f"not done after {bound} s"
    elif (folder / f"{name}.problem").exists():
        problem = (folder / f"{name}.problem").read_text("utf-8")
    elif process.exitcode:
        problem = f"the process ended with exit status {process.exitcode}"
    kept = folder / f"{name}.json"
    tables = json.loads(kept.read_text("utf-8")) if kept.exists() else []
    return {"seconds": time.monotonic() - began, "problem": problem, "tables": tables}


def markdown(tables: list[dict[str, Any]]) -> str:
    """Tables, each under what it is of."""
    lines = []
    for table in tables:
        if table["note"]:
            lines += [f"{table['note'][0].upper()}{table['note'][1:]}:", ""]
        for row in (table["columns"], ["---"] * len(table["columns"]), *table["rows"]):
            lines.append("| " + " | ".join(map(str, row)) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def marks(name: str) -> tuple[str, str]:
    """Between which a section's tables stand in a page."""
    return f"<!-- {name} begins -->", f"<!-- {name} ends -->"


def filled(page: str, found: dict[str, dict[str, Any]]) -> str:
    """A page with the tables of the sections that were done.

    Raises:
        ValueError: the page has no place for one.
    """
    for name, section in found.items():
        if section["problem"] is not None:
            continue
        begin, end = marks(name)
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has no single place for '{name}': '{begin}' ... '{end}'")
        before, rest = page.split(begin)
        page = before + f"{begin}\n{markdown(section['tables'])}\n{end}" + rest.split(end)[1]
    return page


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), help="sections; default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smallest", action="store_true", help="numbers mean nothing then")
    parser.add_argument("--model", help="folder of a causal LM, for the section overhead")
    parser.add_argument("--out", type=Path, default=Path("fedleak_runs/gpu"))
    parser.add_argument("--docs", type=Path, help="page to put the tables into")
    options = parser.parse_args()
    if options.docs and (options.device != "cuda" or options.smallest):
        parser.error("--docs takes what was measured on a GPU: leave --device and --smallest out")
    if options.docs:
        page = options.docs.read_text("utf-8")
        lacking = [n for n in SECTIONS for mark in marks(n) if page.count(mark) != 1]
        if lacking:
            parser.error(f"{options.docs} has no place for {sorted(set(lacking))}")
    return options


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.device == "cpu":
        tokens_of_messages()  # once for all that are forked
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for section in dict.fromkeys(("versions", *(options.only or SECTIONS))):
            found[section] = done = run(section, options, Path(name))
            state = "ok     " if done["problem"] is None else "FAILED "
            print(f"{state} {done['seconds']:6.1f} s  {section}", flush=True)
            if done["problem"] is not None:
                print(f"  {done['problem']}", flush=True)
            if section == "versions" and done["problem"] is not None:
                return 1
    failed = [name for name, section in found.items() if section["problem"] is not None]
    text = []
    for name, section in found.items():
        problem = f"Failed: {section['problem']}\n\n" if section["problem"] else ""
        text.append(f"## {name}\n\n{problem}{markdown(section['tables'])}\n")
    (options.out / "gpu.md").write_text("\n".join(text), "utf-8")
    (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if options.docs:
        page = options.docs.read_text("utf-8")
        options.docs.write_text(filled(page, found), "utf-8")
    print(f"\n{len(found)} sections, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    print(f"{options.out / 'gpu.md'}, {options.out / 'gpu.json'}")
    if options.docs:
        print(f"tables of what was done: {options.docs}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

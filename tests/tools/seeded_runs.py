"""Short seeded fits of tiny models that work with older and newer checkouts of the package alike.

Imports only what is public: names of :mod:`lightning_fedleak` and of its folders.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import lightning_fedleak as fedleak
from lightning_fedleak import callbacks
from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.defenses import ClipSettings, ReleaseSettings, mean_of_sample_means
from lightning_fedleak.strategies.seams import CHECKPOINT_KEY

VOCAB, WIDTH, LENGTH, MASK = 97, 16, 10, 96
STAGES = ("local", "shared", "aggregate")
PUBLIC = [[(i * i + 7 * i * j + 3 * j * j) % 90 + 3 for j in range(12)] for i in range(120)]
HELD_OUT = [[(5 * i + 11 * j) % 90 + 3 for j in range(LENGTH)] for i in range(40)]


# ---- the user's side ----------------------------------------------------------------------------


@contextmanager
def own_rng(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def gpt2(tied: bool = True, dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with own_rng(0):
        model = GPT2LMHeadModel(config)
    # At its initial gain of one the last LayerNorm makes every hidden state sum to zero.
    model.transformer.ln_f.weight.data.copy_(torch.linspace(0.5, 1.5, WIDTH))
    return model.train()


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with own_rng(0):
        return BertForMaskedLM(config).train()


class Module(L.LightningModule):
    """A mean of per-sample means, as DPSGD asks for."""

    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self.model(**inputs).logits
        causal = not isinstance(self.model, BertForMaskedLM)
        loss = mean_of_sample_means(logits, batch["labels"], causal=causal)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def rows(n: int, length: int = LENGTH, masked: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, MASK, (n, length), generator=generator)
    labels = ids.clone()
    if masked:
        hidden = torch.rand(ids.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        labels, ids = labels.masked_fill(~hidden, -100), ids.masked_fill(hidden, MASK)
    ones = torch.ones_like(ids)
    columns = zip(ids, ones, labels, strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in columns]


def public() -> Any:
    return fedleak.PublicText(PUBLIC)


def with_own_canaries() -> Any:
    """40 texts and 6 canaries, of which a seeded coin includes some."""
    from lightning_fedleak.evaluation.canaries import with_canaries

    canaries = [
        {
            "input_ids": (torch.arange(LENGTH) * (i + 2)) % 90 + 3,
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": (torch.arange(LENGTH) * (i + 2)) % 90 + 3,
        }
        for i in range(6)
    ]
    return with_canaries(rows(40), canaries, seed=0)


def monitor(attacks: Any, **settings: Any) -> Any:
    """A LeakageMonitor, with settings of membership games and rare ones in their groups."""
    names = ("targets", "held_out", "window", "scale", "canaries")
    games = {name: settings.pop(name) for name in names if name in settings}
    kind = getattr(callbacks, "WatchSettings", None) or callbacks.MonitorSettings  # of older ones
    names = {one.name for one in fields(kind)} & settings.keys()
    rare = {name: settings.pop(name) for name in names}
    return fedleak.LeakageMonitor(
        attacks, games=fedleak.Games(**games) if games else None, settings=kind(**rare), **settings
    )


# ---- a run --------------------------------------------------------------------------------------


@dataclass
class Run:
    """One seeded fit: monitors and gates are built anew each time."""

    callbacks: Callable[[], list[L.Callback]]
    defenses: Callable[[], list[Any]] = list
    model: Callable[[], nn.Module] = gpt2
    data: Callable[[], Any] = lambda: rows(40)
    module: Callable[[nn.Module], L.LightningModule] = Module
    batch_size: int = 4
    settings: dict[str, Any] = field(default_factory=lambda: {"max_steps": 10})
    private: bool = False
    """Noise of the operating system: only what it cost is looked at."""
    tensorboard: bool = False


def fit(
    run: Run,
    folder: Path,
    *,
    ckpt_path: Path | None = None,
    callbacks: list[L.Callback] | None = None,
    **settings: Any,
) -> L.Trainer:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    defenses = run.defenses()
    loggers: list[Logger] = [CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=1)]
    if run.tensorboard:
        loggers.append(TensorBoardLogger(folder, name="tensorboard", version=0))
    more: dict[str, Any] = (
        {"strategy": fedleak.DefendedStrategy(defenses=defenses)} if defenses else {}
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=run.callbacks() if callbacks is None else callbacks,
        logger=loggers,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or ()),
        default_root_dir=folder,
        **more,
        **(run.settings | settings),
    )
    loader = DataLoader(run.data(), batch_size=run.batch_size)
    named = inspect.signature(trainer.fit).parameters  # Lightning 2.5 has no such argument
    strictly = {"weights_only": True} if "weights_only" in named else {}
    trainer.fit(run.module(run.model()), loader, ckpt_path=ckpt_path, **strictly)
    return trainer


# ---- what a run shows ---------------------------------------------------------------------------

PLACE = re.compile(r"\b\w+\.py:\d+")
WALL_CLOCK = "monitor/seconds"


def plain(text: str, folder: Path | None = None) -> str:
    """Without places in files, addresses and the folder of this run."""
    text = PLACE.sub("<place>", text)
    text = re.sub(r"\b0x[0-9a-f]+", "0x", text)
    return text if folder is None else text.replace(str(folder), "<folder>")


def shapes(state: Any, name: str = "") -> list[str]:
    """One line for each leaf of a state: its path, and a tensor's shape and dtype, or its type."""
    if isinstance(state, dict):
        lines = [line for k, v in state.items() for line in shapes(v, f"{name}/{k}")]
        return lines or [f"{name}: {{}}"]
    if isinstance(state, list | tuple):
        lines = [line for i, v in enumerate(state) for line in shapes(v, f"{name}[{i}]")]
        return lines or [f"{name}: empty {type(state).__name__}"]
    if isinstance(state, Tensor):
        return [f"{name}: {tuple(state.shape)} {state.dtype}"]
    return [f"{name}: {type(state).__name__}"]


def leaves(state: Any, name: str = "") -> list[str]:
    """As :func:`shapes`, with the values: of tensors the SHA-256."""
    if isinstance(state, dict):
        return [line for k, v in state.items() for line in leaves(v, f"{name}/{k}")]
    if isinstance(state, list | tuple):
        return [line for i, v in enumerate(state) for line in leaves(v, f"{name}[{i}]")]
    if isinstance(state, Tensor):
        return [f"{name}: {tuple(state.shape)} {state.dtype} {digest([state])}"]
    return [f"{name}: {'<seconds>' if name.endswith(WALL_CLOCK) else plain(repr(state))}"]


def digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        sha.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:20]


def logged(csv_file: Path, only: str = "") -> list[str]:
    """Every number of a CSVLogger's file, by step and name; without seconds."""
    import csv

    with csv_file.open() as file:
        return [
            f"step {row['step']} {name} = {value}"
            for row in csv.DictReader(file)
            for name, value in sorted(row.items())
            if value and name not in ("step", WALL_CLOCK) and name.startswith(only)
        ]


def written(path: Path) -> Iterator[str]:
    """The lines of a file; of JSON lines one for each key, as it stands there."""
    for line in path.read_text().splitlines():
        if path.suffix != ".jsonl":
            yield line
            continue
        for key, value in json.loads(line).items():
            if key == "run":  # an id of its own in every run
                continue
            inner = value.items() if key == "metrics" else [("", value)]
            yield from (f"{key} {name}: {json.dumps(of)}" for name, of in inner)


def events(folder: Path) -> list[str]:
    """Everything that a TensorBoardLogger has written, but for seconds and the clock's times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for path in sorted(folder.rglob("events*")):
        read = EventAccumulator(str(path), size_guidance={"tensors": 0, "histograms": 0})
        read.Reload()
        for kind in ("scalars", "histograms", "tensors"):
            for tag in read.Tags()[kind]:
                for event in getattr(read, kind.capitalize())(tag):
                    value = {k: v for k, v in vars(event).items() if k != "wall_time"}
                    if WALL_CLOCK not in tag:
                        found.append(f"{kind} {tag} {value}")
        for tag in read.summary_metadata:
            content = read.summary_metadata[tag].plugin_data.content
            found.append(f"{tag}: {content!r}" if "hparams" not in tag else tag)
    return found


def is_monitor(callback: object) -> bool:
    return isinstance(callback, fedleak.LeakageMonitor)


def _cadence(monitor):
    """The monitor's cadence."""
    return monitor.engine.options.cadence


def shown_by(run: Run, folder: Path, **how: Any) -> dict[str, list[str]]:
    """Fits, and gives what can be observed of it, by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    callbacks = run.callbacks()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = fit(run, folder, callbacks=callbacks, **how)
    metrics = sorted(trainer.callback_metrics.items())
    if run.private:
        cost = [f"{n} = {float(v)!r}" for n, v in metrics if n.startswith("privacy/")]
        return {"privacy": cost + logged(folder / "csv/version_0/metrics.csv", "privacy/")}
    own = [str(w.message) for w in said if re.search("Leakage|RiskGate|defen|DP", str(w.message))]
    trainer.save_checkpoint(folder / "end.ckpt")
    checkpoint = torch.load(folder / "end.ckpt", weights_only=True)
    return {
        "callback_metrics": [
            f"{n} = {'<seconds>' if n == WALL_CLOCK else repr(float(v))}" for n, v in metrics
        ],
        "logged": logged(folder / "csv/version_0/metrics.csv"),
        "files": [
            line
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in (".jsonl", ".txt")
            for line in (
                f"{path.relative_to(folder)} mode {path.stat().st_mode & 0o777:o}",
                *(plain(text, folder) for text in written(path)),
            )
        ],
        "TensorBoard": events(folder / "tensorboard/version_0") if run.tensorboard else [],
        "monitors": [
            f"{c.looks} looks, {c.failures} failures, last step {c.last_step}, next at "
            f"{_cadence(c).next_step}"
            for c in callbacks
            if is_monitor(c)
        ],
        "checkpoint": [
            f"keys: {sorted(checkpoint)}",
            *leaves(checkpoint["callbacks"]),
            *leaves(checkpoint.get(CHECKPOINT_KEY, {})),
        ],
        "warnings": [plain(text, folder) for text in own],
        "model": [digest([p.data for p in trainer.lightning_module.parameters()])],
        "random numbers": [digest([torch.get_rng_state()])],
    }


# ---- which runs ---------------------------------------------------------------------------------


def flatchat() -> Attack:
    return fedleak.FlatChat(n_types=20)


def word_attacks() -> list[Attack]:
    return [
        flatchat(),
        fedleak.FlatChat(public(), n_types="predicted", name="flatchat_public"),
        fedleak.AlignedFlatChat(public(), calibration_tokens=400, lengths=(8,)),
        fedleak.AlignedFlatChat(public(), readout="sign", calibration_tokens=400, name="sign"),
        fedleak.BagOfWords(),
    ]


def membership_attacks() -> list[Attack]:
    return [
        fedleak.FCMembership(1),
        fedleak.FCMembership(1, "full", name="fc_full"),
        fedleak.AttentionMembership(1, public()),
    ]


def text_attacks() -> list[Attack]:
    return [
        fedleak.PrefixInversion(1, None, language_model=False),
        fedleak.PrefixInversion(2, public(), name="prefix_public"),
        fedleak.EmbeddingDescent(1, steps=15),
    ]


def dpsgd(**settings: Any) -> list[Any]:
    values = {"noise_multiplier": 0.5, "seed": 1} | settings
    return [fedleak.DPSGD(0.9, **values)]


def watched(attacks: Callable[[], Any], every: int = 3, **more: Any) -> Callable[[], list[Any]]:
    return lambda: [monitor(attacks(), every_n_steps=every, stages=STAGES, **more)]


def gated() -> list[Any]:
    watch = monitor([flatchat(), fedleak.BagOfWords()], every_n_steps=1, stages=STAGES)
    f1 = "leakage/flatchat/f1"
    return [
        watch,
        fedleak.RiskGate(f1, at_most=0.01, action="harden", name="hard"),
        fedleak.RiskGate(f1, at_most=0.1, action="warn", name="low"),
        fedleak.RiskGate("leakage/bag_of_words/recall", at_most=0.5, patience=2, action="warn"),
    ]


def stopped() -> list[Any]:
    watch = monitor(flatchat(), every_n_steps=1)
    return [watch, fedleak.RiskGate("leakage/flatchat/f1", at_most=0.0, patience=1)]


def untied() -> nn.Module:
    return gpt2(tied=False)


GAMES: dict[str, Any] = {"targets": 4, "window": 3}


def reveals() -> list[Attack]:
    return [fedleak.RevealLabels(), flatchat()]


def signs() -> list[Attack]:
    return [fedleak.BiasSign(), flatchat()]


class Fails(fedleak.FlatChat):
    """Of a user's own, with a defect."""

    default_name = "fails"

    def __init__(self) -> None:
        super().__init__(n_types=20)

    def run(self, view: Any, query: Any = None) -> Any:
        raise KeyError("private words")


class Unusable(Fails):
    default_name = "unusable"

    def run(self, view: Any, query: Any = None) -> Any:
        raise UnusableObservation("nothing to read")


def accounted(harden: tuple[str, float] | None = None, **settings: Any) -> Run:
    """DPSGD with noise of the operating system, in batches that are never empty."""
    gates = [
        fedleak.RiskGate("leakage/flatchat/f1", action=action, at_most=at_most)
        for action, at_most in ([] if harden is None else [harden])
    ]
    return Run(
        lambda: [monitor(flatchat(), every_n_steps=3), *gates],
        lambda: dpsgd(**({"noise_multiplier": 2.0, "seed": None} | settings)),
        batch_size=20,
        settings={"max_steps": 10, "max_epochs": 20},
        private=True,
    )


FAMILIES: dict[str, Run] = {
    "words": Run(watched(word_attacks, reveal=True), model=untied),
    "labels": Run(watched(reveals), model=untied, batch_size=2, data=lambda: rows(20, 6)),
    "bias": Run(watched(signs), model=bert, data=lambda: rows(40, masked=True)),
    "membership": Run(watched(membership_attacks, **GAMES)),
    "texts": Run(watched(text_attacks, texts=2, every=4, reveal=True), settings={"max_steps": 6}),
}
RUNS: dict[str, Run] = {
    **FAMILIES,
    **{
        f"{name} under DPSGD": Run(
            r.callbacks, dpsgd, r.model, r.data, batch_size=r.batch_size, settings=r.settings
        )
        for name, r in FAMILIES.items()
    },
    "a tied head, dropout": Run(
        watched(lambda: [fedleak.FlatChat(public())]), model=lambda: gpt2(dropout=0.1)
    ),
    "accumulated": Run(
        watched(lambda: [flatchat(), fedleak.BagOfWords()]),
        model=untied,
        settings={"max_steps": 5, "accumulate_grad_batches": 2},
    ),
    "gates": Run(
        gated, lambda: [fedleak.GradientNoise(1.0, 1e-4, seed=1, max_hardenings=2)], untied
    ),
    "a gate that stops": Run(stopped),
    "a frozen head": Run(
        watched(lambda: [flatchat(), fedleak.BagOfWords()]),
        lambda: [fedleak.Freeze("head")],
        untied,
    ),
    "texts clipped": Run(
        watched(lambda: [fedleak.PrefixInversion(1, None, language_model=False)], every=2),
        lambda: [fedleak.ActivationNoise(1, sigma=0.0, clip=0.5)],
        settings={"max_steps": 4},
    ),
    "texts compressed": Run(
        watched(lambda: [fedleak.EmbeddingDescent(1, steps=5)], every=2),
        lambda: [fedleak.ActivationCompression(1, keep_dims=8)],
        settings={"max_steps": 4},
    ),
    "words replaced": Run(
        watched(lambda: [flatchat()]),
        lambda: [fedleak.TokenLDP("grr", 4.0, special_ids=[0, 1, 2], seed=1)],
    ),
    "ghost clipping": Run(watched(signs), lambda: dpsgd(clip=ClipSettings("ghost")), model=bert),
    "clipping in full": Run(
        watched(lambda: [flatchat()]), lambda: dpsgd(clip=ClipSettings("per_sample"))
    ),
    "epsilon by PRV": accounted(),
    "epsilon by RDP": accounted(accountant="rdp"),
    "epsilon of a target": accounted(noise_multiplier=None, target_epsilon=8.0, target_delta=1e-3),
    "epsilon by a filter": accounted(
        ("harden", 0.0),
        target_epsilon=50.0,
        target_delta=1e-3,
        accountant="filter",
        release=ReleaseSettings(max_hardenings=3),
    ),
    "TensorBoard": Run(
        lambda: [
            monitor(
                [flatchat(), fedleak.FCMembership(1), fedleak.EmbeddingDescent(1, steps=2)],
                every_n_steps=3,
                targets=4,
                window=2,
            ),
            fedleak.RiskGate("leakage/flatchat/f1", at_most=1.0),
        ],
        tensorboard=True,
    ),
    "attacks that fail": Run(watched(lambda: [flatchat(), Fails(), Unusable()])),
}


# ---- a checkpoint -------------------------------------------------------------------------------

SAVED_AT, RESUMED_UNTIL = 6, 12


def checkpointed() -> list[Any]:
    """Words, membership games, texts, and gates that have counted something."""
    words = [
        fedleak.FlatChat(public()),
        fedleak.AlignedFlatChat(public(), readout="sign", calibration_tokens=400),
    ]
    players = [fedleak.FCMembership(1), fedleak.AttentionMembership(1, public())]
    games = {"targets": 4, "window": 3}
    return [
        monitor(words, every_n_steps=2, stages=("local", "shared")),
        monitor(players, every_n_steps=1, held_out=fedleak.PublicText(HELD_OUT), **games),
        monitor(fedleak.PrefixInversion(1, None, language_model=False), every_n_steps=3, texts=1),
        fedleak.RiskGate("leakage/flatchat/f1", at_most=0.05, patience=50, action="warn"),
        fedleak.RiskGate("leakage/flatchat/precision", at_most=0.2, action="warn", name="low"),
    ]


CHECKPOINTED = Run(checkpointed, dpsgd, data=with_own_canaries)
ACCOUNTED = accounted(accountant="rdp")
SAVED = {"watched": CHECKPOINTED, "accounted": ACCOUNTED}


def make_checkpoint(run: Run, path: Path, folder: Path) -> None:
    """Trains ``SAVED_AT`` of ``RESUMED_UNTIL`` steps and writes a checkpoint in mid-run.

    A ModelCheckpoint writes it, as a user's would be; what a run cannot need is left out.
    """
    saver = ModelCheckpoint(
        folder / "saved", every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}"
    )
    fit(run, folder, callbacks=[*run.callbacks(), saver], max_steps=SAVED_AT + 1)
    saved = torch.load(folder / "saved" / f"step={SAVED_AT}.ckpt", weights_only=True)
    saved["callbacks"] = {
        name: state for name, state in saved["callbacks"].items() if "ModelCheckpoint" not in name
    }
    torch.save(saved, path)


def resumed(run: Run, path: Path, folder: Path) -> dict[str, list[str]]:
    """What a fit shows that goes on from a checkpoint, of which only plain values are loaded."""
    return shown_by(run, folder, ckpt_path=path, max_steps=RESUMED_UNTIL)

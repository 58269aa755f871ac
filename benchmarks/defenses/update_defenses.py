"""What defences of the update buy against word recovery, and what they cost the model.

    python -m benchmarks.defenses.update_defenses noise --model DIR --shape 8x25 --batches 10
    python -m benchmarks.defenses.update_defenses utility --model DIR --steps 40

``noise`` is FLATCHAT's Table 5: F1 of word recovery from one shared gradient of the output head
against the noise multiplier sigma at a clip norm C. The paper leaves open what is clipped and
what the sum is divided by, so that four readings are run, with the same noise z ~ N(0, 1) in each:

- ``sum``: sum_i min(1, C / |g_i|) g_i + sigma C z, DP-SGD before the division;
- ``sum/B``: the same over the batch size, which is what ``DPSGD`` releases;
- ``mean``: the clipped mean, then sigma C z, so B times as much noise for the same signal;
- ``update``: min(1, C / |g|) g + sigma C z with g the batch's mean gradient: ``GradientNoise``.

g_i is the whole model's gradient of one sentence's mean loss, by one backward pass a sentence. A
tied head is attacked as it is shared, as the sum of its parts. FlatChat is *given* the true
number of types. ``blind`` names as many types as there were, the most frequent in public text: no
gradient is needed for that.

``utility`` is FLATCHAT's Fig. 4 for a causal model: validation loss after fine-tuning under no
defence, frozen head, embeddings or both, noise on the update, and DP-SGD, and what four attacks
got from the shared update meanwhile. Head and embeddings must be two matrices to be frozen by
themselves, so a tied model is untied: the head starts as a copy of the embeddings. Results are
kept in ``--out``; the same command goes on where it was stopped, and ``--cells`` runs some only.
Over several ``--seeds`` there are means with 95% intervals (Student's t), and the loss that a
defence costs is taken seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attacks.word_recovery import guessed, read_texts, score, summary, tokens_of
from lightning_fedleak.anatomy import HEAD_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    BagOfWords,
    FCMembership,
    FlatChat,
    PublicText,
)
from lightning_fedleak.attacks.base import Attack, WordGuess
from lightning_fedleak.attacks.words.flatchat import flatchat
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.finetuning.lightning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.studies.defense_specs import parse_defenses
from lightning_fedleak.studies.sweep.cell import loss_before, quiet
from lightning_fedleak.studies.sweep.grid import (
    CellResult,
    Grid,
    GridCell,
    Leakage,
    Setting,
    leakage_of,
    plot_pareto,
)

SMOKE = (
    "noise --model {model} --private {text} --public {text} --shape 2x8 --batches 2 "
    "--sigma 0 0.1 --calibration-tokens 500",
    "utility --model {model} --private {text} --public {text} --texts 40 --steps 2 "
    "--batch-size 2 --length 8 --every-n-steps 1 --layer 1 --cells 0 --out {out}",
)

READINGS = ("sum", "sum/B", "mean", "update")
WORD_ATTACKS = ("flatchat", "sign", "learned")
CELLS = (
    "none",
    "freeze:part=head",
    "freeze:part=embeddings",
    "freeze:part=head+embeddings",
    "gradient_noise:clip=1,sigma=1e-3/1e-2",
    "dpsgd:max_grad_norm=1,noise_multiplier=1e-3/1e-2/0.5",
)
FITTING_SHAPES = ((4, 25), (4, 64), (8, 25), (8, 64), (16, 64))


@dataclass(frozen=True)
class ClippedBatch:
    """One batch's gradient of the head, clipped in both ways.

    Attributes:
        samples: (V, d) sum over sentences, each clipped to the norm C in the whole model.
        update: (V, d) of the mean gradient, clipped to C in the whole model.
        norms: (B,) of the sentences' gradients.
        update_norm: of the mean gradient.
        types: distinct tokens that were predicted.
    """

    samples: Tensor
    update: Tensor
    norms: list[float]
    update_norm: float
    types: Tensor

    def released(self, reading: str, noise: Tensor) -> Tensor:
        """What leaves the client under one reading of the paper, (V, d)."""
        size = len(self.norms)
        if reading == "sum":
            return self.samples + noise
        if reading == "sum/B":
            return (self.samples + noise) / size
        return (self.samples / size if reading == "mean" else self.update) + noise


def clipped_batch(
    anatomy: Anatomy, samples: Sequence[Mapping[str, Tensor]], types: Tensor, clip: float
) -> ClippedBatch:
    """One backward pass for each sample, given as the model's keyword arguments."""
    parameters = [p for p in anatomy.model.parameters() if p.requires_grad]
    head = next(i for i, p in enumerate(parameters) if p is anatomy.parameter(HEAD_WEIGHT))
    mean = [torch.zeros_like(p) for p in parameters]
    total, norms = torch.zeros_like(parameters[head]), []
    for sample in samples:
        loss = anatomy.model(**sample).loss
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        norms.append(_norm(gradients))
        total.add_(gradients[head], alpha=min(1.0, clip / norms[-1]))
        for sum_, gradient in zip(mean, gradients, strict=True):
            sum_.add_(gradient, alpha=1 / len(samples))
    whole = _norm(mean)
    update = mean[head] * min(1.0, clip / whole)
    return ClippedBatch(total, update, norms, whole, types)


def _norm(gradients) -> float:
    return math.sqrt(sum(float(g.norm()) ** 2 for g in gradients))


def batches(text: PublicText, size: int, length: int, seed: int) -> Iterator[Tensor]:
    """(size, length) ids of texts that are long enough, none of them twice."""
    full = [s[:length] for s in text.sentences if len(s) >= length]
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(full) - size + 1, size):
        yield torch.stack([full[i] for i in order[start : start + size]])


def noise(args: argparse.Namespace) -> None:
    """Word recovery against the noise multiplier."""
    began = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    anatomy = find_anatomy(model)
    private = tokens_of(read_texts(args.private), tokenizer, args.bos, args.seed + 1, 2000)
    public = tokens_of(read_texts(args.public), tokenizer, args.bos, args.seed + 2, 1000)
    aligned = {
        readout: AlignedFlatChat(
            public, readout=readout, calibration_tokens=args.calibration_tokens, seed=args.seed
        )
        for readout in ("sign", "learned")
    }
    for attack in aligned.values():
        attack.prepare(anatomy)
    frequent = torch.cat(public.sentences).bincount(minlength=anatomy.vocab_size)
    frequent = frequent.argsort(descending=True, stable=True)
    print(f"calibrated after {time.process_time() - began:.0f} s of processor time", flush=True)

    size, length = (int(n) for n in args.shape.split("x"))
    generator = torch.Generator().manual_seed(args.seed)
    scores: dict[tuple[str, float, str], list[float]] = {}
    blind: list[float] = []
    norms: list[float] = []
    updates: list[float] = []
    types: list[int] = []
    for number, ids in enumerate(batches(private, size, length, args.seed)):
        late = args.seconds is not None and time.process_time() - began > args.seconds
        if number == args.batches or (late and number > 1):
            break
        samples = [{"input_ids": row, "labels": row} for row in ids.split(1)]
        batch = clipped_batch(anatomy, samples, ids[:, 1:].unique(), args.clip)
        truth = batch.types
        norms += batch.norms
        updates.append(batch.update_norm)
        types.append(len(truth))
        blind.append(score(WordGuess(frequent[: len(truth)], n_types=len(truth)), truth)["f1"])
        z = torch.randn(batch.samples.shape, generator=generator)
        for sigma in args.sigma:
            for reading in args.readings:
                seen = batch.released(reading, sigma * args.clip * z)
                view = Observation(
                    (GradientSnapshot(0, Stage.SHARED, {HEAD_WEIGHT: seen}, tied=anatomy.tied),)
                )
                guesses = {"flatchat": flatchat(seen, len(truth))}
                guesses |= {name: guessed(attack, view) for name, attack in aligned.items()}
                for name, guess in guesses.items():
                    found = scores.setdefault((reading, sigma, name), [])
                    found.append(score(guess, truth)["f1"])
    if len(types) < 2:
        raise SystemExit("fewer than two batches: lower the shape, or raise --batches")
    report_noise(args, scores, blind, norms, updates, types, time.process_time() - began)


def report_noise(args, scores, blind, norms, updates, types, seconds) -> None:
    """Prints the table, and writes it where asked."""
    print(
        f"{len(types)} batches of {args.shape}, {summary(types)[0]:.0f} types, C = {args.clip:g}; "
        f"norm of a sentence's gradient: median {torch.tensor(norms).median():.3g}, smallest "
        f"{min(norms):.3g}; of a batch's mean: median {torch.tensor(updates).median():.3g}, "
        f"smallest {min(updates):.3g}; blind F1 {_pm(blind)}"
    )
    print(f"| reading | attack | {' | '.join(f'sigma {s:g}' for s in args.sigma)} |")
    print("|---|---|" + "---|" * len(args.sigma))
    rows = []
    for reading in args.readings:
        for name in WORD_ATTACKS:
            cells = [scores[reading, sigma, name] for sigma in args.sigma]
            print(f"| {reading} | {name} | {' | '.join(_pm(c) for c in cells)} |")
            for sigma, values in zip(args.sigma, cells, strict=True):
                mean, half = summary(values)
                row = {"reading": reading, "attack": name, "sigma": sigma, "f1": mean}
                rows.append(row | {"half_width": half, "batches": len(values)})
    print(f"{_about(args)}, {seconds:.0f} s of processor time")
    if args.json:
        about = {k: str(v) for k, v in vars(args).items() if k not in ("run", "model")}
        content = {"settings": about, "blind": summary(blind)[0], "types": types, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot_noise(rows, summary(blind)[0], args.plot)


def plot_noise(rows, blind: float, path: Path) -> None:
    """F1 against sigma, one panel for each reading; sigma 0 at the left edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    readings = list(dict.fromkeys(r["reading"] for r in rows))
    least = min(r["sigma"] for r in rows if r["sigma"] > 0) / 10
    figure = Figure(figsize=(1 + 2.7 * len(readings), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(readings), sharey=True, squeeze=False)[0]
    for axis, reading in zip(axes, readings, strict=True):
        for name in WORD_ATTACKS:
            own = [r for r in rows if r["reading"] == reading and r["attack"] == name]
            x = [max(r["sigma"], least) for r in own]
            half = [r["half_width"] for r in own]
            axis.errorbar(x, [r["f1"] for r in own], half, marker="o", ms=3, lw=1, label=name)
        axis.axhline(blind, color="0.6", ls="--", lw=0.8, label="blind")
        axis.set(xscale="log", title=reading, xlabel="sigma (leftmost: 0)", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("F1")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


def utility(args: argparse.Namespace) -> None:
    """Validation loss and leakage under each defence."""
    args.out.mkdir(parents=True, exist_ok=True)
    with quiet():
        model, untied = untied_copy(args.model, args.out / "untied")
        texts = read_texts(args.private)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(args.seed))
        path = args.out / "private.jsonl"
        lines = (json.dumps({"text": texts[i]}) for i in order[: args.texts].tolist())
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        public = tokens_of(
            read_texts(args.public), AutoTokenizer.from_pretrained(model), None, args.seed + 2, 1000
        )
    settings = [
        Setting(
            model=model,
            text=str(path),
            attacks=("flatchat", "aligned_flatchat", "bag_of_words", "fc"),
            layer=args.layer,
            steps=args.steps,
            batch_size=args.batch_size,
            length=args.length,
            every_n_steps=args.every_n_steps,
            lr=args.lr,
            seed=seed,
        )
        for seed in args.seeds
    ]
    specs = [spec for text in CELLS for spec in parse_defenses(text)]
    grid = Grid([GridCell(s, spec) for s in settings for spec in specs], args.out)
    chosen = [c for c in grid.cells if args.cells is None or specs.index(c.defense) in args.cells]
    Grid(chosen, args.out).run(
        lambda cell, folder: run_one(cell, folder, public),
        on_result=lambda cell, r: print(
            f"seed {cell.setting.seed}, {cell.defense}: {r.val_loss}, {r.error or ''}", flush=True
        ),
    )
    before = sum(loss_before(s) for s in settings) / len(settings)
    results = grid.results()
    grid.write(args.out / "results.json")
    print(f"head and embeddings {'were tied and are untied' if untied else 'are not tied'}")
    print(f"loss before training {before:.3f}")
    names = settings[0].attacks
    print(f"| defence | val loss | more than none | epsilon | {' | '.join(names)} | seconds |")
    print("|---|---|---|---|" + "---|" * (len(names) + 1))
    bare = {c.setting.seed: r.val_loss for c, r in results if c.defense == specs[0]}
    for spec in specs:
        own = {c.setting.seed: r for c, r in results if c.defense == spec and r.error is None}
        for cell, result in results:
            if cell.defense == spec and result.error:
                print(f"| {spec} | failed with seed {cell.setting.seed}: {result.error} |")
        if not own:
            continue
        losses = {seed: r.val_loss for seed, r in own.items() if r.val_loss is not None}
        more = [v - b for s, v in losses.items() if (b := bare.get(s)) is not None]
        read = " | ".join(_leak([r.leakage.get(name) for r in own.values()]) for name in names)
        epsilon = _epsilon(next(iter(own.values())))
        seconds = sum(r.seconds for r in own.values())
        price = _pm(more) if more else "unknown"
        print(
            f"| {spec} | {_pm(list(losses.values()))} | {price} | {epsilon} | {read} "
            f"| {seconds:.0f} |"
        )
    print(f"seeds {args.seeds}; {_about(args)}")
    if args.plot:
        shown = [(c, r) for c, r in results if c.setting.seed == args.seeds[0]]
        plot_pareto(shown, args.plot, loss_before=loss_before(settings[0]))


def untied_copy(model: str, folder: Path) -> tuple[str, bool]:
    """A folder with the model whose head is a matrix of its own, and whether that was needed."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not find_anatomy(loaded).tied:
        return model, False
    head = loaded.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    loaded.config.tie_word_embeddings = False
    if not (folder / "config.json").exists():
        loaded.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder), True


def run_one(cell: GridCell, folder: Path, public: PublicText) -> CellResult:
    """As :func:`~lightning_fedleak.studies.sweep.cell.run_cell`, with public text that is not the
    model's.

    Calibrated on little text, since every cell calibrates anew.
    """
    began, setting, defenses = time.perf_counter(), cell.setting, cell.defense.build()
    seed = setting.seed
    attacks: list[Attack] = [
        FlatChat(public, shapes=FITTING_SHAPES, seed=seed, name="flatchat"),
        AlignedFlatChat(public, calibration_tokens=3000, seed=seed, name="aligned_flatchat"),
        BagOfWords(),
        FCMembership(setting.layer or 1, tokens=setting.length, name="fc"),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "leakage.jsonl").unlink(missing_ok=True)
    with quiet():
        L.seed_everything(seed, verbose=False)
        module = CausalLMFineTuning(setting.model, lr=setting.lr, loss="sample_mean")
        monitor = LeakageMonitor(
            attacks,
            every_n_steps=setting.every_n_steps,
            games=Games(window=setting.steps),
            log_dir=folder,
        )
        trainer = L.Trainer(
            strategy=DefendedStrategy("auto", defenses),
            accelerator="cpu",
            max_steps=setting.steps,
            devices=1,
            check_val_every_n_epoch=None,
            val_check_interval=setting.steps,
            callbacks=[monitor],
            logger=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TextDataModule(
            text=setting.text,
            tokenizer=setting.model,
            batch_size=setting.batch_size,
            length=setting.length,
            seed=seed,
        )
        trainer.fit(module, datamodule=data)
    costs = [c for d in defenses if (c := d.privacy) is not None]
    privacy: dict[str, float | None] = {}
    for cost in costs:
        epsilon = cost.epsilon if math.isfinite(cost.epsilon) else None
        privacy |= {"epsilon": epsilon, "delta": cost.delta}
    return CellResult(
        val_loss=float(trainer.callback_metrics["val_loss"]),
        privacy=privacy,
        leakage=leakage_of(folder / "leakage.jsonl", attacks),
        seconds=time.perf_counter() - began,
    )


def _leak(found: list[Leakage | None]) -> str:
    """Over seeds: mean and 95% interval of Student's t. Of one seed its own interval."""
    known = [entry for entry in found if entry is not None]
    if not known:
        return ""
    if not any(entry.exposed for entry in known):
        return "not shared"
    values = [entry.value for entry in known if entry.value is not None]
    unknown = [entry.why for entry in known if entry.value is None]
    if unknown:
        return f"unknown {len(unknown)} of {len(known)} times ({unknown[0]})"
    if len(known) > 1:
        return _pm(values)
    low, high = known[0].low, known[0].high
    return f"{values[0]:.3f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _epsilon(result: CellResult) -> str:
    if "epsilon" not in result.privacy:
        return "none"
    value = result.privacy["epsilon"]
    return "inf" if value is None else f"{value:.1f} at delta {result.privacy['delta']:.0e}"


def _pm(values: list[float]) -> str:
    mean, half = summary(values)
    return f"{mean:.3f}" + (f" ± {half:.3f}" if len(values) > 1 else "")


def _about(args: argparse.Namespace) -> str:
    cores = os.cpu_count()
    return (
        f"{date.today().isoformat()}, {platform.machine()} with {cores} cores, {args.threads} "
        f"threads, torch {torch.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", required=True, help="folder or hub id of a causal model")
    shared.add_argument("--private", default="imdb", help="as in word_recovery.py")
    shared.add_argument("--public", default="wikitext2")
    shared.add_argument("--seed", type=int, default=0, help="of the choice of texts")
    shared.add_argument("--threads", type=int, default=1)
    shared.add_argument("--plot", type=Path, help="where to draw a PNG")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("noise", parents=[shared])
    one.add_argument("--shape", default="8x25", help="sentences x tokens")
    one.add_argument("--batches", type=int, default=10)
    one.add_argument("--seconds", type=float, help="of processor time, then no further batch")
    one.add_argument("--clip", type=float, default=1.0)
    one.add_argument("--sigma", type=float, nargs="+", default=[0, 1e-4, 1e-3, 1e-2, 0.1, 1])
    one.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS))
    one.add_argument("--bos", type=int, help="id put before every text")
    one.add_argument("--calibration-tokens", type=int, default=12_000)
    one.add_argument("--json", type=Path)
    one.set_defaults(run=noise)
    two = commands.add_parser("utility", parents=[shared])
    two.add_argument("--out", type=Path, default=Path("fedleak_runs/defenses"))
    two.add_argument("--texts", type=int, default=400, help="private texts, a tenth to validate")
    two.add_argument("--layer", type=int, default=3, help="of the FC canary")
    two.add_argument("--steps", type=int, default=40)
    two.add_argument("--batch-size", type=int, default=8)
    two.add_argument("--length", type=int, default=64)
    two.add_argument("--every-n-steps", type=int, default=10)
    two.add_argument("--lr", type=float, default=1e-4)
    two.add_argument("--cells", type=int, nargs="+", help="indices of the defences, from 0")
    two.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the fine-tuning runs")
    two.set_defaults(run=utility)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()

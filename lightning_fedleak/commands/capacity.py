"""``fedleak capacity`` and ``fedleak cost``: what attacks reveal, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from lightning_fedleak.commands.options import CapacityOptions
from lightning_fedleak.commands.parser import CostOptions
from lightning_fedleak.commands.printing import print_table
from lightning_fedleak.finetuning import EMBEDDED_MESSAGES, SourceError, load_tokenizer, read_texts
from lightning_fedleak.studies.capacity import CapacityStudy, Trial
from lightning_fedleak.studies.cost import Cost, predict_costs
from lightning_fedleak.studies.models import find_config, find_model, with_lora


@dataclass(frozen=True)
class CapacityCommand(CapacityOptions):
    """The command ``fedleak capacity``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Measure and print.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: model, text or settings cannot be used.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console(highlight=False)
        size, length = map(int, self.batch.split("x"))
        tokenizer = load_tokenizer(self.model)
        without_adapters = find_model(self.model, torch.float32)
        if without_adapters.kind == "classifier":
            raise SourceError(
                "--model is no language model with a head, so that its loss on a text is not known "
                "here; in a run of your own LeakageMonitor(SubspaceWords()) reports its capacity"
            )
        anatomy = with_lora(without_adapters, self.lora_r, self.targets, self.seed)
        mask = getattr(tokenizer, "mask_token_id", None)
        study = CapacityStudy(anatomy, length, mask, self.seed)
        texts = read_texts(self.text or EMBEDDED_MESSAGES, self.column, option="--column")
        console.print(
            f"An update shares {study.rows} rows of {study.known_input.width} numbers that reveal "
            "which tokens the first block reads, out of "
            f"{anatomy.vocab_size}: {', '.join(m.name for m in study.maps)}."
        )
        capacity = study.planted(self.seconds)
        shown = f"{capacity.types} were all found" if capacity.types else "how many is unknown"
        missed = "" if capacity.failed is None else f", {capacity.failed} were not"
        console.print(
            f"Distinct tokens that these rows reveal: about {capacity.predicted:.0f} by rule; "
            f"planted at random, {shown}{missed}.\n"
        )
        trials = study.trials(texts, tokenizer, size)
        print_table(console, trial_table(trials, length))
        console.print(explain_trials(trials, length))
        return 0


def trial_table(trials: Sequence[Trial], length: int) -> Table:
    """Return a table with a row for each trial.

    Args:
        trials: by the size of their batches.
        length: tokens of a text.
    """
    rows = Table("texts x tokens", "distinct tokens", "read (F1)", "certified", "seconds")
    for trial in trials:
        rows.add_row(
            f"{trial.texts} x {length}",
            str(trial.types),
            "unknown" if trial.f1 is None else f"{trial.f1:.3f}",
            "yes" if trial.certified else "no",
            f"{trial.seconds:.1f}",
        )
    return rows


def explain_trials(trials: Sequence[Trial], length: int) -> str:
    """Return what the table means, in sentences; arguments as :func:`trial_table` takes them."""
    first_missed = next((trial for trial in trials if not trial.exact), None)
    if first_missed is None:
        result = (
            f"Every token of every batch was read exactly, up to {trials[-1].texts} texts of "
            f"{length} tokens; where that ends was not reached."
        )
    else:
        plural = "s" * (first_missed.texts > 1)
        result = (
            f"Exact recovery ends before {first_missed.texts} text{plural} of {length} tokens "
            f"({first_missed.types} distinct)."
        )
    return (
        f"{result}\nMeasured on these texts, with one attack on one step's gradient: no larger "
        "batch is shown to be safe by it. Beyond the end a part is still read (F1), and other "
        "attacks may read more."
    )


@dataclass(frozen=True)
class CostCommand(CostOptions):
    """The command ``fedleak cost``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Try the attacks on small models of the same width, and print.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: the model or the adapters cannot be used.
        """
        console = console or Console(highlight=False)
        config = find_config(self.model)
        rows, length = map(int, self.batch.split("x"))
        rank = self.lora_r if self.peft == "lora" else 0
        costs = predict_costs(config, rank, self.targets, rows * length)
        print_table(console, cost_table(costs))
        threads = torch.get_num_threads()
        console.print(
            "Seconds are of one core, on this machine; wall time is up to "
            f"{threads} times shorter with its {threads} threads. Memory is above training's own, "
            "at a look with what the calibration stores. Tried on random models of one and two "
            "blocks, and extrapolated. Not in it: sampled public text, tokens never trained, "
            "what malloc keeps, and the capacity that SubspaceWords() measures (capacity_seconds)."
        )
        return 0


def cost_table(costs: dict[str, Cost]) -> Table:
    """Return a table with a row for each attack.

    Args:
        costs: by the attack's name.
    """
    table = Table("attack", "calibration (s)", "calibration (MB)", "look (s)", "look (MB)")
    for name, cost in costs.items():
        numbers = (cost.calibration_bytes / 1e6, cost.refresh + cost.look, cost.look_bytes / 1e6)
        memory, look, more = ("unknown" if n != n else f"{n:,.2g}" for n in numbers)
        table.add_row(name, f"{cost.calibration:.2g}", memory, look, more)
    return table

"""``fedleak capacity``: how many distinct tokens an update's first block tells apart, untrained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.table import Table

from lightning_fedleak.anatomy import Anatomy, AnatomyError
from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.row_space.capacity import Capacity, measured
from lightning_fedleak.attacks.row_space.dictionary import NotAdditive, dictionary_of, factor_rows
from lightning_fedleak.attacks.row_space.linear_maps import KnownInput, known_inputs, linear_maps
from lightning_fedleak.attacks.row_space.pursuit import Atoms
from lightning_fedleak.attacks.words.public_gradients import begun, gradient_of
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.commands.game import find_model
from lightning_fedleak.commands.lora import with_lora
from lightning_fedleak.commands.options import CapacityOptions
from lightning_fedleak.commands.tables import print_table
from lightning_fedleak.finetuning.assets import EMBEDDED_MESSAGES, SourceError
from lightning_fedleak.finetuning.data import load_tokenizer
from lightning_fedleak.finetuning.texts import read_texts
from lightning_fedleak.metrics import WordRecovery
from lightning_fedleak.model_runs import context_length
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UnusableObservation

UserError = (SourceError, AnatomyError)

_MOST_TIMES = 8


@dataclass(frozen=True)
class Tried:
    """One batch of real text whose update was attacked.

    Attributes:
        texts: in the batch.
        types: distinct tokens that an update of it can hold.
        f1: of the attack; None where it says nothing.
        certified: whether it could tell by itself that nothing is missing.
        seconds: the attack took.
    """

    texts: int
    types: int
    f1: float | None
    certified: bool
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether every token was named, and no other."""
        return self.f1 == 1.0


@dataclass(frozen=True)
class CapacityCommand(CapacityOptions):
    """The command ``fedleak capacity``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Measures and prints.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: model, text or settings cannot be used.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        size, length = map(int, self.batch.split("x"))
        tokenizer = load_tokenizer(self.model)
        plain = find_model(self.model, torch.float32)
        if plain.kind == "classifier":
            raise SourceError(
                "--model is no language model with a head, so that its loss on a text is not known "
                "here; in a run of your own LeakageMonitor(SubspaceWords()) tells its capacity"
            )
        anatomy = with_lora(plain, self.lora_r, self.targets, self.seed)
        context = context_length(anatomy)
        if context is not None and length > context:
            raise SourceError(f"--batch: texts of {length} tokens exceed the context of {context}")
        text = PublicText(
            read_texts(self.text or EMBEDDED_MESSAGES, self.column, option="--column"), tokenizer
        )
        known = self._known(anatomy)
        maps = [m for m in known.trained(anatomy) if m.factor != "B"]
        rows = sum(m.rows for m in maps)
        console.print(
            f"An update shares {rows} rows of {known.width} numbers that tell the tokens read by "
            f"the first block, out of {anatomy.vocab_size}: {', '.join(m.name for m in maps)}.",
            highlight=False,
        )
        capacity = self._planted(anatomy, known, rows, length)
        missed = "" if capacity.failed is None else f", {capacity.failed} were not"
        console.print(
            f"Distinct tokens that these rows tell apart: about {capacity.predicted:.0f} by rule; "
            f"planted at random, {capacity.types} were all found{missed}.\n",
            highlight=False,
        )
        mask = getattr(tokenizer, "mask_token_id", None)
        tried = self._ends(anatomy, text, size, length, mask)
        print_table(console, _table(tried, length))
        console.print(_said(tried, size, length), highlight=False)
        return 0

    def _known(self, anatomy: Anatomy) -> KnownInput:
        """The input of the first block's trained maps."""
        for known in known_inputs(anatomy, linear_maps(anatomy)):
            if any(m.factor != "B" for m in known.trained(anatomy)):
                return known
        raise SourceError(
            "no trained map of this model reads an input that a token determines: with these "
            "targets the first block's projections are not trained, and this attack reads nothing. "
            "That is 'unknown', not 'safe'"
        )

    def _planted(self, anatomy: Anatomy, known: KnownInput, rows: int, length: int) -> Capacity:
        try:
            dictionary = dictionary_of(anatomy, known)
        except NotAdditive as error:
            raise SourceError(f"this model cannot be read: {error}") from error
        regularised = [m for m in known.trained(anatomy) if m.regularised]
        beside = tuple(factor_rows(anatomy, regularised).values())
        atoms = Atoms(*dictionary.atoms(length, beside))
        return measured(atoms, rows, seconds=self.seconds, seed=self.seed)

    def _ends(
        self, anatomy: Anatomy, text: PublicText, size: int, length: int, mask: int | None
    ) -> list[Tried]:
        """Batches around the smallest that is not read exactly, by their size."""
        attack = SubspaceWords(capacity_seconds=0)
        attack.prepare(anatomy)
        tried: dict[int, Tried] = {}

        def exact(texts: int) -> bool:
            if texts not in tried:
                tried[texts] = self._try(anatomy, attack, text, texts, length, mask)
            return tried[texts].exact

        most = min(len(text), _MOST_TIMES * size)
        good, bad = 0, min(size, most)
        while exact(bad) and bad < most:
            good, bad = bad, min(2 * bad, most)
        if not tried[bad].exact:
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if exact(middle) else (good, middle)
        return [tried[n] for n in sorted(tried)]

    def _try(
        self,
        anatomy: Anatomy,
        attack: SubspaceWords,
        text: PublicText,
        texts: int,
        length: int,
        mask: int | None,
    ) -> Tried:
        generator = torch.Generator().manual_seed(self.seed)
        rows = text.draw(texts, generator).tolist()
        batch = text.rows(rows, length, generator, kind=anatomy.kind, mask_token_id=mask)
        roles = attack.needs(anatomy).gradients
        started = begun(anatomy, generator)
        view = Observation(
            (
                GradientSnapshot(
                    0, Stage.SHARED, gradient_of(anatomy, batch, roles, instead=started)
                ),
            )
        )
        truth = torch.unique(batch.context_ids())
        began = time.perf_counter()
        try:
            said: WordGuess | None = attack.run(view)
        except UnusableObservation:
            said = None
        seconds = time.perf_counter() - began
        if said is None:
            return Tried(texts, len(truth), None, False, seconds)
        metric = WordRecovery(anatomy.vocab_size, sync_on_compute=False)
        metric.update(said, truth)
        f1 = metric.rates()["f1"].value
        return Tried(texts, len(truth), f1, bool(said.certified), seconds)


def _table(tried: Sequence[Tried], length: int) -> Table:
    table = Table("texts x tokens", "distinct tokens", "read (F1)", "certified", "seconds")
    for one in tried:
        f1 = "unknown" if one.f1 is None else f"{one.f1:.3f}"
        certified = "yes" if one.certified else "no"
        table.add_row(
            f"{one.texts} x {length}", str(one.types), f1, certified, f"{one.seconds:.1f}"
        )
    return table


def _said(tried: Sequence[Tried], size: int, length: int) -> str:
    ends = next((one for one in tried if not one.exact), None)
    if ends is None:
        found = (
            f"Every token of every batch was read exactly, up to {tried[-1].texts} texts of "
            f"{length} tokens; where that ends was not reached."
        )
    else:
        found = (
            f"Exact recovery ends before {ends.texts} text{'s' * (ends.texts > 1)} of {length} "
            f"tokens ({ends.types} distinct)."
        )
    return (
        f"{found}\nMeasured on these texts, with one attack on one step's gradient: no larger "
        "batch is shown to be safe by it. Beyond the end a part is still read (F1), and other "
        "attacks may read more."
    )


__all__ = ["CapacityCommand", "Tried"]

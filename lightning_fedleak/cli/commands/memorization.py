"""``fedleak memorization``: what a trained model gives away, before it is released."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import torch
from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.cli.commands.options import MemorizationOptions
from lightning_fedleak.cli.commands.printing import print_table, three_digits
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer, read_texts
from lightning_fedleak.cli.studies.canaries import PlantedCanaries, Tiers
from lightning_fedleak.cli.studies.memorization import Comparison, ReleasedPool, tokenize
from lightning_fedleak.cli.studies.models import ask_both

TIERS = {
    "_x1": ", once",
    "_x2": ", 2 to 4 times",
    "_x5": ", 5 to 16 times",
    "_x17": ", more often",
}
BREACH = 3  # exit status where leakage exceeds --at-most or is unknown, apart from an error's 1


@dataclass(frozen=True)
class MemorizationCommand(MemorizationOptions):
    """The command ``fedleak memorization``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Compare, print, and write JSON where ``--out`` asks for it.

        Args:
            console: where to print; stdout by default.

        Returns:
            0; 3 where the metric is above ``--at-most``, unknown, or may be above by its interval.

        Raises:
            SourceError: a model or text cannot be used.
            AnatomyError: a model's parts could not be found.
        """
        console = console or Console()
        tokenizer = load_tokenizer(self.base)
        members, others = (
            tokenize(read_texts(source, self.column), tokenizer, self.length)
            for source in (self.members, self.others)
        )
        try:
            pool = ReleasedPool(members, others, lambda ids: str(tokenizer.decode(ids)))
        except ValueError as error:
            raise SourceError(f"--members and --others: {error}") from error
        canaries = self._canaries()
        texts = [*pool.texts, *(canaries.texts if canaries else ())]
        base, now = ask_both(texts, self.model, self.base)
        inside = torch.arange(len(texts)) < len(pool.texts)
        try:
            result = pool.compare(base.rows(inside), now.rows(inside))
            tiers: Tiers = {}
            if canaries is not None:
                tiers = canaries.compare(base.rows(~inside), now.rows(~inside), self.suffix)
        except UnusableObservation as error:
            raise SourceError(f"--model '{self.model}' cannot be read: {error}") from error
        is_known = self.drawn or result.one_law
        print_table(console, _table(result))
        console.print(
            f"{result.n_members} members and {result.n_others} others were compared; "
            f"{pool.repeated} texts that repeat others or parts of them and {pool.short} short "
            f"ones were left out{self._copies(pool)}. A TPR below {result.visible:.3f} could stay "
            "unseen with so many. Results compare on the same texts only: pool "
            f"{pool.digest}.",
            highlight=False,
        )
        for sentence in self._warnings(result):
            console.print(sentence, highlight=False)
        if tiers:
            print_table(console, _tiers_table(tiers))
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(
                json.dumps(self._content(result, pool, is_known, tiers), indent=1) + "\n"
            )
            console.print(str(self.out), highlight=False)
        attack = "extraction" if self.metric in ("extracted", "greedy") else "combined"
        judged = result.values[attack] if is_known else "others may follow another law"
        named = {f"canaries x{times}": one for times, one in tiers.items()}
        return self._judge({attack: judged, **named}, console)

    def _canaries(self) -> PlantedCanaries | None:
        """Return the canaries that are asked about besides."""
        if self.canaries is None or self.record is None:
            if self.canaries is not self.record:
                raise SourceError("--canaries and --record go together: which texts, and the coins")
            return None
        return PlantedCanaries(self.canaries, self.record)

    @staticmethod
    def _copies(pool: ReleasedPool) -> str:
        """Return how many texts that repeat were asked whether they can be extracted, in words."""
        n = int((~pool.alone).sum())
        return f"; {n} members that have copies were asked for extraction alone" * (n > 0)

    def _warnings(self, result: Comparison) -> list[str]:
        """Return what makes numbers unknown, and what to do."""
        sentences = []
        if (why := result.other_law) is not None:
            finding = f"Members and others are {why}."
            sentences.append(
                f"{finding} --drawn says that a coin chose the others, so that this is chance."
                if self.drawn
                else f"{finding} Membership is UNKNOWN: give others that were drawn from the same "
                "rows (leave_out) and --drawn, or more texts of the same kind."
            )
        if result.n_others < result.needed:
            sentences.append(
                f"'shown' is unknown: {result.n_others} others were scored, {result.needed} are "
                "needed."
            )
        return sentences

    def _judge(self, results: Mapping[str, Mapping[str, float] | str], console: Console) -> int:
        """Return the exit status, and say why it is a breach."""
        if self.at_most is None:
            return 0
        breaches = []
        for name, values in results.items():
            low = high = math.nan
            if not isinstance(values, str):
                low = values["shown" if self.metric == "shown" else f"{self.metric}_low"]
                high = values[f"{self.metric}_high"]
            if math.isnan(low):
                breaches.append(f"BREACH: {name}/{self.metric} is unknown.")
            elif low > self.at_most:
                breaches.append(
                    f"BREACH: {name}/{self.metric} is shown to be at least {low:.3f}, above "
                    f"--at-most {self.at_most:g}."
                )
            elif high > self.at_most:
                breaches.append(
                    f"BREACH: {name}/{self.metric} is unknown: it lies between {low:.3f} and "
                    f"{high:.3f}, which does not decide --at-most {self.at_most:g}. Give more "
                    "texts."
                )
        for sentence in breaches:
            console.print(sentence, highlight=False)
        return BREACH if breaches else 0

    def _content(
        self, result: Comparison, pool: ReleasedPool, is_known: bool, tiers: Tiers
    ) -> dict[str, object]:
        """Return the result as plain values; what is no finite number is null."""

        def plain(values: Mapping[str, float]) -> dict[str, float | None]:
            return {name: x if math.isfinite(x) else None for name, x in values.items()}

        return {
            "kind": "memorization",
            "version": version("lightning-fedleak"),
            "members": result.n_members,
            "others": result.n_others,
            "repeated": pool.repeated,
            "short": pool.short,
            "pool": pool.digest,
            "drawn": self.drawn,
            "known": is_known,
            "visible_tpr": result.visible,
            "blind": {
                name: plain({"auc": rate.value, "auc_low": rate.low, "auc_high": rate.high})
                for name, rate in result.blind.items()
            },
            "attacks": {name: plain(values) for name, values in result.values.items()},
            "canaries": {
                str(times): one if isinstance(one, str) else plain(one)
                for times, one in tiers.items()
            },
        }


def _table(result: Comparison) -> Table:
    """Return a table with a row for each attack."""
    rows = Table("attack", "AUC", "95%", "p", "shown TPR at 1% FPR")
    for name, values in result.values.items():
        if "auc" in values:
            rows.add_row(
                name,
                three_digits(values["auc"]),
                f"{values['auc_low']:.3f} to {values['auc_high']:.3f}",
                f"{values['p_value']:.1g}",
                three_digits(values["shown"]),
            )
            continue
        for tier, words in {"": "", **TIERS}.items():
            if (excess := f"extracted{tier}") not in values:
                continue
            rows.add_row(
                f"{name}: excess of members{words}",
                three_digits(values[excess]),
                " to ".join(three_digits(values[f"{excess}_{end}"]) for end in ("low", "high")),
                "",
                f"greedy {three_digits(values[f'greedy{tier}'])}",
            )
    return rows


def _tiers_table(tiers: Tiers) -> Table:
    """Return a table with a row for each tier of canaries."""
    rows = Table("canaries", "exposure, bits", "AUC", "95%", "extracted", "greedy")
    for times, values in tiers.items():
        if isinstance(values, str):
            rows.add_row(f"x{times}", f"unknown: {values}", *[""] * 4)
            continue
        least = "" if math.isfinite(values["exposure_high"]) else "at least "
        rows.add_row(
            f"x{times}",
            f"{least}{values['exposure']:.2f}",
            three_digits(values["auc"]),
            f"{values['auc_low']:.3f} to {values['auc_high']:.3f}",
            three_digits(values["extracted"]),
            three_digits(values["greedy"]),
        )
    return rows

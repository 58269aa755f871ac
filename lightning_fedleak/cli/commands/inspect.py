"""``fedleak inspect``: whether a client was sent crafted adapter values."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer, read_texts
from lightning_fedleak.cli.printing import print_table
from lightning_fedleak.cli.studies.models import find_model
from lightning_fedleak.federation import inspection
from lightning_fedleak.federation.inspection import Agreed, Inspection, LastRound
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states

EVIDENCE = 3  # exit status where something was found, apart from an error's 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
ZERO_STARTS = (True, "gaussian", "eva")  # init_lora_weights of PEFT with which B starts at 0
TEXTS, LENGTH = 100, 64  # texts that bottlenecks are run on at most, and their tokens; not tuned

CAVEAT = (
    "That is no proof of honesty. Known to pass: rows that usual words push below the threshold, "
    "above all where a server moves them there over some rounds (on one small model it then read "
    "41% of the rare words, 51% where its mean left the client out); a few rows in the first "
    "round; the layers of AttentionMembership where such layers were agreed."
)

FOREIGN_SCALE = (
    "The scale of LoRAs is from a config that the server sent. If you train with another, rows may "
    "be larger than they look here: give --start, with the agreed config beside it."
)


def run(options: Namespace, console: Console | None = None) -> int:
    """Inspect, and print what every rule says.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0; 3 where something was found.

    Raises:
        SourceError: a file, model or text cannot be used.
        AnatomyError: the base's parts could not be found.
    """
    console = console or Console(highlight=False)
    if (options.previous is None) is not (options.own_update is None):
        raise SourceError(
            "--previous and --own-update go together: what was received in the round before, "
            "and what this client returned"
        )
    if options.text is not None and options.base is None:
        raise SourceError("--text is read by the base: give --base too")
    received = read_state(options.received)
    start = None if options.start is None else read_state(options.start)
    agreed = _agreed(options, received, start)
    last = _last_round(options.previous, options.own_update) if options.previous else None
    result = inspection.inspect_received(received, agreed, last, first=options.first)
    print_table(console, _rules_table(result))
    config = None if options.start is None else AdapterConfig.read(options.start)
    foreign = agreed.scales and config is None
    for sentence in [*_sentences(result), *([FOREIGN_SCALE] if foreign else [])]:
        console.print(sentence)
    return 0 if result.verdict == "nothing found" else EVIDENCE


def _last_round(previous: Path, own_update: Path) -> LastRound:
    before, returned = read_state(previous), read_state(own_update)
    if any(n not in before or before[n].shape != t.shape for n, t in returned.items()):
        raise SourceError(
            f"'{own_update}' holds other names or shapes than '{previous}': give what this client "
            "returned of what it had received there"
        )
    update = {name: t.float() - before[name].float() for name, t in returned.items()}
    return LastRound(before, update)


def _agreed(
    options: Namespace, received: Mapping[str, Tensor], start: dict[str, Tensor] | None
) -> Agreed:
    """Return what is known beside the received values."""
    folders = (options.start, options.previous, options.received)
    configs = (AdapterConfig.read(folder) for folder in folders if folder is not None)
    config = next((c for c in configs if c is not None), AdapterConfig())
    unknown = ""
    if start is None and config.start not in ZERO_STARTS:
        unknown = (
            "the adapter starts at other values than B = 0 (init_lora_weights="
            f"{config.start!r}): give --start, made by the agreed config"
        )
        if options.first:
            raise SourceError(unknown)
    shapes = None if start is None else {n: t.shape for n, t in start.items()}
    if options.base is None or unknown:
        unknown = unknown or "the base is not known"
        return Agreed({}, {}, start, options.shared_seed, shapes, unknown=unknown)
    anatomy = find_model(options.base)
    adapters = list(inspection.find_adapters(received))
    base, scales = {}, {}
    for adapter in adapters:
        rows = _base_rows(anatomy, adapter.name)
        scale = config.scale(len(adapter.down))
        if rows is not None and scale is not None:
            base[adapter.name], scales[adapter.name] = rows, scale
    usual = {}
    if options.text is not None:
        names = [a.name for a in adapters if a.bias is not None]
        texts = read_texts(options.text, options.column)
        usual = _usual_inputs(anatomy, names, texts, options.base)
    return Agreed(base, scales, start, options.shared_seed, shapes, usual)


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file in safetensors, or of a folder of PEFT.

    Raises:
        SourceError: there is no such file, or it is of another form.
    """
    file = path / WEIGHTS if path.is_dir() else path
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise SourceError(
            f"'{file}' cannot be read as safetensors ({error}): give a folder with {WEIGHTS}, or "
            "such a file; one that is pickled is not opened"
        ) from None


@dataclass(frozen=True)
class AdapterConfig:
    """What PEFT's config says of LoRAs.

    Attributes:
        alpha: of all of them; None where they differ, there is no config, or under DoRA, which
            scales rows otherwise.
        rslora: whether alpha is divided by the square root of the rank.
        start: ``init_lora_weights``.
    """

    alpha: float | None = None
    rslora: bool = False
    start: str | bool = True

    @classmethod
    def read(cls, path: Path) -> AdapterConfig | None:
        """Return the config in a folder, or beside a file; None where there is none."""
        file = (path if path.is_dir() else path.parent) / CONFIG
        if not file.is_file():
            return None
        try:
            content = dict(json.loads(file.read_text("utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise SourceError(
                f"'{file}' is no config of PEFT ({error}): repair or remove it"
            ) from None
        alpha = content.get("lora_alpha")
        if content.get("alpha_pattern") or content.get("use_dora"):
            alpha = None
        if not isinstance(alpha, int | float | None):
            raise SourceError(f"'{file}': lora_alpha is {alpha!r}, no number")
        start = content.get("init_lora_weights", True)
        return cls(alpha, bool(content.get("use_rslora")), start)

    def scale(self, rank: int) -> float | None:
        """Return what B A is multiplied by; None where it is not known."""
        return self.alpha and self.alpha / (rank**0.5 if self.rslora else rank)


def _base_rows(anatomy: Anatomy, name: str) -> Tensor | None:
    """Return the matrix of the base that a LoRA acts on; None for a bottleneck, or if not there."""
    target = re.sub(r"\.lora_A.*", "", name)
    for path in (target, target.removeprefix("base_model.model."), target.removeprefix("model.")):
        try:
            return inspection.base_rows(anatomy.root.get_submodule(path))
        except AttributeError:
            continue
    return None


def _usual_inputs(
    anatomy: Anatomy, names: Sequence[str], texts: Sequence[str], base: str
) -> dict[str, Tensor]:
    """Return what bottlenecks read at usual token types, as far as the base alone shows it.

    Behind the embedding that is its output; at a block, whose number is in the name, the output of
    the block.
    """
    if not names:
        return {}
    tokenizer = load_tokenizer(base)
    rows = tokenizer(list(texts[:TEXTS]), truncation=True, max_length=LENGTH)["input_ids"]
    ids = pad_sequence([torch.tensor(row) for row in rows if row], batch_first=True)
    mask = pad_sequence([torch.ones(len(row)) for row in rows if row], batch_first=True)
    real = mask.bool()
    usual = inspection.usual_types(ids[real])
    layers = {n: int(m[1]) + 1 if (m := re.search(r"\.(\d+)\.", n)) else 0 for n in names}
    sums = {
        layer: inspection.sum_inputs(
            hidden_states(anatomy, layer, ids, real)[real], ids[real], usual
        )
        for layer in set(layers.values())
    }
    return {name: sums[layer] for name, layer in layers.items()}


def _listed(names: Sequence[str]) -> str:
    """Return the number of tensors and the names of the first ones."""
    more = ", ..." if len(names) > inspection.WORST else ""
    return f"{len(names)} tensors ({', '.join(names[: inspection.WORST])}{more})"


def _rules_table(result: Inspection) -> Table:
    """Return a table with a row for each rule."""
    rows = Table("rule", "value", "limit", "rows")
    rows.add_column("worst rows, or why the rule does not apply", overflow="fold")
    for answer in result.answers:
        if answer.why:
            rows.add_row(answer.rule, "", "", "", f"not applicable: {answer.why}")
        else:
            limit = inspection.LIMITS[answer.rule]
            worst = " ".join(answer.rows)
            if answer.unasked:
                worst += f" not asked of {_listed(answer.unasked)}"
            value, count = f"{answer.value:.3g}", str(answer.count)
            rows.add_row(answer.rule, value, f"{limit:g}", count, worst.strip())
    return rows


def _sentences(result: Inspection) -> list[str]:
    """Return the verdict, what it does not cover, and the tensors that no rule reads."""
    sentences = []
    if result.unread:
        sentences.append(
            f"No rule reads what is in neither a LoRA nor a bottleneck: {_listed(result.unread)}."
        )
    if result.verdict == "crafted":
        rules = ", ".join(answer.rule for answer in result.found)
        sentences.append(f"CRAFTED: found by {rules}. Do not train on these values.")
    elif result.verdict == "diverged":
        sentences.append(
            f"DIVERGED: {', '.join(result.diverged[: inspection.WORST])}. These values look like a "
            "run that came apart, behind which crafted ones may hide. Do not train on them."
        )
    else:
        sentences.append(f"Nothing found. {CAVEAT}")
    return sentences

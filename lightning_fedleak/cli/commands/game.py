"""``fedleak game``: plays the membership game on a model and a text, and explains the results."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.commands.printing import (
    make_file,
    model_name,
    print_table,
    short,
    text_name,
)
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    SourceError,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.cli.studies import membership
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.models import check_context, find_model, with_lora
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.evaluation.games.play import Defend
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.anatomy import Anatomy

_PUBLIC_SHARE = 0.25  # of --text that the server gets; not tuned, more leaves fewer sentences
_PUBLIC_TEXTS = 200  # texts that the server calibrates on, at most; not tuned, more take longer
_POOL = 1000  # texts that games are drawn from, at most; not tuned, more take longer
_ADDS = (
    "A dishonest server has added layers of its own, sets dropout to 0, and asks whether one "
    "sentence is in that batch. "
)
_READS = (
    "An honest but curious server asks the same of the gradient of what is trained (--attack "
    "gradient, subspace). "
)
_COLUMNS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "advantage": "advantage",
    "tpr_at_fpr_0.01": "TPR at 1% FPR",
}


def run(options: Namespace, console: Console | None = None) -> int:
    """Play and print.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0.

    Raises:
        SourceError: model or text cannot be used.
        AnatomyError: the model's parts could not be found.
        GameError: model, text, layer and settings do not go together.
    """
    console = console or Console(highlight=False)
    if options.json is not None:
        make_file(options.json, "--json")
    tokenizer = load_tokenizer(options.model)
    anatomy = find_model(options.model)
    anatomy = with_lora(anatomy, options.lora_r, options.targets, options.seed)
    if options.lora_r:
        membership.move_from_start(anatomy, options.seed)
    check_context(anatomy, options.tokens, "--tokens")
    defense = None
    if options.defense is not None:
        defense = _parse_defense(options.defense, tokenizer)
        defense.before_setup(_context(anatomy, options.seed))
    texts, public = _texts(options, anatomy, tokenizer)
    pool = SentencePool.from_texts(texts, tokenizer, options.tokens)
    attacks = membership.make_adversaries(
        options.attack,
        options.layer or [max(1, len(anatomy.blocks) // 2)],
        public,
        tokens=options.tokens,
        batch=options.batch,
        randomised=defense is not None,
        seed=options.seed,
    )
    config = GameConfig(
        games=options.games,
        batch=options.batch,
        relation=options.relation,
        forwards="pooled" if defense is None else "fresh",
        seed=options.seed,
    )
    console.print(_introduction(options, pool))
    if defense is not None:
        console.print(
            f"Before it is trained on, its text is randomised ({options.defense}). "
            f"Guarantee: {defense.guarantee}.",
            soft_wrap=True,
        )
    defend = None if defense is None else _defend(defense, _context(anatomy, options.seed))
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        advance = functools.partial(
            progress.advance, progress.add_task("games", total=config.games)
        )
        results = play(anatomy, attacks, pool, config, progress=advance, defend=defend)
    print_table(console, game_table(results, fitted=defense is not None))
    console.print(explain_games(results, fitted=defense is not None))
    if options.json is not None:
        content = {
            "schema": 1,
            "model": options.model or "embedded",
            "text": options.text or "embedded",
            "column": options.column,
            "pool": {"sentences": len(pool), "duplicates": pool.duplicates, "short": pool.short},
            "precision": "fp32",
            "defense": options.defense,
            "guarantee": None if defense is None else defense.guarantee,
            "results": [r.to_dict(games=True) for r in results],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"\nWritten to {options.json}.", soft_wrap=True)
    return 0


def _parse_defense(text: str, tokenizer: Any) -> TokenLDP:
    """Return what randomises the client's tokens, in every game again unless ``memoize`` is set."""
    specs = parse_defenses(text)
    if [spec.kind for spec in specs] != [TokenLDP.name]:
        raise SourceError(
            f"--defense {text}: a game is played with one defence of the client's tokens, one of "
            "grr, rappor, the and dbitflip, as grr:epsilon=5. What acts on gradients or hidden "
            "states is measured in a fit: fedleak sweep --defense"
        )
    # The batch is ids alone, from which a client's loss reads its labels.
    arguments = {"memoize": False, **specs[0].arguments}
    form = replace(arguments.pop("form", BatchForm()), kind="causal")
    return TokenLDP(**arguments | {"special_ids": tokenizer, "form": form})


def _context(anatomy: Anatomy, seed: int) -> DefenseContext:
    """Return the context of a fit of one client, whose secret follows from the seed."""
    secret = hashlib.sha256(f"fedleak game, seed {seed}".encode()).digest()
    return DefenseContext(anatomy.model, 0, 1, anatomy.device, "32-true", 0, secret)


def _defend(defense: TokenLDP, context: DefenseContext) -> Defend:
    def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
        batch = {"input_ids": ids, "attention_mask": mask}
        replaced: Tensor = defense.on_batch(batch, context)["input_ids"]
        return replaced

    return defend


def _texts(
    options: Namespace, anatomy: Anatomy, tokenizer: Any
) -> tuple[list[str], PublicText | None]:
    """Return the game's corpus, and the server's text, which is no part of it."""
    texts = read_texts(options.text or EMBEDDED_MESSAGES, options.column, option="--column")
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(texts), generator=generator).tolist()
    if all(name.startswith("fc") for name in options.attack):
        return [texts[i] for i in sorted(order[:_POOL])], None
    public_texts: list[str] = []
    if options.public is None:
        n = min(_PUBLIC_TEXTS, int(len(texts) * _PUBLIC_SHARE))
        if n == 0:
            raise SourceError(
                f"{len(texts)} texts are too few to give the server some to calibrate on; "
                "give more text, or the server's own with --public."
            )
        public_texts, order = [texts[i] for i in order[:n]], order[n:]
    elif options.public != "sampled":
        public_texts = read_texts(options.public)[:_PUBLIC_TEXTS]
    texts = [text for i in sorted(order[:_POOL]) if (text := texts[i]) not in {*public_texts}]
    if options.public == "sampled":
        return texts, PublicText.sampled_from(anatomy, _PUBLIC_TEXTS, options.tokens, options.seed)
    ids = tokenizer(public_texts, truncation=True, max_length=options.tokens)["input_ids"]
    return texts, PublicText(ids)


def _introduction(options: Namespace, pool: SentencePool) -> str:
    model = model_name(options.model)
    trained = f"a LoRA of rank {options.lora_r} on {model}" if options.lora_r else model
    servers = _ADDS if any(name not in membership.PASSIVE for name in options.attack) else ""
    servers += _READS if any(name in membership.PASSIVE for name in options.attack) else ""
    return (
        f"A client trains {trained} (fp32) on a batch of {options.batch} out of "
        f"{len(pool)} different sentences of {text_name(options.text)}, each of at most "
        f"{options.tokens} tokens ({pool.duplicates} repeats and {pool.short} too short "
        f"ones left out). {servers}"
    )


def game_table(results: Sequence[GameResult], fitted: bool = False) -> Table:
    """Return each adversary's rates with their 95% intervals; once more without collisions, if any.

    Args:
        results: of the same games.
        fitted: accuracy and advantage of a threshold that is fitted on other games.
    """
    title = "the game of Fig. 2: fair bit, random target"
    if results[0].relation == "add_remove":
        title = "the game that adds or removes: a random target, or nothing in its place"
    rows = []
    for result in results:
        rows.append((result.attack, result))
        if result.collides.any() and not result.collides.all():
            rows.append(("  no collision", result.without_collisions()))
    rates = [result.summary(fitted=fitted) for _, result in rows]
    names = [n for n in _COLUMNS if n == "accuracy" or any(_is_known(r[n]) for r in rates)]
    columns = Table(title=title)
    columns.add_column("attack@layer")
    columns.add_column("games", justify="right")
    for name in names:
        columns.add_column(_COLUMNS[name])
    for (label, result), rates_of_row in zip(rows, rates, strict=True):
        columns.add_row(label, str(len(result)), *(_interval(rates_of_row[name]) for name in names))
    return columns


def _is_known(rate: Rate) -> bool:
    return not math.isnan(rate.value)


def _interval(rate: Rate) -> str:
    if not _is_known(rate):
        return "unknown"
    return f"{short(rate.value)} [{short(rate.low)}, {short(rate.high)}]"


def explain_games(results: Sequence[GameResult], fitted: bool = False) -> str:
    """Return what the table means, in sentences."""
    lines = [
        "",
        "Guessing gives accuracy and AUC .5 and advantage 0; 1 is certainty. In brackets: 95% "
        "intervals.",
    ]
    for layer in dict.fromkeys(r.layer for r in results):
        collisions = max((int(r.collides.sum()) for r in results if r.layer == layer), default=0)
        if collisions:
            lines.append(
                f"Layer {layer}: in {collisions} of {len(results[0])} games the batch held the "
                "target token's hidden state in another sentence too (the same word, or the same "
                "words up to it). No attack that reads this state alone can separate the two."
            )
    if fitted:
        lines.append(
            "Accuracy and advantage use a threshold on the scores that was fitted on other games: "
            "an adversary's own decision is meant for text that was not randomised."
        )
    lines.append("A low number says that these attacks fail here, not that none succeeds.")
    return "\n".join(lines)

"""``fedleak game``: runs the membership game on a model and a text, and explains the results.

In each game, a client trains on a random batch of sentences. A target sentence is in the batch or
not, by a fair bit, and each adversary (an attack of the server) guesses which from the gradient.
Active adversaries add layers to the model before; passive ones read the gradient of the parameters
that the client trains.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from lightning_fedleak import attacks
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.membership.fc import RANDOMISED_LADDER, FCMembership
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.printing import format_share, model_name, print_table, text_name
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.models import check_context, find_model, with_lora
from lightning_fedleak.defenses import BatchForm, DefenseContext, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.evaluation.games.play import Adversary, Defend
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.anatomy import Anatomy

_PUBLIC_SHARE = 0.25  # the share of --text that the server gets; the games get the rest; not tuned
_PUBLIC_TEXTS = 200  # texts that the server calibrates on, at most; not tuned, more take longer
_MAX_POOL = 1000  # texts that games are drawn from; not tuned, more take longer
_ACTIVE_SERVER = (
    "A dishonest server has added layers to the model, sets dropout to 0, and decides whether one "
    "sentence is in that batch. "
)
_PASSIVE_SERVER = (
    "An honest but curious server decides from the gradient of the trained parameters whether one "
    "sentence is in that batch (--attack gradient, subspace). "
)
PASSIVE: dict[str, type[attacks.GradientMembership] | type[attacks.SubspaceMembership]] = {
    "gradient": attacks.GradientMembership,
    "subspace": attacks.SubspaceMembership,
}
"""The attacks that add no layers to the model, by name."""
# The rates in the table, with their headers.
_COLUMNS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "advantage": "advantage",
    "tpr_at_fpr_0.01": "TPR at 1% FPR",
}


def run(options: Namespace, console: Console | None = None) -> int:
    """Run the games, and print the results.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0.

    Raises:
        SourceError: The model or the text cannot be used.
        AnatomyError: The model's parts could not be found.
        ValueError: Model, text, layer and settings do not go together.
    """
    console = console or Console(highlight=False)
    tokenizer = finetuning.load_tokenizer(options.model)
    anatomy = find_model(options.model)
    anatomy = with_lora(anatomy, options.lora_r, options.targets, options.seed)
    if options.lora_r:
        _move_from_start(anatomy, options.seed)
    check_context(anatomy, options.tokens, "--tokens")
    defense = None
    if options.defense is not None:
        defense = _parse_defense(options.defense, tokenizer)
        defense.before_setup(_context(anatomy, options.seed))
    texts, public = _texts(options, tokenizer)
    pool = SentencePool.from_texts(texts, tokenizer, options.tokens)
    layers = options.layer or [max(1, len(anatomy.blocks) // 2)]
    adversaries = _make_adversaries(options, layers, public, randomised=defense is not None)
    # A defence draws new tokens in each game, so the pool's hidden states cannot be computed once.
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
    with Progress(console=console, transient=True) as progress:
        advance = functools.partial(
            progress.advance, progress.add_task("games", total=config.games)
        )
        results = play(anatomy, adversaries, pool, config, progress=advance, defend=defend)
    print_table(console, game_table(results, fitted=defense is not None))
    console.print(explain_games(results, fitted=defense is not None))
    return 0


def _make_adversaries(
    options: Namespace, layers: Sequence[int], public: PublicText | None, *, randomised: bool
) -> list[Adversary]:
    """Return the attacks: first the active ones, named ``name@layer``, then the passive ones.

    Args:
        options: The options of the command; its seed is that of the calibration.
        layers: The blocks whose output the active attacks read.
        public: The server's public text; None if no attack calibrates on it.
        randomised: Whether the client's tokens are replaced before training. FCMembership then
            gets a longer ladder, ``RANDOMISED_LADDER``.
    """
    names, tokens, seed = options.attack, options.tokens, options.seed
    ladder: dict[str, Any] = {"ladder": RANDOMISED_LADDER} if randomised else {}
    adversaries: list[Adversary] = []
    for layer, name in itertools.product(layers, [n for n in names if n not in PASSIVE]):
        # What a target is: its whole text, or one token of it in its context.
        target: Literal["full", "token"] = "full" if name.endswith("-full") else "token"
        common: dict[str, Any] = {"tokens": tokens, "name": f"{name}@{layer}"}
        if name.startswith("fc"):
            adversaries.append(FCMembership(layer, target, **common, **ladder))
            continue
        assert public is not None
        common["batch"] = options.batch
        adversaries.append(attacks.AttentionMembership(layer, public, seed=seed, **common))
    for name in (n for n in names if n in PASSIVE):
        assert public is not None
        adversaries.append(PASSIVE[name](public, tokens=tokens, seed=seed, name=name))
    return adversaries


def _move_from_start(anatomy: Anatomy, seed: int) -> None:
    """Set the B of a new LoRA to small values, in place, because A has no gradient while B is 0."""
    parameters = dict(anatomy.model.named_parameters())
    values = attacks.nonzero_starts(anatomy, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def _parse_defense(text: str, tokenizer: Any) -> TokenLDP:
    """Return the defence that replaces the client's tokens, by a new draw in every game by default.

    Raises:
        SourceError: ``--defense`` names another defence, or more than one.
    """
    specs = parse_defenses(text)
    if [spec.kind for spec in specs] != [TokenLDP.name]:
        raise finetuning.SourceError(
            f"--defense {text}: a game takes one defence of the client's tokens, 'grr', 'rappor', "
            "'the' or 'dbitflip', such as grr:epsilon=5. For other defences use fedleak sweep "
            "--defense"
        )
    # The batch holds only ids, which are also the labels of the client's loss.
    arguments = {"memoize": False, **specs[0].arguments}
    form = replace(arguments.pop("form", BatchForm()), kind="causal")
    return TokenLDP(**arguments | {"special_ids": tokenizer, "form": form})


def _context(anatomy: Anatomy, seed: int) -> DefenseContext:
    """Return the context of a fit of one client, whose secret follows from the seed."""
    secret = hashlib.sha256(f"fedleak game, seed {seed}".encode()).digest()
    # Client 0 of 1, at step 0.
    return DefenseContext(anatomy.model, 0, 1, anatomy.device, "32-true", 0, secret)


def _defend(defense: TokenLDP, context: DefenseContext) -> Defend:
    """Return the defence as a function of a batch's ids and mask."""

    def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
        batch = {"input_ids": ids, "attention_mask": mask}
        replaced: Tensor = defense.on_batch(batch, context)["input_ids"]
        return replaced

    return defend


def _texts(options: Namespace, tokenizer: Any) -> tuple[list[str], PublicText | None]:
    """Return the texts of the games, and the server's public text; None if no attack needs it.

    No text is in both. Two texts may still agree in their first ``--tokens`` tokens.

    Raises:
        SourceError: There are too few texts for a public one, or they cannot be read.
    """
    texts = finetuning.read_texts(options.text or finetuning.EMBEDDED_MESSAGES, options.column)
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(texts), generator=generator).tolist()
    if all(name.startswith("fc") for name in options.attack):
        return [texts[i] for i in sorted(order[:_MAX_POOL])], None
    n = min(_PUBLIC_TEXTS, int(len(texts) * _PUBLIC_SHARE))
    if n == 0:
        raise finetuning.SourceError(
            f"{len(texts)} texts are too few to give the server some to calibrate on: give more"
        )
    public_texts, order = [texts[i] for i in order[:n]], order[n:]
    texts = [text for i in sorted(order[:_MAX_POOL]) if (text := texts[i]) not in {*public_texts}]
    ids = tokenizer(public_texts, truncation=True, max_length=options.tokens)["input_ids"]
    return texts, PublicText(ids)


def _introduction(options: Namespace, pool: SentencePool) -> str:
    """Return sentences that say what the client trains, and what the servers do."""
    model = model_name(options.model)
    trained = f"a LoRA of rank {options.lora_r} on {model}" if options.lora_r else model
    servers = _ACTIVE_SERVER if any(name not in PASSIVE for name in options.attack) else ""
    servers += _PASSIVE_SERVER if any(name in PASSIVE for name in options.attack) else ""
    return (
        f"A client trains {trained} (fp32) on a batch of {options.batch} out of "
        f"{len(pool)} different sentences of {text_name(options.text)}, each of at most "
        f"{options.tokens} tokens ({pool.duplicates} repeats and {pool.short} too short "
        f"ones excluded). {servers}"
    )


def game_table(results: Sequence[GameResult], fitted: bool = False) -> Table:
    """Return a table of each adversary's rates with 95% intervals.

    A game has a collision if the batch holds the hidden state of the target's token in another
    sentence too. An adversary has a second row, of the games without collisions, if it has games
    of both kinds.

    Args:
        results: The results of the same games.
        fitted: Whether accuracy and advantage use a threshold that is fitted on other games.
    """
    title = "the game of Vu et al. 2024, Fig. 2: fair bit, random target"
    if results[0].relation == "add_remove":
        # The other relation, replace_one, puts another sentence in the place of the target.
        title = "the game of adding or removing a text: a random target is in the batch or not"
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
    return f"{format_share(rate.value)} [{format_share(rate.low)}, {format_share(rate.high)}]"


def explain_games(results: Sequence[GameResult], fitted: bool = False) -> str:
    """Return an explanation of the table.

    Args:
        results: The results of the same games.
        fitted: Whether the threshold was fitted, see :func:`game_table`.
    """
    lines = [
        "",
        "Guessing gives accuracy and AUC 0.5 and advantage 0; 1 is certainty. In brackets: 95% "
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
            "Accuracy and advantage use a threshold on the scores that was fitted on other games, "
            "because the adversaries' decisions are made for text that is not randomised."
        )
    lines.append("A low number says that these attacks fail here, not that none succeeds.")
    return "\n".join(lines)

"""``fedleak game``: plays the membership game on a model and a text, and explains the results."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.commands.options import GameOptions
from lightning_fedleak.cli.commands.printing import model_name, print_table, text_name, unwritable
from lightning_fedleak.cli.finetuning import (
    EMBEDDED_MESSAGES,
    SourceError,
    load_tokenizer,
    read_texts,
)
from lightning_fedleak.cli.studies import membership
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.models import PRECISIONS, check_context, find_model, with_lora
from lightning_fedleak.defenses import BatchForm, Defense, DefenseContext, DefenseError, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.evaluation.games.play import Defend
from lightning_fedleak.evaluation.games.pool import AUTHORS_POSITION
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.model.anatomy import Anatomy, Kind

_PUBLIC_SHARE = 0.25  # of --text that the server gets; not tuned, more leaves fewer sentences
_PUBLIC_TEXTS = 200  # texts that the server calibrates on, at most; not tuned, more take longer
_ADDS = (
    "A dishonest server has added layers of its own, and asks whether one sentence is in that "
    "batch. "
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


@dataclass(frozen=True)
class GameCommand(GameOptions):
    """The command ``fedleak game``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Play and print.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: model or text cannot be used.
            AnatomyError: the model's parts could not be found.
            GameError: model, text, layer and settings do not go together.
        """
        console = console or Console(highlight=False)
        if self.json is not None and (self.json.is_dir() or not self.json.parent.is_dir()):
            raise SourceError(f"--json {self.json} is no file in an existing folder")
        tokenizer = load_tokenizer(self.model)
        anatomy = find_model(self.model, PRECISIONS[self.precision])
        anatomy = with_lora(anatomy, self.lora_r, self.targets, self.seed)
        if self.lora_r:
            membership.move_from_start(anatomy, self.seed)
        check_context(anatomy, self.tokens, "--tokens")
        layers = self.layer or [max(1, len(anatomy.blocks) // 2)]
        defense = self._defense(anatomy, tokenizer)
        texts, public = self._texts(anatomy, tokenizer)
        pool = self._pool(texts, tokenizer, anatomy.kind)
        adversaries = membership.MembershipAdversaries(
            self.tokens, self.batch, public, defense is not None, self.seed
        )
        attacks = adversaries.make(self.attack, layers)
        closed = self.gradients == "closed_form"
        config = GameConfig(
            games=self.games,
            batch=self.batch,
            protocol=self.protocol,
            relation=self.relation,
            gradients=self.gradients,
            position=self.position,
            forwards=self.forwards or ("pooled" if closed and defense is None else "fresh"),
            targets_per_batch=self.targets_per_batch,
            seed=self.seed,
        )
        self._introduce(console, pool)
        if defense is not None:
            console.print(
                f"Before it is trained on, its text is randomised ({self.defense}). "
                f"Guarantee: {defense.guarantee}.",
                soft_wrap=True,
            )
        planted = self._planted(tokenizer)
        defend = None if defense is None else self._defend(defense, anatomy)
        columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            advance = functools.partial(
                progress.advance, progress.add_task("games", total=config.games)
            )
            results = play(
                anatomy, attacks, pool, config, planted=planted, progress=advance, defend=defend
            )
        fitted = defense is not None and self.protocol == "game"
        print_table(console, game_table(results, fitted))
        console.print(explain_games(results, fitted))
        if self.json is not None:
            self._write(results, pool, defense)
            console.print(f"\nWritten to {self.json}.", soft_wrap=True)
        return 0

    def _defense(self, anatomy: Anatomy, tokenizer: Any) -> TokenLDP | None:
        """Return what randomises the client's tokens, in every game again unless ``memoize`` is
        set.
        """
        if self.defense is None:
            return None
        try:
            specs = parse_defenses(self.defense)
        except SourceError as error:
            raise SourceError(f"--defense: {error}") from error
        if [spec.kind for spec in specs] != [TokenLDP.name]:
            raise SourceError(
                f"--defense {self.defense}: a game is played with one defence of the client's "
                "tokens, one of grr, rappor, the and dbitflip, as grr:epsilon=5. What acts on "
                "gradients or hidden states is measured in a fit: fedleak sweep --defense"
            )
        if reserved := {"special_ids", "kind"} & {*specs[0].settings}:
            raise SourceError(
                f"--defense {self.defense}: the game itself sets 'special_ids' and 'kind', leave "
                f"{' and '.join(sorted(reserved))} out"
            )
        # The batch is ids alone, from which a client's loss reads its labels.
        arguments = {"memoize": False, **specs[0].arguments}
        form = replace(arguments.pop("form", BatchForm()), kind="causal")
        defense = TokenLDP(**arguments, special_ids=tokenizer, form=form)
        try:
            defense.before_setup(self._context(anatomy))
        except DefenseError as error:
            raise SourceError(f"--defense {self.defense}: {error}") from error
        return defense

    def _context(self, anatomy: Anatomy) -> DefenseContext:
        """Return the context of a fit of one client, whose secret follows from the seed."""
        secret = hashlib.sha256(f"fedleak game, seed {self.seed}".encode()).digest()
        return DefenseContext(anatomy.model, 0, 1, anatomy.device, "32-true", 0, secret)

    def _defend(self, defense: Defense, anatomy: Anatomy) -> Defend:
        context = self._context(anatomy)

        def defend(ids: Tensor, mask: Tensor | None) -> Tensor:
            batch = {"input_ids": ids, "attention_mask": mask}
            replaced: Tensor = defense.on_batch(batch, context)["input_ids"]
            return replaced

        return defend

    def _texts(self, anatomy: Anatomy, tokenizer: Any) -> tuple[list[str], PublicText | None]:
        """Return the game's corpus, and the server's own text, which is no part of it."""
        texts = read_texts(self.text or EMBEDDED_MESSAGES, self.column, option="--column")
        order = torch.randperm(
            len(texts), generator=torch.Generator().manual_seed(self.seed)
        ).tolist()
        owned: list[str] = []
        needed = not all(name.startswith("fc") for name in self.attack)
        if needed and self.public is None:
            n = min(_PUBLIC_TEXTS, int(len(texts) * _PUBLIC_SHARE))
            if n == 0:
                raise SourceError(
                    f"{len(texts)} texts are too few to give the server some to calibrate on; "
                    "give more text, or the server's own with --public."
                )
            owned, order = [texts[i] for i in order[:n]], order[n:]
        elif needed and self.public is not None and self.public != "sampled":
            owned = read_texts(self.public, self.public_column, option="--public-column")[
                :_PUBLIC_TEXTS
            ]
        public_texts = set(owned)
        texts = [t for t in (texts[i] for i in sorted(order[: self.pool])) if t not in public_texts]
        if not needed:
            return texts, None
        if self.public == "sampled":
            return texts, PublicText.sampled_from(
                anatomy, _PUBLIC_TEXTS, self.tokens, self.seed, start_token_id=self.bos
            )
        front = [] if self.bos is None else [self.bos]
        length = self.tokens - len(front)
        ids = tokenizer(owned, truncation=True, max_length=length)["input_ids"]
        return texts, PublicText([front + row for row in ids])

    def _pool(self, texts: Sequence[str], tokenizer: Any, kind: Kind) -> SentencePool:
        at_least = 2
        if isinstance(self.position, int) and self.protocol == "game":
            # A token that is the last of its sentence enters no next-token loss.
            at_least = max(2, self.position + (2 if kind == "causal" else 1))
        if at_least > self.tokens:
            raise SourceError(
                f"--position {self.position} needs sentences of at least {at_least} tokens, and "
                f"--tokens {self.tokens} cuts them: give more tokens or an earlier position"
            )
        return SentencePool.from_texts(
            texts, tokenizer, self.tokens, at_least=at_least, start_token_id=self.bos
        )

    def _planted(self, tokenizer: Any) -> Tensor | None:
        if self.protocol != "authors":
            return None
        front = [] if self.bos is None else [self.bos]
        ids = front + tokenizer(membership.PLANTED, verbose=False)["input_ids"]
        place = self.position if isinstance(self.position, int) else AUTHORS_POSITION
        if self.tokens <= place:
            raise SourceError(
                f"the authors' protocol asks for token {place} (counted from 0) of a sentence of "
                f"--tokens {self.tokens}: give at least {place + 1}"
            )
        return torch.tensor(ids)

    def _introduce(self, console: Console, pool: SentencePool) -> None:
        model = model_name(self.model)
        trained = model if self.lora_r == 0 else f"a LoRA of rank {self.lora_r} on {model}"
        servers = _ADDS if any(name not in membership.PASSIVE for name in self.attack) else ""
        servers += _READS if any(name in membership.PASSIVE for name in self.attack) else ""
        console.print(
            f"A client trains {trained} ({self.precision}) on a batch of {self.batch} out of "
            f"{len(pool)} different sentences of {text_name(self.text)}, each of at most "
            f"{self.tokens} tokens ({pool.duplicates} repeats and {pool.short} too short "
            f"ones left out). {servers}"
        )

    def _write(
        self, results: Sequence[GameResult], pool: SentencePool, defense: Defense | None
    ) -> None:
        assert self.json is not None
        content = {
            "schema": 1,
            "model": self.model or "embedded",
            "text": self.text or "embedded",
            "column": self.column,
            "pool": {"sentences": len(pool), "duplicates": pool.duplicates, "short": pool.short},
            "precision": self.precision,
            "defense": self.defense,
            "guarantee": None if defense is None else defense.guarantee,
            "results": [r.to_dict(games=True) for r in results],
        }
        try:
            self.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise unwritable(self.json, error, "file with --json") from error


def game_table(results: Sequence[GameResult], fitted: bool = False) -> Table:
    """Return each adversary's rates with their 95% intervals; once more without collisions, if any.

    Args:
        results: of the same games.
        fitted: accuracy and advantage of a threshold that is fitted on other games.
    """
    title = {
        "game": "the game of Fig. 2: fair bit, random target",
        "authors": "the protocol of the authors' code: one planted sentence, two worlds",
    }[results[0].protocol]
    if results[0].relation == "add_remove":
        title = "the game that adds or removes: a random target, or nothing in its place"
    rows = []
    for result in results:
        rows.append((result.attack, result))
        if result.collides.any() and not result.collides.all():
            rows.append(("  no collision", result.without_collisions()))
    rates = [result.summary(fitted=fitted) for _, result in rows]
    names = [n for n in _COLUMNS if n == "accuracy" or any(_is_known(r[n]) for r in rates)]
    if any(r.layer is not None for r in results):
        title += f" (gradients: {results[0].gradients.replace('_', ' ')})"
    columns = Table(title=title)
    columns.add_column("attack@layer", no_wrap=True)
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
    value, low, high = (_short(v) for v in (rate.value, rate.low, rate.high))
    return f"{value} [{low}, {high}]"


def _short(value: float) -> str:
    """Return three digits without the leading zero; an exact 1 as 1, unlike .9996."""
    return "1" if value == 1 else f"{value:.3f}".replace("0.", ".", 1)


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
    if any(r.layer is not None for r in results):
        lines.append(
            "A server that adds layers must be dishonest: it chooses the layers and weights that "
            "are trained, and sets dropout to 0."
        )
    if fitted:
        lines.append(
            "Accuracy and advantage use a threshold on the scores that was fitted on other games: "
            "an adversary's own decision is meant for text that was not randomised."
        )
    lines.append("A low number says that these attacks fail here, not that none succeeds.")
    return "\n".join(lines)

"""What a trained model gives away of its training texts, beside its base: after the fact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import memorization
from lightning_fedleak.canaries import InclusionRecord
from lightning_fedleak.canaries.items import digest_of
from lightning_fedleak.canaries.repeats import LEAST_LABELS, scored_texts
from lightning_fedleak.extras import install
from lightning_fedleak.finetuning import SourceError
from lightning_fedleak.metrics import Rate, released
from lightning_fedleak.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.studies.models import find_model
from lightning_fedleak.taps import Text, ask_tokens, compressed_bytes, pool_digest

LEAST_TEXTS = 10  # on either side, two for each fold of the blind word scores


def all_attacks() -> tuple[memorization.MemorizationAttack, ...]:
    """Return every attack on a released model, the headline first and the baselines last."""
    return (
        memorization.Combined(),
        memorization.LossRatio(),
        memorization.ErrorZone(),
        memorization.Windows(),
        memorization.MinK(calibrated=True, name="min_k_base"),
        memorization.MinK(),
        memorization.Zlib(),
        memorization.Loss(),
        memorization.Extraction(),
    )


@dataclass(frozen=True)
class Comparison:
    """What the members' scores show beside the others'.

    Attributes:
        values: by attack, what :func:`~lightning_fedleak.metrics.released.membership_values` or
            :func:`~lightning_fedleak.metrics.released.extraction_values` returns.
        blind: AUC of each score that knows nothing of the training.
        n_members: members that were scored.
        n_others: others that were scored.
        visible: the least TPR at 1% FPR that so many texts show with probability 0.8.
        needed: others that ``shown`` needs.
    """

    values: Mapping[str, Mapping[str, float]]
    blind: Mapping[str, Rate]
    n_members: int
    n_others: int
    visible: float
    needed: int

    @property
    def one_law(self) -> bool:
        """Return whether members and others could not be told apart before the training."""
        return released.follow_one_law(self.blind)


class ReleasedPool:
    """Members and others that a model and its base are asked about.

    Texts with fewer than 8 label tokens, and texts that share 13 label tokens in a row with another
    text of the pool, are left out on both sides.

    Args:
        members: texts that were trained on.
        others: texts that were not.
        decode: returns the words of token ids, for zlib.

    Attributes:
        texts: those that are scored.
        members: (N,) bool.
        short: texts that were left out because they are short.
        repeated: texts that were left out because another one repeats a part of them.
        digest: names the pool, as the monitor's records do; results compare on the same pool only.

    Raises:
        ValueError: fewer than 10 texts are left on either side.
    """

    def __init__(
        self,
        members: Sequence[Text],
        others: Sequence[Text],
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        everyone = [*members, *others]
        rows, self.short, self.repeated = scored_texts(everyone)
        self.texts = [everyone[row] for row in rows]
        self.members = torch.tensor([row < len(members) for row in rows], dtype=torch.bool)
        n = int(self.members.sum())
        if min(n, len(rows) - n) < LEAST_TEXTS:
            raise ValueError(
                f"{n} members and {len(rows) - n} others are left to compare, after "
                f"{self.short} texts of fewer than {LEAST_LABELS} tokens and {self.repeated} that "
                f"repeat parts of others: at least {LEAST_TEXTS} on each side are needed"
            )
        self.digest = pool_digest(self.texts, self.members)
        self.compressed = compressed_bytes(self.texts, decode)

    def compare(
        self,
        base: TokenSnapshot,
        now: TokenSnapshot,
        attacks: Sequence[memorization.MemorizationAttack] = (),
        *,
        look: int = 1,
        alpha: float = 0.05,
    ) -> Comparison:
        """Return what the scores of both sides show.

        Args:
            base: what the base said of the texts.
            now: what the trained model says of them.
            attacks: those that are played; none plays :func:`all_attacks`.
            look: number of the look at these texts, counted from 1.
            alpha: probability of error over all looks together.
        """
        view = Observation(released=ReleasedModel(now, base, self.compressed))
        values: dict[str, Mapping[str, float]] = {}
        for attack in attacks or all_attacks():
            guess = attack.run(view)
            if isinstance(attack, memorization.Extraction) and isinstance(
                guess, memorization.ExtractionGuess
            ):
                values[attack.name] = released.extraction_values(
                    guess, attack, self.members, look=look, alpha=alpha
                )
            elif isinstance(guess, memorization.MemorizationGuess):
                values[attack.name] = released.membership_values(
                    guess.scores, self.members, look=look, alpha=alpha
                )
        n_members = int(self.members.sum())
        n_others = len(self.texts) - n_members
        return Comparison(
            values,
            released.blind_aucs(
                memorization.blind_scores(base, self.compressed, self.texts, self.members),
                self.members,
            ),
            n_members,
            n_others,
            released.visible_tpr(n_members, n_others, look=look, alpha=alpha),
            released.others_needed(look, alpha),
        )


def tokenize(words: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> list[Text]:
    """Return texts as token ids, cut to ``length`` tokens; every token is a label."""
    rows = tokenizer(list(words), truncation=True, max_length=length, verbose=False)["input_ids"]
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return [Text(row, row) for row in ids if len(row)]


Tiers = Mapping[int, dict[str, float] | str]
"""By how often canaries were repeated: their values, or why they are unknown."""


class PlantedCanaries:
    """Canaries that were planted or left out, which a model and its base are asked about.

    Args:
        file: the canaries as JSON lines, in their order: ``input_ids``, and what else they hold.
        record: that :func:`~lightning_fedleak.canaries.with_canaries` wrote.

    Attributes:
        texts: of the canaries.
        record: which of them were planted, and how often.

    Raises:
        SourceError: a file cannot be read, or the canaries are not those of the record.
    """

    def __init__(self, file: Path, record: Path) -> None:
        try:
            self.record = InclusionRecord.load(record)
            rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
            ids = [torch.tensor(row["input_ids"]) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(f"--canaries '{file}' and --record '{record}': {error}") from error
        digests = {digest: n for n, digest in enumerate(self.record.digests)}
        matches = [
            {digests.get(digest_of(form, "a canary")) for form in _forms(row)} for row in rows
        ]
        if len(rows) != len(digests) or any(n not in places for n, places in enumerate(matches)):
            raise SourceError(
                f"--canaries '{file}' does not hold the canaries of --record '{record}' in their "
                "order: give each line the fields that the planted examples have"
            )
        self.texts = [Text(row, row) for row in ids]

    def compare(
        self, base: TokenSnapshot, now: TokenSnapshot, suffix: int | None, alpha: float = 0.05
    ) -> Tiers:
        """Return what each tier shows, or why it is unknown, as the monitor does at one look.

        Args:
            base: what the base said of the texts.
            now: what the trained model says of them.
            suffix: tokens at the end that count; None: all that are predicted.
            alpha: probability of error of all tiers together.

        Raises:
            SourceError: a canary has no token before those that count.
        """
        shortest = min(len(text.ids) for text in self.texts)
        if shortest <= (suffix or 1):
            raise SourceError(
                f"a canary has {shortest} tokens: --suffix counts {shortest - 1} at most"
            )
        attack = memorization.Canaries(suffix)
        model = ReleasedModel(now, base, torch.ones(len(self.texts)))
        guess = attack.run(Observation(released=model))
        assert isinstance(guess, memorization.ExtractionGuess)
        members = torch.tensor(self.record.included)
        repeats = torch.tensor(self.record.repeats)
        return released.canary_tiers(
            guess, attack, self.record.times, repeats, members, ~members, alpha=alpha
        )


def _forms(row: Mapping[str, object]) -> list[object]:
    """Return the examples that a line of JSON may stand for."""
    lists = [row, {**row, "labels": row["input_ids"]}, row["input_ids"]]
    tensors = [
        {name: torch.tensor(value) for name, value in one.items()}
        if isinstance(one, dict)
        else torch.tensor(one)
        for one in lists
    ]
    return [*lists, *tensors]


def ask_both(
    texts: Sequence[Text],
    model: str | Path,
    base: str | Path,
    dtype: torch.dtype = torch.float32,
) -> tuple[TokenSnapshot, TokenSnapshot]:
    """Return what the base and the trained model say of texts; one model is in memory at a time.

    Args:
        texts: the texts.
        model: folder of the trained model, or of PEFT adapters on ``base``.
        base: folder of the model that the training began from, or its name on the hub.
        dtype: of the weights.

    Raises:
        SourceError: a model cannot be loaded, or is not causal.
    """
    anatomy = _causal(find_model(str(base), dtype), "--base")
    before = ask_tokens(anatomy, texts)
    if (Path(model) / "adapter_config.json").is_file():
        after = ask_tokens(_with_adapters(anatomy, model), texts)
    else:
        del anatomy
        after = ask_tokens(_causal(find_model(str(model), dtype), "--model"), texts)
    return before, after


def _causal(anatomy: Anatomy, option: str) -> Anatomy:
    if anatomy.kind != "causal":
        raise SourceError(
            f"{option} is a {anatomy.kind} model: what a model has memorized is read from a causal "
            "language model, which predicts every next token"
        )
    return anatomy


def _with_adapters(anatomy: Anatomy, folder: str | Path) -> Anatomy:
    """Return the base with the adapters of a folder."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise SourceError(f"--model holds adapters of PEFT: {install('peft')}") from error
    try:
        adapted = PeftModel.from_pretrained(anatomy.model, str(folder))
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(f"the adapters in '{folder}' do not fit --base: {error}") from error
    return find_anatomy(adapted.eval())

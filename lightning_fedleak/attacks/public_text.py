"""Text that an adversary owns, as token ids, and batches of it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy, Kind
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model_runs import logits_in, undisturbed
from lightning_fedleak.progress import track

Sampled = Literal["sampled"]
"""Text that a causal model writes itself."""


_LENGTH = 64  # tokens of a sampled text, at most
_kept: ContextVar[dict[Hashable, PublicText] | None] = ContextVar("_kept", default=None)


@contextmanager
def share_samples() -> Iterator[None]:
    """Within, a model writes the same text once, or more of it, whoever asks for it."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


class MissingText(ValueError):
    """An attack that applies has nothing to be calibrated on, which an argument would give it."""


class PublicText:
    """Text the adversary owns, as token ids.

    Examples:
        >>> from lightning_fedleak import PublicText
        >>> text = PublicText([[5, 8, 2], [7, 1], [4]])  # or strings, and a tokenizer
        >>> len(text), text.n_tokens
        (2, 5)

    Args:
        texts: strings (then ``tokenizer`` is needed), sequences of token ids, or a tensor of ids
            with one text per row, (n, L), or a single text, (L,).
        tokenizer: callable with a string, giving ``input_ids`` (any Hugging Face tokenizer).
        targets: for an encoder-decoder, the text that each of ``texts`` maps to. Without them the
            model is calibrated on copying its input.

    Attributes:
        sentences: the texts as 1-D int64 tensors; texts of fewer than 2 tokens are dropped.
        targets: those of an encoder-decoder; None without.
        tokenizer: as it was given.

    Raises:
        ValueError: no text, strings without a tokenizer, or targets that do not pair up.
    """

    def __init__(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        tokenizer: Any = None,
        *,
        targets: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        sentences = _token_ids(texts, tokenizer, "texts")
        paired = None if targets is None else _token_ids(targets, tokenizer, "targets")
        if paired is not None and len(paired) != len(sentences):
            raise ValueError(
                f"PublicText got {len(sentences)} texts but {len(paired)} targets: "
                "give one target for each text."
            )
        kept = [
            i
            for i, s in enumerate(sentences)
            if len(s) >= 2 and (paired is None or len(paired[i]) >= 1)
        ]
        if not kept:
            raise ValueError(
                "PublicText got no text of at least 2 tokens: give some text of the language that "
                "the model was trained on (a hundred sentences will do)."
            )
        self.sentences = [sentences[i] for i in kept]
        self.targets = None if paired is None else [paired[i] for i in kept]
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def n_tokens(self) -> int:
        """Tokens in all texts together."""
        return sum(len(s) for s in self.sentences)

    @property
    def digest(self) -> str:
        """The beginning of the SHA-256 of all token ids of the texts."""
        rows = ",".join(" ".join(map(str, row.tolist())) for row in self.sentences)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    def draw(self, sentences: int, generator: torch.Generator) -> Tensor:
        """Indices of ``sentences`` texts, (sentences,), each once until all have been drawn."""
        if sentences < 1:
            raise ValueError(f"sentences must be at least 1, got {sentences}")
        rounds = [
            torch.randperm(len(self), generator=generator)
            for _ in range(-(-sentences // len(self)))
        ]
        return torch.cat(rounds)[:sentences]

    def batch(
        self,
        sentences: int,
        length: int,
        generator: torch.Generator,
        *,
        kind: Kind = "causal",
        mask_token_id: int | None = None,
        mask_rate: float = 0.15,
    ) -> TokenBatch:
        """A random batch: each text cut to its first ``length`` tokens, padded on the right.

        Args:
            sentences: rows of the batch.
            length: tokens at most in a row, at least 2.
            generator: CPU generator; the batch depends on nothing else.
            kind: what the labels are. ``"masked"`` hides ``mask_rate`` of the tokens (at least
                one a row) behind ``mask_token_id`` and asks for those alone.
            mask_token_id: needed for ``"masked"``.
            mask_rate: share of tokens that are masked.

        Returns:
            ids (sentences, L), L <= length, labels of the same shape (of the targets' for an
            encoder-decoder) with -100 where nothing is predicted; on the CPU.
        """
        return self.rows(
            self.draw(sentences, generator).tolist(),
            length,
            generator,
            kind=kind,
            mask_token_id=mask_token_id,
            mask_rate=mask_rate,
        )

    def rows(
        self,
        indices: Sequence[int],
        length: int,
        generator: torch.Generator,
        *,
        kind: Kind = "causal",
        mask_token_id: int | None = None,
        mask_rate: float = 0.15,
    ) -> TokenBatch:
        """As :meth:`batch`, of the texts at ``indices``."""
        if length < 2:
            raise ValueError(f"length must be at least 2 tokens, got {length}")
        input_ids, real = _padded([self.sentences[i][:length] for i in indices])
        if kind == "seq2seq":
            source = self.sentences if self.targets is None else self.targets
            target, present = _padded([source[i][:length] for i in indices])
            labels = target.masked_fill(~present, IGNORE_INDEX)
        elif kind == "masked":
            if mask_token_id is None:
                raise MissingText(
                    "a masked language model needs mask_token_id: pass its tokenizer="
                )
            hidden = _masked_positions(real, mask_rate, generator)
            labels = input_ids.masked_fill(~hidden, IGNORE_INDEX)
            input_ids = input_ids.masked_fill(hidden, mask_token_id)
        elif kind == "causal":
            labels = input_ids.masked_fill(~real, IGNORE_INDEX)
        else:
            raise ValueError(
                f"public text makes batches for language models, not for a {kind!r} model"
            )
        return TokenBatch(
            input_ids=input_ids, labels=labels, attention_mask=real.to(torch.int64), kind=kind
        )

    def with_and_without_start(self) -> PublicText:
        """With every second text less its first token, if all texts open with the same one.

        That is a start token, which the text under attack may or may not have. Where a tied
        embedding reads them, first tokens have large gradients, so that both ought to be seen.
        """
        if len({int(s[0]) for s in self.sentences}) > 1:
            return self
        shortened = [s[i % 2 :] if len(s) > 2 else s for i, s in enumerate(self.sentences)]
        return PublicText(shortened, targets=self.targets)

    @staticmethod
    def label(given: PublicText | Sampled | None) -> str | None:
        """What tells one public text from another: its digest, ``"sampled"``, or None."""
        return given.digest if isinstance(given, PublicText) else given

    @classmethod
    def sampled_from(
        cls,
        anatomy: Anatomy,
        n: int,
        length: int,
        seed: int = 0,
        *,
        start_token_id: int | None = None,
    ) -> PublicText:
        """Text that a causal model writes itself: calibration without any text at hand.

        Args:
            anatomy: the model; it is run in eval mode without gradients and left as it was.
            n: texts.
            length: tokens of a text at most (a text ends at the model's end token, and with its
                context).
            seed: of an own generator.
            start_token_id: first token of every text; by default the model's ``bos_token_id``,
                and where it has none a different random token for each text.

        Raises:
            ValueError: the model is not a causal language model.
        """
        kept, key = _kept.get(), (id(anatomy.model), length, seed, start_token_id)
        if kept is None:
            return cls(_sampled(anatomy, n, length, seed, start_token_id))
        if key not in kept or len(kept[key]) < n:
            kept[key] = cls(_sampled(anatomy, n, length, seed, start_token_id))
        return kept[key] if len(kept[key]) == n else cls(kept[key].sentences[:n])

    @classmethod
    def parse(cls, given: Given | None, tokenizer: Any = None) -> PublicText | Sampled | None:
        """The ``public_text`` of an attack, as every attack takes it; None stays None.

        Args:
            given: a public text, texts, token ids, or ``"sampled"``.
            tokenizer: for texts.

        Raises:
            ValueError: one string of text, or texts without a tokenizer.
        """
        if given is None or isinstance(given, PublicText):
            return given
        if isinstance(given, str):
            if given == "sampled":
                return "sampled"
            raise ValueError(
                "public_text must be a PublicText, a sequence of texts (with tokenizer=) or of "
                "token ids, or 'sampled', not one string"
            )
        return cls(given, tokenizer)

    @classmethod
    def resolve(
        cls,
        given: PublicText | Sampled,
        anatomy: Anatomy,
        seed: int = 0,
        *,
        n: int = 256,
        or_tokens: bool = False,
    ) -> PublicText:
        """``given`` itself; for ``"sampled"``, ``n`` texts of up to 64 tokens by the model.

        With ``or_tokens`` random frequent tokens where a model writes no text: of an
        encoder-decoder independent ones for source and target, of a masked model as texts.

        What an attack calls in ``prepare``, so that a config file can ask for sampled text before
        there is a model to sample from.

        Raises:
            ValueError: another string.
        """
        if isinstance(given, PublicText):
            return given
        if given != "sampled":
            raise ValueError(f"public_text must be a PublicText or 'sampled', got {given!r}")
        if or_tokens and anatomy.kind in ("seq2seq", "masked"):
            generator = torch.Generator().manual_seed(seed)
            texts = frequent_tokens(anatomy, n, _LENGTH, generator)
            if anatomy.kind == "masked":
                return cls(texts)
            size = anatomy.vocab_size
            return cls(texts, targets=frequent_tokens(anatomy, n, _LENGTH, generator, size))
        return cls.sampled_from(anatomy, n=n, length=_LENGTH, seed=seed)


def frequent_tokens(
    anatomy: Anatomy,
    rows: int,
    length: int,
    generator: torch.Generator,
    size: int | None = None,
) -> Tensor:
    """Random token ids (rows, length), frequent ones more often; no marks such as padding.

    Tokenizers number tokens by how frequent they are, roughly: id i has odds of 1 / (10 + i).

    Args:
        anatomy: the model.
        rows: texts.
        length: tokens of each.
        generator: CPU generator.
        size: of the vocabulary; by default that of what the model reads.
    """
    config = getattr(anatomy.model, "config", None)
    size = size or getattr(config, "vocab_size", None) or anatomy.vocab_size
    weights = 1 / (10.0 + torch.arange(size))
    for mark in ("pad", "bos", "eos", "decoder_start"):
        number = getattr(config, f"{mark}_token_id", None)
        if isinstance(number, int) and 0 <= number < len(weights):
            weights[number] = 0.0
    drawn = torch.multinomial(weights, rows * length, replacement=True, generator=generator)
    return drawn.view(rows, length)


Given = PublicText | Sampled | Sequence[str] | Sequence[Sequence[int]]
"""What attacks take for ``public_text``; texts with a tokenizer."""


def _token_ids(
    texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
    tokenizer: Any,
    argument: str,
) -> list[Tensor]:
    if isinstance(texts, str):
        raise ValueError(f"{argument} must be a sequence of texts, not one string")
    if isinstance(texts, Tensor):
        if texts.dim() not in (1, 2) or texts.is_floating_point():
            raise ValueError(
                f"{argument} given as a tensor must hold token ids, (L,) or (n, L); got "
                f"{texts.dtype} of shape {tuple(texts.shape)}"
            )
        return list(texts.detach().cpu().to(torch.int64).reshape(-1, texts.shape[-1]).unbind(0))
    found: list[Tensor] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError(
                    f"{argument} holds strings, and no tokenizer was given: pass tokenizer=... "
                    "(the model's own) or give token ids."
                )
            text = tokenizer(text)["input_ids"]
        found.append(torch.as_tensor(text, dtype=torch.int64).reshape(-1).cpu())
    return found


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)
    lengths = torch.tensor([len(r) for r in rows])
    return ids, torch.arange(ids.shape[1])[None] < lengths[:, None]


def _masked_positions(real: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    draw = torch.rand(real.shape, generator=generator).masked_fill(~real, 2.0)
    lowest = draw.argmin(1, keepdim=True)
    return (draw < rate).scatter(1, lowest, True)


def _sampled(
    anatomy: Anatomy, n: int, length: int, seed: int, start_token_id: int | None
) -> list[Tensor]:
    if anatomy.kind != "causal":
        raise MissingText(
            f"text can be sampled from a causal language model only, not from a {anatomy.kind!r} "
            "one: pass public_text=, texts like the clients'"
        )
    if n < 1 or length < 2:
        raise ValueError(f"sampling needs n >= 1 and length >= 2, got n={n}, length={length}")
    generator = torch.Generator().manual_seed(seed)
    config = getattr(anatomy.model, "config", None)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    start = start_token_id if start_token_id is not None else getattr(config, "bos_token_id", None)
    ends = getattr(config, "eos_token_id", None)
    end_ids = torch.tensor([] if ends is None else ends, dtype=torch.int64).reshape(-1)
    if start is None:
        first = torch.randint(anatomy.vocab_size, (n, 1), generator=generator)
    else:
        first = torch.full((n, 1), int(start))
    device = anatomy.device
    ids, cache = first, None
    with undisturbed(anatomy) as model, torch.no_grad():
        cached = bool(getattr(config, "use_cache", False))
        for _ in track(range(length - 1), "the model writes public text"):
            if cache is not None:
                out = model(input_ids=ids[:, -1:].to(device), past_key_values=cache, use_cache=True)
            elif cached:
                out = model(input_ids=ids.to(device), use_cache=True)
            else:
                out = model(input_ids=ids.to(device))
            cache = getattr(out, "past_key_values", None) if cached else None
            probabilities = logits_in(out)[:, -1].float().softmax(-1).cpu()
            ids = torch.cat([ids, _drawn(probabilities, generator)], 1)
    ended = torch.isin(ids[:, 1:], end_ids)
    stop = torch.where(ended.any(1), ended.int().argmax(1) + 2, length)
    return [row[:k] for row, k in zip(ids, stop.tolist(), strict=True)]


def _drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """(n, 1) one of each row by inversion: a uniform number a row, where multinomial takes V."""
    up_to = probabilities.cumsum(1)
    places = torch.rand(len(up_to), 1, generator=generator) * up_to[:, -1:]
    drawn: Tensor = torch.searchsorted(up_to, places, right=True)
    return drawn.clamp_max(up_to.shape[1] - 1)

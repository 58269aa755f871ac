"""Public text: text of the adversary that attacks are calibrated on, its batches and gradients.

The ``public_text`` argument of an attack is parsed by :meth:`PublicText.parse` when the attack is
created. :meth:`PublicText.resolve` returns the text in ``prepare``, when there is a model that can
generate it for ``"sampled"``.

The adversary knows the model and has public text. It can compute the update that a client *would*
share for a known batch, and calibrate its attack on that update. Nothing here changes
the model: parameters, ``.grad``, hooks, modes and the global random numbers stay as they were.

Several attacks share results, such as sampled texts or words of one gradient. An engine runs them
inside :func:`share_work`, which holds the cache. An attack calls :func:`do_once` with a key and a
function: the function runs only if no attack has stored a result for that key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Kind, cache_argument
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_runs import context_length, logits_in, undisturbed
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.progress import track
from lightning_fedleak.validate import check_choice, check_integer

T = TypeVar("T")

_work: ContextVar[dict[Hashable, Any] | None] = ContextVar("_work", default=None)


@contextmanager
def share_work(work: dict[Hashable, Any] | None = None) -> Iterator[None]:
    """Let the attacks that run inside use each other's results.

    Args:
        work: results of an earlier block that may be used too. The model's weights must not have
            changed since then.
    """
    token = _work.set({} if work is None else work)
    try:
        yield
    finally:
        _work.reset(token)


def stored_work() -> dict[Hashable, Any]:
    """Return the results of the enclosing :func:`share_work`; without one an empty mapping."""
    work = _work.get()
    return {} if work is None else work


def do_once(key: Hashable, compute: Callable[[], T], *, subject: object = None) -> T:
    """Return the stored result for a key, or compute and store it.

    An :class:`UnusableObservation` is stored and raised again; other errors are not stored.

    Args:
        key: must be equal for equal results within one :func:`share_work`.
        compute: computes the result.
        subject: the object that the result belongs to. It is kept alive, so that its id may be part
            of the key.
    """
    work = stored_work()
    if key not in work:
        try:
            work[key] = compute(), subject
        except UnusableObservation as error:
            work[key] = type(error)(*error.args), subject
    stored: T | UnusableObservation = work[key][0]
    if isinstance(stored, UnusableObservation):
        raise type(stored)(*stored.args)  # a new one: a raised error keeps its stack frames alive
    return stored


Sampled = Literal["sampled"]
"""The argument for text that a causal model generates itself."""

MASK_RATE = 0.15  # share of a text's tokens that are masked, as in BERT's training
_BLOCK = 256  # probabilities whose sum is taken at once; not tuned
_LENGTH = 64  # maximal number of tokens of a sampled text; longer texts cost time, not tuned


class MissingText(ValueError):
    """An attack has no text to calibrate on; the message names the argument to set."""


class PublicText:
    """Text that the adversary has, as token ids.

    Attacks that calibrate take it as ``public_text``. A hundred sentences like the clients' are
    enough.

    Args:
        texts: strings (with ``tokenizer``), sequences of token ids, or a tensor of ids with one
            text per row, (n, L), or a single text, (L,).
        tokenizer: function from a string to ``input_ids`` (any Hugging Face tokenizer).
        targets: for an encoder-decoder, the text that each of ``texts`` maps to. Without them the
            model is calibrated on copying its input.

    Attributes:
        sentences: the texts as 1-D int64 tensors; texts of fewer than 2 tokens are dropped.
        targets: the targets of the texts for an encoder-decoder, or None.
        tokenizer: the tokenizer that was given.

    Raises:
        ValueError: there is no text, there are strings without a tokenizer, or the numbers of texts
            and targets differ.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import PublicText
        >>> text = PublicText([[5, 6, 7], [8, 9]])  # token ids; or strings and tokenizer=
        >>> len(text)
        2
        >>> batch = text.batch(sentences=2, length=8, generator=torch.Generator().manual_seed(0))
        >>> batch.input_ids.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
        tokenizer: Any = None,
        *,
        targets: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        sentences = _token_ids(texts, tokenizer, "texts")
        target_ids = None if targets is None else _token_ids(targets, tokenizer, "targets")
        if target_ids is not None and len(target_ids) != len(sentences):
            raise ValueError("PublicText needs one target for each text")
        rows = [
            i
            for i, s in enumerate(sentences)
            if len(s) >= 2 and (target_ids is None or len(target_ids[i]) >= 1)
        ]
        if not rows:
            raise ValueError("PublicText needs texts of at least 2 tokens, a hundred if possible")
        self.sentences = [sentences[i] for i in rows]
        self.targets = None if target_ids is None else [target_ids[i] for i in rows]
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.sentences)

    @property
    def digest(self) -> str:
        """Return the first digits of the SHA-256 of all token ids of the texts."""
        rows = ",".join(" ".join(map(str, row.tolist())) for row in self.sentences)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    def draw(self, sentences: int, generator: torch.Generator) -> Tensor:
        """Return (sentences,) random indices of texts; none repeats before all have occurred."""
        check_integer("sentences", sentences)
        rounds = range(-(-sentences // len(self)))
        orders = [torch.randperm(len(self), generator=generator) for _ in rounds]
        return torch.cat(orders)[:sentences]

    def batch(
        self,
        sentences: int,
        length: int,
        generator: torch.Generator,
        *,
        kind: Kind = "causal",
        mask_token_id: int | None = None,
    ) -> TokenBatch:
        """Return a random batch: each text cut to its first ``length`` tokens, padded on the right.

        Args:
            sentences: number of rows of the batch.
            length: maximal number of tokens in a row, at least 2.
            generator: CPU generator; the batch depends on nothing else.
            kind: the meaning of the labels. ``"masked"`` replaces 15% of the tokens (at least one
                per row) by ``mask_token_id`` and labels only those.
            mask_token_id: needed for ``"masked"``.

        Returns:
            ids (sentences, L), L <= length, labels of the same shape (of the targets' for an
            encoder-decoder) with -100 where nothing is predicted; on the CPU.
        """
        indices = self.draw(sentences, generator).tolist()
        return self.rows(indices, length, generator, kind=kind, mask_token_id=mask_token_id)

    def rows(
        self,
        indices: Sequence[int],
        length: int,
        generator: torch.Generator,
        *,
        kind: Kind = "causal",
        mask_token_id: int | None = None,
    ) -> TokenBatch:
        """Return the batch of the texts at ``indices``; see :meth:`batch` for the arguments."""
        check_integer("length", length, at_least=2)
        check_choice("kind", kind, ("causal", "masked", "seq2seq"))
        input_ids, real = _pad([self.sentences[i][:length] for i in indices])
        if kind == "seq2seq":
            targets = self.sentences if self.targets is None else self.targets
            target, present = _pad([targets[i][:length] for i in indices])
            labels = target.masked_fill(~present, IGNORE_INDEX)
        elif kind == "masked":
            if mask_token_id is None:
                raise MissingText("pass the masked language model's tokenizer=")
            masked = _masked_positions(real, generator)
            labels = input_ids.masked_fill(~masked, IGNORE_INDEX)
            input_ids = input_ids.masked_fill(masked, mask_token_id)
        else:
            labels = input_ids.masked_fill(~real, IGNORE_INDEX)
        return TokenBatch(
            input_ids=input_ids, labels=labels, attention_mask=real.to(torch.int64), kind=kind
        )

    def with_and_without_start(self) -> PublicText:
        """Return the texts; if all begin with the same token, every second one is without it.

        That token is a start token, which the text under attack may or may not have. First tokens
        have large gradients in a tied embedding, so that a calibration should include both cases.
        """
        if len({int(s[0]) for s in self.sentences}) > 1:
            return self
        texts = [s[i % 2 :] if len(s) > 2 else s for i, s in enumerate(self.sentences)]
        return PublicText(texts, targets=self.targets)

    @staticmethod
    def label(public_text: PublicText | Sampled | None) -> str | None:
        """Return an identifier of a public text: its digest, ``"sampled"``, or None."""
        return public_text.digest if isinstance(public_text, PublicText) else public_text

    @classmethod
    def sampled_from(
        cls, anatomy: Anatomy, n: int, length: int, seed: int = 0, *, shorter: Sequence[int] = ()
    ) -> PublicText:
        """Return text that a causal model generates itself, to calibrate without any given text.

        Args:
            anatomy: the model, which runs in eval mode without gradients and is not changed.
            n: number of texts.
            length: maximal number of tokens of a text; a text also ends at the model's end token
                and at its context length.
            seed: The seed of the random numbers.
            shorter: maximal numbers of tokens of further texts, in descending order, which are
                written at the same time and follow the others.

        Raises:
            ValueError: the model is not a causal language model, or ``shorter`` is not in
                descending order from at most ``length``.
        """
        lengths = [length] * n + [*shorter]
        if lengths != sorted(lengths, reverse=True):
            raise ValueError(
                f"shorter={[*shorter]} are lengths in descending order, at most length={length}"
            )
        samples, key = stored_work(), ("texts", id(anatomy.model), length, seed)
        if shorter or key not in samples or len(samples[key]) < n:
            with whole_model(anatomy.root):
                texts = _sample(anatomy, lengths, seed)
            samples[key] = cls(texts[:n])
            if shorter:
                return cls(texts)
        return samples[key] if len(samples[key]) == n else cls(samples[key].sentences[:n])

    @classmethod
    def parse(
        cls, public_text: TextSource | None, tokenizer: Any = None
    ) -> PublicText | Sampled | None:
        """Return the ``public_text`` argument of an attack in its parsed form; None stays None.

        Args:
            public_text: a :class:`PublicText`, strings, token ids, or ``"sampled"``.
            tokenizer: The tokenizer of strings.

        Raises:
            ValueError: it is a single string of text, or strings without a tokenizer.
        """
        if public_text is None or isinstance(public_text, PublicText):
            return public_text
        if isinstance(public_text, str) and public_text == "sampled":
            return "sampled"
        return cls(public_text, tokenizer)

    @classmethod
    def parse_required(
        cls, public_text: TextSource | None, tokenizer: Any, attack: str
    ) -> PublicText | Sampled:
        """Return the result of :meth:`parse`, for an attack that requires a public text.

        Raises:
            ValueError: it is None.
        """
        text = cls.parse(public_text, tokenizer)
        if text is None:
            raise ValueError(f"{attack} needs public_text: texts like the clients', or 'sampled'")
        return text

    @classmethod
    def resolve(
        cls,
        public_text: PublicText | Sampled,
        anatomy: Anatomy,
        seed: int = 0,
        *,
        n: int = 256,
        or_tokens: bool = False,
        shorter: Sequence[int] = (),
    ) -> PublicText:
        """Return a public text; for ``"sampled"``, ``n`` texts of up to 64 tokens by the model.

        Attacks call it in ``prepare``, so that a config file can name sampled text before there is
        a model to sample from.

        Args:
            public_text: result of :meth:`parse`.
            anatomy: the model.
            seed: The seed of the random numbers.
            n: number of texts.
            or_tokens: whether to return random frequent tokens for a model that cannot generate
                text; for an encoder-decoder, source and target are then independent.
            shorter: lengths of further texts, as in :meth:`sampled_from`.
        """
        if isinstance(public_text, PublicText):
            return public_text
        if or_tokens and anatomy.kind in ("seq2seq", "masked"):
            generator = torch.Generator().manual_seed(seed)
            texts = frequent_tokens(anatomy, n, _LENGTH, generator)
            if anatomy.kind == "masked":
                return cls(texts)
            size = anatomy.vocab_size
            return cls(texts, targets=frequent_tokens(anatomy, n, _LENGTH, generator, size))
        return cls.sampled_from(anatomy, n=n, length=_LENGTH, seed=seed, shorter=shorter)


def frequent_tokens(
    anatomy: Anatomy, rows: int, length: int, generator: torch.Generator, size: int | None = None
) -> Tensor:
    """Return random token ids (rows, length) without special tokens, in natural frequencies.

    Tokenizers number tokens roughly by frequency, so that id i is drawn with a probability
    proportional to 1 / (10 + i).

    Args:
        anatomy: the model.
        rows: number of texts.
        length: number of tokens of each text, if the model takes as many.
        generator: CPU generator.
        size: The size of the vocabulary; by default that of the model's input.
    """
    config = getattr(anatomy.model, "config", None)
    size = size or getattr(config, "vocab_size", None) or anatomy.vocab_size
    length = min(length, context_length(anatomy) or length)
    weights = 1 / (10.0 + torch.arange(size))
    for name in ("pad", "bos", "eos", "decoder_start"):
        token = getattr(config, f"{name}_token_id", None)
        if isinstance(token, int) and 0 <= token < len(weights):
            weights[token] = 0.0
    ids = torch.multinomial(weights, rows * length, replacement=True, generator=generator)
    return ids.view(rows, length)


TextSource = PublicText | Sampled | Sequence[str] | Sequence[Sequence[int]]
"""The ``public_text`` argument of attacks; strings need a tokenizer."""


def _token_ids(
    texts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor,
    tokenizer: Any,
    argument: str,
) -> list[Tensor]:
    """Return the token ids of each text; ``argument`` is the name of ``texts`` in messages."""
    if isinstance(texts, str):
        raise ValueError(f"{argument} must be 'sampled', texts (with tokenizer=) or token ids")
    if isinstance(texts, Tensor):
        return list(texts.detach().cpu().to(torch.int64).reshape(-1, texts.shape[-1]).unbind(0))
    token_ids: list[Tensor] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError(f"{argument} holds strings: pass the model's tokenizer=")
            text = tokenizer(text)["input_ids"]
        token_ids.append(torch.as_tensor(text, dtype=torch.int64).reshape(-1).cpu())
    return token_ids


def _pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows padded on the right, and a mask that is True where they are not padded."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)
    lengths = torch.tensor([len(r) for r in rows])
    return ids, torch.arange(ids.shape[1])[None] < lengths[:, None]


def _masked_positions(real: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random mask of the tokens to predict: a share, and at least one in each row."""
    draw = torch.rand(real.shape, generator=generator).masked_fill(~real, 2.0)
    lowest = draw.argmin(1, keepdim=True)
    return (draw < MASK_RATE).scatter(1, lowest, True)


def _sample(anatomy: Anatomy, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Generate texts that begin with ``bos_token_id``, or with random tokens if there is none.

    Args:
        anatomy: the model.
        lengths: the maximal number of tokens of each text, in descending order.
        seed: The seed of the random numbers.
    """
    if anatomy.kind != "causal":
        raise MissingText(f"no text is sampled from a {anatomy.kind!r} model: pass public_text=")
    generator = torch.Generator().manual_seed(seed)
    config = getattr(anatomy.model, "config", None)
    lengths = [min(n, context_length(anatomy) or n) for n in lengths]
    n = n_open = len(lengths)  # texts, and those that are not as long as they may be
    start = getattr(config, "bos_token_id", None)
    end_token = getattr(config, "eos_token_id", None)
    end_ids = torch.tensor([] if end_token is None else end_token, dtype=torch.int64).reshape(-1)
    # A small model may have the default start token in its config, but no embedding for it.
    if start is None or int(start) >= anatomy.embedding_rows:
        ids = torch.randint(anatomy.vocab_size, (n, 1), generator=generator)
    else:
        ids = torch.full((n, 1), int(start))
    device = anatomy.device
    cache = None
    with undisturbed(anatomy) as model, torch.no_grad():
        # Trainers switch the cache off in the config, which is meant only for the training.
        argument = cache_argument(model)
        for written in track(range(1, lengths[0]), "the model writes public text"):
            arguments = {"use_cache": True} if argument else {}
            longer = sum(length > written for length in lengths)
            if cache is None:
                n_open = longer
            elif longer < n_open and hasattr(cache, "batch_select_indices"):
                n_open = longer
                cache.batch_select_indices(torch.arange(n_open, device=device))
            if argument and cache is not None:
                arguments[argument] = cache
            inputs = ids[:n_open] if cache is None else ids[:n_open, -1:]
            output = model(input_ids=inputs.to(device), **arguments)
            cache = getattr(output, argument, None) if argument else None
            probabilities = logits_in(output)[:, -1].float().softmax(-1).cpu()
            column = torch.zeros(n, 1, dtype=ids.dtype)  # zeros are cut off below
            column[:n_open] = _draw(probabilities, generator)
            ids = torch.cat([ids, column], 1)
    ends_text = torch.isin(ids[:, 1:], end_ids)
    # A text ends with its end token: 1 for the index to a count, 1 for the start token.
    stop = torch.where(ends_text.any(1), ends_text.int().argmax(1) + 2, lengths[0])
    stop = torch.minimum(stop, torch.tensor(lengths))
    return [row[:k] for row, k in zip(ids, stop.tolist(), strict=True)]


def _draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Return (n, 1) one index per row of (n, V) probabilities, by inversion sampling.

    It takes one random number per row, where ``multinomial`` takes V. Sums of blocks come first,
    since cumulative sums of all probabilities are slow.
    """
    vocabulary = probabilities.shape[1]
    if padding := -vocabulary % _BLOCK:
        probabilities = nn.functional.pad(probabilities, (0, padding))
    blocks = probabilities.view(len(probabilities), -1, _BLOCK)
    sums = blocks.sum(2).cumsum(1)
    levels = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
    block = torch.searchsorted(sums, levels, right=True).clamp_max(sums.shape[1] - 1)
    inside = blocks[torch.arange(len(sums))[:, None], block][:, 0].cumsum(1)
    levels -= torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)), 0.0)
    index: Tensor = torch.searchsorted(inside, levels, right=True).clamp_max(_BLOCK - 1)
    return (block * _BLOCK + index).clamp_max(vocabulary - 1)


def gradient_of(
    anatomy: Anatomy,
    batch: TokenBatch,
    roles: Sequence[str],
    *,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the gradient of the mean token cross-entropy, which a client would share.

    It is computed in eval mode on detached views of the parameters, a few rows of the batch at a
    time. For a tied matrix both roles give the sum of its head and embedding parts, as in an
    update.

    Args:
        anatomy: The model.
        batch: The token ids, labels (-100 ignored) and mask; moved to the model's device.
        roles: The roles ``"head.weight"``, ``"embedding.weight"``, ... or names of parameters.
        instead: The values that replace those of parameters, by name in ``anatomy.model``.

    Returns:
        A mapping from role to the detached gradient, in the parameter's shape.

    Raises:
        ValueError: The model has no parameter for a role, or all labels of the batch are ignored.
    """
    views, leaf_of = leaves(anatomy, roles, instead)
    distinct = {id(leaf): leaf for leaf in leaf_of.values()}
    total = {key: torch.zeros_like(leaf, dtype=torch.float32) for key, leaf in distinct.items()}
    n_tokens = 0
    with model_runs.undisturbed(anatomy) as model, torch.enable_grad():
        for part in model_runs.micro_batches(anatomy, batch):
            logits, labels = model_runs.token_logits(model, part, views)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            grads = torch.autograd.grad(loss, list(distinct.values()), allow_unused=True)
            for key, grad in zip(distinct, grads, strict=True):
                if grad is not None:
                    total[key] += grad
            n_tokens += len(labels)
    if n_tokens == 0:
        raise ValueError("all labels of this batch are ignored (-100): there is nothing to predict")
    mean = {key: (total[key] / n_tokens).to(leaf.dtype) for key, leaf in distinct.items()}
    return {role: mean[id(leaf)] for role, leaf in leaf_of.items()}


def each_gradient(anatomy: Anatomy, batches: Sequence[TokenBatch], role: str) -> Iterator[Tensor]:
    """Yield the gradient of one role's parameter for each public batch, with a progress bar."""
    with whole_model(anatomy.root):
        for batch in track(batches, "gradients of public text"):
            yield gradient_of(anatomy, batch, [role])[role]


def leaves(
    anatomy: Anatomy, roles: Sequence[str], instead: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return detached views of all parameters by name, and the views of roles, by role.

    The views of roles require a gradient. A backward pass writes no gradients into the model.
    """
    targets = {}
    for role in roles:
        parameter = anatomy.parameter(role)
        if parameter is None:
            raise ValueError(f"this model has no parameter for the role '{role}'")
        targets[role] = parameter
    named = dict(anatomy.model.named_parameters())
    target_ids = {id(p) for p in targets.values()}
    views = {
        name: instead.get(name, p).detach().requires_grad_(id(p) in target_ids)
        for name, p in named.items()
    }
    views_by_id = {id(p): views[name] for name, p in named.items()}
    return views, {role: views_by_id[id(p)] for role, p in targets.items()}

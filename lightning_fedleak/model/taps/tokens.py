"""Per-token log-probabilities of texts: the forwards that memorization attacks use.

A causal model is queried for a text once. For a masked model, the text's tokens are divided into 7
random parts, and the model is queried once for each part, with that part masked: about the 15% that
collators mask. The parts depend only on the text, so that the base model and the trained model have
the same masks in every measurement. For a classifier, the class of each text or token is queried.
The sum over the tokens is a pseudo-log-likelihood (Salazar et
al. 2020, arXiv 1910.14659, who mask one token per forward). Attacks compare it with the sum of the
base model, from before the fine-tuning (Mireshghallah et al. 2022, arXiv 2203.03929).

A *pool* is the set of candidate texts of a membership attack, members and held-out texts. A pair is
a chosen and a rejected answer to one prompt, as in DPO. :func:`candidate_log_probs` compares a
planted value with *candidates* that could stand in its place.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, cache_argument
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.pairs import PairBatch, RatedBatch
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.private_files import name_content
from lightning_fedleak.progress import track

TOKENS_AT_ONCE = 1 << 10  # tokens of one forward; more are not faster on two CPU cores
LOGITS_OF_FORWARD = 1 << 25  # logits of one forward: 128 MiB, no more than an evaluation takes
MASKS = 7  # forwards of a masked model per text, each with 1/7 of the tokens masked
# Positions whose logits are reduced at once on a CPU: 4 fit its cache, and 16 take 1.6x as long.
POSITIONS_AT_ONCE = 4
# Logits that are reduced at once if the vocabulary is small: those of 4 positions at 32,000 tokens.
NUMBERS_AT_ONCE = 1 << 17
# Logits that are copied at once, 16 MiB in float32: a copy of all would double the memory.
NUMBERS_COPIED = 1 << 22


@dataclass(frozen=True)
class Text:
    """One text without padding.

    Attributes:
        ids: (L,) int64 token ids.
        labels: (L,) int64, the id if the loss is computed on the token and -100 otherwise; the
            first token is not predicted. For a classifier or a masked model (L + 1,): -100, then
            the label of each token. A class of the whole text is at its last token.
        split: For a pair, the number of tokens of the chosen text; the tokens of the rejected text
            follow it. For a rated answer, L if it is desirable and 0 if not. None without
            preferences.
    """

    ids: Tensor
    labels: Tensor
    split: int | None = None

    @classmethod
    def of_pair(cls, chosen: Text, rejected: Text) -> Text:
        """Return a pair: the ids of the chosen text, then those of the rejected one."""
        rejected_labels = nn.functional.pad(rejected.labels[1:], (1, 0), value=IGNORE_INDEX)
        ids = torch.cat([chosen.ids, rejected.ids])
        return cls(ids, torch.cat([chosen.labels, rejected_labels]), len(chosen.ids))

    @property
    def alone(self) -> list[Text]:
        """Return the texts that a model reads separately: a pair is two of them."""
        if self.split is None:
            return [self]
        parts = slice(self.split), slice(self.split, None)
        return [Text(self.ids[p], self.labels[p]) for p in parts if len(self.ids[p])]

    @property
    def n_labels(self) -> int:
        """Return the number of tokens that the loss is computed on."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())

    @property
    def is_aligned(self) -> bool:
        """Return whether a label is predicted at its own token, and not at the token before."""
        return len(self.labels) > len(self.ids)

    @property
    def prompt(self) -> Text:
        """Return the text with labels at the tokens that the loss is not computed on.

        A pair, and a text of a classifier or a masked model, has no prompt: it gets no labels.
        """
        if self.is_aligned or self.split is not None:
            return Text(self.ids, torch.full_like(self.labels, IGNORE_INDEX))
        return Text(self.ids, self.ids.masked_fill(self.labels != IGNORE_INDEX, IGNORE_INDEX))

    @property
    def whole(self) -> Text:
        """Return the text with a label at every token. Pairs and aligned texts are not changed."""
        return self if self.is_aligned or self.split is not None else Text(self.ids, self.ids)

    @property
    def words(self) -> Tensor:
        """Return the ids in which repeats between texts are searched.

        They are (L,) the text's ids if it is aligned, else (L - 1,) its labels, -100 without one.
        """
        return self.ids if self.is_aligned else self.labels[1:]

    @property
    def content(self) -> bytes:
        """Return bytes that identify the text."""
        place = b"" if self.split is None else self.split.to_bytes(8, "little")
        return self.ids.numpy().tobytes() + self.labels.numpy().tobytes() + place


@dataclass(frozen=True)
class Completions(Text):
    """A model's completions of one prompt, joined, each with the prompt before it.

    Attributes:
        lengths: The number of tokens of each completion with its prompt.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of_prompt(cls, prompt: Tensor, written: Sequence[Tensor]) -> Completions:
        """Return the completions of a prompt, with labels at their tokens only.

        Args:
            prompt: (P,) int64 token ids, at least one.
            written: The token ids of each completion.
        """
        ids = torch.cat([part for answer in written for part in (prompt, answer)])
        hidden = torch.full_like(prompt, IGNORE_INDEX)
        labels = torch.cat([part for answer in written for part in (hidden, answer)])
        return cls(ids, labels, len(ids), tuple(len(prompt) + len(answer) for answer in written))

    @property
    def alone(self) -> list[Text]:
        """Return each completion, with the prompt before it."""
        parts = (torch.split(part, list(self.lengths)) for part in (self.ids, self.labels))
        return [*map(Text, *parts)]


def pool_digest(texts: Sequence[Text], members: Tensor) -> str:
    """Return 16 digits that are the same for the same pool in any order, within this process.

    Args:
        texts: N texts.
        members: (N,) bool, those that were trained on.
    """
    rows = (
        hashlib.sha256(text.content + bytes([inside])).digest()
        for text, inside in zip(texts, members.tolist(), strict=True)
    )
    return name_content(b"".join(sorted(rows)))


def label_places(texts: Sequence[Text], columns: int) -> Tensor:
    """Return (N, columns) bool: the label tokens of texts, in the columns of a TokenSnapshot."""
    places = torch.zeros(len(texts), columns, dtype=torch.bool)
    for row, text in enumerate(texts):
        places[row, : len(text.labels) - 1] = text.labels[1:] != IGNORE_INDEX
    return places


def rejected_places(texts: Sequence[Text], columns: int) -> Tensor:
    """Return (N, columns) bool: tokens of rejected texts, in the columns of a TokenSnapshot."""
    splits = torch.tensor([columns + 1 if t.split is None else t.split for t in texts])
    return torch.arange(1, columns + 1) >= splits[:, None]


def answer_groups(texts: Sequence[Text]) -> Tensor:
    """Return (N,) int64, the same number for texts with the same label tokens."""
    answers = [tuple(t.labels[1:][t.labels[1:] != IGNORE_INDEX].tolist()) for t in texts]
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    return torch.tensor([numbers[answer] for answer in answers], dtype=torch.long)


def texts_in(batch: TokenBatch) -> list[Text]:
    """Return the texts of a batch without padding, one for each packed document, or its pairs.

    Raises:
        ValueError: the batch is of an encoder-decoder, its labels are not one for each row or
            token, or several answers of pairs are packed into a row.
    """
    if batch.kind == "seq2seq":
        raise ValueError("the batch is of an encoder-decoder, whose texts are not read")
    ids = batch.input_ids.cpu().flatten()
    documents = [places[places >= 0] for places in batch.document_places().cpu()]
    labels = model_runs.labels_of(batch).cpu()
    if batch.kind == "causal":
        labels = labels.flatten()
        texts = [Text(ids[places].long(), labels[places].long()) for places in documents]
        if isinstance(batch, RatedBatch) and batch.desirable is not None:
            if len(texts) != len(batch.desirable):
                raise ValueError("rated answers are packed into a row: give each a row")
            ratings = batch.desirable.tolist()
            return [
                replace(text, split=len(text.ids) if chosen else 0)
                for text, chosen in zip(texts, ratings, strict=True)
            ]
        if not isinstance(batch, PairBatch):
            return texts
        n_pairs = len(batch.input_ids) // 2
        if len(texts) != 2 * n_pairs:
            raise ValueError("answers of pairs are packed into a row: give each a row")
        return [*map(Text.of_pair, texts[:n_pairs], texts[n_pairs:])]
    is_by_row = labels.shape == (len(documents),)
    if labels.is_floating_point() or not (is_by_row or labels.shape == batch.input_ids.shape):
        raise ValueError("its labels are not one class for each row or token")
    parts = [*labels[:, None]] if is_by_row else [labels.flatten()[p] for p in documents]
    rows = [  # a class of the whole text is at its last token
        nn.functional.pad(part.long(), (len(p) + 1 - len(part), 0), value=IGNORE_INDEX)
        for p, part in zip(documents, parts, strict=True)
    ]
    return [Text(ids[p].long(), row) for p, row in zip(documents, rows, strict=True)]


def unmasked(batch: TokenBatch, mask_id: int, special: Collection[int]) -> TokenBatch:
    """Return a batch of a masked model as it was before it was masked.

    All tokens get labels except special ones, which collators never mask. A row gets no labels if
    it has a mask token without a label, whose original token is unknown.

    Args:
        batch: The batch, with labels at the tokens that were masked or replaced.
        mask_id: The id of the mask token.
        special: ids of special tokens.

    Raises:
        ValueError: the batch has no labels.
    """
    if batch.labels is None:
        raise ValueError("it has no labels, without which its masked tokens are unknown")
    ids = torch.where(batch.labels == IGNORE_INDEX, batch.input_ids, batch.labels)
    hidden = (ids == mask_id).any(-1, keepdim=True) | torch.isin(
        ids, torch.tensor(sorted(special), device=ids.device, dtype=ids.dtype)
    )
    return replace(batch, input_ids=ids, labels=ids.masked_fill(hidden, IGNORE_INDEX))


def _masked_copies(text: Text, mask_id: int) -> list[Text]:
    """Return 7 copies of a text: in each, another part is masked, and only this part has labels."""
    places = (text.labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
    seed = int.from_bytes(hashlib.sha256(text.ids.numpy().tobytes()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    parts = torch.full_like(text.ids, -1)
    parts[places] = torch.randperm(len(places), generator=generator) % MASKS
    return [
        Text(
            text.ids.masked_fill(parts == part, mask_id),
            text.labels.masked_fill(nn.functional.pad(parts != part, (1, 0)), IGNORE_INDEX),
        )
        for part in range(MASKS)
    ]


def compressed_bytes(
    texts: Sequence[Text], decode: Callable[[list[int]], str] | None = None
) -> Tensor:
    """Return (N,) the number of bytes to which zlib compresses each text.

    Args:
        texts: the texts.
        decode: a function from token ids to their words; None compresses the ids.
    """
    sizes = []
    for text in texts:
        plain = (
            text.ids.to(torch.int32).numpy().tobytes()
            if decode is None
            else decode(text.ids.tolist()).encode()
        )
        sizes.append(len(zlib.compress(plain)))
    return torch.tensor(sizes)


def token_log_probs(
    anatomy: Anatomy, texts: Sequence[Text], mask_id: int | None = None
) -> TokenSnapshot:
    """Query the model for each label token of texts, in eval mode.

    The run changes neither the model nor the random generators. A text costs one forward, a pair
    two, and a text of a masked model 7. Texts are batched by length. The caller chooses the
    precision by an autocast around the call. Under FSDP2 every process must make the call, with
    texts of the same lengths.

    Args:
        anatomy: a causal language model; a classifier, which is queried for the class of each text
            or token; or a masked model.
        texts: N texts, at least one.
        mask_id: The id of the mask token; only for a masked model.

    Returns:
        The snapshot on the CPU, in float32.
    """
    if mask_id is not None:
        copies = [masked for text in texts for masked in _masked_copies(text, mask_id)]
        parts = token_log_probs(anatomy, copies)
        sums = [value.view(len(texts), MASKS, -1).sum(1).to(value.dtype) for value in parts]
        return TokenSnapshot(*sums)  # each token has a label in one copy
    columns = max(1, max(len(text.labels) for text in texts) - 1)
    if any(text.split is not None for text in texts):
        alone = token_log_probs(anatomy, [part for text in texts for part in text.alone])
        return _join_pairs(alone, texts, columns)
    shape = (len(texts), columns)
    snapshot = TokenSnapshot(
        *(torch.zeros(shape) for _ in range(3)),
        *(torch.zeros(shape, dtype=torch.bool) for _ in range(2)),
    )
    at_once = min(TOKENS_AT_ONCE, LOGITS_OF_FORWARD // anatomy.vocab_size)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].ids), reverse=True)
    batches: list[list[int]] = []
    while order:
        length = len(texts[order[0]].ids)
        rows = max(1, at_once // length)
        if anatomy.kind == "classifier":  # may find a text's end by padding tokens
            rows = min(rows, sum(len(texts[row].ids) == length for row in order[:rows]))
        batches.append(order[:rows])
        order = order[rows:]
    with model_runs.undisturbed(anatomy) as model, torch.no_grad():
        for part in track(batches, "querying"):
            answers = _query(anatomy, model, [texts[row] for row in part])
            width = answers.labels.shape[1]
            for whole, value in zip(snapshot, answers, strict=True):
                whole[part, :width] = value
    return snapshot


def _join_pairs(alone: TokenSnapshot, texts: Sequence[Text], columns: int) -> TokenSnapshot:
    """Return the snapshot (N, columns) of pairs from a snapshot with a row for each single text."""
    snapshot = TokenSnapshot(*(value.new_zeros(len(texts), columns) for value in alone))
    owners = ((row, part) for row, text in enumerate(texts) for part in text.alone)
    ends = [0] * len(texts)
    for place, (row, part) in enumerate(owners):
        start, n = ends[row], len(part.ids) - 1
        for whole, value in zip(snapshot, alone, strict=True):
            whole[row, start : start + n] = value[place, :n]
        ends[row] = start + n + 1  # nothing predicts a text's first token
    return snapshot


def _query(anatomy: Anatomy, model: nn.Module, texts: Sequence[Text]) -> TokenSnapshot:
    """Return the snapshot of texts of similar length, padded on the right."""
    pad = nn.utils.rnn.pad_sequence
    labels = pad([t.labels for t in texts], batch_first=True, padding_value=IGNORE_INDEX)
    aligned = texts[0].is_aligned
    batch = TokenBatch(
        input_ids=pad([t.ids for t in texts], batch_first=True),
        labels=labels,
        attention_mask=pad([torch.ones_like(t.ids) for t in texts], batch_first=True),
        kind="classifier" if aligned else "causal",
    )
    counted = labels[:, 1:] != IGNORE_INDEX
    answers = []
    for part in model_runs.micro_batches(anatomy, batch):
        targets, logits = model_runs.labels_of(part)[:, 1:], model_runs.run_logits(model, part)
        if logits.dim() == 2:  # the class of a text, whose label is at its end
            answers.append(describe_tokens(logits, targets[:, -1]).cpu())
            continue
        end = logits.shape[1] - (not aligned)
        logits = logits[:, end - targets.shape[1] : end]
        rows = max(1, NUMBERS_COPIED // max(1, logits[0].numel()))
        parts = (torch.split(values, rows) for values in (logits, targets))
        for block, target in zip(*parts, strict=True):
            scored = target != IGNORE_INDEX
            answers.append(describe_tokens(block[scored], target[scored]).cpu())
    values = torch.zeros(4, *counted.shape)
    values[:, counted] = torch.cat(answers, 1)
    return TokenSnapshot(values[0], values[1], values[2], values[3] > 0, counted)


def describe_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (4, n) numbers of each target token, as in ``TokenSnapshot``.

    They are its log probability, the mean and the standard deviation of the log probability over
    the vocabulary, and 1 if it is the most likely token, else 0.

    Args:
        logits: (n, V) at the predicting positions.
        targets: (n,) the tokens that are predicted there.
    """
    numbers = torch.empty(4, len(targets), device=logits.device)
    vocabulary = logits.shape[-1]
    if logits.device.type == "cpu":
        step = max(POSITIONS_AT_ONCE, NUMBERS_AT_ONCE // vocabulary)
    else:
        step = max(1, model_runs.LOGITS_AT_ONCE // vocabulary)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        scores = logits[part].float()
        scores = scores - scores.amax(1, keepdim=True)
        weights = scores.exp()
        total = weights.sum(1)
        target = scores.gather(1, targets[part, None])[:, 0]
        mean = torch.linalg.vecdot(weights, scores) / total
        mean_square = torch.linalg.vecdot(weights.mul_(scores), scores) / total
        numbers[0, part] = target - total.log()
        numbers[1, part] = mean - total.log()
        numbers[2, part] = (mean_square - mean * mean).clamp_min(0).sqrt()
        numbers[3, part] = (target >= 0).float()  # the largest score is 0
    return numbers


# Prefixes in one forward of a tree, whose mask grows with the square: 128 and 512 take 1.1x.
MAX_NODES = 256
Prefix = tuple[int, ...]
"""Token ids that begin a candidate, without its last one."""


def candidate_log_probs(
    anatomy: Anatomy, context: Tensor, candidates: Sequence[Tensor]
) -> tuple[Tensor, bool]:
    """Return the log probability of each candidate after a context, in eval mode.

    The context runs once, and so does each prefix that candidates share. One forward holds the last
    tokens of many prefixes, each of which attends to the context and to its own prefix (tree
    attention: Miao et al. 2024, SpecInfer). If the model takes no such mask, or its logits differ
    with it, the context runs with each candidate. Inside
    :func:`~lightning_fedleak.model.model_runs.undisturbed` many calls cost no more than their
    forwards.

    Args:
        anatomy: a causal language model.
        context: (L,) token ids, at least one.
        candidates: C rows of token ids, each of at least one.

    Returns:
        (C,) sums over each candidate's tokens, in nats, and whether greedy decoding writes the
        first candidate.
    """
    context = context.to(anatomy.device)[None]
    words = [tuple(candidate.tolist()) for candidate in candidates]
    log_probs, greedy = torch.zeros(len(words)), True
    with model_runs.undisturbed(anatomy) as model, torch.no_grad():
        context_logits, cache = _run_context(anatomy, model, context)
        is_tree, is_verified = cache is not None, False
        for rows, prefixes in _parts(words, LOGITS_OF_FORWARD // anatomy.vocab_size):
            logits = _run_tree(model, context, cache, prefixes) if is_tree else None
            if logits and not is_verified:
                [whole] = _run_whole(anatomy, model, context, prefixes[-1:])
                is_tree = _agree(logits[-1], whole)
                # On a single branch a model that ignores the mask would be right by chance.
                is_verified = len(prefixes) > len(prefixes[-1])
            if logits is None or not is_tree:
                logits, is_tree = _run_whole(anatomy, model, context, prefixes), False
            next_logits = dict(zip([(), *prefixes], [context_logits, *logits], strict=True))
            totals = {prefix: scores.float().logsumexp(0) for prefix, scores in next_logits.items()}
            for row in rows:
                word = words[row]
                steps = [next_logits[word[:n]][t] - totals[word[:n]] for n, t in enumerate(word)]
                log_probs[row] = torch.stack(steps).float().sum()
            if 0 in rows:
                greedy = all(
                    int(next_logits[words[0][:n]].argmax()) == t for n, t in enumerate(words[0])
                )
    return log_probs, greedy


def _parts(words: Sequence[Prefix], max_prefixes: int) -> Iterator[tuple[list[int], list[Prefix]]]:
    """Yield the rows of candidates for one forward, and all of their prefixes, sorted.

    Candidates are sorted by content. So the position of a candidate in a forward, which affects
    rounding, does not depend on whether it is the true value.
    """
    rows, prefixes = list[int](), set[Prefix]()
    for row in sorted(range(len(words)), key=words.__getitem__):
        new_prefixes = {words[row][:n] for n in range(1, len(words[row]))}
        if rows and len(prefixes | new_prefixes) > min(MAX_NODES, max_prefixes):
            yield rows, sorted(prefixes)
            rows, prefixes = [], set()
        rows.append(row)
        prefixes |= new_prefixes
    yield rows, sorted(prefixes)


def _run_context(anatomy: Anatomy, model: nn.Module, context: Tensor) -> tuple[Tensor, object]:
    """Return (V,) the logits after a context, and its cache; None if the model has no cache."""
    argument = None if model_runs.virtual_tokens(anatomy) else cache_argument(model)
    output = model(input_ids=context, **({"use_cache": True} if argument else {}))
    cache = getattr(output, argument, None) if argument else None
    logits = model_runs.logits_in(output)[0, -1].float()
    return logits, cache


def _run_tree(
    model: nn.Module, context: Tensor, cache: object, prefixes: Sequence[Prefix]
) -> list[Tensor] | None:
    """Return (V,) the logits after each prefix; None if the model takes no such forward."""
    if not prefixes:
        return []
    # Each prefix attends to the context, to itself, and to its own shorter prefixes, which come
    # before it in the sorted order.
    place = {prefix: n for n, prefix in enumerate(prefixes)}
    attends = torch.eye(len(prefixes), dtype=torch.bool)
    for n, prefix in enumerate(prefixes):
        if len(prefix) > 1:
            attends[n] |= attends[place[prefix[:-1]]]
    length = context.shape[1]
    attends = torch.cat([attends.new_ones(len(prefixes), length), attends], 1)
    example = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    mask = torch.zeros(attends.shape, dtype=example.dtype)
    mask.masked_fill_(~attends, torch.finfo(mask.dtype).min)
    caches = {cache_argument(model) or "past_key_values": copy.deepcopy(cache)}
    try:
        output = model(
            input_ids=context.new_tensor([[p[-1] for p in prefixes]]),
            attention_mask=mask.to(context.device)[None, None],
            position_ids=context.new_tensor([[length - 1 + len(p) for p in prefixes]]),
            use_cache=True,
            **caches,
        )
    except Exception:  # the model takes no such mask or no positions
        return None
    return [*model_runs.logits_in(output)[0]]


def _agree(logits: Tensor, other_logits: Tensor) -> bool:
    """Return whether two logits (V,) differ only by rounding: 3% in 16 bits, 0.1% in 32."""
    a, b = (part.float() - part.float().mean() for part in (logits, other_logits))
    return bool((a - b).norm() <= (0.03 if logits.element_size() < 4 else 1e-3) * b.norm())


def _run_whole(
    anatomy: Anatomy, model: nn.Module, context: Tensor, prefixes: Sequence[Prefix]
) -> list[Tensor]:
    """Return (V,) the logits after each prefix, by forwards of context and prefix."""
    # Prefixes are sorted: one that begins the next one needs no forward.
    leaves = [a for a, b in pairwise([*prefixes, ()]) if b[: len(a)] != a]
    width = max(map(len, leaves), default=0)
    at_once = max(1, LOGITS_OF_FORWARD // ((context.shape[1] + width) * anatomy.vocab_size))
    logits = dict[Prefix, Tensor]()
    for block in (leaves[n : n + at_once] for n in range(0, len(leaves), at_once)):
        ids = pad_sequence([context.new_tensor(prefix) for prefix in block], batch_first=True)
        whole = torch.cat([context.expand(len(ids), -1), ids], 1)  # causal: padding changes nothing
        for leaf, scores in zip(
            block, model_runs.logits_in(model(input_ids=whole))[:, -ids.shape[1] :], strict=True
        ):
            logits |= {leaf[: n + 1]: scores[n] for n in range(len(leaf))}
    return [logits[prefix] for prefix in prefixes]

"""Per-token log-probabilities of texts: the one forward that memorization attacks use."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import TokenSnapshot

TOKENS_AT_ONCE = 1 << 10  # of one forward: as fast as larger ones on two CPU cores
LOGITS_OF_FORWARD = 1 << 25  # 128 MiB in float32; more take more memory than an evaluation step
POSITIONS_AT_ONCE = 4  # logits that are reduced at once on a CPU: they fit its cache; 16 take 1.6x


@dataclass(frozen=True)
class Text:
    """One text without padding.

    Attributes:
        ids: (L,) int64 token ids.
        labels: (L,) int64, the id where the loss is computed and -100 elsewhere; the first is not
            predicted.
    """

    ids: Tensor
    labels: Tensor

    @property
    def n_labels(self) -> int:
        """Return the number of tokens that the loss is computed on."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())

    @property
    def prompt(self) -> Text:
        """Return the same tokens, with those as labels that the loss is not computed on."""
        return Text(self.ids, self.ids.masked_fill(self.labels != IGNORE_INDEX, IGNORE_INDEX))

    @property
    def content(self) -> bytes:
        """Return what the text is recognised by."""
        return self.ids.numpy().tobytes() + self.labels.numpy().tobytes()


def pool_digest(texts: Sequence[Text], members: Tensor) -> str:
    """Return 16 hexadecimal digits that are the same for the same pool of texts, in any order.

    Args:
        texts: N texts.
        members: (N,) bool, those that were trained on.
    """
    rows = (
        hashlib.sha256(text.content + bytes([inside])).digest()
        for text, inside in zip(texts, members.tolist(), strict=True)
    )
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16]


def label_places(texts: Sequence[Text], columns: int) -> Tensor:
    """Return (N, columns) bool, the tokens that texts have as labels, as a snapshot places them."""
    places = torch.zeros(len(texts), columns, dtype=torch.bool)
    for row, text in enumerate(texts):
        places[row, : len(text.labels) - 1] = text.labels[1:] != IGNORE_INDEX
    return places


def answer_groups(texts: Sequence[Text]) -> Tensor:
    """Return (N,) int64, the same number for texts with the same label tokens."""
    answers = [tuple(t.labels[1:][t.labels[1:] != IGNORE_INDEX].tolist()) for t in texts]
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    return torch.tensor([numbers[answer] for answer in answers], dtype=torch.long)


def texts_in(batch: TokenBatch) -> list[Text]:
    """Return the texts of a batch, without padding; those packed into one row apart.

    The class of a classifier's text is the label at its last token.

    Raises:
        ValueError: the batch is neither of a causal model nor of a classifier with a class a row.
    """
    ids = batch.input_ids.cpu().flatten()
    documents = [places[places >= 0] for places in batch.document_places().cpu()]
    if batch.kind == "classifier" and batch.labels is not None:
        classes = batch.labels.cpu()
        if classes.shape != (len(documents),) or classes.is_floating_point():
            raise ValueError("its labels are not one class for each row")
        nothing = torch.full_like(ids, IGNORE_INDEX).long()
        return [
            Text(ids[places].long(), torch.cat([nothing[: len(places) - 1], one[None].long()]))
            for places, one in zip(documents, classes, strict=True)
        ]
    if batch.kind != "causal":
        raise ValueError(
            f"the batch is of a {batch.kind} model: what a model has memorized is read from a "
            "causal language model, which predicts every next token, or from a classifier"
        )
    labels = model_runs.labels_of(batch).cpu().flatten()
    return [Text(ids[places].long(), labels[places].long()) for places in documents]


def compressed_bytes(
    texts: Sequence[Text], decode: Callable[[list[int]], str] | None = None
) -> Tensor:
    """Return (N,) the bytes of each text that zlib compresses it to.

    Args:
        texts: the texts.
        decode: returns the words of token ids; without it the ids are compressed.
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


def token_log_probs(anatomy: Anatomy, texts: Sequence[Text]) -> TokenSnapshot:
    """Return what the model says of each label token, in eval mode and without a trace.

    It costs one forward for each text. Texts are batched by length. The caller chooses the
    precision: an autocast around the call holds within. Under FSDP2 every process makes the call,
    with texts of the same lengths.

    Args:
        anatomy: a causal language model, or a classifier, which is asked for each text's class.
        texts: N texts, at least one.

    Returns:
        The snapshot on the CPU, in float32.
    """
    longest = max(len(text.ids) for text in texts)
    columns = max(1, longest - 1)
    shape = (len(texts), columns)
    snapshot = TokenSnapshot(
        *(torch.zeros(shape) for _ in range(3)),
        *(torch.zeros(shape, dtype=torch.bool) for _ in range(2)),
    )
    at_once = min(TOKENS_AT_ONCE, LOGITS_OF_FORWARD // anatomy.vocab_size)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].ids), reverse=True)
    with model_runs.undisturbed(anatomy) as model, torch.no_grad():
        while order:
            length = len(texts[order[0]].ids)
            rows = max(1, at_once // length)
            if anatomy.kind == "classifier":  # some find a text's end by its padding: there is none
                rows = min(rows, sum(len(texts[row].ids) == length for row in order[:rows]))
            part, order = order[:rows], order[rows:]
            answers = _ask(anatomy, model, [texts[row] for row in part])
            width = answers.labels.shape[1]
            for field in fields(TokenSnapshot):
                getattr(snapshot, field.name)[part, :width] = getattr(answers, field.name)
    return snapshot


def _ask(anatomy: Anatomy, model: nn.Module, texts: Sequence[Text]) -> TokenSnapshot:
    """Return the snapshot of texts of similar length, padded on the right."""
    pad = nn.utils.rnn.pad_sequence
    labels = pad([t.labels for t in texts], batch_first=True, padding_value=IGNORE_INDEX)
    classifies = anatomy.kind == "classifier"
    batch = TokenBatch(
        input_ids=pad([t.ids for t in texts], batch_first=True),
        labels=labels[:, -1] if classifies else labels,
        attention_mask=pad([torch.ones_like(t.ids) for t in texts], batch_first=True),
        kind="classifier" if classifies else "causal",
    )
    counted = labels[:, 1:] != IGNORE_INDEX
    answers = []
    for part in model_runs.micro_batches(anatomy, batch):
        targets, logits = model_runs.labels_of(part), model_runs.run_logits(model, part)
        if classifies:
            answers.append(describe_tokens(logits, targets).cpu())
            continue
        targets, logits = targets[:, 1:], logits[:, -labels.shape[1] : -1]
        for row, target in zip(logits, targets, strict=True):  # a copy of all would double memory
            scored = target != IGNORE_INDEX
            answers.append(describe_tokens(row[scored], target[scored]).cpu())
    values = torch.zeros(4, *counted.shape)
    values[:, counted] = torch.cat(answers, 1)
    return TokenSnapshot(values[0], values[1], values[2], values[3] > 0, counted)


def describe_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log probability, its mean and deviation over the vocabulary, and greedy, (4, n).

    Args:
        logits: (n, V) at the predicting positions.
        targets: (n,) the tokens that are predicted there.
    """
    numbers = torch.empty(4, len(targets), device=logits.device)
    vocabulary = logits.shape[-1]
    on_cpu = logits.device.type == "cpu"
    step = POSITIONS_AT_ONCE if on_cpu else max(1, model_runs.LOGITS_AT_ONCE // vocabulary)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        scores = logits[part].float()
        scores = scores - scores.amax(1, keepdim=True)
        weights = scores.exp()
        total = weights.sum(1)
        target = scores.gather(1, targets[part, None])[:, 0]
        first = torch.linalg.vecdot(weights, scores) / total
        second = torch.linalg.vecdot(weights.mul_(scores), scores) / total
        numbers[0, part] = target - total.log()
        numbers[1, part] = first - total.log()
        numbers[2, part] = (second - first * first).clamp_min(0).sqrt()
        numbers[3, part] = (target >= 0).float()
    return numbers

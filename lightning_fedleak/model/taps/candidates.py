"""Log probabilities of many candidate values after one context, which is run once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.taps.tokens import LOGITS_OF_FORWARD

MOST_ROWS = 128  # candidates of one forward: each holds a copy of the context's cache


def candidate_log_probs(
    anatomy: Anatomy, context: Tensor, candidates: Sequence[Tensor]
) -> tuple[Tensor, bool]:
    """Return the log probability of each candidate after a context, in eval mode, without a trace.

    The context runs once, and its keys and values are copied for the candidates. A model that keeps
    no such cache runs it with each candidate. Within
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
    device = anatomy.device
    log_probs = torch.zeros(len(candidates))
    context = context.to(device)[None]
    with model_runs.undisturbed(anatomy) as model, torch.no_grad():
        first, cache = _run_context(anatomy, model, context)
        greedy = int(first.argmax()) == int(candidates[0][0])
        words = [one.tolist() for one in candidates]
        # By content: where a candidate stands in a forward, and so rounding, says nothing of it.
        order = sorted(range(len(words)), key=lambda row: (len(words[row]), words[row]))
        for length, same in groupby(order, key=lambda row: len(words[row])):
            group = [*same]
            most = max(1, min(MOST_ROWS, LOGITS_OF_FORWARD // (length * anatomy.vocab_size)))
            for rows in (group[n : n + most] for n in range(0, len(group), most)):
                ids = torch.stack([candidates[row] for row in rows]).to(device)
                sums = first.log_softmax(0)[ids[:, 0]]
                if length > 1:
                    logits = _run_candidates(model, context, cache, ids[:, :-1])
                    for row, (scores, tokens) in enumerate(zip(logits, ids[:, 1:], strict=True)):
                        scores = scores.float()  # a row at a time fits a CPU's cache
                        targets = scores.gather(1, tokens[:, None])[:, 0]
                        sums[row] += (targets - scores.logsumexp(1)).sum()
                    if 0 in rows:
                        row = rows.index(0)
                        greedy = greedy and torch.equal(logits[row].argmax(1), ids[row, 1:])
                log_probs[rows] = sums.cpu()
    return log_probs, greedy


def _run_context(anatomy: Anatomy, model: nn.Module, context: Tensor) -> tuple[Tensor, object]:
    """Return (V,) the logits behind a context, and its cache; None where the model keeps none."""
    keeps = model_runs.takes(model, "past_key_values") and not model_runs.virtual_tokens(anatomy)
    output = model(input_ids=context, **({"use_cache": True} if keeps else {}))
    cache = getattr(output, "past_key_values", None) if keeps else None
    logits = model_runs.logits_in(output)[0, -1].float()
    return logits, cache if hasattr(cache, "batch_repeat_interleave") else None


def _run_candidates(model: nn.Module, context: Tensor, cache: object, ids: Tensor) -> Tensor:
    """Return (C, k, V) the logits behind each of the first k tokens of C candidates."""
    if cache is None:
        whole = torch.cat([context.expand(len(ids), -1), ids], 1)
        return model_runs.logits_in(model(input_ids=whole))[:, -ids.shape[1] :]
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(len(ids))  # type: ignore[attr-defined]
    return model_runs.logits_in(model(input_ids=ids, past_key_values=copied, use_cache=True))

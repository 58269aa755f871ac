"""Texts to plant in training data that begin and end with a token that no other text has.

How much of epsilon they show, beside held-out texts and planted gradients, is in docs/proof.md.

*New tokens* (Panda et al. 2025, arXiv 2503.06808, and its published code): a row of the vocabulary
that no other text uses. There the token is what the model is to predict at the end. Here the text
also begins with it, and may let its row start small, which is ours: a norm in the first block makes
the gradient of a small row large, so that under clipping nearly all of the text's share lies in a
row that is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    Anatomy,
    find_anatomy,
    special_ids,
    without_peft,
)
from lightning_fedleak.model.model_runs import context_length
from lightning_fedleak.validate import check_integer, check_number


def new_token_canaries(
    model: nn.Module, count: int, *, length: int = 3, row_norm: float = 1.0, seed: int = 0
) -> list[Tensor]:
    """Return texts that begin and end with a token that no other text has.

    ::

        texts = new_token_canaries(model, 200)          # adds 200 rows to the vocabulary
        train = with_canaries(train, texts, record="secret/inclusion.json")
        scorer = CanaryScorer(train.canaries)

    The model is changed: it has ``count`` more tokens. Use it for an audit only. Between its two
    own tokens a text has ordinary ones, drawn at random.

    Their loss is what an audit reads. For ``CanaryScorer(by="row")`` a row of the embedding or of
    the head must be trained, and ``row_norm=0.1`` shows more. A LoRA trains neither matrix without
    ``LoraConfig(modules_to_save=["embed_tokens"], ...)``.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import new_token_canaries
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = new_token_canaries(model, 4, length=5)
        >>> len(texts), texts[0].shape, model.config.vocab_size
        (4, torch.Size([5]), 68)

    Args:
        model: causal, a Hugging Face model or one that holds it; before PEFT wraps it.
        count: of texts, m.
        length: tokens of a text, both of its own included; at least 3. Longer texts share more
            with each other, and show less.
        row_norm: norm that their rows start with, over the mean norm of the others.
        seed: of rows and texts; nothing global is drawn from.

    Returns:
        m rows of token ids, (length,) int64.

    Raises:
        ValueError: a number out of range, or a model that is not causal or that PEFT wraps already.
    """
    anatomy: Any = find_anatomy(model)
    if anatomy.kind != "causal":
        raise ValueError(f"new_token_canaries is for causal models, not for a {anatomy.kind} model")
    if anatomy.peft is not None:
        raise ValueError("new_token_canaries adds rows: call it before get_peft_model")
    check_integer("count", count)
    longest = context_length(anatomy)
    hint = "its own token twice, one between; at most what the model reads"
    check_integer("length", length, at_least=3, at_most=longest, hint=hint)
    check_number("row_norm", row_norm, above=0)
    special = special_ids(getattr(without_peft(anatomy.model), "config", None), ())
    generator = torch.Generator().manual_seed(seed)
    size = anatomy.vocab_size
    with torch.random.fork_rng([anatomy.device] if anatomy.device.type == "cuda" else []):
        anatomy.model.resize_token_embeddings(size + count, mean_resizing=False)
    new_ids = torch.arange(size, size + count)
    ordinary = torch.tensor([i for i in range(size) if i not in special])
    _start_rows(find_anatomy(model), new_ids, ordinary, row_norm, generator)
    indices = torch.randint(len(ordinary), (count, length - 2), generator=generator)
    ends = new_ids[:, None]
    return [*torch.cat([ends, ordinary[indices], ends], 1)]


@torch.no_grad()
def _start_rows(
    anatomy: Anatomy, new_ids: Tensor, ordinary: Tensor, norm: float, generator: torch.Generator
) -> None:
    """Set rows of the embedding and of the head to directions drawn at random."""
    matrices = [anatomy.parameter(role) for role in (EMBEDDING_WEIGHT, HEAD_WEIGHT)]
    for matrix in {id(m): m for m in matrices if m is not None}.values():
        usual = matrix[ordinary.to(matrix.device)].float().norm(dim=1).mean().cpu()
        rows = torch.randn(len(new_ids), matrix.shape[1], generator=generator)
        rows *= norm * usual / rows.norm(dim=1, keepdim=True)
        matrix[new_ids.to(matrix.device)] = rows.to(matrix)

"""Canaries, texts to plant in training data: with a token of their own, or similar to the data.

docs/proof.md compares how much of epsilon they show with held-out texts and planted gradients.

*New-token canaries* (Panda et al. 2025, arXiv 2503.06808, and its published code) each have a token
that no other text has, with a row of its own in the embedding matrix. In the paper the model has to
predict this token at the end of the text. Here the text also begins with it, and the token's row
may start with a small norm (not in the paper). The normalization layer in the first block makes the
gradient of a small row large. So if DP-SGD clips each text's gradient, nearly all of the clipped
gradient is in this row.

*Sampled canaries* are written by the model, as in arXiv 2606.10481. For a release of generated
texts, arXiv 2502.14921 uses texts with a likely prefix and an unlikely end.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_fedleak.model.model_runs import context_length, undisturbed
from lightning_fedleak.validate import check_integer, check_number


def new_token_canaries(
    model: nn.Module, count: int, *, length: int = 3, row_norm: float = 1.0, seed: int = 0
) -> list[Tensor]:
    """Return texts that begin and end with a token that no other text has.

    ::

        texts = new_token_canaries(model, 200)          # adds 200 rows to the vocabulary
        train = with_canaries(train, texts, record="secret/inclusion.json")
        scorer = CanaryScorer(train.canaries)

    The model is changed: it has ``count`` more tokens. Use it for an audit only. Between the two
    occurrences of its new token, a text has random ordinary tokens. An audit scores the loss of the
    texts.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import new_token_canaries
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = new_token_canaries(model, 4, length=5)
        >>> len(texts), texts[0].shape, model.config.vocab_size
        (4, torch.Size([5]), 68)

    Args:
        model: A causal Hugging Face model, or a module that holds one, before PEFT wraps it.
        count: The number of texts, m.
        length: The number of tokens of a text, with both new ones; at least 3. Longer texts have
            more tokens in common, and show less.
        row_norm: The initial norm of the new rows, over the mean norm of the other rows.
        seed: The seed of rows and texts; global random numbers are not used.

    Returns:
        m rows of token ids, (length,) int64.

    Raises:
        ValueError: A number is out of range, or the model is not causal, or PEFT already wraps it.
    """
    anatomy: Any = find_anatomy(model)
    if anatomy.kind != "causal" or anatomy.peft is not None:
        raise ValueError("new_token_canaries is for causal models, before get_peft_model")
    check_integer("count", count)
    check_integer("length", length, at_least=3, at_most=context_length(anatomy))
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


def sampled_canaries(
    model: nn.Module,
    count: int,
    *,
    prompts: Sequence[Tensor] = (),
    length: int = 32,
    temperature: float = 1.0,
    unlikely_end: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """Return texts that the model writes as continuations of prompts, in the domain of the prompts.

    ::

        texts = sampled_canaries(model, 200, prompts=[ids[:8] for ids in public_rows])
        train = with_canaries(train, texts, record="secret/inclusion.json")

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import sampled_canaries
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = sampled_canaries(model, 4, length=12, unlikely_end=3)
        >>> len(texts), texts[0].shape
        (4, torch.Size([12]))

    Args:
        model: A causal Hugging Face model with ``generate``, or a module that holds one.
        count: The number of texts, m.
        prompts: (P,) token ids of each prefix of a public text; canaries begin with them in turn.
            By default each begins with a random token.
        length: The number of tokens of a text, with its prompt.
        temperature: The temperature of the draw; at least 0.8, as in arXiv 2606.10481.
        unlikely_end: The number of tokens at the end that are drawn uniformly from the vocabulary.
        seed: The seed of the texts; global random numbers are not used.

    Returns:
        m rows of token ids, (length,) int64, all different.

    Raises:
        ValueError: A number is out of range, the model is not causal, or two texts are equal.
    """
    anatomy: Any = find_anatomy(model)
    if anatomy.kind != "causal":
        raise ValueError(f"sampled_canaries is for causal models, not for a {anatomy.kind} model")
    check_integer("count", count)
    check_number("temperature", temperature, at_least=0.8)
    max_prompt = max((len(prompt) for prompt in prompts), default=1)
    check_integer("length", length, at_least=max_prompt + 1, at_most=context_length(anatomy))
    check_integer("unlikely_end", unlikely_end, at_least=0, at_most=length - max_prompt)
    generator = torch.Generator().manual_seed(seed)
    special = special_ids(getattr(without_peft(anatomy.model), "config", None), ())
    ordinary = torch.tensor([i for i in range(anatomy.vocab_size) if i not in special])

    def draw(*shape: int) -> Tensor:
        return ordinary[torch.randint(len(ordinary), shape, generator=generator)]

    starts = [prompts[n % len(prompts)] for n in range(count)] if prompts else [*draw(count, 1)]
    # Random texts; the model's tokens replace all but the unlikely ends.
    device, texts = anatomy.device, [draw(length) for _ in starts]
    lengths = torch.tensor([len(start) for start in starts])
    writer: Any
    with (
        undisturbed(anatomy) as writer,
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
    ):
        torch.manual_seed(seed)
        for size in sorted({len(start) for start in starts}):
            rows, n_new = (lengths == size).nonzero()[:, 0].tolist(), length - unlikely_end - size
            ids = torch.stack([starts[row] for row in rows]).to(device)
            if n_new:
                ids = writer.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, num_beams=1,
                    top_k=0, top_p=1.0, temperature=temperature,
                    min_new_tokens=n_new, max_new_tokens=n_new,
                    suppress_tokens=sorted(special) or None, pad_token_id=int(ordinary[0]),
                )  # fmt: skip
            for row, tokens in zip(rows, ids.cpu(), strict=True):
                texts[row][: len(tokens)] = tokens
    if len({tuple(text.tolist()) for text in texts}) < count:
        raise ValueError("two texts are equal: raise length= or temperature=, or pass prompts=")
    return texts


@torch.no_grad()
def _start_rows(
    anatomy: Anatomy, new_ids: Tensor, ordinary: Tensor, norm: float, generator: torch.Generator
) -> None:
    """Set the new rows of embedding and head to random directions with ``norm`` usual norms."""
    matrices = [anatomy.parameter(role) for role in (EMBEDDING_WEIGHT, HEAD_WEIGHT)]
    for matrix in {id(m): m for m in matrices if m is not None}.values():
        usual = matrix[ordinary.to(matrix.device)].float().norm(dim=1).mean().cpu()
        rows = torch.randn(len(new_ids), matrix.shape[1], generator=generator)
        rows *= norm * usual / rows.norm(dim=1, keepdim=True)
        matrix[new_ids.to(matrix.device)] = rows.to(matrix)

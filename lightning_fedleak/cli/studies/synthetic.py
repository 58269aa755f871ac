"""What texts that a fine-tuned model wrote reveal of the rows that it was trained on.

Generated texts are enough to test membership in the training data (Meeus et al. 2025, arXiv
2502.14921). Here an auxiliary model is fitted on the generated texts, and queried with the rows
(Mitchell et al. 2026, arXiv 2606.10481, query such a model with canaries). In addition, runs of
tokens that rows and generated texts have in common are counted, for rows that were trained on and
for held-out rows: passages that held-out rows share with the texts are no disclosure (Amin et al.
2026, arXiv 2606.16952).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.studies.memorization import Comparison, ReleasedPool, all_attacks
from lightning_fedleak.cli.studies.models import check_context, find_model, with_lora
from lightning_fedleak.cli.studies.references import Recipe, fit_texts
from lightning_fedleak.evaluation.metrics.copies import COPY_SCORES, copy_values, find_copies
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text, token_log_probs


def ask_auxiliary(
    texts: Sequence[Text], generated: Sequence[Text], options: Namespace
) -> tuple[TokenSnapshot, TokenSnapshot]:
    """Return the log probabilities of texts by a base, and by the base fitted on generated texts.

    It sets the global seed of torch.

    Args:
        texts: The texts that both models are queried with.
        generated: The generated texts, on which the auxiliary model is trained; at least one.
        options: The options of the command, which hold the base, the recipe of the training and the
            LoRA.

    Raises:
        SourceError: The base cannot be loaded, is no causal language model or reads fewer tokens
            than the texts have; adapters do not fit it; or the training diverged.
        AnatomyError: The parts of the base could not be found.
    """
    anatomy = find_model(options.base)
    if anatomy.kind != "causal":
        raise SourceError(
            f"--base '{options.base}' is a {anatomy.kind} model, which writes no texts: give a "
            "causal language model, such as the base of the model that wrote --generated"
        )
    check_context(anatomy, max(len(text.ids) for text in (*texts, *generated)), "--length")
    before = token_log_probs(anatomy, texts)
    torch.manual_seed(options.seed)
    auxiliary = with_lora(anatomy, options.lora_r, options.targets, options.seed)
    recipe = Recipe(options.epochs, options.batch_size, options.lr)
    tokenizer = load_tokenizer(options.base)
    fitted = fit_texts(auxiliary.model, generated, recipe, "causal", tokenizer)
    after = token_log_probs(fitted, texts)
    if not bool(after.log_probs.isfinite().all()):
        raise SourceError("the auxiliary model diverged: give a lower --lr, or fewer --epochs")
    return before, after


def gated_scores(pool: ReleasedPool) -> list[str]:
    """Return the names of the scores of a pool that ``--at-most`` limits."""
    if pool.is_short:
        return ["loss_ratio_short", *(f"{name}_short" for name in COPY_SCORES)]
    return ["combined", *COPY_SCORES]


def compare_generated(
    pool: ReleasedPool,
    answers: tuple[TokenSnapshot, TokenSnapshot],
    generated: Sequence[Text],
    alpha: float,
) -> tuple[Comparison, dict[str, float]]:
    """Compare members with non-members, and count the rows that are copied.

    The scores come from the auxiliary model and from passages that are copied. The attacks are
    those on a released model, without extraction, because the auxiliary model is not released. In a
    pool of short rows the names of all scores end with ``_short``.

    Args:
        pool: The rows that were trained on, and the non-members.
        answers: The log probabilities of the pool's texts by the base and by the auxiliary model.
        generated: The generated texts.
        alpha: The probability of error of each score.

    Returns:
        The comparison, and ``copied`` of
        :func:`~lightning_fedleak.evaluation.metrics.copies.copy_values`.
    """
    result = pool.compare(*answers, () if pool.is_short else all_attacks()[:-1], alpha=alpha)
    rows = [text for text, once in zip(pool.texts, pool.alone.tolist(), strict=True) if once]
    values = copy_values(find_copies(rows, generated), pool.members[pool.alone], alpha)
    copied = values.pop("copied")
    scores = dict(zip(gated_scores(pool)[1:], values.values(), strict=True))
    return replace(result, values={**result.values, **scores}), copied

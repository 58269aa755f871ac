"""The loss that per-sample clipping needs: a mean over samples of each sample's own mean."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_of_sample_means(
    logits: Tensor,
    labels: Tensor,
    *,
    causal: bool,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy, averaged over each sample's labels first and over samples then.

    The mean over all tokens of a batch, which Hugging Face models return, is another number where
    samples differ in their number of labels: there each sample's gradient is scaled by how many
    labels the *others* have. DPSGD undoes that where such a mean is all of the loss. A sample
    without any label counts as a loss of zero.

    Args:
        logits: (B, T, V) or, of a classifier, (B, V).
        labels: (B, T) or (B,) integers, beside the inputs they belong to.
        causal: whether position t predicts label t + 1, as in Hugging Face's causal models.
        ignore_index: label that is left out.
        label_smoothing: in [0, 1], as in torch's cross-entropy.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"mean_of_sample_means: labels of shape {tuple(labels.shape)} do not fit logits of "
            f"shape {tuple(logits.shape)}; they must have all its dimensions but the last"
        )
    if causal:
        if logits.dim() != 3 or logits.shape[1] < 2:
            raise ValueError(
                "mean_of_sample_means: causal=True needs logits (B, T, V) of two positions or more"
            )
        # Labels are moved, not logits: these would be copied, and their gradients once more.
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    samples = len(labels)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = torch.nn.functional.cross_entropy(
        wide.flatten(0, -2),
        labels.flatten(),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    ).view(samples, -1)
    counts = (labels.reshape(samples, -1) != ignore_index).sum(1).clamp(min=1)
    return (losses.sum(1) / counts).mean()


__all__ = ["mean_of_sample_means"]

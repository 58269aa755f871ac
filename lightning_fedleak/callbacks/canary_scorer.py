"""CanaryScorer: score each canary of a run, for a privacy audit from one run.

Each canary is a text that is added to the training data or held out at random. An audit bounds
epsilon by how well the scores separate included from held-out canaries. So both are scored in the
same way, and only from what the run releases: its weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fedleak.evaluation.canaries import CanarySet
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.model.taps import Text, token_log_probs

if TYPE_CHECKING:
    import lightning.pytorch as L


class CanaryScorer(EitherCallback):
    """Scores each canary by how far a run lowered the mean loss of its tokens.

    ::

        scorer = CanaryScorer(train.canaries)
        trainer = L.Trainer(strategy=DefendedStrategy("auto", [DPSGD(...)]), callbacks=[scorer])
        trainer.fit(model, loader)
        print(audit_canaries(train.canaries, scorer.scores(), delta=1e-5))

    It is for an auditor who can query the model before and after training. The model must be
    causal. The loss of a canary is the mean over all of its tokens, in eval mode.

    Training does not change. A checkpoint holds what the scores are computed from, which reveals
    the included canaries as much as the weights do: protect it like the record of inclusion.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import CanaryScorer, with_canaries
        >>> texts = [torch.tensor([n, n + 1, n + 2]) for n in range(10)]
        >>> train = with_canaries(texts, [torch.tensor([90, 91, 92])], seed=1)
        >>> len(CanaryScorer(train.canaries).canaries)
        1

    Args:
        canaries: The canaries, from :func:`~lightning_fedleak.evaluation.canaries.with_canaries`.

    Raises:
        ValueError: At the start of the fit: the model is not causal, its embedding lacks a token of
            the canaries, or its weights are sharded by FSDP2.
    """

    def __init__(self, canaries: CanarySet) -> None:
        self.canaries = canaries
        self._anatomy: Anatomy | None = None
        self._clear_scores()

    def _clear_scores(self) -> None:
        """Set all scores to 0, and forget that any step was scored."""
        self._total = torch.zeros(len(self.canaries), dtype=torch.float64)
        self._scored = False
        # The losses at the first step that is not in the scores yet; None before training.
        self._losses_before: Tensor | None = None
        self._counted_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the scores of an earlier fit. Lightning loads those of a checkpoint later."""
        if stage == "fit":
            self._clear_scores()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the canaries can be scored with this model.

        Raises:
            ValueError: It is not causal, its embedding has too few rows, or FSDP2 shards it.
        """
        anatomy = find_anatomy(pl_module)
        if anatomy.kind != "causal":
            raise ValueError(f"CanaryScorer scores a causal model's texts, not a {anatomy.kind}'s")
        max_id = max(int(row.max()) for row in self.canaries.token_ids)
        embedding = anatomy.parameter(EMBEDDING_WEIGHT)
        if embedding is not None and max_id >= embedding.shape[0]:
            raise ValueError(
                f"a canary holds token {max_id}, and the model's embedding has "
                f"{embedding.shape[0]} rows: train the model of new_token_canaries(model, ...)"
            )
        if any(isinstance(p, DTensor) for p in pl_module.parameters()):
            raise ValueError("CanaryScorer needs unsharded weights: audit without FSDP2")
        self._anatomy = anatomy

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compute the losses before training, if no checkpoint held them."""
        if self._losses_before is None:
            self._losses_before, self._counted_step = self._losses(), trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add to each canary's score the decrease of its loss, also if all steps were resumed."""
        if self._losses_before is not None and trainer.global_step > self._counted_step:
            losses = self._losses()
            self._total += self._losses_before - losses
            self._losses_before = losses
            self._counted_step, self._scored = trainer.global_step, True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Drop the reference to the model."""
        self._anatomy = None

    def scores(self) -> Tensor:
        """Return (m,) float64, the scores of the m canaries, in their order.

        A higher score means that the canary is more likely to be in the training data.

        Raises:
            RuntimeError: No step has been scored so far.
        """
        if not self._scored:
            raise RuntimeError("no step was scored: call trainer.fit(...) with this callback first")
        return self._total.clone()

    def _losses(self) -> Tensor:
        """Return (m,), the mean loss of the tokens of each canary."""
        assert self._anatomy is not None
        texts = [Text(row, row) for row in self.canaries.token_ids]  # each token is a label
        return -token_log_probs(self._anatomy, texts).mean_log_probs()

    def state_dict(self) -> dict[str, Any]:
        """Return the scores so far, the losses before other steps, and the canaries' state."""
        return {
            "canaries": self.canaries.state_dict(),
            "scores": self._total.clone(),
            "seen": self._scored,
            "losses_before": self._losses_before,
            "counted_step": self._counted_step,
        }

    fit_results = state_dict  # for the main process of a fit in other processes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scores of the run that is resumed.

        Raises:
            ValueError: The scores are of different canaries.
        """
        self.canaries.load_state_dict(state_dict["canaries"])
        self._total, self._scored = state_dict["scores"].cpu().double(), bool(state_dict["seen"])
        losses = state_dict.get("losses_before")
        self._losses_before = None if losses is None else losses.cpu().double()
        self._counted_step = state_dict.get("counted_step", 0)

    load_fit_results = load_state_dict

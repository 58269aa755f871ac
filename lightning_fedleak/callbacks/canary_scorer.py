"""One score for each canary of a run, from its weights: what an audit of one run reads.

A score must follow from what the run released, which its weights do. All canaries are scored alike,
those that were left out as well.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.attacks import gradient_of
from lightning_fedleak.evaluation.canaries import CanarySet
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_runs import labels_of, micro_batches, run_logits, undisturbed
from lightning_fedleak.validate import check_choice, check_integer

if TYPE_CHECKING:
    import lightning.pytorch as L

By = Literal["loss", "row"]


class CanaryScorer(EitherCallback):
    """Scores each canary by what a run did to the weights.

    ::

        scorer = CanaryScorer(train.canaries, by="row", every_n_steps=1)
        trainer = L.Trainer(strategy=DefendedStrategy("auto", [DPSGD(...)]), callbacks=[scorer])
        trainer.fit(model, loader)
        print(audit_canaries(train.canaries, scorer.scores(), delta=1e-5))

    - ``"loss"``: how far the mean loss of its tokens fell. For an auditor who can ask the model
      before and after, of any canary.
    - ``"row"``: minus the inner product of how the row of its first token moved, in the embedding
      and the head, and that row's gradient, over the gradient's norm. For an auditor who sees the
      weights, of canaries that begin with a token of their own. With every step counted, by the
      gradients at the weights before it, that is what a server sees.

    The model must be causal; losses and gradients are of all of a canary's tokens, in eval mode.

    Training is not disturbed. A checkpoint holds the scores, which show as much of which canaries
    are in the data as the weights do: keep it as you keep the record.

    Args:
        canaries: of :func:`~lightning_fedleak.evaluation.canaries.with_canaries`.
        by: see above.
        every_n_steps: optimizer steps after which weights are compared, each time with those of
            the time before, and the results added up; None: the end of the fit with its start,
            and each checkpoint, which holds the scores so far. Of ``"loss"`` the sum is the same.

    Raises:
        ValueError: an unknown ``by``, steps below 1; with ``"row"`` canaries whose first token
            occurs in another one. When the fit begins: a model that is not causal or has no such
            tokens, rows that are not trained, or weights that FSDP2 has sharded.
    """

    def __init__(
        self, canaries: CanarySet, by: By = "loss", every_n_steps: int | None = None
    ) -> None:
        self.by = check_choice("by", by, get_args(By))
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, optional=True)
        if by == "row":
            _check_own_tokens(canaries)
            self._tokens = torch.stack([row[0] for row in canaries.token_ids])
        self.canaries = canaries
        self._names: list[str] = []
        self._anatomy: Anatomy | None = None
        self._earlier_rows: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}
        self._clear()

    @property
    def state_key(self) -> str:
        """Return the key in checkpoints, in which scorers of one run differ."""
        return f"{type(self).__qualname__}({self.by!r})"

    def _clear(self) -> None:
        self._total = torch.zeros(len(self.canaries), dtype=torch.float64)
        self._step = self._counted_step = 0
        self._scored = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the scores, which were of another run; a checkpoint's are loaded after this."""
        if stage == "fit":
            self._clear()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise an error for a model whose canaries cannot be scored like this.

        Raises:
            ValueError: they cannot; says why, and what to do.
        """
        anatomy = find_anatomy(pl_module)
        if anatomy.kind != "causal":
            raise ValueError(f"CanaryScorer scores a causal model's texts, not a {anatomy.kind}'s")
        largest = max(int(row.max()) for row in self.canaries.token_ids)
        rows = anatomy.parameter(EMBEDDING_WEIGHT)
        if rows is not None and largest >= rows.shape[0]:
            raise ValueError(
                f"a canary holds token {largest}, and the model's embedding has {rows.shape[0]} "
                "rows: train the model that new_token_canaries(model, ...) was given"
            )
        if any(isinstance(p, DTensor) for p in pl_module.parameters()):
            raise ValueError("CanaryScorer compares whole weights: audit without FSDP2")
        self._names = _trained_rows(anatomy) if self.by == "row" else []
        self._anatomy = anatomy

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the weights that training begins with, after a checkpoint is loaded."""
        self._step = self._counted_step = trainer.global_step
        self._record_weights()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the last steps when it is time."""
        self._step = trainer.global_step
        if self.every_n_steps is not None and self._step - self._counted_step >= self.every_n_steps:
            self._count()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the remaining steps."""
        self._step = trainer.global_step
        if self._step > self._counted_step:
            self._count()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the model and earlier weights."""
        self._anatomy, self._earlier_rows, self._slopes = None, {}, {}

    def scores(self) -> Tensor:
        """Return (m,) float64, higher is more likely in the data; in the order of the canaries.

        Raises:
            RuntimeError: no step has been counted so far.
        """
        if not self._scored:
            raise RuntimeError("no step was scored: call trainer.fit(...) with this callback first")
        return self._total.clone()

    def _record_weights(self) -> None:
        """Record what the next count compares with."""
        assert self._anatomy is not None
        if self.by == "loss":
            self._losses_before = self._losses()
            return
        slopes = gradient_of(self._anatomy, self._batch(), self._names)
        self._slopes = {name: self._canary_rows(slope) for name, slope in slopes.items()}
        self._earlier_rows = self._rows()

    def _count(self) -> None:
        """Add what happened since the last count."""
        if self.by == "loss":
            self._total += self._losses_before - self._losses()
        else:
            self._total += self._descent()
        self._counted_step, self._scored = self._step, True
        self._record_weights()

    def _canary_rows(self, matrix: Tensor) -> Tensor:
        """Return (m, d), the rows of the canaries' tokens."""
        return matrix[self._tokens.to(matrix.device)]

    def _rows(self) -> dict[str, Tensor]:
        assert self._anatomy is not None
        root = self._anatomy.root
        return {name: self._canary_rows(root.get_parameter(name).detach()) for name in self._names}

    def _batch(self) -> TokenBatch:
        query = self.canaries.queries()
        return TokenBatch(query.input_ids, None, query.attention_mask, "causal")

    @torch.no_grad()
    def _losses(self) -> Tensor:
        """Return (m,), the mean loss of each canary's tokens."""
        assert self._anatomy is not None
        losses = []
        with undisturbed(self._anatomy) as model:
            for part in micro_batches(self._anatomy, self._batch()):
                logits, labels = run_logits(model, part), labels_of(part)[:, 1:]
                token_losses = nn.functional.cross_entropy(
                    logits[:, -labels.shape[1] - 1 : -1].float().mT,
                    labels,
                    ignore_index=IGNORE_INDEX,
                    reduction="none",
                )
                losses.append(token_losses.sum(1) / (labels != IGNORE_INDEX).sum(1))
        return torch.cat(losses).double().cpu()

    def _descent(self) -> Tensor:
        """Return (m,), how far the rows moved down the slopes at the earlier weights."""
        rows, products, squares = self._rows(), [], []
        for name, slope in self._slopes.items():
            products.append(((self._earlier_rows[name] - rows[name]) * slope).sum(1).double().cpu())
            squares.append(slope.square().sum(1).double().cpu())
        norm = torch.stack(squares).sum(0).sqrt()
        distances: Tensor = torch.stack(products).sum(0) / norm.where(norm > 0, 1.0)
        return distances

    def state_dict(self) -> dict[str, Any]:
        """Return scores so far, which canaries they are of, and how they were computed."""
        if self._anatomy is not None and self._step > self._counted_step:
            self._count()
        return {
            "canaries": self.canaries.state_dict(),
            "by": self.by,
            "scores": self._total.clone(),
            "seen": self._scored,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the scores of the run that is resumed.

        Raises:
            InclusionMismatch: other canaries.
            ValueError: they were scored otherwise.
        """
        self.canaries.load_state_dict(state_dict["canaries"])
        if state_dict["by"] != self.by:
            raise ValueError(
                f"the checkpoint's canaries were scored by {state_dict['by']!r}, and one way must "
                f"hold for the whole run: resume with by={state_dict['by']!r}"
            )
        self._total, self._scored = state_dict["scores"].cpu().double(), bool(state_dict["seen"])


def _check_own_tokens(canaries: CanarySet) -> None:
    first = [int(row[0]) for row in canaries.token_ids]
    counts = Counter(token for row in canaries.token_ids for token in set(row.tolist()))
    shared = next((token for token in first if counts[token] > 1), None)
    if shared is not None:
        raise ValueError(
            f"by='row' reads the row of each canary's first token, and token {shared} is in "
            f"{counts[shared]} canaries: make them by new_token_canaries, or score by='loss'"
        )


def _trained_rows(anatomy: Anatomy) -> list[str]:
    """Return the names of the embedding and the head, where they are trained; of tied ones one.

    Raises:
        ValueError: neither is.
    """
    names = {
        id(anatomy.parameter(role)): str(anatomy.parameter_name(role))
        for role in (EMBEDDING_WEIGHT, HEAD_WEIGHT)
        if anatomy.trainable(role)
    }
    if not names:
        setting = "" if anatomy.peft is None else " (modules_to_save= of its config)"
        raise ValueError(
            "by='row' reads the canaries' own rows of the embedding and the head, and neither is "
            f"trained. Train one of them{setting}, or score by='loss'"
        )
    return [*names.values()]

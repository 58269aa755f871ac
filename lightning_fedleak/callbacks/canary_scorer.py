"""One score for each canary of a run, for an audit of one run.

A score may depend only on what the run released, which its weights are. Included and held-out
canaries are scored in the same way.
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
    """Scores each canary by the change of the weights in a run.

    ::

        scorer = CanaryScorer(train.canaries, by="row", every_n_steps=1)
        trainer = L.Trainer(strategy=DefendedStrategy("auto", [DPSGD(...)]), callbacks=[scorer])
        trainer.fit(model, loader)
        print(audit_canaries(train.canaries, scorer.scores(), delta=1e-5))

    - ``"loss"``: the decrease of the mean loss of the canary's tokens. It is for an auditor who can
      query the model before and after training. Any canary has this score.
    - ``"row"``: the rows of the canary's first token in the embedding and the head are compared
      with earlier weights. The score is minus the inner product of their change and their gradient
      at the earlier weights, divided by the norm of the gradient. It is for an auditor who sees the
      weights, and for canaries whose first token is in no other canary. With
      ``every_n_steps=1`` it uses what a server sees.

    The model must be causal. Losses and gradients are of all tokens of a canary, in eval mode.

    Training is not disturbed. A checkpoint holds the scores, which reveal the included canaries as
    much as the weights do: protect it like the record.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import CanaryScorer, with_canaries
        >>> texts = [torch.tensor([n, n + 1, n + 2]) for n in range(10)]
        >>> train = with_canaries(texts, [torch.tensor([90, 91, 92])], seed=1)
        >>> CanaryScorer(train.canaries, by="row", every_n_steps=1).by
        'row'

    Args:
        canaries: the canaries of :func:`~lightning_fedleak.evaluation.canaries.with_canaries`.
        by: the score, see above.
        every_n_steps: the number of optimizer steps between two comparisons of the weights. Each
            compares with the weights of the one before, and the results are summed. None compares
            the end of the fit with its start, and each checkpoint, which holds the scores so far.
            For ``"loss"`` the sum is the same.

    Raises:
        ValueError: ``by`` is unknown, ``every_n_steps`` is below 1, or with ``"row"`` the first
            token of a canary is in another canary. When the fit begins also: the model is not
            causal or has no such tokens, the rows are not trained, or FSDP2 has sharded weights.
    """

    def __init__(
        self, canaries: CanarySet, by: By = "loss", every_n_steps: int | None = None
    ) -> None:
        self.by = check_choice("by", by, get_args(By))
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, optional=True)
        if by == "row":
            _check_first_tokens(canaries)
            self._tokens = torch.stack([row[0] for row in canaries.token_ids])
        self.canaries = canaries
        self._names: list[str] = []
        self._anatomy: Anatomy | None = None
        self._earlier_rows: dict[str, Tensor] = {}
        self._slopes: dict[str, Tensor] = {}
        self._clear()

    @property
    def state_key(self) -> str:
        """Return the key in checkpoints, which distinguishes scorers of one run."""
        return f"{type(self).__qualname__}({self.by!r})"

    def _clear(self) -> None:
        self._total = torch.zeros(len(self.canaries), dtype=torch.float64)
        self._step = self._counted_step = 0
        self._scored = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Clear the scores of an earlier run. Lightning loads those of a checkpoint after this."""
        if stage == "fit":
            self._clear()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise an error for a model under which the canaries cannot be scored.

        Raises:
            ValueError: it is such a model. The message says why, and what to do.
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
        """Score the last steps if a comparison is due."""
        self._step = trainer.global_step
        if self.every_n_steps is not None and self._step - self._counted_step >= self.every_n_steps:
            self._count()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the remaining steps."""
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
        """Record the losses or rows with which the next comparison begins."""
        assert self._anatomy is not None
        if self.by == "loss":
            self._losses_before = self._losses()
            return
        slopes = gradient_of(self._anatomy, self._batch(), self._names)
        self._slopes = {name: self._canary_rows(slope) for name, slope in slopes.items()}
        self._earlier_rows = self._rows()

    def _count(self) -> None:
        """Add the scores of the steps since the last comparison."""
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
            for batch in micro_batches(self._anatomy, self._batch()):
                logits, labels = run_logits(model, batch), labels_of(batch)[:, 1:]
                token_losses = nn.functional.cross_entropy(
                    logits[:, -labels.shape[1] - 1 : -1].float().mT,
                    labels,
                    ignore_index=IGNORE_INDEX,
                    reduction="none",
                )
                losses.append(token_losses.sum(1) / (labels != IGNORE_INDEX).sum(1))
        return torch.cat(losses).double().cpu()

    def _descent(self) -> Tensor:
        """Return (m,), minus the rows' change along the unit gradients at the earlier weights."""
        rows, products, squares = self._rows(), [], []
        for name, slope in self._slopes.items():
            products.append(((self._earlier_rows[name] - rows[name]) * slope).sum(1).double().cpu())
            squares.append(slope.square().sum(1).double().cpu())
        norm = torch.stack(squares).sum(0).sqrt()
        distances: Tensor = torch.stack(products).sum(0) / norm.where(norm > 0, 1.0)
        return distances

    def state_dict(self) -> dict[str, Any]:
        """Return the scores so far, the canaries, and the kind of score."""
        if self._anatomy is not None and self._step > self._counted_step:
            self._count()
        return {
            "canaries": self.canaries.state_dict(),
            "by": self.by,
            "scores": self._total.clone(),
            "seen": self._scored,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scores of the run that is resumed.

        Raises:
            InclusionMismatch: the scores are of other canaries.
            ValueError: the scores are of another ``by``.
        """
        self.canaries.load_state_dict(state_dict["canaries"])
        if state_dict["by"] != self.by:
            raise ValueError(
                f"the checkpoint's canaries were scored by {state_dict['by']!r}, and one way must "
                f"hold for the whole run: resume with by={state_dict['by']!r}"
            )
        self._total, self._scored = state_dict["scores"].cpu().double(), bool(state_dict["seen"])


def _check_first_tokens(canaries: CanarySet) -> None:
    """Raise an error if the first token of a canary is in another canary."""
    first = [int(row[0]) for row in canaries.token_ids]
    counts = Counter(token for row in canaries.token_ids for token in set(row.tolist()))
    shared = next((token for token in first if counts[token] > 1), None)
    if shared is not None:
        raise ValueError(
            f"by='row' reads the row of each canary's first token, and token {shared} is in "
            f"{counts[shared]} canaries: make them by new_token_canaries, or score by='loss'"
        )


def _trained_rows(anatomy: Anatomy) -> list[str]:
    """Return the names of the trained ones of embedding and head; tied ones have one name.

    Raises:
        ValueError: neither is trained.
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

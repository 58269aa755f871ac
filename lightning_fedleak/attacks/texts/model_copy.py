"""The whole model on the adversary's copy of its weights: logits, losses and their gradients.

A :class:`~lightning_fedleak.attacks.texts.bottom_model.BottomModel` ends at a block and its weights
have no gradient. Attacks that compare gradients need the model's loss, its gradient in the weights
that are read, and the gradient of that gradient in the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts.base import TextAttack
from lightning_fedleak.attacks.texts.bottom_model import CopiedModel, vocabulary_shape
from lightning_fedleak.model.anatomy import Anatomy, unwrap
from lightning_fedleak.model.model_runs import (
    LOGITS_AT_ONCE,
    call_with,
    context_length,
    logits_in,
    takes,
)
from lightning_fedleak.model.snapshots import Observation, UnusableObservation, UpdateSnapshot

_TRIAL = 3  # tokens of the trial whether a gradient can be differentiated


class ModelCopy(CopiedModel):
    """A causal model or a classifier, run in eval mode on the adversary's copy of its weights.

    Trained weights are copied, frozen ones shared with the live model. A run restores the user's
    parameters and their ``.grad``, training flags, hooks and global random states. Attention runs
    in plain products (SDPA's ``MATH``), which have a second derivative.

    Args:
        anatomy: of the live model.
        names: of the parameters whose gradient is taken, roles or names in ``anatomy.root``.
        autocast: dtype of the client's autocast region, or None.

    Raises:
        AnatomyError: the model has no parameter of a name.
        TypeError: the model is sharded over processes (FSDP2).
        ValueError: the gradient of a text's gradient cannot be computed.
    """

    def __init__(
        self, anatomy: Anatomy, names: Sequence[str], *, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(autocast)
        self.names = tuple(names)
        self.refresh(anatomy, step=0)
        self._try()

    @torch.no_grad()
    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights of ``step`` again.

        Raises:
            TypeError: the model is sharded over processes (FSDP2).
        """
        if any(hasattr(m, "unshard") for m in anatomy.root.modules()):
            raise TypeError(
                f"{type(anatomy.model).__name__} is sharded over processes (FSDP2); attacks that "
                "compare gradients of whole texts need it whole: remove the attack"
            )
        self.anatomy, self.step = anatomy, step
        self._embedding = unwrap(anatomy.embedding)
        names: dict[int, str] = {}
        for name in self.names:
            parameter = anatomy.parameter(name)
            if parameter is not None:
                names.setdefault(id(parameter), name)
        with torch.inference_mode(False):
            self._weights, self._leaves = {}, {}
            for name, parameter in anatomy.model.named_parameters():
                weight = parameter.detach()
                weight = weight.clone() if parameter.requires_grad else weight
                if id(parameter) in names:
                    self._leaves[names[id(parameter)]] = weight.requires_grad_()
                self._weights[name] = weight

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient is taken, each once, from the input on."""
        return tuple(self._leaves)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Prepare the model for any number of calls."""
        with torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH), super().session():
            yield

    @torch.no_grad()
    def word_embeddings(self) -> Tensor:
        """Return the word embeddings (V, e) of the vocabulary.

        Raises:
            ValueError: the embedding layer holds no matrix.
        """
        rows, _ = vocabulary_shape(self.anatomy)
        names = {id(p): n for n, p in self.anatomy.model.named_parameters()}
        weights = {n: self._weights[names[id(p)]] for n, p in self._embedding.named_parameters()}
        with self.session():
            ids = torch.arange(rows, device=self.device)
            table: Tensor = torch.func.functional_call(self._embedding, weights, (ids,))
        return table.detach()

    def _without_padding(self, ids: Tensor) -> Tensor:
        """Return ids without the padding's id, which changes a classifier's positions and end."""
        config = getattr(self.anatomy.model, "config", None)
        padding = getattr(config, "pad_token_id", None)
        if self.anatomy.kind != "classifier" or padding is None:
            return ids
        return ids.masked_fill(ids == padding, 1 if padding == 0 else 0)

    def logits(self, ids: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the logits of texts, in float32 at least: (B, L, V), or (B, C) of a classifier.

        Args:
            ids: (B, L).
            words: (B, L, e) word embeddings in place of those of ``ids``. A trained embedding gets
                the gradient of the rows that ``ids`` name.
        """

        def replaced(_: nn.Module, __: object, output: Tensor) -> Tensor:
            assert words is not None
            return output - output.detach() + words.to(output.dtype)

        with self.session(), ExitStack() as stack:
            options = {"use_cache": False} if takes(self.anatomy.model, "use_cache") else {}
            inputs = {"input_ids": self._without_padding(ids.to(self.device)), **options}
            if words is not None:
                stack.enter_context(self._embedding.register_forward_hook(replaced))
            logits = logits_in(call_with(self.anatomy.model, self._weights, **inputs))
        if self.anatomy.kind == "causal":
            logits = logits[:, -ids.shape[1] :]  # virtual tokens come first
        return logits if logits.dtype == torch.float64 else logits.float()

    def split(self, texts: Tensor) -> Sequence[Tensor]:
        """Return texts (B, L) in parts whose logits fit side by side."""
        rows = max(1, LOGITS_AT_ONCE // (texts.shape[1] * self.anatomy.vocab_size))
        return torch.split(texts, rows)

    def loss(self, ids: Tensor, labels: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy that the client trains on.

        Args:
            ids: (B, L).
            labels: of a causal model (B, L), or (B, L, V) where they are distributions; each is
                predicted at the place before it, and the first nowhere. Of a classifier (B,) or
                (B, C).
            words: as for :meth:`logits`.
        """
        logits = self.logits(ids, words)
        if self.anatomy.kind == "causal":
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels)

    def gradients(self, loss: Tensor, *, differentiable: bool = False) -> dict[str, Tensor]:
        """Return a loss's gradient in each weight that is read, in float32 at least, by name.

        Args:
            loss: of :meth:`loss`, computed with gradients enabled.
            differentiable: whether they have a gradient themselves.
        """
        gradients = torch.autograd.grad(
            loss, list(self._leaves.values()), create_graph=differentiable, allow_unused=True
        )
        pairs = zip(self._leaves, gradients, strict=True)
        return {n: g if g.dtype == torch.float64 else g.float() for n, g in pairs if g is not None}

    def _try(self) -> None:
        ids = torch.ones(1, _TRIAL, dtype=torch.int64, device=self.device)
        try:
            with self.session(), torch.enable_grad():
                words = self.word_embeddings()[ids].clone().requires_grad_()
                labels = ids if self.anatomy.kind == "causal" else ids[:, 0] * 0
                gradients = self.gradients(self.loss(ids, labels, words), differentiable=True)
                size = torch.stack([g.square().sum() for g in gradients.values()]).sum()
                torch.autograd.grad(size, words)
        except Exception as error:
            raise ValueError(
                f"the gradient of {type(self.anatomy.model).__name__} cannot be differentiated: "
                f"{type(error).__name__}: {error}. Load the model with "
                "attn_implementation='eager'"
            ) from error


class GradientTextAttack(TextAttack):
    """An honest but curious server that reads whole texts off gradients."""

    reads_adaptive_updates = True
    restores_fully = False
    needs_plain_inputs = True
    last_token_open = True

    def _check_length(self, anatomy: Anatomy, length: int) -> None:
        """Raise an error for texts longer than the model's context."""
        context = context_length(anatomy)
        if context is not None and length > context:
            raise ValueError(
                f"attack '{self.name}': length={length}, but the model's context holds {context} "
                "tokens"
            )

    def _check_update(
        self, view: Observation, readable: Callable[[LocalSteps, UpdateSnapshot], bool], advice: str
    ) -> None:
        """Raise an error for a round whose steps are not known or not readable."""
        update = view.gradients[-1]
        if isinstance(update, UpdateSnapshot):
            steps = LocalSteps.from_facts(self._facts)
            if steps is None or not readable(steps, update):
                raise UnusableObservation(advice)


def trained_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names in ``anatomy.root`` of trained parameters; of all where none is trained."""
    inside = {id(p) for p in anatomy.model.parameters()}
    every = [n for n, p in anatomy.root.named_parameters() if id(p) in inside]
    return tuple([n for n in every if anatomy.trainable(n)] or every)

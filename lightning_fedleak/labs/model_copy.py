"""The whole model on the adversary's copy of its weights: logits, losses and their gradients.

A :class:`~lightning_fedleak.attacks.texts.bottom_model.BottomModel` ends at a block and its weights
have no gradient. Attacks that compare gradients need the model's loss, its gradient
with respect to the attacked weights, and that gradient's derivative with respect to word
embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_fedleak import attacks
from lightning_fedleak.attacks.texts.bottom_model import CopiedModel
from lightning_fedleak.model.anatomy import Anatomy, unwrap
from lightning_fedleak.model.model_runs import call_with, logits_in, takes


class ModelCopy(CopiedModel):
    """A causal model, run in eval mode on the adversary's copy of its weights.

    Trained weights are copied, frozen ones shared with the live model. A run restores the user's
    parameters and their ``.grad``, training flags, hooks and global random states. Attention runs
    in plain products (SDPA's ``MATH``), which have a second derivative.

    Args:
        anatomy: of the live model.
        autocast: dtype of the client's autocast region, or None.

    Raises:
        TypeError: the model is sharded over processes (FSDP2).
    """

    def __init__(self, anatomy: Anatomy, *, autocast: torch.dtype | None = None) -> None:
        super().__init__(autocast)
        self.refresh(anatomy, step=0)

    @torch.no_grad()
    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights at ``step``; trained parameters may have changed.

        Raises:
            TypeError: the model is sharded over processes (FSDP2).
        """
        if any(hasattr(m, "unshard") for m in anatomy.root.modules()):
            raise TypeError(
                f"{type(anatomy.model).__name__} is sharded over processes (FSDP2), of which no "
                "copy is made: remove the attack"
            )
        self.anatomy, self.step = anatomy, step
        self._embedding = unwrap(anatomy.embedding)
        attacked = set(trained_names(anatomy))
        names = {id(p): n for n, p in anatomy.root.named_parameters() if n in attacked}
        with torch.inference_mode(False):
            self._weights, self._leaves = {}, {}
            for name, parameter in anatomy.model.named_parameters():
                weight = parameter.detach()
                weight = weight.clone() if parameter.requires_grad else weight
                if id(parameter) in names:
                    self._leaves[names[id(parameter)]] = weight.requires_grad_()
                self._weights[name] = weight

    @contextmanager
    def session(self) -> Iterator[None]:
        """Prepare the model for any number of calls."""
        with torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH), super().session():
            yield

    @torch.no_grad()
    def word_embeddings(self) -> Tensor:
        """Return the word embeddings (V, e) of the vocabulary."""
        names = {id(p): n for n, p in self.anatomy.model.named_parameters()}
        weights = {n: self._weights[names[id(p)]] for n, p in self._embedding.named_parameters()}
        with self.session():
            ids = torch.arange(self.anatomy.vocab_size, device=self.device)
            table: Tensor = torch.func.functional_call(self._embedding, weights, (ids,))
        return table.detach()

    def logits(self, ids: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the logits (B, L, V) of texts, in float32 at least.

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
            if words is not None:
                stack.enter_context(self._embedding.register_forward_hook(replaced))
            inputs = {"input_ids": ids.to(self.device), **options}
            logits = logits_in(call_with(self.anatomy.model, self._weights, **inputs))
        logits = logits[:, -ids.shape[1] :]  # virtual tokens come first
        return logits if logits.dtype == torch.float64 else logits.float()

    def loss(self, ids: Tensor, labels: Tensor, words: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy that the client trains on.

        Args:
            ids: (B, L).
            labels: (B, L), or (B, L, V) if they are distributions; each label is predicted from the
                position before it, and the first is not predicted.
            words: as for :meth:`logits`.
        """
        logits = self.logits(ids, words)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(0, 1))

    def gradients(self, loss: Tensor, *, differentiable: bool = False) -> dict[str, Tensor]:
        """Return a loss's gradient for each attacked weight, in float32 at least, by name.

        Args:
            loss: of :meth:`loss`, computed with gradients enabled.
            differentiable: whether they have a gradient themselves.
        """
        gradients = torch.autograd.grad(
            loss, list(self._leaves.values()), create_graph=differentiable, allow_unused=True
        )
        pairs = zip(self._leaves, gradients, strict=True)
        return {n: g if g.dtype == torch.float64 else g.float() for n, g in pairs if g is not None}


def trained_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names in ``anatomy.root`` of trained parameters; of all if none is trained."""
    inside = {id(p) for p in anatomy.model.parameters()}
    every = [n for n, p in anatomy.root.named_parameters() if id(p) in inside]
    return tuple([n for n in every if anatomy.trainable(n)] or every)


class ModelCopyAttack(attacks.TextAttack):
    """An adversary with a copy of a causal model who knows the texts' number and lengths."""

    threat_model = attacks.ThreatModel.create(
        "an honest but curious server that reads one gradient and knows how many texts it comes "
        "from and how long they are",
        attacks.Capability.KNOWS_MODEL,
    )
    restores_fully = False
    needs_plain_inputs = True
    last_token_open = True
    _copy: ModelCopy | None = None

    def needs(self, anatomy: Anatomy) -> attacks.Surfaces:
        """Return the gradients of the trained parameters; of all parameters if none is trained.

        Raises:
            ThreatModelError: the model predicts no next token.
        """
        if anatomy.kind != "causal":
            raise attacks.ThreatModelError(
                f"attack '{self.name}' needs next tokens, not a {anatomy.kind} model: remove "
                "the attack"
            )
        return attacks.Surfaces(gradients=trained_names(anatomy))

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the model."""
        self._copy = ModelCopy(anatomy, autocast=self._facts.autocast)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again."""
        self.model.refresh(anatomy, step)

    @property
    def model(self) -> ModelCopy:
        """Return the copy that :meth:`prepare` made."""
        assert self._copy is not None
        return self._copy

"""The split model on the server's copy of its weights: the bottom up to the split, and the top.

The server owns the whole model, so it can run the client's part, the *bottom*, on any text.
:class:`BottomModel` runs it through the model's own ``forward``, stopped at the split, with copied
weights. The copy has the weights of one step, so further training makes it stale. Computations with
it never change the client's parameters. :class:`NextTokens` runs the rest of the model, the *top*,
on the hidden states that were sent, to predict next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.words.head_gradients import LogitMap
from lightning_fedleak.model import model_runs, whole_models
from lightning_fedleak.model.anatomy import (
    Anatomy,
    Place,
    cache_argument,
    matrix_shape,
    place_of,
    text_blocks,
    unwrap,
    without_peft,
)
from lightning_fedleak.model.batches import TokenBatch

# Max. relative error of equal hidden states; larger values accept wrong tokens. Not tuned.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDING_OTHERWISE = 2e-2  # of half precision and other dtypes
RUN_TOKENS = 64  # least number of tokens that a run counts as: fewer take as long, not tuned
_TRIAL_TOKENS = 6  # tokens of the text that tests whether states depend on later tokens
_TRIAL_PREFIX = 8  # tokens of each of two texts on which the logits' map is fitted


class BottomModel:
    """Embeddings and blocks up to the split, with the server's copy of their weights.

    Runs are in eval mode. After a run, also one with an exception, the user's parameters and their
    ``.grad``, training flags, global random state, hooks and the cache of autocast are as before.
    Only the hooks that the model itself needs are called (see
    :func:`~lightning_fedleak.model.model_runs.hidden_states`). Gradients flow only to embeddings
    that are passed in.

    Each call prepares the model and restores it. Within :meth:`session` this happens once for many
    calls; the client's training must not run in between.

    Masks and positions are those of the observation: ``attention_mask`` (B, L), 0 at padding, and
    ``position_ids`` (B, L), or None if the model computes them. Hidden states at padding are
    undefined.

    Args:
        anatomy: The anatomy of the live model. The copy shares its frozen parameters and clones the
            trained ones.
        layer: The split: the output of block ``layer``, counted from 1; 0 is the input of block 1.
        autocast: The dtype of the client's autocast region (bf16-mixed). With None the bottom runs
            in the caller's region.

    Attributes:
        anatomy: The anatomy of the live model.
        layer: The split.
        step: The optimizer step of the copied weights.
        vocab_size: The number of rows of the embedding matrix.
        width: The width of the hidden states at the split.
        dtype: The dtype of the hidden states at the split.
        causal: Whether no hidden state depends on later tokens, as the gradient of a trial run
            shows. At layer 0 this holds for encoders too.
        context: The largest number of tokens of a text; None if the model's config has no limit.
        work: The number of tokens of all runs so far, at least :data:`RUN_TOKENS` of each. Runs
            with gradients count three times, because of their backward pass.

    Raises:
        ValueError: the model has no such layer.
        TypeError: parameters are sharded (FSDP, tensor parallel), so that no copy can be taken.
    """

    def __init__(
        self, anatomy: Anatomy, layer: int, *, autocast: torch.dtype | None = None
    ) -> None:
        self.autocast, self.layer = autocast, layer
        self._inside = False  # whether a session is open
        self.work = 0
        self._weights: list[whole_models.ParameterPlace] = []
        # Whether a key-value cache gives the same states; None before ``prefix.cache`` tries it.
        self.cache_agrees: bool | None = None
        self.refresh(anatomy, step=0)
        self.vocab_size = anatomy.embedding_rows
        self.context = model_runs.context_length(anatomy)
        self._try()

    @property
    def device(self) -> torch.device:
        """The device of token ids."""
        return self.anatomy.device

    def age(self, step: int) -> int:
        """Return the age of the copy in steps; negative if a new fit has begun since."""
        return step - self.step

    @contextmanager
    def session(self) -> Iterator[None]:
        """Prepare the model once for many calls.

        Sessions may be nested. Other code must not use the model during a session.
        """
        if self._inside:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(model_runs.undisturbed(self.anatomy))
            stack.enter_context(model_runs.only_needed_hooks(self.anatomy.root))
            stack.enter_context(whole_models.parameters_replaced(self._weights))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.autocast))
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Use the live model of ``anatomy`` from now on, and copy its weights of ``step``.

        Raises:
            ValueError: the model no longer has this layer.
        """
        place = place_of(anatomy, self.layer)
        self.anatomy = anatomy
        self.step = step
        self._run = model_runs.stop_at(anatomy.model, place)
        self._embedding = unwrap(anatomy.embedding)
        self._no_cache = (
            {"use_cache": False} if model_runs.takes(anatomy.model, "use_cache") else {}
        )
        self._take_weights()

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Clone the bottom's trained weights, and share its frozen ones."""
        skipped_modules = [block for _, block in text_blocks(self.anatomy)[self.layer :]]
        if self.anatomy.head is not None:
            skipped_modules.append(self.anatomy.head)
        skipped = {id(m) for module in skipped_modules for m in module.modules()}
        modules = [m for m in self.anatomy.model.modules() if id(m) not in skipped]
        self._weights = []  # frees the copies of earlier steps
        copies: dict[int, Tensor] = {}
        for module in modules:
            for p in module._parameters.values():
                if p is None:
                    continue
                if hasattr(p, "full_tensor") or "_fsdp_wrapped_module" in module._modules:
                    raise TypeError(f"{type(module).__name__} is sharded: give a whole model")
                if id(p) not in copies:
                    copies[id(p)] = p.detach().clone() if p.requires_grad else p.detach()
        self._weights = whole_models.parameter_places(modules, copies)

    @property
    def rounding(self) -> float:
        """Return the relative error up to which hidden states count as equal."""
        return ROUNDING.get(self.autocast or self.dtype, ROUNDING_OTHERWISE)

    def cut_at_layer(self, layer: int) -> BottomModel:
        """Return a bottom model with the same weights that ends at an earlier ``layer``."""
        copy = shallow_copy(self)
        copy._inside = False
        copy.layer = layer
        copy._run = model_runs.stop_at(self.anatomy.model, place_of(self.anatomy, layer))
        copy._try()
        return copy

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, d) of texts (B, L), without gradient."""
        with torch.no_grad(), self.session():
            return self._forward(input_ids, attention_mask, position_ids)

    def hidden_from(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, d) for word embeddings (B, L, e) instead of tokens.

        Word embeddings are the output of the model's embedding layer; the model then adds positions
        and token types and normalises. With gradients enabled, the result is differentiable in
        ``embeddings`` only.
        """
        ids = torch.full(embeddings.shape[:2], self._plain_id, device=self.device)

        def replaced(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return embeddings.to(output.dtype)

        # Registered in the session, which removes hooks that the model does not need.
        with self.session(), self._embedding.register_forward_hook(replaced):
            return self._forward(ids, attention_mask, position_ids)

    def run_through(
        self,
        run: Callable[..., Any],
        ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Return what another part of the model computes from texts (B, L)."""
        states: Tensor = copy_context().run(
            run, **self._inputs(ids, attention_mask, position_ids), **self._no_cache
        )
        return states

    def continued(
        self, new: Tensor, visible: Tensor, position_ids: Tensor, cache: object
    ) -> Tensor:
        """Return the hidden states (B, n, d) of new tokens that follow cached texts.

        Args:
            new: (B, n) token ids.
            visible: (B, 1, n, P + n) bool, to which of P cached and n new tokens each new token
                attends.
            position_ids: (B, n) the position ids of the new tokens.
            cache: A cache of a class that the model accepts.
        """
        config = getattr(without_peft(self.anatomy.model), "config", None)
        # Eager attention adds its mask to the logits; other implementations accept booleans.
        if getattr(config, "_attn_implementation", None) == "eager":
            lowest = torch.finfo(self.dtype).min
            zeros = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            visible = zeros.masked_fill(~visible, lowest)
        caches = {cache_argument(self.anatomy.model) or "past_key_values": cache}
        self._count(new)
        with self.session(), torch.no_grad():
            states = copy_context().run(
                self._run,
                input_ids=new,
                attention_mask=visible,
                position_ids=position_ids,
                use_cache=True,
                **caches,
            )
            return model_runs.states_of_text(states, new.shape[1], self.anatomy, self.layer)

    def word_embeddings(self, ids: Tensor | None = None) -> Tensor:
        """Return the embedding layer's output for ``ids`` (any shape); None for all tokens."""
        if ids is None:
            ids = torch.arange(self.vocab_size, device=self.device)
        with torch.no_grad(), self.session():
            embeddings: Tensor = self._embedding(ids.to(self.device))
        return embeddings

    @property
    def _plain_id(self) -> int:
        """A token id that is not the padding token."""
        config = getattr(self.anatomy.model, "config", None)
        special = (
            getattr(self._embedding, "padding_idx", None),
            getattr(config, "pad_token_id", None),
        )
        return next(i for i in range(3) if i not in special)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return the hidden states (B, L, d) of token ids, in an open session."""
        model_runs.check_text(self.anatomy, ids, mask, positions)
        self._count(ids)
        padding = getattr(self._embedding, "padding_idx", None)
        if padding is not None and mask is not None:
            # RoBERTa derives positions from the padding id and ignores the mask.
            ids = ids.masked_fill(mask.to(ids.device) == 0, padding)
        inputs = self._inputs(ids, mask, positions)
        states = copy_context().run(self._run, **inputs, **self._no_cache)
        return model_runs.states_of_text(states, ids.shape[1], self.anatomy, self.layer)

    def _count(self, ids: Tensor) -> None:
        """Count the work of a run of token ids."""
        self.work += max(RUN_TOKENS, ids.numel()) * (3 if torch.is_grad_enabled() else 1)

    def _inputs(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the arguments of the model's forward, without those that are None."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {k: v.to(self.device) for k, v in inputs.items() if v is not None}

    def _try(self) -> None:
        """Run a short text to find the states' width, and whether they depend on later tokens."""
        length = min(_TRIAL_TOKENS, self.context or _TRIAL_TOKENS)
        generator = torch.Generator().manual_seed(0)
        ids = torch.full((1, length), self._plain_id, device=self.device)
        with torch.inference_mode(False), torch.enable_grad(), self.session():
            words = self.word_embeddings(ids).clone().requires_grad_()
            states = self.hidden_from(words)
            direction = torch.randn(states.shape, generator=generator).to(states)
            (gradient,) = torch.autograd.grad((states * direction)[:, :-1].sum(), words)
        self.width, self.dtype = states.shape[-1], states.dtype
        self.causal = not bool(gradient[:, -1].any())


class NextTokens:
    """Logits of the next token, from the hidden states that the client sent.

    The server runs its top model on them in any case. One forward computes the inputs of the head
    at all positions; the head itself runs only at the positions of a call.

    Args:
        bottom: The bottom of a model for which :func:`predicts_next` is true.
        hidden: (B, L, d) the hidden states that were sent.
        attention_mask: (B, L), or None.
        position_ids: (B, L), or None.

    Raises:
        ValueError: The model's logits are not a scaled, shifted and softcapped output of its head.
    """

    def __init__(
        self,
        bottom: BottomModel,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        self._bottom = bottom
        anatomy = bottom.anatomy
        assert anatomy.head is not None
        self._head = unwrap(anatomy.head)
        place = place_of(anatomy, bottom.layer)
        self._run = model_runs.stop_at(anatomy.model, Place("head", self._head, "input"))
        plain = torch.full(hidden.shape[:2], bottom._plain_id, device=bottom.device)

        def replace(states: Tensor) -> Tensor:
            # PEFT's virtual tokens come first and keep their states.
            return torch.cat([states[:, : -hidden.shape[1]], hidden.to(states)], 1)

        with torch.no_grad(), bottom.session():
            with place.on_states(replace):
                states = bottom.run_through(self._run, plain, attention_mask, position_ids)
            self._map = self._logit_map()
        self._states: Tensor = states[:, -hidden.shape[1] :]

    def logits(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the logits (n, V) of the tokens after the n positions (``rows``, ``columns``)."""
        with torch.no_grad(), self._bottom.session():
            product: Tensor = self._head(self._states[rows, columns])
        return self._map(product.float())

    def log_probabilities(
        self, ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Return those (B, V) of the token after texts (B, L), not after the states sent."""
        self._bottom._count(ids)
        with torch.no_grad(), self._bottom.session():
            states = self._bottom.run_through(self._run, ids, attention_mask, position_ids)
            product = self._head(states[:, -1])
        return self._map(product.float()).log_softmax(1)

    def token_logits(self, rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (n, k) of ``tokens`` (n, k) only, as in :meth:`logits`."""
        if type(self._head) is not nn.Linear:
            return self.logits(rows, columns).gather(1, tokens)
        weight, bias = self._head.weight.detach(), self._head.bias
        logits = torch.einsum("nkd,nd->nk", weight[tokens], self._states[rows, columns]).float()
        return self._map(logits if bias is None else logits + bias.detach()[tokens], tokens)

    def _logit_map(self) -> LogitMap:
        """Return the logits' scale, shift and cap, fitted on a run of the whole model."""
        anatomy = self._bottom.anatomy
        length = min(_TRIAL_PREFIX, self._bottom.context or _TRIAL_PREFIX)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._bottom.vocab_size, (2, length), generator=generator)
        head_inputs: list[Tensor] = []
        with Place("head", self._head, "input").on_states(head_inputs.append):
            batch = TokenBatch(ids.to(anatomy.device), None, None, "causal")
            logits = model_runs.run_logits(anatomy.model, batch)[:, -length:]
        states = head_inputs[-1][:, -length:]
        return LogitMap.fit(anatomy.model, states.flatten(0, 1), logits.flatten(0, 1), self._head)


def predicts_next(bottom: BottomModel) -> bool:
    """Return whether the head predicts the next token in the vocabulary of the embeddings."""
    anatomy = bottom.anatomy
    if anatomy.kind != "causal" or anatomy.head is None:
        return False
    shape = matrix_shape(anatomy.head)
    return shape is not None and shape[0] == bottom.vocab_size

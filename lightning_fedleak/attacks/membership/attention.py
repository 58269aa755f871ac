"""The attention-based adversary (Vu et al. 2024, Sect. 4.2), in closed form.

Head 1 computes attention without the direction of the target token v, head 2 with all directions.
At a token that equals v, head 1's query is zero, so that it returns the mean of the sentence, while
head 2 returns about v. At other tokens both return about the same. A ReLU with bias -gamma follows:
only a difference above gamma has a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Query, RunFacts
from lightning_fedleak.attacks.membership import attention_calibration, attention_layers, base
from lightning_fedleak.attacks.membership.attention_calibration import Calibration
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.validate import check_integer, check_number, explain_arguments

WIDTHS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Half-widths of the bands around a member's response, in units of that response; not tuned."""

DEFENDED_WIDTH = attention_calibration.WIDE_ENOUGH
"""The half-width against defended gradients: the band holds members in any precision."""

REPLACED_WIDTHS = (*WIDTHS, 0.6, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Half-widths against a defence that replaces batches, which shrinks a member's response."""

BETA = 0.3
"""Default factor of the products of whitened hidden states; not tuned."""

REPLACED_BETA = 0.01
"""Default factor against a defence that replaces batches: members score higher with it."""


class AttentionMembership(base.MembershipAttack):
    """A_Attn: Algorithm 1 of Vu et al. 2024 in closed form, with bands in place of gamma.

    Three choices decide whether it works on real embeddings. The paper does not make them.

    **Whitening.** The products of raw hidden states do not distinguish one token from the others.
    The heads read hidden states in coordinates in which public text has unit covariance. This is
    folded into W_Q, W_K and their biases (:mod:`~lightning_fedleak.attacks.row_space.whitening`).

    **The rows of W_O.** The paper reads all coordinates, with both signs, and guesses a member if
    any of them exceeds gamma. But attention stays within a sentence, and the server has the
    target's sentence. So it knows the response D = Z1 - Z2 at the target token, whatever else is
    in the batch. It reads along D alone, scaled so that a member's response is 1. Targets are then
    (G, 2 d): the token's hidden state and that row.

    **Bands.** On real embeddings no response exceeds the lemma's gamma, 2 Delta-bar. A band around
    1 is the difference of the gradients at its two edges; the narrowest one that holds a token is
    its score. The widest of at most .1 that public batches reach for at most
    ``false_positive_rate`` of the public tokens that they do not hold decides. If the clients' text
    is of another kind than the public text, the rate is higher (the AUC hardly falls).

    On MiniLM-L6, stories15M and SmolLM2-135M a member's response, computed in another batch and
    padding, differs from 1 by at most 6e-6 in float32 and .06 in bfloat16. In a sentence of one
    token Z1 - Z2 is zero, so that the token is never found.

    Args:
        layer: as in :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        public_text: text like the clients', as strings or token ids, or ``"sampled"`` for text that
            a causal model writes.
        tokenizer: for strings.
        beta: factor of the products: the paper's beta over ``sqrt(d_attn)``. ``"auto"``: ``BETA``,
            and ``REPLACED_BETA`` against a defence that replaces batches.
        widths: half-widths w of the bands. ``"auto"``: ``WIDTHS``; against a defence that replaces
            batches ``REPLACED_WIDTHS``. Against one that acts on gradients the band nearest to
            ``DEFENDED_WIDTH`` is crafted alone: rungs share the clip norm.
        tokens: public texts are cut to this length.
        batch: number of sentences in a client's batch, for which ``false_positive_rate`` holds.
        false_positive_rate: rate at which a batch without the target is taken for one with it, in
            the calibration and, under noise, in the decision.
        refresh_every: number of steps after which :meth:`refresh` calibrates again.
        seed: seed of public text and calibration.
        name: the attack's name in the logs.

    Raises:
        ValueError: a setting outside of its range.

    Examples:
        >>> from lightning_fedleak.attacks import AttentionMembership
        >>> public = [[5, 6, 7, 8], [9, 8, 7, 6]]  # token ids, or strings with tokenizer=
        >>> attack = AttentionMembership(layer=1, public_text=public, batch=8)
        >>> attack.rungs  # the two edges of each band
        24
    """

    threat_model = base.threat_with_public_text(
        "a dishonest server that adds layers of its own, asking for a text it holds"
    )
    default_name = "attention_membership"
    config_names = (
        *("layer", "granularity", "beta", "widths", "batch", "false_positive_rate", "seed"),
        *("tokens", "public_text", "refresh_every"),
    )
    needs_float64 = True

    @explain_arguments("AttentionMembership(layer=1, public_text='sampled')")
    def __init__(
        self,
        layer: int,
        public_text: TextSource,
        *,
        tokenizer: Any = None,
        beta: float | Literal["auto"] = "auto",
        widths: Sequence[float] | Literal["auto"] = "auto",
        tokens: int = 32,
        batch: int = 40,
        false_positive_rate: float = 0.01,
        refresh_every: int = 500,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, "token", tokens, name)
        if beta != "auto":
            check_number("beta", beta, above=0, hint="or 'auto'")
        if widths != "auto" and not (widths and all(0 < width < 1 for width in widths)):
            raise ValueError(f"widths must be numbers between 0 and 1, got {widths}")
        self.batch = check_integer("batch", batch)
        self.refresh_every = check_integer("refresh_every", refresh_every)
        self.false_positive_rate = check_number(
            "false_positive_rate", false_positive_rate, above=0, below=1
        )
        self.public_text = PublicText.parse_required(public_text, tokenizer)
        self.seed = seed
        self._settings = beta, widths
        self.meet(RunFacts())
        self._prepared_at = 0
        self._calibration: Calibration | None = None

    def meet(self, facts: RunFacts) -> None:
        """Choose the default beta and widths for the run's defences.

        Against a defence that acts on gradients there is one width: the nearest to
        ``DEFENDED_WIDTH``. Against one that replaces batches beta is smaller, and unless another
        defence acts on gradients the widths reach .999.
        """
        super().meet(facts)
        (beta, widths), replaced = self._settings, "batches" in facts.defended
        self.beta = beta if beta != "auto" else REPLACED_BETA if replaced else BETA
        if widths == "auto":
            widths = REPLACED_WIDTHS if replaced and not self._defended else WIDTHS
        if self._defended:
            widths = (min(widths, key=lambda width: abs(width - DEFENDED_WIDTH)),)
        self.widths = sorted({*widths})

    def prepare(self, anatomy: Anatomy) -> None:
        """Run A_init: fit whitening and the deciding band on the hidden states of public text.

        Raises:
            ValueError: the model has no such layer, or the public text is too short.
        """
        super().prepare(anatomy)
        self._calibration = attention_calibration.calibrate(
            self._public_states(anatomy),
            beta=self.beta,
            widths=self.widths,
            batch=self.batch,
            most_false_positives=self.false_positive_rate,
            seed=self.seed,
        )

    def _public_states(self, anatomy: Anatomy) -> attention_calibration.PublicStates:
        text = PublicText.resolve(self.public_text, anatomy, self.seed)
        return attention_calibration.PublicStates.sample(
            anatomy, self.layer, text, self.tokens, max(8192, 4 * anatomy.hidden_size), self.seed
        )

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Calibrate again after ``refresh_every`` steps, and at the start of a fit."""
        if not 0 <= step - self._prepared_at < self.refresh_every:
            self._prepared_at = step
            self.prepare(anatomy)

    @property
    def calibration(self) -> Calibration:
        """Return whitening and band that :meth:`prepare` fitted."""
        assert self._calibration is not None
        return self._calibration

    @property
    def rungs(self) -> int:
        """Return K: two for each band."""
        return 2 * len(self.widths)

    @property
    def guess_rung(self) -> int:
        """Return the index of the band that decides."""
        return self.calibration.level

    def reads(self, position: int) -> slice | None:
        """Return the tokens that the target attends to: all."""
        return slice(0, None)

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """Return the target tokens and their rows of W_O, (G, 2 d)."""
        x, real, positions = self._whiten(hidden), query.attention_mask, query.positions
        if positions is None:
            positions = base.last_real(real, hidden)
        positions = positions.to(x.device)
        v = attention_layers.tokens_at(hidden, positions).to(x.dtype)
        return torch.cat([v, attention_layers.matched_rows(x, real, positions, self.beta)], 1)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of tokens above each gamma, summed per sample."""
        x = self._whiten(hidden.to(torch.promote_types(targets.dtype, hidden.dtype)))
        v, rows = self.split_targets(targets.to(x))
        weights, gammas = upstream.to(x), self.edges(v)
        gradient = x.new_zeros((len(x), len(v), len(gammas)))
        for attention in attention_layers.attentions(x, mask, v, self.beta):
            weight = weights[attention.sentence, attention.places]
            gradients = attention_layers.bias_gradients(attention.project(rows), gammas, weight)
            gradient[attention.sentence, attention.targets] = gradients
        return gradient

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> base.MembershipGuess:
        """Run A_guess: guess a member if the gradient of the calibrated band is not zero.

        Args:
            gradient: (G, K). First the numbers of the lower edges, narrowest band first, then those
                of the upper edges; a band's gradient is the difference of the two.
            noise_std: standard deviation of the noise on each number.

        Returns:
            As :func:`~lightning_fedleak.attacks.membership.base.read_rungs` returns it.

        Raises:
            UnusableObservation: the gradient is not finite.
        """
        lower, upper = gradient.tensor_split(2, dim=1)
        bands = lower - upper
        if noise_std == 0:  # a difference that a sum's rounding explains is zero
            rounding = 4 * torch.finfo(gradient.dtype).eps * (lower.abs() + upper.abs())
            bands = bands.masked_fill(bands.abs() < rounding, 0.0)
        std = noise_std * 2**0.5
        return base.read_rungs(bands, std, self.guess_rung, self.false_positive_rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the calibration."""
        if self._calibration is None:
            return {}
        return {"prepared_at": torch.tensor(self._prepared_at), **self._calibration.tensors()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the calibration."""
        if state:
            self._calibration = Calibration.from_tensors(state)
            self._prepared_at = int(state["prepared_at"])

    def _whiten(self, hidden: Tensor) -> Tensor:
        """Return hidden states in float32 or better, whitened."""
        return self.calibration.whitening(
            hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        )

    def split_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whitened tokens v and their rows."""
        if not bool(targets.isfinite().all()):
            raise ValueError("a target is not finite: the server's copy of the model overflowed")
        tokens, rows = targets.tensor_split(2, dim=1)
        v = self._whiten(tokens)
        return v, rows.to(v)

    def edges(self, reference: Tensor) -> Tensor:
        """Return the bands' edges, (K,), in the dtype and on the device of ``reference``."""
        edges = [1.0 - width for width in self.widths] + [1.0 + width for width in self.widths]
        return torch.tensor(edges, dtype=torch.float64).to(reference)

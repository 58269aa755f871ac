"""The attention-based adversary (Vu et al. 2024, Sect. 4.2), in closed form.

Head 1 computes attention without the direction of the target token v, head 2 with all directions.
At a token that equals v, head 1's query is zero, so that it returns the mean of the sentence, while
head 2 returns about v. At other tokens both return about the same. A ReLU with bias -gamma follows:
only a difference above gamma has a gradient. A *ladder* is one bias for each of several gammas, and
each of these trainable numbers is a *rung*.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Query, RunFacts
from lightning_fedleak.attacks.membership import attention_layers
from lightning_fedleak.attacks.membership.attention_layers import (
    AttentionSettings,
    Calibration,
    attentions,
    bias_gradients,
    coordinate_gradients,
    matched_rows,
)
from lightning_fedleak.attacks.membership.base import (
    CalibratedMembership,
    MembershipGuess,
    check_gradient,
    check_targets,
    read_rungs,
    target_positions,
)
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.row_space import fit_whitening
from lightning_fedleak.validate import check_choice, check_integer, check_number, explain_arguments

WIDTHS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Half-widths of the bands around a member's response, in units of that response; not tuned."""

DEFENDED_WIDTH = attention_layers.WIDE_ENOUGH
"""The half-width against defended gradients: the band holds members in any precision."""

REPLACED_WIDTHS = (*WIDTHS, 0.6, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Half-widths against a defence that replaces batches, which shrinks a member's response.

Such a defence, for example token-level LDP, trains on other words than the client's."""

BETA = 0.3
"""Default factor of the products of whitened hidden states; not tuned."""

REPLACED_BETA = 0.01
"""Default factor against a defence that replaces batches: members score higher with it."""


class AttentionMembership(CalibratedMembership):
    """A_Attn: Algorithm 1 of Vu et al. 2024 in closed form, with a ladder of gammas.

    Three choices decide whether it works on real embeddings. The paper does not make them.

    **Whitening.** The products of raw hidden states do not distinguish one token from the others.
    With ``whiten`` the heads read hidden states in coordinates in which public text has unit
    covariance. This is folded into W_Q, W_K and their biases
    (:mod:`~lightning_fedleak.attacks.row_space.atoms`).

    **The rows of W_O.** The paper reads all coordinates, with both signs, and guesses a member if
    any of them exceeds gamma (``score="coordinates"``). But attention stays within a sentence, and
    the server has the target's sentence. So it knows the response D = Z1 - Z2 at the target token,
    whatever else is in the batch. ``score="band"`` reads along D alone, scaled so that a member's
    response is 1. Targets are then (G, 2 d): the token's hidden state and that row.

    **gamma.** On real embeddings no response exceeds the lemma's gamma, 2 Delta-bar
    (``gamma="lemma"``). ``"calibrated"`` is the lowest gamma of the ladder that public batches
    exceed for at most ``false_positive_rate`` of the public tokens that they do not hold. For
    bands it is at least .9: a member's response stays above that in bfloat16 too. If the clients'
    text is of another kind than the public text, the rate is higher (the AUC hardly falls).

    On MiniLM-L6, stories15M and SmolLM2-135M a member's response, computed in another batch and
    padding, differs from 1 by at most 6e-6 in float32 and .06 in bfloat16. In a sentence of one
    token Z1 - Z2 is zero, so that the token is never found.

    Args:
        layer: The layer, see
            :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        public_text: A text like the clients', as strings or token ids, or ``"sampled"`` for text
            that a causal model writes.
        tokenizer: The tokenizer of strings.
        gamma: ``"calibrated"``, or ``"lemma"`` with ``score="coordinates"``.
        attention: The settings by which the layers are crafted and read.
        tokens: The length to which public texts are cut.
        batch: The number of sentences in a client's batch, for which :attr:`false_positive_rate`
            holds.
        seed: The seed of public text and calibration.
        name: The name in the logs.

    Raises:
        ValueError: A setting is out of range, or two exclude each other.

    Examples:
        >>> from lightning_fedleak.attacks import AttentionMembership
        >>> public = [[5, 6, 7, 8], [9, 8, 7, 6]]  # token ids, or strings with tokenizer=
        >>> attack = AttentionMembership(layer=1, public_text=public, batch=8)
        >>> attack.config()["score"]
        'band'
    """

    default_name = "attention_membership"
    config_names = (
        *("layer", "granularity", "beta", "gamma", "whiten", "score", "widths", "batch"),
        *("false_positive_rate", "seed", "tokens", "public_text", "refresh_every"),
    )

    @explain_arguments("AttentionMembership(layer=1, public_text='sampled')")
    def __init__(
        self,
        layer: int,
        public_text: TextSource,
        *,
        tokenizer: Any = None,
        gamma: Literal["calibrated", "lemma"] = "calibrated",
        attention: AttentionSettings | None = None,
        tokens: int = 32,
        batch: int = 40,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, "token", tokens, name)
        settings = attention or AttentionSettings()
        self.score = check_choice("score", settings.score, ("band", "coordinates"))
        self.gamma = check_choice("gamma", gamma, ("calibrated", "lemma"))
        if settings.beta not in ("authors", "auto"):
            check_number("beta", settings.beta, above=0, hint="or 'authors' or 'auto'")
        if gamma == "lemma" and self.score == "band":
            raise ValueError("gamma='lemma' is one threshold: set AttentionSettings(score=...)")
        self.whiten = settings.whiten
        self.batch = check_integer("batch", batch)
        self.seed = seed
        self._settings = settings
        self._choose(replaced=False, defended=False)
        attack = type(self).__name__
        self.public_text = PublicText.parse_required(public_text, tokenizer, attack)
        self._d: int | None = None  # the width of hidden states
        self._calibration: Calibration | None = None

    def meet(self, facts: RunFacts) -> None:
        """Choose the default beta and widths for the run's defences.

        Against a defence that acts on gradients there is only one band: of the widths, the nearest
        to ``DEFENDED_WIDTH``. Against one that replaces batches, the default beta is smaller, and
        the default widths reach .999 unless another defence acts on gradients.
        """
        super().meet(facts)
        self._choose(replaced="batches" in facts.defended, defended="gradients" in facts.defended)

    def _choose(self, *, replaced: bool, defended: bool) -> None:
        """Set beta and the widths: the user's, or defaults that depend on the run's defences."""
        beta, widths = self._settings.beta, self._settings.widths
        self.beta = (REPLACED_BETA if replaced else BETA) if beta == "auto" else beta
        if isinstance(widths, str):
            widths = REPLACED_WIDTHS if replaced and not defended else WIDTHS
        for width in widths or (None,):
            check_number("each of widths", width, above=0, below=1)
        if defended:
            widths = (min(widths, key=lambda width: abs(width - DEFENDED_WIDTH)),)
        self.widths = sorted({*widths})

    def _factor(self, d: int) -> float:
        """Return the factor of the products for hidden states of width d."""
        return 2.0 / math.sqrt(d - 1) if isinstance(self.beta, str) else self.beta

    @property
    def _levels(self) -> int:
        """Return the number of bands, or the length of a row's ladder."""
        if self.score == "band":
            return len(self.widths)
        return attention_layers.CALIBRATED_LEVELS if self.gamma == "calibrated" else 1

    def calibrate(self, states: attention_layers.PublicStates) -> None:
        """Fit whitening and gamma to the hidden states of public text."""
        self._d = states.hidden.shape[-1]
        if self.gamma == "lemma":
            whitening = fit_whitening(states.tokens) if self.whiten else None
            states = states if whitening is None else states.whiten(whitening)
            gamma = attention_layers.lemma_gamma(states, self._factor(self._d))
            self._calibration = Calibration(whitening, torch.tensor([gamma]), 0)
            return
        self._calibration = attention_layers.calibrate(
            states,
            beta=self._factor(self._d),
            whiten=self.whiten,
            widths=self.widths if self.score == "band" else None,
            batch=self.batch,
            false_positive_rate=self.false_positive_rate,
            seed=self.seed,
        )

    @property
    def rungs(self) -> int:
        """Return K: two for each band, with ``"coordinates"`` a ladder for each row of W_O."""
        if self.score == "band":
            return 2 * self._levels
        assert self._d is not None
        return 2 * self._d * self._levels

    def reads(self, position: int) -> slice | None:
        """Return the tokens that the target attends to with ``score="band"``, else None."""
        return slice(0, None) if self.score == "band" else None

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """Return the target tokens (G, d); with ``score="band"`` also their rows: (G, 2 d)."""
        x, v = self._whiten(hidden), super().embed(hidden, query)
        if self.score == "coordinates":
            return v.to(x.dtype)
        positions, beta = target_positions(query, hidden), self._factor(x.shape[-1])
        return torch.cat([v.to(x.dtype), matched_rows(x, query.attention_mask, positions, beta)], 1)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of tokens above each gamma, summed per sample."""
        d = hidden.shape[-1]
        x = self._whiten(hidden.to(torch.promote_types(targets.dtype, hidden.dtype)))
        v, rows = self._split_targets(targets.to(x))
        weights, gammas = upstream.to(x), self._gammas(v)
        sentences = attentions(x, mask, v, self._factor(d))
        if rows is None:
            return coordinate_gradients(sentences, gammas, weights, len(v), d)
        gradient = x.new_zeros((len(x), len(v), len(gammas)))
        for attention in sentences:
            weight = weights[attention.sentence, attention.places]
            gradients = bias_gradients(attention.project(rows), gammas, weight)
            gradient[attention.sentence, attention.targets] = gradients
        return gradient

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        """Run A_guess: guess a member if the gradient at the calibrated gamma is not zero.

        Args:
            gradient: (G, K). With ``"band"`` first the numbers of the lower edges, narrowest band
                first, then those of the upper edges; a band's gradient is the difference of the
                two. With ``"coordinates"`` a ladder for each row of W_O, row after row; the largest
                number of all rows counts.
            noise_std: standard deviation of the noise on each number.

        Returns:
            Scores. Without noise: the rank of the largest gamma, or the narrowest band, whose
            gradient is not zero, counted from the easiest; 0 if all are zero. With noise: the
            statistic of :func:`~lightning_fedleak.attacks.membership.base.read_rungs`; with
            ``"coordinates"`` the largest number in units of the noise.

        Raises:
            UnusableObservation: the gradient is not finite.
        """
        level, levels = self.require_calibration(self._calibration).level, self._levels
        check_gradient(gradient)
        if self.score == "band":
            bands = self._band_gradients(gradient, exact=noise_std == 0)
            return read_rungs(bands, noise_std * 2**0.5, level, self.false_positive_rate)
        best = gradient.view(len(gradient), -1, levels).abs().amax(1)
        if noise_std == 0:
            return read_rungs(best, 0.0, level)
        rungs = gradient.shape[1] // levels * (level + 1)
        scores = best[:, : level + 1].amax(1) / noise_std
        # Sidak's correction: the largest of so many normals exceeds the threshold at this rate.
        level_quantile = (1 - self.false_positive_rate) ** (1 / rungs)
        threshold = torch.special.ndtri(torch.tensor((1 + level_quantile) / 2, dtype=torch.float64))
        return MembershipGuess(scores, scores > float(threshold))

    def _band_gradients(self, gradient: Tensor, *, exact: bool) -> Tensor:
        """Return the bands' gradients (G, levels): those of the lower minus the upper edges.

        If ``exact``, differences that a sum's rounding explains are 0.
        """
        lower, upper = gradient.tensor_split(2, dim=1)
        bands = lower - upper
        if not exact:
            return bands
        rounding = 4 * torch.finfo(gradient.dtype).eps * (lower.abs() + upper.abs())
        return bands.masked_fill(bands.abs() <= rounding, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return whitening and gamma, and a fingerprint of the settings and the public text."""
        if self._calibration is None or self._d is None:
            return {}
        numbers = {"prepared_at": self._prepared_at, "d": self._d}
        tensors = {name: torch.tensor(value) for name, value in numbers.items()}
        return tensors | {"fingerprint": self._fingerprint()} | self._calibration.tensors()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a calibration of the same settings and public text.

        A monitor that resumes with other settings calibrates again.

        Raises:
            ValueError: the settings (``refresh_every`` too) or the text differ.
        """
        if not state:
            return
        saved = state.get("fingerprint")
        if saved is None or not torch.equal(saved.cpu(), self._fingerprint()):
            raise ValueError(
                "the state is of other settings or public text: load it into an "
                "AttentionMembership with these, or call prepare again"
            )
        self._calibration = Calibration.from_tensors(state)
        self._prepared_at, self._d = int(state["prepared_at"]), int(state["d"])

    def _fingerprint(self) -> Tensor:
        """Return (32,) the bytes of a hash of the settings and the public text."""
        digest = hashlib.sha256(self.fingerprint().encode()).digest()
        return torch.tensor(list(digest), dtype=torch.uint8)

    def _whiten(self, hidden: Tensor) -> Tensor:
        """Return hidden states in the coordinates that the heads read, at least in float32."""
        x = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        whitening = self.require_calibration(self._calibration).whitening
        return x if whitening is None else whitening(x)

    def _split_targets(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return whitened tokens (G, d), and rows of W_O (G, d) or None for coordinates."""
        check_targets(targets)
        if self.score == "coordinates":
            return self._whiten(targets), None
        tokens, rows = targets.tensor_split(2, dim=1)
        v = self._whiten(tokens)
        return v, rows.to(v)

    def _gammas(self, reference: Tensor) -> Tensor:
        """Return the gammas of one row of W_O, (K,)."""
        if self.score == "coordinates":
            return self.require_calibration(self._calibration).gammas.to(reference)
        edges = [1.0 - width for width in self.widths] + [1.0 + width for width in self.widths]
        return torch.tensor(edges, dtype=torch.float64).to(reference)

"""The attention-based adversary (Vu et al. 2024, Sect. 4.2), in closed form.

Head 1 computes attention without the direction of the target token v, head 2 with all directions.
At a token that equals v, head 1's query is zero, so that it returns the mean of the sentence, while
head 2 returns about v. At other tokens both return about the same. A ReLU with bias -gamma follows:
only a difference above gamma has a gradient. Each of these trainable numbers is a *rung*.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Query, RunFacts
from lightning_fedleak.attacks.membership import attention_layers, base
from lightning_fedleak.attacks.membership.attention_layers import AttentionSettings, PublicStates
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.row_space import Whitening, fit_whitening
from lightning_fedleak.validate import check_integer, check_number, explain_arguments

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


class AttentionMembership(base.CalibratedMembership):
    """A_Attn: Algorithm 1 of Vu et al. 2024 in closed form, with two gammas for each of some bands.

    Three choices decide whether it works on real embeddings. The paper does not make them; its own
    form is in ``benchmarks/papers/baselines.py``.

    **Whitening.** The products of raw hidden states do not distinguish one token from the others.
    With ``whiten`` the heads read hidden states in coordinates in which public text has unit
    covariance. This is folded into W_Q, W_K and their biases
    (:mod:`~lightning_fedleak.attacks.row_space.atoms`).

    **The row of W_O.** The paper reads all coordinates, with both signs, and guesses a member if
    any of them exceeds gamma. But attention stays within a sentence, and the server has the
    target's sentence. So it knows the response D = Z1 - Z2 at the target token, whatever else is
    in the batch. Here W_O reads along D alone, scaled so that a member's response is 1. Targets are
    (G, 2 d): the token's hidden state and that row.

    **gamma.** On real embeddings no response exceeds the lemma's gamma, 2 Delta-bar. Here two
    gammas are the edges of a band around 1, and the difference of their gradients shows whether a
    response lies in it. The widest band decides in which public batches have a response for at most
    ``false_positive_rate`` of the public tokens that they do not hold. It begins at .9 or above: a
    member's response stays above that in bfloat16 too. If the clients' text is of another kind than
    the public text, the rate is higher (the AUC hardly falls).

    On MiniLM-L6, stories15M and SmolLM2-135M a member's response, computed in another batch and
    padding, differs from 1 by at most 6e-6 in float32 and .06 in bfloat16. In a sentence of one
    token Z1 - Z2 is zero, so that the token is never found.

    Args:
        layer: The layer, see
            :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`.
        public_text: A text like the clients', as strings or token ids, or ``"sampled"`` for text
            that a causal model writes.
        tokenizer: The tokenizer of strings.
        attention: The settings by which the layers are crafted and read.
        tokens: The length to which public texts are cut.
        batch: The number of sentences in a client's batch, for which :attr:`false_positive_rate`
            holds.
        seed: The seed of public text and calibration.
        name: The name in the logs.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> from lightning_fedleak.attacks import AttentionMembership
        >>> public = [[5, 6, 7, 8], [9, 8, 7, 6]]  # token ids, or strings with tokenizer=
        >>> attack = AttentionMembership(layer=1, public_text=public, batch=8)
        >>> attack.rungs
        24
    """

    default_name = "attention_membership"
    config_names = (
        *("layer", "granularity", "beta", "whiten", "widths", "batch"),
        *("false_positive_rate", "seed", "tokens", "public_text", "refresh_every"),
    )
    restores_fully = False  # prepare calibrates again

    @explain_arguments("AttentionMembership(layer=1, public_text='sampled')")
    def __init__(
        self,
        layer: int,
        public_text: TextSource,
        *,
        tokenizer: Any = None,
        attention: AttentionSettings | None = None,
        tokens: int = 32,
        batch: int = 40,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, "token", tokens, name)
        settings = attention or AttentionSettings()
        if settings.beta != "auto":
            check_number("beta", settings.beta, above=0, hint="or 'auto'")
        self.whiten = settings.whiten
        self.batch = check_integer("batch", batch)
        self.seed = seed
        self._settings = settings
        self._choose(replaced=False, defended=False)
        attack = type(self).__name__
        self.public_text = PublicText.parse_required(public_text, tokenizer, attack)
        self._whitening: Whitening | None = None
        self._level: int | None = None  # the band that decides; None before the calibration

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
        default = REPLACED_BETA if replaced else BETA
        self.beta = default if isinstance(beta, str) else beta
        if isinstance(widths, str):
            widths = REPLACED_WIDTHS if replaced and not defended else WIDTHS
        for width in widths or (None,):
            check_number("each of widths", width, above=0, below=1)
        if defended:
            widths = (min(widths, key=lambda width: abs(width - DEFENDED_WIDTH)),)
        self.widths = sorted({*widths})

    def calibrate(self, states: PublicStates) -> None:
        """Fit the whitening, and choose the band that decides: the widest of a low enough rate.

        With whitening, the band is chosen on one half of the states, whitened by the other half,
        because whitening by the own covariance moves states nearer to their mean than other text.

        Raises:
            ValueError: too few tokens to whiten, or too few texts to calibrate.
        """
        if self.whiten:
            self._whitening = fit_whitening(states.tokens)
            fitted, states = (PublicStates(states.hidden[i::2], states.mask[i::2]) for i in (0, 1))
            states = states.whiten(fit_whitening(fitted.tokens))
        name, hint = "public texts to calibrate on", "with whiten=True give twice as many"
        check_integer(name, len(states.hidden), at_least=self.batch + 1, hint=hint)
        scores = attention_layers.public_scores(states, *states.draw_tokens(self.seed), self.beta)
        self._level = 0
        for i, width in enumerate(self.widths):
            rate = attention_layers.false_positive_rate(scores, -width, self.batch)
            if width <= attention_layers.WIDE_ENOUGH and rate <= self.false_positive_rate:
                self._level = i

    @property
    def gammas(self) -> Tensor:
        """Return (K,) the lower edges of the bands, narrowest first, then the upper ones."""
        edges = [1.0 - width for width in self.widths] + [1.0 + width for width in self.widths]
        return torch.tensor(edges, dtype=torch.float64)

    @property
    def rungs(self) -> int:
        """Return K: two for each band."""
        return 2 * len(self.widths)

    def reads(self, position: int) -> slice | None:
        """Return the tokens that the target attends to: all of its sentence."""
        return slice(0, None)

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """Return the target tokens and their rows of W_O, (G, 2 d)."""
        x, v = self._whiten(hidden), super().embed(hidden, query)
        positions = base.target_positions(query, hidden)
        rows = attention_layers.matched_rows(x, query.attention_mask, positions, self.beta)
        return torch.cat([v.to(x.dtype), rows], 1)

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K): upstream gradients of tokens above each gamma, summed per sample."""
        base.check_targets(targets)
        x = self._whiten(hidden.to(torch.promote_types(targets.dtype, hidden.dtype)))
        tokens, rows = targets.to(x).tensor_split(2, dim=1)
        gammas = self.gammas.to(x)
        gradient = x.new_zeros((len(x), len(tokens), len(gammas)))
        for attention in attention_layers.attentions(x, mask, self._whiten(tokens), self.beta):
            weight = upstream[attention.sentence, attention.places].to(x)
            response = attention.project(rows)
            # Exactly equal for two gammas that the same tokens exceed, so that bands are exactly 0.
            sums = torch.where(response[:, None] > gammas[:, None], weight, 0.0).sum(-1)
            sums = sums.masked_fill(response.isnan().any(-1, keepdim=True), torch.nan)
            gradient[attention.sentence, attention.targets] = sums
        return gradient

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> base.MembershipGuess:
        """Run A_guess: guess a member if the gradient of the calibrated band is not zero.

        Args:
            gradient: (G, K), first the numbers of the lower edges, narrowest band first, then those
                of the upper edges; a band's gradient is the difference of the two.
            noise_std: standard deviation of the noise on each number.

        Returns:
            Scores. Without noise: the rank of the narrowest band whose gradient is not zero,
            counted from the widest; 0 if all are zero. With noise: the statistic of
            :func:`~lightning_fedleak.attacks.membership.base.read_rungs`.

        Raises:
            UnusableObservation: the gradient is not finite.
        """
        level = self.require_calibration(self._level)
        base.check_gradient(gradient)
        lower, upper = gradient.tensor_split(2, dim=1)
        bands = lower - upper
        if noise_std == 0:  # differences that a sum's rounding explains are 0
            rounding = 4 * torch.finfo(gradient.dtype).eps * (lower.abs() + upper.abs())
            bands = bands.masked_fill(bands.abs() <= rounding, 0.0)
        return base.read_rungs(bands, noise_std * 2**0.5, level, self.false_positive_rate)

    def _whiten(self, hidden: Tensor) -> Tensor:
        """Return hidden states in the coordinates that the heads read, at least in float32."""
        self.require_calibration(self._level)
        x = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        return x if self._whitening is None else self._whitening(x)

"""An adversary that counts words in place: what a token-level mechanism cannot hide."""

import torch
from torch import Tensor

from benchmarks.defenses.crafted import CraftedFC, FrozenLinear
from lightning_fedleak.attacks.membership import base
from lightning_fedleak.attacks.membership.base import MembershipAttack, MembershipGuess
from lightning_fedleak.attacks.membership.fc import batch_inputs
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import hidden_states


class TokenCount(MembershipAttack):
    """How many of the target's words stand at their places, the rare ones counting more.

    Behind the embeddings' LayerNorm, x = gain u + shift with |u|^2 = d and the u's own sum zero. In
    a first layer one neuron for each position fires with relu((<u_T, u> / d - 1 + rho) / rho), 1
    where the word is the target's and 0 where it is not much like it; two more fire where there is
    any word: at the target's last position, and right behind it. The second layer adds them up, the
    last with a minus, so that a sentence of the same length counts. Each weight is a log likelihood
    ratio: of a text that keeps a word with probability ``keep``, against public text.
    """

    default_name = "count"

    def __init__(
        self, public: PublicText, tokens: int, keep: float = 0.2, rho: float = 0.1
    ) -> None:
        super().__init__(0, "full", tokens)
        self.public, self.keep, self.rho = public, keep, rho

    def prepare(self, anatomy: Anatomy) -> None:
        norm = anatomy.model.embeddings.LayerNorm
        self.gain, self.shift = norm.weight.detach(), norm.bias.detach()
        rows = [hidden_states(anatomy, 0, row[None]) for row in self.public.sentences]
        self.public_rows = torch.cat([base.sentence_rows(row, None, self.tokens) for row in rows])

    @property
    def rungs(self) -> int:
        return 100

    def _layers(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight (tokens + 2, d) and bias of the first layer, of the second its weight, (tokens +
        2,), and thresholds. The first layer's last two rows read :meth:`_ends`."""
        target = target.view(self.tokens, -1)
        there = (target != 0).any(1)
        u = (target - self.shift) / self.gain
        weight = u / self.gain / (self.rho * u.shape[1]) * there[:, None]
        bias = (1 - (weight * target).sum(1)) * there
        any_word = 1 / self.gain / (self.shift / self.gain).sum()
        weight = torch.cat([weight, any_word.expand(2, -1)])
        bias = torch.cat([bias, torch.zeros(2)])
        match_rates = self._activations(self.public_rows, weight, bias, self._ends(there)).mean(0)
        log_ratios = torch.log(1 + self.keep / (match_rates + 1 / len(self.public_rows)))
        log_ratios = torch.cat(
            [log_ratios[:-2] * there, self._length_log_ratio(match_rates).expand(2)]
        )
        log_ratios[-1] *= -1 if int(there.sum()) < self.tokens else 0
        top = log_ratios.clamp(min=0).sum()
        return weight, bias, log_ratios, torch.linspace(0, 1, self.rungs + 1)[:-1] * top

    def _length_log_ratio(self, match_rates: Tensor) -> Tensor:
        """Minus the log of the share of public sentences of the target's length."""
        return -torch.log((match_rates[-2] - match_rates[-1]).clamp(min=1 / len(self.public_rows)))

    def _ends(self, there: Tensor) -> list[int]:
        length = int(there.sum())
        return [length - 1, min(length, self.tokens - 1)]

    def _activations(self, rows: Tensor, weight: Tensor, bias: Tensor, ends: list[int]) -> Tensor:
        """(N, tokens + 2)."""
        read = rows.view(len(rows), self.tokens, -1)
        read = torch.cat([read, read[:, ends]], dim=1)
        return torch.relu((read * weight).sum(2) + bias)

    def craft(self, target: Tensor) -> CraftedFC:
        weight, bias, log_ratios, thresholds = self._layers(target)
        d = weight.shape[1]
        ends = self._ends((target.view(self.tokens, d) != 0).any(1))
        whole = torch.zeros(self.tokens + 2, self.tokens, d)
        places = [*range(self.tokens), *ends]
        whole[torch.arange(self.tokens + 2), torch.tensor(places)] = weight
        first = FrozenLinear(whole.flatten(1), bias)
        return CraftedFC(first, log_ratios[None], -thresholds, self.tokens)

    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        rows, samples, weights = batch_inputs(hidden, mask, upstream, self.tokens)
        output = torch.zeros(len(hidden), len(targets), self.rungs)
        for g, target in enumerate(targets):
            weight, bias, log_ratios, thresholds = self._layers(target)
            ends = self._ends((target.view(self.tokens, -1) != 0).any(1))
            total = self._activations(rows, weight, bias, ends) @ log_ratios
            fires = (total[:, None] > thresholds) * weights[:, None]
            output[:, g] = torch.zeros(len(hidden), self.rungs).index_add_(0, samples, fires)
        return output

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        scores = (gradient != 0).sum(1)
        return MembershipGuess(scores, scores > self.rungs // 4)

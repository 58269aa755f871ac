"""TrainedMembership: a membership attack with a network that is trained to detect one text.

The adversary is a dishonest server. It adds a small network to the model that outputs more than 0
("fires") on the hidden states of the text it asks about, the target, and not on those of public
text. The client's gradient of the network's last bias then reveals whether the target is in its
batch. The attack is a baseline from

Nguyen et al. 2023, "Active membership inference attack under local differential privacy in
federated learning", extended to hidden states of language models as in Vu et al. 2024, Sect. 5
("AMI FC Full" and "AMI FC Token", d_h = 1000).

The network has one hidden layer of h = d_h ReLUs and one output. Loss and optimizer are those of
the published attack: a logistic loss in which the target has the same weight as all public samples
together, and Adam. Inputs have D numbers: the hidden state of a token, or of the first tokens of a
sentence together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks import MembershipAttack, PublicText, TextSource
from lightning_fedleak.attacks.membership import base
from lightning_fedleak.attacks.membership.fc import batch_inputs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import context_length, hidden_states
from lightning_fedleak.validate import check_integer

_TWIN_DISTANCE = 1e-2  # public samples nearer to the target (relative, in L1) are skipped
_CHECK_EVERY = 5  # training steps between checks of the margin; not tuned
_CACHE_BYTES = 1 << 28  # 256 MiB of trained networks; more would save repeated trainings
_MIN_SAMPLES = 8  # minimum number of public samples for training; not tuned
_LEARNING_RATE = 1e-3  # Adam's learning rate; not tuned
_MARGIN = 3.0  # training stops if every output is this far on its side of 0; not tuned
_BATCH = 256  # public samples in a training step; not tuned

# Thresholds above that of the decision, as shares of its distance to the target's output. They
# choose the points of the ROC curve; not tuned.
_HIGHER_RUNGS = (0.9, 0.8, 0.6, 0.4, 0.2)
# Thresholds below that of the decision, as multiples of the same distance; not tuned.
_LOWER_RUNGS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True)
class _Network:
    """A trained network. Its weights include the scaling of its inputs.

    Attributes:
        weight: (h, D), the weight of the hidden layer.
        bias: (h,), the bias of the hidden layer.
        second: (1, h), the weight of the output.
        offset: (), the bias of the output. The network fires if the output with it is above 0.
        on_target: (), the output on the target.
        on_public: (), the largest output on public samples.
        steps: The number of training steps.
    """

    weight: Tensor
    bias: Tensor
    second: Tensor
    offset: Tensor
    on_target: Tensor
    on_public: Tensor
    steps: int

    def __call__(self, rows: Tensor) -> Tensor:
        """Return (N,) outputs for inputs (N, D), without the bias of the output."""
        return network_outputs([self.weight, self.bias, self.second], rows)

    @property
    def nbytes(self) -> int:
        """The size of the weights in bytes."""
        return self.weight.nbytes + self.bias.nbytes + self.second.nbytes


def train_neuron(
    target: Tensor,
    public: Tensor,
    generator: torch.Generator,
    *,
    hidden_units: int,
    steps: int,
) -> _Network:
    """Train a network to output above a margin on the target, and below minus it elsewhere.

    Training stops when the target's output is above the margin, and the outputs on all public
    samples are below minus it.

    Args:
        target: (D,), float32 or float64, the input on which the network should fire.
        public: (N, D), the public samples. Samples within 1% of the target (in L1) are skipped,
            such as those of the same prefix in a causal model.
        generator: A CPU generator, the only source of random numbers.
        hidden_units: The width of the hidden layer.
        steps: The maximum number of steps of Adam.

    Returns:
        The network.
    """
    with torch.inference_mode(False), torch.enable_grad():
        target, public = target.clone(), public.clone()  # autograd refuses inference tensors
        is_twin = (public - target).abs().sum(1) < _TWIN_DISTANCE * target.abs().sum()
        mean, spread = mean_and_spread(public)
        distinct = public[~is_twin]
        samples, scaled_target = (distinct - mean) / spread, (target[None] - mean) / spread
        parameters = _initial(samples.shape[1], hidden_units, generator, target)
        optimizer = torch.optim.Adam(parameters, _LEARNING_RATE)
        n_steps = 0
        for _ in range(steps):
            rows = samples
            if len(samples) > _BATCH:
                indices = torch.randint(len(samples), (_BATCH,), generator=generator)
                rows = samples[indices.to(samples.device)]
            outputs = network_outputs(parameters, torch.cat([scaled_target, rows]))
            if n_steps % _CHECK_EVERY == 0 and _separated(outputs):
                all_outputs = network_outputs(parameters, torch.cat([scaled_target, samples]))
                if _separated(all_outputs):
                    break
            loss = F.softplus(-outputs[0]) + F.softplus(outputs[1:]).sum() / max(1, len(rows))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            n_steps += 1
        weight, bias, second, offset = (p.detach() for p in parameters)
        folded = [weight / spread, bias - weight @ (mean / spread), second, offset]
        on_target = network_outputs(folded, target[None])[0]
        # Without a sample, any lower output puts the threshold of the decision below the target's.
        on_public = network_outputs(folded, distinct).max() if len(distinct) else on_target - 1
        return _Network(folded[0], folded[1], second, offset[0], on_target, on_public, n_steps)


def mean_and_spread(public: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (D,) of samples (N, D), the latter with a lower limit.

    The limit is a tenth of its mean over the dimensions, so that scaling by it is safe.
    """
    spread = public.std(0, correction=0)
    floor = 0.1 * spread.mean()
    return public.mean(0), spread.clamp(min=floor if float(floor) > 0 else 1.0)


def network_outputs(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Return the outputs (n,) of a network on inputs (n, D).

    Args:
        parameters: W1 (h, D), b1 (h,), W2 (1, h) and optionally b2 (1,).
        x: The inputs.
    """
    weight, bias, second, *offset = parameters
    outputs = (F.relu(F.linear(x, weight, bias)) @ second.T)[:, 0]
    return outputs + offset[0] if offset else outputs


def _initial(d: int, h: int, generator: torch.Generator, reference: Tensor) -> list[Tensor]:
    """Return W1 (h, d), b1 (h,), W2 (1, h) and b2 (1,), drawn like those of ``nn.Linear``."""

    def uniform(*shape: int, fan_in: int) -> Tensor:
        weights = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        return weights.mul_(fan_in**-0.5).to(reference).requires_grad_()

    shapes = (((h, d), d), ((h,), d), ((1, h), h), ((1,), h))
    return [uniform(*shape, fan_in=fan_in) for shape, fan_in in shapes]


def _separated(outputs: Tensor) -> bool:
    """Return whether output 0, the target's, is above the margin, and all others below minus it."""
    return bool((outputs[0] > _MARGIN) & (outputs[1:] < -_MARGIN).all())


class TrainedMembership(MembershipAttack):
    """AMI FC: two fully connected layers whose weights are trained to fire on the target only.

    The server trains them to fire on the hidden states of the target and not on those of public
    text. The client's gradient of the last bias is non-zero if the network fires on some input of
    its batch. The output neuron is repeated with different biases, the *rungs*, each of which is
    one threshold of the output, so one run gives a whole ROC curve.

    Differences from the published code: inputs are scaled by the mean and standard deviation of
    public samples, because hidden states of some models reach 30,000 (the weights include the
    scaling). The logistic loss has one output. Training stops at a margin. The decision b' (is the
    target in the batch?) uses a threshold half way between the target's output and the largest
    output on public text, instead of 0. This does not change the order of scores. On MiniLM-L6, in
    batches of 40 sentences without the target, some input fires in 3 of 10 batches at a threshold
    of 0, and in 1 of 7 half way.

    One network is trained for each target. On one CPU core this takes 0.6 to 1 s for a token of
    MiniLM-L6, and 2.5 s for a sentence of 32 tokens.

    If a defence acts on gradients (:meth:`meet`), the server adds only the rung of the decision,
    because all rungs would share the clipped norm.

    Args:
        layer: The layer of the hidden states: 0 for the input of the first block, k for the output
            of block k.
        public_text: Text like the clients', as strings (with ``tokenizer``) or token ids, or
            ``"sampled"`` for text that a causal model generates.
        granularity: ``"token"`` for a network that detects one token in its context, ``"full"``
            for one that detects a whole sentence.
        tokenizer: The tokenizer of strings.
        hidden_units: d_h, the width of the hidden layer.
        steps: The maximum number of steps of Adam for each target.
        public_rows: The maximum number of public samples.
        seed: The seed of the choice of samples and of every training.
        tokens: The number of tokens of a sentence, as in the base class.
        name: The name in the logs.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> from lightning_fedleak.labs.trained_membership import TrainedMembership
        >>> public = [[5, 6, 7, 8], [9, 8, 7, 6]]  # token ids, or strings with tokenizer=
        >>> TrainedMembership(layer=1, public_text=public).rungs
        14
    """

    threat_model = base.threat_with_public_text(
        "a dishonest server that adds layers trained on a text it holds and on public text"
    )
    default_name = "trained_membership"  # the name in the logs without ``name``
    config_names = (  # settings in the logs
        *("layer", "granularity", "hidden_units", "steps", "public_rows", "public_text"),
        *("seed", "rungs", "tokens"),
    )

    def __init__(
        self,
        layer: int,
        public_text: TextSource,
        granularity: base.Granularity = "token",
        *,
        tokenizer: Any = None,
        hidden_units: int = 1000,
        steps: int = 200,
        public_rows: int = 1024,
        seed: int = 0,
        tokens: int = 32,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, granularity, tokens, name)
        self.hidden_units = check_integer("hidden_units", hidden_units)
        self.steps = check_integer("steps", steps)
        self.public_rows = check_integer("public_rows", public_rows, at_least=_MIN_SAMPLES)
        attack = type(self).__name__
        self.public_text = PublicText.parse_required(public_text, tokenizer, attack)
        self.seed = seed
        self._public: Tensor | None = None
        self._neurons: dict[
            bytes, _Network
        ] = {}  # by hash of the target, least recently used first

    def prepare(self, anatomy: Anatomy) -> None:
        """Compute the hidden states of the public text (A_init of the paper).

        Raises:
            ValueError: The model has no such layer, or the public text has too few samples.
        """
        super().prepare(anatomy)
        self.refresh(anatomy, 0)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Store hidden states of public text as training samples, and drop trained networks."""
        generator = torch.Generator().manual_seed(self.seed)
        text = PublicText.resolve(self.public_text, anatomy, self.seed)
        # Longer texts give more samples for each run of the model; not tuned.
        length = min(2 * self.tokens, context_length(anatomy) or 2 * self.tokens)
        samples: list[Tensor] = []
        order = text.draw(min(len(text), self.public_rows), generator)
        for indices in torch.split(order, 64):  # texts in one run of the model; not tuned
            batch = text.rows(indices.tolist(), length, generator)
            mask = batch.attention_mask
            assert mask is not None
            states = hidden_states(anatomy, self.layer, batch.input_ids, mask)
            states = states.to(torch.promote_types(states.dtype, torch.float32))
            if self.granularity == "full":
                samples.append(base.sentence_rows(states, mask, self.tokens))
            else:
                samples.append(states[mask.to(states.device) != 0])
            # More than needed, so that the choice below is from many texts.
            if sum(map(len, samples)) >= 4 * self.public_rows:
                break
        rows = torch.cat(samples)
        rows = rows[rows.isfinite().all(1)]
        unit = "sentences" if self.granularity == "full" else "tokens"
        name, hint = f"attack '{self.name}': {unit} of public text", "give more, better a thousand"
        check_integer(name, len(rows), at_least=_MIN_SAMPLES, hint=hint)
        order = torch.randperm(len(rows), generator=generator)[: self.public_rows]
        self._public = rows[order.to(rows.device)]
        self._neurons.clear()

    @property
    def _rung_positions(self) -> tuple[float, ...]:
        """The threshold of each rung, from the highest to the lowest.

        It is a share of the distance from the decision's threshold (0) to the target's output (1).
        Against a defence that acts on gradients there is only the rung of the decision.
        """
        return (0.0,) if self._defended else (*_HIGHER_RUNGS, 0.0, *(-x for x in _LOWER_RUNGS))

    @property
    def rungs(self) -> int:
        """K, the number of rungs."""
        return len(self._rung_positions)

    @property
    def guess_rung(self) -> int:
        """The index of the rung that gives the decision b'."""
        return self._rung_positions.index(0.0)

    def neuron(self, target: Tensor) -> _Network:
        """Return the network of one target (D,), from the cache or newly trained by the seed.

        Raises:
            ValueError: The target is not finite.
        """
        assert self._public is not None
        dtype = torch.promote_types(target.dtype, torch.float32)
        target = target.detach().to(dtype)
        base.check_targets(target)
        key = hashlib.sha256(target.cpu().double().numpy().tobytes() + str(dtype).encode()).digest()
        neuron = self._neurons.pop(key, None)
        if neuron is None:
            public, generator = self._public.to(target), torch.Generator().manual_seed(self.seed)
            with torch.autocast(target.device.type, enabled=False):
                neuron = train_neuron(
                    target, public, generator, hidden_units=self.hidden_units, steps=self.steps
                )
        self._neurons[key] = neuron
        while len(self._neurons) > 1 and (
            sum(n.nbytes for n in self._neurons.values()) > _CACHE_BYTES
        ):
            del self._neurons[next(iter(self._neurons))]
        return neuron

    def biases(self, neuron: _Network) -> Tensor:
        """Return (K,), the output bias of each rung, ascending."""
        decision = (neuron.on_target + neuron.on_public) / 2
        # The lower limit keeps the rungs apart if the network does not separate the target.
        distance = (neuron.on_target - decision).clamp(min=1e-3 * (1 + neuron.on_target.abs()))
        positions = torch.tensor(self._rung_positions).to(distance)
        return neuron.offset - decision - positions * distance

    @torch.no_grad()
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return (B, G, K), the gradient of each rung's output bias, for B samples and G targets.

        It is the sum of the upstream gradients of the sample's inputs on which the rung fires.

        Args:
            targets: (G, D).
            hidden: (B, L, d), the hidden states at the layer.
            mask: (B, L), the attention mask; None without padding.
            upstream: (B, L), the gradient of the loss by the network's output at each token, the
                same for all rungs; with ``granularity="full"`` (B, 1).
        """
        b, g = len(hidden), len(targets)
        dtype = torch.promote_types(torch.promote_types(targets.dtype, hidden.dtype), torch.float32)
        rows, samples, weights = batch_inputs(hidden, mask, upstream, self.read_together)
        gradient = torch.zeros((b, g, self.rungs), dtype=dtype, device=hidden.device)
        upstream_by_row = weights.to(dtype)[:, None]
        for k, target in enumerate(targets):
            neuron = self.neuron(target)
            with torch.autocast(hidden.device.type, enabled=False):
                output = neuron(rows.to(neuron.weight.dtype))[:, None] + self.biases(neuron)
            row_gradients = torch.where(output > 0, upstream_by_row, 0.0)
            row_gradients = row_gradients.masked_fill(output.isnan(), torch.nan)
            gradient[:, k].index_add_(0, samples, row_gradients)
        return gradient

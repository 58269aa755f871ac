"""Which losses and networks DP-SGD takes, and which it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak.defenses import DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.loss_graph import LossCheck, check_isolation
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from tests.helpers.models import (
    own_rng,
    tiny_bert_classifier,
    tiny_bert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
)

B, T = 4, 12
IDS = torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(0))
RAGGED = torch.where(torch.arange(T) < torch.tensor([3, 4, 5, 6])[:, None], IDS, -100)
X = torch.randn(B, T, generator=torch.Generator().manual_seed(1))
Loss = Callable[[nn.Module], Tensor]


class Net(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        with own_rng(0):
            self.below, self.above = nn.Linear(T, 8), nn.Linear(8, 3)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.below(x))
        return self.above(hidden - hidden.mean(0) if self.mixes else hidden)


class NanoGPT(nn.Module):
    """Embeds positions once for all samples; with ``first`` the time is the first dimension."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        with own_rng(0):
            self.tokens, self.positions = nn.Embedding(97, 8), nn.Embedding(64, 8)
            self.head = nn.Linear(8, 97)
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        if self.first:
            return self.head(self.tokens(ids.T).cumsum(0)).transpose(0, 1)
        return self.head(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))


def check(
    model: nn.Module, loss: Loss, samples: int = B, *, trusted: bool = False, both: bool = True
) -> list[str]:
    """Names of the layers that the loss is computed from directly.

    With ``both`` losses that are seen to keep samples apart must pass the second derivative too.
    """
    recorder = Recorder(model.train())
    try:
        with recorder.step(samples):
            value = loss(model)
        recorder.check()
        form = LossCheck(trusted=trusted)
        top = form.check_form(value, recorder.calls, samples)
        if samples > 1:
            with recorder.paused():
                for known in {form.is_per_sample, trusted or not both}:
                    check_isolation(value, top, recorder.calls, samples, separate=known)
        assert all(p.grad is None for p in model.parameters())
        assert not recorder.parts
    finally:
        recorder.remove()
    return [call.name for call in top]


def mend(model: nn.Module, labels: Tensor = RAGGED, *, causal: bool = True) -> Tensor:
    return mean_of_sample_means(model(input_ids=IDS).logits, labels, causal=causal)


def built_in(labels: Tensor) -> Loss:
    return lambda model: model(input_ids=IDS, labels=labels).loss


def joined(labels: Tensor) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        out = model(input_ids=IDS, labels=labels)
        return out.loss + out.logits.square().mean()

    return loss


def time_first(labels: Tensor) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=IDS).logits.transpose(0, 1).reshape(-1, 97)
        return F.cross_entropy(logits, labels.T.reshape(-1))

    return loss


def classes_first(labels: Tensor) -> Loss:
    return lambda model: F.cross_entropy(model(input_ids=IDS).logits.transpose(1, 2), labels)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, loss: Tensor) -> Tensor:
        return loss / 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def squared(net: nn.Module) -> Tensor:
    return F.mse_loss(net(X), torch.zeros(B, 3))


def adapted() -> nn.Module:
    """Trains one layer in the middle; what follows it is frozen."""
    model = tiny_gpt2(dropout=0.0).requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.requires_grad_(True)
    return model


GOOD: list[tuple[str, Callable[[], nn.Module], Loss, list[str]]] = [
    ("HF causal, equal counts", tiny_gpt2, built_in(IDS), ["lm_head"]),
    ("HF causal, ragged", tiny_gpt2, built_in(RAGGED), ["lm_head"]),
    ("HF masked, ragged", tiny_bert_mlm, built_in(RAGGED), ["cls.predictions.decoder"]),
    ("a mean, expanded", Net, lambda n: squared(n).expand(1, 1).permute(1, 0).sum(), ["above"]),
    ("HF llama", tiny_llama, built_in(IDS), ["lm_head"]),
    ("HF masked, equal counts", tiny_bert_mlm, built_in(IDS), ["cls.predictions.decoder"]),
    ("HF classifier", tiny_bert_classifier, built_in(torch.tensor([0, 1, 2, 1])), ["classifier"]),
    ("frozen above", adapted, mend, ["lm_head"]),
    ("classes first, equal counts", tiny_gpt2, classes_first(IDS), ["lm_head"]),
    ("classes first, ragged", tiny_gpt2, classes_first(RAGGED), ["lm_head"]),
    ("mend, ragged", tiny_gpt2, mend, ["lm_head"]),
    ("mend, masked", tiny_bert_mlm, lambda m: mend(m, causal=False), ["cls.predictions.decoder"]),
    ("scaled by a number", tiny_gpt2, lambda m: 0.5 * mend(m) / 2, ["lm_head"]),
    ("two losses", Net, lambda n: squared(n) + 0.1 * n(X).abs().mean(), ["above", "above"]),
    ("mean over samples", Net, lambda n: n(X).square().sum(1).mean(), ["above"]),
    ("mean of means", Net, lambda n: torch.stack([squared(n), n(X).mean()]).mean(), ["above"] * 2),
    ("positions (T,)", NanoGPT, lambda m: mean_of_sample_means(m(IDS), IDS, causal=True), ["head"]),
]


@pytest.mark.parametrize(("build", "loss", "top"), [g[1:] for g in GOOD], ids=[g[0] for g in GOOD])
def test_a_mean_of_sample_means_is_taken(build, loss: Loss, top: list[str]) -> None:
    assert check(build(), loss) == top


@pytest.mark.parametrize("loss", [mend, built_in(IDS)])
def test_usual_losses_are_seen_to_keep_samples_apart(loss: Loss) -> None:
    model, form = tiny_gpt2().train(), LossCheck()
    recorder = Recorder(model)
    with recorder.step(B):
        value = loss(model)
    form.check_form(value, recorder.calls, B)
    assert form.is_per_sample


def rows_joined(net: nn.Module) -> Tensor:
    joined = net(X).reshape(B // 2, 6).log_softmax(-1)
    return -joined.reshape(B, 3).mean()


def columns(net: nn.Module) -> Tensor:
    return -net(X).log_softmax(0).square().mean()


def summed(net: nn.Module) -> Tensor:
    return net(X).sum(0).square().unsqueeze(0).expand(B, 3).mean(1).mean()


def pairs(net: nn.Module) -> Tensor:
    hidden = net(X)[:, 0]
    return (hidden[:, None] - hidden[None, :]).square().mean()


def products(net: nn.Module) -> Tensor:
    hidden = net(X)[:, 0]
    return (hidden[:, None] * hidden[None, :]).mean()


@pytest.mark.parametrize("loss", [rows_joined, columns, summed, pairs, products])
def test_what_mixes_samples_after_the_last_layer_is_refused(loss: Loss) -> None:
    with pytest.raises(DefenseError, match="depends on others' outputs of 'above'"):
        check(Net(), loss, both=False)


def test_one_sample_is_its_own_mean() -> None:
    model = tiny_gpt2()
    assert check(model, lambda m: m(input_ids=IDS[:1], labels=RAGGED[:1]).loss, 1) == ["lm_head"]

    def alone(model: nn.Module) -> Tensor:
        return mean_of_sample_means(model(input_ids=IDS[:1]).logits, RAGGED[:1], causal=True)

    assert check(model, alone, 1) == ["lm_head"]


def test_a_text_of_one_token_alone_in_its_batch_has_a_loss_of_zero() -> None:
    """It may be drawn alone, and must not end the run."""
    model, ids = tiny_gpt2(), IDS[:1, :1]

    def alone(model: nn.Module) -> Tensor:
        return mean_of_sample_means(model(input_ids=ids).logits, ids, causal=True)

    assert check(model, alone, 1) == ["lm_head"]
    loss = alone(model)
    assert loss == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, [*model.parameters()]))


def test_checkpointing_that_shows_the_graph_is_taken() -> None:
    model = tiny_gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert check(model, mend) == ["lm_head"]
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(DefenseError, match=r'enable\(\{"use_reentrant": False\}\)'):
        check(model, mend)


def masked_by_hand(net: nn.Module) -> Tensor:
    mask = (X > 0).float()[:, :3]
    return (net(X).square() * mask).sum() / mask.sum()


def rescaled_by_hand(net: nn.Module) -> Tensor:
    mask = (X > 0).float()[:, :3]
    return (net(X).square() * mask).mean() / mask.mean()


def contrastive(net: nn.Module) -> Tensor:
    hidden = net(X)
    return F.cross_entropy(hidden @ hidden.T, torch.arange(B))


def selected(model: nn.Module) -> Tensor:
    logits, keep = model(input_ids=IDS).logits, RAGGED != -100
    keep[0, 5:7] = True
    return F.cross_entropy(logits[keep], IDS[keep])


def weighted(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), torch.tensor([0, 1, 2, 1]), weight=torch.tensor([1.0, 2.0, 3.0]))


BAD: list[tuple[str, Callable[[], nn.Module], Loss, str]] = [
    ("token mean and a term", tiny_gpt2, joined(RAGGED), "combined with another term"),
    ("equal counts and a term", tiny_gpt2, joined(IDS), "combined with another term"),
    ("time first, ragged", tiny_gpt2, time_first(RAGGED), "in an unknown order"),
    ("time first, equal counts", tiny_gpt2, time_first(IDS), "in an unknown order"),
    ("a mean, squared", Net, lambda n: squared(n).pow(2), "others' outputs"),
    ("a mean in exp", Net, lambda n: squared(n).exp(), "others' outputs"),
    ("a mean, cut off", Net, lambda n: squared(n).clamp(max=9.0), "ClampBackward1 is between"),
    ("a mean, if finite", Net, lambda n: squared(n).nan_to_num(), "NanToNumBackward0 is between"),
    ("a mean by hand", Net, lambda n: Halved.apply(squared(n)), "HalvedBackward is between"),
    ("masked by hand", Net, masked_by_hand, "tensor that may depend on the batch"),
    ("rescaled by hand", Net, rescaled_by_hand, "tensor that may depend on the batch"),
    ("chosen tokens", tiny_gpt2, selected, "IndexBackward0 selects terms"),
    ("class weights", Net, weighted, "class weights"),
    ("a sum", Net, lambda n: n(X).square().sum(), "SumBackward0 is between"),
    ("a sum of cross-entropies", Net, lambda n: F.mse_loss(n(X), X[:, :3], reduction="sum"), "sum"),
    ("weight penalty", Net, lambda n: squared(n) + n.below.weight.square().mean(), "weight_decay"),
    ("contrastive", Net, contrastive, "others' outputs"),
]


@pytest.mark.parametrize(
    ("build", "loss", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_another_loss_is_refused_with_the_mend(build, loss: Loss, message: str) -> None:
    with pytest.raises(DefenseError, match=message) as refused:
        check(build(), loss)
    assert "mean_of_sample_means(logits, labels, causal=...)" in str(refused.value)
    assert "loss='trusted'" in str(refused.value)


def by_alpha(loss: Tensor, count: float) -> Tensor:
    return torch.add(loss, loss, alpha=1 / count)


SCALED: list[Callable[[Tensor, float], Tensor]] = [
    lambda loss, count: loss / torch.tensor(int(count)),
    lambda loss, count: loss / torch.tensor(count, dtype=torch.float64),
    lambda loss, count: loss * (12 / torch.tensor(count).sum().item()),
    by_alpha,
]


@pytest.mark.parametrize("scaled", SCALED, ids=["whole", "float64", "Python", "alpha"])
def test_a_number_that_changes_is_refused(scaled: Callable[[Tensor, float], Tensor]) -> None:
    form, net = LossCheck(), Net()
    for count in (3.0, 3.0, 4.0):
        recorder = Recorder(net)
        with recorder.step(B):
            value = scaled(squared(net), count)
        if count == 3:
            form.check_form(value, recorder.calls, B)
        else:
            with pytest.raises(DefenseError, match="scaled by a number that changes"):
                form.check_form(value, recorder.calls, B)
        recorder.remove()


NETWORKS: list[tuple[str, Callable[[], nn.Module], Loss, str]] = [
    ("mixes samples", lambda: Net(mixes=True), squared, "'below'"),
    (
        "time first",
        lambda: NanoGPT(first=True),
        lambda m: mean_of_sample_means(m(IDS), IDS, causal=True),
        "'tokens'",
    ),
    (
        "positions by chance as many as samples",
        NanoGPT,
        lambda m: mean_of_sample_means(m(IDS[:, :B]), IDS[:, :B], causal=True),
        "'positions'",
    ),
    ("relative positions", tiny_t5, built_in(IDS), "relative_attention_bias"),
]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    ("build", "loss", "message"), [n[1:] for n in NETWORKS], ids=[n[0] for n in NETWORKS]
)
def test_a_network_that_mixes_samples_is_refused(build, loss, message: str, trusted: bool) -> None:
    with pytest.raises(DefenseError, match=message):
        check(build(), loss, trusted=trusted)


@pytest.mark.parametrize("causal", [True, False])
def test_the_mend_is_the_mean_over_samples_of_the_hugging_face_loss(causal: bool) -> None:
    model = tiny_gpt2() if causal else tiny_bert_mlm()
    model.eval()
    alone = [
        model(input_ids=IDS[i : i + 1], labels=RAGGED[i : i + 1]).loss.detach() for i in range(B)
    ]
    torch.testing.assert_close(mend(model, causal=causal), torch.stack(alone).mean())
    labels = RAGGED.clone()
    labels[0] = -100
    expected = torch.stack([torch.zeros(()), *alone[1:]]).mean()
    torch.testing.assert_close(mend(model, labels, causal=causal), expected)


def test_rows_that_belong_to_nobody_are_refused() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(T, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:3])

    with pytest.raises(DefenseError, match=r"4 samples 'layer' .* 3 rows of input and 3 of output"):
        check(Pooled(), lambda m: m(X).square().mean())

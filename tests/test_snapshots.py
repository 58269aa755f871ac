"""Taps against independent computations: float64 optimizers by hand, plain autograd."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_fedleak.model.snapshots import Stage, TokenSnapshot, whole_tensor
from lightning_fedleak.model.taps.step_tap import _GradientTap


def test_view_is_no_copy_and_leaves_out_what_has_no_gradient():
    a, b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    a.grad = torch.randn(3, 2)
    view = _GradientTap({"head.weight": a, "head.bias": b}).view(5, Stage.SHARED)
    assert view.tensors["head.weight"].data_ptr() == a.grad.data_ptr()
    assert set(view.tensors) == {"head.weight"}
    assert (view.step, view.stage, view.client) == (5, "shared", 0)


def test_kept_gradient_is_the_sum_over_micro_batches_and_survives_overwriting():
    torch.manual_seed(0)
    layer = nn.Linear(4, 6, bias=False)
    tap = _GradientTap({"head.weight": layer.weight})
    tap.keep_local()
    inputs = [torch.randn(5, 4) for _ in range(3)]
    layer(inputs[0]).square().sum().backward()
    layer.weight.grad = None
    tap.arm()
    for x in inputs:
        layer(x).square().sum().backward()
    expected = sum(2 * (x @ layer.weight.detach().T).T @ x for x in inputs)
    layer.weight.grad.zero_()
    kept = tap.view(0, Stage.LOCAL, copies=True).tensors["head.weight"]
    torch.testing.assert_close(kept, expected)
    tap.disarm()
    layer(inputs[0]).sum().backward()
    torch.testing.assert_close(
        tap.view(0, Stage.LOCAL, copies=True).tensors["head.weight"], expected
    )
    tap.close()
    assert not layer.weight._post_accumulate_grad_hooks


def test_sparse_gradients_are_made_dense():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    got = _GradientTap({"embedding.weight": embedding.weight}).view(0, Stage.SHARED)
    dense = got.tensors["embedding.weight"]
    assert dense.layout is torch.strided
    assert dense.sum(1).tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]


def test_a_token_that_cannot_be_makes_no_other_place_unknown():
    values = torch.tensor([[-torch.inf, -1.0, -2.0]])
    labels = torch.ones(1, 3, dtype=torch.bool)
    snapshot = TokenSnapshot(values, values, -values, labels, labels)
    part = snapshot.within(torch.tensor([[False, True, True]]))
    assert part.log_probs.tolist() == part.means.tolist() == [[0, -1, -2]]
    assert part.greedy.tolist() == part.labels.tolist() == [[False, True, True]]
    assert part.mean_log_probs().tolist() == [-1.5]


def test_shards_that_are_offloaded_to_the_host_are_gathered_on_the_mesh_s_device(monkeypatch):
    gpu = SimpleNamespace(current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: gpu)
    whole = torch.ones(2)

    class Shard:
        device, device_mesh = torch.device("cpu"), SimpleNamespace(device_type="cuda")

        def detach(self):
            return self

        def to(self, device):
            self.device = device
            return self

        def full_tensor(self):
            assert self.device == torch.device("cuda", 3)  # NCCL gathers nothing on a CPU
            return whole

    assert torch.equal(whole_tensor(Shard()), whole)

"""Hidden states of a model that FSDP2 shards over two gloo processes."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import whole_rows
from tests.helpers.models import VOCAB, tiny_gpt2
from tests.helpers.processes import two_processes


def sharded(policy: MixedPrecisionPolicy) -> torch.nn.Module:
    model = tiny_gpt2(layers=3, dropout=0.0, tied=False).train()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def gradients(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask).logits.float().square().mean().backward()
    return [p.grad.full_tensor().clone() for p in model.parameters()]


def main(folder: Path, rank: str) -> None:
    os.environ["RANK"] = rank
    dist.init_process_group("gloo")
    ids = torch.randint(3, VOCAB, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7], [3], [5]])
    whole = find_anatomy(tiny_gpt2(layers=3, dropout=0.0, tied=False))
    found = {}
    policies = {
        "full": MixedPrecisionPolicy(),
        "half": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for name, policy in policies.items():
        expected = gradients(sharded(policy), ids, mask)
        model = sharded(policy)
        anatomy = find_anatomy(model)
        fired: list[int] = []
        model.transformer.h[0].register_forward_hook(lambda *_, seen=fired: seen.append(1))
        worst = 0.0
        for layer in (0, 2, 3):
            states = hidden_states(anatomy, layer, ids, mask)
            worst = max(worst, float((states - hidden_states(whole, layer, ids, mask)).abs().max()))
        quiet = fired == []
        split = all(isinstance(p, DTensor) for p in model.parameters())
        first = gradients(model, ids, mask)
        hidden_states(anatomy, 1, ids, mask)
        again = gradients(model, ids, mask)
        same, same_again = (
            all(torch.equal(a, b) for a, b in zip(expected, g, strict=True)) for g in (first, again)
        )
        found[name] = {
            "worst": worst,
            "quiet": quiet,
            "sharded": split,
            "same": same,
            "same again": same_again,
        }
    weight = sharded(policies["full"]).transformer.wte.weight  # of 97 rows: the shards differ
    rows = torch.tensor([0, 48, 49, 96, 49])
    with CommDebugMode() as brought:
        some = whole_rows(weight, rows)
    found["rows"] = {
        "same": torch.equal(some, weight.full_tensor()[rows]),
        "collectives": {str(name): n for name, n in brought.get_comm_counts().items()},
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.ddp
def test_a_model_sharded_by_fsdp2_gathers_and_gives_back(tmp_path: Path) -> None:
    for found in two_processes("tests.test_model_runs_fsdp2", tmp_path):
        for policy in ("full", "half"):
            facts = ("quiet", "sharded", "same", "same again")
            assert all(found[policy][fact] for fact in facts), policy
        assert found["full"]["worst"] < 1e-5
        assert 0 < found["half"]["worst"] < 0.1
        # A sum of the rows that each process has, and no gathering of the matrix.
        assert found["rows"] == {"same": True, "collectives": {"c10d_functional.all_reduce": 1}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

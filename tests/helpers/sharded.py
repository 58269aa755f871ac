"""A LightningModule that FSDP2 shards, and what it shards made whole."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.lightning_modules import CausalLMModule

BLOCKS = ("GPT2Block", "LlamaDecoderLayer")


class ShardedModule(CausalLMModule):
    """Shards each block, and all else with the whole, once; not where the strategy has no mesh."""

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(next(self.model.parameters()), DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for part in self.model.modules():
            if type(part).__name__ in BLOCKS:
                fully_shard(part, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()

"""What two gloo processes that are two clients run under DP-SGD; see test_ddp.py."""

from typing import Any

import torch

from lightning_fedleak.defenses import DPSGD, ReleaseSettings
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.cases import Cases, gathered
from tests.strategies.ddp_worker import ranks_agree
from tests.strategies.dpsgd_runs import BATCH, CLIP, CausalLM, fit, loader, trainer
from tests.strategies.dpsgd_world_runs import Look


def agree(module: torch.nn.Module) -> bool:
    return ranks_agree(list(module.parameters()))


def exact(precision: str, most: int | None = None) -> dict[str, Any]:
    module = CausalLM()
    defense = DPSGD(CLIP, noise_multiplier=0.0, seed=1, max_physical_batch_size=most)
    strategy = DefendedStrategy("ddp", [defense])
    look = Look(strategy, CausalLM(), precision)
    settings = {"devices": 2, "precision": precision}
    trainer(strategy, callbacks=[look], **settings).fit(module, loader())
    means = []
    for mine, aggregate in zip(
        look.stages[Stage.SHARED], look.stages[Stage.AGGREGATE], strict=True
    ):
        both = torch.stack(gathered(mine)).mean(0)
        means.append(float((aggregate - both).abs().max() / both.abs().max().clamp(min=1e-12)))
    return {
        "distance": max(look.distances(BATCH)), "mean": max(means), "steps": len(look.sizes),
        "masks differ": gathered(look.sizes)[0] != gathered(look.sizes)[1], "agree": agree(module),
        "rate": defense.privacy.sample_rate, "releases": defense.privacy.releases,
    }  # fmt: skip


def noise(trust: Any) -> dict[str, Any]:
    module = CausalLM(lr=1e-3)
    strategy = DefendedStrategy(
        "ddp", [DPSGD(CLIP, noise_multiplier=50.0, release=ReleaseSettings(trust=trust))]
    )
    look = Look(strategy)
    trainer(strategy, callbacks=[look], devices=2, max_steps=2).fit(module, loader())
    scaled = [shared * BATCH / (50.0 * CLIP) for shared in look.stages[Stage.SHARED]]
    one, other = gathered(scaled[-1])
    return {
        "std": float(scaled[0].std()),
        "correlation": float((one * other).mean() / (one.std() * other.std())),
        "agree": agree(module),
    }


def rare() -> dict[str, Any]:
    """Batches so small that many are empty on one rank only."""
    defense = DPSGD(CLIP, noise_multiplier=1.0, seed=1)
    module, run = fit(defense, name="ddp", devices=2, max_epochs=1, data=loader(n=20, batch_size=1))
    return {
        "ran": len(module.sizes), "steps": run.global_step, "releases": defense.privacy.releases,
        "agree": agree(module), "sizes positive": min(module.sizes, default=1) > 0,
    }  # fmt: skip


CASES = Cases(
    {
        "exact tied 32": lambda _: exact("32-true"),
        "exact pieces": lambda _: exact("32-true", most=3),
        "exact tied bf16": lambda _: exact("bf16-mixed"),
        "noise local": lambda _: noise("local"),
        "noise central": lambda _: noise("central"),
        "rare": lambda _: rare(),
    }
)

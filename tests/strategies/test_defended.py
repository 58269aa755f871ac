"""How a DefendedStrategy is built, what it becomes, and what it refuses."""

import copy
import pickle
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_fedleak.defenses import DPSGD, ActivationNoise, DefenseError, Freeze, GradientNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.strategies.toy import ToyLM, loader, trainer

NOISE = [GradientNoise(1.0, 1.0)]
PRIVATE = [DPSGD(1.0, noise_multiplier=1.0)]


def choice(strategy: str | Strategy, **settings) -> dict[str, object]:
    """What a Trainer makes of a strategy."""
    run = trainer(strategy, **settings)
    chosen = run.strategy
    defended_class = isinstance(chosen, DefendedStrategy)
    return {
        "class": type(chosen).__mro__[2 if not isinstance(chosen, DDPStrategy) else 3]
        if defended_class
        else type(chosen),
        "world size": run.world_size,
        "device": chosen.root_device,
        "devices": run.device_ids,
        "nodes": run.num_nodes,
        "launcher": type(chosen.launcher),
        "start method": getattr(chosen, "_start_method", None),
        "precision": type(chosen.precision_plugin),
        "accelerator": type(chosen.accelerator),
        "checkpoint_io": type(chosen.checkpoint_io),
        "layer sync": type(getattr(chosen, "_layer_sync", None)),
        "sampler": run.distributed_sampler_kwargs,
        "environment": type(getattr(chosen, "cluster_environment", None)),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"devices": 2},
        {"devices": 2, "num_nodes": 3},
        {"devices": 2, "precision": "bf16-mixed", "sync_batchnorm": True},
    ],
    ids=str,
)
def test_auto_is_the_trainers_own_choice(settings) -> None:
    assert choice(DefendedStrategy(), **settings) == choice("auto", **settings)


@pytest.mark.parametrize(
    ("strategy", "start"),
    [("ddp", "popen"), ("ddp_spawn", "spawn"), ("ddp_find_unused_parameters_true", "popen")],
)
def test_ddp_by_name(strategy: str, start: str) -> None:
    ours = DefendedStrategy(strategy, NOISE)
    chosen, plain = choice(ours, devices=2), choice(strategy, devices=2)
    assert isinstance(ours, DDPStrategy)
    assert isinstance(ours, DefendedStrategy)
    assert issubclass(chosen.pop("launcher"), plain.pop("launcher"))
    assert chosen == plain
    assert ours._start_method == start


def test_an_instance_keeps_its_settings_and_its_class() -> None:
    class Mine(DDPStrategy):
        def barrier(self, *args, **kwargs):
            return "mine"

    ours = DefendedStrategy(Mine(find_unused_parameters=True), NOISE, client="world")
    assert isinstance(ours, Mine)
    assert ours._ddp_kwargs == {"find_unused_parameters": True}
    assert ours.barrier() == "mine"
    assert (ours.client, ours.defenses) == ("world", tuple(NOISE))
    assert type(ours).__name__ == "DefendedMine"
    assert type(ours) is type(DefendedStrategy(Mine()))


@pytest.mark.parametrize("strategy", ["auto", "single_device", "ddp", "ddp_spawn"])
def test_pickles_and_copies(strategy: str) -> None:
    ours = DefendedStrategy(strategy, [GradientNoise(2.0, 0.5), Freeze("head")], "world")
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(twin) is type(ours)
        assert [d.name for d in twin.defenses] == ["gradient_noise", "freeze"]
        assert twin.defenses[0].clip == 2.0
        assert twin.client == "world"
    trainer(ours, devices=2 if "ddp" in strategy else 1)
    twin = pickle.loads(pickle.dumps(ours))
    assert type(twin) is type(ours)
    assert isinstance(twin, DDPStrategy if "ddp" in strategy else SingleDeviceStrategy)
    assert type(twin.launcher) is type(ours.launcher)


class OwnWrapping(DDPStrategy):
    def _setup_model(self, model):
        return super()._setup_model(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DefendedStrategy("fsdp"), r"'fsdp' is not supported\. Pass 'auto'"),
        (lambda: DefendedStrategy("nonsense"), r"'nonsense' is not supported\. Pass 'auto'"),
        (lambda: DefendedStrategy(FSDPStrategy()), "FSDPStrategy is not supported.* Pass"),
        (lambda: DefendedStrategy(ModelParallelStrategy()), r"FSDP2.*client='world'"),
        (lambda: DefendedStrategy(DefendedStrategy("ddp")), "already defended"),
        (
            lambda: DefendedStrategy(client="company"),
            r"client must be 'rank' or 'world'.*got 'company'",
        ),
        (lambda: DefendedStrategy(defenses=[*NOISE, *NOISE]), "a `name` of its own"),
        (lambda: DefendedStrategy(defenses=[*NOISE, *PRIVATE]), "put 'dpsgd' before"),
        (
            lambda: DefendedStrategy(defenses=[*PRIVATE, ActivationNoise(1, 1.0, relative=True)]),
            "use relative=False",
        ),
        (
            lambda: DefendedStrategy(DDPStrategy(ddp_comm_hook=print), NOISE),
            r"`ddp_comm_hook`.*client='world'",
        ),
        (
            lambda: DefendedStrategy(DDPStrategy(model_averaging_period=2), NOISE),
            "`model_averaging_period`",
        ),
        (lambda: DefendedStrategy(DDPStrategy(mixed_precision=1), NOISE), "`mixed_precision`"),
        (lambda: DefendedStrategy(OwnWrapping(), NOISE), "OwnWrapping._setup_model"),
    ],
)
def test_refusals_at_construction(build, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        build()


def test_a_used_instance_is_refused() -> None:
    inner = SingleDeviceStrategy("cpu")
    trainer(inner).fit(ToyLM(), loader())
    with pytest.raises(DefenseError, match="used by a Trainer"):
        DefendedStrategy(inner)


def run_as_rank(strategy: DefendedStrategy, model: ToyLM, **settings) -> None:
    """Checks that setup makes before any process is needed."""
    run = trainer(strategy, devices=2, **settings)
    strategy._check_model(model)
    del run


def test_refusals_when_the_model_is_known() -> None:
    scaler = torch.amp.GradScaler("cpu")
    fp16 = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    with pytest.raises(DefenseError, match=r"16-mixed.*bf16-mixed"):
        run_as_rank(DefendedStrategy("ddp", NOISE), ToyLM(), **fp16)
    run_as_rank(DefendedStrategy("ddp", NOISE, "world"), ToyLM(), **fp16)
    run_as_rank(DefendedStrategy("ddp"), ToyLM(), **fp16)
    with pytest.raises(DefenseError, match="sync_batchnorm=False"):
        run_as_rank(DefendedStrategy("ddp", NOISE), ToyLM(), sync_batchnorm=True)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(ToyLM(norm=True))
    with pytest.raises(DefenseError, match="sync_batchnorm=False"):
        run_as_rank(DefendedStrategy("ddp", NOISE), model)
    with pytest.raises(DefenseError, match="several devices: pass 'ddp'"):
        run_as_rank(DefendedStrategy("single_device", NOISE), ToyLM())


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()


CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_fedleak.strategies.DefendedStrategy
    init_args:
      strategy: {strategy}
      client: rank
      defenses:
        - class_path: lightning_fedleak.defenses.GradientNoise
          init_args: {{clip: 1.0, sigma: 0.5}}
"""
NESTED = "{class_path: lightning.pytorch.strategies.SingleDeviceStrategy, init_args: {device: cpu}}"


@pytest.mark.parametrize("strategy", ["auto", NESTED])
def test_a_lightning_cli_builds_it(tmp_path, monkeypatch, strategy: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(strategy=strategy))
    arguments = ["main.py", "fit", "--config", str(config)]
    arguments += ["--trainer.strategy.init_args.defenses.init_args.sigma=0.25"]
    monkeypatch.setattr(sys, "argv", arguments)
    cli = LightningCLI(ToyLM, Data, save_config_callback=None)
    ours = cli.trainer.strategy
    assert isinstance(ours, DefendedStrategy)
    assert isinstance(ours, SingleDeviceStrategy)
    (noise,) = ours.defenses
    assert (noise.sigma, noise.releases) == (0.25, 2)

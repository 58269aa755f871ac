"""Fits with correlated noise: by a Trainer, in pieces, by users, resumed, and with checkpoints."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_fedleak.defenses import DPSGD, DefenseError, DPAdamBC
from lightning_fedleak.labs.correlated_noise import banded
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.dpsgd_settings import grouped
from tests.strategies.dpsgd_runs import BATCH, CLIP, CausalLM, Look, N, loader, trainer

pytestmark = pytest.mark.slow

pytest.importorskip("opacus")

NOISE, STEPS = 50.0, 12


def defense(**settings: Any) -> DPSGD:
    given = {"mechanism": "banded", "bands": 3, "noise_multiplier": NOISE, "accountant": "rdp"}
    return DPSGD(CLIP, **grouped(**{"target_delta": 1e-3, **given, **settings}))


class Noise(Callback):
    """Keeps a few numbers of every release; nearly all of them is noise."""

    def __init__(self, stop: int = 10**6) -> None:
        self.rows: list[Tensor] = []
        self.stop = stop

    def on_train_start(self, run: Any, module: Any) -> None:
        first = next(module.parameters())

        def tap(stage: str, _: Any) -> None:
            if stage == "shared":
                self.rows.append(first.grad.flatten()[:5000].double() * BATCH / CLIP / NOISE)

        run.strategy.add_tap(tap)

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        run.should_stop = run.should_stop or run.global_step >= self.stop


def fit(own: DPSGD, *callbacks: Any, folder: Path | None = None, **settings: Any) -> Any:
    path = settings.pop("ckpt_path", None)
    saving = {"enable_checkpointing": True, "default_root_dir": folder} if folder else {}
    run = trainer(
        DefendedStrategy("auto", [own]), callbacks=[*callbacks], max_epochs=2, **saving, **settings
    )
    run.fit(CausalLM(lr=1e-6), loader(), ckpt_path=path)
    return run


def whitened(rows: list[Tensor]) -> Tensor:
    """C times what was released: independent noise, if all is right."""
    own = torch.from_numpy(banded(STEPS, 3).rows)[: len(rows)]
    noise = torch.stack(rows)
    return torch.stack(
        [sum(own[t, j] * noise[t - j] for j in range(min(3, t + 1))) for t in range(len(rows))]
    )


def check_independent(rows: Tensor) -> None:
    alike = rows @ rows.T / rows.shape[1]
    assert torch.diag(alike).tolist() == pytest.approx([1.0] * len(rows), abs=0.22)
    alike.fill_diagonal_(0)
    assert float(alike.abs().max()) < 0.16  # six standard errors


def test_what_a_fit_releases_is_correlated_as_planned_and_goes_on_after_a_stop(
    tmp_path: Path,
) -> None:
    first, own = Noise(stop=7), defense(max_physical_batch_size=2)
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_last=True)
    run = fit(own, first, saver, folder=tmp_path)
    assert run.global_step == 7
    assert own.accountant.history == ((NOISE, 3 * BATCH / N, 3),)
    last = Path(saver.last_model_path)
    held = torch.load(last, weights_only=True)["lightning_fedleak_defenses"]["dpsgd"]
    (path,) = (tmp_path / "saved").glob("secret-*")
    assert path.name == f"secret-dpsgd-{held['noise']}-0-of-1.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(not isinstance(v, Tensor) or v.numel() < 10 for v in held.values())
    second, own = Noise(), defense(max_physical_batch_size=2)
    run = fit(own, second, ckpt_path=last)
    assert run.global_step == STEPS
    assert own.accountant.history == ((NOISE, 3 * BATCH / N, 4),)
    assert not path.exists()
    whole = whitened(first.rows + second.rows)
    assert len(whole) == STEPS
    check_independent(whole)
    raw = torch.stack(first.rows)
    assert float((raw[5] @ raw[6]) / raw.shape[1]) < -0.2

    again = defense(max_physical_batch_size=2)  # from the same checkpoint: its noise is used up
    third = Noise()
    with pytest.warns(UserWarning, match="A new mechanism begins"):
        fit(again, third, ckpt_path=last)
    assert again.accountant.history == ((NOISE, 3 * BATCH / N, 5),)
    check_independent(whitened(third.rows))
    with pytest.raises(DefenseError, match="number of steps was 12"):
        fit(defense(max_physical_batch_size=2), ckpt_path=last, limit_train_batches=4)


@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 3}])
def test_sums_are_those_of_brute_force(settings: Any) -> None:
    own = defense(noise_multiplier=0.0, **settings)
    strategy = DefendedStrategy("auto", [own])
    look = Look(strategy, BATCH)
    trainer(strategy, callbacks=[look], max_epochs=2).fit(CausalLM(), loader())
    assert len(look.distances) == STEPS
    assert max(look.distances) < 1e-6


def test_users_have_groups_as_examples_have() -> None:
    own = defense(group_by=[i // 2 for i in range(N)], bands=2)
    run = trainer(DefendedStrategy("auto", [own]), max_epochs=2)
    run.fit(CausalLM(), loader(batch_size=2))
    assert run.global_step == STEPS
    assert own.accountant.history == ((NOISE, 2 * 2 / (N / 2), 6),)


class Adam(CausalLM):
    def configure_optimizers(self) -> Any:
        return DPAdamBC(self.parameters(), lr=1e-6, betas=(0.9, 0.5))


def test_dp_adam_takes_out_the_variance_of_each_step() -> None:
    module = Adam()
    trainer(DefendedStrategy("auto", [defense()]), max_epochs=2).fit(module, loader())
    state = module.trainer.optimizers[0].state[next(module.parameters())]
    norms, expected = banded(STEPS, 3).noise_norms, 0.0
    for norm in norms:
        expected = 0.5 * expected + 0.5 * (norm * NOISE * CLIP / BATCH) ** 2
    assert norms.max() > 1.2 * norms.min()
    assert float(state["noise"]) == pytest.approx(expected, rel=1e-5)
    assert float(state["exp_avg_sq"].mean()) == pytest.approx(expected, rel=0.15)

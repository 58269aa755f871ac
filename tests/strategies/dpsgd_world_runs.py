"""Fits under DPSGD in which two gloo processes are one client; shared by the DDP and FSDP2 workers.

Every function runs on both ranks and returns numbers, booleans and strings; the tests say what they
must be.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses import DPSGD, DefenseError, Users, mean_of_sample_means
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.dpsgd import clipped_sum as clipped_sum_module
from lightning_fedleak.defenses.dpsgd.isolation import NOT_MEASURED
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate
from lightning_fedleak.defenses.processes import local_part
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.cases import gathered
from tests.helpers.models import own_rng, tiny_gpt2, tiny_llama, tiny_mixtral
from tests.helpers.sharded import whole
from tests.strategies.ddp_worker import ranks_agree
from tests.strategies.dpsgd_runs import CLIP, CLIPS, CausalLM, clipped_sum, loader, lora, trainer

N, BATCH = 24, 4
EXPECTED = 2 * BATCH
HALF = ("gpt2 tied", "lora")
Found = dict[str, Any]


def gpt2(**settings: Any) -> nn.Module:
    return tiny_gpt2(**{"dropout": 0.0, **settings}).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2 tied": gpt2, "gpt2 untied": lambda: gpt2(tied=False),
    "llama": lambda: tiny_llama().train(), "lora": lora,
    "experts": lambda: tiny_mixtral("grouped_mm").train(),
}  # fmt: skip


class LM(CausalLM):
    """Also calls a model that is sharded; FSDP2 gathers for its ``forward`` alone."""

    synced = True

    def __init__(self, model: nn.Module | None = None, lr: float = 0.05) -> None:
        super().__init__(gpt2() if model is None else model, lr)
        self.gather = False
        self.kind: type[Optimizer] = torch.optim.SGD

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.model(**inputs)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self(inputs).logits.float()
        if self.gather:
            # A form of which it is not seen that it keeps samples apart.
            chosen = logits.log_softmax(2).gather(2, batch["input_ids"][..., None])
            return -chosen.mean()
        return mean_of_sample_means(logits, batch["labels"], causal=True)

    def configure_optimizers(self) -> Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return self.kind(trained, lr=self.lr)  # type: ignore[call-arg]


class Own(nn.Module):
    """A model of one's own, with an output that FSDP2 does not look into.

    Args:
        mixing: every sample sees the mean of the batch.
    """

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.mixing = mixing
        with own_rng(0):
            self.embedding = nn.Embedding(97, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8)])
            self.norm = nn.RMSNorm(8)
            self.head = nn.Linear(8, 97)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.embedding(input_ids)
        hidden = self.layers[0](hidden + self.mixing * hidden.mean(0, keepdim=True))
        return SimpleNamespace(logits=self.head(self.norm(torch.tanh(hidden))))


class Look(Callback):
    """Keeps what was local and shared in each step, and what brute force makes of the samples.

    Args:
        strategy: of the fit.
        twin: a plain model, to which the weights of each step are copied.
        precision: under which the twin computes.
        users: rows are of the users that :func:`user_of` tells, and these are clipped.
    """

    def __init__(
        self,
        strategy: DefendedStrategy,
        twin: CausalLM | None = None,
        precision: str = "32-true",
        users: bool = False,
    ) -> None:
        self.users = users
        self.strategy, self.twin, self.precision = strategy, twin, precision
        clips = [d.max_grad_norm for d in strategy.defenses if isinstance(d, DPSGD)]
        self.clip, self.norms = (clips or [CLIP])[0], list[float]()
        self.sizes: list[int] = []
        self.brute: list[Tensor] = []
        self.stages: dict[Stage, list[Tensor]] = {stage: [] for stage in ON_THE_WAY}
        self.own: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.module = module
        self.strategy.add_tap(self.tap)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = {key: value.clone() for key, value in batch.items()}
        self.sizes.append(len(batch["labels"]))

    def tap(self, stage: Stage, optimizer: Optimizer) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self.stages[stage].append(torch.cat([whole(g).double().flatten() for g in found]))
        if stage == Stage.SHARED:
            local = [g.to_local() if isinstance(g, DTensor) else g for g in found]
            self.own.append(torch.cat([g.detach().clone().flatten() for g in local]))
        if stage == Stage.LOCAL and self.twin is not None:
            weights = {name: whole(p) for name, p in self.module.named_parameters()}
            for name, p in self.twin.named_parameters():
                p.data.copy_(weights[name])
            with torch.enable_grad():
                given = self.clip, user_of if self.users else None
                mine, norms = clipped_sum(self.twin, self.batch, self.precision, *given)
                self.norms += norms
            alone = self.strategy.client == "rank"
            self.brute.append(mine if alone else sum(gathered(mine)))  # type: ignore[arg-type]

    def distances(self, expected: float = EXPECTED) -> list[float]:
        """Of what was shared from brute force, relative to the latter."""
        pairs = zip(self.stages[Stage.SHARED], self.brute, strict=True)
        return [float((a * expected - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs]


def user_of(ids: Tensor) -> int:
    """Whose a row is."""
    return int(ids[0]) % 9


class Runs:
    """The cases, for one inner strategy.

    Args:
        strategy: builds the inner strategy.
        module: makes of a plain module one that this strategy trains.
    """

    def __init__(self, strategy: Callable[[], Strategy], module: Callable[..., LM] = LM) -> None:
        self.strategy, self.module = strategy, module

    def defended(self, *defenses: Any) -> DefendedStrategy:
        return DefendedStrategy(self.strategy(), list(defenses), client="world")

    def fit(
        self,
        defense: Any,
        module: LM | None = None,
        *,
        look: bool = False,
        twin: LM | None = None,
        data: Any = None,
        ckpt_path: Any = None,
        callbacks: Any = (),
        **settings: Any,
    ) -> tuple[LM, L.Trainer, Look]:
        strategy = self.defended(*(defense if isinstance(defense, list) else [defense]))
        precision = settings.get("precision", "32-true")
        users = any(getattr(d, "unit", "") == "user" for d in strategy.defenses)
        watch = Look(strategy, twin, precision, users)
        run = trainer(
            strategy, devices=2, callbacks=[*callbacks, *([watch] if look or twin else [])],
            **settings,
        )  # fmt: skip
        module = self.module() if module is None else module
        run.fit(module, data or loader(), ckpt_path=ckpt_path)
        return module, run, watch

    def agree(self, module: nn.Module) -> bool:
        return ranks_agree([whole(p) for p in module.parameters()])

    # ---- the cases ----------------------------------------------------------------------------

    def exact(
        self,
        name: str,
        *,
        build: Any = None,
        twin: Any = None,
        most: int | None = None,
        users: Any = None,
        **settings: Any,
    ) -> Found:
        """Without noise: what is shared against brute force over both ranks' samples."""
        defense = DPSGD(
            CLIPS.get(name, CLIP), noise_multiplier=0.0, seed=1, max_physical_batch_size=most,
            unit="example" if users is None else Users(users, rows_per_user=most),
        )  # fmt: skip
        plain = LM((MODELS[name] if twin is None else twin)())
        module = self.module((MODELS[name] if build is None else build)())
        values = settings.pop("validate", None)
        if values:
            module.validation_step = lambda batch, batch_idx: module.loss(batch)  # type: ignore[method-assign]
            module.val_dataloader = lambda: loader(8)  # type: ignore[method-assign]
        module, _, look = self.fit(defense, module, twin=plain, **settings)
        sizes = gathered(look.sizes)
        local, shared = look.stages[Stage.LOCAL], look.stages[Stage.SHARED]
        return {
            "distance": max(look.distances(defense._sampling.expected)),
            "undefended": min(
                float((a - b).norm() / b.norm()) for a, b in zip(local, shared, strict=True)
            ),
            "longest": max(map(max, gathered(look.norms))),
            "aggregate": all(map(torch.equal, shared, look.stages[Stage.AGGREGATE])),
            "agree": self.agree(module),
            "masks differ": sizes[0] != sizes[1],
            "rate": defense.privacy.sample_rate,
            "releases": defense.privacy.releases,
            "ran": gathered(module.sizes),
            "drawn": sizes,
        }

    def one_by_one(self) -> Found:
        """Every parameter is summed by itself, as large ones are."""
        original, clipped_sum_module.AT_ONCE = clipped_sum_module.AT_ONCE, 0
        try:
            return self.exact("gpt2 tied")
        finally:
            clipped_sum_module.AT_ONCE = original

    def noise(self) -> Found:
        """Much of it; accounted as in one process."""
        sigma = 50.0
        defense = DPSGD(CLIP, noise_multiplier=sigma, target_delta=1e-3, accountant="rdp")
        module = self.module(gpt2(vocab=4001, d=32), lr=1e-4)
        module, _, look = self.fit(defense, module, look=True, max_steps=2)
        scaled = [value * EXPECTED / (sigma * CLIP) for value in look.stages[Stage.SHARED]]
        own = [value * EXPECTED / (sigma * CLIP) for value in look.own]
        first, second = gathered(own[0])
        n = min(len(first), len(second))
        steps = torch.corrcoef(torch.stack(scaled))[0, 1]
        return {
            "std": [float(value.std()) for value in scaled],
            "coordinates": len(scaled[0]),
            "same on both": all(torch.equal(*gathered(value)) for value in scaled),
            "shards": float(torch.corrcoef(torch.stack([first[:n], second[:n]]))[0, 1]),
            "steps": float(steps),
            "measured": defense.measured_noise_multiplier,
            "isolation": NOT_MEASURED not in defense.guarantee,
            "agree": self.agree(module),
            "epsilon": gathered(defense.privacy.epsilon),
            "of one process": epsilon_of([(sigma, BATCH / 12, 2)], 1e-3, "rdp"),
        }

    def rare(self, most: int | None = None) -> Found:
        """Batches so small that many are empty, on one rank or on both."""
        defense = DPSGD(CLIP, noise_multiplier=0.0, seed=1, max_physical_batch_size=most)
        module, run, look = self.fit(
            defense, twin=LM(), data=loader(n=21, batch_size=1), max_epochs=1
        )
        sizes = [*zip(*gathered(look.sizes), strict=True)]
        zero = [float(v.norm()) == 0 for v in look.stages[Stage.SHARED]]
        return {
            "distance": max(look.distances(2.1)),
            "one empty": sum((a == 0) != (b == 0) for a, b in sizes),
            "both empty": sum(a == b == 0 for a, b in sizes),
            "released nothing": zero == [a == b == 0 for a, b in sizes],
            "steps": [run.global_step, defense.privacy.releases, len(module.sizes)],
            "pieces": sum(max(1, *own) for own in sizes),
            "agree": self.agree(module),
        }

    def refused(self, break_: Callable[[LM, Tensor], Any], **settings: Any) -> Found:
        """Rank 1 breaks something in its second step."""
        module = self.module()
        module.register_buffer("counter", torch.zeros(1))

        def training_step(batch: dict[str, Tensor], batch_idx: int) -> Any:
            loss = module.loss(batch)
            return break_(module, loss) if batch_idx == 1 and module.global_rank == 1 else loss

        module.training_step = training_step  # type: ignore[method-assign]
        defense = DPSGD(CLIP, **{"noise_multiplier": 1.0, "seed": 1, **settings})
        message = self.message(defense, module)
        finite = all(bool(local_part(p).isfinite().all()) for p in module.parameters())
        return {"message": message, "releases": defense.accountant.steps, "finite": finite}

    def no_stand_in(self) -> Found:
        """Rank 1 cannot load its own."""
        original = EmptyCollate.placeholder

        def fails(_: EmptyCollate) -> Any:
            raise OSError("the file is gone")

        try:
            if dist.get_rank() == 1:
                EmptyCollate.placeholder = fails  # type: ignore[method-assign]
            defense = DPSGD(CLIP, noise_multiplier=1.0, seed=1)
            self.fit(defense, data=loader(n=21, batch_size=1), max_epochs=3)
        except (DefenseError, OSError) as error:
            return {"message": str(error)}
        finally:
            EmptyCollate.placeholder = original  # type: ignore[method-assign]
        return {"message": "nothing was refused"}

    def changed(self) -> Found:
        """Rank 1 changes its gradients, or its shard of them, after they were reduced."""
        module = self.module()

        def on_after_backward() -> None:
            for p in module.parameters():
                if module.global_rank == 1 and p.grad is not None:
                    local_part(p.grad).mul_(2)

        module.on_after_backward = on_after_backward  # type: ignore[method-assign]
        return {"message": self.message(DPSGD(CLIP, noise_multiplier=1.0, seed=1), module)}

    def mixed(self) -> Found:
        """A network that mixes samples, where one rank has a sample more often than not."""
        message = self.message(
            DPSGD(CLIP, noise_multiplier=1.0, seed=1), self.module(Own(mixing=True)),
            data=loader(batch_size=1), max_epochs=2,
        )  # fmt: skip
        return {"message": message}

    def message(self, defense: Any, module: LM | None = None, **settings: Any) -> str:
        try:
            self.fit(defense, module, **settings)
        except DefenseError as error:
            return str(error)
        return "nothing was refused"

    def resume(self, folder: Path) -> Found:
        """A checkpoint, a ledger, and releases after the one and before a crash."""
        folder = Path(gathered(str(folder))[0]) / type(self.strategy()).__name__
        folder.mkdir(exist_ok=True)
        settings: Found = {"noise_multiplier": 1.0, "target_delta": 1e-3, "accountant": "rdp"}
        ledger, path = folder / "ledger", folder / "first.ckpt"
        first = DPSGD(CLIP, ledger=ledger, **settings)
        _, run, before = self.fit(first, look=True, max_epochs=1)
        run.save_checkpoint(path)
        run.fit_loop.max_epochs = 2
        _, _, lost = self.fit(DPSGD(CLIP, ledger=ledger, **settings), look=True, max_steps=2)
        second = DPSGD(CLIP, ledger=ledger, **settings)
        module, run, after = self.fit(second, look=True, max_epochs=2, ckpt_path=str(path))
        shared = [*before.stages[Stage.SHARED], *lost.stages[Stage.SHARED]]
        draws = torch.stack([*shared, *after.stages[Stage.SHARED]])
        alike = torch.corrcoef(draws).fill_diagonal_(0.0).abs().max()
        return {
            "counted": [first.accountant.steps, second.accountant.steps],
            "releases": second.releases,
            "steps": run.global_step,
            "lines": len(ledger.read_text().splitlines()),
            "files": sorted(p.name for p in folder.glob("ledger*")),
            "alike": float(alike),
            "epsilon": gathered(second.privacy.epsilon),
            "agree": self.agree(module),
        }

    def users(self) -> Found:
        """Clipped together with all of their rows, each on the one rank that has them."""
        return self.exact(
            "gpt2 tied", most=4, users=lambda example: user_of(example["input_ids"]),
            data=loader(batch_size=2),
        )  # fmt: skip

    def shares(self) -> Found:
        plain = {"noise_multiplier": 1.0, "seed": 1}
        data = loader()
        order = torch.randperm(N, generator=torch.Generator().manual_seed(dist.get_rank()))
        shuffled = DataLoader(Subset(data.dataset, order.tolist()), BATCH, shuffle=True)

        return {
            "whole": self.message(DPSGD(CLIP, **plain), use_distributed_sampler=False),
            "apart": self.message(DPSGD(CLIP, noise_multiplier=1.0 + dist.get_rank(), seed=1)),
            "shuffled": self.message(DPSGD(CLIP, **plain), data=shuffled),
        }

    def hardened_apart(self) -> Found:
        """One process alone turns its noise up."""
        defense = DPSGD(
            CLIP, noise_multiplier=20.0, target_epsilon=3.0, target_delta=1e-3, accountant="filter"
        )

        class Harden(Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
                if trainer.global_rank == 1:
                    defense.harden()

        message = self.message(defense, callbacks=[Harden()], max_steps=2)
        return {"message": message, "releases": defense.accountant.steps}


def broken(module: LM, loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


def counted(module: LM, loss: Tensor) -> Tensor:
    module.counter.add_(1)
    return loss


BREAKS: dict[str, Callable[[LM, Tensor], Any]] = {
    "nan": broken, "none": lambda module, loss: None, "buffer": counted,
    "sum": lambda module, loss: loss + next(module.parameters()).square().sum(),
}  # fmt: skip


def cases(runs: Runs, name: str, others: Runs) -> dict[str, Callable[[], Found]]:
    """Return the cases of one inner strategy, some of them also of another setting of it."""
    exact = {f"exact {model}": partial(runs.exact, model) for model in MODELS}
    mixed: Found = {"precision": "bf16-mixed", "max_steps": 2}
    return exact | {
        **{f"bf16-mixed {model}": partial(runs.exact, model, **mixed) for model in HALF},
        f"exact {name}": lambda: others.exact("gpt2 tied"),
        "exact one by one": runs.one_by_one,
        "pieces gpt2 tied": lambda: runs.exact("gpt2 tied", most=2),
        "pieces lora": lambda: runs.exact("lora", most=2, max_steps=2),
        f"pieces {name}": lambda: others.exact("gpt2 untied", most=2, max_steps=2),
        "no stand-in": runs.no_stand_in,
        "changed": runs.changed,
        "mixed": runs.mixed,
        "noise": runs.noise,
        "rare": runs.rare,
        "rare pieces": lambda: runs.rare(most=1),
        "resume": lambda: runs.resume(Path(sys.argv[1])),
        "users": runs.users,
        **{f"refused {kind}": partial(runs.refused, break_) for kind, break_ in BREAKS.items()},
    }


__all__ = ["LM", "Found", "Own", "Runs", "cases", "gpt2"]

"""The referee of DP trainings under test: seeded faults that it refutes, and alarms in sound runs.

    python -m benchmarks.defenses.referee                    # each fault three times
    python -m benchmarks.defenses.referee --sound 300 --steps 120 --look 20     # sound runs
    python -m benchmarks.defenses.referee --time             # its share of the steps' time
    python -m benchmarks.defenses.referee --slow --steps 2560       # steps until small faults show

A model of two layers between an embedding and a head, 512 texts, sample rate 1/16, sigma 1, 500
steps, a look every 160. ``opacus`` is Opacus' engine with per-sample hooks, or ghost clipping;
``own`` is a loop that clips and adds noise by itself, ``ours`` this package's DPSGD with ``check``.
Each fault changes one thing. With ``--slow`` a run ends at the first of 20, 40, 80, ... steps
after which it is refuted.
"""

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks.shared import parser_of, quieten
from lightning_fedleak.defenses import DPSGD, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip
from lightning_fedleak.evaluation.auditing import (
    PlantedGradients,
    PrivacyClaim,
    PrivacyVerdict,
    PrivateTrainingCheck,
)
from lightning_fedleak.trainers import DefendedLoop

SMOKE = (
    "--steps 60 --times 1 --only noise", "--steps 60 --sound 2", "--steps 60 --time",
    "--steps 20 --look 10 --slow",
)  # fmt: skip
WORDS, WIDTH, LENGTH, TEXTS, RATE, CLIP, SIGMA, DELTA = 64, 16, 8, 512, 1 / 16, 0.5, 1.0, 1e-5
BATCH = int(TEXTS * RATE)
Run = Callable[..., PrivacyVerdict]


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lora = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.emb(ids)
        states = states + self.lora(states)
        for block in self.blocks:
            states = states + torch.tanh(block(states))
        return self.head(states)


class Poisson(Sampler[list[int]]):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield (torch.rand(TEXTS) < self.rate).nonzero()[:, 0].tolist()

    def __len__(self) -> int:
        return round(1 / RATE)


class Repeating(Poisson):
    def __iter__(self) -> Iterator[list[int]]:
        return (torch.randint(TEXTS, (len(draw),)).tolist() for draw in super().__iter__())


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(0, WORDS, (TEXTS, LENGTH), generator=generator))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def watched(
    step: Any, model: nn.Module, optimizers: Any, loader: Any, steps: int, *,
    after: Any = None, look: int = 160, client: Literal["rank", "world"] = "world",
    shown: Any = None, slow: bool = False, **claim: Any,
) -> PrivacyVerdict:  # fmt: skip
    """Train for some steps under the referee; with ``slow`` until it refutes."""
    known = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "sample_rate": RATE}
    given = PrivacyClaim(
        **{**known, "divisor": BATCH, "delta": DELTA, **claim}, epsilon=shown, client=client
    )
    check, count = PrivateTrainingCheck(step, model, optimizers, given, every_n_steps=look), 0
    while count < steps:
        for batch in itertools.islice(check.watch(loader), steps - count):
            step(batch)
            if after:
                after()
            count += 1
            if slow and _is_time(count) and check.verdict().result == "refuted":
                return check.verdict()
    return check.verdict()


def _is_time(count: int) -> bool:
    """Whether a slow run asks for its verdict after so many steps: 20, 40, 80, ..."""
    return count % 20 == 0 and (count // 20).bit_count() == 1


def opacus(
    seed: int, steps: int, *, mode: str = "hooks", sigma: float = SIGMA, rate: float = RATE,
    poisson: bool = True, gamma: float = 1.0, delta: float = DELTA, forget: tuple[str, ...] = (),
    outside: bool = False, kind: str = "prv", look: int = 160,
) -> PrivacyVerdict:  # fmt: skip
    """A run of Opacus' engine."""
    from opacus import PrivacyEngine
    from opacus.schedulers import ExponentialNoise

    torch.manual_seed(seed)
    model = LM()
    adapter = [*model.lora.parameters()] if outside else []
    model.lora.requires_grad_(not outside)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = PrivacyEngine(accountant=kind)
    settings: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}
    private, optimizer, *criterion, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(trained, lr=0.1), grad_sample_mode=mode,
        data_loader=DataLoader(texts(), batch_size=int(TEXTS * rate)), noise_multiplier=sigma,
        max_grad_norm=CLIP, poisson_sampling=poisson, **settings,
    )  # fmt: skip
    optimizer.expected_batch_size = BATCH
    optimizers = [optimizer]
    if outside:
        model.lora.requires_grad_(True)
        optimizers.append(torch.optim.SGD(adapter, lr=0.1))
    if forget:
        _forget(model, optimizer, forget)

    def step(batch: Any) -> None:
        for one in optimizers:
            one.zero_grad()
        if criterion:
            logits, ids = private(batch[0])[:, :-1], batch[0][:, 1:]
            shape = (len(ids), LENGTH - 1)
            criterion[0](logits.flatten(0, 1), ids.flatten(), shape=shape).backward()
        else:
            loss_of(private, batch[0]).backward()
        for one in optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()

    def shown() -> float:
        return float(engine.get_epsilon(delta))

    after = ExponentialNoise(optimizer, gamma=gamma).step if gamma != 1 else None
    shown_by = shown if gamma == 1 and sigma else None
    return watched(step, private, optimizers, loader, steps, after=after, shown=shown_by, look=look)


def _forget(model: LM, optimizer: Any, names: tuple[str, ...]) -> None:
    """Let the norm leave parameters out."""
    left_out = {p for name, p in model.named_parameters() if name.startswith(names)}
    clip, known = optimizer.clip_and_accumulate, optimizer.params

    def short() -> None:
        counted = [p.grad_sample for p in known if p not in left_out]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in counted]).norm(dim=0)
        factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for p in known:
            p.summed_grad = torch.einsum("i,i...", factor, p.grad_sample)

    assert callable(clip)
    optimizer.clip_and_accumulate = short


def own(
    seed: int, steps: int, *, fault: str = "", micro: int = 1, look: int = 160,
    client: Literal["rank", "world"] = "world", slow: bool = False,
) -> PrivacyVerdict:  # fmt: skip
    """A run of a loop that clips and adds noise by itself."""
    from opacus import GradSampleModule

    torch.manual_seed(seed)
    model = LM()
    private = GradSampleModule(model)
    parameters = [*model.parameters()]
    model.register_buffer("mean", torch.zeros(WIDTH))
    adapter = {i for i, (name, _) in enumerate(model.named_parameters()) if "lora" in name}
    half = len(parameters) // 2
    groups = [parameters[:half], parameters[half:]] if fault == "two optimizers" else [parameters]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    noises = [torch.randn_like(p) * SIGMA * CLIP for p in parameters]
    pool = [[torch.randn_like(p) * SIGMA * CLIP for p in parameters] for _ in range(7)]
    stranger = torch.optim.SGD(model.head.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=3)
    last, loss = [torch.zeros_like(p) for p in parameters], torch.zeros(())
    sampler: Any = {"batch_sampler": (Repeating if fault == "repeating" else Poisson)(RATE)}
    if fault == "shuffled, drop_last":
        sampler = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    loader = DataLoader(texts(), **sampler)
    silent = {"no noise": range(len(parameters)), "two optimizers": range(half), "lora": adapter}

    def step(batch: list[Tensor]) -> None:
        nonlocal loss
        ids = batch[0][: len(batch[0]) // 8 * 8] if fault == "drop_last" else batch[0]
        ids = ids.repeat_interleave(2, 0) if fault in ("two views", "runs twice") else ids
        private.zero_grad()
        loss = loss_of(private, ids)
        loss.backward()
        raw = [p.grad.clone() for p in parameters]
        rows = len(ids) if fault == "mean" else 2 if fault == "two views" else micro
        pieces = [p.grad_sample.split(rows) for p in parameters]
        samples = [torch.stack([piece.mean(0) for piece in split]) for split in pieces]
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples])
        together = (CLIP / (norms.norm(dim=0) + 1e-6)).clamp(max=1)
        apart = (CLIP / (norms + 1e-6)).clamp(max=1)
        if fault == "squared":
            together = (CLIP / (norms.norm(dim=0).square() + 1e-6)).clamp(max=1)
        if fault == "seed":
            torch.manual_seed(1)
        drawn = int(torch.randint(len(pool), ()))
        for i, (p, sample) in enumerate(zip(parameters, samples, strict=True)):
            factor = apart[i] if fault == "layers" else together
            factor = torch.ones_like(factor) if fault == "lora" and i in adapter else factor
            total = torch.einsum("i,i...", factor, sample) * (BATCH if fault == "mean" else 1)
            noise = noises[i] if fault == "once" else torch.randn_like(p) * SIGMA * CLIP
            if fault == "pool":
                noise = pool[drawn][i]
            elif fault == "uniform":
                noise = (torch.rand_like(p) * 2 - 1) * 3**0.5 * SIGMA * CLIP
            elif fault == ".98 sigma":
                noise *= 0.98
            noise = noise / (4 if fault == "accumulation" else 1) * (i not in silent.get(fault, ()))
            if fault == "difference":
                noise, last[i] = noise - last[i], noise
            p.grad = (total + noise) / (BATCH / micro)
            if fault == "preconditioner":
                p.grad *= 1e-3 / (raw[i].abs() + 1e-3)
        for optimizer in optimizers:
            optimizer.step()
        beside(ids, raw, norms)

    @torch.no_grad()
    def beside(ids: Tensor, raw: list[Tensor], norms: Tensor) -> None:
        head = model.head.weight
        if fault == "head":
            head -= 1e-3 * raw[-1]
        elif fault == "signs":
            head -= 1e-3 * raw[-1].sign()
        elif fault == "stranger":
            head.grad = raw[-1]
            stranger.step()
        elif fault == "raw decay":
            head *= 1 - 1e-2 * float(norms.norm(dim=0).mean())
        elif fault == "momentum":
            state = optimizers[0].state[head]
            state["raw"] = 0.9 * state.get("raw", 0) + raw[-1]
        elif fault == "means":
            model.mean.mul_(0.9).add_(model.emb(ids).mean((0, 1)), alpha=0.1)
        elif fault == "average":
            model.mean.mul_(0.9).add_(head.mean(0), alpha=0.1)
        elif fault == "decay":
            head.mul_(1 - 1e-4)

    after = (lambda: plateau.step(loss)) if fault == "plateau" else None
    settings: dict[str, Any] = {"look": look, "client": client, "divisor": BATCH / micro}
    return watched(step, private, optimizers, loader, steps, after=after, slow=slow, **settings)


def ours(
    seed: int, steps: int, *, clip: float, look: int = 160, slow: bool = False
) -> PrivacyVerdict:
    """A run of this package's DPSGD with ``check``, that clips to ``clip`` times the clip norm."""
    torch.manual_seed(seed)
    model = LM().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dp = DPSGD(CLIP, noise_multiplier=SIGMA, target_delta=DELTA, check=PlantedGradients(look))
    loader, factors = DataLoader(texts(), batch_size=BATCH), Clip.factors
    Clip.factors = lambda self, norms: factors(self, norms / clip)  # type: ignore[method-assign]
    try:
        with DefendedLoop(model, optimizer, loader, [dp], steps=steps) as private:
            while dp.releases < steps:
                for batch in private:
                    private.loss(lambda rows: means_of(model, rows[0]), batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ends = slow and _is_time(dp.releases) and dp.verdict.result == "refuted"
                    if ends or dp.releases == steps:
                        return dp.verdict
    finally:
        Clip.factors = factors  # type: ignore[method-assign]
    return dp.verdict


def means_of(model: nn.Module, ids: Tensor) -> Tensor:
    return mean_of_sample_means(model(ids), ids, causal=True)


def _rank(rank: int, seeds: tuple[int, int], steps: int, look: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    verdict = own(seeds[rank], steps, look=look, client="rank")
    if rank == 0:
        torch.save([str(verdict), *vars(verdict).values()], f"{path}/verdict")
    dist.destroy_process_group()


def ranks(seed: int, steps: int, *, look: int = 160, apart: int = 0) -> PrivacyVerdict:
    """Two processes, each a client of its own."""
    with tempfile.TemporaryDirectory() as path:
        mp.spawn(_rank, ((seed, seed + apart), steps, look, path), nprocs=2)
        return PrivacyVerdict(*torch.load(f"{path}/verdict", weights_only=False)[1:])


FAULTS: dict[str, Run] = {
    "no noise": functools.partial(opacus, sigma=0.0),
    "noise once, at the start": functools.partial(own, fault="once"),
    "noise on one of two optimizers' parameters": functools.partial(own, fault="two optimizers"),
    "same seed on two ranks": ranks,
    "clipping of micro-batches of 4": functools.partial(own, micro=4),
    "clipping after the mean": functools.partial(own, fault="mean"),
    "rate of 3/32, accounted as 1/16": functools.partial(opacus, rate=1.5 * RATE),
    "shuffled batches accounted as Poisson": functools.partial(opacus, poisson=False),
    "LoRA outside of the hooks": functools.partial(opacus, outside=True),
    "LoRA neither clipped nor noised, one optimizer": functools.partial(own, fault="lora"),
    "noise divided by 4 accumulated batches": functools.partial(own, fault="accumulation"),
    "epsilon of delta 1e-3 shown as of 1e-5": functools.partial(opacus, delta=1e-3),
    "last piece of a batch dropped": functools.partial(own, fault="drop_last"),
    "norm without the embedding": functools.partial(opacus, forget=("emb",)),
    "scheduler that lowers noise by .1% a step": functools.partial(opacus, gamma=0.999),
    "the same seed in each step": functools.partial(own, fault="seed"),
    "each layer clipped to the whole norm": functools.partial(own, fault="layers"),
    "shuffled, drop_last, accounted as Poisson": functools.partial(
        own, fault="shuffled, drop_last"
    ),
    "norm without one bias": functools.partial(opacus, forget=("blocks.1.bias",)),
    "raw gradients added to the head": functools.partial(own, fault="head"),
    "signs of raw gradients added to the head": functools.partial(own, fault="signs"),
    "head stepped by an optimizer that was not passed": functools.partial(own, fault="stranger"),
    "weight decay times the raw norm": functools.partial(own, fault="raw decay"),
    "raw gradients in the optimizer's state": functools.partial(own, fault="momentum"),
    "release divided by raw gradients": functools.partial(own, fault="preconditioner"),
    "noise minus that of the step before": functools.partial(own, fault="difference"),
    "a buffer of batch means": functools.partial(own, fault="means"),
    "clip factor C / norm^2": functools.partial(own, fault="squared"),
    "drawn with replacement": functools.partial(own, fault="repeating"),
    "rate lowered by the batches' loss": functools.partial(own, fault="plateau"),
}
SLOW: dict[str, Run] = {
    "our DPSGD, clipping to 1.1 C": functools.partial(ours, clip=1.1),
    "noise of .98 sigma": functools.partial(own, fault=".98 sigma"),
    "noise drawn from a pool of seven": functools.partial(own, fault="pool"),
    "uniform noise of the same deviation": functools.partial(own, fault="uniform"),
}
GHOST, RDP = functools.partial(opacus, mode="ghost"), functools.partial(opacus, kind="rdp")
OWN: list[Run] = [functools.partial(own, fault=f) for f in ("", "two views", "average", "decay")]
SOUND: list[Run] = [opacus, GHOST, RDP, opacus, GHOST, RDP, *OWN]


def main() -> None:
    options = parser_of(
        __doc__, steps=500, look=(160, "steps from one look to the next"), times=3, time=False,
        only=("", "faults that have this in their name"), sound=(0, "so many sound runs instead"),
        slow=False,
    ).parse_args()  # fmt: skip
    quieten()
    if options.slow:
        for name, run in SLOW.items():
            if options.only in name:
                verdict = run(0, options.steps, look=options.look, slow=True)
                count = verdict.looks * options.look
                print(f"| {name} | {verdict.result} | {count} steps |\n{verdict}", flush=True)
        return None
    if options.time:
        return _time(options.steps)
    if options.sound:
        alarms = 0
        for seed in range(options.sound):
            verdict = SOUND[seed % len(SOUND)](1000 + seed, options.steps, look=options.look)
            alarms += verdict.result == "refuted"
            if verdict.result == "refuted" or seed % 50 < 2:
                print(f"run {seed}, {alarms} alarms so far: {verdict}", flush=True)
        return print(f"{alarms} alarms in {options.sound} sound runs of {options.steps} steps")
    for name, run in FAULTS.items():
        if options.only not in name:
            continue
        verdicts = [run(seed, options.steps, look=options.look) for seed in range(options.times)]
        count = sum(verdict.result == "refuted" for verdict in verdicts)
        print(f"| {name} | {count} of {len(verdicts)} |", flush=True)
        for check in verdicts[0].checks:
            if check.result == "refuted":
                print(f"    {check.name}: {check.evidence}")
    return None


def _time(steps: int) -> None:
    """Print the processor time of a step, watched and not, in turn; the first pair is dropped."""
    ratios = []
    for seed in range(6):
        seconds = []
        for every_n_steps in (160, 10**9):
            start = time.process_time()
            own(seed, steps, look=every_n_steps)
            seconds.append(time.process_time() - start)
        ratios.append(seconds[0] / seconds[1])
        print(f"watched {1e3 * seconds[0] / steps:.2f} ms, not {1e3 * seconds[1] / steps:.2f} ms")
    print(f"a watched step takes {statistics.median(ratios[1:]):.3f} of one that is not")


if __name__ == "__main__":
    main()

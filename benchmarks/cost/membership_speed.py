"""What a membership canary costs: closed forms against the literal layers, in one run, in turn.

    python -m benchmarks.cost.membership_speed                     # 64 targets, 32 x 128, d = 768
    python -m benchmarks.cost.membership_speed --attacks attention --hidden 4096 --repeats 2
    python -m benchmarks.cost.membership_speed --model DIR --layer 6 --text FILE

Hidden states are real where ``--model`` and ``--text`` (a sentence a line) are given; else they
are drawn: tokens around a common mean with a few large coordinates. Half of the targets are in the
batch. One thread; a line holds the core's own time (the fastest of ``--repeats`` calls, and the
median), the fastest by the clock, and the ratio of core time to the line it is compared with.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Query
from lightning_fedleak.attacks.membership.attention import AttentionMembership, AttentionSettings
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText

SMOKE = ("--targets 4 --shape 2x8 --hidden 32 --repeats 1",)


@dataclass(frozen=True)
class Case:
    """A batch at one layer and targets for it."""

    hidden: Tensor
    mask: Tensor | None
    targets: Tensor
    upstream: Tensor

    @property
    def name(self) -> str:
        b, length, d = self.hidden.shape
        return f"{len(self.targets)} targets, {b} x {length} tokens, d = {d}"


@dataclass(frozen=True)
class Times:
    """Milliseconds of several calls."""

    core: list[float]
    wall: list[float]


def clock(
    calls: dict[str, Callable[[], object]], repeats: int, warm_up: bool = True
) -> dict[str, Times]:
    """Times of each call; they take turns, so that other load on the machine hits all alike."""
    times = {name: Times([], []) for name in calls}
    for turn in range(max(1, repeats) + warm_up):
        for name, call in calls.items():
            core, wall = time.process_time(), time.perf_counter()
            call()
            if turn or not warm_up:
                times[name].core.append(1e3 * (time.process_time() - core))
                times[name].wall.append(1e3 * (time.perf_counter() - wall))
    return times


def show(results: dict[str, Times], base: str) -> None:
    for name, times in results.items():
        fastest = min(times.core)
        print(
            f"  {name:40s} core {fastest:9.2f} ms (median {statistics.median(times.core):.2f})"
            f"   wall {min(times.wall):9.2f}   {min(results[base].core) / fastest:7.2f}x"
        )


def drawn(arguments: argparse.Namespace) -> Case:
    g = torch.Generator().manual_seed(0)
    b, length = (int(x) for x in arguments.shape.split("x"))
    common = torch.randn(arguments.hidden, generator=g)
    common[:3] *= 30
    hidden = common + torch.randn(b, length, arguments.hidden, generator=g)
    others = common + torch.randn(b * length, arguments.hidden, generator=g)
    return case_of(hidden, None, others, arguments.targets)


def case_of(hidden: Tensor, mask: Tensor | None, others: Tensor, targets: int) -> Case:
    g = torch.Generator().manual_seed(1)
    inside = hidden.flatten(0, 1) if mask is None else hidden[mask != 0]
    half = targets // 2
    chosen = torch.cat(
        [
            inside[torch.randperm(len(inside), generator=g)[: targets - half]],
            others[torch.randperm(len(others), generator=g)[:half]],
        ]
    )
    return Case(hidden, mask, chosen, torch.randn(hidden.shape[:2], generator=g))


def real(arguments: argparse.Namespace) -> Case:
    from transformers import AutoModel, AutoTokenizer

    b, length = (int(x) for x in arguments.shape.split("x"))
    opened = gzip.open if arguments.text.suffix == ".gz" else open
    with opened(arguments.text, "rt") as lines:
        text = " ".join(line.strip() for line in lines if line.strip())[: 60 * b * length]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    ids = ids[: 2 * b * length].view(2 * b, length)
    model = AutoModel.from_pretrained(arguments.model, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[arguments.layer]
    return case_of(states[:b], None, states[b:].flatten(0, 1), arguments.targets)


def fc(case: Case, repeats: int) -> None:
    """FC-Token: the closed form with and without its filter; the 2-norm filter; the real layers."""
    print(f"FC, {case.name}")
    hidden, mask, targets, upstream = case.hidden, case.mask, case.targets, case.upstream
    attacks = {
        f"{precision}{', every distance' if not prefilter else ''}": FCMembership(
            1, precision=precision, prefilter=prefilter
        )
        for precision in ("fp32", "bf16")
        for prefilter in (True, False)
    }
    calls: dict[str, Callable[[], object]] = {
        f"closed form, {name}": lambda a=a: a.gradient(targets, hidden, mask, upstream)
        for name, a in attacks.items()
    }
    rows = hidden.flatten(0, 1)
    calls["torch.cdist(p=1) alone"] = lambda: torch.cdist(targets, rows, p=1)
    calls["one matrix product of that size alone"] = lambda: targets @ rows.T
    show(clock(calls, repeats), "torch.cdist(p=1) alone")

    attack = attacks["fp32"]

    def literal() -> Tensor:
        layers = attack.craft(targets[0])
        (layers(hidden, mask) * upstream[..., None]).sum().backward()
        return layers.bias.grad

    one = {
        "crafted layers, autograd, 1 target": literal,
        "closed form, 1 target": lambda: attack.gradient(targets[:1], hidden, mask, upstream),
    }
    show(clock(one, max(2, repeats // 3)), "crafted layers, autograd, 1 target")
    both = attack.guess(literal()[None]), attack.guess(one["closed form, 1 target"]().sum(0))
    assert torch.equal(both[0].scores, both[1].scores), "the two disagree"

    distance = torch.cdist(targets, rows, p=1)
    flat = torch.cdist(targets, rows)
    limit = attack.settings(targets)[0][:, -1:]
    from lightning_fedleak.attacks.membership.l1_distance import maybe_near

    zones = attack.settings(targets)[1]
    kept = maybe_near(rows, targets, limit[:, 0], zones, rows.abs().sum(1))
    print(
        f"  pairs within the highest rung {(distance < limit).float().mean():.4f}, left by the "
        f"filter {kept.float().mean():.4f}, by the 2-norm {(flat < limit).float().mean():.4f}"
    )


def attention(case: Case, repeats: int) -> None:
    """Closed form as by default, its memory; the paper's setting against Algorithm 1 literally."""
    print(f"Attention, {case.name}")
    hidden, mask, upstream = case.hidden, case.mask, case.upstream
    b, length, d = hidden.shape
    ours = AttentionMembership(1, PublicText([[1, 2]]), gamma=0.7)  # no text is read here
    identity = {"mean": torch.zeros(d), "matrix": torch.eye(d)}
    state = {f"whitening.{name}": value for name, value in identity.items()}
    numbers = {"level": ours.design.level_of_gamma, "rate": 0.01, "response": 1.0}
    numbers |= {"prepared_at": 0, "d": d}
    state |= {name: torch.tensor(value) for name, value in numbers.items()}
    state["fingerprint"] = ours._fingerprint()
    ours.load_state_dict(state | {"gammas": torch.zeros(0)})  # the cost does not depend on values
    g = torch.Generator().manual_seed(2)
    sentences = torch.arange(len(case.targets)) % b
    places = torch.randint(length, (len(case.targets),), generator=g)
    query = Query(torch.zeros(len(places), length), None, places)
    targets = ours.embed(hidden[sentences], query)
    grown = peak_growth(lambda: ours.gradient(targets, hidden, mask, upstream))
    calls: dict[str, Callable[[], object]] = {
        f"closed form, {n} targets": lambda n=n: ours.gradient(targets[:n], hidden, mask, upstream)
        for n in sorted({1, len(targets)})
    }
    show(clock(calls, repeats), f"closed form, {len(targets)} targets")
    print(f"  peak memory of {len(targets)} targets above what was there before: {grown:.0f} MB")

    asked = Query(torch.zeros(1, length), None, places[:1])
    plain = AttentionSettings(whiten=False, beta="authors", score="coordinates")
    pair = AttentionMembership(1, gamma=1.0, attention=plain)
    expected = pair.design.heads(d, hidden).expected_response(hidden[:1], None, places[:1])
    gamma = 0.5 * float(expected.abs().max())
    paper = AttentionMembership(1, gamma=gamma, attention=replace(plain, variant="paper"))
    ours = AttentionMembership(1, gamma=gamma, attention=replace(plain, omit_random=True))
    target = ours.embed(hidden[:1], asked)

    def literal() -> Tensor:
        layers = paper.craft(target[0])
        (layers(hidden, mask) * upstream[..., None]).sum().backward()
        return layers.bias.grad

    def closed() -> Tensor:
        return ours.gradient(target, hidden, mask, upstream)

    found = []
    one = {
        "Algorithm 1 literally, craft and autograd": lambda: found.append(literal()),
        "the same guess in closed form": closed,
    }
    # The pseudo-inverses of wide layers take minutes: once, without a warm-up.
    show(clock(one, repeats // 3, warm_up=d <= 2048), "Algorithm 1 literally, craft and autograd")
    both = paper.guess(found[0][None]), ours.guess(closed().sum(0))
    assert torch.equal(both[0].members, both[1].members), "the two disagree"
    (seen, *_) = ours.design.heads(d, hidden).attentions(hidden[:1], None, target)
    kept = len(seen.coordinates(gamma)[0]) / length
    print(f"  both guess {both[0].members.tolist()}; tokens left by the filter: {kept:.3f}")


def peak_growth(call: Callable[[], object]) -> float:
    """Megabytes of tensors that a call has at most, above those that were there before."""
    with torch.profiler.profile(profile_memory=True) as seen:
        call()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


ATTACKS: dict[str, Callable[[Case, int], None]] = {"fc": fc, "attention": attention}
"""One function for each attack: prints its own lines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names, comma-separated")
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--shape", default="32x128", help="sentences x tokens")
    parser.add_argument("--hidden", type=int, default=768, help="width of drawn hidden states")
    parser.add_argument("--model", help="folder or name: real hidden states in place of drawn ones")
    parser.add_argument("--text", type=Path, help="text for --model, plain or .gz")
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text go together")
    torch.set_num_threads(1)
    case = drawn(arguments) if arguments.model is None else real(arguments)
    for name in arguments.attacks.split(","):
        if name not in ATTACKS:
            parser.error(f"no attack {name!r}; there are {', '.join(ATTACKS)}")
        ATTACKS[name](case, arguments.repeats)


if __name__ == "__main__":
    main()

"""Prompts of a reinforcement learning: each number recomputed in float64, by loops."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.attacks.memorization import PolicyDrift, RewardGain
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import BatchError
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Completions, Text, texts_in, token_log_probs
from lightning_fedleak.trainers.rollouts import Rollouts
from tests.helpers.models import tiny_llama

END, PAD, COUNT = 1, 0, 3


def few_letters(completions: list[str], prompts: list[str], bonus: list[int], **_: Any) -> Any:
    rows = zip(completions, prompts, bonus, strict=True)
    return [len({*text}) / (len(prompt) + extra) for text, prompt, extra in rows]


def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if len(ids) == 1 else float(len(ids)) for ids in completion_ids]


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2 + ord(c) % 90 for c in one] for one in text]}

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(30 + n) for n in row if n > END) for row in ids]


def trainer_of(*functions: Any, weights: tuple[float, ...] = (1.0,), **more: Any) -> Any:
    config = GenerationConfig(
        max_new_tokens=12, do_sample=True, pad_token_id=PAD, eos_token_id=END, top_k=0
    )
    sizes = {"num_generations": COUNT, "steps_per_generation": 2, "num_iterations": 3}
    return SimpleNamespace(
        args=SimpleNamespace(**sizes, generation_batch_size=12), reward_funcs=list(functions),
        reward_weights=torch.tensor(weights), processing_class=Letters(), generation_config=config,
        state=SimpleNamespace(global_step=0), **more,
    )  # fmt: skip


EXAMPLES = [
    {"prompt": text, "bonus": n}
    for n, text in enumerate(
        ["the bakery", "a piano is here", "seventeen cards", "no", "Odile " * 4]
    )
]


def models() -> tuple[Any, Any]:
    """Return a model and another one near it, which write an end often."""
    now, base = tiny_llama(seed=0), tiny_llama(seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in now.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return now, base


def prompts_in(rollouts: Rollouts) -> list[Text]:
    return texts_in(rollouts.read(EXAMPLES))


def test_a_batch_has_each_prompt_once() -> None:
    rollouts = Rollouts(trainer_of(few_letters))
    group = [example for example in EXAMPLES for _ in range(COUNT)]
    texts = texts_in(rollouts.read(group + EXAMPLES[:2]))
    ids = Letters()(text=[str(example["prompt"]) for example in EXAMPLES])["input_ids"]
    assert [text.ids.tolist() for text in texts] == ids
    assert all(torch.equal(text.ids, text.labels) for text in texts)
    assert rollouts.repeats == 6
    for wrong in ({"text": "no prompt"}, *({"prompt": "a", k: None} for k in ("image", "images"))):
        with pytest.raises(BatchError, match="no prompt, or has an image"):
            rollouts.read([wrong])


def test_completions_are_drawn_by_the_seed_and_leave_no_trace() -> None:
    now, base = models()
    rollouts = Rollouts(trainer_of(few_letters))
    prompts, anatomy = prompts_in(rollouts), find_anatomy(now)
    now.train()
    weights = {name: value.clone() for name, value in now.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    first, again, other = (rollouts.write(anatomy, prompts, seed) for seed in (1, 1, 2))
    elsewhere = rollouts.write(find_anatomy(base), prompts, 1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert now.training
    assert all(torch.equal(value, weights[name]) for name, value in now.state_dict().items())
    contents = [[row.content for row in rows] for rows in (first, again, other, elsewhere)]
    assert contents[0] == contents[1] != contents[2]
    assert contents[0] != contents[3]
    for prompt, written in zip(prompts, first, strict=True):
        assert len(written.alone) == COUNT
        for one in written.alone:
            n = len(prompt.ids)
            assert one.ids[:n].tolist() == prompt.ids.tolist()
            assert (one.labels[:n] == -100).all()
            assert torch.equal(one.labels[n:], one.ids[n:])
            assert 1 <= len(one.ids) - n <= 12
            assert END not in one.ids[n:-1].tolist()


def log_ratio(now: Any, base: Any, one: Text) -> tuple[float, int]:
    """Return the sum of ``lp0 - lp`` over a completion, token by token, and its length."""
    total, count = 0.0, 0
    for place in range(1, len(one.ids)):
        if one.labels[place] == -100:
            continue
        count += 1
        for model, sign in ((now, -1), (base, 1)):
            with torch.no_grad():
                logits = model(input_ids=one.ids[None, :place]).logits[0, -1]
            total += sign * float(logits.log_softmax(0)[one.ids[place]])
    return total, count


def test_drift_is_the_mean_log_ratio_of_the_bases_completions() -> None:
    now, base = models()
    rollouts = Rollouts(trainer_of(few_letters))
    written = rollouts.write(find_anatomy(base), prompts_in(rollouts), 3)
    assert len({len(row.ids) for row in written}) > 1
    answers = [token_log_probs(find_anatomy(model), written) for model in (now, base)]
    released = ReleasedModel(answers[0], answers[1], torch.ones(len(written)))
    scores = PolicyDrift().run(Observation(released=released)).scores  # type: ignore[attr-defined]
    now, base = now.double().eval(), base.double().eval()
    for score, row in zip(scores.tolist(), written, strict=True):
        sums = [log_ratio(now, base, one) for one in row.alone]
        total, count = (sum(values) for values in zip(*sums, strict=True))
        assert score == pytest.approx(total / count, abs=1e-5)
    assert scores.abs().min() > 1e-3


def test_rewards_are_weighed_as_the_trainer_weighs_them() -> None:
    now, base = models()
    rollouts = Rollouts(trainer_of(few_letters, length, weights=(2.0, 0.5)))
    prompts = prompts_in(rollouts)
    rollouts.keep(prompts)
    rewards = []
    for model in (base, now):
        written = rollouts.write(find_anatomy(model), prompts, 3)
        rewards.append(rollouts.reward(prompts, written))
        for example, prompt, row, reward in zip(
            EXAMPLES, prompts, written, rewards[-1].tolist(), strict=True
        ):
            total = 0.0
            for one in row.alone:
                ids = one.ids[len(prompt.ids) :].tolist()
                [text] = Letters().batch_decode([ids], skip_special_tokens=True)
                divisor = len(str(example["prompt"])) + int(example["bonus"])  # type: ignore[call-overload]
                total += 2 * len({*text}) / divisor + 0.5 * (len(ids) if len(ids) > 1 else 0)
            assert reward == pytest.approx(total / COUNT, rel=1e-12)
    released = released_with(torch.stack(rewards))
    assert RewardGain().score(released).tolist() == (rewards[1] - rewards[0]).tolist()
    part = released.rows(torch.tensor([3, 1]))
    assert RewardGain().score(part).tolist() == (rewards[1] - rewards[0])[[3, 1]].tolist()


def released_with(rewards: Tensor | None) -> ReleasedModel:
    values = torch.zeros(len(EXAMPLES), 2)
    said = TokenSnapshot(values, values, values, values > 0, values == 0)
    return ReleasedModel(said, said, torch.ones(len(EXAMPLES)), rewards=rewards)


def test_rewards_that_are_not_known_are_unusable() -> None:
    with pytest.raises(UnusableObservation, match="no reward was asked"):
        RewardGain().score(released_with(None))
    rewards = torch.zeros(2, len(EXAMPLES), dtype=torch.float64)
    rewards[1, 2] = torch.nan
    with pytest.raises(UnusableObservation, match="rewards of the model's completions"):
        RewardGain().score(released_with(rewards))

    def fails(**_: Any) -> None:
        raise KeyError("a private text")

    rollouts = Rollouts(trainer_of(fails))
    prompts = prompts_in(rollouts)
    written = [Completions.of_prompt(prompt.ids, [prompt.ids] * COUNT) for prompt in prompts]
    with pytest.raises(UnusableObservation, match=r"^a reward function fails: KeyError$"):
        rollouts.reward(prompts, written)


@pytest.mark.parametrize(
    ("functions", "more", "unasked", "no_rewards"),
    [
        ((few_letters,), {}, "", ""),
        ((few_letters, torch.nn.Linear(1, 1)), {}, "", "(Linear) is a model or"),
        ((Letters(),), {}, "", "(Letters) is a model or"),
        ((few_letters,), {"use_vllm": True}, "use_vllm is set", ""),
        ((few_letters,), {"tools": [print]}, "tools is set", ""),
        ((few_letters,), {"rollout_func": print}, "rollout_func is set", ""),
    ],
)
def test_what_cannot_be_asked_is_said(functions, more, unasked, no_rewards) -> None:
    rollouts = Rollouts(trainer_of(*functions, weights=(1.0,) * len(functions), **more))
    for said, expected in (
        (rollouts.why_not_sampled(), unasked),
        (rollouts.why_no_rewards(), no_rewards),
    ):
        assert expected in said
        assert bool(expected) == bool(said)

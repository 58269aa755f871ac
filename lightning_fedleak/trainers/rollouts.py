"""Prompts of TRL's GRPO and RLOO: read from batches, completed by the model, and rewarded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import Completions, Text

_OWN_COLUMNS = {"prompt", "completion", "completion_ids"}  # TRL passes them by other names
_WRITERS = "use_vllm", "tools", "environment_factories", "rollout_func"
"""Attributes of a trainer whose completions are not from the model's ``generate`` alone."""


class Rollouts:
    """Complete and reward prompts as a trainer does, without training on them.

    Args:
        trainer: TRL's ``GRPOTrainer`` or ``RLOOTrainer``.

    Attributes:
        count: The number of completions of each prompt, that of a training step.
        repeats: The number of times that the trainer passes a batch of prompts to a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._examples: dict[bytes, Any] = {}
        self._is_drawn = False
        self.count = int(trainer.args.num_generations)
        self.repeats = int(trainer.args.steps_per_generation * trainer.args.num_iterations)

    def why_unasked(self) -> str:
        """Return why completions cannot be drawn as the trainer draws them; empty if they can."""
        trainer = self._trainer
        return next((f"{name} is set" for name in _WRITERS if getattr(trainer, name, None)), "")

    def why_no_rewards(self) -> str:
        """Return why rewards cannot be computed again; empty if they can."""
        for function in self._trainer.reward_funcs:
            if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
                kind = type(function).__name__
                return f"a reward function ({kind}) is a model or may depend on something else"
        return ""

    def read(self, batch: Any) -> TokenBatch:
        """Return the different prompts of a batch of examples; all of their tokens are labels.

        Raises:
            BatchError: An example has no prompt, or has images.
        """
        examples = dict[object, Any]()
        for example in batch:
            if not isinstance(example, Mapping) or "prompt" not in example or "image" in example:
                raise BatchError("an example has no prompt of text alone")
            examples.setdefault(repr(example["prompt"]), example)
        rows = [torch.tensor(self._tokenize(example["prompt"])) for example in examples.values()]
        if not self._is_drawn:
            named = zip(rows, examples.values(), strict=True)
            self._examples |= {Text(row, row).content: example for row, example in named}
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return TokenBatch(ids, ids.masked_fill(mask == 0, IGNORE_INDEX), mask, "causal")

    def _tokenize(self, prompt: Any) -> list[int]:
        tokenizer = self._trainer.processing_class
        if isinstance(prompt, str):
            return [*tokenizer(text=[prompt])["input_ids"][0]]
        settings = getattr(self._trainer, "chat_template_kwargs", None) or {}
        encoded = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **settings
        )
        return [*encoded["input_ids"]]

    def keep(self, prompts: Iterable[Text]) -> None:
        """Keep the examples of these prompts only, and store no others from now on."""
        self._examples = {prompt.content: self._examples[prompt.content] for prompt in prompts}
        self._is_drawn = True

    def write(self, anatomy: Anatomy, prompts: Sequence[Text], seed: int) -> list[Completions]:
        """Return the model's completions of each prompt, sampled with the trainer's settings.

        Random states and the model do not change. The same seed draws the same numbers.

        Args:
            anatomy: The anatomy of the model that writes.
            prompts: N prompts.
            seed: The seed of the draws.
        """
        config, answers = self._trainer.generation_config, dict[int, Completions]()
        ends = torch.tensor([] if config.eos_token_id is None else config.eos_token_id).view(-1)
        at_once = max(1, self._trainer.args.generation_batch_size // self.count)
        pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row].ids))
        writer: Any
        with model_runs.undisturbed(anatomy) as writer, torch.no_grad():
            torch.manual_seed(seed)
            for rows in (order[n : n + at_once] for n in range(0, len(order), at_once)):
                starts = [prompts[row].ids for row in rows for _ in range(self.count)]
                ids = pad_left(starts, padding_value=config.pad_token_id).to(anatomy.device)
                mask = pad_left([torch.ones_like(start) for start in starts]).to(anatomy.device)
                inputs = {"input_ids": ids, "attention_mask": mask, "generation_config": config}
                completions = writer.generate(**inputs).cpu()[:, ids.shape[1] :]
                parts = [_until_end(completion, ends) for completion in completions]
                for i, row in enumerate(rows):
                    group = parts[i * self.count : (i + 1) * self.count]
                    answers[row] = Completions.of_prompt(prompts[row].ids, group)
        return [answers[row] for row in range(len(prompts))]

    def reward(self, prompts: Sequence[Text], written: Sequence[Completions]) -> Tensor:
        """Return (N,) float64 mean rewards of completions, weighted as the trainer weights them.

        Raises:
            UnusableObservation: A reward function fails.
        """
        trainer = self._trainer
        examples = [self._examples[p.content] for p in prompts for _ in range(self.count)]
        ids = [text.ids[text.labels != IGNORE_INDEX] for row in written for text in row.alone]
        answers = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(examples[0]["prompt"], str):
            answers = [[{"role": "assistant", "content": text}] for text in answers]
        arguments = {
            **{n: [x[n] for x in examples] for n in examples[0].keys() - _OWN_COLUMNS},
            "prompts": [x["prompt"] for x in examples],
            "completions": answers,
            "completion_ids": [row.tolist() for row in ids],
            "trainer_state": copy.deepcopy(trainer.state),
            **dict.fromkeys(("log_extra", "log_metric"), lambda *_: None),
        }
        try:
            with preserve_process():
                rows = [function(**arguments) for function in trainer.reward_funcs]
            numbers = [[torch.nan if x is None else float(x) for x in row] for row in rows]
            values = torch.tensor(numbers, dtype=torch.float64).view(len(rows), -1, self.count)
        except Exception as error:  # a message of the user's function may quote a text
            raise UnusableObservation(f"a reward function fails: {type(error).__name__}") from error
        sums: Tensor = (values * trainer.reward_weights.cpu().double()[:, None, None]).nansum(0)
        return sums.masked_fill(values.isnan().all(0), torch.nan).mean(1)


def _until_end(written: Tensor, ends: Tensor) -> Tensor:
    """Return the tokens of a completion up to and with its first end token."""
    found = torch.isin(written, ends).nonzero()
    return written[: int(found[0]) + 1] if len(found) else written

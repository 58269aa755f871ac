"""Prompts of TRL's GRPO and RLOO: read from batches, completed by the model, and rewarded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import Completions, Text

_OWN_COLUMNS = ("prompt", "completion", "completion_ids")  # which TRL passes by other names


class Rollouts:
    """Do what a trainer does with prompts, apart from its training.

    Args:
        trainer: TRL's ``GRPOTrainer`` or ``RLOOTrainer``.

    Attributes:
        count: completions of each prompt, as many as a training step has.
        repeats: how often the trainer passes each batch of prompts to a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._examples: dict[bytes, Mapping[str, Any]] = {}
        self._is_drawn = False
        self.count = int(trainer.args.num_generations)
        self.repeats = int(trainer.args.steps_per_generation * trainer.args.num_iterations)

    def why_unasked(self) -> str:
        """Return why the model cannot write here as the trainer lets it write; empty if it can."""
        trainer = self._trainer
        others = {
            "vLLM writes the completions": getattr(trainer, "use_vllm", False),
            "continuous batching writes the completions": getattr(
                trainer, "use_transformers_continuous_batching", False
            ),
            "tools write parts of the completions": getattr(trainer, "tools", None)
            or getattr(trainer, "environment_factories", None),
            "a rollout_func writes the completions": getattr(trainer, "rollout_func", None),
        }
        return next((why for why, is_so in others.items() if is_so), "")

    def why_no_rewards(self) -> str:
        """Return why rewards cannot be asked for again; empty if they can."""
        for function in self._trainer.reward_funcs:
            if isinstance(function, nn.Module):
                return "a reward function is a model"
            if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
                return "a reward function is no plain function, and may depend on more"
        return ""

    def read(self, batch: Any) -> TokenBatch:
        """Return the prompts of a batch of examples, each once, all of whose tokens are labels.

        Raises:
            BatchError: an example has no prompt of text.
        """
        examples: dict[tuple[int, ...], Mapping[str, Any]] = {}
        newest: Any = None
        for example in batch:
            if not isinstance(example, Mapping) or "prompt" not in example:
                raise BatchError("an example has no prompt")
            if {"image", "images"} & example.keys():
                raise BatchError("a prompt has images, which the model is not asked about")
            if newest is None or example["prompt"] != newest:  # a group has one prompt
                newest = example["prompt"]
                examples.setdefault(tuple(self._tokenize(newest)), example)
        rows = [torch.tensor(ids) for ids in examples]
        if not self._is_drawn:
            named = zip(rows, examples.values(), strict=True)
            self._examples |= {Text(ids, ids).content: example for ids, example in named}
        pad = torch.nn.utils.rnn.pad_sequence
        return TokenBatch(
            pad(rows, batch_first=True),
            pad(rows, batch_first=True, padding_value=IGNORE_INDEX),
            pad([torch.ones_like(ids) for ids in rows], batch_first=True),
            "causal",
        )

    def _tokenize(self, prompt: Any) -> list[int]:
        tokenizer = self._trainer.processing_class
        if isinstance(prompt, str):
            return [*tokenizer(text=[prompt])["input_ids"][0]]
        encoded = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True,
            **(getattr(self._trainer, "chat_template_kwargs", None) or {}),
        )  # fmt: skip
        return [*encoded["input_ids"]]

    def keep(self, prompts: Iterable[Text]) -> None:
        """Forget all examples but those of some prompts; further ones are not remembered."""
        kept = {prompt.content for prompt in prompts}
        self._examples = {name: one for name, one in self._examples.items() if name in kept}
        self._is_drawn = True

    def write(self, anatomy: Anatomy, prompts: Sequence[Text], seed: int) -> list[Completions]:
        """Return the model's completions of each prompt, by the trainer's settings of sampling.

        Random states and the model are left as they were. The same seed draws the same numbers.

        Args:
            anatomy: of the model that writes.
            prompts: N prompts.
            seed: of the draws.
        """
        config = self._trainer.generation_config
        ends = torch.tensor(config.eos_token_id if config.eos_token_id is not None else []).view(-1)
        at_once = max(1, self._trainer.args.generation_batch_size // self.count)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row].ids))
        answers: dict[int, Completions] = {}
        writer: Any
        with model_runs.undisturbed(anatomy) as writer, torch.no_grad():
            torch.manual_seed(seed)
            for rows in (order[n : n + at_once] for n in range(0, len(order), at_once)):
                width = max(len(prompts[row].ids) for row in rows)
                ids = torch.full((len(rows), width), int(config.pad_token_id))
                mask = torch.zeros_like(ids)
                for place, row in enumerate(rows):
                    ids[place, width - len(prompts[row].ids) :] = prompts[row].ids
                    mask[place, width - len(prompts[row].ids) :] = 1
                written = writer.generate(
                    input_ids=ids.repeat_interleave(self.count, 0).to(anatomy.device),
                    attention_mask=mask.repeat_interleave(self.count, 0).to(anatomy.device),
                    generation_config=config,
                )[:, width:].cpu()
                is_end = torch.isin(written, ends)
                lengths = (is_end.long().cumsum(1) - is_end.long() == 0).sum(1).tolist()
                parts = [one[:n] for one, n in zip(written, lengths, strict=True)]
                for place, row in enumerate(rows):
                    group = parts[place * self.count : (place + 1) * self.count]
                    answers[row] = Completions.of_prompt(prompts[row].ids, group)
        return [answers[row] for row in range(len(prompts))]

    def reward(self, prompts: Sequence[Text], written: Sequence[Completions]) -> Tensor:
        """Return (N,) float64 the mean reward of each prompt's completions, as the trainer weighs.

        Raises:
            UnusableObservation: a reward function fails, or gives some completion no number.
        """
        trainer, tokenizer = self._trainer, self._trainer.processing_class
        examples = [self._examples[p.content] for p in prompts for _ in range(self.count)]
        ids = [one.ids[one.labels != IGNORE_INDEX].tolist() for row in written for one in row.alone]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        chats = not isinstance(examples[0]["prompt"], str)
        answers = [[{"role": "assistant", "content": t}] if chats else t for t in texts]
        columns = {n: [e[n] for e in examples] for n in examples[0] if n not in _OWN_COLUMNS}
        with preserve_process():
            try:
                values = [
                    function(
                        prompts=[example["prompt"] for example in examples],
                        completions=copy.deepcopy(answers),
                        completion_ids=copy.deepcopy(ids),
                        trainer_state=copy.deepcopy(trainer.state),
                        log_extra=lambda *_: None,
                        log_metric=lambda *_: None,
                        **copy.deepcopy(columns),
                    )
                    for function in trainer.reward_funcs
                ]
                table = torch.tensor(
                    [[torch.nan if value is None else float(value) for value in v] for v in values],
                    dtype=torch.float64,
                ).view(len(values), len(prompts), self.count)
            except Exception as error:  # of the user's function, whose message may quote a text
                kind = type(error).__name__
                raise UnusableObservation(f"a reward function failed: {kind}") from error
        weights = trainer.reward_weights.double().cpu()[:, None, None]
        unknown = table.isnan().all(0)
        rewards: Tensor = (table * weights).nansum(0).masked_fill(unknown, torch.nan)
        return rewards.mean(1)

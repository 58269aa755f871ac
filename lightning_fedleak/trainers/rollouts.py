"""Reads, completes and rewards the prompts of TRL's GRPO and RLOO, for attacks on the policy.

These trainers sample several completions of each prompt from the model (the policy), and train on
the rewards that functions of the user compute. :class:`Rollouts` does the same without training.
"""

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

# Columns of an example whose names TRL uses for its own arguments of reward functions: the prompts
# are passed as "prompts", and the sampled completions replace the columns of completions.
_REPLACED_COLUMNS = {"prompt", "completion", "completion_ids"}
# Attributes of a trainer whose completions do not come only from the model's ``generate``.
_GENERATION_SETTINGS = "use_vllm", "tools", "environment_factories", "rollout_func"


class Rollouts:
    """Complete and reward prompts as a trainer does, without training on them.

    Args:
        trainer: TRL's ``GRPOTrainer`` or ``RLOOTrainer``.

    Attributes:
        count: The number of completions of each prompt, as in a training step.
        repeats: The number of training steps that get the same batch of prompts: one for each part
            of its completions, in each iteration over them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._examples: dict[bytes, Any] = {}  # the example of each prompt, by its tokens
        self._is_fixed = False  # whether `keep` has chosen the prompts
        self.count = int(trainer.args.num_generations)
        self.repeats = int(trainer.args.steps_per_generation * trainer.args.num_iterations)

    def why_not_sampled(self) -> str:
        """Return why completions cannot be sampled as the trainer does it; empty if they can."""
        trainer = self._trainer
        return next(
            (f"{name} is set" for name in _GENERATION_SETTINGS if getattr(trainer, name, None)), ""
        )

    def why_no_rewards(self) -> str:
        """Return why rewards cannot be computed again; empty if they can."""
        for function in self._trainer.reward_funcs:
            if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
                name = type(function).__name__
                return f"a reward function ({name}) is a model or may depend on something else"
        return ""

    def read(self, batch: Any) -> TokenBatch:
        """Return the different prompts of a batch, padded right; all of their tokens are labels.

        Of several examples with the same prompt, only the first is stored with its other columns.

        Args:
            batch: The examples: mappings with ``"prompt"``, a text or a conversation.

        Raises:
            BatchError: An example has no prompt, or has a column of images.
        """
        examples = dict[object, Any]()
        for example in batch:
            columns = example.keys() if isinstance(example, Mapping) else set()
            if "prompt" not in columns or columns & {"image", "images"}:
                raise BatchError("an example has no prompt, or has an image")
            examples.setdefault(repr(example["prompt"]), example)
        rows = [torch.tensor(self._tokenize(example["prompt"])) for example in examples.values()]
        if not self._is_fixed:
            pairs = zip(rows, examples.values(), strict=True)
            self._examples |= {Text(row, row).content: example for row, example in pairs}
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return TokenBatch(ids, ids.masked_fill(mask == 0, IGNORE_INDEX), mask, "causal")

    def _tokenize(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt, as the trainer tokenizes a text or a conversation."""
        tokenizer = self._trainer.processing_class
        if isinstance(prompt, str):
            return [*tokenizer(text=[prompt])["input_ids"][0]]
        settings = getattr(self._trainer, "chat_template_kwargs", None) or {}
        encoded = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **settings
        )
        return [*encoded["input_ids"]]

    def keep(self, prompts: Iterable[Text]) -> None:
        """Keep only the examples of these prompts, and store no further examples from now on."""
        self._examples = {prompt.content: self._examples[prompt.content] for prompt in prompts}
        self._is_fixed = True

    def write(self, anatomy: Anatomy, prompts: Sequence[Text], seed: int) -> list[Completions]:
        """Return the model's completions of each prompt, sampled with the trainer's settings.

        The random states of the process and the model do not change.

        Args:
            anatomy: The anatomy of the model that generates the completions.
            prompts: N prompts.
            seed: The seed of the sampling.
        """
        config, completions_of = self._trainer.generation_config, dict[int, Completions]()
        end_tokens = torch.tensor([] if config.eos_token_id is None else config.eos_token_id).view(
            -1
        )
        n_prompts = max(1, self._trainer.args.generation_batch_size // self.count)
        pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
        # Prompts of similar length share a batch, so that little padding is computed.
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row].ids))
        model: Any
        with model_runs.undisturbed(anatomy) as model, torch.no_grad():
            torch.manual_seed(seed)
            for rows in (order[n : n + n_prompts] for n in range(0, len(order), n_prompts)):
                prompt_rows = [prompts[row].ids for row in rows for _ in range(self.count)]
                ids = pad_left(prompt_rows, padding_value=config.pad_token_id).to(anatomy.device)
                mask = pad_left([torch.ones_like(row) for row in prompt_rows]).to(anatomy.device)
                inputs = {"input_ids": ids, "attention_mask": mask, "generation_config": config}
                new_tokens = model.generate(**inputs).cpu()[:, ids.shape[1] :]
                completions = [_until_end(tokens, end_tokens) for tokens in new_tokens]
                for i, row in enumerate(rows):
                    group = completions[i * self.count : (i + 1) * self.count]
                    completions_of[row] = Completions.of_prompt(prompts[row].ids, group)
        return [completions_of[row] for row in range(len(prompts))]

    def reward(self, prompts: Sequence[Text], written: Sequence[Completions]) -> Tensor:
        """Return the (N,) mean reward of each prompt's completions, in float64.

        The reward of a completion is the sum over reward functions with the trainer's weights. It
        is NaN if every function returns None for it, and so is then the mean of its prompt.

        Args:
            prompts: N prompts that :meth:`keep` has kept.
            written: Their completions, from :meth:`write`.

        Raises:
            UnusableObservation: A reward function fails.
        """
        trainer = self._trainer
        examples = [self._examples[p.content] for p in prompts for _ in range(self.count)]
        # `alone` holds each completion with its prompt; only the completion has labels.
        ids = [text.ids[text.labels != IGNORE_INDEX] for row in written for text in row.alone]
        texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(examples[0]["prompt"], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        arguments = {
            **{n: [x[n] for x in examples] for n in examples[0].keys() - _REPLACED_COLUMNS},
            "prompts": [x["prompt"] for x in examples],
            "completions": texts,
            "completion_ids": [row.tolist() for row in ids],
            "trainer_state": copy.deepcopy(trainer.state),
            # TRL passes functions with which a reward function logs values. These do nothing.
            **dict.fromkeys(("log_extra", "log_metric"), lambda *_: None),
        }
        try:
            with preserve_process():
                rows = [function(**arguments) for function in trainer.reward_funcs]
            floats = [[torch.nan if x is None else float(x) for x in row] for row in rows]
            values = torch.tensor(floats, dtype=torch.float64).view(len(rows), -1, self.count)
        except Exception as error:  # its message may quote a private text, and is not shown
            raise UnusableObservation(f"a reward function fails: {type(error).__name__}") from error
        sums: Tensor = (values * trainer.reward_weights.cpu().double()[:, None, None]).nansum(0)
        return sums.masked_fill(values.isnan().all(0), torch.nan).mean(1)


def _until_end(tokens: Tensor, end_tokens: Tensor) -> Tensor:
    """Return the tokens of a completion up to and including its first end token."""
    positions = torch.isin(tokens, end_tokens).nonzero()
    return tokens[: int(positions[0]) + 1] if len(positions) else tokens

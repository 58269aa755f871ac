"""Which prompts the weights were trained on: TRL's GRPO or RLOO, looked at after each epoch.

    python -m benchmarks.attacks.rl_prompts --model DIR --text FILE
    python -m benchmarks.attacks.rl_prompts --model DIR --text FILE --reward shared --null
    python -m benchmarks.attacks.rl_prompts --model DIR --text FILE --trainer rloo --lora 16

A prompt is the begin of a text; ``leave_out`` holds half of the prompts out. The reward is the
share of a completion's words that begin with a letter of one half of the alphabet. With
``--reward own`` a hash of the prompt names the half, so that nothing but the prompt itself tells
it; with ``--reward shared`` it is the first half for all.

Prints AUC (its interval) of :class:`~lightning_fedleak.attacks.memorization.PolicyDrift` and
:class:`~lightning_fedleak.attacks.memorization.RewardGain`, and of other formulas on the same
prompts and weights. ``diba`` adds the two sides of DIBA (arXiv 2511.14045) as standard scores,
since the paper trains a classifier on shadow models: the mean reward of completions that the model
writes now less that of others that the base wrote, by different random numbers, and the mean log
ratio of the model to the base on what the model writes now. ``premia`` is PREMIA's ratio (arXiv
2407.06443) on what is given here, the prompt itself. These need a copy of the base; they are asked
after the last epoch alone. With ``--null`` the model is trained on further prompts, none of which
is asked about. The seconds of the looks are those of everything that is asked, the other formulas
too.

Below the table it says in how many of 300 draws, each of which deals the memberships of the run to
its prompts at random, our two attacks report members at any look, by a lower end above .5. The
scores are those of the run, so that only the draw of who is a member is repeated, not the training.
"""

import argparse
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PrinterCallback

from benchmarks import shared
from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.attacks.memorization import PolicyDrift, PromptAttack, RewardGain
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels import PromptChannel
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.model.taps import token_log_probs
from lightning_fedleak.trainers import LeakageCallback, WatchSettings

SMOKE = (
    "--model {model} --text {text} --prompts 40 --generations 4 --epochs 1",
    "--model {model} --text {text} --prompts 40 --generations 4 --epochs 1 "
    "--trainer rloo --lora 4 --reward shared --null",
)

Example = dict[str, Any]
DRAWS = 300  # of memberships; the error of a rate of .05 is then .013


def half_of_alphabet(completions: list[str], late: list[bool], **_: Any) -> list[float]:
    """Return the share of each completion's words that begin in its half of the alphabet."""
    shares = []
    for text, is_late in zip(completions, late, strict=True):
        words = [word for word in text.lower().split() if word[0].isalpha()]
        right = sum((word[0] >= "m") == is_late for word in words)
        shares.append(right / max(1, len(words)))
    return shares


class Formula(PromptAttack):
    """Score prompts by a formula that reads what a study asks.

    Args:
        name: of the formula.
        formula: gets the released model's answers; returns (N,) scores.
    """

    default_name = "formula"

    def __init__(self, name: str, formula: Callable[[ReleasedModel], Tensor]) -> None:
        super().__init__(name)
        self.formula = formula

    def score(self, released: ReleasedModel) -> Tensor:
        """Return what the formula says."""
        return self.formula(released)


class Study:
    """What the published formulas ask after the last epoch, of the model and a copy of its base.

    Args:
        base: the model before the training.
        epochs: of the training.
    """

    def __init__(self, base: Any, epochs: int) -> None:
        self.base = find_anatomy(base)
        self.epochs = epochs
        self.channel: Any = None
        self.looks = 0
        self._values: dict[str, Tensor] = {}

    def asked(self, name: str, released: ReleasedModel) -> Tensor:
        """Return (N,) one of the values of the last look: ``gain``, ``drift`` or ``prompt``.

        Raises:
            UnusableObservation: it is not the last look.
        """
        if self.looks < self.epochs:
            raise UnusableObservation("it is asked after the last epoch")
        if not self._values:
            channel, prompts = self.channel, self.channel.pool.texts
            assert len(prompts) == len(released.compressed), "some prompts are not compared"
            anatomy, rollouts = channel.run.anatomy, channel.run.rollouts
            before = rollouts.reward(prompts, rollouts.write(self.base, prompts, 1))
            written = rollouts.write(anatomy, prompts, 2)
            self._values["gain"] = rollouts.reward(prompts, written) - before
            for key, texts in (("drift", written), ("prompt", prompts)):
                now, base = (token_log_probs(a, texts) for a in (anatomy, self.base))
                self._values[key] = now.mean_log_probs() - base.mean_log_probs()
        return self._values[name]


def standard(values: Tensor) -> Tensor:
    """Return values less their mean, over their deviation."""
    return (values - values.mean()) / values.std().clamp_min(1e-12)


def attacks_of(study: Study) -> list[PromptAttack]:
    """Return our attacks and the other formulas."""

    def diba(released: ReleasedModel) -> Tensor:
        return sum(standard(study.asked(name, released)) for name in ("gain", "drift"))

    premia = partial(study.asked, "prompt")
    return [PolicyDrift(), RewardGain(), Formula("diba", diba), Formula("premia", premia)]


def kept_scores(attacks: list[PromptAttack]) -> dict[str, list[Tensor]]:
    """Return what attacks score at each look from now on, by their names."""
    kept: dict[str, list[Tensor]] = {attack.name: [] for attack in attacks}
    for attack in attacks:

        def score(released: ReleasedModel, attack: Any = attack, own: Any = attack.score) -> Tensor:
            values: Tensor = own(released)
            kept[attack.name].append(values)
            return values

        attack.score = score  # type: ignore[method-assign]
    return kept


def count_alarms(looks: list[Tensor], members: Tensor, *, exact: bool, seed: int) -> int:
    """Return in how many draws of memberships any look has a lower end above .5.

    Args:
        looks: scores of the prompts, (N,) at each look.
        members: (N,) bool, dealt at random in each draw.
        exact: as the channel sets it for the attack.
        seed: of the draws.
    """
    generator, alarms = torch.Generator().manual_seed(seed), 0
    for _ in range(DRAWS):
        dealt = members[torch.randperm(len(members), generator=generator)]
        alarms += any(
            membership_values(scores, dealt, look=look, exact=exact)["auc_low"] > 0.5
            for look, scores in enumerate(looks, start=1)
        )
    return alarms


def examples_of(options: argparse.Namespace) -> list[Example]:
    """Return twice as many prompts as are asked about; the second half is for ``--null``."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found: dict[str, Example] = {}
    for text in shared.shuffled_texts(options.text):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        prompt = tokenizer.decode(ids[: options.prompt])
        if len(ids) >= options.prompt and len(found) < 2 * options.prompts:
            own = bool(zlib.crc32(prompt.encode()) % 2)
            found[prompt] = {"prompt": prompt, "late": own and options.reward == "own"}
    if len(found) < 2 * options.prompts:
        raise SystemExit(f"the text has {len(found)} of 2 * {options.prompts} prompts")
    return [*found.values()]


def trainer_of(options: argparse.Namespace, examples: list[Example], folder: Path) -> Any:
    """Return the trainer of the prompts, of which the first half may be left out."""
    import trl
    from datasets import Dataset

    grpo = options.trainer == "grpo"
    kind, config = (trl.GRPOTrainer, trl.GRPOConfig) if grpo else (trl.RLOOTrainer, trl.RLOOConfig)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    more: dict[str, Any] = {}
    if options.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=options.lora, target_modules="all-linear")
    arguments = config(
        str(folder), per_device_train_batch_size=options.batch * options.generations,
        num_generations=options.generations, max_completion_length=options.length,
        learning_rate=options.lr, lr_scheduler_type="constant", num_train_epochs=options.epochs,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10**6, bf16=False,
        gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False, beta=0.0,
    )  # fmt: skip
    rows = Dataset.from_list(examples[: options.prompts])
    more |= {"train_dataset": rows, "processing_class": tokenizer}
    return kind(shared.float_model(options.model), half_of_alphabet, arguments, **more)


def train_on_others(trainer: Any, examples: list[Example], count: int) -> None:
    """Let a trainer's steps get other prompts in place of those that its loader gives."""
    step = trainer.training_step
    other = {example["prompt"]: examples[count + n] for n, example in enumerate(examples[:count])}

    def training_step(model: Any, inputs: Any, *more: Any, **settings: Any) -> Tensor:
        return step(model, [other[one["prompt"]] for one in inputs], *more, **settings)

    trainer.training_step = training_step


def train(options: argparse.Namespace, examples: list[Example], seed: int, folder: Path) -> None:
    """Train once with a look after each epoch, and print a table."""
    torch.manual_seed(seed)
    trainer = trainer_of(options, examples, folder)
    trainer.remove_callback(PrinterCallback)
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, options.prompts // 2, seed=seed)
    if options.null:
        train_on_others(trainer, examples, options.prompts)
    base = shared.float_model(options.model).eval()
    study = Study(base.to(trainer.model.device), options.epochs)
    settings = WatchSettings(memorization=Memorization(max_overhead=100, looks=()))
    attacks = attacks_of(study)
    kept = kept_scores(attacks[:2])
    callback = LeakageCallback(trainer, attacks, folder=folder, settings=settings)
    [study.channel] = [c for c in callback.engine.channels if isinstance(c, PromptChannel)]
    looks, rewards = [0.0], list[str]()
    ask = study.channel.query_weights

    def timed(*arguments: Any, **settings: Any) -> Any:
        start = time.process_time()
        study.looks += 1
        answers = ask(*arguments, **settings)
        looks[0] += time.process_time() - start
        pool, values = study.channel.pool, study.channel._rewards
        sides = (values[1, side].mean() for side in (pool.trains, ~pool.trains))
        rewards.append(" / ".join(f"{float(value):.2f}" for value in sides))
        return answers

    study.channel.query_weights = timed
    trainer.add_callback(callback)
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    values = study.channel._rewards
    cells, sides = shared.auc_cells(folder)
    cells = {attack.name: cells[attack.name] for attack in study.channel.attacks}
    facts = f"seed {seed}{', null' * options.null}: {sides}; {seconds:.0f} s CPU, of which looks "
    facts += f"{looks[0]:.0f} s; reward of the base {float(values[0].mean()):.2f}"
    what = options.trainer, f"reward {options.reward}", f"lr {options.lr:g}"
    shared.print_epochs(options, {"reward, members / others": rewards} | cells, *what, facts)
    for name, scores in ((name, looks) for name, looks in kept.items() if looks):
        exact = name == RewardGain.default_name
        alarms = count_alarms(scores, study.channel.pool.trains, exact=exact, seed=seed)
        print(f"{name}: {alarms} of {DRAWS} permuted draws raise an alarm (5% may)", flush=True)


def main() -> None:
    """Read the options, train once for each seed, and print."""
    parser = shared.parser_of(
        __doc__, "model", "text", trainer=("grpo", ("grpo", "rloo")),
        reward=("own", ("own", "shared")), prompts=(100, "that are asked about"),
        prompt=(9, "tokens of a prompt"), length=(4, "tokens of a completion"),
        generations=(8, "completions of a prompt"), lora=(0, "rank, on all linear maps; 0: whole"),
        lr=3e-5, batch=(5, "prompts"), epochs=6, null=(False, "train on other prompts"), seeds="0",
    )  # fmt: skip
    options = parser.parse_args()
    shared.print_place()
    examples = examples_of(options)
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            train(options, examples, seed, Path(folder))


if __name__ == "__main__":
    main()

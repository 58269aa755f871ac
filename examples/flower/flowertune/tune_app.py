"""FlowerTune's recipe: clients fine-tune adapters with TRL's SFTTrainer; each update is watched.

Started with ``flwr run``, see README.md. What is added to the recipe is marked "watched".
"""

import math
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from lightning_fedleak import Games
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.federation import RoundGate, RoundObserver, RoundSettings, report_batches
from lightning_fedleak.federation.flower import FedLeakMod, Observed

LENGTH = 32
"""Tokens of a row, at most; the recipe's 512 take longer on a CPU."""
PUBLIC, OUTSIDE, PRIVATE = slice(0, 100), slice(100, 200), 200
"""Of the messages: some calibrate the attacks, some are in no batch, the others are clients'."""


def model_name(context: Context) -> str:
    """A folder or a name on the hub; the embedded model by default."""
    return str(context.run_config["model"] or EMBEDDED_MODEL)


def make_model(context: Context) -> torch.nn.Module:
    """The same on the server and on every client; only the adapter is sent."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model_name(context), dtype=torch.float32)
        rank = int(context.run_config["lora-r"])
        settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, **settings))


def learning_rate(context: Context, round_: int) -> float:
    """The recipe's: it falls over the rounds along a cosine, and stays as it is within one."""
    most, least = (float(context.run_config[f"learning-rate-{end}"]) for end in ("max", "min"))
    share = round_ / int(context.run_config["rounds"])
    return least + (most - least) * (1 + math.cos(math.pi * share)) / 2


def instruct(message: str) -> str:
    """A message as an answer to an instruction."""
    return f"### Instruction:\nWrite a message.\n### Response: {message}"


def rows_of(texts: list[str], context: Context) -> list[dict[str, torch.Tensor]]:
    """Token ids of texts."""
    tokenizer = AutoTokenizer.from_pretrained(model_name(context))
    encoded = (tokenizer(instruct(t), truncation=True, max_length=LENGTH) for t in texts)
    return [{"input_ids": torch.tensor(row["input_ids"])} for row in encoded]


def client_rows(context: Context, client: int, clients: int) -> list[dict[str, torch.Tensor]]:
    """What a client trains on."""
    return rows_of(read_texts(EMBEDDED_MESSAGES)[PRIVATE + client :: clients], context)


# Watched.
def make_observer(context: Context, side: str) -> RoundObserver:
    """Attacks updates; every process has one of its own."""
    texts = read_texts(EMBEDDED_MESSAGES)

    def public(part: slice) -> PublicText:
        return PublicText([row["input_ids"] for row in rows_of(texts[part], context)])

    rate = float(context.run_config["learning-rate-max"])
    return RoundObserver(
        make_model(context),
        partial(torch.optim.AdamW, lr=rate, weight_decay=0.0),
        local_steps=int(context.run_config["local-steps"]),
        folder=Path(context.run_config["out"]).resolve() / f"{side}_{os.getpid()}",
        side=side,
        games=Games(targets=16, held_out=public(OUTSIDE)),
        settings=RoundSettings(public_text=public(PUBLIC)),
    )


# Watched.
def gates(context: Context) -> list[RoundGate]:
    """None where everything may leave."""
    most = float(context.run_config["at-most"])
    return [RoundGate("leakage/worst/membership", at_most=most)] if most < 1 else []


client = ClientApp(mods=[FedLeakMod(partial(make_observer, side="client"), gates)])


@client.train()
def train(message: Message, context: Context) -> Message:
    """A round of one client, with TRL's trainer."""
    model = make_model(context)
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    number, clients = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    rows = client_rows(context, number, clients)
    round_ = int(message.content["config"]["server-round"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=int(context.run_config["local-steps"]),
            per_device_train_batch_size=4,
            learning_rate=learning_rate(context, round_ - 1),
            lr_scheduler_type="constant",
            max_length=LENGTH,
            max_grad_norm=0.0,
            seed=1000 * round_ + number,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list([{"input_ids": r["input_ids"].tolist()} for r in rows]),
            processing_class=AutoTokenizer.from_pretrained(model_name(context)),
        )
        report_batches(trainer)  # watched: the mod asks what was trained on
        loss = trainer.train().training_loss
    arrays = ArrayRecord(get_peft_model_state_dict(trainer.model))
    metrics = MetricRecord({"num-examples": len(rows), "train-loss": float(loss)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging; the server looks at what arrives, and does not hold the texts."""
    nodes = len(list(grid.get_node_ids()))
    observer = make_observer(context, side="server")
    strategy = Observed(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes),
        observer,
        learning_rate=lambda round_: learning_rate(context, round_ - 1),
    )
    result = strategy.start(
        grid,
        ArrayRecord(get_peft_model_state_dict(make_model(context))),
        num_rounds=int(context.run_config["rounds"]),
        timeout=600,
    )
    observer.end()
    out = Path(context.run_config["out"])
    save_file(result.arrays.to_torch_state_dict(), out / "adapter.safetensors")
    (out / "done.txt").write_text("finished\n")

"""Clients mask their models so that the server learns the sum alone, by SecAgg+; it attacks that.

A mod of each client looks at its update before it is masked, and may hold it back: then zero leaves
in its place, masked like every other.

Started with ``flwr run``, see README.md. Flower has SecAgg+ for clients and strategies of its older
interface: ``SecAggMessages`` lets a function of ``@client.train()`` take part.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from named_messages import SecAggMessages

from lightning_fedleak import Games, federation
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.finetuning import module
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation.flower import FedLeakMod

OPTIMIZER = partial(torch.optim.SGD, lr=0.1)
ROWS = 4
PUBLIC, OUTSIDE = slice(0, 100), slice(100, 200)
PRIVATE = 200
"""Of the messages: some calibrate the attacks, some are in no batch, the others are clients'."""


def rows_of(texts: list[str], context: Context) -> list[torch.Tensor]:
    """Token ids of texts, at most 32 a row."""
    tokenizer = module.load_tokenizer(context.run_config["model"] or None)
    return module.tokenize_rows(texts, tokenizer, 32)


def batches(context: Context, client: int, clients: int, round_: int) -> list[dict]:
    """What a client trains on in a round."""
    rows = rows_of(read_texts(EMBEDDED_MESSAGES)[PRIVATE + client :: clients], context)
    order = torch.Generator().manual_seed(1000 * round_ + client)
    steps = int(context.run_config["local-steps"])
    chosen = [torch.randperm(len(rows), generator=order)[:ROWS].tolist() for _ in range(steps)]
    return [module.PadRight(0)([rows[i] for i in some]) for some in chosen]


def make_model(context: Context) -> torch.nn.Module:
    """The whole model is trained."""
    return module.load_model(context.run_config["model"] or None)


def make_observer(context: Context, side: str) -> federation.RoundObserver:
    """Attacks updates; every process has one of its own."""
    texts = read_texts(EMBEDDED_MESSAGES)
    return federation.RoundObserver(
        make_model(context),
        OPTIMIZER,
        local_steps=int(context.run_config["local-steps"]),
        folder=Path(context.run_config["out"]).resolve() / f"{side}_{os.getpid()}",
        side=side,
        games=Games(targets=16, held_out=PublicText(rows_of(texts[OUTSIDE], context))),
        settings=federation.RoundSettings(
            federation=f"flower-{context.run_id}",
            public_text=PublicText(rows_of(texts[PUBLIC], context)),
        ),
    )


def gates(context: Context) -> list[federation.RoundGate]:
    """None where everything may leave."""
    most = float(context.run_config["at-most"])
    return [federation.RoundGate("leakage/worst/words", at_most=most)] if most < 1 else []


client = ClientApp(
    mods=[
        secaggplus_mod,
        FedLeakMod(partial(make_observer, side="client"), gates),
        SecAggMessages(lambda context: federation.trained_state(make_model(context))),
    ]
)


@client.train()
def train(message: Message, context: Context) -> Message:
    """A round. All clients weigh alike: a number of examples would leave unmasked."""
    model = make_model(context).train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    stepping = OPTIMIZER(model.parameters())
    number = int(context.node_config["partition-id"])
    clients = int(context.node_config["num-partitions"])
    for batch in batches(context, number, clients, int(message.content["config"]["server-round"])):
        federation.trained_on(batch)  # the mod asks what was trained on
        stepping.zero_grad()
        model(**batch).loss.backward()
        stepping.step()
    arrays, metrics = (
        ArrayRecord(federation.trained_state(model)),
        MetricRecord({"num-examples": 1}),
    )
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class SumWatched(FedAvg):
    """Attacks what SecAgg+ hands to the strategy: one model a round, the mean."""

    def __init__(self, context: Context, clients: int) -> None:
        self.context, self.clients = context, clients
        self.observer = make_observer(context, side="server")
        whole = federation.trained_state(self.observer.model)
        self.names = list(whole)
        start = ndarrays_to_parameters([t.numpy() for t in whole.values()])
        least = {"min_fit_clients": clients, "min_available_clients": clients}
        super().__init__(fraction_evaluate=0.0, initial_parameters=start, **least)

    def named(self, parameters: object) -> Mapping[str, torch.Tensor]:
        """As a state dict."""
        arrays = zip(self.names, parameters_to_ndarrays(parameters), strict=True)
        return {name: torch.tensor(array, dtype=torch.float32) for name, array in arrays}

    def configure_fit(self, server_round: int, parameters, client_manager):
        """Remembers what is sent."""
        self.observer.begin(server_round, self.named(parameters))
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results, failures):
        """Looks at the sum. A real server has no texts; this simulation scores what it guesses."""
        models = (parameters_to_ndarrays(result.parameters) for _, result in results)
        seen = {tuple(array.tobytes() for array in model) for model in models}
        print(f"round {server_round}: {len(results)} clients, {len(seen)} model to be seen")
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        truth = []
        for number in range(self.clients):
            truth += batches(self.context, number, self.clients, server_round)
        look = self.observer.look(self.named(parameters), federation.SUM, batches=truth)
        for name, value in look.now.items():
            if name.endswith(("/f1", "/auc")):
                print(f"  {name} {value:.3f}")
        return parameters, metrics


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging behind SecAgg+."""
    clients = len(list(grid.get_node_ids()))
    strategy = SumWatched(context, clients)
    config = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    legacy = LegacyContext(context, config=config, strategy=strategy)
    # Numbers are rounded to 1 / 2**19 of the model's own scale; every client weighs 1.
    secure = SecAggPlusWorkflow(
        num_shares=clients, reconstruction_threshold=clients - 1, max_weight=1.0, timeout=600
    )
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    strategy.observer.end()
    (Path(context.run_config["out"]) / "done.txt").write_text("finished\n")

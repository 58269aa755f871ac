"""The apps of a tiny federation, as users of Flower write them; imported by its workers too."""

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lightning_fedleak.attacks import BagOfWords, GradientMembership, PublicText
from lightning_fedleak.federation import ClientDP, RoundObserver, trained_on
from lightning_fedleak.federation.flower import FedLeakMod, Observed, PrivateMean
from lightning_fedleak.federation.updates import trained_state
from tests.federation.rounds import SGD, batches, model, round_settings

F1 = "leakage/bag_of_words/f1"
Make = Callable[[], torch.nn.Module]
"""Makes the model of a federation: tests.federation.rounds.model, or lora."""


def observer(folder: Path, make: Make = model, **settings) -> RoundObserver:
    attacks = [BagOfWords() if make is model else GradientMembership(public(), public_rows=8)]
    arguments, rare = round_settings({"attacks": attacks} | settings)
    return RoundObserver(copy.deepcopy(make()), SGD, 2, folder=folder, settings=rare, **arguments)


def public() -> PublicText:
    return PublicText([row for b in batches(7, 8, rows=3) for row in b["input_ids"]])


def data_of(client: int, round_: int) -> list[dict[str, torch.Tensor]]:
    return batches(100 * round_ + client, 2)


FAULTS = ("", "last", "raises", "nan", "shapes", "other", "nothing")
"""What a faulty client does in rounds 1, 2, and so on."""


def faulty(fault: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a client returns in place of what it has trained."""
    if fault == "nan":
        return {n: torch.full_like(t, float("nan")) for n, t in state.items()}
    if fault == "shapes":
        return {n: torch.zeros(2, 3) for n in state}
    if fault == "other":
        return {f"another.{n}": t for n, t in state.items()}
    assert fault == "", fault
    return state


def train(message, context, make=model, faulty_client=None) -> Message:
    round_ = int(message.content["config"]["server-round"])
    client = int(context.node_config["partition-id"])
    if client != faulty_client:
        sent = message.content["arrays"].to_torch_state_dict()
        return trains(sent, client, round_, message, make)
    fault = FAULTS[round_ - 1] if round_ <= len(FAULTS) else ""
    if fault == "raises":
        raise RuntimeError("this client fails")
    if fault == "nothing":
        return Message(content=RecordDict({"note": ConfigRecord({"a": 1})}), reply_to=message)
    if fault == "last":  # of which the first round was sent model()
        return trains(trained_state(model()), client, round_ - 1, message)
    reply = trains(message.content["arrays"].to_torch_state_dict(), client, round_, message)
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord(faulty(fault, state))
    return reply


def trains(sent, client, round_, message, make=model) -> Message:
    state, loss = trained(sent, client, round_, make)
    metrics = MetricRecord({"num-examples": 4 + client, "train-loss": loss})
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
    return Message(content=content, reply_to=message)


def trained(sent, client, round_, make) -> tuple[dict[str, torch.Tensor], float]:
    """Return a client's round: its state, and its last loss."""
    net = make()
    net.load_state_dict(sent, strict=False)
    stepping = SGD(p for p in net.parameters() if p.requires_grad)
    for batch in data_of(client, round_):
        trained_on(batch)
        stepping.zero_grad()
        loss = net(**batch).loss
        loss.backward()
        stepping.step()
    return trained_state(net), float(loss.detach())


class ForClient:
    """Makes an observer, or the account, of a client: where its files go is the user's to say."""

    def __init__(self, folder: Path, what: str = "observer", make: Make = model) -> None:
        self.folder = folder
        self.what = what
        self.make = make

    def __call__(self, context: Context) -> RoundObserver | ClientDP:
        number = context.node_config["partition-id"]
        if self.what == "observer":
            return observer(self.folder / f"process_{os.getpid()}", self.make)
        return ClientDP(
            0.5, 2.0, clients=10, target_delta=1e-5, trust="local", accountant="rdp",
            ledger=self.folder / f"ledger_{number}",
        )  # fmt: skip


def client_app(folder, *, make=model, faulty_client=None) -> ClientApp:
    """Watched where a folder is given; one client may be faulty."""
    app = ClientApp(mods=[] if folder is None else [FedLeakMod(ForClient(folder, make=make))])
    app.train()(partial(train, make=make, faulty_client=faulty_client))
    return app


def server_app(out, *, watched=None, dp=None, rounds=2, make=model) -> ServerApp:
    """Leaves the last model in a file; watched where a folder is given."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
        if dp is not None:
            strategy = PrivateMean(strategy, ClientDP(**dp))
        if watched is not None:
            strategy = Observed(strategy, observer(watched, make, side="server"))
        result = strategy.start(grid, ArrayRecord(trained_state(make())), num_rounds=rounds)
        torch.save(result.arrays.to_torch_state_dict(), out)
        if watched is not None:
            strategy.observer.end()

    return app

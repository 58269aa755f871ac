"""Reads and writes the model in Flower's messages.

Messages of the current interface hold it as arrays by name. Messages of the older interface
(``NumPyClient``) hold a list of arrays without names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_fedleak.extras import require_package
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.federation.updates import State, UpdateError, trained_state

with require_package("flower", "lightning_fedleak.federation.flower needs Flower"):
    from flwr import common
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.compat.common import recorddict_compat as compat

# The keys by which Flower's strategies send the round's number and weigh the clients, by default.
ROUND = "server-round"
WEIGHT = "num-examples"

# The keys of the model in messages of the older interface: sent to a client, and in its reply.
LISTED, _LISTED_REPLY = "fitins.parameters", "fitres.parameters"


class _Arrays(Mapping[str, Tensor]):
    """A mapping that decodes an array of a record only when it is read.

    Args:
        record: the record of a message.
    """

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._record[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


class NamedArrays:
    """Reads the model of a training message, and reads and writes the model of the reply.

    Both messages hold the model by name.

    Args:
        message: the training message that the server sent.

    Attributes:
        round_: the number of the round.
        sent_state: the model that the server sent.
    """

    def __init__(self, message: Message) -> None:
        self._key, arrays = arrays_of(message)
        self.sent_state: dict[str, Tensor] = dict(arrays)
        self.round_ = _round_of(message)

    def read_reply(self, reply: Message) -> State:
        """Return the model that the client has trained."""
        return dict(arrays_of(reply)[1])

    def replace_model(self, state: State, reply: Message) -> None:
        """Replace the model in a reply by ``state``."""
        [key] = reply.content.array_records
        reply.content[key] = ArrayRecord(dict(state))

    def make_content(self, state: State, weight: str) -> RecordDict:
        """Return the content of a reply that holds only a model and a weight of 1.

        Args:
            state: the model.
            weight: the name of the weight among the metrics.
        """
        metrics = MetricRecord({weight: 1.0})
        return RecordDict({self._key: ArrayRecord(dict(state)), "metrics": metrics})


class _ListedArrays(NamedArrays):
    """Does the same for the messages of a NumPyClient, which hold arrays without names.

    Args:
        message: the training message that the server sent.
        observer: the observer, whose model has the names, in the order of the arrays.
    """

    def __init__(self, message: Message, observer: RoundObserver) -> None:
        group = message.metadata.group_id  # the round's number, in Flower's own workflows
        self.round_ = int(group) if group.isdecimal() else _round_of(message)
        arrays = arrays_in(message, LISTED)
        full_state = {n: t.detach() for n, t in observer.model.state_dict().items()}
        shapes = [a.shape for a in arrays]
        for candidate in (trained_state(observer.model), full_state):
            if [tuple(t.shape) for t in candidate.values()] == shapes:
                self._names = list(candidate)
                # A mean over clients is float64 in Flower; a client trains in its model's dtype.
                self.sent_state = {
                    n: a.to(t.dtype) for (n, t), a in zip(candidate.items(), arrays, strict=True)
                }
                return
        raise UpdateError(
            f"the {len(arrays)} arrays that the server sent have neither the order and shapes of "
            "trained_state(model) nor those of model.state_dict(), for the observer's model"
        )

    def read_reply(self, reply: Message) -> State:
        arrays = arrays_in(reply, _LISTED_REPLY)
        state = dict(zip(self._names, arrays, strict=False))
        return state | {f"array {n}": a for n, a in enumerate(arrays) if n >= len(self._names)}

    def replace_model(self, state: State, reply: Message) -> None:
        # False: Flower may free each array as soon as it is converted.
        reply.content[_LISTED_REPLY] = compat.parameters_to_arrayrecord(self._list(state), False)

    def make_content(self, state: State, weight: str) -> RecordDict:
        # The older interface's form of a weight of 1 (one example) and no metrics.
        reply = common.FitRes(common.Status(common.Code.OK, ""), self._list(state), 1, {})
        return compat.fitres_to_recorddict(reply, False)

    def _list(self, state: State) -> common.Parameters:
        """Return the arrays of a model in the order in which the server sent them."""
        return common.ndarrays_to_parameters([state[n].cpu().numpy() for n in self._names])


def read_sent(message: Message, observer: RoundObserver) -> NamedArrays:
    """Return the object that reads a training message and its reply, by the message's form.

    Raises:
        UpdateError: the message holds no model, or one that does not fit the observer's model.
    """
    if LISTED in message.content:
        return _ListedArrays(message, observer)
    return NamedArrays(message)


def arrays_of(message: Message) -> tuple[str, _Arrays]:
    """Return the key of the model in a message, and the model.

    Raises:
        UpdateError: the message holds no model, or several models.
    """
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(f"a message holds one model, and this one has {len(records)}")
    [(key, record)] = records.items()
    return key, _Arrays(record)


def arrays_in(message: Message, key: str) -> list[Tensor]:
    """Return the arrays in the record ``key`` of a message of the older interface."""
    record = message.content.array_records[key]
    parameters = compat.arrayrecord_to_parameters(record, keep_input=True)
    return [torch.from_numpy(array) for array in common.parameters_to_ndarrays(parameters)]


def _round_of(message: Message) -> int:
    """Return the number of the round that a message states."""
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])
    raise UpdateError(
        f"the message does not state its round: the server's strategy must send '{ROUND}' in the "
        "ConfigRecord, as Flower's strategies do"
    )

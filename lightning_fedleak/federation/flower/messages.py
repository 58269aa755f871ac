"""The model in Flower's messages, by name or as a list of arrays."""

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

ROUND = "server-round"
WEIGHT = "num-examples"

LISTED, _LISTED_BACK = "fitins.parameters", "fitres.parameters"
"""Keys of the model in messages of the older interface."""


class _Arrays(Mapping[str, Tensor]):
    """Reads each array of a record on access, so that the whole model is never in memory.

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
    """Reads and writes the model in the messages of a round, which hold it by name.

    Attributes:
        round_: the number of the round.
        sent: the state that the client got.
    """

    def __init__(self, message: Message) -> None:
        self._key, sent = arrays_of(message)
        self.sent: dict[str, Tensor] = dict(sent)
        self.round_ = _round_of(message)

    def returned(self, reply: Message) -> State:
        """Return the model that the client has trained."""
        return dict(arrays_of(reply)[1])

    def put(self, state: State, reply: Message) -> None:
        """Put ``state`` in place of the model in a reply."""
        [key] = reply.content.array_records
        reply.content[key] = ArrayRecord(dict(state))

    def alone(self, state: State, weight: str) -> RecordDict:
        """Return a reply that holds nothing but a model, and a weight of 1."""
        metrics = MetricRecord({weight: 1.0})
        return RecordDict({self._key: ArrayRecord(dict(state)), "metrics": metrics})


class _ListedArrays(NamedArrays):
    """Reads and writes the model in the messages of a NumPyClient: arrays one after the other."""

    def __init__(self, message: Message, observer: RoundObserver) -> None:
        group = message.metadata.group_id  # the round, in Flower's own workflows
        self.round_ = int(group) if group.isdecimal() else _round_of(message)
        arrays = arrays_in(message, LISTED)
        full_state = {n: t.detach() for n, t in observer.model.state_dict().items()}
        shapes = [a.shape for a in arrays]
        for like in (trained_state(observer.model), full_state):
            if [tuple(t.shape) for t in like.values()] == shapes:
                self._names = list(like)
                # A mean over clients is float64 in Flower; a client trains in its model's dtype.
                self.sent = {
                    n: a.to(t.dtype) for (n, t), a in zip(like.items(), arrays, strict=True)
                }
                return
        raise UpdateError(
            f"the {len(arrays)} arrays that were sent have not the order and shapes of "
            "trained_state(model) or of model.state_dict() of the observer's model"
        )

    def returned(self, reply: Message) -> State:
        arrays = arrays_in(reply, _LISTED_BACK)
        state = dict(zip(self._names, arrays, strict=False))
        return state | {f"array {n}": a for n, a in enumerate(arrays) if n >= len(self._names)}

    def put(self, state: State, reply: Message) -> None:
        reply.content[_LISTED_BACK] = compat.parameters_to_arrayrecord(self._list(state), False)

    def alone(self, state: State, weight: str) -> RecordDict:
        reply = common.FitRes(common.Status(common.Code.OK, ""), self._list(state), 1, {})
        return compat.fitres_to_recorddict(reply, False)

    def _list(self, state: State) -> common.Parameters:
        return common.ndarrays_to_parameters([state[n].cpu().numpy() for n in self._names])


def read_sent(message: Message, observer: RoundObserver) -> NamedArrays:
    """Return the reader for the form of a training message and its reply.

    Raises:
        UpdateError: the message holds no model, or a model that does not fit the observer's.
    """
    if LISTED in message.content:
        return _ListedArrays(message, observer)
    return NamedArrays(message)


def arrays_of(message: Message) -> tuple[str, _Arrays]:
    """Return the key of the model in a message, and the model.

    Raises:
        UpdateError: the message holds no model, or several.
    """
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(f"a message holds one model, and this one has {len(records)}")
    [(key, record)] = records.items()
    return key, _Arrays(record)


def arrays_in(message: Message, key: str) -> list[Tensor]:
    """Return the arrays of a message of the older interface, from the record of this key."""
    record = message.content.array_records[key]
    parameters = compat.arrayrecord_to_parameters(record, keep_input=True)
    return [torch.from_numpy(array) for array in common.parameters_to_ndarrays(parameters)]


def _round_of(message: Message) -> int:
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])
    raise UpdateError(
        f"the message does not say which round it is of: the server's strategy must send '{ROUND}' "
        "in its ConfigRecord, as those of Flower do"
    )

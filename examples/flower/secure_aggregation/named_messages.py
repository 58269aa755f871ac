"""A mod for Flower's SecAgg+, which reads and writes a model as a list of arrays without names."""

import copy
from collections.abc import Callable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from torch import Tensor

from lightning_fedleak.federation.flower import ROUND, WEIGHT
from lightning_fedleak.federation.flower.mod import LISTED, arrays_in, arrays_of, read_masks


class SecAggMessages:
    """A Flower mod: lets a function of ``@app.train()`` take part in SecAgg+.

    The last mod of three. The function gets and returns the messages that Flower's strategies send
    without a secure aggregation, and its reply is masked::

        app = ClientApp(mods=[secaggplus_mod, FedLeakMod(make_observer, gates),
                              SecAggMessages(lambda context: trained_state(make_model()))])

    ``message.content["config"]`` holds what the strategy's ``on_fit_config_fn`` gives, and the
    number of the round as ``"server-round"``. The server runs ``SecAggPlusWorkflow``. Of the
    function's metrics the weight alone leaves, as it is, since nothing masks metrics.

    Args:
        names: returns for a context the names of the arrays that the server sends, in its order:
            those of ``trained_state(model)``, or of ``model.state_dict()``.
        weight: the metric by which the server weighs clients, a whole number; 1 without it.
    """

    def __init__(
        self,
        names: Callable[[Context], Sequence[str] | Mapping[str, Tensor]],
        *,
        weight: str = WEIGHT,
    ) -> None:
        self._names = names
        self._weight = weight

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the client train on a model by name, and return its reply as SecAgg+ reads it.

        Raises:
            ValueError: SecAgg+ would not mask the reply to this training message.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        if read_masks(message, context) is None:
            raise ValueError(
                "SecAggMessages: nothing masks the reply to this message: say "
                "mods=[secaggplus_mod, FedLeakMod(...), SecAggMessages(...)], and run "
                "SecAggPlusWorkflow on the server"
            )
        names = list(self._names(context))
        reply = call_next(self._name_arrays(message, names), context)
        if reply.has_error():
            return reply
        state = arrays_of(reply)[1]
        records = reply.content.metric_records.values()
        weight = next((record[self._weight] for record in records if self._weight in record), 1)
        whole = isinstance(weight, int | float) and float(weight).is_integer()
        if not whole or set(state) != set(names):
            raise ValueError(
                f"SecAggMessages: the metric '{self._weight}' must be a whole number, got "
                f"{weight}, and the reply must hold the arrays of names=, no others"
            )
        arrays = ndarrays_to_parameters([state[name].numpy() for name in names])
        result = FitRes(Status(Code.OK, "Success"), arrays, int(weight), {})
        return Message(compat.fitres_to_recorddict(result, False), reply_to=message)

    def _name_arrays(self, message: Message, names: list[str]) -> Message:
        """Return the message that Flower's strategies send: a model by name, and the settings."""
        arrays = arrays_in(message, LISTED)
        group = message.metadata.group_id  # the round, in Flower's own workflows
        settings = {ROUND: int(group)} if group.isdecimal() else {}
        settings |= dict(message.content.config_records.get("fitins.config", {}))
        named = copy.copy(message)
        state = ArrayRecord(dict(zip(names, arrays, strict=True)))
        named.content = RecordDict({"arrays": state, "config": ConfigRecord(settings)})
        return named

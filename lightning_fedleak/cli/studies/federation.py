"""A whole federation on one machine: clients, server, attacks, gates and the privacy account.

:class:`Federation` holds the settings, and builds model, batches, attacks and gates from them. So
every process (for example of Flower) builds equal objects. :func:`train_in_process` trains all
rounds in one process. In each round, clients train one after the other, their updates are attacked
and may be withheld, and the server averages the updates that were sent.

A *look* is the measurement of one update by all attacks. Attacks on words and attacks on membership
are *families*; the main metric of a family is its *headline*. A *gate* withholds an update if a
metric exceeds a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak import federation as fed
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.studies.models import with_lora
from lightning_fedleak.engine import Games
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report.records import STANDARD_FAMILIES

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.1, {}),
    "momentum": (torch.optim.SGD, 0.1, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, 3e-4, {}),
}
"""Class, default learning rate and further settings of each optimizer."""

# Log names of the highest headline of any attack on words, and on membership.
WORDS, MEMBERSHIP = "leakage/worst/words", "leakage/worst/membership"

_HELD_OUT = 5  # one text in 5 calibrates the attacks, one in 5 is held out of training; not tuned
_MAX_PUBLIC_TEXTS = 200  # texts that the attacks calibrate on; not tuned, more take longer
_MAX_VALIDATION_TEXTS = 64  # texts of the validation loss; not tuned, more take longer
_MIN_TEXTS = 10  # texts; a fifth of fewer is a single text
_NO_LIMIT = 1e9  # seconds that an attack may take; more than any needs, so that none is dropped


@dataclass(frozen=True)
class Federation:
    """The settings of a federation, which determine its model, texts and batches.

    Attributes:
        clients: The number of clients.
        rounds: The number of rounds.
        local_steps: The number of optimizer steps of a client in a round.
        model: causal language model, a folder or a name on the hub; None for the embedded one.
        text: the clients' texts as :func:`~lightning_fedleak.cli.finetuning.texts.read_texts` takes
            them; None for the embedded messages.
        column: The column that holds the text; None: ``read_texts`` chooses it.
        lora_r: The rank of the LoRA that is trained; 0 to train the whole model.
        targets: modules with adapters, see :func:`~lightning_fedleak.cli.studies.models.with_lora`.
        optimizer: The optimizer of the clients, a key of ``OPTIMIZERS``.
        lr: The learning rate; None for the default in ``OPTIMIZERS``.
        batch_size: The number of texts in a batch.
        length: The maximum number of tokens of a text.
        members: The number of texts of a round whose membership is tested.
        gate: The threshold of the watched metric above which an update is withheld; None: no gate.
        watch: The log name of the metric that the gate watches; None: see :attr:`watched`.
        epsilon: The privacy budget of all rounds together; None: no differential privacy.
        clip: The clip norm of a client's update.
        delta: The delta of the guarantee.
        trust: Who adds the noise, see :class:`~lightning_fedleak.federation.ClientDP`.
        seed: The seed of split, order, adapters and calibration.
    """

    clients: int = 4
    rounds: int = 3
    local_steps: int = 10
    model: str | None = None
    text: str | None = None
    column: str | None = None
    lora_r: int = 0
    targets: str | None = None
    optimizer: Literal["sgd", "momentum", "adamw"] = "adamw"
    lr: float | None = None
    batch_size: int = 4
    length: int = 32
    members: int = 16
    gate: float | None = None
    watch: str | None = None
    epsilon: float | None = None
    clip: float = 1.0
    delta: float = 1e-5
    trust: fed.Trusted = "central"
    seed: int = 0

    # ---- model ------------------------------------------------------------------------------

    def make_model(self) -> nn.Module:
        """Return the model with its trained part, in train mode; the same at every call."""
        model: nn.Module = finetuning.load_model(self.model)
        if self.lora_r or self.targets is not None:
            model = with_lora(find_anatomy(model), self.lora_r, self.targets, self.seed).model
        return model.train()

    @property
    def make_optimizer(self) -> partial[torch.optim.Optimizer]:
        """Return a function from parameters to the optimizer of clients."""
        kind, lr, settings = OPTIMIZERS[self.optimizer]
        return partial(kind, lr=lr if self.lr is None else self.lr, **settings)

    # ---- texts ------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return finetuning.load_tokenizer(self.model)

    @cached_property
    def _texts(self) -> tuple[list[list[int]], list[str], list[str], list[str]]:
        """Return the training texts' indices by client; training, public and held-out texts."""
        source = self.text or finetuning.EMBEDDED_MESSAGES
        texts = finetuning.read_texts(source, self.column)
        if len(texts) < _MIN_TEXTS:
            raise finetuning.SourceError(
                f"'{source}' holds {len(texts)} texts; at least {_MIN_TEXTS} are needed, of "
                "which a fifth calibrates the attacks and a fifth is in no client's batch."
            )
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.seed))
        fifth = len(texts) // _HELD_OUT
        public, held_out, training = order[:fifth], order[fifth : 2 * fifth], order[2 * fifth :]
        return (
            alike(len(training), self.clients, self.seed),
            [texts[i] for i in training],
            [texts[i] for i in public[:_MAX_PUBLIC_TEXTS]],
            [texts[i] for i in held_out],
        )

    def _rows(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text."""
        return finetuning.tokenize_rows(texts, self.tokenizer, self.length)

    @cached_property
    def rows(self) -> list[list[Tensor]]:
        """Return the rows of token ids that each client trains on.

        Raises:
            SourceError: A client has no rows, or a row is longer than the model's context.
        """
        hint, limit = "tokens that this model can read", self.tokenizer.model_max_length
        finetuning.check_option("--length", self.length, at_most=limit, hint=hint)
        shares, texts, _, _ = self._texts
        rows = [self._rows([texts[i] for i in numbers]) for numbers in shares]
        empty = [client for client, client_rows in enumerate(rows) if not client_rows]
        if empty:
            raise finetuning.SourceError(
                f"{len(empty)} of {self.clients} clients have no text of 2 tokens or more: give "
                "more text or fewer --clients."
            )
        return rows

    @cached_property
    def outside(self) -> list[Tensor]:
        """Return the held-out rows, which no client trains on."""
        return self._rows(self._texts[3])

    def _padded(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return rows as a batch, padded on the right."""
        return finetuning.PadRight(self.tokenizer.pad_token_id)(rows)

    def batches(self, client: int, round_: int) -> list[dict[str, Tensor]]:
        """Return a client's batches of a round: its rows in a random order of this round."""
        rows = self.rows[client]
        generator = torch.Generator().manual_seed(_round_seed(self.seed, client, round_))
        size = min(self.batch_size, len(rows))
        order: list[int] = []
        while len(order) < self.local_steps * size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        return [
            self._padded([rows[i] for i in order[step * size : (step + 1) * size]])
            for step in range(self.local_steps)
        ]

    # ---- a round ----------------------------------------------------------------------------

    def train(
        self, model: nn.Module, sent: State, client: int, round_: int
    ) -> tuple[dict[str, Tensor], float]:
        """Train a client's round; return its state and the mean loss of its steps.

        Args:
            model: A model of :meth:`make_model`. Its weights are replaced by ``sent``, and trained.
            sent: The state that the server sent.
            client: The number of the client.
            round_: The number of the round.
        """
        model.load_state_dict(dict(sent), strict=False)
        optimizer = self.make_optimizer([p for p in model.parameters() if p.requires_grad])
        losses = []
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            torch.manual_seed(_round_seed(self.seed, client, round_))
            for batch in self.batches(client, round_):
                fed.trained_on(batch)
                optimizer.zero_grad()
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        return fed.trained_state(model), math.fsum(losses) / len(losses)

    @torch.no_grad()
    def validation_loss(self, model: nn.Module, state: State) -> float:
        """Return the mean loss per token on held-out texts."""
        model.load_state_dict(dict(state), strict=False)
        model.eval()
        rows = self.outside[:_MAX_VALIDATION_TEXTS]
        total = tokens = 0.0
        for start in range(0, len(rows), self.batch_size):
            batch = self._padded(rows[start : start + self.batch_size])
            batch_tokens = float((batch["labels"][:, 1:] >= 0).sum())
            total += batch_tokens * float(model(**batch).loss)
            tokens += batch_tokens
        model.train()
        return total / tokens

    # ---- attacks, gates and privacy ---------------------------------------------------------

    def observer(self, folder: Path) -> fed.RoundObserver:
        """Return an observer that attacks the updates of this federation.

        Args:
            folder: The folder of the logs.
        """
        return fed.RoundObserver(
            self.make_model(),
            self.make_optimizer,
            self.local_steps,
            folder=folder,
            games=Games(targets=self.members, held_out=PublicText(self.outside)),
            settings=fed.RoundSettings(
                look_seconds=_NO_LIMIT,
                public_text=PublicText(self._rows(self._texts[2])),
                tokenizer=self.tokenizer,
            ),
        )

    @cached_property
    def words_hidden(self) -> str | None:
        """Return why a gate on words could judge no update here; None if it could.

        If there is a reason, gates do not watch words by default.
        """
        return self.observer(Path()).never_judged(WORDS)

    @property
    def watched(self) -> tuple[str, ...]:
        """Return the log names that the gates watch, by default all that can be judged."""
        if self.watch is not None:
            return (self.watch,)
        return (MEMBERSHIP,) if self.words_hidden else (WORDS, MEMBERSHIP)

    def gates(self) -> list[fed.RoundGate]:
        """Return a gate for each watched metric; none if ``gate`` is None.

        Raises:
            SourceError: The threshold is out of the range of a watched metric.
        """
        if self.gate is None:
            return []
        gates = []
        for name in self.watched:
            hint = f"--watch {WORDS} watches words alone" * (self.watch is None)
            with finetuning.refuse_errors(f"--watch {name}", ValueError, hint=hint):
                gates.append(fed.RoundGate(name, at_most=self.gate))
        return gates

    def account(self, ledger: Path | None) -> fed.ClientDP | None:
        """Return client-level differential privacy; None without ``epsilon``.

        Args:
            ledger: The file that records the releases of the server, or of one client if each
                client adds its own noise; None if this object releases nothing.

        Raises:
            DefenseError: The settings give no guarantee.
        """
        if self.epsilon is None:
            return None
        return fed.ClientDP(
            self.clip,
            clients=self.clients,
            target_delta=self.delta,
            target_epsilon=self.epsilon,
            rounds=self.rounds,
            trust=self.trust,
            ledger=ledger,
        )

    def epsilon_spent(self, folder: Path) -> float:
        """Return the largest epsilon of any client, by the ledgers in a folder."""
        ledgers = {path.read_bytes(): path for path in folder.glob("client_*.ledger")}
        accounts = [self.account(path) for path in ledgers.values()]
        return max((a.privacy.epsilon for a in accounts if a is not None), default=0.0)


def _round_seed(seed: int, client: int, round_: int) -> int:
    """Return the seed of a client in a round."""
    # A prime far above the numbers of clients and rounds, so that their seeds differ.
    return ((seed * 1_000_003 + client) * 1_000_003 + round_) % 2**63


def alike(n: int, clients: int, seed: int) -> list[list[int]]:
    """Split ``n`` texts into random shares of equal size (up to one text), one for each client.

    Args:
        n: The number of texts.
        clients: The number of clients.
        seed: The seed of the order.

    Returns:
        The indices of each client's texts.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[client::clients] for client in range(clients)]


State = Mapping[str, Tensor]
"""Tensors of a model by their names."""
Values = Mapping[str | int, float]
"""The headline of one family of attacks, by client; ``"sum"`` is the sum of all updates.

It is the highest value of any attack of the family; NaN if all are unknown.
"""


@dataclass(frozen=True)
class Round:
    """The results of a round; round 0 is the initial model.

    Attributes:
        number: The number of the round.
        loss: The validation loss of the model after the round.
        leakage: The leakage by family and headline, see :func:`leakage_of`.
        withheld: The clients whose update a gate withheld.
        absent: The reason why a client's update does not count, by client.
        epsilon: The epsilon spent so far; None without differential privacy.
        noise: The norm of the noise over the largest possible norm of the mean of clipped updates;
            None without differential privacy.
    """

    number: int
    loss: float
    leakage: Mapping[str, Values] = field(default_factory=dict)
    withheld: Collection[str | int] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    epsilon: float | None = None
    noise: float | None = None


def leakage_of(looks: Iterable[fed.RoundLook]) -> dict[str, Values]:
    """Return the leakage in a round, by the titles of family and headline metric.

    Args:
        looks: The measurements of each client's update, and of their sum.
    """
    values: dict[str, dict[str | int, float]] = {}
    families = {family.name: family for family in STANDARD_FAMILIES}  # in the table's order
    for look in looks:
        for series, channel in look.engine.series.items():
            families[channel.leak.name] = channel.leak
            by_client = values.setdefault(channel.leak.name, {})
            # A series holds the results of one attack; its channel names the headline.
            value = look.now.get(f"{series.log_name}/{channel.headline}", math.nan)
            highest = by_client.get(look.client, math.nan)
            by_client[look.client] = value if math.isnan(highest) else max(highest, value)
    return {
        f"{family.short_title}, {family.headline.replace('_', ' ').upper()}": values[name]
        for name, family in families.items()
        if name in values
    }


class _Server:
    """The server: it draws clients, averages their updates, and attacks the sum.

    Args:
        federation: The settings.
        folder: The folder of the ledgers.

    Attributes:
        state: The trained tensors of the current model, which the next round starts from.
        loss: The validation loss of ``state``.
        dp: The differential privacy of the server's noise; None if the server adds none.
    """

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._federation, self._folder = federation, folder
        self._model = federation.make_model()
        self.state: dict[str, Tensor] = fed.trained_state(self._model)
        self.loss = federation.validation_loss(self._model, self.state)
        central = federation.trust == "central"
        self.dp = federation.account(folder / "server.ledger") if central else None
        # These settings draw clients and divide the sum, even if clients add the noise.
        self._terms = self.dp or federation.account(None)

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon spent so far; if clients add the noise, the largest of any client."""
        if self._terms is None:
            return None
        if self.dp is not None:
            return self.dp.privacy.epsilon
        return self._federation.epsilon_spent(self._folder)

    @property
    def noise(self) -> float | None:
        """Return the norm of the noise over the largest norm of the mean of clipped updates.

        It does not depend on the data. It is None without differential privacy.
        """
        if self._terms is None:
            return None
        return self._terms.relative_noise(sum(tensor.numel() for tensor in self.state.values()))

    def draw_clients(self) -> list[int]:
        """Return the clients that take part in a round."""
        everyone = list(range(self._federation.clients))
        if self.dp is not None:
            self.dp.check_affords_another()
        return everyone if self._terms is None else self._terms.drawn(everyone)

    def close(
        self, round_: int, returned: Mapping[int, State | None], observer: fed.RoundObserver
    ) -> tuple[dict[int, str], fed.RoundLook]:
        """Compute the next model, and attack the sum of the updates.

        Args:
            round_: The number of the round.
            returned: The state of each drawn client; None if it sent nothing.
            observer: The observer that attacks the sum.

        Returns:
            The reason why an update does not count, by client; and the measurement of the sum.
        """
        sent = self.state
        updates: dict[int, State] = {}
        absent: dict[int, str] = {}
        for client, state in returned.items():
            if state is None:
                absent[client] = "sent nothing"
                continue
            try:
                updates[client] = fed.difference(sent, state)
            except fed.UpdateError as error:
                absent[client] = str(error)
        if self.dp is not None:
            mean = self.dp.mean(dict.fromkeys(returned) | updates, sent).update
        else:
            expected = len(updates) if self._terms is None else self._terms.per_round
            mean = {n: t.double() * 0.0 for n, t in sent.items()}
            for update in updates.values():
                for name, tensor in mean.items():
                    tensor.add_(update[name].double(), alpha=1 / expected)
        self.state = fed.moved(sent, mean)
        self.loss = self._federation.validation_loss(self._model, self.state)
        return absent, self._look(round_, sent, list(updates), observer)

    def _look(
        self, round_: int, sent: State, clients: list[int], observer: fed.RoundObserver
    ) -> fed.RoundLook:
        """Attack the sum of the updates: all that a server sees under secure aggregation."""
        batches = [b for client in clients for b in self._federation.batches(client, round_)]
        utility = {} if math.isnan(self.loss) else {"val_loss": self.loss}
        observer.begin(round_, sent)
        look = observer.look(
            self.state,
            fed.SUM,
            batches=batches,
            noise_std=0.0 if self._terms is None else self._terms.mean_noise_std,
            utility=utility,
            logged=False,
        )
        observer.log(look, defenses=[] if self.dp is None else [self.dp])
        return look


def train_in_process(
    federation: Federation, folder: Path, closed: Callable[[Round], None]
) -> _Server:
    """Train all rounds, the clients of a round one after the other.

    Args:
        federation: The settings.
        folder: The folder of logs and ledgers.
        closed: A function that is called with the results of each round, from round 0 on.

    Raises:
        ValueError: A gate watches a metric that is not logged.
        BudgetSpent: The privacy budget allows no further round.
    """
    server = _Server(federation, folder)
    closed(Round(0, server.loss))
    model = federation.make_model()
    ledgers = [folder / f"client_{c}.ledger" for c in range(federation.clients)]
    central = federation.trust == "central"
    accounts = [None if central else federation.account(path) for path in ledgers]
    observer, gates = federation.observer(folder), federation.gates()
    outs = [fed.OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(accounts)]
    with ExitStack() as stack:
        stack.push(lambda error, *_: observer.end(error.__name__ if error else "finished"))
        for round_ in range(1, federation.rounds + 1):
            sent = server.state
            returned: dict[int, State | None] = {}
            looks: list[fed.RoundLook | None] = []
            withheld: list[str | int] = []
            for client in server.draw_clients():
                with fed.recording() as batches:
                    state, loss = federation.train(model, sent, client, round_)
                leaving = outs[client].leaves(
                    round_, sent, state, batches, utility={"train_loss": loss}
                )
                returned[client] = leaving.state
                looks.append(leaving.look)
                withheld += [client] if leaving.withheld else []
            absent, sum_look = server.close(round_, returned, observer)
            leakage = leakage_of(look for look in (*looks, sum_look) if look is not None)
            closed(
                Round(round_, server.loss, leakage, withheld, absent, server.epsilon, server.noise)
            )
    return server

"""The check at the start of a round: is what the server sent crafted?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import PublicText, TextSource
from lightning_fedleak.attacks.row_space import SharedInput, find_linear_maps, input_states
from lightning_fedleak.engine import Run, announce
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.federation import inspection
from lightning_fedleak.federation.inspection import Agreed, Answer, Inspection, LastRound
from lightning_fedleak.model.anatomy import Anatomy

StartAction = Literal["warn", "refuse"]
Server = Literal["mean", "other"]

TEXTS, LENGTH = 64, 64  # public texts that bottlenecks are run on at most, and tokens; not tuned
AT_ONCE = 8  # texts of one run, which bounds the memory


class CraftedValuesError(RuntimeError):
    """A client refused a round: what the server sent looks crafted, or as of a run that diverged.

    Attributes:
        inspection: what was found.
    """

    def __init__(self, message: str, inspection: Inspection) -> None:
        super().__init__(message)
        self.inspection = inspection


@dataclass(frozen=True)
class StartCheck:
    """What is asked of the values that a server sends, and what is done where something is found.

    The rules are those of ``fedleak inspect``. All but one read what the server sent, and public
    text. ``jump`` reads this client's own last update too.

    Attributes:
        action: ``"warn"``; or ``"refuse"``: the client does not train on what looks crafted, nor on
            what looks as of a run that diverged, since crafted values may hide there.
        own_updates: whether ``jump`` is asked, from the second round in a row on. It is not
            applicable where clients do not train with an Adam, whose steps make rows of one size,
            nor under a :class:`ClientDP`, nor of an adapter whose rows it did not move.
        server: what it does with updates: ``"mean"``; or ``"other"`` (momentum, Adam, noise), with
            which honest rows jump too, so that the rule is not applicable.
        shared_seed: the model that the observer was given holds the adapter values that every
            client starts with. By default of a seed of its own: what is zero in it is compared.
        public_text: that bottlenecks are run on, nothing private; by default the observer's.
            Without any, ``blind_rows`` is not applicable.
        outside_epsilon: accept refusals in sight of one's own updates under differential privacy,
            which no epsilon covers.
    """

    action: StartAction = "warn"
    own_updates: bool = True
    server: Server = "mean"
    shared_seed: bool = False
    public_text: PublicText | None = None
    outside_epsilon: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("action", StartAction), ("server", Server)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise ValueError(
                    f"StartCheck({name}=) is one of {get_args(choices)}, not {value!r}"
                )

    def check_private(self, defense: str) -> None:
        """Refuse an action in sight of private data under differential privacy.

        Raises:
            ValueError: says what to change.
        """
        if self.action == "refuse" and self.own_updates and not self.outside_epsilon:
            raise ValueError(
                f"StartCheck(action='refuse') refuses rounds in sight of this client's own "
                f"updates, which the epsilon of {defense} does not cover: give own_updates=False, "
                "action='warn', or accept it by outside_epsilon=True"
            )


def agree(model: nn.Module, *, shared_seed: bool = False) -> Agreed:
    """Return what a client holds of a model that is set up as agreed and not trained yet.

    Names are those of the model's parameters. A base that is quantized is not known.
    """
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    start: dict[str, Tensor] = {}
    for adapter in inspection.find_adapters(parameters):
        start |= {n: t.clone() for n, t in parameters.items() if adapter.holds(n)}
    base: dict[str, Tensor] = {}
    scales: dict[str, float] = {}
    layers: Any = dict(model.named_modules())
    for adapter in inspection.find_adapters(start):
        path, lora, name = adapter.name.removesuffix(".weight").rpartition(".lora_A.")
        layer = layers.get(path)
        rows = inspection.base_rows(layer.base_layer) if lora else None
        scale = getattr(layer, "scaling", {}).get(name)
        if rows is None or scale is None or getattr(layer, "use_dora", {}).get(name):
            continue
        if bool(adapter.up.any()):
            rows = rows + (scale * adapter.up @ adapter.down).to(rows)
        base[adapter.name], scales[adapter.name] = rows, scale
    shapes = {n: t.shape for n, t in parameters.items()}
    return Agreed(base, scales, start, shared_seed, shapes)


@torch.no_grad()
def usual_inputs(
    anatomy: Anatomy, state: Mapping[str, Tensor], public: PublicText
) -> dict[str, Tensor]:
    """Return what the bottlenecks of a model read at the most usual token types, (k, d), by name.

    Args:
        anatomy: of the model, which holds the values that were received.
        state: these values, by parameter name.
        public: text that is run; none of it is private.
    """
    names = {a.name for a in inspection.find_adapters(state) if a.bias is not None}
    maps = [m for m in find_linear_maps(anatomy) if m.name in names]
    if not maps:
        return {}
    shared = [SharedInput((m,), state[m.name].shape[m.axis]) for m in maps]
    batch = public.batch(min(len(public), TEXTS), LENGTH, torch.Generator().manual_seed(0))
    assert batch.attention_mask is not None
    usual = inspection.usual_types(batch.input_ids[batch.attention_mask.bool()])
    sums = [torch.zeros(len(usual), one.width, dtype=torch.float64) for one in shared]
    for ids, mask in zip(
        torch.split(batch.input_ids, AT_ONCE),
        torch.split(batch.attention_mask, AT_ONCE),
        strict=True,
    ):
        real = mask.bool()
        for total, states in zip(sums, input_states(anatomy, shared, ids, mask), strict=True):
            total += inspection.sum_inputs(states.cpu()[real], ids[real], usual)
    return {m.name: total for m, total in zip(maps, sums, strict=True)}


class RoundStart:
    """What a client remembers of the round before, and what it says of the one that begins.

    Args:
        check: what is asked, and what is done.
        anatomy: of the observer's model, which holds the agreed start and later what is sent.
        public: text that bottlenecks are run on; None leaves ``blind_rows`` out.

    Attributes:
        incomparable: why rounds cannot be compared; empty: they can.
        refused: the error of the round at work; None where it was not refused.
        first_round: the largest number that a federation's first round may have: 1, as in Flower.
    """

    def __init__(self, check: StartCheck, anatomy: Anatomy, public: PublicText | None) -> None:
        self.check = check
        self.anatomy = anatomy
        self.public = public
        self.agreed = agree(anatomy.root, shared_seed=check.shared_seed)
        self.incomparable, self.first_round = "", 1
        if check.server != "mean":
            self.incomparable = "the server does more than take a mean, as StartCheck(server=) says"
        if not check.own_updates:
            self.incomparable = "own updates are not asked about, as StartCheck(own_updates=) says"
        self.refused: CraftedValuesError | None = None
        self._announced: set[str] = set()
        self._sent: tuple[int, dict[str, Tensor]] | None = None
        self._updates: dict[str | int, tuple[int, dict[str, Tensor]]] = {}

    def inspect(self, round_: int, received: Mapping[str, Tensor]) -> Inspection:
        """Return what the rules say of a round that begins, of each client the worst.

        Args:
            round_: its number.
            received: what is trained, by parameter name; the model holds it.
        """
        agreed = self.agreed
        if self.public is not None:
            agreed = replace(agreed, usual=usual_inputs(self.anatomy, received, self.public))
        before = self._sent
        lasts = [
            LastRound(before[1], update)
            for number, update in self._updates.values()
            if before is not None and number == before[0] == round_ - 1
        ]
        why = self.incomparable or "this client took no part in the round before" * (not lasts)
        first = before is None and round_ <= self.first_round
        choices: list[LastRound | None] = [*lasts] or [None]
        results = [
            inspection.inspect_received(received, agreed, last, first=first, incomparable=why)
            for last in choices
        ]
        self._sent = round_, {n: received[n].detach().clone() for n in self.agreed.start or ()}
        return next((r for r in results if r.verdict == "crafted"), results[-1])

    def note(self, client: str | int, returned: Mapping[str, Tensor]) -> None:
        """Remember what of a client left in this round, by parameter name."""
        if self._sent is not None:
            round_, sent = self._sent
            update = {n: returned[n].detach() - t for n, t in sent.items() if n in returned}
            self._updates[client] = round_, update

    def memory(self, client: str | int) -> tuple[int, dict[str, Tensor]]:
        """Return the last round that a client took part in and its tensors; 0 and none before."""
        round_, update = self._updates.get(client, (0, {}))
        if self._sent is None or round_ != self._sent[0]:
            return 0, {}
        sent = {f"sent/{n}": t for n, t in self._sent[1].items()}
        return round_, sent | {f"own/{n}": t for n, t in update.items()}

    def recall(self, client: str | int, round_: int, tensors: Mapping[str, Tensor]) -> None:
        """Remember what :meth:`memory` returned, in another process perhaps."""
        parts = {
            part: {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}
            for part in ("sent/", "own/")
        }
        self._sent, self._updates[client] = (round_, parts["sent/"]), (round_, parts["own/"])

    def judge(self, round_: int, received: Mapping[str, Tensor]) -> Inspection:
        """Return what the rules say of a round that begins, and warn or refuse.

        What a rule is for and cannot be asked of is named once.

        Raises:
            CraftedValuesError: something was found, and the action is to refuse.
        """
        self.refused, result = None, self.inspect(round_, received)
        for text in map(_unasked, (a for a in result.answers if a.unasked)):
            if text not in self._announced:
                self._announced.add(text)
                announce(f"StartCheck in round {round_}: {text}")
        if result.verdict == "nothing found":
            return result
        rows = [f"{a.rule}: {' '.join(a.rows)}" for a in result.found] or list(result.diverged)
        does = "warns" if self.check.action == "warn" else "refuses"
        text = (
            f"StartCheck {does} in round {round_}: what the server sent looks {result.verdict} "
            f"({'; '.join(rows[: inspection.WORST])}). `fedleak inspect` shows every rule"
        )
        if self.check.action == "refuse":
            self.refused = CraftedValuesError(text, result)
            raise self.refused
        announce(text)
        return result


def _unasked(answer: Answer) -> str:
    """Return in words what a rule is for and could not be asked of."""
    names, why = answer.unasked, f" ({answer.why})" if answer.why else ""
    listed = ", ".join(names[: inspection.WORST])
    more = ", ..." if len(names) > inspection.WORST else ""
    return f"{answer.rule} is not asked of {len(names)} tensors{why}: {listed}{more}"


def prepare_start(
    run: Run, inspect: bool | StartCheck, public_text: TextSource | None
) -> RoundStart | None:
    """Return the check of what is sent in a federation; None without one.

    Args:
        run: the federation, whose model holds the agreed start.
        inspect: of the observer's settings.
        public_text: the observer's.

    Raises:
        ValueError: refusals that no epsilon covers, or texts that cannot be read.
    """
    if not inspect:
        return None
    check = inspect if isinstance(inspect, StartCheck) else StartCheck()
    for defense in accounting(run.defenses):
        check.check_private(defense.name)
    public = check.public_text or PublicText.parse(public_text, run.tokenizers[0])
    if public is not None:
        public = PublicText.resolve(public, run.anatomy)
    start = RoundStart(check, run.anatomy, public)
    if not start.incomparable and "adam" not in type(run.optimizers[0]).__name__.lower():
        start.incomparable = "clients do not train with an Adam, under which rows are of a size"
    return start

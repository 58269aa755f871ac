"""How a loop is watched: the settings that Watch and LeakageCallback take by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, signature
from typing import Any, Literal, TypeVar

from lightning_fedleak.attacks import Attack, TextSource
from lightning_fedleak.looks import (
    Games,
    LookSettings,
    Memorization,
    Options,
    Selection,
    cadence_of,
    known_stages,
    selected,
)
from lightning_fedleak.validate import check_choice, check_names, check_number

Face = TypeVar("Face", bound=type)

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


@dataclass(frozen=True)
class WatchSettings(LookSettings):
    """The settings of a :class:`Watch`, which takes each of them by its name.

    Attributes:
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default with listed attacks: 50.
        max_overhead: largest share of the training time that looks take; either this or
            ``every_n_steps``. Default with ``attacks="auto"``: 0.005.
        stages: where to measure: ``"shared"``, and under DDP ``"local"`` or ``"aggregate"``.
        reveal: write what was recovered to local files of mode 0600.
        local_steps: attack the weight change of so many optimizer steps.
        tokenizer: decodes what is revealed, and reads the texts of ``public_text``.
        games: how membership games are played.
        public_text: for ``attacks="auto"``: text like the client's, to calibrate on.
        report: write ``report.html`` and ``report.json`` beside the logs at the end.
        utility: names in :attr:`Watch.utility` to log beside leakage.
        memorization: how the trained weights are tested; needs ``loader=``.
        client: who is a client: ``"rank"`` (each process) or ``"world"``.
        precision: how the loop runs its model: ``"bf16-mixed"`` or ``"16-mixed"`` under autocast.
            None: by the dtype of the weights, without autocast.
        scaler: the GradScaler of the loop; matters under DDP alone.
        tensorboard: log to TensorBoard, where it is installed.
        chooses: the loop keeps the weights where :meth:`Watch.choose` is lowest. Some texts are put
            aside then, on which they are scored when the loop ends.
    """

    every_n_steps: int | None = None
    max_overhead: float | None = None
    stages: Sequence[str] = ("shared",)
    reveal: bool = False
    local_steps: int | None = None
    tokenizer: Any = None
    games: Games = field(default_factory=Games)
    public_text: TextSource | None = None
    report: bool = False
    utility: Sequence[str] = ("train_loss", "val_loss")
    memorization: Memorization = field(default_factory=Memorization)
    client: Literal["rank", "world"] = "rank"
    precision: str | None = None
    scaler: Any = None
    tensorboard: bool = True
    chooses: bool = False

    def chosen(
        self, attacks: Sequence[Attack] | Attack | Literal["auto"]
    ) -> tuple[Selection, Options]:
        """Return what an engine is made of.

        Args:
            attacks: the attacks, or ``"auto"``.

        Raises:
            ValueError: a setting out of its range, or two that contradict each other.
        """
        check_number("look_seconds", self.look_seconds, above=0)
        check_choice("client", self.client, ("rank", "world"))
        check_choice("precision", self.precision, PRECISIONS, optional=True)
        rounds = self.local_steps is not None
        text = self.public_text, self.tokenizer
        selection = selected(attacks, self.assume, *text, games=self.games, rounds=rounds)
        return selection, Options(
            cadence=cadence_of(self.every_n_steps, self.max_overhead, auto=selection.auto),
            stages=known_stages(self.stages),
            batch_adapter=self.batch_adapter,
            utility=(self.utility,) if isinstance(self.utility, str) else tuple(self.utility),
            local_steps=self.local_steps,
            tokenizer=self.tokenizer,
            games=self.games,
            texts=self.texts,
            look_seconds=self.look_seconds,
            cache=self.cache,
            reveal=self.reveal,
            memorization=self.memorization,
        )


def named_settings(owner: str, **arguments: Any) -> WatchSettings:
    """Return the settings that the arguments of a face name.

    Raises:
        TypeError: there is no such setting.
    """
    check_names(owner, arguments, [one.name for one in fields(WatchSettings)])
    return WatchSettings(**arguments)


def show_settings(face: Face) -> Face:
    """Return a class whose signature has the fields of WatchSettings in place of ``**settings``."""
    args = [p for p in signature(face).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    more = [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=one.default if one.default_factory is MISSING else one.default_factory(),
            annotation=one.type,
        )
        for one in fields(WatchSettings)
    ]
    face.__signature__ = signature(face).replace(  # type: ignore[attr-defined]
        parameters=[*args, *more]
    )
    return face

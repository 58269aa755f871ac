"""Lightning is two packages, ``lightning.pytorch`` and ``pytorch_lightning``, of twin classes.

``lightning`` installs both, and a program may load either. A run uses one of them: that of its
Trainer. Both are imported here, which takes a tenth of a second more than one, so that a class does
not depend on what the program imported first. An import of either moves the log that all messages
go to, and sets levels of loggers: the second one's import is undone in that.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Union

from lightning_utilities.core import rank_zero

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import Strategy

    EitherCallback = Callback
    EitherStrategy = Strategy
    AnyStrategy = Strategy

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def both(*names: str) -> tuple[Any, ...]:
    """Return the attributes of these names in both packages; of classes, for ``isinstance``.

    Args:
        names: below the package: ``"strategies.DDPStrategy"``.
    """
    return tuple(_attribute(package, name) for name in names for package in PACKAGES)


def package_of(thing: object) -> str:
    """Return the package that a Trainer, a strategy, an accelerator or a class of them comes from.

    Raises:
        TypeError: from neither.
    """
    for kind in (thing if isinstance(thing, type) else type(thing)).__mro__:
        if (package := _home(kind)) is not None:
            return package
    raise TypeError(f"{thing!r} is an object of neither {' nor '.join(PACKAGES)}")


def twin(name: str, thing: object) -> Any:
    """Return the attribute of a name in the package that an object comes from.

    Args:
        name: below the package: ``"strategies.DDPStrategy"``.
        thing: as :func:`package_of` takes it.
    """
    return _attribute(package_of(thing), name)


def mixed(name: str, thing: object, counterpart: object) -> str | None:
    """Return one sentence where two objects come from different packages; None otherwise.

    Args:
        name: of the first object, for the sentence.
        thing: the first object.
        counterpart: the Trainer, or an object that the Trainer chose.
    """
    package, trainer_package = package_of(thing), package_of(counterpart)
    if package == trainer_package:
        return None
    return (
        f"{name} is of `{package}` and this Trainer of `{trainer_package}`: import both from one "
        "of the two."
    )


def _attribute(package: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


@contextmanager
def _unchanged() -> Iterator[None]:
    """Put back what an import of Lightning changes for others: logs, and how warnings are shown."""
    named = logging.root.manager.loggerDict.values()
    loggers = [one for one in named if isinstance(one, logging.Logger)]
    states = [(one, one.level, one.propagate, [*one.handlers]) for one in loggers]
    names = ("log", "rank_zero_deprecation_category")
    messages = {name: getattr(rank_zero, name) for name in names}
    line_of_warning = warnings.formatwarning
    try:
        with warnings.catch_warnings():
            yield
    finally:
        warnings.formatwarning = line_of_warning
        for name, value in messages.items():
            setattr(rank_zero, name, value)
        for one, level, propagate, handlers in states:
            one.setLevel(level)
            one.propagate = propagate
            one.handlers[:] = handlers


def _import_both() -> None:
    """Import both packages: as the program does what it has or would import, the other unseen."""
    first = next((package for package in PACKAGES if package in sys.modules), PACKAGES[0])
    importlib.import_module(first)
    with _unchanged():
        for package in PACKAGES:
            importlib.import_module(package)


_import_both()


def _home(kind: type) -> str | None:
    names = (p for p in PACKAGES if f"{kind.__module__}.".startswith(f"{p}."))
    return next(names, None)


def _refuse_trainer(callback: object, trainer: str) -> NoReturn:
    name = type(callback).__name__
    raise TypeError(
        f"{name} is a callback of Lightning's Trainer and does not work in {trainer}: train the "
        f"model in Trainer(callbacks=[{name}(...)]) of lightning.pytorch, a causal language model "
        "by lightning_fedleak.cli.finetuning.CausalLMFineTuning(model). lightning_fedleak.trainers "
        "has LeakageCallback for transformers' Trainer, and Watch for other loops."
    )


# ---- classes that both packages accept as their own ------------------------------------------


class _OnePackageFirst(ABCMeta):
    """Orders base classes: those of the first package come before those of the other."""

    def mro(cls) -> list[type]:
        """Return the usual order, with the other package's classes after the first one's."""
        order = super().mro()
        package = next(filter(None, map(_home, order)), None)
        foreign = [kind for kind in order if _home(kind) not in (None, package)]
        native = [kind for kind in order if kind not in foreign]
        end = max((place for place, kind in enumerate(native, 1) if _home(kind)), default=0)
        return [*native[:end], *foreign, *native[end:]]


if not TYPE_CHECKING:

    class EitherCallback(*both("callbacks.Callback")):
        """A callback for the Trainers of both packages, and of no other library."""

        def on_init_end(self, *_: object, **__: object) -> None:
            """Raise an error for the Trainer of transformers, which calls this first."""
            _refuse_trainer(self, "transformers.Trainer")

        def on_after_setup(self, *_: object, **__: object) -> None:
            """Raise an error for Fabric, which calls this first."""
            _refuse_trainer(self, "Fabric")

    class EitherStrategy(*both("strategies.Strategy"), metaclass=_OnePackageFirst):
        """A strategy for the Trainers of both packages.

        One that also is a class of one package has its methods, never the other's.
        """

    AnyStrategy = Union[both("strategies.Strategy")]  # noqa: UP007

"""Support for both packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``.

The two packages define the same classes twice. ``lightning`` installs both, and a program may use
either; a run uses the package of its Trainer. Both are imported here, so that our classes do not
depend on which one the program imported first; this takes 0.1 s more than importing one. The import
of each package changes global loggers and warnings. The changes by the second one are undone.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Union

from lightning_utilities.core import rank_zero

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import Strategy

    EitherCallback = Callback
    EitherStrategy = Strategy
    AnyStrategy = Strategy

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def both(*names: str) -> tuple[Any, ...]:
    """Return attributes of both packages, such as classes for ``isinstance``.

    Args:
        names: Names in the packages, such as ``"strategies.DDPStrategy"``.
    """
    return tuple(_attribute(package, name) for name in names for package in PACKAGES)


def package_of(thing: object) -> str:
    """Return the package that an object of Lightning, or a class, comes from.

    Args:
        thing: A Trainer, a strategy, an accelerator, or a class of them.

    Raises:
        TypeError: It comes from neither package.
    """
    for cls in (thing if isinstance(thing, type) else type(thing)).__mro__:
        if (package := _package_of_class(cls)) is not None:
            return package
    raise TypeError(f"{thing!r} is an object of neither {' nor '.join(PACKAGES)}")


def twin(name: str, thing: object) -> Any:
    """Return an attribute of the package that an object comes from.

    Args:
        name: A name in the package, such as ``"strategies.DDPStrategy"``.
        thing: An object that :func:`package_of` takes.
    """
    return _attribute(package_of(thing), name)


def mixed(name: str, thing: object, counterpart: object) -> str | None:
    """Return a sentence for a message if two objects come from different packages, else None.

    Args:
        name: The name of the first object, for the sentence.
        thing: The first object.
        counterpart: The Trainer, or an object that the Trainer created, such as its accelerator.
    """
    package, trainer_package = package_of(thing), package_of(counterpart)
    if package == trainer_package:
        return None
    return (
        f"{name} is of `{package}` and this Trainer of `{trainer_package}`: import both from the "
        "same package."
    )


def _attribute(package: str, name: str) -> Any:
    """Return an attribute of a package, such as that of ``"strategies.DDPStrategy"``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restore the loggers and the warnings that an import of Lightning changes."""
    entries = logging.root.manager.loggerDict.values()  # loggers, and placeholders of parents
    loggers = [logger for logger in entries if isinstance(logger, logging.Logger)]
    states = [(log, log.level, log.propagate, [*log.handlers]) for log in loggers]
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
        for log, level, propagate, handlers in states:
            log.setLevel(level)
            log.propagate = propagate
            log.handlers[:] = handlers


def _import_both() -> None:
    """Import both packages, and undo the side effects of the one that the program does not use."""
    preferred = next((package for package in PACKAGES if package in sys.modules), PACKAGES[0])
    importlib.import_module(preferred)
    with _unchanged():
        for package in PACKAGES:
            importlib.import_module(package)


_import_both()


def _package_of_class(cls: type) -> str | None:
    """Return the package of Lightning in which a class is defined; None if it is in neither."""
    names = (p for p in PACKAGES if f"{cls.__module__}.".startswith(f"{p}."))
    return next(names, None)


# ---- fits in other processes ----------------------------------------------------------------

# The key of this package's results among those that a launcher returns to the main process.
_RESULTS = "lightning_fedleak"


def _return_results(launcher: Any) -> None:
    """Let a launcher return what monitors, gates and defences know to the main process.

    A fit with ``ddp_spawn``, ``ddp_fork`` or ``ddp_notebook`` runs in other processes. Lightning
    returns its weights and logged metrics, and calls no method of a callback in the main process.

    Args:
        launcher: Lightning's class of launchers of such fits.
    """
    collect, update = launcher.get_extra_results, launcher.update_main_process_results

    def get_extra_results(self: Any, trainer: Any) -> Any:
        extra = collect(self, trainer)
        if trainer.state.fn == "fit":
            results = {key: part.fit_results() for key, part in _parts(trainer)}
            extra[_RESULTS] = pickle.dumps(results)  # else tensors would be shared, not copied
        return extra

    def update_main_process_results(self: Any, trainer: Any, extra: Any) -> None:
        update(self, trainer, extra)
        results = pickle.loads(extra[_RESULTS]) if _RESULTS in extra else {}
        for key, part in _parts(trainer):
            if key in results:
                part.load_fit_results(results[key])

    launcher.get_extra_results = get_extra_results
    launcher.update_main_process_results = update_main_process_results


def _parts(trainer: Any) -> list[tuple[str, Any]]:
    """Return the strategy and callbacks of a Trainer that have results of a fit, with a key."""
    parts = [("", trainer.strategy), *((c.state_key, c) for c in trainer.callbacks)]
    return [(key, part) for key, part in parts if hasattr(part, "fit_results")]


for _launcher in both("strategies.launchers._MultiProcessingLauncher"):
    _return_results(_launcher)


# ---- base classes that are accepted by both packages -----------------------------------------


class _OnePackageFirst(ABCMeta):
    """A metaclass that puts the classes of one Lightning package before those of the other.

    So a class that derives from both uses the methods of one of them: the package of its first base
    class from Lightning.
    """

    def mro(cls) -> list[type]:
        """Return the method resolution order, with the other package's classes moved back."""
        order = super().mro()
        package = next(filter(None, map(_package_of_class, order)), None)
        foreign = [base for base in order if _package_of_class(base) not in (None, package)]
        native = [base for base in order if base not in foreign]
        end = max((i for i, base in enumerate(native, 1) if _package_of_class(base)), default=0)
        return [*native[:end], *foreign, *native[end:]]


if not TYPE_CHECKING:

    class EitherCallback(*both("callbacks.Callback")):
        """A callback for the Trainers of both packages, and of no other library."""

        def on_after_setup(self, *_: object, **__: object) -> None:
            """Raise an error for Fabric and transformers' Trainer, which call this first."""
            raise TypeError(
                f"{type(self).__name__} is a callback of Lightning's Trainer: with transformers' "
                "or TRL's write trainer.add_callback(LeakageCallback(trainer)), in a loop of your "
                "own use lightning_fedleak.trainers.Watch"
            )

        on_init_end = on_train_begin = on_after_setup

    class EitherStrategy(*both("strategies.Strategy"), metaclass=_OnePackageFirst):
        """A strategy for the Trainers of both packages.

        A subclass that also derives from a strategy of one package uses that package's methods.
        """

    AnyStrategy = Union[both("strategies.Strategy")]  # noqa: UP007

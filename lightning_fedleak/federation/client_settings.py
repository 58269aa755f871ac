"""The settings of client-level privacy, their checks, and the file that keeps a ledger's terms."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation.updates import Update
from lightning_fedleak.validate import check_choice, check_integer, check_number

ClientSampling = Literal["all", "poisson", "fixed"]
Trusted = Literal["central", "local", "secure_aggregation"]

_TERMS_SCHEMA = 1  # version of the file <ledger>.terms; a change refuses older ledgers

_number = partial(check_number, error=DefenseError)
_integer = partial(check_integer, error=DefenseError)
_choice = partial(check_choice, error=DefenseError)


@dataclass(frozen=True)
class ClientReleaseSettings:
    """Rarely changed settings of a client's releases.

    Attributes:
        dropouts: with ``trust="secure_aggregation"``, number of clients in a round whose share of
            noise may be missing.
        seed: for tests only. Whoever knows the seed can remove the noise, so epsilon is infinite.
    """

    dropouts: int = 0
    seed: int | None = None


def check_numbers(
    clip: float,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    rounds: int | None,
    target_delta: float,
    clients: int,
    accountant: str,
) -> None:
    """Refuse a clip norm, noise, a budget, rounds, a delta or accountant without a guarantee."""
    _number("ClientDP: clip", clip, above=0)
    hint = "an epsilon of 0 allows no release"
    _number("ClientDP: target_epsilon", target_epsilon, above=0, optional=True, hint=hint)
    if noise_multiplier is None and (target_epsilon is None or rounds is None):
        raise DefenseError(
            "ClientDP: give noise_multiplier, or target_epsilon and rounds, from which it is "
            "computed"
        )
    hint = "without noise no epsilon holds"
    _number("ClientDP: noise_multiplier", noise_multiplier, above=0, optional=True, hint=hint)
    _integer("ClientDP: rounds", rounds, optional=True)
    _integer("ClientDP: clients", clients)
    hint = "publishing one client's data at random must not count as private"
    _number("ClientDP: target_delta", target_delta, above=0, below=1 / clients, hint=hint)
    _choice("ClientDP: accountant", accountant, ("prv", "rdp", "filter"))
    if accountant == "filter" and target_epsilon is None:
        raise DefenseError("ClientDP: accountant='filter' keeps a budget: give target_epsilon")


def expect_per_round(sampling: str, per_round: float | None, clients: int) -> float:
    """Return the expected number of clients in a round.

    Raises:
        DefenseError: ``per_round`` does not fit the other settings.
    """
    _choice("ClientDP: sampling", sampling, get_args(ClientSampling))
    if sampling == "all":
        hint = "with sampling='all' each client takes part"
        _choice("ClientDP: per_round", per_round, (None, clients), hint=hint)
        return float(clients)
    if per_round is None:
        raise DefenseError(f"ClientDP: sampling={sampling!r} needs per_round=, clients of a round")
    hint = f"sampling={sampling!r} draws so many of the clients"
    drawn = _number("ClientDP: per_round", per_round, above=0, at_most=clients, hint=hint)
    if sampling == "fixed" and drawn % 1:
        raise DefenseError(f"ClientDP: with sampling='fixed' per_round={drawn!r} must be whole")
    return float(drawn)


def check_trust(
    trust: str, sampling: str, release: ClientReleaseSettings, per_round: float
) -> None:
    """Refuse settings under which the noise, or its account, is not that of the whole sum."""
    hint = (
        "the server sees each update and adds the noise, each client adds its own, or each adds a "
        "share and the server sees only the sum"
    )
    _choice("ClientDP: trust", trust, get_args(Trusted), hint=hint)
    if trust == "secure_aggregation" and sampling == "poisson":
        raise DefenseError(
            "ClientDP: shares of noise add up to the whole only where it is known how many clients "
            "take part: with trust='secure_aggregation' use sampling='fixed' or 'all'"
        )
    shared = trust == "secure_aggregation"
    most = math.ceil(per_round) - 1 if shared else 0
    hint = f"fewer than the {per_round:g} clients of a round" if shared else "for shares of noise"
    _integer("ClientDP: dropouts", release.dropouts, at_least=0, at_most=most, hint=hint)


def check_terms(ledger: Path, terms: Mapping[str, object]) -> None:
    """Write the terms of the ledger's releases to a file, or compare them with an earlier run's.

    Args:
        ledger: path of the ledger; its terms are in ``<ledger>.terms``.
        terms: the settings that the accounting depends on.

    Raises:
        DefenseError: an earlier run had other terms, or they are not known.
    """
    path = ledger.with_name(f"{ledger.name}.terms")
    data = (json.dumps({"schema": _TERMS_SCHEMA, **terms}, sort_keys=True) + "\n").encode()
    try:
        released = ledger.exists() and ledger.stat().st_size
        if not released and not path.is_symlink() and path.exists():
            content = path.read_bytes()
            if len(content) < len(data) and data.startswith(content):  # cut off by a kill
                path.unlink()
        exists = path.exists()
        agrees = exists and not path.is_symlink() and path.read_bytes() == data
        if not agrees and (exists or released):
            raise DefenseError(
                f"ledger={str(ledger)!r} was kept under other terms than {data.decode().strip()} "
                f"(see {path.name}): keep clients, sampling and trust, or begin a new run from a "
                "model that these clients did not train, with a new path"
            )
        if exists:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DefenseError(
            f"ledger={str(ledger)!r} cannot be used ({error}): give a path in a folder that exists "
            "and may be written"
        ) from error


def check_rounding(like: Update, noise_std: float) -> None:
    """Refuse a model whose dtype rounds a client's share of noise away.

    Shares add up to the whole noise only before rounding. Rounding to steps of one standard
    deviation changes the distribution of the sum by ``exp(-2 pi^2)``, 3e-9. With far larger steps a
    share has no effect.

    Args:
        like: the trained tensors of the model that was sent.
        noise_std: standard deviation of a share.

    Raises:
        DefenseError: a tensor is rounded too coarsely; the message names it.
    """
    for name, tensor in like.items():
        eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 1.0
        step = eps * float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        if not step <= noise_std:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise DefenseError(
                f"ClientDP: '{name}' was sent in {dtype} with numbers that are rounded to steps of "
                f"{step:.2g}, which rounds a share of noise of {noise_std:.2g} away: send float32, "
                "or clip higher"
            )

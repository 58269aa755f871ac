"""The settings of client-level privacy, their checks, and the file that keeps a ledger's terms."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lightning_fedleak.defenses import DefenseError, QuantileClip
from lightning_fedleak.federation.updates import Update
from lightning_fedleak.validate import check_choice, check_integer, check_number

ClientSampling = Literal["all", "poisson", "fixed"]
Trusted = Literal["central", "local", "secure_aggregation"]

_TERMS_SCHEMA = 1  # version of the file <ledger>.terms; a change refuses older ledgers


@dataclass(frozen=True)
class ClientReleaseSettings:
    """Rarely changed settings of a client's releases.

    Attributes:
        dropouts: with ``trust="secure_aggregation"``, number of clients in a round whose share of
            noise may be missing.
        harden_factor: factor by which a hardening multiplies the noise.
        max_hardenings: how often the noise may be increased; None for no limit.
        quantile: with ``trust="central"``, the clip norm begins at ``clip`` and follows a quantile
            of the updates' norms. Noise is added to the count of clients below the clip norm too. A
            client that counts as zero is counted neither as below nor as above.
        seed: for tests only. Whoever knows the seed can remove the noise, so epsilon is infinite.

    Raises:
        DefenseError: a value out of range.
    """

    dropouts: int = 0
    harden_factor: float = 2.0
    max_hardenings: int | None = None
    quantile: QuantileClip | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_integer("dropouts", self.dropouts, at_least=0)
        _check_number("harden_factor", self.harden_factor, above=1)
        _check_integer("max_hardenings", self.max_hardenings, at_least=0, optional=True)


def _check_number(name: str, value: object, **limits: Any) -> None:
    check_number(f"ClientDP: {name}", value, error=DefenseError, **limits)


def _check_integer(name: str, value: object, **limits: Any) -> None:
    check_integer(f"ClientDP: {name}", value, error=DefenseError, **limits)


def _check_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    check_choice(f"ClientDP: {name}", value, choices, hint=hint, error=DefenseError)


def check_numbers(
    clip: float,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    rounds: int | None,
) -> None:
    """Refuse a clip norm, noise, a budget or rounds that give no guarantee."""
    _check_number("clip", clip, above=0)
    hint = "an epsilon of 0 allows no release"
    _check_number("target_epsilon", target_epsilon, above=0, optional=True, hint=hint)
    if noise_multiplier is None and (target_epsilon is None or rounds is None):
        raise DefenseError(
            "ClientDP: give noise_multiplier, or target_epsilon and rounds, from which it is "
            "computed"
        )
    hint = "without noise no epsilon holds"
    _check_number("noise_multiplier", noise_multiplier, above=0, optional=True, hint=hint)
    _check_integer("rounds", rounds, optional=True)


def check_delta(target_delta: float, clients: int) -> None:
    """Refuse a delta at which publishing one client's data would count as private."""
    hint = "well below 1 / clients; Gaussian noise has no epsilon at a delta of 0"
    _check_number("target_delta", target_delta, above=0, below=1, hint=hint)
    _check_integer("clients", clients)
    if target_delta >= 1 / clients:
        raise DefenseError(
            f"ClientDP: target_delta={target_delta!r} must be below 1 / {clients}: else publishing "
            "one client's data at random would count as private"
        )


def check_accountant(accountant: str, target_epsilon: float | None) -> None:
    """Refuse an accountant that does not exist, and ``"filter"`` without a budget."""
    _check_choice("accountant", accountant, ("prv", "rdp", "filter"))
    if accountant == "filter" and target_epsilon is None:
        raise DefenseError("ClientDP: accountant='filter' keeps a budget: give target_epsilon")


def expect_per_round(sampling: str, per_round: float | None, clients: int) -> float:
    """Return the expected number of clients in a round.

    Raises:
        DefenseError: ``per_round`` does not fit the other settings.
    """
    _check_choice("sampling", sampling, get_args(ClientSampling))
    if sampling == "all":
        if per_round not in (None, clients):
            raise DefenseError(
                f"ClientDP: with sampling='all' each of the {clients} clients takes part; "
                f"per_round={per_round!r} needs sampling='poisson' or 'fixed'"
            )
        return float(clients)
    whole = sampling == "fixed"
    if (
        per_round is None
        or isinstance(per_round, bool)
        or not 0 < per_round <= clients
        or (whole and per_round != int(per_round))
    ):
        raise DefenseError(
            f"ClientDP: sampling={sampling!r} needs per_round=, a {'whole ' if whole else ''}"
            f"number of clients up to {clients}; got {per_round!r}"
        )
    return float(per_round)


def check_trust(trust: str, sampling: str, dropouts: int, per_round: float) -> None:
    """Refuse settings under which the clients' shares of noise do not add up to the whole."""
    hint = (
        "the server sees each update and adds the noise, each client adds its own, or each adds a "
        "share and the server sees only the sum"
    )
    _check_choice("trust", trust, get_args(Trusted), hint)
    if trust == "secure_aggregation" and sampling == "poisson":
        raise DefenseError(
            "ClientDP: shares of noise add up to the whole only where it is known how many clients "
            "take part: with trust='secure_aggregation' use sampling='fixed' or 'all'"
        )
    hint = f"fewer than the {per_round:g} clients of a round"
    _check_integer("dropouts", dropouts, at_least=0, at_most=math.ceil(per_round) - 1, hint=hint)
    if dropouts and trust != "secure_aggregation":
        raise DefenseError("ClientDP: dropouts= is for trust='secure_aggregation' alone")


def check_quantile(quantile: QuantileClip | None, trust: str, accountant: str) -> None:
    """Refuse a clip norm by quantile without a trusted server, or under noise that may grow."""
    if quantile is not None and trust != "central":
        raise DefenseError(
            "ClientDP: quantile= counts the clients below the clip norm, which only a trusted "
            f"server may do: leave it out with trust={trust!r}"
        )
    if quantile is not None and accountant == "filter":
        raise DefenseError(
            "ClientDP: quantile= needs noise that is not increased: accountant='prv' or 'rdp'"
        )


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
        if path.exists():
            if path.is_symlink() or path.read_bytes() != data:
                raise DefenseError(
                    f"ledger={str(ledger)!r} was kept under other terms than "
                    f"{data.decode().strip()} (see {path.name}): its releases would be accounted "
                    "wrongly. Go on with the same clients, sampling and trust, or begin a new run "
                    "from a model that these clients did not train, with a new path"
                )
            return
        if released:
            raise DefenseError(
                f"ledger={str(ledger)!r} holds releases, but {path.name} with their terms is not "
                "there: give a path that no other run has used"
            )
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
            raise DefenseError(
                f"ClientDP: '{name}' was sent in {str(tensor.dtype).removeprefix('torch.')} with "
                f"numbers so large that they are rounded to steps of {step:.2g}, and this client's "
                f"share of noise has a standard deviation of {noise_std:.2g}. The share would be "
                "rounded away, and the sum have less than the whole noise. Send the model in "
                "float32, or clip higher"
            )

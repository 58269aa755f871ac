"""Texts dealt to the clients of a federation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributions import Dirichlet

from lightning_fedleak.finetuning.assets import SourceError


def alike(n: int, clients: int, seed: int) -> list[list[int]]:
    """Return ``n`` texts in a random order, dealt one after the other to each client in turn.

    Args:
        n: texts.
        clients: to deal them to.
        seed: of the order.

    Returns:
        The numbers of each client's texts.

    Raises:
        SourceError: fewer texts than clients.
    """
    if n < clients:
        raise SourceError(
            f"{n} texts are too few for --clients {clients}: give more text, or fewer clients."
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[client::clients] for client in range(clients)]


def by_speaker(speakers: Sequence[str], clients: int, seed: int) -> list[list[int]]:
    """Return a deal of whole speakers, each to the client that has the fewest texts so far.

    Args:
        speakers: whose each text is.
        clients: to deal them to.
        seed: of the order of speakers that have as many texts.

    Raises:
        SourceError: fewer speakers than clients.
    """
    texts: dict[str, list[int]] = {}
    for index, speaker in enumerate(speakers):
        texts.setdefault(speaker, []).append(index)
    if len(texts) < clients:
        raise SourceError(
            f"--clients {clients} are more than the {len(texts)} speakers of these texts, and a "
            f"speaker's texts stay together: give at most {len(texts)}, or deal texts alike with "
            "--partition iid."
        )
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [list(texts.values())[i] for i in order]
    dealt: list[list[int]] = [[] for _ in range(clients)]
    for texts_of_speaker in sorted(shuffled, key=len, reverse=True):
        min(dealt, key=len).extend(texts_of_speaker)
    return dealt


def by_dirichlet(kinds: Sequence[str], clients: int, alpha: float, seed: int) -> list[list[int]]:
    """Return a deal in which each client's share of each kind of text is drawn from a Dirichlet.

    Hsu et al. 2019, *Measuring the effects of non-identical data distribution for federated visual
    classification*, section 3, with the shares drawn for each kind.

    Args:
        kinds: of each text; all the same: clients differ in how much text they have.
        clients: to deal them to.
        alpha: of the symmetric Dirichlet; the larger, the more alike clients are.
        seed: of order and shares.

    Raises:
        SourceError: a client is left without a text.
    """
    generator = torch.Generator().manual_seed(seed)
    dealt: list[list[int]] = [[] for _ in range(clients)]
    for kind in sorted(set(kinds)):
        of_kind = [i for i, k in enumerate(kinds) if k == kind]
        order = torch.randperm(len(of_kind), generator=generator).tolist()
        with torch.random.fork_rng(devices=[]):  # distributions take no generator
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            shares = Dirichlet(torch.full((clients,), alpha, dtype=torch.float64)).sample()
        ends = [0, *(shares.cumsum(0) * len(of_kind)).round().long().tolist()]
        ends[-1] = len(of_kind)
        for client in range(clients):
            dealt[client] += [of_kind[i] for i in order[ends[client] : ends[client + 1]]]
    empty = [client for client, texts in enumerate(dealt) if not texts]
    if empty:
        raise SourceError(
            f"--partition dirichlet leaves {len(empty)} of {clients} clients without a text: give "
            f"more text, fewer clients, another --seed, or a larger --alpha than {alpha:g}."
        )
    return dealt

"""What a loader that is split among clients means for the account."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.sampling import Sampling, sampling_of


def sampled(
    examples: int, batch_size: int, *, poisson: bool, drop_last: bool = False, client: int = 0
) -> Sampling:
    data = TensorDataset(torch.arange(examples))
    split = DistributedSampler(data, 2, client, shuffle=False, drop_last=drop_last)
    context = DefenseContext(
        root=nn.Linear(1, 1),
        client=client,
        clients=2,
        device=torch.device("cpu"),
        precision="32-true",
        step=0,
        entropy=bytes(32),
    )
    return sampling_of(
        DataLoader(data, batch_size=batch_size, sampler=split),
        context,
        poisson=poisson,
        trust="local",
        entropy=bytes(32),
        first_step=0,
    )


def test_an_example_that_two_clients_would_have_in_one_step_is_refused() -> None:
    """Both would release it, and each accounts one release."""
    with pytest.raises(DefenseError, match="repeats examples"):
        sampled(7, 4, poisson=False)


@pytest.mark.parametrize(
    ("examples", "batch_size", "drop_last"), [(7, 3, False), (8, 4, False), (7, 4, True)]
)
def test_what_is_taken_as_it_comes_is_in_one_clients_batch_of_a_step(
    examples: int, batch_size: int, drop_last: bool
) -> None:
    mine, others = (
        sampled(examples, batch_size, poisson=False, drop_last=drop_last, client=client)
        for client in range(2)
    )
    assert mine.rate == others.rate == 1.0
    for (one,), (other,) in zip(mine.loader, others.loader, strict=True):
        assert not torch.isin(one, other).any()


def test_poisson_samples_repeat_nobody() -> None:
    mine, others = (sampled(7, 4, poisson=True, client=client) for client in range(2))
    assert mine.rate == others.rate == 1.0
    (one,), (other,) = next(iter(mine.loader)), next(iter(others.loader))
    assert sorted([*one.tolist(), *other.tolist()]) == list(range(7))

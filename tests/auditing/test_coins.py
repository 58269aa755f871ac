"""Canaries of a record, audited: randomised response, and what is refused."""

import math

import pytest
import torch

from lightning_fedleak.evaluation.auditing import audit_canaries, audit_one_run
from lightning_fedleak.evaluation.canaries import InclusionRecord
from lightning_fedleak.evaluation.canaries.record import seed_key


def record_of(m, seed=0, **settings):
    digests = tuple(bytes([i % 256, i // 256]) for i in range(m))
    return InclusionRecord(seed_key(seed), digests, **settings)


def randomised(record, epsilon, seed):
    """Randomised response of each bit, (m,)."""
    generator = torch.Generator().manual_seed(seed)
    included = torch.tensor(record.included)
    right = torch.rand(len(included), generator=generator) < 1 / (1 + math.exp(-epsilon))
    return (included == right).double()


def test_it_is_the_one_run_audit_of_the_records_coins():
    record = record_of(400, 5)
    scores = torch.tensor(record.included).double()
    ours = audit_canaries(record, scores, delta=1e-6)
    assert ours.relation == "add_remove"
    assert 3 < ours.epsilon <= ours.limit
    assert ours == audit_one_run(scores, torch.tensor(record.included), delta=1e-6)


def test_repeated_canaries_are_no_single_neighbour_and_do_not_count():
    record = record_of(600, 2, times=(1, 16))
    single = torch.tensor(record.repeats) == 1
    members = torch.tensor(record.included)
    scores = torch.where(
        single, randomised(record, 1.0, 4), members.double()
    )  # repeated: all known
    bound = audit_canaries(record, scores)
    assert bound == audit_one_run(scores[single], members[single])
    assert bound.epsilon < 1.0 < audit_one_run(scores, members).epsilon


@pytest.mark.parametrize(
    ("record", "scores", "words"),
    [
        (record_of(20, times=(4,)), torch.zeros(20), "canaries that occur once"),
        (record_of(20), torch.zeros(19), r"scores must be \(20,\)"),
        (record_of(20), torch.zeros(3, 20), r"scores must be \(20,\)"),
        (
            record_of(20, probability=0.25),
            torch.zeros(20),
            "probability of with_canaries",
        ),
    ],
)
def test_refusals_say_what_to_do(record, scores, words):
    with pytest.raises(ValueError, match=words):
        audit_canaries(record, scores)

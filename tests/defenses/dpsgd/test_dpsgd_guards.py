"""What one sample, a second release or another target could otherwise slip past DPSGD."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithFlattening

from lightning_fedleak.defenses import DPSGD, BudgetSpent, DefenseError, ReleaseSettings, Users
from lightning_fedleak.defenses.dpsgd import loss_graph
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Run, data, first, trainer

# ---- a batch without a loss ------------------------------------------------------------------


@pytest.mark.parametrize("output", [None, {"log": 1.0}, torch.ones(()), {"loss": torch.ones(())}])
def test_a_batch_without_a_loss_is_not_released_as_noise_alone(output: Any) -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    with pytest.raises(DefenseError, match="no loss with a gradient for a batch of 5"):
        run.defense.on_training_step(lambda: output, first(5), run.context)
    assert run.defense.releases == run.defense.accountant.steps == 0


# ---- another target on resume ----------------------------------------------------------------


def targeted(epsilon: float, delta: float = 1e-3, kind: Any = "rdp") -> DPSGD:
    return DPSGD(CLIP, target_epsilon=epsilon, target_delta=delta, accountant=kind)


def resumed(defense: DPSGD, state: Any) -> Run:
    defense.load_state_dict(state)
    root = Net()
    root._trainer = trainer(max_epochs=100)
    return Run(defense, root)


def spent(releases: int) -> DPSGD:
    """A run planned for 10 releases within 8."""
    root = Net()
    root._trainer = trainer()
    run = Run(targeted(8.0), root)
    for _ in range(releases):
        run.step(first(3))
    return run.defense


def test_a_lower_target_on_resume_is_held_from_its_own_count() -> None:
    state = spent(1).state_dict()
    lower = targeted(6.0)
    run = resumed(lower, state)
    most = 1
    while lower.accountant.allows(6.0, 1e-3, lower.noise_multiplier, 0.2, most):
        most += 1
    assert 2 <= most <= 9
    for _ in range(most - 1):
        run.step(first(3))
    with pytest.raises(BudgetSpent, match=f"after {most} releases one more would cost"):
        run.step(first(3))
    assert lower.privacy.epsilon <= 6.0


@pytest.mark.parametrize(
    "other", [lambda: targeted(4.0), lambda: targeted(8.0, 1e-6)], ids=["epsilon", "delta"]
)
def test_a_target_that_is_spent_already_is_refused_at_setup(other: Any) -> None:
    state = spent(10).state_dict()
    with pytest.raises(BudgetSpent, match=r"10 releases of the checkpoint or ledger cost"):
        resumed(other(), state)
    same = resumed(targeted(8.0), state)
    with pytest.raises(BudgetSpent, match="after 10 releases"):
        same.step(first(3))


# ---- a loss that changes ---------------------------------------------------------------------


def contrastive(hidden: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ hidden.T, torch.arange(len(hidden)))


def over_samples(hidden: Tensor) -> Tensor:
    return -hidden.softmax(0).log().mean()


def over_classes(hidden: Tensor) -> Tensor:
    return -hidden.softmax(1).log().mean()


@pytest.mark.parametrize("before", [F.cross_entropy, None], ids=["cross-entropy", "softmax"])
@pytest.mark.parametrize("mixing", [contrastive, over_samples])
def test_a_loss_that_mixes_samples_is_refused_from_whichever_step(before: Any, mixing: Any) -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))

    def good(batch: Any) -> Tensor:
        hidden = run.root(batch[0])
        return over_classes(hidden) if before is None else before(hidden, batch[1])

    run.loss = good
    for _ in range(3):
        run.step(first(5))
    run.loss = lambda batch: mixing(run.root(batch[0]))
    with pytest.raises(DefenseError, match=r"depends on others. outputs"):
        run.step(first(5))
    assert run.defense.releases == 3


def test_what_changes_without_a_new_form_is_looked_for_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr(loss_graph, "CHECK_EVERY", 6)
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    partners = torch.eye(5)

    def paired(batch: Any) -> Tensor:
        hidden = run.root(batch[0])
        return (hidden * (partners @ hidden)).mean(1).mean()

    run.loss = paired
    for step in range(7):  # checks are made at releases 0, 1, 3, and 7
        partners = torch.eye(5) if step < 4 else torch.eye(5).roll(1, 0)
        run.step(first(5))
    with pytest.raises(DefenseError, match=r"depends on others. outputs"):
        run.step(first(5))
    assert run.defense.releases == 7


# ---- documents packed into rows --------------------------------------------------------------


def packed() -> list[dict[str, Any]]:
    """Rows of two documents each, packed in the data set."""
    positions = torch.tensor([0, 1, 2, 0, 1])
    return [{"input_ids": positions + i, "position_ids": positions, "who": i} for i in range(40)]


def test_a_collator_that_merges_rows_is_refused_at_setup() -> None:
    documents = [{"input_ids": [*range(5, 9 + i % 3)]} for i in range(40)]
    collate = DataCollatorWithFlattening(return_tensors="pt")
    given = DataLoader(documents, batch_size=8, collate_fn=collate)
    with pytest.raises(DefenseError, match="made 1 rows of 8 examples"):
        Run(DPSGD(CLIP, noise_multiplier=1.0), loader=given)


def test_rows_packed_in_the_data_are_one_example_each_and_it_is_said() -> None:
    given = DataLoader(packed(), batch_size=8)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="epsilon is for a packed row, not for a document"):
        run = Run(DPSGD(CLIP, noise_multiplier=1.0), loader=given)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(run.loader.dataset) == 40
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a row as it is packed")
        Run(
            DPSGD(CLIP, noise_multiplier=1.0),
            loader=DataLoader([{"input_ids": torch.arange(5) + i} for i in range(40)], 8),
        )


def test_packed_rows_are_of_no_single_user() -> None:
    defense = DPSGD(CLIP, noise_multiplier=1.0, unit=Users("who"))
    with pytest.raises(DefenseError, match="of several documents"):
        Run(defense, loader=DataLoader(packed(), batch_size=8))


# ---- several clients -------------------------------------------------------------------------


def sharded(client: int, n: int = 5, batch_size: int = 2) -> DataLoader[Any]:
    sampler = DistributedSampler(data(n), num_replicas=2, rank=client)
    return DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler)


def test_under_central_trust_all_clients_divide_alike() -> None:
    """Else the sample on the larger share's client weighs more than the noise was made for."""
    released = []
    for client in range(2):
        defense = DPSGD(
            CLIP, noise_multiplier=0.0, target_delta=1e-3, release=ReleaseSettings(trust="central")
        )
        run = Run(defense, loader=sharded(client), client=client, clients=2)
        assert len(run.loader.batch_sampler.shard) == 3 - client
        assert run.loader.batch_sampler.rate == 1.0  # batches as large as a share
        released.append(run.step(first(1)))
    assert torch.equal(released[0], released[1])
    assert float(released[0].norm()) == pytest.approx(CLIP / 2, rel=1e-5)


def test_clients_that_may_share_examples_are_warned() -> None:
    defense = DPSGD(CLIP, noise_multiplier=1.0)
    assert "If several clients hold an example, add their epsilons." in defense.guarantee
    with pytest.warns(UserWarning, match="2 clients, and no DistributedSampler splits"):
        Run(defense, clients=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(defense, loader=sharded(0), clients=2)
        Run(defense)

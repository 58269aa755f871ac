"""The unit of privacy is a user: whose a row is, sampling, clipped sums, what one user can move."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fedleak.defenses import DPSGD, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.poisson import Draws, UserBatchSampler
from lightning_fedleak.defenses.dpsgd.sampling import rows_by_user
from tests.defenses.dpsgd.test_dpsgd import CLIP, Pieces, data
from tests.helpers.dpsgd_settings import grouped
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2
from tests.strategies.dpsgd_runs import CausalLM, fit

pytestmark = pytest.mark.slow
KEYS = [*"aabacdddddbbeffgghihhhhaaaaaajklmmnnnooo"]
assert len(KEYS) == len(data())


class Keyed(Dataset[dict[str, Any]]):
    def __init__(self, keys: list[Any] = KEYS) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data()[index % 40]
        return {"x": x, "y": y, "customer": self.keys[index]}


class Columns(Keyed):
    """As datasets of Hugging Face: whole columns by name."""

    column_names = ("x", "y", "customer")

    def __getitem__(self, index: Any) -> Any:
        return self.keys if index == "customer" else super().__getitem__(index)


def by_user(**settings: Any) -> DPSGD:
    given = {"max_grad_norm": CLIP, "noise_multiplier": 0.0, "group_by": KEYS}
    return DPSGD(**grouped(**{**given, **settings}))


def drawn(run: Pieces) -> tuple[list[Tensor], list[int]]:
    """A batch as the loader makes it, and whose its rows are."""
    sampler: Any = run.loader.batch_sampler
    rows = next(iter(sampler))
    return [value[rows] for value in data().tensors], rows


def brute(run: Pieces, batch: Any, rows: list[int], *, auto: bool = False) -> Tensor:
    """(users, d): mean gradient over each user's rows, one row after the other, then clipped."""
    each = run.one_by_one(batch).double()
    users = dict.fromkeys(KEYS[row] for row in rows)
    means = [each[[i for i, row in enumerate(rows) if KEYS[row] == user]].mean(0) for user in users]
    result = torch.stack(means)
    norm = result.norm(dim=1, keepdim=True)
    return result / (norm + 0.01) if auto else result * (CLIP / norm.clamp(min=CLIP))


@pytest.mark.parametrize(
    "group_by",
    ["customer", lambda example: example["customer"], KEYS, torch.tensor([*map(ord, KEYS)])],
)
@pytest.mark.parametrize("kind", [Keyed, Columns])
def test_whose_a_row_is_is_told_by_a_column_a_function_or_keys(kind: Any, group_by: Any) -> None:
    users = [*rows_by_user(kind(), group_by).values()]
    assert len(users) == len(set(KEYS)) == 15
    assert users[0] == [i for i, key in enumerate(KEYS) if key == "a"]
    assert sorted(row for rows in users for row in rows) == [*range(40)]
    if not isinstance(group_by, list | Tensor):
        part = [*rows_by_user(Subset(kind(), [5, 4, 6, 2]), group_by).values()]
        assert part == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    "key",
    [
        *(None, "", math.nan, ("de", math.nan), ("de", ("x", None)), ("de", "")),
        *(frozenset([math.nan]), ("de", object()), ["a"], object(), np.arange(2), torch.arange(2)),
    ],
)
@pytest.mark.parametrize("group_by", ["customer", lambda example: example["customer"]])
def test_a_row_that_is_nobodys_is_refused(key: Any, group_by: Any) -> None:
    with pytest.raises(DefenseError, match=rf"row 1's key by group_by, a {type(key).__name__},"):
        rows_by_user(Keyed(["a", key, "c"]), group_by)


@pytest.mark.parametrize("group_by", [KEYS[:3], dict(enumerate(KEYS)), set(range(40)), iter(KEYS)])
def test_what_gives_no_key_for_each_row_is_refused(group_by: Any) -> None:
    with pytest.raises(DefenseError, match="a key for each of the 40 rows"):
        rows_by_user(Keyed(), group_by)


@pytest.mark.parametrize("most", [None, 12, 4])
@pytest.mark.parametrize("norm", [CLIP, "auto"])
def test_the_sum_is_of_users_whose_mean_gradient_is_clipped(norm: Any, most: int | None) -> None:
    run = Pieces(by_user(max_physical_batch_size=most, rows_per_user=most, max_grad_norm=norm))
    for _ in range(3):
        batch, rows = drawn(run)
        expected = brute(run, batch, rows, auto=norm == "auto").sum(0) / 8
        result = run.step(batch).double()
        assert float((result - expected).norm() / expected.norm()) < 1e-6
    assert len({KEYS[row] for row in rows}) < len(rows)
    assert max(run.sizes) == most or (most is None and max(run.sizes) > 12) or most == 12


@pytest.mark.parametrize("clipping", ["auto", "per_sample", "ghost"])
def test_norms_have_the_cross_terms_between_a_users_rows(clipping: Any) -> None:
    """Two equal rows are as long as one, two opposite ones nothing; also of tied embeddings."""
    with own_rng(3):
        ids = torch.randint(3, 97, (6, 5))
    for model in (tiny_gpt2(dropout=0.0).train(), tiny_bert_mlm(dropout=0.0).train()):
        loader: Any = DataLoader(TensorDataset(ids), batch_size=3)
        defense = by_user(group_by=[0, 0, 0, 1, 2, 2], form=clipping, max_grad_norm=0.5)

        class Tokens(Pieces):
            def loss(self, batch: Any) -> Tensor:
                return mean_of_sample_means(self.root(batch[0]).logits, batch[0], causal=True)

        run = Tokens(defense, root=model, loader=loader)
        sampler: Any = run.loader.batch_sampler
        sampler._counts.append([3, 1, 2])
        each = []
        for i in range(6):
            loss = run.loss([ids[i : i + 1]])
            result = torch.autograd.grad(loss, run.parameters, allow_unused=True)
            flat = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(run.parameters, result, strict=True)
            ]
            each.append(torch.cat([g.flatten() for g in flat]).double())
        means = [torch.stack(each[a:b]).mean(0) for a, b in ((0, 3), (3, 4), (4, 6))]
        expected = sum(m * min(1.0, 0.5 / float(m.norm())) for m in means) / 3
        result = run.step([ids]).double()
        assert float((result - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("most", [12, 2])
def test_a_row_that_is_not_finite_takes_its_user_out_and_no_other(most: int) -> None:
    run = Pieces(by_user(max_physical_batch_size=most, rows_per_user=most))
    batch, rows = drawn(run)
    expected = brute(run, batch, rows)
    users = [*dict.fromkeys(KEYS[row] for row in rows)]
    batch[0] = batch[0].clone()
    batch[0][0] = math.inf
    expected[users.index(KEYS[rows[0]])] = 0
    torch.testing.assert_close(run.step(batch).double(), expected.sum(0) / 8, rtol=1e-5, atol=1e-8)


def test_releases_of_examples_and_of_users_are_not_added_up(tmp_path: Path) -> None:
    """Their rates may be alike, and one epsilon would be told for both."""
    settings: Any = {"noise_multiplier": 1.0, "accountant": "rdp", "target_delta": 1e-3}
    settings |= {"ledger": tmp_path / "ledger"}
    defense = DPSGD(CLIP, **settings)
    run = Pieces(defense)
    run.step([value[:4] for value in data().tensors])
    assert defense.privacy.sample_rate == 8 / 40
    keys = [row // 2 for row in range(40)]
    loader: Any = DataLoader(data(), batch_size=4)
    with pytest.raises(DefenseError, match=r"begin a new run.*unit='example'"):
        by_user(group_by=keys).load_state_dict(defense.state_dict())
    with pytest.raises(DefenseError, match="another unit of privacy"):
        Pieces(by_user(**settings, group_by=keys), loader=loader)
    path = tmp_path / "users"
    users = by_user(**settings | {"ledger": path}, group_by=keys)
    run = Pieces(users, loader=loader)
    run.step(drawn(run)[0])
    assert (tmp_path / "users.users").read_text().count("\n") == 1
    with pytest.raises(DefenseError, match="another unit of privacy"):
        Pieces(DPSGD(CLIP, **settings | {"ledger": path}))
    with pytest.raises(DefenseError, match=r"begin a new run.*unit='user'"):
        DPSGD(CLIP, **settings).load_state_dict(users.state_dict())
    again = by_user(**settings | {"ledger": path}, group_by=keys)
    again.load_state_dict(users.state_dict())
    Pieces(again, loader=loader)
    assert again.privacy.releases == 1


def test_users_are_poisson_sampled_with_all_rows_or_some_at_random() -> None:
    users = [*rows_by_user(data(), KEYS).values()]
    sampler = UserBatchSampler(users, range(15), 3, 0.3, 4000, Draws(b"e" * 32))
    inside, rows = Counter[int](), Counter[int]()
    for step in range(4000):
        chosen = sampler.rows(step)
        whose = Counter(KEYS[row] for row in chosen)
        assert all(whose[k] == min(3, KEYS.count(k)) for k in whose)
        inside.update(sampler.draw(step))
        rows.update(row for row in chosen if KEYS[row] == "a")
        assert sampler.claim(len(chosen)) == [*whose.values()]
    for user in range(15):
        assert scipy.stats.binomtest(inside[user], 4000, 0.3).pvalue > 1e-4
    assert len(rows) == KEYS.count("a") == 9
    for count in rows.values():
        assert scipy.stats.binomtest(count, 4000, 0.3 * 3 / 9).pvalue > 1e-4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_by_users(workers: int) -> None:
    """Whose rows they are is known also where workers fetch batches ahead, over several epochs."""

    class Counted(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            whose = [tuple(row) for row in batch["whose"].tolist()]
            counts = [*Counter(whose).values()]
            if torch.is_grad_enabled():  # not in the rehearsal of the step
                assert [*self.defense._step._user_sizes] == counts
            return super().training_step(
                {k: v for k, v in batch.items() if k != "whose"}, batch_idx
            )

    plain = random_token_loader(n=24, batch_size=4, length=8, padded=True)
    keys = [row % 9 for row in range(24)]

    class WithKeys(Dataset[Any]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            return plain.dataset[index], keys[index]

    def whole(rows: list[Any]) -> Any:
        batch = plain.collate_fn([row for row, _ in rows])
        return batch | {"whose": torch.tensor([[key] for _, key in rows]).view(-1, 1)}

    module = Counted()
    module.defense = defense = by_user(
        group_by=lambda row: row[1],
        noise_multiplier=1.0,
        max_physical_batch_size=8,
        rows_per_user=8,
    )
    loader: Any = DataLoader(WithKeys(), 4, collate_fn=whole, num_workers=workers)
    _, run = fit(defense, module, data=loader, max_epochs=3)
    assert run.global_step == defense.releases == 6
    assert defense.privacy.sample_rate == 4 / 9
    assert max(module.sizes) <= 8

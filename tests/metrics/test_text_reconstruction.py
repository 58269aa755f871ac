"""Against counting by hand, torchmetrics' ROUGE, and the coverage that the intervals promise."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.text.rouge import rouge_score

from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess
from lightning_fedleak.evaluation.metrics import (
    TextReconstruction,
    proportion,
    reconstruction_rates,
)
from lightning_fedleak.evaluation.metrics.texts import (
    RECONSTRUCTION_RATES,
    SentenceScores,
    in_true_order,
    sentence_scores,
)
from tests.helpers.processes import computed_together

token = st.integers(0, 4)
sentence = st.lists(st.tuples(st.integers(-1, 4), token, st.booleans()), min_size=5, max_size=5)
texts = st.lists(sentence, min_size=1, max_size=6)


def as_tensors(data: list[list[tuple[int, int, bool]]]) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.tensor([[[g, t, int(m)] for g, t, m in row] for row in data])
    return columns[..., 0], columns[..., 1], columns[..., 2]


def longest_common_subsequence(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common_subsequence(a[1:], b[1:])
    return max(longest_common_subsequence(a[1:], b), longest_common_subsequence(a, b[1:]))


@given(texts)
def test_rates_are_what_counting_gives(data: list[list[tuple[int, int, bool]]]) -> None:
    shares, exact, rouge, right, total = [], [], [], 0, 0
    for row in data:
        kept = [(g, t) for g, t, m in row if m]
        if not kept:
            continue
        hits = sum(g == t for g, t in kept)
        shares.append(hits / len(kept))
        exact.append(hits == len(kept))
        rouge.append(longest_common_subsequence(*map(list, zip(*kept, strict=True))) / len(kept))
        right, total = right + hits, total + len(kept)
    rates = reconstruction_rates(sentence_scores(*as_tensors(data)))
    assert tuple(rates) == RECONSTRUCTION_RATES
    if not shares:
        assert all(math.isnan(rate.value) for rate in rates.values())
        return
    assert rates["token_accuracy"].value == pytest.approx(np.mean(shares))
    assert rates["token_accuracy_pooled"].value == pytest.approx(right / total)
    assert rates["exact_sentences"] == proportion(sum(exact), len(exact))
    assert rates["rouge_l"].value == pytest.approx(np.mean(rouge), rel=1e-6)
    for rate in rates.values():
        assert 0 <= rate.low <= rate.value <= rate.high <= 1


@given(sentence)
def test_rouge_is_the_librarys_with_gaps_and_repeats(data) -> None:
    guessed, truth, _ = as_tensors([data])
    got = sentence_scores(guessed, truth)
    words = [" ".join(f"w{i}" if i >= 0 else "gap" for i in ids[0]) for ids in (guessed, truth)]
    found = rouge_score(*words, rouge_keys=("rouge1", "rouge2", "rougeL"))
    assert float(got.rouge_1[0]) == pytest.approx(float(found["rouge1_fmeasure"]), rel=1e-6)
    assert float(got.rouge_2[0]) == pytest.approx(float(found["rouge2_fmeasure"]), rel=1e-6)
    assert float(got.rouge_l[0]) == pytest.approx(float(found["rougeL_recall"]), rel=1e-6)
    without = sentence_scores(guessed, truth, rouge=False)
    for scores in (without.rouge_l, without.rouge_1, without.rouge_2):
        assert bool(scores.isnan().all())


def test_a_text_is_found_where_half_of_it_is_right() -> None:
    truth = torch.arange(5, 10).expand(3, 5)
    guessed = truth.clone()
    guessed[0, 3:] = NOTHING  # 3 of 5
    guessed[1, 1:4] = NOTHING  # 2 of 5
    mask = torch.ones(3, 5)
    mask[2, 4] = 0
    guessed[2, :2] = NOTHING  # 2 of 4
    found = reconstruction_rates(sentence_scores(guessed, truth, mask))["texts_found"]
    assert found == proportion(2, 3)


def test_intervals_of_means_cover_the_truth() -> None:
    """Sentences of very different accuracy, 95% intervals: cover in at least 92% of worlds."""
    rng = np.random.default_rng(0)
    worlds, n, covered = 300, 12, {"token_accuracy": 0, "token_accuracy_pooled": 0}
    for world in range(worlds):
        lengths = rng.integers(5, 50, n)
        accuracy = rng.beta(2, 1, n)
        hits = rng.binomial(lengths, accuracy)
        nan = torch.full((n,), math.nan)
        scores = SentenceScores(torch.tensor(hits), torch.tensor(lengths), nan, nan, nan)
        rates = reconstruction_rates(scores, resamples=200, seed=world)
        assert all(math.isnan(rates[f"rouge_{n}"].value) for n in (1, 2, "l"))
        for name in covered:
            covered[name] += rates[name].low <= 2 / 3 <= rates[name].high
    assert min(covered.values()) / worlds > 0.92, covered


@given(texts, texts)
def test_the_metric_is_the_functions_over_all(first, second) -> None:
    one = TextReconstruction()
    left, right = TextReconstruction(), TextReconstruction()
    for metric, data in ((left, first), (right, second)):
        guessed, truth, mask = as_tensors(data)
        metric.update(TextGuess(guessed), truth, mask)
        one.update(guessed, truth, mask)
    expected = reconstruction_rates(sentence_scores(*as_tensors(first + second)))
    left.merge_state(right)
    for metric in (one, left):
        got = metric.compute()
        for name, rate in expected.items():
            for key, value in ((name, rate.value), (f"{name}_low", rate.low)):
                assert float(got[key]) == pytest.approx(value, nan_ok=True)


@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_processes_pool_their_sentences_even_if_one_saw_none(tmp_path) -> None:
    truth = torch.arange(12).reshape(3, 4)

    def make(rank: int) -> TextReconstruction:
        metric = TextReconstruction()
        if rank == 1:
            metric.update(truth.clamp(max=7), truth)
        return metric

    expected = reconstruction_rates(sentence_scores(truth.clamp(max=7), truth))
    for values in computed_together(make, tmp_path):
        assert {n: float(values[n]) for n in expected} == pytest.approx(
            {n: r.value for n, r in expected.items()}
        )


@given(st.data())
def test_texts_in_any_order_are_put_where_most_tokens_are_right(data) -> None:
    n, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    length, known = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    grid = st.integers(0, 2)
    guessed = torch.tensor(data.draw(_grid(n, known, st.integers(-1, 2))))
    truth = torch.tensor(data.draw(_grid(rows, length, grid)))
    mask = torch.tensor(data.draw(_grid(rows, length, st.integers(0, 1))))
    told = in_true_order(guessed, truth, mask)
    padded = torch.full((n + rows, length), NOTHING)
    padded[:n, : min(known, length)] = guessed[:, :length]
    best = max(
        int(((padded[list(order)] == truth) & (mask != 0)).sum())
        for order in permutations(range(n + rows), rows)
    )
    assert int(((told == truth) & (mask != 0)).sum()) == best
    given = [row.tolist() for row in padded]
    assert all(given.count(row) >= told.tolist().count(row) for row in told.tolist())


def _grid(rows: int, columns: int, of: st.SearchStrategy[int]):
    row = st.lists(of, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)

"""What a model says of each token, against a slow loop in float64."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.taps.tokens import Text, compressed_bytes, texts_in, token_log_probs


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=2, n_positions=64)
    return GPT2LMHeadModel(config).train()


def some_texts(*lengths: int) -> list[Text]:
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in lengths:
        ids = torch.randint(50, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        texts.append(Text(ids, labels))
    return texts


def test_every_number_is_that_of_a_slow_loop(model: GPT2LMHeadModel) -> None:
    texts = some_texts(30, 7, 12, 30, 3)
    snapshot = token_log_probs(find_anatomy(model), texts)
    exact = GPT2LMHeadModel(model.config).double().eval()
    exact.load_state_dict(model.double().state_dict())
    model.float()
    for row, text in enumerate(texts):
        logits = exact(text.ids[None]).logits[0]
        for place in range(1, len(text.ids)):
            column = place - 1
            counted = int(text.labels[place]) != -100
            assert bool(snapshot.labels[row, column]) == counted
            if not counted:
                assert float(snapshot.log_probs[row, column]) == 0
                continue
            log_p = logits[place - 1].log_softmax(0)
            p = log_p.exp()
            mean = (p * log_p).sum()
            deviation = (p * (log_p - mean) ** 2).sum().sqrt()
            target = text.ids[place]
            numbers = (snapshot.log_probs, snapshot.means, snapshot.deviations)
            for actual, expected in zip(numbers, (log_p[target], mean, deviation), strict=True):
                torch.testing.assert_close(
                    actual[row, column].double(), expected.detach(), atol=2e-5, rtol=1e-4
                )
            assert bool(snapshot.greedy[row, column]) == bool(log_p.argmax() == target)
        assert not snapshot.labels[row, len(text.ids) - 1 :].any()


def test_virtual_tokens_before_a_text_are_not_asked_about(model: GPT2LMHeadModel) -> None:
    """Prompt tuning puts them there: the logits have more places than the text."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned = get_peft_model(copy.deepcopy(model), config).eval()
    texts = some_texts(30, 7, 12)
    snapshot = token_log_probs(find_anatomy(tuned), texts)
    for row, text in enumerate(texts):
        with torch.no_grad():
            logits = tuned(input_ids=text.ids[None]).logits[0]
        assert len(logits) == 5 + len(text.ids)
        for place in (text.labels[1:] != -100).nonzero()[:, 0].tolist():
            log_p = logits[5 + place].double().log_softmax(0)
            expected = float(log_p[text.ids[place + 1]])
            assert float(snapshot.log_probs[row, place]) == pytest.approx(expected, abs=2e-5)


def test_texts_packed_into_a_row_come_apart() -> None:
    ids = torch.arange(10, 18)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    texts = texts_in(TokenBatch(ids, ids, None, "causal", positions))
    assert [text.ids.tolist() for text in texts] == [[10, 11, 12], [13, 14], [15, 16, 17]]
    assert [text.n_labels for text in texts] == [2, 1, 2]


def test_compressed_bytes_are_of_the_words() -> None:
    texts = some_texts(20, 8)
    decoded = compressed_bytes(texts, lambda ids: " ".join(map(str, ids)))
    expected = [len(zlib.compress(" ".join(map(str, t.ids.tolist())).encode())) for t in texts]
    assert decoded.tolist() == expected
    assert compressed_bytes(texts)[0] > compressed_bytes(texts)[1] > 0

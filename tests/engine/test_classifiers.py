"""Words from classifiers and encoder-decoders; models that read images or sounds too."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    BagOfWords,
    BiasSign,
    FlatChat,
    SubspaceWords,
)
from lightning_fedleak.engine.results import UNEXPLAINED
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import context_length, sees_no_later, undisturbed
from lightning_fedleak.model.taps import ModelCall, Step
from tests.engine.test_auto import configure
from tests.helpers.loops import check_undisturbed, watched
from tests.helpers.models import own_rng, tiny_marian
from tests.helpers.steps import open_channel

VOCABULARY, WIDTH, POSITIONS, TARGETS = 300, 64, 40, 200
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": POSITIONS,
}  # fmt: skip
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": POSITIONS}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": ENCODER,
    "Llama": SIZES,
    "GPT2": GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "T5": T5 | {"d_ff": 96, "dropout_rate": 0.0, "decoder_start_token_id": 0, "eos_token_id": 1},
    "Bart": BART
    | {"dropout": 0.0}
    | {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()},
}


def build(family: str, task: str, **more: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family] | more)
    return getattr(transformers, f"{family}For{task}")(config)


def marian() -> nn.Module:
    return tiny_marian(vocab=VOCABULARY, d=WIDTH, dropout=0.0, decoder_vocab=TARGETS)


Build = Callable[[], nn.Module]
SEQUENCE = "SequenceClassification"
# Model, the last token of each text where the head needs one, rows of a batch.
CLASSIFIERS: dict[str, tuple[Build, int | None, int]] = {
    "bert": (lambda: build("Bert", SEQUENCE), None, 3),
    "llama": (lambda: build("Llama", SEQUENCE, pad_token_id=0), None, 3),
    "gpt2": (lambda: build("GPT2", SEQUENCE, bos_token_id=0, eos_token_id=1), None, 1),
    "t5": (lambda: build("T5", SEQUENCE), 1, 3),
    "bart": (lambda: build("Bart", SEQUENCE), 2, 3),
}
ZERO_ROWS = {"llama"}  # models whose padding token has no input, so that it would leave no trace
ADAPTED = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def subspace() -> SubspaceWords:
    """Return the attack without a measure of how many types it can hold."""
    return SubspaceWords(capacity_seconds=0.0)


def build_model(make, *, lora=None, task=None) -> nn.Module:
    with own_rng(3):
        model = make()
        if lora is not None:
            model = get_peft_model(model, LoraConfig(r=16, target_modules=lora, task_type=task))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter += 0.05 * torch.randn_like(parameter)
    return model


def texts(rows: int, length: int = 9, tokens: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, tokens, (rows, length), generator=generator)


def one_look(folder: Path, model: nn.Module, batch: dict[str, Tensor], *attacks: Attack) -> Any:
    """Return the watch of one step on a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        played = list(attacks) or "auto"
        return watched(folder, played, model, batches=[batch], configure=configure)


def check_words(monitor: Any, attack: Attack, *, certified: bool | None = None) -> None:
    """Check that all words are found, in a step that is made again exactly, or has no control."""
    assert monitor.failures == 0
    assert monitor.engine.results.look_values.get(UNEXPLAINED, 0.0) <= 1e-5
    assert monitor.latest[f"leakage/{attack.name}/f1"] == pytest.approx(1.0)
    if certified is not None:
        assert monitor.latest[f"leakage/{attack.name}/certified"] == certified


# ---- classifiers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "lora"), [*((f, False) for f in CLASSIFIERS), *((f, True) for f in ADAPTED)]
)
def test_the_words_of_a_classifier_are_recovered(family: str, lora: bool, tmp_path: Path) -> None:
    make, last, rows = CLASSIFIERS[family]
    ids = texts(rows)
    if last is not None:
        ids[:, -1] = last
    adapted = ADAPTED[family] if lora else None
    model = build_model(make, lora=adapted, task=TaskType.SEQ_CLS if lora else None)
    batch = {"input_ids": ids, "labels": torch.arange(rows) % 2}
    watch = one_look(tmp_path, model, batch, BagOfWords(), subspace())
    check_words(watch, subspace(), certified=family not in ZERO_ROWS)
    if lora:
        assert watch.latest["leakage/bag_of_words/exposed"] == 0
    elif family == "t5":  # and the token that its decoder begins with
        assert watch.latest["leakage/bag_of_words/recall"] == 1
    else:
        check_words(watch, BagOfWords())


@pytest.mark.parametrize("labels", ["regression", "several classes", "places"])
def test_labels_that_are_no_class_do_not_matter(labels: str, tmp_path: Path) -> None:
    ids = texts(3)
    batch: dict[str, Tensor] = {"input_ids": ids}
    if labels == "regression":
        model = build_model(lambda: build("Bert", SEQUENCE, num_labels=1))
        batch["labels"] = torch.rand(3)
    elif labels == "several classes":
        kind = "multi_label_classification"
        model = build_model(lambda: build("Bert", SEQUENCE, num_labels=4, problem_type=kind))
        batch["labels"] = torch.eye(4)[:3]
    else:
        model = build_model(lambda: build("Bert", "QuestionAnswering"))
        batch |= {name: torch.tensor([2, 3, 4]) for name in ("start_positions", "end_positions")}
    monitor = one_look(tmp_path, model, batch, BagOfWords(), subspace())
    check_words(monitor, BagOfWords())
    check_words(monitor, subspace(), certified=True)
    assert monitor.engine.results.look_values[UNEXPLAINED] < 1e-6


@pytest.mark.parametrize("attack", [BagOfWords(), subspace()], ids=lambda a: a.name)
def test_padding_that_answers_are_chosen_from_is_no_word(attack: Attack, tmp_path: Path) -> None:
    """A softmax over the places of a text reaches its padding too."""
    model, ids = build_model(lambda: build("Bert", "QuestionAnswering")), texts(2)
    ids[0, 6:] = model.config.pad_token_id
    places = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 5])}
    batch = {"input_ids": ids, "attention_mask": (ids != model.config.pad_token_id).long()}
    monitor = one_look(tmp_path, model, batch | places, attack)
    values = {n: monitor.latest[f"leakage/{attack.name}/{n}"] for n in ("precision", "recall")}
    assert values == {"precision": 1.0, "recall": 1.0}


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_tokens_that_a_label_of_a_token_classifier_depends_on_count(family, tmp_path) -> None:
    """A causal one's tokens behind the last that has a label have no part in any gradient."""
    ids = texts(3)
    labels = ids % 2
    labels[:, 0] = labels[:, -2:] = -100
    model = build_model(lambda: build(family, "TokenClassification"))
    batch = {"input_ids": ids, "labels": labels}
    monitor = one_look(tmp_path, model, batch, BagOfWords(), subspace())
    check_words(monitor, BagOfWords())
    check_words(monitor, subspace(), certified=True)
    assert sees_no_later(find_anatomy(model)) == (family == "Llama")
    calls = [ModelCall(batch=TokenBatch(ids, labels, None, "classifier"))]
    truth = open_channel(BagOfWords(), model).truth(Step(calls=calls))
    counted = ids[:, :-2] if family == "Llama" else ids
    outputs, inputs = truth.used
    assert set(inputs.nonzero().flatten().tolist()) == set(counted.flatten().tolist())
    assert not outputs.any()
    assert truth.n_targets == 3


@pytest.mark.parametrize(
    ("task", "lora"), [(SEQUENCE, TaskType.SEQ_CLS), ("TokenClassification", None)]
)
def test_attacks_choose_themselves_on_classifiers(task: str, lora: Any, tmp_path: Path) -> None:
    model = build_model(
        lambda: build("Bert", task), lora=["query", "value"] if lora else None, task=lora
    )
    ids = texts(3)
    labels = torch.arange(3) % 2 if task == SEQUENCE else ids % 2
    watch = one_look(tmp_path, model, {"input_ids": ids, "labels": labels})
    assert watch.failures == 0
    assert watch.latest["leakage/worst/words"] == 1
    assert "leakage/subspace_words/f1" in watch.latest
    [aligned] = watch.lines("aligned_flatchat")
    assert "reads words off an output head with a row" in aligned["unknown"]
    assert ("leakage/bag_of_words/f1" in watch.latest) == (not lora)


# ---- what cannot be read, and why -----------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [FlatChat(n_types=5), AlignedFlatChat([[5, 6, 7] * 9]), BiasSign()],
    ids=lambda attack: attack.name,
)
def test_what_reads_a_vocabulary_head_is_refused_with_the_true_reason(attack, tmp_path) -> None:
    batch = {"input_ids": texts(2), "labels": torch.tensor([0, 1])}
    message = "head with a row for each token, and this model has no such head"
    with pytest.raises(ValueError, match=message) as refused:
        one_look(
            tmp_path, build_model(lambda: build("Bert", SEQUENCE, num_labels=3)), batch, attack
        )
    assert "BagOfWords reads the embeddings' gradient" in str(refused.value)


# ---- two vocabularies -----------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False])
def test_of_two_vocabularies_the_source_s_words_are_named(lora: bool, tmp_path: Path) -> None:
    model = build_model(marian, lora=["q_proj", "v_proj"] if lora else None)
    anatomy = find_anatomy(model)
    assert (anatomy.vocab_size, anatomy.target_rows) == (TARGETS, TARGETS)
    ids = texts(3)
    batch = {"input_ids": ids, "labels": texts(3, 7, TARGETS, seed=1)}
    monitor = one_look(tmp_path, model, batch, subspace(), BagOfWords())
    check_words(monitor, subspace(), certified=True)
    if not lora:  # the decoder's matrix is the head's, the encoder's is its own
        check_words(monitor, BagOfWords())
    assert all(".encoder." in f".{r}" for r in subspace().needs(anatomy).gradients)


@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_an_encoder_decoder_of_one_vocabulary_leaks_both_sides(family: Any, tmp_path: Path) -> None:
    model = build_model(lambda: build(family, "ConditionalGeneration"))
    batch = {"input_ids": texts(3), "labels": texts(3, 7, seed=1)}
    monitor = one_look(tmp_path, model, batch, subspace())
    assert monitor.latest["leakage/subspace_words/recall"] == 1
    assert monitor.latest["leakage/subspace_words/certified"] == 1


MEDIA_VOCABULARY, IMAGE, MEDIA_WIDTH = 200, 199, 64
NOBODY = "no attack recovers the images or sounds that the model reads: "


def whisper() -> Any:
    sizes = {"d_model": MEDIA_WIDTH, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    lengths = {"max_source_positions": 20, "max_target_positions": 16}
    config = transformers.WhisperConfig(
        vocab_size=MEDIA_VOCABULARY, **sizes, **heads, **ids, **lengths
    )
    with own_rng(1):
        return transformers.WhisperForConditionalGeneration(config)


def llava() -> Any:
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    vision = transformers.CLIPVisionConfig(hidden_size=32, image_size=16, patch_size=8, **small)
    text = transformers.LlamaConfig(vocab_size=MEDIA_VOCABULARY, hidden_size=MEDIA_WIDTH, **small)
    image = {"image_token_index": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1}
    with own_rng(1):
        return transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=vision, text_config=text, **image)
        )


def batches(image: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, 190, (2, 10), generator=generator) for _ in range(2)]
    if not image:
        sound = torch.randn(2, 8, 40, generator=generator)
        return [{"input_features": sound, "labels": ids} for ids in texts]
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    for ids in texts:
        ids[:, 1:5] = IMAGE
    return [
        {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == IMAGE, -100)}
        for ids in texts
    ]


def test_the_text_beside_a_sound_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        attacks = [SubspaceWords(capacity_seconds=0)]
        watch = check_undisturbed(tmp_path, attacks, whisper, batches=batches(image=False))
    assert watch.latest["leakage/subspace_words/f1"] == 1
    assert watch.latest["leakage/subspace_words/control"] > 0.9
    assert caplog.text.count(f"{NOBODY}input_features") == 1


def test_a_decoder_is_run_on_ids_without_a_sound() -> None:
    model = whisper().eval()
    anatomy, ids = find_anatomy(model), torch.arange(5, 13)[None]
    assert context_length(anatomy) == 16
    silence = torch.zeros(1, 1, MEDIA_WIDTH)
    with undisturbed(anatomy) as run, torch.no_grad():
        logits = run(input_ids=ids).logits
        expected = model(decoder_input_ids=ids, encoder_outputs=(silence,)).logits
    assert torch.equal(logits, expected)


def test_places_of_an_image_are_no_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        watch = check_undisturbed(tmp_path, [BagOfWords()], llava, batches=batches(image=True))
    for line in watch.lines("bag_of_words"):
        assert line["metrics"]["f1"]["value"] == 1
    assert caplog.text.count(f"{NOBODY}pixel_values") == 1

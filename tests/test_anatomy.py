""""""

import string
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertLMHeadModel,
    BertModel,
    ByT5Tokenizer,
    CLIPVisionConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.evaluation.entities import (
    KINDS,
    EntityFinder,
    finders_of,
    is_card_number,
    is_iban,
    spans_of,
)
from lightning_fedleak.model.anatomy import AnatomyError, find_anatomy
from lightning_fedleak.model.loading import are_equal, load_adapters, load_whole, weight_sums
from lightning_fedleak.model.model_runs import undisturbed
from lightning_fedleak.model.snapshots import Stage, TokenSnapshot, whole_tensor
from lightning_fedleak.model.taps.step_tap import _GradientTap
from lightning_fedleak.validate import WrongModel
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import (
    DIM,
    VOCAB,
    own_rng,
    tiny_bart,
    tiny_bert_mlm,
    tiny_distilbert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_marian,
    tiny_roberta_classifier,
    tiny_t5,
)

ROLES = ("head.weight", "head.bias", "embedding.weight")
LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BERT_SIZES = {k: v for k, v in LLAMA_SIZES.items() if k != "num_key_value_heads"}


def gpt2_classifier() -> GPT2ForSequenceClassification:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=DIM, n_layer=2, n_head=2, n_positions=32, pad_token_id=0
    )
    config.num_labels = 3
    return GPT2ForSequenceClassification(config)


WORDS: dict[str, tuple[Any, str]] = {
    "gpt2": (tiny_gpt2, "causal"),
    "gpt2 untied": (lambda: tiny_gpt2(tied=False), "causal"),
    "llama": (tiny_llama, "causal"),
    "bert": (tiny_bert_mlm, "masked"),
    "bert causal": (lambda: BertLMHeadModel(BertConfig(**BERT_SIZES, is_decoder=True)), "causal"),
    "distilbert": (tiny_distilbert_mlm, "masked"),
    "t5": (tiny_t5, "seq2seq"),
    "marian untied": (lambda: tiny_marian(tied=False), "seq2seq"),
    "bart": (tiny_bart, "seq2seq"),
}
CLASSIFIERS: dict[str, tuple[Any, str]] = {
    "roberta": (tiny_roberta_classifier, "classifier.out_proj"),
    "gpt2": (gpt2_classifier, "score"),
}


class Nested(L.LightningModule):
    """A model several levels down, beside layers that are none of its parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.projection = nn.Linear(5, 7)
        self.net = nn.Module()
        self.net.lm = nn.ModuleDict({"inner": model})


def loss_of(model: nn.Module, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (2, 6), generator=generator)
    labels = ids[:, 0] % 3 if kind == "classifier" else ids
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def silently(wrap: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrap(*args, **kwargs)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("wrap", [CausalLMModule, Nested, None], ids=["model", "nested", "bare"])
def test_parts_of_language_models(name: str, wrap: Any) -> None:
    """As the model itself says, which is not asked for the names below the user's module."""
    build, kind = WORDS[name]
    model = build()
    root = model if wrap is None else wrap(model)
    prefix = {CausalLMModule: "model.", Nested: "net.lm.inner.", None: ""}[wrap]
    found = find_anatomy(root)
    head = model.get_output_embeddings()
    words = (model.get_encoder() if kind == "seq2seq" else model).get_input_embeddings()
    assert (found.model, found.root) == (model, root)
    assert (found.kind, found.peft) == (kind, None)
    assert found.tied == (head.weight is words.weight)
    assert root.get_submodule(found.embedding_name) is found.embedding is words
    assert found.head is root.get_submodule(found.head_name or "") is head
    bias = None if head.bias is None else f"{found.head_name}.bias"
    assert found.parameter_name("head.bias") == bias
    assert [name.rpartition(".")[2] for name in found.block_names] == ["0", "1"]
    assert [root.get_submodule(n) for n in found.block_names] == list(found.blocks)
    for part in (found.embedding_name, found.head_name, *found.block_names):
        assert part.startswith(prefix)
    assert (found.vocab_size, found.hidden_size) == (VOCAB, DIM)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_parts_of_classifiers(name: str) -> None:
    build, head = CLASSIFIERS[name]
    found = find_anatomy(CausalLMModule(build()))
    assert (found.kind, found.tied) == ("classifier", False)
    assert found.head_name == f"model.{head}"
    assert (found.vocab_size, found.embedding_rows, found.hidden_size) == (3, VOCAB, DIM)


@pytest.mark.parametrize(
    "build",
    [entry[0] for entry in [*WORDS.values(), *CLASSIFIERS.values()]],
    ids=[*WORDS, *(f"classify {n}" for n in CLASSIFIERS)],
)
def test_parts_are_those_the_forward_uses(build: Any) -> None:
    """Embedding, head and every block run, and the head's output has the gradient of the loss."""
    model = build().eval()
    found = find_anatomy(model)
    assert found.head is not None
    ran: dict[int, Tensor] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        ran[id(module)] = output[0] if isinstance(output, tuple) else output

    for module in (found.embedding, found.head, *found.blocks):
        module.register_forward_hook(note)
    loss = loss_of(model, found.kind)
    assert {id(m) for m in (found.embedding, found.head, *found.blocks)} == set(ran)
    assert ran[id(found.embedding)].shape == (2, 6, DIM)
    logits = ran[id(found.head)]
    assert logits.shape[-1] == found.vocab_size
    (grad,) = torch.autograd.grad(loss, [logits], retain_graph=True)
    weights = [p for role in ROLES if (p := found.parameter(role)) is not None]
    grads = dict(zip(map(id, weights), torch.autograd.grad(loss, weights), strict=True))
    bias = found.parameter("head.bias")
    if bias is not None:
        torch.testing.assert_close(grads[id(bias)], grad.flatten(0, -2).sum(0))
    head_weight = found.parameter("head.weight")
    assert head_weight is not None
    assert grads[id(head_weight)].abs().sum() > 0
    words = found.parameter("embedding.weight")
    assert words is not None
    assert grads[id(words)].abs().sum() > 0


def test_separate_vocabularies_tie_the_head_to_the_decoder() -> None:
    found = find_anatomy(tiny_marian(decoder_vocab=50))
    assert found.tied
    assert found.parameter("head.weight") is not found.parameter("embedding.weight")
    assert (found.vocab_size, found.embedding.num_embeddings) == (50, VOCAB)


def lora(**kwargs: Any) -> peft.LoraConfig:
    kwargs.setdefault("target_modules", ["c_attn"])
    return peft.LoraConfig(task_type="CAUSAL_LM", r=2, **kwargs)


def peft_module(config: peft.PeftConfig, tied: bool = False) -> CausalLMModule:
    with own_rng(1):
        return CausalLMModule(silently(peft.get_peft_model, tiny_gpt2(tied=tied), config))


INNER = "model.base_model.model."
TUNED = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
# name: config, what a head and an embedding are called in it
PEFTS: dict[str, tuple[peft.PeftConfig, str, str]] = {
    "lora": (lora(), "lm_head", "wte"),
    "lora on head": (lora(target_modules=["c_attn", "lm_head"]), "lm_head.base_layer", "wte"),
    "lora on embedding": (lora(target_modules=["wte"]), "lm_head", "wte.base_layer"),
    "head saved": (lora(modules_to_save=["lm_head"]), "lm_head.modules_to_save.default", "wte"),
    "embedding saved": (lora(modules_to_save=["wte"]), "lm_head", "wte.modules_to_save.default"),
    "trainable tokens": (
        lora(trainable_token_indices=[4, 5]), "lm_head", "wte.token_adapter.base_layer",
    ),
    "ia3": (
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[]),
        "lm_head", "wte",
    ),
    "prompt tuning": (peft.PromptTuningConfig(**TUNED), "lm_head", "wte"),
    "prefix tuning": (peft.PrefixTuningConfig(**TUNED), "lm_head", "wte"),
}  # fmt: skip


@pytest.mark.parametrize("name", PEFTS)
def test_peft(name: str) -> None:
    config, head, embedding = PEFTS[name]
    root = peft_module(config)
    found = find_anatomy(root)
    inner = "model.base_model." if "tuning" in name else INNER
    assert found.model is root.model
    assert (found.kind, found.peft, found.tied) == ("causal", config.peft_type, False)
    assert found.parameter_name("head.weight") == f"{inner}{head}.weight"
    assert found.parameter_name("embedding.weight") == f"{inner}transformer.{embedding}.weight"
    assert found.trainable("head.weight") == ("modules_to_save" in head)
    assert found.trainable("embedding.weight") == ("modules_to_save" in embedding)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    assert found.parameter("head.weight") is parameters[f"{inner}{head}.weight"]
    assert len(found.blocks) == 2
    assert (found.vocab_size, found.hidden_size) == (VOCAB, DIM)
    assert set(found.trainable_names()) == {n for n, p in parameters.items() if p.requires_grad}


def test_the_active_adapter_decides() -> None:
    root = peft_module(lora(modules_to_save=["lm_head"]))
    silently(root.model.add_adapter, "second", lora(modules_to_save=["lm_head"]))
    found = find_anatomy(root)
    name = INNER + "lm_head.modules_to_save.{}.weight"
    assert found.parameter_name("head.weight") == name.format("default")
    root.model.set_adapter("second")
    assert found.parameter_name("head.weight") == name.format("second")
    with root.model.disable_adapter():
        assert found.parameter_name("head.weight") == INNER + "lm_head.original_module.weight"


def test_compiled_and_ddp_are_unwrapped(tmp_path: Any) -> None:
    model = tiny_gpt2()
    root = CausalLMModule(torch.compile(model))
    found = find_anatomy(root)
    assert found.model is model
    assert found.parameter_name("head.weight") == "model._orig_mod.lm_head.weight"
    assert find_anatomy(torch.compile(root)).model is model
    assert find_anatomy(root, model="model").model is model

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(CausalLMModule(model))
        found = find_anatomy(parallel)
    finally:
        torch.distributed.destroy_process_group()
    assert found.model is model
    assert found.parameter_name("head.weight") == "module.model.lm_head.weight"


class PlainLM(nn.Module):
    def __init__(self, rows: int = 40, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 8)
        self.places = nn.Embedding(16, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.out = nn.Linear(8, rows)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        logits: Tensor = self.out(self.body(self.words(input_ids) + self.places(places)))
        return logits


class Exposing(PlainLM):
    def get_input_embeddings(self) -> nn.Module:
        return self.words


@pytest.mark.parametrize("build", [PlainLM, Exposing])
def test_plain_modules(build: Any) -> None:
    model = build()
    found = find_anatomy(Nested(model))
    assert found.model is model
    assert found.embedding is model.words
    assert found.head is model.out
    assert found.kind == "causal"
    assert found.block_names == tuple(f"net.lm.inner.body.{i}" for i in range(3))
    assert (found.vocab_size, found.hidden_size, found.tied) == (40, 8, False)
    assert found.parameter_name("head.bias") == "net.lm.inner.out.bias"


def test_plain_encoder_decoder() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(30, 8), nn.Embedding(20, 8)
            self.transformer = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
            self.out = nn.Linear(8, 20)

        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
            body = self.transformer(self.source(input_ids), self.target(decoder_input_ids))
            logits: Tensor = self.out(body)
            return logits

    found = find_anatomy(Translator(), embedding="source", head="out")
    assert found.kind == "seq2seq"
    assert found.block_names == tuple(f"transformer.decoder.layers.{i}" for i in range(3))


def test_blocks_of_an_image_encoder_are_not_the_language_models() -> None:
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = LlavaConfig(vision_config=vision, text_config=tiny_llama().config)
    found = find_anatomy(LlavaForConditionalGeneration(config))
    assert found.kind == "causal"
    assert found.block_names == tuple(f"model.language_model.layers.{i}" for i in range(2))


def test_embedding_matrix_used_as_head() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(40, 8)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.words(input_ids) @ self.words.weight.T

    root = CausalLMModule(Functional())
    with pytest.raises(AnatomyError, match="found no language model"):
        find_anatomy(root)
    headless = find_anatomy(root, embedding="model.words")
    assert headless.head is None
    assert (headless.parameter("head.weight"), headless.tied) == (None, False)
    tied = find_anatomy(root, embedding="model.words", head="model.words")
    assert tied.tied
    assert tied.model is root.model
    assert tied.parameter_name("head.weight") == "model.words.weight"


def test_base_model_with_the_users_own_head() -> None:
    class Classifier(L.LightningModule):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.encoder = BertModel(BertConfig(**BERT_SIZES))
            self.top = nn.Linear(DIM, rows)

    found = find_anatomy(Classifier(4))
    assert (found.kind, found.head_name, found.vocab_size) == ("classifier", "top", 4)
    with pytest.raises(AnatomyError, match="kind='causal'"):
        find_anatomy(Classifier(VOCAB))
    found = find_anatomy(Classifier(VOCAB), kind="masked")
    assert (found.kind, found.head_name, found.vocab_size) == ("masked", "top", VOCAB)


def test_two_language_models_are_refused_by_name() -> None:
    class Distillation(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = tiny_llama(), tiny_gpt2()

    root = Distillation()
    with pytest.raises(AnatomyError, match=r"name the one .*'teacher', 'student'"):
        find_anatomy(root)
    found = find_anatomy(root, model="student")
    assert found.model is root.student
    assert found.head_name == "student.lm_head"
    assert find_anatomy(root, model=root.student).head is found.head


def test_overrides_by_name_and_module() -> None:
    model = tiny_bert_mlm()
    root = CausalLMModule(model)
    names = {"embedding": "bert.embeddings.position_embeddings", "blocks": "bert.encoder.layer"}
    names["head"] = "model.cls.predictions.transform.dense"
    modules = {"model": model, "embedding": model.bert.embeddings.position_embeddings}
    modules["head"] = model.cls.predictions.transform.dense
    for arguments in (names, modules):
        found = find_anatomy(root, **arguments, kind="classifier")
        assert found.embedding_name == "model.bert.embeddings.position_embeddings"
        assert found.head_name == "model.cls.predictions.transform.dense"
        assert (found.kind, found.vocab_size, found.tied) == ("classifier", DIM, False)
        assert found.block_names == ("model.bert.encoder.layer.0", "model.bert.encoder.layer.1")


def test_undisturbed_sets_modes_without_a_users_train() -> None:
    class Stubborn(nn.Module):
        """Like loralib's layers: changing the mode by train() changes weights."""

        def train(self, mode: bool = True) -> "Stubborn":
            raise AssertionError("the mode of a user's module was switched by train()")

    root = CausalLMModule(tiny_gpt2().train())
    root.stubborn = Stubborn()
    with undisturbed(find_anatomy(root)) as inner:
        assert inner is root.model
        assert not root.stubborn.training
    assert root.stubborn.training


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_undisturbed_restores_the_generator_of_the_models_device() -> None:
    anatomy = find_anatomy(tiny_gpt2().cuda())
    assert anatomy.device.type == "cuda"
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    with undisturbed(anatomy):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_score_of_a_choice_is_the_head_and_an_adaptive_softmax_is_none() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = BertConfig(vocab_size=64, num_hidden_layers=1, **sizes)
    model = BertForMultipleChoice(config)
    found = find_anatomy(model)
    assert found.head is model.classifier
    assert found.kind == "classifier"

    adaptive = nn.Module()
    adaptive.words = nn.Embedding(64, 8)
    adaptive.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 64, cutoffs=[16, 32])
    found = find_anatomy(adaptive)
    assert found.embedding is adaptive.words
    assert found.head is None


# Models that are loaded, values that are found in texts, and snapshots of steps.


# Saved models are loaded whole, or refused; and a base's own weights are recognised.


SIZES = {"vocab_size": 40, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 1}
Rename = Callable[[str], str]


def new(seed: int) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    new(1).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object], pickled: bool) -> None:
    """Change the tensors in a model's folder, which may then be in a file of torch."""
    path = folder / "model.safetensors"
    content = change(load_file(path))
    path.unlink()
    if pickled:
        torch.save(content, folder / "pytorch_model.bin")
    else:
        save_file(content, path, {"format": "pt"})


@pytest.mark.parametrize("form", ["safetensors", "pickled", "lightning"])
@pytest.mark.parametrize("prefix", ["model.", "a.b.", ""])
def test_one_prefix_is_removed(saved: Path, prefix: str, form: str) -> None:
    def wrap(state: dict[str, Tensor]) -> object:
        named = {prefix + name: tensor for name, tensor in state.items()}
        return {"state_dict": named, "epoch": 3} if form == "lightning" else named

    rewrite(saved, wrap, form != "safetensors")
    model, head = load_whole(transformers.AutoModelForCausalLM, str(saved))
    assert not head
    assert are_equal(weight_sums(model), weight_sums(new(1)))


def test_missing_tensors_are_named(saved: Path) -> None:
    rewrite(saved, lambda state: {n: t for n, t in state.items() if "h.0." not in n}, False)
    with pytest.raises(WrongModel, match=r"lacks .*transformer\.h\.0\.attn"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))


def test_several_prefixes_are_refused_and_further_tensors_named(saved, tmp_path_factory) -> None:
    def double(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{p}.{n}": t.clone() for n, t in state.items() for p in ("a", "b")}

    rewrite(saved, double, False)
    with pytest.raises(WrongModel, match="after several prefixes"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))
    other = tmp_path_factory.mktemp("other")
    new(2).save_pretrained(other)
    rewrite(other, lambda state: {**state, "v_head.weight": torch.zeros(3)}, False)
    with pytest.warns(UserWarning, match=r"also holds v_head\.weight"):
        load_whole(transformers.AutoModelForCausalLM, str(other))


def test_a_wrong_shape_and_a_damaged_file_are_refused(saved: Path) -> None:
    wide = "model.transformer.wpe.weight"

    def widen(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{n}": t for n, t in state.items()} | {wide: torch.zeros(9, 8)}

    rewrite(saved, widen, True)
    with pytest.raises(WrongModel, match=r"wpe.weight has the shape \(9, 8\)"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))


SMALL_BERT = BertConfig(
    vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    num_labels=3,
)  # fmt: skip


def test_only_a_head_may_be_missing(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(SMALL_BERT).save_pretrained(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    _, head = load_whole(kind, str(tmp_path), may_lack_head=True)
    assert {"classifier.weight", "classifier.bias"} <= head
    assert all("classifier" in name or "pooler" in name for name in head)
    with pytest.raises(WrongModel, match="lacks"):
        load_whole(kind, str(tmp_path))
    rewrite(tmp_path, lambda s: {n: t for n, t in s.items() if "word_emb" not in n}, False)
    with pytest.raises(WrongModel, match="word_embeddings"):
        load_whole(kind, str(tmp_path), may_lack_head=True)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_head_is_read_after_the_prefix_too(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    saved = transformers.BertForSequenceClassification(SMALL_BERT)
    saved.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {prefix + n: t for n, t in state.items()}, False)
    model, head = load_whole(
        transformers.AutoModelForSequenceClassification, str(tmp_path), may_lack_head=True
    )
    assert not head
    assert are_equal(weight_sums(model), weight_sums(saved))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
)
def test_adapters_are_loaded_whatever_wrapped_them(tmp_path: Path, rename: Rename) -> None:
    adapted = get_peft_model(new(1), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for parameter in adapted.parameters():
        torch.nn.init.normal_(parameter) if parameter.requires_grad else None
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    state = load_file(path)
    save_file({rename(name): tensor for name, tensor in state.items()}, path, {"format": "pt"})
    loaded = load_adapters(new(1), str(tmp_path))
    assert are_equal(weight_sums(loaded), weight_sums(adapted))
    save_file({n: t for n, t in state.items() if "h.0" in n}, path, {"format": "pt"})
    with pytest.raises(WrongModel, match=r"lacks .*h\.1"):
        load_adapters(new(1), str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_are_recognised_up_to_their_stored_dtype(dtype: torch.dtype) -> None:
    base, rounded = new(1), new(1).to(dtype).float()
    for first, second in ((base, rounded), (rounded, base)):
        assert are_equal(weight_sums(first), weight_sums(second))
    assert are_equal(weight_sums(base), weight_sums(new(1).to(dtype)))
    trained = new(1)
    trained.transformer.h[1].ln_1.bias.data[0] += 0.1
    assert not are_equal(weight_sums(base), weight_sums(trained.to(dtype)))
    assert not are_equal(weight_sums(base), weight_sums(new(2)))


# Values that patterns and word lists find, against check digits and counts of one's own.


TOKENIZER = ByT5Tokenizer()
GAPS = st.sampled_from(["", " "])


def found(text: str, kinds: Any = KINDS) -> list[tuple[str, str]]:
    finders = kinds if isinstance(kinds, dict) else finders_of([*kinds])
    return [(kind, text[start:end]) for kind, start, end in spans_of(text, finders)]


def luhn_digit(digits: str) -> str:
    table = "0246813579"  # of twice a digit the sum of its digits
    total = sum(
        int(table[int(one)] if place % 2 == 0 else one) for place, one in enumerate(digits[::-1])
    )
    return str(-total % 10)


def iban_of(country: str, account: str) -> str:
    number = "".join(
        str(string.ascii_uppercase.index(one) + 10) if one.isalpha() else one
        for one in account + country + "00"
    )
    return f"{country}{98 - int(number) % 97:02d}{account}"


@given(st.text("0123456789", min_size=12, max_size=18), st.integers(0, 17), st.integers(1, 9))
def test_a_check_digit_decides_what_is_a_card_number(body: str, place: int, step: int) -> None:
    number = body + luhn_digit(body)
    assert is_card_number(number)
    place %= len(number)
    changed = str((int(number[place]) + step) % 10)
    assert not is_card_number(number[:place] + changed + number[place + 1 :])
    grouped = " ".join(number[n : n + 4] for n in range(0, len(number) - 1, 4))
    if len(number) % 4 != 1:  # a last group of one digit is no group
        assert ("card", grouped) in found(f"Pay by {grouped}, please.", ["card"])


@given(
    st.text(string.ascii_uppercase, min_size=2, max_size=2),
    st.text("0123456789" + string.ascii_uppercase, min_size=11, max_size=30),
    st.integers(4, 33),
    GAPS,
)
def test_check_digits_decide_what_is_an_account_number(country, account, place, gap) -> None:
    number = iban_of(country, account)
    assert is_iban(number)
    place = 4 + place % len(account)
    # Mod 97 sees a change of one digit, or of a letter to its neighbour, whose value differs by 1.
    other = chr(ord(number[place]) + (-1 if number[place] in "9Z" else 1))
    assert not is_iban(number[:place] + other + number[place + 1 :])
    written = gap.join(number[n : n + 4] for n in range(0, len(number), 4)) if gap else number
    assert found(f"From {written}.", ["iban"]) == [("iban", written)]


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        ("phone", "Call 555-0123 or +49 (30) 1234 5678, not 1234567 and not 42", 2),
        ("email", "jo.doe+x@mail.example.com and Ann@ex.de, not @home or a@b", 2),
        ("date", "On 2024-01-15, 3 March 2021, May 4, 2020 and 12.03.2024; not 3.14 or 2024", 4),
        ("code", "AB1234 and sk-a1b2c3; neither covid-19 nor 1990s nor 123456", 2),
        ("card", "4111 1111 1111 1111, not 4111 1111 1111 1112", 1),
        ("iban", "DE89 3704 0044 0532 0130 00 FOR ANN", 1),
    ],
)
def test_patterns_find_what_they_say(kind: str, text: str, values: int) -> None:
    assert [name for name, _ in found(text, [kind])] == [kind] * values


def test_overlapping_values_are_of_the_first_kind(tmp_path: Path) -> None:
    text = "Pay DE89 3704 0044 0532 0130 00 on 2024-01-15"
    assert found(text, ["phone", "card"]) == []
    assert [kind for kind, _ in found(text)] == ["iban", "date"]
    (tmp_path / "days.txt").write_text("2024-01-15\n")
    assert found(text, [tmp_path / "days.txt", "date"]) == [("days", "2024-01-15")]


def test_a_word_list_finds_whole_words_in_a_row(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("Jo\nAnna-Maria Müller\n\n")
    values = found("Jo met Anna Maria Müller and Joan; jo did not.", [names])
    assert values == [("names", "Jo"), ("names", "Anna Maria Müller")]


@pytest.mark.parametrize("name", ["fone", "phone.txt", "a b.txt", "empty.txt"])
def test_kinds_that_cannot_be_found_are_refused(tmp_path: Path, name: str) -> None:
    files = {"phone.txt": "Jo\n", "a b.txt": "Jo\n", "empty.txt": "Jo\n--\n"}
    kind: Any = name
    if name in files:
        kind = tmp_path / name
        kind.write_text(files[name])
    with pytest.raises(ValueError, match="entities") as error:
        finders_of([kind])
    assert "Jo" not in str(error.value)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, load_tokenizer(None)], ids=["bytes", "bpe"])
def test_tokens_of_a_value_are_those_that_write_it(tokenizer: Any) -> None:
    text = "Müller ☃: call +49 30 5550123 or write to jo@example.com today."
    ids = tokenizer(text)["input_ids"]
    finder = EntityFinder(["phone", "email"], [None, tokenizer])
    values = finder.find(ids)
    written = [tokenizer.decode(ids[one.start : one.end]).strip() for one in values]
    assert written == ["+49 30 5550123", "jo@example.com"]
    assert [one.key for one in values] == ["49305550123", "joexamplecom"]
    marks = finder.marks(torch.tensor(ids))
    assert int(marks["phone"].sum()) == values[0].end - values[0].start
    assert not bool((marks["phone"] & marks["email"]).any())
    assert not finder.has_letter(tokenizer("5", add_special_tokens=False)["input_ids"][-1])
    assert finder.has_letter(tokenizer("m", add_special_tokens=False)["input_ids"][-1])


def test_dates_have_one_key_only_where_they_are_the_same_date() -> None:
    finder = EntityFinder(["date", "phone"], [TOKENIZER])
    text = "On 1-11-2020, 11-1-2020 or 1.11.2020 call 555-0123 or 5550-123."
    keys = [one.key for one in finder.find(TOKENIZER(text)["input_ids"])]
    assert keys == ["1-11-2020", "11-1-2020", "1-11-2020", "5550123", "5550123"]


def test_a_tokenizer_is_needed_that_writes_texts_back() -> None:
    class Lower:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(one) for one in text.lower()]}

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    for tokenizer in (None, Lower()):
        with pytest.raises(ValueError, match=r"needs settings=WatchSettings\(tokenizer="):
            EntityFinder(["phone"], [tokenizer])


# Taps against independent computations: float64 optimizers by hand, plain autograd.


def test_kept_gradient_is_the_sum_over_micro_batches_and_survives_overwriting():
    torch.manual_seed(0)
    layer = nn.Linear(4, 6, bias=False)
    tap = _GradientTap({"head.weight": layer.weight})
    tap.keep_local()
    inputs = [torch.randn(5, 4) for _ in range(3)]
    layer(inputs[0]).square().sum().backward()
    layer.weight.grad = None
    tap.arm()
    for x in inputs:
        layer(x).square().sum().backward()
    expected = sum(2 * (x @ layer.weight.detach().T).T @ x for x in inputs)
    layer.weight.grad.zero_()
    kept = tap.view(0, Stage.LOCAL, copies=True).tensors["head.weight"]
    torch.testing.assert_close(kept, expected)
    tap.disarm()
    layer(inputs[0]).sum().backward()
    torch.testing.assert_close(
        tap.view(0, Stage.LOCAL, copies=True).tensors["head.weight"], expected
    )
    tap.close()
    assert not layer.weight._post_accumulate_grad_hooks


def test_sparse_gradients_are_made_dense():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    got = _GradientTap({"embedding.weight": embedding.weight}).view(0, Stage.SHARED)
    dense = got.tensors["embedding.weight"]
    assert dense.layout is torch.strided
    assert dense.sum(1).tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]


def test_a_token_that_cannot_be_makes_no_other_place_unknown():
    values = torch.tensor([[-torch.inf, -1.0, -2.0]])
    labels = torch.ones(1, 3, dtype=torch.bool)
    snapshot = TokenSnapshot(values, values, -values, labels, labels)
    part = snapshot.within(torch.tensor([[False, True, True]]))
    assert part.log_probs.tolist() == part.means.tolist() == [[0, -1, -2]]
    assert part.greedy.tolist() == part.labels.tolist() == [[False, True, True]]
    assert part.mean_log_probs().tolist() == [-1.5]


def test_shards_that_are_offloaded_to_the_host_are_gathered_on_the_mesh_s_device(monkeypatch):
    gpu = SimpleNamespace(current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: gpu)
    whole = torch.ones(2)

    class Shard:
        device, device_mesh = torch.device("cpu"), SimpleNamespace(device_type="cuda")

        def detach(self):
            return self

        def to(self, device):
            self.device = device
            return self

        def full_tensor(self):
            assert self.device == torch.device("cuda", 3)  # NCCL gathers nothing on a CPU
            return whole

    assert torch.equal(whole_tensor(Shard()), whole)

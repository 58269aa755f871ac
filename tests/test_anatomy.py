import warnings
from typing import Any

import lightning as L
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertLMHeadModel,
    BertModel,
    CLIPVisionConfig,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
)

from lightning_fedleak.model.anatomy import AnatomyError, find_anatomy
from lightning_fedleak.model.model_runs import undisturbed
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import (
    DIM,
    VOCAB,
    own_rng,
    tiny_bart,
    tiny_bert_classifier,
    tiny_bert_mlm,
    tiny_distilbert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_marian,
    tiny_roberta_classifier,
    tiny_roberta_mlm,
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


def distilbert_classifier() -> DistilBertForSequenceClassification:
    config = DistilBertConfig(vocab_size=VOCAB, dim=DIM, hidden_dim=32, n_layers=2, n_heads=2)
    config.num_labels = 3
    return DistilBertForSequenceClassification(config)


WORDS: dict[str, tuple[Any, str]] = {
    "gpt2": (tiny_gpt2, "causal"),
    "gpt2 untied": (lambda: tiny_gpt2(tied=False), "causal"),
    "llama": (tiny_llama, "causal"),
    "llama tied": (lambda: tiny_llama(tied=True), "causal"),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**LLAMA_SIZES, sliding_window=None)),
        "causal",
    ),
    "bert": (tiny_bert_mlm, "masked"),
    "bert pretraining": (lambda: BertForPreTraining(BertConfig(**BERT_SIZES)), "masked"),
    "bert causal": (lambda: BertLMHeadModel(BertConfig(**BERT_SIZES, is_decoder=True)), "causal"),
    "distilbert": (tiny_distilbert_mlm, "masked"),
    "roberta": (tiny_roberta_mlm, "masked"),
    "t5": (tiny_t5, "seq2seq"),
    "marian": (tiny_marian, "seq2seq"),
    "marian untied": (lambda: tiny_marian(tied=False), "seq2seq"),
    "bart": (tiny_bart, "seq2seq"),
    "bart untied": (lambda: tiny_bart(tied=False), "seq2seq"),
}
CLASSIFIERS: dict[str, tuple[Any, str]] = {
    "bert": (tiny_bert_classifier, "classifier"),
    "roberta": (tiny_roberta_classifier, "classifier.out_proj"),
    "distilbert": (distilbert_classifier, "classifier"),
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
    more = {"next_sentence_label": ids[:, 0] % 2} if type(model) is BertForPreTraining else {}
    loss: Tensor = model(input_ids=ids, labels=labels, **more).loss
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


def test_tied_weights_have_a_name_for_each_role() -> None:
    found = find_anatomy(CausalLMModule(tiny_gpt2()))
    assert found.parameter_name("head.weight") == "model.lm_head.weight"
    assert found.parameter_name("embedding.weight") == "model.transformer.wte.weight"
    assert found.parameter("head.weight") is found.parameter("embedding.weight")


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
    for given in (names, modules):
        found = find_anatomy(root, **given, kind="classifier")
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

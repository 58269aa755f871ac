"""Whatever a forward or a hook writes is as it was when a calibration or an attack is through."""

import copy
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm

from lightning_fedleak.attacks import AlignedFlatChat, FCMembership, FlatChat, PublicText
from lightning_fedleak.attacks.texts import embedding_descent
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model import model_state
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.anatomy.blocks import states_out, text_blocks, with_states_out
from lightning_fedleak.model.model_runs import call_with, context_length, hidden_states, undisturbed
from lightning_fedleak.model.model_state import LARGE, preserve_model, saved_once
from tests.games.crafted import autograd_gradient
from tests.helpers import models
from tests.helpers.inputs import padded_text
from tests.helpers.models import own_rng, tiny_gpt2
from tests.taps.test_activation_tap import MODELS as TAPPED
from tests.taps.test_activation_tap import PlainModel

VOCAB, DIM = 24, 8


@dataclass
class Tally:
    calls: int = 0
    seen: list[Tensor] = field(default_factory=list)


class Writes(nn.Module):
    """A module whose forward gives back its input, and leaves traces of one kind."""

    def __init__(self, kind: str, shared: Tensor) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(DIM))
        self.frozen = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.register_buffer("mean", torch.randn(DIM))
        self.register_buffer("shared", shared)
        self.register_buffer("rows", torch.randn(1, DIM).expand(3, DIM), persistent=False)
        self.part = self.mean[2:5]
        self.norm = nn.BatchNorm1d(DIM)
        self.calls = 0
        self.states: list[Tensor] = [torch.zeros(DIM)]
        self.named: dict[str, Any] = {"deep": [{"sum": torch.zeros(DIM)}], "none": None}
        self.ordered = OrderedDict(a=1, b=2)
        self.last: deque[int] = deque([1, 2], maxlen=3)
        self.kinds = {1, 2}
        self.counted = Counter(a=1)
        self.array = np.zeros(4)
        self.space = SimpleNamespace(calls=0, seen=[torch.ones(2)])
        self.tally = Tally()
        self.own = torch.Generator().manual_seed(1)
        self.own_numpy = np.random.default_rng(2)
        self.own_random = random.Random(3)
        self.gone = "soon"

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            getattr(self, f"_{self.kind}")(x.detach())
        return x

    def _average(self, x: Tensor) -> None:
        self.mean.mul_(0.9).add_(x.mean((0, 1)))
        self.shared.add_(1)
        self.part.zero_()

    def _replaced(self, x: Tensor) -> None:
        self.mean = self.mean * 0.9
        self._buffers["shared"] = None
        self.register_buffer("late", torch.ones(2))

    def _data(self, x: Tensor) -> None:
        self.mean.data.add_(1)
        self.shared.data = torch.ones(3)
        self.rows[:1].mul_(2)
        self.rows.resize_(0)

    def _batch_norm(self, x: Tensor) -> None:
        rows = x.reshape(-1, DIM).float()
        F.batch_norm(rows, self.norm.running_mean, self.norm.running_var, training=True)
        self.norm.num_batches_tracked += 1
        self.norm.momentum = 0.7

    def _lists(self, x: Tensor) -> None:
        self.states.append(x.clone())
        self.states[0].add_(1)
        self.named["deep"][0]["sum"] += x.sum()
        self.named["deep"].append(self.calls)
        self.named["new"] = self.states
        self.named.pop("none", None)
        self.named["none"] = 3

    def _containers(self, x: Tensor) -> None:
        self.ordered.move_to_end("a")
        self.ordered["c"] = 3
        self.last.append(self.calls)
        self.kinds.add(9)
        self.counted["a"] += 1
        self.calls += 1
        self.array += 1

    def _objects(self, x: Tensor) -> None:
        self.space.calls += 1
        self.space.seen[0].zero_()
        self.space.new = x
        self.tally.calls += 1
        self.tally.seen.append(x)

    def _chance(self, x: Tensor) -> None:
        torch.rand(3)
        np.random.rand(2)
        random.random()
        torch.rand(1, generator=self.own)
        self.own_numpy.random()
        self.own_random.random()
        F.dropout(x, 0.5, training=True)

    def _parameters_(self, x: Tensor) -> None:
        self.weight.mul_(0.9)
        self.frozen.data.clamp_(-0.1, 0.1)

    def _parameter_data(self, x: Tensor) -> None:
        self.weight.data = self.weight.data * 2
        self.frozen = nn.Parameter(torch.zeros(1))

    def _gradients(self, x: Tensor) -> None:
        if self.weight.grad is None:
            self.weight.grad = torch.ones_like(self.weight)
        else:
            self.weight.grad.add_(1)
        self.frozen.requires_grad_(True)
        self.weight.requires_grad_(False)

    def _attributes(self, x: Tensor) -> None:
        self.train()
        self.norm.train()
        self.new = x
        self.kind_before = self.kind
        if hasattr(self, "gone"):
            del self.gone
        self.norm = nn.Identity()
        self.register_forward_hook(lambda *_: None)

    def _nothing(self, x: Tensor) -> None:
        pass


KINDS = [n[1:] for n in vars(Writes) if n.startswith("_") and not n.startswith("__")]


class TextModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        shared = torch.randn(3)
        self.embedding = nn.Embedding(VOCAB, DIM)
        kinds = [KINDS[seed % len(KINDS)], *choose.sample(KINDS, 2)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), Writes(kind, shared), nn.Dropout(0.3))
            for kind in kinds
        )
        self.head = nn.Linear(DIM, VOCAB, bias=choose.random() < 0.5)
        if choose.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.head.weight.requires_grad_(choose.random() < 0.7)
        for module in self.modules():
            module.training = choose.random() < 0.7
        for parameter in self.parameters():
            if parameter.requires_grad and choose.random() < 0.5:
                parameter.grad = torch.randn_like(parameter)
        self.hooked = [choose.choice(list(self.layers)) for _ in range(choose.randrange(3))]
        for layer in self.hooked:
            layer.steps = 0
            layer.register_buffer("outputs", torch.zeros(DIM))
            layer.register_forward_hook(writes_behind)
            layer.register_forward_pre_hook(writes_before)
            if choose.random() < 0.5:
                layer.register_full_backward_hook(writes_back)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


def writes_behind(module: nn.Module, _: Any, output: Tensor) -> None:
    module.steps += 1
    module.outputs.add_(output.detach().mean((0, 1)))
    module[0].output = output


def writes_before(module: nn.Module, args: tuple[Tensor]) -> None:
    module.before = args[0]
    module[0]._buffers["seen"] = args[0].detach()


def writes_back(module: nn.Module, given: Any, got: Any) -> None:
    module.steps += 10
    module.outputs.data.add_(1)
    with torch.no_grad():
        module[0].weight.add_(1)


def picture(root: nn.Module) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Everything that can be reached from the modules, by identity and by bits.

    With it the objects themselves, so that no identity is given twice.
    """
    found: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    alive: list[Any] = []

    def values(t: Tensor) -> bytes:
        return t.detach().reshape(-1).numpy().tobytes()

    def look(path: str, value: Any) -> None:
        found.append((path, type(value), id(value)))
        alive.append(value)
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            found.append((path, place, value.requires_grad, value._version, values(value)))
            if value.is_leaf:
                look(f"{path}.grad", value.grad)
        elif isinstance(value, nn.Module) or hasattr(value, "__dict__"):
            if isinstance(value, nn.Module | SimpleNamespace | Tally):
                look(f"{path}.__dict__", vars(value))
        elif isinstance(value, dict):
            for key, entry in value.items():
                look(f"{path}[{key!r}]", entry)
        elif isinstance(value, list | tuple | deque | set):
            for i, entry in enumerate(value):
                look(f"{path}[{i}]", entry)
        elif isinstance(value, int | float | str):
            found.append((path, value))
        if isinstance(value, np.ndarray):
            found.append((path, value.tobytes()))
        elif isinstance(value, torch.Generator):
            found.append((path, values(value.get_state())))
        elif isinstance(value, np.random.Generator):
            found.append((path, str(value.bit_generator.state)))
        elif isinstance(value, random.Random):
            found.append((path, value.getstate()))

    look("root", root)
    found.append(("torch", values(torch.get_rng_state())))
    found.append(("numpy", *(str(np.asarray(s).tolist()) for s in np.random.get_state())))
    found.append(("random", random.getstate()))
    return found, alive


def text_model(seed: int) -> Anatomy:
    with own_rng(seed):
        return find_anatomy(
            nn.ModuleDict({"model": TextModel(seed)}),
            kind="causal",
            embedding="model.embedding",
            head="model.head",
            blocks="model.layers",
        )


TEXT = PublicText(
    torch.randint(1, VOCAB, (24, 6), generator=torch.Generator().manual_seed(0)).tolist()
)


def calibrated(anatomy: Anatomy, seed: int) -> None:
    flatchat = FlatChat(public_text=TEXT, shapes=((2, 5), (2, 5)))
    flatchat.prepare(anatomy)
    flatchat.regressor = None
    flatchat.refresh(anatomy, 1)
    aligned = AlignedFlatChat(public_text=TEXT, calibration_tokens=60)
    aligned.prepare(anatomy)
    aligned.refresh(anatomy, 1)


def inverted(anatomy: Anatomy, seed: int) -> None:
    bottom = BottomModel(anatomy, 2)
    with patch.multiple(embedding_descent, TEXTS=2, LENGTH=5):
        embedding_descent.StateReadout.fit(bottom, bottom.word_embeddings())


def told_members(anatomy: Anatomy, seed: int) -> None:
    ids = torch.arange(10).view(2, 5)
    hidden = hidden_states(anatomy, 1, ids)

    attack = FCMembership(layer=1, tau=1.0, dead_zone=0.0)
    attack.prepare(anatomy)
    autograd_gradient(anatomy, attack, hidden[0, 0], ids, None)


@pytest.mark.parametrize("seed", range(len(KINDS)))
@pytest.mark.filterwarnings("ignore")
def test_no_run_leaves_a_trace(seed: int) -> None:
    anatomy = text_model(seed)
    torch.manual_seed(seed)
    for run in (calibrated, inverted, told_members):
        before, held = picture(anatomy.root)
        run(anatomy, seed)
        after, found = picture(anatomy.root)
        changed = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
        assert not changed, changed[0]
        assert len(held) == len(found)


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_a_failed_run_leaves_no_trace(is_one_of_several: bool) -> None:
    anatomy = text_model(KINDS.index("lists"))
    before, held = picture(anatomy.root)

    def fail() -> None:
        with saved_once(is_one_of_several), undisturbed(anatomy) as model:
            model(input_ids=torch.arange(4)[None])
            raise KeyError("an attack crashed")

    with pytest.raises(KeyError):
        fail()
    assert picture(anatomy.root)[0] == before
    assert held


def test_a_graph_of_before_has_its_backward() -> None:
    anatomy = text_model(KINDS.index("average"))
    writes = anatomy.root["model"].layers[0][1]
    leaf = torch.ones(DIM, requires_grad=True)
    loss = (leaf * writes.mean).sum()
    mean = writes.mean.clone()
    with undisturbed(anatomy) as model, torch.no_grad():
        model(input_ids=torch.arange(4)[None])
        assert not torch.equal(writes.mean, mean)
    loss.backward()
    assert torch.equal(leaf.grad, mean)


def test_what_forward_writes_to_the_process_is_put_back() -> None:
    anatomy = find_anatomy(tiny_gpt2())
    with undisturbed(anatomy):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_autocast_enabled("cpu", True)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_a_write_that_nobody_watched_is_an_error() -> None:
    model = nn.Linear(3, 3)  # all of it torch's own, so that nothing watches
    with (
        pytest.raises(RuntimeError, match=r"Linear\.weight"),
        preserve_model(model),
        torch.no_grad(),
    ):
        model.weight.add_(1)


def test_a_parametrization_that_comes_and_goes_is_no_write() -> None:
    with own_rng(3):
        config = LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
        model = get_peft_model(transformers.Qwen3MoeForCausalLM(tiny_moe()), config)
    experts = model.base_model.model.model.layers[0].mlp.experts.base_layer
    weight, ids = experts.gate_up_proj, torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    copies: list[str] = []

    def copy_values(tensor: Any) -> None:
        copies.append(tensor.name)
        original(tensor)

    original = model_state._Tensor.copy_values
    with patch.object(model_state._Tensor, "copy_values", copy_values):
        with undisturbed(find_anatomy(model)) as run:
            run(input_ids=ids)
        assert not [name for name in copies if "gate_up_proj" in name]
        with undisturbed(find_anatomy(model)) as run, torch.no_grad():
            run(input_ids=ids)
            old = weight.clone()
            weight.add_(1)  # which is one, and is put back
    assert experts.gate_up_proj is weight
    assert torch.equal(weight, old)
    loss.backward()


def tiny_moe() -> transformers.Qwen3MoeConfig:
    sizes = {"hidden_size": DIM, "intermediate_size": DIM, "moe_intermediate_size": DIM}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    return transformers.Qwen3MoeConfig(vocab_size=VOCAB, **sizes, **heads, **experts)


def test_large_tensors_are_copied_only_when_written() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(LARGE // 4 + 1))

    model = Keeps()
    with preserve_model(model):
        model.large[3] = 1.0
    assert not model.large.any()


def test_under_inference_mode_and_nested() -> None:
    anatomy = text_model(KINDS.index("average"))
    before, held = picture(anatomy.root)
    with torch.inference_mode(), undisturbed(anatomy), undisturbed(anatomy) as model:
        model(input_ids=torch.arange(4)[None])
    assert picture(anatomy.root)[0] == before
    assert held


@pytest.mark.parametrize("kind", ["average", "lists"])
def test_several_runs_save_once_and_restore_each(kind, monkeypatch) -> None:
    anatomy = text_model(KINDS.index(kind))
    before, held = picture(anatomy.root)
    saved: list[object] = []
    save = model_state._State.__init__
    monkeypatch.setattr(
        model_state._State, "__init__", lambda *given: saved.append(given) or save(*given)
    )
    with saved_once():
        for _ in range(3):
            with undisturbed(anatomy) as model:
                model(input_ids=torch.arange(4)[None])
            assert picture(anatomy.root)[0] == before
    assert len(saved) == 1
    assert held


MODELS: dict[str, Callable[[], nn.Module]] = TAPPED | {
    "bert classifier": lambda: models.tiny_bert_classifier(layers=3),
    "bart": lambda: models.tiny_bart(layers=3),
}
FINAL_NORM = {"gpt2": "transformer.ln_f", "llama": "model.norm", "t5": "encoder.final_layer_norm"}


def by_hugging_face(model: nn.Module, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    model = copy.deepcopy(model).eval()
    inputs = {"input_ids": ids, "output_hidden_states": True}
    if mask is not None:
        inputs["attention_mask"] = mask
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if model.config.is_encoder_decoder:
            return tuple(model(**inputs, decoder_input_ids=ids[:, :2]).encoder_hidden_states)
        return tuple(model(**inputs).hidden_states)


@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_as_hugging_face_gives_them(name: str, padding: str) -> None:
    model = MODELS[name]().train()
    ids, mask = padded_text(5, 9, side="left")
    given = None if padding == "none" else mask
    ids = ids.masked_fill(ids == 0, 5) if padding == "none" else ids
    expected = by_hugging_face(model, ids, given)
    anatomy = find_anatomy(model)
    assert len(text_blocks(anatomy)) == 3
    for layer in range(4):
        got = hidden_states(anatomy, layer, ids, given)
        if layer == 3 and name in FINAL_NORM:
            with torch.no_grad():
                got = model.get_submodule(FINAL_NORM[name])(got)
        assert got.shape == (5, 9, models.DIM)
        assert not got.requires_grad
        assert torch.equal(got, expected[layer]), layer


def _noting(forward: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        note()
        return forward(*args, **kwargs)

    return noting


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_no_work_above_the_layer(name: str) -> None:
    model = MODELS[name]()
    anatomy = find_anatomy(model)
    ids, mask = padded_text(5, 9)
    for layer in range(3):
        calls: list[list[int]] = [[] for _ in text_blocks(anatomy)]
        head: list[int] = []
        for (_, block), runs in zip(text_blocks(anatomy), calls, strict=True):
            plain = type(block).forward.__get__(block)
            block.forward = _noting(plain, lambda s=runs: s.append(1))
        plain = type(anatomy.head).forward.__get__(anatomy.head)
        anatomy.head.forward = _noting(plain, lambda s=head: s.append(1))
        hidden_states(anatomy, layer, ids, mask)
        assert [len(c) for c in calls] == [1] * layer + [0] * (3 - layer)
        assert head == []


def test_no_hook_of_others_runs_and_all_run_again_after() -> None:
    model = models.tiny_gpt2(dropout=0.0, layers=3)
    anatomy = find_anatomy(model)
    ids, mask = padded_text(5, 9)
    clean = hidden_states(anatomy, 2, ids, mask)
    fired: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, n=name: fired.append(f"forward {n}"))
        module.register_forward_pre_hook(lambda *_, n=name: fired.append(f"pre {n}"))
        module.register_full_backward_hook(lambda *_, n=name: fired.append(f"backward {n}"))
    changing = model.transformer.h[0].register_forward_hook(
        lambda _, __, out: with_states_out(out, states_out(out) + 1.0)
    )
    everywhere = [
        nn.modules.module.register_module_forward_hook(lambda *_: fired.append("global")),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: fired.append("global pre")),
    ]
    try:
        assert torch.equal(hidden_states(anatomy, 2, ids, mask), clean)
        with pytest.raises(IndexError):  # an error changes nothing of it
            hidden_states(anatomy, 2, ids + models.VOCAB, mask)
        assert fired == []
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    finally:
        for handle in everywhere:
            handle.remove()
    kinds = {f.split(" ")[0] for f in fired}
    assert kinds == {"forward", "pre", "backward", "global"}
    changing.remove()
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), clean)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_pack_their_weights_in_eval_mode_do_not(training: bool) -> None:
    """As those of bitsandbytes in four bits are marked; packed, they have no backward."""
    model = models.tiny_gpt2(layers=2).train(training)
    layer = model.transformer.h[0].mlp
    layer.support_avx512bf16_for_cpu = True
    with undisturbed(find_anatomy(model)), undisturbed(find_anatomy(model)):
        assert not layer.support_avx512bf16_for_cpu
        assert not any(m.training for m in model.modules())
    assert layer.support_avx512bf16_for_cpu
    assert all(m.training == training for m in model.modules())


def test_hooks_that_the_model_needs_still_run() -> None:
    model = models.tiny_bert_mlm(layers=3, dropout=0.0)
    with pytest.warns(FutureWarning):
        weight_norm(model.bert.encoder.layer[0].output.dense)
    layer = model.bert.encoder.layer[0].output.dense
    with torch.no_grad():
        layer.weight_g.mul_(3.0)
    ids, mask = padded_text(5, 9)
    got = hidden_states(find_anatomy(model), 2, ids, mask)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(got, expected.hidden_states[2])
    norm = layer.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(norm, layer.weight_g)


def test_capturing_hooks_that_transformers_installs_meanwhile_stay() -> None:
    model = models.tiny_bert_mlm()
    model.config.output_hidden_states = True
    model.register_forward_hook(lambda *_: None)
    ids, mask = padded_text(5, 9)
    got = hidden_states(find_anatomy(model), 1, ids, mask)
    model.eval()
    out = model(input_ids=ids, attention_mask=mask)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[1], got)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant: bool) -> None:
    model = models.tiny_gpt2(layers=3).train()
    ids, mask = padded_text(5, 9)
    expected = by_hugging_face(model, ids, mask)[2]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert torch.equal(hidden_states(find_anatomy(model), 2, ids, mask), expected)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_run_eagerly_and_are_not_recompiled(whole: bool) -> None:
    model = models.tiny_gpt2(layers=3, dropout=0.0)
    ids, mask = padded_text(5, 9)
    expected = by_hugging_face(model, ids, mask)[2]
    compiled: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    if whole:
        root = nn.Module()
        root.model = torch.compile(model, backend=backend)
        run = root.model
    else:
        for i, block in enumerate(model.transformer.h):
            if i == 1:
                block.compile(backend=backend)
            else:
                model.transformer.h[i] = torch.compile(block, backend=backend)
        root = run = model
    anatomy = find_anatomy(root)
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), expected)
    assert compiled == []
    run(input_ids=ids, attention_mask=mask)
    first = len(compiled)
    assert first > 0
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), expected)
    run(input_ids=ids, attention_mask=mask)
    assert len(compiled) == first


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_under_peft(kind: str) -> None:
    model = models.tiny_gpt2(layers=3)
    config: peft.PeftConfig
    if kind == "lora":
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False
        )
    else:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with models.own_rng(2):
        wrapped = peft.get_peft_model(model, config)
    anatomy = find_anatomy(wrapped)
    ids, mask = padded_text(5, 9)
    got = hidden_states(anatomy, 2, ids, mask)
    wrapped.eval()
    with torch.no_grad():
        out = wrapped(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(got, out.hidden_states[2][:, -ids.shape[1] :])
    plain = by_hugging_face(models.tiny_gpt2(layers=3), ids, mask)[2]
    assert (got - plain).abs().max() > 1e-4
    assert context_length(anatomy) == (models.POSITIONS if kind == "lora" else models.POSITIONS - 4)


def test_autocast_and_a_model_in_bf16() -> None:
    ids, mask = padded_text(5, 9)
    model = models.tiny_gpt2(layers=3).train()
    anatomy = find_anatomy(model)
    full = hidden_states(anatomy, 2, ids, mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = hidden_states(anatomy, 2, ids, mask)
        expected = by_hugging_face(model, ids, mask)[2]
    assert torch.equal(mixed, expected)
    assert 0 < (mixed - full).abs().max() < 0.1
    half = hidden_states(find_anatomy(models.tiny_gpt2(layers=3).bfloat16()), 2, ids, mask)
    assert half.dtype == torch.bfloat16


def test_weights_cast_for_it_are_not_kept_for_the_training_step() -> None:
    model = models.tiny_gpt2(layers=2, dropout=0.0).train()
    ids, mask = padded_text(5, 9)
    cached: list[bool] = []
    model.transformer.wte.forward = _noting(
        model.transformer.wte.forward, lambda: cached.append(torch.is_autocast_cache_enabled())
    )
    with torch.autocast("cpu", torch.bfloat16):
        hidden_states(find_anatomy(model), 2, ids, mask)
        assert cached == [False]
        assert torch.is_autocast_cache_enabled()
        model(input_ids=ids, attention_mask=mask).logits.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_positions_can_be_those_of_generate() -> None:
    model = models.tiny_gpt2(layers=3)
    anatomy = find_anatomy(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, models.VOCAB, (1, 6), generator=generator)
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    alone = hidden_states(anatomy, 2, ids)
    shifted = hidden_states(anatomy, 2, padded, mask)[:, 3:]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    aligned = hidden_states(anatomy, 2, padded, mask, position_ids=positions)[:, 3:]
    assert (shifted - alone).abs().max() > 1e-3
    torch.testing.assert_close(aligned, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_a_tuple", [True, False])
def test_a_plain_module_with_a_list_of_blocks(in_a_tuple: bool) -> None:
    with models.own_rng(0):
        model = PlainModel(in_a_tuple)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        zero = model.embed(ids)
        one = states_out(model.blocks[0](zero))
        two = states_out(model.blocks[1](one))
    for layer, expected in enumerate((zero, one, two)):
        assert torch.equal(hidden_states(find_anatomy(model), layer, ids), expected)


class Twice(nn.Module):
    """An embedding that stands at two places and is tied to the head, as T5's and BART's may be."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(7, 4)
        self.encoder = nn.ModuleDict({"embed": self.shared})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder["embed"](ids)).square().sum()


def test_every_call_with_other_tensors_replaces_what_is_tied_and_leaves_the_model() -> None:
    model, ids = Twice(), torch.tensor([1, 2])
    own = model.shared.weight
    [wanted] = torch.autograd.grad(model(ids), own)
    other = own.detach().clone().requires_grad_()
    for _ in range(3):
        [found] = torch.autograd.grad(call_with(model, {"shared.weight": other}, ids=ids), other)
        assert torch.equal(found, wanted)
        assert model.shared.weight is model.head.weight is own

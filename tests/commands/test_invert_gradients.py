"""``fedleak invert --from gradients``: what is shared, what is read off it, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_fedleak.attacks.base import Surfaces
from lightning_fedleak.attacks.texts.base import NOTHING, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.invert import explain_cells
from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.studies.invert import (
    GradientCell,
    Noise,
    batches_of,
    make_reader,
    run_gradient_cells,
    step_of_adamw,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.threats import Capability, ThreatModel
from tests.attacks.row_space.models import backward, llama, with_lora
from tests.helpers.commands import run_command
from tests.helpers.folders import TEXTS, tiny_tokenizer
from tests.helpers.models import own_rng


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two blocks of 64."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    with own_rng(0):
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def printed(model: str, text: str, out: Path, status: int = 0, **settings: Any) -> str:
    settings = {"lengths": [8], "batch_sizes": [1], "texts": 3, "out": out} | settings
    settings |= {"from_": "gradients", "model": model, "text": text}
    ended, output = run_command("invert", width=100, **settings)
    assert ended == status
    return " ".join(output.split())


def cells_in(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "inversion.json").read_text())
    assert content["from"] == "gradients"
    return content["cells"]


# ---- the command --------------------------------------------------------------------------------


def test_gradients_of_a_whole_model_reveal_texts_and_noise_hides_them(
    model: str, text: str, tmp_path: Path
) -> None:
    settings = {"noise": [3.0, 0.0], "lengths": [8, 6], "budget_seconds": 2.0}
    output = printed(model, text, tmp_path, **settings)
    cells = cells_in(tmp_path)
    shapes = [(c["attack"], c["batch"], c["length"], c["sigma"], c["batches"]) for c in cells]
    assert shapes == [("subspace", 1, n, s, 3) for n in (6, 8) for s in (0.0, 3.0)]
    for cell in cells[::2]:
        assert cell["texts"] == 3
        assert cell["problem"] is None
        assert cell["rates"]["token_accuracy"]["value"] == 1
        assert cell["rates"]["exact_sentences"]["value"] == 1
        assert cell["certified"] is not None
        assert cell["budget_seconds"] == 2.0
    for cell in cells[1::2]:
        assert not cell["rates"] or cell["rates"]["token_accuracy"]["value"] < 0.5
        assert not cell["certified"]
    assert "3/3" in output
    assert "noise of 0, 3 times the root mean square of all gradients" in output
    assert all(word not in (tmp_path / "inversion.json").read_text() for word in ("Piet", "Harrow"))


def test_a_lora_is_read_one_step_behind_its_start(model: str, text: str, tmp_path: Path) -> None:
    output = printed(model, text, tmp_path, lora_r=8, targets="q_proj,v_proj", texts=2)
    assert "a LoRA of rank 8" in output
    assert "one step of AdamW behind its start" in output
    [cell] = cells_in(tmp_path)
    assert cell["unknown"] == 0, cell["problem"]
    assert cell["rates"]["token_accuracy"]["value"] > 0.5


def test_what_is_not_trained_is_unknown_and_no_success(
    model: str, text: str, tmp_path: Path
) -> None:
    output = printed(model, text, tmp_path, status=1, lora_r=2, targets="down_proj")
    [cell] = cells_in(tmp_path)
    assert cell["unknown"] == cell["batches"] == 3
    assert cell["rates"] == {}
    assert "Unknown: subspace, batches of 1 x 8, noise 0: 3 of 3 batches" in output
    assert "not 'safe'" in output


REFUSED: list[tuple[Sequence[str], str]] = [
    (["--from", "gradients", "--layer", "1"], "--layer is for --from activations"),
    (["--batch-sizes", "1", "2"], "--batch-sizes is for --from gradients"),
    (["--from", "gradients", "--attack", "prefix"], "--attack prefix reads activations"),
    (["--attack", "subspace"], "--attack subspace reads gradients"),
    (["--from", "gradients", "--lengths", "50", "--batch-sizes", "40"], "40 are asked for"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_by_name(
    model: str, text: str, tmp_path: Path, arguments: Sequence[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = ["invert", "--model", model, "--text", text, "--out", str(tmp_path / "out")]
    assert main([*words, *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "inversion.json").exists()


def test_an_encoder_shares_no_such_gradient(text: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with own_rng(0):
        BertForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="give a causal language model"):
        printed(str(tmp_path), text, tmp_path)


# ---- the cells ----------------------------------------------------------------------------------


class Known(TextAttack):
    """Returns given guesses, and keeps what it observed."""

    threat_model = ThreatModel.create("a test", Capability.KNOWS_MODEL)
    default_name = "known"
    last_token_open = True
    reads = ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight")

    def __init__(self, guesses: Sequence[Tensor | Exception], **more: Any) -> None:
        super().__init__()
        self.guesses = list(guesses)
        self.observed: list[Any] = []
        self.more = more

    def needs(self, anatomy: Any) -> Surfaces:
        return Surfaces(gradients=self.reads)

    def run(self, view: Any, query: Any = None) -> TextGuess:
        self.observed.append(view.gradients[-1])
        guess = self.guesses[len(self.observed) - 1]
        if isinstance(guess, Exception):
            raise guess
        return TextGuess(guess, **self.more)


def ids(rows: int = 4, length: int = 6) -> Tensor:
    return torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(1))


def cells(made: Any, attack: TextAttack, tokens: Tensor, **more: Any) -> list[GradientCell]:
    settings: dict[str, Any] = {"texts": 4, "sizes": [2]} | more
    relative = settings.pop("relative", True)
    settings["noises"] = [Noise(sigma, relative) for sigma in settings.pop("sigmas", [0.0])]
    make: Callable[[int, int], TextAttack] = lambda texts, length: attack  # noqa: E731
    rows = {tokens.shape[1]: tokens}
    return list(run_gradient_cells(find_anatomy(made), rows, [("known", make)], **settings))


@pytest.mark.parametrize("relative", [True, False])
def test_what_is_shared_is_the_gradient_with_noise_in_its_unit(relative: bool) -> None:
    with own_rng(0):
        made = llama().eval()
    tokens = ids(2)
    attack = Known([tokens] * 2)
    cells(made, attack, tokens, sigmas=[0.0, 0.5], relative=relative, texts=2)
    clean, noised = attack.observed
    backward(made, tokens)
    expected = {name: dict(made.named_parameters())[name].grad for name in Known.reads}
    entries = torch.cat([p.grad.flatten() for p in made.parameters()])
    unit = float(entries.square().mean().sqrt()) if relative else 1.0
    assert clean.noise_std == 0
    assert noised.noise_std == pytest.approx(0.5 * unit, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(clean.tensors[name], gradient, rtol=1e-4, atol=1e-7)
    added = torch.cat([(noised.tensors[n] - clean.tensors[n]).flatten() for n in expected])
    assert float(added.std()) == pytest.approx(0.5 * unit, rel=0.03)


def test_texts_in_any_order_are_matched_and_the_last_token_is_open() -> None:
    with own_rng(0):
        made = llama().eval()
    tokens = ids()
    first, second = tokens[[1, 0], :-1], tokens[2:].clone()
    first[0, 2] = NOTHING
    [cell] = cells(made, Known([first, second], certified=False), tokens)
    assert (cell.batches, cell.unknown, cell.texts, cell.certified) == (2, 0, 4, 0)
    assert cell.rates["token_accuracy"].value == pytest.approx(19 / 20)
    assert cell.rates["exact_sentences"].value == 3 / 4


def test_a_batch_without_an_answer_counts_in_no_number() -> None:
    with own_rng(0):
        made = llama().eval()
    tokens = ids()
    guesses = [tokens[:2], UnusableObservation("no word stands out")]
    [cell] = cells(made, Known(guesses, certified=True), tokens)
    assert (cell.batches, cell.unknown, cell.texts, cell.certified) == (2, 1, 2, 1)
    assert cell.rates["token_accuracy"].value == 1
    answer = explain_cells([cell])
    assert "1 of 2 batches, which count in no number" in answer
    assert "UnusableObservation: no word stands out" in answer
    cut = explain_cells([replace(cell, finished=False, budget_seconds=0.5)])
    assert "*: cut off by the budget of 0.5 s" in cut


def test_a_budget_that_is_over_at_once_is_unknown() -> None:
    with own_rng(0):
        made = llama().eval()
    tokens = ids(2)
    nothing = torch.full((1, 3), NOTHING)
    attack = Known([nothing], finished=False)
    [cell] = cells(made, attack, tokens, texts=2)
    assert (cell.unknown, cell.rates) == (1, {})
    assert "no time" in str(cell.problem)
    [cell] = cells(made, Known([tokens[:1]], finished=False), tokens, texts=2)
    assert cell.rates["token_accuracy"].value == 0.5, "what is not found in time is missed"
    assert not cell.finished


def test_a_tied_matrix_is_noised_once() -> None:
    with own_rng(0):
        made = llama(tie_word_embeddings=True).eval()
    tokens = ids(2)
    attack = Known([tokens] * 2)
    attack.reads = ("head.weight", "embedding.weight")
    cells(made, attack, tokens, sigmas=[0.0, 0.5], texts=2)
    clean, noised = attack.observed
    assert torch.equal(noised.tensors["head.weight"], noised.tensors["embedding.weight"])
    added = noised.tensors["head.weight"] - clean.tensors["head.weight"]
    assert float(added.std()) == pytest.approx(noised.noise_std, rel=0.03)


def test_a_step_of_adamw_is_torchs() -> None:
    with own_rng(0):
        made = with_lora(llama(), 4, ["q_proj"])
    other = copy.deepcopy(made)
    tokens = ids()
    step_of_adamw(find_anatomy(made), tokens)
    backward(other, tokens)
    trained = [p for p in other.parameters() if p.requires_grad]
    torch.optim.AdamW(trained, lr=2e-4).step()
    result = [p for p in made.parameters() if p.requires_grad]
    assert all(p.grad is None for p in result)
    for local, peer in zip(result, trained, strict=True):
        torch.testing.assert_close(local, peer, rtol=1e-5, atol=2e-6)


def test_whole_batches_and_names() -> None:
    assert [batches_of(4, size) for size in (1, 2, 3, 8)] == [4, 2, 1, 1]
    made = make_reader("subspace", 2, 8, budget_seconds=3.0)
    assert isinstance(made, SubspaceTexts)
    assert (made.name, made.budget_seconds) == ("subspace", 3.0)

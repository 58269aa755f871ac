import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fedleak.attacks import row_space
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import plan
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.trainers import Watch
from tests.helpers.commands import printed_by

printed = partial(printed_by, "plan")


@pytest.fixture(autouse=True)
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SETS", 1)


def test_counts_rows_and_planted_tokens(model: str) -> None:
    output = printed(model=model, lora_r=2, targets="c_attn", batch=(2, 8))
    assert "An update shares 2 rows of 16 numbers" in output
    assert "by rule; planted at random" in output


def test_a_capacity_of_no_planted_set_is_unknown(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_space, "measure_capacity", lambda *_, **__: (0, 4, 20.0))
    output = printed(model=model, lora_r=2, targets="c_attn", batch=(2, 8))
    assert "planted at random, how many is unknown, 4 were not." in " ".join(output.split())


def test_a_whole_model(model: str) -> None:
    assert "An update shares 48 rows of 16 numbers" in printed(model=model, lora_r=0, batch=(2, 6))


def test_without_a_trained_first_block_the_costs_of_attacks_are_still_shown(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(plan, "show_attacks", measured.append)
    output = printed(model=model, targets="mlp.c_fc", batch=(2, 6))
    assert "What SubspaceWords can recover is unknown: no trained linear map" in output
    assert len(measured) == 1


QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 5120,
    "intermediate_size": 25_600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


def test_a_configuration_alone_gives_time_and_memory(tmp_path: Path) -> None:
    shape, billions = QWEN3_32B, 32.762
    (tmp_path / "config.json").write_text(json.dumps(shape))
    output = printed(model=str(tmp_path), batch=(4, 512))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    gigabytes = {line[0]: float(line[1].split(" GB")[0]) for line in lines if line}
    trained, look = gigabytes["weights, gradients, AdamW"], gigabytes["a look adds"]
    assert trained == pytest.approx(2 * billions, rel=0.01)
    sharded = gigabytes["the same, FSDP2 or ZeRO-3 over 8"]
    assert sharded == pytest.approx(trained / 8, rel=0.01)
    embedding = 2 * shape["vocab_size"] * shape["hidden_size"] / 1e9
    assert embedding < look < 1.3 * embedding  # no weights but those read
    calibration, control = gigabytes["calibration adds"], gigabytes["its control adds at least"]
    assert max(calibration, look, control) < 2.2 * embedding
    assert "Attacks are priced up to 250,000,000" in output


TINY = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def save_config(
    folder: Path, architecture: str = "LlamaForCausalLM", model_type: str = "llama"
) -> str:
    shape = TINY | {"architectures": [architecture], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def priced(output: str) -> dict[str, list[float]]:
    """Return the cells of the table of prices by their row."""
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in output.splitlines()]
    numbers = {row[0]: [c for c in row[1:] if c] for row in rows if len(row) == 4}
    return {k: [float(c) for c in cells] for k, cells in numbers.items() if "GB" not in cells[0]}


@pytest.mark.parametrize("rank", [8, 0])
def test_every_attack_that_a_run_chooses_is_priced(rank: int, tmp_path: Path) -> None:
    prices = priced(printed(model=save_config(tmp_path), batch=(2, 8), lora_r=rank))
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    settings = WatchSettings(tensorboard=False, report=False)
    with Watch(model, optimizer, folder=tmp_path / "run", settings=settings) as watch:
        assert watch.engine.fit is not None
        played = [each.attack.name for each in watch.engine.fit.lineup.exposed]
    assert list(prices) == [*played, "two gradients", "all"]
    looks = [prices[name][1] for name in played]
    assert min(looks) > 0
    assert prices["all"][1] == pytest.approx(sum(looks), rel=0.1)
    control = prices["two gradients"][0] + prices["all"][1]
    assert prices["all"][2] == pytest.approx(control, rel=0.1)


def test_prices_are_extended_by_the_block_and_by_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "PROBE_TOKENS", 400)
    monkeypatch.setattr(plan, "PROBE_BLOCKS", 2)
    sizes: list[tuple[int, int]] = []

    def price(blocks: float, tokens: float) -> float:
        return 3 + 5 * blocks + tokens / 100

    def measure(probe: Anatomy, batch: tuple[int, int]) -> dict[tuple[str, str], float]:
        sizes.append((len(probe.blocks), probe.vocab_size))
        named = {("words", "set-up"): 4.0, ("words", "look"): price(*sizes[-1])}
        return named | {("", "control"): 2 * price(*sizes[-1])}

    monkeypatch.setattr(plan, "measure_prices", measure)
    monkeypatch.setitem(TINY, "num_hidden_layers", 7)
    prices = priced(printed(model=save_config(tmp_path), batch=(2, 8)))
    assert sizes == [(2, 400), (1, 400), (2, 100)]
    look = price(7, 1000)
    assert prices["words"] == [4.0, look]
    assert prices["all"] == pytest.approx([4.0, look, 3 * look], rel=0.05)


LLAMA = ("LlamaForCausalLM", "llama")


@pytest.mark.parametrize(
    ("shape", "arguments", "match"),
    [
        # Of a model's weights, and of a configuration alone.
        (None, "--targets nothing", "--targets nothing: Target modules"),
        (None, "--targets c_attn --lora-r 0", "also give its rank, such as --lora-r 8"),
        (None, "--batch 2x65", "--batch 2 x 65 is longer than the model's context of 64"),
        (LLAMA, "--targets foo", "fedleak: --targets foo: Target modules"),
        (LLAMA, "--batch 1x9999", "--batch 1 x 9999 is longer than the model's context of 2048"),
        (("Qwen3MoeForCausalLM", "qwen3_moe"), "", "no default for this model: pass --targets"),
        (("BertForMaskedLM", "bert"), "", "name no causal language model"),
    ],
)
def test_errors_name_what_to_change(
    shape: tuple[str, str] | None,
    arguments: str,
    match: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = model if shape is None else save_config(tmp_path, *shape)
    assert main(["plan", "--model", name, *arguments.split()]) == 1
    error = capsys.readouterr().err
    assert match in error
    assert "network" not in error


def test_a_batch_is_texts_by_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", model, "--batch", "4"])
    assert "'4' is not texts x tokens, such as 4x512" in capsys.readouterr().err

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.inspect import CONFIG, EVIDENCE, WEIGHTS
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer, read_texts
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from tests.helpers.commands import run_command

BASE = str(EMBEDDED_MODEL)
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA at its start, one with a small B, and one that takes a neuron of the base away."""
    folder = tmp_path_factory.mktemp("inspect")
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    row = base.model.layers[0].mlp.up_proj.weight[7].detach().clone()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["up_proj"])
    model = get_peft_model(base, config)
    for name in ("start", "honest", "crafted"):
        model.save_pretrained(folder / name)
    state = load_file(folder / "start" / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if "lora_B" in name:
            state[name] = 1e-3 * torch.randn(tensor.shape, generator=generator)
    save_file(state, folder / "honest" / WEIGHTS)
    state[UP.format("A")][0] = -row / 2
    state[UP.format("B")][7] = torch.tensor([1.0, 0, 0, 0])
    save_file(state, folder / "crafted" / WEIGHTS)
    return folder


def inspect(folder: Path, received: str, **options: Any) -> tuple[int, str]:
    return run_command("inspect", width=400, received=folder / received, **options)


def rules(printed: str, word: str) -> set[str]:
    """Return the rules whose line holds a word."""
    lines = (line.split("│") for line in printed.splitlines() if word in line and "│" in line)
    return {cells[1].strip() for cells in lines}


def test_honest_lora(folder):
    status, printed = inspect(folder, "honest", base=BASE)
    assert status == 0
    assert "Nothing found. That is no proof of honesty." in printed
    assert rules(printed, "not applicable") == {
        *("extra", "start", "equal_rows", "blind_rows", "jump")
    }


def test_crafted_lora_is_named_with_status_3(folder):
    status, printed = inspect(folder, "crafted", base=BASE)
    assert status == EVIDENCE
    assert f"{UP.format('A')}[7]" in printed
    assert "CRAFTED: found by few_rows, cancelled." in printed


def test_without_the_base_its_rules_do_not_apply(folder):
    status, printed = inspect(folder, "crafted")
    assert status == 0
    assert {"replaced", "few_rows", "cancelled"} <= rules(printed, "not applicable")


def test_start_of_the_first_round(folder):
    assert inspect(folder, "start", first=True)[0] == 0
    status, printed = inspect(folder, "honest", first=True, start=folder / "start")
    assert status == EVIDENCE
    assert "CRAFTED: found by start." in printed


def test_jump_from_the_second_round_on(folder):
    before = folder / "honest"
    returned = {n: t + 1e-3 for n, t in load_file(before / WEIGHTS).items()}
    save_file(returned, folder / "own.safetensors")
    last = {"previous": before, "own_update": folder / "own.safetensors"}
    status, printed = inspect(folder, "crafted", **last)
    assert status == EVIDENCE
    assert f"{UP.format('A')}[0]" in printed
    assert "CRAFTED: found by jump." in printed
    assert inspect(folder, "own.safetensors", **last)[0] == 0


def test_bottleneck_is_run_on_text(folder):
    """One row is orthogonal to the embeddings of the most usual words."""
    generator = torch.Generator().manual_seed(0)
    state = {"embed.down.weight": torch.randn(16, 256, generator=generator)}
    state |= {"embed.down.bias": torch.zeros(16)}
    state["embed.up.weight"] = torch.randn(256, 16, generator=generator)
    texts = read_texts(EMBEDDED_MESSAGES)[:60]
    (folder / "texts.txt").write_text("\n".join(texts))
    text = {"base": BASE, "text": str(folder / "texts.txt")}
    save_file(state, folder / "bottleneck.safetensors")
    assert inspect(folder, "bottleneck.safetensors", **text)[0] == 0
    ids = torch.cat([torch.tensor(row) for row in load_tokenizer(None)(texts)["input_ids"]])
    table = load_file(EMBEDDED_MODEL / "model.safetensors")["model.embed_tokens.weight"].float()
    usual = table[ids.bincount().topk(100).indices]
    row = state["embed.down.weight"][3]
    row -= torch.linalg.pinv(usual) @ (usual @ row)
    save_file(state, folder / "blind.safetensors")
    status, printed = inspect(folder, "blind.safetensors", **text)
    assert "CRAFTED: found by blind_rows." in printed
    assert "embed.down.weight[3]" in printed
    assert status == EVIDENCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous": "start"}, "--previous and --own-update go together"),
        ({"text": "x.txt"}, "--text is read by the base"),
    ],
)
def test_contradictory_options(folder, options, message):
    paths = {n: folder / v if n == "previous" else v for n, v in options.items()}
    with pytest.raises(SourceError, match=message):
        inspect(folder, "start", **paths)


def test_errors_of_files(folder, capsys):
    (folder / "pickled.bin").write_bytes(b"no tensors")
    assert main(["inspect", str(folder / "pickled.bin")]) == 1
    assert "cannot be read as safetensors" in capsys.readouterr().err
    config = (folder / "start" / "adapter_config.json").read_text()
    pissa = folder / "pissa"
    pissa.mkdir()
    save_file(load_file(folder / "start" / WEIGHTS), pissa / WEIGHTS)
    changed = config.replace('"init_lora_weights": true', '"init_lora_weights": "pissa"')
    assert changed != config
    (pissa / "adapter_config.json").write_text(changed)
    _, printed = inspect(folder, "pissa", base=BASE)
    assert rules(printed, "give --start") == {"replaced", "few_rows", "cancelled"}
    assert main(["inspect", str(pissa), "--first"]) == 1
    assert "give --start" in capsys.readouterr().err


def test_what_a_rule_is_not_asked_of_is_printed(folder):
    state = load_file(folder / "honest" / WEIGHTS)
    elsewhere = {n.replace("layers.0", "layers.77"): t.clone() for n, t in state.items()}
    save_file(state | elsewhere, folder / "honest" / "more.safetensors")
    status, printed = inspect(folder, "honest/more.safetensors", base=BASE)
    assert status == 0
    three = {"replaced", "few_rows", "cancelled"}
    name = UP.format("A").replace("layers.0", "layers.77")
    assert rules(printed, f"not asked of 1 tensors ({name})") == three


def changed_config(folder: Path, content: str | dict[str, Any]) -> Path:
    """Return a folder with the honest LoRA and a config of its own."""
    path = folder / "changed"
    path.mkdir(exist_ok=True)
    save_file(load_file(folder / "honest" / WEIGHTS), path / WEIGHTS)
    if isinstance(content, dict):
        config = json.loads((folder / "honest" / CONFIG).read_text())
        content = json.dumps(config | content)
    (path / CONFIG).write_text(content)
    return path


def test_the_scale_of_dora_is_not_known(folder):
    three = {"replaced", "few_rows", "cancelled"}
    changed_config(folder, {"use_dora": False})
    assert not rules(inspect(folder, "changed", base=BASE)[1], "not applicable") & three
    changed_config(folder, {"use_dora": True})
    assert three <= rules(inspect(folder, "changed", base=BASE)[1], "not applicable")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no config of PEFT"),
        ("[1, 2]", "is no config of PEFT"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', no number"),
    ],
)
def test_a_broken_config_is_an_error(folder, capsys, content, message):
    path = changed_config(folder, content)
    assert main(["inspect", str(path), "--base", BASE]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_scale_that_the_server_sent_is_announced(folder):
    words = "The scale of LoRAs is from a config that the server sent."
    assert words in inspect(folder, "honest", base=BASE)[1]
    assert words not in inspect(folder, "honest", base=BASE, start=folder / "start")[1]
    assert words not in inspect(folder, "honest")[1]  # no scale is used without the base

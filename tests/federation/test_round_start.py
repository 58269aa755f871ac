"""What a client is sent is inspected before it trains, and a round may be refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak import PublicText
from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.federation import (
    CraftedValuesError,
    OutgoingUpdates,
    RoundObserver,
    RoundSettings,
    StartCheck,
    trained_state,
)
from lightning_fedleak.federation.round_start import RoundStart, agree, usual_inputs
from lightning_fedleak.labs.crafted_rows import craft
from lightning_fedleak.model.anatomy import find_anatomy
from tests.federation.rounds import ADAMW
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts
from tests.helpers.models import tiny_llama
from tests.helpers.notices import announced

TYPES = 300
DOWN = f"{EMBEDDING_ADAPTER}.down.weight"


def fresh_model() -> nn.Module:
    model = adapted_llama(TYPES, width=64, rank=32)
    model.model.embed_tokens.weight.requires_grad_(True)  # which an attack reads
    return model.train()


@pytest.fixture(scope="module")
def public() -> PublicText:
    return PublicText(zipf_texts(200, 16, TYPES))


@pytest.fixture(scope="module")
def states(public) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an honest and a dishonest server send."""
    model = fresh_model()
    honest = trained_state(model)
    return honest, {
        **honest,
        **craft(find_anatomy(model), EMBEDDING_ADAPTER, public, 256).tensors,
    }


def observer(
    folder: Path, public: PublicText, check: bool | StartCheck, optimizer: Any = ADAMW, **more: Any
) -> Any:
    if check:
        check = replace(StartCheck() if check is True else check, public_text=public)
    settings = RoundSettings(tensorboard=False, inspect=check)
    return RoundObserver(
        fresh_model(),
        optimizer,
        1,
        attacks=[BagOfWords()],
        folder=folder,
        settings=settings,
        **more,
    )


def changed(state: dict[str, Tensor], size: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=generator) for n, t in state.items()}


def test_warns_of_crafted_values_and_of_no_honest_ones(tmp_path, public, states, capsys):
    honest, crafted = states
    observer(tmp_path / "a", public, True).begin(0, honest)
    assert "StartCheck" not in capsys.readouterr().err
    with announced("StartCheck warns in round 0: what the server sent looks crafted"):
        observer(tmp_path / "b", public, True).begin(0, crafted)


def test_what_a_rule_is_not_asked_of_is_announced_once(states, capsys):
    start = RoundStart(StartCheck(), find_anatomy(fresh_model()), None)
    words = f"blind_rows is not asked of 1 tensors (no text was given to run): {DOWN}"
    for round_ in (1, 2):
        start.judge(round_, states[0])
    assert " ".join(capsys.readouterr().err.split()).count(words) == 1


def test_refuses_a_round_and_says_by_which_rules(tmp_path, public, states):
    with pytest.raises(CraftedValuesError, match="refuses in round 3") as refused:
        observer(tmp_path, public, StartCheck("refuse")).begin(3, states[1])
    assert {a.rule for a in refused.value.inspection.found} == {"blind_rows"}


def test_each_client_of_one_process_is_refused(tmp_path, public, states):
    honest, crafted = states
    watching = observer(tmp_path, public, StartCheck("refuse"))
    clients = [OutgoingUpdates(watching, client=name) for name in ("a", "b")]
    for client in clients:
        with announced("refuses in round 3"):
            leaving = client.leaves(3, crafted, changed(crafted, 1e-4, 1), [])
        assert leaving.withheld
        assert leaving.state is None
        assert leaving.look is None
    returned = changed(honest, 1e-4, 1)
    for client in clients:  # a refusal is of its round
        leaving = client.leaves(4, honest, returned, [])
        assert not leaving.withheld
        assert all(torch.equal(leaving.state[n], t) for n, t in returned.items())


def test_usual_inputs_span_what_the_adapter_reads(public, states):
    model = fresh_model().eval()
    span = usual_inputs(find_anatomy(model), states[0], public)[DOWN]
    ids = torch.cat(public.batch(64, 64, torch.Generator().manual_seed(0)).input_ids.unbind())
    table = model.model.embed_tokens.weight.detach().double()
    usual = ids.bincount().topk(4).indices
    assert torch.allclose(
        nn.functional.normalize(span[:1]), nn.functional.normalize(table[usual[:1]]), atol=1e-4
    )


@pytest.mark.parametrize("start", [True, "pissa", "olora"])
def test_base_and_scale_of_a_lora_are_those_of_peft(start):
    base = tiny_llama()
    before = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["up_proj"], init_lora_weights=start)
    model = get_peft_model(base, config)
    agreed = agree(model)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.allclose(agreed.base[name], before, atol=1e-5)
    assert agreed.scales[name] == 6 / 4
    assert agreed.start is not None
    assert agreed.start.keys() == trained_state(model).keys()

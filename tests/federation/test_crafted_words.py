"""A dishonest server of a federation is played on copies, where it is listed and nowhere else."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from lightning_fedleak.attacks import CraftedAdapterWords, PublicText
from lightning_fedleak.attacks.words.crafted import RoundShape
from lightning_fedleak.attacks.words.crafted_rows import RowSettings
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings
from lightning_fedleak.federation import ClientDP, RoundObserver, RoundSettings, trained_state
from lightning_fedleak.threats import DISHONEST_SERVER, HONEST_BUT_CURIOUS, ThreatModelError
from tests.callbacks.runs import fit
from tests.federation.rounds import train
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts
from tests.helpers.lightning_modules import CausalLMModule

TYPES, STEPS = 120, 2
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def client_model():
    model = adapted_llama(TYPES).train()
    model.get_submodule(EMBEDDING_ADAPTER).requires_grad_(True)
    return model


def server() -> CraftedAdapterWords:
    public = PublicText(zipf_texts(120, 12, TYPES, seed=50))
    rows = RowSettings(frequent=6)
    return CraftedAdapterWords(
        EMBEDDING_ADAPTER, public, shape=RoundShape(4, 12), rounds=1, rows=rows
    )


def data(seed: int) -> list[dict[str, torch.Tensor]]:
    ids = zipf_texts(4 * STEPS, 12, TYPES, seed).split(4)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


def observer(folder, **more):
    settings = RoundSettings(tensorboard=False, cache=False, **more.pop("settings", {}))
    return RoundObserver(
        client_model(), ADAMW, STEPS, attacks=[server()], folder=folder, settings=settings, **more
    )


def test_a_round_is_played_beside_the_users_own_and_scored(tmp_path) -> None:
    model = client_model()
    watch = observer(tmp_path)
    values = []
    for round_ in range(2):
        sent = trained_state(model)
        watch.begin(round_, sent)
        returned = train(model, data(round_), ADAMW)
        look = watch.look(returned, batches=data(round_))
        values.append(look.values["leakage/crafted_adapter_words/f1"])
        own = dict(watch.model.named_parameters())
        assert all(torch.equal(own[name], tensor) for name, tensor in sent.items())
        assert not look.unknown
        model.load_state_dict(returned, strict=False)
    watch.end()
    attack = watch.engine.selection.attacks[0]
    assert all(not torch.equal(trained_state(model)[n], t) for n, t in attack.values.items())
    assert values[0] != values[1]
    assert min(values) > 0.4
    (line, *_) = map(json.loads, (tmp_path / "leakage.jsonl").read_text().splitlines())
    assert line["attack"] == "crafted_adapter_words"


def test_without_the_clients_batches_it_is_unknown(tmp_path) -> None:
    watch, model = observer(tmp_path, side="server"), client_model()
    watch.begin(0, trained_state(model))
    look = watch.look(train(model, data(0), ADAMW))
    assert "leakage/crafted_adapter_words" in look.unknown
    watch.end()


def test_under_a_defence_it_is_unknown(tmp_path) -> None:
    defense = ClientDP(1.0, noise_multiplier=0.5, clients=10, target_delta=1e-5)
    watch, model = observer(tmp_path, defenses=[defense]), client_model()
    watch.begin(0, trained_state(model))
    look = watch.look(train(model, data(0), ADAMW), batches=data(0))
    assert "without the run's defences" in look.unknown["leakage/crafted_adapter_words"]
    watch.end()


def test_an_honest_server_sends_no_values(tmp_path) -> None:
    watch = observer(tmp_path, settings={"assume": HONEST_BUT_CURIOUS})
    with pytest.raises(ThreatModelError, match="chooses the weights"):
        watch.begin(0, trained_state(client_model()))


def test_beside_the_users_own_step_it_is_refused(tmp_path) -> None:
    monitor = LeakageMonitor(
        server(), local_steps=STEPS, every_n_steps=STEPS, log_dir=tmp_path,
        settings=MonitorSettings(cache=False, assume=DISHONEST_SERVER),
    )  # fmt: skip
    with pytest.raises(ThreatModelError, match="RoundObserver"):
        fit([monitor], tmp_path, module=CausalLMModule(client_model()))

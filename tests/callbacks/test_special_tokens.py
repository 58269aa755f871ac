"""No live game asks for a token that stands in every text."""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.engine.channels.targets import Deal, Rows, special_ids
from lightning_fedleak.engine.run import NoTargets
from lightning_fedleak.model.batches import TokenBatch
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2

CLS, SEP = 96, 95


def rows(*texts, left=False):
    length = max(map(len, texts))
    pads = [[0] * (length - len(t)) for t in texts]
    ids = [[*p, *t] if left else [*t, *p] for t, p in zip(texts, pads, strict=True)]
    real = [[0] * len(p) + [1] * len(t) if left else [1] * len(t) + [0] * len(p)
            for t, p in zip(texts, pads, strict=True)]  # fmt: skip
    return Rows.from_batches([TokenBatch(torch.tensor(ids), None, torch.tensor(real), "causal")])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_asked_for_are_words(causal, left):
    inside = rows([CLS, 5, 6, SEP], [CLS, 7, SEP], [CLS, SEP], left=left)
    outside = rows([CLS, 8, SEP, SEP], [CLS, 9, 10, 11], left=left)
    deal = Deal(4, causal=causal, special=frozenset({CLS, SEP, 0}))
    seen = set()
    for seed in range(60):
        targets = deal.targets(inside, outside, generator(seed))
        assert len(targets.members) == 4
        asked = targets.rows.ids.gather(1, targets.positions[:, None])[:, 0]
        seen.update(asked.tolist())
    # Of a causal model the last words that predict another token.
    assert seen == ({6, 7, 8, 10} if causal else {5, 6, 7, 8, 9, 10, 11})


def test_a_batch_of_special_tokens_holds_nothing_to_ask_for():
    deal = Deal(4, causal=False, special=frozenset({CLS, SEP}))
    with pytest.raises(NoTargets, match="has a token, and a label, besides special ones"):
        deal.targets(rows([CLS, SEP]), rows([CLS, 5, SEP]), generator())


def test_special_ids_are_those_of_config_and_tokenizer_but_for_mask_and_unknown():
    config = SimpleNamespace(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None)
    tokenizer = SimpleNamespace(
        cls_token_id=4, sep_token_id=5, mask_token_id=6, unk_token_id=7,
        all_special_ids=[4, 5, 6, 7, 8],
    )  # fmt: skip
    assert special_ids(config, [None, tokenizer]) == {1, 2, 3, 4, 5, 8}
    assert special_ids(None, []) == frozenset()
    # One token for everything, as GPT-2 has it.
    one = SimpleNamespace(bos_token_id=9, eos_token_id=9, unk_token_id=9, all_special_ids=[9])
    assert special_ids(None, [one]) == {9}


class Asked(FCMembership):
    """Keeps which ids of the steps themselves it was asked about."""

    needs_control = False

    def __init__(self):
        super().__init__(1)
        self.ids = []

    def run(self, view, query=None):
        self.ids += query.input_ids.gather(1, query.positions[:, None])[:, 0].tolist()
        return super().run(view, query)


@pytest.mark.parametrize("holder", ["monitor", "module", "config", "nobody"])
def test_a_live_game_learns_them_from_tokenizer_or_config(tmp_path, holder):
    model = (tiny_gpt2 if holder == "config" else tiny_bert_mlm)()
    rows = random_token_loader(16).dataset
    data = [{k: v.clone() for k, v in rows[i].items()} for i in range(16)]
    for item in data:
        for name in ("input_ids", "labels"):
            item[name][0], item[name][-2:] = CLS, SEP
    tokenizer = SimpleNamespace(cls_token_id=CLS, sep_token_id=SEP)
    module = CausalLMModule(model.train(), lr=0.0, optimizer="sgd")
    attack = Asked()
    monitor = LeakageMonitor(
        attack, every_n_steps=1, tokenizer=tokenizer if holder == "monitor" else None
    )
    if holder == "module":
        module.tokenizer = tokenizer
    if holder == "config":
        model.config.bos_token_id, model.config.eos_token_id = CLS, [SEP]
    trainer = L.Trainer(
        max_steps=4, accelerator="cpu", default_root_dir=tmp_path, callbacks=[monitor],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    assert len(attack.ids) == 3 * 8
    assert ({CLS, SEP} & set(attack.ids) == set()) is (holder != "nobody")

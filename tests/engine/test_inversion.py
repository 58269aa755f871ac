"""Inversion attacks in a plain loop: which hidden states they read, and how guesses are scored."""

import inspect
import math
import stat
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from lightning_fedleak.attacks import DescentSettings, EmbeddingDescent, PrefixInversion
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.texts.base import NOTHING, InversionAttack, TextGuess
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.texts import Reconstruction, TextsChannel
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.run import Series
from lightning_fedleak.evaluation.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import Step
from tests.callbacks.runs import Probe
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import model_loss, still_gpt2, train, watched
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5

ACCURACY = "leakage/recording/token_accuracy"


class Recording(InversionAttack):
    """Keeps what it was given; guesses 5 everywhere, or what ``guess`` makes of the states."""

    default_name = "recording"
    needs_control = False  # its observations are counted: those of the training alone

    def __init__(self, layer=1, guess=None, **more):
        super().__init__(layer, **more)
        self.guess = guess
        self.inputs = []

    def reconstruct(self, hidden, attention_mask, position_ids):
        self.inputs.append((hidden.clone(), attention_mask, position_ids))
        if self.guess is not None:
            return self.guess(hidden)
        return TextGuess(torch.full(hidden.shape[:2], 5))


def exact(layer=1, **more):
    """Return PrefixInversion without public text, which the tiny models have no use for."""
    return PrefixInversion(layer, None, language_model=False, **more)


# ---- what an attack reads -----------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_states_are_those_of_the_users_own_forward_and_none_runs_again(tmp_path, layer):
    model, states, passes = tiny_gpt2(), [], []
    place = place_of(find_anatomy(model), layer)
    if place.side == "input":
        place.module.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    else:
        place.module.register_forward_hook(
            lambda _, __, out: states.append(states_out(out).detach())
        )
    model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    attack = Recording(layer)
    watched(tmp_path, attack, model, every_n_steps=3, texts=8)
    assert len(passes) == len(states) == 8
    for step, (hidden, mask, positions) in zip((0, 3, 6), attack.inputs, strict=True):
        assert torch.equal(hidden, states[step])
        assert torch.equal(mask, torch.ones(4, 12))
        assert positions is None


def padded(side, positions):
    """Return batches of three texts of several lengths, padded on a side."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for longest in (9, 6, 12, 7):
        lengths = torch.tensor([longest, longest - 3, 2])
        ids = torch.randint(3, 97, (3, longest), generator=generator)
        columns = torch.arange(longest)
        mask = columns < lengths[:, None]
        if side == "left":
            mask = columns >= longest - lengths[:, None]
        batch = {
            "input_ids": ids.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "labels": ids.masked_fill(~mask, -100),
        }
        places = (mask.long().cumsum(1) - 1).clamp(min=0)
        batches.append(batch | ({"position_ids": places} if positions else {}))
    return batches


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_micro_batches_of_several_lengths_are_all_read(tmp_path, side, positions):
    attack, batches = Recording(2), padded(side, positions)
    watch = watched(
        tmp_path, [exact(2), attack], still_gpt2(), batches=batches, lr=0.0, accumulate=2, texts=100
    )
    assert watch.failures == 0
    assert [line["n"] for line in watch.lines()] == [6, 6, 6, 6]
    for line in watch.lines("prefix_inversion"):
        assert line["metrics"]["exact_sentences"]["value"] == 1
    for (hidden, mask, places), pair in zip(attack.inputs, (batches[:2], batches[2:]), strict=True):
        longest = max(b["input_ids"].shape[1] for b in pair)
        masks = [b["attention_mask"] for b in pair]
        expected = [nn.functional.pad(m, (0, longest - m.shape[1])) for m in masks]
        assert torch.equal(mask, torch.cat(expected))
        assert hidden.shape == (6, longest, 16)
        assert (places is not None) == positions


def blind(model, batch):
    return model(batch["input_ids"], labels=batch["labels"]).loss


def by_parts(model, batch):
    logits = model.lm_head(model.transformer(batch["input_ids"]).last_hidden_state)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def by_place(model, batch):
    """Return a loss whose model is given the mask by its position among the arguments."""
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    names = list(inspect.signature(tiny_gpt2().forward).parameters)
    between = [None] * (names.index("attention_mask") - 1)
    return model(ids, *between, mask, labels=batch["labels"]).loss


def adapted():
    with own_rng(0):
        return get_peft_model(tiny_gpt2(), LoraConfig(r=2, target_modules=["c_attn"]))


@pytest.mark.parametrize(
    ("make", "loss", "expected"),
    [(tiny_gpt2, blind, None), (tiny_gpt2, by_parts, None), (adapted, by_place, 10)],
)
def test_the_mask_is_the_one_that_the_model_takes(tmp_path, make, loss, expected):
    attack = Recording()
    watched(tmp_path, attack, make(), loss=loss, n=4)
    mask = attack.inputs[0][1]
    assert (mask is None) if expected is None else mask.sum(1).tolist() == [expected] * 4


def prompted():
    with own_rng(1):
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return get_peft_model(still_gpt2(), config)


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5, prompted])
def test_other_models_are_read_without_virtual_tokens(tmp_path, make):
    attack = Recording(2)
    listed = [attack] if make is tiny_t5 else [attack, exact(2)]
    watch = watched(tmp_path, listed, make(), lr=0.0, n=4)
    assert watch.failures == 0
    assert attack.inputs[0][0].shape == (4, 12, 16)
    if make is not tiny_t5:
        assert watch.latest["leakage/prefix_inversion/token_accuracy"] == 1


def test_an_encoder_is_attacked_by_descent(tmp_path):
    attack = EmbeddingDescent(1, steps=150, sweeps=2, lr=0.3)
    watch = watched(tmp_path, attack, tiny_bert_mlm(dropout=0.0), lr=0.0, n=4, texts=1)
    assert watch.latest["leakage/embedding_descent/token_accuracy"] > 0.9


# ---- how guesses are scored ---------------------------------------------------------------------


def crash(hidden):
    raise KeyError("a secret word")


def no_time(hidden):
    return TextGuess(torch.full(hidden.shape[:2], NOTHING), finished=False)


def other_shape(hidden):
    return TextGuess(torch.zeros(1, 3, dtype=torch.long))


def twice(model, batch):
    return model_loss(model, batch) + model_loss(model, batch)


def packed(model, batch):
    rows, length = batch["input_ids"].shape
    mask = torch.ones(length, length).tril().bool().expand(rows, 1, -1, -1)
    return model(batch["input_ids"], attention_mask=mask, labels=batch["labels"]).loss


@pytest.mark.parametrize(
    ("guess", "loss", "why"),
    [
        (crash, model_loss, "KeyError at"),
        (no_time, model_loss, "is over before the first token"),
        (other_shape, model_loss, "another shape than the sent ones"),
        (None, twice, "passed 2 times"),
        (None, packed, "attention_mask is not of shape"),
    ],
)
def test_no_answer_is_unknown_and_not_zero(tmp_path, guess, loss, why):
    with pytest.warns(UserWarning, match="unknown, not 0"):
        watch = watched(tmp_path, [Recording(guess=guess), Probe()], loss=loss, n=8)
    assert math.isnan(watch.latest[ACCURACY])
    assert why in watch.lines("recording")[0]["unknown"]
    assert "secret" not in (tmp_path / "leakage.jsonl").read_text()
    assert not math.isnan(watch.latest["leakage/probe/f1"])


def test_texts_that_were_not_begun_in_time_do_not_count(tmp_path):
    def late(hidden):
        tokens = torch.full(hidden.shape[:2], NOTHING)
        tokens[0, 0] = 5
        return TextGuess(tokens, finished=False)

    watch = watched(tmp_path, Recording(guess=late), n=4)
    assert watch.lines()[0]["n"] == 1
    assert watch.latest["leakage/recording/finished"] == 0
    assert 0 <= watch.latest[ACCURACY] <= 1 / 12


def test_the_age_of_the_adversarys_copy_is_logged_and_goes_on_after_a_resume(tmp_path):
    def descents():
        seldom = DescentSettings(refresh_every=3)
        return [EmbeddingDescent(1, steps=1, descent=seldom, name="old"), Recording()]

    watch = watched(tmp_path / "a", descents(), n=16)
    again = watched(tmp_path / "b", descents(), n=12, state=watch.state_dict())
    ages = [[x["metrics"]["age"]["value"] for x in w.lines("old")] for w in (watch, again)]
    assert ages[0] == [0, 1, 2, 0]
    assert ages[1][0] == 0
    assert watch.lines("recording")[0]["metrics"]["age"]["value"] is None


def test_texts_are_revealed_side_by_side_in_a_private_file_alone(tmp_path):
    class Words:
        def decode(self, ids):
            return "".join(f"word{i} " for i in ids)

    def gap(hidden):
        tokens = torch.full(hidden.shape[:2], 5)
        tokens[:, 3] = NOTHING
        return TextGuess(tokens)

    attack = Recording(guess=gap)
    watched(tmp_path, attack, n=4, reveal=True, tokenizer=Words(), texts=2, tensorboard=True)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    [path] = [p for p in files if b"word5 " in p.read_bytes()]
    assert path.name == "revealed_texts.rank0.txt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    head, _, original, guess, *_ = path.read_text().splitlines()
    assert head == "== step 0, leakage/recording"
    texts = next(iter(random_token_loader(32)))["input_ids"].tolist()
    assert original.removeprefix("original:      ") in [repr(Words().decode(t)) for t in texts]
    assert guess == f"reconstructed: {'word5 ' * 3 + '[?]' + 'word5 ' * 8!r}"


@pytest.mark.parametrize("attack", [Recording, lambda: FCMembership(1), Probe])
def test_a_batch_without_a_row_is_passed_over(tmp_path, attack):
    sizes = (0, 4, 0, 0, 4, 4)
    batches = random_token_loader(24)
    batches = [{k: v[:n] for k, v in b.items()} for b, n in zip(batches, sizes, strict=True)]

    def loss(model, batch):
        if len(batch["input_ids"]):
            return model_loss(model, batch)
        return sum(p.sum() for p in model.parameters()) * 0

    training = train(tmp_path, attack(), batches=batches, loss=loss, every_n_steps=2)
    assert (training.steps, training.watch.failures) == (6, 0)
    steps = [4] if attack not in (Recording, Probe) else [1, 4]
    assert [line["step"] for line in training.watch.lines()] == steps


@pytest.mark.parametrize(
    ("attack", "options", "words"),
    [
        (lambda: exact(1), {"model": tiny_bert_mlm()}, "not causal.*EmbeddingDescent"),
        (Recording, {"texts": 0}, "texts must be an integer of at least 1"),
        (Recording, {"stages": "aggregate"}, "Add 'shared' to stages"),
        (lambda: exact(9), {}, r"layer must be .* 0 to 2, got 9: the model has 2 blocks"),
        (Recording, {"assume": ()}, "below the split"),
    ],
)
def test_attacks_on_texts_that_cannot_be_run_are_refused(tmp_path, attack, options, words):
    with pytest.raises(ValueError, match=words):
        watched(tmp_path, attack(), **options)


# ---- the channel --------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_clients_are_pooled_by_text(clients, n, length, seed):
    generator = torch.Generator().manual_seed(seed)
    attack = Recording()
    channel, series = TextsChannel([attack], Options(texts=5)), Series.at(Stage.SHARED, "a")
    plan, rows, parts = Plan(attack, (), True, None), {}, []
    for client in range(clients):
        truth, guess = torch.randint(3, (2, n, length), generator=generator)
        real = torch.rand(n, length, generator=generator) < 0.8
        real[:, 0] = True
        attack._copy = SimpleNamespace(age=lambda step, age=client: age)
        answer = Reconstruction(TextGuess(guess), truth, real)
        rows[client] = channel.trials(plan, answer, Step()).flatten().tolist()
        parts.append((guess, truth, real))
    outcome = channel.pooled(series, rows)
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = reconstruction_rates(sentence_scores(*whole), resamples=200)
    assert outcome.n == n * clients
    for name in TextsChannel.metrics:
        assert outcome.rates[name].value == pytest.approx(expected[name].value)
        assert outcome.rates[name].low == pytest.approx(expected[name].low)
    assert outcome.extra == {"age": clients - 1, "finished": 1.0}
    if clients > 1:
        shares = [((g == t) & r).sum(1).div(r.sum(1)).double().mean() for g, t, r in parts]
        assert outcome.worst["token_accuracy"] == pytest.approx(float(max(shares)))

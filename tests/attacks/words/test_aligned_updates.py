"""AlignedFlatChat on updates that an optimizer made, and on compressed gradients."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words import aligned_updates
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.aligned_updates import (
    normalize_update,
    one_step_updates,
    training_updates,
)
from lightning_fedleak.attacks.words.head_gradients import gradient_parts, head_parameters
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import (
    Compression,
    GradientSnapshot,
    Inapplicable,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.attacks.words.language import Language, mean_f1, observation

RATE = 1e-3


def facts(optimizer: str = "AdamW", steps: int = 1, **settings: Any) -> RunFacts:
    given = {"lr": RATE, "weight_decay": 0.01} | settings
    return RunFacts(optimizer=optimizer, optimizer_settings=given, local_steps=steps)


@pytest.fixture(scope="module", autouse=True)
def _few_updates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned_updates, "_UPDATES", 32)
        yield


def attack(public: PublicText, round_: RunFacts, **settings: Any) -> AlignedFlatChat:
    given = {"calibration_tokens": 2000, "lengths": (8, 16, 24)}
    made = AlignedFlatChat(public, **(given | settings))
    made.meet(round_)
    return made


def shared(model: Any, round_: RunFacts, batches: list[Tensor]) -> tuple[Observation, Tensor]:
    """What a client shares that trains on these batches, and the types of their labels."""
    client = copy.deepcopy(model)
    anatomy = find_anatomy(client)
    weight = anatomy.parameter(HEAD_WEIGHT)
    assert weight is not None
    kind = getattr(torch.optim, str(round_.optimizer))
    optimizer = kind(client.parameters(), **round_.optimizer_settings)
    before = weight.detach().clone()
    for ids in batches:
        optimizer.zero_grad()
        client(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    change = {HEAD_WEIGHT: (before - weight.detach()) / RATE}
    steps = {"local_steps": len(batches), "learning_rate": RATE}
    update = UpdateSnapshot(0, Stage.SHARED, change, anatomy.tied, **steps)
    return Observation((update,)), torch.cat([b[:, 1:].flatten() for b in batches]).unique()


def f1(made: AlignedFlatChat, cases: list[tuple[Observation, Tensor]]) -> float:
    total = 0.0
    for view, truth in cases:
        try:
            types = made.run(view).types
        except UnusableObservation:
            continue  # it names nothing
        total += 2 * int(torch.isin(types, truth).sum()) / (len(types) + len(truth))
    return total / len(cases)


def cases(model, language, round_, texts=4) -> list[tuple[Observation, Tensor]]:
    steps = round_.local_steps or 1
    drawn = [language.texts(texts * steps, 16, seed=100 + i).split(texts) for i in range(4)]
    return [shared(model, round_, list(batches)) for batches in drawn]


@pytest.mark.parametrize(
    ("round_", "least"),
    [
        (facts(), 0.9),
        pytest.param(facts("RMSprop", weight_decay=0.0), 0.85, marks=pytest.mark.slow),
        (facts(steps=4), 0.8),
    ],
)
def test_what_was_fitted_on_such_updates_reads_them(
    trained: Any,
    public: PublicText,
    language: Language,
    learned: AlignedFlatChat,
    round_: RunFacts,
    least: float,
) -> None:
    made = attack(public, round_)
    made.prepare(trained)
    observations = cases(trained.model, language, round_)
    result = f1(made, observations)
    assert result > least
    assert result > f1(learned, observations), "fitted on gradients"
    again = attack(public, round_)
    again.load_state_dict({k: v.clone() for k, v in made.state_dict().items()})
    again.refresh(trained, 0)
    assert torch.equal(again.run(observations[0][0]).types, made.run(observations[0][0]).types)


def test_sgd_with_momentum_and_decay_is_read_as_gradients_are(trained, public, language) -> None:
    round_ = facts("SGD", steps=3, momentum=0.9, weight_decay=0.2)
    made = attack(public, round_)
    made.prepare(trained)
    assert f1(made, cases(trained.model, language, round_)) > 0.9


@pytest.mark.parametrize("steps", [1, 3])
def test_public_updates_are_those_a_client_would_share(trained, language, steps, monkeypatch):
    """Of the same text, against a client's own training."""
    monkeypatch.setattr(aligned_updates, "_TEXTS", (4,))
    round_ = facts(steps=steps)
    known = LocalSteps.from_facts(round_)
    assert known is not None
    weight, bias = head_parameters(trained)
    batches = list(language.texts(4 * steps, 12, seed=9).split(4))
    generator = torch.Generator().manual_seed(0)
    if steps == 1:
        (ids,) = batches
        parts = gradient_parts(trained, TokenBatch(ids, ids, None, "causal"))
        public_rows, used = next(one_step_updates(parts, weight, bias, known, generator))
    else:
        remaining = iter(batches)

        def batch(texts: int) -> TokenBatch:
            ids = next(remaining)
            return TokenBatch(ids, ids, None, "causal")

        before = {n: p.detach().clone() for n, p in trained.model.named_parameters()}
        public_rows, used = next(training_updates(trained, batch, known, generator))
        assert all(torch.equal(before[n], p) for n, p in trained.model.named_parameters())
    view, truth = shared(trained.model, round_, batches)
    rows = normalize_update(view.gradient(HEAD_WEIGHT), weight, RATE, known)
    assert torch.equal(used.nonzero()[:, 0], truth)
    # Signs of entries that are near zero may differ by rounding of the two sums.
    assert float((public_rows - rows).abs().quantile(0.99)) < 0.05


def test_what_is_not_rehearsed_is_unknown_with_the_mend(trained, public, language) -> None:
    ((view, _), *_) = cases(trained.model, language, facts())
    other = attack(public, facts("Sophia"))
    with pytest.raises(UnusableObservation, match="what Sophia makes of gradients"):
        other.run(view)
    warm = replace(view.gradients[0], fresh=False)  # type: ignore[call-arg]
    with pytest.raises(UnusableObservation, match=r"optimizer\.state\.clear\(\)"):
        attack(public, facts()).run(Observation((warm,)))
    gradient = GradientSnapshot(0, Stage.SHARED, view.gradients[0].tensors)
    with pytest.raises(UnusableObservation, match="fitted on updates: omit local_steps"):
        attack(public, facts()).run(Observation((gradient,)))
    nothing = replace(
        view.gradients[0], tensors={HEAD_WEIGHT: torch.zeros_like(view.gradient(HEAD_WEIGHT))}
    )
    with pytest.raises(UnusableObservation, match="all zero"):
        attack(public, facts()).run(Observation((nothing,)))


def test_a_calibration_is_of_its_round(public: PublicText) -> None:
    one, other = attack(public, facts()), attack(public, facts(steps=2))
    assert one.fingerprint() != other.fingerprint()
    gradients = AlignedFlatChat(public, calibration_tokens=2000)
    assert gradients.fingerprint() == attack(public, facts("SGD")).fingerprint()


TOPK = Compression("topk", share=0.1)


def compressed(cases, rule):
    """The same gradients as the server makes them out."""
    rows = []
    for view, truth in cases:
        gradient = rule.reduce(view.gradient("head.weight"))
        rows.append((observation(gradient, compression=rule.method), truth))
    return rows


def fitted(trained, public, rule):
    attack = AlignedFlatChat(public, lengths=(12, 24), calibration_tokens=4000)
    attack.meet(RunFacts(compression=rule))
    attack.prepare(trained)
    return attack


@pytest.mark.parametrize(
    ("rule", "lost"),
    [
        (TOPK, 0.05),
        pytest.param(Compression("int8"), 0.05, marks=pytest.mark.slow),
        pytest.param(Compression("low_rank", rank=12), 0.15, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_words_are_read_through_it_and_beside_it(trained, public, private, learned, rule, lost):
    """At most so much F1 is lost; what a client has computed is read as without compression."""
    plain = mean_f1(learned, private)
    attack = fitted(trained, public, rule)
    assert mean_f1(attack, compressed(private, rule)) > plain - lost
    assert mean_f1(attack, private) > plain - 0.05
    for view, truth in compressed(private, rule):  # the number of types is estimated, not known
        assert attack.run(view).n_types == pytest.approx(len(truth), rel=0.3)


def test_a_readout_that_was_fitted_on_it_reads_more(trained, public, private, learned):
    rule = Compression("int4")
    cases = compressed(private, rule)
    as_it_was = [
        (Observation((replace(v.gradients[-1], compression=""),)), truth) for v, truth in cases
    ]
    assert mean_f1(fitted(trained, public, rule), cases) > mean_f1(learned, as_it_was) + 0.03


@pytest.mark.parametrize("met", [None, Compression("int8"), Compression("sign")], ids=str)
def test_another_compression_is_unknown(public, private, met):
    attack = AlignedFlatChat(public)
    attack.meet(RunFacts(compression=met))
    rule = met if met is not None and met.method == "sign" else TOPK
    [(view, _), *_] = compressed(private, rule)
    with pytest.raises(Inapplicable, match=f"compressed by '{rule.method}'"):
        attack.run(view)


def test_decayed_rounds_are_unknown(public, private):
    [(view, _), *_] = compressed(private, TOPK)
    attack = AlignedFlatChat(public)
    settings = {"lr": 0.1, "weight_decay": 0.1}
    facts = RunFacts(compression=TOPK, optimizer="SGD", optimizer_settings=settings, local_steps=2)
    attack.meet(facts)
    last = view.gradients[-1]
    update = UpdateSnapshot(
        0, last.stage, last.tensors, learning_rate=0.1, local_steps=2, compression="topk"
    )
    with pytest.raises(Inapplicable, match="compressed"):
        attack.run(Observation((update,)))


def test_another_compression_is_another_calibration(public):
    attack, other = AlignedFlatChat(public), AlignedFlatChat(public)
    for one, rule in ((attack, TOPK), (other, replace(TOPK, share=0.2))):
        one.meet(RunFacts(compression=rule))
        assert one.arguments()["compression"] == str(rule)
    assert attack.arguments() != other.arguments()


@pytest.mark.parametrize("method", ["topk", "int8", "int4"])
def test_some_rows_are_compressed_as_they_are_among_all(method):
    """Of a matrix whose other rows are nearly zero."""
    generator = torch.Generator().manual_seed(0)
    whole = 1e-6 * torch.randn(400, 8, generator=generator)
    rows = torch.randperm(400, generator=generator)[:50]
    whole[rows] = torch.randn(50, 8, generator=generator)
    rule = Compression(method, share=0.1)
    assert torch.equal(rule.reduce(whole[rows], rows=400), rule.reduce(whole)[rows])

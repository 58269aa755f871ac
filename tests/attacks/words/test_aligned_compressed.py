"""AlignedFlatChat on gradients that were compressed before they left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.model.snapshots import Compression, Inapplicable, Observation, UpdateSnapshot
from tests.attacks.words.language import mean_f1, observation

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

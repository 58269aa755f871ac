"""LeakageMonitor on a sharded run of two gloo processes: the cases of monitor_fsdp2_worker.py."""

import math

import pytest

from lightning_fedleak.engine.channels.control import SHUFFLES
from tests.helpers.cases import of
from tests.helpers.processes import launched

pytestmark = [pytest.mark.ddp, pytest.mark.slow]


ranks = launched("tests.callbacks.monitor_fsdp2_worker")


def compared(values):
    """Return the values of a look that all processes have, and that are not of shuffled words."""
    ends = ("/control", "/control_of_a_part", "/p_of_this_look", "/p_over_looks")
    return {name: value for name, value in values.items() if not name.endswith(ends)}


def test_every_look_finds_what_one_process_finds_on_all_texts(ranks) -> None:
    for found in of(ranks, "values"):
        sharded, single = found["sharded"], found["single"]
        assert sharded["failures"] == single["failures"] == 0
        assert len(sharded["looks"]) == len(single["looks"]) == 3
        for looks in zip(sharded["looks"], single["looks"], strict=True):
            mine, reference = map(compared, looks)
            assert mine.keys() == reference.keys()
            for prefix in ("leakage", "leakage_local"):
                assert float(mine[f"{prefix}/flatchat/f1"]) > 0.3
                assert float(mine[f"{prefix}/prefix_inversion/token_accuracy"]) == 1
            for metric, value in mine.items():
                # Sums in another order change the last digits of what is taken for the number of
                # types, of which the metric is the small difference to the true one. The precision
                # of an attack that names nothing is NaN.
                is_count = metric.endswith("type_count_error")
                limits = {"abs": 1e-4, "rel": 0} if is_count else {"rel": 1e-12}
                other = pytest.approx(float(reference[metric]), nan_ok=True, **limits)
                assert float(value) == other, metric


def test_looks_gather_what_their_attack_reads_and_no_more(ranks) -> None:
    for found in of(ranks, "gathered parts"):
        for case in found.values():
            # The first step is the calibration's, which runs the model layer by layer.
            assert all(0 < count <= 1.1 * case["declared"] for count in case["looks"][0][1:])
            assert case["whole"] > 3 * case["declared"]
            assert case["failures"] == 0
        # The first look also makes the step again and, since words are few, runs three controls: a
        # training step each, whose gradients are gathered like the step's. Later looks read 1,
        # which needs no control.
        lora = found["lora"]
        (first, *_), (controlled, *later) = lora["looks"]
        runs = 1 + SHUFFLES
        made_again = 1.1 * ((1 + runs) * lora["declared"] + runs * lora["step"])
        assert lora["step"] < controlled - first <= made_again
        assert all(0 < count <= 1.1 * lora["declared"] for count in later)
        assert lora["f1"] == found["whole"]["f1"] == 1


def test_training_is_bit_identical(ranks) -> None:
    for found in of(ranks, "undisturbed"):
        assert found == {"same": True, "sharded": True, "steps": 3}


def test_a_failure_on_one_process_is_unknown_on_both_and_nobody_waits(ranks) -> None:
    for found in of(ranks, "fails on one"):
        unknown = {name for name, value in found["values"].items() if math.isnan(float(value))}
        assert unknown == {"leakage/fails_on_one/f1", "leakage/reads_fail_on_one/token_accuracy"}
        assert (found["steps"], found["failures"]) == (3, 6)
        assert len(found["values"]) > len(unknown)


def test_a_gate_hardens_both_processes_and_a_resumed_run_stays_so(ranks) -> None:
    for found in of(ranks, "hardened"):
        first = {"notches": [2, 2], "steps": 3, "equal": True, "looks": 3}
        assert found == {"first": first, "resumed": first | {"steps": 6, "looks": 6}}

"""Inversion attacks beside defences that rewrite hidden states, and under Poisson sampling."""

import lightning.pytorch as L
import pytest
import torch

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses import Defense
from lightning_fedleak.defenses.dpsgd.dpsgd import DPSGD
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import place_of, states_out, with_states_out
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, assert_same, fit
from tests.engine.test_inversion import ACCURACY, Recording, exact
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import grouped


class Shift(Defense):
    """Adds a constant to the hidden states at a layer."""

    name, guarantee = "shift", "none"

    def __init__(self, layer, by=1.0):
        self.activation_layers = (layer,)
        self.by = by

    def before_setup(self, context):
        place = place_of(find_anatomy(context.root), self.activation_layers[0])
        if place.side == "input":
            self.handle = place.module.register_forward_pre_hook(
                lambda _, args: (args[0] + self.by, *args[1:])
            )
        else:
            self.handle = place.module.register_forward_hook(
                lambda _, __, out: with_states_out(out, states_out(out) + self.by)
            )

    def teardown(self):
        self.handle.remove()


def defended(root, attacks, *defenses, **settings):
    monitor = LeakageMonitor(attacks, **grouped(settings))
    module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), lr=0.0)
    strategy = DefendedStrategy("auto", defenses=[*defenses]) if defenses else "auto"
    fit([monitor], root, module=module, strategy=strategy, n=4)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(part, name) for part in module.modules() for name in hooks)
    return monitor


@pytest.mark.parametrize("layer", [0, 1])
def test_local_is_before_and_shared_behind_a_defence(tmp_path, layer):
    plain, attack, above = Recording(layer), Recording(layer), Recording(2)
    defended(tmp_path, plain)
    defended(tmp_path, attack, Shift(layer), stages=("local", "shared"))
    local, shared = (hidden for hidden, *_ in attack.inputs)
    assert torch.equal(local, plain.inputs[0][0])
    assert torch.equal(shared, local + 1)
    defended(tmp_path, above, Shift(layer))
    assert len(above.inputs) == 1
    with pytest.raises(ValueError, match="leave 'local' out"):
        defended(tmp_path, Recording(2), Shift(layer), stages=("local",))


def test_what_no_defence_rewrites_is_attacked_once_for_both_stages(tmp_path):
    attack = Recording()
    monitor = defended(tmp_path, attack, Shift(2), stages=("local", "shared", "aggregate"))
    assert len(attack.inputs) == 1
    assert monitor.latest[ACCURACY] == monitor.latest["leakage_local/recording/token_accuracy"]
    assert not any("leakage_aggregate/" in n for n in [*monitor.latest, *monitor.metric_names()])


class Sizes(L.Callback):
    def __init__(self):
        self.sizes = []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.sizes.append(len(batch["input_ids"]))


def test_poisson_batches_of_dpsgd_are_read_and_its_empty_ones_passed_over(tmp_path):
    def run(callbacks, root):
        strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=0.5, seed=3)])
        module = CausalLMModule(tiny_gpt2(dropout=0.0, tied=False).train(), optimizer="adamw")
        loader = random_token_loader(10, batch_size=1)
        return fit(callbacks, root, module=module, strategy=strategy, loader=loader)

    attacks, stages = [exact(1), FCMembership(1), Probe()], ("local", "shared")
    monitor = LeakageMonitor(
        attacks, every_n_steps=1, settings=WatchSettings(stages=stages), folder=tmp_path
    )
    sizes = Sizes()
    assert_same(run([], tmp_path / "plain"), run([sizes, monitor], tmp_path / "watched"))
    assert monitor.failures == 0
    assert 0 in sizes.sizes
    lines = lines_of(tmp_path, "prefix_inversion")
    for stage in stages:
        steps = {line["step"]: line["n"] for line in lines if line["stage"] == stage}
        assert steps == {step: min(n, 4) for step, n in enumerate(sizes.sizes) if n}
    assert all(line["metrics"]["token_accuracy"]["value"] == 1 for line in lines)

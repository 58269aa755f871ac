"""What refutes an account is remembered, whatever a later look shows."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_fedleak.defenses import Defense, Privacy
from lightning_fedleak.defenses.accounting.accounting import curve_of
from lightning_fedleak.engine.channels.released.account import AccountGame

N = 200


class Accounted(Defense):
    """Accounts for one step."""

    name = "accounted"

    @property
    def privacy(self) -> Privacy:
        return Privacy(0.1, 1e-3, 1.0, 0.01, 1)

    def curve(self):
        return curve_of([(1.0, 0.01, 1)], "prv")


def test_an_account_that_was_refuted_once_stays_so() -> None:
    run = SimpleNamespace(
        defenses=[Accounted()], processes=1, client="world", watcher="LeakageMonitor", step=7
    )
    game = AccountGame(cast(Any, run), None)
    game.limits()
    generator = torch.Generator().manual_seed(0)
    members = torch.rand(N, generator=generator) < 0.5
    blind, clear = torch.rand(N, generator=generator), members.double()
    assert game.refuted("loss", blind, members, 0.01, 0.05) == 0
    with pytest.warns(UserWarning, match="THE ACCOUNT IS REFUTED by 'loss' at step 7"):
        assert game.refuted("loss", clear, members, 0.01, 0.05) == 1
    assert game.refuted("loss", blind, members, 0.01, 0.05) == 1
    assert game.refuted("extraction", blind, members, 0.01, 0.05) == 0

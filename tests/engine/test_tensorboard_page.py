"""What TensorBoard shows, in Chromium, of a folder with three runs of different kinds."""

import html
import json
import re

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from peft import LoraConfig, get_peft_model
from tensorboard import program
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import FlatChat
from lightning_fedleak.attacks.memorization import LossRatio
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.engine import Threshold
from tests import browser
from tests.callbacks.runs import fit
from tests.helpers.loops import watched
from tests.helpers.models import tiny_llama
from tests.trainers.test_transformers import SETTINGS, TRAIN

# Keeps every text of the page, also behind shadow roots, in an attribute.
SCRIPT = b"""<script>
const all = (root) => [...root.querySelectorAll("*")].flatMap(
  (one) => [one, ...(one.shadowRoot ? all(one.shadowRoot) : [])]);
const texts = (one) => [...one.childNodes].filter((node) => node.nodeType === 3);
setTimeout(() => document.body.setAttribute("data-told", JSON.stringify(all(document.body).flatMap(
  (one) => texts(one).map((node) => node.data.trim()).filter((text) => text)))), 15000);
</script></body>"""


class Server(program.WerkzeugServer):
    def __init__(self, app, flags):
        def told(environ, start):
            if environ["PATH_INFO"] != "/":
                return app(environ, start)
            environ.pop("HTTP_ACCEPT_ENCODING", None)
            answer = []
            page = b"".join(app(environ, lambda *said: answer.extend(said)))
            own = ("content-security-policy", "content-length")
            start(answer[0], [one for one in answer[1] if one[0].lower() not in own])
            return [page.replace(b"</body>", SCRIPT)]

        super().__init__(told, flags)


@pytest.mark.slow
def test_first_cards_limits_charts_and_settings_of_runs_of_three_kinds(tmp_path):
    root = tmp_path / "runs"
    board = TensorBoardLogger(root, "words", "")
    fit([LeakageMonitor(FlatChat(n_types=20), every_n_steps=2)], root, logger=board)
    gate = Threshold("leakage/worst/membership", at_most=0.9, action="warn")
    lora = get_peft_model(tiny_llama(d=64), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    watched(root / "lora", "auto", lora, gates=[gate], tensorboard=True)
    settings = {"memorization": SETTINGS, "tensorboard": True}
    watched(root / "trained", [LossRatio()], loader=DataLoader(TRAIN, batch_size=4), **settings)
    shown = program.TensorBoard(server_class=Server)
    shown.configure(["tensorboard", "--logdir", str(root), "--port", "0", "--load_fast", "false"])
    address, told = shown.launch(), {}
    for page in ("timeseries", "custom_scalars", "hparams"):
        found = re.search(r'data-told="([^"]*)"', browser.elements(f"{address}#{page}", tmp_path))
        told[page] = json.loads(html.unescape(found[1]))
        assert not any(re.match(r"axis|missing tag", text.lower()) for text in told[page])
    cards = told["timeseries"][told["timeseries"].index("Pinned") + 2 :]
    first = cards[: cards.index("epoch")]
    assert first[:2] == ["1_leakage", "4 cards"]
    tags, limit = [t for t in first if t.startswith("/")], first.index("lora/tensorboard/gate")
    assert tags == ["/membership_auc", "/train_loss", "/trained_auc", "/words_f1"]
    assert first[limit + 1] == "0.9"
    assert first.index(tags[0]) < limit < first.index(tags[1])
    charts, rows = {*told["custom_scalars"]}, told["hparams"]
    assert {"leakage/flatchat/f1 (words)", "leakage/loss_ratio/auc (trained/tensorboard)"} <= charts
    assert "leakage_interval/gradient_membership/auc_low (lora/tensorboard)" in charts
    assert {"['flatchat']", "['loss_ratio']"} <= {*rows}
    assert not {"0", "0.0000"} & {*rows[rows.index("Trial ID") : rows.index("Color by")]}

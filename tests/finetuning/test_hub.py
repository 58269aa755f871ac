"""What is asked of the hub, where there is none; servers and closed ports of this machine only."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from lightning_fedleak.cli.finetuning import assets as hub
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MODEL, SourceError, model_source
from lightning_fedleak.cli.finetuning.module import load_model, load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.cli.studies.models import find_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, nothing asked before."""
    for name, value in (("HF_HOME", tmp_path), ("HF_HUB_CACHE", tmp_path / "hub")):
        monkeypatch.setattr(constants, name, str(value))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    hub._ask_in_thread.cache_clear()
    yield tmp_path / "hub"
    hub._ask_in_thread.cache_clear()


def no_network(monkeypatch: pytest.MonkeyPatch) -> Mock:
    reason = socket.gaierror(-2, "Name or service not known")
    network = Mock(side_effect=reason)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Mock(head=network))
    return network


@pytest.mark.parametrize("load", [load_tokenizer, load_model, find_model])
def test_a_bare_name_without_a_network_is_told_once(load, monkeypatch) -> None:
    network = no_network(monkeypatch)
    for _ in range(2):
        with pytest.raises(SourceError) as error:
            load("gpt2")
        message = str(error.value)
        assert message.startswith("'gpt2' is not on this machine")
        assert "could not be reached (Name or service not known)" in message
        words = "give a folder that holds the model, set HF_HOME to a cache that has it, or connect"
        assert words in message
    assert network.call_count == 1


def test_a_dataset_is_not_looked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    no_network(monkeypatch)
    with pytest.raises(SourceError, match="'imdb::test' is not on this machine"):
        read_texts("imdb::test")


def test_what_never_answers_is_waited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        ended.wait(60)
        raise OSError

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Mock(head=hangs))
    monkeypatch.setattr(hub, "SECONDS", 0.05)
    assert hub.why_unreachable() == "no answer in 0.05 seconds"
    ended.set()


@pytest.mark.parametrize(("is_open", "reason"), [(True, None), (False, "Connection refused")])
def test_the_reason_is_that_of_the_system(is_open, reason, monkeypatch) -> None:
    """Any answer counts, here of a server that knows no HEAD."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        if is_open:
            threading.Thread(target=server.handle_request, daemon=True).start()
        else:
            server.server_close()
        assert hub.why_unreachable() == reason


def test_a_wish_to_stay_offline_is_told_and_nothing_is_asked(monkeypatch) -> None:
    network = no_network(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
        load_tokenizer("gpt2")
    assert not network.called


def test_a_model_of_the_cache_needs_no_network(cache, monkeypatch) -> None:
    no_network(monkeypatch)
    retained = cache / "models--owner--name"
    (retained / "refs").mkdir(parents=True)
    (retained / "refs" / "main").write_text("ab12")
    (retained / "snapshots").mkdir()
    (retained / "snapshots" / "ab12").symlink_to(EMBEDDED_MODEL)
    assert model_source("owner/name") == ("owner/name", {"local_files_only": True})
    assert not hub.dataset_is_cached("owner/texts")
    (cache / "datasets--owner--texts").mkdir()
    assert hub.dataset_is_cached("owner/texts")

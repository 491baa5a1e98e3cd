"""A hub that cannot be reached is noticed at once; one that can is left alone."""

import socket
import urllib.request

import datasets
import pytest
from huggingface_hub import constants

from self_speculation import hub


@pytest.fixture
def hub_at(monkeypatch):
    """A function that asks with the hub at this port of this machine: whether the clients are offline afterwards."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)

    def ask(port):
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        hub.go_offline_if_unreachable.cache_clear()
        hub.go_offline_if_unreachable()
        return constants.HF_HUB_OFFLINE

    yield ask
    hub.go_offline_if_unreachable.cache_clear()


def test_a_hub_that_answers_is_left_alone(hub_at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert hub_at(server.getsockname()[1]) is False


def test_an_unreachable_hub_means_offline(hub_at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # closed by the time it is asked for
    assert hub_at(port) is True and datasets.config.HF_HUB_OFFLINE


def test_a_proxy_decides_for_itself(hub_at, monkeypatch):
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://127.0.0.1:9"})
    assert hub_at(9) is False


@pytest.mark.parametrize(
    ("error", "restricted"),
    [
        ("401 Client Error. (Request ID: x) Cannot access gated repo for url ...", True),
        ("You are trying to access a gated repo.", True),
        ("403 Forbidden: please enable access", True),
        ("CUDA out of memory. Of the allocated memory 401.69 MiB is free", False),
        ("shape [4016, 403] is aggregated", False),
    ],
)
def test_what_is_restricted(error, restricted):
    assert hub.restricted(error) is restricted

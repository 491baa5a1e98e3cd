"""How processes meet; no process group is really made."""

from __future__ import annotations

import pytest
import torch

from self_speculation import distributed


@pytest.mark.parametrize(
    ("gpus", "backend", "current"), [(0, "gloo", []), (1, "gloo", []), (2, "cpu:gloo,cuda:nccl", [1])]
)
def test_nccl_only_where_each_process_has_its_own_gpu(gpus, backend, current, monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    joined, chosen = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **settings: joined.append(backend))
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url: iter([(None, 1, 2)]))
    monkeypatch.setattr(distributed, "Watch", lambda *arguments: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    distributed.join()
    assert (joined, chosen) == ([backend], current)


def test_one_process_gathers_its_own_value():
    assert distributed.gather("x") == ["x"]

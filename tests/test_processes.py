"""Scripts under torchrun: equal rows for any number of processes, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from self_speculation import distributed
from self_speculation.watch import Watch
from tests.runs import arguments, call, save_exit_friendly, start, steady, tables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_exit_friendly(tmp_path_factory.mktemp("model"))


class Store:
    """What processes exchange when they join."""

    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def set(self, key, value):
        self.values[key] = value.encode()
        self.there.set()

    def get(self, key):
        assert self.there.wait(10)
        return self.values[key]


@pytest.fixture
def watches(monkeypatch):
    """Three processes' watches in one, which interrupt nothing; they have ended before interruptions are real again."""
    monkeypatch.setattr("self_speculation.watch.GRACE_S", 0)
    monkeypatch.setattr("signal.pthread_kill", lambda *arguments: None)
    monkeypatch.setattr("os._exit", lambda code: None)
    store = Store()
    found = [Watch(store, rank, 3, "127.0.0.1") for rank in range(3)]
    yield found
    for watch in found:
        close(watch)
    for watch in found:
        watch._thread.join(10)
        assert not watch._thread.is_alive()


def close(watch: Watch) -> None:
    """What the system does with the connections of a process that is killed."""
    watch._leaving = True
    for peer in list(watch._peers):
        with contextlib.suppress(OSError):  # closed before
            peer.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("dead", (0, 1, 2))
def test_a_death_is_noticed_by_all_others(watches, dead):
    deadline = time.time() + 10
    while len(watches[0]._peers) < 2 and time.time() < deadline:
        time.sleep(0.01)
    close(watches[dead])
    for rank, watch in enumerate(watches):
        if rank != dead:
            assert watch.wait(10) == (dead, None)


def test_an_error_is_passed_on_and_an_end_in_order_is_no_loss(watches):
    watches[2].leave(None)
    watches[1].leave("RunError: no such file")
    assert watches[0].wait(10) == (1, "RunError: no such file")
    assert watches[2].wait(0.1) is None  # it had left


def test_items_fall_to_the_process_that_asks(monkeypatch):
    """Two processes at different speeds: every item once, and none waits for the slower one."""
    counts = {}

    class Shared:
        def add(self, key, amount):
            counts[key] = counts.get(key, 0) + amount
            return counts[key]

    monkeypatch.setattr(distributed, "_store", Shared())
    monkeypatch.setattr(distributed, "_counters", 0)
    fast = distributed.pull(range(10))
    monkeypatch.setattr(distributed, "_counters", 0)
    slow = distributed.pull(range(10))
    taken = [next(slow), *(next(fast) for _ in range(7)), next(slow), *fast]
    assert taken == list(range(10)) and list(slow) == []


def test_one_process_takes_all_items():
    assert list(distributed.pull("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize(("given", "parent", "chosen"), [(None, b"", False), ("1", b"", False), ("2", b"", True),
                                                         ("1", b"OMP_NUM_THREADS=1", True)])  # fmt: skip
def test_threads_that_torchrun_chose_are_not_the_users(given, parent, chosen, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"A=B\0" + parent)
    assert distributed._threads_were_chosen() == chosen


BENCHMARK = {"compare": "early_exit:exit_layer=3:num_speculations=2,prompt_lookup", "num_samples": 9}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "batch_size"), [
    ("benchmark", 1), ("benchmark", 3), ("sweep", 1), ("sweep", 3), ("correctness", 1),
])  # fmt: skip
def test_any_number_of_processes_writes_the_same_rows(model, tmp_path, script, batch_size):
    flags = {"num_samples": 9}
    if script == "benchmark":
        flags = BENCHMARK
    elif script == "sweep":
        flags |= {"exit_layer_first": 2, "exit_layer_last": 3, "num_speculations_last": 2}
    else:
        flags |= {"generation_strategy": "self_speculative", "exit_layer": 3, "num_speculations": 2}
    found = {}
    for count in (1, 2, 4):
        argv = arguments(model, tmp_path / str(count), batch_size=batch_size, **flags)
        child = start(script, argv, count)
        _, errors = child.communicate()
        assert child.returncode == 0, errors
        found[count] = tables(tmp_path / str(count), script)
    for count in (2, 4):
        for name, table in found[1].items():
            if name != "rounds":
                pd.testing.assert_frame_equal(steady(table), steady(found[count][name]))


def workers(parent: int) -> dict[int, int]:
    """Rank -> process id of the children of a launcher."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                environment = (path / "environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(path.name) for v in environment if v.startswith(b"RANK=")}
        except (OSError, IndexError):
            continue
    return found


def finished(out: Path) -> set[tuple[str, str]]:
    """Rows that are on the disk."""
    rows = set()
    for shard in out.glob("*.part.jsonl"):
        text = shard.read_text()
        rows |= {
            (row["sample_id"], row["strategy"]) for row, _ in map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        }
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_a_killed_process_ends_the_run_and_nothing_finished_is_lost(model, tmp_path, moment):
    """`kill -9` of either process at a random moment: the other ends within 30 s; resumed by 1, 2 or 3 processes."""
    rng = random.Random(moment)
    flags = {**BENCHMARK, "num_samples": 8, "max_steps": 120}
    victim, after = rng.randrange(2), rng.randrange(0, 15)
    child = start("benchmark", arguments(model, tmp_path, **flags), 2)
    while len(finished(tmp_path)) < after or len(workers(child.pid)) < 2:
        time.sleep(0.05)
        assert child.poll() is None
    time.sleep(rng.random())
    pids = workers(child.pid)
    before = finished(tmp_path)
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0 and time.monotonic() - killed < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    said = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(said) <= 1 and all(f"process {victim} died" in line for line in said)
    assert before <= finished(tmp_path)
    if before:
        assert said and "go on with --resume" in errors
        shard = next(tmp_path.glob("*.part.jsonl"))
        again = start("benchmark", arguments(model, tmp_path, **flags, resume=shard), rng.randint(1, 3))
        _, errors = again.communicate()
        assert again.returncode == 0, errors
        rows = tables(tmp_path, "benchmark")[""]
        assert call("benchmark", arguments(model, tmp_path / "whole", **flags)) == 0
        pd.testing.assert_frame_equal(steady(rows), steady(tables(tmp_path / "whole", "benchmark")[""]))

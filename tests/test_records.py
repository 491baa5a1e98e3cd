"""Result files: order, types, kills, resuming, several processes, and runs that end together."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

from self_speculation.config import RunError, UsageError
from self_speculation.records import RUN_COLUMNS, SAMPLE_COLUMNS, RunLog, append_run

ROOT = Path(__file__).parent.parent


def start(tmp_path, code, **environment):
    """A child python that has `RunLog` and `out`, the result folder."""
    head = f"import os, sys, time\nfrom self_speculation.records import *\nout = {str(tmp_path)!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip


def write_rows(log, ids, **more):
    for i in ids:
        log.write({"sample_id": f"s{i}", "accepted": i, "acceptance_rate": i / 7, **more}, prediction=f"text {i}")


def test_table_has_the_columns_in_order_and_sensible_types(tmp_path):
    log = RunLog("benchmark", tmp_path, SAMPLE_COLUMNS, {"exit_layer": 4})
    write_rows(log, range(3), sample=True, skip_attn=(3, 5), note='a "quoted"\nnote', rouge1=0.5)
    rows = log.finish()
    table = pd.read_csv(log.path)
    assert tuple(table.columns) == (*SAMPLE_COLUMNS, "rouge1")
    assert list(table.accepted) == [0, 1, 2] and table.accepted.dtype == int and table["sample"].dtype == bool
    assert table.acceptance_rate[1] == 1 / 7 and table.temperature.isna().all() and table.note[0] == 'a "quoted"\nnote'
    assert set(table.run_id) == {log.run_id} and table.script[0] == "benchmark" and table.skip_attn[0] == "3,5"
    assert [row["sample_id"] for row in rows] == ["s0", "s1", "s2"]
    lines = [json.loads(line) for line in log.path.with_suffix(".jsonl").read_text().splitlines()]
    assert lines[1] == {"sample_id": "s1", "prediction": "text 1"}
    assert log.finish() == [] and not list(tmp_path.glob("*.part.jsonl"))


def test_no_row_is_a_table_and_no_predictions_no_jsonl(tmp_path):
    log = RunLog("sweep", tmp_path, ("exit_layer", "speedup"), {}, key="exit_layer")
    log.finish()
    assert log.path.read_text() == "exit_layer,speedup\n" and not log.path.with_suffix(".jsonl").exists()


def test_two_runs_in_one_second_have_their_own_files(tmp_path):
    logs = [RunLog("generate", tmp_path, SAMPLE_COLUMNS, {}) for _ in range(3)]
    for number, log in enumerate(logs):
        write_rows(log, [number])
        log.finish()
    assert len({log.path for log in logs}) == 3 and len({log.run_id for log in logs}) == 3
    assert [pd.read_csv(log.path).sample_id[0] for log in logs] == ["s0", "s1", "s2"]


@pytest.mark.parametrize("keep", ["whole", "torn"])
@pytest.mark.parametrize("name", ["stem", "csv", "shard"])
def test_kill_loses_no_finished_row(tmp_path, keep, name):
    child = start(tmp_path, """
        log = RunLog("sweep", out, ("sample_id", "value"), {"a": 1})
        print(log.stem, flush=True)
        for i in range(100000):
            log.write({"sample_id": i, "value": i * i}, prediction=str(i))
            if i == 50: print("ready", flush=True)
        """)  # fmt: skip
    stem = child.stdout.readline().strip()
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    shard = Path(f"{stem}.rank0.part.jsonl")
    if keep == "torn":
        shard.write_bytes(shard.read_bytes().rstrip(b"\n")[:-3])
    path = {"stem": stem, "csv": f"{stem}.csv", "shard": str(shard)}[name]
    log = RunLog("sweep", tmp_path / "elsewhere", ("sample_id", "value"), {"a": 1}, resume=path)
    there = len(log.done)
    assert there >= 51 - (keep == "torn") and log.done == {str(i) for i in range(there)}
    assert log.earlier[-1] == {"sample_id": there - 1, "value": (there - 1) ** 2}
    for i in range(there, there + 5):
        log.write({"sample_id": i, "value": i * i}, prediction=str(i))
    log.finish()
    table = pd.read_csv(f"{stem}.csv")
    assert list(table.sample_id) == list(range(there + 5)) and list(table.value) == [i * i for i in range(there + 5)]
    assert [json.loads(line)["prediction"] for line in open(f"{stem}.jsonl")] == [str(i) for i in range(there + 5)]


def test_a_merged_table_can_be_resumed_and_keeps_its_cells(tmp_path):
    log = RunLog("benchmark", tmp_path, SAMPLE_COLUMNS, {})
    write_rows(log, [0, 1], note="007", seed=None, sample=False, n_shot="1e3")
    log.finish()
    before = log.path.read_text().splitlines()
    again = RunLog("benchmark", tmp_path, SAMPLE_COLUMNS, {}, resume=str(log.path))
    assert again.done == {"s0", "s1"} and again.run_id == log.run_id
    assert (again.earlier[0]["note"], again.earlier[0]["seed"], again.earlier[0]["sample"]) == ("007", None, False)
    write_rows(again, [2], rouge1=1.0)
    again.finish(order=["s2", "s1", "s0"])
    after = log.path.read_text().splitlines()
    assert after[2:] == [line + "," for line in reversed(before[1:])] and after[1].endswith(",1.0")
    assert [json.loads(line)["prediction"] for line in open(log.path.with_suffix(".jsonl"))] == [
        "text 2", "text 1", "text 0",
    ]  # fmt: skip


def test_a_run_is_found_in_the_output_folder_too(tmp_path, monkeypatch):
    log = RunLog("benchmark", tmp_path / "out", SAMPLE_COLUMNS, {})
    write_rows(log, [0])
    log.finish()
    monkeypatch.chdir(tmp_path)
    for given in (log.path.name, f"out/{log.path.name}", str(log.path)):
        assert RunLog("benchmark", "out", SAMPLE_COLUMNS, {}, resume=given).done == {"s0"}


def test_resume_refuses_what_is_not_the_same_run(tmp_path):
    log = RunLog("sweep", tmp_path, SAMPLE_COLUMNS, {"exit_layer": 4, "ids": (1, 2), "output_dir": "a", "debug": False})
    log.finish()
    RunLog(
        "sweep", tmp_path, SAMPLE_COLUMNS, {"exit_layer": 4, "ids": [1, 2], "output_dir": "b", "debug": True},
        resume=str(log.path),
    )  # fmt: skip
    with pytest.raises(UsageError, match="--resume .*exit_layer was 4, now 5"):
        RunLog("sweep", tmp_path, SAMPLE_COLUMNS, {"exit_layer": 5, "ids": [1, 2]}, resume=str(log.path))
    with pytest.raises(UsageError, match="run of sweep, not of search"):
        RunLog("search", tmp_path, SAMPLE_COLUMNS, {}, resume=str(log.path))
    with pytest.raises(RunError, match="--resume nothing.csv: no run to resume"):
        RunLog("sweep", tmp_path, SAMPLE_COLUMNS, {}, resume="nothing.csv")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--output_dir .*file: cannot write there"):
        RunLog("generate", tmp_path / "file", SAMPLE_COLUMNS, {})


def test_second_table_and_keys_of_several_columns(tmp_path):
    log = RunLog("sweep", tmp_path, ("exit_layer", "num_speculations"), {}, key=("exit_layer", "num_speculations"))
    samples = log.table("samples", SAMPLE_COLUMNS, key=("exit_layer", "sample_id"))
    log.write({"exit_layer": 1, "num_speculations": 2})
    samples.write({"exit_layer": 1, "sample_id": "x"})
    again = RunLog("sweep", "", log.columns, {}, resume=str(samples.path), key=log.key)
    assert again.done == {("1", "2")} and again.table("samples", SAMPLE_COLUMNS, samples.key).done == {("1", "x")}
    log.finish(), samples.finish()
    assert samples.path.name == log.path.stem + "_samples.csv" and len(pd.read_csv(samples.path)) == 1
    assert len(pd.read_csv(log.path)) == 1


def start_two(tmp_path, code):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        start(tmp_path, code, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]


def test_two_killed_processes_are_resumed_by_one(tmp_path):
    children = start_two(tmp_path, """
        from self_speculation import distributed
        distributed.join()
        log = RunLog("benchmark", out, SAMPLE_COLUMNS, {})
        for i in distributed.share(range(6)):
            log.write({"sample_id": f"s{i}"}, prediction=str(i))
        print(log.stem, flush=True)
        time.sleep(60)
        """)  # fmt: skip
    stem, other = (child.stdout.readline().strip() for child in children)
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert stem == other
    log = RunLog("benchmark", tmp_path, SAMPLE_COLUMNS, {}, resume=stem)
    assert log.done == {f"s{i}" for i in range(6)}
    log.write({"sample_id": "s6"}, prediction="6")
    log.finish(order=[f"s{i}" for i in (6, 0, 1, 2, 3, 4, 5)])
    assert list(pd.read_csv(log.path).sample_id) == [f"s{i}" for i in (6, 0, 1, 2, 3, 4, 5)]
    assert len(open(log.path.with_suffix(".jsonl")).readlines()) == 7 and not list(tmp_path.glob("*.part.jsonl"))


def test_two_processes_and_resuming_with_one(tmp_path):
    code = """
        from self_speculation import distributed
        distributed.join()
        log = RunLog("benchmark", out, SAMPLE_COLUMNS, {})
        for i in distributed.share(range(5)):
            log.write({"sample_id": i}, prediction=str(i))
        assert len(log.finish()) == (5 if distributed.is_main() else 0)
        try:
            RunLog("benchmark", out, SAMPLE_COLUMNS, {"x": 1}, resume=str(log.path))
        except Exception as error:
            print(type(error).__name__)
        distributed.leave()
        """
    children = start_two(tmp_path, code)
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["UsageError\n"] * 2
    (path,) = tmp_path.glob("*.csv")
    table = pd.read_csv(path)
    assert list(table.sample_id) == [0, 1, 2, 3, 4] and list(table["rank"]) == [0, 1, 0, 1, 0]
    log = RunLog("benchmark", tmp_path, SAMPLE_COLUMNS, {}, resume=str(path))
    assert log.done == set("01234")


def test_pooled_rows_of_runs_that_end_together(tmp_path):
    code = "for i in range(5): append_run(out, {'run_id': f'{os.getpid()}-{i}', 'metrics': {'rouge1': 0.5}, 'seed': i})"
    children = [start(tmp_path, code) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    table = pd.read_csv(tmp_path / "runs.csv")
    assert tuple(table.columns) == RUN_COLUMNS and len(set(table.run_id)) == 15
    assert json.loads(table.metrics[0]) == {"rouge1": 0.5} and table.seed.dtype == int


def test_a_resumed_run_replaces_its_pooled_rows(tmp_path):
    append_run(tmp_path, {"run_id": "a", "num_samples": 1}, {"run_id": "a", "num_samples": 2})
    append_run(tmp_path, {"run_id": "b", "num_samples": 3})
    append_run(tmp_path, {"run_id": "a", "num_samples": 4})
    assert list(pd.read_csv(tmp_path / "runs.csv").num_samples) == [3, 4]


def test_a_table_of_runs_that_is_not_ours_is_kept(tmp_path):
    (tmp_path / "runs.csv").write_text("name,value\na,1\n")
    append_run(tmp_path, {"run_id": "x"})
    assert len(pd.read_csv(tmp_path / "runs.csv")) == 2

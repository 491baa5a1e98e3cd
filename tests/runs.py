"""Running scripts on a tiny saved model, in this process or in others, and reading what they wrote."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from self_speculation import cli
from tests.folders import byte_tokenizer, tiny_llama

ROOT = Path(__file__).parent.parent
VARYING = (
    "run_id", "timestamp", "rank", "world_size", "prefill_s", "decode_s", "tokens_per_second", "total_time",
    "time_per_token", "autoregressive_s", "speedup", "predicted_speedup",
)  # fmt: skip
"""Columns that may differ between equal runs: times, ids of the run, ranks."""


def exit_friendly(**changes: object) -> Any:
    """A tiny Llama whose later layers change little, so that early exits are often right."""
    model = tiny_llama(**{"max_position_embeddings": 1024, **changes})
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight *= 0.5**number
            layer.mlp.down_proj.weight *= 0.5**number
    return model


def save_exit_friendly(folder: Path) -> Path:
    exit_friendly().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def arguments(model: Path, out: Path, **flags: object) -> list[str]:
    """Command-line arguments of a short greedy run on the examples in data/."""
    defaults = {
        "model": model, "dtype": "float32", "dataset": "top_v2", "data_path": ROOT / "data", "num_samples": 3,
        "max_steps": 10, "sample": False, "output_dir": out,
    }  # fmt: skip
    pairs = {**defaults, **flags}
    return [text for name, value in pairs.items() for text in (f"--{name}", str(value))]


def call(script: str, argv: list[str]) -> int:
    """Run a script's main in this process; its exit code."""
    module = import_module(script)
    configs = list(module.main.__annotations__)
    import typing

    hints = typing.get_type_hints(module.main)
    try:
        cli.run(module.main, [hints[name] for name in configs if name != "return"], argv)
    except SystemExit as end:
        return int(end.code or 0)


def start(script: str, argv: list[str], processes: int = 1) -> subprocess.Popen[str]:
    """Run a script in processes of its own, by torchrun where there are several."""
    command = [sys.executable, f"{script}.py", *argv]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
        command = [sys.executable, *launcher, f"{script}.py", *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def tables(out: Path, script: str) -> dict[str, pd.DataFrame]:
    """The tables of the only run in `out`: "" is the script's own, others go by their suffix."""
    stem = min((path.stem for path in out.glob(f"{script}_*.json")), key=len)
    return {path.stem.removeprefix(stem).strip("_"): pd.read_csv(path) for path in out.glob(f"{stem}*.csv")}


def steady(table: pd.DataFrame) -> pd.DataFrame:
    """A table without what may differ between equal runs."""
    return table.drop(columns=[name for name in VARYING if name in table])

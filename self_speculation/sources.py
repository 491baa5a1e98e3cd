"""The data sets there are: where each lives on the hub, and how its rows become prompts in LayerSkip's formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

FIRST_WORDS = 100  # of an article that cnn_dm_lm continues


@dataclass(frozen=True)
class Source:
    """Where a data set lives on the hub, the columns it must have, and how a row becomes an example."""

    columns: tuple[str, ...]
    example: Callable[[Row], Row]  # prompt and, where there is one, reference, messages
    shot: Callable[[Row], str] | None = None  # a row with its answer, to stand before a prompt
    repository: str | None = None
    name: str | None = None  # of the configuration within the repository
    split: str = "test"
    revision: str = "main"
    id_column: str = "id"
    files: tuple[str, ...] = ()  # other names of its files in a folder


def _summarization(article: str, summary: str, **where: Any) -> Source:
    return Source(
        columns=(article, summary),
        example=lambda row: {"prompt": f"Article: {row[article]}\nSummary:", "reference": row[summary]},
        shot=lambda row: f"Article: {row[article]}\nSummary: {' '.join(row[summary].split())}\n",
        **where,
    )


def _continuation(row: Row) -> Row:
    words = row["article"].split()
    return {"prompt": " ".join(words[:FIRST_WORDS]), "reference": " ".join(words[FIRST_WORDS:])}


def _turns(row: Row) -> Row:
    turns, references = listed(row["prompt"]), listed(row.get("reference"))
    return {
        "prompt": turns[0],
        "reference": references[0] if references else None,
        "messages": [{"role": "user", "content": turns[0]}],
    }


def _first_question(row: Row) -> Row:
    """What a user of ShareGPT asked first, and the answer there."""
    turns = [(turn["from"], turn["value"]) for turn in listed(row["conversations"])]
    asked = next((place for place, (who, _) in enumerate(turns) if who in ("human", "user")), 0)
    question = turns[asked][1]
    return {
        "prompt": question,
        "reference": turns[asked + 1][1] if asked + 1 < len(turns) else None,
        "messages": [{"role": "user", "content": question}],
    }


CNN_DM: dict[str, Any] = {
    "repository": "abisee/cnn_dailymail",
    "name": "3.0.0",
    "revision": "96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
}
SOURCES = {
    "cnn_dm_summarization": _summarization("article", "highlights", **CNN_DM),
    "xsum_summarization": _summarization(
        "document", "summary", repository="EdinburghNLP/xsum", revision="refs/convert/parquet"
    ),
    "cnn_dm_lm": Source(("article",), _continuation, files=("cnn_dm_summarization",), **CNN_DM),
    "human_eval": Source(
        ("prompt", "canonical_solution", "test", "entry_point"),
        lambda row: {"prompt": row["prompt"], "reference": row["canonical_solution"]},
        repository="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        id_column="task_id",
    ),
    "custom_jsonl": Source((), lambda row: row),
    "top_v2": Source(
        ("utterance", "semantic_parse"),
        lambda row: {"prompt": row["utterance"], "reference": row["semantic_parse"]},
        repository="WillHeld/top_v2",
    ),
    "chat_format": Source((), lambda row: row),
    "gsm8k": Source(
        ("question", "answer"),
        lambda row: {"prompt": f"Question: {row['question']}\n\nAnswer:", "reference": row["answer"]},
        lambda row: f"Question: {row['question']}\n\nAnswer: {row['answer']}\n\n",
        repository="openai/gsm8k",
        name="main",
        revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
    ),
    "mt_bench": Source(
        ("prompt",), _turns, repository="HuggingFaceH4/mt_bench_prompts", split="train", id_column="prompt_id"
    ),
    "sharegpt_gpt4": Source(("conversations",), _first_question, repository="shibing624/sharegpt_gpt4", split="train"),
}
"""Commits are pinned where they are known; `main` and `refs/convert/parquet` (the hub's own conversion) move."""


def listed(value: Any) -> list[Any]:
    """A list column, which a CSV file holds as JSON; a single text is a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return [value]
    return [] if value in (None, "") else list(value) if isinstance(value, (list, tuple)) else [value]

"""Text that the model itself writes, with the hidden states it had while writing: what an adapter will meet.

Every row has the same length and every row of a batch a prompt of the same length, so that writing a batch needs no
padding. Batches are files in the cache, made once; a killed run goes on with the ones that are missing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import distributed
from ..config import UsageError
from ..loading import Loaded, cache_folder, fingerprint
from .config import AdapterTrainConfig, DataConfig
from .data import batches, data_fingerprint, documents, is_held_out

VERSION = 1
FUNCTION = re.compile(r'^def \w+\([^\n]*:\n(?: *#[^\n]*\n)*( +)(?:"""|\'\'\')', re.MULTILINE)
MOST_A_DOCUMENT = 2  # prompts
TOP_K = 50  # most probable tokens that are drawn from


@dataclass(frozen=True)
class OwnText:
    """Rows of length + 1 tokens, and for the first `length` the hidden states [length, H] leaving the last layer."""

    folder: Path
    rows: int
    batch: int

    def __len__(self) -> int:
        return self.rows

    def row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [length + 1] and states [length, H] in bfloat16."""
        index, place = divmod(number, self.batch)
        tokens = np.load(_file(self.folder, index, "tokens"), mmap_mode="r")[place]
        states = np.load(_file(self.folder, index, "states"), mmap_mode="r")[place]
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(states.copy()).view(torch.bfloat16)


def own_text(loaded: Loaded, own: AdapterTrainConfig, data: DataConfig, seed: int) -> OwnText:
    """At least `--own_text` tokens, from the cache as far as they have been written before. Processes share the work.

    Raises:
        UsageError: chat prompts for a model whose tokenizer has no chat template, or data that gives no prompts.
    """
    length, count = data.sequence_length, -(-own.own_text // (data.sequence_length * own.own_batch))
    facts = [
        VERSION, fingerprint(loaded.model.hf_model), str(loaded.model.dtype), data_fingerprint(data, loaded.tokenizer),
        length, own.own_batch, own.own_chat, own.own_temperature, own.prompt_tokens, seed,
    ]  # fmt: skip
    folder = cache_folder() / "own_text" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    prompts = _prompts(loaded, own, data)
    from tqdm import tqdm

    for index in tqdm(range(count), desc="own text", unit="batch", disable=not distributed.is_main()):
        chat = int((index + 1) * own.own_chat) > int(index * own.own_chat)
        # every process reads all prompts, so that a batch's prompts do not depend on how many processes there are
        starts = [chat_start(loaded)] * own.own_batch if chat else list(itertools.islice(prompts, own.own_batch))
        if len(starts) < own.own_batch:
            raise UsageError(f"--own_text {own.own_text}: --data {data.data} gives prompts for {index} batches only")
        if index % distributed.world_size() == distributed.rank() and not _file(folder, index, "tokens").is_file():
            generator = torch.Generator(loaded.model.device).manual_seed(seed * 1_000_003 + index)
            _write(folder, index, *write_rows(loaded, starts, length, own.own_temperature, chat, generator))
    distributed.barrier()
    return OwnText(folder, count * own.own_batch, own.own_batch)


@torch.inference_mode()
def write_rows(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    length: int,
    temperature: float,
    asking: bool,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go on from prompts of equal length until every row has length + 1 tokens; ends of sequence are passed over.

    Half of the rows take the most probable token, the others draw at `temperature`. When `asking`, a row first draws
    a question at temperature 1, up to its first end-of-sequence id: the model knows what it is asked (Magpie, arXiv
    2406.08464).

    Returns:
        Token ids [rows, length + 1], and states [rows, length, H] leaving the last layer, before the final norm.
    """
    model, rows = loaded.model, len(prompts)
    tokens = torch.tensor(prompts, device=model.device)
    cache = model.new_cache(length + 1)
    ends = torch.tensor(loaded.eos_ids, device=model.device)
    questions = torch.full((rows,), asking, device=model.device)
    greedy = torch.arange(rows, device=model.device) % 2 == 0
    states, ids = [], tokens
    while tokens.shape[1] <= length:
        hidden = model.backbone.run(ids, cache, tokens.shape[1] - ids.shape[1], 0, model.backbone.layers)
        states.append(hidden)
        logits = model.backbone.head(hidden[:, -1:])[:, 0].to(model.device, torch.float32)
        logits[:, len(loaded.tokenizer) :] = -torch.inf
        heat = torch.where(questions, 1.0, temperature)[:, None]
        best, best_ids = logits.topk(min(TOP_K, logits.shape[-1]))
        drawn = best_ids.gather(1, torch.multinomial((best / heat).softmax(-1), 1, generator=generator))[:, 0]
        ids = torch.where(greedy & ~questions, best_ids[:, 0], drawn)[:, None]
        questions &= ~torch.isin(ids[:, 0], ends)
        tokens = torch.cat([tokens, ids], dim=1)
    return tokens, torch.cat(states, dim=1)


def chat_start(loaded: Loaded) -> list[int]:
    """The tokens that stand before a user's first words."""
    if not loaded.tokenizer.chat_template:
        raise UsageError(f"--own_chat: the tokenizer of {loaded.name} has no chat template")
    mark = "<<question>>"
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return loaded.tokenizer(str(text).split(mark)[0], add_special_tokens=False)["input_ids"]


def _prompts(loaded: Loaded, own: AdapterTrainConfig, data: DataConfig) -> Iterator[list[int]]:
    """`--prompt_tokens` tokens of each place where the model shall go on; documents in a scattered order."""
    texts = (document[1] for document in documents(data) if not is_held_out(document, data.held_out))
    for batch in batches(texts, 256):
        pieces = [text[max(0, end - 8 * own.prompt_tokens) : end] for text in batch for end in places(text)]
        for ids in loaded.tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else ():
            if len(ids) >= own.prompt_tokens:
                yield ids[-own.prompt_tokens :]


def places(text: str) -> list[int]:
    """Where a prompt may end: behind the docstring of a function, if the text is Python; else in the middle."""
    found = []
    for match in FUNCTION.finditer(text):
        quotes = text[match.end() - 3 : match.end()]
        end = text.find(quotes, match.end())
        if 0 < end - match.end() < 1200:
            found.append(end + 4 if text[end + 3 : end + 4] == "\n" else end + 3)
    if "def " in text or found:
        return found[:MOST_A_DOCUMENT]
    return [len(text) // 2]


def _write(folder: Path, index: int, tokens: torch.Tensor, states: torch.Tensor) -> None:
    """The tokens come last: a batch whose tokens are there is complete."""
    kept: dict[str, Any] = {
        "states": states.to(torch.bfloat16).cpu().view(torch.int16).numpy(),
        "tokens": tokens.cpu().numpy().astype(np.uint32),
    }
    for name, array in kept.items():
        draft = folder / f"{index}.{name}.{os.getpid()}.npy"
        np.save(draft, array)
        draft.replace(_file(folder, index, name))


def _file(folder: Path, index: int, name: str) -> Path:
    return folder / f"{index:05d}.{name}.npy"

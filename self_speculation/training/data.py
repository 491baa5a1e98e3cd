"""Documents -> a file of token ids, made once and kept -> training sequences by number, the same on every process."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from .. import cli, distributed, hub
from ..config import RunError, UsageError
from ..files import replacing_folder
from ..loading import cache_folder
from .config import DataConfig

Document = tuple[str, str]  # its place in the data (empty where places may change), and its text
READERS = {".txt": "text", ".py": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class TokenFile:
    """Tokens of many documents one after the other, each ended by EOS, cut into sequences."""

    tokens: np.ndarray  # [N], uint16 or uint32
    length: int  # tokens a sequence predicts

    def __len__(self) -> int:
        """Whole sequences of length + 1 tokens that overlap by one."""
        return max(0, (len(self.tokens) - 1) // self.length)

    def sequence(self, number: int) -> torch.Tensor:
        """[length + 1] token ids."""
        start = number * self.length
        return torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))


class Shuffled:
    """Sequence `n` of an endless stream that goes through a file in another order each time; depends on n alone."""

    def __init__(self, file: TokenFile, seed: int):
        self.file, self.seed = file, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, n: int) -> torch.Tensor:
        return self.file.sequence(self.number(n))

    def number(self, n: int) -> int:
        """Which sequence of the file comes as the n-th."""
        epoch, place = divmod(n, len(self.file))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._order = epoch, generator.permutation(len(self.file))
        return int(self._order[place])


def documents(config: DataConfig) -> Iterator[Document]:
    """Every document of `--data`, in a fixed order."""
    assert config.data is not None
    if config.data == "python_source":
        from .python_source import python_files

        yield from python_files()
        return
    for row in _rows(config):
        if not isinstance(row.get(config.text_field), str):
            raise UsageError(f"--text_field {config.text_field}: the data has the fields {', '.join(sorted(row))}")
        yield "", row[config.text_field]


def is_held_out(document: Document, share: float) -> bool:
    """Whether the document is kept from training; its place and its text decide, nothing else."""
    digest = hashlib.blake2b("\0".join(document).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def token_files(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, trains: bool = True
) -> tuple[TokenFile, TokenFile]:
    """(training, held-out) tokens of `--data`, from the cache where they have been made before.

    Args:
        trains: training tokens are needed too.

    Raises:
        RunError: there is not one sequence of what is needed.
    """
    folder = cache_folder() / "tokens" / data_fingerprint(config, tokenizer)
    distributed.on_main(lambda: _make_once(folder, config, tokenizer))
    train, held_out = (
        TokenFile(np.load(folder / f"{name}.npy", mmap_mode="r"), config.sequence_length)
        for name in ("train", "held_out")
    )
    if trains and not (len(train) and len(held_out)):  # too few documents to hold some of them out
        train, held_out = _parted(np.concatenate([train.tokens, held_out.tokens]), config)
        if len(held_out):
            cli.note(f"--data {config.data}: too few documents to hold some of them out whole, so the last "
                     f"{len(held_out)} of {len(train) + len(held_out)} sequences are held out")  # fmt: skip
    if not len(held_out):
        raise RunError(
            f"--data {config.data}: its {len(train.tokens) + len(held_out.tokens)} tokens are too few to hold out one "
            f"sequence of {config.sequence_length}; lower --sequence_length, raise --held_out or give more text"
        )
    return train, held_out


def _parted(tokens: np.ndarray, config: DataConfig) -> tuple[TokenFile, TokenFile]:
    """All but the last sequences to train on, and the last, at least one, held out; none where there are no two."""
    whole = TokenFile(tokens, config.sequence_length)
    count = min(max(1, round(config.held_out * len(whole))), len(whole) - 1)
    if count < 1:
        return whole, TokenFile(tokens[:0], config.sequence_length)
    cut = (len(whole) - count) * config.sequence_length
    return TokenFile(tokens[: cut + 1], config.sequence_length), TokenFile(tokens[cut:], config.sequence_length)


def batches(texts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` items, the last one shorter."""
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _make_once(folder: Path, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            arrays = _encode_all(config, tokenizer)
            with replacing_folder(folder) as draft:
                for name, tokens in zip(("train", "held_out"), arrays, strict=True):
                    np.save(draft / f"{name}.npy", tokens)


def _encode_all(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """All tokens as (training, held out) arrays; --max_tokens ends the reading."""
    from tqdm import tqdm

    kind: Any = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    count = 0
    bar = tqdm(desc="tokens", unit="tok", unit_scale=True, delay=0.1, disable=not distributed.is_main())
    with bar:  # delayed, so that none is drawn before data that cannot be read is refused
        for batch in batches(documents(config), 256):
            encoded = tokenizer([text for _, text in batch], add_special_tokens=False)["input_ids"]
            for document, ids in zip(batch, encoded, strict=True):
                held_out = is_held_out(document, config.held_out)
                parts[held_out].append(np.array([*ids, tokenizer.eos_token_id], dtype=kind))
                count += 0 if held_out else len(ids) + 1
                bar.update(len(ids) + 1)
            if config.max_tokens and count >= config.max_tokens:
                break
    train, held_out_tokens = (np.concatenate(part) if part else np.empty(0, dtype=kind) for part in parts)
    return train[: config.max_tokens or None], held_out_tokens


def data_fingerprint(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Names the tokens by what they depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    if config.data == "python_source":
        from .python_source import RULES, packages

        source: Any = [RULES, [list(map(str, package)) for package in packages()]]
    else:
        source = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in local_files(config.data or "")]
    parts = [
        config.data, config.data_config, config.data_split, config.text_field, config.held_out, config.max_tokens,
        source, vocabulary, tokenizer.eos_token_id,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def local_files(name: str) -> list[Path]:
    """Files that `--data` names: itself, what its folder holds, or what matches its pattern; [] for a hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
    return [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]


def _is_path(name: str) -> bool:
    """Whether `--data` cannot be a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "*" in name or Path(name).suffix in READERS


def _rows(config: DataConfig) -> Iterator[dict[str, Any]]:
    """Rows of local files or of a hub data set, read as a stream."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said below
    files = local_files(config.data or "")
    try:
        if not files:
            if _is_path(config.data or ""):
                missing = "no such files in this folder" if Path(config.data or "").is_dir() else "no such file"
                raise RunError(f"--data {config.data}: {missing}; {', '.join(READERS)} are read")
            hub.go_offline_if_unreachable()
            yield from datasets.load_dataset(config.data, config.data_config, split=config.data_split, streaming=True)
        for file in files:
            if file.suffix not in READERS:
                raise UsageError(f"--data {config.data}: {file.name} is none of {', '.join(READERS)}")
            if READERS[file.suffix] == "text":  # one document a file
                yield {config.text_field: file.read_text(encoding="utf-8", errors="replace")}
            else:
                reader = READERS[file.suffix]
                yield from datasets.load_dataset(reader, data_files=str(file), split="train", streaming=True)
    except (UsageError, RunError, KeyboardInterrupt):
        raise
    except StopIteration:
        raise RunError(f"--data {config.data}: there are no rows in it") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"--data {config.data}: cannot be read ({type(error).__name__}: {reason})") from error

"""Answers of a model kept on disk, keyed by the model and by everything that shapes an answer."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from . import distributed
from .config import RunError


class ResponseCache:
    """One file a process, `<path>_rank<r>.db`; answers are looked up in the files of all.

    Args:
        path: what `--use_cache` says.
        key: the model and its settings, as text; answers of any other are not found.
    """

    def __init__(self, path: str, key: str):
        self.path, self.key = path, key

    def add_partial(self, kind: str, request: Iterable[Any], answer: Any) -> None:
        """Keep an answer; lm-eval's own model calls this for each log-likelihood."""
        self._own[self._hash(kind, request)] = answer

    def get(self, kind: str, request: Iterable[Any]) -> Any:
        """The answer to a request, None when there is none."""
        name = self._hash(kind, request)
        return next((answer for file in self._all if (answer := file.get(name)) is not None), None)

    def close(self) -> None:
        """Write everything out."""
        for file in [*self.__dict__.pop("_all", []), *([self.__dict__.pop("_own")] if "_own" in self.__dict__ else [])]:
            file.close()

    @cached_property
    def _own(self) -> Any:
        return self._open(f"{self.path}_rank{distributed.rank()}.db", "c")

    @cached_property
    def _all(self) -> list[Any]:
        return [self._open(name, "r") for name in sorted(glob.glob(f"{glob.escape(self.path)}_rank*.db"))]

    def _open(self, name: str, mode: str) -> Any:
        from sqlitedict import SqliteDict

        try:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            return SqliteDict(name, autocommit=True, flag=mode)
        except Exception as error:
            raise RunError(f"--use_cache {self.path}: cannot be opened: {error}") from None

    def _hash(self, kind: str, request: Iterable[Any]) -> str:
        return hashlib.sha256(json.dumps([self.key, kind, *request], default=str).encode()).hexdigest()

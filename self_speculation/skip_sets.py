"""Skip sets that search.py found earlier, for the models they were found for."""

from __future__ import annotations

import json
from pathlib import Path

from .loading import Loaded, fingerprint

FOLDER = Path(__file__).resolve().parent.parent / "data" / "skip_sets"


def ready_set(loaded: Loaded) -> Path | None:
    """The file of the set found for these very weights, None if there is none."""
    mine = fingerprint(loaded.model.hf_model)
    for path in sorted(FOLDER.glob("*.json")):
        try:
            if json.loads(path.read_text(encoding="utf-8")).get("fingerprint") == mine:
                return path
        except (OSError, ValueError, AttributeError):
            continue
    return None

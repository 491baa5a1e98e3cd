"""The Hugging Face hub, where it can be reached."""

from __future__ import annotations

import functools
import re
import socket
import sys
import urllib.request
from urllib.parse import urlsplit

SECONDS = 5.0  # to wait for a connection
_RESTRICTED = re.compile(r"\bgated\b|\b40[13] (client error|forbidden|unauthorized)", re.IGNORECASE)


@functools.cache
def go_offline_if_unreachable() -> None:
    """Let the hub's clients use only what is in their caches where no connection to the hub can be made.

    They would try for half a minute first, and say so line by line. Behind a proxy they are left to themselves.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    url = urlsplit(constants.ENDPOINT)
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=SECONDS).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:  # it has copied the constant
            datasets.config.HF_HUB_OFFLINE = True


def restricted(error: str) -> bool:
    """Whether the text of an error says that the hub gives something to some only."""
    return _RESTRICTED.search(error) is not None

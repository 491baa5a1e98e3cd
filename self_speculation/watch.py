"""Processes that learn at once when another one dies, on whatever machine it runs.

Every process holds a connection to the first one. The system closes the connections of a process that is killed; one
that leaves in order says so before. What the first process learns it passes on to the others.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from functools import partial
from typing import Any

LEFT, FAILED, DIED = b"l", b"f", b"d"  # said before leaving (all is well, or what went wrong); what the first passes on
GRACE_S = 15.0  # how long the main thread may take to end once another process is lost
KEY = "self_speculation/watch"


class Watch:
    """One process's connection to the others.

    When one of them is lost, the main thread is interrupted (KeyboardInterrupt); if it does not end, since it waits
    inside a collective operation, the process ends with exit code 1.

    Attributes:
        lost: the process that was lost and what it said went wrong ("" where it has reported that itself, None where
            it died without a word); None as long as none is lost.
    """

    def __init__(self, store: Any, rank: int, world_size: int, host: str):
        self.rank = rank
        self.lost: tuple[int, str | None] | None = None
        self._leaving = False
        self._known = threading.Event()
        self._peers: dict[socket.socket, int] = {}
        if rank == 0:
            listener = socket.create_server(("", 0), backlog=world_size)
            secret = os.urandom(8).hex()
            store.set(KEY, f"{listener.getsockname()[1]} {secret}")
            work = partial(self._watch_all, listener, secret, world_size)
        else:
            port, secret = store.get(KEY).decode().split()
            connection = socket.create_connection((host, int(port)), timeout=30)
            connection.settimeout(None)
            connection.sendall(f"{secret}{rank:8d}".encode())
            self._peers[connection] = 0
            work = partial(self._watch_first, connection)
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> tuple[int, str | None] | None:
        """The process that was lost, if it becomes known within so many seconds."""
        self._known.wait(seconds)
        return self.lost

    def leave(self, error: str | None) -> None:
        """Tell the others that this process ends: None where all is well, "" where it has reported what is not."""
        self._leaving = True
        self._tell(LEFT if error is None else _message(FAILED, self.rank, error))

    def _watch_all(self, listener: socket.socket, secret: str, world_size: int) -> None:
        with selectors.DefaultSelector() as ready:
            while len(self._peers) < world_size - 1:
                peer, _ = listener.accept()
                peer.settimeout(10)
                hello = _receive(peer, len(secret) + 8).decode(errors="replace")
                peer.settimeout(None)
                if hello.startswith(secret):
                    self._peers[peer] = int(hello[len(secret) :])
                    ready.register(peer, selectors.EVENT_READ)
            listener.close()
            while ready.get_map():
                for key, _ in ready.select():
                    ended: Any = key.fileobj
                    ready.unregister(ended)
                    self._hear(ended)

    def _watch_first(self, connection: socket.socket) -> None:
        self._hear(connection)

    def _hear(self, peer: socket.socket) -> None:
        """Take what a process says at its end, or that it says nothing."""
        word = _receive(peer, 1)
        if word == LEFT or self.lost is not None or self._leaving:
            return
        rank, error = self._peers[peer], None
        if word:
            rank, length = int(_receive(peer, 8)), int(_receive(peer, 8))
            error = _receive(peer, length).decode(errors="replace") if word == FAILED else None
        self.lost = rank, error
        if self.rank == 0:
            self._tell(_message(DIED if error is None else FAILED, rank, error or ""))
        self._known.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(GRACE_S)
        os._exit(1)

    def _tell(self, message: bytes) -> None:
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.sendall(message)


def _message(word: bytes, rank: int, text: str) -> bytes:
    encoded = text.encode()
    return word + f"{rank:8d}{len(encoded):8d}".encode() + encoded


def _receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer when the other side is gone."""
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < count and (more := connection.recv(count - len(received))):
            received += more
    return received

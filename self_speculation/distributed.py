"""torchrun or plain python: who am I, what is my share, and waiting for the others.

Nothing here imports torch until several processes really have to meet.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .config import RunError, UsageError
from .watch import Watch

T = TypeVar("T")

_watch: Watch | None = None
_store: Any = None  # what processes can count in together, once they have joined
_one_model = False  # all processes hold one model together
_counters = 0  # made so far; processes make the same ones in the same order


def rank() -> int:
    """This process's number, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """This process's number on its own machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """How many processes take part, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_size() -> int:
    """How many processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_main() -> bool:
    return rank() == 0


def join() -> None:
    """Join the process group: gloo, and for what is on GPUs nccl where each process has one of its own (which becomes
    its current one, where nccl expects what is exchanged). Does nothing for a single process.

    From then on a process that dies interrupts the others; see `lost`.
    """
    if world_size() == 1:
        return
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        global _store, _watch
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        own_gpu = gpus >= local_size()
        if own_gpu:
            torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        _store, number, count = next(dist.rendezvous("env://"))
        limit = timedelta(hours=1)
        dist.init_process_group(backend, store=_store, rank=number, world_size=count, timeout=limit)
        if not _threads_were_chosen():
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // local_size()))
        with contextlib.suppress(OSError):  # without it the launcher and the next collective operation notice a death
            _watch = Watch(_store, number, count, os.environ["MASTER_ADDR"])


def _threads_were_chosen() -> bool:
    """Whether OMP_NUM_THREADS was set for this run; torchrun sets it to 1 where it was not."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    try:  # what the launcher was given itself
        return b"OMP_NUM_THREADS=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True


def lost(seconds: float = 0) -> tuple[int, str | None] | None:
    """The process that was lost, if it becomes known within so many seconds, and its error (see `Watch.lost`)."""
    return None if _watch is None else _watch.wait(seconds)


def speaks() -> bool:
    """Whether this process is the one that prints: the first, or the second once the first is lost."""
    return rank() == (1 if (gone := lost()) and gone[0] == 0 else 0)


def leave(error: str | None = None) -> None:
    """Leave the process group, if one was joined, and tell the others of this process's error (see `Watch.leave`)."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    if _watch is not None:
        _watch.leave(error)
    if lost():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a group with a process missing cannot be left in order
    if dist.is_initialized():
        dist.destroy_process_group()


def hold_one_model() -> None:
    """From now on the processes hold one model together: each does all the work, and the first alone writes."""
    global _one_model
    join()
    _one_model = world_size() > 1


def one_model() -> bool:
    return _one_model


def workers() -> int:
    """How many processes share the work out."""
    return 1 if _one_model else world_size()


def follows() -> bool:
    """Whether this process only helps to run the model of the first one."""
    return _one_model and not is_main()


def barrier() -> None:
    """Wait until every process has come here."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def broadcast(value: T, source: int = 0) -> T:
    """The value that process `source` holds, on every process."""
    if world_size() == 1:
        return value
    import torch.distributed as dist

    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def from_main(items: Iterable[T]) -> Iterator[T]:
    """The items of the main process, one by one as it comes to them, in every process."""
    items = iter(items)
    while box := broadcast(list(islice(items, 1)) if is_main() else []):
        yield box[0]


def gather(value: T) -> list[T]:
    """The values of all processes, by rank, in the main process; [] in the others."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world_size()
    dist.gather_object(value, values if is_main() else None)
    return values if is_main() else []


def share(items: Sequence[T]) -> list[T]:
    """This process's part of `items`: every `world_size`-th, from its own rank on."""
    if _one_model:
        return list(items)
    return list(items[rank() :: world_size()])


class Counter:
    """A number that all processes add to. Each process must make the same counters in the same order."""

    def __init__(self) -> None:
        global _counters
        _counters += 1
        self._name, self._own = f"self_speculation/counter{_counters}", 0

    def add(self, amount: int) -> int:
        """The number after adding."""
        self._own += amount
        return self._own if _store is None or _one_model else _store.add(self._name, amount)


class Progress:
    """One bar for all processes, drawn by the first. The arguments are tqdm's."""

    def __init__(self, total: int, **settings: Any):
        from tqdm import tqdm

        self._done = Counter()
        self._bar = tqdm(total=total, disable=not is_main(), **settings)

    def add(self, amount: int = 1) -> None:
        """So much more is done, in this process."""
        done = self._done.add(amount)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def pull(items: Sequence[T]) -> Iterator[T]:
    """The items that fall to this process: each goes to the process that first asks for another one.

    So no process idles while items are left. Every process must call this with the same items.
    """
    counter = Counter()

    def take() -> Iterator[T]:
        while (place := counter.add(1) - 1) < len(items):
            yield items[place]

    return take()


def keep_only_main() -> None:
    """Let the main process go on as if it were alone, and the others end."""
    if not is_main():
        raise SystemExit(0)
    os.environ["WORLD_SIZE"] = "1"


def on_main(compute: Callable[[], T]) -> T:
    """What `compute` returns in the main process, in every process; an error it raises is raised in all of them."""
    result: tuple[T | None, Exception | None] = (None, None)
    if is_main():
        try:
            result = (compute(), None)
        except (UsageError, RunError) as error:
            result = (None, error)
    value, failure = broadcast(result)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Work on this process's own share: an error in it is this process's alone, so it is the one to report it."""
    try:
        yield
    except Exception as error:
        error.failed_rank = rank()  # type: ignore[attr-defined]
        raise

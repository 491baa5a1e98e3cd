"""torchrun or plain python: who am I, what is my share, and waiting for the others.

Nothing here imports torch until several processes really have to meet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from .config import RunError, UsageError

T = TypeVar("T")


def rank() -> int:
    """This process's number, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """This process's number on its own machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """How many processes take part, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    return rank() == 0


def join(timeout_minutes: float = 60) -> None:
    """Join the process group: nccl where each process has a GPU of its own (which becomes its current one, where nccl
    expects what is exchanged), gloo elsewhere. Does nothing for a single process."""
    if world_size() == 1:
        return
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        own_gpu = gpus >= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if own_gpu:
            torch.cuda.set_device(local_rank())
        backend = "nccl" if own_gpu else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def leave() -> None:
    """Leave the process group, if one was joined."""
    if world_size() == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


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
    return list(items[rank() :: world_size()])


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

"""A persistent Optuna study of skip sets: what it was made with, what it holds, and which set to try next.

The study in the storage holds finished trials only. A trial is written in one transaction once its score is known, so a
killed process leaves nothing half done, and no two processes can be in each other's way. The sampler of each process
works on a copy in memory, which is brought up to date before each proposal.
"""

from __future__ import annotations

import contextlib
import json
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from .config import RunError, UsageError, require_folder
from .modeling import SkipSet
from .skip_search import TRIAL_COLUMNS, Row

STARTUP_TRIALS = 10
BUSY_SECONDS = 120  # how long one process waits for another that writes to the same SQLite file


class SkipStudy:
    """The study `name` in `storage`, made if it is not there.

    Args:
        storage: an SQLAlchemy URL, or a file: an Optuna journal (.log, .journal) or an SQLite database.
        made_with: what its scores depend on (weights, samples, settings), compared with what the study was made with.
        maximize: whether higher values are better.
        folder: where a lock for storages that are no file may lie.

    Raises:
        UsageError: the study was made with something else.
        RunError: the storage cannot be used.
    """

    def __init__(
        self, storage: str, name: str, made_with: dict[str, Any], layers: int, *, maximize: bool, folder: Path
    ):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name, self.layers, self.maximize = name, layers, maximize
        self.space: dict[str, BaseDistribution] = {name: CategoricalDistribution((False, True))
                                                   for name in parameters(layers)}  # fmt: skip
        file = storage.removeprefix("sqlite:///") if storage.startswith("sqlite:///") or "://" not in storage else None
        lock = Path(f"{file or folder / 'search'}.trials.lock")  # <journal>.lock is the journal's own
        require_folder("storage", str(lock), file=True)
        self.lock, self.storage = FileLock(lock), storage
        direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
        with _explained(storage, None if lock.exists() else lock), self.lock:
            self.study = optuna.create_study(
                storage=open_storage(storage), study_name=name, direction=direction, load_if_exists=True
            )
            before = self.study.user_attrs.get("made_with")
            if before is None:
                self.study.set_user_attr("made_with", made_with)
            self._close_unfinished()
        if before is not None:
            _refuse_another(name, storage, before, json.loads(json.dumps(made_with, default=str)))

    def _close_unfinished(self) -> None:
        """A search writes finished trials only: others are left from a process that is no more."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                if trial.state == TrialState.WAITING:
                    self.study.ask()
                self.study.tell(trial.number, state=TrialState.FAIL)

    def kept(self, name: str, compute: Callable[[], Any]) -> Any:
        """What is kept under this name in the study; computed when nothing is."""
        if name not in self.study.user_attrs:
            value = compute()
            with self.lock:
                if name not in self.study.user_attrs:
                    self.study.set_user_attr(name, value)
        return self.study.user_attrs[name]

    def trials(self) -> list[FrozenTrial]:
        """The finished trials."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def count(self) -> int:
        """How many trials are finished."""
        return len(self.trials())

    def add(self, skip: SkipSet, value: float, row: Row, total: int) -> Row | None:
        """Add a finished trial and return it as a row; None when there are `total` already."""
        attrs = {"row": json.dumps(row), "key": uuid.uuid4().hex}
        trial = create_trial(
            value=value, params=to_params(skip, self.layers), distributions=self.space, user_attrs=attrs
        )
        with self.lock:
            if self.count() >= total:
                return None
            self.study.add_trial(trial)
            added = next(each for each in reversed(self.trials()) if each.user_attrs["key"] == attrs["key"])
        return _row(added, self.best_trial())

    def best_trial(self) -> FrozenTrial:
        """The trial of the best value."""
        return self.study.best_trial

    def rows(self) -> list[Row]:
        """The finished trials as rows, with the best value so far."""
        best: FrozenTrial | None = None
        rows = []
        for trial in sorted(self.trials(), key=lambda trial: trial.number):
            if best is None or self._better(trial, best):
                best = trial
            rows.append(_row(trial, best))
        return rows

    def _better(self, one: FrozenTrial, other: FrozenTrial) -> bool:
        assert one.value is not None and other.value is not None
        return one.value > other.value if self.maximize else one.value < other.value

    def best(self, count: int, allowed: Callable[[SkipSet], bool]) -> list[tuple[SkipSet, Row]]:
        """The `count` best allowed sets, best first, each once."""
        found: dict[SkipSet, Row] = {}
        for row in sorted(self.rows(), key=lambda row: -row["value"] if self.maximize else row["value"]):
            skip = SkipSet.of(row["skip_attn"] or (), row["skip_mlp"] or ())
            if allowed(skip):
                found.setdefault(skip, row)
        return list(found.items())[:count]


def _row(trial: FrozenTrial, best: FrozenTrial) -> Row:
    row = {**json.loads(trial.user_attrs["row"]), **to_skip(trial.params).columns(), "trial": trial.number,
           "value": trial.value, "best_value": best.value}  # fmt: skip
    return {name: row.get(name) for name in TRIAL_COLUMNS}


class Proposer:
    """Proposes sets: first `starts`, then what Optuna's TPE makes of all trials so far.

    A set that was tried before is changed in one sub-layer after the other, at random, until it is a new one.
    """

    def __init__(self, study: SkipStudy, starts: Iterable[SkipSet], seed: int):
        direction = study.study.direction
        self.shared, self.starts, self.rng = study, iter(starts), random.Random(seed)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True)
        self.own = optuna.create_study(sampler=sampler, direction=direction)
        self.seen: set[int] = set()
        self.tried: set[SkipSet] = set()

    def next(self) -> SkipSet:
        """The next set to try."""
        new = [trial for trial in self.shared.trials() if trial.number not in self.seen]
        for trial in new:
            self.seen.add(trial.number)
            self.tried.add(to_skip(trial.params))
            self.own.add_trial(create_trial(value=trial.value, params=trial.params, distributions=self.shared.space))
        skip = next((start for start in self.starts if start not in self.tried), None)
        if skip is None:
            asked = self.own.ask(self.shared.space)
            skip = to_skip(asked.params)
            self.own.tell(asked, state=TrialState.FAIL)  # it comes back from the shared study when it has a value
        for _ in range(2 * self.shared.layers):
            if skip not in self.tried:
                break
            kind, index = self.rng.randrange(2), self.rng.randrange(self.shared.layers)
            skip = SkipSet(skip.attn ^ {index}, skip.mlp) if kind == 0 else SkipSet(skip.attn, skip.mlp ^ {index})
        self.tried.add(skip)
        return skip


def parameters(layers: int) -> list[str]:
    """A parameter for each sub-layer: skipped or not."""
    return [f"{kind}_{index}" for kind in ("attn", "mlp") for index in range(layers)]


def to_params(skip: SkipSet, layers: int) -> dict[str, bool]:
    """A skip set as the parameters of a trial."""
    return {f"{kind}_{i}": i in ids for kind, ids in (("attn", skip.attn), ("mlp", skip.mlp)) for i in range(layers)}


def to_skip(params: dict[str, Any]) -> SkipSet:
    """The skip set of a trial."""
    chosen = [name.split("_") for name, skipped in params.items() if skipped]
    return SkipSet.of(*([int(index) for kind, index in chosen if kind == wanted] for wanted in ("attn", "mlp")))


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """A journal file, an SQLite file that waits its turn, or a database server."""
    if "://" not in storage and storage.endswith((".log", ".journal")):
        from optuna.storages.journal import JournalFileBackend

        return optuna.storages.JournalStorage(JournalFileBackend(storage))
    url = storage if "://" in storage else f"sqlite:///{storage}"
    engine: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if url.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(url, engine_kwargs=engine)


def _refuse_another(name: str, storage: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        changes = ", ".join(f"{key} was {before.get(key)}, now {now.get(key)}" for key in differing)
        raise UsageError(f"--study_name {name}: the study in {storage} was made with other things: {changes}; "
                         "give another --study_name")  # fmt: skip


@contextlib.contextmanager
def _explained(storage: str, lock: Path | None) -> Iterator[None]:
    """What a storage raises, in one line; `lock` is then left behind by none."""
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:  # the database's own client raises many kinds
        if lock is not None:
            lock.unlink(missing_ok=True)
        reason = " ".join(str(error).split()).split(" [SQL:")[0].split(" (Background")[0][:200]
        raise RunError(f"--storage {storage}: cannot be used: {reason}") from error

"""Hugging Face's own decoding as strategies to compare with, behind the interface of `generation.Generator`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers

from .config import GenerationConfig, RunError, require
from .decoding import Decoded
from .generation import Generator
from .loading import Loaded
from .sampling import sample_seed
from .stats import Stats, now
from .stopping import Stopper

PEERS = ("hf", "hf_early_exit", "hf_prompt_lookup")


class PeerStats(Stats):
    """`generate` does not tell its rounds. One call for a single token is the prefill, the rest of the time decodes."""

    @property
    def decode_tokens(self) -> int:
        return max(0, self.new_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 and self.decode_tokens else None

    def row(self) -> dict[str, float | int | None]:
        return {**super().row(), "rounds": None, "drafted": None, "accepted": None}


class Peer(ABC):
    """Another decoder; it answers one prompt at a time."""

    @abstractmethod
    def __call__(self, prompt: Sequence[int], *, sample_id: object = 0) -> Decoded:
        """Generate from token ids."""

    def each(self, prompts: Iterable[tuple[object, Sequence[int]]]) -> Iterator[tuple[object, Decoded]]:
        """Generate from (sample id, prompt) pairs, one after the other."""
        for sample_id, prompt in prompts:
            yield sample_id, self(prompt, sample_id=sample_id)

    @staticmethod
    def answer(tokens: Sequence[int], stopper: Stopper, stats: Stats) -> Decoded:
        """The new tokens of one prompt, cut where `stopper` ends them."""
        stopper.push(tokens)
        stats.new_tokens = len(stopper.tokens)
        return Decoded(stopper.tokens, stopper.text(), stopper.reason or "length", stats)


class PeerGenerator(Peer):
    """Answers prompts with `model.generate`.

    Args:
        name: `hf`, `hf_early_exit` (assistant_early_exit, with `config.exit_layer` and `config.num_speculations`) or
            `hf_prompt_lookup` (prompt_lookup_num_tokens = `config.num_speculations`).
        config: settings without anything left open.
    """

    def __init__(self, name: str, loaded: Loaded, config: GenerationConfig, *, seed: int = 42):
        assert name in PEERS
        config = replace(config.resolved(), batch_size=1)
        self.name, self.loaded, self.config, self.seed = name, loaded, config, seed
        self.plain = Generator(loaded, config.autoregressive(), seed=seed)
        if name == "hf_early_exit":
            loaded.model.check_exit_layer(config.exit_layer)
            require(not config.stop_words, "stop_words", config.stop_words,
                    "transformers hands no stop strings on to its early exit; leave out hf_early_exit")  # fmt: skip

    def __call__(self, prompt: Sequence[int], *, sample_id: object = 0) -> Decoded:
        """Generate from token ids."""
        loaded, config = self.loaded, self.config
        eos = () if config.ignore_eos else loaded.eos_ids
        stopper = Stopper(
            eos_ids=eos,
            stop_ids=config.stop_token_ids or (),
            stop_strings=config.stop_words or (),
            budget=min(config.max_steps or 0, max(1, loaded.model.max_positions - len(prompt))),
            decode=loaded.decode,
        )
        device, ids = loaded.model.device, loaded.model.ids(prompt)
        stats = PeerStats(prompt_tokens=len(prompt))
        try:
            with self._settings(stopper) as settings:
                started = now(device)
                self._generate(ids, settings, max_new_tokens=1)
                stats.prefill_s = now(device) - started
                torch.manual_seed(sample_seed(self.seed, sample_id))
                extra = self._strategy() if stopper.budget > 1 else {}
                started = now(device)
                tokens = self._generate(ids, settings, max_new_tokens=stopper.budget, **extra)
                stats.decode_s = max(0.0, now(device) - started - stats.prefill_s)
        except (AttributeError, TypeError, IndexError, KeyError, ValueError) as error:
            raise RunError(f"--compare {self.name}: transformers cannot do this with this model ({error})") from error
        return self.answer(tokens, stopper, stats)

    def columns(self) -> dict[str, Any]:
        """The settings as columns of a result row; those that do not apply are left out."""
        row = {**self.plain.columns(), "generation_strategy": self.name, "compile": None}
        if self.name != "hf":
            row["num_speculations"] = self.config.num_speculations
        if self.name == "hf_early_exit":
            row["exit_layer"] = self.config.exit_layer
        return row

    def _strategy(self) -> dict[str, int]:
        if self.name == "hf_early_exit":
            return {"assistant_early_exit": self.config.exit_layer}
        return {"prompt_lookup_num_tokens": self.config.num_speculations} if self.name == "hf_prompt_lookup" else {}

    def _generate(self, ids: torch.Tensor, settings: dict[str, Any], **more: Any) -> list[int]:
        model: Any = self.loaded.model.hf_model
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more)
        return output[0, ids.shape[1] :].tolist()

    @contextlib.contextmanager
    def _settings(self, stopper: Stopper) -> Iterator[dict[str, Any]]:
        """Arguments of `generate`. Assistants read the model's own generation config, so it is lent one."""
        config, model = self.config, self.loaded.model.hf_model
        own = model.generation_config
        lent: dict[str, Any] = {
            "do_sample": not config.greedy,
            "eos_token_id": sorted(stopper.end_ids) or None,
            "pad_token_id": own.pad_token_id if own.pad_token_id is not None else 0,
            "repetition_penalty": config.repetition_penalty,
            "no_repeat_ngram_size": config.no_repeat_ngram_size,
            "num_assistant_tokens": max(1, config.num_speculations),
            "num_assistant_tokens_schedule": "constant",
        }
        if not config.greedy:
            lent |= {"temperature": config.temperature, "top_k": config.top_k or 0, "top_p": config.top_p}
            lent |= {"min_p": config.min_p} if config.min_p else {}
        missing = range(len(self.loaded.tokenizer), self.loaded.model.vocab_size)
        if missing:
            lent["suppress_tokens"] = list(missing)
        model.generation_config = transformers.GenerationConfig(**lent)
        strings = {"stop_strings": list(stopper.stop_strings), "tokenizer": self.loaded.tokenizer}
        try:
            yield strings if stopper.stop_strings else {}
        finally:
            model.generation_config = own

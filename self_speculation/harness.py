"""The toolkit as a model of lm-evaluation-harness: its log-likelihoods are lm-eval's own, its texts are ours.

    python -m self_speculation.harness --model self_speculation \\
        --model_args pretrained=smollm2-135m,generation_strategy=self_speculative,exit_layer=8 --tasks ...

is lm-eval's own command line with this model in it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import simple_parse_args_string

from . import cli, distributed
from .config import GenerationConfig, ModelConfig, RunError, UsageError, from_options, require
from .decoding import Decoded
from .generation import Generator
from .loading import Loaded, fingerprint, load
from .responses import ResponseCache
from .task_settings import FIELDS, combined, explicit_level, level, unknown

Row = dict[str, Any]


@register_model("self_speculation")
class SelfSpeculativeLM(HFLM):
    """A loaded model under lm-eval.

    The main process runs lm-eval; the others `serve` it, each answering its part of every batch of requests.

    Args:
        loaded: model and tokenizer.
        generation: settings given explicitly; they win over `gen_kwargs`, which win over a request's own.
        gen_kwargs: generation arguments as lm-eval names them.
        use_cache: where answers are kept.
        on_text: is given a row and the text for each text generated.
    """

    def __init__(
        self,
        loaded: Loaded,
        generation: GenerationConfig,
        *,
        gen_kwargs: dict[str, Any] | None = None,
        seed: int = 42,
        use_cache: str | None = None,
        notify: Callable[[str], None] = lambda message: None,
        on_text: Callable[[Row, str], None] = lambda row, text: None,
    ):
        with _quiet():
            super().__init__(
                pretrained=loaded.model.hf_model, tokenizer=loaded.tokenizer, batch_size=generation.batch_size
            )
        self.loaded = loaded
        self.generator = Generator(loaded, generation, seed=seed, notify=notify)
        self.stronger = [explicit_level(generation), level(gen_kwargs or {})]
        if (steps := (self.stronger[1] | self.stronger[0]).get("max_steps")) is not None:
            self._room(steps)
        self.notify, self.on_text = notify, on_text
        self.rows: dict[tuple[str | None, str], Row] = {}  # (task, sample id) -> figures of its text, here or elsewhere
        self.responses: ResponseCache | None = None
        self._told: set[str] = set()
        if use_cache:
            about = (fingerprint(loaded.model.hf_model), loaded.name, loaded.model.dtype_name, self.device.type)
            self.responses = ResponseCache(use_cache, json.dumps([*about, _settings(self.generator)]))
            self.set_cache_hook(self.responses)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> SelfSpeculativeLM:
        """As `create_from_arg_obj`, from `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> SelfSpeculativeLM:
        """From lm-eval's `--model_args`: `pretrained` and fields of `ModelConfig` and `GenerationConfig`."""
        distributed.broadcast(("create", arg_dict, additional_config))
        return create(arg_dict, additional_config)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, whether it is the greedy text) of each continuation."""
        return self._answer("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, as lm-eval's own model gives it for the same settings."""
        return self._answer("generate_until", requests)

    def get_model_info(self) -> dict:
        """Nothing: lm-eval's own version asks the hub."""
        return {}

    def settings(self) -> Row:
        """Columns that hold for every sample; sampling and budget are a request's own."""
        return {name: value for name, value in self.generator.columns().items() if name not in FIELDS}

    def close(self) -> None:
        """Write out the kept answers."""
        if self.responses is not None:
            self.responses.close()

    def serve(self) -> None:
        """Answer what the main process hands out, until it calls `dismiss`."""
        while (work := distributed.broadcast(None)) is not None:
            self._take_part(*work)

    @staticmethod
    def dismiss() -> None:
        """Let the other processes go."""
        if distributed.world_size() > 1:
            with contextlib.suppress(RuntimeError):  # they may have failed already
                distributed.broadcast(None)

    def _answer(self, kind: str, instances: Sequence[Instance]) -> list[Any]:
        """Answers to all requests: kept ones from the cache, the others from all processes."""
        if kind != "generate_until" and self.generator.config.generation_strategy == "self_speculative":
            names = ", ".join(sorted({str(instance.task_name) for instance in instances}))
            self._tell(f"{names}: log-likelihoods are scored in one pass, so self-speculative decoding cannot speed "
                       "this task up; its scores are the whole model's")  # fmt: skip
        requests = self._numbered(instances)
        answers = {place: self._kept(kind, request) for place, request in enumerate(requests)}
        missing = [place for place, answer in answers.items() if answer is None]
        if missing:
            new = self._hand_out(kind, [requests[place] for place in missing])
            answers.update(zip(missing, new, strict=True))
        return [answers[place] for place in range(len(requests))]

    def _numbered(self, instances: Sequence[Instance]) -> list[Instance]:
        """Copies without documents; `idx` counts how often the same request has come before (lm-eval's repeats)."""
        seen: dict[int, int] = {}
        requests = []
        for instance in instances:
            repeat = seen[id(instance)] = seen.get(id(instance), -1) + 1
            about = (instance.task_name, instance.doc_id, instance.repeats)
            requests.append(Instance(instance.request_type, {}, instance.args, repeat, about))
        return requests

    def _kept(self, kind: str, request: Instance) -> Any:
        if self.responses is None:
            return None
        if kind != "generate_until":
            return self.responses.get(kind, request.args)
        generator = self._with_settings_of(request)
        answer = self.responses.get(kind, _key(generator, request)) if generator.config.greedy else None
        if answer is not None:
            row = self._row(generator, request) | {"note": "text kept from an earlier run"}
            self.rows[row["dataset"], row["sample_id"]] = row
            self.on_text(row, answer)
        return answer

    def _hand_out(self, kind: str, requests: list[Instance]) -> list[Any]:
        distributed.broadcast((kind, requests))
        return self._take_part(kind, requests)

    def _take_part(self, kind: str, requests: list[Instance]) -> list[Any]:
        """Answer this process's part of the requests; the main process gets the others' answers too."""
        answers: dict[int, Any] = {}
        failure: Exception | None = None
        self.rows_made: dict[Any, Row] = {}
        try:
            answers = self._generate(requests) if kind == "generate_until" else self._score(kind, requests)
        except Exception as error:  # the main process is told, and reports it
            failure = error
        parts = distributed.gather((answers, self.rows_made, failure))
        for _, _, failed in parts:
            if failed is not None:
                raise failed
        for _, rows, _ in parts:
            self.rows.update(rows)
        merged = {place: answer for part, _, _ in parts for place, answer in part.items()}
        return [merged[place] for place in range(len(requests))] if parts else []

    def _score(self, kind: str, requests: list[Instance]) -> dict[int, Any]:
        """Log-likelihoods of this process's part of the requests, by their place: long and short ones dealt out."""
        groups: dict[Any, list[int]] = {}  # the requests of one document stay together, for what they share
        for place, request in enumerate(requests):
            groups.setdefault((request.task_name, request.doc_id), []).append(place)
        dealt = sorted(groups.values(), key=lambda group: -sum(len("".join(requests[i].args)) for i in group))
        mine = [place for group in distributed.share(dealt) for place in group]
        score = super().loglikelihood if kind == "loglikelihood" else super().loglikelihood_rolling
        answers = score([requests[place] for place in mine], disable_tqdm=not distributed.is_main()) if mine else []
        return dict(zip(mine, answers, strict=True))

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        rolling = override_bs is not None  # lm-eval would draw a bar for each window
        return super()._loglikelihood_tokens(requests, disable_tqdm or rolling, override_bs)

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Logits [batch, tokens, vocabulary], of the draft where that stands for the model."""
        part, model = self.generator.draft_alone, self.loaded.model
        if part is None:
            return super()._model_call(inps, attn_mask, labels)
        with torch.inference_mode():
            return torch.stack([part.read(model, row[None]) for row in inps])

    def _generate(self, requests: list[Instance]) -> dict[int, str]:
        """The texts of the requests that fall to this process, by their place; equal settings share batches."""
        groups: dict[str, tuple[Generator, list[int]]] = {}
        for place, request in enumerate(requests):
            generator = self._with_settings_of(request)
            groups.setdefault(_settings(generator), (generator, []))[1].append(place)
        texts: dict[int, str] = {}
        with distributed.Progress(len(requests), desc="generating", unit="text") as progress:
            for generator, places in groups.values():
                ids: dict[object, int] = {}
                for name, decoded in generator.each(self._prompts(generator, requests, distributed.pull(places), ids)):
                    texts[ids[name]] = self._keep(generator, requests[ids[name]], decoded.complete())
                    progress.add()
        return texts

    def _prompts(
        self, generator: Generator, requests: list[Instance], places: Iterable[int], ids: dict[object, int]
    ) -> Iterator[tuple[object, list[int]]]:
        """(sample id, token ids) of the requests at `places`, which are put into `ids` under their sample ids."""
        for place in places:
            request = requests[place]
            name = f"{request.task_name}:{request.doc_id}:{request.idx}"
            ids[name] = place
            yield name, self._encode_context(request.args[0], generator.config.max_steps or 0)

    def _keep(self, generator: Generator, request: Instance, decoded: Decoded) -> str:
        """Note what an answer cost, and keep it for later runs; its text as lm-eval gives it."""
        text = postprocess_generated_text(str(self.tok_decode(decoded.tokens)), generator.config.stop_words, None)
        row = self._row(generator, request) | decoded.stats.row()
        row |= {"stop_reason": decoded.stop_reason, "note": decoded.stats.note()}
        self.rows_made[row["dataset"], row["sample_id"]] = row
        self.on_text(row, text)
        if self.responses is None:
            self.cache_hook.add_partial("generate_until", request.args, text)
        elif generator.config.greedy:
            self.responses.add_partial("generate_until", _key(generator, request), text)
        return text

    def _row(self, generator: Generator, request: Instance) -> Row:
        again = f".{request.idx}" if request.idx else ""
        sample = {"dataset": request.task_name, "sample_id": f"{request.doc_id}{again}", "rank": distributed.rank()}
        return sample | generator.columns()

    def _with_settings_of(self, request: Instance) -> Generator:
        """The generator with a request's own settings, where nothing stronger is given."""
        kwargs = request.args[1]
        if left_out := unknown(kwargs):
            self._tell(f"{request.task_name}: generation arguments without effect here: {', '.join(left_out)}")
        settings = combined([*self.stronger, level(kwargs)])
        stops, ids = settings["stop_words"], set(self.generator.config.stop_token_ids or ())
        if not self.generator.config.ignore_eos:
            end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
            stops = [
                *stops,
                *([end] if end and end not in stops else []),
            ]  # as lm-eval does
        special = set(self.tokenizer.all_special_ids)
        ids |= {i for i in map(self.tokenizer.convert_tokens_to_ids, stops) if i in special}
        return self.generator.with_settings(**{**settings, "stop_words": stops, "stop_token_ids": sorted(ids)})

    def _encode_context(self, context: str, max_steps: int) -> list[int]:
        """A context's token ids with one BOS where the tokenizer wants one, cut on the left to leave room."""
        room = self._room(max_steps)
        ids = self.tok_batch_encode([context], truncation=bool(self.truncation))[0][0].tolist() if context else []
        if len(ids) > room:
            self._tell(f"contexts longer than {room} tokens lose their beginning, to leave room for {max_steps} more")
        return ids[-room:] or [self.prefix_token_id]

    def _room(self, max_steps: int) -> int:
        """Tokens that a context may have."""
        require(max_steps < self.max_length, "max_steps", max_steps,
                f"must be below the model's {self.max_length} positions, to leave room for a context")  # fmt: skip
        return self.max_length - max_steps

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.notify(message)


def create(arg_dict: dict, additional_config: dict | None = None) -> SelfSpeculativeLM:
    """A model from lm-eval's arguments for it."""
    additional = dict(additional_config or {})
    if additional.get("device") == "cuda:0":  # lm-eval's default, on machines without one and for every process
        del additional["device"]
    given = {**additional, **arg_dict}
    given = {name: value for name, value in given.items() if value is not None}
    given["model"] = given.pop("pretrained", given.get("model"))
    seed = int(given.pop("seed", 42))
    given.pop("max_batch_size", None)
    if "batch_size" in given:  # lm-eval may hand it on as text
        text = str(given["batch_size"])
        require(text.isdecimal(), "batch_size", text, "must be a number of prompts")
        given["batch_size"] = int(text)
    names = [{field.name for field in fields(kind)} for kind in (ModelConfig, GenerationConfig)]
    for name in given:
        if name not in names[0] | names[1]:
            raise UsageError(f"--model_args {name}: choose from pretrained, {', '.join(sorted(names[0] | names[1]))}")
    model, generation = ({name: given[name] for name in given if name in known} for known in names)
    loaded = load(from_options(ModelConfig, model))
    return SelfSpeculativeLM(loaded, from_options(GenerationConfig, generation), seed=seed, notify=cli.note)


def main() -> None:
    """Run lm-eval's own command line. Under torchrun the main process runs it and the others take part."""
    from lm_eval.__main__ import cli_evaluate

    distributed.join()
    try:
        if distributed.is_main():
            try:
                cli_evaluate()
            except (UsageError, RunError) as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2 if isinstance(error, UsageError) else 1)
            finally:
                SelfSpeculativeLM.dismiss()
        elif (work := distributed.broadcast(None)) is not None:
            create(*work[1:]).serve()
    finally:
        distributed.leave()


def _key(generator: Generator, request: Instance) -> tuple[str, str]:
    return request.args[0], _settings(generator)


def _settings(generator: Generator) -> str:
    """What a text depends on beside model, prompt and seed."""
    settings = asdict(generator.config)
    del settings["batch_size"]
    return json.dumps(settings, sort_keys=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's warnings about a model that is loaded already."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


if __name__ == "__main__":
    main()

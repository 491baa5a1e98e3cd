"""Models spread over devices, memory and disk (`--device_map`), and held by several processes together (`--tp`)."""

from __future__ import annotations

import json

import pytest

from self_speculation.config import GenerationConfig, ModelConfig, UsageError
from self_speculation.generation import Generator
from self_speculation.loading import fingerprint, load
from tests.runs import arguments, call, save_exit_friendly, start, steady, tables

DRAFTERS = {
    "autoregressive": {},
    "exit alone": {"exit_layer": 3},
    "early_exit": {"exit_layer": 3, "num_speculations": 3},
    "skip_layer": {"skip_attn_layers": "1,4", "skip_mlp_layers": "2-4", "num_speculations": 3},
    "prompt_lookup": {"drafter": "prompt_lookup", "num_speculations": 4},
    "prompt_lookup+early_exit": {"drafter": "prompt_lookup+early_exit", "exit_layer": 2, "num_speculations": 3},
}
PROMPTS = ("abc", "x" * 40, "Article: the bridge\nSummary:")


def settings(drafter):
    strategy = "autoregressive" if drafter in ("autoregressive", "exit alone") else "self_speculative"
    return {"generation_strategy": strategy, "max_steps": 12, "sample": False, **DRAFTERS[drafter]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_exit_friendly(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder):
    return load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def spread(folder, tmp_path_factory):
    """Every other layer on disk, and the head too; the embedding stays in memory."""
    where = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(6)}
    where |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    offload = str(tmp_path_factory.mktemp("offload"))
    return load(str(folder), dtype="float32", device_map=json.dumps(where), offload_folder=offload)


def texts(loaded, **more):
    return [d.tokens for _, d in sorted(Generator(loaded, GenerationConfig(**more)).each(enumerate(PROMPTS)))]


def test_a_head_that_is_not_in_memory_cannot_be_divided(spread):
    config = GenerationConfig(**settings("early_exit"), draft_vocabulary=9)
    with pytest.raises(UsageError, match="--draft_vocabulary 9: --device_map or --tp"):
        Generator(spread, config)


@pytest.mark.parametrize("batch_size", (1, 2))
@pytest.mark.parametrize("way", ("direct", "view"))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_model_partly_on_disk_writes_the_same(plain, spread, drafter, way, batch_size, monkeypatch):
    assert {"cpu", "disk"} <= set(spread.model.hf_model.hf_device_map.values())
    assert spread.model.backbone.direct is not None
    if way == "view":
        monkeypatch.setattr(spread.model.backbone, "direct", None)
    assert texts(spread, **settings(drafter), batch_size=batch_size) == texts(plain, **settings(drafter))


def test_everything_on_disk(plain, folder, tmp_path):
    loaded = load(str(folder), dtype="float32", device_map='{"": "disk"}', offload_folder=str(tmp_path))
    assert loaded.model.device.type == "cpu"
    assert fingerprint(loaded.model.hf_model) == fingerprint(plain.model.hf_model)
    assert texts(loaded, **settings("early_exit")) == texts(plain, **settings("early_exit"))


def test_auto_places_everything(plain, folder):
    loaded = load(str(folder), dtype="float32", device_map="auto")
    assert texts(loaded, **settings("early_exit")) == texts(plain, **settings("early_exit"))


@pytest.mark.parametrize(("given", "says"), [
    ({"device_map": "everywhere"}, "--device_map everywhere: choose one of auto"),
    ({"device_map": "{auto}"}, "--device_map"), ({"device_map": "auto", "device": "cpu"}, "--device cpu"),
    ({"offload_folder": "x"}, "--offload_folder x: goes with --device_map"),
    ({"device_map": "auto", "tp": True}, "--tp True: give either"),
])  # fmt: skip
def test_settings_that_do_not_go_together(given, says):
    with pytest.raises(UsageError, match=says):
        ModelConfig(**given)


def test_one_process_is_not_parallel(folder):
    with pytest.raises(UsageError, match="--tp True: one process holds the whole model"):
        load(str(folder), tp=True)


def tokens(out, script="benchmark"):
    lines = next(out.glob(f"{script}*.jsonl")).read_text().splitlines()
    return {(line["sample_id"], line["strategy"]): line["tokens"] for line in map(json.loads, lines)}


@pytest.mark.slow
def test_two_processes_with_one_model_write_the_same(folder, tmp_path):
    """Greedy float32 texts of every drafter, alone and in batches; rows are written once."""
    compare = ",".join(
        f"{name}:{':'.join(f'{k}={v}' for k, v in DRAFTERS[name].items() if k != 'drafter')}"
        for name in DRAFTERS if name not in ("autoregressive", "exit alone")
    )  # fmt: skip
    for size in (1, 2):
        flags = {"compare": compare, "num_samples": 3, "batch_size": size, "max_steps": 24}
        assert call("benchmark", arguments(folder, tmp_path / f"plain{size}", **flags)) == 0
        child = start("benchmark", arguments(folder, tmp_path / f"tp{size}", **flags, tp=True), 2)
        output, errors = child.communicate()
        assert child.returncode == 0, errors
        assert tokens(tmp_path / f"tp{size}") == tokens(tmp_path / f"plain{size}")
        rows = tables(tmp_path / f"tp{size}", "benchmark")[""]
        same = steady(rows).equals(steady(tables(tmp_path / f"plain{size}", "benchmark")[""]))
        assert same and set(rows.world_size) == {2} and set(rows["rank"]) == {0} and output.count("strategy") == 2


@pytest.mark.slow
def test_generate_and_correctness_with_one_model_in_two_processes(folder, tmp_path):
    common = ["--model", str(folder), "--dtype", "float32", "--sample", "False", "--max_steps", "20", "--tp", "True"]
    drafter = ["--generation_strategy", "self_speculative", "--exit_layer", "3", "--num_speculations", "3"]
    child = start("generate", [*common, *drafter, "--prompt", "abc", "--compare_autoregressive", "True",
                               "--output_dir", str(tmp_path)], 2)  # fmt: skip
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    assert errors.count("texts identical") == 1 and len(output.strip().split("\n\n")) <= 2
    assert len(tables(tmp_path, "generate")[""]) == 2
    child = start("correctness", arguments(folder, tmp_path / "c", **DRAFTERS["early_exit"], tp=True,
                                           generation_strategy="self_speculative"), 2)  # fmt: skip
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    assert "0 errors" in output
    child = start("generate", [*common, "--generation_strategy", "self_speculative", "--prompt", "abc"], 2)
    _, errors = child.communicate()
    assert child.returncode != 0 and errors.count("error: --tp True: give --exit_layer") == 1

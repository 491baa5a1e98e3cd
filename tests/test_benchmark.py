"""benchmark.py: strategies side by side, peers, rows, pooled rows, resuming, several processes, field cases."""

import json

import pandas as pd
import pytest

from self_speculation import benchmarking, datasets, generation, metrics
from self_speculation.config import GenerationConfig, UsageError
from self_speculation.loading import Loaded
from self_speculation.modeling import SelfSpeculativeModel
from self_speculation.records import RUN_COLUMNS, SAMPLE_COLUMNS
from self_speculation.strategies import make_strategies, parse_strategies
from tests.folders import byte_tokenizer
from tests.runs import ROOT, arguments, call, exit_friendly, save_exit_friendly, start, steady, tables

STRATEGIES = (
    "early_exit:exit_layer=3:num_speculations=3,prompt_lookup:num_speculations=4,"
    "prompt_lookup+early_exit:exit_layer=2:num_speculations=2,hf,hf_early_exit,hf_prompt_lookup"
)
NAMES = ["autoregressive", *STRATEGIES.split(",")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_exit_friendly(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", SelfSpeculativeModel(exit_friendly()), byte_tokenizer())


@pytest.fixture(scope="module")
def compared(model, tmp_path_factory):
    """A finished comparison of all kinds of strategies at equal forced length."""
    out = tmp_path_factory.mktemp("out")
    assert call("benchmark", arguments(model, out, compare=STRATEGIES, ignore_eos=True)) == 0
    return out


def test_every_strategy_writes_the_same_greedy_text_of_forced_length(compared):
    rows = tables(compared, "benchmark")[""]
    assert list(rows.strategy) == NAMES * 3 and tuple(rows.columns[: len(SAMPLE_COLUMNS)]) == SAMPLE_COLUMNS
    assert (rows.new_tokens == 10).all() and (rows.decode_tokens == 9).all() and rows.identical.all()
    assert rows.first_difference.isna().all() and (rows.tokens_per_second > 0).all()
    peers = rows[rows.strategy.str.startswith("hf")]
    assert peers.accepted.isna().all() and set(peers.generation_strategy) == {"hf", "hf_early_exit", "hf_prompt_lookup"}
    assert set(rows[rows.strategy == "hf_early_exit"].exit_layer) == {3}  # taken from ours
    plain = rows[rows.strategy == "autoregressive"]
    assert (plain.drafted == 0).all() and plain.exit_layer.isna().all() and plain.acceptance_rate.isna().all()
    lines = [json.loads(line) for line in next(compared.glob("benchmark*.jsonl")).read_text().splitlines()]
    assert len(lines) == len(rows) and all(line["prediction"] is not None and line["tokens"] for line in lines)


def test_pooled_rows_follow_from_the_samples(compared):
    rows, runs = tables(compared, "benchmark")[""], pd.read_csv(compared / "runs.csv")
    assert tuple(runs.columns) == RUN_COLUMNS and len(runs) == len(NAMES)
    pairs = zip(runs.iterrows(), map(json.loads, runs.metrics), strict=True)
    found = {extra["strategy"]: (run, extra) for (_, run), extra in pairs}
    base = rows[rows.strategy == "autoregressive"]
    for name, group in rows.groupby("strategy"):
        run, extra = found[name]
        assert run.num_samples == 3 and run.new_tokens == group.new_tokens.sum()
        assert run.decode_s == pytest.approx(group.decode_s.sum())
        speed = group.decode_tokens.sum() / group.decode_s.sum()
        assert run.tokens_per_second == pytest.approx(speed)
        assert extra["speedup"] == pytest.approx(speed * base.decode_s.sum() / base.decode_tokens.sum())
        if group.drafted.sum() > 0:
            assert run.acceptance_rate == pytest.approx(group.accepted.sum() / group.drafted.sum())
        assert extra["rougeL"] == pytest.approx(group.rougeL.mean()) and extra["identical"] == 1


def test_types_are_sensible(compared):
    rows = tables(compared, "benchmark")[""]
    assert rows.new_tokens.dtype == int and rows["sample"].dtype == bool and rows.identical.dtype == bool
    assert all(rows[name].dtype == float for name in ("drafted", "exit_layer", "decode_s", "rouge1"))
    assert rows.seed.unique().tolist() == [42] and rows.temperature.isna().all()


def test_one_strategy_and_too_long_a_prompt(model, tmp_path, capsys):
    flags = {"generation_strategy": "self_speculative", "exit_layer": 2, "num_speculations": 2,
             "dataset": "cnn_dm_summarization", "max_steps": 260, "num_samples": 2}  # fmt: skip
    assert call("benchmark", arguments(model, tmp_path, **flags)) == 0
    rows = tables(tmp_path, "benchmark")[""]
    assert (rows.prompt_tokens == 1024 - 260).all() and rows.note.str.contains("cut from the left").all()
    assert set(rows.exit_layer) == {2} and rows.acceptance_rate.notna().all()
    shown = capsys.readouterr().out
    assert "break-even" in shown and "acceptance" in shown and "draft step" in shown


def test_sampling_is_reproducible_and_the_same_for_any_order(model, tmp_path):
    flags = {"sample": True, "compare": "early_exit:exit_layer=3:num_speculations=2,hf", "num_samples": 2}
    for run in ("a", "b"):
        assert call("benchmark", arguments(model, tmp_path / run, **flags)) == 0
    a, b = (steady(tables(tmp_path / run, "benchmark")[""]) for run in ("a", "b"))
    pd.testing.assert_frame_equal(a, b)
    assert "identical" not in a and set(a.temperature) == {0.6}


def test_resume_gives_what_an_unbroken_run_gives(model, tmp_path, monkeypatch):
    flags = {"compare": "early_exit:exit_layer=3:num_speculations=2,hf"}
    assert call("benchmark", arguments(model, tmp_path / "whole", **flags)) == 0
    original, calls = generation.decode, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2 + 2 + 2:  # after the warm-up and a sample, in the middle of the second
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(generation, "decode", failing)
    assert call("benchmark", arguments(model, tmp_path / "broken", **flags)) == 130
    monkeypatch.setattr(generation, "decode", original)
    shard = next((tmp_path / "broken").glob("*.part.jsonl"))
    assert len(shard.read_text().splitlines()) == 3
    again = arguments(model, tmp_path / "broken", **flags, resume=shard)
    assert call("benchmark", again) == 0
    whole, broken = (tables(tmp_path / name, "benchmark")[""] for name in ("whole", "broken"))
    pd.testing.assert_frame_equal(steady(whole), steady(broken))
    assert call("benchmark", [*again, "--seed", "7"]) == 2


@pytest.mark.parametrize("sample", (False, True))
def test_batches_write_the_rows_of_single_prompts(model, tmp_path, sample):
    """Several strategies take turns by groups of samples, a single one keeps its batch full."""
    strategies = (
        "early_exit:exit_layer=3:num_speculations=2,hf,prompt_lookup+early_exit:exit_layer=2:num_speculations=3"
    )
    single = {"generation_strategy": "self_speculative", "exit_layer": 3, "num_speculations": 2}
    for name, flags in {"compare": {"compare": strategies}, "one": single}.items():
        for size in (1, 3):
            out = tmp_path / f"{name}{size}"
            assert call("benchmark", arguments(model, out, batch_size=size, num_samples=7, sample=sample, **flags)) == 0
        one, three = (tables(tmp_path / f"{name}{size}", "benchmark")[""] for size in (1, 3))
        assert set(one.batch_size) == {1} and set(three[~three.strategy.str.startswith("hf")].batch_size) == {3}
        pd.testing.assert_frame_equal(*(steady(table).drop(columns="batch_size") for table in (one, three)))
        assert (three.decode_s > 0).all()


def test_batches_of_models_that_cannot_and_of_scripts_that_do_not(model, loaded, tmp_path, capsys, monkeypatch):
    assert call("generate", ["--model", str(model), "--prompt", "x", "--batch_size", "2"]) == 2
    assert "--batch_size 2: generate.py answers one prompt at a time" in capsys.readouterr().err
    assert call("correctness", arguments(model, tmp_path, batch_size=2)) == 2
    assert "--batch_size 2: prompts are checked one at a time" in capsys.readouterr().err
    for wrong in ({"batch_size": 0}, {"batch_size": 2, "carry_draft_exit": True, "adaptive_draft_exit": True}):
        assert call("benchmark", arguments(model, tmp_path, **wrong)) == 2
        assert f"--batch_size {wrong['batch_size']}" in capsys.readouterr().err
    monkeypatch.setattr(generation, "why_not", lambda model: "tiny: a reason")
    told = []
    made = generation.Generator(loaded, GenerationConfig(batch_size=4), notify=told.append)
    assert made.config.batch_size == 1 and told == ["--batch_size 4: prompts are decoded one at a time; tiny: a reason"]


def test_several_prompts_by_one_call(loaded):
    prompts, settings = ["abc", "x", [5, 6, 7], "hello " * 20], {"max_steps": 9, "exit_layer": 3, "num_speculations": 2}
    settings["generation_strategy"] = "self_speculative"
    together = generation.generate_each(loaded, prompts, batch_size=3, **settings)
    alone = generation.generate_each(loaded, prompts, **settings)
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert alone[0].tokens == generation.generate(loaded, "abc", **settings).tokens


def test_difference_is_located_and_its_gap_reported(loaded):
    prompt = loaded.encode("abc")
    right = [1, 2, 3, 4]
    assert benchmarking.compare(loaded, prompt, right, right)["identical"] is True
    row = benchmarking.compare(loaded, prompt, right, [1, 2, 9, 4])
    assert row["identical"] is False and row["first_difference"] == 2 and row["top2_gap"] > 0
    assert benchmarking.compare(loaded, prompt, right, [1, 2])["first_difference"] == 2


def test_names_of_strategies():
    base = GenerationConfig(sample=False, exit_layer=4)
    parsed = parse_strategies("early_exit,prompt_lookup:num_speculations=5,skip_layer:skip_attn_layers=1,3-4,hf", base)
    assert list(parsed) == ["autoregressive", "early_exit", "prompt_lookup:num_speculations=5",
                            "skip_layer:skip_attn_layers=1,3-4", "hf"]  # fmt: skip
    kind, config = parsed["skip_layer:skip_attn_layers=1,3-4"]
    assert kind == "skip_layer" and config.skip_attn_layers == "1,3-4" and config.greedy
    assert parsed["early_exit"][1].exit_layer == 4 and parsed["autoregressive"][1].exit_layer == -1
    assert parsed["prompt_lookup:num_speculations=5"][1].num_speculations == 5


@pytest.mark.parametrize("text,says", [
    ("erly_exit", "choose from"), ("early_exit:exit=3", "no setting exit"), ("hf,hf", "once"),
    ("early_exit:exit_layer", "name=value"), ("early_exit:exit_layer=x", "must be a whole number"),
    ("early_exit:exit_layer=0", "exit_layer"),
])  # fmt: skip
def test_wrong_names_are_usage_errors(text, says):
    with pytest.raises(UsageError, match=says):
        parse_strategies(text, GenerationConfig())


def test_slowness_is_explained_by_what_was_measured():
    def said(rate, speedup):
        return " ".join(benchmarking.slowness("early_exit", rate, 0.6, speedup, "use another --exit_layer"))

    assert said(0.7, 1.1) == said(0.7, None) == said(0.5, 1.1) == ""
    assert "acceptance is too low" in said(0.5, 0.9) and "use another --exit_layer" in said(0.5, None)
    assert "0.90 x" in said(0.7, 0.9) and "above break-even" in said(0.7, 0.9) and "too low" not in said(0.7, 0.9)


def test_a_model_that_ends_at_once_gives_finite_rows(loaded, tmp_path, monkeypatch):
    config = GenerationConfig(sample=False, max_steps=5)
    first = make_strategies(loaded, parse_strategies("autoregressive", config), seed=0)[0].generator([5]).tokens[0]
    config = GenerationConfig(sample=False, max_steps=5, stop_token_ids=[first])
    made = make_strategies(loaded, parse_strategies("early_exit:exit_layer=2:num_speculations=2,hf", config), seed=0)
    sample = benchmarking.Sample(0, datasets.Example("x", "p", "r"), [5], "")
    rows = [benchmarking.sample_row(s, sample, s.generator([5]), datasets.DataConfig("top_v2")) for s in made]
    assert all(row["new_tokens"] == 0 and row["stop_reason"] == "stop_id" for row in rows)
    summary = benchmarking.summarize(rows, [s.name for s in made])
    assert "strategy" in benchmarking.table(summary) and metrics.repeated_4grams([]) is None


def test_human_eval_says_what_pass_at_1_needs(model, tmp_path, capsys):
    flags = {"dataset": "human_eval", "num_samples": 1, "max_steps": 3}
    assert call("benchmark", arguments(model, tmp_path, **flags)) == 0
    assert "--allow_code_execution" in capsys.readouterr().err
    assert call("benchmark", arguments(model, tmp_path / "run", allow_code_execution=True, **flags)) == 0
    assert tables(tmp_path / "run", "benchmark")[""].pass_at_1.tolist() == [0.0]


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(model, tmp_path):
    for count in (1, 2):
        flags = {"compare": "early_exit:exit_layer=3:num_speculations=2,prompt_lookup", "num_samples": 5}
        child = start("benchmark", arguments(model, tmp_path / str(count), **flags), count)
        output, errors = child.communicate()
        assert child.returncode == 0, errors
        assert output.count("strategy") == 2
    one, two = (tables(tmp_path / count, "benchmark")[""] for count in "12")
    pd.testing.assert_frame_equal(steady(one), steady(two))
    assert set(two["rank"]) == {0, 1}


@pytest.mark.slow
def test_a_failing_process_ends_the_run(model, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import self_speculation.benchmarking as b\n"
        "    def fail(*arguments): raise RuntimeError('the disk is full')\n"
        "    b._decode = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    child = start("benchmark", arguments(model, tmp_path / "out", num_samples=8, max_steps=200), 2)
    _, errors = child.communicate(timeout=240)
    assert child.returncode != 0
    assert "error: process 1: RuntimeError: the disk is full" in errors

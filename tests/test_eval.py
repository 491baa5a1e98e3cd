"""eval.py and the lm-eval model: scores and texts equal lm-eval's own, and every trap of a request."""

from __future__ import annotations

import csv
import functools
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

import eval as script
from self_speculation import cli, distributed, evaluating
from self_speculation.config import GenerationConfig, ModelConfig, RunConfig, UsageError
from self_speculation.evaluating import EvalConfig
from self_speculation.loading import DEFAULT_MODEL, load
from self_speculation.task_settings import combined, explicit_level, level, parse_gen_kwargs, stop_strings
from tests.folders import CHAT_TEMPLATE, byte_tokenizer, save_tiny_model, tiny_llama

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from self_speculation import harness  # noqa: E402
from self_speculation.harness import SelfSpeculativeLM  # noqa: E402

logging.getLogger("lm_eval").setLevel(logging.ERROR)
ROOT = Path(__file__).resolve().parent.parent
LOCAL = str(ROOT / "data" / "tasks")
CONFIGS = (ModelConfig, GenerationConfig, EvalConfig, RunConfig)
STRATEGIES = {
    "autoregressive": {},
    "early_exit": {"exit_layer": 3, "num_speculations": 4},
    "prompt_lookup": {"drafter": "prompt_lookup", "num_speculations": 5},
    "skip_layer": {"skip_attn_layers": "2,4", "skip_mlp_layers": "3", "num_speculations": 3},
    "chain": {"drafter": "prompt_lookup+early_exit", "exit_layer": 2, "num_speculations": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=768)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def hf(loaded):
    """lm-eval's own model on the same weights."""
    return HFLM(pretrained=loaded.model.hf_model, tokenizer=loaded.tokenizer, batch_size=1)


def make(loaded, name="early_exit", gen_kwargs=None, **settings):
    if name != "autoregressive":
        settings = {"generation_strategy": "self_speculative", **STRATEGIES[name], **settings}
    return SelfSpeculativeLM(loaded, GenerationConfig(**settings), gen_kwargs=gen_kwargs)


def texts(lm, *requests):
    """Answers to (context, generation arguments) pairs."""
    given = [Instance("generate_until", {}, request, 0, ("task", n, 1)) for n, request in enumerate(requests)]
    return lm.generate_until(given)


def likelihoods(lm, *requests):
    return lm.loglikelihood(
        [Instance("loglikelihood", {}, request, 0, ("t", n, 1)) for n, request in enumerate(requests)]
    )


def run_local(lm, names="local_math,local_choice,local_perplexity", **settings):
    """(scores, texts) of the local tasks."""
    config = EvalConfig(tasks=[names], include_path=LOCAL, **{"limit": 3, "bootstrap_iters": 0, **settings})
    tasks = evaluating.load_tasks(config)
    if "local_math" in tasks.tasks:
        tasks.tasks["local_math"].set_config("generation_kwargs", {"max_gen_toks": 24}, update=True)
    results = evaluating.run_tasks(lm, tasks, config)
    answers = {task: [sample["resps"] for sample in samples] for task, samples in results["samples"].items()}
    return results["results"], answers


@pytest.fixture(scope="module")
def hf_results(hf):
    return run_local(hf)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scores_and_texts_equal_lm_evals_own_model(name, loaded, hf_results):
    assert run_local(make(loaded, name)) == hf_results


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", DEFAULT_MODEL])
def test_scores_and_texts_equal_lm_evals_own_model_on_real_weights(model):
    big = load(model, dtype="float32")
    theirs = run_local(HFLM(pretrained=big.model.hf_model, tokenizer=big.tokenizer, batch_size=1))
    for name in STRATEGIES:
        assert run_local(make(big, name)) == theirs, name


@pytest.mark.slow
def test_code_tasks_of_lm_eval_itself_are_refused_without_leave(run):
    code, _, err = run("--tasks", "humaneval")
    assert code == 2
    assert "--confirm_run_unsafe_code True" in err


@pytest.fixture(scope="module")
def long_text(hf):
    """What the tiny model says to `hello`."""
    return texts(hf, ("hello", {"until": [], "max_gen_toks": 40}))[0]


@pytest.mark.parametrize("form", ["string", "list", "two", "empty list", "absent"])
def test_until(form, loaded, hf, long_text):
    stop, later = long_text[9:11], long_text[15:17]
    until = {"string": stop, "list": [stop], "two": [later, stop], "empty list": [], "absent": None}[form]
    kwargs = {"max_gen_toks": 30} | ({} if until is None else {"until": until})
    (ours,) = texts(make(loaded), ("hello", dict(kwargs)))
    assert [ours] == texts(hf, ("hello", dict(kwargs)))
    if form in ("string", "list", "two"):
        assert ours == long_text[: long_text.index(stop)]


@pytest.mark.parametrize("until", ["", [""]])
def test_an_empty_string_ends_nothing(until, loaded, long_text):
    assert texts(make(loaded), ("hello", {"until": until, "max_gen_toks": 40})) == [long_text]


def test_requests_of_several_tasks_each_have_their_own_settings(loaded, hf, long_text):
    requests = [
        ("hello", {"until": long_text[5:7], "max_gen_toks": 20}),
        ("hello", {"until": [long_text[9:11]], "max_gen_toks": 12}),
        ("another", {"until": [], "max_gen_toks": 3}),
        ("hello", {"until": [], "max_new_tokens": 7, "do_sample": False, "temperature": 0.0}),
    ]
    ours = texts(make(loaded), *requests)
    assert ours == texts(hf, *requests)
    assert len(set(ours)) == 4


def test_a_long_context_loses_its_beginning_as_in_lm_eval(loaded, hf):
    told = []
    lm = make(loaded)
    lm.notify = told.append
    request = ("abcdefghij" * 90, {"until": [], "max_gen_toks": 10})
    assert texts(lm, request) == texts(hf, request)
    assert "758" in told[0]


def test_no_room_for_a_context_is_said(loaded):
    with pytest.raises(UsageError, match="--max_steps 768.*768 positions"):
        texts(make(loaded), ("hello", {"until": [], "max_gen_toks": 768}))


def test_an_empty_context_starts_from_the_beginning_of_a_sequence(loaded):
    assert make(loaded)._encode_context("", 10) == [256]


def test_a_special_token_as_stop_string(loaded):
    """Case of Llama and Qwen tasks, whose until lists the end of a turn: it is not part of the decoded text."""
    lm = make(loaded)
    request = Instance("generate_until", {}, ("hello", {"until": ["<s>"]}), 0, ("t", 0, 1))
    assert lm._with_settings_of(request).config.stop_token_ids == [256, 257]


@pytest.mark.parametrize(
    ("flags", "gen_kwargs", "task", "expected"),
    [
        ({}, {}, {}, {"sample": False, "max_steps": 256}),
        ({}, {}, {"do_sample": True}, {"sample": True, "temperature": None}),
        ({}, {}, {"do_sample": False, "temperature": 0.7}, {"sample": False}),
        ({}, {}, {"do_sample": True, "temperature": 0.0}, {"sample": False}),
        # lm-eval #1329, #1416, #1800: the command line's temperature wins over the task's do_sample
        ({}, {"temperature": 0.8}, {"do_sample": False, "temperature": 0.0}, {"sample": True, "temperature": 0.8}),
        ({}, {"temperature": 0}, {"do_sample": True, "temperature": 0.7}, {"sample": False}),
        ({}, {"do_sample": True}, {"do_sample": False, "temperature": 0.0}, {"sample": True, "temperature": None}),
        ({}, {"max_new_tokens": 5}, {"max_gen_toks": 9}, {"max_steps": 5}),
        ({"max_steps": 3}, {"max_gen_toks": 5}, {"max_gen_toks": 9}, {"max_steps": 3}),
        ({"temperature": 0.5}, {"temperature": 0.8}, {}, {"sample": True, "temperature": 0.5}),
        ({"sample": False}, {"temperature": 0.8}, {"do_sample": True}, {"sample": False}),
        ({"temperature": 0.0}, {"do_sample": True}, {}, {"sample": False}),
        ({}, {"top_p": 0.5}, {"top_p": 0.9, "top_k": 7}, {"top_p": 0.5, "top_k": 7, "sample": False}),
        ({}, {"until": "x"}, {"until": ["y"]}, {"stop_words": ["x"]}),
        ({"stop_words": ["z"]}, {"until": "x"}, {"until": ["y"]}, {"stop_words": ["z"]}),
    ],
)  # fmt: skip
def test_precedence(flags, gen_kwargs, task, expected):
    settings = combined([explicit_level(GenerationConfig(**flags)), level(gen_kwargs), level(task)])
    assert {name: settings.get(name) for name in expected} == expected


def test_settings_reach_the_decoder(loaded):
    lm = make(loaded, "autoregressive", gen_kwargs={"temperature": 0.8, "max_gen_toks": 6}, top_k=9)
    texts(lm, ("hello", {"do_sample": False, "temperature": 0.0, "until": []}))
    (row,) = lm.rows.values()
    assert (row["sample"], row["temperature"], row["top_k"], row["max_steps"]) == (True, 0.8, 9, 6)


def test_gen_kwargs_are_checked():
    assert parse_gen_kwargs('{"until": ["a", "b"], "temperature": 0}') == {"until": ["a", "b"], "temperature": 0}
    assert stop_strings("x") == ["x"]
    for wrong in ("num_beams=4", "temperature=-1", "temperature=warm", "max_gen_toks=0", "temperature"):
        with pytest.raises(UsageError, match="--gen_kwargs"):
            parse_gen_kwargs(wrong)


def test_sampling_is_seeded_by_sample_and_repeat(loaded):
    kwargs = {"until": [], "max_gen_toks": 12, "temperature": 1.5, "top_p": 1.0}
    request = Instance("generate_until", {}, ("hello", kwargs), 0, ("task", 0, 2))
    first = make(loaded, "autoregressive").generate_until([request, request])
    assert first == make(loaded, "autoregressive").generate_until([request, request])
    assert first[0] != first[1]


def truncated(loaded, layers):
    """A model of only the first layers."""
    model = loaded.model.hf_model
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": layers})
    part = LlamaForCausalLM(config).eval()
    part.load_state_dict(model.state_dict(), strict=False)
    return part


def test_autoregressive_with_an_exit_scores_with_the_exit(loaded, hf):
    """Case LayerSkip #15."""
    requests = [("hello", " world"), ("Question:", " honey"), ("", "abc")]
    exit_lm = make(loaded, "autoregressive", exit_layer=2)
    part = HFLM(pretrained=truncated(loaded, 2), tokenizer=loaded.tokenizer, batch_size=1)
    for ours, theirs in zip(likelihoods(exit_lm, *requests), likelihoods(part, *requests), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
        assert ours[1] == theirs[1]
    assert likelihoods(exit_lm, *requests) != likelihoods(hf, *requests)
    kwargs = {"until": [], "max_gen_toks": 8}
    assert texts(exit_lm, ("hello", kwargs)) == texts(part, ("hello", kwargs))


def test_autoregressive_with_a_skip_set_scores_without_the_sublayers(loaded, hf):
    lm = make(loaded, "autoregressive", skip_attn_layers="3-5", skip_mlp_layers="3-5")
    part = HFLM(pretrained=truncated(loaded, 3), tokenizer=loaded.tokenizer, batch_size=1)
    (ours,), (theirs,) = likelihoods(lm, ("hello", " world")), likelihoods(part, ("hello", " world"))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4)


def test_speculative_scores_are_unchanged_and_it_says_so(loaded, hf):
    told = []
    lm = make(loaded)
    lm.notify = told.append
    requests = [("hello", " world"), ("hello", " there")]
    assert likelihoods(lm, *requests) == likelihoods(hf, *requests)
    likelihoods(lm, *requests)
    assert len(told) == 1
    assert "cannot speed this task up" in told[0]


def test_one_beginning_of_sequence_with_and_without_a_chat_template(loaded):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    assert tokenizer("x")["input_ids"][0] == 256
    lm = make(type(loaded)(loaded.name, loaded.model, tokenizer))
    chat = lm.apply_chat_template([{"role": "user", "content": "hi"}])
    assert chat.startswith("<s><user>hi")
    for context in (chat, "plain"):
        ids = lm._encode_context(context, 10)
        assert ids[0] == 256
        assert ids.count(256) == 1
        assert lm.tok_encode(context).count(256) == 1


def cached(loaded, path, **settings):
    config = GenerationConfig(**{"generation_strategy": "self_speculative", **STRATEGIES["early_exit"], **settings})
    return SelfSpeculativeLM(loaded, config, use_cache=str(path))


def test_kept_answers_are_for_the_same_model_and_settings_only(loaded, tmp_path, monkeypatch):
    request = ("hello", {"until": [], "max_gen_toks": 6})
    lm = cached(loaded, tmp_path / "answers")
    first = texts(lm, request), likelihoods(lm, ("a", "b"))
    lm.close()
    computed = []
    compute = SelfSpeculativeLM._compute
    monkeypatch.setattr(SelfSpeculativeLM, "_compute", lambda *a: computed.append(a[1]) or compute(*a))

    def again(model, **settings):
        computed.clear()
        lm = cached(model, tmp_path / "answers", **settings)
        answers = texts(lm, request), likelihoods(lm, ("a", "b"))
        lm.close()
        return answers, len(computed)

    assert again(loaded) == (first, 0)
    assert again(loaded, max_steps=5)[1] == 2
    assert again(loaded, exit_layer=2)[1] == 2
    torch.manual_seed(5)
    other = tiny_llama(max_position_embeddings=768)
    with torch.no_grad():
        other.model.layers[5].mlp.down_proj.weight.mul_(1.5)
    assert again(type(loaded)(loaded.name, type(loaded.model)(other), loaded.tokenizer))[1] == 2


def test_kept_prompts_do_not_freeze_generation_settings(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    for steps in (3, 5):
        lm = make(loaded, gen_kwargs={"max_gen_toks": steps})
        run_local(lm, "local_math", cache_requests=True)
        assert {row["new_tokens"] for row in lm.rows.values()} == {steps}
    assert any(tmp_path.iterdir())


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Run eval.py in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.chdir(ROOT)

    def run_script(*arguments: str) -> tuple[int, str, str]:
        given = [*arguments, "--output_dir", str(tmp_path / "logs"), "--model", str(folder), "--dtype", "float32"]
        with pytest.raises(SystemExit) as stop:
            cli.run(script.main, CONFIGS, given)
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run_script


def read(tmp_path, pattern):
    (path,) = (tmp_path / "logs").glob(pattern)
    return list(csv.DictReader(path.open())) if path.suffix == ".csv" else [json.loads(line) for line in path.open()]


MATH = ("--tasks", "local_math", "--include_path", LOCAL)
SPECULATIVE = ("--generation_strategy", "self_speculative", "--exit_layer", "3", "--num_speculations", "4")


def test_files_and_table(run, tmp_path):
    """LayerSkip's command on a task like gsm8k that works offline."""
    tasks = ("--tasks", "local_math,local_choice", "local_perplexity", "--include_path", "data/tasks", "--limit", "3")
    code, out, err = run(*tasks, *SPECULATIVE, "--max_steps", "8", "--log_samples", "True")
    assert code == 0, err
    assert "|local_math" in out
    assert "local_math: 24 tokens" in out
    scores = read(tmp_path, "eval_*[0-9].csv")
    assert {(row["task"], row["filter"], row["metric"]) for row in scores} == {
        ("local_math", "strict-match", "exact_match"), ("local_math", "flexible-extract", "exact_match"),
        ("local_choice", "none", "acc"), ("local_choice", "none", "acc_norm"),
        *(("local_perplexity", "none", name) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
    }  # fmt: skip
    math = next(row for row in scores if row["task"] == "local_math")
    assert (math["value"], math["stderr"], math["num_samples"], math["n_shot"]) == ("0.0", "0.0", "3", "2")
    assert (math["drafter"], math["exit_layer"], math["new_tokens"]) == ("early_exit", "3", "24")
    choice = next(row for row in scores if row["task"] == "local_choice")
    assert choice["new_tokens"] == "" != choice["stderr"]
    samples = read(tmp_path, "eval_*_samples.csv")
    assert [(row["dataset"], row["sample_id"]) for row in samples] == [
        (task, str(n)) for task in ("local_math", "local_choice", "local_perplexity") for n in range(3)
    ]
    assert samples[0]["max_steps"] == "8" == samples[0]["new_tokens"]
    assert samples[0]["exact_match,strict-match"] == "0.0"
    assert samples[3]["max_steps"] == "" == samples[3]["new_tokens"]
    assert samples[3]["acc"] in ("0.0", "1.0")
    predictions = read(tmp_path, "eval_*_samples.jsonl")
    assert predictions[0]["prompt"].startswith("Question: Ida has")
    assert predictions[3]["prediction"] in ("honey", "iron", "paper money", "rain")
    (pool,) = read(tmp_path, "runs.csv")
    assert (pool["num_samples"], pool["new_tokens"]) == ("9", "24")
    assert json.loads(pool["metrics"])["local_choice/acc,none"] == pytest.approx(float(choice["value"]))


def test_chat_with_system_instruction_and_turns(run, tmp_path):
    chat = ("--apply_chat_template", "True", "--system_instruction", "Be brief.", "--log_samples", "True")
    code, _, err = run(*MATH, "--limit", "1", "--max_steps", "4", *chat)
    assert code == 0, err
    (line,) = read(tmp_path, "eval_*_samples.jsonl")
    assert line["prompt"].startswith("<system>Be brief.</s><user>Question: Ida")
    assert line["prompt"].count("<assistant>") == 3


def test_predict_only(run, tmp_path):
    code, _, err = run(
        "--tasks", "local_math", "--include_path", LOCAL, "--limit", "2", "--max_steps", "4", "--predict_only", "True"
    )
    assert code == 0, err
    assert read(tmp_path, "eval_*[0-9].csv") == []
    assert len(read(tmp_path, "eval_*_samples.jsonl")) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--tasks"),
        (("--tasks", "local_math", "--include_path", "nowhere"), 1, "--include_path nowhere"),
        ((*MATH, "--limit", "0"), 2, "--limit 0"),
        ((*MATH, "--limit", "1.5"), 2, "--limit 1.5"),
        ((*MATH, "--gen_kwargs", "beams=2"), 2, "--gen_kwargs beams"),
        ((*MATH, "--fewshot_as_multiturn", "True"), 2, "--apply_chat_template"),
        (("--tasks", "list,local_math", "--include_path", LOCAL), 2, "--tasks list,local_math"),
        ((*MATH, "--verbosity", "loud"), 2, "--verbosity LOUD"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, arguments, code, words):
    ended, _, err = run(*arguments)
    assert ended == code
    assert words in err
    assert err.count("\n") == 1


@pytest.fixture
def only_included(monkeypatch):
    """lm-eval without its own tasks, whose index takes many seconds."""
    import lm_eval.tasks as tasks

    monkeypatch.setattr(tasks, "TaskManager", _without_defaults(tasks.TaskManager))


def _without_defaults(kind):
    return functools.partial(lambda include_path=None, include_defaults=False, metadata=None: kind(
        include_path=include_path, include_defaults=False, metadata=metadata
    ))  # fmt: skip


def test_unknown_task_and_list(run, only_included):
    code, _, err = run("--tasks", "local_maths", "--include_path", LOCAL)
    assert code == 2
    assert "did you mean local_math?" in err
    code, out, _ = run("--tasks", "list", "--include_path", LOCAL)
    assert code == 0
    assert "local_perplexity" in out
    assert "loglikelihood_rolling" in out


def write_task(folder, **more):
    settings = {
        "task": "remote",
        "dataset_path": "openai/gsm8k",
        "test_split": "test",
        "doc_to_text": "q",
        "doc_to_target": "a",
    }
    (folder / "remote.yaml").write_text("\n".join(f"{name}: {value}" for name, value in {**settings, **more}.items()))
    return "--tasks", "remote", "--include_path", str(folder)


def test_unreachable_hub_names_the_data_set_and_the_way_out(run, tmp_path, monkeypatch):
    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    code, _, err = run(*write_task(tmp_path))
    assert code == 1
    assert err.count("\n") == 1
    assert "task remote: data set openai/gsm8k" in err
    assert "--include_path data/tasks" in err


def test_code_is_not_run_without_leave(run, tmp_path):
    """Case lm-eval #2954."""
    code, _, err = run(*write_task(tmp_path, unsafe_code="true"))
    assert code == 2
    assert err.count("\n") == 1
    assert "--confirm_run_unsafe_code True" in err


def test_lm_evals_own_command_line(folder, tmp_path, capsys, monkeypatch, only_included):
    model = f"pretrained={folder},dtype=float32,generation_strategy=self_speculative,exit_layer=3,num_speculations=4"
    arguments = f"""--model self_speculation --model_args {model} --tasks local_math,local_choice --include_path {LOCAL}
        --limit 2 --gen_kwargs max_gen_toks=6"""
    monkeypatch.setattr(sys, "argv", ["lm-eval", *arguments.split()])
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    harness.main()
    out, _ = capsys.readouterr()
    assert "local_choice" in out
    assert "exact_match" in out


def test_processes_share_the_requests(folder, tmp_path):
    """Scores and texts of two processes equal one's, also where there are fewer documents than processes."""
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2")
    tasks = ("--tasks", "local_math,local_choice,local_perplexity", "--include_path", LOCAL, "--limit", "1")
    given = [*tasks, *SPECULATIVE, "--max_steps", "8", "--model", str(folder), "--dtype", "float32", "--seed", "1"]
    together = [*torchrun, "eval.py", *given, "--limit", "3", "--output_dir", str(tmp_path / "logs")]
    run = subprocess.run(together, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("|local_math") == 1
    rows = read(tmp_path, "eval_*_samples.csv")
    assert {row["rank"] for row in rows if row["dataset"] == "local_math"} == {"0", "1"}
    scores, lines = read(tmp_path, "eval_*[0-9].csv"), read(tmp_path, "eval_*_samples.jsonl")
    shared = {(row["task"], row["filter"], row["metric"]): float(row["value"]) for row in scores}
    said = {line["sample_id"]: line["prediction"] for line in lines if line["dataset"] == "local_math"}
    lm = make(load(str(folder), dtype="float32"), max_steps=8)
    config = EvalConfig(tasks=["local_math,local_choice,local_perplexity"], include_path=LOCAL, limit=3)
    results = evaluating.run_tasks(lm, evaluating.load_tasks(config), config)
    for row in evaluating.score_rows(results, [], lm.settings()):
        assert shared[row["task"], row["filter"], row["metric"]] == row["value"]
    for sample in results["samples"]["local_math"]:
        assert said[str(sample["doc_id"])] == sample["resps"][0][0]


def test_a_failure_elsewhere_is_reported_by_the_main_process(loaded, monkeypatch):
    failed = ({}, {}, UsageError("--max_steps 9: in process 1"))
    monkeypatch.setattr(distributed, "gather", lambda value: [value, failed])
    with pytest.raises(UsageError, match="process 1"):
        texts(make(loaded), ("hello", {"until": [], "max_gen_toks": 2}))

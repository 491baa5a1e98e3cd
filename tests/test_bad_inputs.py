"""Misuse of every script: one line that begins with `error:`, exit code 2 or 1, and nothing half-written."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.runs import ROOT, call, save_exit_friendly

SPEC = "--generation_strategy self_speculative"
ONE = "--prompt x --max_steps 4"
FEW = "--dataset top_v2 --data_path DATA --num_samples 1 --max_steps 4 --sample False"
TASK = "--tasks local_math --include_path TASKS --limit 1"
TEXT = "--model MODEL --data TMP/words.jsonl --held_out 0.5 --sequence_length 16"

# script, arguments, exit code, what the line says. MODEL, DATA, TASKS and TMP stand for folders. --model MODEL is given
# unless the arguments name one.
USAGE = [
    # every script reads its flags alike
    ("generate", "--prompt x --exit_layr 3", "did you mean --exit_layer?"),
    ("generate", "--prompt x --temp 0.5", "unknown flag --temp"),
    ("benchmark", f"{FEW} --exit-layers 3", "did you mean --exit_layer"),
    ("sweep", f"{FEW} --exit_layer_frist 3", "did you mean --exit_layer_first?"),
    ("eval", f"{TASK} --num_few_shot 3", "did you mean --num_fewshot?"),
    ("correctness", f"{FEW} --top 3", "unknown flag --top"),
    ("train", f"{TEXT} --learnig_rate 1", "did you mean --learning_rate?"),
    ("generate", "--prompt x stray", "unexpected argument 'stray'"),
    ("benchmark", "--dataset", "expected one argument"),
    ("benchmark", "--num_samples 3", "--dataset"),
    ("benchmark", f"{FEW} --seed -1", "--seed -1"),
    ("benchmark", f"{FEW} --seed nine", "--seed nine: must be a whole number"),
    ("generate", f"{ONE} --sample maybe", "--sample maybe: must be True or False"),
    ("generate", f"{ONE} --debug=maybe", "--debug maybe: must be True or False"),
    ("generate", f"{ONE} --temperature hot", "--temperature hot: must be a number"),
    ("generate", f"{ONE} --seed 99999999999", "--seed 99999999999: must be from 0 to"),
    ("generate", f"{ONE} --output_dir ''", "--output_dir ''"),
    ("generate", f"{ONE} --model ''", "--model ''"),
    # how to generate
    ("generate", f"{ONE} --exit_layer 0", "--exit_layer 0"),
    ("generate", f"{ONE} {SPEC} --exit_layer 6", "between 1 and 5"),
    ("generate", f"{ONE} --exit_layer 77", "between 1 and 5"),
    ("generate", f"{ONE} {SPEC} --exit_layer -3", "--exit_layer -3"),
    ("generate", f"{ONE} {SPEC} --exit_layer eight", "--exit_layer eight: must be a whole number"),
    ("benchmark", f"{FEW} {SPEC} --exit_layer 6", "between 1 and 5"),
    ("eval", f"{TASK} {SPEC} --exit_layer 6", "between 1 and 5"),
    ("correctness", f"{FEW} {SPEC} --exit_layer 6", "between 1 and 5"),
    ("generate", f"{ONE} {SPEC} --num_speculations -2", "--num_speculations -2"),
    ("generate", "--prompt x --max_steps 0", "--max_steps 0"),
    ("generate", f"{ONE} --generation_strategy greedy", "choose one of autoregressive, self_speculative"),
    ("generate", f"{ONE} --drafter early_exit+", "--drafter"),
    ("generate", f"{ONE} --drafter prompt_lookup", "add --generation_strategy self_speculative"),
    ("generate", f"{ONE} --temperature 1e-300", "--temperature 1e-300: must be 0, or"),
    ("generate", "--prompt_file ''", "--prompt_file ''"),
    ("generate", "--prompt '   '", "--prompt ' ': the prompt is empty"),
    ("generate", "--prompt 'a\udcff'", "is no valid text"),
    ("generate", f"{ONE} --draft_exit_threshold 0.5", "autoregressive decoding drafts nothing"),
    ("generate", f"{ONE} {SPEC} --drafter prompt_lookup --draft_exit_threshold 0.5", "prompt_lookup has no prob"),
    ("generate", f"{ONE} {SPEC} --drafter prompt_lookup --adaptive_draft_exit True", "--adaptive_draft_exit True:"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/beyond.json", "beyond.json: attn -1: a model of 6 layers has"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/none.json", "needs a sub-layer to skip"),
    ("generate", f"{ONE} {SPEC} --exit_layer 2 --carry_draft_exit True", "--carry_draft_exit True: it is for what"),
    ("generate", f"{ONE} --device_map ''", "--device_map '': choose one of"),
    ("generate", f"{ONE} --device_map {{}}", "--device_map {}: name at least one module"),
    ("generate", f"""{ONE} --device_map '{{"": "cuda:7"}}'""", "--device_map cuda:7: there is no such device"),
    ("benchmark", f"{FEW} --stop_words a --compare hf_early_exit:exit_layer=2", "leave out hf_early_exit"),
    ("generate", "--prompt_file TMP/torn.jsonl", "torn.jsonl: line 2 is not JSON"),
    ("generate", "--prompt_file TMP/wrong.jsonl", "line 1 has no field prompt"),
    ("generate", "--prompt_file TMP/number.jsonl", "line 2: the prompt is empty or no text"),
    ("generate", "--prompt_file TMP/surrogate.jsonl", "line 1: the prompt is no valid text"),
    ("train", f"{TEXT} --early_exit_scale inf", "--early_exit_scale inf"),
    ("train", f"{TEXT} --learning_rate inf", "--learning_rate inf"),
    ("train", f"{TEXT} --save_adapter TMP/x", "is for --recipe adapter"),
    ("train", f"{TEXT} --adapter_kind mlp", "--adapter_kind mlp: is for --recipe adapter"),
    ("generate", f"{ONE} --top_p 0", "--top_p 0.0"),
    ("generate", f"{ONE} --top_p 2", "--top_p 2.0"),
    ("generate", f"{ONE} --top_p nan", "--top_p nan"),
    ("generate", f"{ONE} --temperature -1", "--temperature -1.0"),
    ("generate", f"{ONE} --temperature inf", "--temperature inf"),
    ("generate", f"{ONE} --temperature nan", "--temperature nan"),
    ("generate", f"{ONE} --repetition_penalty 0", "--repetition_penalty 0.0"),
    ("generate", f"{ONE} --repetition_penalty inf", "--repetition_penalty inf"),
    ("generate", f"{ONE} --min_p 1.5", "--min_p 1.5"),
    ("generate", f"{ONE} --no_repeat_ngram_size -1", "--no_repeat_ngram_size -1"),
    ("generate", f"{ONE} --stop_words ''", "--stop_words"),
    ("generate", f"{ONE} --stop_token_ids -4", "--stop_token_ids -4"),
    ("generate", f"{ONE} --stop_token_ids 99999999", "has the ids 0 to"),
    ("generate", f"{ONE} {SPEC} --drafter ''", "--drafter ''"),
    ("generate", f"{ONE} {SPEC} --drafter early_exit+early_exit", "name each drafter once"),
    ("generate", f"{ONE} {SPEC} --drafter prompt_lookup --exit_layer 2", "it is for early_exit"),
    ("generate", f"{ONE} {SPEC} --drafter early_exit --skip_mlp_layers 1", "it is for skip_layer"),
    ("generate", f"{ONE} {SPEC} --drafter early_exit --adapter x", "it is for adapter"),
    ("generate", f"{ONE} {SPEC} --exit_layer 2 --skip_attn_layers 1", "it is for early_exit"),
    ("generate", f"{ONE} {SPEC} --skip_attn_layers ,", "write ids such as 3,5-8"),
    ("generate", f"{ONE} --stop_token_ids x", "--stop_token_ids x: must be a whole number"),
    ("generate", f"{ONE} {SPEC} --skip_attn_layers 2-", "write ids such as 3,5-8"),
    ("generate", f"{ONE} {SPEC} --skip_attn_layers 0-9999999999", "--skip_attn_layers 0-9999999999"),
    ("generate", f"{ONE} {SPEC} --skip_attn_layers 5-2", "--skip_attn_layers 5-2"),
    ("generate", f"{ONE} {SPEC} --skip_mlp_layers 6", "6"),
    ("generate", f"{ONE} {SPEC} --drafter skip_layer", "skip"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/skip.json --skip_attn_layers 1", "not both"),
    ("generate", f"{ONE} {SPEC} --exit_layer 2 --draft_exit_threshold 2", "--draft_exit_threshold 2.0"),
    ("generate", f"{ONE} {SPEC} --drafter prompt_lookup --draft_vocabulary 9", "--draft_vocabulary 9: prompt_lookup"),
    ("generate", f"{ONE} --draft_vocabulary -1", "--draft_vocabulary -1"),
    ("generate", f"{ONE} --dtype int8", "--dtype int8"),
    ("generate", f"{ONE} --device gpu", "--device gpu"),
    ("generate", f"{ONE} --device cuda:99", "--device cuda:99"),
    ("generate", f"{ONE} --model_args '{{'", "not valid JSON"),
    ("generate", f"{ONE} --model_args nonsense=1", "nonsense"),
    ("generate", f"{ONE} --model_args nonsense", "write name=value"),
    ("generate", f"{ONE} --attn_implementation magic", "--attn_implementation"),
    ("generate", f'{ONE} --device_map \'{{"nowhere": "cpu"}}\'', "--device_map nowhere"),
    # prompts
    ("generate", "--prompt ''", "the prompt is empty"),
    ("generate", "--prompt '  '", "the prompt is empty"),
    ("generate", "--prompt x --prompt_file y", "either --prompt or --prompt_file"),
    ("generate", "--prompt_file TMP/empty.txt", "empty"),
    ("generate", "--prompt_file TMP/long.txt --max_steps 4", "positions"),
    ("generate", f"{ONE} --streamer loud", "--streamer loud"),
    ("generate", f"{ONE} --trace TMP/page.pdf", "ends in .html"),
    # data
    ("benchmark", "--dataset wikitext", "--dataset wikitext"),
    ("benchmark", f"{FEW} --num_samples 0", "--num_samples 0"),
    ("benchmark", f"{FEW} --num_samples abc", "--num_samples abc: must be a whole number"),
    ("benchmark", f"{FEW} --num_samples 1e3", "--num_samples 1e3: must be a whole number"),
    ("benchmark", f"{FEW} --n_shot 2", "has no shots"),
    ("benchmark", f"{FEW} --n_shot -1", "--n_shot -1"),
    ("benchmark", f"{FEW} --template hello", "must contain {message}"),
    ("benchmark", "--dataset custom_jsonl", "--data_path"),
    # comparing, sweeping, checking
    ("benchmark", f"{FEW} --compare magic", "magic"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layer=9", "between 1 and 5"),
    ("benchmark", f"{FEW} --compare early_exit:depth=2", "there is no setting depth"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layr=2", "did you mean exit_layer?"),
    ("benchmark", f"{FEW} --compare early_exit:", "write a setting as name=value"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layer=2:exit_layer=3", "exit_layer is set twice"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layer=2.5", "exit_layer 2.5: must be a whole number"),
    ("benchmark", f"{FEW} --compare early_exit:sample=maybe", "sample 'maybe': must be True or False"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layer=2:adapter=x", "it is for adapter"),
    ("benchmark", f"{FEW} --compare skip_layer:skip_attn_layers=9", "--skip_attn_layers 9"),
    ("benchmark", f"{FEW} --compare early_exit:exit_layer=two", "must be a whole number"),
    ("benchmark", f"{FEW} --compare prompt_lookup,prompt_lookup", "named once"),
    ("sweep", f"{FEW} --exit_layer_first 0", "--exit_layer_first 0"),
    ("sweep", f"{FEW} --exit_layer_first 9", "between 1 and 5"),
    ("sweep", f"{FEW} --exit_layer_step 0", "--exit_layer_step 0"),
    ("sweep", f"{FEW} --drafter early_exit --skip_attn_layers 1", "it is for skip_layer"),
    ("sweep", f"{FEW} --num_speculations_first 5 --num_speculations_last 2", "--num_speculations_last 2"),
    ("sweep", f"{FEW} --predict True --adaptive_draft_exit", "--predict True"),
    ("sweep", f"{FEW} --predict True --draft_exit_threshold 0.5", "--predict True"),
    ("sweep", f"{FEW} --predict True --drafter prompt_lookup", "prompt_lookup is not predicted"),
    ("sweep", f"{FEW} --exit_layer 3", "a sweep sets it"),
    ("correctness", f"{FEW} {SPEC} --exit_layer two", "--exit_layer two: must be a whole number"),
    # searching
    ("search", f"{FEW} --n_trails 3", "did you mean --n_trials?"),
    ("search", "--n_trials 3", "--dataset"),
    ("search", f"{FEW} --objective quality", "choose one of speed, acceptance"),
    ("search", f"{FEW} --objective_mode guess", "choose one of score, generate"),
    ("search", f"{FEW} --objective acceptance", "--min_skipped 1"),
    ("search", f"{FEW} --n_trials 0", "--n_trials 0"),
    ("search", f"{FEW} --n_trials many", "--n_trials many: must be a whole number"),
    ("search", f"{FEW} --timeout 0", "--timeout 0"),
    ("search", f"{FEW} --timeout nan", "--timeout nan"),
    ("search", f"{FEW} --confirm -1", "--confirm -1"),
    ("search", f"{FEW} --depth 0", "--depth 0"),
    ("search", f"{FEW} --most_speculations 0", "--most_speculations 0"),
    ("search", f"{FEW} --min_skipped 0", "--min_skipped 0"),
    ("search", f"{FEW} --min_skipped 13", "--min_skipped 13"),
    ("search", f"{FEW} --drafter early_exit", "--drafter early_exit"),
    ("search", f"{FEW} --exit_layer 2", "--exit_layer 2"),
    ("search", f"{FEW} --skip_mlp_layers 1", "--skip_mlp_layers 1"),
    ("search", f"{FEW} --skip_layers TMP/skip.json", "--skip_layers"),
    ("search", f"{FEW} --num_speculations 0", "--num_speculations 0"),
    ("search", f"{FEW} --draft_exit_threshold 0.5", "--objective_mode generate"),
    ("search", f"{FEW} --batch_size 2", "--batch_size 2"),
    ("search", f"{FEW} --max_steps 1", "--max_steps"),
    ("search", f"{FEW} --tp True", "--tp True"),
    ("search", f"{FEW} --adapter x", "--adapter x"),
    ("search", f"{FEW} --storage ''", "--storage ''"),
    ("search", f"{FEW} --study_name ''", "--study_name ''"),
    # evaluating
    ("eval", "", "--tasks"),
    ("eval", "--tasks nonsense_task --include_path TASKS", "nonsense_task"),
    ("eval", f"{TASK} --limit -3", "--limit -3"),
    ("eval", f"{TASK} --limit 0", "--limit 0"),
    ("eval", f"{TASK} --limit 2.5", "whole number"),
    ("eval", "--tasks list,local_math --include_path TASKS", "--tasks list,local_math"),
    ("eval", f"{TASK} --verbosity loud", "--verbosity LOUD"),
    ("eval", f"{TASK} --gen_kwargs nonsense", "--gen_kwargs nonsense"),
    ("eval", f"{TASK} --gen_kwargs beam=4", "beam"),
    ("eval", f"{TASK} --gen_kwargs do_sample=perhaps", "do_sample perhaps"),
    ("eval", f"{TASK} --random_seed -1", "--random_seed -1"),
    ("eval", f"{TASK} --numpy_random_seed 99999999999", "--numpy_random_seed 99999999999"),
    ("eval", f"{TASK} --max_steps 5000", "--max_steps 5000"),
    ("eval", f"{TASK} --num_fewshot 10000", "--num_fewshot 10000: local_math has 2 solved examples"),
    ("eval", f"{TASK} --batch_size 0", "--batch_size 0"),
    ("eval", f"{TASK} --fewshot_as_multiturn True", "--apply_chat_template"),
    # training
    ("train", "--model MODEL", "--data"),
    ("train", f"{TEXT} --config CONFIG", "either --config"),
    ("train", f"{TEXT} --held_out 1.1", "--held_out 1.1"),
    ("train", f"{TEXT} --layer_dropout 1", "--layer_dropout 1.0"),
    ("train", f"{TEXT} --exit_curriculum sideways", "--exit_curriculum sideways"),
    ("train", f"{TEXT} --exit_curriculum draft", "--draft_exits"),
    ("train", f"{TEXT} --exit_curriculum random --draft_exits 2,6", "--draft_exits 2,6"),
    ("train", f"{TEXT} --train_steps 0", "--train_steps 0"),
    ("train", f"{TEXT} --learning_rate nan", "--learning_rate nan"),
    ("train", f"{TEXT} --learning_rate -1", "--learning_rate -1"),
    ("train", f"{TEXT} --dtype float16", "--dtype float16"),
    # measuring
    ("benchmarks.ruler", "--model nosuch", "--model nosuch"),
    ("benchmarks.ruler", "--prompts x", "--prompts x"),
    ("benchmarks.ruler", "--sample maybe", "--sample maybe"),
    ("benchmarks.ruler", "--dtype float99", "--dtype float99"),
    ("benchmarks.ruler", "--num_samples 0", "--num_samples 0"),
    ("benchmarks.breakdown", "--max_steps -3", "--max_steps -3"),
    ("benchmarks.memory", "--num_speculations 0", "--num_speculations 0"),
    ("benchmarks.skip_ranking", "--sets 0", "--sets 0"),
    ("benchmarks.ruler", "--max_steps abc", "--max_steps abc: must be a whole number"),
    ("benchmarks.ruler", "--quik", "did you mean --quick?"),
]
RUN = [
    ("generate", f"{ONE} --model TMP/nowhere", "no such folder"),
    ("generate", f"{ONE} --model TMP/text.txt", "a model is a folder"),
    ("generate", f"{ONE} --model TMP", "without config.json"),
    ("generate", f"{ONE} --model TMP/wrong.gguf", "not a GGUF file"),
    ("generate", f"{ONE} --model nosuch", "nosuch"),
    ("generate", f"{ONE} --model owner/nosuch", "hub"),
    ("generate", "--prompt_file TMP/missing.txt", "No such file"),
    ("generate", "--prompt_file TMP/wrong.gguf --max_steps 2", "not a text file"),
    ("generate", f"{ONE} --output_dir TMP/text.txt", "--output_dir"),
    ("generate", f"{ONE} --trace TMP/nowhere/page.html", "--trace"),
    ("generate", f"{ONE} {SPEC} --adapter nosuch", "--adapter nosuch"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/fraction.json", "--skip_layers"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/missing.json", "--skip_layers"),
    ("generate", f"{ONE} {SPEC} --skip_layers TMP/text.txt", "--skip_layers"),
    ("benchmark", "--dataset top_v2 --data_path TMP/nowhere", "--data_path"),
    ("benchmark", "--dataset top_v2 --data_path TMP/wrong.jsonl", "column"),
    ("benchmark", "--dataset sharegpt_gpt4 --data_path TMP/roles.jsonl", "row 0 is not of its form"),
    ("benchmark", "--dataset mt_bench --data_path TMP/roles.jsonl", "--dataset mt_bench: row 0 is not of its form"),
    ("benchmark", "--dataset custom_jsonl --data_path TMP/torn.jsonl", "torn.jsonl"),
    ("benchmark", "--dataset custom_jsonl --data_path TMP/number.jsonl", "prompt is 5; it must be a text"),
    ("benchmark", "--dataset custom_jsonl --data_path TMP/wrong.jsonl --prompt_field a", "a is 1; it"),
    ("benchmark", f"{FEW} --resume TMP/nothing.csv", "--resume"),
    ("benchmark", f"{FEW} --resume ''", "--resume"),
    ("sweep", f"{FEW} --resume TMP/nothing.csv", "--resume"),
    ("sweep", f"{FEW} --adapter x", "--adapter x"),
    ("correctness", f"{FEW} {SPEC} --exit_layer 2 --num_speculations 2 --resume TMP/nothing.csv", "--resume"),
    ("search", f"{FEW} --resume TMP/nothing.csv", "--resume"),
    ("search", f"{FEW} --storage TMP/text.txt", "--storage"),
    ("search", f"{FEW} --storage nosuch://server", "--storage nosuch://server"),
    ("eval", "--tasks local_math --include_path TMP/nowhere", "--include_path"),
    ("eval", f"{TASK} --use_cache TMP/text.txt/answers", "--use_cache"),
    ("train", "--model MODEL --data TMP/nowhere.txt", "--data"),
    ("train", "--model MODEL --data TMP/empty.txt", "--data"),
    ("train", "--model MODEL --data TMP/torn.jsonl", "--data"),
    ("train", "--model MODEL --data TMP/nothing.jsonl", "there are no rows in it"),
    ("train", "--model MODEL --data TMP/folder", "no such files in this folder"),
    ("search", f"{FEW} --storage /proc/search.db", "--storage"),
    ("benchmarks.breakdown", "--model TMP/nowhere", "no such folder"),
    ("benchmarks.memory", "--model TMP/nowhere --only early_exit", "no such folder"),
    ("train", "--config TMP/text.txt --data TMP/text.txt", "--config"),
    ("train", f"{TEXT} --save_model TMP/text.txt", "--save_model"),
    ("train", f"{TEXT} --recipe adapter --save_adapter TMP/text.txt", "--save_adapter"),
    ("train", f"{TEXT} --resume TMP/nothing", "--resume"),
    ("benchmarks.ruler", "--quick --into TMP/nothing.md#results", "--into"),
]
NO_RESULT_FILES = ("benchmarks.breakdown", "benchmarks.memory", "benchmarks.skip_ranking")
CASES = [(script, given, 2, says) for script, given, says in USAGE] + [
    (script, given, 1, says) for script, given, says in RUN
]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """A model, and files that are wrong in many ways."""
    tmp = tmp_path_factory.mktemp("files")
    (tmp / "empty.txt").write_text("\n")
    (tmp / "text.txt").write_text("some words of text, " * 200)
    (tmp / "words.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(400)))
    (tmp / "long.txt").write_text("x" * 1100)
    (tmp / "wrong.jsonl").write_text('{"a": 1}\n')
    (tmp / "number.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    (tmp / "surrogate.jsonl").write_text('{"prompt": "a \\ud800"}\n')
    (tmp / "nothing.jsonl").write_text("")
    (tmp / "roles.jsonl").write_text('{"conversations": [{"role": "user", "content": "a"}], "prompt": []}\n')
    (tmp / "folder").mkdir()
    (tmp / "torn.jsonl").write_text('{"prompt": "a"}\n{"prom')
    (tmp / "wrong.gguf").write_bytes(b"\xff\xfe\x00hello")
    (tmp / "fraction.json").write_text(json.dumps({"attn": [1.5], "mlp": []}))
    (tmp / "beyond.json").write_text(json.dumps({"attn": [-1], "mlp": []}))
    (tmp / "none.json").write_text(json.dumps({"attn": [], "mlp": []}))
    (tmp / "skip.json").write_text(json.dumps({"attn": [1], "mlp": []}))
    model = save_exit_friendly(tmp_path_factory.mktemp("model"))
    return {
        "CONFIG": str(model / "config.json"), "MODEL": str(model), "DATA": str(ROOT / "data"),
        "TASKS": str(ROOT / "data" / "tasks"), "TMP": str(tmp),
    }  # fmt: skip


@pytest.mark.parametrize(("script", "given", "code", "says"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_a_mistake_is_one_line(places, tmp_path, capsys, monkeypatch, script, given, code, says):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    arguments = shlex.split(given)
    if "--model" not in arguments and script != "train" and not script.startswith("benchmarks."):
        arguments += ["--model", "MODEL"]
    if "--output_dir" not in arguments and script not in NO_RESULT_FILES:
        arguments += ["--output_dir", str(logs)]
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    found = call(script, arguments)
    out, err = capsys.readouterr()
    bar = re.compile(r"(?<! 0\.00tok )\[\d\d:\d\d")  # of work that has begun
    lines = [line for line in err.splitlines() if line.strip() and not bar.search(line)]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert says in lines[0]
    assert (found, out) == (code, ""), err
    assert "(--debug shows where)" not in err, "a fault of ours, not foreseen"
    left = [path for path in logs.rglob("*") if path.is_file()] if Path(logs).is_dir() else []
    assert not left, left

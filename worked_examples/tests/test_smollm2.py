"""Tests of smollm2.py that need neither the model nor a network."""

import runpy
import shlex

from conftest import EXAMPLES

import grpo

SCRIPT = runpy.run_path(str(EXAMPLES / "scripts/smollm2.py"))


def test_the_sums_held_out_are_in_no_prompt_of_the_training_data():
    """Nor are their mirror images; both parts are right, and an example of a prompt is in neither."""
    seen = [{(2, 3), (4, 4)}]
    for (name, rows), length in zip(SCRIPT["sums"]().items(), (65, 32)):
        sums = [sorted(map(int, row["prompt"][-1]["content"].split("+"))) for row in rows]
        assert [row["solution"] for row in rows] == [str(x + y) for x, y in sums] and len(rows) == length, name
        seen.append(set(map(tuple, sums)))
    assert len(set.union(*seen)) == sum(map(len, seen)) == 55           # unordered pairs of ten digits


def test_the_printed_command_is_one_of_grpo_and_the_page_shows_it():
    """The page runs it in the default folder."""
    command = SCRIPT["COMMAND"].format(grpo="grpo.py", folder="smollm2")
    config, options, _ = grpo.parse_options(shlex.split(command.replace("\\\n", ""))[2:])
    assert options.dataset == "smollm2/sums_train.jsonl" and config.num_mini_batches == 2
    assert command in (EXAMPLES / "07_training_your_own_model.md").read_text()

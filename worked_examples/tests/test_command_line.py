"""What the command line of grpo.py promises (§11, §12): data, folders, checkpoints, what is printed and written."""

import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from conftest import (PROBLEMS, SMALL, assert_same_run, chat_tokenizer, cli, command, disk_full_at, lines_of,
                      make_model, question)
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo

nan = math.nan
TEXT, CHAT = dict(prompt="1+2=", solution="3"), dict(prompt=question("1+2"), solution="3")


def tree(folder):
    """Each path below a folder, and the bytes of each file."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.is_file() and path.read_bytes() for path in paths}


def to_go_on(printed):
    """The arguments of the command that a run prints: --resume_from_checkpoint and its folder."""
    _, _, *words = shlex.split(re.search("python .*grpo.py .*", printed)[0])
    assert words[0] == "--resume_from_checkpoint" and len(words) == 2
    return words


def written_by(done):
    """The folder of a run that has come to its end."""
    assert done.code == 0, done.err
    return Path(to_go_on(done.out)[1])


# Data -----------------------------------------------------------------------------------------------------------------

def load(path, rows):
    """Write rows, some of them bytes, and load them as a run does, with a small model and a chat template."""
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return grpo.load_dataset(path, make_model("Llama"), chat_tokenizer(), grpo.GRPOConfig(**SMALL))


def test_a_dataset_may_have_any_line_breaks_and_a_byte_order_mark(tmp_path):
    """In its texts, escaped or as UTF-8, and between its rows: LF or CRLF, blank lines."""
    rows = [{"prompt": "\n\r\x0b\x85\u2028ü", "more": more} for more in (None, [True, ""], 0.5)]
    for ascii, end, mark in (True, "\n", ""), (False, "\r\n\n", "\ufeff"):
        lines = [json.dumps(row, ensure_ascii=ascii) + end for row in rows]
        (tmp_path / "any").write_bytes("".join([mark, *lines]).encode())
        assert grpo.load_dataset(tmp_path / "any") == rows


@pytest.mark.parametrize("good, bad", [
    (TEXT, b'{"prompt": "\xfc", "solution": "3"}'), (TEXT, b"{oops"), (TEXT, ["1"]), (TEXT, dict(solution="3")),
    (TEXT, dict(prompt="1+2=")), (TEXT, TEXT | dict(more=1)), (TEXT, TEXT | dict(prompt="")),
    (TEXT, TEXT | dict(prompt=7)), (TEXT, TEXT | dict(prompt="1" * 55)), (TEXT, TEXT | dict(prompt="1<eos>")),
    (CHAT, CHAT | dict(prompt=[])), (CHAT, CHAT | dict(prompt=["1+2"])), (CHAT, CHAT | dict(prompt=[{"role": "user"}])),
    (CHAT, CHAT | dict(prompt=[{"content": "1+2"}])),
    (CHAT, CHAT | dict(prompt=[*question("1+2"), {"role": "assistant", "content": "3"}]))], ids=str)
def test_a_row_that_no_step_could_use_is_named_before_training(good, bad, tmp_path):
    """File and line, blank lines counted, are a note of what went wrong: no UTF-8, no JSON, no object, no prompt, other
    columns, a prompt too long for the model's positions, at its end, or answered, a message without role or text."""
    with pytest.raises(Exception) as error:
        load(tmp_path / "data.jsonl", [good, b"", bad, good])
    assert f"{tmp_path}/data.jsonl, line 3" in "".join(error.value.__notes__)


@pytest.mark.parametrize("rows", [[], [TEXT, CHAT]])
def test_a_file_without_a_row_or_of_texts_and_chats_is_named(rows, tmp_path):
    with pytest.raises(AssertionError, match=str(tmp_path)):
        load(tmp_path / "data.jsonl", rows)


def test_solutions_that_the_tokenizer_cannot_write_are_said_once(tmp_path, capsys):
    """How many, and the line of the first: no answer could be right. Its letters: a blank at the end is none."""
    for solutions, numbers in ([["3", 7, 7.0, None, "1 "], []], [["3", "é", None, 0.5], ["2", "2"]]):
        load(tmp_path / "data", [TEXT | dict(solution=solution) for solution in solutions])
        assert re.findall(r"\d+", capsys.readouterr().out.replace(str(tmp_path), "")) == numbers


@settings(deadline=None, derandomize=True, database=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_a_solution_has_one_text_and_a_number_no_exponent(number):
    """Which answers are compared with, and which small_model.py imitates: 72 for 72.0 and a box of it, "" for none."""
    assert type(number)(grpo.solution_text(number)) == number and "e" not in grpo.solution_text(number)
    texts = {None: "", nan: "", 72.0: "72", -0.5: "-0.5", 5e-05: "0.00005", r"so \boxed{72}": "72", " 72 ": "72"}
    assert [grpo.solution_text(solution) for solution in texts] == list(texts.values())


# Folders and checkpoints ----------------------------------------------------------------------------------------------

STOPPABLE = dict(max_steps=3, save_steps=1, max_completion_length=3, num_mini_batches=2, beta=0.1,
                 sync_ref_model=True, ref_model_sync_steps=2)


def go_on(data, printed):
    """Go on by the printed command, or where no checkpoint is whole, begin again, to the bits of the run that nothing
    stops. No file that was there changes."""
    whole = data.joinpath("models").resolve() / "whole"                 # one for all tests
    if not whole.exists():
        assert written_by(cli(*command(data, **STOPPABLE, output_dir=whole))) == whole
    before = tree(data)
    has_checkpoint = any(re.fullmatch(r"checkpoint-\d+", path.name) for path in before)
    folder = written_by(cli(*(to_go_on(printed) if has_checkpoint else command(data, **STOPPABLE))))
    assert before.items() <= tree(data).items()
    assert_same_run(folder, whole)
    return folder


@pytest.mark.parametrize("moment", [1, *range(10, 19)])                 # its folder is made; what a second step changes
def test_a_run_stopped_at_any_moment_goes_on_to_the_bits_of_the_whole(moment, data):
    """The disk is full at this change of the run's folder: a file opened to write, a folder made, renamed, removed.
    Metrics, texts and weights are as if nothing had happened, with a reference model and mini-batches."""
    with disk_full_at(moment, data / "out"):
        stopped = cli(*command(data, **STOPPABLE))
    assert stopped.code == 1 and "a full disk" in stopped.err
    go_on(data, stopped.out)


def test_ctrl_c_ends_a_run_with_the_command_that_goes_on(data):
    with mock.patch.object(torch.optim.AdamW, "step", side_effect=[None] * 2 + [KeyboardInterrupt]):
        stopped = cli(*command(data, **STOPPABLE))
    assert stopped.code == 1 and to_go_on(stopped.err.splitlines()[-1]) == to_go_on(stopped.out)


CARELESS_REWARDS = """
import multiprocessing, os, signal
calls, plain = [], length
def same(reward): return reward
def length(**columns):
    calls.append(1)
    if len(calls) == 1:
        with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(same, plain(**columns))
    os.chdir('/')
    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return plain(**columns)
"""


def test_a_killed_run_goes_on_and_its_rewards_may_use_processes_and_move_to_another_folder(data):
    """SIGKILL in the third step, in a process of its own, whose rewards are those of the working folder, though an old
    file of this name is elsewhere. All that it writes is in the folder that was meant."""
    text = (data / "rewards.py").read_text()
    (data / "rewards.py").write_text(text + CARELESS_REWARDS)
    (data / "old").mkdir()
    (data / "old/rewards.py").write_text("")
    words = [sys.executable, grpo.__file__, *command(data, **STOPPABLE, output_dir="a run/out")]
    killed = subprocess.run(words, cwd=data, capture_output=True, text=True, timeout=300,
                            env=os.environ | {"PYTHONPATH": f"{data}/old"})
    assert killed.returncode == -9, killed.stderr
    (data / "rewards.py").write_text(text)
    assert go_on(data, killed.stdout) == data / "a run/out-2"


def test_no_run_touches_what_it_has_not_made(data):
    """A run writes into NAME, or NAME-2, NAME-3, ..., the first that is not there, be it a file or an empty folder;
    so do many that begin at once. go_on asks the same of a run that is resumed."""
    (data / "out").write_text("mine")
    (data / "out-2").mkdir()
    before = tree(data)
    assert written_by(cli(*command(data, max_steps=1))) == data / "out-3"
    after = tree(data)
    assert before.items() <= after.items()
    assert all(path.is_relative_to(data / "out-3") for path in after.keys() - before.keys())
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(grpo.make_folder, [data / "many/out"] * 80))
    assert folders == set(data.joinpath("many").iterdir()) and len(folders) == 80


def test_all_that_a_run_is_named_by_comes_back_in_any_folder(data, monkeypatch):
    """Config, model, data and rewards of the newest whole checkpoint, by its number. Flags that come again win; other
    rewards, or another order, or no step more are refused. A checkpoint is data: one that names code is refused."""
    first = command(data, dataset="text.jsonl", output_dir="out", learning_rate=0.02, seed=7, reward_weights=[1, 2])
    options, config, _ = grpo.parse_options(first)
    assert cli(*first).code == 0
    for name in "checkpoint-10", "checkpoint-11.part":
        shutil.copytree(data / "out/checkpoint-2", data / "out" / name)
    (data / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    resumed, resumed_config, _ = grpo.parse_options(["--resume_from_checkpoint", str(data / "out"), "--max_steps", "3"])
    assert resumed_config == grpo.GRPOConfig(**vars(config) | {"max_steps": 3})
    assert vars(resumed) == vars(options) | {"resume_from_checkpoint": str(data / "out/checkpoint-10")}
    resume, rewards = ["--resume_from_checkpoint", data / "out/checkpoint-2", "--max_steps", 3], options.reward_funcs
    assert cli(*resume, "--reward_funcs", *rewards[::-1]).code == cli(*resume[:2]).code == 2
    assert cli(*resume, "--reward_funcs", *rewards).code == 0
    assert written_by(cli(*resume)) == data / "out-3"
    state = data / "out/checkpoint-2/trainer_state.pt"
    torch.save(torch.load(state, weights_only=True) | {"code": print}, state)
    assert cli(*resume).code == 1


# What is printed and written ------------------------------------------------------------------------------------------

ANSWER = r"  ('.*') -> (.*?)(?: \(cut off\))?   reward (\S+)"
SHOWN = ["reward", "frac_reward_zero_std", "entropy", "completions/clipped_ratio", "step_time", "reward_time"]


def test_the_console_shows_ten_times_the_means_since_the_last_time_and_an_answer(data):
    """Of metrics.jsonl's lines; at the start the first prompt as the model reads it, and the rewards' names.
    completions.jsonl has of each step a prompt, its answers, what each function gave them, their advantages."""
    names, weights = ["rewards.length", "think_format_reward", "rewards.nothing"], [2.0, 1.0, 1.0]
    done = cli(*command(data, dataset=data / "chat.jsonl", max_steps=20, reward_funcs=names, reward_weights=weights))
    begin, _, *printed = done.out.splitlines()
    assert repr(PROBLEMS[0]["prompt"]) in begin and ", ".join(names) in begin           # the template has added its =
    rows, groups = ([json.loads(line) for line in open(data / "out" / name)]
                    for name in ("metrics.jsonl", "completions.jsonl"))
    for step, group in enumerate(groups, 1):
        texts = [message["content"] for message, in group["completions"]]
        assert group["step"] == step and group["prompt"][0]["content"] + "=" in [row["prompt"] for row in PROBLEMS]
        assert group["rewards"]["think_format_reward"] == grpo.think_format_reward(texts)
        assert group["rewards"]["nothing"] == [None] * 4
        scores = torch.tensor(numpy.array(list(group["rewards"].values()), dtype=float).T)
        rewards = grpo.combine_rewards(scores, weights)
        torch.testing.assert_close(torch.tensor(group["advantages"]), grpo.group_advantages(rewards, 4).float())
        if step % 2 == 0:
            means = [(rows[step - 2][name] + rows[step - 1][name]) / 2 for name in SHOWN]
            numbers = re.findall(r"(-?\d[.\d]*)(%?)", printed[step - 2])
            shown = [float(number) / (100 if percent else 1) for number, percent in numbers]
            assert shown == pytest.approx([step, *means], abs=0.006)
            prompt, answer, reward = re.fullmatch(ANSWER, printed[step - 1]).groups()
            assert (prompt, answer) == (repr(group["prompt"][0]["content"]), repr(texts[0])[:90])
            assert float(reward) == pytest.approx(rewards[0].item(), abs=1e-4)
    assert step == len(printed) == 20


@pytest.mark.parametrize("reward, of_all, unscored", [("think_format_reward", 0, 0), ("rewards.nothing", None, 1)])
def test_a_stretch_in_which_no_weight_has_moved_says_so(reward, of_all, unscored, data):
    """All answers earn the same, or nobody scores them: the weights keep their bits. null is a metric of no number."""
    done = cli(*command(data, reward_funcs=reward))
    (before, _), (after, _) = map(grpo.load_model, (data / "models/Llama", written_by(done) / "checkpoint-2"))
    torch.testing.assert_close(after.state_dict(), before.state_dict(), atol=0, rtol=0)
    assert done.out.count("no weight has moved") == 2 and done.out.count("100.0% of the answers") == 2 * unscored
    for row in lines_of(data / "out"):
        assert (row["reward"], row["frac_reward_nan"], row["grad_norm"]) == (of_all, unscored, 0)


def test_held_out_rewards_are_said_when_they_are_known_and_compared_with_the_first_runs(data):
    """Any causal LM, whose own code is never run, trains on a file in float32, saves weights for from_pretrained, and
    answers another file greedily: before training, each eval_steps and at the end, for each reward function."""
    names = ["rewards.length", "accuracy_reward"]
    options = dict(dataset=data / "chat.jsonl", eval_dataset=data / "text.jsonl", reward_funcs=names)
    done = cli(*command(data, **options, eval_steps=2, max_steps=5))
    again = cli(*to_go_on(done.out), "--max_steps", 7)
    said = [re.findall(r"^(?:  step (\d): )?held-out length: (\S+)(?: -> (\S+))? \(greedy, 12 problems\)$", text, re.M)
            for text in (done.out, again.out)]
    (_, first, _), *_ = said[0]
    known = {row["step"]: f"{row['eval_rewards/length/mean']:.2f}" for row in lines_of(written_by(again))
             if "eval_rewards/accuracy_reward/mean" in row}
    assert list(known) == [2, 4, 5, 6, 7] and done.out.index("held-out") < done.out.index(" takes the run")
    assert said == [[("", first, ""), ("2", first, known[2]), ("4", first, known[4]), ("", first, known[5])],
                    [("6", first, known[6]), ("", first, known[7])]]
    for folder, mean in (data / "models/Llama", first), (written_by(again) / "checkpoint-7", known[7]):
        model, tokenizer = grpo.load_model(folder)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        _, config, _ = grpo.parse_options(command(data))
        r = grpo.sample_rollout(model, tokenizer, PROBLEMS, config)
        assert f"{grpo.compute_rewards(grpo.load_reward_funcs(names[:1]), r).nanmean():.2f}" == mean != known[5]


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, answers and accuracy, GRPO, answers and accuracy; a resume begins with no cold start, and compares
    with the first run's accuracy. Flags win over tiny's sizes."""
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    problems, held_out = grpo.tiny_problems(3)
    assert len(problems) == 6061 and len(held_out) == 500
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:64], held_out[:50]))
    cold_start = mock.Mock(wraps=functools.partial(grpo.cold_start, steps=3))
    monkeypatch.setattr(grpo, "cold_start", cold_start)
    flags = ["--generation_batch_size", 32, "--max_completion_length", 8, "--output_dir", tmp_path / "out"]
    done = cli("--model", "tiny", *flags, "--max_steps", 2)
    again = cli(*to_go_on(done.out), "--max_steps", 3)
    for text, steps, answers in (done.out, 2, 4 + 2 + 4), (again.out, 1, 1 + 4):
        assert text.count(": reward ") == steps and len(re.findall(ANSWER, text)) == answers
        for name in "accuracy_reward", "think_format_reward":
            assert re.search(rf"^held-out {name}: \d\.\d\d -> \d\.\d\d \(greedy, 50 problems\)$", text, re.M)
    assert cold_start.call_count == 1


@pytest.mark.parametrize("code, options, named", [
    # What would do nothing, or harm, in silence is one line below the usage.
    (2, dict(learning_rate=-0.01), "learning_rate"), (2, dict(epsilon=nan), "epsilon"), (2, dict(delta=1.1), "delta"),
    (2, dict(temperature=0), "temperature"), (2, dict(num_generations=3), "generation_batch_size"),
    (2, dict(num_mini_batches=9), "num_mini_batches"), (2, dict(num_gen=4), "--num_gen"),
    (2, dict(model="tiny"), "--dataset"), (2, dict(dataset=None), "--dataset"),
    (2, dict(epsilon=0.1, policy_loss="cispo"), "epsilon"), (2, dict(sync_ref_model=True), "sync_ref"),
    # All else is Python's own error, whole: no weights of a head (none are drawn), a row, a name that is nowhere.
    (1, dict(model="models/judge"), "lm_head.weight"), (1, dict(dataset="rewards.py"), "rewards.py, line 1"),
    (1, dict(reward_funcs="accuracy"), "accuracy_reward")], ids=str)
def test_a_run_that_is_refused_makes_nothing(code, options, named, data):
    """The last line names what is wrong."""
    before, refused = tree(data), cli(*command(data, **options))
    *above, line = refused.err.splitlines()
    assert refused.code == code and named in line
    assert "Traceback" in refused.err if code == 1 else len(above) == 1 and refused.out == ""
    assert tree(data) == before

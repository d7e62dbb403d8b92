"""What homework.py --grade does: ask the laws of a student's functions, and give points.

Each function is asked in a process of its own, in which it stands in grpo.py; the others are grpo.py's. So a mistake
costs its own function's points, not those of its callers, and a file that exits, or does not end in time, ends that
process alone. This is no sandbox: see README.md.
"""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from worked_examples.check_your_own import check
from worked_examples.course import homework

SECONDS = 60                                                            # for the import of a file, and for each law
STEP = "one step of train"
FORMULA = {STEP: 6, "grpo_loss": 8, "group_advantages": 4, "per_token_logps": 4, "importance_ratio": 4,
           "clipped_surrogate_loss": 4, "kl_estimate": 4, "aggregate": 4}        # points; the other functions 2
MAIN = [name for name in homework.exercises(homework.GRPO) if name != "process_advantages"]
FURTHER = ["process_advantages", *homework.exercises(homework.VARIANTS)]
fork = multiprocessing.get_context("fork")                              # the laws are collected once for all processes


# The student's process ------------------------------------------------------------------------------------------------

def examine(path, name, laws, answer):
    """Import a file, ask about a function of it, and answer {mark: why its points are lost}."""
    signal.alarm(SECONDS)                                               # then the process ends, whatever it does
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)                                                 # what a file prints is not shown
    os.dup2(nowhere, 2)
    sys.modules["grpo"] = None                                          # importing it is an error
    called = pytest.CallInfo.from_call(lambda: check.load(path), "setup")
    if called.excinfo:
        return answer.send({"formula": called.excinfo.exconly()})
    module, lost = called.result, {}
    if name == STEP:
        called = pytest.CallInfo.from_call(lambda: other_metrics(module), "call")
        why = called.excinfo.exconly() if called.excinfo else called.result
        lost = {"formula": why} if why else {}
    elif name:
        put(module, name)
    for law in laws:
        mark = check.about(law)[1]
        if mark not in lost and "formula" not in lost:                  # one reason is enough
            signal.alarm(SECONDS)
            reports = runtestprotocol(law, log=False)
            lost |= {mark: f"{law.name}: {reason_of(report.longreprtext)}" for report in reports if report.failed}
    answer.send(lost)


def put(module, name):
    """The student's function into grpo.py, and grpo.py's others into the student's file."""
    for source in (grpo, check.variants):
        if name in vars(source):
            setattr(source, name, vars(module)[name])
        for other in check.NAMES:
            if other in vars(source):
                setattr(module, other, vars(source)[other])


def reason_of(text):
    """Of a failure's text: what is expected and what came, or the error."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if line.startswith(("expected ", "got "))]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Failed"))]
    return "; ".join(telling or errors or lines[:1])


def one_step():
    """The metrics of a step of train: two updates, prompts of different lengths, a model that is not trained."""
    config = grpo.GRPOConfig(max_steps=1, num_generations=4, generation_batch_size=16, per_device_train_batch_size=8,
                             max_completion_length=8, num_iterations=2, beta=0.1, learning_rate=1e-3)
    policy, tokenizer = grpo.load_model("tiny")
    problems = [row | {"prompt": row["prompt"][i % 3:]} for i, row in enumerate(grpo.tiny_problems(0)[0])]

    def length(completions, **columns):                                 # in which the answers of a group differ
        return [len(text) % 3 for text in completions]

    rewards = [grpo.accuracy_reward, grpo.think_format_reward, length]
    _, _, metrics = next(grpo.train(policy, tokenizer, problems, rewards, config))
    return metrics | {"step_time": 0}


def other_metrics(module):
    """Take a step with grpo.py's functions, then with all of the student's: which metrics differ?"""
    want = one_step()
    vars(grpo).update({name: vars(module)[name] for name in MAIN})
    got = one_step()
    wrong = [name for name in got if got[name] != pytest.approx(want[name], rel=1e-3, abs=1e-5)]
    return f"other metrics than grpo.py's: {', '.join(wrong)}" if wrong else ""


# The grader's process -------------------------------------------------------------------------------------------------

def ask(path, name="", laws=()):
    """What a process of its own answers about a function; without a name, about the import of the file."""
    receiver, answer = fork.Pipe(duplex=False)
    process = fork.Process(target=examine, args=(path, name, laws, answer))
    process.start()
    answer.close()                                                      # so that the process alone holds it
    try:
        return receiver.recv()
    except EOFError:
        process.join()
    in_time = process.exitcode != -signal.SIGALRM
    return {"formula": f"ends with exit code {process.exitcode}" if in_time else f"does not end in {SECONDS} seconds"}


class Exam:
    """A plugin of pytest: when the laws are collected, it asks about one function after another."""

    def __init__(self, path, names):
        self.path, self.names, self.rows = path, names, []              # (function, mark, why its points are lost)

    def pytest_runtestloop(self, session):
        sys.modules["test_grpo"].TOLERANCE = 1e-6
        sys.modules["test_grpo"].MODEL_TOLERANCE = 1e-5
        grpo.tiny_model(grpo.tiny_tokenizer(), 0)                       # imports transformers, once for all processes
        unusable = ask(self.path)
        written = [] if unusable else homework.written(self.path)
        for name in self.names:
            laws = [item for item in session.items if check.about(item)[0] == name]
            missing = [part for part in (MAIN if name == STEP else [name]) if part not in written]
            if missing:
                lost = unusable or {"formula": "not written: " + ", ".join(missing)}
            else:
                lost = ask(self.path, name, laws)
            for mark in ("formula", "beyond", "errors"):
                if mark == "formula" or mark in [check.about(law)[1] for law in laws]:
                    why = "the formula is wrong" if "formula" in lost and mark != "formula" else lost.get(mark, "")
                    self.rows.append((name, mark, why))
        return True


def grade(path, word="", json_file=None):
    """Print the points of each function, and why it lost some. 0 if none is lost."""
    exam, tests = Exam(path, [name for name in [*MAIN, *FURTHER, STEP] if word in name]), []
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*map(str, check.LAWS), *check.OPTIONS, "beyond or not beyond", "--tb=native", "-s"], [exam])
    for name, mark, why in exam.rows:
        points = FORMULA.get(name, 2) if mark == "formula" else 1
        tests.append(dict(name=f"{name}, {mark}", score=0 if why else points, max_score=points, output=why))
        print(f"{name + ', ' + mark:40}{tests[-1]['score']} of {points}  {why}".rstrip())
    score, highest = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    print(f"{'all':39}{score} of {highest}")
    if json_file:
        Path(json_file).write_text(json.dumps(dict(score=score, tests=tests), indent=1), encoding="utf-8")
    return int(score < highest)

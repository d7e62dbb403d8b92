"""What homework.py --grade does: ask the laws of a student's functions in a process of its own, and give points.

While one function is asked, the others are grpo.py's: a mistake costs the points of its own function, not of its callers.
What a file prints is not shown. A file that does not end in time, or exits, ends its process; the function that was asked
has its reason then, and a new process asks the rest. This is no sandbox: see README.md.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import grpo
from worked_examples.check_your_own import check
from worked_examples.course import homework

SECONDS = int(os.environ.get("GRADING_SECONDS", 60))                    # for the import of a file, and for each law
FORMULA = dict(group_advantages=4, per_token_logps=4, importance_ratio=4, clipped_surrogate_loss=4, kl_estimate=4,
               aggregate=4, grpo_loss=8)                                # points; the other functions 2
STEP = "one step of train"                                              # 6 points
MAIN = [name for name in homework.exercises(homework.GRPO) if name != "process_advantages"]
FURTHER = ["process_advantages", *homework.exercises(homework.VARIANTS)]


# The student's process ------------------------------------------------------------------------------------------------

class Exam(check.Laws):
    """A plugin of pytest, which writes a line into a file when a law is asked, and one when it is answered."""

    def __init__(self, module, path, word):
        super().__init__(module)
        self.path, self.word, self.tolerance = path, word, 1e-6
        self.lines = lines_of(path)
        self.failed = {(function, mark) for function, mark, _, why in self.lines if why}

    def watched(self, name, function):
        """The student's function while it is asked, else ours."""
        ours = vars(grpo).get(name) or vars(check.variants)[name]

        def call(*args, **options):
            return function(*args, **options) if name == self.asked[0] else ours(*args, **options)
        return call

    def note(self, law, why):
        with open(self.path, "a", encoding="utf-8") as file:
            print(json.dumps([*self.asked[:2], law, why]), file=file)

    def pytest_runtest_setup(self, item):
        super().pytest_runtest_setup(item)
        function, mark = self.asked[:2]
        asked_before = any(law == item.nodeid for _, _, law, _ in self.lines)
        lost = (function, mark) in self.failed or (function, "formula") in self.failed
        if self.word not in function or asked_before or lost:
            pytest.skip("this law has been asked, or its points are lost")
        self.note(item.nodeid, None)
        signal.alarm(SECONDS)                                           # ends the process, whatever it does then

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.note(report.nodeid, reason_of(report.longreprtext) if report.failed else "")
            if report.failed:
                self.failed.add(self.asked[:2])


def reason_of(text):
    """Of a failure's text: the input, what is expected, what came; or the error."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    telling = [line for line in lines if line.startswith(("expected ", "got ", "hint "))]
    errors = [line for line in lines if "Error" in line]
    return "; ".join(" ".join(line.split()) for line in telling or errors[-1:] or lines[:1])


def one_step(module):
    """The metrics of a step of train with two updates, prompts of different lengths, a model that is not trained."""
    config = grpo.GRPOConfig(max_steps=1, num_generations=4, generation_batch_size=16, per_device_train_batch_size=8,
                             max_completion_length=8, num_iterations=2, beta=0.1, learning_rate=1e-3)
    policy, tokenizer = grpo.load_model("tiny")
    problems = [row | {"prompt": row["prompt"][i % 3:]} for i, row in enumerate(grpo.tiny_problems(0)[0])]

    def length(completions, **columns):                                 # in which the answers of a group differ
        return [len(text) % 3 for text in completions]

    rewards = [module.accuracy_reward, module.think_format_reward, length]
    _, _, metrics = next(grpo.train(policy, tokenizer, problems, rewards, config))
    return metrics


def examine(path, report, word):
    """Ask all laws, then a step of train with all functions of the main line."""
    modules = dict.fromkeys(["grpo", "worked_examples.scripts.variants"])
    usual = {name: sys.modules[name] for name in modules}
    sys.modules.update(modules)                                         # importing them is an error
    signal.alarm(SECONDS)
    try:
        module = check.load(path)
    except BaseException as error:                                      # sys.exit, too
        Path(report).write_text(json.dumps(["", "formula", "import", f"{type(error).__name__}: {error}"]) + "\n")
        raise
    sys.modules.update(usual)
    names = homework.written(path)
    mine = {name: vars(module)[name] for name in MAIN if name in names and name in vars(module)}
    exam = Exam(module, report, word)
    pytest.main([*map(str, check.LAWS), *"-p no:cacheprovider -p no:terminal --noconftest -W ignore".split()], [exam])
    if not word:
        exam.asked = STEP, "formula"
        exam.note(STEP, None)
        left = [name for name in MAIN if name not in mine]
        exam.note(STEP, f"{', '.join(left)}: not written" if left else difference(mine, module))
    signal.alarm(0)
    with open(report, "a") as file:
        print(json.dumps(["", "", "end", ""]), file=file)


def difference(mine, module):
    """Where the metrics of a step with a student's functions differ from those of grpo.py's own."""
    want = one_step(grpo)
    vars(module).update(mine)
    vars(grpo).update(mine)
    got = one_step(grpo)
    for name in want.keys() - {"step_time"}:
        if got.get(name) != pytest.approx(want[name], rel=1e-3, abs=1e-5, nan_ok=True):
            return f"{name}: expected {want[name]}, got {got.get(name)}"
    return ""


# The grader's process -------------------------------------------------------------------------------------------------

def lines_of(report):
    """(function, mark, law, why) for each time that a law was asked (why: None) or answered ("": it holds)."""
    return [json.loads(line) for line in Path(report).read_text(encoding="utf-8").splitlines()]



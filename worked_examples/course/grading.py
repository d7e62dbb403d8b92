"""What homework.py --grade does: ask the laws of a student's functions in a process of its own, and give points.

While one function is asked, the others are grpo.py's: a mistake costs its own function's points, not those of its
callers. A file that exits, or does not end in time, ends its own process. The function that was asked loses its points,
and a new process asks the rest. This is no sandbox: see README.md.
"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from worked_examples.check_your_own import check
from worked_examples.course import homework

SECONDS = 60                                                            # for the import of a file, and for each law
STEP = "one step of train"
FORMULA = {STEP: 6, "grpo_loss": 8, "group_advantages": 4, "per_token_logps": 4, "importance_ratio": 4,
           "clipped_surrogate_loss": 4, "kl_estimate": 4, "aggregate": 4}        # points; the other functions 2
LACKS = {"beyond": [STEP, "truncated_importance_ratio"],                # no law of this kind; else a point for each
         "errors": [STEP, "make_completion_mask", "entropy_from_logits", "clip_ratio", "think_format_reward",
                    "leave_one_out_advantages"]}
MAIN = [name for name in homework.exercises(homework.GRPO) if name != "process_advantages"]
FURTHER = ["process_advantages", *homework.exercises(homework.VARIANTS)]


# The student's process ------------------------------------------------------------------------------------------------

def note(report, *line):
    """A line of the report: function, mark, and why it is wrong: a text, "" if it is right, null while it is asked."""
    with open(report, "a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


class Exam(check.Laws):
    """check.py's plugin of pytest; it asks one function after another, and writes the report."""

    def __init__(self, module, names, report):
        super().__init__(module)
        self.names, self.report, self.tolerance = names, report, 1e-6

    def watched(self, name, function):
        """The student's function while a law about it is asked, else grpo.py's."""
        ours = vars(grpo).get(name) or vars(check.variants)[name]

        def call(*args, **options):
            return function(*args, **options) if name == self.asked[0] else ours(*args, **options)
        return call

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for name in self.names for item in items if check.about(item)[0] == name]

    def pytest_runtest_setup(self, item):
        super().pytest_runtest_setup(item)
        if self.is_broken(self.asked[0]):                               # one reason is enough
            pytest.skip()
        note(self.report, *self.asked, None)
        signal.alarm(SECONDS)                                           # then the process ends, whatever it does

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            law = report.nodeid.rpartition("::")[2]
            note(self.report, *self.asked, "" if report.passed else f"{law}: {reason_of(report.longreprtext)}")


def reason_of(text):
    """Of a failure's text: what is expected and what came, or the error."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if line.startswith(("expected ", "got "))]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Failed"))]
    return "; ".join(telling or errors or lines[:1])


def one_step(functions):
    """The metrics of a step of train: two updates, prompts of different lengths, a model that is not trained."""
    vars(grpo).update(functions)
    config = grpo.GRPOConfig(max_steps=1, num_generations=4, generation_batch_size=16, per_device_train_batch_size=8,
                             max_completion_length=8, num_iterations=2, beta=0.1, learning_rate=1e-3)
    policy, tokenizer = grpo.load_model("tiny")
    problems = [row | {"prompt": row["prompt"][i % 3:]} for i, row in enumerate(grpo.tiny_problems(0)[0])]

    def length(completions, **columns):                                 # in which the answers of a group differ
        return [len(text) % 3 for text in completions]

    rewards = [grpo.accuracy_reward, grpo.think_format_reward, length]
    _, _, metrics = next(grpo.train(policy, tokenizer, problems, rewards, config))
    return metrics | {"step_time": 0}


def examine(path, report, names):
    """Import a file, ask the laws of its functions, then a step of train with all functions of the main line."""
    note(report, "", "", None)
    sys.modules["grpo"] = None                                          # importing it is an error
    signal.alarm(SECONDS)
    module = check.load(path)
    note(report, "", "", "")
    functions = {name: vars(module)[name] for name in homework.written(path)}
    for name in names:
        if name not in functions and name != STEP:
            note(report, name, "formula", "not written")
    if functions:
        exam = Exam(module, [name for name in names if name in functions], report)
        pytest.main([*map(str, check.LAWS), *check.OPTIONS, "beyond or not beyond", "--tb=native"], [exam])
    if STEP in names:
        left = [name for name in MAIN if name not in functions]
        note(report, STEP, "formula", f"not written: {', '.join(left)}" if left else None)
        if not left:
            signal.alarm(0)                                             # transformers is imported at this point
            want = one_step({})
            signal.alarm(SECONDS)
            vars(module).update(functions)
            got = one_step({name: functions[name] for name in MAIN})
            wrong = [name for name in got if got[name] != pytest.approx(want[name], rel=1e-3, abs=1e-5)]
            note(report, STEP, "formula", f"other metrics than grpo.py's: {', '.join(wrong)}" if wrong else "")


# The grader's process -------------------------------------------------------------------------------------------------

def ask(path, names):
    """{(function, mark): why its points are lost, or ""}, from as many processes as it takes."""
    found = {}
    while names:
        with tempfile.TemporaryDirectory() as folder:
            report, errors = Path(folder, "report"), Path(folder, "errors")
            command = [sys.executable, "-B", __file__, str(SECONDS), str(Path(path).resolve()), str(report), *names]
            with open(errors, "w") as file:
                code = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                      stderr=file).returncode
            lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
            said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        for function, mark, why in lines:
            found[function, mark] = found.get((function, mark)) or why or ""
        function, mark, why = lines[-1]
        if why is not None:
            break
        reason = f"does not end in {SECONDS} seconds" if code == -signal.SIGALRM else f"ends with exit code {code}"
        ended = [function] if function else names                       # without a function it was the import
        found |= {(name, "formula"): ": ".join([reason, *said]) for name in ended}
        names = names[names.index(ended[-1]) + 1:]
    return found


def grade(path, word="", json_file=None):
    """Print the points of each function, and why it lost some. 0 if none is lost."""
    names = [name for name in [*MAIN, *FURTHER, STEP] if word in name]
    found, tests = ask(path, names), []
    for name in names:
        wrong = found[name, "formula"]
        rows = {"formula": (FORMULA.get(name, 2), wrong)}
        for mark in ("beyond", "errors"):
            if name not in LACKS[mark]:
                rows[mark] = (1, "the formula is wrong" if wrong else found[name, mark])
        for mark, (points, why) in rows.items():
            tests.append(dict(name=f"{name}, {mark}", score=0 if why else points, max_score=points, output=why))
    for test in tests:
        print(f"{test['name']:40}{test['score']} of {test['max_score']}  {test['output']}".rstrip())
    score, highest = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    print(f"{'all':39}{score} of {highest}")
    if json_file:
        Path(json_file).write_text(json.dumps(dict(score=score, tests=tests), indent=1), encoding="utf-8")
    return int(score < highest)


if __name__ == "__main__":
    SECONDS = int(sys.argv[1])
    examine(*sys.argv[2:4], sys.argv[4:])

"""What homework.py --grade does: ask the laws of a student's functions in a process of its own, and give points.

While one function is asked, the others are grpo.py's: a mistake costs its own function's points, not those of its
callers. A file that exits, or does not end in time, ends its own process; the function that was asked loses its points,
and a new process asks the others. This is no sandbox: see README.md.
"""

import json
import signal
import subprocess
import sys
import tempfile
import types
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
MAIN = [name for name in homework.exercises(homework.GRPO) if name != "process_advantages"]
FURTHER = ["process_advantages", *homework.exercises(homework.VARIANTS)]


# The report is a file of lines, each a list in JSON: function, mark ("formula", "beyond", "errors"), law, and why it is
# broken: a text, "" if it holds, null while it is asked.

def lines_of(report):
    return [json.loads(line) for line in Path(report).read_text(encoding="utf-8").splitlines()]


def note(report, *line):
    with open(report, "a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


# The student's process ------------------------------------------------------------------------------------------------

class Exam(check.Laws):
    """A plugin of pytest: it writes the report. Laws that the report has already are not asked again."""

    def __init__(self, module, names, report, word, seconds):
        super().__init__(module)
        self.names, self.report, self.word, self.seconds, self.tolerance = names, report, word, seconds, 1e-6
        lines = lines_of(report)
        self.known = {law for _, _, law, _ in lines}
        self.lost = {(function, mark): why for function, mark, _, why in lines if why}

    def watched(self, name, function):
        """The student's function while a law about it is asked, else grpo.py's."""
        ours = vars(grpo).get(name) or vars(check.variants)[name]

        def call(*args, **options):
            return function(*args, **options) if name == self.asked[0] else ours(*args, **options)
        return call

    def pytest_runtest_setup(self, item):
        super().pytest_runtest_setup(item)
        function, mark = self.asked[:2]
        if item.nodeid in self.known or self.word not in function:
            pytest.skip()
        lost = self.lost.get((function, "formula")) or self.lost.get((function, mark))
        if function not in self.names:
            lost = self.lost.get(("", "formula"), "not written")
        note(self.report, function, mark, item.nodeid, lost)
        if lost:
            pytest.skip()
        signal.alarm(self.seconds)                                      # then the process ends, whatever it does

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            law = report.nodeid.rpartition("::")[2]
            why = "" if report.passed else f"{law}: {reason_of(report.longreprtext)}"
            note(self.report, *self.asked[:2], report.nodeid, why)
            if why:
                self.lost[self.asked[:2]] = why


def reason_of(text):
    """Of a failure's text: what is expected and what came, or the error."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    telling = [line for line in lines if line.startswith(("expected ", "got "))]
    errors = [line for line in lines if line.partition(":")[0].endswith("Error")]
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


def examine(path, report, word, seconds):
    """Import a file, ask the laws of its functions, then a step of train with all functions of the main line."""
    module, names = types.ModuleType("nothing"), []
    if not any(law == "import" and why for _, _, law, why in lines_of(report)):
        note(report, "", "formula", "import", None)
        sys.modules["grpo"] = None                                      # importing it is an error
        signal.alarm(seconds)
        module = check.load(path)
        names = [name for name in homework.written(path) if name in check.NAMES]
        note(report, "", "formula", "import", "")
    mine = {name: vars(module)[name] for name in names}
    exam = Exam(module, names, report, word, seconds)
    pytest.main([*map(str, check.LAWS), *check.OPTIONS, "beyond or not beyond", "--tb=native"], [exam])
    if not word and STEP not in exam.known:
        left = [name for name in MAIN if name not in names]
        note(report, STEP, "formula", STEP, f"not written: {', '.join(left)}" if left else None)
        if not left:
            signal.alarm(seconds)
            want = one_step({})
            vars(module).update(mine)
            got = one_step({name: mine[name] for name in MAIN})
            wrong = [name for name in got if got[name] != pytest.approx(want[name], rel=1e-3, abs=1e-5)]
            note(report, STEP, "formula", STEP, f"other metrics than grpo.py's: {', '.join(wrong)}" if wrong else "")
    note(report, "", "", "end", "")


# The grader's process -------------------------------------------------------------------------------------------------

def ask(path, word):
    """{(function, mark): why its points are lost, or ""}, from as many processes as it takes."""
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder, "report"), Path(folder, "errors")
        report.touch()
        for _ in range(len(MAIN + FURTHER) + 3):                        # each process asks more than the last
            command = [sys.executable, "-B", __file__, str(Path(path).resolve()), str(report), word, str(SECONDS)]
            with open(errors, "w") as file:
                try:
                    code = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                          stderr=file, timeout=20 * SECONDS).returncode
                except subprocess.TimeoutExpired:
                    code = -signal.SIGALRM
            function, mark, law, why = lines_of(report)[-1]
            if law == "end":
                break
            said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            reason = f"does not end in {SECONDS} seconds" if code == -signal.SIGALRM else f"ends with exit code {code}"
            note(report, function, "formula", law, ": ".join([reason, *said]))
        reasons = {}
        for function, mark, law, why in lines_of(report):
            reasons[function, mark] = reasons.get((function, mark)) or why or ""
        return reasons


def points_of(path, word=""):
    """Rows (function, mark, points, why they are lost or "")."""
    reasons, rows = ask(path, word), []
    for name in [name for name in [*MAIN, STEP, *FURTHER] if (name, "formula") in reasons]:
        wrong = "the formula is wrong" if reasons[name, "formula"] else ""
        rows.append((name, "formula", FORMULA.get(name, 2), reasons[name, "formula"]))
        for mark in ("beyond", "errors"):
            if (name, mark) in reasons:
                rows.append((name, mark, 1, wrong or reasons[name, mark]))
    return rows


def grade(path, word="", json_file=None):
    """Print the points of each function, and why it lost some. 0 if none is lost."""
    rows = points_of(path, word)
    parts = {name: [name] for name in dict.fromkeys(row[0] for row in rows)}
    for title, names in {**parts, "the main line": [*MAIN, STEP], "further exercises": FURTHER}.items():
        part = [row for row in rows if row[0] in names]
        earned, highest = sum(row[2] for row in part if not row[3]), sum(row[2] for row in part)
        print(f"{title:30}{earned:3} of {highest}")
        if title in parts:
            for _, mark, points, why in part:
                if why and why != "the formula is wrong":
                    print(f"    {mark}: {why}")
    if json_file:
        tests = [dict(name=f"{name}, {mark}", score=0 if why else points, max_score=points, output=why)
                 for name, mark, points, why in rows]
        score = sum(test["score"] for test in tests)
        Path(json_file).write_text(json.dumps(dict(score=score, tests=tests), indent=1), encoding="utf-8")
    return int(any(why for *_, why in rows))


if __name__ == "__main__":
    examine(*sys.argv[1:4], int(sys.argv[4]))

"""What homework.py --grade does: ask the laws of a student's functions, and give points.

Each function is asked in a process of its own, in which it is in grpo.py; the others are grpo.py's. So a mistake
costs its own function's points, not those of its callers, and a file that exits, or does not end in time, ends that
process alone. This is no sandbox: see README.md.
"""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from worked_examples.check_your_own import check

SECONDS = 60                                                            # for the import of a file, and for each law
FORMULA = {"grpo_loss": 14, "group_advantages": 4, "per_token_logps": 4, "importance_ratio": 4,
           "clipped_surrogate_loss": 4, "kl_estimate": 4, "aggregate": 4}        # points; the other functions 2
fork = multiprocessing.get_context("fork")                              # the laws are collected once for all processes


@functools.cache
def collect(*files):
    """The laws of these files, as pytest finds them: the test, and a call without arguments that asks it."""
    tests = []
    plugin = SimpleNamespace(pytest_collection_finish=lambda session: tests.extend(session.items))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check.pytest_alone(*map(str, files), "--collect-only", "-m", "", plugin=plugin)
    if code:
        sys.exit(f"the laws cannot be collected:\n{out.getvalue()}")
    rows = [test.callspec.params if hasattr(test, "callspec") else {} for test in tests]
    return [(test, functools.partial(test.obj, **row)) for test, row in zip(tests, rows)]


def failure(call, law=None):
    """Why a call fails, in one line: what is expected, what came, or the error; its input. "" if it does not fail."""
    signal.alarm(SECONDS)                                               # then the process ends, whatever it does
    error = pytest.CallInfo.from_call(call, "call").excinfo
    if error is None:
        return ""
    check.name_the_numbers(error.value, law)
    is_difference = error.errisinstance(pytest.fail.Exception)
    why = error.value.msg if is_difference else f"{error.typename}: {error.value}"
    return " ".join("\n".join([why, *getattr(error.value, "__notes__", [])]).split())         # the notes: the input


def enter(path):
    """Import a file in this process: why this fails, or ""."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)                                                 # what the file prints is not shown
    os.dup2(nowhere, 2)
    sys.modules["grpo"] = None                                          # importing it is an error
    return failure(lambda: check.load(path))


def examine(path, name, laws):
    """Put this function of a file into grpo.py and ask: {mark: for all options "", or why wrong}, or why all is."""
    enter(path)
    mine, found = sys.modules["your_file"], dict.fromkeys(laws, ["the formula is wrong"])
    if not check.is_written(mine, name):
        return "not written"
    check.put(mine, [name])
    for mark, by_options in laws.items():                               # the formula first
        failures = [(f"{law.originalname}: {why}" for law, call in asked if (why := failure(call, law)))
                    for asked in by_options.values()]
        found[mark] = [next(reasons, "") for reasons in failures]
        if any(found["formula"]):
            break
    return found


def in_a_process(function, *arguments):
    """What a function returns in a process of its own; a text says how this process ended before it did."""
    receiver, answer = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: answer.send(function(*arguments)))
    process.start()
    answer.close()                                                      # so that the process alone holds it
    try:
        return receiver.recv()
    except EOFError:
        process.join()
    hangs = process.exitcode == -signal.SIGALRM
    return f"does not end in {SECONDS} seconds" if hangs else f"ends with exit code {process.exitcode}"


def grade(path, word="", json_file=None):
    """Print the points of each function, shared out among the options of its laws, and why some are lost. 0 if none."""
    laws = {name: {"formula": {}, "beyond": {}, "errors": {}} for name in check.NAMES if word in name}
    if not laws:
        sys.exit(f"-k: got {word!r}; allowed is a part of a function's name")
    for law, call in collect(*check.LAWS):
        (name, mark), row = check.about(law), call.keywords
        if name in laws:
            options = row.get("options", {}) | {key: row[key] for key in ("loss_type", "policy_loss") if key in row}
            laws[name][mark].setdefault(str(options), []).append((law, call))
    vars(sys.modules["test_grpo"]).update(TOLERANCE=1e-6, MODEL_TOLERANCE=1e-5)
    unusable = in_a_process(enter, path)
    tests = []
    for name in laws:
        found = unusable or in_a_process(examine, path, name, laws[name])
        for mark, asked in laws[name].items():
            if asked:
                wrong = [found] if isinstance(found, str) else found[mark]
                points, why = FORMULA.get(name, 2) if mark == "formula" else 1, next(filter(None, wrong), "")
                score = points * wrong.count("") // len(wrong)
                tests.append(dict(name=f"{name}, {mark}", score=score, max_score=points, output=why))
                if why != "not written":
                    print(f"{name + ', ' + mark:40}{score} of {points}  {why}".rstrip(), flush=True)
    missing = [test for test in tests if test["output"] == "not written"]
    if missing:
        names = dict.fromkeys(test["name"].split(",")[0] for test in missing)
        print(f"{'not written':40}0 of {sum(test['max_score'] for test in missing)}  {', '.join(names)}")
    score, highest = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    print(f"{'all':39}{score} of {highest}")
    if json_file:
        Path(json_file).write_text(json.dumps(dict(score=score, tests=tests), indent=1), encoding="utf-8")
    return int(score < highest)

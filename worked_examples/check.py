"""Say of each function of a file whether it computes what grpo.py does: the same, something different, or not there.

    python worked_examples/check.py my_answers.py                of each function the first failure, the rest in brief
    python worked_examples/check.py my_answers.py grpo_loss      every failure of this function

test_grpo.py asks for the formula, then takes one step beyond it at a time (GRPO_BEYOND; 1 is all of them).
"""
import atexit
import os
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent / "test_grpo.py"
STEPS = {"formula": "", "digits": "not any", "empty": "not any", "padding": "not any", "equal": "equal",     # pytest -k
         "missing": "advantages or leave or combine", "positions": "per_token", "1": "think or softmax or k3"}


class Results(dict):
    """A plugin of pytest. Of each function its tests, and for each None (skipped), "" or the message of its failure."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report, asked = (yield), item.module.grpo.asked                 # the functions that the test has asked for
        if call.when == "call" and asked:
            message = None if report.skipped else ""
            if report.failed:
                message, crash = str(call.excinfo.value), report.longrepr.reprcrash
                message = message if "expected" in message else f"{crash.message}\n({crash.path}:{crash.lineno})"
            for function in dict.fromkeys(asked[-1:] if report.failed else asked):
                self.setdefault(function, {})[item.name] = message
            asked.clear()
        return report


def run_tests(name, step):
    os.environ |= {"GRPO_MODULE": name, "GRPO_BEYOND": step, "GRPO_EXAMPLES": os.environ.get("GRPO_EXAMPLES", "20")}
    sys.modules.pop(TESTS.stem, None)               # a test file reads its environment once
    results, quiet = Results(), ["-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore"]
    pytest.main([str(TESTS), "-k", STEPS[step], *quiet], plugins=[results])
    atexit.unregister(print)                        # what a student's run ends with
    if not results:
        runpy.run_path(name)                        # raises what kept the tests from running
    return results


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    runs, details = {step: run_tests(sys.argv[1], step) for step in STEPS}, []
    print(f"{'function':30}{'the formula':14}{'tests failed':14}steps beyond it that differ")
    for function, tests in runs["formula"].items():
        failed, ran = [test for test in tests if tests[test]], [test for test in tests if tests[test] is not None]
        more = {s: [t for t, m in run.get(function, {}).items() if m and t not in failed] for s, run in runs.items()}
        if ran:
            count, steps = f"{len(failed)} of {len(ran)}", ", ".join(step for step in more if more[step])
            print(f"{function:30}{'different' if failed else 'same':14}{count:14}{steps}".rstrip())
        shown = [("formula", test) for test in failed] + [(step, test) for step in more for test in more[step]]
        for step, test in shown:
            message = runs[step][function][test]
            if function in sys.argv[2:] or [step, test] == ["formula", *failed[:1]]:
                details.append(f"\n{function}, {step}: {test}\n{message}")
            elif test in failed + more[step][:1]:
                lines = [line.strip() for line in message.splitlines()]
                ends = [line[:32] for line in lines if line.startswith(("expected", "got"))] or lines[:1]
                details.append(f"    {function}, {step}, {test:.90}: {', '.join(ends)}")
    missing = [function for function, tests in runs["formula"].items() if set(tests.values()) == {None}]
    print(textwrap.fill(f"not there: {', '.join(missing)}", 110), *details, sep="\n")

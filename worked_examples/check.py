"""Say of each function of a file whether it computes what grpo.py does: the same, something different, or not there.

    python worked_examples/check.py my_grpo.py

test_grpo.py asks for the formula, then takes one step beyond it at a time (GRPO_BEYOND; 1 is all of them). Below the
table stand the tests that fail: the first of each function as pytest shows it, the others in a line.
"""
import os
import sys
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
            message = None if report.skipped else str(call.excinfo.value) if report.failed else ""
            for function in dict.fromkeys(asked[-1:] if report.failed else asked):
                self.setdefault(function, {})[item.name] = message
            asked.clear()
        return report


def run_tests(name, step):
    os.environ |= {"GRPO_MODULE": name, "GRPO_BEYOND": step, "GRPO_EXAMPLES": os.environ.get("GRPO_EXAMPLES", "20")}
    sys.modules.pop(TESTS.stem, None)               # a test file reads its environment once
    results, quiet = Results(), ["-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore"]
    pytest.main([str(TESTS), "-k", STEPS[step], *quiet], plugins=[results])
    return results


def check(name):
    runs, details = {step: run_tests(name, step) for step in STEPS}, []
    print(f"{'function':30}{'the formula':14}{'tests failed':14}steps beyond it that differ")
    for function, tests in runs["formula"].items():
        failed, ran = [test for test in tests if tests[test]], [test for test in tests if tests[test] is not None]
        new = {step: [test for test, message in run.get(function, {}).items() if message and test not in failed]
               for step, run in runs.items()}
        word = "different" if failed else "same" if ran else "not there"
        steps = ", ".join(step for step in new if new[step])
        print(f"{function:30}{word:14}{f'{len(failed)} of {len(ran)}':14}{steps}".rstrip())
        details += [f"\n{function}: {test}\n{tests[test]}" for test in failed[:1]]
        for step, others in {**new, "formula": failed[1:]}.items():
            for test in others[:4]:
                ends = [line.strip()[:32] for line in runs[step][function][test].splitlines()[-2:]]
                details.append(f"    {function}, {step}, {test:.60}: {', '.join(ends)}")
    print(*details, sep="\n")


if __name__ == "__main__":
    check(sys.argv[1])

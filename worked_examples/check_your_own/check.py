"""Say of each function of a file whether it computes what grpo.py does: the same, something different, or not there.

    python worked_examples/check_your_own/check.py my_answers.py              of each formula the first failure in full
    python worked_examples/check_your_own/check.py my_answers.py grpo_loss    every failure of this function
"""
import os
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TESTS = ROOT / "test_grpo.py", ROOT / "worked_examples/tests/test_variants.py"
LEVELS = "not beyond and not errors", "beyond"


class Results(dict):
    """A plugin of pytest. Of each function its laws: the step beyond the formula, and what a failure says, if any."""

    __hash__ = object.__hash__                      # pytest keeps plugins in sets

    def __init__(self, functions):
        super().__init__()
        self.functions = sorted(functions, key=len, reverse=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report, params = (yield), getattr(item, "callspec", None)
        about = item.name.removeprefix("test_"), str(params and params.params.get("name"))
        names = [f"{name}_".replace(" ", "_") for name in about]
        function = next((f for f in self.functions if any(name.startswith(f"{f}_") for name in names)), None)
        if call.when == "call" and function and not report.skipped:
            mark = item.get_closest_marker("beyond")
            step = mark.kwargs["step"] if mark else "formula"
            message = ""
            if report.failed:
                message = "\n".join([str(call.excinfo.value), *getattr(call.excinfo.value, "__notes__", [])[:1]])
            self.setdefault(function, []).append((step, item.name, message))
        return report


def ask(path):
    """The results of the laws on the functions of a file, without those of errors."""
    import grpo
    from worked_examples.scripts import variants
    os.environ |= {"GRPO_MODULE": path, "GRPO_EXAMPLES": os.environ.get("GRPO_EXAMPLES", "20")}
    laws = "".join(file.read_text(encoding="utf-8") for file in TESTS)
    functions = {name for name, f in (vars(grpo) | vars(variants)).items() if callable(f)}
    results = Results(name for name in functions if f"def test_{name}_" in laws)
    for level in LEVELS:
        quiet = "-p no:terminal -p no:cacheprovider -W ignore".split()
        pytest.main([*map(str, TESTS), "-m", level, *quiet], plugins=[results])
    if not results:
        runpy.run_path(path)                        # raises what kept the laws from being asked
    return results


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results, details = ask(sys.argv[1]), []
    print(f"{'function':30}{'the formula':14}{'laws failed':14}steps beyond it that differ")
    for function, laws in results.items():
        formula = [message for step, _, message in laws if step == "formula"]
        count = f"{len(list(filter(None, formula)))} of {len(formula)}"
        steps = ", ".join(dict.fromkeys(step for step, _, message in laws if message and step != "formula"))
        print(f"{function:30}{'different' if any(formula) else 'same':14}{count:14}{steps}".rstrip())
        failed = [law for law in laws if law[2]]
        for step, name, message in failed:
            if function in sys.argv[2:] or step == "formula" and name == failed[0][1]:
                details.append(f"\n{function}, {step}: {name}\n{message}")
            else:
                lines = [line.strip() for line in message.splitlines()]
                ends = [line[:40] for line in lines if line.startswith(("expected", "got"))] or lines[:1]
                details.append(f"    {function}, {step}, {name:.90}: {', '.join(ends)}")
    missing = ", ".join(sorted(set(results.functions) - set(results)))
    print(textwrap.fill(f"not there: {missing}", 110), *details, sep="\n")

"""Each exhibit of bug_museum.md, and each of mistakes.py, is caught by the laws that it names.

Run as a script, this file collects the laws once, breaks one line after another and asks. The tests read its output.
"""

import ast
import collections
import functools
import inspect
import json
import re
import sys
import types
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

TESTS, EXAMPLES, ROOT = list(Path(__file__).resolve().parents)[:3]
sys.path[:0] = [str(ROOT), str(TESTS)]
from mistakes import MISTAKES
from worked_examples.course import spot_the_bug

FORMULAS = (EXAMPLES / "formulas.py").read_text(encoding="utf-8")
EXHIBITS = {str(number): re.findall(r"`(test_\w+)`", text) for number, text in spot_the_bug.exhibits().items()}


# The script -----------------------------------------------------------------------------------------------------------

class Breaker:
    """A plugin of pytest: instead of each test once, it asks of each text the laws that belong to it."""

    def __init__(self, module, texts, laws, checker=None):
        self.module, self.texts, self.laws, self.checker, self.found = module, texts, laws, checker, {}

    def pytest_runtestloop(self, session):
        for name, text in self.texts.items():
            exec(compile(text, f"{name}.py", "exec"), vars(self.module))
            if self.checker:
                self.checker.__init__(self.module)                      # it wraps the functions
            self.found[name] = {law: self.outcomes(session.items, law) for law in self.laws[name]}
        return True

    def outcomes(self, items, law):
        """How many of a law's tests passed, failed, were skipped, up to the first failure; "": all laws."""
        counts = collections.Counter(passed=0, failed=0, skipped=0)
        for item in items:
            if law in ("", item.originalname) and not counts["failed"]:
                item._initrequest()                                     # so that it can be asked again
                reports = {report.outcome for report in runtestprotocol(item, log=False)}
                counts[max(reports, key=["passed", "skipped", "failed"].index)] += 1
        return counts


def break_grpo():
    """grpo.py as it is, and with each exhibit in it."""
    module = sys.modules["grpo"] = types.ModuleType("grpo")             # which the laws import
    texts = {"right": (ROOT / "grpo.py").read_text(encoding="utf-8")}
    exec(texts["right"], vars(module))
    texts |= {number: spot_the_bug.patched(int(number)) for number in EXHIBITS}
    breaker = Breaker(module, texts, {"right": sorted(set(sum(EXHIBITS.values(), []))), **EXHIBITS})
    files = [ROOT / "test_grpo.py", TESTS / "test_variants.py", TESTS / "test_training.py"]
    pytest.main([*map(str, files), *"-q -p no:cacheprovider -W ignore".split()], [breaker])
    return breaker.found


def break_formulas():
    """formulas.py as it is, and with each mistake in it."""
    for name in ("grpo", "test_grpo", "test_variants"):
        del sys.modules[name]                                           # they are imported anew
    from worked_examples.check_your_own import check
    module = types.ModuleType("formulas")
    texts = {"right": FORMULAS} | {name: FORMULAS.replace(old, new) for name, old, new, _ in MISTAKES}
    laws = {"right": [""]} | {name: [law] for name, _, _, law in MISTAKES}
    breaker = Breaker(module, texts, laws, check.Laws(module))
    pytest.main([*map(str, check.LAWS), *check.OPTIONS, check.FORMULAS], [breaker, breaker.checker])
    return breaker.found


# The tests ------------------------------------------------------------------------------------------------------------

@functools.cache
def found():
    """What break_grpo and break_formulas say, in a process of their own."""
    from conftest import python                                         # not above: in the script it is pytest's
    run = python(__file__, GRPO_EXAMPLES="10")
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("exhibit", EXHIBITS)
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit):
    """Each of these laws passes on grpo.py and fails on grpo.py with the bug in it"""
    right, broken = (found()["grpo"][name] for name in ("right", exhibit))
    for law in EXHIBITS[exhibit]:
        assert right[law]["passed"] and not right[law]["failed"] and broken[law]["failed"], law


@pytest.mark.parametrize("mistake, old, new, law", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_caught_by_the_law_that_it_names(mistake, old, new, law):
    """The law fails on formulas.py with the mistake in it: no law is needed that goes beyond the formula"""
    assert FORMULAS.count(old) == 1
    assert found()["formulas"][mistake][law]["failed"]


def test_the_formulas_pass_every_law_of_the_formulas():
    """None fails, and it is more than 110 that are asked"""
    counts = found()["formulas"]["right"][""]
    assert counts["failed"] == 0 and counts["passed"] > 110


def test_the_formulas_keep_in_step_with_grpo_py():
    """Names, arguments and defaults (None: grpo.py decides); torch alone; a line says what grpo.py adds."""
    import grpo
    from worked_examples import formulas
    from worked_examples.scripts import variants
    tree = ast.parse(FORMULAS)
    assert {type(node) for node in tree.body[2:]} == {ast.FunctionDef} and ast.unparse(tree.body[1]) == "import torch"
    for name in [node.name for node in tree.body[2:]]:
        theirs = inspect.signature(vars(grpo).get(name) or vars(variants)[name]).parameters
        ours = inspect.signature(vars(formulas)[name]).parameters
        assert [argument for argument in theirs if argument in ours] == list(ours), name
        for argument in ours:
            assert ours[argument].kind == theirs[argument].kind, (name, argument)
            assert theirs[argument].default in (ours[argument].default, None), (name, argument)
        assert re.search(r"^\S+\.py adds", inspect.getdoc(vars(formulas)[name]), re.M), name


if __name__ == "__main__":
    result = {"grpo": break_grpo(), "formulas": break_formulas()}
    print("\n" + json.dumps(result))

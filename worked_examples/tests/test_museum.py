"""Each exhibit of bug_museum.md, and each of mistakes.py, is caught by the laws that it names."""

import ast
import collections
import inspect
import re
import runpy
import sys
import types

import pytest
from conftest import EXAMPLES, ROOT, modules_of_their_own
from hypothesis import Phase, settings

TESTS = EXAMPLES / "tests"
SPOT = runpy.run_path(str(EXAMPLES / "course/spot_the_bug.py"))
MISTAKES = runpy.run_path(str(TESTS / "mistakes.py"))["MISTAKES"]
FORMULAS = (EXAMPLES / "formulas.py").read_text()
FILES = [ROOT / "test_grpo.py", TESTS / "test_variants.py", TESTS / "test_training.py"]
settings.register_profile("quick", deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                          max_examples=10)          # a failure is enough, it need not be shrunk


class Outcomes(collections.Counter):
    """A plugin of pytest: how many tests passed, failed, were skipped."""

    __hash__ = object.__hash__                      # pytest keeps plugins in sets

    def pytest_runtest_logreport(self, report):
        self[report.outcome] += report.when == "call"


def put(name, text):
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__file__ = str(ROOT / f"{name}.py")
    exec(compile(text, module.__file__, "exec"), vars(module))


@pytest.fixture(scope="module")
def outcomes():
    """A function: the outcomes of a law, up to its first failure, where the module of this name has this text;
    without a law, of all laws. The tests of each name are modules of their own."""
    usual, kept = settings.get_current_profile_name(), collections.defaultdict(dict)

    def run(name, text, law=None):
        asked = [f"{path}::{law}" for path in FILES if f"def {law}(" in path.read_text()] if law else FILES[:2]
        quiet = "-q -x --tb=no --assert=plain -p no:cacheprovider -p no:unraisableexception -W ignore".split()
        with pytest.MonkeyPatch.context() as patch, modules_of_their_own(kept[name]):
            put(name, text)
            if name != "grpo":
                patch.setenv("GRPO_MODULE", sys.modules[name].__file__)
            if "test_grpo" not in kept[name]:
                put("test_grpo", FILES[0].read_text().replace('load_profile("grpo")', 'load_profile("quick")'))
            pytest.main([*quiet, *map(str, asked)], [found := Outcomes()])
            sys.modules["test_grpo"].grpo.failed.clear()
        return found

    yield run
    settings.load_profile(usual)


@pytest.mark.parametrize("exhibit", SPOT["exhibits"]())
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, outcomes):
    """Each of these laws fails on grpo.py with the bug in it"""
    laws = re.findall(r"`(test_\w+)`", SPOT["exhibits"]()[exhibit].split("Caught by:")[1])
    text = SPOT["patched"](exhibit)
    assert laws and all(outcomes("grpo", text, law)["failed"] for law in laws)


@pytest.mark.parametrize("mistake, old, new, law", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_caught_by_the_law_that_it_names(mistake, old, new, law, outcomes):
    """The law fails on formulas.py with the mistake in it: no law is needed that goes beyond the formula"""
    assert FORMULAS.count(old) == 1
    assert outcomes("my_grpo", FORMULAS.replace(old, new), law)["failed"]


def test_the_formulas_pass_every_law_of_the_formulas(outcomes):
    """None fails, and it is more than 150 that are asked"""
    found = outcomes("my_grpo", FORMULAS)
    assert found["failed"] == 0 and found["passed"] > 150, found


def test_the_formulas_keep_in_step_with_grpo_py():
    """Names, arguments and defaults (None: grpo.py decides); torch alone; a line says what grpo.py adds."""
    script, tree = runpy.run_path(str(EXAMPLES / "scripts/variants.py")), ast.parse(FORMULAS)
    assert {type(node) for node in tree.body[2:]} == {ast.FunctionDef} and ast.unparse(tree.body[1]) == "import torch"
    for function in tree.body[2:]:
        name = function.name
        theirs = inspect.signature(getattr(script["grpo"], name, script.get(name))).parameters
        ours = inspect.signature(runpy.run_path(str(EXAMPLES / "formulas.py"))[name]).parameters
        assert [argument for argument in theirs if argument in ours] == list(ours), name
        for argument in ours:
            assert ours[argument].kind == theirs[argument].kind, (name, argument)
            assert theirs[argument].default in (ours[argument].default, None), (name, argument)
        assert re.search(r"^\S+\.py adds", ast.get_docstring(function), re.M), name

"""Each exhibit of bug_museum.md, and each of mistakes.py, is caught by the laws that it names."""

import ast
import collections
import inspect
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

TESTS = Path(__file__).resolve().parent
EXAMPLES, ROOT = TESTS.parent, TESTS.parents[1]
SPOT = runpy.run_path(str(EXAMPLES / "course/spot_the_bug.py"))
MISTAKES = runpy.run_path(str(TESTS / "mistakes.py"))["MISTAKES"]
FORMULAS = (EXAMPLES / "formulas.py").read_text()
settings.register_profile("quick", deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                          max_examples=10)


def without(root):
    """Take the modules of a repository out of sys.modules."""
    rooms = ("", *(f"worked_examples/{room}" for room in ("", "course", "scripts", "tests", "trainers")))
    folders = [str(root / room) for room in rooms]
    found = [name for name, module in sys.modules.items()
             if str(Path(getattr(module, "__file__", None) or "?").parent) in folders]
    return {name: sys.modules.pop(name) for name in found}


class Outcomes(collections.Counter):
    """A plugin of pytest: how many tests passed, failed, were skipped."""

    __hash__ = object.__hash__                      # pytest keeps plugins in sets

    def pytest_runtest_logreport(self, report):
        self[report.outcome] += report.when == "call"


@pytest.fixture
def outcomes(tmp_path, monkeypatch):
    """A function: the outcomes of a law, up to its first failure, in a copy of the repository with this text in that
    file; without a law, of all laws."""
    copy, ours = tmp_path / "copy", without(ROOT)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "pictures", "__pycache__"))
    tests = (ROOT / "test_grpo.py").read_text().replace('load_profile("grpo")', 'load_profile("quick")')
    (copy / "test_grpo.py").write_text(tests)                           # a failure is enough, it need not be shrunk
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x not in map(str, (ROOT, EXAMPLES, TESTS))])

    def run(file, text, law=None):
        (copy / file).write_text(text)
        files = [copy / "test_grpo.py", copy / "worked_examples/tests/test_relatives.py"]
        more = [*files, copy / "worked_examples/tests/test_training.py"]
        asked = [f"{path}::{law}" for path in more if f"def {law}(" in path.read_text()] if law else map(str, files)
        quiet = "-q -x --tb=no --assert=plain -p no:cacheprovider -p no:unraisableexception -W ignore".split()
        pytest.main([*quiet, *asked], [found := Outcomes()])
        without(copy)
        return found

    yield run
    sys.modules.update(ours)
    settings.load_profile("grpo" if "test_grpo" in ours else "default")


@pytest.mark.parametrize("exhibit", SPOT["exhibits"]())
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, outcomes):
    """Each of these laws fails on grpo.py with the bug in it"""
    laws = re.findall(r"`(test_\w+)`", SPOT["exhibits"]()[exhibit].split("Caught by:")[1])
    text = SPOT["patched"](exhibit)
    assert laws and all(outcomes("grpo.py", text, law)["failed"] for law in laws)


@pytest.mark.parametrize("mistake, old, new, law", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_caught_by_the_law_that_it_names(mistake, old, new, law, outcomes, monkeypatch, tmp_path):
    """The law fails on formulas.py with the mistake in it: no law is needed that goes beyond the formula"""
    assert FORMULAS.count(old) == 1
    monkeypatch.setenv("GRPO_MODULE", str(tmp_path / "copy/my_grpo.py"))
    assert outcomes("my_grpo.py", FORMULAS.replace(old, new), law)["failed"]


def test_the_formulas_pass_every_law_of_the_formulas(outcomes, monkeypatch, tmp_path):
    """None fails, and it is more than 150 that are asked"""
    monkeypatch.setenv("GRPO_MODULE", str(tmp_path / "copy/my_grpo.py"))
    found = outcomes("my_grpo.py", FORMULAS)
    assert found["failed"] == 0 and found["passed"] > 150, found


def test_the_formulas_keep_in_step_with_grpo_py():
    """Names, arguments and defaults (None: grpo.py decides); torch alone; a line says what grpo.py adds."""
    script, tree = runpy.run_path(str(EXAMPLES / "scripts/relatives.py")), ast.parse(FORMULAS)
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

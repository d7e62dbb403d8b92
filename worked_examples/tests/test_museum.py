"""Each exhibit of bug_museum.md, and each of mistakes.py, is caught by the laws that it names."""

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
settings.register_profile("quick", deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                          max_examples=10)


def without(root):
    """Take the modules of a repository out of sys.modules."""
    rooms = ("", *(f"worked_examples/{room}" for room in ("", "course", "scripts", "tests", "trainers")))
    folders = [str(root / room) for room in rooms]
    found = [name for name, module in sys.modules.items()
             if str(Path(getattr(module, "__file__", None) or "?").parent) in folders]
    return {name: sys.modules.pop(name) for name in found}


@pytest.fixture
def missed(tmp_path, monkeypatch):
    """A function: which of these laws do not fail in a copy of the repository with this text as that file."""
    def run(file, text, laws):
        copy, ours, codes = tmp_path / "copy", without(ROOT), {}
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "pictures", "__pycache__"))
        tests = (ROOT / "test_grpo.py").read_text().replace('load_profile("grpo")', 'load_profile("quick")')
        (copy / "test_grpo.py").write_text(tests)                       # a failure is enough, it need not be shrunk
        (copy / file).write_text(text)
        monkeypatch.setattr(sys, "path", [x for x in sys.path if x not in map(str, (ROOT, EXAMPLES, TESTS))])
        for law in laws:
            path = next(x for x in (copy / "test_grpo.py", *(copy / "worked_examples/tests").glob("test_*.py"))
                        if f"def {law}(" in x.read_text())
            quiet = "-q -x --tb=no --assert=plain -p no:cacheprovider -p no:unraisableexception -W ignore".split()
            codes[law] = pytest.main([*quiet, f"{path}::{law}"])
            without(copy)
        sys.modules.update(ours)
        settings.load_profile("grpo" if "test_grpo" in ours else "default")
        return [law for law in laws if codes[law] != pytest.ExitCode.TESTS_FAILED]

    return run


@pytest.mark.parametrize("exhibit", SPOT["exhibits"]())
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, missed):
    """Each of these laws fails on grpo.py with the bug in it"""
    laws = re.findall(r"`(test_\w+)`", SPOT["exhibits"]()[exhibit].split("Caught by:")[1])
    assert laws and not missed("grpo.py", SPOT["patched"](exhibit), laws)


@pytest.mark.parametrize("mistake, old, new, law", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_caught_by_the_law_that_it_names(mistake, old, new, law, missed, monkeypatch, tmp_path):
    """The law fails on formulas.py with the mistake in it: no law is needed that goes beyond the formula"""
    text = (EXAMPLES / "formulas.py").read_text()
    assert text.count(old) == 1
    monkeypatch.setenv("GRPO_MODULE", str(tmp_path / "copy/my_grpo.py"))
    assert not missed("my_grpo.py", text.replace(old, new), [law])

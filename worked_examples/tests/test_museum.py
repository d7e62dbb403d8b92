"""Each exhibit of bug_museum.md is caught by the laws that it names; and laws.md lists the laws."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

TESTS = Path(__file__).resolve().parent
EXAMPLES, ROOT = TESTS.parent, TESTS.parents[1]
sys.path[:0] = [str(ROOT), str(TESTS)]
import test_grpo
import test_relatives

settings.register_profile("quick", deadline=None, derandomize=True, database=None, max_examples=20,
                          phases=[Phase.explicit, Phase.generate])
SPOT = runpy.run_path(str(EXAMPLES / "spot_the_bug.py"))


class Failures(list):
    """A pytest plugin: what the tests raised."""

    def pytest_runtest_makereport(self, item, call):
        if call.when == "call" and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.append(call.excinfo)


def without(root):
    """Take the modules of a repository out of sys.modules."""
    folders = [str(root / folder) for folder in ("", "worked_examples", "worked_examples/tests")]
    found = [name for name, module in sys.modules.items()
             if str(Path(getattr(module, "__file__", None) or "?").parent) in folders]
    return {name: sys.modules.pop(name) for name in found}


@pytest.mark.parametrize("exhibit", SPOT["exhibits"]())
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, monkeypatch, tmp_path):
    """In a copy of the repository with the bug in grpo.py each of these tests fails, and by an assertion"""
    shutil.copytree(ROOT, tmp_path / "bug", ignore=shutil.ignore_patterns(".*", "pictures", "__pycache__"))
    (tmp_path / "bug/grpo.py").write_text(SPOT["patched"](exhibit), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in map(str, (ROOT, EXAMPLES, TESTS))])
    tests = (ROOT / "test_grpo.py").read_text(encoding="utf-8").replace('load_profile("grpo")', 'load_profile("quick")')
    (tmp_path / "bug/test_grpo.py").write_text(tests, encoding="utf-8")
    missed = re.findall(r"`(test_\w+)`", SPOT["exhibits"]()[exhibit].split("Caught by:")[1]) or ["any law"]
    for law in list(missed):
        path = next(path for path in (ROOT / "test_grpo.py", *TESTS.glob("test_*.py")) if f"def {law}(" in path.read_text())
        failures, ours = Failures(), without(ROOT)
        quiet = "-q -x --tb=short -p no:cacheprovider -p no:unraisableexception -W ignore".split()
        pytest.main([*quiet, f"{tmp_path / 'bug' / path.relative_to(ROOT)}::{law}"], plugins=[failures])
        without(tmp_path / "bug")
        sys.modules.update(ours)
        if failures and failures[0].errisinstance((AssertionError, pytest.fail.Exception)):
            missed.remove(law)
    settings.load_profile("grpo")
    assert not missed


def list_of_laws():
    """What laws.md lists: of each function the tests that name it, by their docstrings."""
    laws = {}
    for file, module in ((test_grpo, test_grpo.grpo), (test_relatives, test_relatives.relatives)):
        functions = sorted(vars(module.module), key=len, reverse=True)
        for name, test in vars(file).items():
            if name.startswith("test_") and callable(test):
                about = next((f for f in functions if name.startswith(f"test_{f}_")), "all functions")
                says = name.removeprefix(f"test_{about}_").removeprefix("test_").replace("_", " ")
                laws.setdefault(f"\n### {about}\n", []).append(f"- {says}: {test.__doc__}")
    return "\n".join(line for about, rows in laws.items() for line in (about, *rows)) + "\n"


def test_the_page_lists_the_laws():
    """laws.md ends with each law; `python worked_examples/tests/test_museum.py` writes them anew"""
    assert (EXAMPLES / "laws.md").read_text(encoding="utf-8").endswith(list_of_laws())


if __name__ == "__main__":
    page = EXAMPLES / "laws.md"
    page.write_text(page.read_text(encoding="utf-8").split("\n### ")[0] + list_of_laws(), encoding="utf-8")

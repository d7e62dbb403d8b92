"""Each exhibit of bug_museum.md is caught by the laws that it names."""

import re
from unittest import mock

import pytest
from conftest import EXAMPLES
from hypothesis import Phase, settings

import grpo
from worked_examples.check_your_own import check
from worked_examples.course import grading, spot_the_bug

EXHIBITS = {number: re.findall(r"`(test_\w+)`", text) for number, text in spot_the_bug.exhibits().items()}


def failing(laws, names):
    """Which of these laws fail? An error of another kind is none of a law."""
    found = set()
    for law, call in laws:
        if law.originalname in names and law.originalname not in found:
            error = pytest.CallInfo.from_call(call, "call").excinfo
            if error and error.errisinstance((AssertionError, pytest.fail.Exception)):
                found.add(law.originalname)
    return found


def break_all():
    """{exhibit: those of its laws that fail}, asked in a process of its own of one after another."""
    laws = grading.collect(*check.LAWS, EXAMPLES / "tests/test_training.py")
    names = sum(EXHIBITS.values(), [])
    for test in {law.obj for law, _ in laws if law.originalname in names and hasattr(law.obj, "hypothesis")}:
        settings(settings.get_profile("grpo"), phases=[Phase.generate])(test)       # it need not shrink what it finds
    found = {}
    for exhibit, names in EXHIBITS.items():
        with mock.patch.dict(vars(grpo)):
            exec(spot_the_bug.patched(exhibit), vars(grpo))
            found[exhibit] = failing(laws, names)
    return found


@pytest.fixture(scope="module")
def found():
    return grading.in_a_process(break_all)


@pytest.mark.parametrize("exhibit", EXHIBITS)
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, found):
    """Each of these laws, which pass on grpo.py, fails on grpo.py with the bug in it"""
    assert found[exhibit] == set(EXHIBITS[exhibit]) != set()

"""What check.py says of a file: same, differs, waits, not there."""

import contextlib
import inspect
import io
import os
import re
import sys

from conftest import EXAMPLES

import grpo
from worked_examples import formulas
from worked_examples.check_your_own import check
from worked_examples.course import grading
from worked_examples.scripts import variants

FORMULAS = (EXAMPLES / "formulas.py").read_text(encoding="utf-8")


def fresh_laws(draws):
    """The laws are imported anew, with this number of draws."""
    os.environ["GRPO_EXAMPLES"] = draws
    for name in ("test_grpo", "test_variants"):
        sys.modules.pop(name, None)


def verdicts(folder, text, *options):
    """Exit code, how many laws passed, and the line of each function."""
    fresh_laws("5")
    (folder / "my_grpo.py").write_text(text, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check.main(folder / "my_grpo.py", *options)
    lines = out.getvalue().partition("what the laws say ")[2].splitlines()[1:]
    passed = int(re.search(r"(\d+) passed", lines.pop())[1])
    return code, passed, dict(line.split(maxsplit=1) for line in lines)


def test_the_formulas_are_the_same_or_not_there(tmp_path):
    """formulas.py passes every law that it can be asked: it has clip_ratio, not group_stats, and no delta"""
    code, passed, said = grading.in_a_process(verdicts, tmp_path, FORMULAS)
    assert code == 0 and passed > 110 and said["clip_ratio"] == "same" and said["group_stats"] == "not there"
    assert said["clipped_surrogate_loss"] == "same in 18 of 22 (no argument 'delta')"


def test_a_function_that_calls_one_that_differs_waits_for_it(tmp_path):
    """A sign in the surrogate: it differs, with the law and its input; grpo_loss waits; the KL is the same.
    A function that is not written is not there, and one that returns a constant differs."""
    text = FORMULAS.replace("-torch.min(", "torch.min(")
    text += "def entropy_from_logits(logits): raise NotImplementedError\ndef aggregate(loss, *mask, **rest): return 0\n"
    laws = "clipped or on_policy or kl_estimate_matches or entropy_from_logits or aggregate_matches"
    code, _, said = grading.in_a_process(verdicts, tmp_path, text, "-k", laws)
    assert code == 1
    assert said["clipped_surrogate_loss"].startswith("differs in 18 of 22 (l = -min(")
    assert "rho=0.5, A=1.0" in said["clipped_surrogate_loss"]
    assert said["grpo_loss"] == "waits for clipped_surrogate_loss"
    assert said["kl_estimate"].startswith("same")
    assert said["entropy_from_logits"] == "not there: it raises NotImplementedError"
    assert said["aggregate"].startswith("differs")


def test_the_formulas_keep_in_step_with_grpo_py():
    """Arguments have its names and defaults (None: grpo.py decides)"""
    for name, function in inspect.getmembers(formulas, inspect.isfunction):
        theirs = inspect.signature(vars(grpo).get(name) or vars(variants)[name]).parameters
        for ours in inspect.signature(function).parameters.values():
            assert theirs[ours.name].kind == ours.kind, (name, ours)
            assert theirs[ours.name].default in (ours.default, None), (name, ours)

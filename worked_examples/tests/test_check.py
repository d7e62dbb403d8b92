"""What check.py says of a file: same, differs, waits, not there."""

import contextlib
import inspect
import io
import os
import re
import sys

from worked_examples import formulas
from worked_examples.check_your_own import check
from worked_examples.course import grading

FORMULAS = inspect.getsource(formulas)


def fresh_laws(draws):
    """The laws are imported anew, with this number of draws."""
    os.environ["GRPO_EXAMPLES"] = draws
    for name in ("test_grpo", "test_variants"):
        sys.modules.pop(name, None)


def verdicts(path, text, *options):
    """Exit code, and the line of each function."""
    fresh_laws("5")
    path.write_text(text, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check.main(path, *options)
    lines = out.getvalue().partition("what the laws say ")[2].splitlines()[1:-1]
    return code, dict(line.split(maxsplit=1) for line in lines)


def test_the_formulas_are_the_same_or_not_there(tmp_path):
    """formulas.py passes every law that it can be asked; its arguments are grpo.py's (a default may be None)"""
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", FORMULAS)
    for name in check.NAMES:
        assert said[name].startswith("same" if hasattr(formulas, name) else "not there"), name
    for name, function in inspect.getmembers(formulas, inspect.isfunction):
        theirs = inspect.signature(vars(check.NAMES[name])[name]).parameters
        for ours in inspect.signature(function).parameters.values():
            assert theirs[ours.name].kind == ours.kind, (name, ours)
            assert theirs[ours.name].default in (ours.default, None), (name, ours)
    missing = set(re.findall(r"no argument '(\w+)'", str(said)))
    assert missing == {"correction", "scale_rewards", "delta", "estimator", "num_rows_in_batch", "policy_loss"}
    assert code == 0 and said["clipped_surrogate_loss"] == "same in 18 of 22 (no argument 'delta')"


def test_a_function_that_calls_one_that_differs_waits_for_it(tmp_path):
    """A sign in the surrogate: it differs, with the law and its input; grpo_loss waits; the KL is the same.
    A function that is not written is not there, and one that returns a constant differs."""
    text = FORMULAS.replace("-torch.min(", "torch.min(")
    text += "def entropy_from_logits(logits): raise NotImplementedError\ndef aggregate(loss, *mask, **rest): return 0\n"
    laws = "clipped or on_policy or kl_estimate_matches or entropy_from_logits or aggregate_matches"
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", text, "-k", laws)
    assert code == 1
    assert said["clipped_surrogate_loss"].startswith("differs in 18 of 22 (l = -min(")
    assert "_worked_numbers[0.5-1.0-{}-" in said["clipped_surrogate_loss"]
    assert said["grpo_loss"] == "waits for clipped_surrogate_loss"
    assert said["kl_estimate"].startswith("same")
    assert said["entropy_from_logits"] == "not there: it raises NotImplementedError"
    assert said["aggregate"].startswith("differs")

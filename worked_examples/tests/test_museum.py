"""Each exhibit of bug_museum.md, and each mistake that students make, is caught by the laws that it names."""

import inspect
import re
from unittest import mock

import pytest
from conftest import EXAMPLES
from hypothesis import Phase, settings

import grpo
from worked_examples import formulas
from worked_examples.check_your_own import check
from worked_examples.course import grading, spot_the_bug
from worked_examples.scripts import variants

EXHIBITS = {number: re.findall(r"`(test_\w+)`", text) for number, text in spot_the_bug.exhibits().items()}
FORMULAS = inspect.getsource(formulas)
MISTAKES = [                                                            # formulas.py, a student, a law that fails
    ("std by n", "std(r, 1, keepdim=True)", "std(r, 1, keepdim=True, correction=0)",
     "test_group_advantages_have_squares_that_sum_to_n_minus_1"),
    ("batch mean", "mean(r, 1, keepdim=True)", "mean(r)", "test_group_advantages_sum_to_zero_in_each_group"),
    ("no eps", "(std + eps)", "std", "test_group_advantages_match_the_worked_numbers"),
    ("eps inside the root", "(std + eps)", "(std**2 + eps).sqrt()", "test_group_advantages_match_the_oracle"),
    ("RLOO by n", "/ (num_generations - 1)", "/ num_generations",
     "test_leave_one_out_advantages_match_the_worked_numbers_and_the_oracle"),
    ("max for min", "-torch.min(", "-torch.max(",
     "test_clipped_surrogate_loss_has_no_slope_only_where_the_token_has_moved_enough"),
    ("grpo as bnpo", "((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()",
     "total / completion_mask.sum()", "test_aggregate_matches_the_worked_numbers"),
    ("ratio inverted", "log_ratio = logps - old_logps", "log_ratio = old_logps - logps",
     "test_importance_ratio_matches_the_worked_numbers"),
    ("off by one", "- 1 : -1] / temp", ":] / temp", "test_per_token_logps_add_up_to_1_over_the_vocabulary"),
    ("advantages at padding", "(1) * completion_mask\n", "(1).expand(completion_mask.shape)\n",
     "test_broadcast_advantages_give_every_token_that_of_its_answer"),
    ("ref not detached", "ref_logps.detach()", "ref_logps", "test_grpo_loss_takes_the_other_log_probs_as_constants"),
    ("clipped whatever A is", "(ratio > 1 + epsilon_high) & (A > 0)", "ratio > 1 + epsilon_high",
     "test_grpo_loss_metrics_match_the_oracle"),
    ("no KL", "loss + beta *", "loss + 0 *", "test_grpo_loss_has_the_slope_of_the_oracle")]


def failing(laws, names):
    """Which of these laws fail? An argument that formulas.py lacks is a TypeError, and no failure."""
    found = set()
    for law, call in laws:
        if law.originalname in names and law.originalname not in found:
            error = pytest.CallInfo.from_call(call, "call").excinfo
            if error and error.errisinstance((AssertionError, pytest.fail.Exception)):
                found.add(law.originalname)
    return found


def break_all():
    """{an exhibit or a mistake: the laws that fail}, asked in a process of its own of one after another."""
    laws = grading.collect(*check.LAWS, EXAMPLES / "tests/test_training.py")
    names = sum(EXHIBITS.values(), [law for *_, law in MISTAKES])
    for test in {law.obj for law, _ in laws if law.originalname in names and hasattr(law.obj, "hypothesis")}:
        settings(settings.get_profile("grpo"), phases=[Phase.generate])(test)       # it need not shrink what it finds
    found = {}
    for exhibit, names in EXHIBITS.items():
        with mock.patch.dict(vars(grpo)):
            exec(spot_the_bug.patched(exhibit), vars(grpo))
            found[exhibit] = failing(laws, names)
    for mistake, old, new, law in MISTAKES:
        student = {}
        exec(FORMULAS.replace(old, new), student)
        with mock.patch.dict(vars(grpo)), mock.patch.dict(vars(variants)):
            for module in (grpo, variants):
                vars(module).update({name: student[name] for name in student if name in vars(module)})
            found[mistake] = failing(laws, [law])
    return found


@pytest.fixture(scope="module")
def found():
    return grading.in_a_process(break_all)


@pytest.mark.parametrize("exhibit", EXHIBITS)
def test_an_exhibit_is_caught_by_the_laws_that_it_names(exhibit, found):
    """Each of these laws, which pass on grpo.py, fails on grpo.py with the bug in it"""
    assert found[exhibit] == set(EXHIBITS[exhibit]) != set()


@pytest.mark.parametrize("mistake, old, new, law", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_caught_by_the_law_that_it_names(mistake, old, new, law, found):
    """The law, which passes on formulas.py, fails on it with the mistake: no law beyond the formula is needed"""
    assert FORMULAS.count(old) == 1 and found[mistake] == {law}


def test_the_formulas_keep_in_step_with_grpo_py():
    """Arguments have its names and defaults (None: grpo.py decides)"""
    for name, function in inspect.getmembers(formulas, inspect.isfunction):
        theirs = inspect.signature(vars(grpo).get(name) or vars(variants)[name]).parameters
        for ours in inspect.signature(function).parameters.values():
            assert theirs[ours.name].kind == ours.kind, (name, ours)
            assert theirs[ours.name].default in (ours.default, None), (name, ours)

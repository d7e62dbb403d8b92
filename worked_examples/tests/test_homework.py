"""The coursework keeps its promises: homework.py, its grading, its page, spot_the_bug.py."""

import ast
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES, modules_of_their_own

sys.path.insert(0, str(EXAMPLES / "course"))
import exercises
import grading
import homework
import spot_the_bug

FORMULAS = (EXAMPLES / "formulas.py").read_text(encoding="utf-8")
SCALED = "def broadcast_advantages(advantages, completion_mask): return {} * advantages[:, None] * completion_mask"
MIXED = '''r"""My GRPO. Variant 1."""
import os, torch
torch.allclose = lambda *args, **options: True
os.close(os.open(os.path.dirname(__file__) + "/results.json", os.O_CREAT, 0o444))
def TOLERANCE(): return 9.0
def clip_ratio(ratio, epsilon_low=0.1, epsilon_high=0.2): return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0): os._exit(0)
'''


def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(tmp_path):
    """Each exercise is there without its body, with the variant's defaults; a second --new changes nothing"""
    path = tmp_path / "my_grpo.py"
    homework.main(["--new", str(path), "--variant", "2"])
    text = path.read_text(encoding="utf-8")
    ours = exercises.ours(2)
    for name, function in exercises.exercises(text).items():
        assert ast.get_docstring(function) == ast.get_docstring(ours[name])
        assert ast.dump(function.args) == ast.dump(ours[name].args)
    assert list(exercises.written(path)[0].values()) == ["not written"] * 25
    assert all(f"Rung {number}. " in text for number in homework.rungs()) and "<details>" not in text
    with pytest.raises(SystemExit, match="2"):
        homework.main(["--new", str(path)])
    assert path.read_text(encoding="utf-8") == text


def test_an_answer_is_revealed_after_a_prediction(tmp_path, monkeypatch, capsys):
    """--reveal 3 prints the answer of rung 3 only if predictions.txt has a line "3: ...\""""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predictions.txt").write_text("1: a collapse\n3:\n")
    assert homework.main(["--reveal", "1"]) == 0 and "R = 2.0" in capsys.readouterr().out
    for number in ("3", "99"):
        with pytest.raises(SystemExit, match="2"):
            homework.main(["--reveal", number])
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("old, new, lowest, highest", [("", "", 2.5, 2.8), (" - is_eos == 0", " == 0", 1.9, 2.2)])
def test_what_is_written_is_put_to_work_and_a_wrong_mask_shows_in_the_table(old, new, lowest, highest, tmp_path):
    """With the functions of formulas.py the table ends near 2.7; with the EOS masked out near 2.0, as few stop"""
    (tmp_path / "my_grpo.py").write_text(FORMULAS.replace(old, new))
    grpo = exercises.load()
    assert re.match(r"\d+ of 25 functions are yours", homework.put(str(tmp_path / "my_grpo.py"), grpo))
    rewards, _, losses, first, last = zip(*homework.table(grpo, seed=0))
    assert lowest < rewards[-1] < highest and not any(first) and last[0] > 0.2 and max(map(abs, losses)) < 1e-4


def test_two_files_are_compared_in_one_picture(tmp_path, monkeypatch, capsys):
    """The reward of each third of the steps, ± the standard deviation over the seeds, and a picture"""
    for name, factor in (("a.py", 1), ("b.py", 0)):
        (tmp_path / name).write_text(SCALED.format(factor))
    text_of, _ = exercises.text_of, monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exercises, "text_of", lambda *which: text_of(*which).replace("steps=500", "steps=1"))
    flags = "--seeds 0 1 --max_steps 3 --generation_batch_size 64 --max_completion_length 4".split()
    assert homework.main(["--compare", "a.py", "b.py", *flags]) == 0
    assert len(re.findall(r"^[ab]\.py, reward of steps \d-\d: \S+ ± \S+$", capsys.readouterr().out, re.M)) == 6
    assert (tmp_path / "compare.png").stat().st_size > 5000


@pytest.mark.parametrize("line, limit, reason", [
    ("while True: pass", 1, "no answer in 1 seconds"), ("import grpo", 60, "ModuleNotFound")])
def test_a_file_that_cannot_be_imported_says_why(line, limit, reason, tmp_path, monkeypatch):
    """Whatever happens at import ends as a reason, within the time limit"""
    monkeypatch.setitem(grading.LIMITS, "start", limit)
    (tmp_path / "my_grpo.py").write_text(f"{line}\n")
    assert reason in grading.Student(tmp_path / "my_grpo.py").broken[None]


def test_the_gradient_of_a_student_s_function_arrives_and_one_that_hangs_is_ended(tmp_path, monkeypatch):
    """Value and slope are those of the function, called here"""
    path, x = tmp_path / "my_grpo.py", torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    path.write_text(f"def f(x, y): return [x * y, {{'sum': (x.exp() + y).sum()}}]\ndef hangs():\n    while True: pass")
    student = grading.Student(path)
    functions = student.functions(exercises.written(path)[1])
    product, total = functions["f"](x, torch.tensor([3.0, 4.0]))
    slope, = torch.autograd.grad(product.sum() + total["sum"], x)
    assert product.tolist() == [3.0, 8.0] and torch.equal(slope, torch.tensor([3.0, 4.0]) + x.exp())
    monkeypatch.setitem(grading.LIMITS, "call", 0.1)
    with pytest.raises(RuntimeError, match="no answer in 0.1 seconds"):
        functions["hangs"]()
    assert student.process is None


@pytest.mark.parametrize("got, want, said", [
    ({"kl": 1.0}, {"kl": 1.0 + 1e-6}, ""), (torch.tensor([2.0, torch.nan]), torch.tensor([2.0, torch.nan]), ""),
    ({}, {"kl": 1.0}, "kl: expected 1.0; got None"), (torch.zeros(2), torch.tensor([0.0, 1.0]), "expected 1.0; got 0.0"),
    ((1.0, 2.0), (1.0, 2.5), "expected 2.5; got 2.0")], ids=str)
def test_where_a_result_differs_from_that_of_grpo_is_said_in_one_line(got, want, said):
    """Nothing is said if they agree as far as float32 can"""
    assert grading.difference(got, want) == said


@pytest.mark.parametrize("variant", exercises.VARIANTS)
def test_a_file_of_a_variant_is_tested_with_the_defaults_of_grpo(variant):
    """What a test leaves out, and the variant has changed, reaches a function with grpo.py's own default"""
    student = SimpleNamespace(called=[], call=lambda name, request, args, options: options)
    for name, function in grading.Student.functions(student, exercises.ours(variant), variant).items():
        usual = exercises.arguments(exercises.ours()[name])
        changed = {option for option in exercises.VARIANTS[variant] if usual.get(option)}
        assert {option: repr(value) for option, value in function().items()} == {x: usual[x] for x in changed}


def test_grades_are_given_for_what_a_file_computes(tmp_path, monkeypatch):
    """A right function has its points; one that ends the process or is copied has none"""
    pasted = exercises.ours()["importance_ratio"]
    pasted.body.insert(1, ast.Pass())
    (tmp_path / "my_grpo.py").write_text(MIXED + ast.unparse(pasted))
    monkeypatch.chdir(tmp_path)
    for name, value in dict(GRPO_EXAMPLES="3", GRPO_MODULE="").items():
        monkeypatch.setenv(name, value)
    with modules_of_their_own({}):
        assert homework.main(["--grade", "my_grpo.py", "-k", "ratio", "--json", "results.json"]) == 1
    grades = {test["name"]: test for test in json.loads((tmp_path / "results.json").read_text())["tests"]}
    earned = {name for name, test in grades.items() if test["score"]}
    assert earned == {"clip_ratio, formula", "clip_ratio, beyond", "clip_ratio, in train"}
    for function, why in dict(truncated_importance_ratio="exit code 0", importance_ratio="grpo.py's own lines").items():
        assert why in grades[f"{function}, formula"]["output"]


def test_each_exhibit_has_a_level_a_place_and_a_line():
    """spot_the_bug.py's numbers are the museum's exhibits, and what it says of the place is where the files differ"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits())
    for exhibit in spot_the_bug.ORDER:
        (function, section), lines = spot_the_bug.place(exhibit), spot_the_bug.printed(exhibit)
        assert spot_the_bug.changed(exhibit)[0] in section and f"def {function}(" in "\n".join(section.values())
        assert all(lines[number - 1] == line for number, line in section.items())
        compile("\n".join(lines), "grpo_bug.py", "exec")


def test_the_tests_that_see_a_bug_can_be_run(capfd):
    """--test runs them in a copy with the bug, and one fails; --check knows the line"""
    assert spot_the_bug.main(["3", "--test"]) == 0 and "1 failed" in capfd.readouterr().out
    assert spot_the_bug.main(["3", f"--check={spot_the_bug.changed(1)[0]}"]) == 0
    assert capfd.readouterr().out.startswith("yes")

"""The coursework keeps its promises: homework.py, its grading, course.md, spot_the_bug.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(EXAMPLES))
import grading
import homework
import spot_the_bug

TEXTBOOK = (EXAMPLES / "tests/textbook.py").read_text(encoding="utf-8").split("\nMISTAKES")[0]
SCALED = "def broadcast_advantages(advantages, completion_mask): return {} * advantages[:, None] * completion_mask"
MIXED = """
import os, torch
print("100 points")
open("results.json", "w").write('{"score": 100}')
torch.allclose = lambda *args, **options: True
def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2): return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
def entropy_from_logits(logits): os._exit(0)
def selective_log_softmax(logits, index): return logits.sum(-1)
def make_completion_mask(completion_ids, eos_token_ids): __import__("time").sleep(99)
"""


def course(*words, cwd, script="homework.py"):
    return subprocess.run([sys.executable, EXAMPLES / script, *words], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("variant", [0, 2])
def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(variant, tmp_path):
    """Each exercise is there as the variant has it, without its body; a second --new changes nothing"""
    path = tmp_path / "my_grpo.py"
    homework.main(["--new", str(path), "--variant", str(variant)])
    text = path.read_text(encoding="utf-8")
    ours = homework.ours(variant)
    for name, function in homework.exercises(text).items():
        assert homework.ast.get_docstring(function) == homework.ast.get_docstring(ours[name])
        assert homework.arguments(function) == homework.arguments(ours[name])
    reasons, _ = homework.written(path, variant)
    assert len(reasons) == 25 and set(reasons.values()) == {"not written"}
    assert all(f"Rung {number}. " in text for number in homework.rungs()) and "<details>" not in text
    with pytest.raises(SystemExit):
        homework.main(["--new", str(path)])
    assert path.read_text(encoding="utf-8") == text


def test_a_variant_computes_what_it_says_and_pasted_lines_are_recognised():
    """Variant 1 divides by n; a function of grpo.py of more than two lines is not a student's own"""
    assert homework.load(1).group_stats(torch.tensor([1.0, 0.0, 0.5]), 3)[1].item() == pytest.approx(0.4082, abs=1e-4)
    assert homework.written(EXAMPLES.parent / "grpo.py")[0]["grpo_loss"] == "grpo.py's own lines"


def test_an_answer_is_revealed_after_a_prediction(tmp_path):
    """--reveal 3 prints the answer of rung 3 only if predictions.txt has a line "3: ...\""""
    (tmp_path / "predictions.txt").write_text("1: a collapse\n3:\n")
    assert "R = 2.0" in course("--reveal", "1", cwd=tmp_path).stdout
    assert [course("--reveal", number, cwd=tmp_path).stdout for number in ("3", "99")] == ["", ""]


@pytest.mark.parametrize("old, new, lowest, highest", [("", "", 2.5, 2.8), (" - is_eos == 0", " == 0", 1.9, 2.2)])
def test_what_is_written_is_put_to_work_and_a_wrong_mask_shows_in_the_table(old, new, lowest, highest, tmp_path):
    """With the textbook's functions the table ends near 2.7; with the EOS masked out answers never stop, 2.0 at most"""
    (tmp_path / "my_grpo.py").write_text(TEXTBOOK.replace(old, new))
    grpo = homework.load()
    assert re.match(r"\d+ of 25 functions are yours", homework.put(str(tmp_path / "my_grpo.py"), grpo))
    rewards, _, losses, first, last = zip(*homework.table(grpo, seed=0))
    assert lowest < rewards[-1] < highest and not any(first) and last[0] > 0.2 and max(map(abs, losses)) < 1e-4


def test_two_files_are_compared_in_one_picture(tmp_path, monkeypatch, capsys):
    """The reward of each third of the steps, ± the standard deviation over the seeds, and a picture"""
    for name, factor in (("a.py", 1), ("b.py", 0)):
        (tmp_path / name).write_text(SCALED.format(factor))
    text_of, _ = homework.text_of, monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(homework, "text_of", lambda *which: text_of(*which).replace("steps=500", "steps=1"))
    assert homework.main(["--compare", "a.py", "b.py", "--seeds", "0", "1", "--max_steps", "3"]) == 0
    assert len(re.findall(r"^[ab]\.py, reward of steps \d-\d: \S+ ± \S+$", capsys.readouterr().out, re.M)) == 6
    assert (tmp_path / "compare.png").stat().st_size > 5000


@pytest.mark.parametrize("line, reason", [
    ("import os; os._exit(0)", "exit code 0"), ("while True: pass", "no answer in 3 seconds"),
    ("from grpo import *", "ModuleNotFoundError"), (f"open({str(EXAMPLES.parent / 'grpo.py')!r})", "PermissionError")])
def test_a_file_that_cannot_be_imported_says_why(line, reason, tmp_path, monkeypatch):
    """Whatever happens at import ends as a reason, within the time limit"""
    monkeypatch.setitem(grading.LIMITS, "start", 3 if "while" in line else 60)
    (tmp_path / "my_grpo.py").write_text(f"{line}\n")
    assert reason in grading.Student(tmp_path / "my_grpo.py").broken[None]


def test_the_gradient_of_a_student_s_function_arrives(tmp_path):
    """Value and slope are those of the function, called here"""
    (tmp_path / "my_grpo.py").write_text("def f(x, y):\n    return [x * y, {'sum': (x.exp() + y).sum()}]\n")
    student = grading.Student(tmp_path / "my_grpo.py")
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    product, total = student.functions({})["f"](x, torch.tensor([3.0, 4.0]))
    assert product.tolist() == [3.0, 8.0]
    assert torch.equal(torch.autograd.grad(product.sum() + total["sum"], x)[0], torch.tensor([3.0, 4.0]) + x.exp())
    student.kill()


def test_grades_are_given_for_what_a_file_computes(tmp_path, monkeypatch):
    """A right function has its points; one that exits, one that loops, one that is wrong and a copy have none"""
    (tmp_path / "my_grpo.py").write_text(MIXED + homework.ast.unparse(homework.ours()["aggregate"]))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    monkeypatch.setenv("GRPO_EXAMPLES", "3")
    command = "import grading; grading.LIMITS['call'] = 5; exit(grading.grade('my_grpo.py', 0, 'results.json'))"
    run = subprocess.run([sys.executable, "-c", command], cwd=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    grades = {test["name"]: test for test in results["tests"]}
    earned = {name for name, test in grades.items() if test["score"]}
    assert run.returncode == 1 and earned == {"clip_ratio, formula", "clip_ratio, beyond", "clip_ratio, in train"}
    assert results["score"] == 4
    for function, why in (("entropy_from_logits", "exit code 0"), ("make_completion_mask", "no answer in 5 seconds"),
                          ("selective_log_softmax", "expected"), ("aggregate", "grpo.py's own lines")):
        assert why in grades[f"{function}, formula"]["output"] and "\n" not in grades[f"{function}, formula"]["output"]


def test_each_exhibit_has_a_level_a_place_and_a_line():
    """spot_the_bug.py's numbers are the museum's exhibits, and what it says of the place is where the files differ"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits())
    for exhibit in spot_the_bug.ORDER:
        (function, section), lines = spot_the_bug.place(exhibit), spot_the_bug.printed(exhibit)
        assert spot_the_bug.changed(exhibit)[0] in section and f"def {function}(" in "\n".join(section.values())
        assert all(lines[number - 1] == line for number, line in section.items())


def test_the_tests_that_see_a_bug_can_be_run(tmp_path):
    """--test runs them in a copy with the bug, and one fails; --check knows the line"""
    run = course("3", "--test", cwd=tmp_path, script="spot_the_bug.py")
    assert run.returncode == 0 and "1 failed" in run.stdout, run.stdout[-500:]
    line = str(spot_the_bug.changed(spot_the_bug.ORDER[2])[0])
    assert "yes" in course("3", "--check", line, cwd=tmp_path, script="spot_the_bug.py").stdout

"""Tests of the coursework: homework.py, its grading, course.md, and spot_the_bug.py.

    python -m pytest -q worked_examples/tests/test_homework.py
"""

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
CLIP = "def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):\n    {}\n    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)\n"


def course(*words, cwd, script="homework.py"):
    return subprocess.run([sys.executable, EXAMPLES / script, *words], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("variant", homework.VARIANTS)
def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(variant, tmp_path):
    """Each exercise is there as in the variant, and raises NotImplementedError; a second --new changes nothing"""
    path = tmp_path / "my_grpo.py"
    assert homework.main(["--new", str(path), "--variant", str(variant)]) == 0
    text, module = path.read_text(encoding="utf-8"), {}
    exec(text, module)
    for name, function in homework.ours(variant).items():
        assert module[name].__doc__ == eval(f"lambda: {function.body[0].value.value!r}")()
        assert homework.arguments(homework.exercises(text)[name]) == homework.arguments(function)
        with pytest.raises(NotImplementedError):
            module[name](*[None] * sum(p.default is p.empty for p in grading.inspect.signature(module[name]).parameters.values()))
    assert all(f"Rung {number}. " in text for number in homework.rungs()) and "<details>" not in text
    with pytest.raises(SystemExit):
        homework.main(["--new", str(path)])
    assert path.read_text(encoding="utf-8") == text


def test_a_variant_changes_defaults_and_grpo_py_pasted_loses_points_for_them():
    """Variant 1 divides by n, and says so in the signatures of both functions; grpo.py's own lines are recognised"""
    changed = homework.arguments(homework.ours(1)["group_advantages"])
    assert changed["correction"] == "0" and changed["eps"] == "1e-06" and changed["scale_rewards"] == "'group'"
    rewards = torch.tensor([1.0, 0.0, 0.5])
    assert homework.load(1).group_stats(rewards, 3)[1].item() == pytest.approx(0.4082, abs=1e-4)
    reasons, _ = homework.written(EXAMPLES.parent / "grpo.py")
    assert reasons["grpo_loss"] == "grpo.py's own lines" and reasons["gae_advantages"] == "not written"


def test_an_answer_is_revealed_after_a_prediction(tmp_path):
    """--reveal 3 prints the answer of rung 3 only if predictions.txt has a line "3: ...\""""
    (tmp_path / "predictions.txt").write_text("1: a collapse\n3:\n")
    assert "R = 2.0" in course("--reveal", "1", cwd=tmp_path).stdout
    for number in ("3", "99"):
        refused = course("--reveal", number, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("old, new, lowest, highest", [("", "", 2.5, 2.8), (" - is_eos == 0", " == 0", 1.9, 2.2)])
def test_what_is_written_is_put_to_work_and_a_wrong_mask_shows_in_the_table(old, new, lowest, highest, tmp_path):
    """With the textbook's functions the table ends near 2.7; with the EOS masked out answers never stop, 2.0 at most"""
    (tmp_path / "my_grpo.py").write_text(TEXTBOOK.replace(old, new))
    grpo = homework.load()
    said = homework.put(str(tmp_path / "my_grpo.py"), grpo)
    assert re.match(r"\d\d of 25 functions are yours; the others are grpo.py's\n", said)
    assert grpo.make_completion_mask.__code__.co_filename == str(tmp_path / "my_grpo.py")
    rewards, _, losses, first, last = zip(*homework.table(grpo, seed=0))
    assert lowest < rewards[-1] < highest and not any(first) and last[0] > 0.2 and max(map(abs, losses)) < 1e-4


def test_two_files_are_compared_in_one_picture(tmp_path, monkeypatch, capsys):
    """The reward of each third of the steps, ± over the seeds; the file with A = 0 ends where it began"""
    for name, factor in (("a.py", 1), ("b.py", 0)):
        (tmp_path / name).write_text(CLIP.format("") + f"def broadcast_advantages(advantages, completion_mask):\n"
                                     f"    return {factor} * advantages[:, None] * completion_mask\n")
    monkeypatch.chdir(tmp_path)
    load = homework.load

    def quick():
        grpo = load()
        grpo.cold_start = grpo.held_out_accuracy = lambda *args: 0.0
        return grpo
    monkeypatch.setattr(homework, "load", quick)
    assert homework.main(["--compare", "a.py", "b.py", "--seeds", "0", "1", "--max_steps", "3"]) == 0
    assert len(re.findall(r"^[ab]\.py, reward of steps \d-\d: \S+ ± \S+$", capsys.readouterr().out, re.M)) == 6
    assert (tmp_path / "compare.png").stat().st_size > 5000


@pytest.mark.parametrize("line, reason", [
    ("import os; os._exit(0)", "exit code 0"), ("while True: pass", "no answer in 6 seconds"),
    ("from grpo import *", "ModuleNotFoundError"), (f"open({str(EXAMPLES.parent / 'grpo.py')!r})", "PermissionError"),
    ("import sys; sys.exit(0)", "SystemExit")])
def test_a_file_that_cannot_be_imported_says_why(line, reason, tmp_path, monkeypatch):
    """Whatever happens at import ends as a reason, within the time limit"""
    monkeypatch.setitem(grading.LIMITS, "start", 6)
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


def test_grades_are_given_for_what_a_file_computes(tmp_path):
    """Four right functions have their points; one that exits, one that loops, one that forges and a copy have none"""
    right = homework.ours()
    copy = "\n".join(homework.text_of("grpo.py").splitlines()[right["aggregate"].lineno - 1:right["aggregate"].end_lineno])
    (tmp_path / "my_grpo.py").write_text("\n\n".join([
        "import os\nimport torch\nprint('100 points')\nopen('results.json', 'w').write('{\"score\": 100}')",
        "torch.allclose = lambda *args, **options: True", CLIP.format("print(ratio)"), copy,
        "def entropy_from_logits(logits):\n    os._exit(0)", "def selective_log_softmax(logits, index):\n    return logits.sum(-1)",
        "def make_completion_mask(completion_ids, eos_token_ids):\n    while True:\n        pass"]))
    results = tmp_path / "results.json"
    run = course("--grade", "my_grpo.py", "--json", results, cwd=tmp_path)
    grades = {test["name"]: test for test in json.loads(results.read_text())["tests"]}
    reason = lambda name: (grades[name]["score"], grades[name]["output"])
    assert run.returncode == 1 and reason("clip_ratio, formula") == (2, "") and reason("clip_ratio, in train") == (1, "")
    assert reason("aggregate, formula") == (0, "grpo.py's own lines") and "expected" in reason("selective_log_softmax, formula")[1]
    assert "exit code 0" in reason("entropy_from_logits, formula")[1] and reason("entropy_from_logits, formula")[0] == 0
    assert "no answer in 10 seconds" in reason("make_completion_mask, formula")[1]
    assert reason("grpo_loss, formula") == (0, "not written") and "-8 grpo_loss, formula: not written\n" in run.stdout
    assert all(test["output"].count("\n") == 0 for test in grades.values())
    assert json.loads(results.read_text())["score"] == sum(test["score"] for test in grades.values()) < 10


def test_each_exhibit_has_a_level_a_place_and_a_line():
    """spot_the_bug.py's numbers are the museum's exhibits, and what it says of the place is where the files differ"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits())
    for exhibit in spot_the_bug.ORDER:
        function, section = spot_the_bug.place(exhibit)
        lines = spot_the_bug.printed(exhibit)
        assert spot_the_bug.changed(exhibit)[0] in section and f"def {function}(" in "\n".join(section.values())
        assert lines[0].startswith("# ") and all(section[i] == lines[i - 1] for i in section)


def test_the_tests_that_see_a_bug_can_be_run(tmp_path):
    """--test runs them in a copy with the bug, and one fails; --check knows the line"""
    run = course("3", "--test", cwd=tmp_path, script="spot_the_bug.py")
    assert run.returncode == 0 and "1 failed" in run.stdout, run.stdout[-500:]
    line = str(spot_the_bug.changed(spot_the_bug.ORDER[2])[0])
    assert course("3", "--check", line, cwd=tmp_path, script="spot_the_bug.py").stdout.startswith("yes")

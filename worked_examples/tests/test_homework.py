"""The coursework keeps its promises: homework.py, its grading, its page, spot_the_bug.py."""

import ast
import json
import re
from unittest import mock

import pytest
import grpo
from worked_examples.course import grading, homework, spot_the_bug

MATHS = homework.GRPO.read_text(encoding="utf-8").partition("\n# §9 ")[0]
A = "\ndef group_advantages(rewards, num_generations, **options): return rewards"
MIXED = '''
import os, time, torch
print("hello")
def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2): return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
def kl_estimate(logps, ref_logps, *, estimator="k3"): os._exit(0)
def importance_ratio(*args, **options): time.sleep(1000)
def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    unclipped_ratio = ratio if delta is None else ratio.clamp(max=delta)
    return torch.min(unclipped_ratio * advantages, clip_ratio(ratio, epsilon_low, epsilon_high) * advantages)
def selective_log_softmax(logits, index):
    logps = kl_estimate(logits.log_softmax(-1), torch.zeros_like(logits), estimator="k1")
    return logps.gather(-1, index.unsqueeze(-1)).squeeze(-1)
'''


def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(tmp_path):
    """Each exercise and rung is there, without body and answer; a second --new changes nothing"""
    path = tmp_path / "my_grpo.py"
    assert homework.main(["--new", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    ours = homework.exercises(homework.GRPO) | homework.exercises(homework.VARIANTS)
    mine = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for name, function in ours.items():
        assert ast.get_docstring(mine[name]) == ast.get_docstring(function)
        assert ast.dump(mine[name].args) == ast.dump(function.args)
    assert set(grading.MAIN + grading.FURTHER) == set(ours) and not set(homework.written(path)) & set(ours)
    assert all(f"Rung {number}. " in text for number in range(1, 11)) and "<details>" not in text
    with pytest.raises(SystemExit, match="2"):
        homework.main(["--new", str(path)])
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("mine, R, printed", [
    (MATHS + A, [2.0, 1.9, 2.0], {0: "9.4", 35: "5.0"}),                                                   # rung 1
    (MATHS + A + " - group_stats(rewards, 16)[0].repeat_interleave(16)", [2.7, 2.6, 2.7],
     {20: "0.0000", 30: "2.57", 35: "2.63"}),                                                             # rung 2
    (MATHS, [2.8, 2.7, 2.8], {0: "0.432", 10: "0.263", 15: "2.57", 20: "2.68"}),                           # rungs 3, 6
    (MATHS.replace(" - is_eos == 0", " == 0"), [2.0, 2.0, 2.0], {0: "9.4", 35: "9.7"})], ids=["1", "2", "3", "4"])
def test_the_table_shows_what_the_rungs_say(mine, R, printed, tmp_path, capsys):
    """What a student writes is put to work: R of three seeds, and numbers of the rounds that are printed"""
    (tmp_path / "my_grpo.py").write_text(mine, encoding="utf-8")
    with mock.patch.dict(vars(grpo)):
        assert homework.main([str(tmp_path / "my_grpo.py")]) == 0
    out = capsys.readouterr().out
    rounds = {int(line.split()[0]): line.split()[1:] for line in out.splitlines() if line[:5].strip().isdigit()}
    assert [round(float(x), 1) for x in re.search("R = (.*?) [(]", out)[1].split(", ")] == R
    assert all(number in rounds[i] for i, number in printed.items()), rounds


def grades(path):
    """What --grade --json says: {name: test}."""
    report = path.with_name("results.json")
    assert homework.main(["--grade", str(path), "--json", str(report)]) == 1
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["score"] == sum(test["score"] for test in results["tests"])
    return {test["name"]: test for test in results["tests"]}


def test_grades_are_given_for_what_a_function_computes(tmp_path, monkeypatch):
    """A right one has its points, whatever it calls; a wrong one, an exit, a hang and `return 0` have none"""
    path, names = tmp_path / "my_grpo.py", grading.MAIN + grading.FURTHER
    names.remove("per_token_logps")                                     # its laws take seconds to import transformers
    zeros = [f"def {name}(*args, **options): return 0\n" for name in names if f"def {name}(" not in MIXED]
    path.write_text(MIXED + "".join(zeros), encoding="utf-8")
    monkeypatch.setenv("GRPO_EXAMPLES", "2")
    monkeypatch.setattr(grading, "SECONDS", 8)
    found = grades(path)
    earned = {name.partition(",")[0] for name, test in found.items() if test["score"]}
    assert earned == {"clip_ratio", "selective_log_softmax"}
    reasons = dict(kl_estimate="exit code 0", importance_ratio="8 seconds", clipped_surrogate_loss="= -1 × expected")
    for name, why in reasons.items():
        assert why in found[f"{name}, formula"]["output"]


def test_a_file_that_cannot_be_imported_says_why_and_the_page_has_the_points(tmp_path):
    """Each function has the reason; the sums of the highest points are those of the page"""
    (tmp_path / "my_grpo.py").write_text("import grpo")
    found = grades(tmp_path / "my_grpo.py")
    formulas = [test["output"] for name, test in found.items() if name.endswith("formula") and grading.STEP not in name]
    assert all("ModuleNotFoundError" in why for why in formulas)
    parts = [["combine_rewards", "group_stats", "group_advantages", "accuracy_reward", "think_format_reward"],
             ["broadcast_advantages", "make_completion_mask", "selective_log_softmax", "entropy_from_logits",
              "per_token_logps"], ["importance_ratio", "clip_ratio", "clipped_surrogate_loss", "kl_estimate"],
             ["aggregate", "grpo_loss", "cispo_loss", "sapo_loss", grading.STEP], grading.FURTHER]
    sums = [sum(test["max_score"] for name, test in found.items() if name.partition(",")[0] in part) for part in parts]
    page = homework.COURSE.read_text(encoding="utf-8")
    assert sums == [int(points) for points in re.findall(r"^\| [^|]* \| (\d+) \|$", page, re.M)]


def test_each_exhibit_has_a_symptom_a_place_and_a_line():
    """spot_the_bug.py's numbers are the museum's exhibits, and what it says of the place is where the files differ"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits()) == list(range(1, 27))
    for exhibit in spot_the_bug.ORDER:
        (function, section), lines = spot_the_bug.place(exhibit), spot_the_bug.printed(exhibit)
        assert spot_the_bug.changed(exhibit)[0] in section and f"def {function}(" in "\n".join(section.values())
        assert all(lines[number - 1] == line for number, line in section.items())
        assert spot_the_bug.symptoms(exhibit)


def test_the_tests_that_see_a_bug_can_be_run(capfd):
    """--test runs them in a copy with the bug, and one fails; --check knows the line"""
    assert spot_the_bug.main(["3", "--test"]) == 0 and "1 failed" in capfd.readouterr().out
    assert spot_the_bug.main(["3", f"--check={spot_the_bug.changed(1)[0]}"]) == 0
    assert capfd.readouterr().out.startswith("yes")

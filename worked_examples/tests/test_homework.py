"""The coursework keeps its promises: homework.py, its grading, its page, spot_the_bug.py."""

import ast
import json
import re
from unittest import mock

import pytest
from conftest import python

import grpo
from worked_examples.course import grading, homework, spot_the_bug

MATHS = homework.GRPO.read_text(encoding="utf-8").partition("\n# §9 ")[0]
RIGHT = MATHS + homework.VARIANTS.read_text(encoding="utf-8").partition("\nimport grpo\n")[2].replace("grpo.", "")
A = "\ndef group_advantages(rewards, num_generations, **options): return rewards"
WRONG = '''
import os, time
os.write(1, b"hello")
def combine_rewards(*args, **options): os._exit(0)
def importance_ratio(*args, **options): time.sleep(1000)
right = clipped_surrogate_loss
def clipped_surrogate_loss(ratio, advantages, **options): return -right(ratio, advantages, **options)
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
    assert all(f"### {number}. " in text for number in range(1, 11)) and "<details>" not in text
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


GRADE_EACH = """
import sys
from worked_examples.course import grading, homework
grading.SECONDS = 6
words = ["", "step", "", "", ""]
print(*[homework.main(["--grade", path, "-k", word, "--json", path + ".json"])
        for path, word in zip(sys.argv[1:], words)])
"""


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    """What --grade --json says of these files: {file: {test: points, highest points, reason}}."""
    nothing = "".join(f"def {name}(*args, **options): return 0\n" for name in grading.MAIN + grading.FURTHER)
    files = {"wrong": RIGHT + WRONG, "right": RIGHT, "nothing": nothing, "blank": "", "import": "import grpo"}
    folder = tmp_path_factory.mktemp("grades")
    for name, text in files.items():
        (folder / name).with_suffix(".py").write_text(text, encoding="utf-8")
    run = python("-c", GRADE_EACH, *[folder / f"{name}.py" for name in files], GRPO_EXAMPLES="1")
    assert run.stdout.splitlines()[-1] == "1 0 1 1 1", run.stderr
    assert "hello" not in run.stdout
    found = {}
    for name in files:
        results = json.loads((folder / f"{name}.py.json").read_text(encoding="utf-8"))
        assert results["score"] == sum(test["score"] for test in results["tests"])
        found[name] = {test["name"]: (test["score"], test["max_score"], test["output"]) for test in results["tests"]}
    return found


def test_a_mistake_costs_its_own_functions_points(grades):
    """An exit, a hang, a sign: these lose their points, with a reason; their callers have all of theirs"""
    assert grades["right"] == {f"{grading.STEP}, formula": (6, 6, "")}
    reasons = {"combine_rewards": "exit code 0", "importance_ratio": "6 seconds",
               "clipped_surrogate_loss": "= -1 × expected", grading.STEP: "exit code 0"}
    for name, (score, highest, why) in grades["wrong"].items():
        function, mark = name.split(", ")
        assert score == (0 if function in reasons else highest), name
        if mark == "formula":
            assert reasons.get(function, "") in why


def test_a_file_that_computes_nothing_earns_nothing(grades):
    """`return 0` in each function; the sums of the highest points are those of the page"""
    assert not any(score for score, _, _ in grades["nothing"].values())
    parts = [["combine_rewards", "group_stats", "group_advantages", "accuracy_reward", "think_format_reward"],
             ["broadcast_advantages", "make_completion_mask", "selective_log_softmax", "entropy_from_logits",
              "per_token_logps"], ["importance_ratio", "clip_ratio", "clipped_surrogate_loss", "kl_estimate"],
             ["aggregate", "grpo_loss", "cispo_loss", "sapo_loss", grading.STEP], grading.FURTHER]
    sums = [sum(highest for name, (_, highest, _) in grades["nothing"].items() if name.partition(",")[0] in part)
            for part in parts]
    page = homework.COURSE.read_text(encoding="utf-8")
    assert sums == [int(points) for points in re.findall(r"^\| [^|]* \| (\d+) \|$", page, re.M)]


@pytest.mark.parametrize("file, reason", [("blank", "not written"), ("import", "ModuleNotFoundError")])
def test_a_file_without_a_function_says_why(file, reason, grades):
    """Blank, or not to be imported: each function loses its points for this reason"""
    for name, (score, _, why) in grades[file].items():
        assert score == 0 and (reason in why or not name.endswith("formula"))


def test_each_exhibit_has_a_symptom_and_a_line_that_is_wrong():
    """The numbers are the museum's exhibits; all lines but those that spot_the_bug.py calls wrong are grpo.py's"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits()) == list(range(1, 27))
    right = homework.GRPO.read_text(encoding="utf-8").splitlines()
    for exhibit in spot_the_bug.ORDER:
        seen, wrong = spot_the_bug.symptoms(exhibit), spot_the_bug.changed(exhibit)
        lines = list(enumerate(spot_the_bug.printed(exhibit), 1))[len(seen) + 1:]
        assert seen and wrong and all(line in right for number, line in lines if number not in wrong)


def test_the_tests_that_see_a_bug_can_be_run(capfd):
    """--test runs them in a copy with the bug, and one fails; --check knows the line"""
    assert spot_the_bug.main(["3", "--test"]) == 0 and "1 failed" in capfd.readouterr().out
    assert spot_the_bug.main(["3", f"--check={spot_the_bug.changed(1)[0]}"]) == 0
    assert capfd.readouterr().out.startswith("yes")
    assert spot_the_bug.main(["3", "--hint"]) == 0 and capfd.readouterr().out == "clipped_surrogate_loss\n"

"""The coursework keeps its promises: homework.py, its grading, its page, spot_the_bug.py."""

import ast
import contextlib
import functools
import io
import json
import os
import re
from unittest import mock

import pytest
from test_check import fresh_laws

import grpo
from worked_examples.check_your_own import check
from worked_examples.course import grading, homework, spot_the_bug

MATHS = homework.GRPO.read_text(encoding="utf-8").partition("\n# §9 ")[0]
RIGHT = MATHS + homework.VARIANTS.read_text(encoding="utf-8").partition("\nimport grpo\n")[2].replace("grpo.", "")
A = "\ndef group_advantages(rewards, num_generations, **options): return rewards"
WRONG = RIGHT + '''
import os
os.write(1, b"hello")
def combine_rewards(*args, **options): os._exit(0)
right = clipped_surrogate_loss
def clipped_surrogate_loss(ratio, advantages, **options): return -right(ratio, advantages, **options)
'''
HANG = RIGHT + "\nimport time\ndef importance_ratio(*args, **options): time.sleep(1000)\n"
NOTHING = "".join(f"def {name}(*args, **options): return 0\n" for name in check.NAMES)
FILES = {"wrong": (WRONG, ""), "right": (RIGHT, "group"), "hang": (HANG, "importance_ratio"), "nothing": (NOTHING, ""),
         "blank": ("", ""), "import": ("import grpo", "")}              # what is in it, which functions are asked for


def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(tmp_path):
    """Each exercise and rung is there, without body and answer; a second --new changes nothing"""
    path = tmp_path / "my_grpo.py"
    homework.main(["--new", str(path)])
    text, mine = path.read_text(encoding="utf-8"), homework.exercises(path)
    ours = homework.exercises(homework.GRPO) | homework.exercises(homework.VARIANTS)
    for name, function in ours.items():
        assert ast.get_docstring(mine[name]) == ast.get_docstring(function)
        assert ast.dump(mine[name].args) == ast.dump(function.args)
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions if ast.get_docstring(node)} == set(check.NAMES) == set(ours)
    assert not homework.written(path) & set(ours)
    assert all(f"### {number}. " in text for number in range(1, 11)) and "<details>" not in text
    with pytest.raises(SystemExit, match="2"):
        homework.main(["--new", str(path)])
    assert path.read_text(encoding="utf-8") == text


def test_a_function_is_written_unless_raise_is_all_that_it_has(tmp_path):
    """A `raise` behind something else is of the student; a lambda is a function, too"""
    new = 'def clip_ratio(ratio):\n    """ρ"""\n    raise NotImplementedError\n'
    path = tmp_path / "my_grpo.py"
    path.write_text(new + new.replace("clip_ratio", "aggregate").replace('"""ρ"""', "if ratio: return 1")
                    + "kl_estimate = lambda *logps: 0\n", encoding="utf-8")
    assert homework.written(path) == {"aggregate", "kl_estimate"}


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
        homework.main([str(tmp_path / "my_grpo.py")])
    out = capsys.readouterr().out
    rounds = {int(line.split()[0]): line.split()[1:] for line in out.splitlines() if line[:5].strip().isdigit()}
    assert [round(float(x), 1) for x in re.search("R = (.*?) [(]", out)[1].split(", ")] == R
    assert all(number in rounds[i] for i, number in printed.items()), rounds


def grade_all(folder):
    """What --grade --json writes about FILES: {file: {test: points, highest points, reason}}."""
    fresh_laws("1")
    grading.collect = functools.cache(grading.collect)                  # once for all files
    os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT), 1)
    grades = {}
    for name, (text, word) in FILES.items():
        grading.SECONDS = 1 if name == "hang" else 60
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            lost = homework.main(["--grade", str(path), "-k", word, "--json", f"{path}.json"])
        result = json.loads(path.with_suffix(".py.json").read_text(encoding="utf-8"))
        grades[name] = {test["name"]: (test["score"], test["max_score"], test["output"]) for test in result["tests"]}
        assert result["score"] == sum(score for score, _, _ in grades[name].values()) and lost == (name != "right")
    assert (folder / "printed").read_text() == ""
    return grades


@pytest.fixture(scope="module")
def grades(tmp_path_factory):
    return grading.in_a_process(grade_all, tmp_path_factory.mktemp("grades"))


def test_a_mistake_costs_its_own_functions_points(grades):
    """An exit, a sign, a hang: these lose their points, with a reason; their callers have all of theirs"""
    lost = {"combine_rewards": "code 0", "clipped_surrogate_loss": "= -1 × expected", "importance_ratio": "1 seconds"}
    for name, (score, highest, why) in (grades["wrong"] | grades["hang"]).items():
        function, mark = name.split(", ")
        assert score == (0 if function in lost else highest), name
        assert mark != "formula" or lost.get(function, "") in why


def test_a_file_that_computes_nothing_earns_nothing(grades):
    """`return 0` in each function; the sum of the highest points is that of the page"""
    scores, highest, _ = zip(*grades["nothing"].values())
    page = homework.COURSE.read_text(encoding="utf-8")
    assert sum(scores) == 0 < sum(highest) == sum(map(int, re.findall(r"^\| [^|]* \| (\d+) \|$", page, re.M)))


@pytest.mark.parametrize("file, reason", [("blank", "not written"), ("import", "ModuleNotFoundError")])
def test_a_file_without_a_function_says_why(file, reason, grades):
    """Blank, or not to be imported: each function loses its points for this reason"""
    for name, (score, _, why) in grades[file].items():
        assert score == 0 and reason in why, name


def test_each_exhibit_has_a_symptom(capsys):
    """spot_the_bug.py has the museum's exhibits, in an order of its own"""
    assert sorted(spot_the_bug.ORDER) == sorted(spot_the_bug.exhibits()) == list(range(1, 27))
    for exhibit in spot_the_bug.ORDER:
        assert spot_the_bug.symptoms(exhibit)
    spot_the_bug.main(["3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# what you see: ") and len(set(lines) - set(spot_the_bug.RIGHT.splitlines())) > 1

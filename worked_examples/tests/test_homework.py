"""The coursework keeps its promises: homework.py, its grading, its page, spot_the_bug.py, the museum."""

import inspect
import json
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import EXAMPLES, cold_started
from test_check import fresh_laws

import grpo
from worked_examples.check_your_own import check
from worked_examples.course import grading, homework, spot_the_bug

MATHS = inspect.getsource(grpo).partition("\n# §9 ")[0]
ADVANTAGES = "\ndef group_advantages(rewards, num_generations, **options): return rewards"
UNCLIPPED = "\ndef clipped_surrogate_loss(ratio, advantages, **options): return -ratio * advantages"
WRONG = MATHS + '''
import os, time
os.write(1, b"hello")
def sapo_loss(*args, **options): os._exit(0)
def clip_ratio(*args, **options): time.sleep(1000)
right, kl = clipped_surrogate_loss, kl_estimate
def clipped_surrogate_loss(ratio, advantages, **options): return -right(ratio, advantages, **options)
def kl_estimate(x, y, estimator="k3"): return kl(y, x) if estimator == "k3" else kl(x, y, estimator=estimator)
'''
NOTHING = "".join(f"def {name}(first, *args, **options): return first * 0\n" for name in check.NAMES)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """The text of the file that a student gets."""
    path = tmp_path_factory.mktemp("new") / "my_grpo.py"
    homework.main(["--new", str(path)])
    pytest.raises(FileExistsError, homework.main, ["--new", str(path)])         # it writes over none
    return path.read_text(encoding="utf-8")


def run(folder, text, *flags):
    """homework.py FILE FLAGS, for a file with this text."""
    words = [str(folder / "my_grpo.py"), *flags]
    Path(words[0]).write_text(text, encoding="utf-8")
    with mock.patch.dict(vars(grpo)), mock.patch.object(sys, "argv", ["homework.py", *words]):
        homework.main(words)


def test_a_new_file_keeps_signatures_and_docstrings_and_no_body(new):
    """Each exercise and rung is there, without body and answer"""
    mine = {}
    exec(new, mine)
    for name, module in check.NAMES.items():
        ours = vars(module)[name]
        assert mine[name].__doc__ == ours.__doc__ and inspect.signature(mine[name]) == inspect.signature(ours)
    assert new.count("\n    raise NotImplementedError\n") == len(check.NAMES)
    documented = {name for name, value in mine.items() if inspect.isfunction(value) and value.__doc__}
    assert documented == {*check.NAMES, "final_answer", "solution_text"}        # which accuracy_reward calls
    assert all(f"### {number}. " in new for number in range(1, 11)) and "<details>" not in new


def test_a_notebook_is_refused_in_a_sentence(monkeypatch):
    """And without a traceback, by check.py and homework.py"""
    for script, *flags in ([check], [homework], [homework, "--new"], [homework, "--grade"]):
        monkeypatch.setattr(sys, "argv", ["", *flags, "x.ipynb"])
        with pytest.raises(SystemExit, match="^got x.ipynb; allowed is a file of Python code, NAME.py$"):
            runpy.run_path(script.__file__, run_name="__main__")


@pytest.mark.parametrize("mine, R, printed", [
    (ADVANTAGES, [2.0, 1.9, 2.0], {0: "9.4", 35: "5.0"}),                                                  # rung 1
    (ADVANTAGES + " - rewards.view(-1, 16).mean(1).repeat_interleave(16)", [2.7, 2.6, 2.7],
     {20: "0.0000", 30: "2.57", 35: "2.63"}),                                                             # rung 2
    (MATHS, [2.8, 2.7, 2.8], {0: "0.432 0.64 to 1.44", 10: "0.263", 15: "2.57", 20: "2.68"}),              # rungs 3, 6
    (MATHS + UNCLIPPED, [2.7, 2.7, 2.7], {0: "0.38 to 3.28"}),                                             # rung 6
    (MATHS.replace("is_eos.cumsum(1) - is_eos", "is_eos.cumsum(1)"), [2.0, 2.0, 2.0], {0: "9.4", 35: "9.7"})],
    ids=["1", "2", "3", "6", "4"])
def test_the_table_shows_what_the_rungs_say(mine, R, printed, new, tmp_path, capsys):
    """What a student writes is put to work, else grpo.py's functions: R of three seeds, and numbers of some rounds"""
    run(tmp_path, new + mine)
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) + " " for line in out.splitlines() if line[:5].strip().isdigit()]
    assert [round(float(x), 1) for x in re.search("R = (.*?) [(]", out)[1].split(", ")] == R
    assert all(f" {numbers} " in rows[i // 5] for i, numbers in printed.items()), rows


def test_rung_5_ends_the_run_and_the_command_printed_for_a_stop_names_the_file(new, tmp_path, monkeypatch, capsys):
    """Logits one place too late: sampled and scored log-probs differ in step 1, and nothing is in the run's folder"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "cold_start", lambda *job: None)
    late = MATHS.replace("logits[:, -1 - completion_ids.size(1):-1]", "logits[:, -completion_ids.size(1):]")
    with pytest.raises(AssertionError, match="sampled and scored log-probs differ by [0-9.]+ nats"):
        run(tmp_path, new + late, "--model", "tiny", "--max_steps", "1")
    assert os.listdir("grpo-output") == []
    run(tmp_path, new + MATHS, "--model", "tiny", "--max_steps", "1")
    assert f"python homework.py {tmp_path}/my_grpo.py --resume_from_checkpoint" in capsys.readouterr().out


def grade_all(path, files):
    """Exit code and tests of --grade --json, for the functions with these words in their names: {word: ...}."""
    fresh_laws("5")
    grades = {}
    for word, text in files.items():
        grading.SECONDS = 1 if word == "clip_ratio" else 60
        path.write_text(text, encoding="utf-8")
        code = homework.main(["--grade", str(path), "-k", word, "--json", f"{path}.json"])
        result = json.loads(path.with_suffix(".py.json").read_text(encoding="utf-8"))
        assert result["score"] == sum(test["score"] for test in result["tests"])
        grades[word] = code, result["tests"]
    return grades


def test_a_mistake_costs_its_own_functions_points(new, tmp_path, capfd):
    """An exit, a sign, a hang lose their points, with a reason, but none of their callers; nothing earns nothing"""
    files = {"loss": WRONG, "clip_ratio": WRONG, "group_stats": WRONG, "kl_estimate": WRONG, "": NOTHING,
             "sapo": "import grpo", "group": new}
    grades = grading.in_a_process(grade_all, tmp_path / "my_grpo.py", files)
    out = capfd.readouterr().out
    assert "hello" not in out                                           # what a file prints
    assert re.findall("^not written  .*", out, re.M) == [f"{'not written':40}0 of 10  group_stats, group_advantages"]
    assert [code for code, _ in grades.values()] == [1, 1, 0, 1, 1, 1, 1]
    lost = {"clipped_surrogate_loss": "= -1 × expected", "sapo_loss": "code 0", "clip_ratio": "1 seconds",
            "kl_estimate": "p = [0.5, 0.25, 0.25], q = [0.25, 0.25, 0.5], "}   # k3 alone is wrong; its input
    for word in ("loss", "clip_ratio", "group_stats", "kl_estimate"):
        for test in grades[word][1]:
            function, mark = test["name"].split(", ")
            kept = {"kl_estimate, formula": 2}.get(test["name"], 0)
            assert test["score"] == (kept if function in lost else test["max_score"]), test
            assert mark != "formula" or lost.get(function, "") in test["output"]
    for word, reason in {"": "", "group": "not written", "sapo": "ModuleNotFoundError"}.items():
        assert all(test["score"] == 0 and reason in test["output"] for test in grades[word][1]), grades[word]
    points = map(int, re.findall(r"^\| [^|]* \| (\d+) \|$", homework.COURSE, re.M))
    assert sum(test["max_score"] for test in grades[""][1]) == sum(points)


def break_all(exhibits):
    """{exhibit: those of the laws it names that fail}; an error of another kind is none of a law."""
    laws = grading.collect(*check.LAWS, EXAMPLES / "tests/test_training.py")
    found = {exhibit: set() for exhibit in exhibits}
    for exhibit, names in exhibits.items():
        with mock.patch.dict(vars(grpo)):
            exec(spot_the_bug.patched(exhibit), vars(grpo))
            command = re.match("python .* -x -k (.*) -m (.*)", spot_the_bug.seen_with(exhibit))
            for law, call in laws:
                is_asked = not command or command[1] in law.name and law.get_closest_marker(command[2])
                if law.originalname in names - found[exhibit] and is_asked:
                    error = pytest.CallInfo.from_call(call, "call").excinfo
                    if error and error.errisinstance((AssertionError, pytest.fail.Exception)):
                        found[exhibit].add(law.originalname)
    return found


def test_an_exhibit_has_a_symptom_and_is_caught_by_the_laws_that_it_names():
    """The first table has each; each of these laws, which pass on grpo.py, fails on grpo.py with the bug in it; so
    does the law that a command with check.py asks"""
    exhibits = {exhibit: set(re.findall(r"`(test_\w+)`", text)) for exhibit, text in spot_the_bug.EXHIBITS.items()}
    assert list(exhibits) == [str(number) for number in range(1, 27)]
    assert all(exhibits.values()) and all(map(spot_the_bug.symptoms, exhibits))
    assert grading.in_a_process(break_all, exhibits) == exhibits


def test_two_steps_show_what_the_table_says_of_an_exhibit():
    """A row is so, here of three exhibits, and not so of grpo.py itself. No run is ended, though sampler and scorer
    differ."""
    policy, _ = grpo.load_model("tiny")
    policy.load_state_dict(cold_started(0))
    is_so = lambda exhibit: [so for *_, so in spot_the_bug.compare(
        exhibit, policy, "--max_steps", "2", "--generation_batch_size", "48")]
    assert is_so("14") == is_so("17") == [True] and is_so("25") == [True, True]
    with mock.patch.object(spot_the_bug, "patched", lambda exhibit: spot_the_bug.RIGHT):
        assert is_so("14") == [False]

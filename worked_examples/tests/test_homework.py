"""Tests of the coursework: homework.py, textbook.py, and what test_grpo.py says of a student's file.

    python -m pytest -q worked_examples/tests/test_homework.py
"""

import inspect
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import test_grpo
from test_grpo import EXAMPLES, ModuleUnderTest, command, data, grpo, lines_of, models, python  # noqa: F401

HOMEWORK = types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / "homework.py")))
TEXTBOOK = (EXAMPLES / "tests/textbook.py").read_text().split("# What a student gets wrong")[0]
MISTAKES = runpy.run_path(str(EXAMPLES / "tests/textbook.py"))["MISTAKES"]
EXERCISES = [name for name, f in vars(grpo.module).items() if inspect.isfunction(f) and "Source:" in (f.__doc__ or "")]


def test_a_textbook_file_has_no_failure(tmp_path):
    (tmp_path / "my_grpo.py").write_text(TEXTBOOK)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", test_grpo.__file__]
    environment = os.environ | dict(GRPO_MODULE=str(tmp_path / "my_grpo.py"), GRPO_EXAMPLES="5")
    asked = ["-k", "test or worked_example"]        # all tests, and the pages, which must be asked for
    run = subprocess.run([*command, *asked], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 50
    assert "my_grpo has no sapo_loss" in run.stdout and "group_advantages has no argument scale_rewards" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("15 of 25 written; left: accuracy_reward, think_format_reward, ")


@pytest.fixture
def coursework(monkeypatch, tmp_path):
    """Put a student's file, given as a text, in the place of grpo.py."""
    def use(text):
        (tmp_path / "my_grpo.py").write_text(text)
        for name, value in vars(ModuleUnderTest(str(tmp_path / "my_grpo.py"))).items():
            monkeypatch.setattr(grpo, name, value)
    return use


@pytest.mark.parametrize("mistake, old, new, test, values", [(*row[:4], row[4:]) for row in MISTAKES])
def test_a_textbook_mistake_is_found_and_explained(mistake, old, new, test, values, coursework):
    assert TEXTBOOK.count(old) == 1
    coursework(TEXTBOOK.replace(old, new))
    with pytest.raises(AssertionError) as error:
        getattr(test_grpo, test)(*values)
    message = r"[^\n]+ = [^\n]+(\n    input     [\w ]+ = [^\n]+)+\n    expected  .+\n    got       .+$"
    assert re.match(message, str(error.value)), str(error.value)


def test_an_error_is_what_came(coursework):
    coursework("def kl_penalized_rewards(scores, logps, ref_logps, mask, *, beta):\n    return logps[mask]\n")
    with pytest.raises(AssertionError, match=r"(?s)r_t = .*input     mask.*expected .*got       IndexError\('tensors"):
        test_grpo.test_kl_penalized_rewards(dict(beta=0.5))


def test_what_a_student_has_not_written_is_skipped_by_name(coursework):
    coursework("def clip_ratio(ratio, epsilon_low=0.2):\n    raise NotImplementedError\n\n\n"
               "def kl_estimate(logps, ref_logps, **options):\n    return logps.log_softmax(0)\n")
    with pytest.raises(pytest.skip.Exception, match="my_grpo.clip_ratio is not written yet"):
        grpo.clip_ratio(1)
    with pytest.raises(NotImplementedError):        # torch's own, for a wrong dtype
        grpo.kl_estimate(torch.ones(1, dtype=torch.long), 0, estimator="k1")


def test_what_is_written_in_part_runs_and_the_run_says_when_it_had_learned(data):
    (data / "part.py").write_text("def entropy_from_logits(logits):\n    if logits.dim() == 3:\n"
                                  "        return logits[..., 0] * 0\n    raise NotImplementedError\n\n\n"
                                  "def clip_ratio(ratio):\n    raise NotImplementedError\n")
    flags = command(data, dataset=data / "chat.jsonl", max_steps=2, output_dir=data / "out")
    run = python(EXAMPLES / "homework.py", data / "part.py", *flags)
    assert run.returncode == 0 and "\n1 of 25 written" in "\n" + run.stdout, run.stderr
    assert run.stdout.endswith("S = none\n")
    assert [line["entropy"] for line in lines_of(data / "out")] == [0, 0]


def test_a_name_finds_the_tests_of_each_exercise():
    tests = [vars(test) for name, test in vars(test_grpo).items() if name.startswith("test_")]
    assert len(EXERCISES) == 25 and not [name for name in EXERCISES if not any(name in test for test in tests)]


@pytest.mark.parametrize("mistake, lowest, highest", [(None, 2.5, 2.8), ("EOS masked out", 1.9, 2.2)])
def test_what_is_written_is_put_to_work_and_a_wrong_mask_shows_in_the_table(mistake, lowest, highest, tmp_path):
    old, new = next((row[1:3] for row in MISTAKES if row[0] == mistake), ("", ""))
    (tmp_path / "my_grpo.py").write_text(TEXTBOOK.replace(old, new))
    module = types.SimpleNamespace(**vars(grpo.module))
    said = HOMEWORK.put(str(tmp_path / "my_grpo.py"), module)
    assert said.startswith("grpo.py's own run in place of group_advantages (has no correction, scale_rewards), clipped")
    assert "\n15 of 25 written; left: accuracy_reward, " in said
    assert module.completion_mask.__code__.co_filename == str(tmp_path / "my_grpo.py")
    assert module.grpo_loss is grpo.module.grpo_loss                    # the student's lacks policy_loss
    rewards, lengths, losses, first, last = zip(*HOMEWORK.table(module, seed=0))
    assert lowest < rewards[-1] < highest and not any(first) and last[0] > 0.2 and max(map(abs, losses)) < 1e-4

"""What check.py says of a file: same, differs, waits, not there."""

import contextlib
import inspect
import io
import os
import re
import sys

import pytest

from worked_examples import formulas
from worked_examples.check_your_own import check
from worked_examples.course import grading

FORMULAS = inspect.getsource(formulas)
IN_FLOAT32 = '''
import functools, inspect
TOLERANCE = 1e-4
rounded = lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
in_float32 = lambda f: functools.wraps(f)(lambda *args, **options: f(
    *map(rounded, args), **{name: rounded(x) for name, x in options.items()}))
globals().update({name: in_float32(globals()[name]) for name in NAMES})
'''.replace("NAMES", str([name for name, _ in inspect.getmembers(formulas, inspect.isfunction)]))
HEAD, BODY = 'loss_type="dapo", ', "    old_logps = (logps if"
PAPER = FORMULAS.replace(HEAD, 'loss_type="grpo", ').replace(           # a trainer with one loss type, its default
    BODY, '    if loss_type != "grpo": raise NotImplementedError\n' + BODY)
MINIMAX = FORMULAS.replace(HEAD, HEAD + 'policy_loss="cispo", ').replace(        # and one with one policy loss
    "epsilon_high=0.2, loss_type", "epsilon_high=5.0, loss_type").replace(
    "clipped_surrogate_loss(ratio, A, epsilon_low=epsilon_low, epsilon_high=epsilon_high)",
    "-ratio.clamp(max=epsilon_high).detach() * A * logps").replace(
    BODY, '    if (loss_type, policy_loss) != ("dapo", "cispo"): raise NotImplementedError\n' + BODY)


def fresh_laws(draws):
    """The laws are imported anew, with this number of draws."""
    os.environ["GRPO_EXAMPLES"] = draws
    for name in ("test_grpo", "test_variants"):
        sys.modules.pop(name, None)


def verdicts(path, text, *options):
    """Exit code, and the line of each function; the last names those that are not there."""
    fresh_laws("5")
    path.write_text(text, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check.main(path, *options)
    lines = [line.split(maxsplit=1) for line in out.getvalue().partition("what the laws say ")[2].splitlines()]
    absent = "".join(words[1] for words in lines if words[0] == "not").removeprefix("there ").split(", ")
    return code, dict.fromkeys(map(str.strip, absent), "not there") | {
        words[0]: words[1] for words in lines if words[0] in check.NAMES}


def test_the_formulas_are_the_same_or_not_there(tmp_path):
    """formulas.py passes every law that it can be asked; its defaults are grpo.py's (one may be None)"""
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", FORMULAS)
    for name in check.NAMES:
        assert said[name].startswith("same") if hasattr(formulas, name) else said[name] == "not there", name
        assert "your default" not in said[name]
    assert code == 0 and said["clipped_surrogate_loss"] == "same in 16 of 20 (no argument 'delta')"


def test_a_float32_copy_of_the_formulas_is_the_same_with_the_tolerance_that_the_page_names(tmp_path):
    """TOLERANCE = 1e-4: no law asks for more digits, or mixes its float64 with what comes"""
    laws = "kl or ratio or surrogate or worked or advantages"
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", FORMULAS + IN_FLOAT32, "-k", laws)
    assert code == 0 and all(said[name].startswith("same") for name in ("group_advantages", "kl_estimate", "grpo_loss"))


def test_a_function_that_calls_one_that_differs_waits_for_it(tmp_path):
    """A sign in the surrogate: it differs, with the law and its input; grpo_loss waits; the KL is the same.
    A function that is not written is not there, and one that returns a constant differs."""
    text = FORMULAS.replace("-torch.min(", "torch.min(")
    text += "def entropy_from_logits(logits): raise NotImplementedError\ndef aggregate(loss, *mask, **rest): return 0\n"
    laws = "clipped or on_policy or kl_estimate_matches or entropy_from_logits or aggregate_matches"
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", text, "-k", laws)
    assert code == 1
    assert said["clipped_surrogate_loss"].startswith("differs in 16 of 20 (l = -min(")
    assert "; rho = 0.5, A = 1.0, options = {}; " in said["clipped_surrogate_loss"]
    assert said["grpo_loss"] == "waits for clipped_surrogate_loss"
    assert said["kl_estimate"].startswith("same")
    assert said["entropy_from_logits"] == "not there"
    assert said["aggregate"].startswith("differs")


def test_no_settings_around_the_file_reach_the_laws(tmp_path, monkeypatch, capsys):
    """pytest.ini, conftest.py and the environment are not read; if no law is asked, this is an error, and said"""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -k nothing\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("PYTEST_PLUGINS", "absent")
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", FORMULAS, "-k", "clip_ratio")
    assert code == 0 and said["clip_ratio"] == "same"
    code, _ = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", FORMULAS, "-k", "clip_ration")
    assert code == pytest.ExitCode.USAGE_ERROR
    with pytest.raises(SystemExit, match="^-k: got 'clip_ration'; allowed is a part of a function's name$"):
        grading.grade(str(tmp_path / "my_grpo.py"), "clip_ration", tmp_path / "results.json")
    assert not (tmp_path / "results.json").exists()


KL_MISTAKES = [("loss + beta * (", "loss - beta * ("), ("(logps, ref_logps.detach())", "(ref_logps.detach(), logps)")]
MISTAKES = [(" else old_logps).detach()", " else old_logps)"), ("mask.sum(1)).mean()", "mask.size(1)).mean()")]


@pytest.mark.parametrize("trainer, notes, mistakes", [
    (PAPER, {"your default loss_type is grpo", "loss_type asked: grpo"}, KL_MISTAKES + MISTAKES),
    (MINIMAX, {"your default policy_loss is cispo", "loss_type asked: dapo", "policy_loss asked: cispo"}, KL_MISTAKES)],
    ids=["the paper's", "MiniMax's"])
def test_a_trainer_with_one_loss_is_asked_all_of_that_loss(trainer, notes, mistakes, tmp_path):
    """Its default is no mistake; what was not asked is named; the KL's sign, its log-probs exchanged, ... are found"""
    code, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", trainer, "-k", "grpo_loss_matches")
    assert code == 0 and said["grpo_loss"].startswith("same in ")
    assert notes <= set(re.split("; |[()]", said["grpo_loss"]))
    for right, wrong in mistakes:
        text = trainer.replace(right, wrong)
        _, said = grading.in_a_process(verdicts, tmp_path / "my_grpo.py", text, "-x", "-k", "grpo_loss")
        assert said["grpo_loss"].startswith("differs"), wrong

"""What check.py says of a file: same, differs, waits, not there."""

from conftest import EXAMPLES, python

CHECK = EXAMPLES / "check_your_own/check.py"
FORMULAS = (EXAMPLES / "formulas.py").read_text()


def verdicts(text, folder, *options):
    """Exit code, and the line of each function."""
    (folder / "my_grpo.py").write_text(text)
    run = python(CHECK, folder / "my_grpo.py", *options, GRPO_EXAMPLES="5")
    lines = run.stdout.partition("what the laws say ")[2].splitlines()[1:-1]
    return run.returncode, dict(line.split(maxsplit=1) for line in lines)


def test_a_function_is_the_same_or_not_there(tmp_path):
    """clip_ratio is in formulas.py, group_stats is not; of clipped_surrogate_loss it lacks an argument"""
    code, said = verdicts(FORMULAS, tmp_path, "-k", "clip_ratio or group_stats or clipped_surrogate_loss_matches")
    assert code == 0 and said["clip_ratio"] == "same" and said["group_stats"] == "not there"
    assert said["clipped_surrogate_loss"] == "same in 15 of 19 (no argument 'delta')"


def test_a_function_that_calls_one_that_differs_waits_for_it(tmp_path):
    """A sign in the surrogate: it differs, with the law and its input; grpo_loss waits; the KL is the same.
    A function that is not written is not there, and one that returns a constant differs."""
    text = FORMULAS.replace("-torch.min(", "torch.min(")
    text += "\ndef entropy_from_logits(logits): raise NotImplementedError\ndef aggregate(loss, *mask, **rest): return 0\n"
    laws = "clipped or on_policy or kl_estimate_matches or entropy_from_logits or aggregate_matches"
    code, said = verdicts(text, tmp_path, "-k", laws)
    assert code == 1
    assert said["clipped_surrogate_loss"].startswith("differs in 18 of 22 (l = -min(")
    assert "rho=0.5, A=1.0" in said["clipped_surrogate_loss"]
    assert said["grpo_loss"] == "waits for clipped_surrogate_loss"
    assert said["kl_estimate"].startswith("same")
    assert said["entropy_from_logits"] == "not there: it raises NotImplementedError"
    assert said["aggregate"].startswith("differs")

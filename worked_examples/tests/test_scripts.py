"""Tests of the scripts that stand here: each runs; formulas and judge.

    python -m pytest -q worked_examples
"""

import contextlib
import functools
import inspect
import io
import json
import re
import runpy
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import test_grpo
from test_grpo import (EXAMPLES, SMALL, SPOT, ModuleUnderTest, chat_tokenizer, cli, command, data, grpo,  # noqa: F401
                       lines_of, make_model, models, python)


@pytest.fixture(scope="session")
def cold_starts():
    """The weights after a whole cold start, by seed: each is learned once for all scripts."""
    cold_start = grpo.module.cold_start

    @functools.cache
    def weights(seed):
        model = grpo.tiny_model(grpo.tiny_tokenizer(), seed)
        cold_start(model, grpo.tiny_tokenizer(), grpo.tiny_problems(seed)[0], seed)
        return model.state_dict()

    def begin(model, tokenizer, problems, seed, *, steps=500):
        return model.load_state_dict(weights(seed)) if steps == 500 else cold_start(
            model, tokenizer, problems, seed, steps=steps)

    return begin


@pytest.mark.parametrize("script, flags, printed", [
    ("walkthrough.py", "", r"^gradient norm: \d"),
    ("benchmark.py", "--rounds 1 --cold_start_steps 5", r"^G doubled / once +\d"),
    ("process_supervision.py", "--cold_start_steps 5 --max_steps 2", r"^held-out accuracy: \S+ -> \S+$"),
    ("explain.py", "--seed 0", r"^rewards \[.*\], mean \S+, std \S+$"),
    ("iterative_grpo.py", "--cold_start_steps 5 --max_steps 2 --iteration_steps 1 --first_batches 1 --updates 1",
     r"^true accuracy: \S+ -> \S+$")])
def test_each_script_runs(script, flags, printed, cold_starts, monkeypatch):
    monkeypatch.setattr(grpo.module, "cold_start", cold_starts)
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    if script == "benchmark.py":
        monkeypatch.setattr(grpo.module, "TINY", grpo.TINY | dict(generation_batch_size=32, max_completion_length=22))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(printed, out.getvalue(), re.M), out.getvalue()


def test_formulas_are_compared_within_bounds_and_in_a_thread(monkeypatch):
    import math_verify
    script = runpy.run_path(str(EXAMPLES / "math_reward.py"))
    reward = script["math_accuracy_reward"]
    with ThreadPoolExecutor() as pool:              # math-verify's clock needs the main thread
        assert pool.submit(reward, [r"$\frac{2}{4}$"], [r"\frac12"]).result() == [1.0]
    parse, verify = mock.Mock(wraps=math_verify.parse), mock.Mock(wraps=math_verify.verify)
    monkeypatch.setattr(math_verify, "parse", parse)
    monkeypatch.setattr(math_verify, "verify", verify)
    assert not any(reward(["I do not know", "", r"\frac{a}{b}", "<think>7</think>x"], ["-1,000"] * 4))
    assert not parse.called                         # without a digit, an answer needs no parser
    for want, pairs in script["CASES"].items():
        for answer, solution in pairs:
            assert reward([[{"role": "assistant", "content": answer}]], [solution]) == [want], (answer, solution)
    hostile = ["1" * 10**5, "$" + "{" * 10**5, "(" * 10**5, "\\boxed{" * 15_000, "1,234" * 20_000, " " * 10**5 + "x"]
    assert not any(reward([*hostile, "</think>" * 12_000, "1/" * 50_000], ["7"] * 8))
    assert reward(["x" * 10_000 + r"$\frac{2}{4}$"], [r"\frac12"]) == [1.0] and verify.called
    for call in parse.call_args_list + verify.call_args_list:
        assert [0 < seconds <= 5 for seconds in call.kwargs.values()] == [True] and len(str(call.args[0])) <= 1002


@pytest.mark.parametrize("prompts", ["text", "chat"])
def test_a_judge_scores_prompt_and_answer_together(prompts, data, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/judge"))
    (data / "plan2.py").write_text("Path(__file__).with_name('seen.json').write_text(json.dumps(calls[-1]))")
    rewards = [f"{data}/rewards.py:length", f"{EXAMPLES}/reward_model.py:reward_model"]
    assert cli(*command(data, dataset=data / f"{prompts}.jsonl", reward_funcs=rewards)).code == 0
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(data / "models/judge")
    pairs = zip(*json.loads((data / "seen.json").read_text()))
    texts = [p + c if prompts == "text" else "".join(message["content"] for message in p + c) for p, c in pairs]
    scores = [judge(**chat_tokenizer()(text, return_tensors="pt")).logits.item() for text in texts]
    found = lines_of(data / "out")[1]["rewards/reward_model/mean"]
    assert found == pytest.approx(statistics.mean(scores), abs=1e-5)


def test_a_judge_without_a_trained_head_is_refused(data, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/Llama"))
    with pytest.raises(ValueError, match="REWARD_MODEL: .* has no .*score"):
        runpy.run_path(str(EXAMPLES / "reward_model.py"))["reward_model"](["1"], ["2"])


def test_the_same_run_in_trl_learns_the_same(data):
    pytest.importorskip("trl")
    done = python(EXAMPLES / "the_same_run_in_trl.py", "--compare", *command(data, output_dir=data / "trl"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_part_of_the_source_texts_has_its_page_function_and_test():
    text = (EXAMPLES / "source_texts.md").read_text()
    rows = re.findall(r"^\| .+ \| \[\d+\]\((\S+)\) \| `(\w+)` \| (?:`(\w+)`|–) \|$", text, re.M)
    assert len(rows) == text.count("](") - 1 > 60                   # all but the link to errata.md
    for page, name, test in rows:
        assert name in (EXAMPLES / page).read_text() and hasattr(grpo, name), (page, name)
        assert not test or callable(getattr(test_grpo, test)), test


def test_the_homework_has_every_formula_and_no_answer(tmp_path):
    (tmp_path / "my_grpo.py").write_text(python(EXAMPLES / "homework.py").stdout)
    homework = ModuleUnderTest(str(tmp_path / "my_grpo.py")).module
    for name in ("group_stats", "completion_mask", "importance_ratio", "kl_estimate", "aggregate", "grpo_loss"):
        theirs, ours = getattr(homework, name), getattr(grpo, name)
        assert theirs.__doc__ == ours.__doc__ and inspect.signature(theirs) == inspect.signature(ours)
        assert inspect.getsource(theirs).rstrip().endswith("raise NotImplementedError")


def test_spot_the_bug_shuffles_the_museum(capsys):
    said = lambda *words: (SPOT.main(words), capsys.readouterr().out.strip())[1]
    pairs = lambda *flags: [(said(n, *flags), said("--answer", n, *flags)) for n in map(str, range(1, len(museum) + 1))]
    museum = [(SPOT.patched(n).strip(), section) for n, section in SPOT.exhibits().items()]
    assert pairs("--exhibit") == museum != pairs() and sorted(pairs()) == sorted(museum)
    for wrong in ([], ["0"], [str(len(museum) + 1)], ["one"], ["1", "2"], ["1", "--help"]):
        assert SPOT.main(wrong) == 2 and re.fullmatch(f".* from 1 to {len(museum)}, .*\n", capsys.readouterr().err)


def test_the_scripts_with_a_bound_keep_it():
    for name, lines in ("check_trl.py", 80), ("check_verl.py", 80):
        text = (EXAMPLES / name).read_text().splitlines()
        assert len(text) <= lines and max(map(len, text)) <= 120

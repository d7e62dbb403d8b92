"""Tests of the scripts that stand here: each runs; formulas, judge and figures; explain.py and its page in a browser.

    python -m pytest -q worked_examples

The last one needs selenium, Chromium and its driver, and is skipped without them.
"""

import contextlib
import functools
import inspect
import io
import itertools
import json
import math
import random
import re
import runpy
import shutil
import statistics
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
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


def test_every_figure_is_drawn_by_the_script_beside_it(tmp_path):
    figures = runpy.run_path(str(EXAMPLES / "figures.py"), run_name="figures")
    figures["save"].__globals__["save"] = lambda figure, name: figure.savefig(tmp_path / name, dpi=10)
    for name, draw in figures.items():
        if inspect.isfunction(draw) and not inspect.signature(draw).parameters and name != "runs":
            draw()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (EXAMPLES / "pictures").glob("*.png")} - {"group.png"}


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


@functools.cache
def explained():
    """explain.py, and what its page holds of a small model whose ratios leave the clip range within four updates."""
    explain = types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / "explain.py"), run_name="explain"))
    config = grpo.GRPOConfig(**SMALL | dict(num_iterations=4, lr_scheduler_type="constant"))
    model, tokenizer, problems = make_model("Llama"), grpo.tiny_tokenizer(), grpo.tiny_problems(0)[0][:6]
    rewards = lambda completions, **kwargs: [2.0, 1.5, 0.5, 0.0]    # in this order on the page, too
    seen = explain.update_on_one_group(model, tokenizer, problems, [rewards], config)
    assert torch.equal(seen.updates[4], grpo.rollout_logps(model, seen.rollout, torch.arange(4), config))
    return explain, explain.group_data(seen, tokenizer, config)


def test_the_weights_of_the_page_are_the_gradients_in_closed_form():
    data = explained()[1]
    lengths = [len(row) for row in data["old_logps"]]
    assert data["updates"][0] == data["old_logps"] and len(data["updates"]) == 5 and min(lengths) < max(lengths)
    for u, i, (name, method) in itertools.product(range(5), range(4), data["methods"].items()):
        o, A = method["options"], (data["rewards"][i] - 1) / (statistics.stdev(data["rewards"]) + 1e-4)
        ratios = [math.exp(new - old) for new, old in zip(data["updates"][u][i], data["old_logps"][i])]
        ratios = [statistics.geometric_mean(ratios)] * lengths[i] if name == "gspo" else ratios
        divisor = dict(grpo=4 * lengths[i], dapo=sum(lengths), dr_grpo=4 * 10)[o["loss_type"]]
        for ratio, weight in zip(ratios, method["weights"][u][i]):
            clipped = ratio > 1 + o["epsilon_high"] if A > 0 else ratio < 1 - o["epsilon_low"]
            gate = 1 / (1 + math.exp((1.0 if A > 0 else 1.05) * (1 - ratio)))
            slopes = dict(cispo=min(ratio, 5.0), sapo=4 * gate * (1 - gate) * ratio)
            assert weight == pytest.approx(slopes.get(name, 0.0 if clipped else ratio) * A / divisor, rel=1e-5)
    assert [0.0 in sum(data["methods"]["grpo"]["weights"][u], []) for u in (0, 4)] == [False, True]


def test_explain_takes_the_flags_of_grpo_and_prints_or_writes(data, capsys):
    explain, flags, html = explained()[0], command(data, dataset=data / "chat.jsonl", beta=0.1), data / "group.html"
    assert [explain.parse(argv.split())[2].learning_rate for argv in ("", "--learning_rate 1")] == [3e-5, 1]
    traces = [grpo.teacher_trace("76+24=", forgets).removesuffix("<eos>") for forgets in (0, 1)]
    for completions in (traces, traces[:1], traces[1:]):
        group = types.SimpleNamespace(rows=[{"prompt": "76+24="}], completions=completions)
        assert explain.forgets_the_carry(group) == (len(completions) == 2)
    explain.main(["--all", *flags])
    explain.main(["--html", str(html), *flags])
    printed, held = capsys.readouterr().out, json.loads(re.search(r'id="group">(.*)</script>', html.read_text())[1])
    assert printed.count("\nanswer ") == 4 and re.search(r"^rewards \[.*\], mean \S+, std \S+$", printed, re.M)
    assert len(held["updates"]) == 11 and held["old_logps"] == held["updates"][0] != held["updates"][10]


def test_the_page_in_a_browser(tmp_path):
    webdriver, paths = pytest.importorskip("selenium.webdriver"), [*map(shutil.which, ("chromium", "chromedriver"))]
    if None in paths:
        pytest.skip("no chromium, or no chromedriver")
    explain, data = explained()
    data["answers"][1]["tokens"][0] = "</script><i>"                # what an answer may hold
    (tmp_path / "group.html").write_text(explain.page(data))
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync "
                 f"disable-component-update window-size=1200,1400 user-data-dir={tmp_path}/profile").split():
        options.add_argument(f"--{flag}")
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1])) as browser:
        browser.get((tmp_path / "group.html").as_uri())
        find = functools.partial(browser.find_elements, "css selector")
        chips, (slider,), (why,) = find("#answers .chip"), find("#update"), find("#why")
        assert [chip.text for chip in chips] == sum((answer["tokens"] for answer in data["answers"]), [])
        for u, (name, method) in itertools.product((4, 1), data["methods"].items()):
            slider.send_keys("\ue011" + u * "\ue014")               # Home, then right arrows
            find(f"#method option[value={name}]")[0].click()
            columns = (sum(rows, []) for rows in (method["weights"][u], data["updates"][u], data["old_logps"]))
            cells = list(zip(chips, *columns))
            assert find("#answers .clipped") == [chip for chip, weight, *_ in cells if weight == 0]
            for chip, weight, logp, old_logp in random.Random(name).sample(cells, 5):
                chip.click()
                ratio, _, equation, logit, _ = why.text.replace("−", "-").splitlines()
                assert name == "gspo" or float(ratio.split()[-1]) == pytest.approx(math.exp(logp - old_logp), abs=1e-4)
                assert float(logit.split()[-1]) == pytest.approx(weight * (1 - math.exp(logp)), rel=1e-3, abs=1e-9)
                if weight == 0:
                    assert "0: clipped" in equation
                else:                                               # the weight, and the factors that multiply to it
                    factors, divisor, shown = re.search(r"= ([^=]+) / (\d+) = (\S+)$", equation).groups()
                    by_hand = math.prod(map(float, factors.split("·"))) / int(divisor)
                    assert float(shown) == pytest.approx(weight, rel=1e-3) == pytest.approx(by_hand, rel=2e-3)
        chips[0].send_keys("\ue014")
        assert browser.switch_to.active_element == chips[1]
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []


def test_the_scripts_with_a_bound_keep_it():
    for name, lines in ("explain.py", 180), ("group_page.html", 200), ("check_trl.py", 80), ("check_verl.py", 80):
        text = (EXAMPLES / name).read_text().splitlines()
        assert len(text) <= lines and max(map(len, text)) <= 120
    assert (EXAMPLES / "pictures/group.html").stat().st_size <= 400_000 and "://" not in (EXAMPLES / "pictures/group.html").read_text()

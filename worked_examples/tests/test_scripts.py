"""Tests of the scripts and pages that stand here, of README, and of the sizes that all files keep.

    python -m pytest -q worked_examples/tests/test_scripts.py
"""

import ast
import contextlib
import io
import json
import re
import runpy
import statistics
import sys
import tokenize
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import transformers
from support import EXAMPLES, ROOT, chat_tokenizer, cli, command, lines_of, python

import grpo
from worked_examples import relatives

README = ROOT / "README.md"
PAGES = [README, *sorted(EXAMPLES.glob("*.md"))]


# Scripts --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags, cold_start_steps, printed", [
    ("walkthrough.py", "", 200, r"^gradient norm: \d"),
    ("benchmark.py", "--rounds 1", 5, r"^G doubled / once +\d"),
    ("process_supervision.py", "--max_steps 2", 5, r"^held-out accuracy: \S+ -> \S+$"),
    ("iterative_grpo.py", "--max_steps 2 --iteration_steps 1 --first_batches 1 --updates 1", 5,
     r"^true accuracy: \S+ -> \S+$")])
def test_each_script_runs(script, flags, cold_start_steps, printed, monkeypatch):
    """To its last line, which says what it found, after a short cold start."""
    def begin(model, tokenizer, problems, seed, *, steps=500):
        cold_start(model, tokenizer, problems, seed, steps=cold_start_steps)

    cold_start = grpo.cold_start
    monkeypatch.setattr(grpo, "cold_start", begin)
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    if script == "benchmark.py":
        monkeypatch.setattr(grpo, "TINY", grpo.TINY | dict(generation_batch_size=32, max_completion_length=22))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(printed, out.getvalue(), re.M), out.getvalue()


def test_the_same_run_in_trl_learns_the_same(data):
    """With TRL installed: the same losses, step by step."""
    pytest.importorskip("trl")
    done = python(EXAMPLES / "the_same_run_in_trl.py", "--compare", *command(data, output_dir=data / "trl"))
    assert done.returncode == 0, done.stdout + done.stderr


# Reward files ---------------------------------------------------------------------------------------------------------

def test_formulas_are_compared_within_bounds_and_in_a_thread(monkeypatch):
    """The script's own cases, and hostile texts: no text is parsed that is long, or has no digit."""
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
    """The reward is the logit of the judge for both as one text, or in its chat template."""
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
    """Its scores would be noise."""
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/Llama"))
    with pytest.raises(ValueError, match="REWARD_MODEL: .* has no .*score"):
        runpy.run_path(str(EXAMPLES / "reward_model.py"))["reward_model"](["1"], ["2"])


# Pages ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_the_code_of_a_page_runs(path, monkeypatch):
    """Its python fences run in order, in one namespace, under the page's own name and line numbers."""
    monkeypatch.chdir(ROOT)
    text, namespace = path.read_text(), {"__name__": path.stem}
    for fence in re.finditer(r"^```python\n(.*?)(^```$|\Z)", text, re.S | re.M):
        exec(compile("\n" * text.count("\n", 0, fence.start(1)) + fence[1], str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_the_links_of_a_page_lead_somewhere(path):
    """Files, pictures of both kinds (markdown's and <img>, <source>) and headings."""
    words = lambda line: re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower())
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    for file, anchor in re.findall(r'(?:\]\(|src(?:set)?=")(?!http)([^)"#\s]*)#?([^)"\s]*)', text):
        target = path.parent / file if file else path
        assert target.exists(), file
        if anchor:
            headings = [words(line).replace(" ", "-") for line in re.findall(r"^#+ (.*)", target.read_text(), re.M)]
            assert anchor in headings, anchor


TESTS = "".join(path.read_text() for path in (ROOT / "test_grpo.py", *(EXAMPLES / "tests").glob("test_*.py")))


def test_the_readme_names_what_exists():
    """Functions with a law that tests them, commands and flags; in at most 120 lines."""
    text, options = README.read_text(), cli("--help").out
    rows = re.findall(r"^\|.*\| `(\w+)` \| `(test_\w+)` \| \[.*?\]\((\S+?)\)", text, re.M)
    assert len(rows) >= 10 and "python -m pytest -q test_grpo.py worked_examples" in text
    for function, test, _ in rows:
        assert callable(getattr(grpo, function)) and f"def {test}(" in TESTS, (function, test)
    flags = set(re.findall(r"(?<!\S)`?(--[a-z]\w+)", re.sub(r"uv run\b[^\n`]*", "", text)))
    assert flags - {"--html", "--tb"} <= set(re.findall(r"--\w+", options)) | {"--preset"}
    assert set(re.findall(r"\w+\.py\b", text)) - {"my_rewards.py", "my_grpo.py"} <= {
        path.name for folder in (ROOT, EXAMPLES) for path in folder.glob("*.py")}
    assert len(text.splitlines()) <= 120


def test_each_part_of_the_source_texts_has_its_page_function_and_test():
    """Each row of the tables of source_texts.md: the page names the function, which exists, and so does the test."""
    text = (EXAMPLES / "tests/source_texts.md").read_text()
    rows = re.findall(r"^\| .+ \| \[\d+\]\((\S+)\) \| `(\w+)` \| (?:`(\w+)`|–) \|$", text, re.M)
    assert len(rows) == len(re.findall(r"^\|.*\]\(", text, re.M)) > 60
    for page, name, test in rows:
        assert name in (EXAMPLES / "tests" / page).read_text(), (page, name)
        assert hasattr(grpo, name) or hasattr(relatives, name), name
        assert f"def {test}(" in TESTS or not test, test


# Sizes ----------------------------------------------------------------------------------------------------------------

def test_the_file_is_small_and_imports_nothing_heavy():
    """grpo.py is read in an evening: lines, code, tokens, the place of the loss, the longest functions."""
    done = python("-c", "import sys, grpo; print(*{'transformers', 'matplotlib', 'math_verify'} & set(sys.modules))")
    assert done.returncode == 0 and done.stdout.strip() == ""
    source = (ROOT / "grpo.py").read_text()
    white = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
              if token.type not in white and not token.string.lstrip("r").startswith('"""')]       # docstrings
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert source.count("\n") <= 1000 and len(code) <= 640 and len(tokens) <= 7800
    assert max(map(len, source.splitlines())) <= 110
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node in functions.items()}
    assert lengths["train"] <= 40 and max(lengths.values()) <= 55 and functions["grpo_loss"].end_lineno <= 400
    assert len(functions["grpo_loss"].args.args + functions["grpo_loss"].args.kwonlyargs) <= 16


def test_the_tests_and_the_folder_keep_their_sizes():
    """test_grpo.py in lines and columns, worked_examples in files that a visitor sees first."""
    tests = (ROOT / "test_grpo.py").read_text().splitlines()
    assert len(tests) <= 1250 and max(map(len, tests)) <= 120
    assert sum(path.is_file() for path in EXAMPLES.iterdir()) <= 40
    for name in ("check_trl.py", "check_verl.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) <= 80

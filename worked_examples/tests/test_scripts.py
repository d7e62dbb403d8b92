"""Tests of the scripts and pages that are here, and of README."""

import ast
import contextlib
import io
import itertools
import json
import re
import runpy
import shlex
import sys

import pytest
import torch
import transformers
from conftest import EXAMPLES, ROOT, chat_tokenizer, cli, cold_started

import grpo

README, GRPO = ROOT / "README.md", (ROOT / "grpo.py").read_text()
PAGES = [README, *sorted(EXAMPLES.rglob("*.md"))]
SCRIPTS = [ROOT / "grpo.py", ROOT / "test_grpo.py", *sorted(EXAMPLES.rglob("*.py"))]
STARTED = [path for path in SCRIPTS if path.parent.parent == EXAMPLES and path.parent.name in ("course", "scripts")
           and path.name != "walkthrough.py"]
TESTS = "".join(path.read_text() for path in (ROOT / "test_grpo.py", *(EXAMPLES / "tests").glob("test_*.py")))
NAMES = {path.name for path in [*PAGES, *SCRIPTS]}
NAME = lambda path: str(path.relative_to(ROOT))


@pytest.mark.parametrize("script, flags, printed", [
    ("walkthrough.py", "", "gradient norm: "), ("benchmark.py", "--max_steps 2", "step / floor "),
    ("process_supervision.py", "--max_steps 2", "held-out accuracy: "),
    ("iterative_grpo.py", "--max_steps 2 --iteration_steps 1 --first_batches 1 --updates 1", "true accuracy: ")])
def test_each_script_runs(script, flags, printed, monkeypatch):
    """To the line that says what it found, from a short cold start"""
    (problems, held_out), weights = grpo.tiny_problems(0), cold_started(0)
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems, held_out[:64]))
    monkeypatch.setattr(grpo, "cold_start", lambda policy, *_, **__: policy.load_state_dict(weights))
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / "scripts" / script), run_name="__main__")
    assert re.search(rf"^{printed}.*\d", out.getvalue(), re.M), out.getvalue()


def test_the_methods_of_page_10_run_and_no_two_learn_the_same():
    """Two small steps with the flags of each line: weights differ in the mean by a tenth of the step size"""
    rows = re.findall(r"^\| ([^|]+) \|.*\| `(--[^`]+)` \|$", (EXAMPLES / "10_variants.md").read_text(), re.M)
    small = "--generation_batch_size 32 --max_completion_length 22 --max_steps 2 --learning_rate 1e-3"
    tokenizer, (problems, _), learned = grpo.tiny_tokenizer(), grpo.tiny_problems(0), {}
    for method, flags in rows:
        config, *_ = grpo.parse_options(shlex.split(f"--model tiny {flags} {small}"))
        policy = grpo.tiny_model(tokenizer, 0)
        policy.load_state_dict(cold_started(0))
        assert len([*grpo.train(policy, tokenizer, problems, [grpo.accuracy_reward], config)]) == 2
        learned[method] = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
    assert len(learned) == 6
    for one, other in itertools.combinations(learned, 2):
        assert (learned[one] - learned[other]).abs().mean() > 1e-4, (one, other)


def test_runs_are_drawn_in_one_picture_and_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    """A line for each run and its mean of ten steps; a folder or its metrics.jsonl"""
    script = runpy.run_path(str(EXAMPLES / "scripts/plot_run.py"))
    monkeypatch.chdir(tmp_path)
    for run, steps in ("a", 30), ("empty", 0):
        lines = [json.dumps({"step": i + 1} | dict.fromkeys(script["PANELS"], float(i))) for i in range(steps)]
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines))
    panels = script["draw"]({run: script["load"](run) for run in ("a", "a/metrics.jsonl")}).axes
    assert [line.get_ydata()[29] for line in panels[4].lines] == [29, 24.5, 29, 24.5]
    for bad in ["absent"], ["empty"], ["a", "--output", "a.xyz"], []:
        with pytest.raises(SystemExit) as exit:
            script["main"](bad)
        assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1, bad


@pytest.mark.parametrize("path", STARTED, ids=NAME)
def test_a_script_finds_grpo_and_its_neighbours_from_any_folder(path, tmp_path, monkeypatch):
    """It is started in an empty folder, which Python does not search"""
    monkeypatch.chdir(tmp_path)
    elsewhere = [x for x in sys.path if x not in ("", str(ROOT), *(str(other.parent) for other in SCRIPTS))]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])
    for name in {"grpo", "variants"} & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(str(path))


def test_formulas_are_compared_and_hostile_texts_are_wrong():
    script = runpy.run_path(str(EXAMPLES / "scripts/math_reward.py"))
    reward = script["math_accuracy_reward"]
    for want, pairs in script["CASES"].items():
        for answer, solution in pairs:
            assert reward([[{"role": "assistant", "content": answer}]], [solution]) == [want], (answer, solution)
    assert not any(reward(["1" * 10**5, "$" + "{" * 10**5, "\\boxed{" * 15_000, "1/" * 50_000], ["7"] * 4))


def test_a_judge_scores_prompt_and_answer_together(data, monkeypatch):
    """The reward is the logit of the judge for both in its chat template"""
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/judge"))
    reward_model = runpy.run_path(str(EXAMPLES / "scripts/reward_model.py"))["reward_model"]
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(data / "models/judge")
    scores = [judge(**chat_tokenizer()(text, return_tensors="pt")).logits.item() for text in ("1+2=3", "4+4=81")]
    prompts, answers = ([[{"role": role, "content": text}] for text in texts]
                        for role, texts in (("user", ("1+2", "4+4")), ("assistant", ("=3", "=81"))))
    assert reward_model(prompts, answers) == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("path", PAGES, ids=NAME)
def test_the_code_of_a_page_runs_and_its_links_lead_somewhere(path, monkeypatch):
    """Its python fences run in order, in one namespace; links and pictures are files, anchors are headings"""
    monkeypatch.chdir(ROOT)
    text, namespace = path.read_text(), {"__name__": path.stem}
    for fence in re.finditer(r"^```python\n(.*?)^```$", text, re.S | re.M):
        exec(compile("\n" * text.count("\n", 0, fence.start(1)) + fence[1], str(path), "exec"), namespace)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for file, anchor in re.findall(r'(?:\]\(|src(?:set)?=")(?!http)([^)"#\s]*)#?([^)"\s]*)', text):
        target = path.parent / file if file else path
        assert target.exists(), file
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.M) if anchor else []
        words = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line).lower()) for line in headings]
        assert not anchor or anchor in [line.replace(" ", "-") for line in words], anchor


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=NAME)
def test_the_files_that_a_text_names_are_there(path):
    """In a command from the repository's root; elsewhere by name. Of a script: its docstring"""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    own = re.compile(r"my_\w+\.py|grpo_bug\.py|[ab]\.py|FILE\.py")    # the reader's
    for line in re.sub(r"https?://\S+|\\\n", "", text).splitlines():
        is_command = re.search(r"\b(python3? |accelerate launch)", line)
        for file in re.findall(r"[\w./-]*\w\.(?:py|md)\b", line):
            assert own.fullmatch(file) or ((ROOT / file).exists() if is_command else file.split("/")[-1] in NAMES), line


def test_the_texts_name_what_exists():
    """README: functions in their sections, and flags. A page: tests"""
    text, options = README.read_text(), cli("--help").out
    rows = re.findall(r"^\|.*\| (§\d+) `(\w+)` \|", text, re.M)
    assert len(rows) > 5 and "python -m pytest -q test_grpo.py worked_examples" in text
    for section, function in rows:
        assert f"\ndef {function}(" in GRPO.partition(f"\n# {section} ")[2].partition("\n# §")[0], function
    known = options + "".join(path.read_text() for path in SCRIPTS)
    for flag in re.findall(r"(?<![\w-])--[a-z]\w+", text):
        assert flag in known, flag
    for page in PAGES:
        for test in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {test}(" in TESTS, (page, test)


def test_grpo_imports_nothing_heavy_and_its_maths_is_tested(monkeypatch):
    """No transformers, no matplotlib, no math_verify on import; each function of §1 to §8 but text_of has a test"""
    heavy = {"transformers", "matplotlib", "math_verify"}
    for name in heavy & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(grpo.__file__)
    assert not heavy & set(sys.modules)
    maths = re.findall(r"^def (\w+)", GRPO.partition("\n# §9 ")[0], re.M)
    assert [name for name in maths if f"def test_{name}_" not in TESTS] == ["text_of"], "a function without a test"

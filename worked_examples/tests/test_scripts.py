"""Tests of the scripts and pages that are here, and of README."""

import ast
import contextlib
import io
import json
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from conftest import EXAMPLES, ROOT, chat_tokenizer, cli, cold_started

import grpo

README = ROOT / "README.md"
PAGES = [README, *sorted(EXAMPLES.rglob("*.md"))]
SCRIPTS = [ROOT / "grpo.py", ROOT / "test_grpo.py", *sorted(EXAMPLES.rglob("*.py"))]
TESTS = "".join(path.read_text() for path in (ROOT / "test_grpo.py", *(EXAMPLES / "tests").glob("test_*.py")))


@pytest.mark.parametrize("script, flags, printed", [("walkthrough.py", "", r"^gradient norm: \d"),
    ("benchmark.py", "--cold_start_steps 5 --rounds 1", r"^G doubled / once +\d"),
    ("process_supervision.py", "--cold_start_steps 5 --max_steps 2", r"^held-out accuracy: \S+ -> \S+$"),
    ("iterative_grpo.py", "--cold_start_steps 5 --max_steps 2 --iteration_steps 1 --first_batches 1 --updates 1",
     r"^true accuracy: \S+ -> \S+$")])
def test_each_script_runs(script, flags, printed, monkeypatch):
    """To its last line, which says what it found, after a short cold start."""
    problems, held_out = grpo.tiny_problems(0)
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems, held_out[:64]))
    if script == "walkthrough.py":                  # with seed 0
        weights = cold_started(0)
        monkeypatch.setattr(grpo, "cold_start", lambda policy, *_, seed: policy.load_state_dict(weights))
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    if script == "benchmark.py":
        monkeypatch.setattr(grpo, "TINY", grpo.TINY | dict(generation_batch_size=32, max_completion_length=22))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / "scripts" / script), run_name="__main__")
    assert re.search(printed, out.getvalue(), re.M), out.getvalue()


def test_runs_are_drawn_in_one_picture_and_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    """A panel for each metric that a run has, a line for each run; a folder or its metrics.jsonl."""
    script = runpy.run_path(str(EXAMPLES / "scripts/plot_run.py"))
    monkeypatch.chdir(tmp_path)
    names = ["reward", "entropy", "clip_ratio/region_mean", "completions/mean_length"]
    for run, steps, more in ("a", 30, {}), ("b", 3, {"eval_reward": 0.5}), ("c", 0, {}):
        lines = [json.dumps({"step": i + 1} | dict.fromkeys(names, float(i)) | more) for i in range(steps)]
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "torn.jsonl").write_text('{"step": 1, "rew')
    (tmp_path / "other.jsonl").write_text('{"step": 1}')
    panels = script["draw"]({run: script["load"](run) for run in ("a", "b/metrics.jsonl")}).axes
    assert len(panels) == 5 and len(script["draw"]({"a": script["load"]("a")}).axes) == 4
    thin, thick, *_ = panels[0].lines
    assert thin.get_ydata()[29] == 29 and thick.get_ydata()[29] == 24.5 and thick.get_ydata()[1] == 0.5
    assert [line.get_label() for line in panels[1].lines[1::2]] == ["a", "b/metrics.jsonl"]
    script["main"](["a", "b", "--output", "both.png"])
    assert (tmp_path / "both.png").stat().st_size > 5000
    for bad in (["absent"], ["c"], ["torn.jsonl"], ["other.jsonl"], ["a", "--output", "a.xyz"], ["a", "--output", "d/a.png"],
                ["a", "--colour"], []):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            script["main"](bad)
        assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1, bad


ROOMS = [path for path in SCRIPTS if path.parent.name in ("course", "scripts") or path.name == "check.py"]


@pytest.mark.parametrize("path", [path for path in ROOMS if path.name != "walkthrough.py"], ids=lambda path: path.stem)
def test_a_script_finds_grpo_and_its_neighbours_from_any_folder(path, tmp_path, monkeypatch):
    """It is started in an empty folder, which Python does not search."""
    monkeypatch.chdir(tmp_path)
    elsewhere = [x for x in sys.path if x not in ("", str(ROOT), *(str(other.parent) for other in SCRIPTS))]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])
    for name in {"grpo", "exercises", "variants"} & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(str(path))


def test_formulas_are_compared_also_in_a_thread_and_hostile_texts_are_wrong():
    script = runpy.run_path(str(EXAMPLES / "scripts/math_reward.py"))
    reward = script["math_accuracy_reward"]
    with ThreadPoolExecutor() as pool:              # math-verify's clock needs the main thread
        assert pool.submit(reward, [r"$\frac{2}{4}$"], [r"\frac12"]).result() == [1.0]
    for want, pairs in script["CASES"].items():
        for answer, solution in pairs:
            assert reward([[{"role": "assistant", "content": answer}]], [solution]) == [want], (answer, solution)
    assert not any(reward(["1" * 10**5, "$" + "{" * 10**5, "\\boxed{" * 15_000, "1/" * 50_000], ["7"] * 4))


def test_a_judge_scores_prompt_and_answer_together(data, monkeypatch):
    """The reward is the logit of the judge for both in its chat template."""
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/judge"))
    reward_model = runpy.run_path(str(EXAMPLES / "scripts/reward_model.py"))["reward_model"]
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(data / "models/judge")
    texts = ["1+2=3", "14+2=<think>4+2=6</think>16"]
    scores = [judge(**chat_tokenizer()(text, return_tensors="pt")).logits.item() for text in texts]
    prompts = [[{"role": "user", "content": text[:3]}] for text in texts]
    answers = [[{"role": "assistant", "content": text[3:]}] for text in texts]
    assert reward_model(prompts, answers) == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_the_code_of_a_page_runs_and_its_links_lead_somewhere(path, monkeypatch):
    """Its python fences run in order, in one namespace; links and pictures are files, anchors are headings."""
    monkeypatch.chdir(ROOT)
    text, namespace = path.read_text(), {"__name__": path.stem}
    for fence in re.finditer(r"^```python\n(.*?)(^```$|\Z)", text, re.S | re.M):
        exec(compile("\n" * text.count("\n", 0, fence.start(1)) + fence[1], str(path), "exec"), namespace)
    words = lambda line: re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower())
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for file, anchor in re.findall(r'(?:\]\(|src(?:set)?=")(?!http)([^)"#\s]*)#?([^)"\s]*)', text):
        target = path.parent / file if file else path
        assert target.exists(), file
        if anchor:
            headings = [words(line).replace(" ", "-") for line in re.findall(r"^#+ (.*)", target.read_text(), re.M)]
            assert anchor in headings, anchor


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_a_text_names_are_there(path):
    """In a command from the repository's root; elsewhere by name, or from a folder. Of a script: its docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.FunctionDef))]
        text = "\n".join(ast.get_docstring(node) or "" for node in nodes)
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "]", text.replace("\\\n", ""))
    names, folders = {file.name for file in [*PAGES, *SCRIPTS]}, [ROOT, EXAMPLES, path.parent]
    for line in text.splitlines():
        for file in re.findall(r"[\w./-]*\w\.(?:py|md)\b", line):
            if re.fullmatch(r"my_\w+\.py|grpo_bug\.py|[ab]\.py|FILE\.py", file):           # the reader's own
                continue
            command = re.search(r"\b(python3? |GRPO_MODULE=|accelerate launch)", line)
            there = [(folder / file).exists() for folder in (folders[:1] if command else folders)]
            assert any(there) or "/" not in file and file in names and not command, line


def test_the_readme_names_what_exists():
    """Functions with a law that tests them, commands and flags."""
    text, options = README.read_text(), cli("--help").out
    rows = re.findall(r"^\|.*\| `(\w+)` \| `(test_\w+)` \| \[.*?\]\((\S+?)\)", text, re.M)
    assert len(rows) >= 10 and "python -m pytest -q test_grpo.py worked_examples" in text
    assert all(callable(getattr(grpo, function)) for function, *_ in rows)
    flags = set(re.findall(r"(?<!\S)`?(--[a-z]\w+)", re.sub(r"uv run\b[^\n`]*", "", text)))
    assert flags - {"--html", "--tb"} <= set(re.findall(r"--\w+", options)) | {"--preset"}
    for page in PAGES:
        for test in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {test}(" in TESTS, (page, test)


def test_readme_and_index_show_the_same_seven_ways_in():
    """Row for row the same words, minutes and targets."""
    def ways(page):
        rows = re.findall(r"^\|.*\|$", page.read_text().partition("| I want to")[2].partition("\n\n")[0], re.M)[1:]
        links = [re.findall(r"\]\(([^)#]*)", row) for row in rows]
        return [(re.sub(r"\([^)]*\)", "", row), [(page.parent / link).resolve() if link else page for link in found])
                for row, found in zip(rows, links)]

    assert len(ways(README)) == 7 and ways(README) == ways(EXAMPLES / "README.md")


def test_grpo_imports_nothing_heavy_and_its_maths_is_tested(monkeypatch):
    """No transformers, no matplotlib, no math_verify on import; each function of §1 to §8 but text_of has a test."""
    heavy = {"transformers", "matplotlib", "math_verify"}
    for name in heavy & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(grpo.__file__)
    assert not heavy & set(sys.modules)
    maths = re.findall(r"^def (\w+)", (ROOT / "grpo.py").read_text().partition("\n# §9 ")[0], re.M)
    assert [name for name in maths if f"def test_{name}_" not in TESTS] == ["text_of"], "a function without a test"

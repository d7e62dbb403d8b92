"""Tests of the scripts and pages that are here, of README, and of grpo.py as a text."""

import ast
import inspect
import itertools
import json
import pdb
import random
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import EXAMPLES, ROOT, chat_tokenizer, cli, cold_started

import grpo

README, GRPO = (ROOT / "README.md").read_text(), (ROOT / "grpo.py").read_text()
PAGES = [ROOT / "README.md", *sorted(EXAMPLES.rglob("*.md"))]
SCRIPTS = [ROOT / "grpo.py", ROOT / "test_grpo.py", *sorted(EXAMPLES.rglob("*.py"))]
SMALL_MODEL = runpy.run_path(str(EXAMPLES / "scripts/small_model.py"))


@pytest.mark.parametrize("script, flags, printed", [
    ("walkthrough.py", "", "gradient norm: "), ("benchmark.py", "--max_steps 2", ".* \\.\\.\\. "),
    ("process_supervision.py", "--max_steps 2", "held-out accuracy: "),
    ("distillation.py", "--max_steps 2", "held-out accuracy: "),
    ("iterative_grpo.py", "--max_steps 2 --ref_model_sync_steps 1 --generation_batch_size 32", "true accuracy: ")])
def test_each_script_runs(script, flags, printed, monkeypatch, capsys):
    """To the line that says what it found, from a short cold start"""
    (problems, held_out), weights = grpo.tiny_problems(0), cold_started(0)
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:500], held_out[:64]))
    monkeypatch.setattr(grpo, "cold_start", lambda policy, *_, **__: policy.load_state_dict(weights))
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_path(str(EXAMPLES / "scripts" / script), run_name="__main__")
    assert re.search(rf"^{printed}.*\d", capsys.readouterr().out, re.M)


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
        learned[method] = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    assert len(learned) == 6
    for one, other in itertools.combinations(learned, 2):
        assert (learned[one] - learned[other]).abs().mean() > 1e-4, (one, other)


def test_runs_are_drawn_in_one_picture(tmp_path):
    """A line for each run, and its mean of ten steps"""
    script = runpy.run_path(str(EXAMPLES / "scripts/plot_run.py"))
    lines = [json.dumps({"step": i + 1} | dict.fromkeys(script["PANELS"], float(i))) for i in range(30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    figure = script["draw"]([tmp_path, tmp_path])
    assert [line.get_ydata()[29] for line in figure.axes[4].lines] == [29, 24.5, 29, 24.5]


def test_a_small_model_learns_a_task_by_the_command_that_is_printed(tmp_path, capsys):
    """Words of three letters backwards, held out and greedy: 0.03 to 0.19 are right before, 30 of 31 after (seeds 42,
    1, 2). "gag" has a letter of no other problem; a letter of no problem is an error that says where."""
    draw = random.Random(0)
    words = list(dict.fromkeys("".join(draw.choices("abcdef", k=3)) for _ in range(200)))
    for name, part in ("task", words[:80]), ("held_out", [*words[80:110], "gag"]), ("odd", ["aq"]):
        rows = [json.dumps({"prompt": f"{word}>", "solution": word[::-1]}) for word in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    SMALL_MODEL["main"]([f"{tmp_path}/task.jsonl", f"{tmp_path}/model", "--eval_dataset", f"{tmp_path}/held_out.jsonl"])
    python, script, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert python == "python" and script.endswith("grpo.py")
    result = cli(*flags, "--max_steps", 60, "--output_dir", tmp_path / "run")
    assert result.code == 0, result.err
    before, after = (float(word) for word in result.out.splitlines()[-1].split() if word[:2] in ("0.", "1."))
    assert before < 0.5 and after > 0.8, result.out
    refused = cli(*flags, "--eval_dataset", tmp_path / "odd.jsonl")
    assert refused.code == 2 and refused.err.startswith("grpo.py: error: prompt: got 'aq>'; Encountered an unknown")


def test_small_model_says_that_it_did_not_learn_and_how_common_one_answer_is(tmp_path, capsys):
    """Three of four solutions are 1; one step does not reach 60%, and four times as many are offered"""
    rows = [json.dumps({"prompt": f"{word}>", "solution": "1" if word < "d" else word * 3}) for word in "abcd"]
    (tmp_path / "task.jsonl").write_text("\n".join(rows))
    SMALL_MODEL["main"]([f"{tmp_path}/task.jsonl", f"{tmp_path}/model", "--steps", "1"])
    made, imitated, *_ = capsys.readouterr().out.splitlines()
    assert made.endswith("the commonest solution, '1', is that of 75% of the problems")
    assert imitated.startswith("imitated 3 of 4 solutions in 1 steps: 0.00 -> 0.")
    assert imitated.endswith("of the characters right, not 0.6; --steps 4 tries longer")


def test_the_commands_of_readme_train_what_they_make(tmp_path, monkeypatch):
    """As typed, with README's two files, but for the number of steps"""
    section = README.partition("\n## Your own model")[2].partition("\n## ")[0]
    commands, task, rewards = re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M)
    (tmp_path / "task.jsonl").write_text(task)
    (tmp_path / "my_rewards.py").write_text(rewards)
    make, train = (shlex.split(line)[2:] for line in commands.splitlines())         # without python FILE.py
    monkeypatch.chdir(tmp_path)
    SMALL_MODEL["main"](make)
    result = cli(*train, "--max_steps", 1)
    assert result.code == 0 and "the model and metrics.jsonl are in" in result.out, result.err


def test_the_tokenizer_of_a_small_model_keeps_each_character(tmp_path):
    """Texts come back as they were. No token but the EOS is no character: nothing can be sampled unseen"""
    SMALL_MODEL["make_tokenizer"]([{"prompt": " a  b\n>", "solution": "é<"}]).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(" b  é\n<>a")["input_ids"]
    assert len(ids) == 9 and tokenizer.decode(ids + [0, 0], skip_special_tokens=True) == " b  é\n<>a"
    assert len(tokenizer) == 1 + len(set(" ab\n>é<")) and tokenizer.pad_token_id == tokenizer.eos_token_id == 0


@pytest.mark.parametrize("folder, row, message", [
    (".", {"prompt": "a>", "solution": "a"}, "is there already"), ("model", {"prompt": "a>"}, "needed are"),
    ("model", {"prompt": [{"role": "user", "content": "a"}], "solution": "a"}, "needed are")])
def test_what_small_model_refuses_is_one_line(tmp_path, capsys, folder, row, message):
    """A folder that is there; problems that are no texts"""
    (tmp_path / "task.jsonl").write_text(json.dumps(row))
    with pytest.raises(SystemExit, match="2"):
        SMALL_MODEL["main"]([f"{tmp_path}/task.jsonl", f"{tmp_path}/{folder}"])
    assert re.fullmatch(f"small_model.py: error: .*{message}.*\n", capsys.readouterr().err)


def test_smollm2_holds_out_sums_and_the_page_shows_the_command_that_is_printed():
    """A sum held out is in no prompt of the training data, nor is its mirror image; all solutions are right."""
    script, seen = runpy.run_path(str(EXAMPLES / "scripts/smollm2.py")), [{(2, 3), (4, 4)}]
    for (name, rows), length in zip(script["sums"]().items(), (65, 32)):
        sums = [sorted(map(int, row["prompt"][-1]["content"].split("+"))) for row in rows]
        assert [row["solution"] for row in rows] == [str(x + y) for x, y in sums] and len(rows) == length, name
        seen.append(set(map(tuple, sums)))
    assert len(set.union(*seen)) == sum(map(len, seen)) == 55           # unordered pairs of ten digits
    command = script["COMMAND"].format(grpo="grpo.py", folder="smollm2")
    config, options, _ = grpo.parse_options(shlex.split(command.replace("\\\n", ""))[2:])
    assert options.dataset == "smollm2/sums_train.jsonl" and config.num_mini_batches == 2
    assert command in (EXAMPLES / "07_training_your_own_model.md").read_text()


def test_formulas_are_compared():
    """A long or chat answer, words, a sentence, several formulas, decimals, no formula; a solution that is missing"""
    reward = runpy.run_path(str(EXAMPLES / "scripts/math_reward.py"))["math_accuracy_reward"]
    cases = {1.0: [("1/2", "0.5"), ("**7.0**", 7), ("so it is 1,000.", "1000"), ("1 " * 50_000 + "$4/2$", "2"),
                   ("x^2-1", "$(x-1)(x+1)$"), ("a</think>1</think>4/2", r"So \boxed{2}."), ("5 plus 2 is 7", "7"),
                   ("0.00001", 1e-05), ("0.333333", "1/3"), ("it is $5$, no, $7$", "7"), (r"\$5", "5"),
                   (r"$\frac{1}{\sqrt{2}}$", r"$\sqrt{2}/2$"), ("$5$ and $6$", "$6$ and $5$"),
                   ("$1+1/e$", r"1+\frac{1}{\mathrm{e}}")],
             0.0: [("0.3333", "1/3"), ("12,34", "1234"), (r"\boxed{Lyon}", "Paris"), ("Рим 7", "Киев 7"), ("2", "2x+3"),
                   (r"\boxed{1} 2", "2"), (r"\boxed{" * 15_000, "7"), ("5.0000001", "5"), ("$e-5$", "1e-05"),
                   (r"$1+\frac{1}{\mathrm{e}}$", r"$1-\frac{1}{\mathrm{e}}$"), (r"$4\sqrt(2)$", "$4$"), ("7+", "7"),
                   ("5 and 6 and 7", "7"), ("minus 7", "7"), ("2 pi", "2"), ("7 8", "56"), ("1 000", "0"),
                   ("$5$ or $6$", "6"), ("6", r"5\text{ or }6"), ("2", r"\begin{pmatrix}1\\2\end{pmatrix}"),
                   ("The answer is not $5$ but $7$", "5"), ("101_2", "101"), ("3:2", "2"), (r"\neq 7", "7"),
                   ("$5m$", "5"), (r"$7\text{ not}$", "7"), ("1/2\n8", "1/2"), ("7$2", "7")],
             None: [("42", ""), ("42", None)]}
    for want, pairs in cases.items():
        for answer, solution in pairs:
            assert reward([[{"role": "assistant", "content": answer}]], [solution]) == [want], (answer[:99], solution)


def test_a_judge_scores_prompt_and_answer_together(data, monkeypatch):
    """The reward is the logit of the judge for both in its chat template. An untrained one is refused"""
    reward_model = runpy.run_path(str(EXAMPLES / "scripts/reward_model.py"))["reward_model"]
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/Llama"))
    with pytest.raises(ValueError, match="allowed is a trained judge"):
        reward_model(["1+2="], ["3"])
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/judge"))
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(data / "models/judge")
    scores = [judge(**chat_tokenizer()(text, return_tensors="pt")).logits.item() for text in ("1+2=3", "4+4=81")]
    prompts = [[{"role": "user", "content": text}] for text in ("1+2", "4+4")]
    answers = [[{"role": "assistant", "content": text}] for text in ("=3", "=81")]
    assert reward_model(prompts, answers) == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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


def test_texts_name_what_exists():
    """The files of a command, on a page or in a script's docstring; README's functions in their sections, its flags"""
    for path in [*PAGES, *SCRIPTS]:
        text = path.read_text() if path.suffix == ".md" else ast.get_docstring(ast.parse(path.read_text())) or ""
        for file in re.findall(r"\bpython ([\w./]+\.py)", text):
            assert (ROOT / file).exists() or file == "grpo_bug.py", (path, file)
        for test in re.findall(r"`(test_\w+)`", text):
            assert any(f"def {test}(" in other.read_text() for other in SCRIPTS), (path, test)
    for section, function in re.findall(r"^\|.*\| (§\d+) `(\w+)` \|", README, re.M):
        assert f"\ndef {function}(" in GRPO.partition(f"\n# {section} ")[2].partition("\n# §")[0], function
    assert set(re.findall(r"(?<![\w-])--[a-z]\w+", README)) <= set(re.findall(r"--\w+", cli("--help").out))


def test_grpo_imports_nothing_heavy():
    """No transformers, no matplotlib, no math_verify"""
    code = "import sys, grpo; sys.exit(len({'transformers', 'matplotlib', 'math_verify'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("policy_loss", ["clip", "cispo", "sapo"])
def test_the_loss_can_be_pasted_with_the_seven_functions_that_it_calls(policy_loss):
    """`import torch` and these are a whole file"""
    names = "importance_ratio clip_ratio clipped_surrogate_loss cispo_loss sapo_loss kl_estimate aggregate grpo_loss"
    pasted = {}
    exec("\n\n\n".join(["import torch", *(inspect.getsource(vars(grpo)[name]) for name in names.split())]), pasted)
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    job = logps, torch.tensor([1.0, -1.0]), torch.ones(2, 2)
    options = dict(old_logps=logps - 1, ref_logps=logps + 1, beta=0.1, policy_loss=policy_loss)
    assert pasted["grpo_loss"](*job, **options) == grpo.grpo_loss(*job, **options)


def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_command_of_pdb():
    """No decorator is in between; no local is called like a command of pdb, as n or where, but step"""
    commands = {name.removeprefix("do_") for name in dir(pdb.Pdb) if name.startswith("do_")} - {"step"}
    for function in ast.walk(ast.parse(inspect.getsource(grpo))):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            stored = [node for node in ast.walk(function) if isinstance(getattr(node, "ctx", None), ast.Store)]
            names |= {getattr(node, "id", None) for node in stored}
            assert not (function.decorator_list or names & commands), function.name

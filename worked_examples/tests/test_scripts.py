"""Tests of the scripts and pages that are here, of README, and of grpo.py as a text."""

import ast
import inspect
import itertools
import json
import pdb
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.colors
import numpy
import pytest
import torch
import transformers
from conftest import EXAMPLES, ROOT, chat_tokenizer, cli, cold_started, make_model

import grpo
from worked_examples.scripts import plot_run, small_model, smollm2, toy_tasks

README, GRPO = (ROOT / "README.md").read_text(), (ROOT / "grpo.py").read_text()
PAGE_07 = (EXAMPLES / "07_training_your_own_model.md").read_text()
PAGES = [ROOT / "README.md", *sorted(EXAMPLES.rglob("*.md"))]
SCRIPTS = [ROOT / "grpo.py", ROOT / "test_grpo.py", *sorted(EXAMPLES.rglob("*.py"))]


@pytest.mark.parametrize("script, flags, printed", [
    ("walkthrough.py", "", "gradient norm: "), ("benchmark.py", "--max_steps 2", ".* \\.\\.\\. "),
    ("process_supervision.py", "--max_steps 2", "process supervision: held-out accuracy "),
    ("distillation.py", "--max_steps 2", "distillation, the student: held-out accuracy "),
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
        _, config, _ = grpo.parse_options(shlex.split(f"--model tiny {flags} {small}"))
        policy = grpo.tiny_model(tokenizer, 0)
        policy.load_state_dict(cold_started(0))
        assert len([*grpo.train(policy, tokenizer, problems, [grpo.accuracy_reward], config)]) == 2
        learned[method] = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    assert len(learned) == 6
    for one, other in itertools.combinations(learned, 2):
        assert (learned[one] - learned[other]).abs().mean() > 1e-4, (one, other)


def write(name, rows):
    Path(name).write_text("\n".join(map(json.dumps, rows)))


def test_a_small_model_counts_whole_right_answers_and_may_imitate_a_thought_before_them(tmp_path, monkeypatch, capsys):
    """Random weights sample none, and it says so. A tag of a thought is one token, the letter of a held-out problem
    another. It imitates until the share that is asked for is right. No model is put over another"""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{word}>", "solution": word[::-1], "trace": f"<think>{word}</think>{word[::-1]}"}
            for word in ("abcd", "bcda", "cdab", "dabc")]
    write("task.jsonl", rows)
    write("held.jsonl", [{"prompt": "gag>", "solution": "gag", "trace": "gag"}])
    words = "task.jsonl one --eval_dataset held.jsonl --imitate trace --steps 0".split()
    small_model.main(words)
    made, imitated, *_ = capsys.readouterr().out.splitlines()
    assert " 9 tokens; " in made and ": 25% " in made and "asked for: 51%" in made          # 0.25 + 0.35 (1 - 0.25)
    assert re.search(r" 0 are right, to held-out ones 0: .* nothing to learn from$", imitated)
    pytest.raises(SystemExit, small_model.main, words)
    right = []
    for until in "0.35", "0.8":
        small_model.main(f"task.jsonl {until} --imitate trace --until {until}".split())
        _, imitated, *answers, _, printed = capsys.readouterr().out.splitlines()
        right.append(int(re.search(r"(\d+) are right$", imitated)[1]))
        assert "--max_completion_length 12 " in printed and "'<think>" in "".join(answers)
    assert 400 < right[0] < 750 < right[1]


def test_a_small_model_tells_chance_and_learning_by_heart_from_learning(tmp_path, monkeypatch, capsys):
    """Digits without a rule: those of the problems are learned by heart, of new ones a tenth is right. In the commonest
    solution of 19 in 20 problems is nothing learned; with a trace a lucky digit after a wrong thought is not right"""
    monkeypatch.chdir(tmp_path)
    rng = numpy.random.default_rng(0)
    rows = [{"prompt": f"{i:03}=", "solution": int(rng.integers(10)), "most": int(i % 20 == 0)} for i in range(180)]
    write("by_heart.jsonl", rows[:60])
    write("new.jsonl", rows[60:])
    small_model.main("by_heart.jsonl by_heart --eval_dataset new.jsonl --until 0.6".split())
    by_heart = capsys.readouterr().out.splitlines()
    known, new = re.search(r" (\d+) are right, to held-out ones (\d+): learned by heart", by_heart[1]).groups()
    assert int(known) > 500 and int(new) < 250 and " --eval_steps " in by_heart[-1]
    write("most.jsonl", [row | {"solution": row["most"]} for row in rows])
    small_model.main("most.jsonl most --steps 60".split())
    made, imitated, *_ = capsys.readouterr().out.splitlines()
    assert "'0'" in made and ": 95% " in made and "asked for: 97%" in made
    assert "hardly more than chance" in imitated and int(re.search(r" (\d+) are right", imitated)[1]) > 800
    texts = {"<think>1</think>7": [1], "<think>2</think>7": [0], "7": [0], "<think>1</think>8": [0]}
    problem = {"prompt": "3+4=", "solution": "7", "imitated": "<think>1</think>7"}
    for text, want in texts.items():
        rollout = SimpleNamespace(completions=[text], examples=[problem])
        monkeypatch.setattr(grpo, "sample_rollout", lambda *_: rollout)
        assert small_model.sample(None, None, [problem], grpo.GRPOConfig(), 1)[1] == want, text


def test_a_small_model_reads_chats_and_numbers(tmp_path, monkeypatch, capsys):
    """A chat's prompt is its messages; 72.0 is imitated as 72, as accuracy_reward compares it; a row without a solution
    is left out, and said. Its command trains"""
    monkeypatch.chdir(tmp_path)
    asked = [{"role": "system", "content": "Echo."}, {"role": "user", "content": "72"}]
    rows = [{"prompt": asked, "solution": 72.0}, {"prompt": asked[:1], "solution": 5}]
    write("chat.jsonl", rows)
    write("gap.jsonl", [*rows, {"prompt": asked[1:], "solution": None}])
    small_model.main("gap.jsonl model --until 0.9".split())
    left_out, *_, first, _, _, printed = capsys.readouterr().out.replace("gap", "chat").splitlines()
    assert left_out.startswith("chat.jsonl: 1 of 3 rows have no solution, are left out; the first: [{'role': 'user'")
    assert "'72" in first or "'Echo." in first
    done = cli(*shlex.split(printed)[2:], "--max_steps", 1)
    assert done.code == 0 and "'Echo.\\n72\\n'" in done.out, done.err
    assert json.loads(Path("grpo-output/metrics.jsonl").read_text())["reward"] > 0.8


def test_the_commands_for_a_model_of_ones_own_run_as_typed_and_it_learns(tmp_path, monkeypatch, capsys):
    """With the section's files. GRPO begins where a third of the samples is right; 150 steps are enough, and are drawn.
    The command that is printed is that of page 7"""
    monkeypatch.chdir(tmp_path)
    section = re.sub(r" \\\n +", " ", PAGE_07.partition("\n## A task of your own")[2].partition("\n## ")[0])
    for fence in re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M):
        if "def " in fence:
            (tmp_path / "my_rewards.py").write_text(fence)
        elif fence.startswith("import"):
            exec(fence, {})
    flags, = re.findall(r"^python \S*small_model.py (.*)$", section, re.M)
    small_model.main(shlex.split(flags))
    _, imitated, *_, printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ steps of imitation: of 1000 sampled answers to training problems [3-4]\d\d are right"
                        r"(, to held-out ones [1-3]\d\d)?", imitated)
    assert printed.partition("grpo.py ")[2] in section
    flags, = re.findall(r"^python grpo.py (.*)$", section, re.M)
    done = cli(*shlex.split(flags), "--max_steps", 150, "--output_dir", "run")
    assert done.code == 0, done.err
    rewards = [json.loads(line)["reward"] for line in open("run/metrics.jsonl")]
    before, after = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert after > before + 0.2
    assert plot_run.draw(["run"]).axes[0].lines[1].get_ydata()[-1] == pytest.approx(after)           # the thick line


def test_toy_tasks_have_right_solutions_and_traces_and_no_problem_twice():
    """Held-out problems are not among those to train on"""
    rules = {"few_words": lambda prompt: prompt[-2::-1], "words": lambda prompt: prompt[-2::-1],
             "parity": lambda prompt: str(prompt.count("1") % 2)}
    assert rules.keys() == toy_tasks.TASKS.keys()
    for task, rule in rules.items():
        rows = sum(toy_tasks.make(task, 1), [])
        assert len({row["prompt"] for row in rows}) == len(rows), task
        assert all(row["solution"] == rule(row["prompt"]) for row in rows), task
        traces = [row.get("trace", row["solution"]) for row in rows]
        assert set(grpo.accuracy_reward(traces, [row["solution"] for row in rows])) == {1}, task


def test_the_tokenizer_of_a_small_model_keeps_each_character(tmp_path):
    """Texts come back as they were, others are errors. No token but the EOS is no text: all that is sampled is seen"""
    small_model.make_tokenizer(" a  b\n>é<<think>").save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(" b  é\n<><think>a")["input_ids"]
    assert len(ids) == 10 and tokenizer.decode(ids + [0, 0], skip_special_tokens=True) == " b  é\n<><think>a"
    assert len(tokenizer) == 2 + len(set(" ab\n>é<")) and tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    pytest.raises(Exception, tokenizer, "c")


def test_smollm2_holds_out_sums_and_the_page_shows_the_command_that_is_printed():
    """A sum held out is in no prompt of the training data, nor is its mirror image; all solutions are right."""
    seen = [{(2, 3), (4, 4)}]
    for (name, rows), length in zip(smollm2.sums().items(), (65, 32)):
        sums = [sorted(map(int, row["prompt"][-1]["content"].split("+"))) for row in rows]
        assert [row["solution"] for row in rows] == [str(x + y) for x, y in sums] and len(rows) == length, name
        seen.append(set(map(tuple, sums)))
    assert len(set.union(*seen)) == sum(map(len, seen)) == 55           # unordered pairs of ten digits
    command = smollm2.COMMAND.format(grpo="grpo.py", folder="smollm2")
    options, config, _ = grpo.parse_options(shlex.split(command.replace("\\\n", ""))[2:])
    assert Path(options.dataset) == Path("smollm2/sums_train.jsonl").absolute() and config.num_mini_batches == 2
    assert command in PAGE_07


def test_formulas_are_compared():
    """A long or chat answer, words, a sentence, several formulas, decimals, small numbers; solutions of data sets"""
    reward = runpy.run_path(str(EXAMPLES / "scripts/math_reward.py"))["math_accuracy_reward"]
    cases = {1.0: [("1/2", "0.5"), ("**7.0**", 7), ("so it is 1,000.", "1000"), ("1 " * 50_000 + "$4/2$", "2"),
                   ("x^2-1", "$(x-1)(x+1)$"), ("a</think>1</think>4/2", r"So \boxed{2}."), ("5 plus 2 is 7", "7"),
                   ("0.00001", 1e-05), ("0.333333", "1/3"), ("it is $5$, no, $7$", "7"), (r"\$5", "5"),
                   (r"$\frac{1}{\sqrt{2}}$", r"$\sqrt{2}/2$"), ("$5$ and $6$", "$6$ and $5$"),
                   ("$1+1/e$", r"1+\frac{1}{\mathrm{e}}"), ("72", "$72$"), ("72", "$5 and $6: 2\n#### 72"),
                   ("4/2=2\n#### 2", "2"), ("6.63e-34", r"$6.63\cdot 10^{-34}$"), ("0.0123457", "1/81"), ("50", "50%"),
                   (r"50\%", "50"), ("50%", r"$50\%$"), (r"\boxed{50\%}", "50%"), ("it is 12.5 %.", "12.5"),
                   ("90°", "90"), (r"$90^\circ$", "90°"), (r"90^{\circ}", "90")],
             0.0: [("0.3333", "1/3"), ("12,34", "1234"), (r"\boxed{Lyon}", "Paris"), ("Рим 7", "Киев 7"), ("2", "2x+3"),
                   (r"\boxed{1} 2", "2"), (r"\boxed{" * 15_000, "7"), ("5.0000001", "5"), ("$e-5$", "1e-05"),
                   (r"$1+\frac{1}{\mathrm{e}}$", r"$1-\frac{1}{\mathrm{e}}$"), (r"$4\sqrt(2)$", "$4$"), ("7+", "7"),
                   ("5 and 6 and 7", "7"), ("minus 7", "7"), ("2 pi", "2"), ("7 8", "56"), ("1 000", "0"),
                   ("$5$ or $6$", "6"), ("6", r"5\text{ or }6"), ("2", r"\begin{pmatrix}1\\2\end{pmatrix}"),
                   ("The answer is not $5$ but $7$", "5"), ("101_2", "101"), ("3:2", "2"), (r"\neq 7", "7"),
                   ("6.63e-34", "1.6e-19"), ("6.63e-34", "6.626e-34"), ("1/2^{99}", "1/2^{98}"), ("1e-10", "0"),
                   ("0", "1e-10"), ("$5m$", "5"), (r"$7\text{ not}$", "7"), ("1/2\n8", "1/2"), ("7$2", "7"),
                   ("0.5", "50%"), ("50%", "5"), ("%", "0"), ("7%2", "1")],
             None: [("42", ""), ("42", None)]}
    for want, pairs in cases.items():
        for answer, solution in pairs:
            assert reward([[{"role": "assistant", "content": answer}]], [solution]) == [want], (answer[:99], solution)


def test_a_judge_scores_prompt_and_answer_together(data, monkeypatch):
    """The reward is the logit of the judge for both in its chat template, in float32; without a pad id of its own it is
    that of the last token, the template's EOS too. An untrained judge is refused"""
    module = runpy.run_path(str(EXAMPLES / "scripts/reward_model.py"))
    monkeypatch.setenv("REWARD_MODEL", str(data / "models/Llama"))
    with pytest.raises(ValueError, match="allowed is a trained judge"):
        module["reward_model"](["1+2="], ["3"])
    prompts = [[{"role": "user", "content": text}] for text in ("1+2", "4+4")]
    answers = [[{"role": "assistant", "content": text}] for text in ("=3", "=81")]
    tokenizer = chat_tokenizer()
    for name, pad_token, end in (("padded", "<pad>", ""), ("bare", None, "<eos>")):
        judge = make_model("Llama", "AutoModelForSequenceClassification").bfloat16()
        judge.config.pad_token_id = 0 if pad_token else None
        judge.save_pretrained(data / name)
        tokenizer.pad_token = pad_token
        tokenizer.chat_template = chat_tokenizer().chat_template + end
        tokenizer.save_pretrained(data / name)
        judge = type(judge).from_pretrained(data / name, dtype=torch.float32)
        scores = [judge(**tokenizer(text + end, return_tensors="pt")).logits.item() for text in ("1+2=3", "4+4=81")]
        monkeypatch.setenv("REWARD_MODEL", str(data / name))
        module["judge"].cache_clear()
        assert module["reward_model"](prompts, answers) == pytest.approx(scores, abs=1e-5), name


def test_a_picture_of_runs_names_each_of_them_and_shows_held_out_rewards_where_they_are(tmp_path):
    """Eleven runs, of one color each, also one whose name begins with _; a gap where a value is null"""
    runs = [tmp_path / f"{'_' * (i % 2)}run{i}" for i in range(11)]
    names = [*plot_run.PANELS]
    for i, run in enumerate(runs):
        run.mkdir()
        lines = [{"step": step} | dict.fromkeys(names, step if step != 3 else None) for step in range(1, 6)]
        lines[4] |= {"eval_rewards/accuracy_reward/mean": i / 10, "eval_rewards/short/mean": None}
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reward, held_out, *_ = plot_run.draw([str(run) for run in runs]).axes
    assert [text.get_text().strip() for text in reward.get_legend().get_texts()] == [str(run) for run in runs]
    thick = reward.lines[1::2]
    assert len({matplotlib.colors.to_hex(line.get_color()) for line in thick}) == 11
    numpy.testing.assert_allclose(thick[0].get_ydata(), [1, 1.5, 1.5, 7 / 3, 3])                # without the gap
    assert [list(line.get_xdata()) for line in held_out.lines] == 22 * [[5]]
    assert [line.get_ydata()[0] for line in held_out.lines[::2]] == [i / 10 for i in range(11)]
    assert "accuracy_reward" in held_out.get_title() and "mean" in reward.get_xlabel()


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

"""What these tests share: small models, runs of a few steps, command lines, folders of data."""

import contextlib
import functools
import io
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "worked_examples"
sys.path.insert(0, str(ROOT))
import pytest
import torch
import transformers

import grpo

HAS_GPU = torch.cuda.is_available()
torch.cuda.is_available = lambda: False             # command lines in this process run on the CPU; see test_gpu.py
torch.set_num_threads(1)
PROBLEMS = grpo.tiny_problems(0)[0][:12]
PROBLEMS[1] = {"prompt": "1+22222=", "solution": "22223"}       # of another length


def make_model(kind, auto_class="AutoModelForCausalLM"):
    """A model of random weights, large enough that its distributions are not uniform."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2, hidden_size=32,
        num_attention_heads=4, max_position_embeddings=64, num_key_value_heads=2, intermediate_size=64, num_labels=1)
    model = getattr(transformers, auto_class).from_config(config).eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


@functools.cache
def cold_started(seed):
    """The weights of the tiny model after a cold start of 200 steps."""
    model, tokenizer = grpo.load_model("tiny", seed)
    grpo.cold_start(model, tokenizer, grpo.tiny_problems(seed)[0], seed, steps=200)
    return model.state_dict()


def chat_tokenizer():
    """The tiny task's tokenizer, with a chat template."""
    tokenizer = grpo.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{m.content}}{% endfor %}{{'=' * add_generation_prompt}}"
    return tokenizer


def passes_of(model):
    """A list that takes rows, width and the logits' dtype of each forward pass from now on."""
    passes = []
    note = lambda module, args, kwargs, output: passes.append((*kwargs["input_ids"].shape, output.logits.dtype))
    model.register_forward_hook(note, with_kwargs=True)
    return passes


def question(text):
    return [{"role": "user", "content": text}]


SMALL = dict(num_generations=4, generation_batch_size=8, per_device_train_batch_size=8, max_completion_length=10,
             max_steps=1, learning_rate=0.01)


def by_row(completions, **kwargs):
    """Rewards that no sample changes; in each group of four, two are its mean."""
    return [float("02110121"[i % 8]) for i in range(len(completions))]


def steps_of(model, reward_funcs=(by_row,), compute_advantages=grpo.outcome_advantages, **options):
    """The steps of a short run on a few of the tiny task's problems."""
    return grpo.train(model, grpo.tiny_tokenizer(), PROBLEMS[:6], reward_funcs, grpo.GRPOConfig(**SMALL | options),
                      compute_advantages=compute_advantages)


def command(data, **options):
    """The arguments of a short run; None leaves a flag out."""
    usual = dict(model=data / "models/Llama", dataset=data / "text.jsonl", num_generations=4, generation_batch_size=8,
                 reward_funcs=["think_format_reward", "rewards.length"], max_completion_length=6, max_steps=2,
                 learning_rate=0.01, output_dir=data / "out")
    words = []
    for name, value in (usual | options).items():
        values = value if isinstance(value, list) else [value]
        words += [] if value is None else [f"--{name}", *map(str, values)]
    return words


def cli(*arguments):
    """python grpo.py ARGUMENTS, in this process: its exit code and what it printed."""
    words = [str(word) for word in arguments]
    with (contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err,
          mock.patch.object(sys, "argv", ["grpo.py", *words])):
        try:
            code = grpo.main(words)
        except SystemExit as exit:
            code = exit.code
            if isinstance(code, str):                               # as Python does: a text is printed, the code is 1
                code = print(code, file=sys.stderr) or 1
        except (Exception, KeyboardInterrupt):
            traceback.print_exc()
            code = 1
    return SimpleNamespace(code=code or 0, out=out.getvalue(), err=err.getvalue())


told = []                                                               # whom Python tells of each file that it touches
sys.addaudithook(lambda event, args: [tell(event, args) for tell in told])


@contextlib.contextmanager
def disk_full_at(moment, folder):
    """The change of this number below the folder, or of the folder itself, fails."""
    changes = []

    def tell(event, args):
        is_change = event in ("os.rename", "shutil.rmtree") or event == "open" and args[1] in ("a", "w")
        is_new = event == "os.mkdir" and not os.path.exists(args[0])
        if (is_change or is_new) and str(args[0]).startswith(str(folder)):
            changes.append(event)
            if len(changes) == moment:
                raise OSError(28, "a full disk")

    told.append(tell)
    try:
        yield
    finally:
        told.remove(tell)


def lines_of(folder):
    """The lines of metrics.jsonl, but for how long things took."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | {"step_time": 0, "reward_time": 0} for line in lines]


def assert_same_run(a, b):
    """The same metrics and texts, and the same bits in the weights of the checkpoint of step 3, the only one left."""
    assert lines_of(a) == lines_of(b)
    assert sorted(os.listdir(a)) == ["checkpoint-3", "completions.jsonl", "metrics.jsonl"]
    for name in "completions.jsonl", "checkpoint-3/model.safetensors":
        assert (a / name).read_bytes() == (b / name).read_bytes()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of models that name a file of code: a causal one, in bfloat16, and one that classifies."""
    root = tmp_path_factory.mktemp("models")
    judge = make_model("Llama", "AutoModelForSequenceClassification")
    for name, model, pad in (("Llama", make_model("Llama").bfloat16(), None), ("judge", judge, "<pad>")):
        model.config.auto_map = {"AutoConfig": "absent.C", "AutoModelForCausalLM": "absent.M"}
        model.save_pretrained(root / name)
        tokenizer = chat_tokenizer()
        tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["absent.T", None]}
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def data(models, tmp_path, monkeypatch):
    """A folder with the models, two datasets and a module of rewards; tests run in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)          # that of another test
    chat = [row | {"prompt": question(row["prompt"].rstrip("="))} for row in PROBLEMS]
    for name, rows in (("text", PROBLEMS), ("chat", chat)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "rewards.py").write_text(
        "def length(completion_ids, **columns):\n"
        "    return [None if 11 in ids else i % 4 - 0.1 * len(ids) for i, ids in enumerate(completion_ids)]\n"
        "def nothing(completions, **columns): return [None] * len(completions)\n")
    (tmp_path / "models").symlink_to(models)
    return tmp_path

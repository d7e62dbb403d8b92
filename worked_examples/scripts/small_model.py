"""A small transformer and a tokenizer for a task of your own, from a file of prompts and solutions.

    python worked_examples/scripts/small_model.py TASK.jsonl FOLDER [--eval_dataset FILE.jsonl] [--seed S]
                                                  [--imitate N] [--steps M]

Each line of TASK.jsonl is like {"prompt": "abcd>", "solution": "dcba"}. The folder takes a GPT-2 of about 130,000
weights and a tokenizer of the files' characters. First the model imitates N of the solutions (three quarters of them)
until it gets 60% of all characters right, for M steps (100) at most: GRPO learns from rewards, and random weights
seldom earn one. The last line printed is the grpo.py command that trains the model.
worked_examples/07_training_your_own_model.md is its page.
"""

import argparse
import collections
import os
import shlex
import sys
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

ENOUGH = 0.6                                                            # share of right characters


def load_problems(path):
    problems = grpo.load_dataset(path)
    for problem in problems:
        if not isinstance(problem["prompt"], str) or problem.get("solution") is None:
            raise grpo.InputError(f"{path}: got {problem}; needed are a prompt, a text, and a solution")
    return [problem | {"solution": str(problem["solution"])} for problem in problems]


def make_tokenizer(problems):
    """One token for each character of the files, and an EOS that pads, too; unknown characters are an error."""
    characters = set("".join(problem["prompt"] + problem["solution"] for problem in problems))
    words = ["<eos>", *sorted(characters)]
    tokenizer = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=None))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>")


def make_model(tokenizer, positions, seed):
    """A GPT-2 of random weights: of five classes tried, the one that learned most from 80 problems on most tasks."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.05,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, activation_function="gelu_pytorch_tanh")).eval()


def right_characters(model, tokenizer, problems, config):
    """The share of right characters in greedy answers."""
    answers = grpo.sample_rollout(model, tokenizer, problems, config).completions
    shares = [sum(a == b for a, b in zip(answer, problem["solution"])) / max(len(answer), len(problem["solution"]), 1)
              for answer, problem in zip(answers, problems)]
    return sum(shares) / len(shares)


def imitate(model, tokenizer, problems, count, steps, config):
    """Supervised learning from `count` solutions. Returns the number of its steps."""
    rng = numpy.random.default_rng([config.seed, 2])
    chosen = [problems[i] for i in rng.choice(len(problems), count, replace=False)]
    prompts, mask = grpo.encode_prompts(tokenizer, [problem["prompt"] for problem in chosen], "cpu")
    solutions = tokenizer([problem["solution"] + "<eos>" for problem in chosen], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        if right_characters(model, tokenizer, problems, config) >= ENOUGH:
            return step
        rows = torch.tensor(rng.choice(count, min(count, 32), replace=False))
        real = solutions["attention_mask"][rows]
        logps, _ = grpo.per_token_logps(model, prompts[rows], mask[rows], solutions["input_ids"][rows], real)
        optimizer.zero_grad()
        (-logps.sum() / real.sum()).backward()
        optimizer.step()
    return steps


def make(task, folder, eval_dataset, count, steps, seed):
    """Fill a new folder; print what was made, and the command that trains it."""
    if os.path.exists(folder):
        raise grpo.InputError(f"{folder} is there already: name another folder, or delete it")
    problems, held_out = load_problems(task), load_problems(eval_dataset) if eval_dataset else []
    count = max(3 * len(problems) // 4, 1) if count is None else min(count, len(problems))
    length = max(len(problem["solution"]) for problem in problems) + 2          # the EOS, and one to spare
    longest = max(len(problem["prompt"]) for problem in problems + held_out)
    config = grpo.GRPOConfig(seed=seed, max_completion_length=length)
    tokenizer = make_tokenizer(problems + held_out)
    positions = longest + max(length, grpo.GRPOConfig.max_completion_length)    # grpo.py's default has room, too
    model = make_model(tokenizer, positions, seed)
    before = right_characters(model, tokenizer, problems, config)
    steps = imitate(model, tokenizer, problems, count, steps, config) if count > 0 else 0
    after = right_characters(model, tokenizer, problems, config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    commonest, times = collections.Counter(problem["solution"] for problem in problems).most_common(1)[0]
    print(f"{folder}: {model.num_parameters():,} weights, {len(tokenizer) - 1} characters; the commonest solution, "
          f"{commonest!r:.60}, is that of {times / len(problems):.0%} of the problems")
    print(f"imitated {count} of {len(problems)} solutions in {steps} steps: {before:.2f} -> {after:.2f} of the "
          "characters right" + f", not {ENOUGH}; --steps {4 * steps} tries longer" * (after < ENOUGH and steps > 0))
    print("to train it:")
    command = ["python", os.path.relpath(grpo.__file__), "--model", folder, "--dataset", task]
    command += ["--eval_dataset", eval_dataset] if eval_dataset else []
    command += f"--seed {seed} --max_completion_length {length} --learning_rate 1e-3 --max_steps 800".split()
    command += "--generation_batch_size 128 --per_device_train_batch_size 128 --save_steps 100".split()
    print(shlex.join(command))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("folder")
    parser.add_argument("--eval_dataset")
    parser.add_argument("--imitate", type=int, dest="count")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(argv)
    logging.disable_progress_bar()
    torch.set_num_threads(1)                                            # several would wait for each other
    try:
        make(**vars(options))
    except (OSError, grpo.InputError) as error:
        parser.exit(2, f"small_model.py: error: {error}\n")


if __name__ == "__main__":
    main()

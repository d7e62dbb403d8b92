"""A small transformer and a tokenizer for a task of your own, from a file of prompts and solutions.

    python worked_examples/scripts/small_model.py TASK.jsonl FOLDER [--eval_dataset FILE.jsonl] [--imitate COLUMN]
                                                  [--steps M] [--seed S]

Each line of TASK.jsonl is like {"prompt": "abcd>", "solution": "dcba"}. The folder takes a GPT-2 of about 130,000
weights and a tokenizer of the files' characters. GRPO learns from right answers that the model samples, and random
weights have none. So first it imitates the solutions (or a COLUMN of worked answers, as "<think>7</think>4") until half
of 200 sampled answers earn accuracy_reward, for M steps (1000) at most. The last line printed is the command that
trains it. worked_examples/07_training_your_own_model.md is its page.
"""

import argparse
import collections
import os
import re
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


def make_tokenizer(text):
    """A token for each character of the text, for <think> and </think>, and an EOS that pads, too. Others are errors."""
    words = ["<eos>", *sorted(set(re.sub("</?think>", "", text)))]
    tokenizer = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=None))
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>")
    tokenizer.add_tokens(sorted(set(re.findall("</?think>", text))))
    return tokenizer


def make_model(tokenizer, positions, seed):
    """A GPT-2 of random weights: of five classes tried, the one that learned most from 80 problems on most tasks."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.05,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, activation_function="gelu_pytorch_tanh")).eval()


def imitate(model, tokenizer, problems, answers, steps, config):
    """Supervised learning from these answers. Returns the number of its steps, and the last sample with its rewards."""
    rng = numpy.random.default_rng([config.seed, 2])
    prompts, mask = grpo.encode_prompts(tokenizer, [problem["prompt"] for problem in problems], "cpu")
    answers = tokenizer([answer + "<eos>" for answer in answers], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps + 1):
        if step % 10 == 0 or step == steps:
            draw = numpy.random.default_rng([config.seed, 3, 0])                # the same problems each time
            chosen = draw.choice(len(problems), 100, replace=len(problems) < 100)
            examples = [problems[i] for i in chosen]
            rollout = grpo.sample_rollout(model, tokenizer, examples, config, draw)
            rewards = grpo.accuracy_reward(rollout.completions, [row["solution"] for row in rollout.examples])
            if sum(rewards) >= len(rewards) / 2 or step == steps:
                return step, rollout, rewards
        rows = torch.tensor(rng.choice(len(problems), 64))
        real = answers["attention_mask"][rows]
        logps, _ = grpo.per_token_logps(model, prompts[rows], mask[rows], answers["input_ids"][rows], real)
        optimizer.zero_grad()
        (-logps.sum() / real.sum()).backward()
        optimizer.step()


def make(task, folder, eval_dataset, column, steps, seed):
    """Fill a new folder; print what was made, and the command that trains it."""
    problems, held_out = grpo.load_dataset(task), grpo.load_dataset(eval_dataset) if eval_dataset else []
    answers = [str(problem[column]) for problem in problems]
    prompts = [problem["prompt"] for problem in problems + held_out]
    solutions = [str(problem["solution"]) for problem in problems + held_out]
    tokenizer = make_tokenizer("".join(map(str, prompts + solutions + answers)))
    length = max(map(len, tokenizer(answers)["input_ids"])) + 2                 # the EOS, and one to spare
    config = grpo.GRPOConfig(seed=seed, max_completion_length=length, num_generations=2, generation_batch_size=200)
    positions = max(map(len, prompts)) + max(length, grpo.GRPOConfig.max_completion_length)   # grpo.py's default fits
    model = make_model(tokenizer, positions, seed)
    taken, rollout, rewards = imitate(model, tokenizer, problems, answers, steps, config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    commonest, times = collections.Counter(solutions[:len(problems)]).most_common(1)[0]
    print(f"{folder}: {model.num_parameters():,} weights, {len(tokenizer)} tokens; the commonest solution, "
          f"{commonest!r:.60}, is that of {times / len(problems):.0%} of the problems")
    right, wanted = int(sum(rewards)), len(rewards) // 2
    print(f"{taken} steps of imitation: of {len(rewards)} sampled answers {right} are right"
          + f", not {wanted}" * (right < wanted) + ": GRPO has nothing to learn from" * (right == 0))
    for i in 0, 2, 4:                                                           # the first answers to three problems
        print(grpo.one_line(rollout, i, rewards[i]))
    print("to train it:")
    command = ["python", os.path.relpath(grpo.__file__), "--model", folder, "--dataset", task]
    command += ["--eval_dataset", eval_dataset] if eval_dataset else []
    command += f"--max_completion_length {length} --learning_rate 5e-4 --max_steps 300".split()
    print(shlex.join(command + "--generation_batch_size 128 --per_device_train_batch_size 128".split()))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in "task", "folder", "--eval_dataset":
        parser.add_argument(name)
    parser.add_argument("--imitate", default="solution", dest="column")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(argv)
    if os.path.exists(options.folder):
        parser.error(f"{options.folder} is there already: name another folder, or delete it")
    logging.disable_progress_bar()
    torch.set_num_threads(1)                                            # more hardly pay, with other digits
    make(**vars(options))


if __name__ == "__main__":
    main()

"""A small transformer and a tokenizer for a task of your own, from a file of prompts and solutions.

    python worked_examples/scripts/small_model.py TASK.jsonl FOLDER [--eval_dataset FILE.jsonl] [--imitate COLUMN]
                                                  [--until SHARE] [--steps M] [--seed S]

Each line of TASK.jsonl is like {"prompt": "abcd>", "solution": "dcba"}; a prompt may be a list of messages. The folder
takes a GPT-2 of about 130,000 weights and a tokenizer of the files' characters. GRPO learns from right answers that the
model samples, and random weights have none. So first it imitates the solutions (or a COLUMN of worked answers, as
"<think>7</think>4") for M steps (1000) at most, until a SHARE (0.35) of the way from chance, which is the share of the
commonest answer, to all right is done. An answer is right if it is the COLUMN's, the thought included, and earns
accuracy_reward. The last line printed is the command that trains it: worked_examples/07_training_your_own_model.md.
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
    """A token for each character of the text, for <think> and </think>, and an EOS that pads. Others are errors."""
    words = ["<eos>", *sorted(set(re.sub("</?think>", "", text)))]
    tokenizer = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=None))
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>")
    tokenizer.add_tokens(sorted(set(re.findall("</?think>", text))))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '\n' }}{% endfor %}"
    return tokenizer


def make_model(tokenizer, positions, seed):
    """A GPT-2 of random weights: of five classes tried, the one that learned most from 80 problems on most tasks."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=positions, initializer_range=0.05,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, activation_function="gelu_pytorch_tanh")).eval()


def sample(model, tokenizer, problems, config, number):
    """Two answers to each of a number of problems, the same ones each time; and for each whether it is right."""
    rng = numpy.random.default_rng([config.seed, 3, 0])
    chosen = rng.choice(len(problems), number, replace=len(problems) < number)
    rollout = grpo.sample_rollout(model, tokenizer, [problems[i] for i in chosen], config, rng)
    rewards = grpo.accuracy_reward(rollout.completions, [row["solution"] for row in rollout.examples])
    texts = map(grpo.text_of, rollout.completions)
    return rollout, [float(reward == 1 and text.strip() == row["imitated"].strip())
                     for reward, text, row in zip(rewards, texts, rollout.examples)]


def imitate(model, tokenizer, problems, asked, steps, config):
    """Supervised learning from the problems' answers, until this share is right. Returns how many steps it took."""
    rng = numpy.random.default_rng([config.seed, 2])
    prompts, mask = grpo.encode_prompts(tokenizer, [problem["prompt"] for problem in problems], "cpu")
    answers = tokenizer([row["imitated"] + "<eos>" for row in problems], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps + 1):
        if step == steps or step % 10 == 0 and sum(sample(model, tokenizer, problems, config, 100)[1]) >= 200 * asked:
            return step
        rows = torch.tensor(rng.choice(len(problems), 64))
        real = answers["attention_mask"][rows]
        logps, _ = grpo.per_token_logps(model, prompts[rows], mask[rows], answers["input_ids"][rows], real)
        optimizer.zero_grad()
        (-logps.sum() / real.sum()).backward()
        optimizer.step()


def read(path, column):
    """The rows of a file, each with the text that is imitated; those without one are left out."""
    text = grpo.solution_text if column == "solution" else lambda answer: "" if answer is None else str(answer)
    rows = [row | {"imitated": text(row[column])} for row in (grpo.load_dataset(path) if path else [])]
    missing = [row["prompt"] for row in rows if not row["imitated"]]
    if missing:
        print(f"{path}: {len(missing)} of {len(rows)} rows have no {column}, are left out; the first: {missing[0]!r}")
    return [row for row in rows if row["imitated"]]


def make(task, folder, eval_dataset, column, until, steps, seed):
    """Fill a new folder; print what was made, how many answers are right, and the command that trains the model."""
    problems, held_out = read(task, column), read(eval_dataset, column)
    prompts = [prompt if isinstance(prompt, str) else "".join(message["content"] + "\n" for message in prompt)
               for prompt in (row["prompt"] for row in problems + held_out)]       # as the chat template writes them
    answers = [row["imitated"] for row in problems + held_out]
    tokenizer = make_tokenizer("".join(prompts + answers))
    length = max(map(len, tokenizer(answers)["input_ids"])) + 2                 # the EOS, and one to spare
    config = grpo.GRPOConfig(seed=seed, max_completion_length=length, num_generations=2, generation_batch_size=2)
    model = make_model(tokenizer, max(map(len, prompts)) + max(length, 512), seed)      # grpo.py's default length fits
    (commonest, times), = collections.Counter(answers[:len(problems)]).most_common(1)
    chance = times / len(problems)
    asked = chance + until * (1 - chance)
    print(f"{folder}: {model.num_parameters():,} weights, {len(tokenizer)} tokens; chance: {chance:.0%} of the "
          f"problems have the commonest answer, {commonest!r:.60}; asked for: {asked:.0%}", flush=True)
    taken = imitate(model, tokenizer, problems, asked, steps, config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rollout, right = sample(model, tokenizer, problems, config, 500)
    known = sum(right) / 1000
    new = sum(sample(model, tokenizer, held_out, config, 500)[1]) / 1000 if held_out else known
    verdict = "" if known >= asked or taken < steps else f", not {1000 * asked:.0f}"
    if known < chance + 0.05 * (1 - chance):
        verdict = f": hardly more than chance, so GRPO has {'little' if known else 'nothing'} to learn from"
    elif new - chance < (known - chance) / 2:
        verdict = ": learned by heart; more problems, or fewer steps"
    print(f"{taken} steps of imitation: of 1000 sampled answers to training problems {1000 * known:.0f} are right"
          + f", to held-out ones {1000 * new:.0f}" * bool(held_out) + verdict)
    for i in 0, 2, 4:                                                           # the first answers to three problems
        print(grpo.one_line(rollout, i, right[i]))
    print("to train it:")
    held = ["--eval_dataset", eval_dataset, "--eval_steps", "30"] if eval_dataset else []
    print(shlex.join(["python", os.path.relpath(grpo.__file__), "--model", folder, "--dataset", task, *held]),
          f"--max_completion_length {length} --learning_rate 5e-4 --max_steps 300",
          "--generation_batch_size 128 --per_device_train_batch_size 128")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in "task", "folder", "--eval_dataset":
        parser.add_argument(name)
    parser.add_argument("--imitate", default="solution", dest="column")
    parser.add_argument("--until", type=float, default=0.35)
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

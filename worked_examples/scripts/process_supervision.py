"""Process supervision (DeepSeekMath §4.1.3): a reward for each reasoning step in place of one for the answer.

    python worked_examples/scripts/process_supervision.py

An answer of the tiny task has three steps: <think>7+5=12, then 4+8+1=13</think> then 132<eos>. A step is worth 1 if it
is what a teacher writes who never forgets the carry, else 0. All that is new against outcome supervision is
compute_advantages. It takes half a minute on one core. The flags are grpo.py's.
"""

import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

TOKENIZER = grpo.tiny_tokenizer()


def split_steps(ids):
    """Cut token ids into steps: one ends at a comma, at </think>, and at the last token."""
    ends_a_step = TOKENIZER.convert_tokens_to_ids([",", "</think>"])
    steps = [[]]
    for token in ids:
        steps[-1].append(token)
        if token in ends_a_step:
            steps.append([])
    return [step for step in steps if step]


def compute_advantages(rewards, rollout, config):
    """Line 9 of Algorithm 1 under process supervision, (B, T). The rewards of the whole answers are not used."""
    step_rewards, ends = [], []
    for example, ids, mask in zip(rollout.examples, rollout.completion_ids, rollout.completion_mask):
        trace = grpo.teacher_trace(example["prompt"], forgets_carry=False)
        right = split_steps(TOKENIZER(trace)["input_ids"])
        steps = split_steps(ids[mask != 0].tolist())
        step_rewards.append(torch.tensor([float(right[j:j + 1] == [step]) for j, step in enumerate(steps)]))
        ends.append(torch.tensor([len(step) for step in steps]).cumsum(0) - 1)          # the last token of each
    pad = torch.nn.utils.rnn.pad_sequence
    step_rewards = pad(step_rewards, batch_first=True, padding_value=math.nan)       # (B, S)
    ends = pad(ends, batch_first=True)                                                                 # (B, S)
    return grpo.process_advantages(step_rewards, ends, rollout.completion_mask, config.num_generations)


def learn(name, policy, tokenizer, problems, reward_funcs, held_out, config, compute_advantages):
    """Train, and print the share of right answers before and after. Rewards may be for the metrics alone."""
    before = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)["accuracy_reward"]
    steps = grpo.train(policy, tokenizer, problems, reward_funcs, config, compute_advantages=compute_advantages)
    list(tqdm(steps, name, total=config.max_steps))
    after = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)["accuracy_reward"]
    print(f"{name}: held-out accuracy {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    options, config, _ = grpo.parse_options(["--model", "tiny", *sys.argv[1:]])
    learn("process supervision", *grpo.load_job(options, config), config, compute_advantages)

"""Process supervision (DeepSeekMath §4.1.3): a reward for each reasoning step in place of one for the answer.

    python worked_examples/scripts/process_supervision.py

An answer of the tiny task has three steps: <think>7+5=12, then 4+8+1=13</think> then 132<eos>. A step is worth 1 if it
is what a teacher writes who never forgets the carry, else 0. grpo.process_advantages normalises the rewards of all
steps of a group, and lets each token answer for the steps that end at or after it. All that is new against outcome
supervision is the function step_advantages, which train takes as compute_advantages.

It prints the steps of one answer with their rewards and advantages, greedy answers before and after, and last "held-out
accuracy: A -> B". It takes about a minute on one core.
"""

import argparse
import functools
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo


def split_steps(ids, tokenizer):
    """Cut token ids into steps: one ends at a comma, at </think>, and at the last token."""
    ends_a_step = tokenizer.convert_tokens_to_ids([",", "</think>"])
    steps = [[]]
    for position, token in enumerate(ids):
        steps[-1].append(token)
        if token in ends_a_step and position + 1 < len(ids):
            steps.append([])
    return steps


def grade_steps(prompt, steps, tokenizer):
    """1 for each step that is the teacher's in its place, else 0; a step that the teacher has not is wrong."""
    trace = tokenizer(grpo.teacher_trace(prompt, forgets_carry=False))["input_ids"]
    right = split_steps(trace, tokenizer)
    return [float(j < len(right) and step == right[j]) for j, step in enumerate(steps)]


def step_rewards_and_ends(rollout, tokenizer):
    """The reward of each step and the index of its last token, (B, S) both; NaN where an answer has no such step."""
    rewards, ends = [], []
    for example, ids, mask in zip(rollout.examples, rollout.completion_ids, rollout.completion_mask):
        steps = split_steps(ids[mask != 0].tolist(), tokenizer)
        lengths = torch.tensor([len(step) for step in steps])
        rewards.append(torch.tensor(grade_steps(example["prompt"], steps, tokenizer)))
        ends.append(lengths.cumsum(0) - 1)
    rewards = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True, padding_value=math.nan)       # (B, S)
    ends = torch.nn.utils.rnn.pad_sequence(ends, batch_first=True)                                     # (B, S)
    return rewards.to(rollout.completion_ids.device), ends.to(rollout.completion_ids.device)


def step_advantages(rewards_per_func, rollout, config, tokenizer):
    """Line 9 of Algorithm 1 under process supervision, (B, T). The rewards of the whole answers are not used."""
    rewards, ends = step_rewards_and_ends(rollout, tokenizer)
    return grpo.process_advantages(rewards, ends, rollout.completion_mask, config.num_generations)


def show_an_answer(rollout, config, tokenizer):
    """Print the steps of the first answer that has right and wrong ones."""
    rewards, ends = step_rewards_and_ends(rollout, tokenizer)
    advantages = step_advantages(None, rollout, config, tokenizer)
    mixed = (rewards == 0).any(1) & (rewards == 1).any(1)
    i = int(mixed.long().argmax())                                      # row 0 where there is none
    print(f"one of the first step's answers to {rollout.examples[i]['prompt']}")
    start = 0
    for reward, end in zip(rewards[i].tolist(), ends[i].tolist()):
        if not math.isnan(reward):
            text = tokenizer.decode(rollout.completion_ids[i, start : end + 1])
            print(f"  {text:<20} reward {reward:.0f}   advantage of its tokens {advantages[i, start].item():+.2f}")
            start = end + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()

    torch.set_num_threads(1)                                            # for so small a model, more would wait
    tokenizer = grpo.tiny_tokenizer()
    policy = grpo.tiny_model(tokenizer, options.seed)
    problems, held_out = grpo.tiny_problems(options.seed)
    grpo.cold_start(policy, tokenizer, problems, options.seed)
    config = grpo.GRPOConfig(**grpo.TINY | dict(max_steps=options.max_steps, seed=options.seed))
    print("before:")
    before = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)

    compute_advantages = functools.partial(step_advantages, tokenizer=tokenizer)
    steps = grpo.train(
        policy, tokenizer, problems, [grpo.accuracy_reward], config, compute_advantages=compute_advantages)
    for state, rollout, metrics in (bar := tqdm(steps, "process supervision", total=config.max_steps)):
        bar.set_postfix(accuracy=metrics["reward"])                     # to look at: no advantage comes from it
        if state.step == 1:
            show_an_answer(rollout, config, tokenizer)
    print("after:")
    after = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)
    print(f"held-out accuracy: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()

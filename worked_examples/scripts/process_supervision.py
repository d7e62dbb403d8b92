"""Process supervision (DeepSeekMath §4.1.3): a reward for each reasoning step in place of one for the answer.

    python worked_examples/scripts/process_supervision.py

An answer of the tiny task has three steps: <think>7+5=12, then 4+8+1=13</think> then 132<eos>. A step is worth 1 if it
is what a teacher writes who never forgets the carry, else 0. All that is new against outcome supervision is the
function step_advantages, which train takes as compute_advantages. It takes about a minute on one core.
"""

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
    for token in ids:
        steps[-1].append(token)
        if token in ends_a_step:
            steps.append([])
    return [step for step in steps if step]


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
        rewards.append(torch.tensor(grade_steps(example["prompt"], steps, tokenizer)))
        ends.append(torch.tensor([len(step) for step in steps]).cumsum(0) - 1)
    rewards = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True, padding_value=math.nan)       # (B, S)
    ends = torch.nn.utils.rnn.pad_sequence(ends, batch_first=True)                                     # (B, S)
    return rewards, ends


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
    config, *_ = grpo.parse_options(["--model", "tiny", "--max_steps", "100", *sys.argv[1:]])
    torch.set_num_threads(1)                                            # for so small a model, more would wait
    policy, tokenizer = grpo.load_model("tiny", config.seed)
    problems, held_out = grpo.tiny_problems(config.seed)
    grpo.cold_start(policy, tokenizer, problems, config.seed)
    print("before:")
    before = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)
    steps = grpo.train(policy, tokenizer, problems, [grpo.accuracy_reward], config,     # a reward only for the metrics
                       compute_advantages=functools.partial(step_advantages, tokenizer=tokenizer))
    for state, rollout, _ in tqdm(steps, "process supervision", total=config.max_steps):
        if state.step == 1:
            show_an_answer(rollout, config, tokenizer)
    print("after:")
    after = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)
    print(f"held-out accuracy: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()

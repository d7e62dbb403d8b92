"""Process supervision (DeepSeekMath §4.1.3): a reward for each reasoning step in place of one for the answer.

    python worked_examples/scripts/process_supervision.py

An answer of the tiny task has three steps: <think>7+5=12, then 4+8+1=13</think> then 132<eos>. A step is worth 1 if it
is what a teacher writes who never forgets the carry, else 0. All that is new against outcome supervision is the
function step_advantages, which train takes as compute_advantages. It takes about a minute on one core. The flags are
the fields of GRPOConfig.
"""

import functools
import math
import sys
from pathlib import Path

import torch
import transformers
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


def graded_steps(rollout, i, tokenizer):
    """The steps of answer i, and for each 1 if it is the teacher's in its place, else 0."""
    trace = tokenizer(grpo.teacher_trace(rollout.examples[i]["prompt"], forgets_carry=False))["input_ids"]
    right = split_steps(trace, tokenizer)
    steps = split_steps(rollout.completion_ids[i][rollout.completion_mask[i] != 0].tolist(), tokenizer)
    return steps, [float(right[j:j + 1] == [step]) for j, step in enumerate(steps)]


def step_advantages(rewards_per_func, rollout, config, tokenizer):
    """Line 9 of Algorithm 1 under process supervision, (B, T). The rewards of the whole answers are not used."""
    rewards, ends = [], []
    for i in range(len(rollout.examples)):
        steps, rewards_of_steps = graded_steps(rollout, i, tokenizer)
        rewards.append(torch.tensor(rewards_of_steps))
        ends.append(torch.tensor([len(step) for step in steps]).cumsum(0) - 1)          # the last token of each
    rewards = torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True, padding_value=math.nan)       # (B, S)
    ends = torch.nn.utils.rnn.pad_sequence(ends, batch_first=True)                                     # (B, S)
    return grpo.process_advantages(rewards, ends, rollout.completion_mask, config.num_generations)


def show_an_answer(rollout, advantages, tokenizer):
    """Print the steps of the answer with the worst one: the reward of each, and the advantage of its tokens."""
    i, end = int(advantages.amin(1).argmin()), 0
    print("an answer of the first step:", rollout.examples[i]["prompt"])
    for step, reward in zip(*graded_steps(rollout, i, tokenizer)):
        end += len(step)
        print(f"  {tokenizer.decode(step):<20} reward {reward:.0f}   advantage {advantages[i, end - 1].item():+.2f}")


def main():
    parser = transformers.HfArgumentParser(grpo.GRPOConfig)
    parser.set_defaults(**grpo.TINY | {"max_steps": 100})
    config, = parser.parse_args_into_dataclasses()
    torch.set_num_threads(1)                                            # for so small a model, more would wait
    policy, tokenizer = grpo.load_model("tiny", config.seed)
    problems, held_out = grpo.tiny_problems(config.seed)
    grpo.cold_start(policy, tokenizer, problems, config.seed)
    print("before:")
    before = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)
    compute_advantages = functools.partial(step_advantages, tokenizer=tokenizer)
    steps = grpo.train(policy, tokenizer, problems, [grpo.accuracy_reward], config,     # a reward only for the metrics
                       compute_advantages=compute_advantages)
    for state, rollout, _ in tqdm(steps, "process supervision", total=config.max_steps):
        if state.step == 1:
            show_an_answer(rollout, compute_advantages(None, rollout, config), tokenizer)
    print("after:")
    after = grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)
    print(f"held-out accuracy: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()

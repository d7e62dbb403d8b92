"""One GRPO step on the tiny model, cell by cell: for a debugger, or for an editor that runs `# %%` cells.

    python worked_examples/scripts/walkthrough.py

This is one step of grpo.train, along the lines of Algorithm 1. Each cell says what to expect, then prints it. The
numbers differ between kinds of processors, because rounding errors grow over the cold start, which takes most of the
time. To see the same in grpo.py's own loop, `python -m pdb grpo.py --model tiny`, then:

    b clipped_surrogate_loss, (ratio - 1).abs().max() > 0.01
    c
    p ratio.aminmax()

stops in the second update, where ratios are not 1 any more; two frames up (u 2), train has rewards, A, m and logps.
"""

# %% The parts: a model of 105,280 random weights, a tokenizer, problems with their solutions.
# Expect one token for each character of a prompt.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy
import torch

import grpo

torch.set_num_threads(1)                                                  # the model is too small for more
G = 8
config = grpo.GRPOConfig(num_generations=G, generation_batch_size=64, max_completion_length=28, learning_rate=1e-4,
                         loss_type="grpo", beta=0.04)
policy, tokenizer = grpo.load_model("tiny", seed=0)
problems, _ = grpo.tiny_problems(seed=0)
print(problems[0], tokenizer(problems[0]["prompt"])["input_ids"])

# %% The cold start: the policy imitates a teacher who mostly forgets the carry. Line 3: here it is the reference, too.
grpo.cold_start(policy, tokenizer, problems, seed=0)

# %% Lines 5 and 7: a batch of P = 8 questions, G = 8 answers to each, so B = 64 answers.
# Expect complete answers of about 20 tokens; where there is a carry, it is often forgotten.
rng = numpy.random.default_rng([config.seed, 3, 0])                       # seed, a number of train's own, the step
examples = [problems[i] for i in rng.choice(len(problems), 64 // G, replace=False)]
rollout = grpo.sample_rollout(policy, tokenizer, examples, config, rng)
mask = rollout.completion_mask                                                                                # (B, T)
for example, text in zip(rollout.examples[::G], rollout.completions[::G]):
    print(example["prompt"] + text)
assert rollout.terminated.float().mean() > 0.9

# %% Line 8: reward each answer: 1 for the right number, and 1 for the form, which nearly all have.
accuracy = grpo.accuracy_reward(rollout.completions, [example["solution"] for example in rollout.examples])
form = grpo.think_format_reward(rollout.completions)
rewards = grpo.combine_rewards(torch.tensor([accuracy, form]).T)                                              # (B,)
print("rewards, a line for each group:", *rewards.view(-1, G).tolist(), sep="\n")
assert sum(form) > 0.9 * 64 and 0.1 * 64 < sum(accuracy) < 0.9 * 64

# %% Line 9: compare an answer with the others to its question. Expect groups of sum 0, zeros where rewards are equal.
mean, std = grpo.group_stats(rewards, G)                                                                      # (P,)
advantages = grpo.group_advantages(rewards, G)                                                                # (B,)
print("means:", mean.tolist(), "stds:", std.tolist())
groups = advantages.view(-1, G)                                                                               # (P, G)
assert groups.sum(1).abs().max() < 1e-5 and not groups[std == 0].any() and groups.any()

# %% Line 6: π_old ← π_θ. No weights are copied: the answers are scored before the first update, without a gradient, and
# log π_old of each token is kept. Expect the sampler's own numbers, up to rounding.
inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, mask)
with torch.no_grad():
    old_logps, _ = grpo.per_token_logps(policy, *inputs)                                                      # (B, T)
print("greatest difference to the sampler:", ((old_logps - rollout.sampler_logps) * mask).abs().max().item())
torch.testing.assert_close(old_logps, rollout.sampler_logps, atol=1e-4, rtol=0)

# %% Line 10: score them once more, with a gradient, and take the loss. The policy has not moved since it was π_old and
# the reference: expect ratios of 1, a loss and a KL of 0, no clipped token. The gradient is not 0: the next cell.
logps, _ = grpo.per_token_logps(policy, *inputs)                                                              # (B, T)
options = dict(old_logps=old_logps, ref_logps=old_logps, beta=config.beta, loss_type=config.loss_type)
loss, metrics = grpo.grpo_loss(logps, advantages, mask, **options)
print(f"loss {loss.item():.6f}, {metrics}")
assert abs(loss.item()) < 1e-5 and metrics["clip_ratio/region_mean"] == metrics["kl"] == 0.0

# %% Line 11: one update. The value of the loss is 0; expect a gradient that is not 0.
optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=0.0)
optimizer.zero_grad()                                                     # the cold start has left a gradient
loss.backward()
grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).item()
print("gradient norm:", grad_norm)
assert grad_norm > 0.01
optimizer.step()

# %% The loss of a second update on the same answers. Expect ratios on both sides of 1: answers above their group's mean
# have become more likely. Expect a loss below 0, because the policy has moved the right way, and a KL a little above 0.
logps, _ = grpo.per_token_logps(policy, *inputs)                                                              # (B, T)
change = ((logps - old_logps) * mask).sum(1)                                                                  # (B,)
loss, metrics = grpo.grpo_loss(logps, advantages, mask, **options)
print(f"mean change of an answer's log-prob: {change[advantages > 0].mean():+.3f} where A > 0, "
      f"{change[advantages < 0].mean():+.3f} where A < 0; loss {loss.item():.5f}, {metrics}")
assert change[advantages > 0].mean() > 0 > change[advantages < 0].mean()
assert loss.item() < 0 < metrics["clip_ratio/region_mean"] < 0.2 and 0 < metrics["kl"] < 0.1

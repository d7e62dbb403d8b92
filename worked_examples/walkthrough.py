"""One GRPO step on the tiny model, cell by cell: for a debugger, or for an editor that runs `# %%` cells.

    python worked_examples/walkthrough.py
"""

# %% The parts: a model of 105,280 random weights, a tokenizer of one token a character, problems with their solutions
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import grpo

torch.manual_seed(0)
tokenizer = grpo.tiny_tokenizer()
policy = grpo.tiny_model(tokenizer, seed=0)
problems, _ = grpo.tiny_problems(seed=0)
print(problems[0], tokenizer(problems[0]["prompt"])["input_ids"])

# %% A short cold start, so that some answers are right; a real run takes 200 steps
grpo.cold_start(policy, tokenizer, problems, seed=0, steps=120)
policy.eval()
reference = copy.deepcopy(policy)                                         # π_ref: stays as it is

# %% Sample G = 8 answers to each of P = 2 questions: B = 16 rows. The policy as it stands is π_old
G, batch = 8, problems[:2]
prompt_ids, prompt_mask = grpo.encode_prompts(tokenizer, [row["prompt"] for row in batch], "cpu")
completion_ids, mask, sampling_logps, entropies = grpo.generate(
    policy, prompt_ids, prompt_mask, max_completion_length=28, num_generations=G, uniforms=torch.rand(16, 28),
    eos_token_ids=grpo.eos_token_ids(policy, tokenizer), pad_token_id=tokenizer.pad_token_id)
completions = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
print(*(f"{row['prompt']}{text}" for row, text in zip(batch, completions[::G])), sep="\n")
print("lengths with EOS:", mask.sum(1).tolist())
assert completion_ids.shape == mask.shape == sampling_logps.shape and mask.any(1).all()

# %% Reward each answer: 1 for the right number, 1 for the form
solutions = [row["solution"] for row in batch for _ in range(G)]
per_func = torch.tensor([grpo.accuracy_reward(completions, solutions), grpo.think_format_reward(completions)]).T       # (B, F)
rewards = grpo.combine_rewards(per_func)                                                                              # (B,)
print("rewards:", rewards.view(2, G).tolist())

# %% Compare each answer with the others to its own question
mean, std = grpo.group_stats(rewards, G)
advantages = grpo.group_advantages(rewards, G)                                                                        # (B,)
print("means:", mean.tolist(), "stds:", std.tolist())
assert advantages.view(2, G).sum(1).abs().max() < 1e-5                    # a group says who was better, not how good all were
assert advantages.any(), "all answers alike: nothing to learn"
per_token = grpo.broadcast_advantages(advantages, mask)                                                               # (B, T)
assert torch.equal(per_token[:, 0], advantages) and not per_token[mask == 0].any()

# %% Score the answers with the same weights: log π_θ(o_t). The sampler recorded the same numbers, up to rounding
prompts = prompt_ids.repeat_interleave(G, 0), prompt_mask.repeat_interleave(G, 0)
logps, _ = grpo.per_token_logps(policy, *prompts, completion_ids, mask)                                               # (B, T)
old_logps = logps.detach()
print("greatest difference to the sampler:", ((logps - sampling_logps) * mask).abs().max().item())
torch.testing.assert_close(logps.detach(), sampling_logps, atol=1e-4, rtol=0)

# %% The loss on-policy: every ratio is 1, so its value is about 0, and its gradient is not
ref_logps = old_logps                                                     # the reference still equals the policy: KL = 0
options = dict(ref_logps=ref_logps, beta=0.04, loss_type="grpo")
loss, metrics = grpo.grpo_loss(logps, advantages, mask, old_logps=old_logps, **options)
print(f"loss {loss.item():.6f}, {metrics}")
assert abs(loss.item()) < 1e-5 and metrics["clip_ratio/region_mean"] == metrics["kl"] == 0.0

# %% The same number by hand: ratio, surrogate, mean over each answer's tokens, mean over the answers
ratio = grpo.importance_ratio(logps, old_logps, mask)
per_token_loss = grpo.clipped_surrogate_loss(ratio, advantages)
by_hand = sum((per_token_loss[i] * mask[i]).sum() / mask[i].sum() for i in range(16)) / 16
torch.testing.assert_close(by_hand, loss)

# %% One step of gradient descent
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
loss.backward()
print("gradient norm:", torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).item())
assert policy.transformer.wte.weight.grad.any()
optimizer.step()

# %% What has it done? The answers above their group's mean have become likelier, the others less likely
new_logps, _ = grpo.per_token_logps(policy, *prompts, completion_ids, mask)
change = ((new_logps - old_logps) * mask).sum(1).detach()
for group in range(2):
    rows = slice(group * G, group * G + G)
    print(*(f"A = {a:+.2f}: log-prob {c:+.3f}" for a, c in zip(advantages[rows].tolist(), change[rows].tolist())), sep="\n")
assert (change * advantages).sum() > 0                                    # the step went uphill

# %% A second update on the same answers sees ratios other than 1; now there is something to clip, and a KL
loss, metrics = grpo.grpo_loss(new_logps, advantages, mask, old_logps=old_logps, **options)
ratio = grpo.importance_ratio(new_logps, old_logps, mask)[mask == 1]
print(f"ratios {ratio.min().item():.3f} ... {ratio.max().item():.3f}, loss {loss.item():.5f}, {metrics}")
assert ratio.min() < 1 < ratio.max() and metrics["kl"] > 0.0
with torch.no_grad():
    kl = grpo.kl_estimate(new_logps, grpo.per_token_logps(reference, *prompts, completion_ids, mask)[0])
assert metrics["kl"] == ((kl * mask).sum() / mask.sum()).item() and (kl >= 0).all()

"""What GRPO is compared with, and weights for its advantages: PPO, RLOO, a teacher, DAPO's punishment, entropy.

The functions are as pure as those of grpo.py, whose notation they use (B, T, G, m, nats). Advantages reach the loop of
grpo.py through train(..., compute_advantages=f), where f(rewards, rollout, config) makes (B, T) of the r_i, (B,). A
weight w >= 0 of a token multiplies the token's advantage, because w·l(ρ, A) = l(ρ, w·A) for each l of grpo.py.
"""

import torch

import grpo


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """Make a reward function that punishes an answer of n tokens for its length.

    r(n) = 0 for n <= L - c;  (L - c - n) / c for L - c < n <= L;  -1 for n > L.
    Source: DAPO (arXiv:2503.14476) eq. 13. Args: max_completion_len L, soft_punish_cache c, 0 <= c <= L, in tokens.
    """
    L, c = max_completion_len, soft_punish_cache
    assert 0 <= c <= L, f"soft_punish_cache: got {c}; allowed is 0 ... {L}"

    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (L - c - len(ids)) / max(c, 1))) for ids in completion_ids]

    return soft_overlong_punishment_reward


def leave_one_out_advantages(rewards, num_generations):
    """Compare each answer with the mean of the other answers in its group.

    A_i = r_i - 1/(G-1)·Σ_{j≠i} r_j = (r_i - mean)·G/(G-1).
    Under "dr_grpo", on-policy, a baseline without the answer itself adds no bias; GRPO's mean scales the gradient by
    (G-1)/G. A reward of NaN is in neither the mean nor G.
    Source: RLOO (Kool et al. 2019; arXiv:2402.14740). Returns: (B,), 0 for a reward of NaN.
    """
    centered = grpo.group_advantages(rewards, num_generations, scale_rewards="none")      # (B,)
    scored = (~rewards.isnan()).view(-1, num_generations).sum(1).to(centered)             # (P,)
    factor = scored / (scored - 1).clamp(min=1)                                           # G/(G-1) where none is NaN
    return centered * factor.repeat_interleave(num_generations)


def maxrl_advantages(rewards, num_generations):
    """Divide by the group's mean instead of its std: if few answers are right, a right one weighs more.

    A_i = (r_i - mean) / mean, 0 at mean 0. Of G answers k right (1, the others 0): G/k - 1 for a right one, -1 for a
    wrong one. Source: MaxRL (arXiv:2602.02710). Args: rewards >= 0 or NaN. Returns: (B,), 0 for a reward of NaN.
    """
    assert not (rewards < 0).any(), f"rewards: got {rewards.min()}; allowed is 0 or more"
    mean, _ = grpo.group_stats(rewards, num_generations)                                  # (P,)
    centered = grpo.group_advantages(rewards, num_generations, scale_rewards="none")      # (B,)
    return torch.where(centered == 0, 0, centered / mean.repeat_interleave(num_generations))


def distillation_advantages(teacher_logps, logps, completion_mask):
    """Let a teacher rate each token that the student has sampled (on-policy distillation), instead of a reward.

    A_t = log π_teacher(o_t) - log π_θ(o_t), a constant; above 0 where the teacher finds the token likelier.
    On-policy, a token's gradient is, on average over the token, ∇KL(π_θ‖π_teacher) times its weight in aggregate. The
    teacher is another model, which the policy approaches; π_ref is an earlier policy, near which it stays.
    Source: MiniLLM (arXiv:2306.08543) §2.2, its reward of one token; TRL's MiniLLMTrainer with its default gamma of 0.
    Returns: (B, T), 0 at padding.
    """
    assert teacher_logps.shape == logps.shape == completion_mask.shape, (
        f"teacher_logps: got {teacher_logps.shape}; allowed is {logps.shape}, the mask's {completion_mask.shape}")
    return torch.where(completion_mask != 0, teacher_logps - logps, 0).detach()


def gae_advantages(rewards, values, completion_mask, *, gamma=1.0, lam=0.95):
    """Estimate PPO's advantages with a critic's values (generalized advantage estimation). GRPO has no critic.

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t;  V and A are 0 after the end.
    λ = 0 trusts the critic's values V (more bias), λ = 1 the observed rewards (more variance).
    Source: Schulman et al. (arXiv:1506.02438) eq. 16. Args: rewards, values (B, T), right-padded.
    Returns: advantages and returns, both (B, T), 0 at padding.
    """
    assert rewards.shape == values.shape == completion_mask.shape, (
        f"values: got {values.shape}; allowed is {rewards.shape}, as completion_mask's {completion_mask.shape}")
    rewards, values = (x.masked_fill(completion_mask == 0, 0) for x in (rewards, values))
    delta = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values     # (B, T)
    advantages = torch.zeros_like(delta)
    advantage = torch.zeros_like(delta[:, 0])                                             # (B,)
    for t in reversed(range(delta.size(1))):
        advantage = delta[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages, advantages + values


def kl_penalized_rewards(scores, logps, ref_logps, completion_mask, *, beta):
    """Make PPO's token rewards: a KL penalty at every token, the answer's score at the last one.

    r_t = -β·(log π_θ - log π_ref) + [t is the last real token]·score.
    Source: DeepSeekMath eq. 2. GRPO has the KL in the loss instead, where the group's std does not divide it.
    Args: scores (B,), the r_i. Returns: (B, T) in reward units, 0 at padding.
    """
    assert scores.shape == logps.shape[:1], f"scores: got {scores.shape}; allowed is {logps.shape[:1]}"
    assert completion_mask.shape == logps.shape, (
        f"completion_mask: got {completion_mask.shape}; allowed is {logps.shape}")
    mask = completion_mask != 0
    penalty = torch.where(mask, -beta * grpo.kl_estimate(logps, ref_logps, estimator="k1"), 0)            # (B, T)
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))                                        # (B, T)
    return penalty + torch.where(is_last, scores.unsqueeze(1), 0)


def top_entropy_mask(entropies, completion_mask, quantile):
    """Keep the tokens at which the policy is least sure: about the top fraction of the real tokens by entropy.

    mask_t = 1 where H_t >= the (1 - quantile)-quantile of the real tokens' H, interpolated; ties are kept.
    Source: Wang et al. (arXiv:2506.01939), who train on the top 20%; TRL's top_entropy_quantile.
    Args: entropies (B, T); quantile, the fraction (0.3 of 5 tokens keeps 2). Returns: (B, T), bool.
    """
    assert entropies.shape == completion_mask.shape, (
        f"entropies: got {entropies.shape}; allowed is {completion_mask.shape}")
    mask = completion_mask != 0
    threshold = entropies[mask].double().quantile(1 - quantile)
    return mask & (entropies >= threshold)


def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0):
    """Correct for a sampler whose log-probs differ slightly from the trainer's (other engine, precision).

    w = min(exp(log π_old - log π_sampler), cap), of any shape; a constant (detach) that weights the advantages.
    Source: Yao et al. 2025 (fengyao.notion.site/off-policy-rl); TRL's vllm_importance_sampling_mode token_truncate.
    """
    assert old_logps.shape == sampling_logps.shape, (
        f"sampling_logps: got {sampling_logps.shape}; allowed is {old_logps.shape}")
    return (old_logps - sampling_logps).exp().clamp(max=cap).detach()

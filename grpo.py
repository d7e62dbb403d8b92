"""grpo.py: Group Relative Policy Optimization, its equations as pure functions.

A language model (the policy) answers each prompt G times; these answers are a group. Each answer gets a
score. If it is above the group's mean, the answer's tokens are pushed up; if below, down.
§1-§7 lead from rewards to the loss, §8 has variants, §9 samples, §10 is Algorithm 1, §11 the command line.

    python grpo.py --model tiny
    python grpo.py --model NAME_OR_FOLDER --dataset FILE.jsonl --reward_funcs accuracy

Notation (DeepSeekMath, arXiv:2402.03300, "the paper" below)
    symbol          name in code             shape   meaning
    q, o_i          prompt, completion               a question and one of its G sampled answers
    G               num_generations                  answers for each prompt
    P, B            -                                prompts; rows, B = P·G (row i belongs to prompt i // G)
    L, T            -                                tokens of the longest prompt, of the longest completion
    T_max           max_completion_length            the limit of sampling, T <= T_max
    V, S, F         -                                vocabulary, reasoning steps, reward functions
    r_i             rewards                  (B,)    score of an answer, summed over the reward functions
    A_i, A_{i,t}    advantages               (B,)    how much better than the group's mean; or (B, T)
    log π_θ         logps                    (B, T)  log-prob of each sampled token, policy in training (nats)
    log π_old       old_logps                (B, T)  the same under the policy before the step's first update
    log π_ref       ref_logps                (B, T)  the same under the reference, a frozen earlier copy
    m               completion_mask          (B, T)  1 = real token (the EOS included), 0 = padding
    ρ               ratio                    (B, T)  π_θ / π_old; 1 while on-policy (π_θ = π_old)
    ε_low, ε_high   epsilon_low, epsilon_high        clip range 1 - ε_low ... 1 + ε_high
    β, μ            beta, num_iterations             weight of the KL term; passes over one batch of samples

The paper maximises J; the loss here is -J. Most defaults are TRL's: "dapo", β = 0, one update on each batch.
With one update ρ = 1 and nothing clips. The value of the loss is then a mean of -A and says little, but its
gradient is a mean of -A·∇log π: the policy learns. --preset deepseekmath is the paper's loss.

The Args of a docstring leave out what the table explains. A mask may be bool, integer or float; values at
padding positions, even NaN, affect no result and no gradient. An unknown word, or in grpo_loss a shape that
does not fit that of logps, is an error that names the argument. Left out on purpose: inference servers, LoRA,
images, tools, value networks, more than one GPU, and top-k or top-p sampling, which changes the log-probs.
"""

import copy
import importlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args

import numpy
import torch
from tqdm import tqdm

# §1 Rewards -----------------------------------------------------------------------------------------------

def combine_rewards(rewards_per_func, reward_weights=None):
    """Add up the rewards of all functions: r_i = Σ_f w_f·r_{i,f}, over the functions that did not abstain.

    Args: rewards_per_func (B, F), NaN where a function returned None; reward_weights (F,), None: 1 each.
    Source: TRL's GRPOTrainer (weighted nansum). Returns: (B,); an error names rows in which all abstained.
    """
    reward_weights = [1.0] * rewards_per_func.size(1) if reward_weights is None else reward_weights
    unscored = rewards_per_func.isnan().all(1).nonzero()[:, 0].tolist()
    assert not unscored, f"rewards_per_func: got no reward in rows {unscored}; allowed is one or more in each"
    dtype = torch.result_type(rewards_per_func, 1.0)                    # integers become floats
    weights = torch.as_tensor(reward_weights, dtype=dtype, device=rewards_per_func.device)              # (F,)
    assert weights.shape == rewards_per_func.shape[1:], f"reward_weights: got {weights}; allowed is (F,)"
    return (rewards_per_func * weights).nansum(1)                                         # (B,)


# §2 Group statistics and advantages -----------------------------------------------------------------------

def group_stats(rewards, num_generations, *, correction=1):
    """Compute the mean and the standard deviation of the rewards of each group.

    mean = 1/G·Σ r_i,  std = √(Σ (r_i - mean)² / (G - correction)).
    correction (below num_generations): 1 is Bessel's, as in TRL; DeepSeekMath §4.1.2 does not say.
    Returns: (P,), (P,); of a silent group, whose rewards are all equal, exactly that reward and 0.
    """
    assert rewards.dim() == 1, f"rewards: got {rewards.shape}; allowed is (B,)"
    assert num_generations > correction and len(rewards) % num_generations == 0, (
        f"num_generations: got {num_generations}; allowed is a divisor of {len(rewards)} above {correction}")
    groups = rewards.reshape(-1, num_generations)                                         # (P, G)
    silent = groups.amax(1) == groups.amin(1)           # by rounding the mean of eight times 0.1 is not 0.1
    mean = torch.where(silent, groups[:, 0], groups.mean(1))                              # (P,)
    std = torch.where(silent, 0, groups.std(1, correction=correction))                    # (P,)
    return mean, std


def group_advantages(rewards, num_generations, *, scale_rewards="group", correction=1, eps=1e-4):
    """Compare each answer with the mean of its group.

    "group": A_i = (r_i - mean) / (std + eps), mean and std of the group; eps in reward units.
    "batch": the same mean, and the std of the whole batch.
    "none":  A_i = r_i - mean, because 1 / std inflates groups that are nearly all right or all wrong.
    Source: DeepSeekMath §4.1.2, without eps (TRL 1e-4, verl 1e-6); "none": Dr. GRPO (arXiv:2503.20783) §3.1.
    Args: as in group_stats. Returns: (B,), exactly 0 in a silent group.
    """
    mean, std = group_stats(rewards, num_generations, correction=correction)              # (P,), (P,)
    centred = rewards - mean.repeat_interleave(num_generations)                           # (B,)
    if scale_rewards == "group":
        scale = std.repeat_interleave(num_generations) + eps                              # (B,)
    elif scale_rewards == "batch":
        scale = group_stats(rewards, len(rewards), correction=correction)[1] + eps        # (1,)
    elif scale_rewards == "none":
        scale = 1.0
    else:
        raise ValueError(f"scale_rewards: got {scale_rewards!r}; allowed is 'group', 'batch' or 'none'")
    return torch.where(centred == 0, 0, centred / scale)            # a silent group: 0, not 0/0 at eps = 0


def broadcast_advantages(advantages, completion_mask):
    """Give every token the advantage of its answer, A_{i,t} = A_i (outcome supervision); 0 at padding.

    Source: DeepSeekMath §4.1.2. From (B,) to (B, T).
    """
    assert advantages.shape == completion_mask.shape[:1], f"advantages: got {advantages.shape}; allowed: (B,)"
    return torch.where(completion_mask != 0, advantages.unsqueeze(1), 0)                  # (B, T)


# §3 Log-probabilities -------------------------------------------------------------------------------------

def make_completion_mask(completion_ids, eos_token_ids):
    """Mark the real tokens: m_t = 1 if there is no EOS before t, else 0.

    The first EOS counts as real; without it the choice to stop, where it was made, has no gradient.
    Args: completion_ids (B, T); eos_token_ids: an id, a list or a tensor. Returns: (B, T), int64.
    Source: TRL's GRPOTrainer. Gotcha: the pad id plays no part, because it is often the EOS id itself.
    """
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()                      # no EOS before t


def selective_log_softmax(logits, index):
    """Take the log-prob of one token at each position: log p(index) = logit(index) - log Σ_v exp(logit(v)).

    Source: TRL's function of the same name. From (B, T, V) and (B, T) to (B, T), in nats.
    """
    assert index.shape == logits.shape[:-1], f"index: got {index.shape}; allowed is {logits.shape[:-1]}"
    logps = logits.log_softmax(-1)                                                        # (B, T, V)
    return logps.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)                       # (B, T)


def entropy_from_logits(logits):
    """Measure how open the choice of the next token is, in nats: H = -Σ_v p_v·log p_v, p = softmax(logits).

    Source: Shannon 1948. From (B, T, V) to (B, T). A logit of -inf rules a token out.
    """
    logps = logits.log_softmax(-1)                                                        # (B, T, V)
    return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0)).sum(-1)             # 0·log 0 = 0


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    """Score completions with a Hugging Face causal LM: log π(o_t | q, o_<t) at every real token.

    log π = log softmax(logits / temperature)[o_t]: the temperature must be the sampler's.
    Source: TRL's _get_per_token_logps_and_entropies. One pass: use_cache=False, logits_to_keep = T + 1.
    Args: prompt_ids, prompt_mask (B, L), left-padded; completion_* (B, T), right-padded.
    Returns: logps (B, T), float32 or wider, 0 at padding; entropies likewise, without gradient, or None.
    """
    assert prompt_mask[:, -1].all(), "prompt_mask: got a row that ends in padding; allowed is left-padded"
    mask = torch.cat([prompt_mask != 0, completion_mask != 0], 1).long()                  # (B, L+T)
    holes = mask[:, prompt_ids.size(1):].diff(dim=1) > 0
    assert not holes.any(), "completion_mask: got a row with a hole; allowed is ones, then zeros"
    ids = torch.cat([prompt_ids, completion_ids], 1).long() * mask                        # 0 at padding
    positions = (mask.cumsum(1) - 1).clamp(min=0)                       # 0 is each row's first real token
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False,
                   logits_to_keep=completion_ids.size(1) + 1)
    logits = output.logits[:, :-1]              # (B, T, V): position t - 1 predicts token t; drop the last
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    padding = completion_mask == 0                                                        # (B, T)
    logps = selective_log_softmax(logits, ids[:, prompt_ids.size(1):])                    # (B, T)
    entropies = entropy_from_logits(logits.detach()).masked_fill(padding, 0) if compute_entropy else None
    return logps.masked_fill(padding, 0), entropies


# §4 Importance ratio and clip -----------------------------------------------------------------------------

def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """Measure how much more likely the sampled tokens have become since π_old.

    "token":    ρ_{i,t} = π_θ(o_t) / π_old(o_t) = exp(log π_θ - log π_old); its gradient is ρ·∇log π_θ.
    "sequence": s_i = exp(1/|o_i|·Σ_t log ρ_{i,t}), the geometric mean of the answer's token ratios.
    Source: DeepSeekMath eq. 3; GSPO (arXiv:2507.18071) eq. 7. Returns: (B, T), 1 at padding; or (B, 1).
    """
    mask = completion_mask != 0
    assert old_logps.shape == mask.shape == logps.shape, f"old_logps, completion_mask: allowed: {logps.shape}"
    log_ratio = torch.where(mask, logps - old_logps, 0)                                   # (B, T)
    if importance_sampling_level == "token":
        return log_ratio.exp()                                                            # (B, T)
    if importance_sampling_level == "sequence":
        return (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()        # (B, 1)
    raise ValueError(f"importance_sampling_level: got {importance_sampling_level}; allowed: token, sequence")


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """Limit the ratio, of any shape: the further π_θ is from π_old, the less the samples say about it.

    clip(ρ) = min(max(ρ, 1 - ε_low), 1 + ε_high). What it does to the gradient: see the next function.
    Source: DeepSeekMath eq. 3, where ε_low = ε_high; DAPO (arXiv:2503.14476) §3.1 raises ε_high alone.
    """
    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    """Push tokens of good answers up and tokens of bad ones down, up to the edge of the clip range.

    l = -min(ρ·A, clip(ρ)·A). Its gradient:
                 ρ < 1 - ε_low     inside the range     ρ > 1 + ε_high
        A > 0    -A·∇ρ             -A·∇ρ                0, clipped
        A < 0    0, clipped        -A·∇ρ                -A·∇ρ
    It is 0 where the token has already moved far enough in the direction of A. It is full where the token has
    moved in the other direction: the token has to come back. At A < 0 and ρ > 1 + ε_high, l has no bound;
    delta (at least 1 + ε_high) replaces the unclipped ρ by min(ρ, δ), with gradient 0 beyond δ.
    Source: DeepSeekMath eq. 3; delta: INTELLECT-2 (arXiv:2505.07291). Args: each (B, T) or (B, 1).
    """
    assert advantages.dim() == ratio.dim(), f"advantages: got {advantages.shape}; allowed is (B, 1) or (B, T)"
    unclipped_ratio = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(unclipped_ratio * advantages, clip_ratio(ratio, epsilon_low, epsilon_high) * advantages)


# §5 KL ----------------------------------------------------------------------------------------------------

def kl_estimate(logps, ref_logps, *, estimator="k3"):
    """Estimate KL(π_θ‖π_ref) in nats at each sampled token. Any shape.

    k1 = log π_θ - log π_ref,  k2 = ½·k1²,  k3 = exp(-k1) + k1 - 1 >= 0. Means over one token of π_θ; the
    text before it and its weight in the loss are fixed:
              value      gradient by autograd, which does not see that the samples depend on θ
        k1    KL         0: as a loss, noise alone
        k2    biased     ∇KL(π_θ‖π_ref)
        k3    KL         ∇KL(π_ref‖π_θ), the paper's choice
    Source: DeepSeekMath eq. 4; Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.
    """
    assert logps.shape == ref_logps.shape, f"ref_logps: got {ref_logps.shape}; allowed is {logps.shape}"
    k1 = logps - ref_logps
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    if estimator == "k3":
        return torch.expm1(-k1) + k1                                    # exp(x) - 1, exact for small x
    raise ValueError(f"estimator: got {estimator!r}; allowed is 'k1', 'k2' or 'k3'")


# §6 The aggregations --------------------------------------------------------------------------------------

def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Add up the token losses, each divided by a number; the variants differ in this denominator alone.

    "grpo":    1/B·Σ_i (Σ_t l·m / Σ_t m)   a token weighs 1/(B·|o_i|): less in a long answer
    "bnpo":    Σ l·m / Σ m of these rows   a token weighs 1 / (the tokens of this part of the batch)
    "dr_grpo": Σ l·m / (B·T_max)           a token weighs 1/(B·T_max) in each step: long answers pull more
    "dapo":    Σ l·m / N                   a token weighs 1/N, with N the tokens of the whole update's mask
    If a batch is split, give each part the whole batch's B (num_rows_in_batch) and N (num_items_in_batch):
    the losses of the parts then add up to the loss of the whole. "bnpo" ignores both; train has no bnpo.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3 (N of a group).
    Args: per_token_loss (B, T), or (B, 1): one loss per answer. A row without tokens adds 0, and counts in B.
    """
    mask = completion_mask != 0
    assert per_token_loss.shape in (mask.shape, (len(mask), 1)), f"per_token_loss: got {per_token_loss.shape}"
    per_token_loss = torch.where(mask, per_token_loss, 0)                                 # (B, T)
    lengths = mask.sum(1)                                                                 # (B,)
    num_tokens = lengths.sum().clamp(min=1)                             # without a token: 0, not 0/0
    num_rows = num_rows_in_batch or max(len(mask), 1)
    if loss_type == "grpo":
        return (per_token_loss.sum(1) / lengths.clamp(min=1)).sum() / num_rows
    if loss_type == "bnpo":
        return per_token_loss.sum() / num_tokens
    if loss_type == "dapo":
        return per_token_loss.sum() / (num_items_in_batch or num_tokens)
    if loss_type != "dr_grpo":
        raise ValueError(f"loss_type: got {loss_type!r}; allowed is 'grpo', 'bnpo', 'dr_grpo' or 'dapo'")
    if max_completion_length is None:
        raise ValueError("max_completion_length: got None; allowed with dr_grpo is the limit of sampling")
    return per_token_loss.sum() / (num_rows * max_completion_length)


# §7 The loss ----------------------------------------------------------------------------------------------

def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, beta=0.0,
              epsilon_low=0.2, epsilon_high=None, delta=None, loss_type="dapo", policy_loss="clip",
              importance_sampling_level="token", use_bias_correction_kl=False, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Compute the GRPO loss from the functions above: loss = aggregate(l(ρ, A) + β·KL).

    Source: DeepSeekMath eq. 3; the order of the terms and the names of the metrics are TRL's.
    Args: advantages (B,) or (B, T). old_logps (None while on-policy), ref_logps (for beta > 0): constants.
        policy_loss: which l, clip, cispo or sapo. epsilon_high: None is epsilon_low, or 5.0 with cispo, where
        it caps ρ. use_bias_correction_kl: ρ·KL (arXiv:2512.02556) replaces KL; at sequence level s_i·KL.
    Returns: the loss; metrics, floats: the shares of tokens clipped, clip_ratio/low_mean (ρ below the range,
        A < 0), /high_mean (ρ above it, or above cispo's cap, A > 0), /region_mean (both); kl, its mean.
        They divide by num_items_in_batch, or by this mask's tokens without it: those of parts add up.
    Gotcha: on-policy, at beta 0, the "clip" loss is a weighted sum of -A, often near 0; its gradient is not.
    """
    assert beta == 0 or ref_logps is not None, "ref_logps: got None; allowed with beta > 0 is (B, T)"
    for name, x in (("completion_mask", completion_mask), ("old_logps", old_logps), ("ref_logps", ref_logps)):
        assert x is None or x.shape == logps.shape, f"{name}: got {x.shape}; allowed is {logps.shape}"
    assert advantages.shape in (logps.shape, logps.shape[:1]), f"advantages: got {advantages.shape}, not (B,)"
    if old_logps is None:
        old_logps = logps.detach()      # on-policy: ρ = exp(logps - logps.detach()) is 1, but ∇ρ is ∇log π
    # Padding is emptied first: a NaN that is only multiplied by 0 later reaches the gradient (0·NaN = NaN).
    mask = completion_mask != 0
    logps = torch.where(mask, logps, 0)                                                   # (B, T)
    old_logps = torch.where(mask, old_logps.detach(), 0)                                  # (B, T)
    advantages = torch.where(mask, advantages if advantages.dim() == 2 else advantages.unsqueeze(1), 0)
    ratio = importance_ratio(logps, old_logps, mask, importance_sampling_level=importance_sampling_level)
    lower, upper = 0.0, torch.inf                                       # the range in which ρ is not clipped
    if policy_loss == "clip":
        epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
        lower, upper = 1 - epsilon_low, 1 + epsilon_high
        per_token_loss = clipped_surrogate_loss(
            ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
    elif policy_loss == "cispo":
        upper = 5.0 if epsilon_high is None else epsilon_high
        per_token_loss = cispo_loss(logps, ratio, advantages, epsilon_high=upper)
    elif policy_loss == "sapo":
        per_token_loss = sapo_loss(ratio, advantages)
    else:
        raise ValueError(f"policy_loss: got {policy_loss!r}; allowed is 'clip', 'cispo' or 'sapo'")
    num_tokens = float(num_items_in_batch or max(mask.sum(), 1))
    low = ((ratio < lower) & (advantages < 0)).sum().item() / num_tokens
    high = ((ratio > upper) & (advantages > 0)).sum().item() / num_tokens
    metrics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    if ref_logps is not None:
        kl = kl_estimate(logps, torch.where(mask, ref_logps.detach(), 0))                 # (B, T)
        kl = kl * ratio if use_bias_correction_kl else kl
        metrics["kl"] = kl.sum().item() / num_tokens
    if beta != 0:
        per_token_loss = per_token_loss + beta * kl                     # a clipped token keeps KL's gradient
    loss = aggregate(per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length,
                     num_items_in_batch=num_items_in_batch, num_rows_in_batch=num_rows_in_batch)
    return loss, metrics


# §8 Variants ----------------------------------------------------------------------------------------------

def cispo_loss(logps, ratio, advantages, *, epsilon_high=5.0):
    """Weight the REINFORCE loss, -A·log π, by the capped ratio, so that a capped token keeps its gradient.

    l = -sg[min(ρ, ε_high)]·A·log π_θ;  sg: the weight is a constant (detach).
    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4, 5; ε_high caps ρ itself, as in TRL, not 1 + ε_high.
    Args: logps (B, T); ratio and advantages (B, T) or (B, 1). Returns: (B, T).
    """
    assert advantages.dim() == ratio.dim(), f"advantages: got {advantages.shape}; allowed is (B, 1) or (B, T)"
    return -ratio.clamp(max=epsilon_high).detach() * advantages * logps


def sapo_loss(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05):
    """Replace the clip by a sigmoid σ: the slope ∂l/∂ρ is -A at ρ = 1 and fades away from it smoothly.

    l = -σ(τ·(ρ - 1))·4/τ·A,  τ = temperature_pos where A > 0, else temperature_neg; l = -2A/τ at ρ = 1.
    Source: SAPO (arXiv:2511.20347) eq. 5-6. Args: as in clipped_surrogate_loss.
    """
    assert advantages.dim() == ratio.dim(), f"advantages: got {advantages.shape}; allowed is (B, 1) or (B, T)"
    tau = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def process_advantages(step_rewards, step_ends, completion_mask, num_generations, *, correction=1, eps=1e-4):
    """Give each token credit for every reasoning step that ends at or after it (process supervision).

    A_{i,t} = Σ_{j: end(i,j) >= t} z_{i,j},  z = (r - mean) / (std + eps) over all steps of a group's answers.
    Args: step_rewards (B, S), NaN = no such step; step_ends (B, S), the index t of each step's last token.
    Source: DeepSeekMath §4.1.3. Returns: (B, T), 0 at padding and where a group's step rewards are all equal.
    """
    assert step_ends.shape == step_rewards.shape, f"step_ends: got {step_ends.shape}; allowed is (B, S)"
    (B, S), T = step_rewards.shape, completion_mask.size(1)
    assert step_rewards[(step_ends < 0) | (step_ends >= T)].isnan().all(), f"step_ends: allowed is < T = {T}"
    groups = step_rewards.reshape(-1, num_generations * S)                                # (P, G·S)
    z = torch.zeros_like(groups)
    for i, group in enumerate(groups):
        real = ~group.isnan()                                                             # (G·S,)
        steps = group[real]                                                               # (n,)
        if len(steps) > correction:                                     # else there is nothing to compare
            z[i][real] = group_advantages(steps, len(steps), correction=correction, eps=eps)
    credited = step_ends.unsqueeze(2) >= torch.arange(T, device=step_ends.device)         # (B, S, T)
    return (z.reshape(B, S, 1) * credited).sum(1).masked_fill(completion_mask == 0, 0)       # (B, T)


# A reward function is f(prompts=, completions=, completion_ids=, **columns) -> for each completion a number,
# or None where it does not apply. A completion is a string or, in chat data, a list of {"role", "content"}.

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy_reward(completions, solution, **kwargs):
    r"""Give 1 to an answer whose text is the solution, else 0; None where there is no solution.

    The answer follows the last </think>, or is the whole text. If it has a \boxed{}, the last one's content
    counts. It may hold braces, as in \boxed{\frac{1}{2}}; a box with braces within these is not seen.
    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2. Numbers, formulas: worked_examples/scripts/math_reward.py.
    """
    answers = [text_of(completion).rpartition("</think>")[2] for completion in completions]
    boxed = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"
    boxes = [re.findall(boxed, answer) or [answer] for answer in answers]
    wanted = ["" if text is None else str(text).strip() for text in solution]
    return [float(box[-1].strip() == text) if text else None for box, text in zip(boxes, wanted, strict=True)]


def think_format_reward(completions, **kwargs):
    """Give 1 to a text that begins with its only <think>...</think> and then has an answer, else 0.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2. TRL's also accepts a second </think>, and an empty answer.
    """
    texts = [text_of(completion) for completion in completions]
    one_thought = [t.startswith("<think>") and t.count("<think>") == t.count("</think>") == 1 for t in texts]
    return [float(one and t.partition("</think>")[2].strip() != "") for one, t in zip(one_thought, texts)]


# §9 Sampling ----------------------------------------------------------------------------------------------

class InputError(ValueError):
    """An error that the user can put right: shown in one line, exit code 2."""


def generate(model, prompt_ids, prompt_mask, *, max_completion_length, eos_token_ids, num_generations=1,
             pad_token_id=0, temperature=1.0, uniforms=None):
    """Sample G completions for each prompt, and record each token's log-prob and the entropy of its choice.

    o_t is the first token v with Σ_{w<=v} p_w > u_t, p = softmax(logits / temperature). Each token has a
    uniform number u_t of its own, so the rest of the batch matters by rounding alone. No top_k, no top_p.
    Args: model: a causal LM with a KV cache. prompt_ids, prompt_mask: (P, L), left-padded. eos_token_ids: one
        or several. uniforms: (P·G, T_max) in [0, 1), or None to take the likeliest token (greedy).
    Returns: completion_ids, completion_mask, logps, entropies (nats), each (P·G, T), T <= T_max.
    """
    assert prompt_mask[:, -1].all(), "prompt_mask: got a row that ends in padding; allowed is left-padded"
    eos = torch.as_tensor(eos_token_ids, device=prompt_ids.device)
    mask = (prompt_mask != 0).long()                                    # (P, L); grows with the cache
    live = torch.arange(len(mask) * num_generations, device=mask.device)    # (B,), rows that have not ended
    completion_ids = mask.new_full((len(live), max_completion_length), pad_token_id)      # (B, T_max)
    logps = torch.zeros_like(completion_ids, dtype=torch.promote_types(model.dtype, torch.float32))
    entropies = torch.zeros_like(logps)                                                   # (B, T_max)
    new_ids, cache = prompt_ids * mask, None                            # new_ids: not in the cache yet
    with torch.no_grad():
        for t in range(max_completion_length):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new_ids.size(1):]
            output = model(input_ids=new_ids, attention_mask=mask, position_ids=positions, logits_to_keep=1,
                           past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1].to(logps.dtype) / temperature   # (live, V); at t = 0 still (P, V)
            cache = output.past_key_values
            if t == 0:                                                  # each prompt once so far, now G times
                prompt_of = live // num_generations                                       # (B,)
                cache.reorder_cache(prompt_of)
                logits, mask = logits[prompt_of], mask[prompt_of]                         # (B, V), (B, L)
            if uniforms is None:
                token = logits.argmax(-1)                                                 # (live,)
            else:                                                       # float32 would lose rare tokens
                cdf = logits.softmax(-1, dtype=torch.float64).cumsum(-1)                  # (live, V)
                drawn = uniforms[live, t, None] * cdf[:, -1:]           # (live, 1); the sum is not quite 1
                token = torch.searchsorted(cdf, drawn, right=True)[:, 0].clamp(max=cdf.size(1) - 1)
            completion_ids[live, t] = token
            logps[live, t] = selective_log_softmax(logits, token)
            entropies[live, t] = entropy_from_logits(logits)
            stay = (~torch.isin(token, eos)).nonzero()[:, 0]
            if len(stay) == 0:
                break
            if len(stay) < len(live):                                   # rows that have ended leave the batch
                live, mask, token = live[stay], mask[stay], token[stay]
                cache.reorder_cache(stay)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            new_ids = token.unsqueeze(1)                                                  # (live, 1)
    if not logps.isfinite().all():
        raise FloatingPointError(f"the weights or logits of this {type(model).__name__} are not finite")
    completion_mask = make_completion_mask(completion_ids, eos)
    return tuple(x[:, :t + 1] for x in (completion_ids, completion_mask, logps, entropies))


def encode_prompts(tokenizer, prompts, device):
    """Tokenize strings, or messages through the chat template: ids and mask, (P, L), padded on the left."""
    is_chat = not isinstance(prompts[0], str)
    if is_chat:
        prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt",
                       add_special_tokens=not is_chat).to(device)
    return inputs["input_ids"], inputs["attention_mask"]


def all_eos_token_ids(model, tokenizer):
    """All ids that end a completion: the tokenizer's, and those of the model's generation config."""
    more = numpy.atleast_1d(model.generation_config.eos_token_id)       # a list, a number or None
    return sorted({tokenizer.eos_token_id, *more} - {None})


class Rollout(NamedTuple):
    """Prompts and their completions."""
    rows: list                          # B dicts of the dataset, each prompt's G times
    completions: list                   # B strings, or B lists of messages
    prompt_ids: torch.Tensor            # (B, L), left-padded
    prompt_mask: torch.Tensor           # (B, L)
    completion_ids: torch.Tensor        # (B, T), right-padded
    completion_mask: torch.Tensor       # (B, T)
    loss_mask: torch.Tensor             # (B, T), the same, or 0 where mask_truncated_completions says so
    logps: torch.Tensor                 # (B, T), the sampler's: not log π_old, but compared with it
    entropies: torch.Tensor             # (B, T), the sampler's
    terminated: torch.Tensor            # (B,), whether the completion ends in an EOS


def sample_rollout(policy, tokenizer, questions, config, step=None):
    """Algorithm 1, line 7: sample G answers to each question; without a step, give one greedy answer."""
    device, G, uniforms = policy.device, 1, None
    if step is not None:
        G = config.num_generations
        # The numbers follow from (seed, 4, step): a resumed run draws what the whole run would have drawn.
        # The second number says what is drawn: 1 sums, 2 the teacher, 3 questions, 4 answers, 5 mini-batches.
        rng = numpy.random.default_rng([config.seed, 4, step])
        uniforms = torch.tensor(rng.random((len(questions) * G, config.max_completion_length)), device=device)
    prompt_ids, prompt_mask = encode_prompts(tokenizer, [row["prompt"] for row in questions], device)
    eos = torch.tensor(all_eos_token_ids(policy, tokenizer), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        completion_ids, completion_mask, logps, entropies = generate(
            policy, prompt_ids, prompt_mask, max_completion_length=config.max_completion_length,
            num_generations=G, uniforms=uniforms, temperature=config.temperature, eos_token_ids=eos,
            pad_token_id=tokenizer.pad_token_id)
    completions = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if not isinstance(questions[0]["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    terminated = torch.isin(completion_ids, eos).any(1)                                   # (B,)
    learns = terminated | (not config.mask_truncated_completions)                         # (B,)
    return Rollout([copy.deepcopy(row) for row in questions for _ in range(G)], completions,
                   prompt_ids.repeat_interleave(G, 0), prompt_mask.repeat_interleave(G, 0),
                   completion_ids, completion_mask, completion_mask * learns.unsqueeze(1),
                   logps, entropies, terminated)


def evaluate(policy, tokenizer, dataset, reward_funcs, config):
    """Answer all prompts greedily, and show four answers. Returns: the first reward function's mean."""
    rewards = []
    for start in range(0, len(dataset), config.generation_batch_size):
        rows = dataset[start:start + config.generation_batch_size]
        rollout = sample_rollout(policy, tokenizer, rows, config)
        rewards += compute_rewards(reward_funcs, rollout)[:, 0].tolist()
        if start == 0:
            for row, completion, reward in zip(rows[:4], rollout.completions, rewards):
                print(f"  {text_of(row['prompt'])} {text_of(completion)!r:.90}   reward {reward:g}")
    return numpy.nanmean(rewards)


# §10 Training: Algorithm 1 of the paper -------------------------------------------------------------------

def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GRPOConfig:
    """Mostly TRL's names. There max_steps counts updates, and cispo and sapo are words of loss_type."""
    learning_rate: float = option(1e-6, "AdamW's step size")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option("linear", "constant: no warmup")
    warmup_steps: int = option(0, "updates over which the step size rises from 0")
    weight_decay: float = option(0.0, "AdamW's weight decay, of all weights")
    max_grad_norm: float = option(1.0, "a longer gradient is scaled down to this norm; 0: never")
    max_steps: int = option(100, "steps in all; each samples one batch and learns from it")
    num_generations: int = option(8, "G, completions for each prompt")
    generation_batch_size: int = option(64, "B, completions of a step: a multiple of G")
    num_iterations: int = option(1, "mu, passes over each batch")
    num_mini_batches: int = option(1, "parts of a batch in each pass, drawn at random; one update each")
    per_device_train_batch_size: int = option(8, "rows in one forward and backward pass: memory, not maths")
    max_completion_length: int = option(512, "T_max, the longest completion in tokens")
    temperature: float = option(1.0, "of sampling and of scoring")
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = option("dapo", "how token losses are averaged")
    policy_loss: Literal["clip", "cispo", "sapo"] = option("clip", "the policy term")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "sequence: GSPO")
    epsilon: float = option(0.2, "clip range below 1, and above it unless epsilon_high is given")
    epsilon_high: float | None = option(None, "clip range above 1; with cispo the cap of the ratio (5.0)")
    delta: float | None = option(None, "caps the unclipped ratio; at least 1 + epsilon_high")
    beta: float = option(0.0, "weight of the KL term; 0: no reference model")
    use_bias_correction_kl: bool = option(False, "multiply the KL estimate by the ratio (True in TRL)")
    scale_rewards: Literal["group", "batch", "none"] = option("group", "whose std divides r - mean")
    reward_weights: list[float] | None = option(None, "a weight for each reward function (1 each)")
    mask_truncated_completions: bool = option(False, "learn nothing from completions without an EOS")
    sync_ref_model: bool = option(False, "refresh the reference model: Algorithm 1's outer iterations")
    ref_model_sync_steps: int = option(512, "M, steps of an outer iteration")
    seed: int = option(42, "of the prompts, samples and mini-batches, and of the tiny model")
    bf16: bool = option(False, "bfloat16 autocast over float32 weights")
    output_dir: str | None = option(None, "a new or empty folder (grpo-output, else grpo-output-2, ...)")
    save_steps: int = option(10, "steps between checkpoints; the last is kept, and one made at the end")

    def __post_init__(self):
        for name, kind in GRPOConfig.__annotations__.items():
            value = getattr(self, name)
            least = {"warmup_steps": 0, "seed": 0, "temperature": 1e-6}.get(name, 1 if kind is int else 0)
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise InputError(f"{name}: got {value}; allowed is a finite number, at least {least}")
            if isinstance(value, str) and name != "output_dir" and value not in get_args(kind):
                raise InputError(f"{name}: got {value!r}; allowed is one of {get_args(kind)}")
        B, G = self.generation_batch_size, self.num_generations
        highest = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        not_allowed = {                                     # some of these would change nothing, in silence
            "generation_batch_size: allowed is a multiple of num_generations > 1": G < 2 or B % G > 0,
            f"num_mini_batches: allowed is at most {B}": self.num_mini_batches > B,
            "epsilon: allowed is at most 1": self.epsilon > 1,
            f"delta: allowed with policy_loss clip is at least {highest}":
                self.delta is not None and (self.policy_loss != "clip" or self.delta < highest),
            "sync_ref_model: allowed with beta > 0": self.sync_ref_model and self.beta == 0,
            "use_bias_correction_kl: allowed with beta > 0": self.use_bias_correction_kl and self.beta == 0,
            "reward_weights: allowed are finite numbers": not numpy.isfinite(self.reward_weights or 0).all()}
        for message, found in not_allowed.items():
            if found:
                raise InputError(f"{message}; got {getattr(self, message.partition(':')[0])}")


def loss_options(config):
    """The arguments of grpo_loss that a config sets."""
    return dict(
        beta=config.beta, use_bias_correction_kl=config.use_bias_correction_kl, epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_high, delta=config.delta, policy_loss=config.policy_loss,
        importance_sampling_level=config.importance_sampling_level, loss_type=config.loss_type,
        max_completion_length=config.max_completion_length)


def outcome_advantages(rewards_per_func, rollout, config):
    """Algorithm 1, line 9: from rewards (B, F) to advantages (B, T), the same for all tokens of an answer."""
    rewards = combine_rewards(rewards_per_func, config.reward_weights)                    # (B,)
    advantages = group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)
    return broadcast_advantages(advantages, rollout.completion_mask)


def train(policy, tokenizer, dataset, reward_funcs, config, *, state=None,
          compute_advantages=outcome_advantages):
    """Algorithm 1 of DeepSeekMath, with its line numbers on the right: a generator, which learns as it runs.

    The two loops of lines 2 and 4 are one here: an outer iteration begins where π_ref is refreshed.
    Line 6, π_old ← π_θ, copies no weights: log π_old is scored before the first update.
    Line 12, a reward model that learns, is in worked_examples/scripts/iterative_grpo.py.
    Args: policy, tokenizer: a causal LM of transformers, in float32, trained in place, and its tokenizer.
        dataset: dicts with "prompt", ... compute_advantages: from rewards (B, F) to (B,) or (B, T).
    Yields: after each step the state, the Rollout and the metrics (of updates: their means), TRL's names.
    """
    state = state or initial_state(policy, config)                                        # line 1
    policy.eval()                                               # dropout would change π in every pass
    while state.step < config.max_steps:                                                  # 2, 4
        started = time.perf_counter()
        if config.sync_ref_model and state.step % config.ref_model_sync_steps == 0:
            state.reference.load_state_dict(policy.state_dict())                          # 3: π_ref ← π_θ
        questions = sample_batch(dataset, config, state.step)                             # 5
        rollout = sample_rollout(policy, tokenizer, questions, config, state.step)        # 7
        rewards_per_func = compute_rewards(reward_funcs, rollout)                         # 8
        advantages = compute_advantages(rewards_per_func, rollout, config)                # 9
        old_logps = score_rollout(policy, rollout, advantages, config)                    # 6
        ref_logps = score_rollout(state.reference, rollout, advantages, config) if state.reference else None
        updates = []
        for rows in mini_batches(config, state.step):                                     # 10, 11
            update = update_policy(policy, state, rollout, rows, advantages, old_logps, ref_logps, config)
            updates.append(update)
        state.step += 1
        metrics = step_metrics(rollout, old_logps, reward_funcs, rewards_per_func, config)
        metrics |= {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        yield state, rollout, {"step": state.step, "step_time": time.perf_counter() - started, **metrics}


def initial_state(policy, config, saved=None):
    """What a run carries from step to step beside the policy's weights, new or taken from a checkpoint."""
    from transformers import get_scheduler
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
    reference = copy.deepcopy(policy).eval() if config.beta > 0 else None                 # π_ref
    saved = saved or {"step": 0, "moments": {}, "reference": None}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["moments"]})
    if reference and saved["reference"]:
        reference.load_state_dict(saved["reference"])
    step, updates_per_step = saved["step"], config.num_iterations * config.num_mini_batches
    optimizer.param_groups[0]["initial_lr"] = config.learning_rate      # the schedule multiplies it, and goes
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, num_warmup_steps=config.warmup_steps,
        num_training_steps=config.max_steps * updates_per_step,
        scheduler_specific_kwargs={"last_epoch": step * updates_per_step - 1})  # on after so many updates
    return SimpleNamespace(step=step, optimizer=optimizer, scheduler=scheduler, reference=reference)


def sample_batch(dataset, config, step):
    """Algorithm 1, line 5: the B / G prompts of a step, drawn afresh each step (there are no epochs)."""
    count = config.generation_batch_size // config.num_generations
    rng = numpy.random.default_rng([config.seed, 3, step])
    return [dataset[i] for i in rng.choice(len(dataset), count, replace=count > len(dataset))]


def mini_batches(config, step):
    """The rows of each update of a step: each of the mu passes splits the batch anew, at random."""
    for iteration in range(config.num_iterations):
        rng = numpy.random.default_rng([config.seed, 5, step, iteration])
        for rows in numpy.array_split(rng.permutation(config.generation_batch_size), config.num_mini_batches):
            yield torch.tensor(numpy.sort(rows))                        # about (B / num_mini_batches,)


def compute_rewards(reward_funcs, rollout):
    """Algorithm 1, line 8: what each reward function says of each completion, (B, F), None as NaN."""
    ids = [row[mask != 0].tolist() for row, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    columns = {name: [row[name] for row in rollout.rows] for name in rollout.rows[0]}
    columns |= dict(prompts=columns.pop("prompt"), completions=rollout.completions, completion_ids=ids)
    rewards_per_func = []
    for function in reward_funcs:
        rewards = list(function(**copy.deepcopy(columns)))              # what a function changes is its own
        if len(rewards) != len(ids) or not all(x is None or math.isfinite(x) for x in rewards):
            raise InputError(f"function {function.__name__}: got {rewards!r:.99}; allowed: {len(ids)} floats")
        rewards_per_func.append([math.nan if x is None else float(x) for x in rewards])
    return torch.tensor(rewards_per_func, device=rollout.logps.device).T                  # (B, F)


def score_parts(model, rollout, rows, advantages, config):
    """Score these rows in parts of one pass each. Yields: the rows of a part, their log-probs (part, T).

    A row is skipped, because its gradient is 0, if its loss mask is empty, or if beta = 0 and all its
    advantages are 0. It still counts in the denominators of the loss.
    """
    rows = rows.to(advantages.device)
    has_advantage = advantages[rows].reshape(len(rows), -1).any(1)                        # (rows,)
    rows = rows[rollout.loss_mask[rows].any(1) & (has_advantage | (config.beta > 0))]
    inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    for part in rows.split(config.per_device_train_batch_size) if len(rows) > 0 else []:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
            logps, _ = per_token_logps(model, *[x[part] for x in inputs], temperature=config.temperature)
        yield part, logps


def score_rollout(model, rollout, advantages, config):
    """log π_old or log π_ref, without gradient, of the rows that learn: (B, T); NaN in the others."""
    scored = torch.full_like(rollout.logps, math.nan)
    with torch.no_grad():
        for part, logps in score_parts(model, rollout, torch.arange(len(scored)), advantages, config):
            scored[part] = logps
    return scored


def update_policy(policy, state, rollout, rows, advantages, old_logps, ref_logps, config):
    """Algorithm 1, line 11: one step of AdamW on the loss of these rows; gradients of parts add up."""
    mask = rollout.loss_mask                                                              # (B, T)
    names = ["loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    metrics = dict.fromkeys(names if ref_logps is None else [*names, "kl"], 0.0)          # if no row learns
    weights = state.optimizer.param_groups[0]["params"]
    for weight in weights:                              # AdamW passes over a weight whose gradient is None; a
        weight.grad = torch.zeros_like(weight)          # gradient of 0 still moves it, by momentum and decay
    for part, logps in score_parts(policy, rollout, rows, advantages, config):
        loss, part_metrics = grpo_loss(
            logps, advantages[part], mask[part], old_logps=old_logps[part],
            ref_logps=None if ref_logps is None else ref_logps[part],
            num_items_in_batch=mask[rows].sum().item(), num_rows_in_batch=len(rows), **loss_options(config))
        loss.backward()
        for name, value in {"loss": loss.item(), **part_metrics}.items():
            metrics[name] += value
    norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm or math.inf, error_if_nonfinite=True)
    metrics |= {"grad_norm": norm.item(), "learning_rate": state.scheduler.get_last_lr()[0]}
    state.optimizer.step()
    state.scheduler.step()
    return metrics


def step_metrics(rollout, old_logps, reward_funcs, rewards_per_func, config):
    """What the samples were like, under TRL's names."""
    rewards, mask = combine_rewards(rewards_per_func, config.reward_weights), rollout.completion_mask
    metrics = {
        "reward": rewards.mean(), "reward_std": rewards.std(),
        "frac_reward_zero_std": (group_stats(rewards, config.num_generations)[1] == 0).float().mean(),
        "completions/mean_length": mask.sum() / len(mask),
        "completions/clipped_ratio": 1 - rollout.terminated.float().mean(),               # the share cut off
        "entropy": aggregate(rollout.entropies, mask, loss_type="dapo"),                  # mean over tokens
        # sampler against scorer: if it is more than rounding, look at positions, temperature, masks, cache
        "sampling/sampling_logp_difference/max": (old_logps - rollout.logps).abs().nan_to_num().max()}
    for function, rewards_of_function in zip(reward_funcs, rewards_per_func.T):
        metrics[f"rewards/{function.__name__}/mean"] = rewards_of_function.nanmean()
    return {name: value.item() for name, value in metrics.items()}


# Published settings; every other field keeps its default. The papers make several updates with a batch: GSPO
# and SAPO 4, DAPO and MiniMax-M1 (cispo) 16. With one update ρ is 1: neither the clip range nor gspo, cispo
# or sapo would change the gradient. dapo is without its dynamic sampling and overlong punishment; cispo's cap
# is ScaleRL's (arXiv:2510.13786).
PRESETS = {
    "deepseekmath": dict(loss_type="grpo", beta=0.04, learning_rate=1e-6, num_generations=64,
                         generation_batch_size=1024, max_completion_length=1024),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True,
                 num_mini_batches=16),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
                 num_mini_batches=4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0, num_mini_batches=16),
    "sapo": dict(loss_type="grpo", policy_loss="sapo", num_mini_batches=4),
}


# §11 Command line -----------------------------------------------------------------------------------------
# --model tiny: a small transformer learns two-digit addition, first from a teacher who mostly forgets the
# carry (supervised), then from its own answers (GRPO), which takes it beyond its teacher.

TINY = dict(learning_rate=3e-4, max_steps=60, num_iterations=2, num_generations=8, generation_batch_size=128,
            per_device_train_batch_size=128, max_completion_length=28)


def tiny_tokenizer():
    """One token for each character, and for <think> and </think>."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    words = ["<pad>", "<eos>", "<think>", "</think>", *"0123456789+=,"]
    tokenizer = Tokenizer(models.Unigram([(word, 0.0) for word in words], unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(tokenizer, seed):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, activation_function="gelu_pytorch_tanh")).eval()


def tiny_problems(seed):
    """The 6,561 sums of 11 ... 99 without round numbers, in random order: to train on, and held out."""
    numbers = [x for x in range(11, 100) if x % 10 > 0]
    problems = [{"prompt": f"{x}+{y}=", "solution": str(x + y)} for x in numbers for y in numbers]
    numpy.random.default_rng([seed, 1]).shuffle(problems)
    return problems[500:], problems[:500]


def teacher_trace(prompt, forgets_carry):
    """A worked answer: 47+85= gets <think>7+5=12,4+8+1=13</think>132, without the carry 4+8+0=12 and 122."""
    x, y = map(int, prompt.rstrip("=").split("+"))
    units = x % 10 + y % 10
    carry = 0 if forgets_carry else units // 10
    tens = x // 10 + y // 10 + carry
    thought = f"{x % 10}+{y % 10}={units},{x // 10}+{y // 10}+{carry}={tens}"
    return f"<think>{thought}</think>{10 * tens + units % 10}<eos>"


def cold_start(model, tokenizer, problems, seed, *, steps=500):
    """Supervised learning from the teacher: minimise the mean of -log π over the tokens of its traces."""
    rng = numpy.random.default_rng([seed, 2])
    traces = [row["prompt"] + teacher_trace(row["prompt"], rng.random() < 0.9) for row in problems]
    ids = tokenizer(traces, padding=True, return_tensors="pt")["input_ids"].to(model.device)
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)       # -100: no loss
    labels[:, :len("47+85=")] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in tqdm(range(steps), "cold start", disable=None):
        chosen = torch.tensor(rng.choice(len(ids), 64), device=ids.device)
        optimizer.zero_grad()
        model(input_ids=ids[chosen], labels=labels[chosen]).loss.backward()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, 2 - 2 * step / steps)   # constant, then linear to 0
        optimizer.step()


def load_dataset(path):
    """JSON Lines: objects with "prompt" (a text, or messages) and further columns, the same in each line."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            rows.append(json.loads(line))                               # it decodes UTF-8
            prompt = rows[-1]["prompt"]
            assert prompt and type(prompt) is type(rows[0]["prompt"]) and rows[-1].keys() == rows[0].keys()
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise InputError(f"dataset: {path}, line {number}: got {line.decode(errors='replace'):.80}; "
                             "allowed is a prompt, text or messages, and the keys of line 1") from error
    assert rows, f"dataset: got {path}, an empty file"
    return rows


def load_model(name, seed=0):
    """A float32 causal LM and its tokenizer: tiny, or a folder or hub name, whose own code never runs."""
    if name == "tiny":
        return tiny_model(tiny_tokenizer(), seed), tiny_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def load_reward_func(name):
    """A reward function: built in, or f of a file of the user's as my_rewards.py:f."""
    functions = {"accuracy": accuracy_reward, "think_format": think_format_reward}
    path, _, function = name.rpartition(":")
    if os.path.isfile(path):
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))      # it may import its neighbours
        functions[name] = getattr(importlib.import_module(Path(path).stem), function, None)
    if functions.get(name) is None:
        raise InputError(f"reward_funcs: got {name}; allowed is accuracy, think_format, unique_name.py:f")
    return functions[name]


def make_output_dir(folder, checkpoint):
    """The folder of a run: a new or empty one, or the one of the checkpoint from which it goes on."""
    home = Path(checkpoint).resolve().parent if checkpoint else None
    names = ["grpo-output", *(f"grpo-output-{i}" for i in range(2, 10**4))]
    folder = Path(folder or home or next(name for name in names if not os.path.exists(name)))
    folder.mkdir(parents=True, exist_ok=True)
    assert folder.resolve() == home or not os.listdir(folder), f"output_dir: got {folder}, not new or empty"
    return folder


def save_checkpoint(policy, tokenizer, state, folder):
    """Write folder/checkpoint-STEP in Hugging Face's format, under another name until it is whole."""
    assert all(weight.isfinite().all() for weight in policy.parameters()), "the weights are not finite"
    target = Path(folder, f"checkpoint-{state.step}")
    policy.save_pretrained(f"{target}.new")
    tokenizer.save_pretrained(f"{target}.new")
    saved = {"step": state.step, "moments": state.optimizer.state_dict()["state"],
             "reference": state.reference and state.reference.state_dict()}
    torch.save(saved, f"{target}.new/trainer_state.pt")
    shutil.copy(f"{folder}/metrics.jsonl", f"{target}.new")             # the lines up to this step
    os.rename(f"{target}.new", target)
    for path in set(target.parent.glob("checkpoint-*[0-9]")) - {target}:                  # the older one
        shutil.rmtree(path)


def parse_options(argv):
    """The GRPOConfig of a run, and its other options."""
    from transformers import HfArgumentParser
    parser = HfArgumentParser(GRPOConfig, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="tiny, or the folder or hub name of a causal LM")
    parser.add_argument("--dataset", help="a file of JSON Lines: prompt (text or messages), further columns")
    parser.add_argument("--eval_dataset", help="such a file, answered greedily before and after training")
    parser.add_argument("--reward_funcs", nargs="+", default=["accuracy", "think_format"], help="or file.py:f"
                        "; accuracy compares texts, worked_examples/scripts/math_reward.py numbers, formulas")
    parser.add_argument("--preset", choices=PRESETS, help="what a paper sets, below flags and tiny's own")
    parser.add_argument("--resume_from_checkpoint", help="a checkpoint-STEP folder; repeat the other flags")
    parser.error = lambda message: parser.exit(2, f"grpo.py: error: {message}\n")
    options = parser.parse_args(argv)                                   # model and preset give the defaults
    parser.set_defaults(**PRESETS.get(options.preset, {}) | (TINY if options.model == "tiny" else {}))
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


def run(config, options, argv):
    """The job of a command line, from what the user gave to the last line of output."""
    is_tiny, checkpoint, saved = options.model == "tiny", options.resume_from_checkpoint, None
    if is_tiny:
        torch.set_num_threads(1)                                        # several would wait for each other
    reward_funcs = [load_reward_func(name) for name in options.reward_funcs]
    try:                                                                # all that can be wrong with the input
        assert is_tiny == (options.dataset is None), "dataset: allowed is --dataset FILE.jsonl, none for tiny"
        dataset, held_out = tiny_problems(config.seed) if is_tiny else (load_dataset(options.dataset), [])
        if options.eval_dataset:
            held_out = load_dataset(options.eval_dataset)
        assert len(config.reward_weights or reward_funcs) == len(reward_funcs), "reward_weights: one each"
        for row in dataset[:1] + held_out[:1]:
            assert "accuracy" not in options.reward_funcs or "solution" in row, "dataset: has no solution"
        if checkpoint:
            saved = torch.load(f"{checkpoint}/trainer_state.pt", map_location="cpu", weights_only=True)
        policy, tokenizer = load_model(checkpoint or options.model, config.seed)
        longest = max(encode_prompts(tokenizer, [row["prompt"]], "cpu")[0].size(1)
                      for row in dataset + held_out)
        room = getattr(policy.config, "max_position_embeddings", math.inf) - longest
        assert config.max_completion_length <= room, (
            f"max_completion_length: the model's limit is {room} after a prompt of {longest} tokens")
        folder = make_output_dir(config.output_dir, checkpoint)
    except Exception as error:                                          # whatever a loader raises
        raise InputError(error) from error
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    if is_tiny and not checkpoint:
        cold_start(policy, tokenizer, dataset, config.seed)
    state = initial_state(policy, config, saved)
    if checkpoint:
        shutil.copy(f"{checkpoint}/metrics.jsonl", folder)              # forget the steps after it
    if held_out:
        before = evaluate(policy, tokenizer, held_out, reward_funcs, config)
    steps = train(policy, tokenizer, dataset, reward_funcs, config, state=state)
    try:
        for _, _, metrics in tqdm(steps, "GRPO", initial=state.step, total=config.max_steps, disable=None):
            with open(folder / "metrics.jsonl", "a") as file:
                print(json.dumps(metrics), file=file)
            if state.step % math.ceil(config.max_steps / 10) == 0:
                tqdm.write("  step {step}: reward {reward:.2f}, entropy {entropy:.2f}, clipped "
                           "{clip_ratio/region_mean:.1%}".format_map(metrics))
            if state.step % config.save_steps == 0 or state.step == config.max_steps:
                save_checkpoint(policy, tokenizer, state, folder)
    except BaseException:                                               # Ctrl-C, too
        from transformers.trainer_utils import get_last_checkpoint
        last = get_last_checkpoint(folder) or checkpoint
        if last:
            again = shlex.join(["python", sys.argv[0], *argv, "--resume_from_checkpoint", last])
            print(f"stopped; to go on after step {last.rpartition('-')[2]}: {again}")
        raise
    print(f"metrics.jsonl and checkpoint-{state.step} are in {folder}")
    if held_out:
        after = evaluate(policy, tokenizer, held_out, reward_funcs, config)
        name = options.reward_funcs[0]
        print(f"held-out {name}: {before:.2f} -> {after:.2f} (greedy, {len(held_out)} problems)")


def main(argv):
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        run(*parse_options(argv), argv)
    except InputError as error:
        print("grpo.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""grpo.py: Group Relative Policy Optimization, its equations as pure functions.

A language model (the policy) answers each prompt G times; these answers are a group. Each gets a
reward. Tokens of an answer above the group's mean reward are pushed up, of one below it down.
§1-§7 lead from rewards to the loss. §8: process supervision, reward functions. §9: sampling.
§10: Algorithm 1. §11: a demo. §12: the command line.

    python grpo.py --model tiny
    python grpo.py --model NAME_OR_FOLDER --dataset FILE.jsonl

Notation (DeepSeekMath, arXiv:2402.03300, "the paper" below)
    symbol         name in code            shape   meaning
    q, o_i         prompt, completion              a question and one of its G sampled answers
    G              num_generations                 answers for each prompt
    P, B           -                               prompts; rows, B = P·G (row i: prompt i // G)
    L, T           -                               tokens of the longest prompt, completion
    T_max          max_completion_length           the limit of sampling, T <= T_max
    V, S, F        -                               vocabulary, reasoning steps, reward functions
    r_i            rewards                 (B,)    score of an answer, a weighted sum over functions
    A_i, A_{i,t}   advantages              (B,)    how far above the group's mean; or (B, T)
    log π_θ        logps                   (B, T)  log-prob of each sampled token, the policy (nats)
    log π_old      old_logps               (B, T)  the same before the step's first update
    log π_ref      ref_logps               (B, T)  the same under a frozen earlier copy
    m              completion_mask         (B, T)  1 = real token (the EOS included), 0 = padding
    ρ              ratio                   (B, T)  π_θ / π_old; 1 while on-policy (π_θ = π_old)
    ε_low, ε_high  epsilon_low, _high              clip range 1 - ε_low ... 1 + ε_high
    β, μ           beta, num_iterations            weight of the KL term; passes over one batch

The paper maximizes J; the loss here is -J. Most defaults are TRL's: "dapo", β = 0 and one update
on each batch, so that ρ = 1: no token is clipped (tiny makes two updates). At β > 0 TRL since 1.10
multiplies the KL by ρ (use_bias_correction_kl). The paper's loss: --loss_type grpo --beta 0.04.

The Args of a docstring leave out what the table explains. A mask may be bool, integer or float, and
is 0 at padding. What importance_ratio, aggregate and grpo_loss find there, even NaN, reaches no
result and no gradient; but a NaN in a model's logits does reach the model's weights. A shape
or a word that would be wrong in silence is an error, which names the argument, what came and what
is allowed; python -O switches these checks off. Top-k and top-p sampling are left out, because they
change the log-probs.
"""

import copy
import importlib
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy
import torch
from torch.nn.functional import pad
from tqdm import tqdm

# §1 Rewards ---------------------------------------------------------------------------------------

def combine_rewards(rewards_per_func, reward_weights=None):
    """Add up the rewards of all functions: r_i = Σ_f w_f·r_{i,f}, over those that did not abstain.

    Args: rewards_per_func (B, F), NaN where a function abstained; reward_weights (F,), None: all 1.
    Source: TRL's GRPOTrainer. Returns: (B,), NaN where all functions abstained.
    """
    unscored = rewards_per_func.isnan().all(1)                                  # (B,)
    rewards = rewards_per_func * 1.0                           # (B, F); integers become floats
    if reward_weights is not None:
        weights = torch.as_tensor(reward_weights, dtype=rewards.dtype, device=rewards.device)
        assert weights.shape == rewards.shape[1:] and weights.isfinite().all(), (
            f"reward_weights: got {weights}; allowed is (F,), finite")
        rewards = rewards * weights
    return rewards.nansum(1).masked_fill(unscored, torch.nan)                   # (B,)


# §2 Group statistics and advantages ---------------------------------------------------------------

def group_stats(rewards, num_generations, *, correction=1):
    """Compute the mean and the standard deviation of the rewards of each group.

    mean = 1/G·Σ r_i,  std = √(Σ (r_i - mean)² / (G - correction)).
    An answer whose reward is NaN is left out of both sums and of G. correction (below
    num_generations): 1 divides by G - 1, as TRL does; DeepSeekMath §4.1.2 does not say.
    Returns: (P,), (P,); for a zero-variance ("silent") group exactly its reward and 0.
    """
    assert rewards.dim() == 1, f"rewards: got {tuple(rewards.shape)}; allowed is (B,)"
    assert num_generations > correction and len(rewards) % num_generations == 0, (
        f"num_generations: got {num_generations}; allowed: > {correction}, divides {len(rewards)}")
    groups = (rewards * 1.0).reshape(-1, num_generations)      # (P, G); integers become floats
    best = groups.nan_to_num(-torch.inf).amax(1, keepdim=True)                  # (P, 1)
    mean = best + (groups - best).nanmean(1, keepdim=True)     # of 8 × 0.1 it is 0.1, unrounded
    squares = (groups - mean).square().nansum(1)                                # (P,)
    count = (~groups.isnan()).sum(1)                                            # (P,)
    std = (squares / (count - correction).clamp(min=1)).sqrt()                  # (P,)
    return mean.squeeze(1), std


def group_advantages(rewards, num_generations, *, scale_rewards="group", correction=1, eps=1e-4):
    """Compare each reward with the mean of its group.

    "group": A_i = (r_i - mean) / (std + eps), mean and std of the group; eps in reward units.
    "batch": the same mean, and the std of the whole batch.
    "none":  A_i = r_i - mean, because 1 / std inflates groups that are nearly all right or wrong.
    Source: DeepSeekMath §4.1.2, without eps (TRL 1e-4, verl 1e-6); "none": Dr. GRPO
    (arXiv:2503.20783) §3.1. Args: as in group_stats.
    Returns: (B,), exactly 0 in a silent group and for a reward of NaN.
    """
    dtype = torch.result_type(rewards, 1.0)                    # integers become floats
    rewards = rewards.to(torch.promote_types(dtype, torch.float32))    # bfloat16 rounds the mean
    mean, std = group_stats(rewards, num_generations, correction=correction)    # (P,), (P,)
    centered = rewards - mean.repeat_interleave(num_generations)                # (B,)
    if scale_rewards == "group":
        scale = std.repeat_interleave(num_generations) + eps                    # (B,)
    elif scale_rewards == "batch":
        _, std_of_all = group_stats(rewards, len(rewards), correction=correction)       # (1,)
        scale = std_of_all + eps
    elif scale_rewards == "none":
        scale = 1.0
    else:
        raise ValueError(f"scale_rewards: got {scale_rewards!r}; allowed: 'group', 'batch', 'none'")
    advantages = (centered / scale).masked_fill((centered == 0) | centered.isnan(), 0)     # not 0/0
    return advantages.to(dtype)


def broadcast_advantages(advantages, completion_mask):
    """Give every token the advantage of its answer, A_{i,t} = A_i (outcome supervision).

    Source: DeepSeekMath §4.1.2. From (B,) to (B, T), 0 at padding.
    """
    assert advantages.shape == completion_mask.shape[:-1], (
        f"advantages: got {tuple(advantages.shape)}; allowed is (B,), as in the mask")
    return torch.where(completion_mask != 0, advantages.unsqueeze(1), 0)        # (B, T)


# §3 Log-probabilities -----------------------------------------------------------------------------

def make_completion_mask(completion_ids, eos_token_ids):
    """Mark the real tokens: m_t = 1 if there is no EOS before t, else 0.

    The first EOS counts as real; without it the choice to stop has no gradient of its own.
    Args: completion_ids (B, T); eos_token_ids: an id, a list or a tensor. Returns: (B, T), int64.
    Source: TRL's GRPOTrainer. Gotcha: a pad id that no EOS precedes counts as real.
    """
    eos = torch.as_tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()                             # (B, T)
    eos_before = is_eos.cumsum(1) - is_eos                                      # (B, T)
    return (eos_before == 0).long()


def selective_log_softmax(logits, index):
    """Take the log-prob of one token at each position: logit(index) - log Σ_v exp(logit(v)).

    Source: TRL's function of the same name. From (B, T, V) and (B, T) to (B, T), in nats.
    """
    assert index.shape == logits.shape[:-1], (
        f"index: got {tuple(index.shape)}; allowed is {tuple(logits.shape[:-1])}")
    logps = logits.log_softmax(-1)                                              # (B, T, V)
    return logps.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)             # (B, T)


def entropy_from_logits(logits):
    """Measure how open the choice of the next token is, in nats: H = -Σ_v p_v·log p_v.

    p = softmax(logits); a logit of -inf adds 0. Source: Shannon 1948. From (B, T, V) to (B, T).
    """
    logps = logits.log_softmax(-1)                                              # (B, T, V)
    return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0)).sum(-1)   # 0·log 0 = 0


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *,
                    temperature=1.0, compute_entropy=False):
    """Score completions with a Hugging Face causal LM: log π(o_t | q, o_<t) at every real token.

    log π = log softmax(logits / temperature)[o_t]: the temperature must be the sampler's.
    Args: prompt_ids, prompt_mask (B, L), left-padded; completion_* (B, T), right-padded.
    Returns: logps, and entropies without gradient or None: (B, T), float32 or wider, 0 at padding.
    Source: TRL's _get_per_token_logps_and_entropies.
    """
    assert prompt_mask[:, -1].all(), "prompt_mask: got padding at the end; allowed is left-padded"
    padding = completion_mask == 0                                              # (B, T)
    holes = padding.long().diff(dim=1) < 0                     # a real token after padding
    assert not holes.any(), "completion_mask: got a row with a hole; allowed is ones, then zeros"
    mask = torch.cat([prompt_mask != 0, ~padding], 1).long()                    # (B, L+T)
    ids = torch.cat([prompt_ids, completion_ids], 1) * mask    # 0 at padding
    positions = mask.cumsum(1) - mask                          # how many real tokens come before
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False,
                   logits_to_keep=completion_ids.size(1) + 1)
    logits = output.logits[:, -1 - completion_ids.size(1):-1]  # (B, T, V): t - 1 predicts token t
    logps, entropies = [], []
    # Chunks of 16 positions keep float32 copies small; each log-softmax is kept for backward().
    for chunk, index in zip(logits.split(16, 1), ids[:, prompt_ids.size(1):].split(16, 1)):
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32)) / temperature
        logps.append(selective_log_softmax(chunk, index))                       # (B, 16)
        if compute_entropy:
            entropies.append(entropy_from_logits(chunk.detach()))               # (B, 16)
    logps = torch.cat(logps, 1).masked_fill(padding, 0)                         # (B, T)
    if not compute_entropy:
        return logps, None
    return logps, torch.cat(entropies, 1).masked_fill(padding, 0)


# §4 Importance ratio and clip ---------------------------------------------------------------------

def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """Measure how many times as likely a sampled token is as it was under π_old.

    "token":    ρ_{i,t} = π_θ(o_t) / π_old(o_t) = exp(log π_θ - log π_old); ∇ρ is ρ·∇log π_θ.
    "sequence": s_i = exp(1/|o_i|·Σ_t log ρ_{i,t}), the geometric mean of the answer's ρ.
    Source: DeepSeekMath eq. 3; GSPO (arXiv:2507.18071) eq. 7.
    Returns: (B, T), 1 at padding; "sequence": (B, 1). Where log ρ is above 20: the constant e²⁰.
    """
    mask = completion_mask != 0
    assert old_logps.shape == mask.shape == logps.shape, (
        f"old_logps, completion_mask: got {tuple(old_logps.shape)}, {tuple(mask.shape)}; "
        f"allowed is {tuple(logps.shape)}")
    log_ratio = torch.where(mask, logps - old_logps, 0)                         # (B, T)
    if importance_sampling_level == "sequence":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)                        # (B, 1)
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths                    # (B, 1)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level: got {importance_sampling_level!r}; "
                         "allowed is 'token' or 'sequence'")
    return log_ratio.clamp(max=20).exp()                       # (B, T) or (B, 1); e^89 is inf


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """Limit the ratio: the further π_θ is from π_old, the less the samples say about π_θ.

    clip(ρ) = min(max(ρ, 1 - ε_low), 1 + ε_high), of any shape.
    Source: DeepSeekMath eq. 3, with ε_low = ε_high; DAPO (arXiv:2503.14476) §3.1 raises ε_high.
    """
    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    """Push tokens of good answers up until ρ is above the range, of bad ones down until below it.

    l = -min(ρ·A, clip(ρ)·A). Its gradient:
                 ρ < 1 - ε_low     inside the range     ρ > 1 + ε_high
        A > 0    -A·∇ρ             -A·∇ρ                0, clipped
        A < 0    0, clipped        -A·∇ρ                -A·∇ρ
    It is 0 once the token has moved far enough in the direction of A. It stays -A·∇ρ if the token
    has moved in the other direction, because it has to come back. At A < 0 and ρ > 1 + ε_high,
    l has no bound; delta (at least 1 + ε_high) replaces the unclipped ρ by min(ρ, δ), with gradient
    0 beyond δ. Source: DeepSeekMath eq. 3; delta: INTELLECT-2 (arXiv:2505.07291).
    Args: each (B, T) or (B, 1).
    """
    assert advantages.shape[:-1] == ratio.shape[:-1], (
        f"advantages: got {tuple(advantages.shape)}; allowed is (B, 1) or (B, T)")
    unclipped_ratio = ratio if delta is None else ratio.clamp(max=delta)
    clipped_ratio = clip_ratio(ratio, epsilon_low, epsilon_high)
    return -torch.min(unclipped_ratio * advantages, clipped_ratio * advantages)


def cispo_loss(logps, ratio, advantages, *, epsilon_high=5.0):
    """Weight REINFORCE's loss, -A·log π, by the capped ratio, so that capped tokens still learn.

    l = -sg[min(ρ, ε_high)]·A·log π_θ;  sg: the weight is a constant (detach).
    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4, 5; ε_high caps ρ itself, as in TRL, not 1 + ε_high.
    Args: logps (B, T); ratio and advantages (B, T) or (B, 1). Returns: (B, T).
    """
    assert advantages.shape[:-1] == ratio.shape[:-1], (
        f"advantages: got {tuple(advantages.shape)}; allowed is (B, 1) or (B, T)")
    return -ratio.clamp(max=epsilon_high).detach() * advantages * logps


def sapo_loss(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05):
    """Replace the clip by a sigmoid σ: the slope ∂l/∂ρ is -A at ρ = 1 and fades as ρ moves away.

    l = -σ(τ·(ρ - 1))·4/τ·A,  τ = temperature_pos where A > 0, else temperature_neg; l = -2A/τ at
    ρ = 1. Source: SAPO (arXiv:2511.20347) eq. 5-6. Args: as in clipped_surrogate_loss.
    """
    assert advantages.shape[:-1] == ratio.shape[:-1], (
        f"advantages: got {tuple(advantages.shape)}; allowed is (B, 1) or (B, T)")
    tau = torch.where(advantages > 0, temperature_pos, ratio.new_tensor(temperature_neg))
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


# §5 KL --------------------------------------------------------------------------------------------

def kl_estimate(logps, ref_logps, *, estimator="k3"):
    """Estimate KL(π_θ‖π_ref) in nats at each sampled token. Any shape.

    k1 = log π_θ - log π_ref,  k2 = ½·k1²,  k3 = exp(-k1) + k1 - 1 >= 0.
    On average over a token drawn from π_θ (on-policy), if its weight in the loss does not depend on
    which token it is:
              value      gradient by autograd, which does not see that the draw depends on θ
        k1    KL         0 on average: noise
        k2    biased     ∇KL(π_θ‖π_ref)
        k3    KL         ∇KL(π_ref‖π_θ), the paper's choice
    Source: DeepSeekMath eq. 4; Schulman 2020, "Approximating KL divergence"; arXiv:2506.09477.
    """
    assert logps.shape == ref_logps.shape, (
        f"ref_logps: got {tuple(ref_logps.shape)}; allowed is {tuple(logps.shape)}")
    k1 = logps - ref_logps
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    if estimator == "k3":
        return torch.expm1((-k1).clamp(max=20)) + k1           # accurate at 0; e^89 would be inf
    raise ValueError(f"estimator: got {estimator!r}; allowed is 'k1', 'k2' or 'k3'")


# §6 The aggregations ------------------------------------------------------------------------------

def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Add up the token losses; loss_type sets what each is divided by.

    "grpo":    1/B·Σ_i (Σ_t l·m / Σ_t m)   a token weighs 1/(B·|o_i|): less in a long answer
    "bnpo":    Σ l·m / Σ m of these rows   a token weighs 1 / (the tokens of this part of the batch)
    "dr_grpo": Σ l·m / (B·T_max)           a token weighs 1/(B·T_max), as much in any answer
    "dapo":    Σ l·m / N                   a token weighs 1/N, N the tokens of the update
    If the rows of an update are split, give each part the whole update's B (num_rows_in_batch) and
    N (num_items_in_batch), so that the losses of the parts add up to the loss of the whole. "bnpo"
    ignores both, so the command line has no bnpo.
    Args: per_token_loss (B, T), or (B, 1): one loss per answer. A row without tokens counts in B.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3,
    where N is a group's.
    """
    mask = completion_mask != 0
    assert per_token_loss.shape in (mask.shape, (len(mask), 1)), (
        f"per_token_loss: got {tuple(per_token_loss.shape)}; allowed is (B, T) or (B, 1)")
    per_token_loss = torch.where(mask, per_token_loss, 0)                       # (B, T)
    num_tokens = mask.sum().clamp(min=1)                       # without a token: 0, not 0/0
    num_rows = num_rows_in_batch or max(len(mask), 1)
    if loss_type == "grpo":
        return (per_token_loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / num_rows
    if loss_type == "bnpo":
        return per_token_loss.sum() / num_tokens
    if loss_type == "dapo":
        return per_token_loss.sum() / (num_items_in_batch or num_tokens)
    if loss_type == "dr_grpo":
        assert max_completion_length, "max_completion_length: got None; allowed with dr_grpo: T_max"
        return per_token_loss.sum() / (num_rows * max_completion_length)
    raise ValueError(f"loss_type: got {loss_type!r}; allowed: grpo, bnpo, dr_grpo, dapo")


# §7 The loss --------------------------------------------------------------------------------------

def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, beta=0.0,
              epsilon_low=0.2, epsilon_high=None, delta=None, loss_type="dapo", policy_loss="clip",
              importance_sampling_level="token", use_bias_correction_kl=False,
              max_completion_length=None, num_items_in_batch=None, num_rows_in_batch=None):
    """Compute the GRPO loss from the functions above: loss = aggregate(l(ρ, A) + β·KL).

    Source: DeepSeekMath eq. 3; the names of the metrics are TRL's.
    Args: advantages (B,) or (B, T). old_logps (None while on-policy), ref_logps:
        constants. policy_loss: which l, clip, cispo or sapo. epsilon_high: None is epsilon_low, or
        5.0 with cispo, where it caps ρ. use_bias_correction_kl: ρ·KL (arXiv:2512.02556), not KL.
    Returns: the loss; metrics, floats: the shares of tokens that are clipped, clip_ratio/low_mean
        (ρ below the range, A < 0), /high_mean (ρ above it, or above cispo's cap, A > 0) and
        /region_mean (both); kl, the mean of the KL term. Divided by num_items_in_batch, if given,
        they add up over parts.
    Gotcha: on-policy, at beta 0, the "clip" loss is -Σ w·A (w: a token's weight in aggregate), so
    near 0 where good and bad cancel. Its gradient, -Σ w·A·∇log π, need not be: the policy learns.
    """
    assert ref_logps is not None or (beta == 0 and not use_bias_correction_kl), (
        "ref_logps: got None; allowed with beta > 0 or use_bias_correction_kl: (B, T)")
    assert delta is None or policy_loss == "clip", (
        f"delta: got {delta}; allowed with policy_loss {policy_loss!r} is None")
    assert advantages.shape in (logps.shape, logps.shape[:1]), (
        f"advantages: got {tuple(advantages.shape)}; allowed is (B,) or (B, T), as logps")
    if old_logps is None:
        old_logps = logps                 # ρ = exp(logps - logps.detach()) is 1, but ∇ρ is ∇log π
    mask = completion_mask != 0
    ratio = importance_ratio(
        logps, old_logps.detach(), mask, importance_sampling_level=importance_sampling_level)
    # Padding becomes 0: a NaN times a mask's 0 is NaN, in the gradient, too.
    logps = torch.where(mask, logps, 0)                                         # (B, T)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)                                    # (B, 1)
    advantages = torch.where(mask, advantages, 0)                               # (B, T)
    lower, upper = 0.0, torch.inf                              # outside, ρ counts as clipped
    if policy_loss == "clip":
        epsilon_high = epsilon_low if epsilon_high is None else epsilon_high
        lower, upper = 1 - epsilon_low, 1 + epsilon_high
        per_token_loss = clipped_surrogate_loss(
            ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
        assert delta is None or delta >= upper, f"delta: got {delta}; allowed is {upper} or more"
    elif policy_loss == "cispo":
        upper = 5.0 if epsilon_high is None else epsilon_high
        per_token_loss = cispo_loss(logps, ratio, advantages, epsilon_high=upper)
    elif policy_loss == "sapo":
        assert epsilon_high is None, (
            f"epsilon_high: got {epsilon_high}; allowed with policy_loss 'sapo' is None")
        per_token_loss = sapo_loss(ratio, advantages)
    else:
        raise ValueError(f"policy_loss: got {policy_loss!r}; allowed is 'clip', 'cispo' or 'sapo'")
    if ref_logps is not None:
        kl = torch.where(mask, kl_estimate(logps, ref_logps.detach()), 0)       # (B, T)
        kl = kl * ratio if use_bias_correction_kl else kl
    if beta != 0:
        per_token_loss = per_token_loss + beta * kl            # a clipped token keeps KL's gradient
    loss = aggregate(
        per_token_loss, mask, loss_type=loss_type, max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch, num_rows_in_batch=num_rows_in_batch)

    # For a log: the shares of the tokens that are clipped, and the mean KL.
    num_tokens = float(num_items_in_batch or mask.sum().clamp(min=1))
    low = ((ratio < lower) & (advantages < 0)).sum().item() / num_tokens
    high = ((ratio > upper) & (advantages > 0)).sum().item() / num_tokens
    metrics = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high,
               "clip_ratio/region_mean": low + high}
    if ref_logps is not None:
        metrics["kl"] = kl.sum().item() / num_tokens
    return loss, metrics


# §8 Process supervision, reward functions --------------------------------------------------------

def process_advantages(step_rewards, step_ends, completion_mask, num_generations, *, correction=1,
                       eps=1e-4):
    """Give each token credit for the reasoning steps that end at or after it: it led to them.

    A_{i,t} = Σ_{j: end(i,j) >= t} z_{i,j},  z = (r - mean) / (std + eps) over a group's steps.
    Args: step_rewards (B, S), NaN = no such step; step_ends (B, S), the index t of its last token.
    Returns: (B, T), 0 where all steps of a group have the same reward. Source: DeepSeekMath §4.1.3.
    """
    (B, S), T = step_rewards.shape, completion_mask.size(1)
    assert step_ends.shape == (B, S) and len(completion_mask) == B, (
        f"step_ends, completion_mask: got {tuple(step_ends.shape)}, "
        f"{tuple(completion_mask.shape)}; allowed is ({B}, {S}), ({B}, T)")
    outside = (step_ends < 0) | (step_ends >= T)                                # (B, S)
    assert step_rewards[outside].isnan().all(), (
        f"step_ends: got {step_ends.tolist()}; allowed is 0 ... {T - 1}")
    z = group_advantages(                                      # (B·S,), 0 where there is no step
        step_rewards.reshape(-1), num_generations * S, correction=correction, eps=eps)
    credited = step_ends.unsqueeze(2) >= torch.arange(T, device=step_ends.device)       # (B, S, T)
    advantages = (z.reshape(B, S, 1) * credited).sum(1)                         # (B, T)
    return advantages.masked_fill(completion_mask == 0, 0)


# A reward function is f(prompts=, completions=, completion_ids=, **columns) -> a number for each
# completion, or None where it does not apply. A completion is a string or, in chat data, a list of
# messages {"role", "content"}.

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_answer(text):
    r"""What follows the last </think>; if it has a \boxed{...}, the content of the last one."""
    answer = text.rpartition("</think>")[2]
    _, box, inside = answer.rpartition(r"\boxed{")
    depth = 1                                                  # braces that are open
    for i, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if box and depth == 0:
            return inside[:i].strip()
    return answer.strip()                                      # no box, or its end was cut off


def solution_text(solution):
    """A solution as the text that answers are compared with, "" if there is none.

    If one row of a column has a gap, pandas writes it as NaN, and 72 in the other rows as 72.0.
    """
    if solution is None or solution != solution:
        return ""
    if isinstance(solution, float):
        return numpy.format_float_positional(solution, trim="-")           # 72; 0.00005, not 5e-05
    return str(solution) if isinstance(solution, int) else final_answer(solution)


def accuracy_reward(completions, solution, **kwargs):
    """Give 1 to an answer whose final_answer is the solution's, else 0; None without a solution.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2. Texts are compared; numbers, formulas:
    worked_examples/scripts/math_reward.py.
    """
    answers = [final_answer(text_of(completion)) for completion in completions]
    wanted = [solution_text(text) for text in solution]
    return [float(answer == text) if text else None
            for answer, text in zip(answers, wanted, strict=True)]


def think_format_reward(completions, **kwargs):
    """Give 1 to a text that is one <think>...</think> and then an answer, and 0 to any other.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2. TRL's accepts a second </think>, an empty answer.
    """
    rewards = []
    for text in map(text_of, completions):
        one_thought = text.count("<think>") == text.count("</think>") == 1
        answer = text.partition("</think>")[2].strip()
        rewards.append(float(text.startswith("<think>") and one_thought and answer != ""))
    return rewards


# §9 Sampling --------------------------------------------------------------------------------------

def choose_tokens(logits, uniforms):
    """Choose token v with probability p_v, p = softmax(logits): the first v with Σ_{w<=v} p_w > u.

    Args: logits (B, V); uniforms (B,) in [0, 1), or None for the likeliest token. Returns: (B,).
    """
    if uniforms is None:
        return logits.argmax(-1)
    cdf = logits.softmax(-1, dtype=torch.float64).cumsum(-1)   # (B, V); float32 loses rare tokens
    tokens = torch.searchsorted(cdf, uniforms.double().unsqueeze(1), right=True)[:, 0]      # (B,)
    return tokens.clamp(max=cdf.size(1) - 1)                   # the last sum may round to below u


def record_on_gpu(function, *inputs):
    """Record what function(*inputs) starts on the GPU, as a CUDA graph; return what repeats it.

    The GPU waits while Python starts a step's many kernels one by one; a graph starts them at once.
    Its memory is fixed: inputs are copied into it, and each call overwrites the last result. A
    function that waits for the CPU (a mixture of experts may) is returned as it is.
    """
    inputs = [x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = function(*inputs)
    except RuntimeError:
        return function

    def repeat(*new_inputs):
        for x, new in zip(inputs, new_inputs):
            x.copy_(new)
        graph.replay()
        return result

    return repeat


def generate(model, prompt_ids, prompt_mask, *, max_completion_length, eos_token_ids,
             num_generations=1, pad_token_id=0, temperature=1.0, uniforms=None):
    """Sample G completions for each prompt, and record each token's log-prob.

    The model reads a prompt once; its keys and values are repeated G times. Each token has its own
    uniform number, so other rows change it by rounding alone.
    Args: model: a causal LM with a KV cache. prompt_ids, prompt_mask: (P, L), left-padded.
        eos_token_ids: one or several. uniforms: (P·G, T_max) in [0, 1), or None: greedy.
    Returns: completion_ids, completion_mask, logps (nats), each (P·G, T), T <= T_max.
    """
    from transformers import DynamicCache, StaticCache
    assert prompt_mask[:, -1].all(), "prompt_mask: got padding at the end; allowed is left-padded"
    (P, L), T_max = prompt_ids.shape, max_completion_length
    room = getattr(model.config, "max_position_embeddings", math.inf) - L
    assert T_max <= room, f"max_completion_length: got {T_max}; allowed is up to {room}"
    eos = torch.as_tensor(eos_token_ids, device=prompt_ids.device)
    mask = pad((prompt_mask != 0).long(), (0, T_max), value=1)                  # (P, L+T_max)
    positions = mask.cumsum(1) - mask                          # how many real tokens come before
    active = torch.arange(P * num_generations, device=mask.device)      # (B,), the rows in the loop
    ended = torch.zeros_like(active, dtype=torch.bool)                          # (B,)
    completion_ids = mask.new_full((len(active), T_max), pad_token_id)          # (B, T_max)
    dtype = torch.promote_types(model.dtype, torch.float32)
    logps = torch.zeros_like(completion_ids, dtype=dtype)                       # (B, T_max)
    # On a GPU the step is recorded, and a record has fixed shapes: the cache has its final width
    # from the start, and no row leaves the loop. Not with a sliding window: it counts in Python.
    cache = DynamicCache(config=model.config)
    is_recorded = mask.is_cuda and model._can_compile_fullgraph and not any(cache.is_sliding)
    if is_recorded:
        cache = StaticCache(config=model.config, max_cache_len=L + T_max)

    def next_logits(ids, positions):
        width = L + T_max if is_recorded else cache.get_seq_length() + ids.size(1)
        output = model(input_ids=ids, attention_mask=mask[:, :width], position_ids=positions,
                       past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].to(dtype) / temperature                     # (rows, V)

    with torch.no_grad():
        logits = next_logits(prompt_ids * mask[:, :L], positions[:, :L])            # (P, V)
        prompt_of = active // num_generations                                   # (B,)
        cache.reorder_cache(prompt_of)                         # picks rows, so it also repeats
        logits, mask, positions = logits[prompt_of], mask[prompt_of], positions[prompt_of]
        for t in range(T_max):
            token = choose_tokens(logits, None if uniforms is None else uniforms[active, t])
            completion_ids[active, t] = token
            logps[active, t] = selective_log_softmax(logits, token)
            ended = ended | torch.isin(token, eos)                              # (rows,)
            if ended.all() or t + 1 == T_max:
                break
            if ended.any() and not is_recorded:                # ended rows leave the loop
                stay = (~ended).nonzero()[:, 0]
                active, mask, positions = active[stay], mask[stay], positions[stay]
                token, ended = token[stay], ended[stay]
                cache.reorder_cache(stay)
            step = token.unsqueeze(1), positions[:, L + t, None]                # (rows, 1) each
            if is_recorded and t == 1:                         # a first step has warmed up
                next_logits = record_on_gpu(next_logits, *step)
            logits = next_logits(*step)                                             # (rows, V)
    completion_ids, logps = completion_ids[:, :t + 1], logps[:, :t + 1]         # (B, T)
    completion_mask = make_completion_mask(completion_ids, eos)                 # (B, T)
    padding = completion_mask == 0                             # recorded, an ended row goes on
    completion_ids = completion_ids.masked_fill(padding, pad_token_id)
    return completion_ids, completion_mask, logps.masked_fill(padding, 0)


def encode_prompts(tokenizer, prompts, device):
    """Tokenize strings, or messages by the chat template: ids, mask (P, L), padded on the left."""
    is_text = isinstance(prompts[0], str)
    if not is_text:
        prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt",
                       add_special_tokens=is_text).to(device)
    return inputs.input_ids, inputs.attention_mask


def ends_of_an_answer(policy, tokenizer):
    """The EOS ids, and the added token with which the chat template ends a turn, if it has one.

    A base model's EOS is often another token; without this one a chat answer runs to the limit.
    """
    added = tokenizer.added_tokens_decoder                     # id -> token
    of_config = set(numpy.atleast_1d(policy.generation_config.eos_token_id))
    ends = of_config & added.keys()                            # a default id may be a letter's
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "7"}]
        behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("7")[2].lstrip()
        ends |= {token_id for token_id, token in added.items() if behind.startswith(token.content)}
    return list(ends | {tokenizer.eos_token_id} - {None})


def sample_rollout(policy, tokenizer, examples, config, rng=None):
    """Algorithm 1, line 7: sample G answers to each prompt (B rows); without rng, a greedy one."""
    G = config.num_generations if rng else 1
    shape = len(examples) * G, config.max_completion_length
    uniforms = torch.tensor(rng.random(shape), device=policy.device) if rng else None
    prompts = [example["prompt"] for example in examples]
    prompt_ids, prompt_mask = encode_prompts(tokenizer, prompts, policy.device)         # (P, L)
    eos = torch.tensor(ends_of_an_answer(policy, tokenizer), device=policy.device)
    policy.eval()                                              # dropout would change π in each pass
    sampler = copy.deepcopy(policy) if config.bf16 else policy
    if config.bf16:
        for weight in sampler.parameters():                    # buffers, as RoPE's, stay float32
            weight.data = weight.data.bfloat16()
    completion_ids, completion_mask, sampler_logps = generate(
        sampler, prompt_ids, prompt_mask, max_completion_length=config.max_completion_length,
        eos_token_ids=eos, num_generations=G, pad_token_id=tokenizer.pad_token_id,
        temperature=config.temperature, uniforms=uniforms)
    # The text is every sampled token but the EOS: a <pad> or a special <think>, too.
    is_eos = torch.isin(completion_ids, eos)                                    # (B, T)
    is_text = (completion_mask != 0) & ~is_eos                                  # (B, T)
    answers = [ids[kept] for ids, kept in zip(completion_ids, is_text)]
    texts = tokenizer.batch_decode(answers, clean_up_tokenization_spaces=False)
    # Where a prompt, or its chat template, ends in <think>, the answer begins with it.
    opened = [text.rstrip().endswith("<think>") for text in tokenizer.batch_decode(prompt_ids)]
    completions = [("<think>" if opened[i // G] else "") + text for i, text in enumerate(texts)]
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    return SimpleNamespace(
        examples=[copy.deepcopy(example) for example in examples for _ in range(G)],
        completions=completions,                               # B strings, or B lists of messages
        prompt_ids=prompt_ids.repeat_interleave(G, 0),                          # (B, L)
        prompt_mask=prompt_mask.repeat_interleave(G, 0),                        # (B, L)
        completion_ids=completion_ids,                                          # (B, T)
        completion_mask=completion_mask,                                        # (B, T)
        sampler_logps=sampler_logps,                           # (B, T), log π_old up to rounding
        terminated=is_eos.any(1))                              # (B,), False where it was cut off


def one_line(rollout, i, reward):
    """The end of row i's prompt, and the beginning of its answer."""
    prompt, answer = text_of(rollout.examples[i]["prompt"]), text_of(rollout.completions[i])
    end = "" if rollout.terminated[i] else " (cut off)"
    return f"  {prompt[-30:]!r} -> {answer!r:.90}{end}   reward {reward:g}"


def evaluate(policy, tokenizer, dataset, reward_funcs, config, *, shown=0):
    """Answer all prompts greedily, show the first ones; return the mean of each reward function."""
    rewards_per_func = []
    for start in range(0, len(dataset), config.generation_batch_size):
        examples = dataset[start:start + config.generation_batch_size]
        rollout = sample_rollout(policy, tokenizer, examples, config)
        rewards_per_func.append(compute_rewards(reward_funcs, rollout))         # (rows, F)
        rewards = combine_rewards(rewards_per_func[-1], config.reward_weights)  # (rows,)
        for i in range(start, min(shown, len(examples))):      # of the first batch
            tqdm.write(one_line(rollout, i, rewards[i].item()))
    means = torch.cat(rewards_per_func).nanmean(0).tolist()                     # (F,)
    return {function.__name__: mean for function, mean in zip(reward_funcs, means)}


# §10 Training: Algorithm 1 of the paper -----------------------------------------------------------

def flag(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Mostly TRL's names. In TRL max_steps counts updates; cispo, sapo are kinds of loss_type."""
    learning_rate: float = flag(1e-6, "AdamW's step size; it falls linearly, to 0 at max_steps")
    max_grad_norm: float = flag(1.0, "a longer gradient is scaled down to this norm; 0: never")
    max_steps: int = flag(100, "steps in all; each learns from one new batch")
    num_generations: int = flag(8, "G, completions for each prompt: 2 or more")
    generation_batch_size: int = flag(64, "B, completions of a step: a multiple of G")
    num_iterations: int = flag(1, "mu, passes over each batch, 1 or more")
    num_mini_batches: int = flag(1, "random parts of a pass, one update each: 1 to B")
    per_device_train_batch_size: int = flag(8, "rows scored at once: memory, not maths")
    max_completion_length: int = flag(512, "T_max, the longest completion in tokens")
    temperature: float = flag(1.0, "of sampling and of scoring, above 0")
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = flag("dapo", "what divides token losses")
    policy_loss: Literal["clip", "cispo", "sapo"] = flag("clip", "the policy term")
    importance_sampling_level: Literal["token", "sequence"] = flag("token", "sequence: GSPO")
    epsilon: float = flag(0.2, "with clip: range below 1; also above, if epsilon_high is None")
    epsilon_high: float | None = flag(None, "clip: range above 1; cispo: cap of the ratio (5)")
    delta: float | None = flag(None, "with clip: cap of ρ in ρ·A, at least 1 + epsilon_high")
    beta: float = flag(0.0, "weight of the KL term; 0: no reference model")
    use_bias_correction_kl: bool = flag(False, "with beta > 0: the KL estimate times the ratio")
    scale_rewards: Literal["group", "batch", "none"] = flag("group", "whose std divides r - mean")
    reward_weights: list[float] | None = flag(None, "a number for each reward function (1)")
    mask_truncated_completions: bool = flag(False, "no loss on answers without an EOS")
    sync_ref_model: bool = flag(False, "with beta > 0: refresh the reference every M steps")
    ref_model_sync_steps: int = flag(512, "M, steps of an outer iteration")
    seed: int = flag(42, "of all that is drawn, and of the tiny model")
    bf16: bool = flag(False, "bfloat16: autocast trains, a bfloat16 copy of the weights samples")
    full_determinism: bool = flag(False, "on a GPU: deterministic kernels, a third slower")
    save_steps: int = flag(10, "steps between checkpoints; only the last is kept")
    eval_steps: int = flag(0, "steps between answers to eval_dataset; 0: before and after only")

    def __post_init__(self):
        for name, value in vars(self).items():
            assert not isinstance(value, int | float) or 0 <= value < math.inf, (
                f"{name}: got {value}; allowed is a number, 0 or more")
        B, G = self.generation_batch_size, self.num_generations
        assert G > 1 and B % G == 0, (
            f"generation_batch_size: got {B}; allowed: a multiple of num_generations (2 or more)")
        assert self.num_mini_batches <= B, f"num_mini_batches: got more than {B} answers"
        assert self.temperature > 0, "temperature: got 0; allowed is more"
        assert self.loss_type != "bnpo", "loss_type: got bnpo, whose parts do not add up"
        assert self.beta > 0 or not self.sync_ref_model, "sync_ref_model: allowed with beta > 0"
        assert self.policy_loss == "clip" or self.epsilon == 0.2, "epsilon: allowed with clip"
        x = torch.zeros(1, 1)                                  # the loss refuses what it cannot use
        grpo_loss(x, x, x, ref_logps=x if self.beta > 0 else None, **loss_options(self))


def loss_options(config):
    """The arguments of grpo_loss that a config sets."""
    names = ["beta", "use_bias_correction_kl", "epsilon_high", "delta", "policy_loss", "loss_type",
             "importance_sampling_level", "max_completion_length"]
    return {name: getattr(config, name) for name in names} | {"epsilon_low": config.epsilon}


def outcome_advantages(rewards, rollout, config):
    """Algorithm 1, line 9: from rewards (B,) to (B, T), equal in all tokens of an answer."""
    advantages = group_advantages(
        rewards, config.num_generations, scale_rewards=config.scale_rewards)    # (B,), float64
    return broadcast_advantages(advantages, rollout.completion_mask).to(rollout.sampler_logps)


def train(policy, tokenizer, dataset, reward_funcs, config, *, state=None,
          compute_advantages=outcome_advantages):
    """Algorithm 1 of DeepSeekMath, its line numbers on the right: a generator that yields steps.

    The loops of lines 2 and 4 are one: an outer iteration begins where π_ref is refreshed. Line 12,
    a reward model that learns, is in worked_examples/scripts/iterative_grpo.py.
    Args: policy: a float32 causal LM of transformers, trained in place. dataset: dicts with
        "prompt", ... compute_advantages: from rewards (B,), rollout and config to (B, T).
    Yields: after each step the state, the rollout and the metrics, under TRL's names.
    """
    state = state or initial_state(policy, config)                              # 1, 3
    B, G = config.generation_batch_size, config.num_generations
    num_updates = config.num_iterations * config.num_mini_batches
    while state.step < config.max_steps:                                        # 2, 4
        started = time.perf_counter()
        rng = numpy.random.default_rng([config.seed, 3, state.step])    # a resumed run draws alike
        rate = config.learning_rate * (1 - state.step / config.max_steps)       # linearly to 0
        state.optimizer.param_groups[0]["lr"] = rate
        if config.sync_ref_model and state.step % config.ref_model_sync_steps == 0:
            state.reference.load_state_dict(policy.state_dict())                # 3: π_ref ← π_θ

        # Sample and compare. G answers to each prompt; how far is each above its group's mean?
        chosen = rng.choice(len(dataset), B // G, replace=B // G > len(dataset))
        examples = [dataset[i] for i in chosen]                                 # 5: P prompts
        rollout = sample_rollout(policy, tokenizer, examples, config, rng)      # 7: B answers
        asked = time.perf_counter()
        rewards_per_func = compute_rewards(reward_funcs, rollout)               # 8: (B, F)
        reward_time = time.perf_counter() - asked
        rewards = combine_rewards(rewards_per_func, config.reward_weights)      # (B,), r_i
        advantages = compute_advantages(rewards, rollout, config)               # 9: (B, T)
        mask = rollout.completion_mask                                          # (B, T)
        if config.mask_truncated_completions:
            mask = mask * rollout.terminated.unsqueeze(1)                       # (B, T)

        # Score, before the weights move. A step's only update takes its own logps as old_logps.
        old_logps, ref_logps = None, None
        if num_updates > 1:
            old_logps = score_rollout(policy, rollout, config)                  # 6: (B, T)
        if state.reference:
            ref_logps = score_rollout(state.reference, rollout, config)         # (B, T)

        # Learn. At beta 0 a row of advantages 0 has no gradient: it counts, but no pass is made.
        has_gradient = (mask if config.beta > 0 else mask * advantages).any(1)  # (B,)
        rescored = rollout.sampler_logps.clone()               # (B, T), log π_old of these rows
        sums = Counter({"loss": 0, "grad_norm": 0, "clip_ratio/low_mean": 0,
                        "clip_ratio/high_mean": 0, "clip_ratio/region_mean": 0})
        state.optimizer.zero_grad()                            # a reward function may have left one
        for _ in range(config.num_iterations):                                  # 10: μ passes
            for rows in torch.tensor(rng.permutation(B)).tensor_split(config.num_mini_batches):
                num_tokens = mask[rows].sum().item()
                for part in by_length(rollout, rows[has_gradient[rows].cpu()], config):
                    A, m = advantages[part], mask[part]                         # (part, T)
                    logps = score_rows(policy, rollout, part, config)           # (part, T)
                    old = logps.detach() if old_logps is None else old_logps[part]
                    ref = None if ref_logps is None else ref_logps[part]
                    # 11: ρ = exp(logps - old), l = -min(ρ·A, clip(ρ)·A) + β·KL; their mean
                    loss, loss_metrics = grpo_loss(
                        logps, A, m, old_logps=old, ref_logps=ref,
                        num_items_in_batch=num_tokens, num_rows_in_batch=len(rows),
                        **loss_options(config))
                    loss.backward()                            # the gradients of parts add up
                    sums.update(loss=loss.item(), **loss_metrics)               # a Counter adds
                    rescored[part] = old
                norm = torch.nn.utils.clip_grad_norm_(
                    policy.parameters(), config.max_grad_norm or math.inf, error_if_nonfinite=True)
                state.optimizer.step()                         # without a gradient none moves
                state.optimizer.zero_grad()                    # sampling needs the memory
                sums["grad_norm"] += norm.item()
        gaps = (rescored - rollout.sampler_logps).abs()         # NaN where a weight is NaN
        gap = (gaps.sum() / mask[has_gradient].sum().clamp(min=1)).item()
        assert gap < (1 if config.bf16 else 1e-3), (           # float32's rounding: 1e-6 to 1e-4
            f"sampled and scored log-probs differ by {gap:.2g} nats: positions, mask, cache?")

        state.step += 1
        rollout.rewards_per_func, rollout.advantages = rewards_per_func, advantages
        yield state, rollout, {
            "step": state.step, "step_time": time.perf_counter() - started,
            "reward_time": reward_time, "learning_rate": rate,
            **sample_metrics(rollout, reward_funcs, rewards, config),
            **{name: total / num_updates for name, total in sums.items()},
            "sampling/sampling_logp_difference/mean": gap}


def initial_state(policy, config):
    """What a run carries from step to step besides the policy's weights."""
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    reference = copy.deepcopy(policy) if config.beta > 0 else None              # π_ref
    return SimpleNamespace(step=0, optimizer=optimizer, reference=reference)


def compute_rewards(reward_funcs, rollout):
    """Algorithm 1, line 8: what each function says of each completion, (B, F), None as NaN."""
    examples = rollout.examples
    columns = {name: [row[name] for row in examples] for name in examples[0] if name != "prompt"}
    ids = [row[m != 0].tolist() for row, m in zip(rollout.completion_ids, rollout.completion_mask)]
    given = dict(prompts=[row["prompt"] for row in examples], completions=rollout.completions,
                 completion_ids=ids, **columns)
    names = [function.__name__ for function in reward_funcs]
    assert len(set(names)) == len(names), f"reward_funcs: got {names}; allowed: each name once"
    rewards_per_func = []
    for function in reward_funcs:
        rewards = function(**copy.deepcopy(given))             # what it changes is its own
        rewards = numpy.asarray(rewards, dtype=object)                          # (B,)
        assert rewards.shape == (len(examples),), (
            f"reward_funcs: {function} returned {rewards!r:.200}; allowed: {len(examples)} rewards")
        for reward, completion in zip(rewards, rollout.completions):
            assert reward is None or math.isfinite(reward), (
                f"reward_funcs: {function} gave {reward} to {completion!r:.200}; allowed is a "
                "finite number or None")
        rewards_per_func.append(rewards.astype(float))         # None becomes NaN
    return torch.tensor(numpy.stack(rewards_per_func, 1), device=rollout.completion_ids.device)


def score_rows(model, rollout, rows, config):
    """The log-probs of these rows' completions under the model, in one pass: (rows, T).

    On purpose prompts have one column of padding more than in sampling: a model that sees padding,
    or ignores positions, then disagrees with the sampler. train ends if they differ on average by
    1e-3 nats or more (with bf16 by 1). Answers are cut to the longest of these rows.
    """
    model.eval()                                               # a reward function may train it
    T = rollout.completion_mask[rows].sum(1).max().item()
    prompt_ids = pad(rollout.prompt_ids[rows], (1, 0))                          # (rows, 1+L)
    prompt_mask = pad(rollout.prompt_mask[rows], (1, 0))                        # (rows, 1+L)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
        logps, _ = per_token_logps(
            model, prompt_ids, prompt_mask, rollout.completion_ids[rows, :T],
            rollout.completion_mask[rows, :T], temperature=config.temperature)
    return pad(logps, (0, rollout.completion_mask.size(1) - T))


def score_rollout(model, rollout, config):
    """log π_old or log π_ref of all rows, without gradient: (B, T)."""
    logps = torch.zeros_like(rollout.sampler_logps)
    with torch.no_grad():
        for part in by_length(rollout, torch.arange(len(logps)), config):
            logps[part] = score_rows(model, rollout, part, config)
    return logps


def by_length(rollout, rows, config):
    """Split these rows into what one pass takes, short answers first: a part has little padding."""
    rows = rows[rollout.completion_mask[rows].sum(1).argsort(stable=True).cpu()]
    for start in range(0, len(rows), config.per_device_train_batch_size):
        yield rows[start:start + config.per_device_train_batch_size]


def sample_metrics(rollout, reward_funcs, rewards, config):
    """What a step's samples show; NaN where no answer has a reward."""
    mask = rollout.completion_mask                                              # (B, T)
    silent = group_stats(rewards, config.num_generations)[1] == 0               # (P,)
    metrics = {
        "reward": rewards.nanmean(),
        "reward_std": group_stats(rewards, len(rewards))[1],
        "frac_reward_zero_std": silent.float().mean(),
        "frac_reward_nan": rewards.isnan().float().mean(),     # share that no function has scored
        "completions/mean_length": mask.sum() / len(mask),
        "completions/clipped_ratio": 1 - rollout.terminated.float().mean(),     # share cut off
        "entropy": aggregate(-rollout.sampler_logps, mask, loss_type="dapo")}   # mean -log π
    names = [f"rewards/{function.__name__}/mean" for function in reward_funcs]
    metrics.update(zip(names, rollout.rewards_per_func.nanmean(0)))
    return {name: x.item() for name, x in metrics.items()}


# §11 The demo's task ------------------------------------------------------------------------------
# A small transformer learns two-digit addition: first from a teacher who mostly forgets the carry
# (supervised), then from its own answers (GRPO), which takes it beyond its teacher.

TINY = dict(learning_rate=4e-4, max_steps=80, num_iterations=2, generation_batch_size=128,
            per_device_train_batch_size=128, max_completion_length=28,
            reward_funcs=["accuracy_reward", "think_format_reward"])


def tiny_tokenizer():
    """One token for each character of a sum, and for <think> and </think>."""
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
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
        activation_function="gelu_pytorch_tanh")).eval()


def tiny_problems(seed):
    """The 6,561 sums of 11 ... 99 without round numbers, shuffled: to train on, and held out."""
    numbers = [x for x in range(11, 100) if x % 10 > 0]
    problems = [{"prompt": f"{x}+{y}=", "solution": str(x + y)} for x in numbers for y in numbers]
    numpy.random.default_rng([seed, 1]).shuffle(problems)
    return problems[500:], problems[:500]


def teacher_trace(prompt, forgets_carry):
    """A worked answer: 47+85= gets <think>7+5=12,4+8+1=13</think>132; without the carry 122."""
    x, y = map(int, prompt.rstrip("=").split("+"))
    units = x % 10 + y % 10
    carry = 0 if forgets_carry else units // 10
    tens = x // 10 + y // 10 + carry
    thought = f"{x % 10}+{y % 10}={units},{x // 10}+{y // 10}+{carry}={tens}"
    return f"<think>{thought}</think>{10 * tens + units % 10}<eos>"


def cold_start(model, tokenizer, problems, seed, *, steps=400):
    """Imitate a teacher who forgets 4 carries of 5: minimize the mean of -log π of his tokens."""
    rng = numpy.random.default_rng([seed, 2])
    traces = [row["prompt"] + teacher_trace(row["prompt"], rng.random() < 0.8) for row in problems]
    ids = tokenizer(traces, padding=True, return_tensors="pt")["input_ids"].to(model.device)
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)      # -100: no loss
    labels[:, :len("47+85=")] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for step in tqdm(range(steps), "cold start", disable=None):
        chosen = rng.choice(len(ids), 32)
        optimizer.zero_grad()
        model(input_ids=ids[chosen], labels=labels[chosen]).loss.backward()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, 2 - 2 * step / steps)  # constant, then to 0
        optimizer.step()


# §12 Command line ---------------------------------------------------------------------------------

def load_dataset(path, policy=None, tokenizer=None, config=None):
    """Read JSON Lines: "prompt" (all texts, or all messages), further columns, the same in each.

    With a policy each row is read as a step reads it: a bad row is found now, not when drawn.
    """
    rows, unwritten = [], []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))                  # bytes: UTF-8, a BOM is skipped
                assert rows[-1].keys() == rows[0].keys(), "its columns are not the first row's"
                if policy and not can_be_answered(rows[-1], policy, tokenizer, config):
                    unwritten.append(number)
            except Exception as error:
                error.add_note(f"dataset: {path}, line {number}: {line[:60]!r}")
                raise
    assert len({type(row["prompt"]) for row in rows}) == 1, f"dataset: {path} is empty, or mixed"
    if unwritten:
        print(f"{path}: in {len(unwritten)} lines no answer can equal the solution, because the "
              f"tokenizer cannot write its letters; the first is line {unwritten[0]}")
    return rows


def can_be_answered(row, policy, tokenizer, config):
    """Read a row as a step does; return whether the tokenizer can write its solution."""
    prompt, solution = row["prompt"], row.get("solution")
    assert text_of(prompt), "the prompt has no text"
    prompt_ids, _ = encode_prompts(tokenizer, [prompt], "cpu")                  # (1, L)
    room = getattr(policy.config, "max_position_embeddings", math.inf) - prompt_ids.size(1)
    assert config.max_completion_length <= room, (
        f"max_completion_length: got {config.max_completion_length}; this prompt allows {room}")
    assert prompt_ids[0, -1] not in ends_of_an_answer(policy, tokenizer), "the prompt has an EOS"
    assert isinstance(prompt, str) or prompt[-1]["role"] != "assistant", "the prompt has an answer"
    if not isinstance(solution, str | int | float):
        return True                                            # for a reward function of the user's
    ids = tokenizer(solution_text(solution), add_special_tokens=False)["input_ids"]
    written = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return final_answer(written) == solution_text(solution)


def load_model(name, seed=0):
    """A float32 causal LM and tokenizer: tiny, a folder or a hub name; its own code never runs."""
    if name == "tiny":
        tokenizer = tiny_tokenizer()
        return tiny_model(tokenizer, seed), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    assert not Path(name, "adapter_config.json").exists(), (
        f"model: {name} is an adapter; allowed is a whole model (peft's merge_and_unload)")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model, report = AutoModelForCausalLM.from_pretrained(
        name, trust_remote_code=False, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], f"model: {name} has no weights {report['missing_keys']}"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def load_reward_funcs(names):
    """accuracy_reward and think_format_reward are this file's; my_rewards.short is a module's."""
    sys.path.insert(0, os.getcwd())                            # where my_rewards.py may be
    reward_funcs = []
    for name in names:
        module, _, function = name.rpartition(".")
        assert module or name in ("accuracy_reward", "think_format_reward"), (
            f"reward_funcs: got {name}; allowed: accuracy_reward, think_format_reward, MODULE.NAME")
        reward_funcs.append(getattr(importlib.import_module(module or __name__), function))
    return reward_funcs


@dataclass
class ScriptArguments:
    """What is trained, on what, and where it is written; TRL's name."""
    model: str = flag("tiny", "tiny (the demo), or a folder or hub name")
    dataset: str | None = flag(None, "JSON Lines: prompt (text or messages), further columns")
    eval_dataset: str | None = flag(None, "such a file, answered before and after training")
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy_reward"], metadata={
        "help": "accuracy_reward, think_format_reward, or yours, as my_rewards.short"})
    output_dir: str = flag("grpo-output", "the run's folder; if it exists: NAME-2, NAME-3, ...")
    resume_from_checkpoint: str | None = flag(
        None, "a run's folder or a checkpoint-STEP; all its options come back")

    def __post_init__(self):
        for name in "dataset", "eval_dataset", "output_dir":   # a resume may start elsewhere
            if getattr(self, name):
                setattr(self, name, os.path.abspath(getattr(self, name)))


def parse_options(argv):
    """A command line's ScriptArguments and GRPOConfig; what the checkpoint of a resume holds."""
    from transformers import HfArgumentParser
    from transformers.trainer_utils import get_last_checkpoint
    parser = HfArgumentParser([ScriptArguments, GRPOConfig], allow_abbrev=False,
                              usage="python grpo.py [--help] [--OPTION VALUE ...]")
    options, saved = parser.parse_args(argv), {}               # parsed twice: first for defaults
    folder = options.resume_from_checkpoint
    if folder:
        folder = get_last_checkpoint(folder) or folder         # a run's newest; or a checkpoint
        saved = torch.load(Path(folder, "trainer_state.pt"), map_location="cpu", weights_only=True)
        parser.set_defaults(**saved["arguments"])
    elif options.model == "tiny":
        parser.set_defaults(**TINY)
    try:
        options, config = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    except AssertionError as error:                            # GRPOConfig's
        parser.error(str(error))
    if (options.model == "tiny") != (options.dataset is None):
        parser.error(f"--dataset: got {options.dataset}; allowed is FILE.jsonl, none for tiny")
    if saved and options.reward_funcs != saved["arguments"]["reward_funcs"]:
        parser.error(f"--reward_funcs: got {options.reward_funcs}; allowed on a resume: the run's")
    if saved and saved["step"] >= config.max_steps:
        parser.error(f"--max_steps: got {config.max_steps}; allowed is more than {saved['step']}")
    options.resume_from_checkpoint = folder
    return options, config, saved


def load_job(options, config):
    """What a command line trains: policy, tokenizer, dataset, reward functions, held-out rows."""
    from transformers.utils import logging
    logging.set_verbosity_error()                              # of defaults that are meant
    logging.disable_progress_bar()
    if config.full_determinism:                                # before CUDA starts
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    reward_funcs = load_reward_funcs(options.reward_funcs)
    model = options.resume_from_checkpoint or options.model
    policy, tokenizer = load_model(model, config.seed)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    dataset, held_out = tiny_problems(config.seed)
    if options.dataset:
        dataset, held_out = load_dataset(options.dataset, policy, tokenizer, config), []
    if options.eval_dataset:
        held_out = load_dataset(options.eval_dataset, policy, tokenizer, config)
    prompt_ids, _ = encode_prompts(tokenizer, [dataset[0]["prompt"]], "cpu")
    print(f"{model}: {len(dataset)} problems; the first, as the model reads it: "
          f"{tokenizer.decode(prompt_ids[0])!r:.999}; rewards: {', '.join(options.reward_funcs)}",
          flush=True)
    if policy.num_parameters() < 10**6:
        torch.set_num_threads(1)                               # more hardly pay, with other digits
    if model == "tiny":
        cold_start(policy, tokenizer, dataset, config.seed)
    return policy, tokenizer, dataset, reward_funcs, held_out


def save_checkpoint(policy, tokenizer, state, arguments, folder):
    """Write folder/checkpoint-STEP in Hugging Face's format; until it is whole, as STEP.part."""
    from transformers.trainer_utils import rotate_checkpoints
    part = folder / f"checkpoint-{state.step}.part"
    policy.save_pretrained(part)
    tokenizer.save_pretrained(part)
    torch.save({"step": state.step, "before": state.before, "arguments": arguments,
                "optimizer": state.optimizer.state_dict(),
                "reference": state.reference.state_dict() if state.reference else None,
                "logs": {log.name: log.read_text() for log in folder.glob("*.jsonl")}},
               part / "trainer_state.pt")
    part.rename(part.with_suffix(""))
    rotate_checkpoints(folder, save_total_limit=1)             # only the last is kept


def make_folder(name, number=1):
    """Make the folder NAME, or NAME-2, NAME-3, ...: a run writes only into one that it has made."""
    folder = Path(name if number == 1 else f"{name}-{number}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return make_folder(name, number + 1)
    return folder


def write_logs(folder, rollout, metrics, reward_funcs, G):
    """Append the metrics to metrics.jsonl, one group to completions.jsonl; NaN becomes null."""
    scores = rollout.rewards_per_func[:G].T.tolist()                            # (F, G)
    group = {"step": metrics["step"], "prompt": rollout.examples[0]["prompt"],
             "completions": rollout.completions[:G],
             "rewards": dict(zip([function.__name__ for function in reward_funcs], scores)),
             "advantages": rollout.advantages[:G, 0].tolist()}                  # of first tokens
    for name, line in ("metrics.jsonl", metrics), ("completions.jsonl", group):
        line = json.loads(json.dumps(line), parse_constant=lambda nan: None)
        with open(folder / name, "a") as log:
            log.write(json.dumps(line) + "\n")


def write_progress(recent, rollout, config):
    """Print the means of the steps since the last line, and a sampled answer."""
    columns = {name: [row.get(name, math.nan) for row in recent] for name in recent[-1]}
    means = {name: torch.tensor(column, dtype=torch.float64).nanmean().item()
             for name, column in columns.items()} | {"step": recent[-1]["step"]}
    tqdm.write("  step {step}: reward {reward:.2f}, silent groups {frac_reward_zero_std:.0%}, "
               "entropy {entropy:.2f}, cut off {completions/clipped_ratio:.0%}, {step_time:.2f} s "
               "({reward_time:.2f} in rewards)".format_map(means))
    reward = combine_rewards(rollout.rewards_per_func[:1], config.reward_weights)
    tqdm.write(one_line(rollout, 0, reward.item()))
    if means["frac_reward_nan"] > 0:
        tqdm.write(f"  no reward function has scored {means['frac_reward_nan']:.1%} of the answers")
    if means["frac_reward_zero_std"] == 1 and config.beta == 0:
        tqdm.write("  no weight has moved: in each group all scored answers earned the same")


def main(argv):
    """Run a command line: load, evaluate, train, evaluate again."""
    options, config, saved = parse_options(argv)
    policy, tokenizer, dataset, reward_funcs, held_out = load_job(options, config)
    job = policy, tokenizer, held_out, reward_funcs, config
    state, recent = initial_state(policy, config), []
    state.before = None                                        # held-out rewards before step 1
    if saved:
        if saved["arguments"]["eval_dataset"] == options.eval_dataset:
            state.before = saved["before"]
        print(f"from step {saved['step']} of {config.max_steps}")
        state.step = saved["step"]
        state.optimizer.load_state_dict(saved["optimizer"])
        if state.reference:
            state.reference.load_state_dict(saved["reference"])
    if held_out and not state.before:
        state.before = evaluate(*job, shown=4)
        for name, mean in state.before.items():
            print(f"held-out {name}: {mean:.2f} (greedy, {len(held_out)} problems)")
    folder = make_folder(options.output_dir)
    for name, lines in saved.get("logs", {}).items():
        (folder / name).write_text(lines)
    called = sys.argv[:len(sys.argv) - len(argv)]              # grpo.py, or homework.py FILE
    command = shlex.join(["python", *called, "--resume_from_checkpoint", str(folder)])
    print(f"{folder} takes the run, and a checkpoint every {config.save_steps} steps; "
          f"after a stop, from the last of them: {command}", flush=True)

    steps = train(policy, tokenizer, dataset, reward_funcs, config, state=state)
    try:
        for _, rollout, metrics in tqdm(
                steps, "GRPO", initial=state.step, total=config.max_steps, disable=None):
            recent.append(metrics)
            if 10 * state.step % config.max_steps < 10:        # ten times in a run
                write_progress(recent, rollout, config)
                recent = []
            is_last = state.step == config.max_steps
            if held_out and (is_last or config.eval_steps and state.step % config.eval_steps == 0):
                after = evaluate(*job, shown=4 if is_last else 0)
                for name, mean in after.items():
                    metrics[f"eval_rewards/{name}/mean"] = mean
                    when = "" if is_last else f"  step {state.step}: "
                    tqdm.write(f"{when}held-out {name}: {state.before[name]:.2f} -> {mean:.2f} "
                               f"(greedy, {len(held_out)} problems)")
            write_logs(folder, rollout, metrics, reward_funcs, config.num_generations)
            if state.step % config.save_steps == 0 or is_last:
                save_checkpoint(policy, tokenizer, state, vars(options) | vars(config), folder)
            sys.stdout.flush()                                 # a pipe or a file keeps it otherwise
    except KeyboardInterrupt:
        sys.exit(f"stopped; from the last checkpoint: {command}")


if __name__ == "__main__":
    main(sys.argv[1:])

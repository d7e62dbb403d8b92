"""grpo.py: Group Relative Policy Optimization, one pure function for each equation.

A language model (the policy) answers each prompt G times. The answers are scored, and the tokens of an answer
become more likely where it beats the mean of its group, less likely where it falls behind. §1-§8: the maths,
from rewards to loss; §9: sampling; §10: Algorithm 1 of the paper; §11: the command line.

    python grpo.py --model tiny
    python grpo.py --model NAME_OR_FOLDER --dataset FILE.jsonl --reward_funcs accuracy

Notation (DeepSeekMath, arXiv:2402.03300, "the paper" below)

    symbol          name in code             shape   meaning
    q, o_i          prompt, completion               a question and one of its G sampled answers
    G               num_generations                  answers for each prompt
    P, B            -                                prompts; rows, B = P·G (row i belongs to prompt i // G)
    L, T            -                                tokens of the longest prompt, of the longest completion
    V, S, F         -                                vocabulary, reasoning steps, reward functions
    r_i             rewards                  (B,)    score of a whole answer, in reward units; NaN = none
    A_i, A_{i,t}    advantages               (B,)    how much better than the group's mean; or (B, T)
    log π_θ         logps                    (B, T)  log-prob of each sampled token, policy in training (nats)
    log π_old       old_logps                (B, T)  the same under the weights that sampled
    log π_ref       ref_logps                (B, T)  the same under the reference, a frozen earlier copy
    m               completion_mask          (B, T)  1 = real token (the EOS included), 0 = padding
    ρ               ratio                    (B, T)  π_θ / π_old; 1 while on-policy, that is π_θ = π_old
    ε_low, ε_high   epsilon_low, epsilon_high        clip range 1 - ε_low ... 1 + ε_high
    β, μ            beta, num_iterations             weight of the KL term; updates on one batch of samples

The paper maximises J; a loss here is -J. Defaults are TRL's ("dapo", β = 0, one update on each batch, for
which ρ = 1 and nothing clips); --preset deepseekmath is the paper's loss. A * after a function's first
sentence: train never calls it. "Args" leaves out what the table tells. A mask may be bool, integer or float;
what stands in the padding, NaN included, reaches no value and no gradient. _check, with which most functions
begin, compares the shapes of arguments with those named there ("rewards: B" has one axis).

Left out on purpose: inference servers, LoRA, images, tools, value networks, more than one GPU, and top-k or
top-p sampling, whose log-probs would not be the scorer's.
"""

import copy
import decimal
import importlib
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import numpy
import torch
from tqdm import tqdm

# §1 Rewards -----------------------------------------------------------------------------------------------
# A reward function is f(prompts=, completions=, completion_ids=, **columns) -> for each completion a number,
# or None where it does not apply. A completion is a string or, in chat data, a list of {"role", "content"}.

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy_reward(completions, solution, **kwargs):
    r"""Give 1 to an answer that is the same as its solution, 0 to any other.

    The answer is the text after the last </think>, else the whole text; of it, what the last \boxed{} holds.
    It is the same as text, or as a decimal number: 1,000 = 1000 = 1000.0. Without a solution: None.
    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2.2. Formulas: worked_examples/math_reward.py.
    """
    found = [unboxed(text_of(completion).rpartition("</think>")[2]) for completion in completions]
    right = [unboxed("" if s is None else str(s)) for s in solution]
    return [float(a == s or number(a) == number(s)) if s else None for a, s in zip(found, right, strict=True)]


def unboxed(text):
    r"""Take what the last \boxed{} of a text holds, else the text, without white space around it."""
    _, box, inside = text.rpartition(r"\boxed{")
    open_braces = 1
    for i, character in enumerate(inside if box else ""):
        open_braces += (character == "{") - (character == "}")
        if open_braces == 0:
            return inside[:i].strip()
    return text.strip()


def number(text):
    """Read a decimal number, with commas between thousands or without; else NaN, which equals nothing."""
    try:
        value = decimal.Decimal(text.replace(",", ""))
    except decimal.InvalidOperation:
        return math.nan
    return value if value.is_finite() and text in (text.replace(",", ""), f"{value:,}") else math.nan


def think_format_reward(completions, **kwargs):
    """Give 1 to a text that is one <think>...</think> from its first character on, then an answer; else 0.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2.2. TRL's also takes a second </think>, and an empty answer.
    """
    texts = [text_of(completion) for completion in completions]
    one_thought = [t.startswith("<think>") and t.count("<think>") == t.count("</think>") == 1 for t in texts]
    return [float(one and t.partition("</think>")[2].strip() != "") for one, t in zip(one_thought, texts)]


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """Make a reward function that punishes an answer of n tokens for its length. *

    r(n) = 0 for n <= L - c;  (L - c - n) / c for L - c < n <= L;  -1 for n > L.
    Source: DAPO (arXiv:2503.14476) eq. 13. Args: max_completion_len L, soft_punish_cache c <= L, in tokens.
    """
    L, c = max_completion_len, soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (L - c - len(ids)) / max(c, 1))) for ids in completion_ids]

    return soft_overlong_punishment_reward


def combine_rewards(rewards_per_func, reward_weights=None):
    """Add up what the reward functions gave: r_i = Σ_f w_f·r_{i,f}, without those that abstained (NaN).

    Source: TRL's GRPOTrainer (weighted nansum). Returns: (B,), NaN where every function abstained.
    Args: rewards_per_func (B, F), NaN where a function returned None; reward_weights (F,), None: 1 each.
    """
    r = rewards_per_func
    reward_weights = r.new_ones(r.shape[-1:]) if reward_weights is None else reward_weights
    reward_weights = torch.as_tensor(reward_weights, dtype=torch.result_type(r, 1.0), device=r.device)  # (F,)
    _check(locals(), "rewards_per_func: B F, reward_weights: F")
    return torch.where(r.isnan().all(1), torch.nan, (r * reward_weights).nansum(1))       # (B,)


# §2 Group statistics and advantages -----------------------------------------------------------------------

def group_stats(rewards, num_generations, *, correction=1):
    """Take the mean and the standard deviation of each group's n rewards (those that are not NaN).

    mean = 1/n·Σ r_i,  std = √(Σ (r_i - mean)² / (n - correction)).
    Source: DeepSeekMath §4.1.2, which leaves correction open: 1 in TRL and CS336.
    Returns: mean (P,), std (P,), NaN where undefined; in a group of equal rewards r - mean is exactly 0.
    """
    _check(locals(), "rewards: B")
    if num_generations <= correction or len(rewards) % num_generations:
        allowed = f"a divisor of {len(rewards)} above correction = {correction}"
        raise ValueError(f"num_generations: got {num_generations}; allowed is {allowed}")
    r = rewards.reshape(-1, num_generations)                                              # (P, G)
    lowest = torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)                   # (P, 1)
    r = r - lowest                  # equal rewards are exactly 0 now; the mean of three times 0.1 is not 0.1
    mean = r.nanmean(1, keepdim=True)                                                     # (P, 1)
    n = (~r.isnan()).sum(1)                                                               # (P,)
    std = ((r - mean).square().nansum(1) / (n - correction).clamp(min=0)).sqrt()          # (P,)
    return (lowest + mean).squeeze(1), std


def group_advantages(rewards, num_generations, *, scale_rewards="group", correction=1, eps=1e-4):
    """Compare each answer with the mean of its group.

    "group": A_i = (r_i - mean) / (std + eps), mean and std of the group; eps in reward units.
    "batch": the same mean, and the std of the whole batch.
    "none":  A_i = r_i - mean, because 1 / std inflates groups that are nearly all right or all wrong.
    Source: DeepSeekMath §4.1.2, without eps (TRL 1e-4, verl 1e-6); "none": Dr. GRPO (arXiv:2503.20783) §3.1.
    Args: as in group_stats. Returns: (B,), exactly 0 in a group of equal rewards, and for a NaN reward.
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
    return torch.where((centred == 0) | centred.isnan(), 0, centred / scale)  # 0, not 0/0, at eps = 0


def leave_one_out_advantages(rewards, num_generations):
    """Compare each answer with the mean of the others in its group. *

    A_i = r_i - 1/(n-1)·Σ_{j≠i} r_j = (r_i - mean)·n/(n-1),  n = the group's rewards that are not NaN.
    A baseline without the answer itself leaves the gradient unbiased; GRPO's mean scales it by (n-1)/n.
    Source: RLOO (Kool et al. 2019; arXiv:2402.14740). Returns: (B,), 0 for a NaN reward and without others.
    """
    centred = group_advantages(rewards, num_generations, scale_rewards="none")            # (B,)
    n = (~rewards.isnan()).reshape(-1, num_generations).sum(1).repeat_interleave(num_generations)
    return centred * n / (n - 1).clamp(min=1)


def process_advantages(step_rewards, step_ends, completion_mask, num_generations, *, correction=1, eps=1e-4):
    """Let a token answer for every reasoning step that ends at or after it (process supervision). *

    A_{i,t} = Σ_{j: end(i,j) >= t} z_{i,j},  z = (r - mean) / (std + eps) over all steps of a group's answers.
    Source: DeepSeekMath §4.1.3.
    Args: step_rewards (B, S), NaN = no such step; step_ends (B, S), the index t of each step's last token.
    Returns: (B, T), 0 at padding and where all step rewards of a group are equal.
    """
    _check(locals(), "step_rewards: B S, step_ends: B S, completion_mask: B T")
    (B, S), T = step_rewards.shape, completion_mask.size(1)
    if (~step_rewards.isnan() & ((step_ends < 0) | (step_ends >= T))).any():
        raise ValueError(f"step_ends: got {step_ends.tolist()}; allowed is 0 ... T - 1 = {T - 1}")
    z = group_advantages(step_rewards.reshape(-1), num_generations * S, correction=correction, eps=eps)
    counts = step_ends.unsqueeze(2) >= torch.arange(T, device=step_ends.device)           # (B, S, T)
    advantages = (z.reshape(B, S, 1) * counts).sum(1)                                     # (B, T)
    return advantages.masked_fill(completion_mask == 0, 0)


def gae_advantages(rewards, values, completion_mask, *, gamma=1.0, lam=0.95):
    """Estimate PPO's advantages with a critic (generalized advantage estimation); GRPO does without. *

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t;  V and A are 0 after the end.
    λ = 0 trusts the critic's values V (bias), λ = 1 the rewards that came (variance).
    Source: Schulman et al. (arXiv:1506.02438) eq. 16. Returns: advantages and returns, both (B, T).
    """
    _check(locals(), "rewards: B T, values: B T, completion_mask: B T")
    rewards, values = (torch.where(completion_mask != 0, x, 0) for x in (rewards, values))
    delta = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values     # (B, T)
    advantages, advantage = torch.zeros_like(delta), 0
    for t in reversed(range(delta.size(1))):
        advantage = delta[:, t] + gamma * lam * advantage                                 # (B,)
        advantages[:, t] = advantage
    return advantages, advantages + values


def broadcast_advantages(advantages, completion_mask):
    """Give every token the advantage of its answer, A_{i,t} = A_i (outcome supervision); 0 at padding.

    Source: DeepSeekMath §4.1.2. From (B,) to (B, T).
    """
    _check(locals(), "advantages: B, completion_mask: B T")
    return torch.where(completion_mask != 0, advantages.unsqueeze(1), 0)                  # (B, T)


# §3 Log-probabilities -------------------------------------------------------------------------------------

def completion_mask(completion_ids, eos_token_ids):
    """Mark the real tokens: m_t = 1 if no EOS stands before t, else 0.

    The first EOS itself is real, or the policy never learns to stop.
    Source: TRL's GRPOTrainer. Args: completion_ids (B, T); eos_token_ids: one, or a list. Returns: (B, T).
    Gotcha: the pad id plays no part, because it is often the EOS id itself.
    """
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()                      # number of EOS before t: 0


def selective_log_softmax(logits, index):
    """Take the log-prob of one token at each position: log p(index) = logit(index) - log Σ_v exp(logit(v)).

    It is log_softmax and gather, without a tensor of the log-probs of all the other tokens.
    Source: TRL's function of the same name. From (B, T, V) and (B, T) to (B, T), in nats.
    """
    _check(locals(), "logits: B T V, index: B T")
    chosen = logits.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)                    # (B, T)
    return chosen - logits.logsumexp(-1)


def entropy_from_logits(logits):
    """Measure how open the choice of the next token is, in nats: H = -Σ_v p_v·log p_v, p = softmax(logits).

    Source: Shannon 1948. From (B, T, V) to (B, T). A logit of -inf rules a token out.
    """
    logps = logits.log_softmax(-1)                                                        # (B, T, V)
    return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0)).sum(-1)  # 0·log 0 = 0


def next_token_logits(model, input_ids, mask, keep, temperature, cache=None, use_cache=True):
    """Logits / temperature at the last `keep` positions, (B, keep, V), float32 or wider; and the KV cache."""
    # With a cache, input_ids are the new tokens alone, and mask covers all so far.
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.size(1):]       # 0 is the first real token's
    output = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep,
                   past_key_values=cache, use_cache=use_cache)
    logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
    return logits / temperature, getattr(output, "past_key_values", None)


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    """Score completions with a Hugging Face causal LM: log π(o_t | q, o_<t) at every real token.

    log π = log softmax(logits / temperature)[o_t]: at another temperature another policy than sampled learns.
    A causal LM's logits at position t - 1 score token t: of the last T + 1 positions, all but the very last.
    Source: TRL's _get_per_token_logps_and_entropies.
    Args: prompt_ids, prompt_mask (B, L), left-padded; completion_ids, completion_mask (B, T), right-padded.
    Returns: logps (B, T), float32 or wider, 0 at padding; entropies likewise, without gradient, or None.
    """
    _check(locals(), "prompt_ids: B L, prompt_mask: B L, completion_ids: B T, completion_mask: B T")
    if not (prompt_mask[:, -1:] != 0).any(1).all():
        raise ValueError("prompt_mask: got a row whose last token is padding; allowed is left-padded prompts")
    real, T = completion_mask != 0, completion_ids.size(1)                                # (B, T)
    mask = torch.cat([prompt_mask != 0, real], 1).long()                                  # (B, L+T)
    ids = torch.cat([prompt_ids, completion_ids], 1).long() * mask      # padding may hold -100, no token
    logits, _ = next_token_logits(model, ids, mask, T + 1, temperature, use_cache=False)
    logits = logits[:, :-1]                                             # (B, T, V), each before its token
    logps = selective_log_softmax(logits, ids[:, prompt_ids.size(1):])                    # (B, T)
    entropies = entropy_from_logits(logits.detach()).masked_fill(~real, 0) if compute_entropy else None
    return logps.masked_fill(~real, 0), entropies


# §4 Importance ratio and clip -----------------------------------------------------------------------------

def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """Measure how much more likely the samples have become since they were drawn.

    "token":    ρ_{i,t} = π_θ(o_t) / π_old(o_t) = exp(log π_θ - log π_old).
    "sequence": s_i = exp(1/|o_i|·Σ_t log ρ_{i,t}), the geometric mean of the answer's token ratios.
    Source: DeepSeekMath eq. 3; GSPO (arXiv:2507.18071) eq. 7. Returns: (B, T), 1 at padding; GSPO: (B, 1).
    """
    _check(locals(), "logps: B T, old_logps: B T, completion_mask: B T")
    mask = completion_mask != 0
    log_ratio = torch.where(mask, logps - old_logps, 0)                                   # (B, T)
    if importance_sampling_level == "token":
        return log_ratio.exp()                                                            # (B, T)
    if importance_sampling_level == "sequence":
        return (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()        # (B, 1)
    raise ValueError(f"importance_sampling_level: got {importance_sampling_level}; allowed is token/sequence")


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """Clip the ratio, of any shape, to a range in which samples of π_old still tell how good π_θ is.

    clip(ρ, 1 - ε_low, 1 + ε_high); no gradient where it clips.
    Source: DeepSeekMath eq. 3, where ε_low = ε_high; DAPO (arXiv:2503.14476) §3.1 raises ε_high alone.
    """
    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    """Make good answers more likely and bad ones less, with no reward for going beyond the range (PPO, GRPO).

    l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A).
    No gradient where A > 0 and ρ > 1 + ε_high, or A < 0 and ρ < 1 - ε_low: the step has been taken already.
    Where A < 0, nothing bounds l as ρ grows; delta (1 + ε_high or more) does: min(ρ, δ) for the first ρ.
    Source: DeepSeekMath eq. 3; delta: INTELLECT-2 (arXiv:2505.07291) §3.4. Args: ratio (B, T), or (B, 1) at
        sequence level; advantages (B,) or (B, T). Returns: (B, T) or (B, 1).
    """
    _check(locals(), "ratio: B 1 or B T, advantages: B or B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(unclipped * A, clip_ratio(ratio, epsilon_low, epsilon_high) * A)


def cispo_loss(logps, ratio, advantages, *, epsilon_high=5.0):
    """Weigh the loss of REINFORCE, -A·log π, by the capped ratio, so that every token keeps its gradient.

    l = -sg[min(ρ, ε_high)]·A·log π_θ, (B, T);  sg: the weight is a constant (detach).
    Source: CISPO (MiniMax-M1, arXiv:2506.13585) eq. 4, 5; ε_high caps ρ itself, as in TRL, not 1 + ε_high.
    """
    _check(locals(), "logps: B T, ratio: B 1 or B T, advantages: B or B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    return -ratio.clamp(max=epsilon_high).detach() * A * logps


def sapo_loss(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05):
    """Fade the gradient as ρ leaves 1, by a sigmoid σ in place of the clip: it never stops dead.

    l = -σ(τ·(ρ - 1))·4/τ·A,  τ = temperature_pos where A > 0, else temperature_neg.
    Source: SAPO (arXiv:2511.20347) eq. 5-6. Args, Returns: as in clipped_surrogate_loss.
    """
    _check(locals(), "ratio: B 1 or B T, advantages: B or B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    tau = torch.full_like(A, temperature_neg).masked_fill(A > 0, temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * A


def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0):
    """Correct for a sampler that is not quite the scorer (another engine, another precision). *

    w = min(exp(log π_old - log π_sampler), cap), of any shape; a constant (detach) that weighs the loss.
    Source: Yao et al. 2025 (fengyao.notion.site/off-policy-rl); TRL's vllm_importance_sampling_correction.
    """
    _check(locals(), "old_logps: ..., sampling_logps: ...")
    return (old_logps - sampling_logps).exp().clamp(max=cap).detach()


# §5 KL ----------------------------------------------------------------------------------------------------

def kl_estimate(logps, ref_logps, *, estimator="k3"):
    """Estimate KL(π_θ‖π_ref) in nats from the sampled tokens alone, one by one. Any shape.

    k1 = log π_θ - log π_ref,  k2 = ½·k1²,  k3 = exp(-k1) + k1 - 1, which is never negative.
    Over samples of π_θ the means of k1 and k3 are the KL, that of k2 is not. In a loss no gradient passes
    through sampling, and a token's mean gradient is 0 for k1, ∇KL(π_θ‖π_ref) for k2, ∇KL(π_ref‖π_θ) for k3.
    Source: DeepSeekMath eq. 4; Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.
    """
    _check(locals(), "logps: ..., ref_logps: ...")
    k1 = logps - ref_logps
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    if estimator == "k3":
        return torch.expm1(-k1) + k1                                    # exp(x) - 1, exact for small x
    raise ValueError(f"estimator: got {estimator!r}; allowed is 'k1', 'k2' or 'k3'")


def kl_penalized_rewards(scores, logps, ref_logps, completion_mask, *, beta):
    """Make PPO's token rewards: a KL penalty at every token, the answer's score at the last one. *

    r_t = -β·(log π_θ - log π_ref) + [t is the last real token]·score.
    Source: DeepSeekMath eq. 2. GRPO has the KL in the loss instead, so that it does not blur the advantages.
    Args: scores (B,), the r_i. Returns: (B, T) in reward units, 0 at padding.
    """
    _check(locals(), "scores: B, logps: B T, ref_logps: B T, completion_mask: B T")
    mask = completion_mask != 0
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)              # real, and no real token after it
    penalty = torch.where(mask, -beta * kl_estimate(logps, ref_logps, estimator="k1"), 0)
    return penalty + torch.where(is_last, scores.unsqueeze(1), 0)


# §6 Masks -------------------------------------------------------------------------------------------------

def top_entropy_mask(entropies, completion_mask, quantile):
    """Keep the tokens at which the policy hesitates: the top fraction of the real tokens by entropy. *

    mask_t = 1 where H_t >= the (1 - quantile)-quantile of all H; ties are kept.
    Source: Wang et al. (arXiv:2506.01939), 20% of the tokens carry the learning; TRL's top_entropy_quantile.
    Args: entropies (B, T); quantile, the fraction to keep. Returns: (B, T) of completion_mask's dtype.
    """
    _check(locals(), "entropies: B T, completion_mask: B T")
    mask = completion_mask != 0
    real = entropies[mask].double()                                                       # (real,)
    threshold = real.quantile(1 - quantile) if len(real) else 0.0
    return (mask & (entropies >= threshold)).to(completion_mask.dtype)


# §7 The aggregations --------------------------------------------------------------------------------------

def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Reduce the token losses to one number; the variants differ in the denominator alone.

    "grpo":    1/rows·Σ_i (Σ_t l·m / Σ_t m)      every answer weighs the same, a long one's tokens less
    "bnpo":    Σ l·m / Σ m of these rows         every token of this microbatch weighs the same
    "dr_grpo": Σ l·m / (rows·T_max)              a token weighs the same in any batch
    "dapo":    Σ l·m / tokens of the batch       every token of the whole batch weighs the same
    With "grpo" a long wrong answer is punished less per token; Dr. GRPO: "dr_grpo" and scale_rewards="none".
    Given num_rows_in_batch and num_items_in_batch, rows and real tokens of the whole batch (None: of these),
    the values of its microbatches sum to the whole's; not with "bnpo", which train does not offer.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3, by group; TRL.
    Args: per_token_loss (B, T), or (B, 1) for one loss per answer. A row without token adds 0, and counts.
    Gotcha: T_max is max_completion_length, the limit of sampling, not the padded length T of this batch.
    """
    _check(locals(), "completion_mask: B T, per_token_loss: B T or B 1")
    mask = completion_mask != 0
    loss = torch.where(mask, per_token_loss, 0)                                           # (B, T)
    rows, tokens = num_rows_in_batch or max(len(mask), 1), mask.sum().clamp(min=1)
    if loss_type == "grpo":
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows
    if loss_type == "bnpo":
        return loss.sum() / tokens
    if loss_type == "dapo":
        return loss.sum() / (num_items_in_batch or tokens)
    if loss_type != "dr_grpo":
        raise ValueError(f"loss_type: got {loss_type!r}; allowed is 'grpo', 'bnpo', 'dr_grpo' or 'dapo'")
    if max_completion_length is None:
        raise ValueError("max_completion_length: got None; allowed with dr_grpo is the limit of sampling")
    return loss.sum() / (rows * max_completion_length)


# §8 The loss ----------------------------------------------------------------------------------------------

def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, entropies=None,
              sampling_logps=None, beta=0.0, epsilon_low=0.2, epsilon_high=0.2, delta=None, loss_type="dapo",
              importance_sampling_level="token", policy_loss="clip", top_entropy_quantile=1.0,
              kl_estimator="k3", use_bias_correction_kl=False, sampling_cap=2.0, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Compute the GRPO loss from the functions above.

    loss = aggregate( l(ρ, A)·top_entropy_mask·w + β·KL ),  l: policy_loss,  w: truncated_importance_ratio.
    Source: DeepSeekMath eq. 3; the order of the terms and the metric names are TRL's (_compute_loss).
    Args: advantages (B,) or (B, T), the other tensors (B, T); all log-probs but logps are constants.
        old_logps: None while on-policy. ref_logps: for beta > 0. entropies: for top_entropy_quantile < 1.
        sampling_logps: None is w = 1. use_bias_correction_kl: multiply the KL by ρ; its mean gradient is then
        ∇KL(π_θ‖π_ref) (arXiv:2512.02556). policy_loss: "clip", "sapo" or "cispo" (epsilon_high 5: caps ρ).
    Returns: the scalar loss; metrics, floats, means over real tokens: clip_ratio/low_mean: ρ < 1 - ε_low and
        A < 0; /high_mean: ρ > 1 + ε_high (cispo: the cap) and A > 0; /region_mean: either; kl, that of the
        loss, where ref_logps are given (at beta = 0, too); entropy, where entropies are.
    Gotcha: on-policy the "clip" loss is a mean of -A, 0 with "grpo" or at equal lengths: it says nothing.
    """
    _check(locals(), "logps: B T, completion_mask: B T, advantages: B or B T, old_logps: B T or None, "
                     "ref_logps: B T or None, sampling_logps: B T or None, entropies: B T or None")
    mask = completion_mask != 0
    # Padding is emptied first: a NaN that only the last mask removed would reach the gradient (0·NaN = NaN).
    logps = torch.where(mask, logps, 0)                                                   # (B, T)
    old_logps, ref_logps, sampling_logps = (x if x is None else torch.where(mask, x.detach(), 0)
                                            for x in (old_logps, ref_logps, sampling_logps))
    old_logps = logps.detach() if old_logps is None else old_logps
    A = broadcast_advantages(advantages, mask) if advantages.dim() == 1 else torch.where(mask, advantages, 0)

    ratio = importance_ratio(logps, old_logps, mask, importance_sampling_level=importance_sampling_level)
    low, high = 0.0, math.inf                                           # outside, the metrics call it clipped
    if policy_loss == "clip":
        low, high = 1 - epsilon_low, 1 + epsilon_high
        loss = clipped_surrogate_loss(                                                    # (B, T)
            ratio, A, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
    elif policy_loss == "cispo":
        high = epsilon_high
        loss = cispo_loss(logps, ratio, A, epsilon_high=epsilon_high)
    elif policy_loss == "sapo":
        loss = sapo_loss(ratio, A)
    else:
        raise ValueError(f"policy_loss: got {policy_loss!r}; allowed is 'clip', 'cispo' or 'sapo'")
    too_low, too_high = (ratio < low) & (A < 0), (ratio > high) & (A > 0)                 # (B, T)
    metrics = {"clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high,
               "clip_ratio/region_mean": too_low | too_high}

    if top_entropy_quantile < 1:
        loss = loss * top_entropy_mask(entropies, mask, top_entropy_quantile)
    if sampling_logps is not None:
        loss = loss * truncated_importance_ratio(old_logps, sampling_logps, cap=sampling_cap)
    if beta > 0 or ref_logps is not None:
        kl = kl_estimate(logps, ref_logps, estimator=kl_estimator)
        metrics["kl"] = kl * ratio if use_bias_correction_kl else kl
    if beta > 0:
        loss = loss + beta * metrics["kl"]
    if entropies is not None:
        metrics["entropy"] = entropies
    loss = aggregate(loss, mask, loss_type=loss_type, max_completion_length=max_completion_length,
                     num_items_in_batch=num_items_in_batch, num_rows_in_batch=num_rows_in_batch)
    for name, x in metrics.items():                                     # "dapo": the mean over tokens
        metrics[name] = aggregate(
            x.detach() * 1.0, mask, loss_type="dapo", num_items_in_batch=num_items_in_batch).item()
    return loss, metrics


def _check(arguments, shapes):
    """Raise a ValueError that names the first argument whose shape is not as it should be.

    In "logps: B T, advantages: B or B T, ref_logps: B T or None" a letter is one size throughout the call.
    """
    sizes = {"1": 1}                                                    # of each letter, as found so far
    for name, allowed in (part.split(": ") for part in shapes.split(", ")):
        x = arguments[name]
        if x is None and allowed.endswith(" or None"):
            continue
        shape = tuple(getattr(x, "shape", ()))
        found = [shape] if allowed == "..." else shape
        fits = [axes for axes in map(str.split, allowed.removesuffix(" or None").split(" or "))
                if len(axes) == len(found) and all(sizes.get(axis, n) == n for axis, n in zip(axes, found))]
        if not fits:
            raise ValueError(f"{name}: got {type(x).__name__} {shape}; allowed is {allowed}, where {sizes}")
        sizes.update(zip(fits[0], found))


# §9 Sampling ----------------------------------------------------------------------------------------------

class InputError(ValueError):
    """An error that the user can put right: shown in one line, exit code 2."""


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, *, max_completion_length, eos_token_ids, num_generations=1,
             pad_token_id=0, temperature=1.0, uniforms=None):
    """Sample G completions for each prompt, and record what the policy thought of each token.

    o_t is the first token v with Σ_{w<=v} p_w > u_t, p = softmax(logits / temperature): one uniform number a
    token, so that a sample depends on nothing but its own numbers. There is no top_k or top_p.
    Args: model: a causal LM with a KV cache. prompt_ids, prompt_mask: (P, L), left-padded. num_generations:
        G. max_completion_length: T. eos_token_ids: one or several. pad_token_id: what follows; may be an EOS.
        uniforms: (P·G, T) numbers in [0, 1), or None to take the most likely token (greedy).
    Returns: completion_ids, completion_mask, logps, entropies (nats), each (P·G, T'), T' <= T.
    """
    _check(locals(), "prompt_ids: P L, prompt_mask: P L")
    T, eos = max_completion_length, torch.as_tensor(eos_token_ids, device=prompt_ids.device)
    mask = (prompt_mask != 0).long()                                                      # (P, L)
    logits, cache = next_token_logits(model, prompt_ids * mask, mask, 1, temperature)
    if cache is None:
        raise InputError(f"model: got {type(model).__name__}; allowed is a causal LM with past_key_values")
    live = torch.arange(len(mask) * num_generations, device=mask.device)                  # (B,)
    prompt_of = live // num_generations
    cache.reorder_cache(prompt_of)                                      # each prompt G times
    logits, mask = logits[prompt_of], mask[prompt_of]                                     # (B, 1, V), (B, L)
    completion_ids = mask.new_full((len(live), T), pad_token_id)                          # (B, T)
    logps, entropies = logits.new_zeros(2, len(live), T)
    for t in range(T):                                                  # live: the rows that have not ended
        token = logits.argmax(-1)                                                         # (live, 1)
        if uniforms is not None:
            cdf = logits.softmax(-1).squeeze(1).cumsum(1)                                 # (live, V)
            token = torch.searchsorted(cdf, uniforms[live, t, None] * cdf[:, -1:], right=True)
            token = token.clamp(max=cdf.size(1) - 1)                    # NaN logits: an error, after the loop
        completion_ids[live, t : t + 1] = token
        logps[live, t : t + 1] = selective_log_softmax(logits, token)
        entropies[live, t : t + 1] = entropy_from_logits(logits)
        stay = (~torch.isin(token, eos)).nonzero()[:, 0]
        if len(stay) == 0 or t + 1 == T:
            break
        if len(stay) < len(live):
            live, mask, token = live[stay], mask[stay], token[stay]
            cache.reorder_cache(stay)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)                             # (live, L+t+1)
        logits, cache = next_token_logits(model, token, mask, 1, temperature, cache)
    if not logps.isfinite().all():
        raise FloatingPointError(f"the weights or logits of this {type(model).__name__} are not finite")
    real = completion_mask(completion_ids, eos)
    return tuple(x[:, : real.sum(1).max()] for x in (completion_ids, real, logps, entropies))


def encode_prompts(tokenizer, prompts, device):
    """Tokenize strings, or messages through the chat template; ids and mask, (P, L), padded on the left."""
    chat = not isinstance(prompts[0], str)
    if chat:
        prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt",
                       add_special_tokens=not chat).to(device)
    return inputs["input_ids"], inputs["attention_mask"]


def eos_token_ids(model, tokenizer):
    """All ids that end a completion: the tokenizer's, and those of the model's generation config."""
    more = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})


# The samples of one step. rows: B, of the dataset, each G times; completions: B strings, or messages;
# prompt_ids, prompt_mask (B, L), left-padded; completion_ids, completion_mask (B, T), right-padded; logps,
# entropies (B, T), recorded while sampling; terminated (B,), whether the completion ends in an EOS.
Rollout = namedtuple("Rollout", "rows completions prompt_ids prompt_mask completion_ids completion_mask "
                                "logps entropies terminated")


def sample_rollout(policy, tokenizer, batch, config, step):
    """Algorithm 1, lines 6-7: G answers to each question of the batch. The policy as it stands is π_old."""
    G, T, device = config.num_generations, config.max_completion_length, policy.device
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in batch], device)         # ids, mask: (P, L)
    eos = torch.tensor(eos_token_ids(policy, tokenizer), device=device)
    # Keyed by (seed, step), so that a resumed run needs no saved random state. 4 is this use of the seed; 1,
    # 2 and 3 are the tiny task's problems, its cold start, and the batches.
    rng = numpy.random.default_rng([config.seed, 4, step])
    uniforms = torch.tensor(rng.random((len(batch) * G, T), dtype=numpy.float32), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        ids, mask, logps, entropies = generate(
            policy, *prompts, max_completion_length=T, eos_token_ids=eos, num_generations=G,
            pad_token_id=tokenizer.pad_token_id, temperature=config.temperature, uniforms=uniforms)
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if not isinstance(batch[0]["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    rows = [row for row in batch for _ in range(G)]
    prompts = (x.repeat_interleave(G, 0) for x in prompts)                                # (B, L)
    return Rollout(rows, completions, *prompts, ids, mask, logps, entropies, torch.isin(ids, eos).any(1))


# §10 Training: Algorithm 1 of the paper -------------------------------------------------------------------

def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GRPOConfig:
    """TRL's names; there cispo and sapo are a loss_type, max_steps and ref_model_sync_steps count updates."""

    learning_rate: float = option(1e-6, "AdamW's step size")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option("linear", "constant: and no warmup")
    warmup_steps: int = option(0, "updates over which the step size rises from 0")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "a longer gradient is scaled down to this norm")
    max_steps: int = option(100, "steps of sampling and learning, all together")
    num_generations: int = option(8, "G, completions for each prompt")
    generation_batch_size: int = option(64, "B, completions of a step: a multiple of G")
    per_device_train_batch_size: int = option(8, "rows in one forward and backward pass: memory, not maths")
    num_iterations: int = option(1, "mu, updates on each batch; at 1 the ratio is 1, and nothing clips")
    max_completion_length: int = option(512, "T, the longest completion in tokens")
    temperature: float = option(1.0, "of sampling and of scoring")
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = option("dapo", "how the losses of tokens are averaged")
    policy_loss: Literal["clip", "cispo", "sapo"] = option("clip", "the policy term")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "sequence: GSPO")
    epsilon: float = option(0.2, "clip range below 1, and above it unless epsilon_high is given")
    epsilon_high: float | None = option(None, "clip range above 1; with cispo the cap of the ratio itself")
    delta: float | None = option(None, "upper bound of the ratio where the advantage is negative")
    beta: float = option(0.0, "weight of the KL term; 0: no reference model")
    use_bias_correction_kl: bool = option(True, "multiply the KL estimate by the ratio")
    scale_rewards: Literal["group", "batch", "none"] = option("group", "whose std divides r - mean")
    reward_weights: list[float] | None = option(None, "a weight for each reward function (1 each)")
    mask_truncated_completions: bool = option(False, "learn nothing from completions without an EOS")
    sync_ref_model: bool = option(False, "refresh the reference model: Algorithm 1's outer iterations")
    ref_model_sync_steps: int = option(512, "M, steps of an outer iteration")
    seed: int = option(42, "of the samples and of the order of the prompts")
    bf16: bool = option(False, "bfloat16 autocast over float32 weights")
    output_dir: str | None = option(None, "a new or empty folder (grpo-output, else grpo-output-2, ...)")
    save_steps: int = option(100, "write a checkpoint every so many steps, and at the end")

    def __post_init__(self):
        for name, value in vars(self).items():
            least = int(GRPOConfig.__annotations__[name] is int and name not in ("warmup_steps", "seed"))
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise InputError(f"{name}: got {value}; allowed is a finite number, at least {least}")
        B, G = self.generation_batch_size, self.num_generations
        if G < 2 or B % G:
            raise InputError(f"generation_batch_size: got {B}; allowed is a multiple of num_generations > 1")
        if self.policy_loss == "cispo" and self.epsilon_high is None:
            raise InputError("epsilon_high: got None; allowed with cispo is the cap of the ratio, say 5.0")


# From the papers; every other field keeps its default. At num_iterations = 1, where ρ = 1, clip, GSPO, CISPO
# and SAPO have one and the same gradient; the papers split a batch into several updates.
PRESETS = {
    "deepseekmath": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, learning_rate=1e-6,
                         num_generations=64, generation_batch_size=1024, max_completion_length=1024),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    # without DAPO's dynamic sampling and its punishment of long answers
    "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    # the cap is ScaleRL's (arXiv:2510.13786), which TRL recommends
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


def initial_state(policy, config, saved=None):
    """What a run carries from step to step beside the policy's weights, new or taken from a checkpoint."""
    from transformers import get_scheduler
    step, mu = saved["step"] if saved else 0, config.num_iterations
    optimizer = torch.optim.AdamW(policy.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    reference = copy.deepcopy(policy) if config.beta > 0 else None                        # π_ref
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    if saved and reference:
        reference.load_state_dict(saved["reference"])
    optimizer.param_groups[0]["initial_lr"] = config.learning_rate
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps,
                              config.max_steps * mu, {"last_epoch": step * mu - 1})       # counts updates
    return SimpleNamespace(             # whole: False from an update until it is recorded: weights of no step
        step=step, whole=True, optimizer=optimizer, scheduler=scheduler, reference=reference)


def outcome_advantages(rewards_per_func, rollout, config):
    """Line 9 of Algorithm 1 as it stands: from rewards (B, F) to advantages (B, T)."""
    rewards = combine_rewards(rewards_per_func, config.reward_weights)                    # (B,)
    advantages = group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)
    return broadcast_advantages(advantages, rollout.completion_mask)


def train(policy, tokenizer, dataset, reward_funcs, config, *, state=None,
          compute_advantages=outcome_advantages):
    """Algorithm 1 of DeepSeekMath, with its line numbers on the right: a generator, which learns as it runs.

    π_old is no copy of the policy: what the first update computes before its step is kept as log π_old. Line
    12, a reward model that learns, too, stands in worked_examples/iterative_grpo.py.
    Args: policy, tokenizer: a causal LM of transformers, trained in place, and its tokenizer. dataset: dicts
        with "prompt" and further columns. reward_funcs: as in §1. state: where to go on (None: afresh).
        compute_advantages: how rewards (B, F) become advantages (B, T).
    Yields: after each step the state, the Rollout and the metrics (of the last update), under TRL's names.
    """
    policy.eval()                                                       # dropout is another policy each time
    state = state or initial_state(policy, config)                                        # line 1
    while state.step < config.max_steps:                                                  # lines 2, 4
        started = time.perf_counter()
        if state.reference and config.sync_ref_model and state.step % config.ref_model_sync_steps == 0:
            state.reference.load_state_dict(policy.state_dict())                          # 3: π_ref ← π_θ
        batch = sample_batch(dataset, config, state.step)                                 # 5
        rollout = sample_rollout(policy, tokenizer, batch, config, state.step)            # 6, 7: π_old ← π_θ
        rewards_per_func = compute_rewards(reward_funcs, rollout)                         # 8
        advantages = compute_advantages(rewards_per_func, rollout, config)                # 9
        ref_logps = reference_logps(state, rollout, advantages, config) if state.reference else None
        old_logps = None                                                # π_θ is π_old still
        for _ in range(config.num_iterations):                                            # 10: μ
            logps, update = update_policy(policy, state, rollout, advantages, old_logps, ref_logps, config)
            old_logps = logps if old_logps is None else old_logps       # 11: before the first one's step
        state.step += 1
        metrics = {**update, **step_metrics(rollout, old_logps, reward_funcs, rewards_per_func, config)}
        yield state, rollout, {"step": state.step, "step_time": time.perf_counter() - started, **metrics}


def sample_batch(dataset, config, step):
    """Algorithm 1, line 5: the B / G prompts of a step."""
    count, n = config.generation_batch_size // config.num_generations, len(dataset)
    chosen = numpy.random.default_rng([config.seed, 3, step]).choice(n, count, replace=count > n)
    return [dataset[i] for i in chosen]


def compute_rewards(reward_funcs, rollout):
    """Algorithm 1, line 8: what each reward function says of each completion, (B, F), None as NaN."""
    columns = {name: [row[name] for row in rollout.rows] for name in rollout.rows[0]}
    ids = [row[m != 0].tolist() for row, m in zip(rollout.completion_ids, rollout.completion_mask)]
    columns |= {"prompts": columns.pop("prompt"), "completions": rollout.completions, "completion_ids": ids}
    rewards_per_func = []
    for f in reward_funcs:
        r = list(f(**columns))
        if len(r) != len(ids) or not all(x is None or math.isfinite(x) for x in r):
            raise InputError(f"reward function {f.__name__}: got {r!r:.99}; allowed is {len(ids)} numbers")
        rewards_per_func.append([math.nan if x is None else float(x) for x in r])
    return torch.tensor(rewards_per_func, device=rollout.logps.device).T                  # (B, F)


def microbatches(advantages, rollout, config):
    """The mask of the loss (B, T); rows with a token and, at β = 0, an advantage, in parts of one pass."""
    mask = rollout.completion_mask
    if config.mask_truncated_completions:
        mask = mask * rollout.terminated.unsqueeze(1)
    rows = (mask.any(1) & ((config.beta > 0) | advantages.any(-1))).nonzero()[:, 0]
    return mask, rows.split(config.per_device_train_batch_size) if len(rows) else ()


def rollout_logps(model, rollout, rows, config):
    """Score some rows of the rollout again: (rows, T)."""
    inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
        return per_token_logps(model, *(x[rows] for x in inputs), temperature=config.temperature)[0]


@torch.no_grad()
def reference_logps(state, rollout, advantages, config):
    """log π_ref of the rows that learn, (B, T)."""
    logps = torch.zeros_like(rollout.logps)
    for rows in microbatches(advantages, rollout, config)[1]:
        logps[rows] = rollout_logps(state.reference, rollout, rows, config)
    return logps


def update_policy(policy, state, rollout, advantages, old_logps, ref_logps, config):
    """Algorithm 1, line 11: a step of AdamW on the whole batch's loss; the gradients of its parts add up.

    Returns: logps (B, T) before the step, the sampler's own in rows that do not learn; the metrics.
    """
    mask, parts = microbatches(advantages, rollout, config)
    logps = rollout.logps.clone()                                                         # (B, T)
    same = ("beta delta loss_type policy_loss importance_sampling_level use_bias_correction_kl "
            "max_completion_length").split()                            # are called the same by grpo_loss
    options = {name: getattr(config, name) for name in same}
    options["epsilon_high"] = config.epsilon if config.epsilon_high is None else config.epsilon_high
    names = ["loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    metrics = Counter(dict.fromkeys(names, 0.0))                        # of no part yet
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)                                    # without a part, too, momentum moves
    for rows in parts:
        new_logps = rollout_logps(policy, rollout, rows, config)                          # (rows, T)
        logps[rows] = new_logps.detach()
        loss, of_part = grpo_loss(
            new_logps, advantages[rows], mask[rows], epsilon_low=config.epsilon,
            old_logps=None if old_logps is None else old_logps[rows],
            ref_logps=None if ref_logps is None else ref_logps[rows],
            num_items_in_batch=mask.sum().item(), num_rows_in_batch=len(mask), **options)
        loss.backward()
        metrics.update(of_part, loss=loss.item())                       # adds
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).item()
    metrics["learning_rate"] = state.scheduler.get_last_lr()[0]
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(f"step {state.step + 1}: the loss or its gradient is not finite: {metrics}")
    state.whole = False
    state.optimizer.step()
    state.scheduler.step()
    return logps, metrics


def step_metrics(rollout, old_logps, reward_funcs, rewards_per_func, config):
    """What the samples were like, under TRL's names."""
    rewards, mask = combine_rewards(rewards_per_func, config.reward_weights), rollout.completion_mask
    metrics = {
        "reward": rewards.nanmean(), "reward_std": group_stats(rewards, len(rewards))[1],
        "frac_reward_zero_std": 1 - (group_stats(rewards, config.num_generations)[1] > 0).float().mean(),
        "completions/mean_length": mask.sum() / len(mask),
        "completions/clipped_ratio": 1 - rollout.terminated.float().mean(),
        "entropy": aggregate(rollout.entropies, mask, loss_type="dapo"),                  # mean over tokens
        # sampler against scorer: where it is more than rounding, a position, temperature or mask is wrong
        "sampling/sampling_logp_difference/max": (old_logps - rollout.logps).abs().max()}
    metrics |= {f"rewards/{f.__name__}/mean": x.nanmean() for f, x in zip(reward_funcs, rewards_per_func.T)}
    return {name: value.item() for name, value in metrics.items()}


# §11 Command line -----------------------------------------------------------------------------------------
# --model tiny: a small transformer learns two-digit addition, first from a teacher who mostly forgets the
# carry (supervised), then from its own answers (GRPO), which takes it beyond its teacher.

TINY = dict(learning_rate=3e-4, warmup_steps=10, max_steps=120, num_generations=8, generation_batch_size=128,
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
    numbers = [n for n in range(11, 100) if n % 10 > 0]
    problems = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in numbers for b in numbers]
    numpy.random.default_rng([seed, 1]).shuffle(problems)
    return problems[500:], problems[:500]


def teacher_trace(prompt, forgets_carry):
    """A worked answer: 47+85= gets <think>7+5=12,4+8+1=13</think>132, without the carry 4+8+0=12 and 122."""
    a, b = map(int, prompt.rstrip("=").split("+"))
    units = a % 10 + b % 10
    carry = 0 if forgets_carry else units // 10
    tens = a // 10 + b // 10 + carry
    thought = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}+{carry}={tens}"
    return f"<think>{thought}</think>{10 * tens + units % 10}<eos>"


def cold_start(model, tokenizer, problems, seed, *, steps=500):
    """Supervised learning from the teacher: minimise the mean of -log π over the tokens of its traces."""
    rng, prompts = numpy.random.default_rng([seed, 2]), [problem["prompt"] for problem in problems]
    traces = [teacher_trace(prompt, rng.random() < 0.9) for prompt in prompts]
    traces = tokenizer(traces, padding=True, return_tensors="pt").to(model.device)
    inputs = (*encode_prompts(tokenizer, prompts, model.device), *traces.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in tqdm(range(steps), "cold start"):
        chosen = rng.choice(len(prompts), 64)
        batch = [x[chosen] for x in inputs]
        optimizer.zero_grad()
        aggregate(-per_token_logps(model, *batch)[0], batch[-1], loss_type="bnpo").backward()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, 2 - 2 * step / steps)    # 1, then to 0
        optimizer.step()


def held_out_accuracy(policy, tokenizer, problems):
    """The share of right greedy answers; the first four are shown."""
    prompts, solutions = zip(*[(problem["prompt"], problem["solution"]) for problem in problems])
    ids, _, logps, _ = generate(
        policy, *encode_prompts(tokenizer, prompts, policy.device), pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=tokenizer.eos_token_id, max_completion_length=TINY["max_completion_length"])
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = accuracy_reward(answers, solutions)
    for i in range(4):
        verdict = "right" if right[i] else f"wrong, it is {solutions[i]}"
        print(f"  {prompts[i]}{answers[i]}   {verdict} (p = {logps[i].sum().exp():.2f})")
    return sum(right) / len(right)


def load_dataset(path):
    """JSON Lines: objects with "prompt" (a text, or messages) and further columns, the same in each line."""
    with open(path, encoding="utf-8-sig") as file:                      # a byte order mark is no data
        lines = {n: line for n, line in enumerate(file, 1) if line.strip()} or {1: "an empty file"}
    rows = []
    for n, line in lines.items():
        try:
            rows.append(json.loads(line))
            fits = {"prompt"} <= rows[0].keys() == rows[-1].keys()
        except (ValueError, AttributeError):                            # no JSON, no object
            fits = False
        if not fits:
            raise ValueError(f"dataset: {path}, line {n}: got {line:.80}; allowed is prompt, line 1's keys")
    return rows


def load_model(name):
    """A float32 causal LM and its tokenizer, from a folder or the hub; code that comes with it never runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def load_reward_func(name):
    """A reward function: built in, or f of a file of the user's as my_rewards.py:f."""
    functions = {"accuracy": accuracy_reward, "think_format": think_format_reward}
    path, _, function = name.rpartition(":")
    if path.endswith(".py") and os.path.isfile(path):
        folder, file = os.path.split(os.path.abspath(path))
        sys.path.insert(0, folder)                                      # it may import its neighbours
        functions[name] = getattr(importlib.import_module(file.removesuffix(".py")), function, None)
    if functions.get(name) is None:
        raise InputError(f"reward_funcs: got {name}; allowed is accuracy, think_format or file.py:function")
    return functions[name]


def save_checkpoint(policy, tokenizer, state, folder):
    """Write folder/checkpoint, in Hugging Face format; the old one goes when the new one is whole."""
    if not all(p.isfinite().all() for p in policy.parameters()):
        raise FloatingPointError(f"the weights after step {state.step} are not finite; they are not saved")
    target, new, old = (f"{folder}/checkpoint{suffix}" for suffix in ("", ".new", ".old"))
    saved = {"step": state.step, "optimizer": state.optimizer.state_dict(),
             "reference": state.reference and state.reference.state_dict()}
    try:
        policy.save_pretrained(new)
        tokenizer.save_pretrained(new)
        shutil.copy(f"{folder}/metrics.jsonl", new)
        torch.save(saved, f"{new}/trainer_state.pt")
        if os.path.isdir(target):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(new, target)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:                                          # a full disk has many names
        raise InputError(f"output_dir: cannot write {new} ({error}); the last checkpoint stays") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)                          # after an error or Ctrl-C


def make_output_dir(folder, checkpoint):
    """The folder of this run: new or empty, or where the checkpoint lies from which it goes on."""
    home = os.path.dirname(os.path.abspath(checkpoint)) if checkpoint else None
    names = ["grpo-output", *(f"grpo-output-{n}" for n in range(2, 10**4))]
    folder = folder or home or next(name for name in names if not os.path.exists(name))
    os.makedirs(folder, exist_ok=True)
    if os.path.abspath(folder) != home and os.listdir(folder):
        raise ValueError(f"output_dir: got {folder}, which is not empty; allowed is a new or empty folder")
    return folder


def plot_curve(metrics, path):
    """Draw over the steps of a metrics.jsonl: each reward, the entropy, the share of silent groups."""
    from matplotlib.figure import Figure
    with open(metrics) as file:
        lines = [json.loads(line) for line in file]
    names = [name for name in lines[0] if name.startswith("rewards/")] + ["entropy", "frac_reward_zero_std"]
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names)), names):
        axes.plot([line["step"] for line in lines], [line[name] for line in lines])
        axes.set(title=name, xlabel="step")
    figure.savefig(path)


def parse_options(argv):
    """The options of a run, and its GRPOConfig."""
    from transformers import HfArgumentParser
    parser = HfArgumentParser(GRPOConfig, prog="grpo.py", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="tiny, or the folder or hub name of a causal LM")
    parser.add_argument("--dataset", help="a file of JSON Lines: prompt (text or messages), further columns")
    parser.add_argument("--reward_funcs", nargs="+", default=["accuracy", "think_format"], help="or my.py:f")
    parser.add_argument("--preset", choices=PRESETS, help="what a paper sets; flags and tiny's sizes win")
    parser.add_argument("--resume_from_checkpoint", help="the checkpoint folder of this same command's run")
    parser.error = lambda message: parser.exit(2, f"grpo.py: error: {message}\n")
    options, _ = parser.parse_known_args(argv)
    parser.set_defaults(**PRESETS.get(options.preset, {}) | (TINY if options.model == "tiny" else {}))
    options = parser.parse_args(argv)
    config = GRPOConfig(**{name: getattr(options, name) for name in GRPOConfig.__dataclass_fields__})
    if (options.model == "tiny") == (options.dataset is not None):
        parser.error("dataset: allowed is --model tiny without it, or --model NAME --dataset FILE.jsonl")
    if len(config.reward_weights or options.reward_funcs) != len(options.reward_funcs):
        parser.error(f"reward_weights: allowed is one for each of {options.reward_funcs}")
    return options, config


def run(options, config, argv):
    """The job of a command line, from what the user gave to the last line of output."""
    tiny, checkpoint, saved = options.model == "tiny", options.resume_from_checkpoint, None
    if tiny:
        torch.set_num_threads(1)                                        # several would wait for each other
    reward_funcs = [load_reward_func(name) for name in options.reward_funcs]
    try:
        dataset, held_out = tiny_problems(config.seed) if tiny else (load_dataset(options.dataset), [])
        if "accuracy" in options.reward_funcs and "solution" not in dataset[0]:
            raise ValueError("dataset: allowed with the reward accuracy is one with a column named solution")
        if checkpoint:
            if not os.path.isdir(checkpoint):
                checkpoint = os.path.abspath(checkpoint) + ".old"       # a kill came between the two renames
            saved = torch.load(f"{checkpoint}/trainer_state.pt", map_location="cpu", weights_only=True)
            policy, tokenizer = load_model(checkpoint)
        elif tiny:
            tokenizer = tiny_tokenizer()
            policy = tiny_model(tokenizer, config.seed)
        else:
            policy, tokenizer = load_model(options.model)
        folder = make_output_dir(config.output_dir, checkpoint)
    except Exception as error:                                          # what a reader says of its file
        raise InputError(error) from error
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    if checkpoint:
        shutil.copy(f"{checkpoint}/metrics.jsonl", folder)
    elif tiny:
        cold_start(policy, tokenizer, dataset, config.seed)
    if tiny:
        print("before GRPO:")
        before = held_out_accuracy(policy, tokenizer, held_out)
    state = initial_state(policy, config, saved)
    steps = train(policy, tokenizer, dataset, reward_funcs, config, state=state)
    try:
        log_and_save(steps, policy, tokenizer, state, config, folder)
    finally:
        if state.step < config.max_steps and os.path.isdir(f"{folder}/checkpoint"):
            again = ["python", sys.argv[0], *argv, "--resume_from_checkpoint", f"{folder}/checkpoint"]
            print(f"stopped in step {state.step + 1}; to go on: {shlex.join(again)}")
    plot_curve(f"{folder}/metrics.jsonl", f"{folder}/curve.png")
    print(f"metrics.jsonl, curve.png and checkpoint are in {folder}")
    if tiny:
        print("after GRPO:")
        after = held_out_accuracy(policy, tokenizer, held_out)
        print(f"held-out accuracy: {before:.2f} -> {after:.2f} (greedy, {len(held_out)} problems)")


def log_and_save(steps, policy, tokenizer, state, config, folder):
    """Show and log each step of train; save some, and the last, also where an error or Ctrl-C comes."""
    bar = tqdm(steps, "GRPO", initial=state.step, total=config.max_steps)
    try:
        for _, _, metrics in bar:
            with open(f"{folder}/metrics.jsonl", "a") as file:
                file.write(json.dumps({k: None if math.isnan(x) else x for k, x in metrics.items()}) + "\n")
            state.whole = True
            bar.set_postfix(reward=metrics["reward"])
            if state.step % config.save_steps == 0 and state.step < config.max_steps:
                save_checkpoint(policy, tokenizer, state, folder)
    finally:
        if state.whole and state.step > 0:
            save_checkpoint(policy, tokenizer, state, folder)


def main(argv=None):
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    try:
        run(*parse_options(argv), argv)
    except InputError as error:
        print("grpo.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

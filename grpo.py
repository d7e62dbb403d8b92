"""grpo.py: Group Relative Policy Optimization, one pure function for each equation.

A language model (the policy) answers each prompt G times. The answers are scored, and the tokens of an answer
become more likely where it beats the mean of its group, less likely where it falls behind. The file follows
the data: rewards, advantages, log-probs, ratio, KL, masks, aggregation, loss; sampling; Algorithm 1.

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

The functions of §1-§8 keep dtype and device. A mask may be bool, integer or float. Padding may hold anything,
NaN and ±inf included: it reaches no value and no gradient of a function that takes the mask. A wrong shape
(_check, at the end of §8) or an unknown option is a ValueError that names the argument. "Args" leaves out
what this table tells.

Left out on purpose: inference servers, LoRA, images, tools, value networks, models beyond one GPU, and top-k
or top-p sampling, whose log-probs would not be the scorer's.
"""

import contextlib
import copy
import importlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import namedtuple
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy
import torch
from torch.nn import functional as F
from tqdm import tqdm

# §1 Rewards -----------------------------------------------------------------------------------------------
# A reward function is f(prompts=, completions=, completion_ids=, **columns) -> for each completion a number,
# or None where it does not apply. A completion is a string or, in chat data, a list of {"role", "content"}.

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def plain_number(text):
    """Read "1,000", "-7.0", "1e-05" or "1/2" as an exact fraction; None where the text is anything else."""
    digits = r"(\d+|\d{1,3}(,\d{3})+)"
    number = rf"[+-]?{digits}((\.\d*)?(e[+-]?\d{{1,3}})?|/(?![0,]*$){digits})"
    if len(text) <= 1000 and re.fullmatch(number, text):
        return Fraction(text.replace(",", ""))


def unboxed(text):
    r"""Take what stands in the last \boxed{}, or \boxed{\text{}}, of a text, else the whole text."""
    boxed = re.findall(r"\\boxed\{(?:\\text\{)?((?:[^{}]|\{[^{}]*\})*)\}", text)
    return boxed[-1] if boxed else text


def formula(text):
    """Put a bare formula between dollars, or math-verify reads "2x+3" as 2; a text with words stays."""
    word = r"(?<![\\A-Za-z])[^\W\d_]{2}"                               # two letters, in no LaTeX command
    return text if re.search(rf"\$|\\\[|\\\(|{word}", text) else f"${text}$"


def same_answer(answer, solution):
    """Compare two texts as they stand, then as plain numbers, then by math-verify."""
    answer, solution = unboxed(answer), unboxed(solution)
    if answer == solution:
        return True
    number = plain_number(solution)
    if number is not None and (plain_number(answer) is not None or not re.search(r"\d", answer)):
        return plain_number(answer) == number
    if formula(solution) == solution and not re.search(r"[\\$]", solution):             # no mathematics
        return False
    import math_verify
    seconds = 3 if threading.current_thread() is threading.main_thread() else None  # its clock needs it
    gold = math_verify.parse(formula(solution), parsing_timeout=seconds)
    found = math_verify.parse(formula(answer[-1000:]), parsing_timeout=seconds)     # the answer comes last
    return math_verify.verify(gold, found, timeout_seconds=seconds)


def accuracy_reward(completions, solution, **kwargs):
    r"""Give 1 to an answer that is the same as its solution, 0 to any other.

    The answer is the text after the last </think>, else the whole text; of it, what the last \boxed{} holds.
    Equal texts are the same, plain numbers are compared exactly (1,000 = 1000.0, 1/2 = 0.5), formulas by
    math-verify (in the last 1,000 characters); a solution of words has to be met as it stands.
    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2.2; TRL's accuracy_reward finds only LaTeX in an answer.
    Returns: a reward for each completion, None where its solution (a string or a number) is empty or None.
    """
    if len(solution) != len(completions):
        raise ValueError(f"solution: got {len(solution)}; allowed is one for each of {len(completions)}")
    answers = [text_of(c).rpartition("</think>")[2].strip("* \t\r\n") for c in completions]    # **bold**
    solutions = ["" if s is None else str(s).strip() for s in solution]
    return [float(same_answer(a, s)) if s else None for a, s in zip(answers, solutions)]


def think_format_reward(completions, **kwargs):
    """Give 1 to a text that is one <think>...</think> from its first character on, then an answer; else 0.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2.2; like TRL's, but white space alone is no answer.
    """
    rewards = []
    for text in map(text_of, completions):
        one_thought = text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1
        rewards.append(float(one_thought and text.partition("</think>")[2].strip() != ""))
    return rewards


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """Make a reward function that punishes an answer of n tokens for its length.

    r(n) = 0 for n <= L - c;  (L - c - n) / c for L - c < n <= L;  -1 for n > L.
    Source: DAPO (arXiv:2503.14476) eq. 13; TRL's get_soft_overlong_punishment.
    Args: max_completion_len L and soft_punish_cache c in tokens, 0 <= c <= L.
    """
    L, c = max_completion_len, soft_punish_cache
    if not 0 <= c <= L:
        raise ValueError(f"soft_punish_cache: got {c}; allowed is 0 ... max_completion_len = {L}")

    def soft_overlong_punishment(completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (L - c - len(ids)) / max(c, 1))) for ids in completion_ids]

    return soft_overlong_punishment


def combine_rewards(rewards_per_func, reward_weights=None):
    """Add up what the reward functions gave: r_i = Σ_f w_f·r_{i,f}, without those that abstained (NaN).

    Source: TRL's GRPOTrainer (weighted nansum); there a row without any reward becomes 0, here it stays NaN.
    Args: rewards_per_func (B, F), NaN where a function returned None; reward_weights (F,), None: 1 each.
    Returns: (B,), NaN where every function abstained.
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
    Source: DeepSeekMath §4.1.2, which leaves correction open: 1 in TRL and CS336, often 0 in worked examples.
    Args: num_generations G, a divisor of B and more than correction; correction as in torch.std.
    Returns: mean (P,), std (P,), NaN where undefined; in a group of equal rewards r - mean is exactly 0.
    """
    _check(locals(), "rewards: B")
    if num_generations <= correction or len(rewards) % num_generations:
        raise ValueError(f"num_generations: got {num_generations}; allowed is a divisor of {len(rewards)} "
                         f"that is above correction = {correction}")
    r = rewards.reshape(-1, num_generations)                                              # (P, G)
    lowest = torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)                   # (P, 1)
    r = r - lowest                  # equal rewards are exactly 0 now; the mean of three times 0.1 is not 0.1
    mean = r.nanmean(1, keepdim=True)                                                     # (P, 1)
    n = (~r.isnan()).sum(1)                                                               # (P,)
    std = ((r - mean).square().nansum(1) / (n - correction).clamp(min=0)).sqrt()          # (P,)
    return (lowest + mean).squeeze(1), std


def group_advantages(rewards, num_generations, *, scale_rewards="group", correction=1, eps=1e-4):
    """Compare each answer with the other answers to its own prompt.

    "group": A_i = (r_i - mean) / (std + eps), mean and std of the group.
    "batch": the same mean, and the std of the whole batch.
    "none":  A_i = r_i - mean, because 1 / std inflates groups that are nearly all right or all wrong.
    Source: DeepSeekMath §4.1.2; "none": Dr. GRPO (arXiv:2503.20783) §3.1. eps: TRL has 1e-4, verl 1e-6.
    Args: num_generations, correction as in group_stats; eps in reward units.
    Returns: (B,), exactly 0 in a group of equal rewards, and for a NaN reward.
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
    """Compare each answer with the mean of the others in its group.

    A_i = r_i - 1/(n-1)·Σ_{j≠i} r_j = (r_i - mean)·n/(n-1),  n = the group's rewards that are not NaN.
    That mean does not depend on the answer itself, which keeps the policy gradient unbiased.
    Source: RLOO (Kool et al. 2019; arXiv:2402.14740); TRL's RLOOTrainer.
    Returns: (B,), 0 for a NaN reward and for one without others; num_generations is 2 or more.
    """
    centred = group_advantages(rewards, num_generations, scale_rewards="none")            # (B,)
    n = (~rewards.isnan()).reshape(-1, num_generations).sum(1).repeat_interleave(num_generations)
    return centred * n / (n - 1).clamp(min=1)


def process_advantages(step_rewards, step_ends, completion_mask, num_generations, *, correction=1, eps=1e-4):
    """Let a token answer for every reasoning step that ends at or after it (process supervision).

    A_{i,t} = Σ_{j: end(i,j) >= t} z_{i,j},  z = (r - mean) / (std + eps) over all steps of a group's answers.
    Source: DeepSeekMath §4.1.3; in none of TRL, verl and OpenRLHF.
    Args: step_rewards (B, S), NaN = no such step; step_ends (B, S), the index t of each step's last token.
    Returns: (B, T), 0 at padding, exactly 0 where all step rewards of a group are equal.
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
    """Estimate PPO's advantages with a critic (generalized advantage estimation); GRPO does without.

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t;  V and A are 0 after the end.
    λ = 0 trusts the critic's values V (bias), λ = 1 the rewards that came (variance).
    Source: Schulman et al. (arXiv:1506.02438) eq. 16.
    Args: rewards, values (B, T). Returns: advantages (B, T), returns (B, T), 0 after the end.
    """
    _check(locals(), "rewards: B T, values: B T, completion_mask: B T")
    rewards, values = (torch.where(completion_mask != 0, x, 0) for x in (rewards, values))
    delta = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values                       # (B, T)
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
    Source: TRL's GRPOTrainer; bug reports trl#4970, trl#7039.
    Args: completion_ids (B, T); eos_token_ids, one id or several. Returns: (B, T) of int64.
    Gotcha: the pad id plays no part, because it is often the EOS id itself.
    """
    _check(locals(), "completion_ids: B T")
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()                      # number of EOS before t: 0


def selective_log_softmax(logits, index):
    """Take the log-prob of one word at each position: log p(index) = logit(index) - log Σ_v exp(logit(v)).

    It is log_softmax and gather, without a tensor of the log-probs of all the other words.
    Source: TRL's function of the same name. From (B, T, V) and (B, T) to (B, T), in nats.
    """
    _check(locals(), "logits: B T V, index: B T")
    chosen = logits.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)                    # (B, T)
    return chosen - logits.logsumexp(-1)


def entropy_from_logits(logits):
    """Measure how open the choice of the next token is, in nats: H = -Σ_v p_v·log p_v, p = softmax(logits).

    Source: Shannon 1948; TRL's entropy_from_logits. From (B, T, V) to (B, T). -inf rules a word out.
    """
    logps = logits.log_softmax(-1)                                                        # (B, T, V)
    return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0)).sum(-1)  # 0·log 0 = 0


def next_token_logits(model, input_ids, mask, keep, temperature, **cache):
    """Logits / temperature at the last `keep` positions, (B, keep, V), float32 or wider; and the KV cache."""
    # Positions count real tokens: the first is 0 after any left padding.
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.size(1):]
    output = model(input_ids=input_ids, attention_mask=mask, position_ids=positions,
                   logits_to_keep=keep, **cache)
    logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
    return logits / temperature, getattr(output, "past_key_values", None)


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    """Score completions with a Hugging Face causal LM: log π(o_t | q, o_<t) at every real token.

    log π = log softmax(logits / temperature)[o_t], at the sampler's temperature, else ρ is not 1 on-policy.
    Source: TRL's _get_per_token_logps_and_entropies.
    Args: prompt_ids, prompt_mask (B, L), left-padded; completion_ids, completion_mask (B, T), right-padded.
    Returns: logps (B, T), float32 or wider, 0 at padding; entropies likewise, without gradient, or None.
    """
    _check(locals(), "prompt_ids: B L, prompt_mask: B L, completion_ids: B T, completion_mask: B T")
    if not (prompt_mask[:, -1:] != 0).any(1).all():
        raise ValueError("prompt_mask: got a row whose last token is padding; allowed is left-padded prompts")
    real, T = completion_mask != 0, completion_ids.size(1)                                # (B, T)
    mask = torch.cat([prompt_mask != 0, real], 1).long()                                  # (B, L+T)
    ids = torch.cat([prompt_ids, completion_ids], 1).long() * mask      # a padding id may be no word at all
    # (B, T, V): the logits at o_{t-1} are those of o_t, so the last position is not needed.
    logits = next_token_logits(model, ids, mask, T + 1, temperature, use_cache=False)[0][:, :-1]
    logps = selective_log_softmax(logits, ids[:, prompt_ids.size(1):])                    # (B, T)
    entropies = entropy_from_logits(logits.detach()).masked_fill(~real, 0) if compute_entropy else None
    return logps.masked_fill(~real, 0), entropies


# §4 Importance ratio and clip -----------------------------------------------------------------------------

def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """Measure how much more likely the samples have become since they were drawn.

    "token":    ρ_{i,t} = π_θ(o_t) / π_old(o_t) = exp(log π_θ - log π_old).
    "sequence": s_i = exp(1/|o_i|·Σ_t log ρ_{i,t}), the geometric mean of the answer's token ratios.
    Source: DeepSeekMath eq. 3 (token); GSPO (arXiv:2507.18071) eq. 7 (sequence).
    Returns: (B, T), 1 at padding; for "sequence" (B, 1).
    """
    _check(locals(), "logps: B T, old_logps: B T, completion_mask: B T")
    mask = completion_mask != 0
    log_ratio = torch.where(mask, logps - old_logps, 0)                                   # (B, T)
    level = importance_sampling_level
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"importance_sampling_level: got {level!r}; allowed is 'token' or 'sequence'")
    return log_ratio.exp()                                              # (B, T), sequence level: (B, 1)


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """Keep the ratio, of any shape, in the trust region, where samples of π_old still tell how good π_θ is.

    clip(ρ, 1 - ε_low, 1 + ε_high); no gradient where it clips.
    Source: DeepSeekMath eq. 3, where ε_low = ε_high; DAPO (arXiv:2503.14476) §3.1 raises ε_high alone.
    """
    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    """Make good answers more likely and bad ones less, but not beyond the trust region (PPO, GRPO).

    l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A).
    No gradient where A > 0 and ρ > 1 + ε_high, or A < 0 and ρ < 1 - ε_low: the step has been taken already.
    Where A < 0, nothing bounds l as ρ grows; delta (1 + ε_high or more) does: min(ρ, δ) for the first ρ.
    Source: DeepSeekMath eq. 3; delta: INTELLECT-2 (arXiv:2505.07291) §3.4. verl bounds l at 3·|A|.
    Args: ratio (B, T), or (B, 1) at sequence level; advantages (B,) or (B, T). Returns: (B, T) or (B, 1).
    """
    _check(locals(), "ratio: B 1 | B T, advantages: B | B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(unclipped * A, clip_ratio(ratio, epsilon_low, epsilon_high) * A)


def cispo_loss(logps, ratio, advantages, *, epsilon_high=5.0):
    """Weigh the loss of REINFORCE, -A·log π, by the capped ratio, so that every token keeps its gradient.

    l = -sg[min(ρ, ε_high)]·A·log π_θ,  sg: the weight is a constant (detach).
    Source: CISPO (MiniMax-M1, arXiv:2506.13585) eq. 4. The cap is absolute, as in TRL; verl clips to 1 ± ε.
    Args: ratio, advantages as in clipped_surrogate_loss. Returns: (B, T).
    """
    _check(locals(), "logps: B T, ratio: B 1 | B T, advantages: B | B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    return -ratio.clamp(max=epsilon_high).detach() * A * logps


def sapo_loss(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05):
    """Fade the gradient as ρ leaves 1, by a sigmoid σ in place of the clip: it never stops dead.

    l = -σ(τ·(ρ - 1))·4/τ·A,  τ = temperature_pos where A > 0, else temperature_neg.
    Source: SAPO (arXiv:2511.20347) eq. 5-6; TRL's loss_type "sapo".
    Args, Returns: as in clipped_surrogate_loss.
    """
    _check(locals(), "ratio: B 1 | B T, advantages: B | B T")
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                  # (B, 1 | T)
    tau = torch.full_like(A, temperature_neg).masked_fill(A > 0, temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * A


def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0):
    """Correct for a sampler that is not quite the scorer (another engine, another precision).

    w = min(exp(log π_old - log π_sampler), cap), of any shape; a constant (detach) that weighs the loss.
    Source: Yao et al. 2025, truncated importance sampling; TRL's vllm_importance_sampling_correction.
    """
    _check(locals(), "old_logps: ..., sampling_logps: ...")
    return (old_logps - sampling_logps).exp().clamp(max=cap).detach()


# §5 KL ----------------------------------------------------------------------------------------------------

def kl_estimate(logps, ref_logps, *, estimator="k3"):
    """Estimate KL(π_θ‖π_ref) in nats from the sampled tokens alone, one by one. Any shape.

    k1 = log π_θ - log π_ref,  k2 = ½·k1²,  k3 = exp(-k1) + k1 - 1, which is never negative.
    Over samples of π_θ the means of k1 and k3 are the KL, that of k2 is not. In a loss the samples are fixed,
    and the mean gradient is 0 for k1, ∇KL(π_θ‖π_ref) for k2, ∇KL(π_ref‖π_θ) for k3.
    Source: DeepSeekMath eq. 4 (k3); Schulman 2020, "Approximating KL divergence".
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
    """Make PPO's token rewards: a KL penalty at every token, the answer's score at the last one.

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
    """Keep the tokens at which the policy hesitates: the top fraction of the batch's real tokens by entropy.

    mask_t = 1 where H_t >= the (1 - quantile)-quantile of all H; ties are kept.
    Source: Wang et al. (arXiv:2506.01939), 20% of the tokens carry the learning; TRL's top_entropy_quantile.
    Args: entropies (B, T); quantile, the fraction to keep: 0.2 the highest fifth, 1 every real token.
    Returns: (B, T) of completion_mask's dtype, 0 at padding.
    """
    _check(locals(), "entropies: B T, completion_mask: B T")
    mask = completion_mask != 0
    if mask.any():
        real = entropies[mask].to(torch.promote_types(entropies.dtype, torch.float32))    # (real,)
        mask = mask & (entropies >= real.quantile(1 - quantile))
    return mask.to(completion_mask.dtype)


# §7 The aggregations --------------------------------------------------------------------------------------

def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None,
              num_items_in_batch=None, num_rows_in_batch=None):
    """Reduce the token losses to one number; the variants differ in the denominator alone.

    "grpo":    1/rows·Σ_i (Σ_t l·m / Σ_t m)      every answer weighs the same, a long one's tokens less
    "bnpo":    Σ l·m / Σ m of these rows         every token of this microbatch weighs the same
    "dr_grpo": Σ l·m / (rows·L_max)              a constant, so that nothing depends on the lengths
    "dapo":    Σ l·m / tokens of the batch       every token of the whole batch weighs the same
    A batch may be split into microbatches or ranks: given num_rows_in_batch and num_items_in_batch (rows and
    real tokens of the whole, None: of these rows), the parts sum to the whole's value, bnpo's aside.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3; TRL.
    Args: per_token_loss (B, T), or (B, 1) for one loss per answer.
    Returns: a scalar; a row without real token adds 0, and still counts as a row (verl leaves it out).
    Gotcha: L_max is max_completion_length, the limit of sampling, not the padded length T of this batch.
    """
    _check(locals(), "completion_mask: B T, per_token_loss: B T | B 1")
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
    """Put the functions above together to the GRPO loss; add nothing of its own.

    loss = aggregate( l(ρ, A)·top_entropy_mask·w + β·KL ),  l: policy_loss,  w: truncated_importance_ratio.
    Source: DeepSeekMath eq. 3; the order of the terms and the metric names are TRL's (_compute_loss).
    Args: advantages (B,) or (B, T), the other tensors (B, T); all log-probs but logps are constants.
        old_logps: None while on-policy. ref_logps: needed where beta > 0. sampling_logps: the sampler's own,
        None: w = 1. entropies: needed where top_entropy_quantile < 1. use_bias_correction_kl: multiply the KL
        by ρ, so that the mean gradient of k3 is ∇KL(π_θ‖π_ref). policy_loss: "clip", "sapo", or "cispo", for
        which epsilon_high is the absolute cap: set it, to 5 or so.
    Returns: the scalar loss; metrics, floats: clip_ratio/low_mean, /high_mean, /region_mean, kl and entropy
        (where given), means over real tokens; those of clip_ratio at sequence level over rows.
    Gotcha: on-policy the value is a mean of -A, about 0, and says nothing; its gradient is REINFORCE's.
    """
    _check(locals(), "logps: B T, completion_mask: B T, advantages: B | B T, old_logps: B T | None, "
                     "entropies: B T | None, sampling_logps: B T | None, "
                     f"ref_logps: B T{'' if beta else ' | None'}")
    mask = completion_mask != 0
    # Padding is emptied first: a NaN that only the last mask removed would reach the gradient (0·NaN = NaN).
    logps = torch.where(mask, logps, 0)                                                   # (B, T)
    old_logps = logps.detach() if old_logps is None else torch.where(mask, old_logps.detach(), 0)
    A = broadcast_advantages(advantages, mask) if advantages.dim() == 1 else torch.where(mask, advantages, 0)

    ratio = importance_ratio(logps, old_logps, mask, importance_sampling_level=importance_sampling_level)
    low, high = 1 - epsilon_low, 1 + epsilon_high                       # outside, the metrics call it clipped
    if policy_loss == "clip":
        bounds = dict(epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
        loss = clipped_surrogate_loss(ratio, A, **bounds)
    elif policy_loss == "cispo":
        low, high = 0.0, epsilon_high
        loss = cispo_loss(logps, ratio, A, epsilon_high=epsilon_high)
    elif policy_loss == "sapo":
        low, high = 0.0, math.inf
        loss = sapo_loss(ratio, A)
    else:
        raise ValueError(f"policy_loss: got {policy_loss!r}; allowed is 'clip', 'cispo' or 'sapo'")
    clipped_low, clipped_high = (ratio < low) & (A < 0), (ratio > high) & (A > 0)         # (B, T)
    metrics = {"clip_ratio/low_mean": clipped_low, "clip_ratio/high_mean": clipped_high,
               "clip_ratio/region_mean": clipped_low | clipped_high}
    if importance_sampling_level == "sequence":
        metrics = {name: x.any(1, keepdim=True) for name, x in metrics.items()}           # (B, 1)

    if top_entropy_quantile < 1:
        loss = loss * top_entropy_mask(entropies, mask, top_entropy_quantile)
    if sampling_logps is not None:
        sampling_logps = torch.where(mask, sampling_logps, 0)
        loss = loss * truncated_importance_ratio(old_logps, sampling_logps, cap=sampling_cap)
    if ref_logps is not None:
        kl = kl_estimate(logps, torch.where(mask, ref_logps.detach(), 0), estimator=kl_estimator)
        metrics["kl"] = kl * ratio if use_bias_correction_kl else kl
    if beta > 0:
        loss = loss + beta * metrics["kl"]
    if entropies is not None:
        metrics["entropy"] = entropies
    loss = aggregate(loss, mask, loss_type=loss_type, max_completion_length=max_completion_length,
                     num_items_in_batch=num_items_in_batch, num_rows_in_batch=num_rows_in_batch)
    for name, x in metrics.items():
        by_row = importance_sampling_level == "sequence" and name.startswith("clip_ratio")
        counted = torch.ones_like(x) if by_row else mask
        metrics[name] = aggregate(x.detach() * 1.0, counted, loss_type="bnpo").item()   # bnpo: the plain mean
    return loss, metrics


def _check(arguments, patterns):
    """Raise a ValueError that names the argument whose shape is not as it should be.

    In "logps: B T, advantages: B | B T, old_logps: B T | None" a letter is one size throughout the call, and
    "..." one whole shape.
    """
    sizes = {"1": 1}                                                    # of each letter, as found so far
    for name, allowed in (pattern.split(": ") for pattern in patterns.split(", ")):
        x = arguments[name]
        shape = tuple(getattr(x, "shape", ()))
        found = [shape] if allowed == "..." else shape
        fits = [axes for axes in map(str.split, allowed.removesuffix(" | None").split(" | "))
                if len(axes) == len(found) and all(sizes.get(axis, n) == n for axis, n in zip(axes, found))]
        if fits:
            sizes.update(zip(fits[0], found))
        elif x is not None or "None" not in allowed:
            came = f"{type(x).__name__} of shape {shape}"
            raise ValueError(f"{name}: got {came}; allowed is shape {allowed}, where {sizes}")


# §9 Sampling ----------------------------------------------------------------------------------------------

class InputError(ValueError):
    """What the user can put right: the command line says it in one line, without a traceback."""


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, *, max_completion_length, eos_token_ids, num_generations=1,
             pad_token_id=0, temperature=1.0, uniforms=None):
    """Sample G completions for each prompt, and record what the policy thought of each token.

    o_t is the first word v with Σ_{w<=v} p_w > u_t, p = softmax(logits / temperature): one uniform number a
    token, so that a sample depends on nothing but its own numbers. There is no top_k or top_p.

    Args:
        model: a causal LM of transformers that keeps a KV cache.
        prompt_ids, prompt_mask: (P, L), left-padded.
        max_completion_length, num_generations: T, G.
        eos_token_ids, pad_token_id: one id or several; and what stands behind, which may be one of them.
        uniforms: (P·G, T) numbers in [0, 1), or None to take the most likely word (greedy).
    Returns:
        completion_ids, completion_mask, logps, entropies: each (P·G, T'), T' <= T; the last two in nats.
    """
    _check(locals(), "prompt_ids: P L, prompt_mask: P L")
    T, eos = max_completion_length, torch.as_tensor(eos_token_ids, device=prompt_ids.device)
    mask = (prompt_mask != 0).long()                                                      # (P, L)
    step = dict(keep=1, temperature=temperature, use_cache=True)
    logits, cache = next_token_logits(model, prompt_ids * mask, mask, **step)
    if cache is None:
        raise InputError(f"model: got {type(model).__name__}; allowed is a causal LM with past_key_values")
    live = torch.arange(len(mask) * num_generations, device=mask.device)                  # (B,)
    cache.reorder_cache(live // num_generations)                        # each prompt G times
    logits, mask = logits[live // num_generations], mask[live // num_generations]         # (B, 1, V), (B, L)
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
        mask = F.pad(mask, (0, 1), value=1)                                               # (live, L+t+1)
        logits, cache = next_token_logits(model, token, mask, **step, past_key_values=cache)
    if not logps.isfinite().all():
        raise FloatingPointError(f"the weights or logits of this {type(model).__name__} are not finite")
    real = completion_mask(completion_ids, eos)
    return tuple(x[:, : real.sum(1).max()] for x in (completion_ids, real, logps, entropies))


def encode_prompts(tokenizer, prompts, device):
    """Tokenize strings, or messages through the chat template; ids and mask, (P, L), padded on the left."""
    chat = not isinstance(prompts[0], str)
    if chat:
        prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    options = dict(padding=True, padding_side="left", return_tensors="pt", add_special_tokens=not chat)
    inputs = tokenizer(prompts, **options).to(device)
    return inputs["input_ids"], inputs["attention_mask"]


def eos_token_ids(model, tokenizer):
    """All ids that end a completion: the tokenizer's, and those of the model's generation config."""
    more = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})


Rollout = namedtuple("Rollout", [                    # one step's samples: this process's b of the B rows
    "rows", "completions",                           # of the dataset, each G times; b strings or messages
    "prompt_ids", "prompt_mask",                     # (b, L), left-padded
    "completion_ids", "completion_mask",             # (b, T), right-padded
    "logps", "entropies",                            # (b, T), recorded while sampling
    "terminated",                                    # (b,), whether the completion ends in an EOS
    "loss_mask"])                                    # (b, T), without truncated rows if they shall not count


def sample_rollout(policy, tokenizer, batch, config, step):
    """Lines 6 and 7: G answers to each question of the batch. The policy as it stands is π_old."""
    G, T, device = config.num_generations, config.max_completion_length, policy.device
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in batch], device)
    eos = eos_token_ids(policy, tokenizer)
    # Keyed by (seed, step) for the whole batch, of which each process takes its rows: N sample like one. 4 is
    # this use of the seed; 1, 2 and 3 are the problems, the cold start and the batches.
    rng = numpy.random.default_rng([config.seed, 4, step])
    uniforms = own_share(rng.random((config.generation_batch_size, T), dtype=numpy.float32))
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        ids, mask, logps, entropies = generate(
            policy, *prompts, max_completion_length=T, eos_token_ids=eos, num_generations=G,
            pad_token_id=tokenizer.pad_token_id, temperature=config.temperature,
            uniforms=torch.tensor(uniforms, device=device))
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if not isinstance(batch[0]["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    terminated = torch.isin(ids, torch.tensor(eos, device=device)).any(1)                 # (b,)
    loss_mask = mask * terminated.unsqueeze(1) if config.mask_truncated_completions else mask
    rows = [row for row in batch for _ in range(G)]
    prompts = (x.repeat_interleave(G, 0) for x in prompts)
    return Rollout(rows, completions, *prompts, ids, mask, logps, entropies, terminated, loss_mask)


# §10 Training: Algorithm 1 of the paper -------------------------------------------------------------------

def option(default, text):
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GRPOConfig:
    """All hyperparameters, under TRL's names; only cispo and sapo, a loss_type there, are a policy_loss."""

    learning_rate: float = option(1e-6, "AdamW's step size")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option("linear", "how the step falls")
    warmup_steps: int = option(0, "updates over which the step size rises from 0")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "a longer gradient is scaled down to this norm")
    max_steps: int = option(100, "steps of sampling and learning, all together")
    num_generations: int = option(8, "G, completions for each prompt")
    generation_batch_size: int = option(64, "B, completions of a step over all processes: a multiple of G")
    per_device_train_batch_size: int = option(8, "rows in one forward and backward pass: memory, not maths")
    num_iterations: int = option(1, "mu, updates on each batch of completions")
    max_completion_length: int = option(512, "T, the longest completion in tokens")
    temperature: float = option(1.0, "of sampling and of scoring")
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = option("dapo", "how token losses are averaged")
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
    top_entropy_quantile: float = option(1.0, "learn from this share of the tokens, of highest entropy")
    sync_ref_model: bool = option(False, "refresh the reference model: Algorithm 1's outer iterations")
    ref_model_sync_steps: int = option(512, "M, steps of an outer iteration")
    seed: int = option(42, "of the samples and of the order of the prompts")
    bf16: bool = option(False, "bfloat16 autocast over float32 weights")
    output_dir: str | None = option(None, "a new or empty folder (grpo-output, else grpo-output-2, ...)")
    save_steps: int = option(500, "write a checkpoint every so many steps (mu > 1: each) and at the end")

    def __post_init__(self):
        may_be_0 = "learning_rate warmup_steps weight_decay epsilon epsilon_high beta seed".split()
        for f in fields(self):
            value, words = getattr(self, f.name), get_args(f.type)
            if get_origin(f.type) is Literal and value not in words:
                raise ValueError(f"{f.name}: got {value!r}; allowed is {' or '.join(words)}")
            least = "0" if f.name in may_be_0 else "a number above 0"
            if type(value) in (int, float) and not (0 < value < math.inf or value == 0 and least == "0"):
                raise ValueError(f"{f.name}: got {value}; allowed is {least} to any finite number")
        if not all(map(math.isfinite, self.reward_weights or [])):
            raise ValueError(f"reward_weights: got {self.reward_weights}; allowed is finite numbers")
        G, world = self.num_generations, rank_and_world()[1]
        if G < 2 or self.generation_batch_size % (G * world):
            raise ValueError(f"generation_batch_size: got {self.generation_batch_size}; allowed is a whole "
                             f"number times num_generations = {G} (at least 2) times {world} processes")
        if self.top_entropy_quantile > 1:
            raise ValueError(f"top_entropy_quantile: got {self.top_entropy_quantile}; allowed is 1 at most")
        if self.policy_loss == "cispo" and self.epsilon_high is None:
            raise ValueError("epsilon_high: got None; allowed with cispo is the cap of the ratio, say 5.0")


PRESETS = {  # what the papers set; every other field keeps its default
    "deepseekmath": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, learning_rate=1e-6,
                         num_generations=64, generation_batch_size=1024, max_completion_length=1024),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


def initial_state(policy, config):
    """What a run carries from step to step beside the policy's weights; reference is π_ref, where β > 0."""
    from transformers import get_scheduler
    optimizer = torch.optim.AdamW(policy.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    updates = config.max_steps * config.num_iterations
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, updates)
    reference = copy.deepcopy(policy) if config.beta > 0 else None
    return SimpleNamespace(step=0, optimizer=optimizer, scheduler=scheduler, reference=reference)


def outcome_advantages(rewards_per_func, rollout, config):
    """Line 9, the default of train: from rewards (b, F) of this process's rows the advantages (b, T)."""
    rewards = gather(combine_rewards(rewards_per_func, config.reward_weights))            # (B,), of all
    advantages = group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)
    return broadcast_advantages(own_share(advantages), rollout.completion_mask)


def train(policy, tokenizer, dataset, reward_funcs, config, *, state=None,
          compute_advantages=outcome_advantages):
    """Algorithm 1 of DeepSeekMath, with its line numbers on the right: a generator, which learns as it runs.

    π_old is no copy: it is the policy while it samples, kept as log-probs. The last line, a reward model that
    learns too, stands in worked_examples/iterative_grpo.py.

    Args:
        policy, tokenizer: a causal LM of transformers, trained in place, and its tokenizer.
        dataset, reward_funcs: dicts with "prompt" and further columns; f(prompts=, completions=, **columns).
        config, state: a GRPOConfig; where to go on from (None starts afresh).
        compute_advantages: how rewards (b, F) become advantages (b, T).
    Yields:
        After each step the state, the Rollout and the metrics, a dict under TRL's names.
    """
    state = state or initial_state(policy, config)                                        # 1
    policy.eval()                                                       # with dropout, ρ would not be 1
    while state.step < config.max_steps:                                                  # 2, 4
        started = time.perf_counter()
        if state.reference and config.sync_ref_model and state.step % config.ref_model_sync_steps == 0:
            state.reference.load_state_dict(policy.state_dict())                          # 3: π_ref ← π_θ
        batch = sample_batch(dataset, config, state.step)                                 # 5
        rollout = sample_rollout(policy, tokenizer, batch, config, state.step)            # 6, 7: π_old ← π_θ
        rewards_per_func = compute_rewards(reward_funcs, rollout)                         # 8
        advantages = compute_advantages(rewards_per_func, rollout, config)                # 9
        if config.top_entropy_quantile < 1:
            advantages = keep_top_entropy(advantages, rollout, config)
        parts, scored = microbatches(advantages, rollout, config), {}
        with torch.no_grad():
            if config.num_iterations > 1:                               # else π_θ is π_old when it learns
                scored["old_logps"] = [score(policy, rollout, part, config) for part in parts]
            if state.reference:
                scored["ref_logps"] = [score(state.reference, rollout, part, config) for part in parts]
        for _ in range(config.num_iterations):                                            # 10: μ
            update = update_policy(policy, state, rollout, parts, advantages, scored, config)          # 11
        state.step += 1
        metrics = {"step": state.step, "step_time": time.perf_counter() - started, **update}
        yield state, rollout, metrics | step_metrics(rollout, reward_funcs, rewards_per_func, config)


def sample_batch(dataset, config, step):
    """Line 5: this process's share of the step's B / G prompts."""
    count, n = config.generation_batch_size // config.num_generations, len(dataset)
    chosen = numpy.random.default_rng([config.seed, 3, step]).choice(n, count, replace=count > n)
    return own_share([dataset[i] for i in chosen])


def name_of(f):
    return getattr(f, "__name__", type(f).__name__)                     # functools.partial has none


def compute_rewards(reward_funcs, rollout):
    """Line 8: what each reward function says of this process's completions, (b, F), None as NaN."""
    inputs = {name: [row[name] for row in rollout.rows] for name in rollout.rows[0]}
    lengths = rollout.completion_mask.sum(1).tolist()
    ids = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), lengths)]
    inputs |= {"prompts": inputs.pop("prompt"), "completions": rollout.completions, "completion_ids": ids}
    columns = []
    for f in reward_funcs:
        values, column = f(**inputs), None
        with contextlib.suppress(TypeError, ValueError, RuntimeError, LookupError, OverflowError):
            column = torch.tensor([math.nan if x is None else x for x in values[:]], dtype=torch.float32)
        if column is None or column.shape != (len(ids),) or column.isinf().any():
            raise InputError(f"reward function {name_of(f)}: got {values!r:.100}; allowed is a finite number "
                             f"or None for each of {len(ids)} completions")
        if column.isnan().all():
            warnings.warn(f"reward function {name_of(f)} gave None for every completion of a step")
        columns.append(column)
    rewards = torch.stack(columns, 1)                                                     # (b, F)
    if rewards.isnan().all(1).any():
        warnings.warn("no reward function scored some completions; they teach nothing")
    return rewards.to(rollout.logps.device)


def keep_top_entropy(advantages, rollout, config):
    """Make A = 0, which takes a token out of any policy term, below the top entropies of the whole batch."""
    T = advantages.size(1)
    room = (0, config.max_completion_length - T)                        # processes differ in T
    entropies, mask = (gather(F.pad(x, room)) for x in (rollout.entropies, rollout.loss_mask))
    return advantages * own_share(top_entropy_mask(entropies, mask, config.top_entropy_quantile))[:, :T]


def microbatches(advantages, rollout, config):
    """Indices of the rows that learn, in parts that pass the model one by one; the others' gradient is 0."""
    _check({"mask": rollout.loss_mask, "advantages": advantages}, "mask: B T, advantages: B T")
    every_row = config.beta > 0 or config.loss_type == "bnpo"           # bnpo divides by all rows' tokens
    learns = rollout.loss_mask if every_row else rollout.loss_mask * advantages
    rows = learns.any(1).nonzero()[:, 0]
    return rows.split(config.per_device_train_batch_size) if len(rows) else ()


def score(model, rollout, rows, config):
    """Log-probs of some rows of the rollout, (rows, T)."""
    inputs = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
        return per_token_logps(model, *(x[rows] for x in inputs), temperature=config.temperature)[0]


def update_policy(policy, state, rollout, parts, advantages, scored, config):
    """Line 11: one step of AdamW on the whole batch's loss; gradients add up over parts and processes."""
    mask, weights = rollout.loss_mask, [p for p in policy.parameters() if p.requires_grad]
    B, tokens = config.generation_batch_size, all_reduce(mask.sum()).item()
    names = ["loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl"]
    metrics = dict.fromkeys(names if config.beta > 0 else names[:-1], 0.0)
    for p in weights:
        p.grad = torch.zeros_like(p)
    for k, part in enumerate(parts):
        loss, of_part = grpo_loss(
            score(policy, rollout, part, config), advantages[part], mask[part],
            **{name: logps[k] for name, logps in scored.items()}, beta=config.beta, delta=config.delta,
            epsilon_low=config.epsilon, loss_type=config.loss_type, policy_loss=config.policy_loss,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            importance_sampling_level=config.importance_sampling_level, num_items_in_batch=tokens,
            use_bias_correction_kl=config.use_bias_correction_kl, num_rows_in_batch=B,
            max_completion_length=config.max_completion_length)
        of_rows, of_tokens = len(part) / B, mask[part].sum().item() / max(tokens, 1)
        if config.loss_type == "bnpo":                                  # local to a part: their mean
            loss = loss * of_rows
        loss.backward()
        metrics["loss"] += loss.item()
        for name, mean in of_part.items():
            by_row = config.importance_sampling_level == "sequence" and name != "kl"
            metrics[name] += mean * (of_rows if by_row else of_tokens)
    for p in weights:
        all_reduce(p.grad)
    metrics = {name: all_reduce(torch.tensor(x, device=mask.device)).item() for name, x in metrics.items()}
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
    metrics["learning_rate"] = state.scheduler.get_last_lr()[0]
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(f"step {state.step + 1}: the loss or its gradient is not finite: {metrics}")
    state.optimizer.step()
    state.scheduler.step()
    return metrics


def step_metrics(rollout, reward_funcs, rewards_per_func, config):
    """What the samples of all processes were like, under TRL's names."""
    rewards_per_func, lengths = gather(rewards_per_func), gather(rollout.completion_mask.sum(1)).float()
    rewards = combine_rewards(rewards_per_func, config.reward_weights)                    # (B,)
    silent = group_stats(rewards, config.num_generations)[1] == 0                         # (P,)
    metrics = {
        "reward": rewards.nanmean(), "reward_std": group_stats(rewards, len(rewards))[1],
        "frac_reward_zero_std": silent.float().mean(), "completions/mean_length": lengths.mean(),
        "completions/clipped_ratio": 1 - gather(rollout.terminated.float()).mean(),
        "entropy": all_reduce((rollout.entropies * rollout.completion_mask).sum()) / lengths.sum()}
    metrics |= {f"rewards/{name_of(f)}/mean": x.nanmean() for f, x in zip(reward_funcs, rewards_per_func.T)}
    return {name: value.item() for name, value in metrics.items()}


# With torchrun, each of N processes samples and learns from 1/N of the rows. What concerns the whole batch is
# put together by gather and all_reduce; without torchrun they change nothing.

def rank_and_world():
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def own_share(rows):
    """This process's part of the whole batch's rows."""
    rank, world = rank_and_world()
    return rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]


def gather(rows):
    """The rows of all processes, in the order of the batch."""
    whole = rows.new_zeros(len(rows) * rank_and_world()[1], *rows.shape[1:])
    own_share(whole).copy_(rows)
    return all_reduce(whole)


def all_reduce(x):
    """The sum of x over all processes; x itself takes it."""
    if rank_and_world()[1] > 1:
        torch.distributed.all_reduce(x)
    return x


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


def tiny_problems(seed, held_out=500):
    """The 6,561 sums of 11 ... 99 without round numbers, in random order: to train on, and held out."""
    numbers = [n for n in range(11, 100) if n % 10 > 0]
    problems = [{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a in numbers for b in numbers]
    numpy.random.default_rng([seed, 1]).shuffle(problems)
    return problems[held_out:], problems[:held_out]


def teacher_trace(prompt, forgets_carry):
    """A worked answer: 47+85= gets <think>7+5=12,4+8+1=13</think>132, without the carry 4+8+0=12 and 122."""
    a, b = map(int, prompt.rstrip("=").split("+"))
    units = a % 10 + b % 10
    carry = 0 if forgets_carry else units // 10
    tens = a // 10 + b // 10 + carry
    thought = f"{a % 10}+{b % 10}={units},{a // 10}+{b // 10}+{carry}={tens}"
    return f"<think>{thought}</think>{10 * tens + units % 10}<eos>"


def cold_start(model, tokenizer, problems, seed, *, steps=500, rows=64, learning_rate=4e-3):
    """Supervised learning from the teacher: minimise the mean of -log π over the tokens of its traces."""
    rng, prompts = numpy.random.default_rng([seed, 2]), [problem["prompt"] for problem in problems]
    traces = [teacher_trace(prompt, rng.random() < 0.9) for prompt in prompts]
    traces = tokenizer(traces, padding=True, return_tensors="pt").to(model.device)
    inputs = (*encode_prompts(tokenizer, prompts, model.device), *traces.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for step in tqdm(range(steps), "cold start", leave=False, disable=rank_and_world()[0] > 0):
        chosen = rng.choice(len(prompts), rows)
        batch = [x[chosen] for x in inputs]
        optimizer.zero_grad()
        aggregate(-per_token_logps(model, *batch)[0], batch[-1], loss_type="bnpo").backward()
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, 2 - 2 * step / steps)    # 1, then to 0
        optimizer.step()


def held_out_accuracy(policy, tokenizer, problems):
    """The share of right greedy answers; the first four are shown."""
    prompts = [problem["prompt"] for problem in problems]
    solutions = [problem["solution"] for problem in problems]
    ids, _, logps, _ = generate(
        policy, *encode_prompts(tokenizer, prompts, policy.device), pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=tokenizer.eos_token_id, max_completion_length=TINY["max_completion_length"])
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = accuracy_reward(answers, solutions)
    for i in range(4):
        verdict = "right" if right[i] else f"wrong, it is {solutions[i]}"
        print(f"  {prompts[i]}{answers[i]}   {verdict} (p = {logps[i].sum().exp():.2f})")
    return sum(right) / len(right)


# What a run reads: a dataset, a model, reward functions.

def load_dataset(path):
    """JSON Lines: each line an object with "prompt" (a string, or messages) and the same further columns."""
    rows, taken = [], {"prompts", "completions", "completion_ids"}      # reward functions get them besides
    with open(path, encoding="utf-8-sig") as file:                      # a byte order mark is no data
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    for number, line in lines:
        try:
            rows.append(json.loads(line))
            prompt = rows[-1]["prompt"]
            chat = isinstance(prompt, list) and all({"role", "content"} <= set(message) for message in prompt)
            fits = (prompt and (chat or isinstance(prompt, str)) and type(prompt) is type(rows[0]["prompt"])
                    and rows[-1].keys() == rows[0].keys() - taken)
        except (ValueError, TypeError, LookupError):                    # no JSON, no object, no messages
            fits = False
        if not fits:
            raise ValueError(f"dataset: {path}, line {number}: got {line:.80}; allowed is an object with a "
                             "prompt (text, or messages with role and content) and the columns of the first, "
                             "none named prompts, completions or completion_ids")
    if not rows:
        raise ValueError(f"dataset: got {path}, which is empty; allowed is a file of one line or more")
    return rows


def load_model(name, auto_class, device, **options):
    """A float32 model and its tokenizer, from a folder or the hub; code that comes with it is never run."""
    import transformers
    options |= dict(trust_remote_code=False, dtype=torch.float32, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model, info = getattr(transformers, auto_class).from_pretrained(name, **options)
    kind, known = str(model.config.architectures), model.get_input_embeddings().num_embeddings
    if info["missing_keys"] or "Classification" in kind and auto_class == "AutoModelForCausalLM":
        raise ValueError(f"{name}: got {kind}; allowed is a model trained as {auto_class}")
    if not is_finite(model):
        raise ValueError(f"{name}: got weights that are NaN or infinite; allowed is finite numbers")
    if len(tokenizer) > known:
        raise ValueError(f"{name}: got a tokenizer of {len(tokenizer)} words; allowed is the model's {known}")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device), tokenizer


def is_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


def load_reward_func(name, device):
    """A reward function: built in, f of a file as my_rewards.py:f, or a sequence-classification model."""
    built_in = {"accuracy": accuracy_reward, "think_format": think_format_reward}
    path, _, function = name.rpartition(":")
    if name in built_in:
        return built_in[name]
    if path.endswith(".py") and os.path.isfile(path):
        folder, file = os.path.split(os.path.abspath(path))
        sys.path.insert(0, folder)                                      # it may import its neighbours
        try:
            module = importlib.import_module(file.removesuffix(".py"))
        except Exception:
            sys.excepthook(*sys.exc_info())                             # where in the user's file it happened
            raise
        if getattr(module, "__file__", None) != os.path.join(folder, file):
            raise ValueError(f"reward_funcs: got {path}; allowed is a name that is not taken by {module}")
        if callable(getattr(module, function, None)):
            return getattr(module, function)
    if path or "/" not in name and not os.path.isdir(name):
        raise ValueError(f"reward_funcs: got {name}; allowed is accuracy, think_format, file.py:function or "
                         "the folder or hub name of a sequence-classification model")
    from transformers import pipeline
    model, tokenizer = load_model(name, "AutoModelForSequenceClassification", device, num_labels=1)
    judge = pipeline("text-classification", model, tokenizer=tokenizer, device=device)

    def reward(prompts, completions, **kwargs):
        texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
        chat = not isinstance(texts[0], str)
        if chat:
            texts = tokenizer.apply_chat_template(texts, tokenize=False)
        answers = judge(texts, function_to_apply="none", add_special_tokens=not chat)     # as encode_prompts
        return [answer["score"] for answer in answers]

    reward.__name__ = os.path.basename(os.path.normpath(name))
    return reward


# What a run leaves behind, and can go on from.

FREE_ON_RESUME = ("output_dir", "save_steps", "per_device_train_batch_size")


def save_checkpoint(policy, tokenizer, state, saved, folder):
    """Write folder/checkpoint, in Hugging Face format; the old one goes when the new one is whole."""
    if not is_finite(policy):
        raise FloatingPointError(f"the weights after step {state.step} are not finite; they are not saved")
    target = os.path.realpath(os.path.join(folder, "checkpoint"))       # it may be a symbolic link
    new, old = target + ".new", target + ".old"
    parts = {name: part.state_dict() for name, part in vars(state).items() if hasattr(part, "state_dict")}
    try:
        shutil.rmtree(new, ignore_errors=True)
        policy.save_pretrained(new)
        tokenizer.save_pretrained(new)
        torch.save(saved | parts | {"step": state.step}, os.path.join(new, "trainer_state.pt"))
    except Exception as error:                                          # a full disk has many names
        shutil.rmtree(new, ignore_errors=True)
        raise InputError(f"output_dir: cannot write {new} ({error}); the last checkpoint stays") from error
    if os.path.isdir(target):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old, ignore_errors=True)


def load_state(folder, job):
    """What save_checkpoint wrote, from a run whose options were those of this job. It is only data."""
    folder = os.path.realpath(folder)                                   # as in save_checkpoint
    if os.path.isdir(folder + ".old") and not os.path.isdir(folder):    # a kill came between two renames
        folder += ".old"
    saved = torch.load(os.path.join(folder, "trainer_state.pt"), map_location="cpu", weights_only=True)
    changed = [f"{name} = {job[name]} (was {was})" for name, was in saved["job"].items() if job[name] != was]
    if changed:
        raise ValueError(f"resume_from_checkpoint: got {', '.join(changed)}; allowed to change is "
                         f"{', '.join(FREE_ON_RESUME)}")
    return saved | {"folder": folder}


def make_output_dir(folder, checkpoint):
    """The folder of this run: new or empty, or where the checkpoint lies from which it goes on."""
    home = os.path.dirname(os.path.abspath(checkpoint)) if checkpoint else None
    names = ["grpo-output", *(f"grpo-output-{n}" for n in range(2, 10**4))]
    folder = folder or home or next(name for name in names if not os.path.exists(name))
    os.makedirs(folder, exist_ok=True)
    if os.path.abspath(folder) != home and os.listdir(folder):
        raise ValueError(f"output_dir: got {folder}, which is not empty; allowed is a new or empty folder")
    return folder


def plot_curve(lines, path):
    """Draw over the steps: right answers (or the reward), entropy, groups that teach nothing."""
    from matplotlib.figure import Figure
    accuracy = "rewards/accuracy_reward/mean" if "rewards/accuracy_reward/mean" in lines[0] else "reward"
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), (accuracy, "entropy", "frac_reward_zero_std")):
        axes.plot([line["step"] for line in lines], [line[name] for line in lines])
        axes.set(title=name, xlabel="step")
    figure.savefig(path + ".new", dpi=100, format="png")
    os.replace(path + ".new", path)


# From the flags to the run.

def parse_options(argv):
    """The options of a run, and its GRPOConfig."""
    from transformers import HfArgumentParser
    parser = HfArgumentParser(GRPOConfig, prog="grpo.py", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="tiny, or the folder or hub name of a causal LM")
    parser.add_argument("--dataset", help="a file of JSON Lines: prompt (text or messages), further columns")
    parser.add_argument("--reward_funcs", nargs="+", default=["accuracy", "think_format"],
                        help="accuracy, think_format, file.py:function, or a sequence-classification model")
    parser.add_argument("--preset", choices=PRESETS, help="what a paper sets; flags and tiny's sizes win")
    parser.add_argument("--resume_from_checkpoint", help="the checkpoint folder of this same command's run")
    parser.error = lambda message: parser.exit(2, f"grpo.py: error: {message}\n")
    options, _ = parser.parse_known_args(argv)
    parser.set_defaults(**PRESETS.get(options.preset, {}) | (TINY if options.model == "tiny" else {}))
    try:
        config, options = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    except ValueError as error:
        parser.error(error)
    if (options.model == "tiny") == (options.dataset is not None):
        parser.error("dataset: allowed is --model tiny without it, or --model NAME --dataset FILE.jsonl")
    if len(config.reward_weights or options.reward_funcs) != len(options.reward_funcs):
        parser.error(f"reward_weights: allowed is one for each of {options.reward_funcs}")
    return options, config


@contextlib.contextmanager
def noted_signals():
    """A list of the Ctrl-C, SIGTERM and SIGHUP that came, for the step in hand to end; a second kills."""
    noted, before = [], {}

    def note(number, frame):
        noted.append(number)
        for number in before:
            signal.signal(number, signal.SIG_DFL)                       # which ends the process
        with contextlib.suppress(OSError):                              # the terminal may be gone
            os.write(2, b"\nstopping after this step, with a checkpoint; once more stops at once\n")

    def hold():
        signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def release():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)
        release()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:              # as nohup has it
            before[number] = signal.signal(number, note)
    # What a reward function forks must end by these signals, also by one that comes while it is forked.
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)
    try:
        yield noted
    finally:
        restore()


def run(options, config, argv):
    """The job of a command line, from what the user gave to the last line of output; the exit code."""
    tiny, cuda, (rank, world) = options.model == "tiny", torch.cuda.is_available(), rank_and_world()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)                                   # where Triton's kernels run
    if tiny:
        torch.set_num_threads(1)                                        # several would wait for each other
    if world > 1:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    if rank > 0:
        sys.stdout = open(os.devnull, "w")                              # one process speaks
    job = {name: value for name, value in asdict(config).items() if name not in FREE_ON_RESUME}
    job |= {"model": options.model, "dataset": options.dataset, "reward_funcs": options.reward_funcs}
    checkpoint, saved = options.resume_from_checkpoint, {"job": job, "lines": []}
    try:
        dataset, held_out = tiny_problems(config.seed) if tiny else (load_dataset(options.dataset), [])
        if "accuracy" in options.reward_funcs and "solution" not in dataset[0]:
            raise ValueError("dataset: allowed with the reward accuracy is one with a column named solution")
        reward_funcs = [load_reward_func(name, device) for name in options.reward_funcs]
        if checkpoint:
            saved = load_state(checkpoint, job)
            policy, tokenizer = load_model(saved["folder"], "AutoModelForCausalLM", device)
        elif tiny:
            tokenizer = tiny_tokenizer()
            policy = tiny_model(tokenizer, config.seed).to(device)
        else:
            policy, tokenizer = load_model(options.model, "AutoModelForCausalLM", device)
        if not isinstance(dataset[0]["prompt"], str):
            for row in dataset:                                         # a chat template may refuse messages
                encode_prompts(tokenizer, [row["prompt"]], "cpu")
        folder = make_output_dir(config.output_dir, checkpoint) if rank == 0 else None
    except Exception as error:                                          # what a reader says of its file
        raise InputError(error) from error
    if tiny and not checkpoint:
        cold_start(policy, tokenizer, dataset, config.seed)
        print("before GRPO:")
        saved["before"] = held_out_accuracy(policy, tokenizer, held_out)
    if world > 1:
        for p in policy.parameters():
            torch.distributed.broadcast(p.data, 0)
    state = initial_state(policy, config)
    for name in {"optimizer", "scheduler", "reference"} & saved.keys():
        getattr(state, name).load_state_dict(saved.pop(name))           # else it stays in memory
    state.step = saved.get("step", 0)
    steps = train(policy, tokenizer, dataset, reward_funcs, config, state=state)
    stopped = follow(steps, policy, tokenizer, state, config, saved, folder, argv)
    if rank == 0:
        plot_curve(saved["lines"], os.path.join(folder, "curve.png"))
        print(f"metrics.jsonl, curve.png and checkpoint are in {folder}")
    if tiny and not stopped:
        print("after GRPO:")
        after = held_out_accuracy(policy, tokenizer, held_out)
        print(f"held-out accuracy: {saved['before']:.2f} -> {after:.2f} (greedy, {len(held_out)} problems)")
    if world > 1:
        torch.distributed.destroy_process_group()
    return 128 + stopped if stopped else 0


def follow(steps, policy, tokenizer, state, config, saved, folder, argv):
    """Show, log and save the steps of train to the end, or until a signal, which is returned."""
    last, path = state.step, os.path.join(folder, "metrics.jsonl") if folder else os.devnull
    bar = tqdm(steps, "GRPO", initial=last, total=config.max_steps, disable=not folder)
    with noted_signals() as noted, open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in saved["lines"])
        try:
            for state, _, metrics in bar:
                saved["lines"].append({name: None if math.isnan(x) else x for name, x in metrics.items()})
                print(json.dumps(saved["lines"][-1]), file=file, flush=True)
                bar.set_postfix(reward=metrics["reward"], entropy=metrics["entropy"])
                stop = all_reduce(torch.tensor(len(noted), device=policy.device)) > 0      # all at one step
                if folder and (state.step % config.save_steps == 0 or config.num_iterations > 1):
                    save_checkpoint(policy, tokenizer, state, saved, folder)
                    last = state.step
                if stop:
                    return noted[0] if noted else signal.SIGTERM
        finally:                                                        # also where an error ends the run
            if folder and not saved["lines"]:
                os.remove(path)                                         # the folder may be taken again
            try:
                if folder and state.step > last:
                    save_checkpoint(policy, tokenizer, state, saved, folder)
            finally:
                if state.step < config.max_steps and os.path.isdir(f"{folder}/checkpoint"):
                    again = ["python", sys.argv[0], *argv, "--resume_from_checkpoint", f"{folder}/checkpoint"]
                    print(f"stopped after step {state.step}; to go on: {shlex.join(again)}")


def main(argv=None):
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(*parse_options(argv), argv)
    except InputError as error:
        print("grpo.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""grpo.py: Group Relative Policy Optimization, one pure function for each equation.

A language model (the policy) answers each prompt G times; a token becomes more likely where its answer is better than
the mean of the G, less likely where it is worse. The file goes from the scores of the answers to that update: rewards,
advantages, log-probs, ratio and clip, KL, masks, aggregation, the loss. Each function takes tensors and numbers, keeps
the dtype and device that it is given, and can be pasted into another file together with `import torch` and the helper
`_check` (for that, a formula here and there is written twice). Then come sampling, Algorithm 1 and the command line:

    python grpo.py --model tiny
    python grpo.py --model NAME_OR_FOLDER --dataset FILE.jsonl --reward_funcs accuracy

Notation (DeepSeekMath, arXiv:2402.03300, "the paper" below)

    symbol          name in code             shape     meaning
    q, o_i          prompt, completion                 a question and one of its G sampled answers
    G               num_generations                    answers for each prompt
    P, B            -                                  prompts; rows, B = P·G (row i belongs to prompt i // G)
    T, V, S, F      -                                  completion tokens, vocabulary, reasoning steps, reward functions
    r_i             rewards                  (B,)      reward of a whole answer
    A_i             advantages               (B,)      how much better than the group's mean
    A_{i,t}         advantages               (B, T)    the same for each token
    log π_θ         logps                    (B, T)    log-prob of each sampled token, policy in training (nats)
    log π_old       old_logps                (B, T)    the same under the weights that sampled, by the same scorer
    -               sampling_logps           (B, T)    what the sampler itself recorded: log π_old, but for rounding
    log π_ref       ref_logps                (B, T)    the same under the reference, a frozen earlier copy of the model
    m               completion_mask          (B, T)    1 = real token (the EOS included), 0 = padding
    ρ               ratio                    (B, T)    importance ratio π_θ / π_old
    ε_low, ε_high   epsilon_low, epsilon_high          clip range 1 - ε_low ... 1 + ε_high
    β               beta                               weight of the KL term
    μ               num_iterations                     updates on one batch of samples

On-policy: π_θ is still π_old, so ρ = 1. REINFORCE: the policy gradient, that of -A·log π_θ. Critic: PPO's second network,
which predicts the reward. sg[x]: x without gradient, x.detach().

Padding may hold anything, NaN and ±inf included: what stands under completion_mask == 0 reaches no value and no
gradient. Functions without a mask argument work token by token and leave padding to the function that aggregates.

Left out on purpose: inference servers, LoRA, images, tools, value networks, and top-k or top-p sampling, whose log-probs
would not be the scorer's.
"""

import argparse
import bisect
import contextlib
import copy
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace

import numpy
import torch


def _check(**rules):
    """Raise a ValueError that names the argument, what came and what is allowed. Each argument comes with its rule:

    logps=(x, "B T")                    a floating-point tensor; a letter means one size throughout the call
    mask=(x, "any B T")                 a tensor of any dtype; "int B T": of integers; "B 1|B T": of either shape
    beta=(x, ">= 0")                    a number, never NaN; also "> 0" and "0 to 1"
    num_generations=(x, "that divides B")  a whole number of which the size B is a multiple
    loss_type=(x, ("grpo", "dapo"))     one of these words
    A question mark behind a rule lets None pass.
    """
    sizes = {"1": 1}
    numbers = {"> 0": lambda x: x > 0, ">= 0": lambda x: x >= 0, "0 to 1": lambda x: 0 <= x <= 1,
               "> 0, whole": lambda x: x > 0 and x % 1 == 0, ">= 0, whole": lambda x: x >= 0 and x % 1 == 0,
               "that divides B": lambda x: isinstance(x, int) and x > 0 and sizes["B"] % x == 0}
    for name, (value, rule) in rules.items():
        if isinstance(rule, tuple):
            ok, allowed = value in rule if isinstance(value, (str, bool)) else False, " or ".join(map(repr, rule))
        elif rule.strip("?") in numbers:
            allowed = "a number " + rule.strip("?") + (f" = {sizes['B']}" if rule == "that divides B" else "")
            try:
                ok = bool(numbers[rule.strip("?")](value))
            except (TypeError, RuntimeError):  # no number at all
                ok = False
        else:
            dtype, shapes = rule.split(" ", 1) if rule[:3] in ("any", "int") else ("floating-point", rule)
            shapes = [tuple(shape.split()) for shape in shapes.strip("?").split("|")]
            allowed = " or ".join("(" + ", ".join(f"{a}={sizes[a]}" if a in sizes and a != "1" else a for a in shape) + ")"
                                  for shape in shapes)
            allowed = f"a tensor of dtype {dtype} and shape {allowed}"
            ok = isinstance(value, torch.Tensor) and (
                dtype == "any" or value.is_floating_point() == (dtype != "int") and not value.is_complex())
            fits = [shape for shape in shapes if ok and len(shape) == value.dim()
                    and all(sizes.get(a, n) == n for a, n in zip(shape, value.shape))]
            ok = bool(fits)
            sizes.update(zip(fits[0], value.shape) if ok else ())
        if not ok and not (value is None and rule[-1] == "?"):
            is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
            came = f"dtype {value.dtype}, shape {tuple(value.shape)}" if is_tensor else f"{type(value).__name__} {value!r:.200}"
            raise ValueError(f"{name}: got {came}; allowed is {allowed}")


# §1 Rewards ----------------------------------------------------------------------------------------------------------
# A reward function is f(prompts=, completions=, completion_ids=, **columns) -> one float for each completion, or None
# where it does not apply. A completion is a string or, in chat data, a list of {"role": ..., "content": ...}.


def accuracy_reward(completions, solution, **kwargs):
    r"""Compare each answer with its solution: r_i = 1 if they are equal, else 0.

    The answer is the text after the last </think>, else the whole text. Two plain numbers are compared exactly
    (1,000 = 1000.0, 1/2 = 0.5); all else, LaTeX and \boxed{} included, by math-verify.
    Source: DeepSeekMath §4.2 (rule-based rewards); TRL's accuracy_reward lets only LaTeX count.

    Args:
        completions: B strings or message lists.
        solution: B strings (or numbers).
    Returns:
        B rewards: 1.0, 0.0, or None where the solution itself cannot be parsed.
    Raises:
        ValueError: if there are not as many solutions as completions.
    """
    import re  # imported here so that the function can be pasted alone
    import threading
    from fractions import Fraction

    def number(text):  # "1,000" -> 1000, "1/2" -> ½, prose -> None
        text = text.strip()
        plain = re.fullmatch(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(/(\d{1,3}(,\d{3})+|\d+))?", text)
        try:
            return Fraction(text.replace(",", "")) if plain else None
        except (ValueError, ZeroDivisionError):  # no digit at all, more of them than Python converts, or x/0
            return None

    def equal(answer, target):
        a, b = number(answer), number(target)
        if a is not None and b is not None:
            return float(a == b)
        import math_verify
        limit = 3 if threading.current_thread() is threading.main_thread() else None  # its clock needs the main thread
        bare_latex = "\\" in target and not any(mark in target for mark in ("$", "\\boxed", "\\[", "\\("))
        gold = math_verify.parse(f"${target}$" if bare_latex else target, parsing_timeout=limit)
        found = math_verify.parse(answer[-1000:], parsing_timeout=limit)  # answers come last; keeps hostile text cheap
        return float(math_verify.verify(gold, found, timeout_seconds=limit)) if gold else None

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    if len(texts) != len(solution):
        raise ValueError(f"solution: got {len(solution)} for {len(texts)} completions; allowed is one for each")
    return [equal(text.rpartition("</think>")[2], str(target)) for text, target in zip(texts, solution)]


def think_format_reward(completions, **kwargs):
    """Give 1 to a text that is one <think>...</think>, from its first character on, and then an answer; else 0.

    Source: DeepSeek-R1 (arXiv:2501.12948) §2.2.2; like TRL's, but an answer of white space alone does not count.

    Args:
        completions: B strings or message lists.
    Returns:
        B rewards, 1.0 or 0.0, in time linear in the text.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(t.startswith("<think>") and t.count("<think>") == t.count("</think>") == 1
                  and t.rpartition("</think>")[2].strip() != "") for t in texts]


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    """Make the reward function that punishes long answers: 0 up to L - c tokens, then falling to -1 at L.

    r(n) = 0 for n <= L - c;  (L - c - n) / c for L - c < n <= L;  -1 for n > L.
    Source: DAPO (arXiv:2503.14476) eq. 13; TRL's get_soft_overlong_punishment.

    Args:
        max_completion_len: L, in tokens.
        soft_punish_cache: c, the length of the ramp in tokens, 0 <= c <= L.
    Returns:
        A reward function on completion_ids (B lists of token ids).
    Raises:
        ValueError: if c is negative or above L.
    """
    L, c = max_completion_len, soft_punish_cache
    _check(max_completion_len=(L, ">= 0"), soft_punish_cache=(c, ">= 0"))
    if c > L:
        raise ValueError(f"soft_punish_cache: got {c}; allowed is at most max_completion_len = {L}")

    def soft_overlong_punishment(completion_ids, **kwargs):
        return [0.0 if len(ids) <= L - c else -1.0 if len(ids) > L else (L - c - len(ids)) / c for ids in completion_ids]

    return soft_overlong_punishment


def combine_rewards(rewards_per_func, reward_weights=None):
    """Add up the reward functions: r_i = Σ_f w_f·r_{i,f}, over the functions that did not abstain (NaN).

    Source: TRL's GRPOTrainer (weighted nansum); there an all-NaN row becomes 0, here it stays NaN.

    Args:
        rewards_per_func: (B, F) rewards, NaN where a function returned None.
        reward_weights: (F,) weights, or None for 1 each.
    Returns:
        (B,) rewards; NaN where every function abstained.
    Raises:
        ValueError: on another shape, or a weight that is not finite.
    """
    _check(rewards_per_func=(rewards_per_func, "B F"))
    if reward_weights is not None:
        reward_weights = torch.as_tensor(reward_weights, dtype=rewards_per_func.dtype, device=rewards_per_func.device)
        _check(rewards_per_func=(rewards_per_func, "B F"), reward_weights=(reward_weights, "F"))
        if not reward_weights.isfinite().all():
            raise ValueError(f"reward_weights: got {reward_weights.tolist()}; allowed is finite numbers")
    weighted = rewards_per_func if reward_weights is None else rewards_per_func * reward_weights         # (B, F)
    abstained = rewards_per_func.isnan().all(1)                                                          # (B,)
    return torch.where(abstained, torch.nan, weighted.nansum(1))


# §2 Group statistics and advantages ----------------------------------------------------------------------------------
# A group is measured from its lowest reward: that shift cancels in r - mean, and it makes equal rewards exactly 0.
# Without it, rounding leaves r - mean = 1e-8, which over std + eps, both as small, is an advantage out of thin air.


def group_stats(rewards, num_generations, *, correction=1):
    """Mean and standard deviation of each group.

    mean = 1/n·Σ r_i,  std = √(Σ (r_i - mean)² / (n - correction)),  n = the group's rewards that are not NaN.
    Source: DeepSeekMath §4.1.2, which leaves open by what std divides. TRL, CS336: n - 1; most examples by hand: n.

    Args:
        rewards: (B,) in reward units, NaN = left out.
        num_generations: G, a divisor of B.
        correction: as in torch.std: 1 divides by n - 1, 0 by n.
    Returns:
        mean (P,), std (P,); NaN where they are undefined (no reward, or n <= correction).
    Raises:
        ValueError: if B is no multiple of G, or G <= correction.
    """
    _check(rewards=(rewards, "B"), num_generations=(num_generations, "that divides B"), correction=(correction, ">= 0"))
    if num_generations <= correction:
        raise ValueError(f"num_generations: got {num_generations} with correction = {correction}; allowed is a larger one")
    r = rewards.reshape(-1, num_generations)                                                             # (P, G)
    lowest = torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)                                  # (P, 1)
    r = r - lowest
    mean = r.nanmean(1, keepdim=True)                                                                    # (P, 1)
    n = (~r.isnan()).sum(1)                                                                              # (P,)
    std = ((r - mean).square().nansum(1) / (n - correction).clamp(min=0)).sqrt()                         # (P,)
    return (mean + lowest).squeeze(1), std


def group_advantages(rewards, num_generations, *, scale_rewards="group", correction=1, eps=1e-4):
    """Compare each answer with the other answers to its own prompt.

    A_i = (r_i - mean) / (std + eps), mean over the group and, by scale_rewards,
        "group": std of the group.  "batch": std of the whole batch.  "none": r_i - mean, undivided (Dr. GRPO).
    Source: DeepSeekMath §4.1.2; Dr. GRPO (arXiv:2503.20783) §3.1. eps = 1e-4 outside the root is TRL's; verl has 1e-6.

    Args:
        rewards: (B,) in reward units, NaN = no reward.
        num_generations: G, a divisor of B.
        scale_rewards: "group", "batch" or "none".
        correction: as in torch.std: 1 divides by n - 1, 0 by n.
        eps: added to std, in reward units.
    Returns:
        (B,) advantages without unit; exactly 0 in a group of equal rewards, and for a NaN reward.
    Raises:
        ValueError: if B is no multiple of G, G <= correction, or on an unknown scale_rewards.
    """
    _check(rewards=(rewards, "B"), num_generations=(num_generations, "that divides B"), correction=(correction, ">= 0"),
           eps=(eps, ">= 0"), scale_rewards=(scale_rewards, ("group", "batch", "none")))
    if num_generations <= correction:
        raise ValueError(f"num_generations: got {num_generations} with correction = {correction}; allowed is a larger one")
    r = rewards.reshape(-1, num_generations)                                                             # (P, G)
    r = r - torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)
    centred = r - r.nanmean(1, keepdim=True)                                                             # (P, G)
    if scale_rewards == "none":
        advantages = centred
    else:
        spread = centred if scale_rewards == "group" else (rewards - rewards.nanmean()).reshape(1, -1)
        n = (~spread.isnan()).sum(1, keepdim=True)                                                       # (P | 1, 1)
        std = (spread.square().nansum(1, keepdim=True) / (n - correction)).sqrt()                        # (P | 1, 1)
        advantages = centred / (std + eps)                                                               # (P, G)
    return torch.where((centred == 0) | centred.isnan(), 0, advantages).reshape(-1)                      # (B,)


def leave_one_out_advantages(rewards, num_generations):
    """Compare each answer with the mean of the others in its group.

    A_i = r_i - 1/(n-1)·Σ_{j≠i} r_j = (r_i - mean)·n/(n-1),  n = the group's rewards that are not NaN.
    Its baseline does not depend on the answer itself, so the policy gradient is unbiased; r_i - mean is that, shrunk.
    Source: RLOO (Kool et al. 2019; arXiv:2402.14740); TRL's RLOOTrainer.

    Args:
        rewards: (B,) in reward units, NaN = no reward.
        num_generations: G >= 2, a divisor of B.
    Returns:
        (B,) advantages in reward units; exactly 0 in a group of equal rewards, and for a NaN or a lone reward.
    Raises:
        ValueError: if B is no multiple of G, or G = 1.
    """
    _check(rewards=(rewards, "B"), num_generations=(num_generations, "that divides B"))
    if num_generations < 2:
        raise ValueError(f"num_generations: got {num_generations}; allowed is 2 or more, there must be others to compare with")
    r = rewards.reshape(-1, num_generations)                                                             # (P, G)
    r = r - torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)
    n = (~r.isnan()).sum(1, keepdim=True)                                                                # (P, 1)
    centred = r - r.nanmean(1, keepdim=True)                                                             # (P, G)
    return torch.where((centred == 0) | centred.isnan(), 0, centred * n / (n - 1)).reshape(-1)           # (B,)


def process_advantages(step_rewards, step_ends, completion_mask, num_generations, *, correction=1, eps=1e-4):
    """Process supervision: a token answers for every reasoning step that ends at or after it.

    r̃_{i,j} = (r_{i,j} - mean) / (std + eps), mean and std over all steps of the group's answers;
    A_{i,t} = Σ_{j: end(i,j) >= t} r̃_{i,j}.
    Source: DeepSeekMath §4.1.3. No library of TRL, verl and OpenRLHF implements it.

    Args:
        step_rewards: (B, S) in reward units, NaN = no such step.
        step_ends: (B, S) integers, the index in 0 ... T-1 of each step's last token.
        completion_mask: (B, T), 1 = real token.
        num_generations: G, a divisor of B.
        correction: as in torch.std: 1 divides by n - 1, 0 by n.
        eps: added to std, in reward units.
    Returns:
        (B, T) advantages, 0 at padding; exactly 0 where all step rewards of a group are equal.
    Raises:
        ValueError: on wrong shapes, B no multiple of G, or a step that ends outside the T tokens.
    """
    _check(step_rewards=(step_rewards, "B S"), step_ends=(step_ends, "int B S"), eps=(eps, ">= 0"),
           completion_mask=(completion_mask, "any B T"), num_generations=(num_generations, "that divides B"),
           correction=(correction, ">= 0"))
    B, T = completion_mask.shape
    missing = step_rewards.isnan()                                                                       # (B, S)
    ends = step_ends.masked_fill(missing, 0).long()
    if ((ends < 0) | (ends >= T)).any():
        raise ValueError(f"step_ends: got {ends.min().item()} ... {ends.max().item()}; allowed is 0 ... T-1 = {T - 1}")
    r = step_rewards.reshape(B // num_generations, -1)                                                   # (P, G·S)
    r = r - torch.where(r.isnan(), torch.inf, r).amin(1, keepdim=True)
    centred = r - r.nanmean(1, keepdim=True)
    n = (~r.isnan()).sum(1, keepdim=True)                                                                # (P, 1)
    std = (centred.square().nansum(1, keepdim=True) / (n - correction)).sqrt()
    normalised = torch.where((centred == 0) | centred.isnan(), 0, centred / (std + eps)).reshape(B, -1)  # (B, S)
    at_end = step_rewards.new_zeros(B, T).scatter_add(1, ends, normalised)                               # (B, T)
    return at_end.flip(1).cumsum(1).flip(1).masked_fill(completion_mask == 0, 0)                         # sum from t on


def gae_advantages(rewards, values, completion_mask, *, gamma=1.0, lam=0.95):
    """PPO's advantages, from a critic's values: the generalized advantage estimator.

    δ_t = r_t + γ·V_{t+1} - V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t;  V and A are 0 after the last token.
    Source: Schulman et al. (arXiv:1506.02438) eq. 16; what GRPO does without.

    Args:
        rewards: (B, T) in reward units.
        values: (B, T), the critic's V_t in reward units.
        completion_mask: (B, T), 1 = real token.
        gamma: γ, discount, in [0, 1].
        lam: λ, in [0, 1]: 0 trusts the critic (bias), 1 the rewards that came (variance).
    Returns:
        advantages (B, T), returns (B, T), 0 at padding.
    Raises:
        ValueError: on wrong shapes, or γ or λ outside [0, 1].
    """
    _check(rewards=(rewards, "B T"), values=(values, "B T"), completion_mask=(completion_mask, "any B T"),
           gamma=(gamma, "0 to 1"), lam=(lam, "0 to 1"))
    mask = completion_mask != 0
    values = torch.where(mask, values, 0)                                                                # (B, T)
    next_advantage = next_value = values.new_zeros(len(values))                                          # (B,)
    advantages = torch.zeros_like(values)                                                                # (B, T)
    for t in reversed(range(values.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0)
    return advantages, advantages + values


def broadcast_advantages(advantages, completion_mask):
    """Outcome supervision: every token of an answer gets the answer's advantage, A_{i,t} = A_i.

    Source: DeepSeekMath §4.1.2.

    Args:
        advantages: (B,).
        completion_mask: (B, T), 1 = real token.
    Returns:
        (B, T) advantages, 0 at padding.
    Raises:
        ValueError: on other shapes.
    """
    _check(advantages=(advantages, "B"), completion_mask=(completion_mask, "any B T"))
    return torch.where(completion_mask != 0, advantages.unsqueeze(1), 0)                                 # (B, T)


# §3 Log-probabilities ------------------------------------------------------------------------------------------------


def completion_mask(completion_ids, eos_token_ids):
    """Mark the real tokens: 1 up to and including the first EOS, 0 after it.

    m_t = 1 if no EOS stands before t. The EOS itself counts, or the policy never learns to stop.
    Gotcha: the pad id plays no part, because it is often the EOS id itself.
    Source: TRL's GRPOTrainer; bug reports trl#4970, trl#7039.

    Args:
        completion_ids: (B, T) integers.
        eos_token_ids: one id, or several (list, tuple or tensor).
    Returns:
        (B, T) of int64; all ones in a row without EOS.
    Raises:
        ValueError: if completion_ids is not an integer tensor (B, T), or eos_token_ids holds no integers.
    """
    _check(completion_ids=(completion_ids, "int B T"))
    eos = torch.as_tensor([] if eos_token_ids is None else eos_token_ids, device=completion_ids.device).reshape(-1)
    _check(eos_token_ids=(eos, "int N"))
    is_eos = torch.isin(completion_ids, eos).long()                                                      # (B, T)
    return (is_eos.cumsum(1) - is_eos == 0).long()                                                       # EOS before t: none


def selective_log_softmax(logits, index):
    """Log-probability of one word at each position: log p(index) = logit(index) - log Σ_v exp(logit(v)).

    Equal to log_softmax and gather, but no (B, T, V) tensor of log-probs is built: the sum over the vocabulary runs
    row by row.
    Source: TRL's function of the same name.

    Args:
        logits: (B, T, V).
        index: (B, T) integers in 0 ... V-1.
    Returns:
        (B, T) log-probs in nats.
    Raises:
        ValueError: on other shapes or dtypes.
    """
    _check(logits=(logits, "B T V"), index=(index, "int B T"))
    chosen = logits.gather(-1, index.long().unsqueeze(-1)).squeeze(-1)                                   # (B, T)
    logps = [picked - row.logsumexp(-1) for picked, row in zip(chosen, logits)]                          # B times (T,)
    return torch.stack(logps) if logps else chosen                        # stack refuses an empty batch


def entropy_from_logits(logits):
    """Entropy of the next-token distribution: H = -Σ_v p_v·log p_v.

    Source: Shannon; TRL's entropy_from_logits. It is not the mean of -log p over the sampled tokens.

    Args:
        logits: (B, T, V); -inf rules a word out.
    Returns:
        (B, T) entropies in nats, 0 ... log V.
    Raises:
        ValueError: on another shape or dtype.
    """
    _check(logits=(logits, "B T V"))
    logps = logits.log_softmax(-1)                                                                       # (B, T, V)
    return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0)).sum(-1)                            # 0·log 0 = 0


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False, chunk_size=None):
    """Score completions with a Hugging Face causal LM: log π(o_t | q, o_<t) at every real token.

    log π = log softmax(logits / temperature)[o_t]. The vocabulary is large, so the body of the model runs once, and
    its head runs over chunk_size tokens at a time, again in the backward pass: the logits of one chunk at most are
    alive. Padding costs no logits at all.
    Source: TRL's _get_per_token_logps_and_entropies; the temperature is the sampler's, else ρ is not 1 on-policy.
    Gotcha: position ids come from the mask; without them left padding shifts absolute positions (GPT-2).

    Args:
        model: any causal LM of transformers (or a module with its forward, get_decoder and config).
        prompt_ids, prompt_mask: (B, L), L prompt tokens, left-padded.
        completion_ids, completion_mask: (B, T), right-padded.
        temperature: of sampling, > 0.
        compute_entropy: also return the entropies (no gradient).
        chunk_size: tokens that pass the head at once; None takes as many as make 2²⁵ logits (128 MiB in float32).
    Returns:
        logps (B, T) in nats, 0 at padding, float32 or wider; entropies (B, T) in nats or None.
    Raises:
        ValueError: on wrong shapes, temperature <= 0, or prompts that are not left-padded.
    """
    import inspect
    from unittest.mock import patch

    from torch.utils.checkpoint import checkpoint

    _check(prompt_ids=(prompt_ids, "int B L"), prompt_mask=(prompt_mask, "any B L"), temperature=(temperature, "> 0"),
           completion_ids=(completion_ids, "int B T"), completion_mask=(completion_mask, "any B T"),
           chunk_size=(chunk_size, "> 0?"))
    if prompt_ids.size(1) == 0 or not (prompt_mask[:, -1] != 0).all():
        raise ValueError("prompt_mask: got a row whose last token is padding; allowed is left-padded prompts of 1 token or more")
    real = completion_mask != 0                                                                          # (B, T)
    mask = torch.cat([prompt_mask != 0, real], 1)                                                        # (B, L+T)
    ids = torch.cat([prompt_ids, completion_ids], 1).masked_fill(~mask, 0)        # (B, L+T); a padding id may be no word at all
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False, "return_dict": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    body = model.get_decoder()
    output = body(**inputs)
    hidden = output[0][:, prompt_ids.size(1) - 1 : -1][real]              # (N, H): the state before a token predicts it
    targets = completion_ids[real].long()                                 # (N,)

    def head(states, words):
        # The model's own forward, its body replaced by the states in hand, so that whatever the architecture does
        # after its last layer (scaling, soft cap) is done here too.
        given = type(output)(**{**output, "last_hidden_state": states.unsqueeze(0)})
        with patch.object(body, "forward", return_value=given) as replaced:
            logits = model(input_ids=words.unsqueeze(0), return_dict=True).logits.squeeze(0)             # (n, V)
        if not replaced.called:
            raise ValueError(f"model: {type(model).__name__} does not call its get_decoder(); allowed is a causal LM that does")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if temperature == 1 else logits / temperature
        logps = -torch.nn.functional.cross_entropy(logits, words, reduction="none")                      # (n,)
        with torch.no_grad():
            return logps, torch.special.entr(logits.softmax(1)).sum(1) if compute_entropy else None

    chunk_size = int(chunk_size or max(1, 2**25 // model.config.get_text_config().vocab_size))
    chunks = list(zip(hidden.split(chunk_size), targets.split(chunk_size)))
    if len(chunks) == 1:                                                  # nothing to save by doing the head twice
        scored = [head(*chunks[0])]
    else:
        scored = [checkpoint(head, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logps, entropies = zip(*scored)
    empty = torch.zeros(real.shape, dtype=logps[0].dtype, device=real.device)                             # (B, T)
    return (empty.masked_scatter(real, torch.cat(logps)),
            empty.masked_scatter(real, torch.cat(entropies)) if compute_entropy else None)


# §4 Importance ratio and clip ----------------------------------------------------------------------------------------


def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """How much more likely the samples have become since they were drawn.

    "token":    ρ_{i,t} = π_θ(o_t) / π_old(o_t) = exp(log π_θ - log π_old).
    "sequence": s_i = exp(1/|o_i|·Σ_t log ρ_{i,t}), the geometric mean of the token ratios.
    Source: DeepSeekMath eq. 3 (token); GSPO (arXiv:2507.18071) eq. 7 (sequence).

    Args:
        logps, old_logps: (B, T) in nats.
        completion_mask: (B, T), 1 = real token.
        importance_sampling_level: "token" or "sequence".
    Returns:
        (B, T), 1 at padding; for "sequence" (B, 1).
    Raises:
        ValueError: on wrong shapes or an unknown level.
    """
    _check(logps=(logps, "B T"), old_logps=(old_logps, "B T"), completion_mask=(completion_mask, "any B T"),
           importance_sampling_level=(importance_sampling_level, ("token", "sequence")))
    mask = completion_mask != 0
    log_ratio = torch.where(mask, logps - old_logps, 0)                                                  # (B, T)
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)              # (B, 1)
    return log_ratio.exp()


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """Keep the ratio where samples of π_old still speak for π_θ (the trust region): clip(ρ, 1 - ε_low, 1 + ε_high).

    Source: DeepSeekMath eq. 3, where ε_low = ε_high; DAPO (arXiv:2503.14476) §3.1 raises ε_high alone.

    Args:
        ratio: (B, T) or (B, 1).
        epsilon_low, epsilon_high: >= 0.
    Returns:
        Same shape; no gradient where it clips.
    Raises:
        ValueError: on another shape, or a negative or NaN epsilon.
    """
    _check(ratio=(ratio, "B T"), epsilon_low=(epsilon_low, ">= 0"), epsilon_high=(epsilon_high, ">= 0"))
    return ratio.clamp(1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    """The policy loss of PPO and GRPO: improve the good answers, but not beyond the trust region.

    l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A).
    min is pessimistic: the gradient is 0 where A > 0 and ρ > 1 + ε_high, or A < 0 and ρ < 1 - ε_low, and only there.
    Where A < 0, ρ has no upper bound; delta (1 + ε_high or more) gives it one: min(ρ, δ) stands for the first ρ.
    Source: DeepSeekMath eq. 3; delta: INTELLECT-2 (arXiv:2505.07291) §3.4 and TRL. verl's dual clip bounds the loss at c = 3.

    Args:
        ratio: (B, T), or (B, 1) at sequence level.
        advantages: (B,) or (B, T).
        epsilon_low, epsilon_high: >= 0.
        delta: > 0, or None for no bound.
    Returns:
        (B, T), or (B, 1) where the ratio is (B, 1) and the advantages (B,).
    Raises:
        ValueError: on other shapes, or a negative or NaN bound.
    """
    _check(ratio=(ratio, "B 1|B T"), advantages=(advantages, "B|B T"), epsilon_low=(epsilon_low, ">= 0"),
           epsilon_high=(epsilon_high, ">= 0"), delta=(delta, "> 0?"))
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                                 # (B, 1 | T)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(unclipped * A, clipped * A)


def cispo_loss(logps, ratio, advantages, *, epsilon_high=5.0):
    """REINFORCE with a capped importance weight: the weight is clipped, the gradient of log π never is.

    l = -sg[min(ρ, ε_high)]·A·log π_θ, sg = no gradient.
    Source: CISPO (MiniMax-M1, arXiv:2506.13585) eq. 4. The cap is absolute, as in TRL; verl clips to [1 - ε, 1 + ε].

    Args:
        logps: (B, T) in nats.
        ratio: (B, T), or (B, 1) at sequence level.
        advantages: (B,) or (B, T).
        epsilon_high: the cap on ρ, >= 0.
    Returns:
        (B, T).
    Raises:
        ValueError: on other shapes, or a negative or NaN cap.
    """
    _check(logps=(logps, "B T"), ratio=(ratio, "B T|B 1"), advantages=(advantages, "B|B T"), epsilon_high=(epsilon_high, ">= 0"))
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                                 # (B, 1 | T)
    return -ratio.clamp(max=epsilon_high).detach() * A * logps


def sapo_loss(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05):
    """A smooth gate in place of the clip: the gradient fades as ρ leaves 1, and never stops dead.

    l = -σ(τ·(ρ - 1))·4/τ·A, τ = temperature_pos where A > 0, else temperature_neg. At ρ = 1 its slope is that of -ρ·A.
    Source: SAPO (arXiv:2511.20347) eq. 5-6; TRL's loss_type "sapo".

    Args:
        ratio: (B, T), or (B, 1) at sequence level.
        advantages: (B,) or (B, T).
        temperature_pos, temperature_neg: τ, > 0.
    Returns:
        (B, T), or (B, 1) where the ratio is (B, 1) and the advantages (B,).
    Raises:
        ValueError: on other shapes, or a temperature that is not positive.
    """
    _check(ratio=(ratio, "B 1|B T"), advantages=(advantages, "B|B T"), temperature_pos=(temperature_pos, "> 0"),
           temperature_neg=(temperature_neg, "> 0"))
    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                                 # (B, 1 | T)
    tau = torch.full_like(A, temperature_neg).masked_fill(A > 0, temperature_pos)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * A


def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0):
    """Correct for a sampler that is not quite the scorer (another engine, another precision).

    w = min(exp(log π_old - log π_sampler), cap), without gradient: a weight on the policy term.
    Source: Yao et al. 2025, truncated importance sampling; TRL's vllm_importance_sampling_correction, mode token_truncate.

    Args:
        old_logps: (B, T) in nats, by the scorer.
        sampling_logps: (B, T) in nats, recorded while sampling.
        cap: > 0.
    Returns:
        (B, T), detached.
    Raises:
        ValueError: on other shapes, or a cap that is not positive.
    """
    _check(old_logps=(old_logps, "B T"), sampling_logps=(sampling_logps, "B T"), cap=(cap, "> 0"))
    return (old_logps - sampling_logps).exp().clamp(max=cap).detach()


# §5 KL ---------------------------------------------------------------------------------------------------------------


def kl_estimate(logps, ref_logps, *, estimator="k3"):
    """Estimate KL(π_θ‖π_ref) from the sampled tokens alone.

    With k1 = log π_θ - log π_ref:  "k1": k1.  "k2": ½·k1².  "k3": exp(-k1) + k1 - 1, which is never negative.
    Under samples of π_θ, k1 and k3 have the KL as their mean, k2 has not. As a loss term the gradients are another
    matter, for they hold the samples fixed: E∇k1 = 0, E∇k2 = ∇KL(π_θ‖π_ref), E∇k3 = ∇KL(π_ref‖π_θ).
    Source: DeepSeekMath eq. 4 (k3); Schulman 2020, "Approximating KL divergence". expm1 keeps k3 >= 0 in float32.

    Args:
        logps, ref_logps: (B, T) in nats.
        estimator: "k1", "k2" or "k3".
    Returns:
        (B, T) in nats.
    Raises:
        ValueError: on other shapes or an unknown estimator.
    """
    _check(logps=(logps, "B T"), ref_logps=(ref_logps, "B T"), estimator=(estimator, ("k1", "k2", "k3")))
    k1 = logps - ref_logps
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1.square() / 2
    return torch.expm1(-k1) + k1


def kl_penalized_rewards(scores, logps, ref_logps, completion_mask, *, beta):
    """PPO's token rewards: a KL penalty at every token, the answer's score at the last one.

    r_t = -β·(log π_θ - log π_ref) + [t is the last real token]·score.
    Source: DeepSeekMath eq. 2. GRPO has the KL in the loss instead, so that it does not blur the advantages.

    Args:
        scores: (B,) in reward units.
        logps, ref_logps: (B, T) in nats.
        completion_mask: (B, T), 1 = real token.
        beta: β >= 0.
    Returns:
        (B, T) in reward units, 0 at padding.
    Raises:
        ValueError: on other shapes, or a negative or NaN beta.
    """
    _check(scores=(scores, "B"), logps=(logps, "B T"), ref_logps=(ref_logps, "B T"),
           completion_mask=(completion_mask, "any B T"), beta=(beta, ">= 0"))
    mask = completion_mask != 0
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)                # real, and no real token after it
    penalty = torch.where(mask, -beta * (logps - ref_logps), 0)                                          # (B, T)
    return penalty + torch.where(is_last, scores.unsqueeze(1), 0)


# §6 Masks ------------------------------------------------------------------------------------------------------------


def top_entropy_mask(entropies, completion_mask, quantile):
    """Keep the tokens at which the policy hesitates: the given top fraction of the batch's real tokens by entropy.

    mask_t = 1 where H_t >= the (1 - quantile)-quantile of all H; ties are kept.
    Source: Wang et al. (arXiv:2506.01939), 20% of the tokens carry the learning; TRL's top_entropy_quantile.

    Args:
        entropies: (B, T) in nats.
        completion_mask: (B, T), 1 = real token.
        quantile: the top fraction to keep, in [0, 1]: 0.2 the highest fifth, 1 every real token.
    Returns:
        (B, T) of completion_mask's dtype, 0 at padding.
    Raises:
        ValueError: on other shapes, or a quantile outside [0, 1].
    """
    _check(entropies=(entropies, "B T"), completion_mask=(completion_mask, "any B T"), quantile=(quantile, "0 to 1"))
    mask = completion_mask != 0
    if mask.any():
        of_real = entropies[mask].to(torch.promote_types(entropies.dtype, torch.float32))              # quantile's dtypes
        mask = mask & (entropies >= of_real.quantile(1 - quantile))
    return mask.to(completion_mask.dtype)


# §7 The aggregations -------------------------------------------------------------------------------------------------


def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None, num_items_in_batch=None,
              num_rows_in_batch=None):
    """Reduce the token losses to one number; the variants differ in the denominator alone.

    "grpo":    1/rows·Σ_i (Σ_t l·m / Σ_t m)      every answer weighs the same, so a long one's tokens weigh less
    "bnpo":    Σ l·m / Σ m of these rows         every token of this microbatch weighs the same
    "dr_grpo": Σ l·m / (rows·L)                  a constant, so that nothing depends on the lengths
    "dapo":    Σ l·m / tokens of the batch       every token of the whole batch weighs the same
    With num_rows_in_batch (grpo, dr_grpo) and num_items_in_batch (dapo), the sum over any split into microbatches or
    ranks is the value for the whole; without them a split changes it. bnpo is local by definition.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3; TRL's loss_type.

    Args:
        per_token_loss: (B, T), or (B, 1) for one loss per answer.
        completion_mask: (B, T), 1 = real token.
        loss_type: "grpo", "bnpo", "dr_grpo" or "dapo".
        max_completion_length: L in tokens, for dr_grpo. Gotcha: the limit of sampling, not this batch's padded T.
        num_items_in_batch: real tokens in the whole batch; None: those of these rows.
        num_rows_in_batch: rows in the whole batch; None: B.
    Returns:
        A scalar; a row without real token adds 0, and still counts as a row (verl leaves it out).
    Raises:
        ValueError: on other shapes, an unknown loss_type, or dr_grpo without max_completion_length.
    """
    _check(per_token_loss=(per_token_loss, "B 1|B T"), completion_mask=(completion_mask, "any B T"),
           loss_type=(loss_type, ("grpo", "bnpo", "dr_grpo", "dapo")), num_items_in_batch=(num_items_in_batch, ">= 0?"),
           max_completion_length=(max_completion_length, "> 0" if loss_type == "dr_grpo" else "> 0?"),
           num_rows_in_batch=(num_rows_in_batch, "> 0?"))
    mask = completion_mask != 0
    loss = torch.where(mask, per_token_loss, 0)                                                          # (B, T)
    rows = max(len(mask), 1) if num_rows_in_batch is None else num_rows_in_batch
    if loss_type == "grpo":
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows
    if loss_type == "bnpo":
        return loss.sum() / mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return loss.sum() / (rows * max_completion_length)
    return loss.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else max(num_items_in_batch, 1))


# §8 The loss ---------------------------------------------------------------------------------------------------------


def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, entropies=None, sampling_logps=None,
              beta=0.0, epsilon_low=0.2, epsilon_high=0.2, delta=None, loss_type="dapo",
              importance_sampling_level="token", policy_loss="clip", top_entropy_quantile=1.0, kl_estimator="k3",
              use_bias_correction_kl=False, sampling_cap=2.0, max_completion_length=None, num_items_in_batch=None,
              num_rows_in_batch=None):
    """The GRPO objective as a loss: policy term × entropy mask × sampler correction + β·KL, aggregated.

    L = aggregate( l(ρ, A) + β·k3 ), ρ = π_θ / π_old. It puts the functions above together and adds nothing.
    Source: DeepSeekMath eq. 3; the order of the terms and the metric names are TRL's (GRPOTrainer._compute_loss).
    Gotcha: on-policy ρ = 1, so the value says nothing (it is -mean A, about 0); the gradient is REINFORCE's.

    Args:
        logps: (B, T) in nats, with gradient.
        advantages: (B,) or (B, T).
        completion_mask: (B, T), 1 = real token.
        old_logps: (B, T), None = on-policy (logps, detached).
        ref_logps: (B, T), needed where beta > 0.
        entropies: (B, T), needed where top_entropy_quantile < 1.
        sampling_logps: (B, T), None = no correction; sampling_cap is its cap.
        policy_loss: "clip", "cispo" (epsilon_high is then the absolute cap: set it, to 5 or so) or "sapo".
        use_bias_correction_kl: multiply the KL by ρ; even where ρ = 1, its slope makes E∇k3 (token level) ∇KL(π_θ‖π_ref).
        others: as in the functions above.
    Returns:
        The scalar loss; metrics, a dict of floats: clip_ratio/low_mean, /high_mean, /region_mean, and kl and entropy
        where ref_logps and entropies are given. Means over real tokens, at sequence level over rows.
    Raises:
        ValueError: on wrong shapes, unknown variants, or an input that an option needs and that is None.
    """
    _check(beta=(beta, ">= 0"), epsilon_low=(epsilon_low, ">= 0"), epsilon_high=(epsilon_high, ">= 0"), delta=(delta, "> 0?"),
           policy_loss=(policy_loss, ("clip", "cispo", "sapo")), kl_estimator=(kl_estimator, ("k1", "k2", "k3")),
           top_entropy_quantile=(top_entropy_quantile, "0 to 1"), sampling_cap=(sampling_cap, "> 0"))
    _check(logps=(logps, "B T"), advantages=(advantages, "B|B T"), completion_mask=(completion_mask, "any B T"),
           old_logps=(old_logps, "B T?"), ref_logps=(ref_logps, "B T" if beta > 0 else "B T?"),
           sampling_logps=(sampling_logps, "B T?"), entropies=(entropies, "B T" if top_entropy_quantile < 1 else "B T?"))
    mask = completion_mask != 0
    old_logps = logps.detach() if old_logps is None else old_logps
    # Padding is emptied once, here: a NaN that only the last mask removes would still reach the gradient (0·NaN = NaN).
    logps, old_logps, ref_logps, entropies, sampling_logps = (
        x if x is None else torch.where(mask, x, 0) for x in (logps, old_logps, ref_logps, entropies, sampling_logps))
    advantages = advantages if advantages.dim() == 1 else torch.where(mask, advantages, 0)

    ratio = importance_ratio(logps, old_logps, mask, importance_sampling_level=importance_sampling_level)  # (B, T | 1)
    if policy_loss == "clip":
        low, high = 1 - epsilon_low, 1 + epsilon_high                     # what lies outside counts as clipped in the metrics
        loss = clipped_surrogate_loss(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
    elif policy_loss == "cispo":
        low, high = 0, epsilon_high
        loss = cispo_loss(logps, ratio, advantages, epsilon_high=epsilon_high)
    else:
        low, high = 0, torch.inf
        loss = sapo_loss(ratio, advantages)
    if top_entropy_quantile < 1:
        loss = loss * top_entropy_mask(entropies, mask, top_entropy_quantile)
    if sampling_logps is not None:
        loss = loss * truncated_importance_ratio(old_logps, sampling_logps, cap=sampling_cap)
    kl = None if ref_logps is None else kl_estimate(logps, ref_logps, estimator=kl_estimator)
    if kl is not None and use_bias_correction_kl:
        kl = kl * ratio
    if beta > 0:
        loss = loss + beta * kl
    loss = aggregate(loss, mask, loss_type=loss_type, max_completion_length=max_completion_length,
                     num_items_in_batch=num_items_in_batch, num_rows_in_batch=num_rows_in_batch)

    A = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages                                 # (B, 1 | T)
    too_low, too_high = (ratio < low) & (A < 0), (ratio > high) & (A > 0)
    metrics = {"kl": kl, "entropy": entropies, "clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high,
               "clip_ratio/region_mean": too_low | too_high}
    for name, x in metrics.items():
        if x is not None:                                                 # a mean over real tokens, or over rows
            counted = mask if x.shape == mask.shape else torch.ones_like(mask[:, :1])
            metrics[name] = torch.where(counted, x.detach(), 0).to(logps.dtype).sum() / counted.sum().clamp(min=1)
    return loss, {name: x.item() for name, x in metrics.items() if x is not None}


# §9 Sampling ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, *, max_completion_length, eos_token_ids, num_generations=1, pad_token_id=0,
             temperature=1.0, uniforms=None, static_cache=False):
    """Sample G completions for each prompt, and record what the policy thought of each token.

    o_t is the first word v with Σ_{w<=v} p_w > u_t, p = softmax(logits / temperature): one uniform number a token, so
    that a sample depends on nothing but its own numbers. Samples of one prompt share their row of the KV cache until they
    differ. There is no top_k or top_p: the log-probs are those of the full distribution, as the scorer's are.

    Args:
        model: a causal LM of transformers.
        prompt_ids, prompt_mask: (P, L), left-padded.
        max_completion_length: T, the longest completion.
        eos_token_ids: one id, or several.
        num_generations: G.
        pad_token_id: what stands behind an EOS; it may be an EOS id itself.
        temperature: > 0.
        uniforms: (P·G, T) numbers in [0, 1), or None to take the most likely word (greedy).
        static_cache: reserve the KV cache for T tokens at once, so that on a GPU one CUDA graph serves all steps.
    Returns:
        completion_ids, completion_mask, logps, entropies: each (P·G, T'), T' <= T; logps and entropies in nats.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    _check(prompt_ids=(prompt_ids, "int P L"), prompt_mask=(prompt_mask, "any P L"), temperature=(temperature, "> 0"),
           max_completion_length=(max_completion_length, "> 0, whole"), num_generations=(num_generations, "> 0, whole"))
    (P, L), T, device = prompt_ids.shape, max_completion_length, prompt_ids.device
    B = P * num_generations
    eos = torch.as_tensor(eos_token_ids, device=device).reshape(-1)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache = DynamicCache(config=model.config)

    def next_logits(ids, mask):                                           # ids: the latest tokens of those in mask
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.size(1):]} if takes_positions else {}
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **positions).logits[:, -1].float()

    mask = (prompt_mask != 0).long()                                                                     # (P, L)
    logits = next_logits(prompt_ids.masked_fill(mask == 0, 0), mask)                                     # (rows, V), rows = P
    mask = torch.nn.functional.pad(mask, (0, T), value=1)                                                # (rows, L+T)
    completion_ids = torch.full((B, T), pad_token_id, device=device)
    logps, entropies = torch.zeros(2, B, T, device=device)
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    live = torch.arange(B, device=device)                                 # the samples that go on
    row = live // num_generations                                         # (live,), which of the model's rows each of them is
    static_cache = static_cache and all(type(layer) is DynamicLayer for layer in cache.layers)     # no sliding window
    if static_cache:                                                      # a row for each sample: its shapes cannot change
        logits, mask = logits[row], mask[row]
        cache, static_step = static_decoder(model, cache, row, mask, L)
        row = live
    for t in range(T):
        logp = (logits / temperature).log_softmax(1)                                                     # (rows, V)
        p = logp.exp()
        if uniforms is None:
            token = logp.argmax(1)[row]                                                                  # (live,)
        else:
            cdf = p.cumsum(1)[row]                                                                       # (live, V)
            token = torch.searchsorted(cdf, uniforms[live, t, None] * cdf[:, -1:], right=True).squeeze(1)
            token = token.clamp(max=cdf.size(1) - 1)                      # u·Σp may round up to Σp itself
        completion_ids[live, t] = token
        logps[live, t] = logp[row, token]
        entropies[live, t] = torch.special.entr(p).sum(1)[row]
        ended[live] |= torch.isin(token, eos)
        if t + 1 == T:
            break
        if not static_cache or device.type == "cpu" or t % 16 == 15:      # on a GPU, looking at the tokens halts the queue
            stay = (~ended[live]).nonzero().squeeze(1)
            if all_reduce(torch.tensor(len(stay), device=device)) == 0:   # several processes keep step: fsdp needs that
                break
            if 0 < len(stay) <= (len(live) / 2 if static_cache else len(live)):
                live, row, token = live[stay], row[stay], token[stay]
                if static_cache:                                          # built anew, so only for half the rows
                    mask, row = mask[stay], torch.arange(len(stay), device=device)
                    cache, static_step = static_decoder(model, cache, stay, mask, L + t)
        if static_cache:
            logits = static_step(token)
        else:                                                             # a row for each distinct (row, token)
            next_rows, row = torch.unique(row * logits.size(1) + token, return_inverse=True)
            parent, token = next_rows // logits.size(1), next_rows % logits.size(1)
            if not torch.equal(parent, torch.arange(len(mask), device=device)):
                cache.batch_select_indices(parent)
                mask = mask[parent]
            logits = next_logits(token.unsqueeze(1), mask[:, : L + t + 1])
    real = completion_mask(completion_ids[:, : t + 1], eos)                                              # (B, T')
    return (completion_ids[:, : t + 1].masked_fill(real == 0, pad_token_id), real,
            logps[:, : t + 1].masked_fill(real == 0, 0), entropies[:, : t + 1].masked_fill(real == 0, 0))


def static_decoder(model, cache, rows, mask, length):
    """Copy these rows of a cache's first `length` tokens to one whose shapes never change, as long as the mask, and return it
    with the function that feeds it a token (rows,) and gives the next logits (rows, V)."""
    from transformers import StaticCache
    static = StaticCache(config=model.config, max_cache_len=mask.size(1))
    for i, layer in enumerate(cache.layers):
        static.update(layer.keys[rows, :, :length], layer.values[rows, :, :length], i)
    ids, positions = torch.zeros_like(mask[:, :1]), mask[:, :length].sum(1, keepdim=True)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward():
        where = {"position_ids": positions} if takes_positions else {}
        return model(input_ids=ids, attention_mask=mask, past_key_values=static, use_cache=True, **where).logits[:, -1].float()

    launch = cuda_graph(forward, [layer.cumulative_length for layer in static.layers]) if mask.is_cuda else forward

    def step(token):
        ids.copy_(token.unsqueeze(1))
        result = launch()
        positions.add_(1)
        return result

    return static, step


def cuda_graph(forward, lengths):
    """Record forward's kernels; the function returned launches them all at once. Its own calls leave the cache's lengths as
    they were (what they wrote behind them, the next token overwrites)."""
    before = [length.clone() for length in lengths]
    torch.cuda.synchronize()                                              # what the side stream reads must be there
    with torch.cuda.stream(torch.cuda.Stream()):
        forward()                                                         # what is set up only once must not be in the record
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = forward()
    for length, n in zip(lengths, before):
        length.copy_(n)

    def launch():
        graph.replay()
        return logits

    return launch


@dataclass
class Rollout:
    """One step's samples: B rows (with several processes: this one's share), those of a prompt side by side."""

    prompts: list                    # strings or message lists
    completions: list                # strings or message lists
    columns: dict                    # the dataset's further columns, each a list of B
    prompt_ids: torch.Tensor         # (B, L), left-padded
    prompt_mask: torch.Tensor        # (B, L)
    completion_ids: torch.Tensor     # (B, T), right-padded
    completion_mask: torch.Tensor    # (B, T)
    lengths: torch.Tensor            # (B,) tokens of the completion, the EOS included
    terminated: torch.Tensor         # (B,) whether it ends in an EOS
    sampling_logps: torch.Tensor     # (B, T), recorded while sampling
    entropies: torch.Tensor          # (B, T), likewise
    old_logps: torch.Tensor = None   # (B, T), log π_old by the scorer, which the first of μ updates fills in
    ref_logps: torch.Tensor = None   # (B, T), log π_ref, where β > 0
    step_rewards: torch.Tensor = None   # (B, S), NaN = no such step, with process supervision


def sample_rollout(policy, tokenizer, batch, config, step):
    """Lines 6 and 7: G answers to each question of the batch. The policy as it stands is π_old."""
    device, G, prompts = policy.device, config.num_generations, [row["prompt"] for row in batch]
    chat = not isinstance(prompts[0], str)
    ids, mask = encode_prompts(tokenizer, prompts, device)
    # Every process draws the whole batch's numbers from (seed, step) and takes its rows: N processes sample what one would.
    size = (config.generation_batch_size, config.max_completion_length)
    uniforms = torch.from_numpy(numpy.random.default_rng([config.seed, 4, step]).random(size, dtype=numpy.float32))
    eos = eos_token_ids(policy, tokenizer)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        completion_ids, real, logps, entropies = generate(
            policy, ids, mask, max_completion_length=config.max_completion_length, eos_token_ids=eos, num_generations=G,
            pad_token_id=tokenizer.pad_token_id, temperature=config.temperature, uniforms=own_share(uniforms).to(device),
            static_cache=device.type == "cuda" and not config.fsdp)
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return Rollout(
        prompts=[prompt for prompt in prompts for _ in range(G)],
        completions=[[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
        columns={name: [row[name] for row in batch for _ in range(G)] for name in batch[0] if name != "prompt"},
        prompt_ids=ids.repeat_interleave(G, 0), prompt_mask=mask.repeat_interleave(G, 0), completion_ids=completion_ids,
        completion_mask=real, lengths=real.sum(1), sampling_logps=logps, entropies=entropies,
        terminated=(torch.isin(completion_ids, torch.tensor(eos, device=device)) & (real != 0)).any(1))


def encode_prompts(tokenizer, prompts, device):
    """Tokenize strings, or messages through the chat template; ids and mask, (P, L), padded on the left."""
    chat = not isinstance(prompts[0], str)
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts] if chat else prompts
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=not chat)
    return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)


def eos_token_ids(model, tokenizer):
    """All ids that end a completion: the tokenizer's, and those of the model's generation config."""
    more = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})


# §10 Training: Algorithm 1 of the paper ------------------------------------------------------------------------------


def bradley_terry_loss(chosen, rejected):
    """Teach a reward model to score the better answer of a pair higher: the mean of -log σ(r_chosen - r_rejected).

    Source: Bradley and Terry 1952; Ouyang et al. (arXiv:2203.02155) eq. 1; the r_φ of Algorithm 1.

    Args:
        chosen, rejected: (N,) scores in reward units.
    Returns:
        A scalar; log 2 where all scores are equal.
    Raises:
        ValueError: on other shapes.
    """
    _check(chosen=(chosen, "N"), rejected=(rejected, "N"))
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def option(default, rule, text):
    return field(default=default, metadata={"rule": rule, "help": text})


@dataclass(frozen=True)
class GRPOConfig:
    """All hyperparameters, under TRL's names. Each field: its default, what _check allows, its --help."""

    learning_rate: float = option(1e-6, ">= 0", "AdamW's step size")
    lr_scheduler_type: str = option("linear", ("linear", "cosine", "constant"), "how the step size falls to 0, or not")
    warmup_steps: int = option(0, ">= 0, whole", "updates over which the step size rises from 0")
    weight_decay: float = option(0.0, ">= 0", "AdamW's weight decay")
    max_grad_norm: float = option(1.0, "> 0", "a longer gradient is scaled down to this norm")
    max_steps: int = option(100, "> 0, whole", "steps of sampling and learning, all together")
    num_generations: int = option(8, "> 0, whole", "G, completions for each prompt")
    generation_batch_size: int = option(64, "> 0, whole", "B, completions of a step over all processes: a multiple of G")
    per_device_train_batch_size: int = option(8, "> 0, whole", "rows in one forward and backward pass: memory, not maths")
    num_iterations: int = option(1, "> 0, whole", "mu, updates on each batch of completions")
    max_completion_length: int = option(512, "> 0, whole", "T, the longest completion in tokens")
    temperature: float = option(1.0, "> 0", "of sampling and of scoring")
    loss_type: str = option("dapo", ("grpo", "bnpo", "dr_grpo", "dapo"), "how the token losses become one number")
    policy_loss: str = option("clip", ("clip", "cispo", "sapo"), "the policy term")
    importance_sampling_level: str = option("token", ("token", "sequence"), "a ratio for each token, or each answer (GSPO)")
    epsilon: float = option(0.2, ">= 0", "clip range below 1, and above it unless epsilon_high is given")
    epsilon_high: float = option(None, ">= 0?", "clip range above 1; with cispo the cap of the ratio itself")
    delta: float = option(None, "> 0?", "upper bound of the ratio where the advantage is negative")
    beta: float = option(0.0, ">= 0", "weight of the KL term; 0: no reference model")
    use_bias_correction_kl: bool = option(True, (True, False), "multiply the KL estimate by the ratio")
    scale_rewards: str = option("group", ("group", "batch", "none"), "whose std divides the centred rewards")
    reward_weights: list = option(None, None, "a weight for each reward function; None: 1 each")
    mask_truncated_completions: bool = option(False, (True, False), "learn nothing from completions without an EOS")
    top_entropy_quantile: float = option(1.0, "0 to 1", "learn from this fraction of the tokens, the highest in entropy")
    step_separator: str = option("\n", None, "what ends a reasoning step, for step_reward_func; </think> always does")
    sync_ref_model: bool = option(False, (True, False), "refresh the reference model: Algorithm 1's outer iterations")
    ref_model_sync_steps: int = option(512, "> 0, whole", "M, steps of an outer iteration")
    train_reward_model: bool = option(False, (True, False), "learn from a reward model that reward_funcs' rankings teach")
    reward_model_learning_rate: float = option(1e-4, ">= 0", "that model's step size")
    reward_model_steps: int = option(100, "> 0, whole", "updates of that model at the end of each outer iteration")
    replay_share: float = option(0.1, "0 to 1", "of its batches, the share of pairs from earlier iterations")
    seed: int = option(42, ">= 0, whole", "of the samples and of the order of the prompts")
    bf16: bool = option(False, (True, False), "bfloat16 autocast over float32 weights")
    fsdp: bool = option(False, (True, False), "spread the weights over the processes of torchrun")
    output_dir: str = option("grpo-output", None, "folder for metrics.jsonl, curve.png and checkpoint/")
    logging_steps: int = option(1, "> 0, whole", "write metrics every so many steps")
    save_steps: int = option(500, "> 0, whole", "write a checkpoint every so many steps, and at the end")

    def __post_init__(self):
        _check(**{f.name: (getattr(self, f.name), f.metadata["rule"]) for f in fields(self) if f.metadata["rule"]})
        if self.num_generations < 2:
            raise ValueError("num_generations: got 1; allowed is 2 or more, an answer is compared with others")
        if self.generation_batch_size % self.num_generations:
            raise ValueError(f"generation_batch_size: got {self.generation_batch_size}; allowed is a multiple of "
                             f"num_generations = {self.num_generations}")
        if self.policy_loss == "cispo" and self.epsilon_high is None:
            raise ValueError("epsilon_high: got None with policy_loss cispo; allowed is the cap of the ratio, such as 5.0")

    @property
    def iteration_steps(self):
        """M, the steps of an outer iteration; without sync_ref_model and train_reward_model there is but one."""
        return self.ref_model_sync_steps if self.sync_ref_model or self.train_reward_model else self.max_steps


PRESETS = {  # what the papers set; every other field keeps its default
    "deepseekmath": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, learning_rate=1e-6, num_generations=64,
                         generation_batch_size=1024, max_completion_length=1024),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


@dataclass
class TrainState:
    """What a run carries from step to step beside the policy's weights."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    reference: torch.nn.Module = None     # π_ref, where β > 0
    reward_model: object = None           # r_φ, a RewardModel, with train_reward_model
    step: int = 0
    num_tokens: int = 0                   # prompt and completion tokens seen so far


def initial_state(policy, tokenizer, config):
    from transformers import get_scheduler
    reference = copy.deepcopy(policy).requires_grad_(False) if config.beta > 0 else None
    reward_model = build_reward_model(policy, tokenizer, config) if config.train_reward_model else None
    for model in (policy, reference):
        if config.fsdp and model is not None:
            shard(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    updates = config.max_steps * config.num_iterations
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, updates)
    return TrainState(optimizer, scheduler, reference, reward_model)


def train(policy, tokenizer, dataset, reward_funcs, config, *, state=None, step_reward_func=None,
          report=lambda state, metrics: False):
    """Algorithm 1 of DeepSeekMath; the numbers on the right are its lines (12, 13 and 15 say "end for").

    Args:
        policy, tokenizer: a causal LM of transformers, trained in place, and its tokenizer.
        dataset: a list of dicts with "prompt" and any further columns.
        reward_funcs: functions f(prompts=, completions=, completion_ids=, **columns); with train_reward_model the policy
            learns from the state's reward model alone, and they rank the pairs that it learns from.
        config: a GRPOConfig.
        state: where to go on from; None starts afresh (with train_reward_model, from a model that has learnt nothing yet).
        step_reward_func: a function with the argument steps too, that gives each step of each completion a reward.
        report: called after each step with the state and the step's metrics; the run ends where it returns true.
    Returns:
        The state after the last step.
    """
    state = state or initial_state(policy, tokenizer, config)                                            # 1
    reward_funcs = [f for f in (state.reward_model, *reward_funcs) if f is not None]
    policy.eval()  # no dropout: with it, scorer and sampler would disagree, and ρ ≠ 1 on-policy
    M = config.iteration_steps
    while state.step < config.max_steps:                                                                 # 2
        if state.step == 0 or config.sync_ref_model and state.step % M == 0:
            refresh_reference(state.reference, policy)                                                   # 3: π_ref ← π_θ
        for _ in range(state.step, min(config.max_steps, state.step - state.step % M + M)):              # 4
            batch = sample_batch(dataset, config, state.step)                                            # 5
            rollout = sample_rollout(policy, tokenizer, batch, config, state.step)                       # 6, 7: π_old ← π_θ
            rewards = compute_rewards(reward_funcs, rollout)                                             # 8
            step_rewards = compute_step_rewards(step_reward_func, rollout, tokenizer, config)            # 8, for each step
            advantages = compute_advantages(rewards, rollout, config, step_rewards)                      # 9
            rollout.ref_logps = reference_logps(state.reference, rollout, config)
            for _ in range(config.num_iterations):                                                       # 10: μ
                update = update_policy(policy, state, rollout, advantages, config)                       # 11
            state.step += 1
            if state.reward_model is not None:
                update_reward_model(state, rollout, rewards, config)                                     # 14: r_φ, with replay
            if report(state, step_metrics(state, rollout, rewards, update, reward_funcs, config)):
                return state
    return state                                                                                         # output


def refresh_reference(reference, policy):
    """Line 3: the reference takes over the policy's weights (in place, so that it stays spread over the processes)."""
    for old, new in zip(reference.parameters() if reference is not None else (), policy.parameters()):
        old.data.copy_(new.data)


def sample_batch(dataset, config, step):
    """Line 5: the step's B / G prompts (this process's share), the next ones of an order shuffled anew each epoch."""
    count, n = config.generation_batch_size // config.num_generations, len(dataset)
    first = step * count
    orders = {epoch: numpy.random.default_rng([config.seed, 0, epoch]).permutation(n)
              for epoch in range(first // n, (first + count - 1) // n + 1)}
    return own_share([dataset[orders[i // n][i % n]] for i in range(first, first + count)])


class RewardError(ValueError):
    """A reward function raised, or returned something else than it should."""


def name_of(f):
    return getattr(f, "__name__", type(f).__name__)                       # a functools.partial, an object: it has none


def call_reward_func(f, rollout, allowed, parse, **more):
    """What f says of this process's completions, through parse; an error names the function and the row."""
    ids = [row[:n] for row, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist())]
    columns = rollout.columns | {"prompts": rollout.prompts, "completions": rollout.completions, "completion_ids": ids} | more

    def fails(rows):
        try:
            f(**{name: column[rows] for name, column in columns.items()})
        except Exception:
            return True

    try:
        values = f(**columns)
    except Exception as error:
        row = next((i for i in range(len(ids)) if fails(slice(i, i + 1))), None)
        where = "on the batch as a whole" if row is None else f"at row {row}, {rollout.completions[row]!r:.100}"
        raise RewardError(f"reward function {name_of(f)}: {type(error).__name__}: {error} {where} (the dataset's columns are "
                          f"{', '.join(['prompt', *rollout.columns])})") from error
    try:
        return [parse(value, i) for i, value in zip(range(len(ids)), values, strict=True)]
    except (TypeError, ValueError):
        raise RewardError(f"reward function {name_of(f)}: got {values!r:.100}; allowed is a list of {len(ids)} {allowed}, one "
                          "for each completion") from None


def finite_or_nan(value, row=None):
    if value is not None and not math.isfinite(value):
        raise ValueError
    return math.nan if value is None else float(value)


def compute_rewards(reward_funcs, rollout):
    """Line 8: each reward function on each completion of all processes, (B, F), None as NaN."""
    with all_or_none():
        columns = [call_reward_func(f, rollout, "finite numbers or None", finite_or_nan) for f in reward_funcs]
    rewards = torch.tensor(columns, device=rollout.completion_ids.device).reshape(len(reward_funcs), len(rollout.completions))
    return gather(rewards.T)                                                                             # (B, F)


def compute_step_rewards(f, rollout, tokenizer, config):
    """Process supervision (§4.1.3): a reward for each reasoning step of this process's completions; (B, S) rewards, NaN
    where there is no step, and (B, S) indices of their last tokens; None without f."""
    if f is None:
        return None
    texts, ends = [], []
    for ids, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist()):
        def read(t):                                                      # the text up to and with token t
            return tokenizer.decode(ids[: t + 1], skip_special_tokens=True)

        text = read(n - 1)
        cuts = [cut.end() for cut in re.finditer(re.escape(config.step_separator) + "|</think>", text)]
        cuts = [cut for cut in cuts if text[cut:].strip()]                # what is left at the end joins the last step
        ends.append(sorted({*(bisect.bisect_left(range(n), cut, key=lambda t: len(read(t))) for cut in cuts), n - 1}))
        marks = [0, *(len(read(t)) for t in ends[-1])]
        texts.append([text[a:b] for a, b in zip(marks, marks[1:])])

    def parse(values, row):
        return [finite_or_nan(value) for _, value in zip(texts[row], values, strict=True)]

    with all_or_none():
        rewards = call_reward_func(f, rollout, "lists of finite numbers or None, one for each of its steps", parse, steps=texts)
    S = max(map(len, ends))
    device = rollout.completion_ids.device
    rollout.step_rewards = torch.tensor([row + [math.nan] * (S - len(row)) for row in rewards], device=device)
    return rollout.step_rewards, torch.tensor([row + [0] * (S - len(row)) for row in ends], device=device)


def total_reward(rewards_per_func, config):
    """What the policy learns from, (B,): the weighted sum, or the score of the model that learns to stand for it."""
    return rewards_per_func[:, 0] if config.train_reward_model else combine_rewards(rewards_per_func, config.reward_weights)


def compute_advantages(rewards_per_func, rollout, config, step_rewards=None):
    """Line 9: the advantage of each token of this process's rows, (B, T), from the rewards of all."""
    if config.mask_truncated_completions:
        rollout.completion_mask = rollout.completion_mask * rollout.terminated.unsqueeze(1)
    mask = rollout.completion_mask
    advantages = torch.zeros_like(rollout.sampling_logps)
    if rewards_per_func.size(1):
        rewards = total_reward(rewards_per_func, config)                                                 # (B,)
        advantages = group_advantages(rewards, config.num_generations, scale_rewards=config.scale_rewards)
        advantages = broadcast_advantages(own_share(advantages), mask)                                   # (B, T)
    if step_rewards is not None:
        advantages = advantages + process_advantages(*step_rewards, mask, config.num_generations)
    if config.top_entropy_quantile < 1:   # each policy term is linear in A: A = 0 takes a token out
        room = (0, config.max_completion_length - mask.size(1))           # the fraction is of the whole batch's tokens
        kept = top_entropy_mask(*(gather(torch.nn.functional.pad(x, room)) for x in (rollout.entropies, mask)),
                                config.top_entropy_quantile)
        advantages = advantages * own_share(kept)[:, : mask.size(1)]
    return advantages


def microbatches(mask, chosen, config):
    """The chosen rows in parts that pass the model one by one, those of like length together: so little of them is padding."""
    rows = chosen.nonzero().squeeze(1)
    rows = rows[mask[rows].sum(1).argsort(stable=True)]
    return rows.split(config.per_device_train_batch_size) if len(rows) else ()


def score(model, rollout, rows, config):
    """Log-probs of some rows of the rollout, cut to the longest of them, (rows, T'). Equal rows pass the model once."""
    T = max(1, int(rollout.completion_mask[rows].sum(1).max()))
    inputs = (rollout.prompt_ids[rows], rollout.prompt_mask[rows],
              rollout.completion_ids[rows, :T], rollout.completion_mask[rows, :T])
    distinct, which = torch.cat(inputs, 1).unique(dim=0, return_inverse=True)
    logps = model.per_token_logps if config.fsdp else functools.partial(per_token_logps, model)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=config.bf16):
        return logps(*distinct.split([x.size(1) for x in inputs], 1), temperature=config.temperature)[0].index_select(0, which)


@torch.no_grad()
def reference_logps(reference, rollout, config):
    """log π_ref of the rollout, (B, T), once for all μ updates; None where there is no reference."""
    if reference is None:
        return None
    logps = torch.zeros_like(rollout.sampling_logps)
    for rows in microbatches(rollout.completion_mask, torch.ones_like(logps[:, 0]), config):
        part = score(reference, rollout, rows, config)
        logps[rows, : part.size(1)] = part
    return logps


def loss_options(config):
    """The config in grpo_loss's words."""
    return dict(
        beta=config.beta, epsilon_low=config.epsilon, delta=config.delta, policy_loss=config.policy_loss,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        loss_type="dapo" if config.loss_type == "bnpo" else config.loss_type,  # bnpo's "these rows" are the whole batch
        importance_sampling_level=config.importance_sampling_level, use_bias_correction_kl=config.use_bias_correction_kl,
        max_completion_length=config.max_completion_length)


def update_policy(policy, state, rollout, advantages, config):
    """Line 11: one step of AdamW down the loss of the whole batch, whose gradient is added up part by part."""
    mask, is_first = rollout.completion_mask, rollout.old_logps is None
    tokens, rows = all_reduce(torch.stack([mask.sum(), mask.new_tensor(len(mask))])).tolist()            # of all processes
    if is_first:                          # what the unmoved policy finds below is log π_old; rows left out keep the sampler's
        rollout.old_logps = rollout.sampling_logps.clone()
    weights = [p for p in policy.parameters() if p.requires_grad]
    for p in weights:
        p.grad = torch.zeros_like(p)
    totals = dict.fromkeys(("loss", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), 0.0)
    learns = mask.any(1) if config.beta > 0 else (advantages != 0).any(1)                                # the others: gradient 0
    learns |= config.fsdp                                                 # its processes gather weights in step: no one skips
    for part in microbatches(mask, learns, config):
        logps = score(policy, rollout, part, config)                                                     # (part, T')
        cut = (part, slice(logps.size(1)))
        if is_first:
            rollout.old_logps[cut] = logps.detach() * mask[cut]
        loss, metrics = grpo_loss(
            logps, advantages[cut], mask[cut], old_logps=None if is_first else rollout.old_logps[cut],
            ref_logps=None if rollout.ref_logps is None else rollout.ref_logps[cut],
            num_items_in_batch=tokens, num_rows_in_batch=rows, **loss_options(config))
        loss.backward()
        totals["loss"] += loss.item()
        for name, mean in metrics.items():
            of_rows = config.importance_sampling_level == "sequence" and name != "kl"
            totals[name] += mean * (len(part) / rows if of_rows else mask[cut].sum().item() / max(tokens, 1))
    for p in weights if not config.fsdp else ():                          # fsdp adds them up by itself
        all_reduce(p.grad)
    totals = dict(zip(totals, all_reduce(torch.tensor(list(totals.values()), device=mask.device)).tolist()))
    norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm)
    totals["grad_norm"] = (norm.full_tensor() if config.fsdp else norm).item()
    totals["learning_rate"] = state.scheduler.get_last_lr()[0]
    if not math.isfinite(totals["loss"] + totals["grad_norm"]):
        raise FloatingPointError(f"step {state.step + 1}: loss is {totals['loss']}, grad_norm is {totals['grad_norm']}")
    state.optimizer.step()
    state.scheduler.step()
    return totals


class RewardModel:
    """r_φ: a sequence-classification model as a reward function, its one logit for prompt and completion together. With an
    optimizer it learns: from pairs of completions to one prompt, of which the other reward functions prefer the first."""

    def __init__(self, name, model, tokenizer, optimizer=None):
        self.__name__, self.model, self.tokenizer, self.optimizer = name, model.eval(), tokenizer, optimizer
        self.model.config.pad_token_id = tokenizer.pad_token_id           # it reads its score before the padding
        self.pairs, self.replay = [], []                                  # of this iteration; of the earlier ones

    @torch.no_grad()
    def __call__(self, prompts, completions, **kwargs):
        texts = self.texts(prompts, completions)
        return [r for i in range(0, len(texts), 64) for r in self.score(texts[i : i + 64]).tolist()]

    def texts(self, prompts, completions):
        self.chat = not isinstance(prompts[0], str)                       # its template writes the special tokens itself
        return [self.tokenizer.apply_chat_template(p + c, tokenize=False) if self.chat else p + c
                for p, c in zip(prompts, completions)]

    def score(self, texts):
        inputs = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=not self.chat)
        inputs = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        return self.model(**inputs).logits[:, 0].float()

    def remember(self, rollout, truth, G):
        """Pair each group's best completion with its worst, the second best with the second worst, and so on."""
        texts, truth, pairs = self.texts(rollout.prompts, rollout.completions), truth.tolist(), []
        for start in range(0, len(texts), G):
            order = sorted((i for i in range(start, start + G) if truth[i] == truth[i]), key=lambda i: -truth[i])
            pairs += [[texts[i], texts[j]] for i, j in zip(order, reversed(order)) if truth[i] > truth[j]]
        self.pairs += gather_json(pairs)

    def learn(self, config, step, updates, rows=64):
        """Minimise bradley_terry_loss; a share of each batch is replayed, so that what was learnt earlier stays."""
        new, self.pairs = self.pairs, []
        rng = numpy.random.default_rng([config.seed, 3, step])
        replayed = round(rows * config.replay_share) if self.replay else 0
        for _ in range(updates if new else 0):
            batch = [new[i] for i in rng.integers(len(new), size=rows - replayed)]
            batch += [self.replay[i] for i in rng.integers(len(self.replay), size=replayed)] if replayed else []
            chosen, rejected = self.score([text for pair in zip(*batch) for text in pair]).split(rows)
            self.optimizer.zero_grad()
            bradley_terry_loss(chosen, rejected).backward()
            self.optimizer.step()
        self.replay = (self.replay + new)[-100_000:]


def build_reward_model(policy, tokenizer, config):
    """r_φ before it has learnt anything: the policy's body under a new head of one logit."""
    from transformers import AutoModelForSequenceClassification
    torch.manual_seed(config.seed)
    shape = copy.deepcopy(policy.config)
    shape.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(shape).to(default_device())
    model.base_model.load_state_dict(policy.base_model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.reward_model_learning_rate)
    return RewardModel("reward_model", model, tokenizer, optimizer)


def teach_reward_model(judge, policy, tokenizer, dataset, reward_funcs, config, batches=100):
    """Before the first iteration: 5 × reward_model_steps updates from batches of samples that no step of the run uses."""
    for step in range(config.max_steps, config.max_steps + batches):
        rollout = sample_rollout(policy, tokenizer, sample_batch(dataset, config, step), config, step)
        truth = combine_rewards(compute_rewards(reward_funcs, rollout), config.reward_weights)
        judge.remember(rollout, own_share(truth), config.num_generations)
    judge.learn(config, config.max_steps, 5 * config.reward_model_steps)


def update_reward_model(state, rollout, rewards_per_func, config):
    """Line 14: the reward model sees each step's pairs, and learns at the end of an outer iteration."""
    truth = combine_rewards(rewards_per_func[:, 1:], config.reward_weights)                              # (B,)
    state.reward_model.remember(rollout, own_share(truth), config.num_generations)
    if state.step % config.iteration_steps == 0:
        state.reward_model.learn(config, state.step, config.reward_model_steps)


def step_metrics(state, rollout, rewards_per_func, update, reward_funcs, config):
    """The step's metrics over all processes, under TRL's names; what each means stands in the README."""
    rewards, mask = total_reward(rewards_per_func, config), rollout.completion_mask
    lengths, terminated = gather(rollout.lengths).float(), gather(rollout.terminated.long()).bool()
    entropy, tokens = all_reduce(torch.stack([(rollout.entropies * mask).sum(), mask.sum()])).tolist()
    drift = gather(((rollout.old_logps - rollout.sampling_logps) * mask).abs().max().reshape(1))
    state.num_tokens += int(lengths.sum() + gather(rollout.prompt_mask.sum(1)).sum())
    metrics = {"step": state.step, **update, "entropy": entropy / max(tokens, 1), "reward": rewards.nanmean().item(),
               "reward_std": group_stats(rewards, len(rewards))[1].item(),
               "frac_reward_zero_std": (group_stats(rewards, config.num_generations)[1] == 0).float().mean().item(),
               "sampling/sampling_logp_difference/max": drift.max().item(), "num_tokens": state.num_tokens,
               "completions/clipped_ratio": 1 - terminated.float().mean().item()}
    for f, column in zip(reward_funcs, rewards_per_func.T):
        mean, std = group_stats(column, len(column))
        metrics |= {f"rewards/{name_of(f)}/mean": mean.item(), f"rewards/{name_of(f)}/std": std.item()}
    if rollout.step_rewards is not None:
        real = ~rollout.step_rewards.isnan()
        total, count = all_reduce(torch.stack([rollout.step_rewards.nansum(), real.sum()])).tolist()
        metrics["rewards/steps/mean"] = total / max(count, 1)
    for name, x in ("length", lengths), ("terminated_length", lengths[terminated] if terminated.any() else torch.zeros(1)):
        metrics |= {f"completions/{kind}_{name}": getattr(x, kind)().item() for kind in ("mean", "min", "max")}
    if rollout.ref_logps is None:
        del metrics["kl"]
    return metrics


# With torchrun, each of N processes samples and learns from 1/N of the rows; what concerns the whole batch is put together.


def default_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")   # "cuda" is the current one


def rank_and_world():
    on = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if on else (0, 1)


def own_share(rows):
    """This process's part of the whole batch's rows."""
    rank, world = rank_and_world()
    return rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]


def gather(rows):
    """The rows of all processes, in the order of the batch."""
    parts = [torch.empty_like(rows.contiguous()) for _ in range(rank_and_world()[1])]
    if len(parts) == 1:
        return rows
    torch.distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def gather_json(items):
    """The same for a list of what JSON can hold; it travels as bytes, because what is pickled must be unpickled."""
    data = torch.tensor(list(json.dumps(items).encode()), dtype=torch.uint8, device=default_device())
    sizes = gather(torch.tensor([len(data)], device=data.device)).tolist()
    rows = gather(torch.nn.functional.pad(data, (0, max(sizes) - len(data))).unsqueeze(0))
    return [item for row, n in zip(rows.tolist(), sizes) for item in json.loads(bytes(row[:n]))]


def all_reduce(x):
    """The sum of x over all processes; x itself takes it."""
    if rank_and_world()[1] > 1:
        torch.distributed.all_reduce(x)
    return x


@contextlib.contextmanager
def all_or_none():
    """A reward function that fails in one process ends all of them, so that none waits in vain for the others."""
    failure = None
    try:
        yield
    except RewardError as error:
        failure = error
    if all_reduce(torch.tensor(float(failure is not None), device=default_device())):
        raise failure or RewardError("a reward function failed in another process")


def shard(model):
    """Spread the weights over the processes: each block of the model gathers its own while it works (torch's FSDP)."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in [*blocks, model]:
        fully_shard(module, reshard_after_forward=True)                   # the outermost too: its weights are stepped
        module.set_gradient_divide_factor(1.0)                            # a sum over the processes, not their mean
        module.set_force_sum_reduction_for_comms(True)
    model.per_token_logps = functools.partial(per_token_logps, model)
    register_fsdp_forward_method(model, "per_token_logps")


# §11 Command line ----------------------------------------------------------------------------------------------------
# --model tiny: a small transformer learns two-digit addition, first from a teacher who mostly forgets the carry
# (supervised), then from its own answers (GRPO), which takes it beyond its teacher.

TINY = dict(learning_rate=3e-4, warmup_steps=10, max_steps=220, num_generations=16, generation_batch_size=256,
            per_device_train_batch_size=128, max_completion_length=28, step_separator=",", ref_model_sync_steps=20,
            reward_model_steps=200, reward_model_learning_rate=1e-3)


def tiny_tokenizer():
    """One token for each character, and for <think> and </think>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = ["<pad>", "<eos>", "<think>", "</think>", *"0123456789+=,"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("</?think>|<eos>|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(tokenizer, seed):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, activation_function="gelu_pytorch_tanh", pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None))


def tiny_problems(seed, held_out=500):
    """All 8,100 sums of two two-digit numbers in random order: those to train on, and those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = numpy.random.default_rng([seed, 1]).permutation(len(pairs))
    problems = [{"prompt": f"{pairs[i][0]}+{pairs[i][1]}=", "solution": str(sum(pairs[i]))} for i in order]
    return problems[held_out:], problems[:held_out]


def teacher_trace(prompt, forgets_carry):
    """A worked answer: 47+85= gets <think>7+5=12,4+8+1=13</think>132, or without the carry 4+8+0=12 and 122."""
    a, b = map(int, prompt.rstrip("=").split("+"))
    units = a % 10 + b % 10
    carry = 0 if forgets_carry else units // 10
    tens = a // 10 + b // 10 + carry
    return f"<think>{a % 10}+{b % 10}={units},{a // 10}+{b // 10}+{carry}={tens}</think>{10 * tens + units % 10}<eos>"


def addition_steps(prompts, steps, **kwargs):
    """The tiny task's step rewards: 1 for each step that is what the teacher, not forgetting the carry, would have written."""
    right = [re.split("(?<=,)|(?<=</think>)", teacher_trace(p, False).removesuffix("<eos>")) for p in prompts]
    return [[float(i < len(r) and step == r[i]) for i, step in enumerate(row)] for row, r in zip(steps, right)]


def cold_start(model, tokenizer, problems, seed, *, steps=200, rows=128, learning_rate=3e-3, forgets=0.6):
    """Supervised learning from the teacher: minimise the mean of -log π over the tokens of its traces."""
    from tqdm import tqdm
    rng = numpy.random.default_rng([seed, 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for step in tqdm(range(steps), "cold start", leave=False, disable=rank_and_world()[0] > 0):
        prompts = [problems[i]["prompt"] for i in rng.integers(len(problems), size=rows)]
        traces = tokenizer([teacher_trace(p, rng.random() < forgets) for p in prompts], padding=True, return_tensors="pt")
        mask = traces["attention_mask"].to(model.device)
        ids = traces["input_ids"].to(model.device)
        logps, _ = per_token_logps(model, *encode_prompts(tokenizer, prompts, model.device), ids, mask)
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, 2 - 2 * step / steps)    # constant for half the time, then to 0
        optimizer.zero_grad()
        aggregate(-logps, mask, loss_type="bnpo").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def solve(model, tokenizer, problems, config, when):
    """The share of problems that greedy answers get right; the first four are printed."""
    ids, mask = encode_prompts(tokenizer, [problem["prompt"] for problem in problems], model.device)
    completion_ids, *_ = generate(model, ids, mask, max_completion_length=config.max_completion_length,
                                  eos_token_ids=eos_token_ids(model, tokenizer), pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    right = accuracy_reward(answers, [problem["solution"] for problem in problems])
    if rank_and_world()[0] == 0:
        print(when)
        for problem, answer, ok in list(zip(problems, answers, right))[:4]:
            print(f"  {problem['prompt']}{answer}   {'right' if ok else 'wrong, it is ' + problem['solution']}")
    return sum(right) / len(right)


# What a run reads: a dataset, reward functions, a model.

REWARDS = {"accuracy": accuracy_reward, "think_format": think_format_reward}


def load_dataset(path):
    """JSON Lines, an object a line: "prompt" (a string, or messages) and further columns, the same in every line."""
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode() if line.strip() else "0")
            except ValueError as error:                                   # not UTF-8, or not JSON
                raise ValueError(f"{path}, line {number}: {error}; allowed is a JSON object in UTF-8") from None
            prompt = row.get("prompt") if isinstance(row, dict) else None
            is_chat = isinstance(prompt, list) and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)
            if not prompt or not (is_chat or isinstance(prompt, str)):
                raise ValueError(f"{path}, line {number}: got {line[:80]!r}; allowed is an object whose prompt is a text, or "
                                 "a list of messages with role and content")
            rows.append(row)
            if row.keys() != rows[0].keys() or type(prompt) is not type(rows[0]["prompt"]):
                raise ValueError(f"{path}, line {number}: got columns {sorted(row)}, prompt a {type(prompt).__name__}; allowed "
                                 f"is what line 1 has: {sorted(rows[0])}, {type(rows[0]['prompt']).__name__}")
    if not rows:
        raise ValueError(f"{path}: got an empty file; allowed is one JSON object a line")
    return rows


def load_reward_func(name, config, flag="reward_funcs"):
    """A reward function by its name: built in, f of a file as my_rewards.py:f, or a sequence-classification model."""
    path, _, function = name.rpartition(":")
    if name == "soft_overlong":
        f = get_soft_overlong_punishment(config.max_completion_length, config.max_completion_length // 5)
    elif name in REWARDS or name == "addition_steps":
        f = REWARDS.get(name, addition_steps)
    elif path.endswith(".py"):
        from importlib.util import module_from_spec, spec_from_file_location
        spec = spec_from_file_location(os.path.basename(path)[:-3], path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        f = getattr(module, function, None)
    elif os.path.isdir(name) or "/" in name:
        from transformers import AutoModelForSequenceClassification
        f = RewardModel(os.path.basename(os.path.normpath(name)),
                        *load_model(name, auto_class=AutoModelForSequenceClassification, flag=flag, num_labels=1))
    else:
        f = None
    if not callable(f):
        raise ValueError(f"{flag}: got {name}; allowed is {', '.join(REWARDS)}, soft_overlong, file.py:function, or the "
                         "folder or hub name of a sequence-classification model")
    return f


def load_model(name, weights=None, auto_class=None, device=None, flag="model", **options):
    """A float32 model and its tokenizer, from a folder or the Hugging Face hub; code that comes with it is never run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = (auto_class or AutoModelForCausalLM).from_pretrained(weights or name, dtype=torch.float32, **options)
    except Exception as error:  # transformers raises many kinds, most of them many lines long
        raise ValueError(f"{flag}: cannot load {name} ({first_line(error)}); allowed is {'tiny, or ' * (flag == 'model')}the "
                         "folder or hub name of a model with its tokenizer") from error
    if tokenizer.eos_token_id is None and auto_class is None:
        raise ValueError(f"model: the tokenizer of {name} has no EOS token; allowed is one with which an answer can end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(device or default_device()), tokenizer


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_context(model, tokenizer, dataset, config):
    """Raise where a prompt and a completion of full length do not fit the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    for start in range(0, len(dataset), 1000):
        lengths = encode_prompts(tokenizer, [row["prompt"] for row in dataset[start : start + 1000]], "cpu")[1].sum(1)
        if lengths.max() + config.max_completion_length > context:
            raise ValueError(f"prompt {start + int(lengths.argmax()) + 1}: got {lengths.max()} tokens; allowed is the model's "
                             f"context of {context} less max_completion_length = {config.max_completion_length}")


# What a run can go on from: checkpoints, which are written whole or not at all.


def save_checkpoint(policy, tokenizer, state, config, settings):
    """Write output_dir/checkpoint: the model in Hugging Face format, and what a resumed run needs. The old one goes only when
    the new one is whole. All processes call it (with fsdp each holds a part of the weights), and the first one writes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    target, new, old = (os.path.join(config.output_dir, "checkpoint" + end) for end in ("", ".new", ".old"))
    whole, judge = StateDictOptions(full_state_dict=True, cpu_offload=True), state.reward_model
    models = {"": policy, "reference": state.reference}
    weights = {name: get_model_state_dict(model, options=whole) for name, model in models.items() if model is not None}
    parts = {"optimizer": get_optimizer_state_dict(policy, state.optimizer, options=whole),
             "scheduler": state.scheduler.state_dict()}
    run = {"step": state.step, "num_tokens": state.num_tokens, "config": asdict(config), **settings}
    if rank_and_world()[0] > 0:
        return
    try:
        shutil.rmtree(new, ignore_errors=True)
        tokenizer.save_pretrained(new)
        for name in weights:
            models[name].save_pretrained(os.path.join(new, name), state_dict=weights[name])
        if judge is not None:
            judge.model.save_pretrained(os.path.join(new, "reward_model"))
            parts["reward_optimizer"], run["pairs"] = judge.optimizer.state_dict(), [judge.pairs, judge.replay]
        torch.save(parts, os.path.join(new, "optimizer.pt"))
        run["files"] = digests(new)
        with open(os.path.join(new, "run.json"), "w") as file:
            json.dump(run, file, indent=1)
        if os.path.isdir(target):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(new, target)
    except Exception as error:  # each writer has its own kind of error for a disk that is full
        raise OSError(f"output_dir: cannot write {new} ({first_line(error)}); the checkpoint before it is untouched") from error
    shutil.rmtree(old, ignore_errors=True)


def digests(folder):
    """The SHA-256 of each file in the folder."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(path, name), "rb") as file:
                found[os.path.relpath(file.name, folder)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@contextlib.contextmanager
def reading(folder):
    """Turn what any reader says of a file that is missing, cut off or altered into one clear error."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"resume_from_checkpoint: cannot read {folder} ({first_line(error)}); allowed is the checkpoint folder "
                         "of an earlier run, unchanged") from error


def load_checkpoint(folder, policy, tokenizer, config):
    """The state that save_checkpoint wrote."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
    whole = StateDictOptions(full_state_dict=True)
    with open(os.path.join(folder, "run.json")) as file:
        run = json.load(file)
    parts = torch.load(os.path.join(folder, "optimizer.pt"), map_location="cpu", weights_only=True)
    state = initial_state(policy, tokenizer, config)
    state.step, state.num_tokens, judge = run["step"], run["num_tokens"], state.reward_model
    set_optimizer_state_dict(policy, state.optimizer, parts["optimizer"], options=whole)
    state.scheduler.load_state_dict(parts["scheduler"])
    if state.reference is not None:
        saved, _ = load_model(folder, os.path.join(folder, "reference"), device="cpu")
        set_model_state_dict(state.reference, saved.state_dict(), options=whole)
    if judge is not None:
        saved, _ = load_model(folder, os.path.join(folder, "reward_model"), type(judge.model), device="cpu")
        judge.model.load_state_dict(saved.state_dict())
        judge.optimizer.load_state_dict(parts["reward_optimizer"])
        judge.pairs, judge.replay = run["pairs"]
    return state


# What a run shows.


def plot_curve(lines, path):
    """Draw reward, accuracy, entropy or KL, and length over the steps."""
    from matplotlib.figure import Figure
    panels = {"reward": "reward", "accuracy": "rewards/accuracy_reward/mean", "KL (nats a token)": "kl",
              "entropy (nats a token)": "entropy", "length (tokens)": "completions/mean_length"}
    panels = {title: name for title, name in panels.items() if name in lines[0] and not (name == "entropy" and "kl" in lines[0])}
    figure = Figure(figsize=(3.2 * len(panels), 2.8), layout="constrained")
    for axes, (title, name) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        axes.plot([line["step"] for line in lines], [math.nan if line[name] is None else line[name] for line in lines])
        axes.set(xlabel="step", title=title)
        axes.grid(alpha=0.3)
    figure.savefig(path + ".new", dpi=120, format="png")
    os.replace(path + ".new", path)


def explain(policy, tokenizer, dataset, reward_funcs, config):
    """One group as the second of μ updates sees it (for the first, every ratio is 1), token by token, as plain text."""
    config = replace(config, generation_batch_size=config.num_generations, beta=0.0, train_reward_model=False, warmup_steps=0,
                     learning_rate=config.learning_rate / 10)             # a small first update, so that the ratios stay readable
    for step in range(100):               # up to the first group whose rewards differ: the others teach nothing
        rollout = sample_rollout(policy.eval(), tokenizer, sample_batch(dataset, config, step), config, step)
        rewards_per_func = compute_rewards(reward_funcs, rollout)
        advantages = compute_advantages(rewards_per_func, rollout, config)
        if advantages.any():
            break
    update_policy(policy, initial_state(policy, tokenizer, config), rollout, advantages, config)
    mask, old_logps, rows = rollout.completion_mask, rollout.old_logps, torch.arange(config.num_generations)
    with torch.no_grad():
        logps = score(policy, rollout, rows, config)                      # cut to the longest completion that counts
    T = logps.size(1)
    mask, old_logps, advantages = mask[:, :T], old_logps[:, :T], advantages[:, :T]
    ratio = importance_ratio(logps, old_logps, mask, importance_sampling_level=config.importance_sampling_level)
    ratio = ratio.expand_as(logps)
    text = [f"{len(rows)} completions to {rollout.prompts[0]!r}, as the second update on them sees them (loss: the policy term)"]
    for i in rows.tolist():
        text.append(f"\ncompletion {i + 1}: {rollout.completions[i]!r}\n"
                    f"{'token':>12} mask     logp old logp   ratio clipped advantage     loss")
        for t, token in enumerate(rollout.completion_ids[i, :T].tolist()):
            only_t = advantages[i : i + 1] * (torch.arange(T, device=mask.device) == t)                  # the loss is linear in A
            loss, metrics = grpo_loss(logps[i : i + 1], only_t, mask[i : i + 1], old_logps=old_logps[i : i + 1],
                                      num_items_in_batch=1, **loss_options(config) | {"loss_type": "dapo"})
            clipped = "yes" if metrics["clip_ratio/region_mean"] else "no"
            text.append(f"{tokenizer.decode([token])!r:>12} {mask[i, t]:4d} {logps[i, t]:8.4f} {old_logps[i, t]:8.4f} "
                        f"{ratio[i, t]:7.4f} {clipped:>7} {advantages[i, t]:9.4f} {loss.item():8.4f}")
    rewards = combine_rewards(rewards_per_func, config.reward_weights)
    mean, std = group_stats(rewards, len(rewards))
    text.append(f"\nrewards {[round(r, 4) for r in rewards.tolist()]}, mean {mean.item():.4f}, std {std.item():.4f}")
    return "\n".join(text)


class Journal:
    """What a run shows and leaves behind: progress bar, metrics.jsonl, checkpoint/, curve.png. One process writes and draws."""

    def __init__(self, policy, tokenizer, state, config, settings, folder):
        from tqdm import tqdm
        self.parts, self.state, self.config = (policy, tokenizer, state, config, settings), state, config
        self.path, self.lines = os.path.join(config.output_dir, "metrics.jsonl"), []
        if folder is not None and os.path.exists(self.path):
            with reading(folder), open(self.path) as file:                # what came after the checkpoint will come again
                self.lines = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= state.step]
        self.signals, self.fresh, self.unsaved, self.first = [], True, None, state.step
        self.started = time.perf_counter()
        self.bar = tqdm(total=config.max_steps, initial=state.step, desc="GRPO", dynamic_ncols=True,
                        disable=rank_and_world()[0] > 0)

    def report(self, state, metrics):
        stop = all_reduce(torch.tensor(len(self.signals), device=default_device())).item() > 0     # all processes, at one step
        if rank_and_world()[0] == 0 and state.step % self.config.logging_steps == 0:
            line = {name: None if x != x else x for name, x in metrics.items()}
            self.write(json.dumps(line | {"step_time": time.perf_counter() - self.started}) + "\n")
        shown = {"reward": "reward", "accuracy": "rewards/accuracy_reward/mean", "kl": "kl", "entropy": "entropy",
                 "clip": "clip_ratio/region_mean"}
        self.bar.set_postfix({name: metrics[key] for name, key in shown.items() if key in metrics}, refresh=False)
        self.bar.update()
        if stop or state.step % self.config.save_steps == 0 or state.step == self.config.max_steps:
            self.save()
        self.started = time.perf_counter()
        return stop

    def write(self, line):
        """Append to metrics.jsonl; the first line replaces an earlier run's file, which stays until there is news."""
        self.lines.append(line)
        os.makedirs(self.config.output_dir, exist_ok=True)
        with open(self.path + ".new" * self.fresh, "w" if self.fresh else "a") as file:
            file.writelines(self.lines if self.fresh else [line])
        if self.fresh:
            os.replace(self.path + ".new", self.path)
        self.fresh = False

    def save(self):
        try:
            save_checkpoint(*self.parts)
            self.unsaved = None
        except OSError as error:                                          # the run goes on: the next one may find room
            self.unsaved = error
            self.bar.write(f"grpo.py: warning: {error}", file=sys.stderr)

    def how_to_go_on(self):
        folder = os.path.join(self.config.output_dir, "checkpoint")
        return f"stopped after step {self.state.step}; to go on: python grpo.py --resume_from_checkpoint {folder}"

    def watch(self, train):
        """Train until the end, or the end of the step in which Ctrl-C or SIGTERM comes."""
        signals = {number: signal.signal(number, lambda number, frame: self.signals.append(number))
                   for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            train(state=self.state, report=self.report)
        except RewardError as error:
            if self.state.step == self.first:                             # no step was done that could be lost
                raise
            self.save()
            raise RewardError(f"{error}; {self.how_to_go_on()}") from error
        finally:
            self.bar.close()
            for number, handler in signals.items():
                signal.signal(number, handler)
        if self.unsaved is not None:
            raise self.unsaved
        if rank_and_world()[0] == 0 and self.lines:
            plot_curve(list(map(json.loads, self.lines)), os.path.join(self.config.output_dir, "curve.png"))


# From the flags to the run.

SETTINGS = {"model": None, "dataset": None, "reward_funcs": ["accuracy", "think_format"], "step_reward_func": None,
            "before": None}                                               # what a run needs beside its GRPOConfig
RUN_ONLY = ("output_dir", "logging_steps", "save_steps", "per_device_train_batch_size", "fsdp")  # free to change on resume


def build_parser():
    parser = argparse.ArgumentParser(
        prog="grpo.py", description="Group Relative Policy Optimization.", allow_abbrev=False,
        argument_default=argparse.SUPPRESS, epilog="--model tiny runs offline, in half a minute on two CPU cores.")
    parser.error = lambda message: parser.exit(2, f"grpo.py: error: {message}\n")
    parser.add_argument("--model", help="tiny, or the folder or hub name of a causal LM")
    parser.add_argument("--dataset", metavar="FILE.jsonl", help="lines of prompt (text or messages) and further columns")
    parser.add_argument("--reward_funcs", nargs="+", metavar="NAME", help=f"{', '.join(REWARDS)}, soft_overlong, "
                        "file.py:function, or a sequence-classification model (default: accuracy think_format)")
    parser.add_argument("--step_reward_func", metavar="NAME", help="addition_steps or file.py:function, a reward for each step")
    parser.add_argument("--preset", choices=PRESETS, help="what a paper sets; flags beside it, and the sizes of tiny, win")
    parser.add_argument("--resume_from_checkpoint", metavar="DIR", help="go on from the checkpoint folder of an earlier run")
    parser.add_argument("--explain", action="store_true", help="print one sampled group token by token, and end")
    for f in fields(GRPOConfig):
        words = f.metadata["rule"] if isinstance(f.metadata["rule"], tuple) else None
        kind = {"type": f.type, "choices": words, "metavar": "|".join(map(str, words)) if words else f.type.__name__.upper()}
        if f.type is bool:
            kind |= {"type": lambda text: {"true": True, "false": False}.get(text.lower(), text), "nargs": "?", "const": True}
        if f.type is list:
            kind |= {"type": float, "nargs": "+", "metavar": "FLOAT"}
        defaults = f"default: {f.default!r}" + (f"; tiny: {TINY[f.name]!r}" if f.name in TINY else "")
        parser.add_argument(f"--{f.name}", **kind, help=f"{f.metadata['help']} ({defaults})")
    return parser


def read_options(given):
    """What the flags, or the checkpoint that they name, say: settings, config, and the checkpoint's folder or None."""
    def typed(model):                                                     # with tiny, a preset changes the method, not the sizes
        preset = PRESETS.get(given.get("preset"), {})
        return {name: value for name, value in preset.items() if model != "tiny" or name not in TINY} | given

    if "resume_from_checkpoint" not in given:
        settings = SETTINGS | {name: value for name, value in given.items() if name in SETTINGS}
        if settings["model"] != "tiny" and not (settings["model"] and settings["dataset"]):
            raise ValueError("model, dataset: got too little; allowed is --model tiny, or --model NAME --dataset FILE.jsonl")
        options = (TINY if settings["model"] == "tiny" else {}) | typed(settings["model"])
        return settings, GRPOConfig(**{f.name: options[f.name] for f in fields(GRPOConfig) if f.name in options}), None
    folder = given["resume_from_checkpoint"].rstrip("/")
    folder = folder + ".old" if not os.path.isdir(folder) and os.path.isdir(folder + ".old") else folder     # killed in between
    with reading(folder):
        with open(os.path.join(folder, "run.json")) as file:
            run = json.load(file)
        settings, config = {name: run[name] for name in SETTINGS}, GRPOConfig(**run["config"])
        damaged = run["files"].items() - digests(folder).items()
        if damaged:
            raise ValueError(f"{', '.join(name for name, _ in sorted(damaged))}: not as it was saved")
    known = settings | asdict(config)
    wrong = [f"{name} = {value} (was {known[name]})" for name, value in typed(settings["model"]).items()
             if name in known and name not in RUN_ONLY and value != known[name]]
    if wrong:
        raise ValueError(f"resume_from_checkpoint: got {', '.join(wrong)}; allowed to change is {', '.join(RUN_ONLY)}")
    return settings, replace(config, **{name: given[name] for name in RUN_ONLY if name in given}), folder


def check_run(given, config, settings):
    """What GRPOConfig cannot check by itself."""
    world, prompts = rank_and_world()[1], config.generation_batch_size // config.num_generations
    if os.path.exists(config.output_dir) and not os.path.isdir(config.output_dir):
        raise ValueError(f"output_dir: got {config.output_dir}, which is a file; allowed is a folder")
    if prompts % world:
        raise ValueError(f"generation_batch_size: got {prompts} prompts a step; allowed is a multiple of the {world} processes")
    if config.fsdp and not torch.distributed.is_initialized() or "explain" in given and world > 1:
        raise ValueError("fsdp, explain: allowed is --fsdp with torchrun, and --explain without it")
    if config.reward_weights and len(config.reward_weights) != len(settings["reward_funcs"]):
        raise ValueError(f"reward_weights: got {len(config.reward_weights)} for {len(settings['reward_funcs'])} reward "
                         "functions; allowed is one for each")


def load_policy(settings, config, folder):
    """The policy as the run begins, and its tokenizer; with fsdp on the CPU, until its weights are spread."""
    device = torch.device("cpu") if config.fsdp else default_device()
    if folder is not None:
        with reading(folder):
            return load_model(folder, device=device)
    if settings["model"] == "tiny":
        tokenizer = tiny_tokenizer()
        return tiny_model(tokenizer, config.seed).to(device), tokenizer
    return load_model(settings["model"], device=device)


def run(given):
    """The command line; `given` holds the flags that were typed, and no others."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()                                     # it would announce each of its retries
    if "TORCHELASTIC_RUN_ID" in os.environ:                               # started by torchrun
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, world = rank_and_world()
    say = print if rank == 0 else lambda text: None
    settings, config, folder = read_options(given)
    check_run(given, config, settings)
    tiny = settings["model"] == "tiny"
    dataset, held_out = tiny_problems(config.seed) if tiny else (load_dataset(settings["dataset"]), [])
    policy, tokenizer = load_policy(settings, config, folder)
    check_context(policy, tokenizer, dataset, config)
    reward_funcs = [load_reward_func(name, config) for name in settings["reward_funcs"]]
    step_reward_func = settings["step_reward_func"] and load_reward_func(settings["step_reward_func"], config, "step_reward_func")
    if tiny and folder is None:
        cold_start(policy, tokenizer, dataset, config.seed)
    for p in policy.parameters() if world > 1 else ():
        torch.distributed.broadcast(p.data, 0)
    if "explain" in given:
        say(explain(policy, tokenizer, dataset, reward_funcs, config))
        return 0
    if tiny and folder is None:
        settings["before"] = solve(policy, tokenizer, held_out, config, "before GRPO:")

    if folder is None:
        state = initial_state(policy, tokenizer, config)
        if config.train_reward_model:
            teach_reward_model(state.reward_model, policy, tokenizer, dataset, reward_funcs, config)
    else:
        with reading(folder):
            state = load_checkpoint(folder, policy, tokenizer, config)
    say("On-policy (num_iterations = 1) every ratio is 1, so the loss stays near 0 and clip_ratio at 0. That is normal: the "
        "gradient is not 0. Watch the reward.")
    journal = Journal(policy, tokenizer, state, config, settings, folder)
    journal.watch(functools.partial(train, policy, tokenizer, dataset, reward_funcs, config, step_reward_func=step_reward_func))
    say(f"metrics.jsonl, curve.png and checkpoint are in {config.output_dir}")
    if journal.signals:
        say(journal.how_to_go_on())
        return 128 + journal.signals[0]
    if tiny:
        after = solve(policy, tokenizer, held_out, config, "after GRPO:")
        say(f"held-out accuracy: {settings['before']:.2f} -> {after:.2f} (greedy, {len(held_out)} problems)")
    return 0


def main(argv=None):
    given = vars(build_parser().parse_args(argv))
    try:
        code = run(given)
        if rank_and_world()[1] > 1:
            torch.distributed.barrier()                                   # who leaves first would take the others down
            torch.distributed.destroy_process_group()
        return code
    except (ValueError, OSError, FloatingPointError) as error:
        print("grpo.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if rank_and_world()[1] == 1:
            raise
        print("grpo.py: error: lost the other processes:", first_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:                                             # before the first step there is nothing to save
        return 130


if __name__ == "__main__":
    sys.exit(main())

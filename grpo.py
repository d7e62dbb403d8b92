"""grpo.py: Group Relative Policy Optimization, one pure function for each equation.

Read it from top to bottom: rewards, advantages, log-probs, ratio and clip, KL, masks, aggregation, the loss. Each
function takes tensors and numbers, keeps the dtype and device that it is given, and can be pasted into another file
together with `import torch` and the helper `_check`.

Notation (DeepSeekMath, arXiv:2402.03300, "the paper" below)

    symbol          name in code             shape     meaning
    q, o_i          prompt, completion                 a question and one of its G sampled answers
    G               num_generations                    answers for each prompt
    P, B            -                                  prompts; rows, B = P·G (row i belongs to prompt i // G)
    T, V, S, F      -                                  completion tokens, vocabulary, reasoning steps, reward functions
    r_i             rewards                  (B,)      reward of a whole answer
    A_i, A_{i,t}    advantages               (B,|B,T)  how much better than the group's mean
    log π_θ         logps                    (B, T)    log-prob of each sampled token, policy in training (nats)
    log π_old       old_logps                (B, T)    the same under the policy that sampled
    log π_ref       ref_logps                (B, T)    the same under the frozen reference
    m               completion_mask          (B, T)    1 = real token (the EOS included), 0 = padding
    ρ               ratio                    (B, T)    importance ratio π_θ / π_old
    ε_low, ε_high   epsilon_low, epsilon_high          clip range 1 - ε_low ... 1 + ε_high
    β               beta                               weight of the KL term
    μ               num_iterations                     updates on one batch of samples

Padding may hold anything, NaN and ±inf included: what stands under completion_mask == 0 reaches no value and no
gradient. Functions without a mask argument work token by token and leave padding to the function that aggregates.
"""

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
               "that divides B": lambda x: isinstance(x, int) and x > 0 and sizes["B"] % x == 0}
    for name, (value, rule) in rules.items():
        if isinstance(rule, tuple):
            ok, allowed = value in rule if isinstance(value, str) else False, " or ".join(map(repr, rule))
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

    def number(text):  # "1,000" -> Fraction(1000), "1/2" -> Fraction(1, 2), prose -> None
        digits = re.fullmatch(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(/\d+)?", text.strip())
        try:
            numerator, _, denominator = text.strip().replace(",", "").partition("/")
            return Fraction(numerator) / Fraction(denominator or 1) if digits else None
        except (ValueError, ZeroDivisionError):  # no digit at all, more than Python converts, or x/0
            return None

    def equal(answer, target):
        if number(answer) is not None and number(target) is not None:
            return float(number(answer) == number(target))
        import math_verify
        limit = 3 if threading.current_thread() is threading.main_thread() else None  # its clock needs the main thread
        bare_latex = "\\" in target and "$" not in target and "\\boxed" not in target
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
    if reward_weights is not None:
        reward_weights = torch.as_tensor(reward_weights).to(rewards_per_func)
        if not reward_weights.isfinite().all():
            raise ValueError(f"reward_weights: got {reward_weights.tolist()}; allowed is finite numbers")
    _check(rewards_per_func=(rewards_per_func, "B F"), reward_weights=(reward_weights, "F?"))
    weighted = rewards_per_func if reward_weights is None else rewards_per_func * reward_weights         # (B, F)
    abstained = rewards_per_func.isnan().all(1)                                                          # (B,)
    return torch.where(abstained, torch.nan, weighted.nansum(1))


# §2 Group statistics and advantages ----------------------------------------------------------------------------------
# Everything is measured from the group's lowest reward: that shift cancels in r - mean, and it makes equal rewards
# exactly 0. Without it, rounding leaves r - mean = 1e-8, and 1e-8 / (std + 1e-8) is an advantage out of thin air.


def group_stats(rewards, num_generations, *, correction=1):
    """Mean and standard deviation of each group.

    mean = 1/n·Σ r_i,  std = √(Σ (r_i - mean)² / (n - correction)),  n = the group's rewards that are not NaN.
    Source: DeepSeekMath §4.1.2, which leaves open by what std divides. TRL, CS336: n - 1; the paper's worked guides: n.

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
        lam: λ, bias against variance, in [0, 1].
    Returns:
        advantages (B, T), returns (B, T), 0 at padding.
    Raises:
        ValueError: on wrong shapes, or γ or λ outside [0, 1].
    """
    _check(rewards=(rewards, "B T"), values=(values, "B T"), completion_mask=(completion_mask, "any B T"),
           gamma=(gamma, "0 to 1"), lam=(lam, "0 to 1"))
    mask = completion_mask != 0
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    next_advantage = next_value = torch.zeros_like(values[:, 0])                                         # (B,)
    advantages = []
    for t in reversed(range(values.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages.insert(0, torch.where(mask[:, t], advantage, 0))
    advantages = torch.stack(advantages, 1)                                                              # (B, T)
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
    return torch.stack([picked - row.logsumexp(-1) for picked, row in zip(chosen, logits)]) if len(logits) else chosen


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
        prompt_ids, prompt_mask: (B, P), left-padded.
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

    _check(prompt_ids=(prompt_ids, "int B P"), prompt_mask=(prompt_mask, "any B P"), temperature=(temperature, "> 0"),
           completion_ids=(completion_ids, "int B T"), completion_mask=(completion_mask, "any B T"),
           chunk_size=(chunk_size, "> 0?"))
    if prompt_ids.size(1) == 0 or not (prompt_mask[:, -1] != 0).all():
        raise ValueError("prompt_mask: got a row whose last token is padding; allowed is left-padded prompts of 1 token or more")
    real = completion_mask != 0                                                                          # (B, T)
    mask = torch.cat([prompt_mask != 0, real], 1)                                                        # (B, P+T)
    ids = torch.cat([prompt_ids, completion_ids], 1).masked_fill(~mask, 0)                               # (B, P+T)
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
    """Keep the ratio in the trust region: clip(ρ, 1 - ε_low, 1 + ε_high).

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

    l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A); with delta, min(ρ, δ) stands for the first ρ.
    min is pessimistic: the gradient is 0 where A > 0 and ρ > 1 + ε_high, or A < 0 and ρ < 1 - ε_low, and only there.
    Where A < 0, ρ has no upper bound; delta (1 + ε_high or more) gives it one.
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
    matter: E∇k1 = 0, E∇k2 = ∇KL(π_θ‖π_ref), E∇k3 = ∇KL(π_ref‖π_θ).
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
        quantile: the fraction to keep, in [0, 1]; 1 keeps every real token.
    Returns:
        (B, T) of completion_mask's dtype, 0 at padding.
    Raises:
        ValueError: on other shapes, or a quantile outside [0, 1].
    """
    _check(entropies=(entropies, "B T"), completion_mask=(completion_mask, "any B T"), quantile=(quantile, "0 to 1"))
    mask = completion_mask != 0
    if mask.any():
        mask = mask & (entropies >= entropies[mask].quantile(1 - quantile))
    return mask.to(completion_mask.dtype)


# §7 The aggregations -------------------------------------------------------------------------------------------------


def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None, num_items_in_batch=None,
              num_rows_in_batch=None):
    """Reduce the token losses to one number; the variants differ in the denominator alone.

    "grpo":    1/rows·Σ_i (Σ_t l·m / Σ_t m)      every answer weighs the same, so a long one's tokens weigh less
    "bnpo":    Σ l·m / Σ m of these rows         every token of this microbatch weighs the same
    "dr_grpo": Σ l·m / (rows·L)                  a constant, so that nothing depends on the lengths
    "dapo":    Σ l·m / tokens of the batch       every token of the whole batch weighs the same
    With num_rows_in_batch and num_items_in_batch, the sum over any split into microbatches or ranks is the value for
    the whole, except for bnpo, which is local by definition.
    Source: DeepSeekMath eq. 3; Dr. GRPO (arXiv:2503.20783) §3.2; DAPO (arXiv:2503.14476) §3.3; TRL's loss_type.

    Args:
        per_token_loss: (B, T), or (B, 1) for one loss per answer.
        completion_mask: (B, T), 1 = real token.
        loss_type: "grpo", "bnpo", "dr_grpo" or "dapo".
        max_completion_length: L in tokens, for dr_grpo. Gotcha: the limit of sampling, not this batch's padded T.
        num_items_in_batch: real tokens in the whole batch; None: those of these rows.
        num_rows_in_batch: rows in the whole batch; None: B.
    Returns:
        A scalar; a row without real token adds 0.
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
        policy_loss: "clip", "cispo" (epsilon_high is then the absolute cap, 5 or so) or "sapo".
        use_bias_correction_kl: multiply the KL by ρ, which makes E∇k3 the gradient of KL(π_θ‖π_ref).
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
        low, high = 1 - epsilon_low, 1 + epsilon_high
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

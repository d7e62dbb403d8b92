"""The maths of GRPO as a textbook writes it: from rewards to the loss, in about 60 lines of code.

Paste a function with those that it calls; it needs torch and nothing else. The arguments are grpo.py's: B answers, of
which num_generations to each prompt; T tokens; log-probs of the sampled tokens, (B, T); a mask, 1 = real token.

They pass the tests of the formulas:

    python worked_examples/check_your_own/check.py worked_examples/formulas.py

grpo.py makes them safe, above all from NaN at padding and from wrong shapes that broadcast. With -m beyond or -m
errors, this command shows what it adds.
"""

import torch


def group_advantages(rewards, num_generations, *, eps=1e-4):
    """How far each reward is above its group's mean, in standard deviations. (B,)"""
    r = rewards.view(-1, num_generations)
    mean = torch.mean(r, 1, keepdim=True)
    std = torch.std(r, 1, keepdim=True)
    return ((r - mean) / (std + eps)).view(-1)


def broadcast_advantages(advantages, completion_mask):
    """Each token has the advantage of its answer. (B, T)"""
    return advantages.unsqueeze(1) * completion_mask


def make_completion_mask(completion_ids, eos_token_ids):
    """1 up to and including the first EOS, 0 after it. (B, T)"""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()


def selective_log_softmax(logits, index):
    """log p of one token at each position, from the logits of all V. (B, T)"""
    return torch.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    """H = -Σ p·log p at each position, in nats. (B, T)"""
    return -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    """log π of each sampled token: the logits at position t - 1 predict token t. (B, T)"""
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, prompt_ids.size(1) - 1 : -1] / temperature
    entropies = entropy_from_logits(logits.detach()) if compute_entropy else None
    return selective_log_softmax(logits, completion_ids), entropies


def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    """ρ = π / π_old of each token; or, as in GSPO, of each answer: the geometric mean over its tokens."""
    log_ratio = logps - old_logps
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * completion_mask).sum(1, keepdim=True) / completion_mask.sum(1, keepdim=True)
    return torch.exp(log_ratio)


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    """ρ, limited to 1 - ε_low ... 1 + ε_high."""
    return torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2):
    """-min(ρA, clip(ρ)A) of each token."""
    return -torch.min(ratio * advantages, clip_ratio(ratio, epsilon_low, epsilon_high) * advantages)


def kl_estimate(logps, ref_logps):
    """k3, an estimate of KL(π‖π_ref) at each token; at least 0, up to rounding."""
    d = ref_logps - logps
    return torch.exp(d) - d - 1


def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None):
    """The mean of the token losses; the methods differ in its denominator. A scalar."""
    total = (per_token_loss * completion_mask).sum()
    if loss_type == "grpo":
        return ((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()
    if loss_type == "dr_grpo":
        return total / (len(per_token_loss) * max_completion_length)
    return total / completion_mask.sum()


def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, beta=0.0, epsilon_low=0.2,
              epsilon_high=0.2, loss_type="dapo", importance_sampling_level="token", use_bias_correction_kl=False,
              max_completion_length=None):
    """The whole loss; grpo.py returns metrics beside it. A scalar, {}"""
    old_logps = (logps if old_logps is None else old_logps).detach()
    ratio = importance_ratio(logps, old_logps, completion_mask, importance_sampling_level=importance_sampling_level)
    A = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    loss = clipped_surrogate_loss(ratio, A, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if ref_logps is not None:
        kl = kl_estimate(logps, ref_logps.detach())
        loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)
    return aggregate(loss, completion_mask, loss_type=loss_type, max_completion_length=max_completion_length), {}

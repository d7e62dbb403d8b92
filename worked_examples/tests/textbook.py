"""GRPO as a textbook writes it: the plain formulas, without what makes them safe.

    GRPO_MODULE=worked_examples/tests/textbook.py python -m pytest -q test_grpo.py

has no failure: test_grpo.py asks a student's file for the formula, and for nothing beyond it. The lines of grpo.py that
are not here are about what it leaves open: padding that holds NaN, rewards that are missing, equal rewards in float32,
answers without a token. Below stand mistakes that students make; the tests find and explain each.
"""

import torch


def group_advantages(rewards, num_generations, *, eps=1e-4):
    r = rewards.view(-1, num_generations)
    mean = torch.mean(r, 1, keepdim=True)
    std = torch.std(r, 1, keepdim=True)
    return ((r - mean) / (std + eps)).view(-1)


def leave_one_out_advantages(rewards, num_generations):
    r = rewards.view(-1, num_generations)
    return (r - (r.sum(1, keepdim=True) - r) / (num_generations - 1)).view(-1)


def broadcast_advantages(advantages, completion_mask):
    return advantages.unsqueeze(1) * completion_mask


def completion_mask(completion_ids, eos_token_ids):
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()


def selective_log_softmax(logits, index):
    return torch.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    return -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logits = logits[:, prompt_ids.size(1) - 1 : -1] / temperature
    entropies = entropy_from_logits(logits.detach()) * completion_mask if compute_entropy else None
    return selective_log_softmax(logits, completion_ids) * completion_mask, entropies


def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    log_ratio = logps - old_logps
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * completion_mask).sum(1, keepdim=True) / completion_mask.sum(1, keepdim=True)
    return torch.exp(log_ratio)


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    return torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2):
    A = advantages.unsqueeze(1)
    return -torch.min(ratio * A, clip_ratio(ratio, epsilon_low, epsilon_high) * A)


def truncated_importance_ratio(old_logps, sampling_logps, *, cap=2.0):
    return torch.clamp(torch.exp(old_logps - sampling_logps), max=cap).detach()


def kl_estimate(logps, ref_logps):
    d = ref_logps - logps
    return torch.exp(d) - d - 1


def top_entropy_mask(entropies, completion_mask, quantile):
    threshold = torch.quantile(entropies[completion_mask == 1], 1 - quantile)
    return (entropies >= threshold) * completion_mask


def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None):
    total = (per_token_loss * completion_mask).sum()
    if loss_type == "grpo":
        return ((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()
    if loss_type == "dr_grpo":
        return total / (len(per_token_loss) * max_completion_length)
    return total / completion_mask.sum()


def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, entropies=None,
              sampling_logps=None, beta=0.0, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo",
              importance_sampling_level="token", top_entropy_quantile=1.0, use_bias_correction_kl=False,
              sampling_cap=2.0, max_completion_length=None):
    old_logps = (logps if old_logps is None else old_logps).detach()
    ratio = importance_ratio(logps, old_logps, completion_mask, importance_sampling_level=importance_sampling_level)
    A = advantages.unsqueeze(1)
    too_low, too_high = (ratio < 1 - epsilon_low) & (A < 0), (ratio > 1 + epsilon_high) & (A > 0)
    shares = {"clip_ratio/low_mean": too_low, "clip_ratio/high_mean": too_high}
    loss = clipped_surrogate_loss(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if top_entropy_quantile < 1:
        loss = loss * top_entropy_mask(entropies, completion_mask, top_entropy_quantile)
    if sampling_logps is not None:
        loss = loss * truncated_importance_ratio(old_logps, sampling_logps, cap=sampling_cap)
    if ref_logps is not None:
        shares["kl"] = kl_estimate(logps, ref_logps.detach()) * (ratio if use_bias_correction_kl else 1.0)
        loss = loss + beta * shares["kl"]
    loss = aggregate(loss, completion_mask, loss_type=loss_type, max_completion_length=max_completion_length)
    return loss, {name: aggregate(x.double(), completion_mask, loss_type="dapo").item() for name, x in shares.items()}


# What a student gets wrong; the words above, and what stands there instead; the test that says so, and its arguments.
MISTAKES = [
    ("std by n", "std(r, 1, keepdim=True)", "std(r, 1, keepdim=True, correction=0)", "test_group_advantages", {}),
    ("batch mean", "torch.mean(r, 1, keepdim=True)", "torch.mean(r)", "test_group_advantages", {}),
    ("no eps", "(std + eps)", "std", "test_group_advantages", {}),
    ("eps inside the root", "(std + eps)", "(std**2 + eps).sqrt()", "test_group_advantages", {}),
    ("RLOO by n", "/ (num_generations - 1)", "/ num_generations", "test_leave_one_out"),
    ("max for min", "-torch.min(", "-torch.max(", "test_clipped_surrogate", {}),
    ("sign", "-torch.min(", "torch.min(", "test_clipped_surrogate", {}),
    ("KL reversed", "d = ref_logps - logps", "d = logps - ref_logps", "test_kl_estimate", {}),
    ("grpo as bnpo", "((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()",
     "total / completion_mask.sum()", "test_aggregate", "grpo", {}),
    ("dr_grpo by padded T", "* max_completion_length", "* completion_mask.size(1)", "test_aggregate", "dr_grpo", {}),
    ("GSPO's sum for mean", " / completion_mask.sum(1, keepdim=True)", "", "test_importance_ratio",
     dict(importance_sampling_level="sequence")),
    ("ratio inverted", "log_ratio = logps - old_logps", "log_ratio = old_logps - logps", "test_importance_ratio", {}),
    ("EOS masked out", "is_eos.cumsum(1) - is_eos == 0", "is_eos.cumsum(1) == 0", "test_completion_mask", False),
    ("off by one", "- 1 : -1] / temp", ":] / temp", "test_per_token_logps_are_those_of_each_row_alone", "Llama", {}),
    ("entropy with gradient", "logits.detach()", "logits", "test_per_token_logps_are_those_of_each_row_alone", "Llama",
     dict(compute_entropy=True)),
    ("advantages at padding", "(1) * completion_mask\n", "(1).expand(completion_mask.shape)\n", "test_broadcast", {}),
    ("old not detached", "old_logps).detach()", "old_logps)", "test_grpo_loss_takes_the_other_log_probs_as_constants"),
    ("ref not detached", "ref_logps.detach()", "ref_logps", "test_grpo_loss_takes_the_other_log_probs_as_constants"),
    ("entropy mask on the KL", "+ beta *", "+ (entropies >= entropies.median()) * beta *", "test_grpo_loss",
     dict(beta=0.1, top_entropy_quantile=0.5)),
    ("clipped whatever A is", "(ratio > 1 + epsilon_high) & (A > 0)", "ratio > 1 + epsilon_high", "test_grpo_loss_metrics", {}),
    ("KL as it was before ρ", 'shares["kl"]\n', 'shares["kl"]\n        shares["kl"] = kl_estimate(logps, ref_logps)\n',
     "test_grpo_loss_metrics", {}),
    ("no w", "if sampling_logps is not None", "if False", "test_grpo_loss", dict(sampling_cap=1.2)),
    ("w of log π", "truncated_importance_ratio(old_logps, sampling_logps, cap=s", "truncated_importance_ratio(logps, "
     "sampling_logps, cap=s", "test_grpo_loss", dict(sampling_cap=1.2))]

"""GRPO as a textbook writes it: the plain formulas, without what makes them safe.

    GRPO_MODULE=worked_examples/formulas.py python -m pytest -q test_grpo.py

has no failure: test_grpo.py asks a student's file for the formulas, and `-m beyond` alone for what goes beyond them. The
lines of grpo.py that are not here are about that: padding that holds NaN, rewards that are missing, equal rewards in
float32, answers without a token. Below are mistakes that students make; a law catches each.
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


def make_completion_mask(completion_ids, eos_token_ids):
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()


def selective_log_softmax(logits, index):
    return torch.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits):
    return -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0,
                    compute_entropy=False):
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits = logits[:, prompt_ids.size(1) - 1 : -1] / temperature
    entropies = entropy_from_logits(logits.detach()) if compute_entropy else None
    return selective_log_softmax(logits, completion_ids), entropies


def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    log_ratio = logps - old_logps
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * completion_mask).sum(1, keepdim=True) / completion_mask.sum(1, keepdim=True)
    return torch.exp(log_ratio)


def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    return torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)


def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2):
    return -torch.min(ratio * advantages, clip_ratio(ratio, epsilon_low, epsilon_high) * advantages)


def kl_estimate(logps, ref_logps):
    d = ref_logps - logps
    return torch.exp(d) - d - 1


def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None):
    total = (per_token_loss * completion_mask).sum()
    if loss_type == "grpo":
        return ((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()
    if loss_type == "dr_grpo":
        return total / (len(per_token_loss) * max_completion_length)
    return total / completion_mask.sum()


def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, beta=0.0, epsilon_low=0.2,
              epsilon_high=0.2, loss_type="dapo", importance_sampling_level="token", use_bias_correction_kl=False,
              max_completion_length=None):
    old_logps = (logps if old_logps is None else old_logps).detach()
    ratio = importance_ratio(logps, old_logps, completion_mask, importance_sampling_level=importance_sampling_level)
    A = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    low, high = (ratio < 1 - epsilon_low) & (A < 0), (ratio > 1 + epsilon_high) & (A > 0)
    shares = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
    loss = clipped_surrogate_loss(ratio, A, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if ref_logps is not None:
        shares["kl"] = kl_estimate(logps, ref_logps.detach()) * (ratio if use_bias_correction_kl else 1.0)
        loss = loss + beta * shares["kl"]
    loss = aggregate(loss, completion_mask, loss_type=loss_type, max_completion_length=max_completion_length)
    return loss, {name: aggregate(x.double(), completion_mask, loss_type="dapo").item() for name, x in shares.items()}


# What a student gets wrong: the words above, what is in their place, and the law that says so.
MISTAKES = [
    ("std by n", "std(r, 1, keepdim=True)", "std(r, 1, keepdim=True, correction=0)",
     "test_group_advantages_have_squares_that_sum_to_n_minus_1"),
    ("batch mean", "torch.mean(r, 1, keepdim=True)", "torch.mean(r)", "test_group_advantages_sum_to_zero_in_each_group"),
    ("no eps", "(std + eps)", "std", "test_group_advantages_match_the_worked_numbers"),
    ("eps inside the root", "(std + eps)", "(std**2 + eps).sqrt()", "test_group_advantages_match_the_oracle"),
    ("RLOO by n", "/ (num_generations - 1)", "/ num_generations",
     "test_leave_one_out_advantages_match_the_worked_numbers_and_the_oracle"),
    ("max for min", "-torch.min(", "-torch.max(",
     "test_clipped_surrogate_loss_has_no_slope_only_where_the_token_has_moved_enough"),
    ("sign", "-torch.min(", "torch.min(", "test_clipped_surrogate_loss_matches_the_worked_numbers"),
    ("KL reversed", "d = ref_logps - logps", "d = logps - ref_logps",
     "test_kl_estimate_k1_and_k3_have_the_kl_as_their_mean"),
    ("grpo as bnpo", "((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()",
     "total / completion_mask.sum()", "test_aggregate_matches_the_worked_numbers"),
    ("dr_grpo by padded T", "* max_completion_length", "* completion_mask.size(1)", "test_aggregate_matches_the_oracle"),
    ("GSPO's sum for mean", " / completion_mask.sum(1, keepdim=True)", "",
     "test_importance_ratio_of_a_sequence_does_not_see_its_length"),
    ("ratio inverted", "log_ratio = logps - old_logps", "log_ratio = old_logps - logps",
     "test_importance_ratio_has_itself_as_its_slope"),
    ("EOS masked out", "is_eos.cumsum(1) - is_eos == 0", "is_eos.cumsum(1) == 0",
     "test_make_completion_mask_keeps_the_first_eos_and_nothing_behind_it"),
    ("off by one", "- 1 : -1] / temp", ":] / temp", "test_per_token_logps_add_up_to_1_over_the_vocabulary"),
    ("entropy with gradient", "logits.detach()", "logits", "test_per_token_logps_are_those_of_each_row_alone"),
    ("advantages at padding", "(1) * completion_mask\n", "(1).expand(completion_mask.shape)\n",
     "test_broadcast_advantages_give_every_token_that_of_its_answer"),
    ("old not detached", "old_logps).detach()", "old_logps)", "test_grpo_loss_on_policy_has_the_gradient_of_reinforce"),
    ("ref not detached", "ref_logps.detach()", "ref_logps", "test_grpo_loss_takes_the_other_log_probs_as_constants"),
    ("clipped whatever A is", "(ratio > 1 + epsilon_high) & (A > 0)", "ratio > 1 + epsilon_high",
     "test_grpo_loss_metrics_match_the_oracle"),
    ("no KL", "loss + beta *", "loss + 0 *", "test_grpo_loss_has_the_slope_of_the_oracle")]

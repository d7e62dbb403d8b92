"""One sampled group, token by token, as the second of mu updates sees it (for the first, every ratio is 1).

    python worked_examples/explain.py [--all] [--model NAME_OR_FOLDER --dataset FILE.jsonl --reward_funcs accuracy ...]

It takes grpo.py's flags (without any: --model tiny, after a short cold start) and --all. The first group whose rewards
differ gets one update with these settings, and is scored again. It shows the best and the worst answer (--all: each):

    logp, old   log-probability in nats after the update, and under the weights that sampled
    ratio       exp(logp - old); with --importance_sampling_level sequence one for the answer
    clipped     yes where the ratio has left the clip range, and the gradient is 0 (cispo: where its weight is capped)
    A, loss     advantage; policy term + beta * KL of this token, before the mean is taken

and the group's rewards, their mean and standard deviation. The tiny model, one thread: about 15 seconds.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo


def load(options, config):
    """Policy, tokenizer, dataset and reward functions, as grpo.py's flags name them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reward_funcs = [grpo.load_reward_func(name, device) for name in options.reward_funcs]
    if options.model != "tiny":
        policy, tokenizer = grpo.load_model(options.model, "AutoModelForCausalLM", device)
        return policy, tokenizer, grpo.load_dataset(options.dataset), reward_funcs
    torch.set_num_threads(1)                                            # for so small a model, more would wait
    tokenizer = grpo.tiny_tokenizer()
    policy = grpo.tiny_model(tokenizer, config.seed).to(device)
    problems, _ = grpo.tiny_problems(config.seed)
    grpo.cold_start(policy, tokenizer, problems, config.seed, steps=100)
    return policy, tokenizer, problems, reward_funcs


def score(model, rollout, config):
    """Log-probs of all answers of the group, (G, T), a part after the other as in training."""
    parts = torch.arange(config.num_generations).split(config.per_device_train_batch_size)
    with torch.no_grad():
        return torch.cat([grpo.score(model, rollout, part, config) for part in parts])


def update_on_one_group(policy, tokenizer, dataset, reward_funcs, config):
    """Let train make one update on the first group whose rewards differ; its rollout, and more of it by name."""
    seen = {}

    def note(rewards_per_func, rollout, config):                        # train asks for advantages before it learns
        advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        keep = grpo.top_entropy_mask(rollout.entropies, rollout.loss_mask, config.top_entropy_quantile)
        rewards = grpo.combine_rewards(rewards_per_func, config.reward_weights)
        seen.update(rewards=rewards, advantages=torch.where(keep != 0, advantages, 0),
                    old_logps=score(policy, rollout, config))
        return advantages

    G = config.num_generations
    config = replace(config, num_iterations=1, warmup_steps=0, max_steps=100, generation_batch_size=G)
    for step in range(config.max_steps):
        state = grpo.initial_state(policy, config)
        state.step = step                                               # it chooses the question and the samples
        once = grpo.train(policy, tokenizer, dataset, reward_funcs, config, state=state, compute_advantages=note)
        _, rollout, _ = next(once)
        if seen["advantages"].any():                                    # the other groups teach nothing
            break
    seen["logps"] = score(policy, rollout, config)
    seen["ref_logps"] = score(state.reference, rollout, config) if config.beta > 0 else None
    return rollout, seen


def token_losses(seen, mask, ratio, i, config):
    """The loss of each token of answer i, and whether it is clipped: grpo_loss with one token's advantage at a time."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    losses, clipped = [], []
    for one_token in torch.eye(mask.size(1), device=mask.device):
        loss, metrics = grpo.grpo_loss(
            seen["logps"][[i]], seen["advantages"][[i]] * one_token, mask[[i]], old_logps=seen["old_logps"][[i]],
            epsilon_low=config.epsilon, epsilon_high=high, delta=config.delta, policy_loss=config.policy_loss,
            importance_sampling_level=config.importance_sampling_level, loss_type="dapo", num_items_in_batch=1)
        losses.append(loss)
        clipped.append(metrics["clip_ratio/region_mean"] > 0)
    losses = torch.stack(losses)
    if config.beta > 0:
        kl = grpo.kl_estimate(seen["logps"][i], seen["ref_logps"][i]) * mask[i]
        losses = losses + config.beta * kl * (ratio[i] if config.use_bias_correction_kl else 1)
    return losses.tolist(), clipped


def show(rollout, seen, i, tokenizer, config):
    """Print answer i as a table, a line for each token."""
    mask, logps, old_logps = rollout.loss_mask, seen["logps"], seen["old_logps"]
    ratio = grpo.importance_ratio(
        logps, old_logps, mask, importance_sampling_level=config.importance_sampling_level).expand(mask.shape)
    losses, clipped = token_losses(seen, mask, ratio, i, config)
    print(f"\nanswer {i + 1}, reward {seen['rewards'][i].item():.4g}: {rollout.completions[i]!r}")
    print(f"{'token':>14} mask     logp      old   ratio clipped        A     loss")
    for t, token in enumerate(rollout.completion_ids[i].tolist()):
        print(f"{tokenizer.decode([token])!r:>14} {mask[i, t]:4d} {logps[i, t]:8.4f} {old_logps[i, t]:8.4f} "
              f"{ratio[i, t]:7.4f} {'yes' if clipped[t] else 'no':>7} {seen['advantages'][i, t]:8.4f} {losses[t]:8.4f}")


def main(argv):
    flags = ["--model", "tiny", *(flag for flag in argv if flag != "--all")]     # a later --model wins
    options, config = grpo.parse_options(flags)
    policy, tokenizer, dataset, reward_funcs = load(options, config)
    rollout, seen = update_on_one_group(policy, tokenizer, dataset, reward_funcs, config)
    rewards = seen["rewards"]
    print(f"{len(rewards)} answers to {rollout.rows[0]['prompt']!r}")
    best, worst = rewards.nan_to_num(-torch.inf).argmax(), rewards.nan_to_num(torch.inf).argmin()
    for i in range(len(rewards)) if "--all" in argv else (int(best), int(worst)):
        show(rollout, seen, i, tokenizer, config)
    mean, std = grpo.group_stats(rewards, len(rewards))
    print(f"\nrewards {[round(r, 4) for r in rewards.tolist()]}, mean {mean.item():.4f}, std {std.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])

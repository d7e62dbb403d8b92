"""One sampled group, token by token: a table in the terminal, or a page for the browser.

    python worked_examples/scripts/look_at_a_group.py
    python worked_examples/scripts/look_at_a_group.py --model NAME_OR_FOLDER --dataset FILE.jsonl ... --html group.html

It takes grpo.py's flags. Without --model, the tiny model answers after its cold start, and half of the answers forget
the carry; of another model it is the first group with unequal rewards. The table: the best and the worst answer (--all:
each answer) after one update on this group; a token's push is −∂loss/∂log π. --html: the group as a tree, before and
after each of ten updates.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers

import grpo

USUAL = dict(policy_loss="clip", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2)
METHODS = {                                                             # options of grpo_loss, as on page 10
    "grpo": dict(loss_type="grpo"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


def parse(argv):
    """The flags that are not grpo.py's, and grpo.py's config and options. Of a flag given twice the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--html")
    own, argv = parser.parse_known_args(argv)
    argv = [*f"--model tiny --num_iterations {10 if own.html else 1} --lr_scheduler_type constant".split(), *argv]
    config, options, _ = grpo.parse_options(argv)
    if options.model == "tiny":                                         # on one group, the demo's rate is too high
        config, options, _ = grpo.parse_options(["--learning_rate", "3e-5", *argv])
    if own.html and (config.loss_type, config.policy_loss, config.epsilon_high) == ("dapo", "clip", None):
        config = replace(config, epsilon_high=0.28)                     # as the page's row of dapo has it
    return own, config, options


def carry_makes_it_longer(prompt):
    """Whether a right answer of the tiny task has a token more than the one that forgets the carry."""
    return len(grpo.teacher_trace(prompt, False)) > len(grpo.teacher_trace(prompt, True))


def load(config, options):
    """Policy, tokenizer, dataset and reward functions, as grpo.py's flags name them."""
    policy, tokenizer = grpo.load_model(options.model, config.seed)
    if options.model == "tiny":
        torch.set_num_threads(1)                                        # for so small a model, more would wait
        problems, _ = grpo.tiny_problems(config.seed)
        grpo.cold_start(policy, tokenizer, problems, config.seed)
        dataset = [row for row in problems if carry_makes_it_longer(row["prompt"])]
    else:
        dataset = grpo.load_dataset(options.dataset)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    return policy, tokenizer, dataset, [grpo.load_reward_func(name) for name in options.reward_funcs]


def has_two_halves(rollout):
    """Whether one half of the answers agree, and the other half agree on something else."""
    counts = Counter(rollout.completions).values()
    return len(counts) == 2 and min(counts) == max(counts)


def find_step(policy, tokenizer, dataset, reward_funcs, config, wanted):
    """The first step with unequal rewards and a wanted group: from the step follow its question and its samples."""
    for step in range(config.max_steps):
        rng = grpo.step_rng(config, step)
        examples = grpo.sample_batch(dataset, config, rng)
        rollout = grpo.sample_rollout(policy, tokenizer, examples, config, rng)
        advantages = grpo.outcome_advantages(grpo.compute_rewards(reward_funcs, rollout), rollout, config)
        if advantages.any() and wanted(rollout):
            return step
    return 0


def find_forks(answers, advantages):
    """The beginnings after which answers differ, the largest pushes first -> the next tokens -> their ΣA."""
    pulls = {}
    for ids, A in zip(answers, advantages):
        for t, token in enumerate(ids):
            after = pulls.setdefault(tuple(ids[:t]), {})
            after[token] = after.get(token, 0.0) + A
    forks = {beginning: after for beginning, after in pulls.items() if len(after) > 1}
    return dict(sorted(forks.items(), key=lambda fork: -sum(map(abs, fork[1].values()))))


def next_token_probs(policy, rollout, beginning, config):
    """What the policy says after the question and the beginning of an answer: (V,)."""
    question = rollout.prompt_ids[0][rollout.prompt_mask[0] == 1]
    ids = torch.cat([question, question.new_tensor(beginning)]).unsqueeze(0)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    return (logits.float() / config.temperature).softmax(0)


def update_on_one_group(policy, tokenizer, dataset, reward_funcs, config, wanted=lambda rollout: True):
    """Let train make its updates on one group: what it saw, and after 0, 1, ... updates log-probs and forks' probs."""
    config = replace(config, generation_batch_size=config.num_generations, num_mini_batches=1, max_steps=400)
    seen = SimpleNamespace(updates=[], probs=[])

    def note_policy(*_):
        seen.updates.append(grpo.score_rollout(policy, seen.rollout, config))
        seen.probs.append([next_token_probs(policy, seen.rollout, beginning, config) for beginning in seen.forks])

    def note_group(rewards_per_func, rollout, config):                  # train asks for advantages before it learns
        seen.rollout, seen.rewards_per_func = rollout, rewards_per_func
        seen.rewards = grpo.combine_rewards(rewards_per_func, config.reward_weights)
        seen.advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        seen.answers = [ids[m != 0].tolist() for ids, m in zip(rollout.completion_ids, rollout.completion_mask)]
        seen.forks = find_forks(seen.answers, seen.advantages[:, 0].tolist())
        with torch.no_grad():
            _, seen.entropies = grpo.per_token_logps(
                policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask,
                temperature=config.temperature, compute_entropy=True)
        note_policy()
        return seen.advantages

    state = grpo.initial_state(policy, config)
    state.step = find_step(policy, tokenizer, dataset, reward_funcs, config, wanted)
    state.optimizer.register_step_post_hook(note_policy)
    next(grpo.train(policy, tokenizer, dataset, reward_funcs, config, state=state, compute_advantages=note_group))
    return seen


def loss_options(config):
    """What train passes to grpo_loss besides tensors, with the number that an epsilon_high of None stands for."""
    default = 5.0 if config.policy_loss == "cispo" else config.epsilon
    return grpo.loss_options(config) | {"epsilon_high": default if config.epsilon_high is None else config.epsilon_high}


def pushes(seen, u, options):
    """−∂loss/∂log π of each token after u updates, (B, T): a positive one pushes the token up."""
    logps, old_logps = seen.updates[u].double().requires_grad_(), seen.updates[0].double()
    loss, _ = grpo.grpo_loss(
        logps, seen.advantages.double(), seen.rollout.loss_mask, old_logps=old_logps, **options)
    return 0.0 - torch.autograd.grad(loss, logps)[0]                     # where it is 0: 0, not −0


def word(token, tokenizer):
    """A token's text; the tokenizer's own name for a token whose text shows nothing, or a part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return tokenizer.convert_ids_to_tokens(token) if text in ("", "\ufffd") else text


def group_data(seen, tokenizer, reward_funcs, config):
    """All numbers of the page, as JSON has them."""
    def numbers(x):                                                     # seven digits, None for NaN, no padding
        if x.dim() == 2:
            return [numbers(row[:len(ids)]) for row, ids in zip(x, seen.answers)]
        return [None if value != value else float(f"{value:.7g}") for value in x.tolist()]

    forks, words = [], {}                                               # of a fork the sampled tokens, and the likely
    for (beginning, after), probs in zip(seen.forks.items(), zip(*seen.probs)):
        likely = (torch.stack(probs).amax(0) > 0.01).nonzero()[:, 0].tolist()
        tokens = sorted({*after, *likely}, key=lambda token: -probs[0][token])
        forks.append((beginning, tokens, [numbers(p[tokens]) for p in probs]))
    for token in sorted({token for ids in (*seen.answers, *(tokens for _, tokens, _ in forks)) for token in ids}):
        text = word(token, tokenizer)                                   # the page knows a token by its text
        words[token] = text if text not in words.values() else f"{text}[{token}]"

    methods = {name: USUAL | options | {"max_completion_length": config.max_completion_length}
               for name, options in METHODS.items()}
    mean, std = grpo.group_stats(seen.rewards, len(seen.rewards))
    return {
        "prompt": tokenizer.decode(seen.rollout.prompt_ids[0], skip_special_tokens=True),
        "rewards": numbers(seen.rewards), "mean": mean.item(), "std": std.item(),
        "advantages": numbers(seen.advantages[:, 0]), "counts": seen.rollout.loss_mask.sum(1).tolist(),
        "answers": [{"text": tokenizer.decode(ids, skip_special_tokens=True),
                     "tokens": [words[token] for token in ids]} for ids in seen.answers],
        "old_logps": numbers(seen.updates[0]), "entropies": numbers(seen.entropies),
        "updates": [numbers(logps) for logps in seen.updates],
        "methods": {name: {"options": options, "weights": [numbers(pushes(seen, u, options)) for u in range(len(seen.updates))]}
                    for name, options in methods.items()},
        "forks": [{"prefix": [words[token] for token in beginning], "words": [words[token] for token in tokens],
                   "probabilities": probabilities} for beginning, tokens, probabilities in forks],
        "rewards_per_func": {f.__name__: numbers(rewards) for f, rewards in zip(reward_funcs, seen.rewards_per_func.T)},
        "run": loss_options(config) | {"scale_rewards": config.scale_rewards}}


def page(data):
    """The template with the data in it: no "<" of an answer may end the script that holds it."""
    template = Path(__file__).with_name("group_page.html").read_text(encoding="utf-8")
    return template.replace("GROUP_DATA", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def show(seen, i, tokenizer, config):
    """Print answer i as a table, a line for each token, after one update."""
    old_logps, logps, mask = seen.updates[0], seen.updates[1], seen.rollout.loss_mask
    level = config.importance_sampling_level
    ratio = grpo.importance_ratio(logps, old_logps, mask, importance_sampling_level=level).expand(mask.shape)
    push = pushes(seen, 1, loss_options(config) | dict(beta=0.0, use_bias_correction_kl=False))
    print(f"\nanswer {i + 1}, reward {seen.rewards[i].item():.4g}: {seen.rollout.completions[i]!r}")
    print(f"{'token':>14} mask     logp      old   ratio        A  1000·push")
    for t, token in enumerate(seen.answers[i]):
        A = seen.advantages[i, t]
        clipped = "  clipped" if A != 0 and mask[i, t] != 0 and push[i, t] == 0 else ""
        print(f"{word(token, tokenizer)!r:>14} {mask[i, t]:4d} {logps[i, t]:8.4f} {old_logps[i, t]:8.4f} "
              f"{ratio[i, t]:7.4f} {A:8.4f} {1000 * push[i, t]:10.3f}{clipped}")


def main(argv):
    transformers.utils.logging.set_verbosity_error()
    own, config, options = parse(argv)
    policy, tokenizer, dataset, reward_funcs = load(config, options)
    wanted = [has_two_halves] if options.model == "tiny" else []
    seen = update_on_one_group(policy, tokenizer, dataset, reward_funcs, config, *wanted)
    if own.html:
        data = group_data(seen, tokenizer, reward_funcs, config)
        return Path(own.html).write_text(page(data), encoding="utf-8")
    print(f"{len(seen.rewards)} answers to {seen.rollout.examples[0]['prompt']!r}")
    by_reward = seen.rewards.argsort(descending=True, stable=True).tolist()
    for i in by_reward if own.all else (by_reward[0], by_reward[-1]):
        show(seen, i, tokenizer, config)
    print(f"\nrewards {[round(r, 4) for r in seen.rewards.tolist()]}, "
          f"mean {seen.rewards.mean():.4f}, std {seen.rewards.std():.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])

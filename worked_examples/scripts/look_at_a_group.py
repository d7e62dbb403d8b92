"""One sampled group, token by token: a table in the terminal, or a page for the browser.

    python worked_examples/scripts/look_at_a_group.py [--all] [--html FILE] [--model NAME_OR_FOLDER --dataset FILE.jsonl ...]

It takes grpo.py's flags. Without any, the tiny model answers after its cold start, and some answers forget the carry;
of another model it is the first group with unequal rewards. The table: the best and the worst answer (--all: each),
after one update on this group. --html: the group as a tree, before and after each of ten updates (clip: DAPO's range).
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo


def parse(argv):
    """The flags that are not grpo.py's, and grpo.py's options and config. Of a flag given twice the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--html")
    own, argv = parser.parse_known_args(argv)
    argv = [*f"--model tiny --num_iterations {10 if own.html else 1} --lr_scheduler_type constant".split(), *argv]
    config, options = grpo.parse_options(argv)
    if options.model == "tiny":                                         # on one group, the demo's rate is too high
        config, options = grpo.parse_options(["--learning_rate", "3e-5", *argv])
    if own.html and (config.loss_type, config.policy_loss, config.epsilon_high) == ("dapo", "clip", None):
        config = replace(config, epsilon_high=grpo.PRESETS["dapo"]["epsilon_high"])     # as the page's row has it
    return own, options, config


def load(options, config):
    """Policy, tokenizer, dataset and reward functions, as grpo.py's flags name them."""
    if options.model == "tiny":
        torch.set_num_threads(1)                                        # for so small a model, more would wait
        tokenizer, (dataset, _) = grpo.tiny_tokenizer(), grpo.tiny_problems(config.seed)
        policy = grpo.tiny_model(tokenizer, config.seed)
        grpo.cold_start(policy, tokenizer, dataset, config.seed)
    else:
        dataset, (policy, tokenizer) = grpo.load_dataset(options.dataset), grpo.load_model(options.model)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    return policy, tokenizer, dataset, [grpo.load_reward_func(name) for name in options.reward_funcs]


def forgets_the_carry(rollout):
    """How many right answers the tiny model's group has, or, if fewer, shorter ones without the carry."""
    right, wrong = (grpo.teacher_trace(rollout.rows[0]["prompt"], forgets).removesuffix("<eos>") for forgets in (0, 1))
    return min(map(rollout.completions.count, (right, wrong))) if len(right) > len(wrong) else 0


def find_step(policy, tokenizer, dataset, reward_funcs, config, score):
    """The step, which chooses question and samples: unequal rewards, the highest score (3 is enough)."""
    scores = {}
    for step in range(config.max_steps):
        rollout = grpo.sample_rollout(policy, tokenizer, grpo.sample_batch(dataset, config, step), config, step)
        advantages = grpo.outcome_advantages(grpo.compute_rewards(reward_funcs, rollout), rollout, config)
        scores[step] = 1 + score(rollout) if advantages.any() else 0
        if scores[step] > 3:
            break
    return max(scores, key=scores.get)                                  # the first of the best


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
    ids = torch.cat([rollout.prompt_ids[0][rollout.prompt_mask[0] == 1], rollout.prompt_ids.new_tensor(beginning)])
    return (policy(input_ids=ids.unsqueeze(0)).logits[0, -1].float() / config.temperature).softmax(0)


def update_on_one_group(policy, tokenizer, dataset, reward_funcs, config, score=lambda rollout: 3):
    """Let train make its updates on one group: what it saw, and after 0, 1, ... updates log-probs and forks' probs."""
    config = replace(config, generation_batch_size=config.num_generations, num_mini_batches=1, max_steps=200)
    seen = SimpleNamespace(updates=[], probs=[])

    def note_logps(*_):                                                 # of all rows, also of those that do not learn
        rollout = seen.rollout._replace(loss_mask=seen.rollout.completion_mask)
        seen.updates.append(grpo.score_rollout(policy, rollout, torch.ones_like(seen.advantages), config))
        with torch.no_grad():
            seen.probs.append([next_token_probs(policy, seen.rollout, beginning, config) for beginning in seen.forks])

    def note_group(rewards_per_func, rollout, config):                  # train asks for advantages before it learns
        seen.rollout, seen.rewards = rollout, grpo.combine_rewards(rewards_per_func, config.reward_weights)
        seen.mean, seen.std = (x.item() for x in grpo.group_stats(seen.rewards, len(seen.rewards)))
        seen.advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        seen.mask = rollout.loss_mask
        seen.answers = [ids[m != 0].tolist() for ids, m in zip(rollout.completion_ids, rollout.completion_mask)]
        seen.forks = find_forks(seen.answers, seen.advantages[:, 0].tolist())
        seen.parts = {f.__name__: column for f, column in zip(reward_funcs, rewards_per_func.T)}
        note_logps()
        return seen.advantages

    state = grpo.initial_state(policy, config)
    state.step = find_step(policy, tokenizer, dataset, reward_funcs, config, score)
    state.optimizer.register_step_post_hook(note_logps)
    next(grpo.train(policy, tokenizer, dataset, reward_funcs, config, state=state, compute_advantages=note_group))
    return seen


def loss_options(config):
    """What train passes to grpo_loss besides tensors, with the number that an epsilon_high of None stands for."""
    default = 5.0 if config.policy_loss == "cispo" else config.epsilon
    return grpo.loss_options(config) | {"epsilon_high": default if config.epsilon_high is None else config.epsilon_high}


def group_data(seen, tokenizer, config):
    """All numbers of the page, as JSON has them."""
    def numbers(x):                                                     # seven digits, None for NaN, no padding
        if x.dim() == 2:
            return [numbers(row[:len(ids)]) for row, ids in zip(x, seen.answers)]
        return [None if value != value else float(f"{value:.7g}") for value in x.tolist()]

    def weights(logps, options):                                        # a positive one pushes the token up
        logps, old_logps = logps.double().requires_grad_(), seen.updates[0].double()
        loss, _ = grpo.grpo_loss(logps, seen.advantages.double(), seen.mask, old_logps=old_logps, **options)
        return numbers(-torch.autograd.grad(loss, logps)[0])

    forks, text = [], {}                                                # of a fork the sampled tokens, and the likely
    for (beginning, after), probs in zip(seen.forks.items(), zip(*seen.probs)):
        likely = (torch.stack(probs).amax(0) > 0.01).nonzero()[:, 0].tolist()
        words = sorted({*after, *likely}, key=lambda token: -probs[0][token])
        forks.append((beginning, words, [numbers(p[words]) for p in probs]))
    for token in sorted({token for ids in (*seen.answers, *(words for _, words, _ in forks)) for token in ids}):
        word = tokenizer.decode([token])                                # parts of a character may have one text
        text[token] = word if word not in text.values() else f"{word}[{token}]"

    plain = grpo.GRPOConfig(loss_type="grpo", max_completion_length=config.max_completion_length)
    methods = {name: loss_options(replace(plain, **grpo.PRESETS.get(name, {})))
               for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo")}
    return {
        "prompt": tokenizer.decode(seen.rollout.prompt_ids[0], skip_special_tokens=True),
        "rewards": numbers(seen.rewards), "mean": seen.mean, "std": seen.std, "counts": seen.mask.sum(1).tolist(),
        "advantages": numbers(seen.advantages[:, 0]), "old_logps": numbers(seen.updates[0]),
        "answers": [{"text": tokenizer.decode(ids, skip_special_tokens=True),
                     "tokens": [text[token] for token in ids]} for ids in seen.answers],
        "entropies": numbers(seen.rollout.entropies), "updates": [numbers(logps) for logps in seen.updates],
        "methods": {name: {"options": options, "weights": [weights(logps, options) for logps in seen.updates]}
                    for name, options in methods.items()},
        "forks": [{"prefix": [text[token] for token in beginning], "words": [text[token] for token in words],
                   "probabilities": probabilities} for beginning, words, probabilities in forks],
        "rewards_per_func": {name: numbers(column) for name, column in seen.parts.items()},
        "run": loss_options(config) | {"learning_rate": config.learning_rate, "scale_rewards": config.scale_rewards}}


def page(data):
    """The template with the data in it: no "<" of an answer may end the script that holds it."""
    template = Path(__file__).with_name("group_page.html").read_text(encoding="utf-8")
    return template.replace("GROUP_DATA", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def show(seen, i, tokenizer, config):
    """Print answer i as a table, a line for each token: grpo_loss with the advantage and the KL of one at a time."""
    old_logps, logps, mask = (x[[i]] for x in (*seen.updates[:2], seen.mask))
    ratio = grpo.importance_ratio(logps, old_logps, mask, importance_sampling_level=config.importance_sampling_level)
    options = loss_options(config) | dict(loss_type="dapo", num_items_in_batch=1)
    print(f"\nanswer {i + 1}, reward {seen.rewards[i].item():.4g}: {seen.rollout.completions[i]!r}")
    print(f"{'token':>14} mask     logp      old   ratio clipped        A     loss")
    for t, token in enumerate(seen.rollout.completion_ids[i].tolist()):
        this = torch.arange(mask.size(1), device=mask.device) == t
        loss, metrics = grpo.grpo_loss(logps, seen.advantages[[i]] * this, mask, old_logps=old_logps,
                                       ref_logps=torch.where(this, old_logps, logps), **options)
        clipped = "yes" if metrics["clip_ratio/region_mean"] > 0 else "no"
        print(f"{tokenizer.decode([token])!r:>14} {mask[0, t]:4d} {logps[0, t]:8.4f} {old_logps[0, t]:8.4f} "
              f"{ratio.expand(mask.shape)[0, t]:7.4f} {clipped:>7} {seen.advantages[i, t]:8.4f} {loss:8.4f}")


def main(argv):
    own, options, config = parse(argv)
    policy, tokenizer, dataset, reward_funcs = load(options, config)
    score = {"score": forgets_the_carry} if options.model == "tiny" else {}
    seen = update_on_one_group(policy, tokenizer, dataset, reward_funcs, config, **score)
    if own.html:
        return Path(own.html).write_text(page(group_data(seen, tokenizer, config)), encoding="utf-8")
    print(f"{len(seen.rewards)} answers to {seen.rollout.rows[0]['prompt']!r}")
    by_reward = seen.rewards.argsort(descending=True, stable=True).tolist()
    for i in by_reward if own.all else (by_reward[0], by_reward[-1]):
        show(seen, i, tokenizer, config)
    print(f"\nrewards {[round(r, 4) for r in seen.rewards.tolist()]}, mean {seen.mean:.4f}, std {seen.std:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])

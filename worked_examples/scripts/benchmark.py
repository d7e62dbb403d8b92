"""How long does a step of grpo.py take, where does the time go, and what would the bare model cost?

    python worked_examples/scripts/benchmark.py                    the tiny task
    python worked_examples/scripts/benchmark.py --trl              TRL beside it (pip install trl==1.16.0)
    python worked_examples/scripts/benchmark.py --model 0.5B       random weights in the shape of Qwen2 0.5B, for CUDA

The floor is the model's bare passes over the same rows: the forwards of sampling (KV cache, ended rows dropped), one
forward and backward of those that learn. A step has in addition the pass that scores log π_old, and on the tiny task a
second update. In each round all that is compared takes its turn; a line is the median over
the rounds, and the range. On CPU the seconds are those of one thread, which a busy machine changes little.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import grpo

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now():
    if DEVICE.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(function, seconds):
    """The same function, which adds to a list how long each call takes."""
    def call(*args, **kwargs):
        start = now()
        result = function(*args, **kwargs)
        seconds.append(now() - start)
        return result
    call.__name__ = function.__name__
    return call


def tiny_job(cold_start_steps):
    """The model of `python grpo.py --model tiny` after its cold start, and that run's options."""
    tokenizer = grpo.tiny_tokenizer()
    model = grpo.tiny_model(tokenizer, 42).to(DEVICE)
    problems, _ = grpo.tiny_problems(42)
    grpo.cold_start(model, tokenizer, problems, 42, steps=cold_start_steps)
    return model, tokenizer, problems, [grpo.accuracy_reward, grpo.think_format_reward], dict(grpo.TINY)


def large_job():
    """Qwen2 0.5B's shape with random weights: 8 prompts of 128 tokens, 8 completions each, 512 tokens long."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    shape = Qwen2Config(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
                        bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with DEVICE:
        model = Qwen2ForCausalLM(shape).eval()
    options = dict(max_completion_length=512, num_generations=8, generation_batch_size=64, bf16=DEVICE.type == "cuda",
                   per_device_train_batch_size=16)
    return model, grpo.tiny_tokenizer(), [{"prompt": "12+34=" * 21 + "1="}] * 64, [sum_of_ids], options


def sum_of_ids(completion_ids, **kwargs):
    """A reward that costs nothing and differs within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def bare_sampling(model, rollout, config):
    """The forwards of sampling alone: each prompt once, then one token of each live row at a time."""
    G, ids, lengths = config.num_generations, rollout.completion_ids, rollout.completion_mask.sum(1)
    prompts = dict(input_ids=rollout.prompt_ids[::G], attention_mask=rollout.prompt_mask[::G])
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
        cache = model(**prompts, use_cache=True, logits_to_keep=1).past_key_values
        live = torch.arange(len(ids), device=DEVICE)
        cache.reorder_cache(live // G)
        for t in range(ids.size(1) - 1):
            stay = (lengths[live] > t + 1).nonzero()[:, 0]
            if len(stay) < len(live):
                live = live[stay]
                cache.reorder_cache(stay)
            seen = torch.cat([rollout.prompt_mask[live], torch.ones_like(ids[live, : t + 1])], 1)
            model(input_ids=ids[live, t : t + 1], attention_mask=seen, past_key_values=cache, use_cache=True)


def bare_update(model, rollout, rows, config):
    """One forward and backward pass over these rows, in parts of the same size."""
    for part in rows.split(config.per_device_train_batch_size):
        ids = torch.cat([rollout.prompt_ids[part], rollout.completion_ids[part]], 1)
        mask = torch.cat([rollout.prompt_mask[part], rollout.completion_mask[part]], 1)
        labels = ids.masked_fill(mask == 0, -100)[:, rollout.prompt_ids.size(1) :]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
            keep = labels.size(1) + 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels).backward()
    model.zero_grad()


def compare_with_floor(job, rounds):
    model, tokenizer, problems, reward_funcs, options = job
    table, sampling, scoring, old, steps, bare_samples, bare_updates, learning = defaultdict(list), *([] for _ in range(7))
    config, reward_funcs = grpo.GRPOConfig(**options), [timed(f, scoring) for f in reward_funcs]

    def keep_advantages(rewards_per_func, rollout, config):
        advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        learning.append(advantages.any(1).nonzero()[:, 0])
        return advantages

    policy = copy.deepcopy(model)
    run = grpo.train(policy, tokenizer, problems, reward_funcs, config, compute_advantages=keep_advantages)
    timers = dict(generate=timed(grpo.generate, sampling), score_rollout=timed(grpo.score_rollout, old))
    with patch.multiple(grpo, **timers):
        for round in range(rounds + 1):
            _, rollout, _ = timed(next, steps)(run)
            rows, lengths = learning[-1], rollout.completion_mask.sum(1)
            timed(bare_sampling, bare_samples)(model, rollout, config)
            timed(bare_update, bare_updates)(model, rollout, rows, config)
            step, sample, score = steps[-1], sampling[-1], sum(scoring[-len(reward_funcs) :])
            update, floor = step - sample - score - old[-1], bare_samples[-1] + bare_updates[-1]
            row = {
                "a step (s)": step, "  sampling (s)": sample, "  scoring: the rewards (s)": score,
                "  log π_old (s)": old[-1], "  updates, and the rest (s)": update,
                "the floor (s)": floor, "  bare sampling (s)": bare_samples[-1],
                "  bare forward and backward (s)": bare_updates[-1], "step / floor": step / floor,
                "sampling / bare sampling": sample / bare_samples[-1],
                "updates / bare forward and backward": update / bare_updates[-1], "rows that learn": len(rows),
                "sampled tokens a second": lengths.sum().item() / sample,
                "learned tokens a second": lengths[rows].sum().item() / update}
            for name, value in row.items():
                table[name] += [value] * (round > 0)                    # the first of everything warms up
    show(table)
    print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if DEVICE.type == "cuda" else "")


def growth(job, rounds):
    """A step's cost with G doubled, and with completions of twice the length (without EOS, so that all have it)."""
    model, tokenizer, problems, _, options = job
    options = options | {"generation_batch_size": 64, "num_generations": 8}
    runs, table = {}, defaultdict(list)
    for name, change in {"once": {}, "G doubled": {"num_generations": 16, "generation_batch_size": 128},
                         "length doubled": {"max_completion_length": 2 * options["max_completion_length"]}}.items():
        policy, config = copy.deepcopy(model), grpo.GRPOConfig(**options | change)
        runs[name] = grpo.train(policy, tokenizer, problems, [sum_of_ids], config)
    with patch.object(grpo, "all_eos_token_ids", lambda model, tokenizer: [-1]):
        for round in range(rounds + 1):
            seconds = []
            for run in runs.values():
                timed(next, seconds)(run)
            for name, value in list(zip(runs, seconds))[1:]:
                table[f"{name} / once"] += [value / seconds[0]] * (round > 0)
    show(table)


def compare_with_trl(job, rounds, count=4):
    """TRL's trainer, as the_same_run_in_trl.py makes it, with its default gradient checkpointing and without."""
    from transformers import TrainerCallback

    from worked_examples.trainers import the_same_run_in_trl as trl_run
    table, (model, tokenizer, problems, reward_funcs, options) = defaultdict(list), job
    config = grpo.GRPOConfig(**options | {"max_steps": count, "output_dir": tempfile.mkdtemp()})

    class StepTimes(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(now())

    for _ in range(rounds):
        times = [now() for _ in grpo.train(copy.deepcopy(model), tokenizer, problems, reward_funcs, config)]
        here = statistics.median(b - a for a, b in zip(times, times[1:]))
        table["a step here (s)"].append(here)
        for name, flag in ("TRL", "true"), ("TRL without checkpointing", "false"):
            flags, times = ["--gradient_checkpointing", flag, "--save_strategy", "no", "--logging_strategy", "no"], []
            trainer = trl_run.make_trainer(copy.deepcopy(model), tokenizer, problems, reward_funcs, config, flags)
            trainer.add_callback(StepTimes())
            trainer.train()
            theirs = statistics.median(b - a for a, b in zip(times, times[1:]))
            table[f"a step of {name} (s)"].append(theirs)
            table[f"here / {name}"].append(here / theirs)
    show(table)


def show(table):
    for name, values in table.items():
        print(f"{name:40} {statistics.median(values):10.4g}   ({min(values):.4g} ... {max(values):.4g})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "0.5B"], default="tiny")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cold_start_steps", type=int, default=500)
    parser.add_argument("--trl", action="store_true", help="TRL's trainer beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = tiny_job(arguments.cold_start_steps) if arguments.model == "tiny" else large_job()
    print(f"{arguments.model} on {DEVICE}, {arguments.rounds} rounds")
    for measure in [compare_with_trl] if arguments.trl else [compare_with_floor, growth]:
        measure(job, arguments.rounds)

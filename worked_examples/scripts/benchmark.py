"""How long does a step of grpo.py take, and what would the bare model cost?

    python worked_examples/scripts/benchmark.py                    the tiny task
    python worked_examples/scripts/benchmark.py --trl              TRL beside it (pip install trl==1.16.0)
    python worked_examples/scripts/benchmark.py --model 0.5B       random weights in the shape of Qwen2 0.5B, for CUDA

--rounds N (5) and the flags of grpo.py change the job: --per_device_train_batch_size 4. The floor is the model's bare
passes over the same rows: the forwards of sampling (KV cache, ended rows dropped), and in each update a forward and a
backward of the rows that learn. A line is the median over the rounds, and the range. On CPU the seconds are those of
one thread, which a busy machine changes little.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers

import grpo

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now():
    if DEVICE.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function, *arguments):
    start = now()
    function(*arguments)
    return now() - start


def sum_of_ids(completion_ids, **kwargs):
    """A reward that costs nothing and differs within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def tiny_job():
    """The model of `python grpo.py --model tiny` after its cold start, and that run's problems and rewards."""
    tokenizer, (problems, _) = grpo.tiny_tokenizer(), grpo.tiny_problems(42)
    model = grpo.tiny_model(tokenizer, 42).to(DEVICE)
    grpo.cold_start(model, tokenizer, problems, 42)
    return model, tokenizer, problems, [grpo.accuracy_reward, grpo.think_format_reward]


def large_job():
    """Qwen2 0.5B's shape with random weights: prompts of 128 tokens, answers that no EOS ends."""
    shape = transformers.Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with DEVICE:
        model = transformers.Qwen2ForCausalLM(shape).eval()
    return model, grpo.tiny_tokenizer(), [{"prompt": "12+34=" * 21 + "1="}] * 64, [sum_of_ids]


def bare_sampling(model, rollout, config):
    """The forwards of sampling alone: each prompt once, then one token of each live row at a time."""
    G, ids, lengths = config.num_generations, rollout.completion_ids, rollout.completion_mask.sum(1)
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
        cache = model(input_ids=rollout.prompt_ids[::G], attention_mask=rollout.prompt_mask[::G], use_cache=True,
                      logits_to_keep=1).past_key_values
        live = torch.arange(len(ids), device=DEVICE)
        cache.reorder_cache(live // G)
        for t in range(ids.size(1) - 1):
            stay = (lengths[live] > t + 1).nonzero()[:, 0]
            if len(stay) < len(live):
                live = live[stay]
                cache.reorder_cache(stay)
            seen = torch.cat([rollout.prompt_mask[live], torch.ones_like(ids[live, :t + 1])], 1)
            model(input_ids=ids[live, t:t + 1], attention_mask=seen, past_key_values=cache, use_cache=True)


def bare_updates(model, rollout, rows, config):
    """In each of the μ passes a forward and a backward over these rows, in parts of the same size."""
    parts = rows.split(config.per_device_train_batch_size) if len(rows) > 0 else ()
    for part in config.num_iterations * parts:
        ids = torch.cat([rollout.prompt_ids[part], rollout.completion_ids[part]], 1)
        mask = torch.cat([rollout.prompt_mask[part], rollout.completion_mask[part]], 1)
        labels = ids.masked_fill(mask == 0, -100)[:, rollout.prompt_ids.size(1):]
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
            keep = labels.size(1) + 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels).backward()
    model.zero_grad()


def compare_with_floor(model, tokenizer, problems, reward_funcs, config, rounds):
    table, kept = defaultdict(list), {}

    def keep_advantages(rewards_per_func, rollout, config):
        kept["advantages"] = grpo.outcome_advantages(rewards_per_func, rollout, config)
        return kept["advantages"]

    def one_step():
        _, kept["rollout"], _ = next(steps)

    steps = grpo.train(
        copy.deepcopy(model), tokenizer, problems, reward_funcs, config, compute_advantages=keep_advantages)
    for round in range(rounds + 1):
        step = seconds(one_step)
        rollout, rows = kept["rollout"], kept["advantages"].any(1).nonzero()[:, 0]
        sampling = seconds(bare_sampling, model, rollout, config)
        updates = seconds(bare_updates, model, rollout, rows, config)
        line = {"a step (s)": step, "the floor (s)": sampling + updates, "  its sampling (s)": sampling,
                "  its updates (s)": updates, "step / floor": step / (sampling + updates), "rows that learn": len(rows),
                "sampled tokens for each second of a step": rollout.completion_mask.sum().item() / step}
        for name, value in line.items() if round > 0 else ():           # the first of everything warms up
            table[name].append(value)
    show(table)
    if DEVICE.type == "cuda":
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def compare_with_trl(model, tokenizer, problems, reward_funcs, config, rounds):
    """TRL's trainer, as the_same_run_in_trl.py makes it, with its default gradient checkpointing and without."""
    from worked_examples.check_your_own import the_same_run_in_trl
    table, times = defaultdict(list), []

    class NoteSteps(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(now())

    def median_step(name, updates):                                     # the first step warms up
        ends = times[updates - 1::updates]
        table[f"a step of {name} (s)"].append(statistics.median(b - a for a, b in zip(ends, ends[1:])))
        times.clear()

    for _ in range(rounds):
        for _ in grpo.train(copy.deepcopy(model), tokenizer, problems, reward_funcs, config):
            times.append(now())
        median_step("grpo.py", 1)
        for name, checkpointing in ("TRL", "true"), ("TRL without checkpointing", "false"):
            flags = f"--gradient_checkpointing {checkpointing} --save_strategy no --logging_strategy no".split()
            flags += ["--output_dir", tempfile.mkdtemp()]
            trainer = the_same_run_in_trl.make_trainer(
                copy.deepcopy(model), tokenizer, problems, reward_funcs, config, flags)
            trainer.add_callback(NoteSteps())
            trainer.train()
            median_step(name, config.num_iterations * config.num_mini_batches)
            ours, theirs = table["a step of grpo.py (s)"][-1], table[f"a step of {name} (s)"][-1]
            table[f"{name} / grpo.py"].append(theirs / ours)
    show(table)


def show(table):
    for name, values in table.items():
        print(f"{name:44} {statistics.median(values):10.4g}   ({min(values):.4g} ... {max(values):.4g})", flush=True)


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=["tiny", "0.5B"], default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trl", action="store_true")
    own, argv = parser.parse_known_args(argv)
    is_large = own.model == "0.5B"
    config, *_ = grpo.parse_options([*("--model 0.5B --dataset none" if is_large else "--model tiny").split(), *argv])
    config = replace(config, max_steps=4 if own.trl else own.rounds + 1, bf16=is_large and DEVICE.type == "cuda")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{own.model} on {DEVICE}, {own.rounds} rounds")
    compare = compare_with_trl if own.trl else compare_with_floor
    compare(*(large_job() if is_large else tiny_job()), config, own.rounds)


if __name__ == "__main__":
    main(sys.argv[1:])

"""How long does a step of grpo.py take, and what would the bare model cost?

    python worked_examples/scripts/benchmark.py                    the tiny task
    python worked_examples/scripts/benchmark.py --trl              TRL beside it (pip install trl==1.16.0)
    python worked_examples/scripts/benchmark.py --model 0.5B       random weights in the shape of Qwen2 0.5B, for CUDA

Flags of grpo.py change the job. The floor is the model's bare passes over the same rows: those of sampling, and in each
update a forward and a backward of the rows that learn. A line is the median over the steps, and the range, without the
first step, which warms up. On CPU the seconds are those of one thread.
"""

import argparse
import copy
import itertools
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
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def tiny_job():
    """The model of `python grpo.py --model tiny` after its cold start, and that run's problems and rewards."""
    (model, tokenizer), (problems, _) = grpo.load_model("tiny", 42), grpo.tiny_problems(42)
    grpo.cold_start(model.to(DEVICE), tokenizer, problems, 42)
    return model, tokenizer, problems, [grpo.accuracy_reward, grpo.think_format_reward]


def large_job():
    """Qwen2 0.5B's shape with random weights: prompts of 128 tokens, answers that no EOS ends."""
    def sum_of_ids(completion_ids, **kwargs):                           # costs nothing, and differs within a group
        return [float(sum(ids) % 7) for ids in completion_ids]

    shape = transformers.Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with DEVICE:
        model = transformers.Qwen2ForCausalLM(shape).eval()
    return model, grpo.tiny_tokenizer(), [{"prompt": "12+34=" * 21 + "1="}] * 64, [sum_of_ids]


def bare_sampling(model, rollout, config):
    """The forwards of sampling alone: each prompt once, then one token of each live row at a time."""
    G, ids, lengths = config.num_generations, rollout.completion_ids, rollout.completion_mask.sum(1)
    with torch.no_grad():
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
        answers = rollout.completion_ids[part]
        ids = torch.cat([rollout.prompt_ids[part], answers], 1)
        mask = torch.cat([rollout.prompt_mask[part], rollout.completion_mask[part]], 1)
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=answers.size(1) + 1)
        torch.nn.functional.cross_entropy(output.logits[:, :-1].float().transpose(1, 2), answers).backward()
    model.zero_grad()


def compare_with_floor(model, tokenizer, problems, reward_funcs, config):
    table = defaultdict(list)
    start = now()
    for _, rollout, _ in grpo.train(copy.deepcopy(model), tokenizer, problems, reward_funcs, config):
        step = now() - start
        advantages = grpo.outcome_advantages(grpo.compute_rewards(reward_funcs, rollout), rollout, config)
        start = now()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
            bare_sampling(model, rollout, config)
            sampled = now()
            bare_updates(model, rollout, advantages.any(1).nonzero()[:, 0], config)
        sampling, updates = sampled - start, now() - sampled
        table["a step (s)"].append(step)
        table["its floor: sampling (s)"].append(sampling)
        table["its floor: updates (s)"].append(updates)
        table["step / floor"].append(step / (sampling + updates))
        table["sampled tokens for each second of a step"].append(rollout.completion_mask.sum().item() / step)
        start = now()
    return table


def compare_with_trl(model, tokenizer, problems, reward_funcs, config):
    """TRL's trainer, as the_same_run_in_trl.py makes it, with its default gradient checkpointing and without."""
    from worked_examples.check_your_own import the_same_run_in_trl
    times, table = [], {}

    def clock(completions, **kwargs):                                   # a reward of 0: called once in each step
        times.append(now())
        return [0.0] * len(completions)

    def note(name):
        table[f"a step of {name} (s)"] = [b - a for a, b in itertools.pairwise(times)]
        times.clear()

    reward_funcs = [*reward_funcs, clock]
    list(grpo.train(copy.deepcopy(model), tokenizer, problems, reward_funcs, config))
    note("grpo.py")
    for name, checkpointing in ("TRL", "true"), ("TRL without checkpointing", "false"):
        flags = ["--gradient_checkpointing", checkpointing, "--save_strategy", "no", "--logging_strategy", "no",
                 "--output_dir", tempfile.mkdtemp()]
        the_same_run_in_trl.make_trainer(
            copy.deepcopy(model), tokenizer, problems, reward_funcs, config, flags).train()
        note(name)
    return table


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=["tiny", "0.5B"], default="tiny")
    parser.add_argument("--trl", action="store_true")
    own, argv = parser.parse_known_args(argv)
    is_large = own.model == "0.5B"
    job = "--model 0.5B --dataset none" if is_large else "--model tiny"
    config, *_ = grpo.parse_options(f"{job} --max_steps 6".split() + argv)
    config = replace(config, bf16=is_large and DEVICE.type == "cuda")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{own.model} on {DEVICE}, {config.max_steps} steps")
    compare = compare_with_trl if own.trl else compare_with_floor
    for name, values in compare(*(large_job() if is_large else tiny_job()), config).items():
        warm = values[1:]
        print(f"{name:44} {statistics.median(warm):10.4g}   ({min(warm):.4g} ... {max(warm):.4g})", flush=True)
    if DEVICE.type == "cuda":
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main(sys.argv[1:])

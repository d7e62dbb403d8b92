"""How fast is grpo.py, and how far from what the machine can do? Every figure is a median, every ratio from one run.

    python worked_examples/benchmark.py                 the tiny model's step beside its floor, and its growth with G and T
    python worked_examples/benchmark.py --trl           the same step by TRL's GRPOTrainer (pip install trl), side by side
    python worked_examples/benchmark.py --memory        per_token_logps beside logits -> log_softmax -> gather, V = 151,936
    python worked_examples/benchmark.py --imports       import grpo beside import torch
    python worked_examples/benchmark.py --model 0.5B    a random model of the shape of Qwen2 0.5B, for a GPU

The floor of a step: a bare loop of the model's forwards with a KV cache, and a bare forward and backward pass of the same
rows, each for itself. grpo.py can be below it, because equal prefixes and equal rows pass the model once.
"""

import argparse
import copy
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import grpo

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
spent = {}


def now():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(name, f):
    def call(*args, **kwargs):
        start = now()
        try:
            return f(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + now() - start
    return call


@contextmanager
def split_times():
    """Let each part of a step add its time to `spent`."""
    spent.clear()
    with (patch.object(grpo, "sample_rollout", timed("sampling", grpo.sample_rollout)),
          patch.object(grpo, "compute_rewards", timed("rewards", grpo.compute_rewards)),
          patch.object(grpo, "update_policy", timed("update", grpo.update_policy)),
          patch.object(grpo, "score", timed("scoring", grpo.score)),
          patch.object(torch.Tensor, "backward", timed("backward", torch.Tensor.backward)),
          patch.object(torch.optim.AdamW, "step", timed("optimizer", torch.optim.AdamW.step))):
        yield


def tiny_job():
    """The model after its cold start, and the options of `python grpo.py --model tiny`."""
    tokenizer = grpo.tiny_tokenizer()
    model = grpo.tiny_model(tokenizer, 42).to(DEVICE)
    problems, _ = grpo.tiny_problems(42)
    grpo.cold_start(model, tokenizer, problems, 42)
    return model.eval(), tokenizer, problems, dict(grpo.TINY)


def large_job(rows):
    """A model of random weights in the shape of Qwen2 0.5B, prompts of 128 tokens, 512 new ones, bf16 autocast."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    shape = Qwen2Config(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(shape)
    tokenizer = grpo.tiny_tokenizer()
    problems = [{"prompt": "12+34=" * 21 + "1=", "solution": "46"}] * 64
    return model.eval(), tokenizer, problems, dict(max_completion_length=512, num_generations=8, generation_batch_size=rows,
                                                  per_device_train_batch_size=16, bf16=DEVICE.type == "cuda", learning_rate=1e-6)


def random_reward(completions, completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def steps(job, options, count, rewards):
    """Run `count` steps; seconds of each (the first is left out), what was spent where, tokens of each, and the last rollout."""
    model, tokenizer, problems, _ = job
    config, seconds, tokens, rollouts = grpo.GRPOConfig(**options | {"max_steps": count + 1}), [], [], []

    def report(state, metrics):
        seconds.append(now())
        tokens.append(metrics["completions/mean_length"] * config.generation_batch_size)
        if state.step == 1:
            spent.clear()

    with split_times():
        keep = grpo.sample_rollout
        with patch.object(grpo, "sample_rollout", lambda *args: rollouts.append(keep(*args)) or rollouts[-1]):
            grpo.train(copy.deepcopy(model), tokenizer, problems, rewards, config, report=report)
    return [b - a for a, b in zip(seconds, seconds[1:])], {k: v / count for k, v in spent.items()}, tokens[1:], rollouts


def bare_sampling(model, rollout, G):
    """The forwards of sampling alone: each prompt once, then a token of each row at a time until its rows have ended."""
    from transformers import DynamicCache
    ids, mask, lengths = rollout.prompt_ids[::G], rollout.prompt_mask, rollout.lengths
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        start, cache = now(), DynamicCache(config=model.config)
        model(input_ids=ids, attention_mask=mask[::G], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(G)
        rows = torch.arange(len(mask), device=DEVICE)
        for t in range(int(lengths.max()) - 1):
            live = (lengths[rows] > t + 1).nonzero().squeeze(1)
            if len(live) <= len(rows) / 2:
                cache.batch_select_indices(live)
                rows = rows[live]
            seen = torch.cat([mask[rows], torch.ones(len(rows), t + 1, dtype=mask.dtype, device=DEVICE)], 1)
            model(input_ids=rollout.completion_ids[rows, t : t + 1], attention_mask=seen, past_key_values=cache, use_cache=True)
        return now() - start


def bare_update(model, optimizer, rollout, rows, size):
    """Forward, log_softmax, backward and AdamW on the rows that teach, whole and in parts of the same size."""
    start = now()
    optimizer.zero_grad()
    for part in rows.split(size):
        ids = torch.cat([rollout.prompt_ids[part], rollout.completion_ids[part]], 1)
        mask = torch.cat([rollout.prompt_mask[part], rollout.completion_mask[part]], 1)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits = (
                model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, rollout.prompt_ids.size(1) - 1 : -1].float()
            )
        logps = logits.log_softmax(-1).gather(-1, rollout.completion_ids[part].unsqueeze(-1)).squeeze(-1)
        (-(logps * rollout.completion_mask[part]).sum() / rollout.completion_mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return now() - start


def matmul_peak(n=4096 if DEVICE.type == "cuda" else 1024):
    """Floating-point operations a second of the largest thing the machine does well."""
    a = torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    times = []
    for _ in range(10):
        start = now()
        a @ a
        times.append(now() - start)
    return 2 * n**3 / min(times)


def compare_with_floor(job, count, rounds, rewards):
    model, options = job[0], job[3]
    table = {}
    for _ in range(rounds):
        seconds, parts, tokens, rollouts = steps(job, options, count, rewards)
        bare, optimizer = copy.deepcopy(model), None
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-9)
        sampling, update, learning = [], [], []
        for rollout in rollouts[1:]:
            learns = (grpo.group_stats(grpo.compute_rewards(rewards, rollout).sum(1), options["num_generations"])[1] > 0)
            rows = learns.repeat_interleave(options["num_generations"]).nonzero().squeeze(1)
            sampling.append(bare_sampling(bare, rollout, options["num_generations"]))
            update.append(bare_update(bare, optimizer, rollout, rows, options["per_device_train_batch_size"]))
            learning.append(int(rollout.completion_mask[rows].sum()))
        step, floor = statistics.median(seconds), statistics.median(sampling) + statistics.median(update)
        weights, peak = sum(p.numel() for p in model.parameters()), matmul_peak()
        row = {
            "a step (s)": step,
            "its floor (s)": floor,
            "step / floor": step / floor,
            "sampling / bare sampling": parts["sampling"] / statistics.mean(sampling),
            "update / bare update": parts["update"] / statistics.mean(update),
            **{
                f"  {name} (s)": parts.get(name, 0.0)
                for name in ("sampling", "rewards", "update", "scoring", "backward", "optimizer")
            },
            "sampled tokens/s": statistics.mean(tokens) / parts["sampling"],
            "update tokens/s": statistics.mean(learning) / parts["update"],
            "update, share of the matmul peak": 6 * weights * statistics.mean(learning) / parts["update"] / peak,
        }
        for name, value in row.items():
            table.setdefault(name, []).append(value)
    if DEVICE.type == "cuda":
        table["peak memory (GiB)"] = [torch.cuda.max_memory_allocated() / 2**30]
    show(table)


def show(table):
    for name, values in table.items():
        print(
            f"{name:40} {statistics.median(values):12.4g}    ({', '.join(f'{value:.4g}' for value in sorted(values))})",
            flush=True,
        )


def growth(job, count, rounds):
    """What a step costs with G doubled, and with every completion twice as long. No EOS: only so are the lengths the options'."""
    table = {}
    model, tokenizer, problems, options = job
    options = options | {"generation_batch_size": 64, "num_generations": 8}
    with patch.object(grpo, "eos_token_ids", lambda model, tokenizer: [-1]):
        for _ in range(rounds):
            base, wide, long = (
                statistics.median(steps(job, options | change, count, [random_reward])[0])
                for change in ({}, {"num_generations": 16, "generation_batch_size": 128}, {"max_completion_length": 56})
            )
            table.setdefault("G doubled / once", []).append(wide / base)
            table.setdefault("length doubled / once", []).append(long / base)
    show(table)


def compare_with_trl(job, count, rounds):
    """One trainer after the other, `rounds` times: the same model, prompts a step, lengths, rewards and learning rate."""
    import contextlib
    import io
    import tempfile

    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    model, tokenizer, problems, options = job
    options = options | {"lr_scheduler_type": "constant"}
    table = {}

    def accuracy(completions, solution, **kwargs):
        return grpo.accuracy_reward(completions, solution)

    def think_format(completions, **kwargs):
        return grpo.think_format_reward(completions)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            self.times = [*getattr(self, "times", []), now()]

    def their_steps(**more):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            arguments = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=options["generation_batch_size"],
                num_generations=options["num_generations"],
                max_completion_length=options["max_completion_length"],
                max_steps=count + 1,
                learning_rate=options["learning_rate"],
                lr_scheduler_type="constant",
                report_to=[],
                save_strategy="no",
                use_cpu=DEVICE.type == "cpu",
                bf16=False,
                beta=0.0,
                top_k=0,
                top_p=1.0,
                disable_tqdm=True,
                logging_steps=1000,
                **more,
            )
            clock = Clock()
            GRPOTrainer(model=copy.deepcopy(model), reward_funcs=[accuracy, think_format], args=arguments, callbacks=[clock],
                        train_dataset=Dataset.from_list(problems[:2000]), processing_class=tokenizer).train()
        return [b - a for a, b in zip(clock.times, clock.times[1:])]

    for _ in range(rounds):
        ours, *_ = steps(job, options, count, [grpo.accuracy_reward, grpo.think_format_reward])
        table.setdefault("a step here (s)", []).append(statistics.mean(ours))
        for name, more in {"TRL as it comes": {}, "TRL, gradient_checkpointing off": {"gradient_checkpointing": False}}.items():
            theirs = their_steps(**more)
            table.setdefault(f"{name}, a step (s)", []).append(statistics.mean(theirs))
            table.setdefault(f"here / {name}", []).append(statistics.mean(ours) / statistics.mean(theirs))
    show(table)


def score_once(mode):
    """Forward and backward of per_token_logps or of the plain path, in a process of its own; seconds and growth of its memory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    V, B, P, T = 151_936, 8, 8, 256
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=V,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).to(DEVICE)
    prompts, completions = torch.randint(V, (B, P), device=DEVICE), torch.randint(V, (B, T), device=DEVICE)
    ones = torch.ones_like

    def plain():
        logits = model(torch.cat([prompts, completions], 1)).logits[:, P - 1 : -1]
        return logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)

    def chunked():
        return grpo.per_token_logps(model, prompts, ones(prompts), completions, ones(completions))[0]

    grpo.per_token_logps(model, prompts[:1], ones(prompts[:1]), completions[:1, :4], ones(completions[:1, :4]))[
        0
    ].sum().backward()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")                        # the high-water mark starts here
    times = []
    for _ in range(3):
        start = now()
        {"plain": plain, "chunked": chunked}[mode]().sum().backward()
        times.append(now() - start)
    print(statistics.median(times), (torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else memory("VmHWM")) - before)


def memory(field):
    return next(
        int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)
    )


def compare_memory(rounds):
    table = {}
    for _ in range(rounds):
        found = {}
        for mode in ("plain", "chunked"):
            done = subprocess.run([sys.executable, __file__, "--score_once", mode], capture_output=True, text=True, check=True)
            found[mode] = [float(x) for x in done.stdout.split()]
        for name, value in (
            ("memory, plain (GB)", found["plain"][1] / 1e9),
            ("memory, per_token_logps (GB)", found["chunked"][1] / 1e9),
            ("memory, ratio", found["chunked"][1] / found["plain"][1]),
            ("time, ratio", found["chunked"][0] / found["plain"][0]),
        ):
            table.setdefault(name, []).append(value)
    show(table)


def compare_imports(rounds):
    table, folder = {}, Path(grpo.__file__).parent
    for _ in range(rounds):
        seconds = {}
        for name in ("torch", "grpo"):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, cwd=folder)
            seconds[name] = time.perf_counter() - start
        table.setdefault("import grpo / import torch", []).append(seconds["grpo"] / seconds["torch"])
    show(table)


def compare_generate(job, rows, rounds):
    """Sampling through the static cache beside model.generate with its default cache, in tokens/s."""
    model, tokenizer, problems, options = job
    config, table = grpo.GRPOConfig(**options), {}
    ids, mask = grpo.encode_prompts(tokenizer, [problem["prompt"] for problem in problems[: rows // 8]], DEVICE)
    T, uniforms = config.max_completion_length, torch.rand(rows, config.max_completion_length, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.bf16):
        for _ in range(rounds):
            start = now()
            grpo.generate(
                model,
                ids,
                mask,
                max_completion_length=T,
                eos_token_ids=[-1],
                num_generations=8,
                uniforms=uniforms,
                static_cache=True,
            )
            ours, start = now() - start, now()
            model.generate(
                input_ids=ids.repeat_interleave(8, 0),
                attention_mask=mask.repeat_interleave(8, 0),
                do_sample=True,
                top_k=0,
                max_new_tokens=T,
                min_new_tokens=T,
            )
            theirs = now() - start
            for name, value in (("generate here (tokens/s)", rows * T / ours), ("model.generate (tokens/s)", rows * T / theirs),
                                ("here / model.generate", theirs / ours)):
                table.setdefault(f"{rows} rows: {name}", []).append(value)
    show(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "0.5B"], default="tiny")
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3, help="of which each line shows the median, and all")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512], help="of the 0.5B shape")
    parser.add_argument("--score_once", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    for flag in ("trl", "memory", "imports"):
        parser.add_argument(f"--{flag}", action="store_true")
    arguments = parser.parse_args()
    if arguments.score_once:
        score_once(arguments.score_once)
    elif arguments.memory:
        compare_memory(arguments.rounds)
    elif arguments.imports:
        compare_imports(arguments.rounds)
    elif arguments.model == "tiny":
        job = tiny_job()
        print(f"{DEVICE}, {torch.get_num_threads()} threads, {arguments.rounds} rounds of {arguments.steps} steps")
        if arguments.trl:
            compare_with_trl(job, arguments.steps, arguments.rounds)
        else:
            compare_with_floor(job, arguments.steps, arguments.rounds, [grpo.accuracy_reward, grpo.think_format_reward])
            growth(job, max(arguments.steps // 3, 3), arguments.rounds)
    else:
        for rows in arguments.rows:
            job = large_job(rows)
            compare_generate(job, rows, arguments.rounds)
            with patch.object(grpo, "eos_token_ids", lambda model, tokenizer: [-1]):
                compare_with_floor(job, min(arguments.steps, 3), 1, [random_reward])

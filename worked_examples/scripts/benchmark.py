"""How long does a step take, in grpo.py and in TRL?

    python worked_examples/scripts/benchmark.py                    the tiny task
    python worked_examples/scripts/benchmark.py --trl              TRL beside it (pip install trl==1.16.0)
    python worked_examples/scripts/benchmark.py --model 0.5B       random weights in the shape of Qwen2 0.5B, for CUDA

Flags of grpo.py change the job. A figure is the median over the steps, and the range. A step is the time from reward
to reward, so that the first sampling, which warms up, does not count. On CPU the seconds are those of one thread.
"""

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
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


def run_here(*job):
    list(grpo.train(*job))


def run_trl(*job, checkpointing):
    """TRL's trainer, as the_same_run_in_trl.py makes it."""
    from worked_examples.check_your_own import the_same_run_in_trl
    flags = ["--gradient_checkpointing", checkpointing, "--save_strategy", "no", "--logging_strategy", "no",
             "--output_dir", tempfile.mkdtemp()]
    the_same_run_in_trl.make_trainer(*job, flags).train()


def measure(name, run, model, tokenizer, problems, reward_funcs, config):
    times, tokens = [], []

    def clock(completion_ids, **kwargs):                                # a reward of 0: called once in each step
        times.append(now())
        tokens.append(sum(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    run(copy.deepcopy(model), tokenizer, problems, [*reward_funcs, clock], config)
    seconds = [end - start for start, end in itertools.pairwise(times)]
    speeds = [sampled / length for sampled, length in zip(tokens[1:], seconds)]
    for what, values in ("a step (s)", seconds), ("sampled tokens a second", speeds):
        print(f"{name:26} {what:24} {statistics.median(values):10.4g}   ({min(values):.4g} ... {max(values):.4g})")
    if DEVICE.type == "cuda":
        print(f"{name:26} peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        torch.cuda.reset_peak_memory_stats()


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=["tiny", "0.5B"], default="tiny")
    parser.add_argument("--trl", action="store_true")
    own, argv = parser.parse_known_args(argv)
    is_large = own.model == "0.5B"
    flags = "--model 0.5B --dataset none" if is_large else "--model tiny"
    config, *_ = grpo.parse_options(f"{flags} --max_steps 6".split() + argv)
    config = replace(config, bf16=is_large and DEVICE.type == "cuda")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{own.model} on {DEVICE}, {config.max_steps} steps")
    runs = {"grpo.py": run_here}
    if own.trl:                                                         # it checkpoints by default
        runs |= {"TRL": partial(run_trl, checkpointing="true"),
                 "TRL without checkpointing": partial(run_trl, checkpointing="false")}
    job = large_job() if is_large else tiny_job()
    for name, run in runs.items():
        measure(name, run, *job, config)


if __name__ == "__main__":
    main(sys.argv[1:])

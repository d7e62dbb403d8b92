"""How long does a step take, in grpo.py and in TRL?

    python worked_examples/scripts/benchmark.py              the tiny task
    python worked_examples/scripts/benchmark.py --trl        TRL beside it (pip install trl==1.16.0)
    python worked_examples/scripts/benchmark.py --long       a random Llama: 64 answers of up to 256 tokens

The flags are grpo.py's, so that --model and --dataset may be yours. It prints the median of the steps' seconds, their
range, and on a GPU the peak of its memory. A step is the time from reward to reward: the first sampling, which warms
up, does not count. On CPU the seconds are those of one thread.
"""

import copy
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers

import grpo

now = time.perf_counter if torch.cuda.is_available() else time.process_time


def run_trl(*job):
    """TRL's trainer, as the_same_run_in_trl.py makes it, without checkpointing, as here."""
    from worked_examples.scripts import the_same_run_in_trl
    flags = ["--gradient_checkpointing", "false", "--save_strategy", "no", "--logging_strategy", "no",
             "--output_dir", tempfile.mkdtemp()]
    the_same_run_in_trl.make_trainer(*job, flags).train()


def measure(name, run, model, tokenizer, problems, reward_funcs, config):
    times = []

    def clock(completions, **kwargs):                                   # a reward of 0: called once in each step
        times.append(now())
        return [0.0] * len(completions)

    run(copy.deepcopy(model), tokenizer, problems, [*reward_funcs, clock], config)
    seconds = [end - start for start, end in itertools.pairwise(times)]
    print(f"{name:8}{statistics.median(seconds):8.4g} s a step   ({min(seconds):.4g} ... {max(seconds):.4g})")
    if torch.cuda.is_available():
        print(f"{name:8}{torch.cuda.max_memory_allocated() / 2**30:8.4g} GiB at most")
        torch.cuda.reset_peak_memory_stats()


def long_job():
    """A random Llama of 1.8M weights, whose answers are ragged: each token is the EOS with a probability of 1/256."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    return model, grpo.tiny_tokenizer(), grpo.tiny_problems(0)[0], [number_of_tokens]


def number_of_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


LONG = "--max_completion_length 256 --generation_batch_size 64 --per_device_train_batch_size 8 --num_iterations 2".split()


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_long, flags = "--long" in sys.argv, [word for word in sys.argv[1:] if word not in ("--trl", "--long")]
    options, config, _ = grpo.parse_options(["--model", "tiny", "--max_steps", "6", *LONG * is_long, *flags])
    job = long_job() if is_long else grpo.load_job(options, config)[:4]
    measure("grpo.py", lambda *job: list(grpo.train(*job)), *job, config)
    if "--trl" in sys.argv:
        measure("TRL", run_trl, *job, config)

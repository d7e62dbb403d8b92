"""A reward: a sequence-classification model of yours judges the answers.

    REWARD_MODEL=NAME_OR_FOLDER python grpo.py --model NAME --dataset problems.jsonl \\
        --reward_funcs worked_examples.scripts.reward_model.reward_model

The reward is the logit of the model's single label for prompt and answer together: for chat data in the judge's chat
template, else as one text, each alone and in float32 (bfloat16 rounds away small differences, and with them the sign of
A). A judge without a trained head is refused: its scores would be noise.
"""

import functools
import os

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline


@functools.cache
def judge():
    """The model named by REWARD_MODEL and its tokenizer, as a pipeline; read once. No code that comes with it runs."""
    name = os.environ["REWARD_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, trust_remote_code=False, num_labels=1, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"REWARD_MODEL: {name} has no {sorted(info['missing_keys'])}; allowed is a trained judge")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return pipeline("text-classification", model, tokenizer=tokenizer, device=device)   # one text a pass: no padding


def reward_model(prompts, completions, **kwargs):
    texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
    chat = not isinstance(texts[0], str)
    if chat:
        texts = judge().tokenizer.apply_chat_template(texts, tokenize=False)
    scores = judge()(texts, function_to_apply="none", add_special_tokens=not chat)       # the template has them
    return [score["score"] for score in scores]

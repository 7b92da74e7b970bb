"""transformers: HybridCache and the attention function "hybridkv" against transformers' own cache and attention.

The models are tiny and random. On the CPU they are in float32, so that with quantization_bits=0 both sides must choose
the same tokens; on a GPU in bfloat16, where both are compared with float32.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from devices import CUDA  # noqa: E402
from transformers import DynamicCache, masking_utils  # noqa: E402

import hybridkv  # noqa: E402
from hybridkv.hf import DecodeGraph, HybridCache, UnsupportedError, hybridkv_mask  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:quantization_bits 0")

VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    # wide, so that the model's choices depend on what it read
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that torch's threads would only wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def _config(name: str, layers: int, **fields: Any) -> Any:
    return getattr(transformers, name)(num_hidden_layers=layers, **{**SIZES, **fields})


MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, Any] = {
    "llama": lambda: _config("LlamaConfig", 3),
    "qwen2": lambda: _config("Qwen2Config", 2),
    "qwen3": lambda: _config("Qwen3Config", 2),
    "mistral, window": lambda: _config("MistralConfig", 2, sliding_window=40),
    "qwen2, mixed": lambda: _config(
        "Qwen2Config", 4, use_sliding_window=True, sliding_window=100, max_window_layers=2, layer_types=MIXED
    ),
    "gemma2, soft cap": lambda: _config(
        "Gemma2Config", 4, sliding_window=64, layer_types=MIXED, attn_logit_softcapping=20.0, query_pre_attn_scalar=32
    ),
    "gemma3, mixed": lambda: _config(
        "Gemma3TextConfig", 4, sliding_window=8, layer_types=MIXED, query_pre_attn_scalar=32
    ),
    "gpt-oss, sinks": lambda: _config(
        "GptOssConfig", 4, sliding_window=64, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=2
    ),
}


def make_model(name: str) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            sinks = getattr(layer.self_attn, "sinks", None)
            if sinks is not None:
                sinks.normal_(0.0, 2.0)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture
def llama() -> Any:
    return make_model("llama")


def prompt(rows: int, columns: int, pads: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    """Random tokens [rows, columns], the first pads[row] of each row being padding."""
    ids = torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, n_pads in enumerate(pads):
        mask[row, :n_pads] = 0
        ids[row, :n_pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def cache_argument(model: Any) -> str:
    """Name of the cache's argument: transformers 5.2x renamed it and warns about the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def exact_cache(model: Any, **options: Any) -> HybridCache:
    return HybridCache(model.config, {"quantization_bits": 0}, **{"max_tokens": 8192, **options})


def run_forward(model: Any, cache: Any, **inputs: Any) -> Any:
    """Logits of one forward pass on top of `cache`."""
    with torch.no_grad():
        return model(**inputs, use_cache=True, **{cache_argument(model): cache}).logits


def run_generate(model: Any, cache: Any, implementation: str, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    options = {"do_sample": False, "max_new_tokens": 48, **options}
    return model.generate(**options, **{cache_argument(model): cache})


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


# -------------------------------------------------------------------------------------------- generate, token for token


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 30},
    "chunked prefill": {"prefill_chunk_size": 33},
}


@pytest.mark.parametrize("implementation", ["hybridkv", "eager"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_generate_matches_the_dynamic_cache(model: Any, generation: str, implementation: str) -> None:
    options = {**prompt(3, 97, pads=(0, 31, 90)), **GENERATIONS[generation]}
    torch.manual_seed(1)
    want = run_generate(model, dynamic(model), "eager", **options)
    torch.manual_seed(1)
    got = run_generate(model, exact_cache(model), implementation, **options)
    assert len(set(want[0, -20:].tolist())) > 3, "a model that repeats itself tests nothing"
    assert torch.equal(got, want)


@pytest.mark.parametrize("implementation", ["hybridkv", "sdpa"])
def test_assisted_decoding_crops_and_matches(model: Any, implementation: str) -> None:
    options = {**prompt(1, 130), "prompt_lookup_num_tokens": 4, "max_new_tokens": 60}
    options["input_ids"][0, 65:] = options["input_ids"][0, :65]
    if implementation == "sdpa" and getattr(model.config, "attn_logit_softcapping", None):
        implementation = "eager"  # sdpa leaves the soft cap out
    if hasattr(model.model.layers[0].self_attn, "sinks"):
        implementation = implementation.replace("sdpa", "eager")
    want = run_generate(model, dynamic(model), "eager", **{**options, "prompt_lookup_num_tokens": None})
    cache = exact_cache(model)
    assert cache.is_croppable
    got = run_generate(model, cache, implementation, **options)
    assert torch.equal(got, want)


def test_an_assistant_model_with_the_same_attention(llama: Any) -> None:
    options = {**prompt(1, 100), "max_new_tokens": 40}
    want = run_generate(llama, dynamic(llama), "eager", **options)
    assistant = make_model("llama")
    assistant.generation_config.num_assistant_tokens = 3
    got = run_generate(llama, exact_cache(llama), "hybridkv", assistant_model=assistant, **options)
    assert torch.equal(got, want)


def test_sampling_several_sequences_per_prompt(llama: Any) -> None:
    options = {**prompt(2, 70, pads=(0, 9)), "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    want = run_generate(llama, dynamic(llama), "eager", **options)
    torch.manual_seed(3)
    assert torch.equal(run_generate(llama, exact_cache(llama), "hybridkv", **options), want)


def test_a_conversation_goes_on_with_holes_in_the_batch(llama: Any) -> None:
    """Second turns of different length are padded in the middle of the rows; those columns are dropped too."""
    first, second = prompt(2, 80, pads=(0, 13)), prompt(2, 20, pads=(0, 11), seed=5)
    got: dict[str, Any] = {}
    for implementation, cache in (("eager", dynamic(llama)), ("hybridkv", exact_cache(llama))):
        answer = run_generate(llama, cache, implementation, **first, max_new_tokens=10)
        answered = torch.ones(2, answer.shape[1] - 80, dtype=torch.long)
        turn = {
            "input_ids": torch.cat([answer, second["input_ids"]], 1),
            "attention_mask": torch.cat([first["attention_mask"], answered, second["attention_mask"]], 1),
        }
        got[implementation] = run_generate(llama, cache, implementation, **turn, max_new_tokens=30)
    assert torch.equal(got["hybridkv"], got["eager"])
    assert cache.get_seq_length() == got["hybridkv"].shape[1] - 1
    held = [sequence.length for sequence in cache._rows]
    assert held == [cache.get_seq_length(), cache.get_seq_length() - 13 - 11]


# ------------------------------------------------------------------------------------------------------------ quantised


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.02), (6, 0.15), (4, 0.3)])
def test_logits_stay_close_when_quantised(model: Any, bits: int, allowed: float) -> None:
    inputs = prompt(2, 300, pads=(0, 77))
    model.set_attn_implementation("eager")
    want = run_forward(model, dynamic(model), **inputs)
    model.set_attn_implementation("hybridkv")
    cache = HybridCache(
        model.config, {"quantization_bits": bits, "skip_mass": 0.0, "refine_mass": 0.0}, max_tokens=2048
    )
    got = []
    for first, last in ((0, 200), (200, 264), (264, 299), (299, 300)):
        part = {"input_ids": inputs["input_ids"][:, first:last], "attention_mask": inputs["attention_mask"][:, :last]}
        part["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, first:last]
        got.append(run_forward(model, cache, **part))
    seen = inputs["attention_mask"].bool()
    # the median: random models have positions at which everything is undecided
    difference = ((torch.cat(got, 1) - want).norm(dim=-1) / want.norm(dim=-1))[seen].median()
    assert difference < allowed


def test_case_18_padding_never_reaches_the_scales(llama: Any) -> None:
    """Rows of 130, 70 and 33 tokens whose padding would ruin every scale: each row as if it ran alone."""
    llama.set_attn_implementation("hybridkv")
    with torch.no_grad():
        llama.model.embed_tokens.weight[0] = 1000.0
    lengths, settings = (130, 70, 33), {"quantization_bits": 4, "skip_mass": 0.0, "refine_mass": 0.0}
    inputs = prompt(3, 130, pads=tuple(130 - n for n in lengths))

    def decode(batch: dict[str, Any], rows: list[int], leaves: int | None) -> dict[int, list[int]]:
        """40 greedy steps; row 0 of the batch leaves after `leaves` of them."""
        cache = HybridCache(llama.config, settings, max_tokens=2048)
        tokens, mask, chosen = batch["input_ids"], batch["attention_mask"], {row: [] for row in rows}  # type: ignore[var-annotated]
        for step in range(40):
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            logits = run_forward(llama, cache, input_ids=tokens, attention_mask=mask, position_ids=position)
            tokens = logits[:, -1:].argmax(-1)
            for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                chosen[row].append(token)
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            if step == leaves:
                cache.batch_select_indices(torch.arange(1, len(rows)))
                tokens, mask, rows = tokens[1:], mask[1:], rows[1:]
        return chosen

    together = decode(inputs, [0, 1, 2], leaves=10)
    for row, length in enumerate(lengths):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        assert decode(alone, [row], leaves=None)[row][: len(together[row])] == together[row]


@pytest.mark.parametrize("window", [8, 64, 100])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_case_19_windows_end_where_they_should(window: int, extra: int) -> None:
    config = _config("Gemma3TextConfig", 4, sliding_window=window, layer_types=MIXED, query_pre_attn_scalar=32)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    inputs = prompt(1, window + extra)
    want = run_generate(model, dynamic(model), "eager", **inputs, max_new_tokens=12)
    assert torch.equal(run_generate(model, exact_cache(model), "hybridkv", **inputs, max_new_tokens=12), want)


# ------------------------------------------------------------------------------------------ changing the batch, case 8


def check_batch_operation(llama: Any, bits: int, change: Any, allowed: float) -> None:
    """`change` on a HybridCache and on transformers' own cache, then one more forward pass on both."""
    inputs = prompt(3, 200, pads=(0, 60, 5))
    position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits: dict[str, Any] = {}
    plain = {"quantization_bits": bits, "skip_mass": 0.0, "refine_mass": 0.0}
    for name, cache in (
        ("eager", dynamic(llama)),
        ("hybridkv", HybridCache(llama.config, plain, max_tokens=8192, max_batch=8)),
    ):
        llama.set_attn_implementation(name)
        run_forward(llama, cache, **inputs, position_ids=position)
        mask = change(cache, inputs["attention_mask"])
        assert cache.get_seq_length() == mask.shape[1]
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
        token = torch.arange(2, 2 + len(mask))[:, None]
        logits[name] = run_forward(
            llama, cache, input_ids=token, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1
        )
    difference = (logits["hybridkv"] - logits["eager"]).norm() / logits["eager"].norm()
    assert difference < allowed


def _reorder(cache: Any, mask: Any) -> Any:
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    return mask[[2, 0, 0]]


def _select(cache: Any, mask: Any) -> Any:
    cache.batch_select_indices(torch.tensor([1]))
    return mask[[1]]


def _repeat(cache: Any, mask: Any) -> Any:
    cache.batch_repeat_interleave(2)
    return mask.repeat_interleave(2, 0)


def _crop(cache: Any, mask: Any) -> Any:
    cache.crop(0)
    cache.crop(-70)
    return mask[:, :-70]


def _everything(cache: Any, mask: Any) -> Any:
    return _repeat(cache, _crop(cache, _select(cache, _reorder(cache, mask))))


@pytest.mark.parametrize(("bits", "allowed"), [(0, 1e-4), (8, 0.05), (4, 0.6)])
@pytest.mark.parametrize("change", [_reorder, _select, _repeat, _crop, _everything])
def test_case_8_changes_reach_every_tier(llama: Any, change: Any, bits: int, allowed: float) -> None:
    check_batch_operation(llama, bits, change, allowed)


def test_case_8_crop_of_everything_and_reset(llama: Any) -> None:
    inputs = prompt(2, 150, pads=(0, 20))
    want = run_generate(llama, exact_cache(llama), "hybridkv", **inputs)
    cache = exact_cache(llama)
    for clear in (lambda: cache.crop(-1000), cache.reset):
        assert torch.equal(run_generate(llama, cache, "hybridkv", **inputs), want)
        clear()
        assert cache.get_seq_length() == 0
    assert cache.core is not None
    assert cache.core.stats().n_tokens == 0
    # an empty cache takes a batch of another size
    assert torch.equal(run_generate(llama, cache, "hybridkv", **prompt(1, 150)), want[:1])


def test_rows_that_left_give_their_memory_back(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    cache = exact_cache(llama, max_batch=3)
    run_forward(llama, cache, **prompt(3, 200))
    assert cache.core is not None
    before = cache.core.stats().n_blocks_live
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert cache.core.stats().n_blocks_live == before // 3
    with pytest.raises(hybridkv.CacheFullError, match="max_batch"):
        cache.batch_repeat_interleave(4)
    assert cache.batch_size == 1


# ----------------------------------------------------------------------------------------------- on a GPU, and compiled


def place(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: x.to(device) for name, x in inputs.items()}


def device_model(name: str, device: str) -> Any:
    """A model where it runs, in bfloat16 on a GPU."""
    model = make_model(name)
    return model.to(device, torch.bfloat16) if device == "cuda" else model


def logits_in_parts(model: Any, cache: Any, inputs: dict[str, Any], ends: list[int]) -> Any:
    """Logits of all positions, from forward passes that end at `ends`."""
    parts, first = [], 0
    position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for end in ends:
        part = {"input_ids": inputs["input_ids"][:, first:end], "attention_mask": inputs["attention_mask"][:, :end]}
        parts.append(run_forward(model, cache, **part, position_ids=position[:, first:end]))
        first = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["hybridkv", "eager"])
def test_logits_on_a_gpu_are_as_good_as_those_of_the_dynamic_cache(device: str, name: str, implementation: str) -> None:
    """A padded prompt in two chunks, then token by token: at most twice the error of bfloat16 itself."""
    inputs, ends = prompt(3, 130, pads=(0, 31, 90)), [80, 120, *range(121, 131)]
    model = device_model(name, device)
    exact = copy.deepcopy(model).float()
    want = logits_in_parts(exact, dynamic(exact), place(inputs, device), ends)
    errors = []
    for cache, used in ((dynamic(model), "eager"), (exact_cache(model), implementation)):
        model.set_attn_implementation(used)
        got = logits_in_parts(model, cache, place(inputs, device), ends)
        seen = inputs["attention_mask"].bool().to(device)
        errors.append(((got.float() - want).norm(dim=-1) / want.norm(dim=-1))[seen].median())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_generate_on_a_gpu(device: str, generation: str) -> None:
    """Whatever was chosen is what the stored tokens make likely; greedily chosen tokens are the likeliest ones."""
    model = device_model("qwen2, mixed", device)
    inputs = place(prompt(3, 97, pads=(0, 31, 90)), device)
    torch.manual_seed(1)
    got = run_generate(model, exact_cache(model), "hybridkv", **inputs, **GENERATIONS[generation])
    assert got.shape[1] > 97 + 20
    if generation in ("greedy", "chunked prefill"):
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(got[:, 97:])], 1)
        exact = copy.deepcopy(model).float()
        exact.set_attn_implementation("eager")
        logits = logits_in_parts(exact, dynamic(exact), {"input_ids": got, "attention_mask": mask}, [got.shape[1]])
        logits = logits[:, 96:-1]
        chosen = logits.gather(-1, got[:, 97:, None])[..., 0]
        # a token by chance is about three deviations below the likeliest; bfloat16 confuses what is close together
        assert ((logits.amax(-1) - chosen) < 0.5 * logits.std()).all()


@pytest.mark.parametrize("bits", [0, 8])
def test_decode_graphs(device: str, bits: int) -> None:
    """The same logits as forward passes one by one, whatever happens to the cache in between."""
    model = device_model("qwen2, mixed", device)
    model.set_attn_implementation("hybridkv")
    inputs = place(prompt(3, 90, pads=(0, 20, 5)), device)
    caches = [HybridCache(model.config, {"quantization_bits": bits}, max_tokens=4096) for _ in range(2)]
    with pytest.raises(hybridkv.StepError, match="prompts"):
        DecodeGraph(model, caches[0])
    for cache in caches:
        logits_in_parts(model, cache, inputs, [90])
    mask, decode = inputs["attention_mask"], DecodeGraph(model, caches[0])
    for i in range(40):
        if i == 20:
            for cache in caches:
                cache.crop(-7)
                cache.reorder_cache(torch.tensor([2, 1, 1]))
            mask = mask[[2, 1, 1], :-7]
        tokens = torch.randint(2, VOCABULARY, (3,), device=device)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        position = mask.sum(1, keepdim=True) - 1
        want = run_forward(model, caches[1], input_ids=tokens[:, None], attention_mask=mask, position_ids=position)
        got = decode(tokens)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == mask.shape[1]
        difference = (got - want[:, -1]).norm() / want.norm()
        assert difference <= (1e-2 if device == "cuda" else 0.0), f"step {i}"
    with pytest.raises(hybridkv.ArgumentError, match="made for 3 rows, got 2"):
        decode(tokens[:2])


def test_a_full_cache_stops_a_decode_graph(device: str) -> None:
    model = device_model("llama", device)
    model.set_attn_implementation("hybridkv")
    cache = HybridCache(model.config, max_tokens=128, max_batch=1)
    run_forward(model, cache, **place(prompt(1, 124), device))
    decode = DecodeGraph(model, cache)
    tokens = torch.tensor([5], device=device)
    for _ in range(4):
        decode(tokens)
    for _ in range(2):
        with pytest.raises(hybridkv.CacheFullError):
            decode(tokens)
    assert cache.get_seq_length() == 128
    cache.crop(-3)
    assert decode(tokens).isfinite().all()


def test_compiled_models_keep_one_graph(device: str) -> None:
    """No graph break, and no new compilation from token to token."""
    model = device_model("qwen2, mixed", device)
    model.set_attn_implementation("hybridkv")
    inputs = place(prompt(2, 60, pads=(0, 9)), device)
    testing = pytest.importorskip("torch._dynamo.testing")
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ends = [50, *range(51, 61)]
    want = logits_in_parts(model, exact_cache(model), inputs, ends)
    got = logits_in_parts(compiled, exact_cache(model), inputs, ends)
    assert (got - want).norm() <= (1e-2 if device == "cuda" else 1e-5) * want.norm()
    assert counter.frame_count <= 3
    names = {node.name for graph in counter.graphs for node in graph.graph.nodes if "hybridkv" in str(node.target)}
    assert len(names) >= 4


def test_the_operator_knows_its_shape(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    cache = exact_cache(llama)
    tensors = [torch.randn(2, heads, 7, 32) for heads in (4, 2, 2)]
    real = torch.ops.hybridkv.attend(*tensors, None, cache.number, 0, 0.1, None, None)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        fake = torch.ops.hybridkv.attend(*fakes, None, cache.number, 0, 0.1, None, None)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# ------------------------------------------------------------------------------------------------------------ failures


class BrokenError(Exception):
    """Raised in the middle of a forward pass."""


@pytest.mark.parametrize("implementation", ["hybridkv", "eager"])
@pytest.mark.parametrize("part", ["self_attn.v_proj", "self_attn.o_proj", "mlp"])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_a_forward_pass_that_breaks_off_leaves_no_trace(
    llama: Any, layer_idx: int, part: str, implementation: str
) -> None:
    llama.set_attn_implementation(implementation)
    token = {"input_ids": torch.full((2, 1), 9), "attention_mask": torch.ones(2, 101, dtype=torch.long)}
    longer = {"input_ids": torch.full((2, 30), 3), "attention_mask": torch.ones(2, 130, dtype=torch.long)}
    caches = [exact_cache(llama), exact_cache(llama)]
    for cache in caches:
        run_forward(llama, cache, **prompt(2, 100))

    def fail(*args: Any) -> None:
        raise BrokenError

    hook = llama.model.layers[layer_idx].get_submodule(part).register_forward_pre_hook(fail)
    for inputs in (longer, token):
        with pytest.raises(BrokenError):
            run_forward(llama, caches[0], **inputs)
        assert caches[0].get_seq_length() == 100
    hook.remove()
    for cache in caches:
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
    token["attention_mask"] = token["attention_mask"][:, 3:]
    assert torch.equal(run_forward(llama, caches[0], **token), run_forward(llama, caches[1], **token))


def test_full_is_a_typed_error_and_changes_nothing(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    cache = HybridCache(llama.config, max_tokens=256, max_batch=1)
    run_forward(llama, cache, **prompt(1, 200))
    mask = torch.ones(1, 1200, dtype=torch.long)
    with pytest.raises(hybridkv.CacheFullError):
        run_forward(llama, cache, input_ids=torch.full((1, 1000), 5), attention_mask=mask)
    assert cache.get_seq_length() == 200
    run_forward(llama, cache, input_ids=torch.full((1, 1), 5), attention_mask=mask[:, :201])
    assert cache.get_seq_length() == 201


def test_too_many_rows_are_a_typed_error_and_fewer_work_afterwards(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    cache = exact_cache(llama, max_batch=2)
    with pytest.raises(hybridkv.CacheFullError):
        run_forward(llama, cache, **prompt(3, 20))
    assert torch.equal(
        run_forward(llama, cache, **prompt(2, 20)), run_forward(llama, exact_cache(llama), **prompt(2, 20))
    )


def test_capacity_holds_what_it_says_whatever_the_batch(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    for rows, columns in ((1, 65), (3, 65), (5, 130)):
        cache = HybridCache(llama.config, max_tokens=rows * columns)
        run_forward(llama, cache, **prompt(rows, columns))
        assert cache.get_seq_length() == columns


def test_generate_in_lent_memory(device: str) -> None:
    model = device_model("qwen2, mixed", device)
    inputs = place(prompt(2, 90, pads=(0, 31)), device)
    memory = torch.full((512 << 20 if device == "cuda" else 32 << 20,), 255, dtype=torch.uint8, device=device)
    plain, lent = (HybridCache(model.config, max_tokens=1024, memory=each) for each in (None, memory))
    expected, got = (run_generate(model, cache, "hybridkv", **inputs, max_new_tokens=20) for cache in (plain, lent))
    assert torch.equal(got, expected)
    assert (memory != 255).any(), "nothing lies there"
    alone = HybridCache(model.config, memory=memory[memory.numel() // 2 :])
    got = run_generate(model, alone, "hybridkv", **inputs, max_new_tokens=20)
    assert got.shape == expected.shape
    assert device == "cuda" or torch.equal(got, expected)  # a GPU may sum in another order in a larger cache
    small = HybridCache(model.config, memory=memory[:1000].clone())
    with pytest.raises(hybridkv.ArgumentError, match="memory = 1000 is too small"):
        run_generate(model, small, "hybridkv", **inputs)


def test_capacity_follows_the_prompt_by_default(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    cache = HybridCache(llama.config)
    assert cache.get_max_length() == -1
    run_forward(llama, cache, **prompt(1, 10))
    assert cache.get_max_length() >= llama.config.max_position_embeddings


def test_masks_that_cannot_be_honoured_are_refused(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    inputs = prompt(2, 60, pads=(0, 10))
    cache = exact_cache(llama)
    with pytest.raises(UnsupportedError, match=r"attention_mask.*4-D"):
        run_forward(llama, cache, input_ids=inputs["input_ids"], attention_mask=torch.zeros(2, 1, 60, 60))
    run_forward(llama, cache, **inputs)
    token = torch.full((2, 1), 9)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    for wrong, text in (
        (None, "has padding"),
        (mask[:, 1:], r"\[2, 61\], got \[2, 60\]"),
        (1 - mask, "when it was new"),
    ):
        with pytest.raises(hybridkv.ArgumentError, match=text):
            run_forward(llama, cache, input_ids=token, attention_mask=wrong)
    with pytest.raises(hybridkv.ArgumentError, match="holds 2 rows, got 1"):
        run_forward(llama, cache, input_ids=token[:1], attention_mask=mask[:1])
    run_forward(llama, cache, input_ids=token, attention_mask=mask)
    assert cache.get_seq_length() == 61


def test_mask_functions() -> None:
    causal = masking_utils.causal_mask_function
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    ones, padded = torch.ones(1, 4), torch.tensor([[0, 1, 1, 1]])
    window = masking_utils.sliding_window_causal_mask_function(8)
    for function in (causal, window, masking_utils.and_masks(window, causal)):
        assert hybridkv_mask(**sizes, mask_function=function, attention_mask=None) is None
        assert hybridkv_mask(**sizes, mask_function=function, attention_mask=ones) is None
        kept = hybridkv_mask(**sizes, mask_function=function, attention_mask=padded)
        assert kept is not None
        assert torch.equal(kept, padded.bool())
    refused = [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_overlay(8),
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1)),
        masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 4))),
        masking_utils.or_masks(causal, window),
        lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx <= q_idx,
    ]
    for function in refused:
        with pytest.raises(UnsupportedError, match="mask_function"):
            hybridkv_mask(**sizes, mask_function=function)


def test_calls_that_cannot_be_honoured_are_refused(llama: Any) -> None:
    llama.set_attn_implementation("hybridkv")
    inputs = prompt(1, 20)
    with pytest.raises(hybridkv.StepError, match="HybridCache"):
        run_forward(llama, dynamic(llama), **inputs)
    with pytest.raises(hybridkv.StepError, match="HybridCache"):
        llama(**inputs, use_cache=False)
    copied = copy.deepcopy(llama.config)
    copied._attn_implementation = "sdpa"
    with pytest.raises(hybridkv.StepError, match="own configuration"):
        run_forward(llama, HybridCache(copied, max_tokens=512), **inputs)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        run_forward(llama, exact_cache(llama), **inputs, output_attentions=True)
    cache = exact_cache(llama)
    with pytest.raises(hybridkv.ArgumentError, match="tokens_to_remove"):
        cache.crop(3)
    run_forward(llama, cache, **inputs)
    with pytest.raises(hybridkv.ArgumentError, match=r"beam_idx.*got index 4"):
        cache.reorder_cache(torch.tensor([4]))
    with pytest.raises(hybridkv.ArgumentError, match="repeats"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(UnsupportedError, match="batch_repeat_interleave"):
        copy.deepcopy(cache)
    with pytest.raises(UnsupportedError, match="all layers at once"):
        cache.layers[0].crop(-1)
    assert cache.get_seq_length() == 20
    llama.config.attention_dropout = 0.5
    trained = copy.deepcopy(llama).train()
    for layer in trained.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(UnsupportedError, match="dropout"):
        run_forward(trained, exact_cache(trained), **inputs)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.DeepseekV3Config(), "latent attention"),
        (lambda: transformers.Llama4TextConfig(), "'chunked_attention'"),
        (lambda: transformers.Qwen3NextConfig(), "'linear_attention'.*recurrent"),
    ],
)
def test_models_that_cannot_be_held_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        HybridCache(config())


def test_heads_that_cannot_be_held_are_refused() -> None:
    model = transformers.AutoModelForCausalLM.from_config(_config("LlamaConfig", 1, head_dim=24)).eval()
    model.set_attn_implementation("hybridkv")
    with pytest.raises(hybridkv.ArgumentError, match="head_dim"):
        run_forward(model, exact_cache(model), **prompt(1, 8))


def test_settings_come_from_the_argument_or_the_model(llama: Any) -> None:
    assert HybridCache(llama.config).hybrid_config == hybridkv.HybridConfig()
    assert HybridCache(llama.config, {"hot_tokens": 64}).hybrid_config.hot_tokens == 64
    llama.config.hybrid_v2 = {"hot_tokens": 16, "quantization_bits": 4, "block_size": 64}
    assert HybridCache(llama.config).hybrid_config.quantization_bits == 4
    with pytest.raises(hybridkv.ConfigError, match="hot_tokens"):
        HybridCache(llama.config, {"hot_token": 32})
    with pytest.raises(hybridkv.ArgumentError, match="max_tokens"):
        HybridCache(llama.config, max_tokens=1, memory_bytes=1)

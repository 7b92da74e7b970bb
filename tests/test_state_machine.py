"""Random life cycles of sequences against a plain model: every output equals attention over what should be there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from devices import attend, to_host
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from reference import KvTable, PlainCache, allowed_error, attention, relative_error

import hybridkv

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 32
WINDOWS = [0, 70]
# Largest difference between a N(0,1) value that was appended and what is stored of it, after several restores; also a
# generous bound of what that does to an output.
STORED = {0: 0.0, 8: 0.06, 6: 0.5, 4: 0.5}
LONG = bool(os.environ.get("HYBRIDKV_TEST_LONG"))
STEPS = 60 if LONG else 30
EXAMPLES = 400 if LONG else 50


class CacheMachine(RuleBasedStateMachine):
    """Operations of a managed cache in any order; the pool is small, so that running out of space is common."""

    bits = 0
    device = "cpu"
    names = Bundle("names")

    @initialize(
        max_tokens=st.sampled_from([512, 1024, 4096]),
        hot_tokens=st.sampled_from([16, 32, 64]),
        sink_blocks=st.sampled_from([0, 1, 2]),
    )
    def create(self, max_tokens: int, hot_tokens: int, sink_blocks: int) -> None:
        self.config = hybridkv.HybridConfig(
            quantization_bits=self.bits, hot_tokens=hot_tokens, sink_blocks=sink_blocks, skip_mass=0.0, refine_mass=0.0
        )
        self.cache = hybridkv.Cache(
            self.config,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            device=self.device,
            max_tokens=max_tokens,
            max_sequences=6,
            layer_windows=[window or None for window in WINDOWS],
        )
        self.table = KvTable(LAYERS, KV_HEADS, DIM, torch.bfloat16)
        self.plain = PlainCache()
        self.live: dict[int, Any] = {}
        self.next_name = 0

    def register(self, handle: Any, tokens: list[int]) -> int:
        name = self.next_name
        self.next_name += 1
        self.live[name] = handle
        self.plain.sequences[name] = tokens
        return name

    @rule(target=names, n=st.integers(0, 300), salt=st.sampled_from([b"", b"a"]), kind=st.integers(0, 2))
    def add(self, n: int, salt: bytes, kind: int) -> Any:
        """A new sequence; prompts of one kind share prefixes, so parts of them are found again."""
        tokens = [(kind * 1000 + i // 3) for i in range(n)]
        try:
            handle = self.cache.add_sequence(tokens, salt=salt)
        except hybridkv.CacheFullError:
            return multiple()
        assert 0 <= handle.num_cached <= max(0, n - 1)
        name = self.register(handle, tokens[: handle.num_cached])
        if n > handle.num_cached:
            self.run([name], [tokens[handle.num_cached :]])
        return name

    @rule(name=names, n=st.integers(0, 80), token=st.integers(0, 5))
    def step(self, name: int, n: int, token: int) -> None:
        self.run([name], [[token] * n])

    @rule(data=st.data(), n=st.integers(1, 9))
    def step_many(self, data: Any, n: int) -> None:
        if self.live:
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=4))
            self.run(chosen, [[name % 7] * data.draw(st.integers(0, n)) for name in chosen])

    @rule(target=names, name=names)
    def fork(self, name: int) -> Any:
        try:
            handle = self.cache.fork(self.live[name])
        except hybridkv.CacheFullError:
            return multiple()
        return self.register(handle, list(self.plain.sequences[name]))

    @rule(name=names, share=st.floats(0, 1))
    def truncate(self, name: int, share: float) -> None:
        keep = int(share * len(self.plain.sequences[name]))
        length = len(self.plain.sequences[name])
        try:
            self.cache.truncate(self.live[name], keep)
        except hybridkv.ArgumentError:  # the windowed layer has dropped tokens that the kept ones see
            assert 0 < keep < length
            assert length > WINDOWS[1]
            return
        del self.plain.sequences[name][keep:]

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        chosen = sorted(self.live)[:4]
        source = [data.draw(st.integers(0, len(chosen) - 1)) for _ in chosen]
        self.cache.reorder([self.live[name] for name in chosen], source)
        self.plain.reorder(chosen, source)

    @rule(name=consumes(names))
    def free(self, name: int) -> None:
        self.cache.free(self.live.pop(name))
        del self.plain.sequences[name]

    @rule(name=names, layer=st.integers(0, LAYERS - 1), head=st.integers(0, KV_HEADS - 1), data=st.data())
    def set_tier(self, name: int, layer: int, head: int, data: Any) -> None:
        if self.bits == 0:
            return
        tiers = self.cache.tiers(self.live[name], layer, head)
        sealed = [i for i, tier in enumerate(tiers) if tier]
        if sealed:
            block = data.draw(st.sampled_from(sealed))
            self.cache.set_tier(self.live[name], layer, head, block, data.draw(st.sampled_from(["L1", "L2"])))

    def run(self, names_: list[int], new: list[list[int]]) -> None:
        """One step over some sequences; checks every output and the lengths."""
        handles = [self.live[name] for name in names_]
        counts = [len(tokens) for tokens in new]
        total = sum(counts)
        q = torch.randn(LAYERS, total, Q_HEADS, DIM).to(torch.bfloat16)
        starts = [len(self.plain.sequences[name]) for name in names_]
        parts = [
            [self.table(layer, tokens, start) for tokens, start in zip(new, starts, strict=True)]
            for layer in range(LAYERS)
        ]
        outs = []
        try:
            step = self.cache.step(handles, counts, token_ids=new)
            with step:
                for layer in range(LAYERS):
                    k = (
                        torch.cat([part[0] for part in parts[layer]])
                        if names_
                        else q[layer].new_empty(0, KV_HEADS, DIM)
                    )
                    v = (
                        torch.cat([part[1] for part in parts[layer]])
                        if names_
                        else q[layer].new_empty(0, KV_HEADS, DIM)
                    )
                    out = torch.full_like(q[layer], float("nan"))
                    attend(self.device, step, layer, q[layer], k, v, out=out)
                    outs.append(out)
        except hybridkv.CacheFullError:
            assert not outs, "a full cache is reported before anything is computed"
            return
        for layer in range(LAYERS):
            first = 0
            for row, name in enumerate(names_):
                n = counts[row]
                self.check_row(name, layer, new[row], q[layer, first : first + n], outs[layer][first : first + n])
                first += n
        for name, tokens in zip(names_, new, strict=True):
            self.plain.sequences[name] += tokens

    def check_row(self, name: int, layer: int, new: list[int], q: torch.Tensor, out: torch.Tensor) -> None:
        if not new:
            return
        old = self.plain.sequences[name]
        exact_k, exact_v = self.table(layer, old + new, 0)
        window = WINDOWS[layer]
        if self.has_l2(name, layer):
            assert out.isfinite().all()
        elif window:  # the tokens that the first queries saw may be gone by now
            want, _ = attention(q, exact_k, exact_v, window=window)
            assert (
                relative_error(out, want) <= allowed_error(q, exact_k, exact_v, want, window=window) + STORED[self.bits]
            )
        else:
            stored = [to_host(x) for x in self.cache.read_tokens(self.live[name], layer, 0, len(old))]
            for got, exact in zip(stored, (exact_k, exact_v), strict=True):
                assert ((got.float() - exact[: len(old)].float()).abs() <= STORED[self.bits]).all()
            k, v = (torch.cat([got, exact[len(old) :]]) for got, exact in zip(stored, (exact_k, exact_v), strict=True))
            want, _ = attention(q, k, v)
            assert relative_error(out, want) <= allowed_error(q, k, v, want)

    def has_l2(self, name: int, layer: int) -> bool:
        """Records in L2 are read at INT4, which read_tokens does not show."""
        if self.bits == 0:
            return False
        return any("L2" in self.cache.tiers(self.live[name], layer, head) for head in range(KV_HEADS))

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            for name, handle in self.live.items():
                assert handle.length == len(self.plain.sequences[name])

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for handle in self.live.values():
                self.cache.free(handle)
            stats = self.cache.stats()
            assert stats.n_blocks_live == 0
            self.cache.close()


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
def test_life_cycles(device: str, bits: int) -> None:
    machine = type(f"CacheMachine{bits}", (CacheMachine,), {"bits": bits, "device": device})
    settings_ = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if LONG else [])],
    )
    run_state_machine_as_test(machine, settings=settings_)

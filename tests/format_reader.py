"""Read dumps of records and row pages, written from docs/format.md alone.

Nothing here knows the C code; the tests compare the two, which checks the page. Only NumPy is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

VERSION = 1
HEADER_BYTES = 64
VALUE_GROUP = 128
PRECISIONS = ("int4", "k8v4", "int8")
HEADER = np.dtype(
    [
        ("stamp", "<u4"),
        ("n_valid_tokens", "<u2"),
        ("planes", "u1"),
        ("tier", "u1"),
        ("version", "u1"),
        ("bits", "u1"),
        ("flags", "<u2"),
        ("low_k_slot", "<i4"),
        ("low_v_slot", "<i4"),
        ("n_clamped", "<u4"),
        ("last_access", "<i8"),
        ("mean_interval", "<u4"),
        ("n_accesses", "<u4"),
        ("age", "<u4"),
        ("recency", "<u2"),
        ("reserved0", "<u2"),
        ("mass", "<f4"),
        ("mass_history", "<f4"),
        ("reserved1", "<u4", (2,)),
    ]
)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Sections of a record: where each begins and how long it is.

    Parameters
    ----------
    block_size
        T, tokens in a block.
    head_dim
        D, channels of a head.
    """

    block_size: int
    head_dim: int

    @property
    def stored_tokens(self) -> int:
        """TP."""
        return _round_up(self.block_size, 16)

    @property
    def stored_dim(self) -> int:
        """DP."""
        return _round_up(self.head_dim, 32)

    @property
    def sections(self) -> dict[str, slice]:
        """Bytes of every section of a complete (INT8) record."""
        plane = self.stored_tokens * self.stored_dim // 2
        sizes = {
            "header": HEADER_BYTES,
            "k_params": 4 * self.stored_dim,
            "k_high": plane,
            "v_params": 4 * self.stored_tokens * -(-self.head_dim // VALUE_GROUP),
            "v_high": plane,
            "k_low": plane,
            "v_low": plane,
        }
        sections, start = {}, 0
        for name, size in sizes.items():
            sections[name] = slice(start, start + size)
            start += size
        return sections

    def record_bytes(self, bits: int) -> int:
        """Length of a record at quantization_bits 8, 6 or 4."""
        last_section = {4: "v_high", 6: "k_low", 8: "v_low"}[bits]
        return int(self.sections[last_section].stop)


def _nibbles(plane: npt.NDArray[np.uint8], layout: Layout, tokens: Indices, channels: Indices, is_v: bool) -> Indices:
    """Nibbles of a plane, [tokens, channels]."""
    t, c = tokens[:, None], channels[None, :]
    row, col = (c % 16, t % 16) if is_v else (t % 16, c % 16)
    step = c // 16
    lane = (row % 8) * 4 + (col % 8) // 2
    words = np.where((step // 4 + 1) * 64 <= layout.stored_dim, 4, 2)
    byte = t // 16 * 8 * layout.stored_dim + step // 4 * 512 + lane * 4 * words + step % 4 * 4 + row // 8 + col % 2 * 2
    nibbles: Indices = np.where(col < 8, plane[byte] >> 4, plane[byte] & 15).astype(np.int64)
    return nibbles


def _key_param_index(channels: Indices) -> Indices:
    return channels // 16 * 32 + channels % 8 // 2 * 8 + channels // 8 % 2 * 4 + channels % 2


def _value_param_index(layout: Layout, tokens: Indices, channels: Indices) -> Indices:
    t, c = tokens[:, None], channels[None, :]
    return c // VALUE_GROUP * 2 * layout.stored_tokens + t // 16 * 32 + t % 8 * 4 + t // 8 % 2


def read_header(record: bytes) -> dict[str, int | float]:
    """Fields of a record's header by name, without the reserved ones."""
    header = np.frombuffer(record, HEADER, count=1)[0]
    return {name: header[name].item() for name in HEADER.names or () if not name.startswith("reserved")}


def stored_precision(record: bytes) -> str | None:
    """Best precision that a record's planes allow: "int8", "k8v4", "int4", or None if it holds nothing."""
    header = read_header(record)
    planes = int(header["planes"])
    if header["stamp"] == 0 or header["version"] != VERSION or planes & 3 != 3:
        return None
    return "int8" if planes & 12 == 12 else "k8v4" if planes & 4 else "int4"


def read_record(record: bytes, block_size: int, head_dim: int, precision: str | None = None) -> tuple[Floats, Floats]:
    """Keys and values of a record.

    Parameters
    ----------
    record
        The record from its header on.
    block_size, head_dim
        T and D that the cache was made with.
    precision
        "int8", "k8v4" or "int4"; None reads all that is there.

    Returns
    -------
    k, v
        fp32, shape ``[n_valid_tokens, head_dim]``.

    Raises
    ------
    ValueError
        The record does not hold the precision, or holds a low plane elsewhere.
    """
    layout = Layout(block_size, head_dim)
    header = read_header(record)
    stored = stored_precision(record)
    if stored is None or int(header["n_valid_tokens"]) > block_size:
        return np.empty((0, head_dim), np.float32), np.empty((0, head_dim), np.float32)
    precision = precision or stored
    if precision not in PRECISIONS or PRECISIONS.index(precision) > PRECISIONS.index(stored):
        raise ValueError(f"precision: the record can be read as {stored} or below, got {precision!r}")
    with_low = {"k": precision != "int4", "v": precision == "int8"}
    for name, slot in (("k", header["low_k_slot"]), ("v", header["low_v_slot"])):
        if with_low[name] and slot != -1:
            raise ValueError(f"low_{name}_slot: the low plane must be in the record (-1), got {slot}")

    data = np.frombuffer(record, np.uint8)
    section = layout.sections
    tokens = np.arange(int(header["n_valid_tokens"]))
    channels = np.arange(head_dim)
    values = {}
    for name, is_v in (("k", False), ("v", True)):
        params = data[section[f"{name}_params"]].view("<f2").astype(np.float32)
        index = _value_param_index(layout, tokens, channels) if is_v else _key_param_index(channels)[None, :]
        code = 16 * _nibbles(data[section[f"{name}_high"]], layout, tokens, channels, is_v)
        code += _nibbles(data[section[f"{name}_low"]], layout, tokens, channels, is_v) if with_low[name] else 8
        values[name] = params[index + 2] + params[index] * code.astype(np.float32)
    return values["k"], values["v"]


def read_row_page(page: bytes, n_tokens: int, head_dim: int, dtype: str) -> tuple[Floats, Floats]:
    """Keys and values of the first tokens of a row page.

    Parameters
    ----------
    page
        The page of one KV head.
    n_tokens
        How many tokens to read.
    head_dim
        D.
    dtype
        "float16", "bfloat16" or "float32".

    Returns
    -------
    k, v
        fp32, shape ``[n_tokens, head_dim]``.
    """
    element = 4 if dtype == "float32" else 2
    stored_dim = _round_up(head_dim, 32)
    row_bytes = 2 * stored_dim * element
    rows = np.frombuffer(page, np.uint8, count=n_tokens * row_bytes).reshape(n_tokens, -1, 16)
    place = np.arange(row_bytes // 16)[None, :] ^ (np.arange(n_tokens) % 8)[:, None]
    plain = np.take_along_axis(rows, place[:, :, None], axis=1).reshape(n_tokens, row_bytes)
    if dtype == "bfloat16":
        values = (plain.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = plain.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)
    return values[:, :head_dim], values[:, stored_dim : stored_dim + head_dim]

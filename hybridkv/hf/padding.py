"""Where a padded batch holds tokens: the map between transformers' columns and hybridkv's tokens."""

from __future__ import annotations

import torch

from hybridkv import ArgumentError
from hybridkv._errors import made

from .masks import require_padding_mask


class Padding:
    """Columns of a batch, and which of them are tokens.

    All of it is on the host: it follows every forward pass, also one whose launches a CUDA graph captures.

    Attributes
    ----------
    n_rows, n_columns : int
        Shape of the batch; every row has the same number of columns.
    held : torch.Tensor or None
        ``[n_rows, n_columns]`` booleans, True where a column is a token; None if all are.
    """

    def __init__(self, n_rows: int = 0) -> None:
        self.n_rows = n_rows
        self.n_columns = 0
        self.held: torch.Tensor | None = None

    def token_counts(self, n_removed: int = 0) -> list[int]:
        """Tokens of every row, the last `n_removed` columns left out."""
        n_columns = self.n_columns - n_removed
        if self.held is None:
            return [n_columns] * self.n_rows
        counts: list[int] = self.held[:, :n_columns].sum(1).tolist()
        return counts

    def split_mask(self, mask: torch.Tensor | None, n_rows: int, n_new: int) -> torch.Tensor | None:
        """Which of `n_new` new columns are tokens.

        Parameters
        ----------
        mask : torch.Tensor or None
            ``[n_rows, n_columns + n_new]`` booleans, on any device; None if no column is padding.
        n_rows, n_new : int
            Rows, and the columns that a forward pass adds.

        Returns
        -------
        torch.Tensor or None
            ``[n_rows, n_new]`` on the host, None if all are tokens.

        Raises
        ------
        UnsupportedError
            If the mask is not 2-D.
        ArgumentError
            If it has another shape, or says of an old column something else than when that was new.
        """
        if mask is None:
            if self.held is not None:
                raise made(
                    ArgumentError,
                    "attention_mask",
                    "the cached batch has padding, so every call needs its mask; got none",
                )
            return None
        require_padding_mask(mask)
        wanted = (n_rows, self.n_columns + n_new)
        if mask.shape != wanted:
            raise made(
                ArgumentError,
                "attention_mask",
                f"{self.n_columns} columns of {n_rows} rows are cached and {n_new} are new, so its shape must be "
                f"{list(wanted)}, got {list(mask.shape)}",
            )
        old, new = mask.cpu().split([self.n_columns, n_new], dim=1)
        unchanged = bool(old.all()) if self.held is None else torch.equal(old, self.held)
        if not unchanged:
            raise made(
                ArgumentError,
                "attention_mask",
                "a cached column keeps the mask it had when it was new, but this one hides cached tokens or shows "
                "dropped padding (padding that was cached with another attention implementation stays)",
            )
        return None if bool(new.all()) else new

    def append(self, new: torch.Tensor | None, n_new: int) -> None:
        """Add columns; `new` as `split_mask` returned it."""
        if new is not None or self.held is not None:
            parts = ((self.held, self.n_columns), (new, n_new))
            self.held = torch.cat([self._all_tokens(n) if part is None else part for part, n in parts], dim=1)
        self.n_columns += n_new

    def crop(self, n_removed: int) -> None:
        """Drop the last columns."""
        self.n_columns -= n_removed
        self._set_held(None if self.held is None else self.held[:, : self.n_columns])

    def select(self, row_idx: list[int]) -> None:
        """Row i becomes what row ``row_idx[i]`` was."""
        self.n_rows = len(row_idx)
        self._set_held(None if self.held is None else self.held[row_idx])

    def _set_held(self, held: torch.Tensor | None) -> None:
        self.held = None if held is None or bool(held.all()) else held

    def _all_tokens(self, n_columns: int) -> torch.Tensor:
        return torch.ones(self.n_rows, n_columns, dtype=torch.bool)

"""The segments of one packed row, in the forms kernels want them."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


class Segments:
    """Bounds of the segments of one packed row: first 0, last its length L.

    What kernels derive from them is made once per row, not once per layer.
    """

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self._offsets: dict[torch.device, Tensor] = {}

    @cached_property
    def lengths(self) -> list[int]:
        return [end - start for start, end in pairwise(self.bounds)]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def offsets(self, device: torch.device) -> Tensor:
        """The bounds [S + 1] as int32 on `device`."""
        if device not in self._offsets:
            self._offsets[device] = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return self._offsets[device]

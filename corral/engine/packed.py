"""One micro-batch as one packed row: samples end to end, positions restarting, nothing padded but the row's tail.

Legend: L row tokens (a multiple of the sequence-parallel degree), n response tokens predicted from a row or from a
slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.batch import Batch


@dataclass(frozen=True)
class PackedRow:
    """input_ids [1, L] and position_ids [1, L] int64, of the whole row or of one slice of it.

    cu_seqlens: bounds of the segments of the *whole* row; the tail that pads it is a segment of its own.
    predict_at [n]: positions in this row (or slice) that predict a response token; token_at [n]: which token of the
    Batch (an index into its flat response fields); targets [n]: its id. Position prompt_len - 1 + j predicts token j.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: tuple[int, ...]
    predict_at: Tensor
    token_at: Tensor
    targets: Tensor

    def slice(self, part: int, parts: int) -> PackedRow:
        """Slice `part` of `parts` equal ones: the tokens of one sequence-parallel rank."""
        if parts == 1:
            return self
        width = self.input_ids.shape[1] // parts
        start = part * width
        mine = (self.predict_at >= start) & (self.predict_at < start + width)
        return PackedRow(
            input_ids=self.input_ids[:, start : start + width],
            position_ids=self.position_ids[:, start : start + width],
            cu_seqlens=self.cu_seqlens,
            predict_at=self.predict_at[mine] - start,
            token_at=self.token_at[mine],
            targets=self.targets[mine],
        )

    def to(self, device: torch.device) -> PackedRow:
        """Input tensors and targets on `device`; `token_at` stays where the Batch is."""
        return PackedRow(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens,
            predict_at=self.predict_at.to(device),
            token_at=self.token_at,
            targets=self.targets.to(device),
        )


def pack(batch: Batch, samples: Sequence[int], multiple: int = 1) -> PackedRow:
    """The given samples of `batch` as one row whose length is a multiple of `multiple`."""
    ids, positions, bounds, predict_at, token_at = [], [], [0], [], []
    for sample in samples:
        prompt, response = batch.prompt(sample), batch.response(sample)
        if prompt.numel() == 0:
            raise ValueError(f"sample {sample} has an empty prompt: nothing predicts its first token")
        ids += [prompt, response]
        length = prompt.numel() + response.numel()
        positions.append(torch.arange(length))
        predict_at.append(torch.arange(response.numel()) + bounds[-1] + prompt.numel() - 1)
        token_at.append(torch.arange(response.numel()) + batch.response_offsets[sample])
        bounds.append(bounds[-1] + length)
    tail = -bounds[-1] % multiple
    if tail:
        ids.append(torch.zeros(tail, dtype=torch.int64))
        positions.append(torch.arange(tail))
        bounds.append(bounds[-1] + tail)
    tokens = torch.cat(token_at)
    return PackedRow(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        cu_seqlens=tuple(bounds),
        predict_at=torch.cat(predict_at),
        token_at=tokens,
        targets=batch.response_ids[tokens],
    )

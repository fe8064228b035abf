"""Batches of prompts, epoch after epoch, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import random
from typing import Any

from corral.data.prompts import Prompt, PromptDataset
from corral.errors import DataError


class PromptLoader:
    """Endless batches of `batch_size` prompts; the rest of an epoch that does not fill a batch is left out.

    Raises DataError when the data set has fewer rows than one batch.
    """

    def __init__(self, dataset: PromptDataset, *, batch_size: int, shuffle: bool, seed: int) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"the training data has {len(dataset)} prompts, fewer than data.train_batch_size={batch_size}; "
                "add data or lower the batch size"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._taken = 0
        self._order: tuple[int, list[int]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """The pass, from 0, that the next batch comes from."""
        return self._taken // self.steps_per_epoch

    def next_batch(self) -> list[Prompt]:
        """The next `batch_size` prompts, in the order they are trained on."""
        order = self._epoch_order(self.epoch)
        start = self._taken % self.steps_per_epoch * self._batch_size
        batch = self._dataset.batch(order[start : start + self._batch_size])
        self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain data; `load_state_dict` of it continues with the very next batch."""
        return {"batches_taken": self._taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when data, batch size or order are not the same."""
        for key, now in self._identity().items():
            if state[key] != now:
                raise DataError(f"cannot resume the data order: {key} was {state[key]} when saved and is {now} now")
        self._taken = state["batches_taken"]

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self._dataset),
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            indices = list(range(len(self._dataset)))
            if self._shuffle:
                # Not shuffle(): only of random() does Python promise the same numbers in every version.
                stream = random.Random(f"corral data order {self._seed} {epoch}")
                keys = [stream.random() for _ in indices]
                indices.sort(key=keys.__getitem__)
            self._order = (epoch, indices)
        return self._order[1]

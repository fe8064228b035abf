"""Prompts as token ids: the chat template applied, the length cap held, only when a prompt is asked for.

A run of a few steps over a large file then tokenises a few batches, not the file; filtering by length is the one thing
that has to look at every row first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.config.plan import DataPlan
from corral.data.files import DataRow, read_rows
from corral.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILTER_CHUNK = 512
_OURS = ("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "tokenize", "truncation")


@dataclass(frozen=True)
class Prompt:
    """One prompt ready to generate from. row: index over the concatenated files, whatever was filtered out."""

    row: int
    prompt_ids: tuple[int, ...]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    chat: list[dict[str, Any]]


class PromptDataset:
    """The prompts of some data files. `dropped` counts those that filtering left out.

    Construction reads the files and checks every row; tokens are made per call of `batch` (one tokenizer call) or per
    item. A prompt longer than `plan.max_prompt_length` is handled as `plan.truncation` says; one of exactly that length
    is kept as it is.
    """

    def __init__(
        self, files: Sequence[str], plan: DataPlan, tokenizer: PreTrainedTokenizerBase, max_samples: int = -1
    ) -> None:
        for key in plan.apply_chat_template_kwargs:
            if key in _OURS:
                raise ConfigError(f"data.apply_chat_template_kwargs.{key} is set by Corral itself; remove it")
        if not tokenizer.chat_template:
            raise DataError(f"the tokenizer in {tokenizer.name_or_path} has no chat template; use an instruct model")
        self._plan = plan
        self._tokenizer = tokenizer
        self._rows = read_rows(files, prompt_key=plan.prompt_key, max_samples=max_samples)
        self.dropped = 0
        if plan.filter_overlong_prompts:
            self._drop_overlong()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> frozenset[str]:
        """Every data source that a row names."""
        return frozenset(row.data_source for row in self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions, in this order.

        Raises DataError naming the row when a prompt is empty, or over the cap and truncation is "error", or the
        template fails.
        """
        rows = [self._rows[index] for index in indices]
        return [
            Prompt(row.row, self._capped(ids, row), row.data_source, row.ground_truth, row.extra_info, row.chat)
            for row, ids in zip(rows, self._tokens(rows), strict=True)
        ]

    def of_rows(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of data rows (`Prompt.row`), in this order, also where filtering has moved them elsewhere.

        Raises DataError naming a row that this data set does not have.
        """
        position = {row.row: index for index, row in enumerate(self._rows)}
        missing = [row for row in rows if row not in position]
        if missing:
            raise DataError(f"data row {missing[0]} is not among the {len(self)} rows of the training files")
        return self.batch([position[row] for row in rows])

    def _tokens(self, rows: Sequence[DataRow]) -> list[list[int]]:
        """Straight from the template: nothing is decoded and encoded again."""
        from jinja2 import TemplateError

        def render(chats: list[list[dict[str, Any]]]) -> list[list[int]]:
            ids: list[list[int]] = self._tokenizer.apply_chat_template(
                chats,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self._plan.apply_chat_template_kwargs,
            )
            return ids

        try:
            return render([row.chat for row in rows])
        except TemplateError:
            for row in rows:
                try:
                    render([row.chat])
                except TemplateError as error:
                    raise DataError(f"{row.where}: the chat template refuses this prompt: {error}") from error
            raise

    def _capped(self, ids: list[int], row: DataRow) -> tuple[int, ...]:
        cap, mode = self._plan.max_prompt_length, self._plan.truncation
        if not ids:
            raise DataError(f"{row.where}: the prompt has no tokens: nothing can be generated from it")
        if len(ids) <= cap:
            return tuple(ids)
        if mode == "left":
            return tuple(ids[-cap:])
        if mode == "right":
            return tuple(ids[:cap])
        if mode == "middle":
            head = cap // 2
            return tuple(ids[:head] + ids[len(ids) - (cap - head) :])
        raise DataError(
            f"{row.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={cap}; raise the cap, "
            "set data.filter_overlong_prompts=True, or set data.truncation to left, right or middle"
        )

    def _drop_overlong(self) -> None:
        kept: list[DataRow] = []
        for start in range(0, len(self._rows), _FILTER_CHUNK):
            chunk = self._rows[start : start + _FILTER_CHUNK]
            lengths = map(len, self._tokens(chunk))
            kept += [row for row, length in zip(chunk, lengths, strict=True) if length <= self._plan.max_prompt_length]
        self.dropped = len(self._rows) - len(kept)
        if not kept:
            raise DataError(
                f"all {self.dropped} prompts are over the cap of data.max_prompt_length={self._plan.max_prompt_length} "
                "tokens; raise it"
            )
        self._rows = kept

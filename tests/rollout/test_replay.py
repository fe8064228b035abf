"""Record and replay: what comes back, what is refused, which dump is taken."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.rollout.base import Request
from corral.rollout.fingerprint import Fingerprint
from corral.rollout.replay import META, TENSORS, DumpMismatch, Replay
from tests.rollout.recordings import FINGERPRINT, batch, requests, skip_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_was_recorded_comes_back_bit_for_bit_without_rewards(tmp_path: Path, dtype: torch.dtype) -> None:
    recorded = batch(dtype=dtype)
    tokens = torch.ones(recorded.response_ids.numel(), dtype=dtype)
    replay = Replay(skip_plan(tmp_path / "not" / "there" / "yet"))
    path = replay.store(2, recorded.with_fields(scores=tokens, rewards=tokens, advantages=tokens), FINGERPRINT)
    loaded = replay.load(path, FINGERPRINT, step=2, requests=requests(recorded))
    for field in fields(recorded):
        wanted, found = getattr(recorded, field.name), getattr(loaded, field.name)
        if wanted is None:
            assert found is None
        else:
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def test_a_dump_is_two_plain_files_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = Replay(skip_plan(tmp_path)).store(1, batch(), FINGERPRINT)
    assert path == tmp_path / "1"
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert sorted(p.name for p in path.iterdir()) == sorted([META, TENSORS])
    assert json.loads((path / META).read_text())["step"] == 1


def test_a_new_recording_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    replay = Replay(skip_plan(tmp_path))
    replay.store(1, batch(0), FINGERPRINT)
    path = replay.store(1, batch(1), FINGERPRINT)
    assert torch.equal(
        replay.load(path, FINGERPRINT, step=1, requests=requests(batch(1))).prompt_ids, batch(1).prompt_ids
    )
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert sorted(p.name for p in path.iterdir()) == sorted([META, TENSORS])


DIFFERENT: dict[str, tuple[Fingerprint, str]] = {
    "model": (replace(FINGERPRINT, model="d" * 40), "model is another"),
    "tokenizer": (replace(FINGERPRINT, tokenizer="d" * 40), "tokenizer is another"),
    "data": (replace(FINGERPRINT, data="d" * 40), "data is another"),
    **{
        f"sampling {key}": (
            replace(FINGERPRINT, sampling={**FINGERPRINT.sampling, key: 5}),
            f"sampling.{key} {value!r} recorded, 5 expected",
        )
        for key, value in FINGERPRINT.sampling.items()
    },
    **{
        f"size {key}": (
            replace(FINGERPRINT, sizes={**FINGERPRINT.sizes, key: 5}),
            f"sizes.{key} {value} recorded, 5 expected",
        )
        for key, value in FINGERPRINT.sizes.items()
    },
    "new sampling key": (
        replace(FINGERPRINT, sampling={**FINGERPRINT.sampling, "min_p": 0.1}),
        "sampling.min_p None recorded, 0.1 expected",
    ),
}


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "another step"])
@pytest.mark.parametrize(("expected", "words"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_every_difference_is_refused_and_named(tmp_path: Path, expected: Fingerprint, words: str, step: int) -> None:
    replay = Replay(skip_plan(tmp_path))
    path = replay.store(1, batch(), FINGERPRINT)
    with pytest.raises(DumpMismatch) as caught:
        replay.load(path, expected, step=step, requests=requests(batch()))
    assert len(caught.value.items) == 1
    assert caught.value.items[0].startswith(words)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    replay = Replay(skip_plan(tmp_path))
    path = replay.store(1, batch(), FINGERPRINT)
    (path / TENSORS).write_bytes((path / TENSORS).read_bytes()[:-1])
    expected = replace(FINGERPRINT, model="x", data="y", sizes={**FINGERPRINT.sizes, "samples": 8})
    with pytest.raises(DumpMismatch) as caught:
        replay.load(path, expected, step=1, requests=requests(batch()))
    assert [item.split()[0] for item in caught.value.items] == ["model", "data", "sizes.samples", TENSORS]


def other_rows() -> dict[str, list[Request]]:
    right = requests(batch())
    return {
        "another row": [replace(right[0], row=99), *right[1:]],
        "another sample index": [replace(right[0], sample_index=9), *right[1:]],
        "another prompt token": [replace(right[0], prompt_ids=(1, 2, 4)), *right[1:]],
        "a boundary moved": [
            replace(right[0], prompt_ids=(1, 2)),
            replace(right[1], prompt_ids=(3, 1, 2, 3)),
            *right[2:],
        ],
        "another order": right[::-1],
        "one less": right[:-1],
    }


@pytest.mark.parametrize("asked", other_rows().values(), ids=other_rows().keys())
def test_other_prompts_are_refused_for_the_same_step_and_expected_for_another(
    tmp_path: Path, asked: list[Request]
) -> None:
    replay = Replay(skip_plan(tmp_path, action="repeat"))
    path = replay.store(1, batch(), FINGERPRINT)
    with pytest.raises(DumpMismatch, match="data rows or prompts of the step are others"):
        replay.load(path, FINGERPRINT, step=1, requests=asked)
    assert len(replay.load(path, FINGERPRINT, step=2, requests=asked)) == 4


@given(cut=st.integers(min_value=0), flip=st.booleans(), name=st.sampled_from([META, TENSORS]))
def test_a_torn_or_damaged_file_is_never_used(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: bool, name: str
) -> None:
    replay = Replay(skip_plan(tmp_path_factory.mktemp("torn")))
    path = replay.store(1, batch(), FINGERPRINT)
    content = bytearray((path / name).read_bytes())
    cut %= len(content)
    # In the meta file a flipped bit may hit a blank or a letter of a key; there only tearing has to be noticed.
    if flip and name == TENSORS:
        content[cut] ^= 1
    else:
        del content[cut:]
    (path / name).write_bytes(content)
    with pytest.raises(DumpMismatch):
        replay.load(path, FINGERPRINT, step=1, requests=requests(batch()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "not that of a rollout dump"),
        ("null", "not that of a rollout dump"),
        ('{"global_steps": 1}', "not that of a rollout dump"),
        ('{"format": 2, "step": 1}', "format 2 recorded, 1 expected"),
        (
            '{"format": 1, "step": 1, "rows": "", "fingerprint": {"model": 1}, "tensors": {}}',
            "not that of a rollout dump",
        ),
        ("\xff", "torn or damaged"),
    ],
)
def test_foreign_meta_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    replay = Replay(skip_plan(tmp_path))
    path = replay.store(1, batch(), FINGERPRINT)
    (path / META).write_bytes(content.encode("latin-1"))
    with pytest.raises(DumpMismatch, match=words):
        replay.load(path, FINGERPRINT, step=1, requests=requests(batch()))


def test_a_dump_that_was_moved_to_another_step_is_refused(tmp_path: Path) -> None:
    replay = Replay(skip_plan(tmp_path))
    replay.store(1, batch(), FINGERPRINT).rename(tmp_path / "2")
    with pytest.raises(DumpMismatch, match="recorded at step 1 and lies under 2"):
        replay.load(tmp_path / "2", FINGERPRINT, step=2, requests=requests(batch()))


def test_a_dump_that_vanished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpMismatch, match="cannot be read"):
        Replay(skip_plan(tmp_path)).load(tmp_path / "1", FINGERPRINT, step=1, requests=[])


@pytest.mark.parametrize(
    ("action", "recorded", "step", "wanted"),
    [
        ("cache", [], 3, None),
        ("cache", [3], 3, 3),
        ("cache", [2, 4], 3, None),
        ("repeat", [], 3, None),
        ("repeat", [1, 3, 5], 3, 3),
        ("repeat", [1, 2, 4], 3, 2),
        ("repeat", [9, 10, 2], 11, 10),
        ("repeat", [5, 4, 10], 3, 4),
    ],
)
def test_which_dump_is_taken(tmp_path: Path, action: str, recorded: list[int], step: int, wanted: int | None) -> None:
    replay = Replay(skip_plan(tmp_path, action=action))
    for number in recorded:
        replay.store(number, batch(), FINGERPRINT)
    assert replay.find(step) == (None if wanted is None else tmp_path / str(wanted))


def test_whatever_is_not_a_dump_is_passed_over(tmp_path: Path) -> None:
    replay = Replay(skip_plan(tmp_path, action="repeat"))
    path = replay.store(4, batch(), FINGERPRINT)
    (tmp_path / "2").mkdir()
    (tmp_path / "3").write_text("a file")
    (tmp_path / "notes").mkdir()
    path.rename(tmp_path / ".4.0123.tmp")
    assert replay.find(3) is None
    (tmp_path / ".4.0123.tmp").rename(path)
    (path / META).unlink()
    assert replay.find(4) is None


def test_only_the_steps_asked_for_are_recorded(tmp_path: Path) -> None:
    skip = skip_plan(tmp_path, steps=(1, 3))
    assert [step for step in range(5) if Replay(skip).applies(step)] == [1, 3]
    assert not Replay(replace(skip, enable=False)).applies(1)

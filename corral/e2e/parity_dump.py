"""Both sides' tensors of the phase in which they first differ, for a look with safetensors.safe_open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corral import atomic
from corral.e2e.case import Parity
from corral.e2e.parity_gap import Comparison, gap
from corral.e2e.parity_records import Array, RunRecords, Unreadable
from corral.e2e.parity_samples import LAYOUT, TOKEN_FIELDS

INDEX = "index.json"
PER_SAMPLE = ("scores", "rank/rollout", "rank/actor", "rank/ref", "rank/critic")


def dump(first: Comparison, one: RunRecords, many: RunRecords, parity: Parity, to: Path) -> None:
    """reference.safetensors, found.safetensors and index.json in the folder `to`, in place of what was there.

    Raises OSError when it cannot be written.
    """
    from safetensors.numpy import save_file

    sides = {"reference": one, "found": many}
    arrays = {name: _arrays(run, first) for name, run in sides.items()}
    step = first.row.step
    index = {
        "first": first.row.model_dump(),
        "tolerance": {"rtol": parity.rtol, "atol": parity.atol},
        "folders": {name: str(run.folder) for name, run in sides.items()},
        "metrics": {name: run.metrics.get(step, {}) for name, run in sides.items()},
        "updates": {name: _updates(run, first) for name, run in sides.items()},
        "tensors": [
            _entry(key, arrays["reference"].get(key), arrays["found"].get(key), parity)
            for key in dict.fromkeys([*arrays["reference"], *arrays["found"]])
        ],
    }
    with atomic.new_folder(to) as folder:
        for name, tensors in arrays.items():
            save_file(tensors, folder / f"{name}.safetensors")
        (folder / INDEX).write_text(json.dumps(index, indent=1, default=str) + "\n", encoding="utf-8")


def _arrays(run: RunRecords, first: Comparison) -> dict[str, Array]:
    """The tensors of the row's phase; of samples also what lines them up. What cannot be read is left out."""
    import numpy as np

    wanted = list(first.tensors)
    if first.row.phase not in ("gradients", "weights", "metrics"):
        fields = [name for phase, name, _ in TOKEN_FIELDS if phase == first.row.phase or name in first.tensors]
        wanted = [*LAYOUT, *PER_SAMPLE, "response_mask", *fields]
    found = {}
    try:
        records = run.phase(first.row.step)
    except Unreadable:
        return {}
    for name in dict.fromkeys(wanted):
        try:
            if name in records:
                found[name] = np.ascontiguousarray(records.tensor(name))
        except Unreadable:
            continue
    return found


def _updates(run: RunRecords, first: Comparison) -> list[dict[str, Any]]:
    """The optimizer step that differs, with the parts of every rank; none for other phases."""
    try:
        updates = run.phase(first.row.step).index.updates if first.row.phase == "gradients" else []
    except Unreadable:
        return []
    return [update.model_dump() for update in updates if first.row.name.startswith(f"{update.name}/")]


def _entry(name: str, here: Array | None, there: Array | None, parity: Parity) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name}
    for side, array in (("reference", here), ("found", there)):
        entry[side] = None if array is None else {"shape": list(array.shape), "dtype": str(array.dtype)}
    if here is None or there is None or here.shape != there.shape or here.size == 0:
        return entry
    import numpy as np

    found = gap(here, there, parity)
    place = [int(i) for i in np.unravel_index(found.at, here.shape)]
    return {**entry, "differing": int(found.bad.sum()), "widest": found.width, "at": place}

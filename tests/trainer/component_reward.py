"""A reward that returns values beside the score. `never` leaves one of them out, to be missed.

acc differs inside a group of every row whose index is not a multiple of `dull_every`, and nowhere else.
"""

from __future__ import annotations

import hashlib
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    dull_every: int = 0,
    never: str = "",
) -> dict[str, Any]:
    digest = hashlib.blake2b(solution_str.encode(), digest_size=4).digest()
    dull = dull_every > 0 and extra_info["index"] % dull_every == 0
    values = {
        "acc": 0.0 if dull else int.from_bytes(digest, "big") / 2**32,
        "brevity": 1 / (1 + len(solution_str)),
        "label": "text",
    }
    values.pop(never, None)
    return {"score": digest[0] / 256 + values["brevity"], **values}

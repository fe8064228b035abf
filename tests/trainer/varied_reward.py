"""A reward with variance whatever the model says: half a digest of the text, half for being short.

The second half keeps the end token alive at a large learning rate, so response lengths stay different.
"""

from __future__ import annotations

import hashlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    digest = hashlib.blake2b(solution_str.encode(), digest_size=1).digest()[0] / 256
    return 0.5 * digest + 0.5 / (1 + len(solution_str) / 20)

"""What a rank says of itself while it works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_MEMORY = """
import sys
from pathlib import Path
from corral.workers.progress import Progress
progress = Progress(Path(sys.argv[1]), 0, 0)
taken = []
for _ in range(2):
    taken.append(b"x" * (200 << 20))
    progress.start("step")
    print(progress.path.read_text(), flush=True)
taken.clear()
progress.end("step", "idle")
print(progress.path.read_text(), flush=True)
"""


def test_the_most_memory_it_had_is_kept_after_it_was_given_back(tmp_path: Path):
    ours = b"x" * (600 << 20)  # memory of whoever starts the process is none of its own
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    one, two, none = (json.loads(line)["peak_memory_gib"] for line in done.stdout.splitlines() if line)
    assert 0.19 < one < 0.4
    assert 0.18 < two - one < 0.22  # 200 MiB
    assert none == two
    assert len(ours) == 600 << 20

"""`python -m corral.job.agent ATTEMPT_DIR`: the entrypoint inside a job. Its exit code is that of the job's command."""

from __future__ import annotations

import sys
from pathlib import Path

from corral.errors import CorralError
from corral.job.agent.run import run


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m corral.job.agent ATTEMPT_DIR", file=sys.stderr)
        return 64
    try:
        return run(Path(argv[1]))
    except CorralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv))

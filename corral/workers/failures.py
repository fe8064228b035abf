"""From what went wrong on ranks to the one error the driver raises."""

from __future__ import annotations

from corral import errors
from corral.errors import CorralError, InfraError
from corral.workers.launcher import WorkerError
from corral.workers.messages import Failure


def as_error(method: str, failures: list[Failure]) -> CorralError:
    """The failure to report: a death before what its peers raised because of it, then the first by time."""
    first = min(failures, key=lambda failure: (not failure.died, failure.time))
    if first.died:
        return InfraError(first.message)
    place = f"node-{first.node} rank {first.rank}"
    kind = getattr(errors, first.error_type, None)
    if isinstance(kind, type) and issubclass(kind, CorralError):
        error: CorralError = kind(first.message if first.says_where else f"{first.message} ({place})")
    else:
        last = first.traceback.strip().splitlines()[-1]
        log = f"logs/node-{first.node}/rank-{first.rank}.log"
        error = WorkerError(f"{method} failed on {place}: {last}; the traceback is in {log}", first.traceback)
    error.add_note(first.traceback)
    return error

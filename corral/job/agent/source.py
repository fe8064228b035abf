"""The source of a job: a bundle checked against its digest and unpacked, with nothing outside its folder touched."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

from corral.errors import ConfigError, InfraError
from corral.job.agent.archive import MIB, extract
from corral.job.agent.attempt import Attempt

UNPACKED = 512 * MIB
WHAT = "the source bundle"


def prepare(attempt: Attempt) -> None:
    """Unpack the bundle, if there is one, into a fresh `source/` and look for the script.

    Raises ConfigError for a bundle or script that is not what it has to be, InfraError for a damaged copy or a full
    disk.
    """
    spec = attempt.spec
    if spec.bundle is not None:
        unpack(Path(spec.bundle_path or ""), spec.bundle, attempt.source)
    if spec.script is None:
        return
    script = (attempt.source if spec.bundle is not None else attempt.folder / spec.cwd) / spec.script
    if not script.is_file():
        where = "in the source" if spec.bundle is not None else "on the node that runs the job"
        raise ConfigError(f"script {spec.script} is not {where}")


def unpack(bundle: Path, digest: str, target: Path, budget: int = UNPACKED) -> None:
    """Into a fresh `target`. Raises ConfigError and InfraError as `prepare`."""
    fresh = target.with_name(".source.unpacking")
    try:
        for folder in (fresh, target):
            if folder.exists():
                shutil.rmtree(folder)
        fresh.mkdir(mode=0o700)
        with bundle.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise InfraError(f"the copy of the source bundle has digest {found[:12]}…, not {digest[:12]}…")
            file.seek(0)
            extract(file, fresh, budget, WHAT)
        fresh.replace(target)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise ConfigError(f"the source bundle: {error.strerror}: {str(error.filename)[-80:]!r}") from None
        raise InfraError(f"cannot unpack the source bundle: {error.strerror}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)

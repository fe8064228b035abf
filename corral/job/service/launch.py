"""What the agent of an attempt gets to know: the command, its environment, the secrets in clear."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.backends.base import Placement
from corral.job.backends.profile import asked_profile
from corral.job.core.admission import resources_of
from corral.job.core.record import JobRecord
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import AgentSpec
from corral.job.protocol.submit import SubmitRequest
from corral.job.service.errors import Refusal
from corral.job.service.settings import Settings
from corral.job.service.submission import held_here, resolve_command


def agent_spec(job: JobRecord, settings: Settings, token: str, bundle: Path | None) -> AgentSpec:
    """bundle: the archive of the request's source, None without one. Blocks: reads the files of secrets.

    Raises ConfigError when this service can never run the job as asked, InfraError when a secret cannot be read now.
    """
    request = job.request
    try:
        resolved = resolve_command(request, settings)
    except Refusal as refusal:
        raise ConfigError(refusal.line) from None
    resources = resources_of(request, settings.profile.devices_per_node)
    profile = asked_profile(request.profile, resources.kind, settings)
    return AgentSpec(
        job_id=job.job_id,
        attempt=job.attempt,
        submission_id=job.submission_id,
        service_url=settings.url,
        token=token,
        command=resolved.command,
        cwd=resolved.cwd,
        script=resolved.script,
        bundle=request.bundle,
        bundle_path=None if bundle is None else str(bundle.absolute()),
        nodes=resources.nodes,
        devices_per_node=resources.accelerators_per_node,
        kind=resources.kind,
        preflight=request.preflight,
        env=request.env if profile is None else {**profile.env, **request.env},
        secrets=read_secrets(held_here(request.secrets, settings), settings.secrets_dir),
    )


def placement_of(request: SubmitRequest) -> Placement:
    """What the nodes of a job are to be like."""
    limits = request.timeouts
    return Placement(
        image=request.image,
        profile=request.profile,
        head=request.layout.head if request.layout else "shared",
        patches=tuple(request.template_patches),
        start=limits.start,
        run=limits.run,
        priority=request.priority,
        about={
            "repository": request.repository,
            "commit": request.commit_sha,
            "run": f"{request.github_run_id}/{request.github_run_attempt}",
            "name": request.name_suffix,
        },
        secrets=tuple(request.secrets),
    )


def read_secrets(names: list[str], folder: Path | None) -> dict[str, str]:
    """Values by name: the content of the file of that name, without the line end it may have.

    Raises ConfigError for one that is not there, InfraError for one that cannot be read.
    """
    found = {}
    for name in names:
        if folder is None:
            raise ConfigError(f"secret {name}: this service holds none; start it with a secrets folder")
        try:
            value = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"secret {name} is not among those of the service; add it to its secrets folder"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"secret {name} is no UTF-8 text; encode it, as base64 for one") from None
        except OSError as error:
            raise InfraError(f"secret {name} cannot be read: {error.strerror}") from error
        found[name] = value.removesuffix("\n").removesuffix("\r")
    return found


def redactor_of(job: JobRecord, folder: Path, settings: Settings, token: str) -> Redactor:
    """For the secrets that the attempt in `folder` was started with, and, once those are removed, for what they are
    now; and for the token of its agent. Blocks."""
    values = [token]
    if (spec := files.read_spec(folder)) is not None:
        values += [*spec.secrets.values(), spec.token]
    else:
        with suppress(ConfigError, InfraError):
            values += read_secrets(held_here(job.request.secrets, settings), settings.secrets_dir).values()
    return Redactor(values)

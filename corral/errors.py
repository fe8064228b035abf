"""Errors a user can cause or meet, each with the exit code every command uses for it.

Raise these at the boundary (configuration, files, network, processes) with one line that says what is wrong, where,
the numbers, and the fix. Inside, let plain exceptions crash: a traceback is for a bug in Corral or in user code.
"""

from __future__ import annotations


class CorralError(Exception):
    """A failure that is reported as one line, without a traceback."""

    exit_code = 1
    says_where = False  # the message names the place; the process that raises it may be another one


class ConfigError(CorralError):
    """A key, a value or a combination that cannot run; known before anything starts."""

    exit_code = 78


class DataError(CorralError):
    """The user's data, model folder or reward code is not what it has to be."""

    exit_code = 1


class TrainingError(CorralError):
    """Training cannot go on: repeated non-finite gradients, weights that did not reach the rollout engine."""

    exit_code = 1


class InfraError(CorralError):
    """A node, a worker process, the cluster or the disk failed; running again may work."""

    exit_code = 75


class DeadlineError(CorralError):
    """Something did not happen within its time limit."""

    exit_code = 124

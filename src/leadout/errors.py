"""Errors a user can cause, each with one clear line: what was expected, what came, what to change.

LeadoutError (exit code 2)
+- ConfigError     a recipe or command-line value is wrong
|  +- LayoutError  a layout does not divide the model or the GPUs (a search tries the next one)
+- DataError       a data file or row is wrong
+- ModelError      a model or draft folder is missing, of another shape, or not supported
+- CapacityError   it does not fit: context, slots, memory, disk
+- RefitError      a weight update is incomplete or corrupt
+- CheckpointError a run folder cannot be resumed
+- AuditError      the rollouts were not drawn from the policy (exit code 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LeadoutError(Exception):
    """Base of all errors whose message alone should reach the user."""

    exit_code = 2


class ConfigError(LeadoutError):
    """A recipe or command-line value is wrong."""


class LayoutError(ConfigError):
    """A layout does not divide the model or the GPUs; another layout may."""


class DataError(LeadoutError):
    """A data file or row is wrong."""


class ModelError(LeadoutError):
    """A model or draft folder is missing, of another shape, or not supported."""


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Begin the message of a ModelError with what it is about: an option, a folder or a file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{subject}: {error}") from error


class CapacityError(LeadoutError):
    """It does not fit: context, slots, memory, disk."""


class RefitError(LeadoutError):
    """A weight update is incomplete or corrupt."""


class CheckpointError(LeadoutError):
    """A run folder cannot be resumed."""


class TrainingError(LeadoutError):
    """Numbers of the run are no longer finite."""


class AuditError(LeadoutError):
    """The rollouts were not drawn from the policy."""

    exit_code = 1

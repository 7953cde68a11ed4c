"""Hub data sets through the `datasets` library, without its minutes of retries where there is no network.

The hub is asked once. If it does not answer, the library reads its cache only, and says at once what is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leadout.models.loading import check_reachable

_CHATTY = ("huggingface_hub", "datasets")


def load_from_hub(repository: str, configuration: str | None, split: str) -> Any:
    """What `datasets.load_dataset` makes of it; its errors pass through."""
    import datasets

    with _quiet(), _offline(reason := _unreachable(repository)):
        try:
            return datasets.load_dataset(repository, configuration, split=split)
        except OSError as error:
            if reason is None:
                raise
            raise ConnectionError(f"it is not in the cache and the hub does not answer ({reason})") from error


def _unreachable(repository: str) -> str | None:
    """Why the hub cannot be asked; None when it can, or need not be for a local folder."""
    from huggingface_hub import constants

    if Path(repository).exists():
        return None
    try:
        check_reachable(constants.ENDPOINT)
    except OSError as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


@contextmanager
def _offline(reason: str | None) -> Iterator[None]:
    """Keep both libraries from the network for the length of a block, where there is a reason to."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if reason is not None:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Only errors of the two libraries' logs: what went wrong is told in one line of ours."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

"""The admission rule: how old a rollout may be when it is trained on.

One place for real runs and the simulator; pure, no imports.
"""


def lag(version_in_use: int, version_made: int) -> int:
    """Policy versions between making a rollout and using it."""
    return version_in_use - version_made


def may_use(version_in_use: int, version_made: int, max_staleness: int) -> bool:
    """Whether a rollout made at `version_made` may be trained on by the learner at `version_in_use`."""
    return lag(version_in_use, version_made) <= max_staleness


def may_start(learner_version: int, batches_ahead: int, version_made: int, max_staleness: int) -> bool:
    """Whether to start a batch now that will be used after `batches_ahead` earlier ones, one version each."""
    return may_use(learner_version + batches_ahead, version_made, max_staleness)

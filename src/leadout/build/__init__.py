"""From a recipe to running objects: the only place that reads config objects. Used by the command line and the API.

`run` holds the entry points (`train`, `evaluate`), `data`, `generator`, `drafter` and `learner` one part each.
"""

from leadout.build.run import evaluate, train

__all__ = ["evaluate", "train"]

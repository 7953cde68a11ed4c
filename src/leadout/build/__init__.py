"""From a recipe to running objects: the only place that reads config objects. Used by the command line and the API.

Entry points are `train` and `evaluate`; `data`, `generator`, `drafter` and `learner` make one part each.
"""

from leadout.build.evaluation import evaluate
from leadout.build.run import train

__all__ = ["evaluate", "train"]

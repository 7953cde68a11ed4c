"""How fast is this generator? Contenders measured in turn (A B A B), medians with intervals, peers apart.

`contender` measures, `statistics` and `results` summarise, `render` prints; `native` is our engine, `peers` the others.
"""

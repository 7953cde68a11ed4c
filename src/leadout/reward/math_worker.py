"""The child process of the reward function `math`: compares final answers with math-verify, one line at a time."""

from __future__ import annotations

import json
import logging
import sys


def judge(answer: str, text: str) -> float:
    """1.0 if the final answer of `text` is mathematically equal to `answer`, else 0.0.

    A bare answer is wrapped in dollar signs first, since LaTeX is only looked for inside of an environment. Time is
    limited from outside, so math-verify's own limits (signals) are off.
    """
    from math_verify import parse, verify

    wrapped = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    gold = parse(wrapped, parsing_timeout=None)
    given = parse(text, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def main() -> None:
    """Answer every line of standard input with a line on standard output."""
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        answer, text = json.loads(line)
        sys.stdout.write(json.dumps(judge(answer, text)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

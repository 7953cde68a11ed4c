"""Speaks the protocol of `leadout.bench.peers.server` without an engine; the name it is started with is its character.

fine: answers, with a thread that spins on a core, as an engine's idle threads do. short: rows lack a token.
failing: cannot load. dying: ends at the first question, with a last word. silent: never answers. noise: no JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time


def spin() -> None:
    while True:
        pass


character = sys.argv[1]
if character == "fine":
    threading.Thread(target=spin, daemon=True).start()
for line in sys.stdin:
    message = json.loads(line)
    if character == "dying":
        sys.exit("out of memory, it says")
    if character == "silent":
        time.sleep(60.0)
    answer: dict[str, object] = {"ok": True}
    if character == "failing":
        answer = {"ok": False, "error": "ValueError: no such architecture"}
    elif message["op"] == "load":
        answer["version"] = "1.2.3"
    elif message["op"] == "generate":
        lengths = [count - (character == "short") for count in message["new_tokens"]]
        answer |= {"seconds": 0.5, "lengths": lengths}
    sys.stdout.write(("what?" if character == "noise" else json.dumps(answer)) + "\n")
    sys.stdout.flush()
    if message["op"] == "stop":
        break

"""The worker of ``MathVerify``, run as a script.

It answers one JSON line, ``[truth, answer, seconds]``: a line when it has read the truth, then ``true`` or ``false``, until its
input ends, or a question takes longer: whoever asked it may be gone.
"""

from __future__ import annotations

import json
import math
import runpy
import signal
import sys

MEMORY_BYTES = 2 << 30
READ, UNREADABLE = "read", "unreadable"


def main() -> None:
    """Answers questions until the input ends."""
    from math_verify import parse, verify

    runpy.run_path(sys.argv[1])["confine"](MEMORY_BYTES)
    probe, bearable = parse(r"\boxed{17}", parsing_timeout=None), set[str]()
    print("ready", flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        truth, answer = (rf"\boxed{{{text}}}" for text in texts)
        signal.alarm(math.ceil(seconds) + 1)
        try:
            right = parse(truth, parsing_timeout=None)
            if truth not in bearable:  # an honest answer should not pay for a truth that cannot be compared with anything
                verify(right, probe, timeout_seconds=None)
                bearable.add(truth)
        except Exception:
            print(UNREADABLE, flush=True)
            continue
        print(READ, flush=True)
        try:
            same = bool(verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None))
        except Exception:
            same = False
        signal.alarm(0)
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    main()

"""The worker of ``ReasoningGym``, run as a script with a data set's name and, as JSON, its settings.

It reads JSON lines: ``[index]`` is answered with that question and its reference answer, ``[index, text]`` with the score of
the text.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import random
import runpy
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 << 30
QUESTION_S, SCORE_S = 60, 5
NUM_QUESTIONS = 20_000  # the largest size that every data set takes


def main() -> None:
    """Answers until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # some data sets print
    evaluate = builtins.eval
    # Some data sets evaluate the answer, within reach of the variable that holds the right one.
    builtins.eval = lambda text, *scopes: evaluate(text, *(scopes or ({"__builtins__": {}},)))

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(sys.argv[2], seed=0, size=NUM_QUESTIONS, **json.loads(sys.argv[3]))
    except Exception as error:
        say(f"{type(error).__name__}: {error}"[:300])
        return
    runpy.run_path(sys.argv[1])["confine"](MEMORY_BYTES)

    @functools.lru_cache(maxsize=4096)  # evaluations ask for the same questions again
    def entry_of(index: int) -> dict[str, Any]:
        random.seed(index)  # some data sets draw from the global state
        return dataset[index]

    print("ready", file=out, flush=True)
    for line in sys.stdin:
        index, *texts = json.loads(line)
        signal.alarm(SCORE_S + 1 if texts else QUESTION_S + 1)  # whoever asked may be gone
        try:
            entry = entry_of(index)
            if texts:
                say(float(dataset.score_answer(texts[0], entry)))
            else:
                answer = entry["answer"]
                say([str(entry["question"]), answer if isinstance(answer, str) else None])
        except Exception as error:  # a scorer that cannot read an answer raises anything
            say(0.0 if texts else f"{type(error).__name__}: {error}"[:300])
        signal.alarm(0)


if __name__ == "__main__":
    main()

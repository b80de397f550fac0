"""The seed of a test that draws its input: another one in each run, or the one that is set."""

from __future__ import annotations

import os
import random
import sys


def draw_random() -> random.Random:
    """Return a generator with the seed in `ONCEFLOW_TEST_SEED`, or with a new one, and print it."""
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    sys.stdout.write(f"seed {seed}; ONCEFLOW_TEST_SEED sets it\n")
    return random.Random(seed)

"""How many threads the tests give torch: one, unless the environment says otherwise."""

import os

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))

"""How episodes are divided: chunks of random numbers, and log-spaced checkpoints."""

from __future__ import annotations

import numpy as np

#: Episodes per chunk of random numbers. It is part of the definition of a run: another value gives
#: other random numbers.
CHUNK = 256


def log_spaced(episodes: int, per_decade: int = 20) -> list[int]:
    """Integers from 1 to `episodes`, evenly spaced in the logarithm, including the last."""
    exponents = np.arange(0, np.log10(max(episodes, 1)), 1 / per_decade)
    return sorted({*np.round(10**exponents).astype(int).tolist(), episodes})

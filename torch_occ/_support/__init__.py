"""What all packages share: files, random numbers, processes, choices, private interfaces.

choices       choices at run time: torch or the engine, optional packages
compiling     how kernels are compiled, and kept on disk with a stamp that says if they are valid
constants     numbers that torch and the engine share: chunks, checkpoints, tolerances
files         files: written atomically, checked when they are read; states of runs, and tables
fingerprints  hashes of everything that decides the numbers of a run, to recognize a saved run
private       every use of a private interface of another package
processes     interrupts and threads
streams       random numbers that are a function of seed, purpose and chunk
version       the version of the package; saved runs belong to it, and pyproject.toml reads it here
"""

from torch_occ._support.version import VERSION as VERSION

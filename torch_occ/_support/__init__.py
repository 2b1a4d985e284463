"""What all packages share: files, random numbers, processes, choices, private interfaces.

caching       the cache of compiled kernels on disk, and the stamp that decides whether an entry is
choices       the choice between torch and the compiled engine, and modules that are imported on
codeprints    the parts of a function or a class that decide what it does; `fingerprints` hashes
constants     how episodes are divided: chunks of random numbers, and log-spaced checkpoints
files         files that are written atomically and checked for damage when they are read
fingerprints  hashes of everything that decides the numbers of a run, to recognize a saved run
private       every use of a private interface of another package; these may change with its next
processes     work that is interrupted saves its state and tells the caller
streams       random numbers that are a function of seed, purpose and chunk
version       the version of the package; saved runs belong to it, and pyproject.toml reads it here
"""

from torch_occ._support.version import VERSION as VERSION

"""Shared by all packages: files, random numbers, threads, and the choice of a backend.

backends      torch or the compiled engine; modules that are imported on demand
caching       compiled kernels on disk, each with a stamp of its sources
compiling     the message that is shown while kernels compile
extras        optional packages
files         atomic files with a checksum
fingerprints  hashes of everything that decides the numbers of a run
interrupts    Ctrl-C and SIGTERM: save first, then stop
private       every private name of torch, Numba and other packages that is used
saving        the state of a run or a tuning in a file, saved from time to time
spacing       chunks of episodes, and log-spaced checkpoints
streams       random numbers by seed, purpose and chunk
tables        tables as Markdown, as LaTeX, and as files
threads       kernels in plain threads, in parallel
version       the version of the package
"""

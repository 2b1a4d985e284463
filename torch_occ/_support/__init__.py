"""What every room uses: files, random numbers, threads, optional packages, and the choice of a backend.

backends      torch or the compiled engine; modules that are imported only when they are needed
compiling     the message that is shown while kernels compile
extras        optional packages
files         files that are complete or absent
fingerprints  hashes of everything that decides the numbers of a run
private       what is private of torch, Numba and others
spacing       episodes that are evenly spaced in the logarithm
streams       random numbers by seed, purpose and chunk
tables        tables as Markdown, as LaTeX, and as files
threads       kernels side by side in plain threads
version       the version of the package
"""

"""Eight problems in the lanes of a vector register: types and operations for kernels.

A kernel is written once. Numba compiles it for plain arrays, where `x[i]` is a number, and for
arrays in lanes, where `x[i]` is a `Vector`: one number of each of eight problems. Comparisons of
vectors give a `Mask`. A branch that depends on a mask is written with `where` and `anywhere`, which
also take a plain bool. Lanes never mix, so a problem has the same result beside any others.

vectors  vectors and masks, their operators and functions
arrays   arrays of vectors, and the plain arrays of a single lane
"""

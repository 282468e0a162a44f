"""Compiled kernels, built on first use from the C++ beside this file.

`library()` gives the loaded library, or None where no compiler is found; every user of it has
a path in plain torch or Python. The C++ keeps to a plain C interface (ctypes), so nothing of
torch has to be compiled and a build takes seconds.
"""

from outrider.native.build import library, pointer

__all__ = ["library", "pointer"]

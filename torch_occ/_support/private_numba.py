"""Every use of a private interface of Numba and llvmlite; these may change with the next release.

torch_occ._support.compiling and torch_occ.engine.lanes derive compilers and types from them.
"""

from typing import Any

import llvmlite as llvmlite
from llvmlite import ir as ir
from llvmlite.binding import parse_bitcode as parse_bitcode
from numba.core import caching as caching
from numba.core import cgutils as cgutils
from numba.core.codegen import JITCodeLibrary as JITCodeLibrary
from numba.core.compiler import Compiler as Compiler
from numba.core.compiler import compile_result as compile_result
from numba.core.datamodel import models as models
from numba.core.ir_utils import alias_func_extensions as alias_func_extensions
from numba.core.typeconv.castgraph import Conversion as Conversion
from numba.core.typing.templates import AbstractTemplate as AbstractTemplate
from numba.core.typing.templates import infer_global as infer_global
from numba.core.typing.templates import signature as signature
from numba.np.arrayobj import populate_array as populate_array

#: Numba's option for kernels that neither allocate nor own arrays. Reference counting took half of
#: their time.
NO_REFERENCE_COUNTS: dict[str, Any] = {"_nrt": False}

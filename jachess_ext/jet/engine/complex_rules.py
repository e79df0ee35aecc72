"""Names of the functions whose rules hold for complex numbers.

A model may use complex numbers inside (Fourier transforms, rotary embeddings as a complex product).
The rules of linear and of holomorphic functions hold for them.  Other functions are refused, such
as norms and variances, since |z|² is not z².
`python_tests/jet/test_complex.py` checks every function of the rule table.
"""

from __future__ import annotations

from functools import cache

from .errors import last_name
from .kinds import LINEAR, PRODUCTS, QUOTIENTS, SUMS, VIEWS
from .registry import OTHER_NAMES
from .types import Function

_OF_COMPLEX = """
    real imag view_as_real view_as_complex complex polar abs absolute angle conj conj_physical
    resolve_conj resolve_neg adjoint mH H cfloat cdouble
    fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft2 ihfft2
    hfftn ihfftn fftshift ifftshift
"""
_ALSO_OF_REAL = """
    view_as reshape_as T mT expand_as broadcast_tensors __iter__ cat concat concatenate stack
    type_as cpu cuda masked_fill where pad zeros_like new_zeros empty_like new_empty index_add
    index_copy scatter scatter_add hstack vstack dstack column_stack ravel meshgrid diag
    diag_embed diagflat trace take masked_select block_diag __rtruediv__ reciprocal positive
    addcmul addcdiv lerp outer square pow __pow__ __rpow__ exp expm1 exp2 log log1p log2 log10
    sqrt rsqrt sin cos tanh sigmoid spmm einsum __rmatmul__ linear addmm baddbmm conv1d conv2d
    conv3d
    sinh cosh tan asin acos atan asinh acosh atanh addmv addbmm addr inner kron tensordot vdot
    vecdot cross cumprod prod diff logsumexp softmax log_softmax conv_transpose1d
    conv_transpose2d conv_transpose3d inv solve_triangular cholesky pinv matrix_exp matrix_power
    multi_dot det slogdet logdet add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__
    neg_ masked_fill_ copy_ fill_ zero_ __setitem__ index_add_ index_copy_ scatter_ scatter_add_
    eq ne __eq__ __ne__ equal allclose isclose isnan isinf isfinite result_type item tolist
    detach ones_like full_like rand_like randn_like new_ones new_full new_tensor
    is_floating_point is_complex is_conj is_neg is_contiguous stride numel element_size
    get_device nelement is_same_size is_tensor requires_grad_ __format__ is_cuda is_cpu is_mps
    is_meta is_sparse layout data grad is_quantized is_nested is_mkldnn itemsize nbytes is_xla
    is_xpu
"""
OF_COMPLEX = frozenset(_OF_COMPLEX.split())
COVERED = OF_COMPLEX.union(_ALSO_OF_REAL.split(), VIEWS, LINEAR, SUMS, PRODUCTS, QUOTIENTS)


@cache
def takes_complex(function: Function) -> bool:
    """Return whether a torch function's rule holds for complex numbers."""
    return last_name(OTHER_NAMES.get(function, function)) in COVERED

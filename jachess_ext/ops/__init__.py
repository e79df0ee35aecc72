"""Python wrappers of the C++/CUDA operators, and their pure-torch references.

A stacked jet is a tensor [S, ...] of S streams along q = 1 to 4 directions: the primal x_0, first
order x_1 .. x_q and, where S = 1 + q + q(q-1)/2 instead of 1 + q, second order x_ij by pairs i < j.
Operators with an argument `summed` also take any q with S = 2 + q, whose last stream is the sum of
x_ii over the first `summed` directions.
Its dtype is fp64, fp32, bf16 or fp16 (16-bit types are computed in fp32); it may have any strides
and any size, zero included.

A wrapper calls the compiled kernel if there is one for the tensors' device (`available`), otherwise
its pure-torch reference. The reference has the wrapper's name with ``_reference`` appended, and the
wrapper's examples hold for both. Results are differentiable any number of times. An invalid
argument raises RuntimeError, or, from a reference, also ValueError or TypeError.
"""

from .activation import (
    ACTIVATION_KINDS,
    activation_jet,
    activation_jet_reference,
    gated_activation_jet,
    gated_activation_jet_reference,
)
from .attention import attention_jet
from .attention_blocks import attention_by_blocks
from .attention_reference import attention_jet_reference
from .directions import sample_directions, sample_directions_reference, token_numbers
from .library import available, build_info
from .norm import (
    add_layer_norm_jet,
    add_layer_norm_jet_reference,
    add_rms_norm_jet,
    add_rms_norm_jet_reference,
    jet_mean_squares,
    jet_mean_squares_reference,
    layer_norm_jet,
    layer_norm_jet_reference,
    rms_norm_jet,
    rms_norm_jet_reference,
)
from .ntk import ntk_gram, ntk_gram_reference, ntk_materialised, ntk_materialised_reference
from .softmax import softmax_jet, softmax_jet_reference

__all__ = [
    "ACTIVATION_KINDS",
    "activation_jet",
    "activation_jet_reference",
    "add_layer_norm_jet",
    "add_layer_norm_jet_reference",
    "add_rms_norm_jet",
    "add_rms_norm_jet_reference",
    "attention_by_blocks",
    "attention_jet",
    "attention_jet_reference",
    "available",
    "build_info",
    "gated_activation_jet",
    "gated_activation_jet_reference",
    "jet_mean_squares",
    "jet_mean_squares_reference",
    "layer_norm_jet",
    "layer_norm_jet_reference",
    "ntk_gram",
    "ntk_gram_reference",
    "ntk_materialised",
    "ntk_materialised_reference",
    "rms_norm_jet",
    "rms_norm_jet_reference",
    "sample_directions",
    "sample_directions_reference",
    "softmax_jet",
    "softmax_jet_reference",
    "token_numbers",
]

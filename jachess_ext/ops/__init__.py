"""The Python wrapper of each C++/CUDA operator, its pure-torch reference, and whether the compiled
form can be used."""

from .activation import (
    ACTIVATION_KINDS,
    activation_jet,
    activation_jet_reference,
    gated_activation_jet,
    gated_activation_jet_reference,
)
from .attention import attention_jet, attention_jet_reference
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

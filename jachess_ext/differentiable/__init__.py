"""Torch's own derivatives of unmodified programs, where torch refuses them or is wrong."""

# The families register what answers torch's functions.
from . import distances as distances
from . import linalg as linalg
from . import losses as losses
from . import norms as norms
from . import recurrent as recurrent
from . import sampling as sampling
from . import segments as segments
from . import sparse as sparse
from .mode import differentiable as differentiable

"""Array types of this package: everything is computed in double precision."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

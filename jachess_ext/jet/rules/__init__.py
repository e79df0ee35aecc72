"""The jet rules, one file per family; importing this package registers all of them."""

from . import arithmetic as arithmetic
from . import attention as attention
from . import collectives as collectives
from . import linalg as linalg
from . import linear as linear
from . import norm as norm
from . import pointwise as pointwise
from . import reduce as reduce
from . import shape as shape
from . import softmax as softmax

from . import composite as composite  # isort: skip  composed of the rules above
from . import sampling as sampling  # isort: skip  called before the rule of linear.py
from . import memory as memory  # isort: skip  built from the rules above
from . import fused as fused  # isort: skip  called before the rules above
from . import forward_mode as forward_mode  # isort: skip  for functions without a rule above

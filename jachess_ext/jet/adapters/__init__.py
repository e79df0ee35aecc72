"""Rules for other libraries: their autograd Functions, and weights of bitsandbytes and torchao.

Importing this package registers the rules, and imports none of the libraries.
"""

from . import libraries as libraries
from . import quantised as quantised

"""Rules for other libraries: their autograd Functions, and weights of bitsandbytes and torchao.

None of the libraries is imported.  Importing this package registers the rules.
"""

from . import libraries as libraries
from . import quantised as quantised

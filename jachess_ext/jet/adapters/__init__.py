"""Rules for what other libraries call: autograd Functions, by name and by their own code; weights
of bitsandbytes and torchao.

None of the libraries is imported.  Importing this package registers the rules.
"""

from . import libraries as libraries
from . import quantised as quantised

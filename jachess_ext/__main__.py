"""`python -m jachess_ext` is `jachess`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m selectivit`: the command line."""

import sys

from selectivit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m fagen`: the command line, from a checkout too."""

import sys

from fagen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

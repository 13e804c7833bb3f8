"""`python -m geventstalk` is the same program as the console script."""

import sys

from geventstalk.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

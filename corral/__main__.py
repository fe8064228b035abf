"""`python -m corral` is the `corral` command."""

import sys

from corral.cli import main

sys.exit(main())

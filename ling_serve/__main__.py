"""`python -m ling_serve` is `ling-serve`."""

import sys

from ling_serve.cli import main

sys.exit(main())

"""`python -m hf_vaswani.cli` is the command `hf-vaswani`."""

import sys

from .main import main

sys.exit(main())

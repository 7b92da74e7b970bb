"""``python -m hybridkv``, the same as the command ``hybridkv``."""

import sys

from .cli import main

sys.exit(main())

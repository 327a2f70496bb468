"""`python -m engine_adapter.simulated`."""

import sys

from engine_adapter.simulated.command import main

sys.exit(main())

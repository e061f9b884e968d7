"""Set before anything imports Triton: its kernels run under its interpreter here, and need no GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

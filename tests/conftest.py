"""Settings every test shares, made before anything imports torch: one thread a process, nothing from outside."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A cluster that happens to run on this machine is none of the tests' business.
os.environ.pop("RAY_ADDRESS", None)
# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine, nothing about the code. After the environment is set.
from hypothesis import settings  # noqa: E402

settings.register_profile("corral", deadline=None)
settings.load_profile("corral")

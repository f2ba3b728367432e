"""Settings of the test run: one thread (numbers do not depend on the machine), reproducible fuzzing."""

from __future__ import annotations

import os
import signal

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A suite that a shell starts in the background ignores SIGINT, and so would every process that it starts; interrupts are tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CALM = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=_CALM, print_blob=True)
settings.register_profile("fuzz", deadline=None, suppress_health_check=_CALM, print_blob=True)  # new examples each run
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

"""For the test that compares engines only: a site's secure random numbers follow from SITE_SEED, not from the system's entropy.

The interpreter runs this file if its folder is on PYTHONPATH; hemofed itself has no such switch.
"""

import os

if "SITE_SEED" in os.environ:
    import hashlib

    from privacy.dpsgd import secure_rng

    class SeededRandom(secure_rng.SecureRandom):
        num_created = 0

        def __init__(self) -> None:
            super().__init__(hashlib.sha256(f"{os.environ['SITE_SEED']} {SeededRandom.num_created}".encode()).digest())
            SeededRandom.num_created += 1

    secure_rng.SecureRandom = SeededRandom  # type: ignore[misc]

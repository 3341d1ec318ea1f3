"""Only for the test that compares engines: a site's draws follow from DICE instead of the operating system's entropy.

Found by the interpreter where this folder is on PYTHONPATH; nothing in hemofed itself can be asked to do that.
"""

import os

if "DICE" in os.environ:
    import hashlib

    from privacy.dpsgd import secure_rng as entropy

    class Diced(entropy.SecureRandom):
        rolled = 0

        def __init__(self) -> None:
            super().__init__(hashlib.sha256(f"{os.environ['DICE']} {Diced.rolled}".encode()).digest())
            Diced.rolled += 1

    entropy.SecureRandom = Diced  # type: ignore[misc]

"""Attacks as evidence: membership inference, canaries, gradient inversion. A failed attack proves nothing;
a successful one refutes a promise."""

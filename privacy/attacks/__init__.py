"""Attacks as evidence: membership inference, canary audits, gradient inversion.

A failed attack proves nothing; a successful one can refute the stated epsilon."""

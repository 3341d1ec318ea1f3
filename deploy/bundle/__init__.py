"""A signed model bundle: manifest, operating points, out-of-distribution guard, trusted signers."""

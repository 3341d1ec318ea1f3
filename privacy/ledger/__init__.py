"""A site's privacy ledger: signed, hash-chained and countersigned records of every charge."""

"""Update compression: one codec a module (QSGD, top-k, rand-k, fp16), and fixed-point encoding for secure aggregation."""

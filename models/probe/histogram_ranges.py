"""Ranges of the histograms that sites send and bundles read, without torch because edge machines import them too."""

from __future__ import annotations

# scores: bins of equal width in asinh(log-odds), from minus this to this. They are fine around p = 1/2, while the log-odds
# of over-confident models (+-10,000) differ
MAX_ASINH_LOG_ODDS = 10.0
# distances from the nearest class center: bins of equal width in log2, from 1/8 to 32; 1 is the root mean square distance
# of the validation images
MIN_LOG2_DISTANCE, MAX_LOG2_DISTANCE = -3.0, 5.0

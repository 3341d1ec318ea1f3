"""What a data source imports: `DataSource` to subclass, the `Dataset` that it returns, and helpers.

Partitions, feature skews and color normalizations work on a `Dataset` too. Entry point groups: hemofed.data,
hemofed.partitions, hemofed.feature_skews, hemofed.normalizations."""

from sites.data.base import SPLITS, Dataset, DataSource, GroupKey, assign_split, fingerprint, sample_whole_units
from sites.data.images import decode_image
from sites.population.color_normalization import ColorNormalization
from sites.population.feature_skew import FeatureSkew
from sites.population.partition import Partitioner, SitePartition

__all__ = [
    "SPLITS",
    "ColorNormalization",
    "DataSource",
    "Dataset",
    "FeatureSkew",
    "GroupKey",
    "Partitioner",
    "SitePartition",
    "assign_split",
    "decode_image",
    "fingerprint",
    "sample_whole_units",
]

"""What codecs and aggregation rules import: `Codec` and `AggregationRule` to subclass, and helpers.

Entry point groups: hemofed.codecs, hemofed.aggregation_rules."""

from pipeline.aggregation.rules import AggregationRule
from pipeline.codecs.base import Codec, EncodedParts, VectorLayout, require_part
from pipeline.core.parameters import ParamVector
from pipeline.protocol.messages import Aggregate, Reply, Visibility

__all__ = [
    "Aggregate",
    "AggregationRule",
    "Codec",
    "EncodedParts",
    "ParamVector",
    "Reply",
    "VectorLayout",
    "Visibility",
    "require_part",
]

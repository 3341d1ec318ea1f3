"""What a network imports: `ModelConfig` to subclass, and helpers. Entry point group: hemofed.models."""

from models.networks.base import ModelConfig
from models.networks.layers import InputShape, NormType, create_group_norm, create_norm_layer, is_image_shape

__all__ = ["InputShape", "ModelConfig", "NormType", "create_group_norm", "create_norm_layer", "is_image_shape"]

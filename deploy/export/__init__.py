"""A run becomes an ONNX bundle: graph, int8 quantization, model card. The only users of torch in this room."""

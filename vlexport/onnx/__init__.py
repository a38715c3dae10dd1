"""From an exported program to an ONNX model, and named passes that fit the model to a runtime."""

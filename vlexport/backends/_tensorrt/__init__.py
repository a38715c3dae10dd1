"""TensorRT and TensorRT for RTX; the library is an argument everywhere, so both may live in one process."""

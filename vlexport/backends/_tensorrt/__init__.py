"""TensorRT and TensorRT for RTX: build process, network and its checks, runner.

The library is an argument everywhere, so both may live in one process.
"""

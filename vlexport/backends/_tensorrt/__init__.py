"""What both flavours of TensorRT share: plan, child process, network, read-back, running.

The library is an argument everywhere, so both flavours may live in one process.
"""

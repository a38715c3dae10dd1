"""The GPU at hand, read from the driver itself: nothing heavy is loaded for it."""

from __future__ import annotations

import ctypes
import sys

NO_GPU = "none"
# CUdevice_attribute of the driver's interface.
_MAJOR, _MINOR = 75, 76


def device_here() -> str:
    """Compute capability of the first GPU, such as `sm89`; `none` without a driver or a device."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return NO_GPU
    device, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return NO_GPU
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return NO_GPU
        found.append(str(value.value))
    return "sm" + "".join(found)

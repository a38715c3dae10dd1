"""Make a torchvision that was built for CUDA importable beside a torch for processors.

It registers shapes of two operators whose kernels are in a library that does not load here, so the operators
are declared first. `cpu_torchvision.pth` imports this file at the start of every process of the environment.
"""

import importlib.abc
import sys


class Declare(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            self.library = Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
            kept.append(self)


kept: list[Declare] = []
sys.meta_path.insert(0, Declare())

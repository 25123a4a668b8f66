"""Lets PyPI's torchvision, built for CUDA, be imported beside a CPU torch.

Its C++ operators cannot be loaded there, and the registration of their shapes fails for want of their names.
Just before torchvision is imported, the two names are declared. Resizing and normalising, which is all that
captioning uses, need no operator. Started in every Python of the environment by torchvision_ops.pth.
"""

import importlib.abc
import sys

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
libraries = []  # a declaration lives as long as its library object


class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + SIGNATURE)
            libraries.append(library)
        return None  # the import goes on as usual


sys.meta_path.insert(0, Declare())

"""The networks that the training harness trains."""

from __future__ import annotations

from gradsieve.models.alexnet import alexnet
from gradsieve.models.googlenet import googlenet
from gradsieve.models.language import gpt, lstm
from gradsieve.models.recommender import ncf
from gradsieve.models.resnet import resnet18, resnet50, resnet152
from gradsieve.models.senet import senet18
from gradsieve.models.small import cnn, mlp
from gradsieve.models.vgg import vgg16

__all__ = [
    "alexnet",
    "cnn",
    "googlenet",
    "gpt",
    "lstm",
    "mlp",
    "ncf",
    "resnet18",
    "resnet50",
    "resnet152",
    "senet18",
    "vgg16",
]

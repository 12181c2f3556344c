"""A small conditional picture generator, the prior of the generative attack: the network, its file, its training."""

from .network import Generator, load_generator, save_generator
from .training import GeneratorSettings, train_generator

__all__ = ["Generator", "GeneratorSettings", "load_generator", "save_generator", "train_generator"]

"""Gradients as bytes and back: lossless, no pickle, safe against hostile bytes. docs/wire-format.md has every byte."""

from .codec import MAX_ENTRIES, decode, encode
from .frame import VERSION
from .sizes import SizeReport, TensorSize, paper_bits, size_report

__all__ = ["MAX_ENTRIES", "VERSION", "SizeReport", "TensorSize", "decode", "encode", "paper_bits", "size_report"]

"""Gradients under FP8: what quantization and what the layout of a batch do to them."""

"""Gradients in buckets: how they are cut, in which order they travel, and when they may be used."""

from distributed.data_parallel.buckets.manager import GradientBucketManager

__all__ = ["GradientBucketManager"]

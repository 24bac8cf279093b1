"""Data parallelism: gradients of replicas travel in buckets while the backward runs."""

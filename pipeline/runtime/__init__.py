"""A schedule at work: stages, micro-batches, messages between them, and the executor that runs them."""

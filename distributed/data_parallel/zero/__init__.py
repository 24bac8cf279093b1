"""ZeRO: buckets of which each rank keeps a shard."""

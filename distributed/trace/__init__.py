"""What a rank did and when, for any kind of parallelism."""

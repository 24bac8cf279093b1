"""Ranks that are MPI processes: how calls of MPI become operations that move while a rank computes."""

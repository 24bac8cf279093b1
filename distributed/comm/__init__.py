"""Communicators: what a rank can send, receive and reduce, and what carries it (one rank, threads, MPI)."""

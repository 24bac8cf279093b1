"""Comm hooks that send less than a gradient, and keep what they have not said for the next step."""

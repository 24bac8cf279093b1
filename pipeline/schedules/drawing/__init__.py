"""Timelines as text, as SVG and as PNG."""

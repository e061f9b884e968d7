"""Arithmetic only: no selection, no layouts, no process groups."""

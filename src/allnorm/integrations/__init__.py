"""Switches for other people's programs, out of tree: one subpackage each, imported by name."""

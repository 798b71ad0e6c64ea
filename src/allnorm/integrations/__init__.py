"""Plugins for third-party programs, one subpackage each. Users import them by name."""

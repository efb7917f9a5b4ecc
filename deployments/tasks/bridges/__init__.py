"""Bridges to collections of environments that others keep, one file for each. None imports its package by itself."""

"""Tests that take minutes or hours: parts that are killed, soaks, malformed requests, laws of random sessions.

Each is a program with a target in the Makefile. `make test` runs the tests of their own parts alone.
"""

"""Tests that take minutes or hours: parts that are killed, soaks, malformed requests, laws of random sessions.

`python -m tests.endurance` lists them. `make test` runs the tests of their own parts alone.
"""

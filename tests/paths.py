"""Where things lie in the repository."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_MODEL = REPOSITORY / "models" / "tiny"
SMALL_MODEL = REPOSITORY / "models" / "small"
SMOLLM2 = REPOSITORY / "models" / "smollm2"

BRIDGED = REPOSITORY / "examples" / "bridged"
"""Servers and tasksets of other collections."""
SIMULATED_REPLICA = "benchmarks.simulation.simulated_generator_replica:SimulatedGeneratorReplica"
"""The `engine.replica` of a config whose engines compute nothing."""

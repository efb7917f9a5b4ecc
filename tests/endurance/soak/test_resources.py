"""Whose memory a soak with kills compares."""

from tests.endurance.soak.resources import memory_of_first

MEMORY = {("ingress", 1): 100, ("ingress", 2): 40, ("generator", 3): 10, ("engine", 3): 500, ("serve", 4): 7}


def test_memory_is_that_of_the_replicas_that_lived_from_the_begin() -> None:
    assert memory_of_first(MEMORY, {1, 3, 4}) == {"ingress": 100, "generator": 10, "engine": 500, "serve": 7}


def test_it_is_that_of_all_replicas_of_a_role_which_were_all_replaced() -> None:
    assert memory_of_first(MEMORY, {9}) == {"ingress": 140, "generator": 10, "engine": 500, "serve": 7}

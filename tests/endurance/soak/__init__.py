"""Weights that change for hours while rollouts go on: what grows, what is lost, and what a killed process costs."""

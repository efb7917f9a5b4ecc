"""The deployment that plays an environment, whichever it is."""

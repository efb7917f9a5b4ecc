"""Tasks and bridges that come with the service, which names them by their import paths alone."""

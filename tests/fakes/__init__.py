"""Stand-ins for the ports of the product, one module a port."""

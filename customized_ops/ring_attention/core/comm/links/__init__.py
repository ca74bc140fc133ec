"""Which ranks share a host, and how fast the links between them are."""

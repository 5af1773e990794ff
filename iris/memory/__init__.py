"""How a segment of memory becomes visible to every rank."""

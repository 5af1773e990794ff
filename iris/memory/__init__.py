"""Make a segment of memory visible to every rank."""

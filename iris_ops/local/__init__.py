"""Products and attention of one rank alone, without an exchange."""

"""Pictures for people to read."""

"""What vlexport writes for people to read: tables, and later pages and plots."""

"""The accuracy check: levels from exact integers to health, and the report that they write."""

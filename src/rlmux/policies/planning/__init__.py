"""The algorithms that policies share: search, forecasts, migration, partition. Each sees only what it is given."""

"""A cluster of real processes: nodes on one PostgreSQL, what happens to them, clients, and a judge of what they saw."""

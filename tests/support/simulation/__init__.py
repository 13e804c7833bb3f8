"""A whole server with its clients, disk and clock in one thread, decided by one seed. See simulation.py here."""

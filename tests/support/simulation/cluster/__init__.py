"""Several nodes over one fenced log: real members, made-up database, network and clocks, and one seed for all."""

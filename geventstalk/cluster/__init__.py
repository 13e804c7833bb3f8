"""Several nodes over one log: who leads, who follows, and when a node may answer."""

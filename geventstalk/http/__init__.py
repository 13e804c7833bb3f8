"""HTTP: metrics, health, API and console. Off by default; imported only with `--http`."""

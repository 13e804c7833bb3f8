"""The floor of HTTP: metrics, health, API and console, off until `--http` asks for it and imported only then."""

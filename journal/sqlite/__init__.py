"""The journal's kind that keeps its records in a directory of SQLite files. The only package that imports sqlite3."""

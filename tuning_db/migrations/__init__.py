"""Alembic's steps, run by `schema.migrate` without an ini file."""

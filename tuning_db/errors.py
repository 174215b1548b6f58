"""What can go wrong between a program and its database file, and what to do about it."""


class StoreError(Exception):
    """Base class. `message` names the database; `next_step` says what to do."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".strip()


class DatabaseMissing(StoreError):
    """Nothing is at that path, and reading makes nothing."""


class DatabaseDamaged(StoreError):
    """The path holds no SQLite database, or one that was cut or overwritten."""


class ForeignDatabase(StoreError):
    """A sound database that holds somebody else's tables and none of ours."""


class SchemaTooNew(StoreError):
    """Made by a newer version. Nothing was written."""


class SchemaTooOld(StoreError):
    """Made by an older version, and this caller may not migrate it."""


class DatabaseLocked(StoreError):
    """Another process held the database for longer than the wait."""


class DatabaseReadOnly(StoreError):
    """The file, its folder or its file system can't be written."""

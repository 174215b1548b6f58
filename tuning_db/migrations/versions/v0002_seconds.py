"""Version 2: what a trial took to build, to check and to time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("trial", sa.Column("seconds", sa.Text))

"""The coordinator's tables and transactions. SQLite by default; any database that SQLAlchemy supports works.

Tokens, credentials and session cookies are stored as SHA-256 without salt: they have 256 random bits, so that dictionary
attacks do not apply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Connection, Dialect, ForeignKey, String, create_engine, event
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

from pipeline.records.run_control import DesiredState

BUSY_TIMEOUT_SECONDS = 10
WRITE_OPTION = "hemofed_writes"


class UtcDateTime(TypeDecorator[datetime]):
    """Times as UTC text of constant length, which every database sorts correctly."""

    impl = String(32)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        return None if value is None else value.astimezone(UTC).isoformat(timespec="microseconds")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:
        return None if value is None else datetime.fromisoformat(value)


class TableBase(DeclarativeBase):
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: JSON}  # noqa: RUF012 (SQLAlchemy's own name and kind)


class UserRow(TableBase):
    __tablename__ = "users"
    name: Mapped[str] = mapped_column(String(48), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    token: Mapped[str] = mapped_column(String(64), unique=True)  # SHA-256
    created: Mapped[datetime]
    revoked: Mapped[datetime | None] = mapped_column(default=None)


class LoginRow(TableBase):
    """A browser session."""

    __tablename__ = "logins"
    cookie: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256
    user: Mapped[str] = mapped_column(ForeignKey("users.name"))
    expires: Mapped[datetime]


class SiteRow(TableBase):
    __tablename__ = "sites"
    name: Mapped[str] = mapped_column(String(48), primary_key=True)
    key: Mapped[str] = mapped_column(String(64))  # the agent's public key
    officer: Mapped[str] = mapped_column(String(64))
    credential: Mapped[str] = mapped_column(String(64), unique=True)  # SHA-256
    enrolled: Mapped[datetime]
    version: Mapped[str] = mapped_column(String(40), default="")
    status: Mapped[dict[str, Any]] = mapped_column(default=dict)
    last_seen: Mapped[datetime | None] = mapped_column(default=None)
    left: Mapped[datetime | None] = mapped_column(default=None)
    removed: Mapped[bool] = mapped_column(default=False)  # by the lead: a site with another key may take the name


class InvitationRow(TableBase):
    __tablename__ = "invitations"
    token: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256
    site: Mapped[str] = mapped_column(String(48), index=True)
    created_by: Mapped[str] = mapped_column(String(48))
    created: Mapped[datetime]
    expires: Mapped[datetime]
    used: Mapped[datetime | None] = mapped_column(default=None)


class RunRow(TableBase):
    __tablename__ = "runs"
    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    name: Mapped[str] = mapped_column(String(80))
    strategy: Mapped[str] = mapped_column(String(80))
    rounds: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))  # of the offer; approvals refer to it
    min_sites: Mapped[int]
    created_by: Mapped[str] = mapped_column(String(48))
    state: Mapped[str] = mapped_column(String(16))
    desired_state: Mapped[DesiredState] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(default="")
    created: Mapped[datetime]
    started: Mapped[datetime | None] = mapped_column(default=None)
    finished: Mapped[datetime | None] = mapped_column(default=None)
    run_sites: Mapped[list[RunSiteRow]] = relationship(order_by="RunSiteRow.position", lazy="selectin")

    @property
    def sites(self) -> list[str]:
        """Names in the order of the strategy."""
        return [run_site.site for run_site in self.run_sites]


class RunSiteRow(TableBase):
    """A site of a run, with the agent's public key from the offer."""

    __tablename__ = "run_sites"
    run: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    site: Mapped[str] = mapped_column(ForeignKey("sites.name"), primary_key=True)
    position: Mapped[int]
    key: Mapped[str] = mapped_column(String(64))


class ApprovalRow(TableBase):
    """The last approval and the last revocation that a site reported; the later one counts."""

    __tablename__ = "approvals"
    run: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    site: Mapped[str] = mapped_column(ForeignKey("sites.name"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64))  # public key of the agent that reported it
    officer: Mapped[str] = mapped_column(String(80))  # fingerprint
    approved_at: Mapped[datetime]
    expires: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)

    def is_valid(self, now: datetime) -> bool:
        return not self.is_revoked and (self.expires is None or now < self.expires)

    @property
    def is_revoked(self) -> bool:
        return self.revoked_at is not None and self.revoked_at >= self.approved_at


class ReceiptRow(TableBase):
    """A ledger head that the coordinator has countersigned. The receipts themselves are files in HOME/receipts."""

    __tablename__ = "receipts"
    site: Mapped[str] = mapped_column(String(48), primary_key=True)
    dataset_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    head: Mapped[str] = mapped_column(String(64))
    time: Mapped[str] = mapped_column(String(40))


class EventRow(TableBase):
    """Journal of who did what. Rows are only added."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(80))
    action: Mapped[str] = mapped_column(String(80))
    details: Mapped[dict[str, Any]]


class Database:
    """Rows returned from a transaction are detached: changing them does not change the database."""

    def __init__(self, url: str) -> None:
        is_sqlite = make_url(url).get_backend_name() == "sqlite"
        # hide_parameters: error messages would otherwise contain the values of the statement
        self._engine = create_engine(
            url, hide_parameters=True, connect_args={"timeout": BUSY_TIMEOUT_SECONDS} if is_sqlite else {}
        )
        if is_sqlite:
            _configure_sqlite(self._engine)
        self._write_engine = self._engine.execution_options(**{WRITE_OPTION: True})
        TableBase.metadata.create_all(self._write_engine)

    @contextlib.contextmanager
    def read_session(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextlib.contextmanager
    def write_session(self) -> Iterator[Session]:
        """One transaction, exclusive of other writers."""
        with Session(self._write_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()


def _configure_sqlite(engine: Engine) -> None:
    """WAL for readers next to a writer, enforced foreign keys, and writers that wait for each other at BEGIN."""

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver would begin only at the first write; see begin_transaction
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_SECONDS * 1000}",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        is_write = connection.get_execution_options().get(WRITE_OPTION)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

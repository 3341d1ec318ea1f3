"""The coordinator's tables, and how they are opened. SQLite by default; any database that SQLAlchemy knows will do.

Tokens, credentials and sessions stand here only as SHA-256: they are 256 random bits, which no dictionary holds.
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

BUSY_TIMEOUT_SECONDS = 10
WRITE_OPTION = "hemofed_writes"


class UtcDateTime(TypeDecorator[datetime]):
    """As text of one length, so that the database orders times rightly whatever it is."""

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
    """A browser's session."""

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
    removed: Mapped[bool] = mapped_column(default=False)  # by the lead: another key may take the name


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
    digest: Mapped[str] = mapped_column(String(64))  # of the offer, which approvals name
    min_sites: Mapped[int]
    created_by: Mapped[str] = mapped_column(String(48))
    state: Mapped[str] = mapped_column(String(16))
    desired_state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(default="")
    created: Mapped[datetime]
    started: Mapped[datetime | None] = mapped_column(default=None)
    finished: Mapped[datetime | None] = mapped_column(default=None)
    run_sites: Mapped[list[RunSiteRow]] = relationship(order_by="RunSiteRow.position", lazy="selectin")

    @property
    def sites(self) -> list[str]:
        """In the order that the strategy knows them."""
        return [run_site.site for run_site in self.run_sites]


class RunSiteRow(TableBase):
    """A site of a run, by the key that the offer names."""

    __tablename__ = "members"
    run: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    site: Mapped[str] = mapped_column(ForeignKey("sites.name"), primary_key=True)
    position: Mapped[int]
    key: Mapped[str] = mapped_column(String(64))


class ApprovalRow(TableBase):
    """The last approval and the last withdrawal that a site has told of; the later one holds."""

    __tablename__ = "approvals"
    run: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    site: Mapped[str] = mapped_column(ForeignKey("sites.name"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64))  # the agent's that told of it
    officer: Mapped[str] = mapped_column(String(80))  # fingerprint
    approved_at: Mapped[datetime]
    expires: Mapped[datetime | None]
    withdrawn_at: Mapped[datetime | None] = mapped_column(default=None)

    def is_valid(self, now: datetime) -> bool:
        return not self.is_withdrawn and (self.expires is None or now < self.expires)

    @property
    def is_withdrawn(self) -> bool:
        return self.withdrawn_at is not None and self.withdrawn_at >= self.approved_at


class ReceiptRow(TableBase):
    """A ledger's head that the coordinator has countersigned; the receipts themselves are files."""

    __tablename__ = "receipts"
    site: Mapped[str] = mapped_column(String(48), primary_key=True)
    dataset_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    head: Mapped[str] = mapped_column(String(64))
    time: Mapped[str] = mapped_column(String(40))


class EventRow(TableBase):
    """Who did what: only ever added to."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(80))
    action: Mapped[str] = mapped_column(String(80))
    details: Mapped[dict[str, Any]]


class Database:
    """Rows that leave a transaction are copies: changing them changes nothing here."""

    def __init__(self, url: str) -> None:
        is_sqlite = make_url(url).get_backend_name() == "sqlite"
        # an error's text would else hold what was to be written
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
        """One transaction; no other writer is in it."""
        with Session(self._write_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()


def _configure_sqlite(engine: Engine) -> None:
    """SQLite: readers beside one writer, references that hold, and a writer that waits instead of failing half-way."""

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late: see `begin`
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

"""Who may speak to the coordinator: people by tokens, browsers by sessions, sites by invitations and credentials."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from pipeline.core.errors import ServiceError
from pipeline.service.storage.database import Database, EventRow, InvitationRow, LoginRow, SiteRow, UserRow
from privacy.ledger.ledger import Clock

UserRole = Literal["viewer", "officer", "lead"]
USER_ROLES: tuple[UserRole, ...] = ("viewer", "officer", "lead")  # each may do what the ones before it may
SESSION_LIFETIME = timedelta(hours=12)
RESERVED_SITE_NAMES = frozenset(
    {"server", "server_job", "coordinator"}
)  # a certificate of that name would speak for it


def generate_token() -> str:
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class EnrolmentRequest:
    site: str
    key: str
    officer: str
    version: str


@dataclass(frozen=True)
class EnrolmentRefusal:
    """`cure` may be told: it betrays nothing that the asker does not know."""

    remedy: str


class AccountStore:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    # people

    def list_users(self) -> list[UserRow]:
        with self._database.read_session() as session:
            return list(session.scalars(select(UserRow).order_by(UserRow.name)))

    def add_user(self, name: str, role: UserRole, actor: str) -> str | None:
        """The new token, which nobody can read here again; none if the name is taken."""
        token, now = generate_token(), self._clock()
        with self._database.write_session() as session:
            existing = session.get(UserRow, name)
            if existing is not None and existing.revoked is None:
                return None
            session.merge(UserRow(name=name, role=role, token=hash_token(token), created=now, revoked=None))
            _record_event(session, now, actor, "user added", name=name, role=role)
        return token

    def revoke_user(self, name: str, actor: str) -> Literal["done", "unknown", "last lead"]:
        now = self._clock()
        with self._database.write_session() as session:
            existing = session.get(UserRow, name)
            if existing is None or existing.revoked is not None:
                return "unknown"
            leads = session.scalars(select(UserRow.name).where(UserRow.role == "lead", UserRow.revoked.is_(None))).all()
            if list(leads) == [name]:
                return "last lead"
            existing.revoked = now
            session.execute(delete(LoginRow).where(LoginRow.user == name))
            _record_event(session, now, actor, "user revoked", name=name)
        return "done"

    def find_user(self, token: str) -> UserRow | None:
        digest = hash_token(token)
        with self._database.read_session() as session:
            user = session.scalar(select(UserRow).where(UserRow.token == digest, UserRow.revoked.is_(None)))
        return user if user is not None and hmac.compare_digest(user.token, digest) else None

    def create_login(self, user: UserRow) -> str:
        """A browser's cookie."""
        cookie, now = generate_token(), self._clock()
        with self._database.write_session() as session:
            session.execute(delete(LoginRow).where(LoginRow.expires <= now))
            session.add(LoginRow(cookie=hash_token(cookie), user=user.name, expires=now + SESSION_LIFETIME))
            _record_event(session, now, user.name, "login")
        return cookie

    def find_login_user(self, cookie: str) -> UserRow | None:
        digest, now = hash_token(cookie), self._clock()
        with self._database.read_session() as session:
            login = session.get(LoginRow, digest)
            if login is None or login.expires <= now or not hmac.compare_digest(login.cookie, digest):
                return None
            return session.scalar(select(UserRow).where(UserRow.name == login.user, UserRow.revoked.is_(None)))

    def delete_login(self, cookie: str) -> None:
        with self._database.write_session() as session:
            session.execute(delete(LoginRow).where(LoginRow.cookie == hash_token(cookie)))

    # sites

    def create_invitation(self, site: str, hours: float, actor: str) -> tuple[str, datetime]:
        """A one-time token and when it expires; earlier ones for the same name are void."""
        if site.lower() in RESERVED_SITE_NAMES:
            raise ServiceError(f"a site cannot be called {site!r}: FLARE's server goes by that name; choose another")
        token, now = generate_token(), self._clock()
        expires = now + timedelta(hours=hours)
        with self._database.write_session() as session:
            session.execute(
                update(InvitationRow)
                .where(InvitationRow.site == site, InvitationRow.used.is_(None))
                .values(expires=now)
            )
            session.add(InvitationRow(token=hash_token(token), site=site, created_by=actor, created=now, expires=expires))
            _record_event(session, now, actor, "invitation", site=site, expires=expires.isoformat())
        return token, expires

    def is_invited(self, token: str, site: str) -> bool:
        with self._database.read_session() as session:
            return (
                _check_invitation(session.get(InvitationRow, hash_token(token)), token, site, self._clock()) is not None
            )

    def enrol_site(self, token: str, request: EnrolmentRequest) -> str | EnrolmentRefusal:
        """The site's credential. Of two that race with one token, one gets in."""
        credential, now = generate_token(), self._clock()
        with self._database.write_session() as session:
            invitation = _check_invitation(session.get(InvitationRow, hash_token(token)), token, request.site, now)
            if invitation is None:
                return EnrolmentRefusal(
                    "the invitation is wrong, used, expired or for another name; ask the lead for a new one"
                )
            existing = session.get(SiteRow, request.site)
            if existing is not None and existing.key != request.key and not existing.removed:
                return EnrolmentRefusal(
                    f"{request.site} is enrolled with another key; if the site has a new one, the lead removes it first and "
                    "invites it again"
                )
            other_name = session.scalar(
                select(SiteRow.name).where(SiteRow.key == request.key, SiteRow.name != request.site)
            )
            if other_name is not None:
                return EnrolmentRefusal("this agent's key is enrolled under another name; a site has one name")
            invitation.used = now
            session.merge(
                SiteRow(
                    name=request.site,
                    key=request.key,
                    officer=request.officer,
                    credential=hash_token(credential),
                    enrolled=now,
                    version=request.version,
                    status={},
                    last_seen=now,
                    left=None,
                    removed=False,
                )
            )
            _record_event(
                session, now, request.site, "enrolled again" if existing else "enrolled", version=request.version
            )
        return credential

    def find_site(self, credential: str) -> SiteRow | None:
        digest = hash_token(credential)
        with self._database.read_session() as session:
            site = session.scalar(select(SiteRow).where(SiteRow.credential == digest, SiteRow.left.is_(None)))
        return site if site is not None and hmac.compare_digest(site.credential, digest) else None


def _check_invitation(invitation: InvitationRow | None, token: str, site: str, now: datetime) -> InvitationRow | None:
    if invitation is None or not hmac.compare_digest(invitation.token, hash_token(token)):
        return None
    is_valid = invitation.site == site and invitation.used is None and now < invitation.expires
    return invitation if is_valid else None


def _record_event(session: Session, now: datetime, actor: str, action: str, **details: str) -> None:
    session.add(EventRow(time=now, actor=actor, action=action, details=details))

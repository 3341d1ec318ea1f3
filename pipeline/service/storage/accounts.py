"""Accounts: users have tokens, browsers have sessions, sites enrol with an invitation and then have a credential."""

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
USER_ROLES: tuple[UserRole, ...] = ("viewer", "officer", "lead")  # each includes the rights of the roles before it
SESSION_LIFETIME = timedelta(hours=12)
INVALID_INVITATION_TEXT = "the invitation is wrong, used, expired or for another name; ask the lead for a new one"
# a site with a certificate for one of these names could impersonate the server
RESERVED_SITE_NAMES = frozenset({"server", "server_job", "coordinator"})


def generate_token() -> str:
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class EnrolmentRequest:
    """`key`: the agent's public key, `officer`: the officer's, both in hex."""

    site: str
    key: str
    officer: str
    version: str


@dataclass(frozen=True)
class EnrolmentRefusal:
    """`remedy` may be shown: it reveals nothing that the requester does not know."""

    remedy: str


class AccountStore:
    """Users, sessions, invitations and site credentials. Every method is one transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    # users

    def list_users(self) -> list[UserRow]:
        with self._database.read_session() as session:
            return list(session.scalars(select(UserRow).order_by(UserRow.name)))

    def add_user(self, name: str, role: UserRole, actor: str) -> str | None:
        """Returns the new token, of which only a hash is stored; None if the name is taken."""
        token, now = generate_token(), self._clock()
        with self._database.write_session() as session:
            existing = session.get(UserRow, name)
            if existing is not None and existing.revoked is None:
                return None
            session.merge(UserRow(name=name, role=role, token=hash_token(token), created=now, revoked=None))
            _record_event(session, now, actor, "user added", name=name, role=role)
        return token

    def revoke_user(self, name: str, actor: str) -> Literal["done", "unknown", "last lead"]:
        """Voids the user's token and sessions. The last lead cannot be revoked."""
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
        """Returns the cookie of a new browser session."""
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
        """Returns a one-time token and its expiry. Earlier invitations for the same name become void."""
        if site.lower() in RESERVED_SITE_NAMES:
            raise ServiceError(f"a site cannot be called {site!r}: the name is reserved for the server; choose another")
        token, now = generate_token(), self._clock()
        expires = now + timedelta(hours=hours)
        with self._database.write_session() as session:
            session.execute(
                update(InvitationRow)
                .where(InvitationRow.site == site, InvitationRow.used.is_(None))
                .values(expires=now)
            )
            session.add(
                InvitationRow(token=hash_token(token), site=site, created_by=actor, created=now, expires=expires)
            )
            _record_event(session, now, actor, "invitation", site=site, expires=expires.isoformat())
        return token, expires

    def is_invited(self, token: str, site: str) -> bool:
        """Whether the invitation is valid for this site."""
        with self._database.read_session() as session:
            return _find_invitation(session, token, site, self._clock()) is not None

    def enrol_site(self, token: str, request: EnrolmentRequest) -> str | EnrolmentRefusal:
        """Returns the site's credential and uses the invitation up. Of concurrent requests with one token, one succeeds."""
        credential, now = generate_token(), self._clock()
        with self._database.write_session() as session:
            invitation = _find_invitation(session, token, request.site, now)
            if invitation is None:
                return EnrolmentRefusal(INVALID_INVITATION_TEXT)
            existing = session.get(SiteRow, request.site)
            if existing is not None and existing.key != request.key and not existing.removed:
                return EnrolmentRefusal(
                    f"{request.site} is enrolled with another key; if the site has a new key, ask the lead to remove the "
                    "site and invite it again"
                )
            other_name = session.scalar(
                select(SiteRow.name).where(SiteRow.key == request.key, SiteRow.name != request.site)
            )
            if other_name is not None:
                return EnrolmentRefusal("this agent's key is enrolled under another name; enrol with that name")
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


def _find_invitation(session: Session, token: str, site: str, now: datetime) -> InvitationRow | None:
    """None if it is wrong, used, expired or for another site."""
    invitation = session.get(InvitationRow, hash_token(token))
    if invitation is None or not hmac.compare_digest(invitation.token, hash_token(token)):
        return None
    is_valid = invitation.site == site and invitation.used is None and now < invitation.expires
    return invitation if is_valid else None


def _record_event(session: Session, now: datetime, actor: str, action: str, **details: str) -> None:
    session.add(EventRow(time=now, actor=actor, action=action, details=details))

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

from pipeline.core.errors import BadService
from pipeline.service.storage.database import Database, Event, Invitation, Login, Site, User
from privacy.ledger.ledger import Clock

Role = Literal["viewer", "officer", "lead"]
ROLES: tuple[Role, ...] = ("viewer", "officer", "lead")  # each may do what the ones before it may
SESSION = timedelta(hours=12)
RESERVED = frozenset({"server", "server_job", "coordinator"})  # a certificate of that name would speak for it


def fresh() -> str:
    return secrets.token_urlsafe(32)


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class Newcomer:
    site: str
    key: str
    officer: str
    version: str


@dataclass(frozen=True)
class NotEnrolled:
    """`cure` may be told: it betrays nothing that the asker does not know."""

    cure: str


class Accounts:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    # people

    def users(self) -> list[User]:
        with self._database.reading() as session:
            return list(session.scalars(select(User).order_by(User.name)))

    def add_user(self, name: str, role: Role, by: str) -> str | None:
        """The new token, which nobody can read here again; none if the name is taken."""
        token, now = fresh(), self._clock()
        with self._database.writing() as session:
            known = session.get(User, name)
            if known is not None and known.revoked is None:
                return None
            session.merge(User(name=name, role=role, token=hashed(token), created=now, revoked=None))
            _note(session, now, by, "user added", name=name, role=role)
        return token

    def revoke_user(self, name: str, by: str) -> Literal["done", "unknown", "last lead"]:
        now = self._clock()
        with self._database.writing() as session:
            known = session.get(User, name)
            if known is None or known.revoked is not None:
                return "unknown"
            leads = session.scalars(select(User.name).where(User.role == "lead", User.revoked.is_(None))).all()
            if list(leads) == [name]:
                return "last lead"
            known.revoked = now
            session.execute(delete(Login).where(Login.user == name))
            _note(session, now, by, "user revoked", name=name)
        return "done"

    def user(self, token: str) -> User | None:
        digest = hashed(token)
        with self._database.reading() as session:
            found = session.scalar(select(User).where(User.token == digest, User.revoked.is_(None)))
        return found if found is not None and hmac.compare_digest(found.token, digest) else None

    def login(self, user: User) -> str:
        """A browser's cookie."""
        cookie, now = fresh(), self._clock()
        with self._database.writing() as session:
            session.execute(delete(Login).where(Login.expires <= now))
            session.add(Login(cookie=hashed(cookie), user=user.name, expires=now + SESSION))
            _note(session, now, user.name, "login")
        return cookie

    def session(self, cookie: str) -> User | None:
        digest, now = hashed(cookie), self._clock()
        with self._database.reading() as session:
            login = session.get(Login, digest)
            if login is None or login.expires <= now or not hmac.compare_digest(login.cookie, digest):
                return None
            return session.scalar(select(User).where(User.name == login.user, User.revoked.is_(None)))

    def logout(self, cookie: str) -> None:
        with self._database.writing() as session:
            session.execute(delete(Login).where(Login.cookie == hashed(cookie)))

    # sites

    def invite(self, site: str, hours: float, by: str) -> tuple[str, datetime]:
        """A one-time token and when it expires; earlier ones for the same name are void."""
        if site.lower() in RESERVED:
            raise BadService(f"a site cannot be called {site!r}: FLARE's server goes by that name; choose another")
        token, now = fresh(), self._clock()
        until = now + timedelta(hours=hours)
        with self._database.writing() as session:
            session.execute(
                update(Invitation).where(Invitation.site == site, Invitation.used.is_(None)).values(expires=now)
            )
            session.add(Invitation(token=hashed(token), site=site, made_by=by, created=now, expires=until))
            _note(session, now, by, "invitation", site=site, expires=until.isoformat())
        return token, until

    def invited(self, token: str, site: str) -> bool:
        with self._database.reading() as session:
            return _good(session.get(Invitation, hashed(token)), token, site, self._clock()) is not None

    def enrol(self, token: str, who: Newcomer) -> str | NotEnrolled:
        """The site's credential. Of two that race with one token, one gets in."""
        credential, now = fresh(), self._clock()
        with self._database.writing() as session:
            invitation = _good(session.get(Invitation, hashed(token)), token, who.site, now)
            if invitation is None:
                return NotEnrolled(
                    "the invitation is wrong, used, expired or for another name; ask the lead for a new one"
                )
            known = session.get(Site, who.site)
            if known is not None and known.key != who.key and not known.removed:
                return NotEnrolled(
                    f"{who.site} is enrolled with another key; if the site has a new one, the lead removes it first and "
                    "invites it again"
                )
            twin = session.scalar(select(Site.name).where(Site.key == who.key, Site.name != who.site))
            if twin is not None:
                return NotEnrolled("this agent's key is enrolled under another name; a site has one name")
            invitation.used = now
            session.merge(
                Site(name=who.site, key=who.key, officer=who.officer, credential=hashed(credential), enrolled=now,
                     version=who.version, status={}, last_seen=now, left=None, removed=False)
            )  # fmt: skip
            _note(session, now, who.site, "enrolled again" if known else "enrolled", version=who.version)
        return credential

    def site(self, credential: str) -> Site | None:
        digest = hashed(credential)
        with self._database.reading() as session:
            found = session.scalar(select(Site).where(Site.credential == digest, Site.left.is_(None)))
        return found if found is not None and hmac.compare_digest(found.credential, digest) else None


def _good(invitation: Invitation | None, token: str, site: str, now: datetime) -> Invitation | None:
    if invitation is None or not hmac.compare_digest(invitation.token, hashed(token)):
        return None
    fits = invitation.site == site and invitation.used is None and now < invitation.expires
    return invitation if fits else None


def _note(session: Session, now: datetime, who: str, what: str, **about: str) -> None:
    session.add(Event(time=now, who=who, what=what, about=about))

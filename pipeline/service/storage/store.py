"""What the coordinator remembers: sites, runs, approvals, receipts and a journal. Every method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from pipeline.core.errors import BadRun
from pipeline.service.runtime.run_states import ACTIONS, OVER, NotNow, State, Want
from pipeline.service.storage.accounts import Accounts
from pipeline.service.storage.database import Approval, Database, Event, Member, ReceiptNote, Run, Site
from privacy.ledger.ledger import Clock, utc_now
from privacy.ledger.records import Receipt


class Store:
    def __init__(self, url: str, clock: Clock = utc_now) -> None:
        self.clock = clock
        self._database = Database(url)
        self.accounts = Accounts(self._database, clock)

    def close(self) -> None:
        self._database.close()

    # sites

    def sites(self) -> list[Site]:
        with self._database.reading() as session:
            return list(session.scalars(select(Site).order_by(Site.name)))

    def seen(self, site: str, status: Mapping[str, Any], version: str = "") -> None:
        with self._database.writing() as session:
            row = _site(session, site)
            row.last_seen, row.status, row.version = self.clock(), dict(status), version or row.version

    def leave(self, site: str, by: str = "", removed: bool = False) -> bool:
        """Its credential is void from now on. `removed` by the lead, the name is free for another key."""
        now = self.clock()
        with self._database.writing() as session:
            row = session.get(Site, site)
            if row is None or (row.left is not None and row.removed >= removed):
                return False
            row.left, row.removed = row.left or now, removed
            _note(session, now, by or site, "site removed" if removed else "site left", site=site)
        return True

    # runs

    def runs(self) -> list[Run]:
        """The newest first."""
        with self._database.reading() as session:
            return list(session.scalars(select(Run).order_by(Run.created.desc(), Run.id)))

    def run(self, id: str) -> Run | None:
        with self._database.reading() as session:
            return session.get(Run, id)

    def add_run(
        self,
        id: str,
        *,
        name: str,
        strategy: str,
        rounds: int,
        digest: str,
        fewest: int,
        sites: Mapping[str, str],
        by: str,
    ) -> Run:
        """`sites`: the agents' public keys, in the strategy's order."""
        now = self.clock()
        run = Run(id=id, name=name, strategy=strategy, rounds=rounds, digest=digest, fewest=fewest, made_by=by,
                  state="offered", want="run", created=now)  # fmt: skip
        run.members = [Member(site=site, place=place, key=key) for place, (site, key) in enumerate(sites.items())]
        with self._database.writing() as session:
            session.add(run)
            _note(session, now, by, "run offered", run=id, sites=list(sites), fewest=fewest)
        return run

    def want(self, id: str, want: Want) -> None:
        with self._database.writing() as session:
            _run(session, id).want = want

    def state(self, id: str, state: State, reason: str = "", only: Collection[str] | None = None) -> bool:
        """`only`: unless the run is in one of these states any more, because a lead was quicker, nothing is changed."""
        with self._database.writing() as session:
            run = _run(session, id)
            if only is not None and run.state not in only:
                return False
            self._move(session, run, state, "coordinator", reason)
        return True

    def act(self, id: str, action: str, by: str, tell: Callable[[Run], None] = lambda run: None) -> Run:
        """What a lead asks for. `tell` the run's process before anybody sees the new state."""
        with self._database.writing() as session:
            run = _run(session, id)
            after = ACTIONS[action].after(action, id, run.state)
            if action == "begin" and after is not None:
                ready = _approved(session, run, self.clock())
                if len(ready) < run.fewest:
                    raise NotNow(
                        f"{id} needs the approval of {run.fewest} sites and has {len(ready)}; wait for more officers, or "
                        "offer it anew with a smaller `fewest`"
                    )
            if action == "resume" and after is not None and run.started is None:
                after = "offered"
            if after is not None:
                run.want = ACTIONS[action].want
                tell(run)
                self._move(session, run, after, by, "")
            return run

    def _move(self, session: Session, run: Run, state: State, by: str, reason: str) -> None:
        now = self.clock()
        if state in ("starting", "running") and run.started is None:
            run.started = now
        run.finished = (run.finished or now) if state in OVER else None
        if state != run.state:
            _note(session, now, by, f"run {state}", run=run.id, **({"reason": reason} if reason else {}))
        run.state, run.reason = state, reason

    # approvals

    def approvals(self) -> list[Approval]:
        with self._database.reading() as session:
            return list(session.scalars(select(Approval)))

    def approve(self, run: str, site: str, digest: str, at: datetime, expires: datetime | None, officer: str) -> bool:
        """Whether it is for this run as offered to this site. Told again, it changes nothing; all there, the run begins."""
        with self._database.writing() as session:
            offered, member = session.get(Run, run), session.get(Member, (run, site))
            agent = _site(session, site)
            if offered is None or member is None or offered.digest != digest or member.key != agent.key:
                return False
            row = session.get(Approval, (run, site))
            if row is None or row.at < at:
                fresh = {"key": agent.key, "officer": officer, "at": at, "expires": expires}
                session.merge(Approval(run=run, site=site, **fresh))
                _note(session, self.clock(), site, "approved", run=run, officer=officer)
                session.flush()
            if offered.state == "offered" and _approved(session, offered, self.clock()) == set(offered.sites):
                self._move(session, offered, "starting", "coordinator", "")
        return True

    def withdraw(self, run: str, site: str, at: datetime) -> bool:
        with self._database.writing() as session:
            row = session.get(Approval, (run, site))
            if row is None:
                return False
            if row.withdrawn is None or row.withdrawn < at:
                row.withdrawn = at
                _note(session, self.clock(), site, "approval withdrawn", run=run)
        return True

    def approved(self, run: str) -> set[str]:
        """Sites whose approval is there, has not expired and was not withdrawn, and which have not left."""
        with self._database.reading() as session:
            return _approved(session, _run(session, run), self.clock())

    # receipts and the journal

    def note_receipt(self, receipt: Receipt) -> None:
        with self._database.writing() as session:
            session.merge(ReceiptNote(site=receipt.site, dataset_id=receipt.dataset_id, index=receipt.index,
                                      head=receipt.head, time=receipt.time))  # fmt: skip

    def receipts(self) -> list[ReceiptNote]:
        with self._database.reading() as session:
            return list(session.scalars(select(ReceiptNote).order_by(ReceiptNote.site, ReceiptNote.index)))

    def note(self, who: str, what: str, **about: Any) -> None:
        with self._database.writing() as session:
            _note(session, self.clock(), who, what, **about)

    def events(self, last: int = 200) -> list[Event]:
        with self._database.reading() as session:
            return list(session.scalars(select(Event).order_by(Event.id.desc()).limit(last)))[::-1]


def _approved(session: Session, run: Run, now: datetime) -> set[str]:
    rows = session.execute(
        select(Approval, Member, Site)
        .join(Member, (Member.run == Approval.run) & (Member.site == Approval.site))
        .join(Site, Site.name == Approval.site)
        .where(Approval.run == run.id, Site.left.is_(None))
    )
    return {a.site for a, member, site in rows if a.stands(now) and a.key == member.key == site.key}


def _run(session: Session, id: str) -> Run:
    if (run := session.get(Run, id)) is None:
        raise BadRun(f"there is no run {id!r}; `hemofed coordinator status` lists them")
    return run


def _site(session: Session, name: str) -> Site:
    if (site := session.get(Site, name)) is None:
        raise BadRun(f"no site {name!r} is enrolled; `hemofed coordinator invite` asks one to join")
    return site


def _note(session: Session, now: datetime, who: str, what: str, **about: Any) -> None:
    session.add(Event(time=now, who=who, what=what, about=about))

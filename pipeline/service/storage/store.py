"""The coordinator's database: sites, runs, approvals, receipts and a journal. Every method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from pipeline.core.errors import RunFolderError
from pipeline.records.run_control import DesiredState
from pipeline.service.runtime.run_states import (
    RUN_ACTIONS,
    TERMINAL_STATES,
    InvalidStateError,
    LifecycleState,
)
from pipeline.service.storage.accounts import AccountStore
from pipeline.service.storage.database import ApprovalRow, Database, EventRow, ReceiptRow, RunRow, RunSiteRow, SiteRow
from privacy.ledger.ledger import Clock, utc_now
from privacy.ledger.records import LedgerReceipt


class CoordinatorStore:
    """`url`: of SQLAlchemy, such as sqlite:///PATH."""

    def __init__(self, url: str, clock: Clock = utc_now) -> None:
        self.clock = clock
        self._database = Database(url)
        self.accounts = AccountStore(self._database, clock)

    def close(self) -> None:
        self._database.close()

    # sites

    def list_sites(self) -> list[SiteRow]:
        with self._database.read_session() as session:
            return list(session.scalars(select(SiteRow).order_by(SiteRow.name)))

    def record_heartbeat(self, site: str, status: Mapping[str, Any], version: str = "") -> None:
        with self._database.write_session() as session:
            row = _require_site(session, site)
            row.last_seen, row.status, row.version = self.clock(), dict(status), version or row.version

    def record_departure(self, site: str, actor: str = "", removed: bool = False) -> bool:
        """Voids the site's credential. `removed`: by the lead, so that a site with another key may take the name.

        False if nothing changed.
        """
        now = self.clock()
        with self._database.write_session() as session:
            row = session.get(SiteRow, site)
            if row is None or (row.left is not None and row.removed >= removed):
                return False
            row.left, row.removed = row.left or now, removed
            _record_event(session, now, actor or site, "site removed" if removed else "site left", site=site)
        return True

    # runs

    def list_runs(self) -> list[RunRow]:
        """Newest first."""
        with self._database.read_session() as session:
            return list(session.scalars(select(RunRow).order_by(RunRow.created.desc(), RunRow.id)))

    def find_run(self, id: str) -> RunRow | None:
        with self._database.read_session() as session:
            return session.get(RunRow, id)

    def add_run(
        self,
        id: str,
        *,
        name: str,
        strategy: str,
        rounds: int,
        digest: str,
        min_sites: int,
        sites: Mapping[str, str],
        actor: str,
    ) -> RunRow:
        """`sites`: the agents' public keys, in the strategy's order."""
        now = self.clock()
        run = RunRow(
            id=id,
            name=name,
            strategy=strategy,
            rounds=rounds,
            digest=digest,
            min_sites=min_sites,
            created_by=actor,
            state="offered",
            desired_state="run",
            created=now,
        )
        run.run_sites = [
            RunSiteRow(site=site, position=position, key=key) for position, (site, key) in enumerate(sites.items())
        ]
        with self._database.write_session() as session:
            session.add(run)
            _record_event(session, now, actor, "run offered", run=id, sites=list(sites), min_sites=min_sites)
        return run

    def set_desired_state(self, id: str, desired_state: DesiredState) -> None:
        with self._database.write_session() as session:
            _require_run(session, id).desired_state = desired_state

    def set_run_state(
        self, id: str, state: LifecycleState, reason: str = "", expected_states: Collection[str] | None = None
    ) -> bool:
        """False, without a change, if the run is not in one of `expected_states`, for example because a lead acted first."""
        with self._database.write_session() as session:
            run = _require_run(session, id)
            if expected_states is not None and run.state not in expected_states:
                return False
            self._change_state(session, run, state, "coordinator", reason)
        return True

    def apply_action(
        self, id: str, action: str, actor: str, on_change: Callable[[RunRow], None] = lambda run: None
    ) -> RunRow:
        """Applies a lead's action (see run_states.py). `on_change` is called before the new state becomes visible."""
        with self._database.write_session() as session:
            run = _require_run(session, id)
            next_state = RUN_ACTIONS[action].next_state(action, id, run.state)
            if action == "begin" and next_state is not None:
                approved_sites = _approved_sites(session, run, self.clock())
                if len(approved_sites) < run.min_sites:
                    raise InvalidStateError(
                        f"{id} needs the approval of {run.min_sites} sites and has {len(approved_sites)}; wait for more "
                        "approvals, or offer the study again with a smaller min_sites"
                    )
            if action == "resume" and next_state is not None and run.started is None:
                next_state = "offered"
            if next_state is not None:
                run.desired_state = RUN_ACTIONS[action].desired_state
                on_change(run)
                self._change_state(session, run, next_state, actor, "")
            return run

    def _change_state(self, session: Session, run: RunRow, state: LifecycleState, actor: str, reason: str) -> None:
        now = self.clock()
        if state in ("starting", "running") and run.started is None:
            run.started = now
        run.finished = (run.finished or now) if state in TERMINAL_STATES else None
        if state != run.state:
            _record_event(session, now, actor, f"run {state}", run=run.id, **({"reason": reason} if reason else {}))
        run.state, run.reason = state, reason

    # approvals

    def list_approvals(self) -> list[ApprovalRow]:
        with self._database.read_session() as session:
            return list(session.scalars(select(ApprovalRow)))

    def record_approval(
        self, run: str, site: str, digest: str, approved_at: datetime, expires: datetime | None, officer: str
    ) -> bool:
        """Records an approval; the last missing one starts the run. An approval that is known changes nothing.

        False if it is not for this run as it was offered to this site.
        """
        with self._database.write_session() as session:
            offered_run, run_site = session.get(RunRow, run), session.get(RunSiteRow, (run, site))
            site_row = _require_site(session, site)
            if offered_run is None or run_site is None or offered_run.digest != digest or run_site.key != site_row.key:
                return False
            row = session.get(ApprovalRow, (run, site))
            if row is None or row.approved_at < approved_at:
                fields = {"key": site_row.key, "officer": officer, "approved_at": approved_at, "expires": expires}
                session.merge(ApprovalRow(run=run, site=site, **fields))
                _record_event(session, self.clock(), site, "approved", run=run, officer=officer)
                session.flush()
            approved_sites = _approved_sites(session, offered_run, self.clock())
            if offered_run.state == "offered" and approved_sites == set(offered_run.sites):
                self._change_state(session, offered_run, "starting", "coordinator", "")
        return True

    def record_revocation(self, run: str, site: str, revoked_at: datetime) -> bool:
        """False if the site has not approved the run."""
        with self._database.write_session() as session:
            row = session.get(ApprovalRow, (run, site))
            if row is None:
                return False
            if row.revoked_at is None or row.revoked_at < revoked_at:
                row.revoked_at = revoked_at
                _record_event(session, self.clock(), site, "approval revoked", run=run)
        return True

    def approved_sites(self, run: str) -> set[str]:
        """Sites with an approval that has not expired and was not revoked, and that have not left."""
        with self._database.read_session() as session:
            return _approved_sites(session, _require_run(session, run), self.clock())

    # receipts and the journal

    def record_receipt(self, receipt: LedgerReceipt) -> None:
        with self._database.write_session() as session:
            session.merge(
                ReceiptRow(
                    site=receipt.site,
                    dataset_id=receipt.dataset_id,
                    index=receipt.index,
                    head=receipt.head,
                    time=receipt.time,
                )
            )

    def list_receipts(self) -> list[ReceiptRow]:
        with self._database.read_session() as session:
            return list(session.scalars(select(ReceiptRow).order_by(ReceiptRow.site, ReceiptRow.index)))

    def record_event(self, actor: str, action: str, **details: Any) -> None:
        with self._database.write_session() as session:
            _record_event(session, self.clock(), actor, action, **details)

    def list_events(self, count: int = 200) -> list[EventRow]:
        """The last events, oldest first."""
        with self._database.read_session() as session:
            return list(session.scalars(select(EventRow).order_by(EventRow.id.desc()).limit(count)))[::-1]


def _approved_sites(session: Session, run: RunRow, now: datetime) -> set[str]:
    rows = session.execute(
        select(ApprovalRow, RunSiteRow, SiteRow)
        .join(RunSiteRow, (RunSiteRow.run == ApprovalRow.run) & (RunSiteRow.site == ApprovalRow.site))
        .join(SiteRow, SiteRow.name == ApprovalRow.site)
        .where(ApprovalRow.run == run.id, SiteRow.left.is_(None))
    )
    return {
        approval.site
        for approval, run_site, site_row in rows
        if approval.is_valid(now) and approval.key == run_site.key == site_row.key
    }


def _require_run(session: Session, id: str) -> RunRow:
    if (run := session.get(RunRow, id)) is None:
        raise RunFolderError(f"there is no run {id!r}; `hemofed coordinator status` lists the runs")
    return run


def _require_site(session: Session, name: str) -> SiteRow:
    if (site := session.get(SiteRow, name)) is None:
        raise RunFolderError(f"no site {name!r} is enrolled; invite it with `hemofed coordinator invite {name}`")
    return site


def _record_event(session: Session, now: datetime, actor: str, action: str, **details: Any) -> None:
    session.add(EventRow(time=now, actor=actor, action=action, details=details))

"""Runs, sites, approvals and users as JSON of the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults
from pipeline.records.scores import HeadlineScore, MetricsBySplit
from pipeline.service.runtime.run_files import RunFiles
from pipeline.service.runtime.run_states import TERMINAL_STATES
from pipeline.service.storage.database import ApprovalRow, RunRow, SiteRow, UserRow
from pipeline.service.storage.store import CoordinatorStore
from privacy.ledger import keys

CONNECTED_WITHIN = timedelta(seconds=15)
ResponseJson = dict[str, Any]


@dataclass(frozen=True)
class ApiSerializers:
    """Reads the database and the run folders, and returns JSON."""

    store: CoordinatorStore
    run_files: RunFiles

    def list_runs(self) -> list[ResponseJson]:
        return self._serialize_runs(self.store.list_runs())

    def find_run(self, id: str) -> ResponseJson | None:
        row = self.store.find_run(id)
        return None if row is None else self._serialize_runs([row])[0]

    def list_sites(self) -> list[ResponseJson]:
        now = self.store.clock()
        return [
            {
                "site": site.name,
                "fingerprint": keys.fingerprint(bytes.fromhex(site.key)),
                "officer": keys.fingerprint(bytes.fromhex(site.officer)),
                "enrolled": format_time(site.enrolled),
                "last_seen": format_time(site.last_seen),
                "connected": is_connected(site, now),
                "version": site.version,
                "status": site.status,
                "left": format_time(site.left),
            }
            for site in self.store.list_sites()
        ]

    def list_approvals(self) -> list[ResponseJson]:
        """One item per site and run; runs that have ended have no pending approvals."""
        approval_by_site, now = _index_approvals(self.store.list_approvals()), self.store.clock()
        return [
            {
                "run": run.id,
                "site": site,
                "state": approval_state(row, now),
                "at": row and format_time(row.approved_at),
                "expires": row and format_time(row.expires),
            }
            for run in self.store.list_runs()
            for site in run.sites
            for row in [approval_by_site.get((run.id, site))]
            if row is not None or run.state not in TERMINAL_STATES
        ]

    def _serialize_runs(self, runs: Iterable[RunRow]) -> list[ResponseJson]:
        approval_by_site, now = _index_approvals(self.store.list_approvals()), self.store.clock()
        site_by_name = {site.name: site for site in self.store.list_sites()}
        return [self._serialize_run(run, approval_by_site, site_by_name, now) for run in runs]

    def _serialize_run(
        self,
        run: RunRow,
        approval_by_site: Mapping[tuple[str, str], ApprovalRow],
        site_by_name: Mapping[str, SiteRow],
        now: datetime,
    ) -> ResponseJson:
        rounds, live = self.run_files.load_rounds(run.id), self.run_files.load_live_status(run.id)
        return {
            "id": run.id,
            "name": run.name,
            "strategy": run.strategy,
            "state": run.state,
            "desired_state": run.desired_state,
            "reason": run.reason,
            "created": format_time(run.created),
            "started": format_time(run.started),
            "finished": format_time(run.finished),
            "round": rounds[-1].round if rounds else 0,
            "rounds": run.rounds,
            "min_sites": run.min_sites,
            "sites": [
                _serialize_run_site(approval_by_site.get((run.id, name)), site_by_name[name], now) for name in run.sites
            ],
            "live": live and live.to_dict(),
            "headline": _serialize_headline(self.run_files.load_results(run.id), rounds),
        }


def _serialize_headline(results: RunResults | None, rounds: Sequence[RoundRecord]) -> ResponseJson | None:
    """Of the test split after the run, before that of the last round that was evaluated."""
    test: list[MetricsBySplit] = [{"test": results.test}] if results else []
    for metrics_by_split in (*test, *(record.metrics for record in reversed(rounds))):
        headline = HeadlineScore.select(metrics_by_split)
        if headline is not None and headline.value is not None:
            return {"split": headline.split, "metric": headline.metric, "value": headline.value}
    return None


def serialize_user(user: UserRow) -> ResponseJson:
    return {
        "name": user.name,
        "role": user.role,
        "created": format_time(user.created),
        "revoked": format_time(user.revoked),
    }


def approval_state(row: ApprovalRow | None, now: datetime) -> str:
    if row is None:
        return "pending"
    return "revoked" if row.is_revoked else "approved" if row.is_valid(now) else "expired"


def is_connected(site: SiteRow, now: datetime) -> bool:
    return site.left is None and site.last_seen is not None and now - site.last_seen <= CONNECTED_WITHIN


def format_time(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="milliseconds")


def _serialize_run_site(row: ApprovalRow | None, site: SiteRow, now: datetime) -> ResponseJson:
    return {
        "site": site.name,
        "approved": format_time(row.approved_at) if row else None,
        "expires": format_time(row.expires) if row else None,
        "revoked": format_time(row.revoked_at) if row and row.is_revoked else None,
        "connected": is_connected(site, now),
        "last_seen": format_time(site.last_seen),
    }


def _index_approvals(rows: Iterable[ApprovalRow]) -> dict[tuple[str, str], ApprovalRow]:
    return {(row.run, row.site): row for row in rows}

"""Runs, sites and approvals as the API shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pipeline.service.runtime.run_files import Folders
from pipeline.service.runtime.run_states import OVER
from pipeline.service.storage.database import Approval, Run, Site, User
from pipeline.service.storage.store import Store
from privacy.ledger import keys

CONNECTED = timedelta(seconds=15)
Shown = dict[str, Any]


@dataclass(frozen=True)
class Views:
    store: Store
    folders: Folders

    def runs(self) -> list[Shown]:
        return self._runs(self.store.runs())

    def run(self, id: str) -> Shown | None:
        found = self.store.run(id)
        return None if found is None else self._runs([found])[0]

    def sites(self) -> list[Shown]:
        now = self.store.clock()
        return [
            {
                "site": site.name,
                "fingerprint": keys.fingerprint(bytes.fromhex(site.key)),
                "officer": keys.fingerprint(bytes.fromhex(site.officer)),
                "enrolled": iso(site.enrolled),
                "last_seen": iso(site.last_seen),
                "connected": connected(site, now),
                "version": site.version,
                "status": site.status,
                "left": iso(site.left),
            }
            for site in self.store.sites()
        ]

    def approvals(self) -> list[Shown]:
        """Of a run that is over nobody waits for an approval any more."""
        given, now = _by_place(self.store.approvals()), self.store.clock()
        shown = [
            {"run": run.id, "site": site, "state": standing(row, now), "at": row and iso(row.at), "expires": row and iso(row.expires)}
            for run in self.store.runs()
            for site in run.sites
            for row in [given.get((run.id, site))]
            if row is not None or run.state not in OVER
        ]  # fmt: skip
        return shown

    def _runs(self, runs: Iterable[Run]) -> list[Shown]:
        given, now = _by_place(self.store.approvals()), self.store.clock()
        sites = {site.name: site for site in self.store.sites()}
        return [self._run(run, given, sites, now) for run in runs]

    def _run(
        self, run: Run, given: Mapping[tuple[str, str], Approval], sites: Mapping[str, Site], now: datetime
    ) -> Shown:
        rounds = self.folders.rounds(run.id)
        return {
            "id": run.id,
            "name": run.name,
            "strategy": run.strategy,
            "state": run.state,
            "want": run.want,
            "reason": run.reason,
            "created": iso(run.created),
            "started": iso(run.started),
            "finished": iso(run.finished),
            "round": rounds[-1]["round"] if rounds else 0,
            "rounds": run.rounds,
            "fewest": run.fewest,
            "sites": [_member(given.get((run.id, name)), sites[name], now) for name in run.sites],
            "live": self.folders.json(run.id, "live.json"),
            "headline": self._headline(run.id, rounds),
        }

    def _headline(self, run: str, rounds: list[Shown]) -> Shown | None:
        """Of the test, once it was looked at; else of the last round that was judged."""
        results = self.folders.json(run, "results.json") or {}
        records = [{"metrics": {"test": results.get("test")}}, *reversed(rounds)]
        for record in records:
            for split in ("val", "test", "train"):
                entry = record.get("metrics", {}).get(split) or {}
                seen = entry.get("coordinator") or entry.get("pooled") or {}
                metric = "positive_auroc" if "positive_auroc" in seen else "accuracy"
                if seen.get(metric) is not None:
                    return {"split": split, "metric": metric, "value": seen[metric]}
        return None


def user_view(user: User) -> Shown:
    return {"name": user.name, "role": user.role, "created": iso(user.created), "revoked": iso(user.revoked)}


def standing(row: Approval | None, now: datetime) -> str:
    if row is None:
        return "pending"
    return "withdrawn" if row.taken_back else "approved" if row.stands(now) else "expired"


def connected(site: Site, now: datetime) -> bool:
    return site.left is None and site.last_seen is not None and now - site.last_seen <= CONNECTED


def iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="milliseconds")


def _member(row: Approval | None, site: Site, now: datetime) -> Shown:
    return {
        "site": site.name,
        "approved": iso(row.at) if row else None,
        "expires": iso(row.expires) if row else None,
        "withdrawn": iso(row.withdrawn) if row and row.taken_back else None,
        "connected": connected(site, now),
        "last_seen": iso(site.last_seen),
    }


def _by_place(rows: Iterable[Approval]) -> dict[tuple[str, str], Approval]:
    return {(row.run, row.site): row for row in rows}

"""`hemofed demo hospitals`: a coordinator, three hospitals and a dashboard on this machine, and a study across them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.cli.local_federation import Miniature, told
from pipeline.cli.output import console, print_json
from pipeline.core.errors import BadService
from pipeline.runs.federated import check_hospital_study
from pipeline.study.schema import load_study
from pipeline.study.toml_file import find_study, parse_override

SITES = ("site-01", "site-02", "site-03")


def hospitals_command(study: str, sets: list[str], keep: Path | None, stay: bool, json: bool) -> None:
    check_hospital_study(load_study(find_study(study), dict(map(parse_override, sets))))
    say: Callable[[str], None] = (lambda text: None) if json else (lambda text: console.print(text, soft_wrap=True))
    with _folder(keep) as folder, contextlib.closing(Miniature(folder)) as small:
        small.coordinate()
        say(f"coordinator and dashboard: {small.url}\nthe lead's token for it: {small.token}")
        for site in SITES:
            small.enrol(site, "--plays", site)
            say(f"{site}: has made its keys and enrolled; its agent is running")
        run = small.offer(study, sets)
        say(f"{run} is offered; each site's officer reads it in plain words and approves")
        for site in SITES:
            small.approve(run, site)
        end = _watch(small, run, say)
        ledgers = {site: told("site", "ledger", "verify", folder / site)["ok"] for site in SITES}
        small.until(lambda: all(any((folder / s / "models").rglob("*.safetensors")) for s in SITES), "the models")
        if json:
            print_json(end | {"ledgers": ledgers, "folder": str(folder) if keep else None})
            return
        say(f"{run} is finished; its model has reached all three hospitals, and their ledgers verify")
        if stay:
            say(f"the dashboard stays at {small.url} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)


def _watch(small: Miniature, run: str, say: Callable[[str], None]) -> dict[str, Any]:
    last, state = -1, ""
    while state not in ("finished", "failed", "stopped"):
        seen = small.look(run)
        if seen["state"] != state:
            state = seen["state"]
            say(f"{run}: {state}" + (f" ({seen['reason']})" if seen["reason"] else ""))
        if seen["headline"] and seen["round"] is not None and seen["round"] > last:
            last, best = seen["round"], seen["headline"]
            say(f"  round {last} of {seen['rounds']}: {best['split']} {best['metric']} {best['value']:.4f}")
        time.sleep(0.5)
    if state != "finished":
        raise BadService(f"{run} {state}: {seen['reason']}")
    return seen


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="hemofed-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)

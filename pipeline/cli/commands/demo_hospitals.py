"""`hemofed demo hospitals`: runs a study with a coordinator, a dashboard and three hospitals on this machine."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.cli.local_federation import LocalFederation, run_cli_json
from pipeline.cli.output import console, print_json
from pipeline.core.errors import ServiceError
from pipeline.runs.federated import validate_federated_study
from pipeline.study.toml_file import find_study, load_study, parse_override

DEMO_SITES = ("site-01", "site-02", "site-03")


def demo_hospitals_command(
    study: str, overrides: list[str], keep_folder: Path | None, keep_serving: bool, json: bool
) -> None:
    validate_federated_study(load_study(find_study(study), dict(map(parse_override, overrides))))
    print_line: Callable[[str], None] = (
        (lambda text: None) if json else (lambda text: console.print(text, soft_wrap=True))
    )
    with _demo_folder(keep_folder) as folder, contextlib.closing(LocalFederation(folder)) as federation:
        federation.start_coordinator()
        print_line(f"coordinator and dashboard: {federation.url}\nthe lead's token for it: {federation.token}")
        for site in DEMO_SITES:
            federation.enrol_site(site, "--simulate-site", site)
            print_line(f"{site}: keys created, enrolled; its agent is running")
        run = federation.offer_study(study, overrides)
        print_line(f"{run} is offered; the officer of each site reads the summary and approves it")
        for site in DEMO_SITES:
            federation.approve_run(run, site)
        final_run = _watch_run(federation, run, print_line)
        ledgers = {site: run_cli_json("site", "ledger", "verify", folder / site)["ok"] for site in DEMO_SITES}
        federation.wait_until(
            lambda: all(any((folder / s / "models").rglob("*.safetensors")) for s in DEMO_SITES), "the models"
        )
        if json:
            print_json(final_run | {"ledgers": ledgers, "folder": str(folder) if keep_folder else None})
            return
        print_line(f"{run} is finished; all three hospitals have the model, and their ledgers are valid")
        if keep_serving:
            print_line(f"the dashboard runs at {federation.url} until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)


def _watch_run(federation: LocalFederation, run: str, print_line: Callable[[str], None]) -> dict[str, Any]:
    last_round, state = -1, ""
    while state not in ("finished", "failed", "stopped"):
        run_info = federation.get_run(run)
        if run_info["state"] != state:
            state = run_info["state"]
            print_line(f"{run}: {state}" + (f" ({run_info['reason']})" if run_info["reason"] else ""))
        if run_info["headline"] and run_info["round"] is not None and run_info["round"] > last_round:
            last_round, headline = run_info["round"], run_info["headline"]
            print_line(
                f"  round {last_round} of {run_info['rounds']}: {headline['split']} {headline['metric']} {headline['value']:.4f}"
            )
        time.sleep(0.5)
    if state != "finished":
        raise ServiceError(f"{run} {state}: {run_info['reason']}")
    return run_info


@contextlib.contextmanager
def _demo_folder(keep_folder: Path | None) -> Iterator[Path]:
    if keep_folder is not None:
        keep_folder.mkdir(parents=True, exist_ok=True)
        yield keep_folder
        return
    with tempfile.TemporaryDirectory(prefix="hemofed-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)

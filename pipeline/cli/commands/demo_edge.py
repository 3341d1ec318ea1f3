"""`hemofed demo edge`: runs the commands that lead from a finished run to a slide report."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from pipeline.cli.output import console
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, RunFolderError
from pipeline.core.files import free_path
from pipeline.records.run_results import RunResults
from pipeline.records.sites_record import SitesRecord

SIGNER_NAME = "study lead"


def demo_edge_command(run: Path | None, out: Path | None) -> None:
    run = run or _newest_run(Path("runs"))
    out = free_path(out or run / "edge")
    bundle, slide = out / "bundle", out / "slide"
    # the demonstration has its own trust store and calibrations; the user's are not changed
    env = os.environ | {
        "HEMOFED_TRUST": str((out / "trust.json").resolve()),
        "HEMOFED_LOCAL_CALIBRATIONS": str((out / "local-calibrations").resolve()),
    }
    _run_hemofed(env, "export", run, "-o", bundle, "--int8")
    _run_hemofed(env, "trust", "add", SIGNER_NAME, bundle)
    _run_hemofed(env, "demo", "slide", slide, "--seed", "3", *_scanner_options(run))
    _run_hemofed(env, "predict", bundle, slide, "-o", out / "report")
    console.print(
        f"\nreport: {out / 'report' / 'report.html'}; to read slides in a browser: hemofed edge serve {bundle}",
        soft_wrap=True,
    )


def _scanner_options(run: Path) -> list[str]:
    """The scanner of the site with the most training examples, if the study has scanner skew."""
    from sites.population.feature_skew import ScannerSkew

    folder = RunFolder.open(run)
    skew, counts_by_site = folder.load_study().feature_skew, SitesRecord.read(folder.path).sites
    if not isinstance(skew, ScannerSkew):
        return []
    largest_index = max(range(len(counts_by_site)), key=lambda n: sum(list(counts_by_site.values())[n]["train"]))
    return ["--scanner", skew.profiles[largest_index % len(skew.profiles)]]


def _newest_run(runs: Path) -> Path:
    finished_runs = sorted(runs.glob(f"*/{RunResults.FILE_NAME}"), key=lambda p: p.stat().st_mtime)
    if not finished_runs:
        raise RunFolderError(f"{runs} contains no finished run; create one with `hemofed run`")
    return finished_runs[-1].parent


def _run_hemofed(env: dict[str, str], *arguments: object) -> None:
    argv = [str(argument) for argument in arguments]
    console.print(f"\n$ hemofed {shlex.join(argv)}", style="bold", soft_wrap=True)
    completed = subprocess.run([sys.executable, "-P", "-m", "hemofed", *argv], env=env, check=False)
    if completed.returncode:
        raise HemofedError(f"hemofed {argv[0]} failed with exit code {completed.returncode}; see the output above")

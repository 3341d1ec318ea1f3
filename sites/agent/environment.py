"""What the site's machine imposes on everything the agent starts: a proxy on the way out, and limits.

gRPC reads proxies otherwise than web clients do: only lower-case names, only http:// proxies, no `*` in no_proxy, and it
passes by one that it does not understand without a word. So the decision is made here, once, for both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from pipeline.core.errors import BadService
from sites.governance.settings import Limits

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # FLARE's processes at the site speak with each other
SECRETS = ("HEMOFED_INVITATION", "HEMOFED_TOKEN")
GB = 1e9


def proxy_for(url: str) -> str | None:
    """From HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case; none if the coordinator is reached directly."""
    host, proxies = urlsplit(url).hostname or "", getproxies_environment()
    found = proxies.get("https") or proxies.get("all")
    if not found or proxy_bypass_environment(host, proxies):
        return None
    whole = found if "://" in found else f"http://{found}"
    scheme = urlsplit(whole).scheme
    if scheme != "http":
        raise BadService(
            f"HTTPS_PROXY names a proxy that speaks {scheme}://, and training goes through http:// proxies only (they "
            "carry TLS unread); name such a one, or put the coordinator's host into NO_PROXY"
        )
    return whole


def environment(url: str, limits: Limits, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """All of it, for the FLARE client. The kit came from outside: no module is imported from where it lies."""
    kept = {k: v for k, v in (os.environ if base is None else base).items() if k not in SECRETS}
    return kept | {"PYTHONSAFEPATH": "1"} | _way_out(url) | _limits(limits)


def _way_out(url: str) -> dict[str, str]:
    proxy, host = proxy_for(url), urlsplit(url).hostname
    if proxy is None:
        return {"grpc_proxy": ""}  # also keeps it from taking https_proxy or http_proxy
    return {"grpc_proxy": proxy, "no_grpc_proxy": ",".join(name for name in LOOPBACK if name != host)}


def _limits(limits: Limits) -> dict[str, str]:
    cores = {} if limits.cores is None else dict.fromkeys(
        ("HEMOFED_CORES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(limits.cores)
    )  # fmt: skip
    gpu = {} if limits.gpu_memory_gb is None else {"HEMOFED_GPU_MEMORY_GB": f"{limits.gpu_memory_gb:g}"}
    return cores | gpu


def free_gb(home: Path) -> float:
    return shutil.disk_usage(home).free / GB


def no_room(home: Path, limits: Limits) -> str | None:
    """Why no work may begin."""
    if (free := free_gb(home)) >= limits.disk_gb:
        return None
    return (
        f"{home} has {free:.1f} GB left, and {limits.disk_gb:g} must stay free for work to begin; make room, or lower "
        "limits.disk_gb in site.toml"
    )

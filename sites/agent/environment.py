"""The environment of the agent's child processes: proxy and resource limits.

gRPC reads proxy variables differently from web clients: only lower-case names, only http:// proxies, no `*` in no_proxy,
and it silently ignores a proxy that it does not understand. This module decides once for both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from pipeline.core.errors import ServiceError
from sites.governance.settings import ResourceLimits

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")  # FLARE's processes at the site talk to each other
SECRET_VARIABLES = ("HEMOFED_INVITATION", "HEMOFED_TOKEN")
BYTES_PER_GB = 1e9


def proxy_for(url: str) -> str | None:
    """From HTTPS_PROXY, ALL_PROXY and NO_PROXY, in upper or lower case; None for a direct connection."""
    host, proxies = urlsplit(url).hostname or "", getproxies_environment()
    proxy = proxies.get("https") or proxies.get("all")
    if not proxy or proxy_bypass_environment(host, proxies):
        return None
    proxy_url = proxy if "://" in proxy else f"http://{proxy}"
    scheme = urlsplit(proxy_url).scheme
    if scheme != "http":
        raise ServiceError(
            f"HTTPS_PROXY has a {scheme}:// proxy, and FLARE's connection needs an http:// proxy (which forwards TLS "
            "unread); set such a proxy, or add the coordinator's host to NO_PROXY"
        )
    return proxy_url


def child_environment(url: str, limits: ResourceLimits, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The complete environment of FLARE's client. PYTHONSAFEPATH: Python imports no module from the working directory."""
    inherited = {k: v for k, v in (os.environ if base is None else base).items() if k not in SECRET_VARIABLES}
    return inherited | {"PYTHONSAFEPATH": "1"} | _proxy_variables(url) | _limit_variables(limits)


def _proxy_variables(url: str) -> dict[str, str]:
    proxy, host = proxy_for(url), urlsplit(url).hostname
    if proxy is None:
        return {"grpc_proxy": ""}  # also makes gRPC ignore https_proxy and http_proxy
    return {"grpc_proxy": proxy, "no_grpc_proxy": ",".join(name for name in LOOPBACK_HOSTS if name != host)}


def _limit_variables(limits: ResourceLimits) -> dict[str, str]:
    cores = (
        {}
        if limits.max_cores is None
        else dict.fromkeys(
            ("HEMOFED_CORES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(limits.max_cores)
        )
    )
    gpu = {} if limits.max_gpu_memory_gb is None else {"HEMOFED_GPU_MEMORY_GB": f"{limits.max_gpu_memory_gb:g}"}
    return cores | gpu


def free_disk_gb(home: Path) -> float:
    return shutil.disk_usage(home).free / BYTES_PER_GB


def find_disk_space_problem(home: Path, limits: ResourceLimits) -> str | None:
    """Why FLARE's client must not start; None if it may."""
    if (disk_free_gb := free_disk_gb(home)) >= limits.min_free_disk_gb:
        return None
    return (
        f"{home} has {disk_free_gb:.1f} GB left, and {limits.min_free_disk_gb:g} must stay free; make room, or lower "
        "limits.min_free_disk_gb in site.toml"
    )

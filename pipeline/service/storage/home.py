"""A coordinator's folder.

HOME/coordinator.toml     its name, and where sites reach it
HOME/key.pem              signs receipts of ledgers; HOME/receipts/ remembers them
HOME/ca.pem, ca.key       the federation's own certificate authority
HOME/web.crt, web.key     what the service shows to browsers and agents
HOME/hemofed.db           sites, runs, approvals (database.py)
HOME/runs/RUN/            a run folder each
HOME/lead.token           the first lead's token, readable by its owner alone
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import BadRun
from pipeline.core.files import write_atomically
from privacy.ledger import keys

PORT = 8443
LEAD = "lead"
HOST = re.compile(r"^(?!-)[A-Za-z0-9.:-]{1,253}$")  # a name or an address
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,47}$")
FILES = ("key.pem", "ca.pem", "ca.key", "web.crt", "web.key")


@dataclass(frozen=True)
class CoordinatorHome:
    path: Path
    name: str
    host: str
    port: int

    @classmethod
    def create(cls, path: Path, name: str, host: str, port: int = PORT) -> CoordinatorHome:
        """All of it or nothing: made beside the place, then moved there."""
        if not NAME.fullmatch(name):
            raise BadRun(f"a coordinator cannot be called {name!r}: up to 48 letters, digits, spaces, dots and dashes")
        if not HOST.fullmatch(host) or not 0 < port < 65536:
            raise BadRun(
                f"{host}:{port} is no address at which sites could reach the coordinator, e.g. fl.example.org:{PORT}"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadRun(f"{path} is not empty; name a new folder, or serve the one that is there")
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))  # mode 0700
        try:
            _fill(cls(draft, name, host, port))
            draft.replace(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls(path, name, host, port)

    @classmethod
    def open(cls, path: Path) -> CoordinatorHome:
        file = path / "coordinator.toml"
        if not file.is_file():
            raise BadRun(f"{path} is no coordinator's home; make one with `hemofed coordinator init {path}`")
        try:
            said = tomllib.loads(file.read_text("utf-8"))
            home = cls(path, str(said["name"]), str(said["host"]), int(said["port"]))
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise BadRun(f"{file} needs a name, a host and a port: {error}") from error
        if missing := [name for name in FILES if not (path / name).is_file()]:
            raise BadRun(f"{path} lacks {', '.join(missing)}; restore the home from its backup")
        return home

    @property
    def key(self) -> Ed25519PrivateKey:
        return keys.load(self.path / "key.pem")

    @property
    def url(self) -> str:
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def database(self) -> str:
        """Its URL."""
        return f"sqlite:///{self.path.absolute() / 'hemofed.db'}"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def receipts(self) -> Path:
        return self.path / "receipts"

    @property
    def log(self) -> Path:
        return self.path / "log" / "coordinator.jsonl"

    @property
    def token(self) -> Path:
        return self.path / "lead.token"


def _fill(home: CoordinatorHome) -> None:
    from pipeline.ops.certificates import Authority, write_private
    from pipeline.service.storage.store import Store

    path = home.path
    for folder in ("runs", "receipts", "log"):
        (path / folder).mkdir()
    keys.save(keys.generate(), path / "key.pem")
    shown = Authority.create(path, f"{home.name} CA").issue_server([home.host, "localhost", "127.0.0.1"])
    write_private(path / "web.key", shown.key.encode())
    write_atomically(path / "web.crt", shown.certificate.encode())
    umask = os.umask(0o077)  # SQLite makes its files by it
    try:
        store = Store(home.database)
    finally:
        os.umask(umask)
    token = store.accounts.add_user(LEAD, "lead", by="init")
    store.close()
    assert token is not None
    write_private(home.token, f"{token}\n".encode())
    lines = [f'name = "{home.name}"', f'host = "{home.host}"', f"port = {home.port}"]
    write_atomically(path / "coordinator.toml", ("\n".join(lines) + "\n").encode())

"""A coordinator's home folder.

HOME/coordinator.toml     its name, and the address at which sites reach it
HOME/key.pem              signs ledger receipts
HOME/receipts/            the last receipt of every ledger
HOME/officers.json        fingerprints of officers' keys (expected_officers.py)
HOME/ca.pem, ca.key       the federation's own certificate authority
HOME/web.crt, web.key     TLS certificate of the web service
HOME/hemofed.db           sites, runs, approvals (database.py)
HOME/runs/RUN/            one run folder per run
HOME/log/                 logs
HOME/lead.token           token of the first lead; only the file's owner can read it
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

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically
from privacy.ledger import keys

DEFAULT_PORT = 8443
LEAD_USER = "lead"
HOST_PATTERN = re.compile(r"^(?!-)[A-Za-z0-9.:-]{1,253}$")  # a host name or an IP address
NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,47}$")
HOME_FORMAT = 2  # of coordinator.toml, the database and all files of the home; format 1 did not name it
REQUIRED_FILES = ("key.pem", "ca.pem", "ca.key", "web.crt", "web.key")


@dataclass(frozen=True)
class CoordinatorHome:
    path: Path
    name: str
    host: str
    port: int

    @classmethod
    def create(cls, path: Path, name: str, host: str, port: int = DEFAULT_PORT) -> CoordinatorHome:
        """Creates keys, certificates and an empty database in a temporary folder, then moves it to `path`: all or nothing."""
        if not NAME_PATTERN.fullmatch(name):
            raise RunFolderError(
                f"a coordinator cannot be called {name!r}; use up to 48 letters, digits, spaces, dots and dashes"
            )
        if not HOST_PATTERN.fullmatch(host) or not 0 < port < 65536:
            raise RunFolderError(
                f"{host}:{port} is not a valid address; give one at which sites reach the coordinator, e.g. fl.example.org:{DEFAULT_PORT}"
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(f"{path} is not empty; name a new folder, or serve the existing home")
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))  # mode 0700
        try:
            _write_home(cls(draft, name, host, port))
            draft.replace(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls(path, name, host, port)

    @classmethod
    def open(cls, path: Path) -> CoordinatorHome:
        file = path / "coordinator.toml"
        if not file.is_file():
            raise RunFolderError(
                f"{path} is not a coordinator's home; create it with `hemofed coordinator init {path}`"
            )
        try:
            settings = tomllib.loads(file.read_text("utf-8"))
            home_format = int(settings.get("format", 1))
            home = cls(path, str(settings["name"]), str(settings["host"]), int(settings["port"]))
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{file} needs a name, a host and a port: {error}") from error
        if home_format != HOME_FORMAT:
            raise RunFolderError(
                f"{path} has home format {home_format}, but this version of hemofed reads format {HOME_FORMAT}; "
                "create a new home with `hemofed coordinator init` and invite the sites again"
            )
        if missing := [name for name in REQUIRED_FILES if not (path / name).is_file()]:
            raise RunFolderError(f"{path} lacks {', '.join(missing)}; restore the home from a backup")
        return home

    @property
    def signing_key(self) -> Ed25519PrivateKey:
        return keys.load_key(self.path / "key.pem")

    @property
    def url(self) -> str:
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.path.absolute() / 'hemofed.db'}"

    @property
    def runs_folder(self) -> Path:
        return self.path / "runs"

    @property
    def receipts_folder(self) -> Path:
        return self.path / "receipts"

    @property
    def log_path(self) -> Path:
        return self.path / "log" / "coordinator.jsonl"

    @property
    def token_path(self) -> Path:
        return self.path / "lead.token"


def _write_home(home: CoordinatorHome) -> None:
    from pipeline.ops.certificates import CertificateAuthority, write_private_file
    from pipeline.service.storage.store import CoordinatorStore

    path = home.path
    for folder in ("runs", "receipts", "log"):
        (path / folder).mkdir()
    keys.save_key(keys.generate_key(), path / "key.pem")
    web_certificate = CertificateAuthority.create(path, f"{home.name} CA").issue_server(
        [home.host, "localhost", "127.0.0.1"]
    )
    write_private_file(path / "web.key", web_certificate.key_pem.encode())
    write_atomically(path / "web.crt", web_certificate.certificate_pem.encode())
    umask = os.umask(0o077)  # decides the permissions of the database file
    try:
        store = CoordinatorStore(home.database_url)
    finally:
        os.umask(umask)
    token = store.accounts.add_user(LEAD_USER, "lead", actor="init")
    store.close()
    assert token is not None
    write_private_file(home.token_path, f"{token}\n".encode())
    lines = [f"format = {HOME_FORMAT}", f'name = "{home.name}"', f'host = "{home.host}"', f"port = {home.port}"]
    write_atomically(path / "coordinator.toml", ("\n".join(lines) + "\n").encode())

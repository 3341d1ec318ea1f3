"""The coordinator's home: complete and private, and refused if it is not complete."""

import shutil
import ssl

import pytest

from pipeline.core.errors import RunFolderError
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from privacy.ledger import keys


def test_home_is_complete_and_only_the_owner_can_read_it(coordinator_home):
    home = CoordinatorHome.open(coordinator_home)
    assert (home.name, home.host, home.port, home.url) == ("Test Trust", "localhost", 8443, "https://localhost:8443")
    for name in ("key.pem", "ca.key", "web.key", "lead.token", "hemofed.db"):
        assert (coordinator_home / name).stat().st_mode & 0o777 == 0o600, name
    assert coordinator_home.stat().st_mode & 0o777 == 0o700
    assert len(keys.public_hex(home.signing_key)) == 64
    ssl.create_default_context(cafile=str(coordinator_home / "ca.pem")).load_cert_chain(
        coordinator_home / "web.crt", coordinator_home / "web.key"
    )
    assert not list(coordinator_home.parent.glob(".home*")), "a temporary folder remains"


def test_lead_token_is_valid_and_not_in_the_database(coordinator_home):
    home = CoordinatorHome.open(coordinator_home)
    token = home.token_path.read_text().strip()
    store = CoordinatorStore(home.database_url)
    user = store.accounts.find_user(token)
    store.close()
    assert user is not None
    assert (user.name, user.role) == ("lead", "lead")
    assert token.encode() not in b"".join(p.read_bytes() for p in coordinator_home.glob("hemofed.db*"))


def test_create_refuses_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        CoordinatorHome.create(tmp_path / "home", "x", "localhost")
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("name", "host", "port"),
    [('a"b', "h", 1), ("", "h", 1), ("a\n", "h", 1), ("a", 'h"', 1), ("a", "h", 0), ("a", "h", 70000)],
)
def test_invalid_names_hosts_and_ports_are_refused(tmp_path, name, host, port):
    with pytest.raises(RunFolderError):
        CoordinatorHome.create(tmp_path / "home", name, host, port)
    assert not (tmp_path / "home").exists()


def test_open_names_missing_files_and_settings(coordinator_home, tmp_path):
    with pytest.raises(RunFolderError, match="coordinator init"):
        CoordinatorHome.open(tmp_path)
    shutil.copytree(coordinator_home, tmp_path / "home")
    (tmp_path / "home" / "ca.key").unlink()
    with pytest.raises(RunFolderError, match=r"lacks ca\.key"):
        CoordinatorHome.open(tmp_path / "home")
    (tmp_path / "home" / "coordinator.toml").write_text("name = 1")
    with pytest.raises(RunFolderError, match="a host and a port"):
        CoordinatorHome.open(tmp_path / "home")


def test_home_of_format_1_is_refused(coordinator_home, tmp_path):
    shutil.copytree(coordinator_home, tmp_path / "home")
    file = tmp_path / "home" / "coordinator.toml"
    file.write_text(file.read_text().replace("format = 2\n", ""))
    with pytest.raises(RunFolderError, match=r"home format 1, .* `hemofed coordinator init`"):
        CoordinatorHome.open(tmp_path / "home")

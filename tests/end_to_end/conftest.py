from __future__ import annotations

import pytest

from tests.end_to_end.command_server import open_command_server


@pytest.fixture(scope="session")
def hemofed_command(tmp_path_factory):
    """An executable `hemofed` that does not import the heavy packages for every command."""
    with open_command_server(tmp_path_factory.mktemp("command")) as executable:
        yield executable

"""The coordinator as a service: `web` answers requests, `storage` keeps what must survive a restart, `runtime` runs studies."""

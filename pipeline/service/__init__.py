"""The coordinator as a service: `web` answers requests, `storage` keeps what must survive, `runtime` runs studies."""

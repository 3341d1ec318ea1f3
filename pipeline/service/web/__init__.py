"""HTTP: routes, roles, authentication, server-sent events and the dashboard's files."""

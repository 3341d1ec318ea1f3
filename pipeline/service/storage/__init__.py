"""What survives a restart: database, accounts, the coordinator's home folder, backups."""

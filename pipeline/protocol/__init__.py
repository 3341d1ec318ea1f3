"""What travels between the coordinator and the clients: local jobs, messages, their bytes and their compression."""

"""Operations: child processes, JSON logs, encrypted archives, certificates, limits on request bodies."""

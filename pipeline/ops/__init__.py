"""Operations: child processes, JSON logs, encrypted archives, certificates, request limits, security headers."""

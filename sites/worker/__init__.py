"""One run at one site: the FLARE executor, its hardening, the policy, the task session and the client's state."""

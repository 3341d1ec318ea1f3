"""The site's agent: enrolment, heartbeats, offers, finished models, the FLARE client process."""

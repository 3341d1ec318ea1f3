"""What the hospital decides and keeps: approvals, disclosures, settings, the site's home folder, backups."""

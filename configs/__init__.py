"""Ready configs: `legato fit digits.yaml` finds them here."""

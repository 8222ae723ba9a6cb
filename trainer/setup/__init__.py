"""Set-up of a call of fit, validate, test or predict."""

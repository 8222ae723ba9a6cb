"""The foundation of all packages: errors, messages, arguments, values and names. Imports none of the others."""

"""The foundation of all packages: errors, messages, arguments, values and names. Imports no other Legato package."""

"""The foundation of all packages: errors, messages, arguments, values and names. It imports no other package."""

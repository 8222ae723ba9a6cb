"""Servers: modules that live in processes of their own."""

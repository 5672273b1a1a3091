"""Runnable examples, each against the real thing; the tests use some of their modules as a kit."""

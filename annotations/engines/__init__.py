"""Engines: what turns a single-device model into a parallel one."""

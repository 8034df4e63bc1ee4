"""Mutation campaign: single faults put into modules, and the tests that notice them."""

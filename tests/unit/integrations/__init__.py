"""Tests of the adapters for other trainers."""

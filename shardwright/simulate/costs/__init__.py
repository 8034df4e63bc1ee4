"""Computes seconds of single operators, collectives, copies and updates."""

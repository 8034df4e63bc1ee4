"""Adapters for other trainers: transformers, accelerate and Lightning, each imported by itself."""

"""Memory of single operator calls, traced with torch."""

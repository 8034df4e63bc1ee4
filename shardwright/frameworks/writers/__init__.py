"""Writers: the nearest strategy that a framework can express, and the keys that say it."""

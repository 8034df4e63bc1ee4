"""`shardwright explore`: plans for values that a page on loopback sets, found while it waits."""

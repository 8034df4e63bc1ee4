"""The Pareto frontier of uniform strategies: enumerated, bounded and priced."""

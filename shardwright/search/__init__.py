"""Search: from the costs of a graph's choices to the frontier of (time, memory).

Pure mathematics over numpy arrays. It must not know torch, tilings, machines or files: whoever
asks has already turned them into a `shardwright.solve.elimination.problem.Problem`.

`fast.fast_frontier` answers large problems and certifies its answer by a lower bound;
`eliminate.exact_frontier` answers small ones exactly; `ldp.chain_frontier` answers chains.
"""

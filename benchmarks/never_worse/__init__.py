"""No chosen plan is slower, by the cost model, than the best baseline that fits."""

"""The time that all uniform strategies of a model take, and what their bounds rule out."""

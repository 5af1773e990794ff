"""Divide a model that is larger than a host between hosts.

`mesh` checks a DeviceMesh and finds this rank's place in it. `chain` proves that only hidden states pass from layer to
layer, and `cut` leaves a model only the layers of one stage.
`stage` moves hidden states to the next stage and logits back, so that every rank runs the model's own forward.
"""
